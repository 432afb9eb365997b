// A tile of queries, and which keys are visible to it: every pass begins with it.
//
// Queries are in the SIMD lanes. Rows of key and value are read in place, one number at a time, and
// broadcast; only the tile of queries is transposed. Maximum, sum, exp and masks are lane-wise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "conversions-inl.h"
#include "edits.h"
#include "multiply-inl.h"
#include "tiles-inl.h"

namespace regard::REGARD_NAMESPACE {

constexpr int kKeys = 128;      // of a tile
constexpr int kMeanwhile = 16;  // keys of a vector, after which other work is done meanwhile
constexpr double kLog2e = 1.44269504088896340736, kLn2 = 0.693147180559945309417;

template <class R>
constexpr R kInf = std::numeric_limits<R>::infinity();

// What multiplies numbers: vectors, or tiles. Of these, the forward pass takes fewer queries at a
// time: what a tile is written to stays in L1.
enum class By { vectors, tiles, tiles_forward };

// A stored type, and how it is packed and multiplied.
template <Type t, By by = By::vectors>
struct Element {
  static constexpr Type type = t;
  typedef typename Stored<t>::Bits Bits;
  typedef typename Stored<t>::Real Real;
  static constexpr bool tiles = by != By::vectors;
#ifdef REGARD_PAIRS
  typedef std::conditional_t<t == Type::bfloat16 || tiles, Pairs, Plain<Real>> Op;
#else
  typedef Plain<Real> Op;
#endif
  typedef Element<t, tiles ? By::tiles_forward : by> OfForward;
  typedef Element<t> OfFew;  // of calls with few queries
  typedef typename Op::Word Word;
  // A number is the sum of so many of bfloat16: of float16 exactly, of weights to 16 bits.
  static constexpr int parts = tiles && t == Type::float16 ? 2 : 1;
  static constexpr int pack = Op::numbers_per_word;
  static constexpr int block = tiles ? 32 : pack;  // numbers in a step of a product
  static constexpr bool direct =                   // words are read in place, without packing
      sizeof(Word) == pack * sizeof(Bits) && parts == 1;
  static constexpr bool rounds = pack > 1 && parts == 1;  // weights, to bfloat16
  static constexpr int lanes = Simd<Real>::lanes;
  // Vectors of words that few queries take from one load: the numbers of even and those of odd
  // index are the halves of bfloat16 pairs, which are two floats by a shift and a mask.
  static constexpr int loaded = t == Type::bfloat16 && pack == 1 ? 2 : 1;
  static constexpr int vectors = by == By::tiles_forward ? 2 : kVectors;
  static constexpr int rows = vectors * lanes;  // of a tile of queries
  static constexpr int keys = kKeys;

