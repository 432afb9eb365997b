// The code of amx on any processor with AVX-512, for tests: its instructions in others, to the bit.
#define REGARD_NAMESPACE amx_emulated
#define REGARD_LANES 16
#define REGARD_BASE avx512_target
#define REGARD_PAIRS
#define REGARD_PLAIN_PAIRS
#ifdef REGARD_TILE_INSTRUCTIONS  // for a test that compares the two
#define REGARD_TILES 1
#else
#define REGARD_TILES 2
#endif
#include "../target-inl.h"

namespace regard {
const Target amx_emulated_target = amx_emulated::target("amx_emulated");
}
