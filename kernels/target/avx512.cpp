// AVX-512: 16 floats. Compiled with its flags.
#include <immintrin.h>

#include "../target-includes.h"

#define REGARD_LANES 16
namespace regard::avx512 {
#include "../target-inl.h"

static bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma");
}
}  // namespace regard::avx512

namespace regard {
const Target avx512_target = avx512::target("avx512", avx512::runs_here);
}