  static int64_t words(int64_t numbers) { return (numbers + block - 1) / block * (block / pack); }
  static int64_t row_words(int64_t numbers) { return parts * words(numbers); }  // [parts][words]
};

// Bump allocator over one thread's scratch memory; with base 0 it only measures.
class Scratch {
 public:
  explicit Scratch(char* base) : base_(uintptr_t(base)), at_(base_) {}
  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(at_);
    at_ += (uintptr_t(n) * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  int64_t taken() const { return int64_t(at_ - base_); }
  bool measures() const { return base_ == 0; }

 private:
  uintptr_t base_, at_;
};

#ifdef REGARD_TILES
// A part of floats that are a sum of two numbers of bfloat16 to 16 bits, in the upper halves. The
// second of what is not finite is 0.
template <int part>
static inline U part_of(F x) {
  const U first = (U)x & 0xffff0000u;
  if (part == 0) return first;
  const F rest = x - (F)first;
  return rest == rest ? (U)rest : U{};
}

// A part of up to 32 numbers of float16 as pairs of bfloat16; the others are 0.
template <int part>
static inline I half_words(const char* p, int64_t count) {
  const __m512i halves =
      _mm512_maskz_loadu_epi16(count >= 32 ? ~uint32_t{0} : (uint32_t{1} << count) - 1, p);
  const auto upper = [](__m256i x) {
    return _mm512_cvtepi32_epi16((__m512i)(part_of<part>((F)_mm512_cvtph_ps(x)) >> 16));
  };
  const __m256i high = upper(_mm512_extracti64x4_epi64(halves, 1));
  return (I)_mm512_inserti64x4(_mm512_castsi256_si512(upper(_mm512_castsi512_si256(halves))), high,
                               1);
}
#endif

// A masked load of up to `count` numbers as words, of a part; the others are 0.
template <class E, int part = 0>
static inline Vec<typename E::Word> words_at(const char* p, int64_t count) {
#ifdef REGARD_TILES
  if constexpr (E::parts > 1) {
    return half_words<part>(p, count);
  } else
#endif
#ifdef REGARD_PAIRS
      if constexpr (E::pack > 1) {
    if (count >= 2 * E::lanes) return load<typename E::Word>(p);
    return load_some(p, count);
  } else
#endif
    return numbers<typename E::Real, E::type>(p, count);
}

// One load of up to `count` numbers, of which the others are 0, and vector i of E::loaded of it.
template <class E>
static inline auto load_words(const char* p, int64_t count) {
  if constexpr (E::loaded == 1) {
    return words_at<E>(p, count);
  } else {
    U x = {};
    if (count >= 2 * E::lanes)
      x = read<U>(p);
    else
      __builtin_memcpy(&x, p, size_t(count) * sizeof(uint16_t));
    return x;
  }
}
template <class E>
static inline auto words_of(auto x, int i) {
  if constexpr (E::loaded == 1)
    return x;
  else
    return i ? (F)(x & 0xffff0000u) : (F)(x << 16);
}

// Transposes `count` rows of D numbers into the lanes: out[part][word][row], zeros after `count`.
template <class E, int part = 0>
static void transpose_rows(const char* const* rows, int count, int64_t D, typename E::Word* out) {
  if constexpr (part + 1 < E::parts)
    transpose_rows<E, part + 1>(rows, count, D, out + E::words(D) * E::rows);
  constexpr int n = E::lanes;
  const int64_t words = E::words(D);
  for (int v = 0; v * n < count; ++v)
    for (int64_t w = 0; w < words; w += n) {
      Vec<typename E::Word> t[n];
      const int64_t skip = w * E::pack * int64_t(sizeof(typename E::Bits)), left = D - w * E::pack;
      if ((v + 1) * n <= count && left >= n * E::pack) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) t[i] = words_at<E, part>(rows[v * n + i] + skip, n * E::pack);
        transpose(t);
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) store<typename E::Word>(out + (w + i) * E::rows + v * n, t[i]);
        continue;
      }
      for (int i = 0; i < n; ++i)
        t[i] = v * n + i < count ? words_at<E, part>(rows[v * n + i] + skip, left)
                                 : Vec<typename E::Word>{};
      transpose(t);
      for (int i = 0; i < n && w + i < words; ++i)
        store<typename E::Word>(out + (w + i) * E::rows + v * n, t[i]);
    }
}

// A row-major operand of a matrix product, in place or packed; or packed keys of a tile in panels:
// [kKeys / kPanelRows][terms][kPanelRows] of the first kTerms words, then of the next.
struct Matrix {
  const void* data;
  int64_t stride;  // in bytes; or kInPanels
};
constexpr int64_t kInPanels = -1;

// n rows of D numbers as words, packed into `memory` of n * row_words(D).
template <class E, int part = 0>
static Matrix pack_rows(const char* rows, int64_t stride, int64_t n, int64_t D,
                        typename E::Word* memory) {
  const int64_t row = E::row_words(D);
  if constexpr (part + 1 < E::parts)
    pack_rows<E, part + 1>(rows, stride, n, D, memory + E::words(D));
  const int64_t words = E::words(D), bytes = D * int64_t(sizeof(typename E::Bits));
  constexpr int64_t kAhead = 16;  // rows: hardware prefetchers do not follow from page to page
  for (int64_t r = 0; r < n; ++r) {
    if (stride != bytes && r + kAhead < n)
      for (int64_t x = 0; x < bytes; x += 64)
        __builtin_prefetch(rows + (r + kAhead) * stride + x, 0, 3);
    for (int64_t w = 0; w < words; w += E::lanes) {
      const Vec<typename E::Word> x = words_at<E, part>(
          rows + r * stride + w * E::pack * sizeof(typename E::Bits), D - w * E::pack);
      const int64_t left = words - w < E::lanes ? words - w : E::lanes;
      if (left == E::lanes)
        store<typename E::Word>(memory + r * row + w, x);
      else
        __builtin_memcpy(memory + r * row + w, &x, size_t(left) * sizeof(typename E::Word));
    }
  }
  return {memory, row * int64_t(sizeof(typename E::Word))};
}

