// AVX2: 8 floats. Compiled with its flags.
#include <immintrin.h>

#include "../target-includes.h"

#define REGARD_LANES 8
namespace regard::avx2 {
#include "../target-inl.h"

static bool runs_here() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
}  // namespace regard::avx2

namespace regard {
const Target avx2_target = avx2::target("avx2", avx2::runs_here);
}
