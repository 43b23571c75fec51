#define ACMIX_NAMESPACE baseline
#define ACMIX_VECTOR_BYTES 16
#define ACMIX_CHANNELS 4
#include "kernels.inl"
