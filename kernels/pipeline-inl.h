// The forward pass by tiles of the processor, as a software pipeline: while the scores of a tile of
// keys become weights, tiles multiply the weights of the one before with their values, and the keys
// of the one after with the queries.
#pragma once

#include <cstdint>
#include <cstring>
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
  if (E::vectors != 2 || vectors != 2 || !x.is_whole() || !x.x.are_held()) {
    if (adds && !x.adds) std::memset((void*)x.out, 0, size_t(x.rows * row));
    return multiply_by_tiles<adds>(x.a, x.rows, x.x, vectors, x.out, x.ldo);
  }
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
  // Of this tile alone: maxima of others, which are known with row statistics, change no bit.
  for (int v = 0; v < E::vectors; ++v) vector_at<E>(m.new_maximum, 0, v) = F{} - kInf<float>;
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

// The forward pass as a pipeline over tiles of keys: while the scores of one become weights, tiles
// multiply the weights of the one before with their values, and the keys of the one after with the
// queries. Those before and after may be of other queries.
template <class E>
class ForwardPipeline {
 public:
  // What is done with queries when all their values are added, before those `after` have any.
  typedef void Finish(const Forward& f, ForwardMemory<E>& m, const Rows<E>* after);

  ForwardPipeline(const Forward& f, const ForwardMemory<E>& m, Finish* finish)
      : f_(f),
        p_(*f.problem),
        scaling_(p_),
        finish_(finish),
        scores_(m.scores),
        other_scores_(m.other_scores) {
    before_->tile.keys = now_->tile.keys = 0;
  }

  // Whether there is a next step, for these queries.
  bool attends(const ForwardMemory<E>& m) const { return now_->m == &m && now_->tile.keys; }

  // Begins with the keys of some queries from `low` to `high`, after `drain`. Whether any is
  // shown.
  bool begin(ForwardMemory<E>& m, int64_t kv, int64_t low, int64_t high) {
    find_first(m, kv, low, high, *now_);
    if (now_->tile.keys) compute_scores(*now_, scores_);
    return now_->tile.keys != 0;
  }

  // Finds the tile after: of the same queries, or after their last one of others.
  bool find_next() {
    after_->m = now_->m, after_->high = now_->high;
    find_tile(*after_, now_->tile.kv, now_->tile.j0 + tile_keys<E>(p_));
    return after_->tile.keys != 0;
  }
  bool continue_with(ForwardMemory<E>& m, int64_t kv, int64_t low, int64_t high) {
    find_first(m, kv, low, high, *after_);
    return after_->tile.keys != 0;
  }

  // The weights of a tile of keys, after a tile was looked for; `look`, optional, sees its scores
  // before. A pointer: each type of it would be code of its own.
  typedef void Look(void* looks, const KeyTile& tile);
  __attribute__((noinline)) void step(Look* look = nullptr, void* looks = nullptr) {
    ForwardMemory<E>& m = *now_->m;
    const KeyTile& tile = now_->tile;
    m.scores = scores_, m.other_scores = other_scores_;
    m.masked |= !tile.unmasked || (tile.packed && tile.keys % E::block);
    mask_scores();
    // A row's base is above the scores of the first tile of keys that it sees, and rises where the
    // sum of its weights becomes large: nobody looks for the maxima of other tiles.
    const auto base = [&](int v) -> const F& { return vector_at<E>(m.state.base, 0, v); };
    const auto sum = [&](int v) -> const F& {
      return vector_at<E>(E::rounds ? m.state.rounded : m.state.total, 0, v);
    };
    now_->lack_base = now_->lack_base && any([&](int v) {
                        return greater(F{} + std::numeric_limits<float>::lowest(), base(v));
                      });
    if (now_->lack_base)
      move_bases(p_, scaling_, m, tile, [&](int v) { return base(v) == -kInf<float>; });
    // Made where they stay: a copy would wait for their stores.
    const TileProduct values = before_->tile.keys ? of_values(*before_) : TileProduct{};
    const bool values_meanwhile = before_->tile.keys && m.rows.vectors == 2 &&
                                  before_->m->rows.vectors == 2 && values.is_whole();
    if (before_->tile.keys && !values_meanwhile)
      multiply_now<E, true>(values, before_->m->rows.vectors);
    if (look) look(looks, tile);
    if (now_->high - tile.j0 <= kPrefetchDistance) m.prefetcher.prefetch_some();
    const bool keys_meanwhile = m.rows.vectors == 2 && is_whole(*after_);
    const TileProduct keys = keys_meanwhile ? of_keys(*after_, other_scores_) : TileProduct{};
    SavedSums<E> saved(m.state);
    softmax_in_place(f_, scaling_, m, tile, values_meanwhile ? &values : nullptr,
                     keys_meanwhile ? &keys : nullptr);
    if (before_->tile.keys && before_->m != &m) finish_(f_, *before_->m, &m.rows);
    if (any([&](int v) { return greater(sum(v), F{} + kMostSum); })) {
      F large[E::vectors];
      for (int v = 0; v < m.rows.vectors; ++v) large[v] = sum(v);
      saved.restore();
      const bool has_other_queries = after_->tile.keys && after_->m != &m;
      if (has_other_queries) load_queries<E>(p_, m.rows);
      compute_scores(*now_, scores_);
      mask_scores();
      move_bases(p_, scaling_, m, tile, [&](int v) { return large[v] > kMostSum; });
      softmax_in_place(f_, scaling_, m, tile);
      if (has_other_queries) load_queries<E>(p_, after_->m->rows);
    }
    if (after_->tile.keys && !keys_meanwhile) compute_scores(*after_, other_scores_);
    after_->lack_base = after_->m != &m || now_->lack_base;
    std::swap(scores_, other_scores_);
    Stage* const free = before_;
    before_ = now_, now_ = after_, after_ = free;
  }

