// A call of attention as Python gives it, and as the kernels read it.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "attention.h"
#include "bind_given.h"
#include "mask.h"
#include "threads.h"
#include "visibility.h"

namespace bindings {

using regard::ArrayRef, regard::Shape, regard::shape_of;

// The array broadcast to a shape.
regard::Array array(const char* name, const ArrayRef& ref, const Shape& shape);
regard::Array array(const char* name, const std::optional<ArrayRef>& ref, const Shape& shape);

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Intervals of heads, queries and keys, and the logarithm of the factor to base 2.
using EditRef = std::tuple<std::array<int64_t, 6>, double>;

// The arguments of a call. The arrays are the caller's, who keeps them alive.
struct Call : regard::ScoreOptions {
  ArrayRef query, key;
  std::optional<ArrayRef> value, mask, bias;
  int64_t group_rows = 0;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  std::vector<int64_t> starts, lengths;
  int64_t query_step = 1, key_step = 1;
  uintptr_t query_ids = 0, key_ids = 0;
  bool shared_query_ids = false, shared_key_ids = false;
  uintptr_t interval_first = 0, interval_last = 0;
  bool shared_interval_first = false, shared_interval_last = false;
  std::vector<double> sinks;
  std::vector<EditRef> edits;
  double dropout = 0;
  int64_t seed = 0;
  std::array<int64_t, 2> draw_start{0, 0}, draw_step{1, 1};
};

// A call as the kernels read it, and the intervals and edits that it points to.
struct Read {
  regard::Problem problem;
  std::vector<regard::Edit> edits;
  regard::Intervals intervals;
  regard::MaskBlocks blocks;

  // A mask is read whole for what it hides everywhere, unless a `few` rows are all that is read.
  Read(const Call& call, int threads, bool few = false);

 private:
  void read_mask(int threads);
};

// Runs the jobs one after another, without Python's lock.
void run(std::initializer_list<regard::Job> jobs, int threads);

// Cancels the calls of daemon threads, which could not return to a Python that is gone.
void end();

void forward(const Call& call, const std::optional<ArrayRef>& out, uintptr_t maximum,
             uintptr_t total, int threads);

}  // namespace bindings
