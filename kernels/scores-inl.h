// The scores of a block of queries and a block of keys: S^T = K Q^T with the queries in the lanes,
// or Q K^T with the numbers of a key in the lanes where there are few queries.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "mathematics-inl.h"
#include "rows-inl.h"

namespace regard::REGARD_NAMESPACE {

// Sums of more words than these are made in parts: the error grows with the longest.
constexpr int64_t kTerms = 128;

// to[key][row]: the products of the keys of a cut with its vectors of x, [words(D)][rows].
template <class E>
static void multiply_cut(const Reach::Cut& cut, const typename E::Word* x, const Matrix& keys,
                         int64_t D, typename E::Real* to, Ahead* ahead = nullptr) {
  typedef typename E::Op Op;
  const int vectors = cut.to - cut.from, first = cut.from * E::lanes;
  for (int64_t w = 0; w == 0 || w < E::words(D); w += kTerms) {  // of nothing the sum is 0
    const int64_t terms = E::words(D) - w < kTerms ? E::words(D) - w : kTerms;
    const char* from =
        (const char*)keys.data + cut.begin * keys.stride + w * int64_t(sizeof(typename E::Word));
    (w ? multiply<Op, false, Into::add>
       : multiply<Op, false, Into::set>)(vectors, x + w * E::rows + first, E::rows, from,
                                         keys.stride, terms, cut.end - cut.begin,
                                         to + cut.begin * E::rows + first, E::rows, nullptr, ahead);
  }
}

// Few queries are multiplied with the numbers of a key in the lanes.
constexpr int64_t kDecodeRows = 8;  // above, queries in the lanes are faster
constexpr int kDecodeKeys = 512;    // of a block, or fewer where they are long
constexpr int64_t kAhead = 16384;   // how many bytes ahead of the sums the memory is asked

// Whether a call, or the call of which this is a part, has so few queries. It decides in which
// order the products of a score are added, so every pass must find the same.
template <class E>
static bool few_queries(const Problem& p) {
  constexpr int64_t most = E::rows < kDecodeRows ? E::rows : kDecodeRows;
  return p.group_rows <= most && p.Lk >= kKeys;
}

// Words of a query that lies with its numbers next to each other, up to whole vectors.
template <class E>
static int64_t padded_words(const Problem& p) {
  return (E::words(p.D) + E::lanes - 1) / E::lanes * E::lanes;
}

template <class E>
static int64_t query_words(const Problem& p) {
  return few_queries<E>(p) ? kDecodeRows * padded_words<E>(p) : E::words(p.D) * E::rows;
}

// Brings the queries of a block into rows.q: [words(D)][rows], or [kDecodeRows][padded_words].
template <class E>
static void load_queries(const Problem& p, const Rows<E>& rows) {
  typedef typename E::Word Word;
  if (!few_queries<E>(p)) return into_lanes<E>(rows.query, rows.count, p.D, rows.q);
  const int64_t width = padded_words<E>(p);
  std::memset((void*)rows.q, 0, size_t(kDecodeRows * width) * sizeof(Word));
  for (int r = 0; r < rows.count; ++r)
    for (int64_t w = 0; w < E::words(p.D); w += E::lanes)
      store<Word>(rows.q + r * width + w,
                  words_at<E>(rows.query[r] + w * E::pack * int64_t(sizeof(typename E::Bits)),
                              p.D - w * E::pack));
}

// Asks for some bytes. Into the second cache: the first has too few lines under way to keep the
// memory busy.
static inline void ask_for(const char* p, int64_t bytes) {
  for (int64_t x = 0; x < bytes; x += 64) __builtin_prefetch(p + x, 0, 2);
}

// Asks for a row that comes some rows after this one.
static inline void ask_ahead(const char* row, int64_t stride, int64_t bytes) {
  ask_for(row + (kAhead / (stride > 0 ? stride : 1) + 1) * stride, bytes);
}

// The products of R rows of queries with `keys` keys: scores[row][kDecodeKeys]. A score has the
// same bits for any R.
template <class E, int R>
__attribute__((noinline)) static void dot_keys(const Problem& p, const typename E::Word* queries,
                                               const char* key, int keys,
                                               typename E::Real* scores) {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  constexpr int n = E::lanes, K = n / R;
  const int64_t stride = p.key.strides[2], bytes = E::pack * int64_t(sizeof(typename E::Bits));
  const int64_t whole = p.D / (n * E::pack) * n, width = padded_words<E>(p);
  for (int j = 0; j < keys; j += K) {
    const char* row[K];
    for (int i = 0; i < K; ++i) {
      row[i] = key + (j + i < keys ? j + i : keys - 1) * stride;
      ask_ahead(row[i], stride, p.D * bytes / E::pack);
    }
    Vec<Real> sum[n] = {};
    const auto add = [&](int64_t w, int64_t count) {
      Vec<Word> q[R];
      for (int r = 0; r < R; ++r) q[r] = *(const Vec<Word>*)(queries + r * width + w);
      for (int i = 0; i < K; ++i) {
        const Vec<Word> k = words_at<E>(row[i] + w * bytes, count);
        for (int r = 0; r < R; ++r) sum[r * K + i] = E::Op::add(sum[r * K + i], q[r], k);
      }
    };
    for (int64_t w = 0; w < whole; w += n) add(w, n * E::pack);
    if (whole < width) add(whole, p.D - whole * E::pack);
    const Vec<Real> all = fold_each(sum, [](Vec<Real> x, Vec<Real> y) { return x + y; });
    for (int r = 0; r < R; ++r)  // behind the last key too, where there is room
      __builtin_memcpy(scores + r * kDecodeKeys + j, (const Real*)&all + r * K, K * sizeof(Real));
  }
}

// Calls `work(r, R)` for all of some rows, in groups of R = 4, 2 or 1.
template <class E, class Work>
static void by_rows(int count, Work work) {
  for (int r = 0; r < count;) {
    if (E::lanes >= 4 && count - r > 2) {
      constexpr int R = E::lanes >= 4 ? 4 : 1;
      work(r, std::integral_constant<int, R>()), r += R;
    } else if (count - r > 1) {
      work(r, std::integral_constant<int, 2>()), r += 2;
    } else {
      work(r, std::integral_constant<int, 1>()), r += 1;
    }
  }
}

// scores[key][row]: the products of a block of keys and the queries, where they are `few_queries`.
template <class E>
static void multiply_few(const Problem& p, const Rows<E>& rows, const char* key, int keys,
                         typename E::Real* scores) {
  typedef typename E::Real Real;
  const int width = rows.vectors * E::lanes;
  for (int j = 0; j < keys; ++j)
    std::memset((void*)(scores + j * E::rows), 0, size_t(width) * sizeof(Real));
  by_rows<E>(rows.count, [&]<int R>(int r0, std::integral_constant<int, R>) {
    alignas(64) Real products[R * kDecodeKeys];
    dot_keys<E, R>(p, rows.q + r0 * padded_words<E>(p), key, keys, products);
    for (int r = 0; r < R && r0 + r < rows.count; ++r)
      for (int j = 0; j < keys; ++j) scores[j * E::rows + r0 + r] = products[r * kDecodeKeys + j];
  });
}

// scores[key][row]: the products of the keys from j0 on, which are `k`, and the queries that may
// see them.
template <class E>
static void multiply_keys(const Problem& p, const Rows<E>& rows, const Reach& reach, int64_t kv,
                          int64_t j0, int keys, const Matrix& k, typename E::Real* scores,
                          Ahead* ahead = nullptr) {
  if (few_queries<E>(p)) return multiply_few(p, rows, p.key.at(rows.b, kv, j0), keys, scores);
  for (int c = 0; c < reach.cuts; ++c) multiply_cut<E>(reach.cut[c], rows.q, k, p.D, scores, ahead);
}

// What stands between the products and the exponential. Where it is `raw`, scores are the products
// and `factor` has the scale in it; else they are computed in place.
template <class E>
struct Scaling {
  typedef typename E::Real Real;
  bool raw;
  Real factor;  // from a score to the exponent of 2

