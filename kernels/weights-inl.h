// A tile of weights between softmax and values: dropout, rounding to pairs, and the slow path for
// values that are not finite.
#pragma once

#include <cstdint>
#include <type_traits>

#include "random-inl.h"
#include "scores-inl.h"

namespace regard::REGARD_NAMESPACE {

// The running state of the online softmax of a tile of queries: [.][rows].
template <class E>
struct SoftmaxState {
  typename E::Real* out;      // [Dv]: weights times values, not yet normalised
  typename E::Real* maximum;  // the largest score so far
  typename E::Real* base;     // the score whose weight is 1: the maximum, or up to kMargin above
  typename E::Real* total;    // the denominator: the sum of the weights
  typename E::Real* compensation;  // its two-sum rounding error
  typename E::Real* rounded;       // the denominator of the weights as rounded to pairs
};

constexpr int kStatistics = 5;  // of these, [rows] each, beside the sums

template <class E>
static int64_t state_size(const Problem& p) {
  return (p.Dv + kStatistics) * E::rows;
}

template <class E>
static SoftmaxState<E> state_in(typename E::Real* out, typename E::Real* statistics) {
  constexpr int n = E::rows;
  return {
      out, statistics, statistics + n, statistics + 2 * n, statistics + 3 * n, statistics + 4 * n};
}

template <class E>
static SoftmaxState<E> state_in(const Problem& p, void* memory) {
  typename E::Real* out = (typename E::Real*)memory;
  return state_in<E>(out, out + p.Dv * E::rows);
}

template <class E>
constexpr int kKeepMaskRows = (E::rows + REGARD_LANES - 1) / REGARD_LANES * REGARD_LANES;

// Fills keep_mask[key][row], the dropout mask: all bits set where the weight is kept. Word j % 4 of
// Philox's counter (j / 4, i, b * Hq + h) decides, so that every pass draws the same mask, and
// every part of a call that of the whole.
template <class E>
static void draw_keep_mask(const Problem& p, const Rows<E>& rows, int64_t j0, int keys,
                           uint32_t* keep_mask) {
  const bool none = p.threshold > 0xffffffffu;
  const U threshold = U{} + uint32_t(p.threshold);
  for (int at = 0; at < rows.count; at += REGARD_LANES) {
    U index = {}, head = {};
    for (int i = 0; i < REGARD_LANES && at + i < rows.count; ++i) {
      index[i] = uint32_t(p.draw_start[0] + rows.index[at + i] * p.draw_step[0]);
      head[i] = uint32_t(rows.b * p.Hq + rows.head[at + i]);
    }
    U words[4];
    int64_t drawn = -1;  // the counter of the words
    for (int j = 0; j < keys; ++j) {
      const int64_t key = p.draw_start[1] + (j0 + j) * p.draw_step[1];
      if (key / 4 != drawn) philox(uint32_t(drawn = key / 4), index, head, p.seed, words);
      *(U*)(keep_mask + j * kKeepMaskRows<E> + at) = none ? U{} : (U)(words[key % 4] >= threshold);
    }
  }
}

// x where the dropout mask keeps it, else 0.
template <class R>
static inline Vec<R> keep(const uint32_t* keep_mask, Vec<R> x) {
  return __builtin_convertvector(read<typename Simd<R>::Int32>(keep_mask), Int<R>) != 0 ? x
                                                                                        : Vec<R>{};
}

template <class E>
static void apply_dropout(const Rows<E>& rows, const TileMask& tile_mask, const uint32_t* keep_mask,
                          typename E::Real* weights) {
  typedef typename E::Real Real;
  for (int v = 0; v < rows.vectors; ++v)
    for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j) {
      Vec<Real>* x = (Vec<Real>*)(weights + j * E::rows + v * E::lanes);
      *x = keep<Real>(keep_mask + j * kKeepMaskRows<E> + v * E::lanes, *x);
    }
}

