// Matrices of token pairs as Python gives them.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "attention.h"
#include "bind_call.h"

namespace bindings {

// A summand of a matrix of token pairs: the weights of one head, or their effects.
struct PairTerm {
  Call call;
  uintptr_t maximum = 0, total = 0;
  double coefficient = 1;
  std::string kind = "weight";
  uintptr_t value = 0, gradient = 0, of_sink = 0, squares = 0, rest = 0;
  int64_t value_size = 0;
  bool rest_is_known = false;
};

// Terms as the kernels read them: of one head, size and type.
struct Terms {
  std::deque<Read> reads;
  std::vector<regard::PairTerm> terms;

  Terms(const std::vector<PairTerm>& given, int threads);
  const regard::Problem& problem() const { return reads.front().problem; }
};

// Two sums of weights to compare: both of one size and type, or of no terms.
regard::Divergences sides_of(const Terms& a, const Terms& b);

}  // namespace bindings
