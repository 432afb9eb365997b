// Peak rates of this machine: multiply-adds in vector registers, and reading memory.
//
//   roofline THREADS SECONDS [MIB]    operations or bytes per second, all threads together, as JSON;
//                                     with MIB the bandwidth of reading so much memory
//
// One thread is measured in CPU time, more by the wall clock; of several rounds the fastest counts.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

double now(int threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Prints one member of the JSON object.
void print(const char* name, double rate) {
  static const char* before = "";
  std::printf("%s\"%s\": %.4g", before, name, rate);
  before = ", ";
}

template <class Work>
void on_all(int threads, Work work) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
}

// Returns the shortest time in which every thread has done work(thread), over rounds that take
// about `seconds` together, and five at least.
template <class Work>
double fastest(int threads, double seconds, Work work) {
  double best = 1e30, total = 0;
  for (int round = 0; round < 5 || total < seconds; ++round) {
    const double start = now(threads);
    on_all(threads, work);
    const double elapsed = now(threads) - start;
    total += elapsed;
    if (elapsed < best) best = elapsed;
  }
  return best;
}

// Hides a value from the optimiser, which leaves it in its register.
template <class V>
void keep(V& x) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(x));
#else
  asm volatile("" : "+w"(x));
#endif
}

constexpr int64_t kSteps = 1 << 20;  // of a round: a few milliseconds

// Multiply-adds in chains that do not wait for each other: enough of them fill the pipelines.
template <class V, size_t... I>
void multiply_add(std::index_sequence<I...>) {
  V x[sizeof...(I)] = {}, factor = V{} + 0.5f, term = V{} + 1.0f;
  keep(factor), keep(term);
  for (int64_t i = 0; i < kSteps; ++i) ((x[I] = x[I] * factor + term, keep(x[I])), ...);
}

// A round of one thread, and how many operations it is.
struct Round {
  const char* name;
  void (*work)(int thread);
  double operations;
};

template <class T, int kBytes>
constexpr Round fma(const char* name) {
  typedef T V __attribute__((vector_size(kBytes)));
  constexpr int kChains = 12, kLanes = kBytes / static_cast<int>(sizeof(T));
  return {name, [](int) { multiply_add<V>(std::make_index_sequence<kChains>()); },
          2.0 * kChains * kLanes * kSteps};
}

#if defined(__AVX512BF16__)
template <size_t... I>
void dot(std::index_sequence<I...>) {
  __m512 x[sizeof...(I)] = {};
  __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = a;
  keep(a), keep(b);
  for (int64_t i = 0; i < kSteps; ++i) ((x[I] = _mm512_dpbf16_ps(x[I], a, b), keep(x[I])), ...);
}

constexpr int kDots = 24;
#endif

constexpr Round kRounds[] = {
#if defined(__AVX512F__)
    fma<float, 64>("float32 fma 512"), fma<double, 64>("float64 fma 512"),
#endif
#if defined(__AVX2__)
    fma<float, 32>("float32 fma 256"), fma<double, 32>("float64 fma 256"),
#endif
    fma<float, 16>("float32 fma 128"), fma<double, 16>("float64 fma 128"),
#if defined(__AVX512BF16__)
    {"bfloat16 dot 512", [](int) { dot(std::make_index_sequence<kDots>()); },
     2.0 * kDots * 32 * kSteps},
#endif
};

// Sums n vectors, eight sums at a time, fetching ahead of where it reads.
typedef int64_t Line __attribute__((vector_size(64)));
Line sum(const Line* p, int64_t n) {
  constexpr int kAhead = 80;  // lines of 64 bytes
  Line s[8] = {};
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) {
      __builtin_prefetch(p + i + j + kAhead);
      s[j] += p[i + j];
    }
  }
  return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}

void print_bandwidth(int threads, double seconds, int64_t mib) {
  const int64_t bytes = (mib / threads / 2) << 21, lines = bytes / 64;  // of a thread
  std::vector<Line*> parts(threads);
  std::vector<Line> sums(threads);
  for (Line*& part : parts) {
    part = static_cast<Line*>(std::aligned_alloc(2 << 20, bytes));
#if defined(MADV_HUGEPAGE)
    madvise(part, bytes, MADV_HUGEPAGE);  // 10 to 20 % faster than pages of 4 KiB
#endif
    for (int64_t i = 0; i < lines; ++i) part[i] = Line{} + i;  // a page exists once it is written
  }
  const double best =
      fastest(threads, seconds, [&](int t) { sums[t] = sum(parts[t], lines); });
  for (Line& s : sums) asm volatile("" : : "m"(s));
  print("read", static_cast<double>(bytes) * threads / best);
}

}  // namespace

// For who loads this as a library: one round of what is named, a few milliseconds. Returns how many
// operations that was, of all threads; 0 where there is no such thing.
extern "C" double one_round(const char* name, int threads) {
  for (const Round& round : kRounds)
    if (std::strcmp(round.name, name) == 0) {
      on_all(threads, round.work);
      return round.operations * threads;
    }
  return 0;
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.1;
  std::printf("{");
  if (argc > 3) {
    print_bandwidth(threads, seconds, std::atoll(argv[3]));
  } else {
    for (const Round& round : kRounds)
      print(round.name, round.operations * threads / fastest(threads, seconds, round.work));
  }
  std::printf("}\n");
}
