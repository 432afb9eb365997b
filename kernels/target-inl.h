// All of one instruction set.
#pragma once

#include "backward-inl.h"
#include "chunks-inl.h"
#include "decode-inl.h"
#include "divergences-inl.h"
#include "forward-inl.h"
#include "gather-inl.h"
#include "pair_reductions-inl.h"
#include "reduce-inl.h"

namespace regard::REGARD_NAMESPACE {

static constexpr Target target(const char* name) {
  return {name,        forward,       merge,        partial_bytes, reduce,           collect,
          chunk_bytes, gather,        reduce_pairs, collect_pairs, pair_chunk_bytes, diverge,
          backward,    bias_gradient, row_tiles};
}

}  // namespace regard::REGARD_NAMESPACE