// Whether words can be read where the numbers are.
template <class E>
static bool reads_in_place(int64_t D) {
  return E::direct && D % E::block == 0;
}

// n rows of D numbers as words, for sums along a row (scores): in place where they can be read so.
template <class E>
static Matrix as_rows(const char* rows, int64_t stride, int64_t n, int64_t D,
                      typename E::Word* memory) {
  if (reads_in_place<E>(D)) return {rows, stride};
  return pack_rows<E>(rows, stride, n, D, memory);
}

#ifdef REGARD_TILES
// n rows of D numbers, transposed for sums over the rows: [32 rows][parts][D up to 16][16 words], a
// word is one number of two neighbouring rows. Rows past n are 0.
template <class E, int part = 0>
static Matrix transpose_pairs(const char* rows, int64_t stride, int64_t n, int64_t D,
                              typename E::Word* memory) {
  constexpr int pairs = kTileRows;
  const int64_t height = (D + kTileRows - 1) / kTileRows * kTileRows;
  if constexpr (part + 1 < E::parts)
    transpose_pairs<E, part + 1>(rows, stride, n, D, memory + height * pairs);
  for (int64_t r = 0; r < n; r += 2 * pairs)
    for (int64_t d = 0; d < D; d += 2 * E::lanes) {
      I low[pairs], high[pairs];
      const auto numbers_at = [&](int64_t row) {
        return row < n ? words_at<E, part>(rows + row * stride + d * 2, D - d) : I{};
      };
      for (int i = 0; i < pairs; ++i) {
        const I x = numbers_at(r + 2 * i), y = numbers_at(r + 2 * i + 1);
        low[i] = interleave<0>(x, y), high[i] = interleave<1>(x, y);
      }
      transpose(low), transpose(high);
      typename E::Word* const to = memory + (r / 2 * height * E::parts + d * pairs);
      for (int i = 0; i < pairs; ++i) store<int32_t>(to + i * pairs, low[i]);
      for (int i = 0; d + kTileRows < height && i < pairs; ++i)
        store<int32_t>(to + (kTileRows + i) * pairs, high[i]);
    }
  return {memory, kTileBytes};
}
#endif

// Words of the memory of as_pairs.
template <class E>
static int64_t pair_words(int64_t n, int64_t D) {
  return E::row_words(n) * (E::tiles ? (D + E::lanes - 1) / E::lanes * E::lanes : D);
}

// n rows of D numbers for sums over the rows (outputs): pairs of bfloat16 are packed into the VNNI
// layout, a word is one number of two neighbouring rows; for tiles they are transposed.
template <class E>
static Matrix as_pairs(const char* rows, int64_t stride, int64_t n, int64_t D,
                       typename E::Word* memory) {
#ifdef REGARD_TILES
  if constexpr (E::tiles) return transpose_pairs<E>(rows, stride, n, D, memory);
#endif
#ifdef REGARD_PAIRS
  if constexpr (E::pack > 1) {
    for (int64_t r = 0; r < n; r += 2) {
      const char* p = rows + r * stride;
      typename E::Word* to = memory + r / 2 * D;
      int64_t d = 0;
      for (; r + 1 < n && d + 2 * E::lanes <= D; d += 2 * E::lanes) {
        const I x = load<int32_t>(p + d * 2), y = load<int32_t>(p + stride + d * 2);
        store<int32_t>(to + d, interleave<0>(x, y));
        store<int32_t>(to + d + E::lanes, interleave<1>(x, y));
      }
      for (; d < D; ++d) {
        const uint32_t y = r + 1 < n ? read<uint16_t>(p + stride + d * 2) : 0;
        to[d] = int32_t(read<uint16_t>(p + d * 2) | y << 16);
      }
    }
    return {memory, D * 4};
  }
#endif
  return as_rows<E>(rows, stride, n, D, memory);
}

