// Whether the numbers of an array are finite.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "attention.h"

namespace regard {

// A look at all numbers of an array of a shape; those of axes with a stride of 0 are read once.
class FiniteScan {
 public:
  FiniteScan(const Array& x, const std::array<int64_t, 4>& shape);
  Job job() const;
  bool all_finite() const { return finite; }  // once the job is done

 private:
  static void run(const void* scan, int64_t task, char*, const Stop&);

  Array array;
  int64_t sizes[3], numbers = 1;  // rows, and the numbers of each
  int64_t rows_of_task;
  mutable std::atomic<bool> finite{true};
};

}  // namespace regard
