// AVX2: 8 floats. Compiled with its flags; everything is inside its own namespace, so that no
// other target can be linked against this code.
#include "../attention.h"

#define REGARD_LANES 8
namespace regard::avx2 {
#include "../vec-inl.h"
#include "../forward-inl.h"

static bool runs_here() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
}  // namespace regard::avx2

namespace regard {
const Target avx2_target = {"avx2", avx2::runs_here, avx2::tasks, avx2::scratch_floats,
                              avx2::forward};
}
