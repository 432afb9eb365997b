#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

namespace regard {
namespace {

const Target* const kTargets[] = {
#if defined(__x86_64__)
    &avx512_bf16_target, &avx512_target, &avx2_target,
#endif
    &portable_target};

const Target* choose() {
  const char* asked = std::getenv("REGARD_TARGET");
  std::string known, here;
  for (const Target* t : kTargets) {
    const bool runs = t->runs_here();
    if (runs && (!asked || !*asked)) return t;
    if (asked && std::string(asked) == t->name) {
      if (runs) return t;
      throw std::runtime_error("REGARD_TARGET=" + std::string(asked) +
                               ": this processor lacks its instructions.");
    }
    known += (known.empty() ? "" : ", ") + std::string(t->name);
  }
  throw std::runtime_error("REGARD_TARGET=" + std::string(asked) + " is unknown; " + known +
                           " are there.");
}

}  // namespace

std::vector<const Target*> targets_here() {
  std::vector<const Target*> found;
  for (const Target* t : kTargets)
    if (t->runs_here()) found.push_back(t);
  return found;
}

const Target& target() {
  static const Target* const chosen = choose();
  return *chosen;
}

}  // namespace regard
