// The scores of a tile of queries and keys: S^T = K Q^T with the queries in the lanes, or, for few
// queries, Q K^T with the numbers of a key in the lanes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "mathematics-inl.h"
#include "rows-inl.h"

namespace regard::REGARD_NAMESPACE {

// Longer sums are blocked: the rounding error grows with the longest sum.
constexpr int64_t kTerms = 128;

// Whether keys may be packed in panels: where register blocks have as many rows of numbers.
#ifdef REGARD_FMA
template <class E>
constexpr bool kHasKeyPanels = E::pack == 1 && !E::tiles && kRows == kPanelRows;
#else
template <class E>
constexpr bool kHasKeyPanels = false;  // portable is to be small
#endif

// A span of up to `terms` words from word w, of keys in panels; see multiply_span().
template <class E>
static void multiply_panels(const TileMask::Span& span, const typename E::Word* x, const void* keys,
                            int64_t w, int64_t terms, typename E::Real* to,
                            Prefetcher* prefetcher) {
  typedef typename E::Op Op;
  typedef typename E::Word Word;
  const int64_t first = span.from * E::lanes;
  for (int64_t j = span.begin, next; j < span.end; j = next) {
    const int64_t row = j % kPanelRows;
    next = j - row + kPanelRows < span.end ? j - row + kPanelRows : span.end;
    (w ? multiply<Op, true, Epilogue::add>
       : multiply<Op, true, Epilogue::set>)(span.to - span.from, x + w * E::rows + first, E::rows,
                                            (const Word*)keys + kKeys * w + (j - row) * terms + row,
                                            kPanelRows * sizeof(Word), terms, next - j,
                                            to + j * E::rows + first, E::rows, nullptr, prefetcher);
  }
}

// to[key][row]: the products of the keys of a span with its vectors of x, [words(D)][rows].
template <class E>
static void multiply_span(const TileMask::Span& span, const typename E::Word* x, const Matrix& keys,
                          int64_t D, typename E::Real* to, Prefetcher* prefetcher = nullptr) {
  typedef typename E::Op Op;
  const int vectors = span.to - span.from, first = span.from * E::lanes;
  for (int64_t w = 0; w == 0 || w < E::words(D); w += kTerms) {  // D = 0: the sum is 0
    const int64_t terms = E::words(D) - w < kTerms ? E::words(D) - w : kTerms;
    if constexpr (kHasKeyPanels<E>)
      if (keys.stride == kInPanels) {
        multiply_panels<E>(span, x, keys.data, w, terms, to, prefetcher);
        continue;
      }
    const char* from =
        (const char*)keys.data + span.begin * keys.stride + w * int64_t(sizeof(typename E::Word));
    (w ? multiply<Op, false, Epilogue::add>
       : multiply<Op, false, Epilogue::set>)(vectors, x + w * E::rows + first, E::rows, from,
                                             keys.stride, terms, span.end - span.begin,
                                             to + span.begin * E::rows + first, E::rows, nullptr,
                                             prefetcher);
  }
}

#ifdef REGARD_TILES
// Rows of D numbers as words, and [row_words(D)][rows], as operands of a product by tiles.
template <class E>
static TileMatrix tile_rows(const Matrix& rows, int64_t D) {
  const int64_t part = E::words(D) * int64_t(sizeof(int32_t));
  return {(const char*)rows.data, rows.stride, kTileRows * rows.stride, kTileBytes, part};
}
template <class E>
static TileVectors tile_columns(const int32_t* x, int64_t D) {
  const int64_t words = E::words(D);
  return {x, E::rows, words * E::rows, words / kTileRows, E::parts * E::parts};
}

// The product of two rows of words in two parts, whose words lie `x_step` and `y_step` apart.
static inline float product_of_parts(const int32_t* x, int64_t x_step, const int32_t* y,
                                     int64_t y_step, int64_t words) {
  const auto number = [&](const int32_t* p, int64_t step, int64_t w, int shift) {
    const auto part = [&](int64_t word) {
      return bits_as<float>(uint32_t(p[word * step]) >> shift << 16);
    };
    return part(w) + part(words + w);
  };
  float sum = 0;
  for (int64_t w = 0; w < words; ++w)
    for (int shift = 0; shift <= 16; shift += 16)
      sum += number(x, x_step, w, shift) * number(y, y_step, w, shift);
  return sum;
}

// Products of keys or queries that are not finite, of which one part may be multiplied with 0.
template <class E>
static void multiply_infinite(const Matrix& keys, int count, const int32_t* x, int64_t D, int from,
                              int end, float* to) {
  F found = {};
  for (int j = 0; j < count; ++j)
    for (int v = from; v < end; ++v) found += vector_at<E>(to, j, v) - vector_at<E>(to, j, v);
  if (sum_lanes<float>(found) == 0) return;
  for (int j = 0; j < count; ++j)
    for (int i = from * E::lanes; i < end * E::lanes; ++i) {
      float& product = to[j * E::rows + i];
      if (product - product != 0)
        product = product_of_parts((const int32_t*)((const char*)keys.data + j * keys.stride), 1,
                                   x + i, E::rows, E::words(D));
    }
}

// to[key][row]: the products of a tile of keys, packed as rows, with the vectors of x to which any
// of 32 keys is visible, by tiles.
template <class E>
static void multiply_visible(const Rows<E>& rows, const TileMask& tile_mask, const int32_t* x,
                             const Matrix& keys, int count, int64_t D, float* to) {
  for (int j = 0; j < count; j += 2 * kTileRows) {
    int from = rows.vectors, end = 0;
    for (int v = 0; v < rows.vectors; ++v)
      if (tile_mask.low[v] < j + 2 * kTileRows && tile_mask.high[v] > j) {
        if (v < from) from = v;
        end = v + 1;
      }
    const char* const first = (const char*)keys.data + j * keys.stride;
    const TileMatrix a = tile_rows<E>({first, keys.stride}, D);
    const int64_t some = count - j < 2 * kTileRows ? count - j : 2 * kTileRows;
    if (from < end)
      multiply_by_tiles<false>(a, some, tile_columns<E>(x + from * E::lanes, D), end - from,
                               to + j * E::rows + from * E::lanes, E::rows);
    if (E::parts > 1 && from < end)
      multiply_infinite<E>({first, keys.stride}, int(some), x, D, from, end, to + j * E::rows);
  }
}
#endif

// to[key][row]: the products of a tile of keys, packed as rows, with the vectors of x, [words(D)]
// [rows], to which they are visible.
template <class E>
static void multiply_rows([[maybe_unused]] const Rows<E>& rows, const TileMask& tile_mask,
                          const typename E::Word* x, const Matrix& keys, [[maybe_unused]] int count,
                          int64_t D, typename E::Real* to, Prefetcher* prefetcher = nullptr) {
#ifdef REGARD_TILES
  if constexpr (E::tiles) return multiply_visible<E>(rows, tile_mask, x, keys, count, D, to);
#endif
  for (int c = 0; c < tile_mask.spans; ++c)
    multiply_span<E>(tile_mask.span[c], x, keys, D, to, prefetcher);
}

// Few queries are multiplied with the numbers of a key in the lanes.
constexpr int64_t kDecodeRows = kFewRows;  // above, queries in the lanes are faster
constexpr int kDecodeKeys = 512;           // of a tile, or fewer where they are long
constexpr int kStretches = 4;              // of a tile's keys, read side by side
constexpr int64_t kStretchAhead = 2048;    // prefetch distance in each, in bytes

// Whether a call, or the call of which this is a part, is decoding: so few queries that the numbers
// of a key go into the lanes. This sets the order in which the products of a score are added, so
// every pass must decide alike.
template <class E>
static bool few_queries(const Problem& p) {
  constexpr int64_t most = E::rows < kDecodeRows ? E::rows : kDecodeRows;
  return p.group_rows <= most;
}

// Words of a query that is stored row-major, padded to whole loads.
template <class E>
static int64_t padded_words(const Problem& p) {
  constexpr int64_t n = E::loaded * E::lanes;
  return (E::words(p.D) + n - 1) / n * n;
}

template <class E>
static int64_t query_words(const Problem& p) {
  if (!few_queries<E>(p)) return E::row_words(p.D) * E::rows;
  return by_stored<typename E::OfFew>(
      p.type, [&]<class Few>(Few) { return kDecodeRows * padded_words<Few>(p); });
}

// The queries of a tile of a call with few.
template <class E>
static typename E::OfFew::Word* few_rows(const Rows<E>& rows) {
  return (typename E::OfFew::Word*)rows.q;
}

// transpose_rows and as_rows of rows that are stored as the type of a problem.
template <class E>
static void transpose_stored(const Problem& p, const char* const* rows, int count, int64_t D,
                             typename E::Word* out) {
  by_stored<E>(p.type, [&]<class S>(S) { transpose_rows<S>(rows, count, D, out); });
}
template <class E>
static Matrix stored_rows(const Problem& p, const char* rows, int64_t stride, int64_t n, int64_t D,
                          typename E::Word* memory) {
  return by_stored<E>(p.type, [&]<class S>(S) { return as_rows<S>(rows, stride, n, D, memory); });
}

// Calls `write` with the element of what is written: of a stored type, or as it is summed.
template <class E, class Write>
static void by_written(Type type, Write write) {
  if (type == real_type<typename E::Real>)
    write(Element<real_type<typename E::Real>>());
  else
    by_stored<E>(type, write);
}

// Packs the queries of a tile into rows.q: [row_words(D)][rows], or [kDecodeRows][padded_words].
template <class E>
static void load_queries(const Problem& p, const Rows<E>& rows) {
  if (!few_queries<E>(p)) return transpose_stored<E>(p, rows.query, rows.count, p.D, rows.q);
  by_stored<typename E::OfFew>(p.type, [&]<class Few>(Few) {
    typedef typename Few::Word Word;
    const int64_t width = padded_words<Few>(p);
    std::memset((void*)rows.q, 0, size_t(kDecodeRows * width) * sizeof(Word));
    for (int r = 0; r < rows.count; ++r)
      for (int64_t w = 0; w < Few::words(p.D); w += Few::loaded * Few::lanes) {
        const auto x =
            load_words<Few>(rows.query[r] + w * Few::pack * int64_t(sizeof(typename Few::Bits)),
                            p.D - w * Few::pack);
        for (int i = 0; i < Few::loaded; ++i)
          store<Word>(few_rows(rows) + r * width + w + i * Few::lanes, words_of<Few>(x, i));
      }
  });
}

// Software prefetch of the cache lines of some bytes. Into L2: L1 has too few line fill buffers to
// saturate the memory bandwidth.
static inline void prefetch(const char* p, int64_t bytes) {
  for (int64_t x = 0; x < bytes; x += 64) __builtin_prefetch(p + x, 0, 2);
}

// The dot products of R rows of queries with `keys` keys: scores[row][kDecodeKeys]. A score has the
// same bits for any R. Keys are taken from several stretches side by side, each in order, which
// hardware prefetchers follow: 1.7 times as many float32 a second as four neighbouring rows.
template <class E, int R>
__attribute__((noinline)) static void dot_keys(const Problem& p, const typename E::Word* queries,
                                               const char* key, int keys,
                                               typename E::Real* scores) {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  constexpr int n = E::lanes, K = n / R, S = K < kStretches ? K : kStretches, T = K / S;
  static_assert(kDecodeKeys % K == 0);
  const int64_t stride = p.key.strides[2], bytes = E::pack * int64_t(sizeof(typename E::Bits));
  constexpr int64_t step = n * E::loaded;
  const int64_t whole = p.D / (step * E::pack) * step, width = padded_words<E>(p);
  const int64_t ahead = (kStretchAhead / (stride > 0 ? stride : 1) + 1) * stride;
  const int stretch = (keys + K - 1) / K * T;
  for (int j = 0; j < stretch; j += T) {
    const char* row[K];
    for (int i = 0; i < K; ++i) {
      const int at = i / T * stretch + j + i % T;
      row[i] = key + (at < keys ? at : keys - 1) * stride;
    }
    Vec<Real> sum[n] = {};
    const auto add = [&](int64_t w, int64_t count) {
      decltype(load_words<E>(key, count)) x[K];
      for (int i = 0; i < K; ++i) {
        __builtin_prefetch(row[i] + ahead + w * bytes);
        x[i] = load_words<E>(row[i] + w * bytes, count);
      }
      for (int v = 0; v < E::loaded; ++v) {
        Vec<Word> q[R];
        for (int r = 0; r < R; ++r)
          q[r] = in_register(*(const Vec<Word>*)(queries + r * width + w + v * n));
        for (int i = 0; i < K; ++i) {
          const Vec<Word> k = words_of<E>(x[i], v);
          for (int r = 0; r < R; ++r) sum[r * K + i] = E::Op::add(sum[r * K + i], q[r], k);
        }
      }
    };
    for (int64_t w = 0; w < whole; w += step) add(w, step * E::pack);
    if (whole < width) add(whole, p.D - whole * E::pack);
    const Vec<Real> all = fold_each(sum, [](Vec<Real> x, Vec<Real> y) { return x + y; });
    for (int r = 0; r < R; ++r)  // past the last key too, where there is room
      for (int i = 0; i < S; ++i)
        __builtin_memcpy(scores + r * kDecodeKeys + i * stretch + j,
                         (const Real*)&all + r * K + i * T, T * sizeof(Real));
  }
}

// Calls `work(r, R)` for `count` rows, in groups of R = 4, 2 or 1.
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

// scores[key][row]: the products of a tile of keys and queries, where there are `few_queries`.
template <class E>
static void multiply_few(const Problem& p, const Rows<E>& rows, const char* key, int keys,
                         typename E::Real* scores) {
  typedef typename E::Real Real;
  const int width = rows.vectors * E::lanes;
  for (int j = 0; j < keys; ++j)
    std::memset((void*)(scores + j * E::rows), 0, size_t(width) * sizeof(Real));
  by_rows<E>(rows.count, [&]<int R>(int r0, std::integral_constant<int, R>) {
    alignas(64) Real products[R * kDecodeKeys];
    by_stored<typename E::OfFew>(p.type, [&]<class Few>(Few) {
      dot_keys<Few, R>(p, few_rows(rows) + r0 * padded_words<Few>(p), key, keys, products);
    });
    for (int r = 0; r < R && r0 + r < rows.count; ++r)
      for (int j = 0; j < keys; ++j) scores[j * E::rows + r0 + r] = products[r * kDecodeKeys + j];
  });
}

// Up to so many rows of a tile leave most lanes empty: the keys go into the lanes instead.
constexpr int kLoneRows = 4;

// Words of the memory of multiply_lone: keys as [words(D)][rows], and their products.
template <class E>
static int64_t lone_words(const Problem& p) {
  return (E::words(p.D) + kLoneRows) * E::rows;
}

// scores[key][row]: the products of the keys from j0 on and of up to kLoneRows queries, with the
// bits of multiply_keys: their terms are added in the same order.
template <class E>
static void multiply_lone(const Problem& p, const Rows<E>& rows, int64_t kv, int64_t j0, int keys,
                          typename E::Word* memory, typename E::Real* scores) {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  constexpr int64_t stride = E::rows * int64_t(sizeof(Word));
  const int64_t words = E::words(p.D);
  Real* const products = (Real*)(memory + words * E::rows);
  for (int from = 0; from < keys; from += E::rows) {
    const int some = keys - from < E::rows ? keys - from : E::rows;
    const char* key[E::rows];
    for (int i = 0; i < some; ++i) key[i] = p.key.at(rows.b, kv, j0 + from + i);
    transpose_stored<E>(p, key, some, p.D, memory);
    for (int64_t w = 0; w == 0 || w < words; w += kTerms)
      (w ? multiply<typename E::Op, true, Epilogue::add>
         : multiply<typename E::Op, true, Epilogue::set>)((some + E::lanes - 1) / E::lanes,
                                                          memory + w * E::rows, E::rows,
                                                          rows.q + w * E::rows, stride,
                                                          words - w < kTerms ? words - w : kTerms,
                                                          rows.count, products, E::rows, nullptr,
                                                          nullptr);
    for (int i = 0; i < some; ++i) {
      Vec<Real>& score = vector_at<E>(scores, from + i, 0);
      score = Vec<Real>{};
      for (int r = 0; r < rows.count; ++r) score[r] = products[r * E::rows + i];
    }
  }
}

// scores[key][row]: the products of the keys from j0 on, packed as `k`, and the queries to which
// they are visible.
template <class E>
static void multiply_keys(const Problem& p, const Rows<E>& rows, const TileMask& tile_mask,
                          int64_t kv, int64_t j0, int keys, const Matrix& k,
                          typename E::Real* scores, Prefetcher* prefetcher = nullptr) {
  if (few_queries<E>(p)) return multiply_few(p, rows, p.key.at(rows.b, kv, j0), keys, scores);
  multiply_rows<E>(rows, tile_mask, rows.q, k, keys, p.D, scores, prefetcher);
}

// From products to exponents. Where it is `raw`, scores are the products and `factor` includes the
// scale; else finish_scores computes them in place.
template <class E>
struct Scaling {
  typedef typename E::Real Real;
  bool raw;
  Real factor;  // from a score to the exponent of 2

