// The products that everything is made of: sums over t of a vector x[t] times a number a(r, t).
#pragma once

#include <cstdint>

#include "pairs-inl.h"
#include "vectors-inl.h"

namespace regard::REGARD_NAMESPACE {

// Vectors of queries: with four keys they make 4 x 4 sums in 32 registers, 4 x 3 in 16.
constexpr int kVectors = REGARD_LANES == 16 ? 4 : 3;

// How two words are multiplied and added.
template <class R>
struct Plain {  // numbers
  typedef R Real;
  typedef R Word;
  static constexpr int numbers_a_word = 1;
  static inline Vec<R> add(Vec<R> sum, Vec<R> x, Vec<R> y) { return sum + x * y; }
};

#ifdef REGARD_PAIRS
struct Pairs {  // two bfloat16
  typedef float Real;
  typedef int32_t Word;
  static constexpr int numbers_a_word = 2;
  static inline F add(F sum, I x, I y) { return dot_pairs(sum, x, y); }
};
#endif

// Memory that will be needed soon. It is asked for a few lines at a time, between products that
// keep the processor busy until they come; all at once they would only be waited for earlier.
class Ahead {
 public:
  void clear() { parts_ = part_ = 0; }

  // Some rows of `bytes`.
  void add(const char* row, int64_t stride, int64_t rows, int64_t bytes) {
    if (rows <= 0 || bytes <= 0) return;
    if (stride == bytes) bytes *= rows, rows = 1;
    all_[parts_++] = {row, stride, rows, bytes, 0};
  }

  void ask() {
    for (int64_t left = kAtOnce; left > 0 && part_ < parts_;) {
      Part& part = all_[part_];
      const int64_t end = part.at + left < part.bytes ? part.at + left : part.bytes;
      for (; part.at < end; part.at += 64, left -= 64) __builtin_prefetch(part.row + part.at, 0, 3);
      if (part.at < part.bytes) return;
      part.at = 0, part.row += part.stride;
      if (--part.rows == 0) ++part_;
    }
  }

 private:
  static constexpr int64_t kAtOnce = 12 * 64;  // lines of 64 bytes
  struct Part {
    const char* row;
    int64_t stride, rows, bytes, at;
  };
  Part all_[4];
  int parts_ = 0, part_ = 0;
};

enum class Into { set, set_and_maximum, add };

// out[r] = or += sum of x[t] * a(r, t) over t < terms, for r < R and V vectors. a(r, t) is word t
// of row r, or word r of row t where the sum goes across the rows; rows are lda bytes apart.
template <class Op, bool across, Into into, int R, int V>
static inline void tile(const typename Op::Word* x, int64_t ldx, const char* a, int64_t lda,
                        int64_t terms, typename Op::Real* out, int64_t ldo,
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
      const char* p = across ? a + t * lda + r * sizeof(Word) : a + r * lda + t * sizeof(Word);
      const Vec<Word> number = in_register(broadcast(read<Word>(p)));
      for (int v = 0; v < V; ++v) sum[r][v] = Op::add(sum[r][v], y[v], number);
    }
  }
// All unrolled: a sum that is counted is taken out of its register first.
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Vec<Real> top;
    if (into == Into::set_and_maximum) top = *(const Vec<Real>*)(maximum + v * n);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vec<Real>* to = (Vec<Real>*)(out + r * ldo + v * n);
      *to = into == Into::add ? *to + sum[r][v] : sum[r][v];
      if (into == Into::set_and_maximum) top = larger(sum[r][v], top);  // a NaN is passed over
    }
    if (into == Into::set_and_maximum) *(Vec<Real>*)(maximum + v * n) = top;
  }
}

// Not inlined: in a larger function the compiler spills what must stay in registers.
template <class Op, bool across, Into into, int V>
__attribute__((noinline)) static void tiles(const typename Op::Word* x, int64_t ldx, const char* a,
                                            int64_t lda, int64_t terms, int64_t rows,
                                            typename Op::Real* out, int64_t ldo,
                                            typename Op::Real* maximum, Ahead* ahead) {
  // Few vectors make a tile of more rows: sums enough to hide how long one takes.
  constexpr int tall = kVectors / V * 4;
  const int64_t step = across ? int64_t(sizeof(typename Op::Word)) : lda;
  int64_t r = 0;
  for (; r + tall <= rows; r += tall) {
    if (ahead) ahead->ask();
    tile<Op, across, into, tall, V>(x, ldx, a + r * step, lda, terms, out + r * ldo, ldo, maximum);
  }
  if (tall > 4)
    for (; r + 4 <= rows; r += 4)
      tile<Op, across, into, 4, V>(x, ldx, a + r * step, lda, terms, out + r * ldo, ldo, maximum);
  for (; r < rows; ++r)
    tile<Op, across, into, 1, V>(x, ldx, a + r * step, lda, terms, out + r * ldo, ldo, maximum);
}

// The same for any number of vectors.
template <class Op, bool across, Into into>
static void multiply(int vectors, const typename Op::Word* x, int64_t ldx, const void* a,
                     int64_t lda, int64_t terms, int64_t rows, typename Op::Real* out, int64_t ldo,
                     typename Op::Real* maximum = nullptr, Ahead* ahead = nullptr) {
  constexpr int most = kVectors, n = Simd<typename Op::Real>::lanes;
  for (int passes = (vectors + most - 1) / most; passes > 0; --passes) {
    const int v = (vectors + passes - 1) / passes;  // 5 are 3 and 2, not 4 and 1
    const char* from = (const char*)a;
    switch (v) {
      case 1:
        tiles<Op, across, into, 1>(x, ldx, from, lda, terms, rows, out, ldo, maximum, ahead);
        break;
      case 2:
        tiles<Op, across, into, 2>(x, ldx, from, lda, terms, rows, out, ldo, maximum, ahead);
        break;
      case 3:
        tiles<Op, across, into, 3>(x, ldx, from, lda, terms, rows, out, ldo, maximum, ahead);
        break;
      default:
        tiles<Op, across, into, most>(x, ldx, from, lda, terms, rows, out, ldo, maximum, ahead);
    }
    vectors -= v;
    x += v * n, out += v * n;
    if (maximum) maximum += v * n;
  }
}

}  // namespace regard::REGARD_NAMESPACE
