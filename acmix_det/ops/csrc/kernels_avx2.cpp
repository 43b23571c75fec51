#define ACMIX_NAMESPACE avx2
#define ACMIX_VECTOR_BYTES 32
#define ACMIX_CHANNELS 4
#include "kernels.inl"
