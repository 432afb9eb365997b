#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <system_error>
#include <thread>

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

Memory allocate(int64_t bytes) {
  return Memory(
      static_cast<char*>(::operator new[](static_cast<size_t>(bytes), std::align_val_t(64))));
}

bool run(const Job& job, int threads, bool (*poll)()) {
  if (threads > job.tasks) threads = static_cast<int>(job.tasks);
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  std::vector<Memory> memory;  // taken before any thread starts: a failure leaves nothing running
  for (int i = 0; i < threads; ++i) memory.push_back(allocate(job.scratch_bytes));
  const auto work = [&](int thread) {
    const Stop end{&stop, thread == 0 ? poll : nullptr};
    for (;;) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= job.tasks || stopped(end)) return;
      job.run(job.pass, task, memory[static_cast<size_t>(thread)].get(), end);
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    try {
      others.emplace_back(work, i);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: the others do it all
    }
  }
  if (threads) work(0);
  for (std::thread& other : others) other.join();
  return !stop.load();
}

}  // namespace regard