// Whether every number of these rows is finite: adding its lowest bit to an exponent that is all
// ones carries into the sign.
template <class E>
static bool finite(const char* rows, int64_t stride, int64_t n, int64_t D) {
  typedef typename E::Bits Bits;
  typedef std::conditional_t<sizeof(Bits) == 8, uint64_t,
                             std::conditional_t<sizeof(Bits) == 4, uint32_t, uint16_t>>
      Word;
  typedef Word Words __attribute__((vector_size(REGARD_LANES * 4)));
  constexpr int lanes = sizeof(Words) / sizeof(Word);
  constexpr Word sign = Word(Word(1) << (sizeof(Word) * 8 - 1));
  constexpr Word exponent = E::type == Type::float64   ? Word(0x7ff0000000000000u)
                            : E::type == Type::float32 ? Word(0x7f800000u)
                            : E::type == Type::float16 ? Word(0x7c00u)
                                                       : Word(0x7f80u);
  constexpr Word lowest = Word(sign - exponent);
  Words found = {};
  const auto add = [&](Words x) { found |= (x & exponent) + lowest; };
  for (int64_t r = 0; r < n; ++r) {
    const char* row = rows + r * stride;
    int64_t d = 0;
    for (; d + lanes <= D; d += lanes) add(read<Words>(row + d * int64_t(sizeof(Word))));
    if (d == D) continue;
    if (D > lanes) {  // overlaps the last
      add(read<Words>(row + (D - lanes) * int64_t(sizeof(Word))));
    } else {
      Words rest = {};
      __builtin_memcpy(&rest, row, size_t(D) * sizeof(Word));
      add(rest);
    }
  }
  found &= sign;
  const W all = (W)found;
  uint64_t any = 0;
  for (size_t i = 0; i < sizeof(W) / 8; ++i) any |= all[i];
  return any == 0;
}

// Likewise of values that are stored as the type of a problem.
template <class E>
static bool finite_values(const Problem& p, const char* value, int64_t n) {
  return by_stored<E>(p.type,
                      [&]<class S>(S) { return finite<S>(value, p.value.strides[2], n, p.Dv); });
}

// Whether all values of a tile that are masked for some row are finite.
template <class E>
static bool all_finite(const Problem& p, const Rows<E>& rows, const Scaling<E>& scaling,
                       const char* value, int64_t j0, int keys) {
  if (!scaling.raw || p.mask || p.key_ids || edits_meet(p, rows, j0, keys))
    return finite_values<E>(p, value, keys);
  const auto inside = [&](int64_t j) { return j < j0 ? 0 : j > j0 + keys ? keys : j - j0; };
  const int64_t low = inside(rows.all_low), high = inside(rows.all_high);
  if (low >= high) return finite_values<E>(p, value, keys);
  return finite_values<E>(p, value, low) &&
         finite_values<E>(p, value + high * p.value.strides[2], keys - high);
}

// The slow path of multiply_values, for a tile with NaN or inf: skips masked keys, since 0 * NaN is
// NaN.
template <class E>
static void add_values_nan_safe(const Problem& p, const Rows<E>& rows, const char* value,
                                int64_t j0, int keys, const TileMask& tile_mask,
                                const typename E::Real* weights, const SoftmaxState<E>& state) {
  typedef typename E::Real Real;
  for (int j = 0; j < keys; ++j)
    for (int i = 0; i < rows.count; ++i) {
      const int v = i / E::lanes;
      if (j < tile_mask.low[v] || j >= tile_mask.high[v] || !attends(p, rows, i, j0 + j)) continue;
      const Real w = weights[j * E::rows + i];
      if (E::rounds) state.rounded[i] += w;
      for (int64_t d = 0; d < p.Dv; ++d)
        state.out[d * E::rows + i] +=
            w * number<Real>(value + j * p.value.strides[2] + d * bytes_of(p.type), p.type);
    }
}

#ifdef REGARD_TILES
// V^T for tiles, as transpose_pairs packs it.
template <class E>
static TileMatrix tile_pairs(const Matrix& rows, int64_t D) {
  const int64_t across = pair_words<E>(E::block, D) * int64_t(sizeof(int32_t));
  return {(const char*)rows.data, kTileBytes, kTileRows * kTileBytes, across, across / E::parts};
}
#endif

#ifdef REGARD_PAIRS
// Packs the weights of neighbouring keys into pairs of bfloat16; for tiles of two parts, in two
// rows.
template <class E>
static void pack_weights(const Rows<E>& rows, const TileMask& tile_mask, int keys,
                         const float* weights, int32_t* pairs) {
  for (int v = 0; v < rows.vectors; ++v)
    for (int j = tile_mask.low[v]; j < tile_mask.high[v]; j += 2) {
      const F x = *(const F*)(weights + j * E::rows + v * E::lanes);
      const F y = j + 1 < keys ? *(const F*)(weights + (j + 1) * E::rows + v * E::lanes) : F{};
      I* const pair = (I*)(pairs + (E::tiles ? j : j / 2) * E::rows + v * E::lanes);
#ifdef REGARD_TILES
      if constexpr (E::parts > 1) {
        *pair = join(part_of<0>(x), part_of<0>(y));
        pair[E::vectors] = join(part_of<1>(x), part_of<1>(y));
        continue;
      }
#endif
      *pair = pairs_of(x, y);
    }
}
#endif

}  // namespace regard::REGARD_NAMESPACE
