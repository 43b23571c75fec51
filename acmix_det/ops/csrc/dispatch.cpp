// Picks the kernels for the processor at run time.

#include <cstring>

#include "local_attention.h"

namespace acmix_det {

#define ACMIX_DECLARE(isa)             \
  namespace isa {                      \
  Status run_forward(const Problem&);  \
  Status run_backward(const Problem&); \
  }
ACMIX_DECLARE(baseline)
#ifdef __x86_64__
ACMIX_DECLARE(avx2)
ACMIX_DECLARE(avx512)
#endif

namespace {

struct Kernels {
  const char* name;
  bool (*runs_here)();
  Status (*forward)(const Problem&);
  Status (*backward)(const Problem&);
};

bool always() { return true; }
#ifdef __x86_64__
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

// fastest first
const Kernels kKernels[] = {
#ifdef __x86_64__
    {"avx512", has_avx512, avx512::run_forward, avx512::run_backward},
    {"avx2", has_avx2, avx2::run_forward, avx2::run_backward},
#endif
    {"baseline", always, baseline::run_forward, baseline::run_backward},
};

const Kernels* chosen = nullptr;

const Kernels& kernels() {
  if (!chosen)
    for (const Kernels& k : kKernels)
      if (k.runs_here()) {
        chosen = &k;
        break;
      }
  return *chosen;
}

}  // namespace
}  // namespace acmix_det

#pragma GCC visibility push(default)
extern "C" {

// sizeof(Problem), to find a library that does not fit its Python side.
int64_t acmix_det_problem_size() { return sizeof(acmix_det::Problem); }

// The instruction set in use: "avx512", "avx2" or "baseline".
const char* acmix_det_capability() { return acmix_det::kernels().name; }

// Use another instruction set; 0 if this processor has it, else 1.
int acmix_det_set_capability(const char* name) {
  for (const auto& k : acmix_det::kKernels)
    if (!std::strcmp(name, k.name) && k.runs_here()) {
      acmix_det::chosen = &k;
      return 0;
    }
  return 1;
}

int acmix_det_forward(const acmix_det::Problem* problem) {
  return acmix_det::kernels().forward(*problem);
}

int acmix_det_backward(const acmix_det::Problem* problem) {
  return acmix_det::kernels().backward(*problem);
}
}
#pragma GCC visibility pop
