// The forward pass: FlashAttention, with an online softmax over tiles of keys: S^T = K Q^T,
// P^T = 2^(S^T - base), O^T += V^T P^T. Nothing is summed across lanes.
//
// A single tile of queries is split over the keys (split-K), so that threads can share it; partial
// results are merged in their order. Source: Milakov & Gimelshein 2018; Dao et al. 2022.
#pragma once

#include <cstdint>
#include <utility>

#include "weights-inl.h"

namespace regard::REGARD_NAMESPACE {

constexpr int64_t kSplitKeys = 2048;        // of one part of a split-K
constexpr int64_t kPrefetchDistance = 512;  // keys left when prefetching begins

template <class E>
static int64_t row_tiles_of(const Problem& p) {
  return p.Hkv ? (p.Hq / p.Hkv * p.Lq + E::rows - 1) / E::rows : 0;
}

template <class E>
static int64_t splits(const Problem& p) {
  return p.group_rows > E::rows || p.Lk <= kSplitKeys ? 1 : (p.Lk + kSplitKeys - 1) / kSplitKeys;
}

// Neighbouring tiles of queries in one task: up to eight, as long as every thread gets eight tasks
// and a task takes at most 4e9 products, for the load to balance.
template <class E>
static int64_t tiles_per_task(const Forward& f) {
  const Problem& p = *f.problem;
  if (splits<E>(p) > 1) return 1;
  const double products = double(E::rows) * double(p.Lk) * double(p.D + p.Dv);
  int64_t most = 8;
  while (most > 1 &&
         (p.B * p.Hkv * row_tiles_of<E>(p) < most * 8 * f.threads || double(most) * products > 4e9))
    --most;
  return most;
}

// Keys and values that are packed before they are multiplied, once for all tiles of queries of a
// head that a thread takes one after another: where words cannot be read in place, and where rows
// lie apart, as those of a head between other heads: they fall into few sets of the caches, each
// into a page of its own.
template <class E>
struct PackedKV {
  typedef typename E::Word Word;
  static constexpr int64_t kMost = 4 << 20;  // bytes of a thread
  struct Range {
    int64_t head, low, high;
  };
  Range* held;             // which keys are packed; zeros, none, when the thread begins
  Word* keys = nullptr;    // [high - low][words(D)], or null
  Word* values = nullptr;  // [words(high - low)][Dv], or null

  PackedKV(const Forward& f, Scratch& scratch) {
    const Problem& p = *f.problem;
    const int64_t key_words = are_packed(p.key, p.D) ? p.Lk * E::row_words(p.D) : 0;
    const int64_t value_words =
        are_packed(p.value, p.Dv) || E::pack > 1 ? pair_words<E>(p.Lk, p.Dv) : 0;
    held = scratch.take<Range>(1);  // first: these bytes of a thread's scratch stay
    if (row_tiles_of<E>(p) < 2 || (key_words + value_words) * int64_t(sizeof(Word)) > kMost) return;
    if (key_words) keys = scratch.take<Word>(key_words);
    if (value_words) values = scratch.take<Word>(value_words);
  }

  static bool are_packed(const Array& x, int64_t D) {
    return !in_place<E>(D) || x.strides[2] != D * int64_t(sizeof(typename E::Bits));
  }

  explicit operator bool() const { return keys || values; }

  // Packs those keys from `from` to `to` that are missing.
  void add(const Problem& p, int64_t b, int64_t kv, int64_t from, int64_t to) const {
    from -= from % E::block;
    if (to % E::block) to = to / E::block * E::block + E::block;
    if (to > p.Lk) to = p.Lk;
    const int64_t head = b * p.Hkv + kv;
    if (held->head != head || from < held->low || from > held->high) *held = {head, from, from};
    const int64_t high = held->high, count = high - held->low, n = to - high;
    if (n <= 0) return;
    if (keys)
      pack_rows<E>(p.key.at(b, kv, high), p.key.strides[2], n, p.D,
                   keys + count * E::row_words(p.D));
    if (values)
      pack_values<E>(p.value.at(b, kv, high), p.value.strides[2], n, p.Dv,
                     values + pair_words<E>(count, p.Dv));
    held->high = to;
  }
};

template <class E>
struct ForwardMemory {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  Rows<E> rows, next;
  Prefetcher prefetcher;
  SoftmaxState<E> state;
  Real* scores;        // [keys][rows]: scores, then weights
  Real* other_scores;  // likewise, of the tile before or after, for tiles
  Real* new_maximum;   // [rows]: with the scores of the tile
  Word* weights;       // the weights, packed
  Word* keys;
  Word* values;
  uint32_t* keep_mask;
  PackedKV<E> packed;

