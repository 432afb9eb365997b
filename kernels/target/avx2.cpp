// AVX2: 8 floats. Compiled with its flags.
#define REGARD_NAMESPACE avx2
#define REGARD_LANES 8
#include "../target-inl.h"

namespace regard {
const Target avx2_target = avx2::target("avx2");
}
