#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "cpu.h"

namespace regard {
namespace {

// An instruction set. Whether it runs is probed in this unit: the targets are compiled with its
// instructions.
struct Known {
  const char* name;
  bool (*runs_here)();
  const Target* target;  // null: the compiler could not build it
};

// Best first, on AMD. CMakeLists.txt defines REGARD_AVX2 as &avx2_target or as nullptr, so each of
// them.
const Known kKnown[] = {
#if defined(__x86_64__)
    {"avx512_bf16", runs_avx512_bf16, REGARD_AVX512_BF16},
    {"avx512", runs_avx512, REGARD_AVX512},
    {"avx2", runs_avx2, REGARD_AVX2},
#endif
    {"portable", runs_portable, REGARD_PORTABLE},
#if defined(REGARD_AVX512_BF16_EMULATED)  // only by its name: for tests
    {"avx512_bf16_emulated", runs_avx512, REGARD_AVX512_BF16_EMULATED},
#endif
};

// Those of this build, best first on the processors of a vendor.
std::vector<const Known*> best_first(const std::string& vendor) {
  std::vector<const Known*> found;
  for (const Known& k : kKnown)
    if (k.target) found.push_back(&k);
  // Intel's processors begin a product of bfloat16 pairs every second cycle, and two of floats in
  // every one: plain AVX-512 is 1.4 to 1.8 times as fast there.
  if (vendor == "GenuineIntel" && found.size() > 1 && found[1]->name == std::string("avx512"))
    std::swap(found[0], found[1]);
  return found;
}

// Of the known ones those that are in this build, or those that are not.
std::vector<std::string> names(bool built) {
  std::vector<std::string> found;
  for (const Known& k : kKnown)
    if ((k.target != nullptr) == built) found.emplace_back(k.name);
  return found;
}

// What follows the name of a target that cannot serve.
std::string refusal(const std::string& asked) {
  std::string there;
  for (const std::string& name : names(true)) there += (there.empty() ? "" : ", ") + name;
  there += names(true).size() == 1 ? " is there." : " are there.";
  for (const Known& k : kKnown) {
    if (asked != k.name) continue;
    if (k.target) return ": this processor lacks its instructions.";
    return ": this build lacks it, its compiler could not make it; " + there;
  }
  return " is unknown; " + there;
}

const Target* choose() {
  const char* value = std::getenv("REGARD_TARGET");
  const std::string asked = value ? value : "";
  for (const Target* t : targets_here())
    if (asked.empty() || asked == t->name) return t;
  throw std::runtime_error("REGARD_TARGET=" + asked + refusal(asked));
}

}  // namespace

std::vector<const Target*> targets_here() {
  std::vector<const Target*> found;
  for (const Known* k : best_first(cpu_vendor()))
    if (k->runs_here()) found.push_back(k->target);
  return found;
}

std::vector<std::string> preference(const std::string& vendor) {
  std::vector<std::string> found;
  for (const Known* k : best_first(vendor)) found.emplace_back(k->name);
  return found;
}

std::vector<std::string> targets_left_out() { return names(false); }

const Target& target() {
  static const Target* const chosen = choose();
  return *chosen;
}

}  // namespace regard
