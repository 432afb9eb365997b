// Which instruction set serves this process.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "attention.h"

namespace regard {

// The targets that this processor runs, best first.
std::vector<const Target*> targets_here();

// Those of this build that do not run here, with the reason.
std::map<std::string, std::string> obstacles();

// The names of those that the compiler could not build.
std::vector<std::string> targets_left_out();

// The targets of this build in the order in which a processor would try them (preferences.h);
// where `features` are given, those of them that it runs.
std::vector<std::string> preference(const std::string& vendor, unsigned family,
                                    const std::optional<std::vector<std::string>>& features);

// The target in use: the best, or what REGARD_TARGET names. Throws std::runtime_error where that is
// unknown, not in this build, or cannot run here.
const Target& target();

}  // namespace regard
