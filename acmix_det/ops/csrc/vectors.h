// Vectors of the width that this translation unit is compiled for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifndef ACMIX_VECTOR_BYTES
#error "ACMIX_VECTOR_BYTES must be defined"
#endif

#define ACMIX_INLINE inline __attribute__((always_inline))

namespace acmix_det {
namespace ACMIX_NAMESPACE {

template <class T>
struct Vector {
  static constexpr int lanes = ACMIX_VECTOR_BYTES / sizeof(T);
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> index_lane;
  typedef index_lane index __attribute__((vector_size(ACMIX_VECTOR_BYTES)));
  typedef T type __attribute__((vector_size(ACMIX_VECTOR_BYTES)));
  typedef T unaligned
      __attribute__((vector_size(ACMIX_VECTOR_BYTES), aligned(sizeof(T)),
                     may_alias));
};

template <class T>
ACMIX_INLINE typename Vector<T>::type load(const T* p) {
  return *reinterpret_cast<const typename Vector<T>::unaligned*>(p);
}

template <class T>
ACMIX_INLINE void store(T* p, typename Vector<T>::type x) {
  *reinterpret_cast<typename Vector<T>::unaligned*>(p) = x;
}

template <class T>
ACMIX_INLINE typename Vector<T>::type broadcast(T x) {
  return typename Vector<T>::type{} + x;
}

template <class T>
ACMIX_INLINE T sum(typename Vector<T>::type x) {
  T total = 0;
  for (int i = 0; i < Vector<T>::lanes; ++i) total += x[i];
  return total;
}

// Lanes [shift, shift + lanes) of low and high put side by side.
template <class T, int shift, size_t... lane>
ACMIX_INLINE typename Vector<T>::type shifted_lanes(
    typename Vector<T>::type low, typename Vector<T>::type high,
    std::index_sequence<lane...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(low, high, (lane + shift)...);
#else
  return __builtin_shuffle(
      low, high,
      typename Vector<T>::index{static_cast<
          typename Vector<T>::index_lane>(lane + shift)...});
#endif
}

template <class T, int shift>
ACMIX_INLINE typename Vector<T>::type shifted(typename Vector<T>::type low,
                                              typename Vector<T>::type high) {
  return shifted_lanes<T, shift>(
      low, high, std::make_index_sequence<Vector<T>::lanes>());
}

// 2^x for x <= 0, minus infinity and NaN included.

ACMIX_INLINE Vector<double>::type exp2_not_positive(Vector<double>::type x) {
  for (int i = 0; i < Vector<double>::lanes; ++i) x[i] = std::exp2(x[i]);
  return x;
}

// 2^x = 2^n * 2^f with |f| <= 1 / 2 and the minimax polynomial of degree 5
// for 2^f (7.5e-8 relative); 0 below the normal range.
ACMIX_INLINE Vector<float>::type exp2_not_positive(Vector<float>::type x) {
  typedef Vector<float>::type V;
  typedef Vector<float>::index Int;
  const V lowest = broadcast(-126.f);
  const auto underflow = x < lowest;
  const V y = underflow ? lowest : x;
  const V magic = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds
  const V t = y + magic;
  const V f = y - (t - magic);
  V p = broadcast(0x1.5c08e4p-10f);
  p = p * f + 0x1.3d0c52p-7f;
  p = p * f + 0x1.c6b6e4p-5f;
  p = p * f + 0x1.ebf918p-3f;
  p = p * f + 0x1.62e428p-1f;
  p = p * f + 0x1.000002p+0f;
  Int exponent, power;
  std::memcpy(&exponent, &t, sizeof(t));  // n in the low bits of t
  std::memcpy(&power, &p, sizeof(p));
  power += exponent << 23;
  std::memcpy(&p, &power, sizeof(p));
  return underflow ? V{} : p;
}

}  // namespace ACMIX_NAMESPACE
}  // namespace acmix_det
