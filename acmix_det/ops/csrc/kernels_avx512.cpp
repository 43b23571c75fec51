#define ACMIX_NAMESPACE avx512
#define ACMIX_VECTOR_BYTES 64
#define ACMIX_CHANNELS 8
#include "kernels.inl"