  ForwardMemory(const Forward& f, Scratch& scratch) : packed(f, scratch) {
    const Problem& p = *f.problem;
    rows.q = next.q = scratch.take<Word>(query_words<E>(p));
    scores = scratch.take<Real>(E::keys * E::rows);
    other_scores = E::tiles ? scratch.take<Real>(E::keys * E::rows) : nullptr;
    weights = E::pack == 1 ? (Word*)scores
                           : scratch.take<Word>(E::keys / 2 * (E::tiles ? 2 : 1) * E::rows);
    state = state_in<E>(p, scratch.take<Real>(state_size<E>(p)));
    new_maximum = scratch.take<Real>(E::rows);
    keys = scratch.take<Word>(E::keys * E::row_words(p.D));
    values = scratch.take<Word>(pair_words<E>(E::keys, p.Dv));
    keep_mask = p.threshold ? scratch.take<uint32_t>(E::keys * kKeepMaskRows<E>) : nullptr;
  }
};

// The margin, in powers of two, by which the base of the exponentials rises above a new maximum.
// Rescaling rounds the sums, which would add up where the maximum rises a little with every tile.
constexpr int kMargin = 8;

// The correction step of the online softmax: rescales the sums to a new maximum.
template <class E>
static void rescale(const Problem& p, const Scaling<E>& scaling, const SoftmaxState<E>& state,
                    const typename E::Real* new_maximum, int v) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const auto at = [&](Real* x) -> Vec<Real>& { return *(Vec<Real>*)(x + v * n); };
  const Vec<Real> maximum = *(const Vec<Real>*)(new_maximum + v * n), old = at(state.base);
  at(state.maximum) = maximum;
  if (!greater(maximum, old)) return;
  const Vec<Real> none = Vec<Real>{} - kInf<Real>;  // of a row without a visible key so far
  const Vec<Real> higher = maximum + Real(kMargin) / scaling.factor;
  const Vec<Real> risen = ((old == none) | (higher == kInf<Real>)) ? maximum : higher;
  const Vec<Real> base = maximum > old ? risen : old;
  at(state.base) = base;
  if (!greater(old, none)) return;
  const Vec<Real> factor = exp2(scaling.exponent(old, scaling.base(base)));
  at(state.total) *= factor, at(state.compensation) *= factor;
  if (E::rounds) at(state.rounded) *= factor;
  for (int64_t d = 0; d < p.Dv; ++d) at(state.out + d * E::rows) *= factor;
}

// Adds weights of V vectors to the denominators of their rows. kSumKeys weights are summed in plain
// arithmetic, such sums with compensation: one weight of 1 does not hide a million of 1e-8.
constexpr int kSumKeys = 8;
static inline int end_of_sum(int j, int high) {  // the same whichever rows share a tile
  const int end = (j / kSumKeys + 1) * kSumKeys;
  return end < high ? end : high;
}
template <class E, int V>
static void add_to_totals(const SoftmaxState<E>& state, const Vec<typename E::Real> (&sum)[V],
                          int v) {
  typedef typename E::Real Real;
  for (int i = 0; i < V; ++i) {
    const int at = (v + i) * E::lanes;
    add_compensated(*(Vec<Real>*)(state.total + at), *(Vec<Real>*)(state.compensation + at),
                    sum[i]);
  }
}

#ifdef REGARD_PAIRS
// Turns the scores of V vectors into weights relative to the base, packed into pairs of
// neighbouring keys.
template <class E, int V>
static void softmax_pairs(const Scaling<E>& scaling, const SoftmaxState<E>& state,
                          const float* scores, int32_t* pairs, int v, int low, int high) {
  constexpr int n = E::lanes;
  F base[V], rounded[V] = {};
  for (int i = 0; i < V; ++i) base[i] = scaling.base(*(const F*)(state.base + (v + i) * n));
  const auto exponent = [&](int j, int i) {
    return scaling.exponent(*(const F*)(scores + j * E::rows + (v + i) * n), base[i]);
  };
  for (int j = low; j < high;) {
    F sum[V] = {};
    for (const int end = end_of_sum(j, high); j < end; j += 2) {
      F x[V], y[V];
      for (int i = 0; i < V; ++i) x[i] = exponent(j, i);
      for (int i = 0; i < V; ++i) y[i] = j + 1 < high ? exponent(j + 1, i) : F{} - kInf<float>;
      exp2_each(x);
      exp2_each(y);
      for (int i = 0; i < V; ++i) {
        const I pair = pairs_of(x[i], y[i]);
        *(I*)(pairs + j / 2 * E::rows + (v + i) * n) = pair;
        sum[i] += x[i] + y[i];
        rounded[i] = Pairs::add(rounded[i], pair, I{} + kOnes);
      }
    }
    add_to_totals<E, V>(state, sum, v);
  }
  for (int i = 0; i < V; ++i) *(F*)(state.rounded + (v + i) * n) += rounded[i];
}
#endif

