// Local attention on the CPU: the C interface.
//
// Plain C++ without PyTorch's headers, so that the library serves every
// release of PyTorch. Python fills a Problem and calls through ctypes; the
// fields are those of cpu_backend.py and must stay in the same order.
#pragma once

#include <cstdint>

namespace acmix_det {

enum DataType { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };
enum PaddingMode { kMask = 0, kZeros = 1, kReflect = 2 };
enum Status { kOk = 0, kOutOfMemory = 1 };

// A tensor (B, N, channels, H, W) anywhere in memory; strides in elements.
struct Tensor5 {
  void* data;
  int64_t stride[5];
};

struct Problem {
  int64_t batch, heads, head_dim, value_dim, height, width;
  int64_t kernel, stride, dilation;
  int64_t padding_mode;  // PaddingMode
  int64_t dtype;         // DataType of query, key, value, out and grad_out
  double scale;
  // query, key and value; key.data is null where the logits have no q . k
  Tensor5 query, key, value;
  // (N, D / 2, k) and (N, D - D / 2, k), contiguous, in the compute type
  // (float32, float64 for kFloat64); null where there are none
  const void *rel_pos_h, *rel_pos_w;
  Tensor5 out;  // forward: written; backward: unused
  // backward: the upstream gradient, and the gradients, in the compute type,
  // zero-filled, contiguous
  Tensor5 grad_out, grad_query, grad_key, grad_value;
  void *grad_rel_pos_h, *grad_rel_pos_w;
  int64_t num_threads;
  // GOMP_parallel of the OpenMP runtime that PyTorch uses, whose threads are
  // then shared; null starts threads of our own
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

}  // namespace acmix_det
