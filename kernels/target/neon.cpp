// NEON: 4 floats. Compiled for the baseline of aarch64, which has it.
#define REGARD_NAMESPACE neon
#define REGARD_LANES 4
#define REGARD_ARM
#include "../target-inl.h"

namespace regard {
const Target neon_target = neon::target("neon");
}