#ifdef REGARD_TILES
// softmax_pairs for tiles: the pairs of keys j and j + 1 take the place of the scores of key j, and
// products by tiles are computed meanwhile. Numbers are rounded by the last addition of their
// polynomial: after instructions of tiles fewer units convert or permute, but all of them add.
// `exact`: with the denominator of weights that are not rounded, which changes no bit of the
// others.
template <class E, int V, bool exact>
static void softmax_rounded(const Scaling<E>& scaling, const SoftmaxState<E>& state,
                            const float* scores, int32_t* pairs, int v, int low, int high,
                            TileQueue& queue) {
  constexpr int n = E::lanes;
  if (low >= high) return;
  F base[V], rounded[V] = {}, sum[V] = {};
  for (int i = 0; i < V; ++i) base[i] = scaling.base(*(const F*)(state.base + (v + i) * n));
  const int64_t groups = (high - low + 3) / 4, advances = (queue.left() + groups - 1) / groups;
  const auto some = [&]<int keys>(int j, std::integral_constant<int, keys>) {
    F x[keys * V], w[keys * V];
    for (int k = 0; k < keys; ++k)
      for (int i = 0; i < V; ++i)
        x[k * V + i] =
            j + k < high
                ? scaling.exponent(*(const F*)(scores + (j + k) * E::rows + (v + i) * n), base[i])
                : F{} - kInf<float>;
    if constexpr (E::rounds)
      exp2_rounded<exact>(x, w);
    else
      exp2_each(x);
    for (int k = 0; k < keys; k += 2)
      for (int i = 0; i < V; ++i) {
        const int at = k * V + i;
        I* const pair = (I*)(pairs + (j + k) * E::rows + (v + i) * n);
        if constexpr (E::rounds) {
          *pair = join((U)w[at], (U)w[at + V]);
          rounded[i] += w[at] + w[at + V];
        } else {
          *pair = join(part_of<0>(x[at]), part_of<0>(x[at + V]));
          pair[E::vectors] = join(part_of<1>(x[at]), part_of<1>(x[at + V]));
        }
        if (exact) sum[i] += x[at] + x[at + V];
      }
    for (int64_t a = 0; a < advances; ++a) queue.advance();
  };
  for (int j = low; j < high;) {
    const int end = end_of_sum(j, high);
    for (; j + 4 <= end; j += 4) some(j, std::integral_constant<int, 4>());
    for (; j < end; j += 2) some(j, std::integral_constant<int, 2>());
    if (!exact) continue;
    add_to_totals<E, V>(state, sum, v);
    for (F& x : sum) x = F{};
  }
  for (int i = 0; E::rounds && i < V; ++i) *(F*)(state.rounded + (v + i) * n) += rounded[i];
}
#endif

// Without fused multiply-adds the product of a weight and a value is rounded before it is added,
// and takes 150 cycles where it is denormal. Weights times this power of two avoid that: for scores
// that spread over hundreds of nats, portable took 3 times as long without.
template <class R>
constexpr R kWeightScale = REGARD_LANES == 4 ? R(0x1p64f) : R(1);

// Turns the scores of V vectors into weights relative to the base, times `weight_scale`, in place
// or packed into `pairs`.
template <class E, int V>
static void softmax(const Scaling<E>& scaling, const SoftmaxState<E>& state,
                    typename E::Real* scores, [[maybe_unused]] typename E::Word* pairs,
                    typename E::Real weight_scale, int v, int low, int high) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
#ifdef REGARD_PAIRS
  if constexpr (E::pack > 1)
    if (pairs) return softmax_pairs<E, V>(scaling, state, scores, pairs, v, low, high);
#endif
  Vec<Real> base[V];
  for (int i = 0; i < V; ++i) base[i] = scaling.base(*(const Vec<Real>*)(state.base + (v + i) * n));
  const auto score = [&](int j, int i) -> Vec<Real>& {
    return *(Vec<Real>*)(scores + j * E::rows + (v + i) * n);
  };
  for (int j = low; j < high;) {
    Vec<Real> sum[V] = {};
    for (const int end = end_of_sum(j, high); j < end; ++j) {
      Vec<Real> x[V];
      for (int i = 0; i < V; ++i) x[i] = scaling.exponent(score(j, i), base[i]);
      exp2_each(x);
      if (kWeightScale<Real> != 1)
        for (int i = 0; i < V; ++i) x[i] *= weight_scale;
      for (int i = 0; i < V; ++i) score(j, i) = x[i], sum[i] += x[i];
    }
    add_to_totals<E, V>(state, sum, v);
  }
}

// A tile of keys of a head, and which of them are visible to the queries.
struct KeyTile {
  int64_t kv, j0;
  int keys;
  TileMask tile_mask;
  bool unmasked;  // every key is visible, and scores are the products
  bool packed;    // keys and values are packed
};

template <class E>
static KeyTile key_tile_of(const Problem& p, const ForwardMemory<E>& m, int64_t kv, int64_t j0,
                           int64_t high, bool nan_safe) {
  const int keys = int(high - j0 < E::keys ? high - j0 : E::keys);
  const TileMask tile_mask = tile_mask_of(m.rows, j0, keys);
  return {kv,
          j0,
          keys,
          tile_mask,
          is_unmasked<E>(p, m.rows, tile_mask, j0, keys),
          m.packed && !nan_safe && j0 % E::block == 0};
}