// as_pairs, packed into `memory` in any case.
template <class E>
static Matrix pack_values(const char* rows, int64_t stride, int64_t n, int64_t D,
                          typename E::Word* memory) {
  return E::pack > 1 ? as_pairs<E>(rows, stride, n, D, memory)
                     : pack_rows<E>(rows, stride, n, D, memory);
}

// A tile of queries. With grouped-query attention (GQA) the rows of all query heads that share a
// key head follow one another, so that one read of a key serves them all.
template <class E>
struct Rows {
  typename E::Word* q;  // [words(D)][rows]
  int count, vectors;   // rows and vectors in use
  int64_t b;
  const char* query[E::rows];
  int64_t first[E::rows], last[E::rows];  // interval of visible keys, before mask and ids
  int64_t head[E::rows], index[E::rows];  // query head and query index of a row
  int64_t low, high;                      // the union of the intervals
  int64_t all_low, all_high;              // their intersection
  int64_t vector_low[kVectors], vector_high[kVectors];  // the union over the rows of a vector
  int64_t seen_low[kVectors], seen_high[kVectors];      // the intersection
  bool ordered;                                         // whether these never decrease
};

// Vector v of row j of [.][rows].
template <class E>
static inline Vec<typename E::Real>& vector_at(typename E::Real* x, int j, int v) {
  return *(Vec<typename E::Real>*)(x + j * E::rows + v * E::lanes);
}

// How far the queries of vector v of [rows] positions are from a key. Whole numbers are subtracted:
// rounded ones, far from the first key, would not differ.
template <class E>
static inline Vec<typename E::Real> distances_from(int64_t key, const int64_t* positions, int v) {
  typename Simd<typename E::Real>::Int64 apart;
  __builtin_memcpy(&apart, positions + v * E::lanes, sizeof apart);
  return __builtin_convertvector(apart - key, Vec<typename E::Real>);
}

// Fills query pointers, indices and visible key intervals of up to E::rows rows: those from row0
// on, of `all` rows of the heads from h0 on; or, where queries of h0 are `listed`, of these.
template <class E>
static void describe_rows(const Problem& p, Rows<E>& rows, int64_t b, int64_t h0, int64_t row0,
                          int64_t all, const int64_t* listed = nullptr) {
  constexpr int n = E::lanes;
  rows.b = b;
  rows.count = int(all - row0 < E::rows ? all - row0 : E::rows);
  rows.vectors = (rows.count + n - 1) / n;
  rows.low = p.Lk, rows.high = 0, rows.all_low = 0, rows.all_high = p.Lk;
  rows.ordered = true;
  int64_t h = h0 + row0 / p.Lq, q = row0 % p.Lq;
  for (int i = 0; i < rows.count;) {  // the rows of a head at once
    if (listed) q = listed[row0 + i];
    const int64_t left = listed ? 1 : p.Lq - q, at = interval_at(p, b, h, q);
    const int some = int(rows.count - i < left ? rows.count - i : left);
    const char* const query = p.query.at(b, h, q);
    for (int k = 0; k < some; ++k) {
      rows.first[i + k] = p.first[at + k], rows.last[i + k] = p.last[at + k];
      rows.head[i + k] = h, rows.index[i + k] = q + k;
      rows.query[i + k] = query + k * p.query.strides[2];
    }
    i += some;
    if (!listed) q = 0, ++h;
  }
  for (int i = rows.count; i < E::rows; ++i) rows.first[i] = rows.last[i] = 0;
  for (int v = 0; v < kVectors; ++v) {
    int64_t low = p.Lk, high = 0, seen_low = 0, seen_high = p.Lk, empty = 0;
    for (int i = v * n; i < (v + 1) * n && i < rows.count; ++i) {
      const int64_t first = rows.first[i], last = rows.last[i];
      const bool sees = first < last;
      low = sees && first < low ? first : low, high = sees && last > high ? last : high;
      seen_low = first > seen_low ? first : seen_low;
      seen_high = last < seen_high ? last : seen_high;
      empty += !sees;
    }
    rows.vector_low[v] = low, rows.vector_high[v] = high;
    rows.seen_low[v] = seen_low, rows.seen_high[v] = seen_high;
    if (empty) rows.ordered = false;
  }
  for (int v = 0; v < rows.vectors; ++v) {
    if (rows.vector_low[v] < rows.low) rows.low = rows.vector_low[v];
    if (rows.vector_high[v] > rows.high) rows.high = rows.vector_high[v];
    if (rows.seen_low[v] > rows.all_low) rows.all_low = rows.seen_low[v];
    if (rows.seen_high[v] < rows.all_high) rows.all_high = rows.seen_high[v];
    if (v && (rows.vector_low[v] < rows.vector_low[v - 1] ||
              rows.vector_high[v] < rows.vector_high[v - 1]))
      rows.ordered = false;
  }
}