  explicit Scaling(const Problem& p) : raw(raw_scores(p)), factor(Real(factor_of(p))) {}

  // The exponent of 2 of a score, relative to `base`. The difference comes first: it is exact for
  // large scores too.
  static Vec<Real> base(Vec<Real> maximum) {
    return maximum == -kInf<Real> ? Vec<Real>{} : maximum;
  }
  Vec<Real> exponent(Vec<Real> score, Vec<Real> base) const { return (score - base) * factor; }
};

// Weights of exponents, in the lanes of a vector of queries: 2^x times a normaliser. Those of the
// second pass of bfloat16 by tiles are to 1e-7: beside tiles one unit less multiplies.
template <class E>
class Exponential {
 public:
  typedef typename E::Real Real;
  static constexpr bool has_few_terms = E::tiles && E::rounds;
  // `exact`: as everywhere else, for weights that are given out one by one, or may be NaN.
  explicit Exponential(Vec<Real> normaliser, bool exact) : normaliser_(normaliser), exact_(exact) {
#ifdef REGARD_TILES
    if constexpr (has_few_terms) {
      for (int k = 0; k < kFew; ++k) terms_[k] = normaliser * kFewTerms[k];
      lanes_ = _mm512_cmp_ps_mask((__m512)normaliser, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    }
#endif
  }

  // Lanes without normaliser have weights of 0. An infinite x becomes one by which 0 may be
  // multiplied, where it is `clears`.
  template <bool clears, int n>
  REGARD_INLINE void weights(Vec<Real> (&x)[n], Vec<Real> (&w)[n]) const {
#ifdef REGARD_TILES
    if constexpr (has_few_terms)
      if (!exact_) return exp2_by<clears>(terms_, lanes_, x, w);
#endif
    for (int i = 0; i < n; ++i) w[i] = x[i];
    exp2_each(w);
    for (int i = 0; i < n; ++i) {
      w[i] = normaliser_ != 0 ? w[i] * normaliser_ : Vec<Real>{};
      if (clears) x[i] = larger(Vec<Real>{} - 1e4f, x[i]);
    }
  }

 private:
  const Vec<Real> normaliser_;
  const bool exact_;
#ifdef REGARD_TILES
  std::conditional_t<has_few_terms, F[kFew], char> terms_;
  uint16_t lanes_;
#endif
};

// The same without a normaliser.
template <class E, bool clears, int n>
REGARD_INLINE static void exponentials(Vec<typename E::Real> (&x)[n],
                                       Vec<typename E::Real> (&w)[n]) {
#ifdef REGARD_TILES
  if constexpr (E::tiles && E::rounds) {
    F terms[kFew];
    for (int k = 0; k < kFew; ++k) terms[k] = F{} + kFewTerms[k];
    return exp2_by<clears>(terms, __mmask16(~0), x, w);
  }
#endif
  for (int i = 0; i < n; ++i) w[i] = x[i];
  exp2_each(w);
  for (int i = 0; clears && i < n; ++i) x[i] = larger(Vec<typename E::Real>{} - 1e4f, x[i]);
}

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

// The cap: what options make of scaled scores before the bias. `slope`, optional, takes its
// derivative, for NaN 0: a score that is hidden may be NaN, and its weight of 0 times NaN is none.
template <class Real>
static inline Vec<Real> cap_scores(const Problem& p, Vec<Real> s, Vec<Real>* slope) {
  if (p.softcap == 0) return s;
  const Real cap = Real(p.softcap);
  s = tanh(s / cap);
  if (slope) *slope = s == s ? Real(1) - s * s : Vec<Real>{};
  return s * cap;
}

// Applies scale and cap to the scores of vector v. `slope`, optional, takes the derivative of the
// cap.
template <class E>
static void scale_scores(const Problem& p, const TileMask& tile_mask, int v,
                         typename E::Real* scores, typename E::Real* slope) {
  typedef typename E::Real Real;
  const Real scale = Real(p.scale);
  for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j) {
    Vec<Real>& s = vector_at<E>(scores, j, v);
    s = cap_scores<Real>(p, s * scale, slope ? &vector_at<E>(slope, j, v) : nullptr);
  }
}

// Applies score = both(score, entry) to vector v and the entries of a mask or a bias.
template <class E, class Both>
static void apply_entries(const Array& x, const Rows<E>& rows, const TileMask& tile_mask, int v,
                          int64_t j0, typename E::Real* scores, Both both) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int count = rows.count - v * n < n ? rows.count - v * n : n, high = tile_mask.high[v];
  const char* row[n];
  Vec<Real> tile[n];
  for (int i = 0; i < count; ++i)
    row[i] = x.at(rows.b, rows.head[v * n + i], rows.index[v * n + i]);
  for (int j = tile_mask.low[v]; j < high; j += n) {
    const int m = high - j < n ? high - j : n;
    entries<Real>(x, row, count, j0 + j, m, tile);
    for (int i = 0; i < m; ++i) {
      Vec<Real>& score = vector_at<E>(scores, j + i, v);
      score = both(score, tile[i]);
    }
  }
}