// The keys of a tile as words, packed or in place.
template <class E>
static Matrix keys_of(const Problem& p, const ForwardMemory<E>& m, const KeyTile& tile) {
  const char* const key = p.key.at(m.rows.b, tile.kv, tile.j0);
  const int64_t stride = p.key.strides[2], words = E::row_words(p.D);
  if (few_queries<E>(p) || !PackedKV<E>::are_packed(p.key, p.D)) return {key, stride};
  if (!tile.packed || !m.packed.keys) return pack_rows<E>(key, stride, tile.keys, p.D, m.keys);
  return {m.packed.keys + (tile.j0 - m.packed.held->low) * words,
          words * int64_t(sizeof(typename E::Word))};
}

// The values of a tile, likewise; two rows of numbers are one of pairs.
template <class E>
static Matrix values_of(const Problem& p, const ForwardMemory<E>& m, const KeyTile& tile) {
  const char* const value = p.value.at(m.rows.b, tile.kv, tile.j0);
  const int64_t stride = p.value.strides[2];
  if (E::pack == 1 && !PackedKV<E>::are_packed(p.value, p.Dv)) return {value, stride};
  if (!tile.packed || !m.packed.values)
    return pack_values<E>(value, stride, tile.keys, p.Dv, m.values);
  return {m.packed.values + pair_words<E>(tile.j0 - m.packed.held->low, p.Dv),
          (E::tiles ? E::lanes : p.Dv) * int64_t(sizeof(typename E::Word))};
}

// Finishes the scores of a tile, and finds the new maxima of its rows.
template <class E>
static void finish_tile(const Problem& p, const Scaling<E>& scaling, ForwardMemory<E>& m,
                        const KeyTile& tile) {
  typedef typename E::Real Real;
  const TileMask& tile_mask = tile.tile_mask;
  if (!tile.unmasked)
    finish_scores<E>(p, m.rows, tile_mask, scaling, tile.j0, tile.keys, m.scores, nullptr);
  for (int v = 0; v < m.rows.vectors; ++v) {
    Vec<Real> maximum = vector_at<E>(m.new_maximum, 0, v);
    for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j)
      maximum = larger(vector_at<E>(m.scores, j, v), maximum);
    vector_at<E>(m.new_maximum, 0, v) = maximum;
  }
}

// Computes the scores of a tile, updates the maxima of its rows and rescales their sums.
template <class E>
static void score_tile(const Problem& p, const Scaling<E>& scaling, ForwardMemory<E>& m,
                       const KeyTile& tile, Prefetcher* prefetcher) {
  typedef typename E::Real Real;
  const Rows<E>& rows = m.rows;
  const TileMask& tile_mask = tile.tile_mask;
  const int64_t kv = tile.kv, j0 = tile.j0, words = E::words(p.D);
  const Matrix k = keys_of(p, m, tile);
  __builtin_memcpy(m.new_maximum, m.state.maximum, sizeof(Real) * E::rows);
  if (!E::tiles && tile.unmasked && words <= kTerms && !few_queries<E>(p)) {
    multiply<typename E::Op, false, Epilogue::set_and_maximum>(
        rows.vectors, rows.q, E::rows, k.data, k.stride, words, tile.keys, m.scores, E::rows,
        m.new_maximum, prefetcher);
  } else {
    multiply_keys<E>(p, rows, tile_mask, kv, j0, tile.keys, k, m.scores, prefetcher);
    finish_tile(p, scaling, m, tile);
  }
  for (int v = 0; v < rows.vectors; ++v) rescale(p, scaling, m.state, m.new_maximum, v);
}

// The weights of a tile from its scores; into `pairs`, optional, where nothing else needs them.
template <class E>
static void softmax_tile(const Problem& p, const Scaling<E>& scaling, ForwardMemory<E>& m,
                         const KeyTile& tile, typename E::Word* pairs,
                         typename E::Real weight_scale) {
  const TileMask& tile_mask = tile.tile_mask;
  if (tile_mask.fully_visible && m.rows.vectors == E::vectors)
    softmax<E, E::vectors>(scaling, m.state, m.scores, pairs, weight_scale, 0, 0, tile.keys);
  else
    for (int v = 0; v < m.rows.vectors; ++v)
      softmax<E, 1>(scaling, m.state, m.scores, pairs, weight_scale, v, tile_mask.low[v],
                    tile_mask.high[v]);
  if (!p.threshold) return;
  draw_keep_mask(p, m.rows, tile.j0, tile.keys, m.keep_mask);
  apply_dropout(m.rows, tile_mask, m.keep_mask, m.scores);
}

