// The products of a tile of queries and keys: S^T = K Q^T with the queries in the lanes, or, for
// few queries, Q K^T with the numbers of a key in the lanes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Packed keys of a head that are kept take at most so many bytes.
constexpr int64_t kKeptKeyBytes = int64_t{4} << 20;

// Keys of a head as rows of words: where they lie, or packed, in the order of their first use.
template <class E>
class KeyRows {
  typedef typename E::Word Word;

 public:
  // Room for a tile of them; or for all, which `keeps` what several tiles of queries use.
  KeyRows(int64_t words, bool keeps, Scratch& scratch)
      : words_(scratch.take<Word>(words)), keeps_(keeps) {}
  KeyRows(const Problem& p, bool keeps, Scratch& scratch)
      : KeyRows((keeps ? p.Lk : kKeys) * E::row_words(p.D), keeps, scratch) {}

  // Whether keys must be packed, and there is room for all of them.
  static bool can_keep(const Problem& p) {
    const bool in_place = by_stored<E>(p.type, [&]<class S>(S) { return reads_in_place<S>(p.D); });
    return !in_place && p.Lk * E::row_words(p.D) * int64_t(sizeof(Word)) <= kKeptKeyBytes;
  }

  // Those from j0 on, always of the same head.
  Matrix at(const Problem& p, int64_t b, int64_t kv, int64_t j0, int keys) {
    const int64_t stride = p.key.strides[2], row = E::row_words(p.D), end = j0 + keys;
    if (!keeps_) return stored_rows<E>(p, p.key.at(b, kv, j0), stride, keys, p.D, words_);
    if (j0 < low_ || j0 > high_) low_ = high_ = j0;
    if (high_ < end) {
      stored_rows<E>(p, p.key.at(b, kv, high_), stride, end - high_, p.D, words_ + high_ * row);
      high_ = end;
    }
    return {(const char*)(words_ + j0 * row), row * int64_t(sizeof(Word))};
  }

 private:
  Word* words_;                 // [keys][row_words(D)]
  int64_t low_ = 0, high_ = 0;  // the keys that are packed, where all have room
  bool keeps_;
};

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

}  // namespace regard::REGARD_NAMESPACE
