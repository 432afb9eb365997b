// Which instruction set serves this process.
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

}  // namespace regard
