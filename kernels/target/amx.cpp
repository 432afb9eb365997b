// AVX-512 with products of tiles of bfloat16 (Intel AMX): 16 floats. Compiled with the flags of
// AVX-512; the instructions of tiles are written out.
#define REGARD_NAMESPACE amx
#define REGARD_LANES 16
#define REGARD_BASE avx512_target
#define REGARD_PAIRS
#define REGARD_PLAIN_PAIRS
#define REGARD_TILES 1
#include "../target-inl.h"

namespace regard {
const Target amx_target = amx::target("amx");
}