// Masks the keys outside the intervals of the rows of vector v.
template <class E>
static void mask_outside(const Rows<E>& rows, const TileMask& tile_mask, int v, int64_t j0,
                         int keys, typename E::Real* scores, Vec<typename E::Real> masked) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int low = tile_mask.low[v], high = tile_mask.high[v];
  const auto inside = [&](int64_t j) { return int(j < 0 ? 0 : j > keys ? keys : j); };
  const int seen_low = inside(rows.seen_low[v] - j0), seen_high = inside(rows.seen_high[v] - j0);
  if (seen_low <= low && seen_high >= high) return;
  typedef typename Simd<Real>::Int64 Wide;
  const auto ends = [&](const int64_t* x) {
    Wide end;
    __builtin_memcpy(&end, x + v * n, sizeof end);
    end -= j0;
    end = end < 0 ? Wide{} : end;
    return __builtin_convertvector(end > keys ? Wide{} + keys : end, Int<Real>);
  };
  const Int<Real> first = ends(rows.first), last = ends(rows.last);
  const auto mask_range = [&](int from, int to) {
    for (int j = from; j < to; ++j) {
      const Int<Real> key = Int<Real>{} + j;
      Vec<Real>& score = vector_at<E>(scores, j, v);
      score = ((key >= first) & (key < last)) ? score : masked;
    }
  };
  const int from = seen_low < low ? low : seen_low < high ? seen_low : high;
  mask_range(low, from);
  mask_range(seen_high > from ? seen_high : from, high);
}