// The visible part of a tile of queries and keys, as spans of keys x vectors of queries; nothing
// outside is computed.
struct TileMask {
  struct Span {
    int begin, end;  // keys
    int from, to;    // vectors
  };
  int spans = 0;
  Span span[2 * kVectors + 1];
  int low[kVectors], high[kVectors];  // visible keys of a vector, in steps of 4
  bool fully_visible;                 // every key is visible to every row, before mask and ids
};

template <class E>
static void set_tile_mask(const Rows<E>& rows, int64_t j0, int keys, TileMask& r) {
  r.fully_visible = rows.all_low <= j0 && j0 + keys <= rows.all_high;
  r.spans = 1;
  r.span[0] = {0, keys, 0, rows.vectors};
  for (int v = 0; v < rows.vectors; ++v) r.low[v] = 0, r.high[v] = keys;
  if (r.fully_visible || !rows.ordered) return;
  r.spans = 0;
  int edges[2 * kVectors + 2] = {0, keys}, count = 2;
  for (int v = 0; v < rows.vectors; ++v) {
    const auto inside = [&](int64_t j) { return int(j < 0 ? 0 : j > keys ? keys : j); };
    r.low[v] = inside((rows.vector_low[v] - j0) / 4 * 4);  // register blocks have four keys
    r.high[v] = inside((rows.vector_high[v] - j0 + 3) / 4 * 4);
    edges[count++] = r.low[v], edges[count++] = r.high[v];
  }
  for (int e = 1; e < count; ++e)  // not std::sort, which would be linked from any target
    for (int i = e; i && edges[i] < edges[i - 1]; --i) {
      const int x = edges[i];
      edges[i] = edges[i - 1], edges[i - 1] = x;
    }
  for (int e = 0; e + 1 < count; ++e) {
    if (edges[e] == edges[e + 1]) continue;
    int from = rows.vectors, to = 0;
    for (int v = 0; v < rows.vectors; ++v)
      if (r.low[v] <= edges[e] && edges[e] < r.high[v]) {
        if (v < from) from = v;
        to = v + 1;
      }
    if (from < to) r.span[r.spans++] = {edges[e], edges[e + 1], from, to};
  }
}
template <class E>
static TileMask tile_mask_of(const Rows<E>& rows, int64_t j0, int keys) {
  TileMask r;
  set_tile_mask(rows, j0, keys, r);
  return r;
}

// Whether an edit is of some of the rows and some of the keys; or, `all`, of every pair of them.
template <class E>
static bool meets(const Edit& edit, const Rows<E>& rows, int64_t j0, int64_t keys, bool all) {
  if (!overlaps(edit.key, j0, j0 + keys)) return false;
  if (all && !includes(edit.key, j0, j0 + keys)) return false;
  const int64_t end = rows.count - 1, h0 = rows.head[0], h1 = rows.head[end] + 1;
  const int64_t q0 = rows.index[0], q1 = rows.index[end] + 1;
  if (h1 - h0 == 1 || !all) {  // of several heads any query may be among the rows
    if (!overlaps(edit.head, h0, h1) || (h1 - h0 == 1 && !overlaps(edit.query, q0, q1)))
      return false;
    return !all || (includes(edit.head, h0, h1) && includes(edit.query, q0, q1));
  }
  for (int i = 0; i < rows.count; ++i)
    if (!is_of(edit, rows.head[i], rows.index[i])) return false;
  return true;
}