  explicit Scaling(const Problem& p) : raw(raw_scores(p)), factor(Real(factor_of(p))) {}

  // The exponent of 2 of a score less that of `base`: first the difference, so that large scores
  // are exact too.
  static Vec<Real> base(Vec<Real> top) { return top == -kInf<Real> ? Vec<Real>{} : top; }
  Vec<Real> exponent(Vec<Real> score, Vec<Real> base) const { return (score - base) * factor; }
};

// The entries (i, j0 + j) of a mask or a bias for the rows of one vector and `n` keys: t[j][i].
template <class R>
static void entries(const Array& x, const char* const* rows, int count, int64_t j0, int n,
                    Vec<R>* t) {
  constexpr int lanes = Simd<R>::lanes;
  const int64_t step = x.strides[3], size = bytes_of(x.type);
  bool same = true;
  for (int i = 1; i < count; ++i) same &= rows[i] == rows[0];
  if (same) {
    for (int j = 0; j < n; ++j) t[j] = broadcast(number<R>(rows[0] + (j0 + j) * step, x.type));
    return;
  }
  for (int i = 0; i < lanes; ++i) {
    t[i] = Vec<R>{};
    if (i >= count) continue;
    const char* p = rows[i] + j0 * step;
    if (step == size && n == lanes) {
      switch (x.type) {
        case Type::float32:
          t[i] = numbers<R, Type::float32>(p);
          continue;
        case Type::float64:
          t[i] = numbers<R, Type::float64>(p);
          continue;
        case Type::bfloat16:
          t[i] = numbers<R, Type::bfloat16>(p);
          continue;
        case Type::float16:
          t[i] = numbers<R, Type::float16>(p);
          continue;
        default:
          t[i] = __builtin_convertvector(read<typename Simd<R>::Byte>(p), Vec<R>);
          continue;
      }
    }
    for (int j = 0; j < n; ++j) t[i][j] = number<R>(p + j * step, x.type);
  }
  transpose(*(Vec<R>(*)[lanes])t);
}

// Applies scale and softcap to the scores of vector v. `slope`, where wanted, is the derivative of
// the softcap.
template <class E>
static void scale_scores(const Problem& p, const Reach& reach, int v, typename E::Real* scores,
                         typename E::Real* slope) {
  typedef typename E::Real Real;
  const Real scale = Real(p.scale), cap = Real(p.softcap);
  for (int j = reach.low[v]; j < reach.high[v]; ++j) {
    Vec<Real> s = vector_at<E>(scores, j, v) * scale;
    if (p.softcap != 0) {
      s = tanh(s / cap);
      if (slope) vector_at<E>(slope, j, v) = Real(1) - s * s;
      s *= cap;
    }
    vector_at<E>(scores, j, v) = s;
  }
}

// Makes `both(score, entry)` of the scores of vector v and the entries of a mask or a bias.
template <class E, class Both>
static void apply_entries(const Array& x, const Rows<E>& rows, const Reach& reach, int v,
                          int64_t j0, typename E::Real* scores, Both both) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int count = rows.count - v * n < n ? rows.count - v * n : n, high = reach.high[v];
  const char* row[n];
  Vec<Real> tile[n];
  for (int i = 0; i < count; ++i)
    row[i] = x.at(rows.b, rows.head[v * n + i], rows.index[v * n + i]);
  for (int j = reach.low[v]; j < high; j += n) {
    const int m = high - j < n ? high - j : n;
    entries<Real>(x, row, count, j0 + j, m, tile);
    for (int i = 0; i < m; ++i) {
      Vec<Real>& score = vector_at<E>(scores, j + i, v);
      score = both(score, tile[i]);
    }
  }
}

