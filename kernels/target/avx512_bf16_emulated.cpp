// The code of avx512_bf16 on any processor with AVX-512, for tests: its instructions in others.
#define REGARD_NAMESPACE avx512_bf16_emulated
#define REGARD_LANES 16
#define REGARD_BASE avx512_target
#define REGARD_PAIRS
#define REGARD_PLAIN_PAIRS
#include "../target-inl.h"

namespace regard {
const Target avx512_bf16_emulated_target = avx512_bf16_emulated::target("avx512_bf16_emulated");
}