#ifdef REGARD_TILES
// Clears the packed weights of masked keys, and of those that fill up the last step.
template <class E>
static void clear_masked_pairs(const Rows<E>& rows, const TileMask& tile_mask, int keys,
                               int32_t* pairs) {
  const int words = int(E::words(keys));
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
static TileQueue::Product product_with_values(const Problem& p, const ForwardMemory<E>& m,
                                              const KeyTile& tile, int32_t* pairs) {
  clear_masked_pairs(m.rows, tile.tile_mask, tile.keys, pairs);
  const TileVectors weights = {pairs, 2 * E::rows, E::rows, E::words(tile.keys) / kTileRows,
                               2 * E::parts - 1};
  return {tile_pairs<E>(values_of(p, m, tile), p.Dv), p.Dv, weights, m.state.out, E::rows, true};
}

// Computes a product at once.
static void multiply_now(const TileQueue::Product& x, int vectors) {
  (x.adds ? multiply_by_tiles<true> : multiply_by_tiles<false>)(x.a, x.rows, x.x, vectors, x.out,
                                                                x.ldo);
}

// Adds a product to those that are computed meanwhile, if it is of whole blocks; else it is
// computed at once.
template <class E>
static void enqueue(const Rows<E>& rows, const TileQueue::Product& product, TileQueue& queue) {
  if (rows.vectors == 2 && product.rows % (2 * kTileRows) == 0)
    queue.add(product);
  else
    multiply_now(product, rows.vectors);
}
#endif

// O^T += V^T P^T for the values of a tile.
template <class E>
static void multiply_values(const Problem& p, ForwardMemory<E>& m, const KeyTile& tile,
                            Prefetcher* prefetcher) {
#ifdef REGARD_TILES
  if constexpr (E::tiles)
    return multiply_now(product_with_values(p, m, tile, m.weights), m.rows.vectors);
#endif
  const Matrix v = values_of(p, m, tile);
  for (int c = 0; c < tile.tile_mask.spans; ++c) {
    const TileMask::Span& span = tile.tile_mask.span[c];
    const int first = span.from * E::lanes, begin = span.begin / E::pack;
    multiply<typename E::Op, true, Epilogue::add>(
        span.to - span.from, m.weights + begin * E::rows + first, E::rows,
        (const char*)v.data + begin * v.stride, v.stride, E::words(span.end - span.begin), p.Dv,
        m.state.out + first, E::rows, nullptr, prefetcher);
  }
}

// Whether the denominator of weights that are not rounded is needed.
template <class E>
static bool needs_total(const Forward& f) {
  return !(E::tiles && E::rounds) || f.maximum || f.problem->threshold;
}

#ifdef REGARD_TILES
// The first tile from j0 on of which any key is shown; without keys where there is none.
template <class E>
static KeyTile shown_tile(const Problem& p, const ForwardMemory<E>& m, int64_t kv, int64_t j0,
                          int64_t high) {
  for (; j0 < high; j0 += E::keys) {
    const KeyTile tile = key_tile_of(p, m, kv, j0, high, false);
    if (mask_shows(p, m.rows, j0, tile.keys)) return tile;
  }
  return {};
}

// The weights of a tile, packed in the place of its scores; the queue goes on meanwhile.
template <class E, bool exact>
static void softmax_in_place(const Scaling<E>& scaling, ForwardMemory<E>& m, const KeyTile& tile,
                             TileQueue& queue) {
  const TileMask& tile_mask = tile.tile_mask;
  int32_t* const pairs = (int32_t*)m.scores;
  if (tile_mask.fully_visible && m.rows.vectors == E::vectors)
    return softmax_rounded<E, E::vectors, exact>(scaling, m.state, m.scores, pairs, 0, 0, tile.keys,
                                                 queue);
  for (int v = 0; v < m.rows.vectors; ++v)
    softmax_rounded<E, 1, exact>(scaling, m.state, m.scores, pairs, v, tile_mask.low[v],
                                 tile_mask.high[v], queue);
}

// Whether a row of a tile has a score above the base of its weights.
template <class E>
static bool rises(const ForwardMemory<E>& m) {
  uint32_t any = 0;
  for (int v = 0; v < m.rows.vectors; ++v)
    any |= greater(*(const F*)(m.new_maximum + v * E::lanes),
                   *(const F*)(m.state.base + v * E::lanes));
  return any;
}

// The same for a tile alone, with the product of its values.
template <class E>
static void add_weighted_values(const Forward& f, ForwardMemory<E>& m, const Scaling<E>& scaling,
                                const KeyTile& tile) {
  TileQueue none;
  (needs_total<E>(f) ? softmax_in_place<E, true> : softmax_in_place<E, false>)(scaling, m, tile,
                                                                               none);
  int32_t* const pairs = (int32_t*)m.scores;
  multiply_now(product_with_values(*f.problem, m, tile, pairs), m.rows.vectors);
}

// add_keys by tiles, as a pipeline: while the scores of a tile become weights, tiles multiply the
// weights of the tile before with their values, and the keys of the tile after with the queries.
template <class E, class Look>
static bool add_keys_by_tiles(const Forward& f, ForwardMemory<E>& m, int64_t kv, int64_t low,
                              int64_t high, Look look) {
  const Problem& p = *f.problem;
  const Scaling<E> scaling(p);
  TileQueue queue;
  bool masked = false;
  const auto scores_of = [&](const KeyTile& tile, float* to) {
    multiply_keys<E>(p, m.rows, tile.tile_mask, kv, tile.j0, tile.keys, keys_of(p, m, tile), to);
  };
  KeyTile before{}, tile = shown_tile(p, m, kv, low, high);
  if (tile.keys) scores_of(tile, m.scores);
  for (KeyTile next; tile.keys; before = tile, tile = next) {
    masked |= !tile.unmasked || (tile.packed && tile.keys % E::block);
    __builtin_memcpy(m.new_maximum, m.state.maximum, sizeof(float) * E::rows);
    finish_tile(p, scaling, m, tile);
    if (before.keys)
      enqueue(m.rows, product_with_values(p, m, before, (int32_t*)m.other_scores), queue);
    if (rises(m)) queue.finish();  // what is rescaled must be complete
    for (int v = 0; v < m.rows.vectors; ++v) rescale(p, scaling, m.state, m.new_maximum, v);
    look(tile);
    next = shown_tile(p, m, kv, tile.j0 + E::keys, high);
    const bool meanwhile = E::parts == 1 && next.keys == E::keys && next.tile_mask.fully_visible &&
                           m.rows.vectors == 2 && !few_queries<E>(p);
    if (meanwhile) {
      const Matrix k = keys_of(p, m, next);
      queue.add({tile_rows<E>(k, p.D), next.keys, tile_columns<E>(m.rows.q, p.D), m.other_scores,
                 E::rows, false});
    }
    (needs_total<E>(f) ? softmax_in_place<E, true> : softmax_in_place<E, false>)(scaling, m, tile,
                                                                                 queue);
    queue.finish();
    if (next.keys && (!meanwhile || p.D == 0)) scores_of(next, m.other_scores);
    std::swap(m.scores, m.other_scores);
  }
  if (before.keys)
    multiply_now(product_with_values(p, m, before, (int32_t*)m.other_scores), m.rows.vectors);
  return masked;
}
#endif

// Attends a tile of queries to the keys from `low` to `high`; `look` sees the scores of each tile
// before they become weights. Returns whether some keys were masked for some rows: the product
// 0 * value is then NaN for values of NaN or inf, unless `nan_safe`.
template <class E, class Look>
static bool add_keys(const Forward& f, ForwardMemory<E>& m, int64_t kv, int64_t low, int64_t high,
                     bool nan_safe, Look look) {
  typedef typename E::Real Real;
  const Problem& p = *f.problem;
  const SoftmaxState<E>& state = m.state;
  const Scaling<E> scaling(p);
  if (m.packed && !nan_safe) m.packed.add(p, m.rows.b, kv, low, high);
  for (int64_t x = 0; x < state_size<E>(p); ++x) state.out[x] = 0;
  for (int i = 0; i < E::rows; ++i) state.maximum[i] = state.base[i] = -kInf<Real>;
#ifdef REGARD_TILES
  if constexpr (E::tiles)
    if (!nan_safe && !p.threshold) return add_keys_by_tiles<E>(f, m, kv, low, high, look);
#endif
  const Real weight_scale = nan_safe ? 1 : kWeightScale<Real>;
  bool masked = false;
  for (int64_t j0 = low; j0 < high; j0 += E::keys) {
    const KeyTile tile = key_tile_of(p, m, kv, j0, high, nan_safe);
    if (!mask_shows(p, m.rows, j0, tile.keys)) continue;
    // The last keys of a step may be masked, but are packed with the others.
    masked |= !tile.unmasked || (tile.packed && tile.keys % E::block);
    Prefetcher* const prefetcher = high - j0 <= kPrefetchDistance ? &m.prefetcher : nullptr;
    score_tile(p, scaling, m, tile, prefetcher);
    look(tile);
    const char* const value = p.value.at(m.rows.b, kv, j0);
    const bool scalar =
        nan_safe &&
        (E::parts > 1 ? !finite<E>(value, p.value.strides[2], tile.keys, p.Dv)
                      : !tile.unmasked && !all_finite<E>(p, m.rows, scaling, value, j0, tile.keys));
#ifdef REGARD_TILES
    if constexpr (E::tiles)
      if (!p.threshold && !scalar) {
        add_weighted_values(f, m, scaling, tile);
        continue;
      }
#endif
    const bool fused_packing = E::pack > 1 && !p.threshold && !scalar;
    softmax_tile(p, scaling, m, tile, fused_packing ? m.weights : nullptr, weight_scale);
    if (scalar) {
      add_values_nan_safe<E>(p, m.rows, value, j0, tile.keys, tile.tile_mask, m.scores, state);
      continue;
    }
    if constexpr (E::pack > 1)
      if (!fused_packing) pack_weights(m.rows, tile.tile_mask, tile.keys, m.scores, m.weights);
    multiply_values(p, m, tile, prefetcher);
  }
  if (weight_scale != 1) {
    for (int64_t x = 0; x < p.Dv * E::rows; ++x) state.out[x] *= 1 / weight_scale;
    for (int i = 0; i < E::rows; ++i)
      state.total[i] *= 1 / weight_scale, state.compensation[i] *= 1 / weight_scale;
  }
  return masked;
}

// Whether all outputs of a tile are finite.
template <class E>
static bool finite_sums(const Problem& p, const SoftmaxState<E>& state) {
  typedef typename E::Real Real;
  Vec<Real> sum = {};
  for (int64_t x = 0; x < p.Dv * E::rows; x += E::lanes) {
    const Vec<Real> out = *(const Vec<Real>*)(state.out + x);
    sum += out - out;  // 0, or NaN of NaN and inf
  }
  for (int i = 0; i < E::lanes; ++i)
    if (sum[i] != 0) return false;
  return true;
}

// The maximum stays the largest score up to here, which tells the largest weight of a row.
constexpr int kSinkExponent = 32;

// Adds the term of the attention sink to the denominator of a row. A sink whose term would be above
// 2^kSinkExponent is the maximum. Returns the normaliser (1 / denominator) of its output.
template <class E>
static typename E::Real finish_denominator(const Problem& p, const Scaling<E>& scaling,
                                           int64_t head, typename E::Real& maximum,
                                           typename E::Real& total, typename E::Real rounded) {
  typedef typename E::Real Real;
  if (maximum == -kInf<Real>) {  // no visible key, or scores of NaN
    if (total != total) return total;
    total = 0;
    return 1;
  }
  Real factor = 1;
  if (p.sinks) {
    // A sink is one more key, without a value. In double: its term may be nearly all of the total.
    const double exponent = p.sinks[head] * kLog2e - double(maximum) * factor_of(p);
    Real own;
    if (exponent > kSinkExponent) {
      const Real sink = Real(p.sinks[head] * kLog2e / double(scaling.factor));
      const auto base = scaling.base(broadcast(sink));
      factor = exp2(scaling.exponent(broadcast(maximum), base))[0];
      own = exp2(scaling.exponent(broadcast(sink), base))[0];
      maximum = sink;
    } else {
      own = Real(std::exp2(exponent));
    }
    total = total * factor + own, rounded = rounded * factor + own;
  }
  return factor / rounded * Real(1 / (1 - p.dropout));
}

// Writes numbers of an output row from d on, rounded to the type of the call or as they are summed.
template <class E>
static void put_output(const Array& out, char* row, int64_t d, Vec<typename E::Real> x,
                       int64_t count) {
  typedef typename E::Real Real;
  if (out.type == E::type)
    put<Real, E::type>(row + d * int64_t(sizeof(typename E::Bits)), x, count);
  else
    put<Real, real_type<Real>>(row + d * int64_t(sizeof(Real)), x, count);
}

// Adds the sinks, normalises, and writes output rows and row statistics.
template <class E>
static void write_rows(const Forward& f, const Rows<E>& rows, const SoftmaxState<E>& state) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Problem& p = *f.problem;
  const Scaling<E> scaling(p);
  alignas(64) Real factor[E::rows];  // from base to maximum, then the normaliser
  for (int v = 0; v < rows.vectors; ++v) {
    const auto at = [&](Real* x) -> Vec<Real>& { return *(Vec<Real>*)(x + v * n); };
    at(factor) =
        exp2(scaling.exponent(scaling.base(at(state.base)), scaling.base(at(state.maximum))));
  }
  char* to[E::rows];
  for (int i = 0; i < rows.count; ++i) {
    Real maximum = state.maximum[i];
    const Real sum = needs_total<E>(f) ? state.total[i] + state.compensation[i] : state.rounded[i];
    // With dropout the rounded denominator lacks the dropped weights.
    const Real rounded = E::rounds && !p.threshold ? state.rounded[i] : sum;
    Real total = sum * factor[i];
    factor[i] *= finish_denominator(p, scaling, rows.head[i], maximum, total, rounded * factor[i]);
    const int64_t row = (rows.b * p.Hq + rows.head[i]) * p.Lq + rows.index[i];
    if (f.maximum) ((Real*)f.maximum)[row] = maximum, ((Real*)f.total)[row] = total;
    to[i] = f.out.into(rows.b, rows.head[i], rows.index[i]);
  }
  for (int v = 0; v < rows.vectors; ++v) {
    for (int64_t d = 0; d < p.Dv; d += n) {
      Vec<Real> t[n];
      load_transposed<Real>(state.out + d * E::rows + v * n, E::rows, p.Dv - d, t);
      for (int i = 0; i < n && v * n + i < rows.count; ++i)
        put_output<E>(f.out, to[v * n + i], d, t[i] * factor[v * n + i], p.Dv - d);
    }
  }
}

