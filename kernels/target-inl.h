// All of one instruction set. Included inside its own namespace, so that nothing that was compiled
// with its instructions can be linked into another.
// Vectors of queries: with four keys they make 4 x 4 sums in 32 registers, 4 x 3 in 16.
constexpr int kVectors = REGARD_LANES == 16 ? 4 : 3;

#include "vec-inl.h"
#include "multiply-inl.h"
#include "rows-inl.h"
#include "scores-inl.h"
#include "weights-inl.h"
#include "forward-inl.h"
#include "decode-inl.h"
#include "backward-inl.h"
#include "chunks-inl.h"
#include "reduce-inl.h"

static constexpr Target target(const char* name) {
  return {name,    forward,     merge,    partial_bytes, reduce,
          collect, chunk_bytes, backward, bias_gradient, row_blocks};
}
