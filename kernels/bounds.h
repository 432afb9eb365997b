// Bounds checks of arrays against their memory, for builds with checks.
#pragma once

#include <array>
#include <cstdint>

#include "attention.h"

namespace regard {

// Whether every element of an array of a shape, of `size` bytes each, lies within `bytes` from
// `memory` on.
inline bool lies_within(const Array& x, const std::array<int64_t, 4>& shape, int64_t size,
                        uintptr_t memory, int64_t bytes) {
  __int128 low = static_cast<__int128>(reinterpret_cast<uintptr_t>(x.data)) - memory;
  __int128 high = low + size;
  for (size_t i = 0; i < 4; ++i) {
    if (shape[i] == 0) return true;
    const __int128 reach = static_cast<__int128>(shape[i] - 1) * x.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  return low >= 0 && high <= bytes;
}

}  // namespace regard