template <class E>
static int64_t forward_tasks(const Forward& f) {
  const Problem& p = *f.problem;
  const int64_t n = tiles_per_task<E>(f);
  return (p.B * p.Hkv * row_tiles_of<E>(p) + n - 1) / n * splits<E>(p);
}

// Fills `rows` with those of a tile of the batch.
template <class E>
static void describe_tile(const Problem& p, Rows<E>& rows, int64_t tile) {
  const int64_t tiles = row_tiles_of<E>(p), head = tile / tiles, group = p.Hq / p.Hkv;
  describe_rows(p, rows, head / p.Hkv, head % p.Hkv * group, tile % tiles * E::rows, group * p.Lq);
}

// Gives the prefetcher the output rows of a tile and what the next tile, if there is one, reads
// first and this one did not.
template <class E>
static void plan_prefetch(const Forward& f, ForwardMemory<E>& m, bool more) {
  const Problem& p = *f.problem;
  constexpr int64_t size = sizeof(typename E::Bits);
  const auto in_head = [&](const Rows<E>& rows) {
    const int64_t left = p.Lq - rows.index[0];
    return rows.count < left ? rows.count : left;
  };
  m.prefetcher.clear();
  m.prefetcher.add(f.out.at(m.rows.b, m.rows.head[0], m.rows.index[0]), f.out.strides[2],
                   in_head(m.rows), p.Dv * bytes_of(f.out.type));
  if (!more) return;
  const Rows<E>& next = m.next;
  const int64_t kv = next.head[0] / (p.Hq / p.Hkv);
  const bool same = next.b == m.rows.b && kv == m.rows.head[0] / (p.Hq / p.Hkv);
  const int64_t low = same && m.rows.high > next.low ? m.rows.high : next.low;
  const int64_t keys = next.high - low < E::keys ? next.high - low : E::keys;
  m.prefetcher.add(next.query[0], p.query.strides[2], in_head(next), p.D * size);
  m.prefetcher.add(p.key.at(next.b, kv, low), p.key.strides[2], keys, p.D * size);
  m.prefetcher.add(p.value.at(next.b, kv, low), p.value.strides[2], keys, p.Dv * size);
}

