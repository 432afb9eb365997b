// Peak rates of this machine: multiply-adds and exponentials, and reading memory.
//
//   roofline THREADS SECONDS [MIB]    operations or bytes per second, all threads together, as JSON;
//                                     with MIB the bandwidth of reading so much memory, in 1, 2, 4
//                                     and 8 streams
//
// One thread is measured in CPU time, more by the wall clock; of several rounds the fastest counts.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define REGARD_NAMESPACE roofline  // the kernels' exponential, in the widest registers
#if defined(__AVX512F__)
#define REGARD_LANES 16
#elif defined(__AVX2__)
#define REGARD_LANES 8
#else
#define REGARD_LANES 4
#endif
#include "../kernels/mathematics-inl.h"

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

// A round of one thread, and how many operations it is.
struct Round {
  const char* name;
  void (*work)(int thread);
  double operations;
  bool (*runs_here)() = [] { return true; };
};

// How numbers and pairs of bfloat16 are multiplied and added.
template <class T, int kBytes>
struct Numbers {
  typedef T Word;
  typedef T V __attribute__((vector_size(kBytes)));
  static constexpr int lanes = kBytes / static_cast<int>(sizeof(T));
  static constexpr int operations = 2 * lanes, chains = 12;
  static V add(V sum, V x, V y) { return sum + x * y; }
  static constexpr Word number = 0.5;
};

#if defined(__AVX512BF16__)
struct Dots {
  typedef int32_t Word;
  typedef float V __attribute__((vector_size(64)));
  static constexpr int lanes = 16, operations = 4 * lanes, chains = 24;
  static V add(V sum, V x, V y) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }
  static constexpr Word number = 0x3f003f00;  // a pair of 0.5
};
#endif

template <class Op>
typename Op::V in_all_lanes(typename Op::Word word) {
  typedef typename Op::Word Words __attribute__((vector_size(sizeof(typename Op::V))));
  return (typename Op::V)(word - Words{});  // 0 + word would be an addition: not of -0
}

// Multiply-adds in chains that do not wait for each other: enough of them fill the pipelines.
template <class Op, size_t... I>
void multiply_add(std::index_sequence<I...>) {
  typename Op::V x[sizeof...(I)] = {}, one = in_all_lanes<Op>(Op::number), other = one;
  keep(one), keep(other);
  for (int64_t i = 0; i < kSteps; ++i) ((x[I] = Op::add(x[I], one, other), keep(x[I])), ...);
}

// The same with the loads that a product needs: R numbers, each in all lanes, and V vectors make
// R x V sums, which fill the registers as those of the kernels do. All lie in the level-1 cache.
constexpr int kTerms = 64, kPasses = 1 << 12;

