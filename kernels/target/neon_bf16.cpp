// NEON with products of bfloat16 pairs (FEAT_BF16): 4 floats. Compiled with its flags.
#define REGARD_NAMESPACE neon_bf16
#define REGARD_LANES 4
#define REGARD_BASE neon_target
#define REGARD_ARM
#define REGARD_PAIRS
#include "../target-inl.h"

namespace regard {
const Target neon_bf16_target = neon_bf16::target("neon_bf16");
}