// A task is some neighbouring tiles of queries in rising order, which hardware prefetchers follow,
// or one part of a split tile. The last rows come first: with a causal mask they take longest.
template <class E>
static void run_forward(const void* pass, int64_t task, char* memory, const Stop& stop) {
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  ForwardMemory<E> m(f, scratch);
  const int64_t n = splits<E>(p), split = task % n, per_task = tiles_per_task<E>(f);
  const int64_t end = p.B * p.Hkv * row_tiles_of<E>(p) - task / n * per_task;
  int64_t tile = end > per_task ? end - per_task : 0;
  describe_tile(p, m.next, tile);
  for (; tile < end; ++tile) {
    if (stopped(stop)) return;
    const TileConfiguration<E::tiles> configuration;
    m.rows = m.next;
    load_queries<E>(p, m.rows);
    if (tile + 1 < end) describe_tile(p, m.next, tile + 1);
    plan_prefetch(f, m, tile + 1 < end);
    // Tiles of keys are aligned, so that a row's bits do not depend on the rows beside it.
    int64_t low = m.rows.low - m.rows.low % E::keys, high = m.rows.high;
    if (n > 1) {
      if (low < split * kSplitKeys) low = split * kSplitKeys;
      if (high > (split + 1) * kSplitKeys) high = (split + 1) * kSplitKeys;
      m.state = state_in<E>(
          p, f.partial + (tile * n + split) * state_size<E>(p) * sizeof(typename E::Real));
    }
    const int64_t kv = m.rows.head[0] / (p.Hq / p.Hkv);
    const auto none = [](const KeyTile&) {};
    const bool masked = add_keys(f, m, kv, low, high, false, none);
    const bool may_lose = kWeightScale<typename E::Real> != 1 || E::parts > 1;  // infinite sums
    if ((masked || may_lose) && !finite_sums(p, m.state)) add_keys(f, m, kv, low, high, true, none);
    if (n == 1) write_rows(f, m.rows, m.state);
  }
}

