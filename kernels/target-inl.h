// All of one instruction set. Included inside its own namespace, so that nothing that was compiled
// with its instructions can be linked into another.
constexpr int kVectors = REGARD_LANES == 16 ? 4 : 3;  // of queries: 4 x 4 sums of 32 registers, 4 x 3 of 16

#include "vec-inl.h"
#include "multiply-inl.h"
#include "rows-inl.h"
#include "weights-inl.h"
#include "forward-inl.h"
#include "decode-inl.h"
#include "backward-inl.h"
#include "reduce-inl.h"

static constexpr Target target(const char* name, bool (*runs_here)()) {
#ifdef REGARD_PAIRS
  constexpr bool pairs = true;
#else
  constexpr bool pairs = false;
#endif
  return {name, runs_here, pairs, forward, merge, partial_bytes, reduce, collect, chunk_bytes, backward, bias_gradient, row_blocks};
}
