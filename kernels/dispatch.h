// Which instruction set serves this process, and how a pass is spread over threads.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "attention.h"

namespace regard {

// The targets that this processor runs, best first.
std::vector<const Target*> targets_here();

// The target in use: the best, or what REGARD_TARGET names. Throws std::runtime_error where that is
// unknown or cannot run here.
const Target& target();

struct Free {
  void operator()(char* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Memory = std::unique_ptr<char[], Free>;

// Uninitialised memory, 64-byte aligned. Throws std::bad_alloc.
Memory allocate(int64_t bytes);

// Runs the tasks of a job on up to `threads` threads, the calling one included, which calls `poll`
// now and then; where that returns true the job ends early. Returns whether it ran to its end.
// Threads take tasks in their order, so that a task may wait for one before it.
bool run(const Job& job, int threads, bool (*poll)());

}  // namespace regard