  // Multiplies the weights of the last tile with their values.
  void drain() {
    if (before_->tile.keys) multiply_now<E, true>(of_values(*before_), before_->m->rows.vectors);
    before_->tile.keys = 0;
  }

 private:
  // A tile of keys, and the queries that attend to it.
  struct Stage {
    ForwardMemory<E>* m;
    int64_t high;    // the end of their keys
    bool lack_base;  // whether a row may have seen no key so far
    KeyTile tile;
  };

  void find_first(ForwardMemory<E>& m, int64_t kv, int64_t low, int64_t high, Stage& stage) {
    stage.m = &m, stage.high = high, stage.lack_base = true;
    find_tile(stage, kv, low);
  }

  // The first tile from j0 on of which any key is shown; without keys where there is none.
  __attribute__((noinline)) void find_tile(Stage& stage, int64_t kv, int64_t j0) {
    const ForwardMemory<E>& m = *stage.m;
    for (const int64_t keys = tile_keys<E>(p_); j0 < stage.high; j0 += keys) {
      set_key_tile(p_, m, kv, j0, stage.high, false, stage.tile);
      if (mask_shows(p_, m.rows, j0, stage.tile.keys)) return;
    }
    stage.tile.keys = 0;
  }

  template <class Of>
  bool any(Of of) const {
    uint32_t found = 0;
    for (int v = 0; v < now_->m->rows.vectors; ++v) found |= of(v);
    return found != 0;
  }

  void mask_scores() {
    const KeyTile& tile = now_->tile;
    if (!tile.unmasked)
      finish_scores<E>(p_, now_->m->rows, tile.tile_mask, scaling_, tile.j0, tile.keys, scores_,
                       nullptr);
  }

  // Whether every score of a tile is computed, seen or not, in whole blocks.
  bool is_whole(const Stage& stage) const {
    const int keys = stage.tile.keys;
    return E::parts == 1 && keys && keys % (2 * kTileRows) == 0 && stage.m->rows.vectors == 2 &&
           !few_queries<E>(p_) && p_.D > 0;
  }

  TileProduct of_keys(const Stage& stage, float* to) const {
    const ForwardMemory<E>& m = *stage.m;
    return {tile_rows<E>(keys_of(p_, m, stage.tile), p_.D), stage.tile.keys,
            tile_columns<E>(m.rows.q, p_.D), to, E::rows};
  }

  // After which the sums are set.
  TileProduct of_values(const Stage& stage) const {
    TileProduct product = product_with_values(p_, *stage.m, stage.tile, (int32_t*)other_scores_);
    product.adds = stage.m->has_sums;
    stage.m->has_sums = true;
    return product;
  }

  __attribute__((noinline)) void compute_scores(const Stage& stage, float* to) const {
    const ForwardMemory<E>& m = *stage.m;
    const KeyTile& tile = stage.tile;
    if (tile.unmasked && is_whole(stage))
      return multiply_now<E, false>(of_keys(stage, to), m.rows.vectors);
    multiply_keys<E>(p_, m.rows, tile.tile_mask, tile.kv, tile.j0, tile.keys, keys_of(p_, m, tile),
                     to);
  }

  const Forward& f_;
  const Problem& p_;
  const Scaling<E> scaling_;
  Finish* const finish_;
  float *scores_, *other_scores_;  // of the tile; of the one before, and then of the one after
  Stage stages_[3], *before_ = stages_, *now_ = stages_ + 1, *after_ = stages_ + 2;
};

// add_keys by tiles.
template <class E, class Look>
static bool add_keys_by_tiles(const Forward& f, ForwardMemory<E>& m, int64_t kv, int64_t low,
                              int64_t high, Look look) {
  ForwardPipeline<E> pipeline(f, m, nullptr);
  m.masked = false;
  pipeline.begin(m, kv, low, high);
  while (pipeline.attends(m)) {
    pipeline.find_next();
    pipeline.step([](void* looks, const KeyTile& tile) { (*(Look*)looks)(tile); }, &look);
  }
  pipeline.drain();
  return m.masked;
}

#endif

}  // namespace regard::REGARD_NAMESPACE
