// AVX-512: 16 floats. Compiled with its flags.
#include <immintrin.h>

#include "../target-includes.h"

#define REGARD_LANES 16
namespace regard::avx512 {
#include "../target-inl.h"
}  // namespace regard::avx512

namespace regard {
const Target avx512_target = avx512::target("avx512");
}
