// AVX-512: 16 floats. Compiled with its flags; everything is inside its own namespace, so that no
// other target can be linked against this code.
#include <immintrin.h>

#include "../attention.h"

#define REGARD_LANES 16
namespace regard::avx512 {
#include "../vec-inl.h"
#include "../forward-inl.h"

static bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma");
}
}  // namespace regard::avx512

namespace regard {
const Target avx512_target = {"avx512", avx512::runs_here, avx512::tasks, avx512::scratch_floats,
                              avx512::forward};
}