// Whether the scores of a tile are its products: every key is visible, and nothing is added.
template <class E>
static bool is_unmasked(const Problem& p, const Rows<E>& rows, const TileMask& tile_mask,
                        int64_t j0, int keys) {
  return tile_mask.fully_visible && raw_scores(p) && !p.mask && !p.key_ids &&
         !edits_meet(p, rows, j0, keys);
}

// Adds an edit to the scores of the rows of vector v, or masks them.
template <class E>
static void apply_edit(const Problem& p, const Edit& edit, const Rows<E>& rows,
                       const TileMask& tile_mask, int v, int64_t j0, typename E::Real* scores,
                       Vec<typename E::Real> masked) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int64_t low = j0 + tile_mask.low[v], high = j0 + tile_mask.high[v];
  const int from = int((edit.key[0] > low ? edit.key[0] : low) - j0);
  const int to = int((edit.key[1] < high ? edit.key[1] : high) - j0);
  Int<Real> of_edit = {};
  bool any = false;
  for (int i = 0; i < n && v * n + i < rows.count; ++i) {
    const bool its = is_of(edit, rows.head[v * n + i], rows.index[v * n + i]);
    of_edit[i] = its ? -1 : 0;
    any |= its;
  }
  if (!any) return;
  const bool cuts = is_cut(edit);
  const Vec<Real> added =
      of_edit != 0 ? broadcast(Real(cuts ? 0 : added_score(p, edit))) : Vec<Real>{};
  for (int j = from; j < to; ++j) {
    Vec<Real>& score = vector_at<E>(scores, j, v);
    score = cuts ? (of_edit != 0 ? masked : score) : score + added;
  }
}

