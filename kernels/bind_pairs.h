// Matrices of token pairs as Python gives them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "bind_call.h"

namespace bindings {

// A call that is read once for all terms that are of its heads.
struct ReadCall {
  const Call call;
  const Read read;

  ReadCall(const Call& given, int threads) : call(given), read(call, threads) {}
};

// A summand of a matrix of token pairs: the weights of one head of a call, or their effects.
struct PairTerm {
  std::shared_ptr<ReadCall> call;
  int64_t b = 0, h = 0;
  uintptr_t maximum = 0, total = 0;  // of all heads of the call
  double coefficient = 1;
  std::string kind = "weight";
  uintptr_t value = 0, gradient = 0, of_sink = 0, squares = 0, rest = 0;
  int64_t value_size = 0;
  bool rest_is_known = false;
};

// One head of a call, as a problem of its own.
struct Head {
  regard::Problem problem;
  std::vector<regard::Edit> edits;

  Head(const regard::Problem& whole, int64_t b, int64_t h);
  Head(const Head&) = delete;
};

// Terms as the kernels read them: of one head, size and type. What is given must live as long.
struct Terms {
  std::deque<Head> heads;
  std::vector<regard::PairTerm> terms;

  explicit Terms(const std::vector<PairTerm>& given);
  const regard::Problem& problem() const { return heads.front().problem; }
};

// Two sums of weights to compare: both of one size and type, or of no terms.
regard::Divergences sides_of(const Terms& a, const Terms& b);

}  // namespace bindings
