// Everything else: 4 floats. Compiled for the baseline.
#include "../target-includes.h"

#define REGARD_LANES 4
namespace regard::portable {
#include "../target-inl.h"
}  // namespace regard::portable

namespace regard {
const Target portable_target = portable::target("portable");
}
