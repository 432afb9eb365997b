// AVX-512 with products of bfloat16 pairs: 16 floats. Compiled with its flags.
#include <immintrin.h>

#include "../target-includes.h"

#define REGARD_LANES 16
#define REGARD_PAIRS
namespace regard::avx512_bf16 {
#include "../target-inl.h"
}  // namespace regard::avx512_bf16

namespace regard {
const Target avx512_bf16_target = avx512_bf16::target("avx512_bf16");
}
