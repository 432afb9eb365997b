// AVX-512 with products of bfloat16 pairs: 16 floats. Compiled with its flags.
#define REGARD_NAMESPACE avx512_bf16
#define REGARD_LANES 16
#define REGARD_BASE avx512_target
#define REGARD_PAIRS
#include "../target-inl.h"

namespace regard {
const Target avx512_bf16_target = avx512_bf16::target("avx512_bf16");
}
