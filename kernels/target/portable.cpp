// Everything else: 4 floats. Compiled for the baseline.
#define REGARD_NAMESPACE portable
#define REGARD_LANES 4
#include "../target-inl.h"

namespace regard {
const Target portable_target = portable::target("portable");
}
