#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif
#if defined(__linux__) && !defined(__SANITIZE_THREAD__)
#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#define REGARD_OPENMP
#endif

namespace regard {
namespace {

// Calls `work(data)` on several threads and waits for them: GCC's entry into an OpenMP runtime,
// which LLVM's and Intel's have too.
using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// The threads of an OpenMP runtime that is loaded, such as torch's; null where there is none.
// OpenMP workers busy-wait for some milliseconds after a region: threads of our own would
// oversubscribe the processors until then.
Parallel openmp() {
#ifdef REGARD_OPENMP
  // A forked process has none of these threads, but its copy of the runtime counts on them.
  static std::atomic<bool> forked{false};
  static const bool watched = [] {
    constexpr unsigned kForkedWithoutExec = 0x40;  // PF_FORKNOEXEC, in the kernel's sched.h
    unsigned flags = kForkedWithoutExec;
    if (std::FILE* stat = std::fopen("/proc/self/stat", "r")) {
      // proc(5): the name, in parentheses, may hold anything else.
      if (std::fscanf(stat, "%*d (%*[^\n)]) %*c %*d %*d %*d %*d %*d %u", &flags) != 1)
        flags = kForkedWithoutExec;
      std::fclose(stat);
    }
    if (pthread_atfork(nullptr, nullptr, [] { forked = true; }) != 0) return false;
    return (flags & kForkedWithoutExec) == 0;
  }();
  if (!watched || forked) return nullptr;
  return reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#else
  return nullptr;
#endif
}

// A parallel region: up to `needed` of `threads` threads do the work, with the calling one.
template <class Work>
void run_parallel(Work& work, int needed, int threads) {
  if (const Parallel parallel = needed > 1 ? openmp() : nullptr) {
    // All threads, though some may find no task: with fewer, the runtime would end the others and
    // start them again in the next region.
    parallel([](void* data) { (*static_cast<Work*>(data))(); }, &work,
             static_cast<unsigned>(threads), 0);
    return;
  }
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(needed));  // may throw: before any thread has started
  for (int i = 1; i < needed; ++i) {
    try {
      others.emplace_back([&] { work(); });
    } catch (const std::exception&) {
      break;  // the system has no thread or memory left: those that run do all tasks
    }
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace

int64_t level2_bytes() {
  static const int64_t bytes = [] {
    int64_t told = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    told = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return told > 0 ? told : int64_t(1) << 20;
  }();
  return bytes;
}

Memory allocate(int64_t bytes) {
  return Memory(
      static_cast<char*>(::operator new[](static_cast<size_t>(bytes), std::align_val_t(64))));
}

bool run(const Job& job, int threads, bool (*poll)()) {
  if (job.tasks == 0) return true;
  std::atomic<int64_t> next{0};
  std::atomic<size_t> working{0};
  std::atomic<bool> stop{false};
  std::vector<Memory> memory;  // taken before any thread starts: a failure leaves nothing running
  const int64_t most = std::min<int64_t>(threads, job.tasks);
  memory.reserve(static_cast<size_t>(most));
  for (int64_t i = 0; i < most; ++i) memory.push_back(allocate(job.scratch_bytes));
  const std::thread::id caller = std::this_thread::get_id();
  auto work = [&] {
    const Stop end{&stop, std::this_thread::get_id() == caller ? poll : nullptr};
    char* scratch = nullptr;
    for (;;) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= job.tasks || stopped(end)) return;
      if (!scratch) {
        scratch = memory[working++].get();
        std::memset(scratch, 0, static_cast<size_t>(std::min<int64_t>(job.scratch_bytes, 64)));
      }
      job.run(job.pass, task, scratch, end);
    }
  };
  run_parallel(work, static_cast<int>(memory.size()), threads);
  return !stop.load();
}

}  // namespace regard
