// AVX2: 8 floats. Compiled with its flags.
#include <immintrin.h>

#include "../target-includes.h"

#define REGARD_LANES 8
namespace regard::avx2 {
#include "../target-inl.h"
}  // namespace regard::avx2

namespace regard {
const Target avx2_target = avx2::target("avx2");
}
