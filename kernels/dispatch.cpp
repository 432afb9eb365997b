#include "dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "preferences.h"

namespace regard {
namespace {

// An instruction set. Whether it runs is probed in this unit: the targets are compiled with its
// instructions.
struct Known {
  const char* name;
  std::string (*obstacle)();           // why it does not run here, or ""
  const Target* target;                // null: the compiler could not build it
  std::string (*request)() = nullptr;  // asks the system for it when it is chosen; likewise
};

template <bool runs_here()>
std::string lacks() {
  return runs_here() ? "" : "this processor lacks its instructions";
}

// CMakeLists.txt defines REGARD_AVX2 as &avx2_target or as nullptr, so each of them.
const Known kKnown[] = {
#if defined(__x86_64__)
    {"amx", amx_obstacle, REGARD_AMX, request_amx},
    {"avx512_bf16", lacks<runs_avx512_bf16>, REGARD_AVX512_BF16},
    {"avx512", lacks<runs_avx512>, REGARD_AVX512},
    {"avx2", lacks<runs_avx2>, REGARD_AVX2},
#elif defined(__aarch64__)
    {"neon_bf16", lacks<runs_neon_bf16>, REGARD_NEON_BF16},
    {"neon", lacks<runs_neon>, REGARD_NEON},
#endif
    {"portable", lacks<runs_portable>, REGARD_PORTABLE},
#if defined(REGARD_EMULATES)  // only by their names: for tests
    {"amx_emulated", lacks<runs_avx512>, REGARD_AMX_EMULATED},
    {"avx512_bf16_emulated", lacks<runs_avx512>, REGARD_AVX512_BF16_EMULATED},
#endif
};

// Those of this build, best first on a processor; last those that only their name asks for.
std::vector<const Known*> best_first(const std::string& vendor, unsigned family) {
  std::vector<const Known*> found;
  for (const Known& k : kKnown)
    if (k.target) found.push_back(&k);
  const std::string order = " " + order_of(vendor, family) + " ";
  const auto place = [&](const Known* k) { return order.find(" " + std::string(k->name) + " "); };
  std::stable_sort(found.begin(), found.end(),
                   [&](const Known* a, const Known* b) { return place(a) < place(b); });
  return found;
}

// What the system said when it was asked for an instruction set that was to be used.
std::map<std::string, std::string>& refusals() {
  static std::map<std::string, std::string> said;
  return said;
}

std::string obstacle_of(const Known& k) {
  const auto refused = refusals().find(k.name);
  return refused == refusals().end() ? k.obstacle() : refused->second;
}

std::vector<const Known*> best_first_here() {
  return best_first(cpu_vendor(), cpu_numbers().family);
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
    if (k.target) return ": " + obstacle_of(k) + ".";
    return ": this build lacks it: its compiler could not make it, or REGARD_TARGETS named "
           "others; " +
           there;
  }
  return " is unknown; " + there;
}

const Target* choose() {
  const char* value = std::getenv("REGARD_TARGET");
  const std::string asked = value ? value : "";
  for (const Known* k : best_first_here()) {
    if ((!asked.empty() && asked != k->name) || !k->obstacle().empty()) continue;
    const std::string refused = k->request ? k->request() : "";
    if (refused.empty()) return k->target;
    refusals()[k->name] = refused;
  }
  throw std::runtime_error("REGARD_TARGET=" + asked + refusal(asked));
}

}  // namespace

std::vector<const Target*> targets_here() {
  std::vector<const Target*> found;
  for (const Known* k : best_first_here())
    if (k->obstacle().empty()) found.push_back(k->target);
  return found;
}

std::map<std::string, std::string> obstacles() {
  target();  // which may have been refused others
  std::map<std::string, std::string> found;
  for (const Known& k : kKnown)
    if (k.target && !obstacle_of(k).empty()) found[k.name] = obstacle_of(k);
  return found;
}

std::vector<std::string> preference(const std::string& vendor, unsigned family,
                                    const std::optional<std::vector<std::string>>& features) {
  std::vector<std::string> found;
  for (const Known* k : best_first(vendor, family))
    if (!features || std::count(features->begin(), features->end(), k->name))
      found.emplace_back(k->name);
  return found;
}

std::vector<std::string> targets_left_out() { return names(false); }

const Target& target() {
  static const Target* const chosen = choose();
  return *chosen;
}

}  // namespace regard