// Whether any edit is of pairs of the rows and some keys.
template <class E>
static bool edits_meet(const Problem& p, const Rows<E>& rows, int64_t j0, int64_t keys) {
  for (int64_t e = 0; e < p.edit_count; ++e)
    if (meets(p.edits[e], rows, j0, keys, false)) return true;
  return false;
}

// Whether mask and edits show any of some keys to any row, as far as whole blocks of a mask and
// single edits tell; neighbouring keys are asked for together.
template <class E>
static bool mask_shows(const Problem& p, const Rows<E>& rows, int64_t j0, int64_t keys) {
  for (int64_t e = 0; e < p.edit_count; ++e)
    if (is_cut(p.edits[e]) && meets(p.edits[e], rows, j0, keys, true)) return false;
  if (!p.mask_blocks) return true;
  const int64_t* strides = p.mask_block_strides;
  const int64_t from = j0 / kMaskKeys, to = (j0 + keys - 1) / kMaskKeys;
  for (int i = 0; i < rows.count; ++i) {
    const uint8_t* const row = p.mask_blocks + rows.b * strides[0] + rows.head[i] * strides[1] +
                               rows.index[i] * strides[2];
    for (int64_t block = from; block <= to; ++block)
      if (row[block]) return true;
  }
  return false;
}

// Whether row i attends to key j: interval, mask, ids and edits.
template <class E>
static bool attends(const Problem& p, const Rows<E>& rows, int i, int64_t j) {
  const int64_t b = rows.b, h = rows.head[i], q = rows.index[i];
  return rows.first[i] <= j && j < rows.last[i] &&
         (!p.key_ids || p.query_ids[b * p.Lq + q] == p.key_ids[b * p.Lk + j]) &&
         (!p.mask || *(p.mask.at(b, h, q) + j * p.mask.strides[3])) && !is_cut(p, h, q, j);
}

// What a pass is compiled for that reads the caller's arrays by by_stored() alone: one element for
// all the types that become floats, number by number.
template <class E>
using Computed =
    std::conditional_t<E::tiles || E::pack != 1, E, Element<real_type<typename E::Real>>>;

// Calls `read` with the element of a stored type, of those that are computed as E.
template <class E, class Read>
static auto by_stored([[maybe_unused]] Type type, Read read) {
#ifndef REGARD_BASE
  if constexpr (std::is_same_v<E, Element<Type::float32>>) {
    if (type == Type::bfloat16) return read(Element<Type::bfloat16>());
    if (type == Type::float16) return read(Element<Type::float16>());
  }
#endif
  return read(E());
}

// Calls `write` with the element of what is written: of a stored type, or as it is summed.
template <class E, class Write>
static void by_written(Type type, Write write) {
  if (type == real_type<typename E::Real>)
    write(Element<real_type<typename E::Real>>());
  else
    by_stored<E>(type, write);
}

// Calls `what` with the element type of a problem; where there is a base, of this target's own.
template <class Result, class What>
static Result by_type(Type type, What what) {
#ifdef REGARD_TILES
  constexpr By halves = By::tiles;
#else
  constexpr By halves = By::vectors;
#endif
  switch (type) {
    case Type::bfloat16:
      return what(Element<Type::bfloat16, halves>());
#if !defined(REGARD_BASE) || defined(REGARD_TILES)
    case Type::float16:
      return what(Element<Type::float16, halves>());
#endif
#ifndef REGARD_BASE
    case Type::float64:
      return what(Element<Type::float64>());
    default:
      return what(Element<Type::float32>());
#else
    default:
      __builtin_unreachable();
#endif
  }
}

// The same with what it is computed as.
template <class Result, class What>
static Result by_computed(Type type, What what) {
  return by_type<Result>(type, [&]<class E>(E) { return what(Computed<E>()); });
}

}  // namespace regard::REGARD_NAMESPACE
