// The forward pass by tiles of the processor, as a software pipeline: while the scores of a tile of
// keys become weights, tiles multiply the weights of the one before with their values, and the keys
// of the one after with the queries.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "forward_tile-inl.h"

namespace regard::REGARD_NAMESPACE {

#ifdef REGARD_TILES

// softmax_pairs for tiles, a few keys at a time, of V vectors: the pairs of keys j and j + 1 take
// the place of the scores of key j. Numbers are rounded by the last addition of their polynomial:
// after instructions of tiles fewer units multiply, convert or permute, but all of them add.
// `exact`: with the maxima of the scores, and the denominator of weights that are not rounded,
// which changes no bit of the others.
template <class E, int V, bool exact>
class SoftmaxInPlace {
 public:
  SoftmaxInPlace(const Scaling<E>& scaling, const SoftmaxState<E>& state, float* scores, int low,
                 int high)
      : scaling_(scaling), state_(state), at_(scores + low * E::rows), j_(low), high_(high) {
    for (int i = 0; i < V; ++i) {
      base_[i] = scaling.base(*(const F*)(state.base + i * E::lanes));
      maximum_[i] = *(const F*)(state.maximum + i * E::lanes);
      rounded_[i] = sum_[i] = F{};
    }
  }

  // The next few keys, of which so many are left; or, if so many are.
  REGARD_INLINE void next() { add<kSome, true>(); }
  REGARD_INLINE void next_if_any() {
    if (j_ + kSome <= high_) next();
  }

  REGARD_INLINE void finish() {
    while (j_ + kSome <= high_) next();
    while (j_ < high_) add<2, false>();
    for (int i = 0; E::rounds && i < V; ++i) *(F*)(state_.rounded + i * E::lanes) += rounded_[i];
    for (int i = 0; exact && i < V; ++i) *(F*)(state_.maximum + i * E::lanes) = maximum_[i];
  }

 private:
  static constexpr int kSome = 4 / V;  // of 4 vectors, which registers have room for

  template <int keys, bool whole>
  REGARD_INLINE void add() {
    F x[keys * V], w[keys * V];
    for (int k = 0; k < keys; ++k)
      for (int i = 0; i < V; ++i) {
        const F score = whole || j_ + k < high_ ? *(const F*)(at_ + k * E::rows + i * E::lanes)
                                                : F{} - kInf<float>;
        x[k * V + i] = scaling_.exponent(score, base_[i]);
        if (exact) maximum_[i] = larger_by_mask(score, maximum_[i]);
      }
    if constexpr (E::rounds)
      exp2_rounded<exact>(x, w);
    else
      exp2_each(x);
    for (int k = 0; k < keys; k += 2)
      for (int i = 0; i < V; ++i) {
        const int at = k * V + i;
        I* const pair = (I*)(at_ + k * E::rows + i * E::lanes);
        if constexpr (E::rounds) {
          *pair = join((U)w[at], (U)w[at + V]);
          rounded_[i] += w[at] + w[at + V];
        } else {
          *pair = join(part_of<0>(x[at]), part_of<0>(x[at + V]));
          pair[E::vectors] = join(part_of<1>(x[at]), part_of<1>(x[at + V]));
        }
        if (exact) sum_[i] += x[at] + x[at + V];
      }
    j_ += keys, at_ += keys * E::rows;
    if (!exact || (j_ % kSumKeys && j_ < high_)) return;
    add_to_totals<E, V>(state_, sum_, 0);
    for (F& x : sum_) x = F{};
  }

  const Scaling<E> scaling_;
  const SoftmaxState<E> state_;
  float* at_;
  int j_;
  const int high_;
  F base_[V], maximum_[V], rounded_[V], sum_[V];
};

// The keys of a tile that any row sees.
struct SeenKeys {
  int low, high;

