// Everything else: 4 floats. Compiled for the baseline; everything is inside its own namespace, so that no
// other target can be linked against this code.
#include "../attention.h"

#define REGARD_LANES 4
namespace regard::portable {
#include "../vec-inl.h"
#include "../forward-inl.h"

static bool runs_here() {
  return true;
}
}  // namespace regard::portable

namespace regard {
const Target portable_target = {"portable", portable::runs_here, portable::tasks, portable::scratch_floats,
                              portable::forward};
}
