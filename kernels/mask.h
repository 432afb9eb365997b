// A bool mask, read once before a pass: what it says of intervals, and which blocks of keys it
// leaves out altogether.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "visibility.h"

namespace regard {

// Which blocks of kMaskKeys keys a query sees any of, by the mask of a problem.
struct MaskBlocks {
  std::vector<uint8_t> seen;  // [masks][blocks of keys]
  int64_t strides[3] = {};    // from one batch element, head and query to the next
};

// Narrows the intervals to the keys that the mask of a problem shows. Returns whether they say all
// that the mask says, which is then needed no more; else fills `blocks`.
bool narrow(const Problem& p, Intervals& intervals, MaskBlocks& blocks, int threads,
            bool (*poll)());

}  // namespace regard