template <class Op, int R, int V>
void multiply_add_loaded(int) {
  alignas(64) typename Op::V vectors[kTerms][V];
  typename Op::Word numbers[R][kTerms];
  for (auto& row : vectors)
    for (auto& x : row) x = in_all_lanes<Op>(Op::number);
  for (auto& row : numbers)
    for (auto& x : row) x = Op::number;
  typename Op::V sum[R][V] = {};
  for (int pass = 0; pass < kPasses; ++pass) {
    asm volatile("" : : "r"(vectors), "r"(numbers) : "memory");  // read anew
#pragma GCC unroll 4
    for (int t = 0; t < kTerms; ++t) {
      typename Op::V y[V];
      for (int v = 0; v < V; ++v) y[v] = vectors[t][v];
      for (int r = 0; r < R; ++r) {
        typename Op::V x = in_all_lanes<Op>(numbers[r][t]);
        keep(x);
        for (int v = 0; v < V; ++v) sum[r][v] = Op::add(sum[r][v], y[v], x);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) keep(sum[r][v]);
}

template <class Op>
constexpr Round in_registers(const char* name) {
  return {name, [](int) { multiply_add<Op>(std::make_index_sequence<Op::chains>()); },
          1.0 * Op::operations * Op::chains * kSteps};
}
template <class Op>
constexpr Round with_loads(const char* name) {  // the register block of the kernels
  constexpr bool is_widest = sizeof(typename Op::V) == 64;
  constexpr int R = is_widest ? 6 : 4, V = is_widest ? 4 : 3;
  return {name, multiply_add_loaded<Op, R, V>, 1.0 * Op::operations * R * V * kTerms * kPasses};
}

// Exponentials as the kernels compute them, four vectors in step, in registers.
void exponentials(int) {
  using regard::roofline::F;
  F x[4] = {F{} - 0.25f, F{} - 0.5f, F{} - 1.5f, F{} - 2.5f};
  for (int64_t i = 0; i < kSteps / 4; ++i) {
    for (F& y : x) keep(y);
    F y[4] = {x[0], x[1], x[2], x[3]};
    regard::roofline::exp2_each(y);
    for (F& z : y) keep(z);
  }
}

#if defined(__AMX_BF16__) && defined(__linux__)
// Tiles of 16 rows of 64 bytes: a product is 16 x 16 sums of 32 products. The operating system
// gives them to a process that asks; where there are none, or none are given, none are measured.
bool has_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // of arch_prctl
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// The instructions by hand: GCC 12's intrinsics do not say which memory they read, and it leaves out
// the stores of what they need.
struct Tiles {  // the configuration of a thread: all eight, whole
  Tiles() {
    alignas(64) const struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease"); }
};

template <int tile>
void load(const char* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(64L), "i"(tile) : "memory");
}

constexpr int kTileSteps = kSteps / 16;
constexpr double kTileOperations = 2.0 * 16 * 16 * 32;

void tile_products(int) {
  const Tiles tiles;
  for (int64_t i = 0; i < kTileSteps; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
  }
}

// The same with the loads that a product needs: two tiles of each operand make 2 x 2 sums.
void tile_products_loaded(int) {
  const Tiles tiles;
  alignas(64) static constexpr char memory[16][1024] = {};  // in the level-1 cache
  for (int64_t i = 0; i < kTileSteps; ++i) {
    const char* at = memory[i % 4 * 4];
    asm volatile("" : "+r"(at));
    load<4>(at);
    load<5>(at + 1024);
    load<6>(at + 2048);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    load<7>(at + 3072);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}
#endif

constexpr Round kRounds[] = {
#if defined(__AVX512F__)
    in_registers<Numbers<float, 64>>("float32 fma 512"),
    with_loads<Numbers<float, 64>>("float32 fma 512 with loads"),
    in_registers<Numbers<double, 64>>("float64 fma 512"),
    with_loads<Numbers<double, 64>>("float64 fma 512 with loads"),
#endif
#if defined(__AVX2__)
    in_registers<Numbers<float, 32>>("float32 fma 256"),
    with_loads<Numbers<float, 32>>("float32 fma 256 with loads"),
    in_registers<Numbers<double, 32>>("float64 fma 256"),
    with_loads<Numbers<double, 32>>("float64 fma 256 with loads"),
#endif
    in_registers<Numbers<float, 16>>("float32 fma 128"),
    with_loads<Numbers<float, 16>>("float32 fma 128 with loads"),
    in_registers<Numbers<double, 16>>("float64 fma 128"),
    with_loads<Numbers<double, 16>>("float64 fma 128 with loads"),
#if defined(__AVX512BF16__)
    in_registers<Dots>("bfloat16 dot 512"),
    with_loads<Dots>("bfloat16 dot 512 with loads"),
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
    {"bfloat16 tiles", tile_products, 4 * kTileOperations * kTileSteps, has_tiles},
    {"bfloat16 tiles with loads", tile_products_loaded, 4 * kTileOperations * kTileSteps,
     has_tiles},
#endif
    {"float32 exp", exponentials, 1.0 * kSteps * REGARD_LANES},
};

// Sums n vectors that lie in some stretches, eight of a stretch at a time, fetching ahead of where
// it reads.
typedef int64_t Line __attribute__((vector_size(64)));
Line sum(const Line* p, int64_t n, int streams) {
  constexpr int kAhead = 80;  // lines of 64 bytes
  const int64_t stretch = n / streams;
  Line s[8] = {};
  for (int64_t i = 0; i + 8 <= stretch; i += 8) {
    for (int k = 0; k < streams; ++k) {
      const Line* const q = p + k * stretch + i;
      for (int j = 0; j < 8; ++j) {
        __builtin_prefetch(q + j + kAhead);
        s[j] += q[j];
      }
    }
  }
  return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}

// A memory of which each thread has a part.
class Memory {
 public:
  Memory(int threads, int64_t mib) : bytes_((mib / threads / 2) << 21), parts_(threads) {
    for (Line*& part : parts_) {
      part = static_cast<Line*>(std::aligned_alloc(2 << 20, bytes_));
#if defined(MADV_HUGEPAGE)
      madvise(part, bytes_, MADV_HUGEPAGE);  // 10 to 20 % faster than pages of 4 KiB
#endif
      for (int64_t i = 0; i < bytes_ / 64; ++i) part[i] = Line{} + i;  // it exists once written
    }
  }
  ~Memory() {
    for (Line* part : parts_) std::free(part);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  double bytes() const { return static_cast<double>(bytes_) * static_cast<double>(parts_.size()); }
  void read(int thread, int streams) const {
    Line all = sum(parts_[thread], bytes_ / 64, streams);
    asm volatile("" : : "m"(all));
  }

 private:
  int64_t bytes_;  // of a thread
  std::vector<Line*> parts_;
};

void print_bandwidth(int threads, double seconds, int64_t mib) {
  const Memory memory(threads, mib);
  for (int streams : {1, 2, 4, 8}) {
    const std::string name = "read " + std::to_string(streams);
    const auto read = [&](int thread) { memory.read(thread, streams); };
    print(name.c_str(), memory.bytes() / fastest(threads, seconds, read));
  }
}

}  // namespace

// For who loads this as a library: one round of what is named, a few milliseconds. Returns how many
// operations that was, of all threads; 0 where there is no such thing.
extern "C" double one_round(const char* name, int threads) {
  for (const Round& round : kRounds)
    if (std::strcmp(round.name, name) == 0 && round.runs_here()) {
      on_all(threads, round.work);
      return round.operations * threads;
    }
  return 0;
}

// Reads a memory once, each thread its part of it in so many streams. Returns its bytes.
extern "C" double one_reading(int streams, int threads, int64_t mib) {
  static const Memory memory(threads, mib);  // of the first call
  on_all(threads, [streams](int thread) { memory.read(thread, streams); });
  return memory.bytes();
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.1;
  std::printf("{");
  if (argc > 3) {
    print_bandwidth(threads, seconds, std::atoll(argv[3]));
  } else {
    for (const Round& round : kRounds)
      if (round.runs_here())
        print(round.name, round.operations * threads / fastest(threads, seconds, round.work));
  }
  std::printf("}\n");
}
