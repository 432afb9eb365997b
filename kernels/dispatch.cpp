#include "dispatch.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>

namespace regard {
namespace {

const Target* const kTargets[] = {
#if defined(__x86_64__)
    &avx512_target, &avx2_target,
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

struct Free {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Scratch = std::unique_ptr<float[], Free>;

Scratch scratch(int64_t floats) {
  return Scratch(static_cast<float*>(
      ::operator new[](static_cast<size_t>(floats) * sizeof(float), std::align_val_t(64))));
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

bool run_forward(const Forward& f, int threads, void (*poll)(Work&)) {
  const Target& t = target();
  const int64_t tasks = t.tasks(f);
  if (threads > tasks) threads = static_cast<int>(tasks);
  // Starting a thread costs as much as some four million products.
  if (f.B * f.Hq * f.Lq * f.Lk * (f.D + f.Dv) < int64_t{1} << 22 && threads > 1) threads = 1;
  Work work;
  const int64_t floats = t.scratch_floats(f);
  std::vector<Scratch> memory;  // taken before any thread starts: a failure leaves nothing running
  for (int i = 0; i < threads; ++i) memory.push_back(scratch(floats));
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i)
    others.emplace_back([&, i] { t.forward(f, work, memory[i].get(), nullptr); });
  if (threads) t.forward(f, work, memory[0].get(), poll);
  for (std::thread& other : others) other.join();
  return !work.stop.load();
}

}  // namespace regard