// Applies the edits of a tile.
template <class E>
static void apply_edits(const Problem& p, const Rows<E>& rows, const TileMask& tile_mask,
                        int64_t j0, int keys, typename E::Real* scores,
                        Vec<typename E::Real> masked) {
  for (int64_t e = 0; e < p.edit_count; ++e) {
    if (!meets(p.edits[e], rows, j0, keys, false)) continue;
    for (int v = 0; v < rows.vectors; ++v)
      apply_edit<E>(p, p.edits[e], rows, tile_mask, v, j0, scores, masked);
  }
}

// Applies scale, cap and bias where scores are not `raw`, and edits, and masks: with -inf, unless
// another number is given. `slope`, optional, takes the derivative of the cap.
template <class E>
static void finish_scores(const Problem& p, const Rows<E>& rows, const TileMask& tile_mask,
                          const Scaling<E>& scaling, int64_t j0, int keys, typename E::Real* scores,
                          typename E::Real* slope,
                          Vec<typename E::Real> masked = Vec<typename E::Real>{} -
                                                         kInf<typename E::Real>) {
  typedef Vec<typename E::Real> V;
  constexpr int n = E::lanes;
  for (int v = 0; v < rows.vectors; ++v) {
    if (!scaling.raw) scale_scores<E>(p, tile_mask, v, scores, slope);
    if (p.bias)
      apply_entries<E>(p.bias, rows, tile_mask, v, j0, scores,
                       [](V s, V bias) { return s + bias; });
  }
  apply_edits<E>(p, rows, tile_mask, j0, keys, scores, masked);
  for (int v = 0; v < rows.vectors; ++v) {
    if (!tile_mask.fully_visible) mask_outside<E>(rows, tile_mask, v, j0, keys, scores, masked);
    if (p.mask)
      apply_entries<E>(p.mask, rows, tile_mask, v, j0, scores,
                       [&](V s, V seen) { return seen != 0 ? s : masked; });
  }
  // What is hidden from the rows, and may be NaN, is hidden from unused lanes: sums over a vector's
  // rows have them too, times 0.
  const int last = rows.vectors - 1, used = rows.count - last * n;
  for (int j = tile_mask.low[last]; used < n && j < tile_mask.high[last]; ++j)
    for (int i = used; i < n; ++i) scores[j * E::rows + last * n + i] = masked[0];
  if (!p.key_ids) return;
  const int64_t* ids = p.key_ids + rows.b * p.Lk + j0;
  for (int v = 0; v < rows.vectors; ++v)
    for (int i = v * n; i < rows.count && i < (v + 1) * n; ++i) {
      const int64_t id = p.query_ids[rows.b * p.Lq + rows.index[i]];
      for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j)
        if (ids[j] != id) scores[j * E::rows + i] = masked[0];
    }
}

}  // namespace regard::REGARD_NAMESPACE
