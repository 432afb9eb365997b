// AVX-512: 16 floats. Compiled with its flags.
#define REGARD_NAMESPACE avx512
#define REGARD_LANES 16
#include "../target-inl.h"

namespace regard {
const Target avx512_target = avx512::target("avx512");
}
