// The kernels, included once for every instruction set.
//
// One task is a few rows of queries of one head. The rows of keys and values
// that its neighborhoods reach are packed one by one into a ring of padded
// rows, which settles the border rule, the stride, the dilation, the memory
// layout and the type; no whole tensor is ever copied. On packed rows the
// work is vectorised over the x axis, and the k * k logits of a vector of
// pixels stay in the first-level cache.
//
// A packed row has `stride` phases: pixel i of the padded row lies at
// [i % stride][i / stride], so that neighboring queries read neighboring
// keys at any stride.

#include <algorithm>
#include <limits>
#include <new>
#include <vector>

#include "local_attention.h"
#include "parallel.h"
#include "vectors.h"

namespace acmix_det {
namespace ACMIX_NAMESPACE {
namespace {

// Channels that are worked on at once.
constexpr int kChannels = ACMIX_CHANNELS;

// Pixels that are worked on at once.
template <class T>
constexpr int64_t block() {
  return Vector<T>::lanes;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// --- element types in memory

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float decode(float x) { return x; }
inline double decode(double x) { return x; }
inline float decode(BFloat16 x) {
  return from_bits(static_cast<uint32_t>(x.bits) << 16);
}
inline float decode(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  if (magnitude >= 0x0f800000)  // infinity or NaN
    return from_bits(sign | 0x7f800000 | magnitude);
  // a multiplication by 2^112 shifts the exponent, subnormals included
  return from_bits(sign | to_bits(from_bits(magnitude) * 0x1p112f));
}

inline void encode(float x, float* out) { *out = x; }
inline void encode(double x, double* out) { *out = x; }
inline void encode(float x, BFloat16* out) {
  const uint32_t bits = to_bits(x);
  out->bits = x != x ? 0x7fc0
                     : static_cast<uint16_t>(
                           (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void encode(float x, Float16* out) {
  const uint32_t bits = to_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = from_bits(bits & 0x7fffffff);
  uint32_t half;
  if (x != x) {
    half = 0x7e00;
  } else if (magnitude >= 65520.f) {
    half = 0x7c00;
  } else if (magnitude < 0x1p-14f) {  // subnormal: round to multiples of 2^-24
    half = to_bits(magnitude + 0.5f) - to_bits(0.5f);
  } else {  // round to 10 bits, ties to even
    const uint32_t m = to_bits(magnitude);
    half = (m + 0xfff + ((m >> 13) & 1) - (112u << 23)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

// --- geometry

// Logits are computed to base 2: 2^(x * log2(e)) = e^x.
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

struct Geometry {
  int64_t k, stride, dilation, pad;
  int64_t height, width, out_height, out_width;
  int64_t mode;
  int64_t row_width;    // out_width, rounded up to whole blocks
  int64_t phase_width;  // of a packed row
  int64_t ring_rows;    // rows that one neighborhood spans
  int64_t margin;       // zeros before a row of weights
  int64_t margin_right;
  int64_t line;         // elements of a cache line
  bool successive;      // neighbors lie side by side in a packed row
  std::vector<int64_t> phase;   // of a column offset dx
  std::vector<int64_t> offset;  // of a column offset dx, in its packed row
  // of a column offset dx: the queries [begin, end) whose neighbor is inside
  std::vector<int64_t> begin, end;

  template <class T>
  static Geometry of(const Problem& p, const T*) {
    Geometry g;
    g.k = p.kernel;
    g.stride = p.stride;
    g.dilation = p.dilation;
    g.pad = p.dilation * (p.kernel / 2);
    g.height = p.height;
    g.width = p.width;
    g.out_height = ceil_div(p.height, p.stride);
    g.out_width = ceil_div(p.width, p.stride);
    g.mode = p.padding_mode;
    g.row_width = round_up(g.out_width, block<T>());
    g.successive = g.stride == 1 && g.dilation == 1;
    const int64_t reach = (g.k - 1) * g.dilation;
    // two vectors are read from every offset on
    g.phase_width = round_up(
        std::max(g.row_width + reach / g.stride + block<T>(),
                 ceil_div(g.width + 2 * g.pad, g.stride)),
        block<T>());
    g.ring_rows = reach + 1;
    g.margin = round_up(reach / g.stride, block<T>());
    g.margin_right = block<T>();
    g.line = 64 / sizeof(T);
    for (int64_t dx = 0; dx < g.k; ++dx) {
      const int64_t at = dx * g.dilation;
      g.phase.push_back(at % g.stride);
      g.offset.push_back(at % g.stride * g.phase_width + at / g.stride);
      const int64_t left = std::max<int64_t>(g.pad - at, 0);
      const int64_t right = std::max<int64_t>(g.width + g.pad - at, 0);
      g.begin.push_back(ceil_div(left, g.stride));
      g.end.push_back(ceil_div(right, g.stride));
    }
    return g;
  }

  // Steps between the channels of packed rows, and between rows of weights or
  // queries, whose margins are included. Both are an odd number of cache
  // lines: with a power of two among its factors the same few sets of the
  // cache would hold them all.
  int64_t packed_width() const { return odd_lines(stride * phase_width); }
  int64_t weight_width() const {
    return odd_lines(margin + phase_width + margin_right);
  }
  int64_t odd_lines(int64_t width) const {
    return (ceil_div(width, line) | 1) * line;
  }

  // Image position behind a padded one; -1 where there is none.
  int64_t source(int64_t padded, int64_t size) const {
    int64_t i = padded - pad;
    if (i >= 0 && i < size) return i;
    if (mode != kReflect) return -1;
    const int64_t period = std::max<int64_t>(2 * size - 2, 1);
    i %= period;
    if (i < 0) i += period;
    return i < size ? i : period - i;
  }
  int64_t source_row(int64_t padded) const { return source(padded, height); }
  int64_t source_col(int64_t padded) const { return source(padded, width); }
};

// --- memory of a thread, kept between tasks

class Arena {
 public:
  // Everything taken before is free again.
  void reset() {
    if (blocks_.size() != 1) {  // next time all fits into one block
      size_t bytes = size_t(1) << 16;
      for (const auto& block : blocks_) bytes += block.size();
      blocks_.clear();
      blocks_.emplace_back(bytes);
    }
    used_ = 0;
  }

  template <class T>
  T* take(int64_t count) {
    const size_t bytes = round_up(count * sizeof(T), 64) + 64;
    if (used_ + bytes > blocks_.back().size()) {
      blocks_.emplace_back(bytes);
      used_ = 0;
    }
    char* p = blocks_.back().data() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64);
  }

  template <class T>
  T* zeros(int64_t count) {
    T* p = take<T>(count);
    std::fill(p, p + count, T(0));
    return p;
  }

 private:
  std::vector<std::vector<char>> blocks_;
  size_t used_ = 0;  // of the last block
};

// --- packing

// Row `y` of head (b, n), all channels, into dst[channel * dst_stride +
// phase * phase_width + column]; dst is zero where the image ends.
template <class T, class E>
void pack_row(const Geometry& g, const Tensor5& x, int64_t b, int64_t n,
              int64_t channels, int64_t y, T* dst) {
  const E* row = static_cast<const E*>(x.data) + b * x.stride[0] +
                 n * x.stride[1] + y * x.stride[3];
  const int64_t width = g.packed_width(), step = x.stride[4];
  for (int64_t c = 0; c < channels; ++c, row += x.stride[2], dst += width) {
    if (g.stride == 1 && step == 1) {
      for (int64_t i = 0; i < g.pad; ++i) {
        const int64_t left = g.source_col(i);
        const int64_t right = g.source_col(g.pad + g.width + i);
        dst[i] = left < 0 ? T(0) : T(decode(row[left]));
        dst[g.pad + g.width + i] = right < 0 ? T(0) : T(decode(row[right]));
      }
      for (int64_t i = 0; i < g.width; ++i) dst[g.pad + i] = decode(row[i]);
    } else {
      for (int64_t i = 0; i < g.width + 2 * g.pad; ++i) {
        const int64_t col = g.source_col(i);
        dst[i % g.stride * g.phase_width + i / g.stride] =
            col < 0 ? T(0) : T(decode(row[col * step]));
      }
    }
  }
}

// Row `y`, only its columns at the step of the queries, times `factor`.
template <class T, class E>
void pack_queries(const Geometry& g, const Tensor5& x, int64_t b, int64_t n,
                  int64_t channels, int64_t y, int64_t step, T factor,
                  int64_t dst_stride, T* dst) {
  const E* row = static_cast<const E*>(x.data) + b * x.stride[0] +
                 n * x.stride[1] + y * x.stride[3];
  const int64_t across = x.stride[4] * step;
  for (int64_t c = 0; c < channels;
       ++c, row += x.stride[2], dst += dst_stride)
    for (int64_t i = 0; i < g.out_width; ++i)
      dst[i] = T(decode(row[i * across])) * factor;
}

// --- products on packed rows
//
// The neighbors of a block of pixels at k offsets overlap. Where the offsets
// are successive (stride and dilation 1) they are cut out of two vectors,
// which costs less than unaligned loads.

// Most offsets that are worked on at once.
constexpr int kOffsets = 7;
constexpr int64_t kSuccessive[kOffsets] = {0, 1, 2, 3, 4, 5, 6};

// Calls f(constant<0>), ..., f(constant<count - 1>).
template <class F, int... i>
ACMIX_INLINE void unroll(const F& f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int count, class F>
ACMIX_INLINE void unroll(const F& f) {
  unroll(f, std::make_integer_sequence<int, count>());
}

// Neighbors b[x + offset[j]] of one vector of pixels, for a constant j.
template <class T, bool successive>
struct Neighbors {
  typename Vector<T>::type low, high;
  const T* b;
  const int64_t* offset;

  ACMIX_INLINE Neighbors(const T* at, const int64_t* offsets)
      : b(at), offset(offsets) {
    if (successive) {
      low = load(b + offset[0]);
      high = load(b + offset[0] + Vector<T>::lanes);
    }
  }
  template <int j>
  ACMIX_INLINE typename Vector<T>::type at(
      std::integral_constant<int, j>) const {
    // shifts beyond the two vectors: short vectors only
    if constexpr (successive && j <= Vector<T>::lanes)
      return shifted<T, j>(low, high);
    else
      return load(b + offset[j]);
  }
};

// out[j * out_stride + x] = sum_d a[d * a_stride + x] * b[d * b_stride +
// offset[j] + x], for one vector of x
template <class T, int count, bool successive>
ACMIX_INLINE void dots_of(const T* a, int64_t a_stride, const T* b,
                          int64_t b_stride, const int64_t* offset,
                          int64_t channels, T* out, int64_t out_stride) {
  typename Vector<T>::type acc[count] = {};
  for (int64_t d = 0; d < channels; ++d, a += a_stride, b += b_stride) {
    const auto left = load(a);
    const Neighbors<T, successive> right(b, offset);
    unroll<count>([&](auto j) { acc[j] += left * right.at(j); });
  }
  for (int j = 0; j < count; ++j) store(out + j * out_stride, acc[j]);
}

// acc[d] += sum_j weight[j * weight_stride + x] * b[d * b_stride + offset[j]
// + x], for one vector of x
template <class T, int channels, int count, bool successive>
ACMIX_INLINE void weighted_sums_of(const T* weight, int64_t weight_stride,
                                   const T* b, int64_t b_stride,
                                   const int64_t* offset,
                                   typename Vector<T>::type* acc) {
  typename Vector<T>::type scale[count];
  for (int j = 0; j < count; ++j) scale[j] = load(weight + j * weight_stride);
  for (int d = 0; d < channels; ++d) {
    const Neighbors<T, successive> right(b + d * b_stride, offset);
    unroll<count>([&](auto j) { acc[d] += scale[j] * right.at(j); });
  }
}

// f(first, constant<count>) for groups of the k offsets
template <class F>
ACMIX_INLINE void for_offsets(int64_t k, const F& f) {
  int64_t first = 0;
  for (; first + kOffsets <= k; first += kOffsets)
    f(first, std::integral_constant<int, kOffsets>());
  switch (k - first) {
#define ACMIX_CASE(i)                               \
  case i:                                           \
    f(first, std::integral_constant<int, i>());     \
    break;
    ACMIX_CASE(1)
    ACMIX_CASE(2)
    ACMIX_CASE(3)
    ACMIX_CASE(4)
    ACMIX_CASE(5)
    ACMIX_CASE(6)
#undef ACMIX_CASE
  }
}

// f(first, constant<count>) for groups of channels
template <class F>
ACMIX_INLINE void for_channels(int64_t channels, const F& f) {
  int64_t d = 0;
  for (; d + kChannels <= channels; d += kChannels)
    f(d, std::integral_constant<int, kChannels>());
  for (; d + 2 <= channels; d += 2) f(d, std::integral_constant<int, 2>());
  if (d < channels) f(d, std::integral_constant<int, 1>());
}

// out[j * out_stride + lane] = sum_d a[d * a_stride + lane] * (neighbor j of
// channel d of the packed row b)
template <class T>
void dots(const Geometry& g, const T* a, int64_t a_stride, const T* b,
          int64_t channels, T* out, int64_t out_stride) {
  for_offsets(g.k, [&](int64_t first, auto count) {
    const int64_t* offset = g.offset.data() + first;
    T* to = out + first * out_stride;
    if (g.successive)
      dots_of<T, count, true>(a, a_stride, b, g.packed_width(), offset,
                              channels, to, out_stride);
    else
      dots_of<T, count, false>(a, a_stride, b, g.packed_width(), offset,
                               channels, to, out_stride);
  });
}

// sums[d * lanes + lane] = sum over the packed rows (null: left out) and
// offsets of weight[(row * k + j) * weight_stride + lane] * (neighbor j of x)
template <class T>
void weighted_sums(const Geometry& g, const T* weight, int64_t weight_stride,
                   const std::vector<const T*>& rows, int64_t x,
                   int64_t channels, T* sums) {
  for_channels(channels, [&](int64_t d, auto number) {
    typename Vector<T>::type acc[number] = {};
    for (int64_t r = 0; r < g.k; ++r) {
      if (!rows[r]) continue;
      const T* b = rows[r] + d * g.packed_width() + x;
      for_offsets(g.k, [&](int64_t first, auto count) {
        const int64_t* offset = g.offset.data() + first;
        const T* w = weight + (r * g.k + first) * weight_stride;
        if (g.successive)
          weighted_sums_of<T, number, count, true>(
              w, weight_stride, b, g.packed_width(), offset, acc);
        else
          weighted_sums_of<T, number, count, false>(
              w, weight_stride, b, g.packed_width(), offset, acc);
      });
    }
    for (int i = 0; i < number; ++i) store(sums + (d + i) * block<T>(), acc[i]);
  });
}

// The transpose, of one packed row: neighbor j of x in channel d of `to` gets
// += weight[j * weight_stride + x] * a[d * a_stride + x], for all x. Read as a
// sum for every place of `to`; rows of `weight` and `a` have zeros as margins.
template <class T>
void scatter(const Geometry& g, const T* weight, int64_t weight_stride,
             const T* a, int64_t a_stride, int64_t channels, T* to) {
  typedef typename Vector<T>::type V;
  const int64_t to_stride = g.packed_width();
  for_channels(channels, [&](int64_t d, auto number) {
    for (int64_t phase = 0; phase < g.stride; ++phase)
      for (int64_t x = 0; x < g.phase_width; x += block<T>()) {
        T* place = to + d * to_stride + phase * g.phase_width + x;
        const T* from = a + d * a_stride + x;
        V acc[number];
        for (int i = 0; i < number; ++i) acc[i] = load(place + i * to_stride);
        if (g.successive) {
          // pixels x - first - count + 1 and on, the last offset first
          for_offsets(g.k, [&](int64_t first, auto count) {
            V scale[count];
            const int64_t start = -first - (count - 1);
            for (int j = 0; j < count; ++j)
              scale[j] = load(weight + x + start + j +
                              (first + count - 1 - j) * weight_stride);
            for (int i = 0; i < number; ++i) {
              const Neighbors<T, true> right(from + i * a_stride + start,
                                             kSuccessive);
              unroll<count>([&](auto j) { acc[i] += scale[j] * right.at(j); });
            }
          });
        } else {
          for (int64_t j = 0; j < g.k; ++j) {
            if (g.phase[j] != phase) continue;
            const int64_t back = g.offset[j] - phase * g.phase_width;
            const V scale = load(weight + j * weight_stride + x - back);
            for (int i = 0; i < number; ++i)
              acc[i] += scale * load(from + i * a_stride - back);
          }
        }
        for (int i = 0; i < number; ++i) store(place + i * to_stride, acc[i]);
      }
  });
}

// --- one task

// What forward and backward share: packed rows and the softmax of a block.
template <class T, class E>
class Rows {
  typedef typename Vector<T>::type V;

 public:
  Rows(const Problem& p, const Geometry& g, Arena& arena, int64_t b, int64_t n)
      : p_(p), g_(g), b_(b), n_(n) {
    const int64_t width = g.packed_width();
    if (p.key.data)
      keys_ = arena.zeros<T>(g.ring_rows * p.head_dim * width);
    values_ = arena.zeros<T>(g.ring_rows * p.value_dim * width);
    queries_ = arena.zeros<T>(p.head_dim * g.weight_width()) + g.margin;
    along_h_ = arena.take<T>(g.k * block<T>());
    along_w_ = arena.take<T>(g.k * block<T>());
    const int64_t half = p.head_dim / 2;
    if (p.rel_pos_w) {
      rel_h_ = static_cast<const T*>(p.rel_pos_h) + n * half * g.k;
      rel_w_ = static_cast<const T*>(p.rel_pos_w) +
               n * (p.head_dim - half) * g.k;
    }
    key_rows.resize(g.k);
    value_rows.resize(g.k);
  }

  // Pack what output row `y` reads; rows already in the ring stay.
  void move_to(int64_t y) {
    const int64_t begin = y * g_.stride, end = begin + g_.ring_rows;
    for (int64_t row = std::max(begin, packed_); row < end; ++row) {
      // rows between the dilated ones are read by no one here
      if (!reached(row)) continue;
      const int64_t source = g_.source_row(row), slot = row % g_.ring_rows;
      const int64_t width = g_.packed_width();
      T* key = keys_ + slot * p_.head_dim * width;
      T* value = values_ + slot * p_.value_dim * width;
      if (source < 0) {
        if (keys_) std::fill(key, key + p_.head_dim * width, T(0));
        std::fill(value, value + p_.value_dim * width, T(0));
      } else {
        if (keys_)
          pack_row<T, E>(g_, p_.key, b_, n_, p_.head_dim, source, key);
        pack_row<T, E>(g_, p_.value, b_, n_, p_.value_dim, source, value);
      }
    }
    packed_ = end;
    for (int64_t dy = 0; dy < g_.k; ++dy) {
      const int64_t row = begin + dy * g_.dilation;
      const int64_t slot = row % g_.ring_rows;
      const bool masked = g_.mode == kMask && g_.source_row(row) < 0;
      key_rows[dy] = masked || !keys_
                         ? nullptr
                         : keys_ + slot * p_.head_dim * g_.packed_width();
      value_rows[dy] =
          masked ? nullptr
                 : values_ + slot * p_.value_dim * g_.packed_width();
    }
    pack_queries<T, E>(g_, p_.query, b_, n_, p_.head_dim, y * g_.stride,
                       g_.stride, T(p_.scale * kLog2E), g_.weight_width(),
                       queries_);
  }

  // Softmax weights of the vector of queries at x, without their division:
  // weight[o * stride + lane]. Returns the divisors.
  V softmax(int64_t x, T* weight, int64_t stride) {
    const T* q = queries_ + x;
    const int64_t half = p_.head_dim / 2;
    if (rel_w_) {
      along(q, rel_h_, half, along_h_);
      along(q + half * g_.weight_width(), rel_w_, p_.head_dim - half,
            along_w_);
    }
    V largest = broadcast(-std::numeric_limits<T>::infinity());
    for (int64_t dy = 0; dy < g_.k; ++dy) {
      if (!value_rows[dy]) continue;
      T* row = weight + dy * g_.k * stride;
      if (keys_) {
        dots(g_, q, g_.weight_width(), key_rows[dy] + x, p_.head_dim, row,
             stride);
      } else {
        for (int64_t dx = 0; dx < g_.k; ++dx) store(row + dx * stride, V{});
      }
      for (int64_t dx = 0; dx < g_.k; ++dx) {
        T* logits = row + dx * stride;
        V value = load(logits);
        if (rel_w_)
          value += load(along_h_ + dy * block<T>()) +
                   load(along_w_ + dx * block<T>());
        store(logits, value);
        if (!all_inside(x, dx)) {
          mask(x, dx, logits);
          value = load(logits);
        }
        largest = value > largest ? value : largest;
      }
    }
    V total{};
    for (int64_t dy = 0; dy < g_.k; ++dy) {
      if (!value_rows[dy]) continue;
      for (int64_t o = dy * g_.k; o < (dy + 1) * g_.k; ++o) {
        const V e = exp2_not_positive(load(weight + o * stride) - largest);
        total += e;
        store(weight + o * stride, e);
      }
    }
    return total;
  }

  const T* queries() const { return queries_; }

  std::vector<const T*> key_rows, value_rows;  // by dy, null if masked

 private:
  bool reached(int64_t row) const {
    if (g_.stride == 1 || g_.dilation == 1) return true;
    for (int64_t dy = 0; dy < g_.k; ++dy) {
      const int64_t at = row - dy * g_.dilation;
      if (at >= 0 && at % g_.stride == 0) return true;
    }
    return false;
  }

  // out[i][lane] = sum_c q[c][lane] * rel[c][i]
  void along(const T* q, const T* rel, int64_t channels, T* out) const {
    for_offsets(g_.k, [&](int64_t first, auto count) {
      V acc[count] = {};
      for (int64_t c = 0; c < channels; ++c) {
        const V left = load(q + c * g_.weight_width());
        for (int i = 0; i < count; ++i)
          acc[i] += left * rel[c * g_.k + first + i];
      }
      for (int i = 0; i < count; ++i)
        store(out + (first + i) * block<T>(), acc[i]);
    });
  }

  // Is the neighbor at dx of every query of the vector at x inside?
  bool all_inside(int64_t x, int64_t dx) const {
    return g_.mode != kMask ||
           (g_.begin[dx] <= x && g_.end[dx] >= x + block<T>());
  }

  void mask(int64_t x, int64_t dx, T* logits) const {
    for (int64_t i = 0; i < block<T>(); ++i)
      // queries behind the image keep a finite logit
      if ((x + i < g_.begin[dx] || x + i >= g_.end[dx]) &&
          x + i < g_.out_width)
        logits[i] = -std::numeric_limits<T>::infinity();
  }

  const Problem& p_;
  const Geometry& g_;
  int64_t b_, n_;
  int64_t packed_ = 0;  // padded rows before this one are in the ring
  T *keys_ = nullptr, *values_, *queries_, *along_h_, *along_w_;
  const T *rel_h_ = nullptr, *rel_w_ = nullptr;
};

// Rows of queries in one task. Neither depends on the number of threads.
int64_t forward_rows(const Geometry& g) {
  return std::max<int64_t>(16, 2 * g.pad / g.stride);
}
// Tasks of every second group of rows run together; they must not reach the
// same keys.
int64_t backward_rows(const Geometry& g) {
  return std::max<int64_t>(16, ceil_div(2 * g.pad, g.stride) + 1);
}

Arena& thread_arena() {
  static thread_local Arena arena;
  return arena;
}

template <class T, class E>
Status forward(const Problem& p) {
  const Geometry g = Geometry::of<T>(p, nullptr);
  const int64_t rows = forward_rows(g);
  const int64_t groups = ceil_div(g.out_height, rows);
  return parallel_for(p, p.batch * p.heads * groups, [&](int64_t task) {
    const int64_t b = task / groups / p.heads, n = task / groups % p.heads;
    const int64_t top = task % groups * rows;
    const int64_t bottom = std::min(top + rows, g.out_height);
    Arena& arena = thread_arena();
    arena.reset();
    Rows<T, E> packed(p, g, arena, b, n);
    T* weight = arena.take<T>(g.k * g.k * block<T>());
    T* sums = arena.take<T>(p.value_dim * block<T>());
    for (int64_t y = top; y < bottom; ++y) {
      packed.move_to(y);
      E* out = static_cast<E*>(p.out.data) + b * p.out.stride[0] +
               n * p.out.stride[1] + y * p.out.stride[3];
      for (int64_t x = 0; x < g.out_width; x += block<T>()) {
        const auto total = packed.softmax(x, weight, block<T>());
        weighted_sums(g, weight, block<T>(), packed.value_rows, x,
                      p.value_dim, sums);
        const int64_t count = std::min(block<T>(), g.out_width - x);
        for (int64_t d = 0; d < p.value_dim; ++d) {
          T* sum_d = sums + d * block<T>();
          store(sum_d, load(sum_d) / total);
          E* to = out + d * p.out.stride[2] + x * p.out.stride[4];
          for (int64_t i = 0; i < count; ++i)
            encode(sum_d[i], to + i * p.out.stride[4]);
        }
      }
    }
  });
}

// Gradient rows that belong to the ring of packed rows.
template <class T>
class GradRows {
 public:
  GradRows(const Geometry& g, Arena& arena, const Tensor5& grad, int64_t b,
           int64_t n, int64_t channels, T factor)
      : g_(g),
        factor_(factor),
        channels_(channels),
        size_(channels * g.packed_width()),
        rows_(arena.zeros<T>(g.ring_rows * size_)),
        grad_(static_cast<T*>(grad.data) + b * grad.stride[0] +
              n * grad.stride[1]),
        stride_(grad.stride) {}

  T* row(int64_t padded) { return rows_ + padded % g_.ring_rows * size_; }

  // Add factor times the padded rows [begin, end) to the gradient, and clear
  // them.
  void flush(int64_t begin, int64_t end) {
    for (int64_t padded = begin; padded < end; ++padded) {
      const int64_t y = g_.source_row(padded);
      T* from = row(padded);
      if (y >= 0)
        for (int64_t c = 0; c < channels_; ++c)
          add(from + c * g_.packed_width(),
              grad_ + c * stride_[2] + y * stride_[3]);
      std::fill(from, from + size_, T(0));
    }
  }

 private:
  void add(const T* from, T* to) const {
    if (g_.stride == 1) {
      for (int64_t i = 0; i < g_.width; ++i) to[i] += factor_ * from[g_.pad + i];
      if (g_.mode != kReflect) return;
      for (int64_t i = 0; i < g_.pad; ++i) {
        to[g_.source_col(i)] += factor_ * from[i];
        to[g_.source_col(g_.pad + g_.width + i)] +=
            factor_ * from[g_.pad + g_.width + i];
      }
      return;
    }
    for (int64_t i = 0; i < g_.width + 2 * g_.pad; ++i) {
      const int64_t col = g_.source_col(i);
      if (col >= 0)
        to[col] +=
            factor_ * from[i % g_.stride * g_.phase_width + i / g_.stride];
    }
  }

  const Geometry& g_;
  T factor_;
  int64_t channels_, size_;
  T* rows_;
  T* grad_;
  const int64_t* stride_;
};

template <class T, class E>
void backward_task(const Problem& p, const Geometry& g, int64_t b, int64_t n,
                   int64_t top, int64_t bottom, T* grad_rel_h,
                   T* grad_rel_w) {
  constexpr int lanes = Vector<T>::lanes;
  typedef typename Vector<T>::type V;
  const int64_t k = g.k, wide = g.weight_width(), half = p.head_dim / 2;
  Arena& arena = thread_arena();
  arena.reset();
  Rows<T, E> packed(p, g, arena, b, n);
  GradRows<T> grad_values(g, arena, p.grad_value, b, n, p.value_dim, T(1));
  // the packed queries are log2(e) times too large for a gradient
  GradRows<T> grad_keys(g, arena, p.key.data ? p.grad_key : p.grad_value, b, n,
                        p.key.data ? p.head_dim : 0, T(kLn2));
  T* grads = arena.zeros<T>(p.value_dim * wide) + g.margin;
  // of a whole row of queries, with zeros as margins
  T* weight = arena.zeros<T>(k * k * wide) + g.margin;
  T* step = arena.zeros<T>(k * k * wide) + g.margin;
  T* grad_query = arena.take<T>(p.head_dim * block<T>());
  T* step_h = arena.take<T>(k * block<T>());
  T* step_w = arena.take<T>(k * block<T>());
  // sums over all queries of the task, lane by lane
  V* rel_h = reinterpret_cast<V*>(arena.zeros<T>(half * k * lanes));
  V* rel_w =
      reinterpret_cast<V*>(arena.zeros<T>((p.head_dim - half) * k * lanes));
  int64_t done = top * g.stride;  // padded rows before this one are flushed

  for (int64_t y = top; y < bottom; ++y) {
    const int64_t begin = y * g.stride;
    grad_values.flush(done, begin);
    if (p.key.data) grad_keys.flush(done, begin);
    done = begin;
    packed.move_to(y);
    pack_queries<T, E>(g, p.grad_out, b, n, p.value_dim, y, 1, T(1), wide,
                       grads);
    for (int64_t x = 0; x < g.out_width; x += block<T>()) {
      const int64_t count = std::min(block<T>(), g.out_width - x);
      const V total = packed.softmax(x, weight + x, wide);
      V mean{};
      for (int64_t dy = 0; dy < k; ++dy) {
        if (!packed.value_rows[dy]) continue;
        dots(g, grads + x, wide, packed.value_rows[dy] + x, p.value_dim,
             step + dy * k * wide + x, wide);
        for (int64_t o = dy * k; o < (dy + 1) * k; ++o) {
          T* w = weight + o * wide + x;
          const V value = load(w) / total;
          store(w, value);
          mean += value * load(step + o * wide + x);
          // queries behind the image have no weight
          std::fill(w + count, w + block<T>(), T(0));
        }
      }
      std::fill(step_h, step_h + k * block<T>(), T(0));
      std::fill(step_w, step_w + k * block<T>(), T(0));
      for (int64_t dy = 0; dy < k; ++dy) {
        if (!packed.value_rows[dy]) continue;
        for (int64_t dx = 0; dx < k; ++dx) {
          T* at = step + (dy * k + dx) * wide + x;
          const V value =
              load(weight + (dy * k + dx) * wide + x) * (load(at) - mean);
          store(at, value);
          std::fill(at + count, at + block<T>(), T(0));
          T* h = step_h + dy * block<T>();
          T* w = step_w + dx * block<T>();
          store(h, load(h) + load(at));
          store(w, load(w) + load(at));
        }
      }
      if (p.key.data)
        weighted_sums(g, step + x, wide, packed.key_rows, x, p.head_dim,
                      grad_query);
      else
        std::fill(grad_query, grad_query + p.head_dim * block<T>(), T(0));
      if (p.rel_pos_w)
        for (int64_t c = 0; c < p.head_dim; ++c) {
          const bool is_row = c < half;
          const int64_t channel = is_row ? c : c - half;
          const T* rel =
              static_cast<const T*>(is_row ? p.rel_pos_h : p.rel_pos_w) +
              (n * (is_row ? half : p.head_dim - half) + channel) * k;
          V* sums = (is_row ? rel_h : rel_w) + channel * k;
          const T* steps = is_row ? step_h : step_w;
          const V q = load(packed.queries() + c * wide + x);
          V acc = load(grad_query + c * block<T>());
          for (int64_t i = 0; i < k; ++i) {
            const V s = load(steps + i * block<T>());
            acc += s * rel[i];
            sums[i] += s * q;
          }
          store(grad_query + c * block<T>(), acc);
        }
      T* to = static_cast<T*>(p.grad_query.data) +
              b * p.grad_query.stride[0] + n * p.grad_query.stride[1] +
              begin * p.grad_query.stride[3] + x * g.stride;
      for (int64_t c = 0; c < p.head_dim; ++c, to += p.grad_query.stride[2])
        for (int64_t i = 0; i < count; ++i)
          to[i * g.stride] = grad_query[c * block<T>() + i] * T(p.scale);
    }
    for (int64_t dy = 0; dy < k; ++dy) {
      if (!packed.value_rows[dy]) continue;
      const int64_t row = begin + dy * g.dilation;
      scatter(g, weight + dy * k * wide, wide, grads, wide, p.value_dim,
              grad_values.row(row));
      if (p.key.data)
        scatter(g, step + dy * k * wide, wide, packed.queries(), wide,
                p.head_dim, grad_keys.row(row));
    }
  }
  grad_values.flush(done, done + g.ring_rows);
  if (p.key.data) grad_keys.flush(done, done + g.ring_rows);
  if (p.rel_pos_w) {
    for (int64_t i = 0; i < half * k; ++i) grad_rel_h[i] = sum<T>(rel_h[i]) * T(kLn2);
    for (int64_t i = 0; i < (p.head_dim - half) * k; ++i)
      grad_rel_w[i] = sum<T>(rel_w[i]) * T(kLn2);
  }
}

template <class T, class E>
Status backward(const Problem& p) {
  const Geometry g = Geometry::of<T>(p, nullptr);
  // reflected rows of a low map lie in several groups: one group then
  const bool low = g.mode == kReflect && g.height <= 2 * g.pad;
  const int64_t rows = low ? g.out_height : backward_rows(g);
  const int64_t groups = ceil_div(g.out_height, rows);
  const int64_t half = p.head_dim / 2 * g.k;
  const int64_t other = p.head_dim * g.k - half;
  std::vector<T> rel_h(p.batch * p.heads * groups * half);
  std::vector<T> rel_w(p.batch * p.heads * groups * other);
  for (int64_t first : {0, 1}) {
    const int64_t count = (groups + 1 - first) / 2;
    const Status status =
        parallel_for(p, p.batch * p.heads * count, [&](int64_t task) {
          const int64_t plane = task / count;
          const int64_t group = task % count * 2 + first;
          const int64_t at = plane * groups + group;
          backward_task<T, E>(
              p, g, plane / p.heads, plane % p.heads, group * rows,
              std::min((group + 1) * rows, g.out_height),
              rel_h.data() + at * half, rel_w.data() + at * other);
        });
    if (status != kOk) return status;
  }
  if (p.rel_pos_w) {
    const auto add = [&](const std::vector<T>& from, int64_t size, void* to) {
      for (int64_t at = 0; at < p.batch * p.heads * groups; ++at)
        for (int64_t i = 0; i < size; ++i)
          static_cast<T*>(to)[at / groups % p.heads * size + i] +=
              from[at * size + i];
    };
    add(rel_h, half, p.grad_rel_pos_h);
    add(rel_w, other, p.grad_rel_pos_w);
  }
  return kOk;
}

}  // namespace

Status run_forward(const Problem& p) {
  switch (p.dtype) {
    case kFloat64:
      return forward<double, double>(p);
    case kBFloat16:
      return forward<float, BFloat16>(p);
    case kFloat16:
      return forward<float, Float16>(p);
    default:
      return forward<float, float>(p);
  }
}

Status run_backward(const Problem& p) {
  switch (p.dtype) {
    case kFloat64:
      return backward<double, double>(p);
    case kBFloat16:
      return backward<float, BFloat16>(p);
    case kFloat16:
      return backward<float, Float16>(p);
    default:
      return backward<float, float>(p);
  }
}

}  // namespace ACMIX_NAMESPACE
}  // namespace acmix_det