  SeenKeys(const TileMask& tile_mask, int vectors)
      : low(tile_mask.low[0]), high(tile_mask.high[0]) {
    for (int v = 1; v < vectors; ++v) {
      if (tile_mask.low[v] < low) low = tile_mask.low[v];
      if (tile_mask.high[v] > high) high = tile_mask.high[v];
    }
    if (high < low) high = low;
  }
};

// Masks the scores of a vector's rows of keys that only another one's see, which are not computed.
template <class E>
static void mask_unseen(const Rows<E>& rows, const TileMask& tile_mask, const SeenKeys& seen,
                        float* scores) {
  for (int v = 0; v < rows.vectors; ++v) {
    const auto mask = [&](int from, int to) {
      for (int j = from; j < to; ++j) vector_at<E>(scores, j, v) = F{} - kInf<float>;
    };
    const int low = tile_mask.low[v], high = tile_mask.high[v];
    if (low >= high) {
      mask(seen.low, seen.high);
      continue;
    }
    mask(seen.low, low);
    mask(high, seen.high);
  }
}

// Clears the packed weights of masked keys, and of those that fill up the last step.
template <class E>
static void clear_masked_pairs(const Rows<E>& rows, const KeyTile& tile, int32_t* pairs) {
  const TileMask& tile_mask = tile.tile_mask;
  const int words = int(E::words(tile.keys));
  if (tile_mask.fully_visible && words * 2 == tile.keys) return;
  for (int v = 0; v < rows.vectors; ++v) {
    const auto clear = [&](int from, int to) {
      for (int j = from; j < to; ++j)
        for (int part = 0; part < E::parts; ++part)
          *(I*)(pairs + (2 * j + part) * E::rows + v * E::lanes) = I{};
    };
    const bool none = tile_mask.low[v] >= tile_mask.high[v];
    clear(0, none ? words : tile_mask.low[v] / 2);
    clear((tile_mask.high[v] + 1) / 2, words);
  }
}

// O^T += V^T P^T by tiles, for packed weights: [pair of keys][2][rows], of which a second part has
// the second row.
template <class E>
static TileProduct product_with_values(const Problem& p, const ForwardMemory<E>& m,
                                       const KeyTile& tile, int32_t* pairs) {
  clear_masked_pairs(m.rows, tile, pairs);
  const TileVectors weights = {pairs, 2 * E::rows, E::rows, E::words(tile.keys) / kTileRows,
                               2 * E::parts - 1};
  return {tile_pairs<E>(values_of(p, m, tile), p.Dv), p.Dv, weights, m.state.out, E::rows};
}

// Computes a product at once: with values it adds to the sums, with keys it sets scores.
template <class E, bool adds>
static void multiply_now(const TileProduct& x, int vectors) {
  constexpr int64_t row = E::rows * 4, ldx = adds ? 2 * row : row;
  if (E::vectors != 2 || vectors != 2 || !x.is_whole() || !x.x.are_held())
    return multiply_by_tiles<adds>(x.a, x.rows, x.x, vectors, x.out, x.ldo);
  char* unstored = nullptr;
  multiply_held_meanwhile<adds, ldx, row>(x, unstored, [] {});
  store_held(unstored, row);
}

// The weights of a tile, packed in the place of its scores. Meanwhile two products are computed,
// where they are not null.
template <class E, int V, bool exact>
static void softmax_in_place(const Scaling<E>& scaling, ForwardMemory<E>& m, const KeyTile& tile,
                             const TileProduct* before, const TileProduct* after) {
  const SeenKeys seen(tile.tile_mask, V);
  if (V > 1 && !tile.tile_mask.fully_visible) mask_unseen(m.rows, tile.tile_mask, seen, m.scores);
  SoftmaxInPlace<E, V, exact> softmax(scaling, m.state, m.scores, seen.low, seen.high);
  if constexpr (V == 2) {
    const auto multiply = [&](auto every, auto some) REGARD_INLINE_LAMBDA {
      constexpr int64_t row = E::rows * 4;
      char* unstored = nullptr;
      const auto product = [&]<bool adds, int64_t ldx>(const TileProduct& x) REGARD_INLINE_LAMBDA {
        if (every() == 1 && x.x.are_held())
          return multiply_held_meanwhile<adds, ldx, row>(x, unstored, some);
        store_held(unstored, row);
        multiply_meanwhile<adds, every(), ldx, row>(x, some);
      };
      if (before) product.template operator()<true, 2 * row>(*before);
      if (after) product.template operator()<false, row>(*after);
      store_held(unstored, row);
    };
    constexpr std::integral_constant<int, 1> each;
    constexpr std::integral_constant<int, 2> second;
    const int64_t products = (before ? before->count() : 0) + (after ? after->count() : 0);
    const int64_t steps = seen.low == 0 && seen.high % 2 == 0 ? seen.high / 2 : -1;
    const auto next = [&]() REGARD_INLINE_LAMBDA { softmax.next(); };
    if (E::parts == 1 && !exact && products == steps)  // as with heads of 64
      multiply(each, next);
    else if (E::parts == 1 && !exact && products == 2 * steps)  // of 128
      multiply(second, next);
    else if (products)
      multiply(each, [&]() REGARD_INLINE_LAMBDA { softmax.next_if_any(); });
  }
  softmax.finish();
}

template <class E>
static void softmax_in_place(const Forward& f, const Scaling<E>& scaling, ForwardMemory<E>& m,
                             const KeyTile& tile, const TileProduct* before = nullptr,
                             const TileProduct* after = nullptr) {
  const bool exact = needs_total<E>(f);
  (m.rows.vectors == 2 ? exact ? softmax_in_place<E, 2, true> : softmax_in_place<E, 2, false>
   : exact             ? softmax_in_place<E, 1, true>
                       : softmax_in_place<E, 1, false>)(scaling, m, tile, before, after);
}

// The weights of a tile alone, with the product of its values.
template <class E>
static void add_weighted_values(const Forward& f, ForwardMemory<E>& m, const Scaling<E>& scaling,
                                const KeyTile& tile) {
  softmax_in_place(f, scaling, m, tile);
  multiply_now<E, true>(product_with_values(*f.problem, m, tile, (int32_t*)m.scores),
                        m.rows.vectors);
}

// The sum of a row's weights above which their base rises. Below it costs no bit: weights are
// rounded relative to themselves. Sums of values overflow no earlier than those of so many keys
// with a weight of 1 each.
constexpr float kMostSum = 0x1p16f;

// Moves the base of those rows of a tile that `moves` says, from the scores of a tile of keys: the
// others keep theirs, so that a row's bits do not depend on the rows beside it.
template <class E, class Moves>
static void move_bases(const Problem& p, const Scaling<E>& scaling, ForwardMemory<E>& m,
                       const KeyTile& tile, Moves moves) {
  __builtin_memcpy(m.new_maximum, m.state.maximum, sizeof(float) * E::rows);
  find_maxima(m, tile);
  for (int v = 0; v < m.rows.vectors; ++v) {
    F &rise = vector_at<E>(m.new_maximum, 0, v), &maximum = vector_at<E>(m.state.maximum, 0, v);
    const F base = vector_at<E>(m.state.base, 0, v), before = maximum;
    rise = (moves(v) | (rise < base)) ? rise : base;
    rescale(p, scaling, m.state, m.new_maximum, v);
    maximum = larger(before, maximum);
  }
}

// The denominators of a tile of queries, before a tile of keys whose weights may be too large.
template <class E>
class SavedSums {
 public:
  explicit SavedSums(const SoftmaxState<E>& state) : state_(state) {
    for (int i = 0; i < 3; ++i) __builtin_memcpy(saved_[i], of(i), sizeof saved_[i]);
  }
  void restore() {
    for (int i = 0; i < 3; ++i) __builtin_memcpy(of(i), saved_[i], sizeof saved_[i]);
  }

