// Gradients as Python asks for them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bind_call.h"
#include "bind_pairs.h"

namespace bindings {

// The arrays of a gradient: the addresses of those that have no strides, or 0. Those of the rule
// are described in WeightGradient.
struct Gradients {
  std::optional<ArrayRef> grad, out, bias_grad;
  uintptr_t maximum = 0, total = 0, delta = 0;
  uintptr_t query_sum = 0, query_grad = 0, key_grad = 0, value_grad = 0;
  std::string rule = "products";
  uintptr_t numbers = 0, other = 0, given_delta = 0;
  std::array<int64_t, 2> other_strides{};  // of batch element and head, in numbers
  int64_t columns = 0;
  uintptr_t query_blocks = 0, key_blocks = 0, first_distances = 0;
  std::array<int64_t, 2> block_counts{};
  int64_t distance_step = 1, distances = 0;
  std::vector<PairTerm> side_a, side_b;  // of a divergence
  int side = 0;
  bool adds = false;
  bool* finite = nullptr;  // as in Backward
};

void backward(const Call& call, const Gradients& arrays, int threads);

// Whether all numbers of some arrays are finite.
bool are_finite(const std::vector<ArrayRef>& refs, int threads);

}  // namespace bindings
