// The matrix product of every pass, in register blocks: sums over t of a vector x[t] times a number
// a(r, t), which is broadcast.
#pragma once

#include <cstdint>

#include "pairs-inl.h"
#include "vectors-inl.h"

namespace regard::REGARD_NAMESPACE {

// The register block: rows of sums, and vectors of queries that each of them has. 6 x 4 sums are as
// many as 32 registers hold beside what is multiplied, 4 x 3 as 16 do.
#if REGARD_LANES == 16
constexpr int kRows = 6, kVectors = 4;
#elif defined(REGARD_ARM)
constexpr int kRows = 4, kVectors = 4;
#else
constexpr int kRows = 4, kVectors = 3;
#endif

// How two words are multiplied and added.
template <class R>
struct Plain {  // numbers
  typedef R Real;
  typedef R Word;
  static constexpr int numbers_per_word = 1;
  static inline Vec<R> add(Vec<R> sum, Vec<R> x, Vec<R> y) { return sum + x * y; }
  static inline Vec<R> everywhere(R x) { return in_register(broadcast(x)); }
};

#ifdef REGARD_PAIRS
struct Pairs {  // two bfloat16
  typedef float Real;
  typedef int32_t Word;
  static constexpr int numbers_per_word = 2;
  static inline F add(F sum, I x, I y) { return dot_pairs(sum, x, y); }
#if defined(REGARD_ARM)  // which multiplies with one pair of a register, and need not repeat it
  static inline F add(F sum, I x, bfloat16x4_t y) {
    return (F)vbfdotq_lane_f32((float32x4_t)sum, vreinterpretq_bf16_s32((int32x4_t)x), y, 0);
  }
  static inline bfloat16x4_t everywhere(int32_t x) {
    return vreinterpret_bf16_s32(vcreate_s32(uint32_t(x)));
  }
#else
  static inline I everywhere(int32_t x) { return in_register(broadcast(x)); }
#endif
};
#endif

// Software prefetch of what is read or written next: 12 cache lines between two tiles, whose
// products hide the latency. All lines at once would fill the line fill buffers and stall the
// products.
class Prefetcher {
 public:
  void clear() { ranges_ = range_ = 0; }

  // Adds rows of `bytes` each.
  void add(const char* row, int64_t stride, int64_t rows, int64_t bytes) {
    if (rows <= 0 || bytes <= 0) return;
    if (stride == bytes) bytes *= rows, rows = 1;
    all_[ranges_++] = {row, stride, rows, bytes, 0};
  }

  void prefetch_some() {
    for (int64_t left = kBytesAtOnce; left > 0 && range_ < ranges_;) {
      Range& range = all_[range_];
      const int64_t end = range.at + left < range.bytes ? range.at + left : range.bytes;
      for (; range.at < end; range.at += 64, left -= 64)
        __builtin_prefetch(range.row + range.at, 0, 3);
      if (range.at < range.bytes) return;
      range.at = 0, range.row += range.stride;
      if (--range.rows == 0) ++range_;
    }
  }

 private:
  static constexpr int64_t kBytesAtOnce = 12 * 64;  // 12 cache lines of 64 bytes
  struct Range {
    const char* row;
    int64_t stride, rows, bytes, at;
  };
  Range all_[4];
  int ranges_ = 0, range_ = 0;
};

// What a tile does with its sums.
enum class Epilogue { set, set_and_maximum, add };

// One register block: out[r] = or += sum of x[t] * a(r, t) over t < terms, for r < R and V vectors.
// a(r, t) is word t of row r, or word r of row t where a is `transposed`; rows are lda bytes apart.
template <class Op, bool transposed, Epilogue epilogue, int R, int V>
static inline void register_block(const typename Op::Word* x, int64_t ldx, const char* a,
                                  int64_t lda, int64_t terms, typename Op::Real* out, int64_t ldo,
                                  typename Op::Real* maximum) {
  typedef typename Op::Word Word;
  typedef typename Op::Real Real;
  constexpr int n = Simd<Real>::lanes;
  Vec<Real> sum[R][V] = {};
#pragma GCC unroll 4
  for (int64_t t = 0; t < terms; ++t) {
    Vec<Word> y[V];
    for (int v = 0; v < V; ++v) y[v] = *(const Vec<Word>*)(x + t * ldx + v * n);
    for (int r = 0; r < R; ++r) {
      const char* p = transposed ? a + t * lda + r * sizeof(Word) : a + r * lda + t * sizeof(Word);
      const auto number = Op::everywhere(read<Word>(p));
      for (int v = 0; v < V; ++v) sum[r][v] = Op::add(sum[r][v], y[v], number);
    }
  }
// Fully unrolled: the compiler spills an array that a loop variable indexes.
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Vec<Real> top;
    if (epilogue == Epilogue::set_and_maximum) top = *(const Vec<Real>*)(maximum + v * n);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vec<Real>* to = (Vec<Real>*)(out + r * ldo + v * n);
      *to = epilogue == Epilogue::add ? *to + sum[r][v] : sum[r][v];
      if (epilogue == Epilogue::set_and_maximum) top = larger(sum[r][v], top);  // NaN is ignored
    }
    if (epilogue == Epilogue::set_and_maximum) *(Vec<Real>*)(maximum + v * n) = top;
  }
}

