// How a pass is spread over threads, and their memory.
#pragma once

#include <memory>
#include <new>

#include "attention.h"

namespace regard {

struct Free {
  void operator()(char* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Memory = std::unique_ptr<char[], Free>;

// Uninitialised memory, 64-byte aligned. Throws std::bad_alloc.
Memory allocate(int64_t bytes);

// Runs the tasks of a job on up to `threads` threads, the calling one included. That one calls
// `poll` now and then, and cancels the job where it returns true. Returns whether the job was
// completed. Threads take tasks in their order, so that a task may wait for one before it.
bool run(const Job& job, int threads, bool (*poll)());

}  // namespace regard