 private:
  float* of(int i) const {
    return i == 0 ? state_.total : i == 1 ? state_.compensation : state_.rounded;
  }
  const SoftmaxState<E> state_;
  alignas(64) float saved_[3][E::rows];
};

// The first tile from j0 on of which any key is shown; without keys where there is none.
template <class E>
static void find_tile(const Problem& p, const ForwardMemory<E>& m, int64_t kv, int64_t j0,
                      int64_t high, KeyTile& tile) {
  const int64_t keys = tile_keys<E>(p);
  for (; j0 < high; j0 += keys) {
    set_key_tile(p, m, kv, j0, high, false, tile);
    if (mask_shows(p, m.rows, j0, tile.keys)) return;
  }
  tile.keys = 0;
}

// add_keys by tiles, as a pipeline: while the scores of a tile become weights, tiles multiply the
// weights of the tile before with their values, and the keys of the tile after with the queries.
template <class E, class Look>
static bool add_keys_by_tiles(const Forward& f, ForwardMemory<E>& m, int64_t kv, int64_t low,
                              int64_t high, Look look) {
  const Problem& p = *f.problem;
  const Scaling<E> scaling(p);
  bool masked = false;
  // Whether every score of a tile is computed, seen or not, in whole blocks.
  const auto is_whole = [&](const KeyTile& tile) {
    return E::parts == 1 && tile.keys && tile.keys % (2 * kTileRows) == 0 && m.rows.vectors == 2 &&
           !few_queries<E>(p) && p.D > 0;
  };
  const auto product_with_keys = [&](const KeyTile& tile, float* to) {
    return TileProduct{tile_rows<E>(keys_of(p, m, tile), p.D), tile.keys,
                       tile_columns<E>(m.rows.q, p.D), to, E::rows};
  };
  const auto scores_of = [&](const KeyTile& tile, float* to) {
    if (tile.unmasked && is_whole(tile))
      return multiply_now<E, false>(product_with_keys(tile, to), m.rows.vectors);
    multiply_keys<E>(p, m.rows, tile.tile_mask, kv, tile.j0, tile.keys, keys_of(p, m, tile), to);
  };
  // A row's base is above the scores of the first tile of keys that it sees, and rises where the
  // sum of its weights becomes large: nobody looks for the maxima of other tiles.
  const auto base = [&](int v) -> const F& { return vector_at<E>(m.state.base, 0, v); };
  const auto sum = [&](int v) -> const F& {
    return vector_at<E>(E::rounds ? m.state.rounded : m.state.total, 0, v);
  };
  const auto any = [&](auto of) {
    uint32_t found = 0;
    for (int v = 0; v < m.rows.vectors; ++v) found |= of(v);
    return found != 0;
  };
  bool lack_base = true;
  KeyTile tiles[3], *before = tiles, *tile = tiles + 1, *next = tiles + 2;
  before->keys = 0;
  find_tile(p, m, kv, low, high, *tile);
  if (tile->keys) scores_of(*tile, m.scores);
  while (tile->keys) {
    masked |= !tile->unmasked || (tile->packed && tile->keys % E::block);
    const auto finish = [&] {
      if (!tile->unmasked)
        finish_scores<E>(p, m.rows, tile->tile_mask, scaling, tile->j0, tile->keys, m.scores,
                         nullptr);
    };
    finish();
    lack_base = lack_base && any([&](int v) {
                  return greater(F{} + std::numeric_limits<float>::lowest(), base(v));
                });
    if (lack_base) move_bases(p, scaling, m, *tile, [&](int v) { return base(v) == -kInf<float>; });
    // Made where they stay: a copy would wait for their stores.
    const TileProduct values =
        before->keys ? product_with_values(p, m, *before, (int32_t*)m.other_scores) : TileProduct{};
    const bool values_meanwhile = before->keys && m.rows.vectors == 2 && values.is_whole();
    if (before->keys && !values_meanwhile) multiply_now<E, true>(values, m.rows.vectors);
    look(*tile);
    if (high - tile->j0 <= kPrefetchDistance) m.prefetcher.prefetch_some();
    find_tile(p, m, kv, tile->j0 + tile_keys<E>(p), high, *next);
    const bool keys_meanwhile = is_whole(*next);
    const TileProduct keys =
        keys_meanwhile ? product_with_keys(*next, m.other_scores) : TileProduct{};
    SavedSums<E> saved(m.state);
    softmax_in_place(f, scaling, m, *tile, values_meanwhile ? &values : nullptr,
                     keys_meanwhile ? &keys : nullptr);
    if (any([&](int v) { return greater(sum(v), F{} + kMostSum); })) {
      F large[E::vectors];
      for (int v = 0; v < m.rows.vectors; ++v) large[v] = sum(v);
      saved.restore();
      scores_of(*tile, m.scores);
      finish();
      move_bases(p, scaling, m, *tile, [&](int v) { return large[v] > kMostSum; });
      softmax_in_place(f, scaling, m, *tile);
    }
    if (next->keys && !keys_meanwhile) scores_of(*next, m.other_scores);
    std::swap(m.scores, m.other_scores);
    KeyTile* const free = before;
    before = tile, tile = next, next = free;
  }
  if (before->keys)
    multiply_now<E, true>(product_with_values(p, m, *before, (int32_t*)m.other_scores),
                          m.rows.vectors);
  return masked;
}

#endif

}  // namespace regard::REGARD_NAMESPACE