// Puts -inf where the rows of vector v do not see the key, before mask and ids.
template <class E>
static void hide_outside(const Rows<E>& rows, const Reach& reach, int v, int64_t j0, int keys,
                         typename E::Real* scores) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int low = reach.low[v], high = reach.high[v];
  const int count = rows.count - v * n < n ? rows.count - v * n : n;
  Int<Real> first, last;
  int seen_low = low, seen_high = high;  // by every row
  for (int i = 0; i < n; ++i) {
    const auto inside = [&](int64_t j) { return int(j < 0 ? 0 : j > keys ? keys : j); };
    first[i] = inside(rows.first[v * n + i] - j0);
    last[i] = inside(rows.last[v * n + i] - j0);
    if (i < count && first[i] > seen_low) seen_low = int(first[i]);
    if (i < count && last[i] < seen_high) seen_high = int(last[i]);
  }
  const auto hide = [&](int from, int to) {
    for (int j = from; j < to; ++j) {
      const Int<Real> key = Int<Real>{} + j;
      Vec<Real>& score = vector_at<E>(scores, j, v);
      score = ((key >= first) & (key < last)) ? score : Vec<Real>{} - kInf<Real>;
    }
  };
  hide(low, seen_low < high ? seen_low : high);
  hide(seen_high > seen_low ? seen_high : seen_low, high);
}

// Applies scale, softcap and bias where they are not left for the exponential, and puts -inf where
// nothing is seen. `slope`, where wanted, is the derivative of the softcap.
template <class E>
static void finish_scores(const Problem& p, const Rows<E>& rows, const Reach& reach,
                          const Scaling<E>& scaling, int64_t j0, int keys, typename E::Real* scores,
                          typename E::Real* slope) {
  typedef Vec<typename E::Real> V;
  constexpr int n = E::lanes;
  const V hidden = V{} - kInf<typename E::Real>;
  for (int v = 0; v < rows.vectors; ++v) {
    if (!scaling.raw) scale_scores<E>(p, reach, v, scores, slope);
    if (p.bias)
      apply_entries<E>(p.bias, rows, reach, v, j0, scores, [](V s, V bias) { return s + bias; });
    if (!reach.plain) hide_outside<E>(rows, reach, v, j0, keys, scores);
    if (p.mask)
      apply_entries<E>(p.mask, rows, reach, v, j0, scores,
                       [&](V s, V seen) { return seen != 0 ? s : hidden; });
  }
  if (!p.key_ids) return;
  const int64_t* ids = p.key_ids + rows.b * p.Lk + j0;
  for (int v = 0; v < rows.vectors; ++v)
    for (int i = v * n; i < rows.count && i < (v + 1) * n; ++i) {
      const int64_t id = p.query_ids[rows.b * p.Lq + rows.index[i]];
      for (int j = reach.low[v]; j < reach.high[v]; ++j)
        if (ids[j] != id) scores[j * E::rows + i] = hidden[0];
    }
}

}  // namespace regard::REGARD_NAMESPACE
