// All of one instruction set.
#pragma once

#include "backward-inl.h"
#include "bias_gradient-inl.h"
#include "chunks-inl.h"
#include "decode-inl.h"
#include "divergences-inl.h"
#include "forward-inl.h"
#include "gather-inl.h"
#include "pair_reductions-inl.h"
#include "reduce-inl.h"

namespace regard::REGARD_NAMESPACE {

#ifdef REGARD_BASE
static inline bool is_own(Type type) {
#ifdef REGARD_TILES
  if (type == Type::float16) return true;
#endif
  return type == Type::bfloat16;
}
static inline Type type_of(const Problem& p) { return p.type; }
static inline Type type_of(const PairMatrix& x) { return x.terms[0].problem->type; }
static inline Type type_of(const Divergences& x) { return x.terms[0][0].problem->type; }
static inline Type type_of(const auto& x) { return x.problem->type; }

// A function of this target for its own types, that of the base for the others.
template <auto own, auto base, class X>
static auto by_base(const X& x) {
  return is_own(type_of(x)) ? own(x) : (REGARD_BASE.*base)(x);
}
#define REGARD_FUNCTION(name, X) by_base<name, &Target::name, X>
#else
#define REGARD_FUNCTION(name, X) name
#endif

static constexpr Target target(const char* name) {
  return {name,
          REGARD_FUNCTION(forward, Forward),
          REGARD_FUNCTION(merge, Forward),
          REGARD_FUNCTION(partial_bytes, Forward),
          REGARD_FUNCTION(reduce, Reduce),
          REGARD_FUNCTION(collect, Reduce),
          REGARD_FUNCTION(chunk_bytes, Reduce),
          REGARD_FUNCTION(gather, Gather),
          REGARD_FUNCTION(reduce_pairs, PairMatrix),
          REGARD_FUNCTION(collect_pairs, PairMatrix),
          REGARD_FUNCTION(pair_chunk_bytes, PairMatrix),
          REGARD_FUNCTION(diverge, Divergences),
          REGARD_FUNCTION(backward, Backward),
          REGARD_FUNCTION(bias_gradient, Backward),
          REGARD_FUNCTION(row_tiles, Problem)};
}
#undef REGARD_FUNCTION

}  // namespace regard::REGARD_NAMESPACE