// Merges the partial results of a split tile, in their order.
template <class E>
static void run_merge(const void* pass, int64_t unit, char* memory, const Stop&) {
  typedef typename E::Real Real;
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  ForwardMemory<E> m(f, scratch);
  const int64_t n = splits<E>(p), size = state_size<E>(p);
  describe_tile(p, m.rows, unit);
  const Scaling<E> scaling(p);
  const SoftmaxState<E>& sum = m.state;
  for (int64_t x = 0; x < size; ++x) sum.out[x] = 0;
  for (int v = 0; v < m.rows.vectors; ++v) {
    const int at = v * E::lanes;
    const auto vec = [&](const Real* x) -> Vec<Real>& { return *(Vec<Real>*)(x + at); };
    vec(sum.maximum) = Vec<Real>{} - kInf<Real>;
    for (int64_t i = 0; i < n; ++i) {
      const SoftmaxState<E> part = state_in<E>(p, f.partial + (unit * n + i) * size * sizeof(Real));
      vec(sum.maximum) = larger(vec(part.maximum), vec(sum.maximum));
    }
    vec(sum.base) = vec(sum.maximum);
    const auto base = scaling.base(vec(sum.maximum));
    for (int64_t i = 0; i < n; ++i) {
      const SoftmaxState<E> part = state_in<E>(p, f.partial + (unit * n + i) * size * sizeof(Real));
      const Vec<Real> factor = exp2(scaling.exponent(vec(part.base), base));
      add_compensated(vec(sum.total), vec(sum.compensation), vec(part.total) * factor);
      vec(sum.compensation) += vec(part.compensation) * factor;
      vec(sum.rounded) += vec(part.rounded) * factor;
      for (int64_t d = 0; d < p.Dv; ++d)
        vec(sum.out + d * E::rows) += vec(part.out + d * E::rows) * factor;
    }
  }
  write_rows(f, m.rows, sum);
}

}  // namespace regard::REGARD_NAMESPACE
