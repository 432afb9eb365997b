// Which instruction set serves this process, and how a pass is spread over threads.
#pragma once

#include <string>
#include <vector>

#include "attention.h"

namespace regard {

// The targets that this processor runs, best first.
std::vector<const Target*> targets_here();

// The target in use: the best, or what REGARD_TARGET names. Throws std::runtime_error where that is
// unknown or cannot run here.
const Target& target();

// Computes one forward pass on `threads` threads, the calling one included. `poll` is called by that
// one between tasks and may set `stop`, after which the output is incomplete. Returns whether it ran
// to its end.
bool run_forward(const Forward& f, int threads, void (*poll)(Work&));

}  // namespace regard