// Rows side by side in a panel of packed keys: those of a register block.
constexpr int kPanelRows = 4;

// Not inlined: in a larger function the compiler spills the register block. Aligned: where the loop
// lies in the lines of decoded instructions makes a difference of 6 % on a first Zen.
template <class Op, bool transposed, Epilogue epilogue, int V>
__attribute__((noinline, aligned(64))) static void register_blocks(
    const typename Op::Word* x, int64_t ldx, const char* a, int64_t lda, int64_t terms,
    int64_t rows, typename Op::Real* out, int64_t ldo, typename Op::Real* maximum,
    Prefetcher* prefetcher) {
  // Few vectors take more rows, an even number: as many independent sums hide the latency of a
  // multiply-add.
  constexpr int tall = V == kVectors ? kRows : 4 * kVectors / V / 2 * 2;
  const int64_t step = transposed ? int64_t(sizeof(typename Op::Word)) : lda;
  int64_t r = 0;
  // 8 rows are 4 and 4, not 6 and twice 1.
  for (; r + tall <= rows && (tall != 6 || rows - r != 8); r += tall) {
    if (prefetcher) prefetcher->prefetch_some();
    register_block<Op, transposed, epilogue, tall, V>(x, ldx, a + r * step, lda, terms,
                                                      out + r * ldo, ldo, maximum);
  }
  if (tall > 4)
    for (; r + 4 <= rows; r += 4)
      register_block<Op, transposed, epilogue, 4, V>(x, ldx, a + r * step, lda, terms,
                                                     out + r * ldo, ldo, maximum);
  for (; r < rows; ++r)
    register_block<Op, transposed, epilogue, 1, V>(x, ldx, a + r * step, lda, terms, out + r * ldo,
                                                   ldo, maximum);
}

// The product for any number of vectors.
template <class Op, bool transposed, Epilogue epilogue>
static void multiply(int vectors, const typename Op::Word* x, int64_t ldx, const void* a,
                     int64_t lda, int64_t terms, int64_t rows, typename Op::Real* out, int64_t ldo,
                     typename Op::Real* maximum = nullptr, Prefetcher* prefetcher = nullptr) {
  constexpr int most = kVectors, n = Simd<typename Op::Real>::lanes;
  for (int passes = (vectors + most - 1) / most; passes > 0; --passes) {
    const int v = (vectors + passes - 1) / passes;  // 5 are 3 and 2, not 4 and 1
    const char* from = (const char*)a;
    switch (v) {
      case 1:
        register_blocks<Op, transposed, epilogue, 1>(x, ldx, from, lda, terms, rows, out, ldo,
                                                     maximum, prefetcher);
        break;
      case 2:
        register_blocks<Op, transposed, epilogue, 2>(x, ldx, from, lda, terms, rows, out, ldo,
                                                     maximum, prefetcher);
        break;
      case 3:
        register_blocks<Op, transposed, epilogue, 3>(x, ldx, from, lda, terms, rows, out, ldo,
                                                     maximum, prefetcher);
        break;
      default:
        register_blocks<Op, transposed, epilogue, most>(x, ldx, from, lda, terms, rows, out, ldo,
                                                        maximum, prefetcher);
    }
    vectors -= v;
    x += v * n, out += v * n;
    if (maximum) maximum += v * n;
  }
}

}  // namespace regard::REGARD_NAMESPACE
