// A tile of queries and keys in the forward pass: its memory, scores, maxima and weights.
#pragma once

#include <cstdint>
#include <type_traits>

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

// Packed values whose words are single numbers lie in panels, [keys of a tile][columns], with the
// columns of a few register blocks: a cache line that one of these reads is there for the next.
constexpr int64_t kPanel = 4 * kRows;

// Keys and values that are packed before they are multiplied, once for all tiles of queries of a
// head that a thread takes one after another: where words cannot be read in place, and where rows
// lie apart, as those of a head between other heads: they fall into few sets of the caches, each
// into a page of its own. So do the values of a column where rows are multiples of 512 bytes; and
// long keys that come from beyond L2, numbers as they are, are one stream in panels, which
// prefetchers follow, where rows are four. Packing these takes less time than it spares where a
// thread has many tiles of queries.
template <class E>
struct PackedKV {
  typedef typename E::Word Word;
  static constexpr int64_t kMost = 8 << 20;  // bytes of a thread
  static constexpr int64_t kTilesOfPanels = 16, kLongRow = 512;
  struct Range {
    int64_t head, low, high;
  };
  Range* held;             // which keys are packed; zeros, none, when the thread begins
  Word* keys = nullptr;    // [high - low][row_words(D)], or null
  bool has_long_keys;      // whether keys lie in panels
  Word* values = nullptr;  // panels, or [words(high - low)][Dv]; or null

  PackedKV(const Forward& f, Scratch& scratch) {
    const Problem& p = *f.problem;
    const bool many = row_tiles_of<E>(p) >= kTilesOfPanels * f.threads;
    has_long_keys = kHasKeyPanels<E> && many && p.type == real_type<typename E::Real> &&
                    p.D * bytes_of(p.type) >= kLongRow;
    const bool in_few_sets = many && p.value.strides[2] % 512 == 0;
    const bool packs_values = E::pack > 1 || are_packed(p, p.value, p.Dv) || in_few_sets;
    const int64_t whole_tiles = (p.Lk + E::keys - 1) / E::keys * E::keys;
    const int64_t value_words = packs_values ? pair_words<E>(whole_tiles, p.Dv) : 0;
    const bool packs_keys = are_packed(p, p.key, p.D) || has_long_keys;
    int64_t key_words = packs_keys ? whole_tiles * E::row_words(p.D) : 0;
    const auto is_too_much = [&] {
      return (key_words + value_words) * int64_t(sizeof(Word)) > kMost;
    };
    held = scratch.take<Range>(1);  // first: these bytes of a thread's scratch stay
    if (is_too_much()) key_words = 0;
    if (row_tiles_of<E>(p) < 2 || is_too_much()) return;
    if (key_words) keys = scratch.take<Word>(key_words);
    if (value_words) values = scratch.take<Word>(value_words);
  }

  static bool are_packed(const Problem& p, const Array& x, int64_t D) {
    const bool in_place = by_stored<E>(p.type, [&]<class S>(S) { return reads_in_place<S>(D); });
    return !in_place || x.strides[2] != D * bytes_of(p.type);
  }

  explicit operator bool() const { return keys || values; }

  // Packs those keys from `from` to `to` that are missing.
  void add(const Problem& p, int64_t b, int64_t kv, int64_t from, int64_t to) const {
    from -= from % E::keys;
    if (to % E::block) to = to / E::block * E::block + E::block;
    if (to > p.Lk) to = p.Lk;
    const int64_t head = b * p.Hkv + kv;
    if (held->head != head || from < held->low || from > held->high) *held = {head, from, from};
    const int64_t high = held->high, count = high - held->low, n = to - high;
    if (n <= 0) return;
    if (keys) add_keys(p, p.key.at(b, kv, high), count, n);
    if (values) add_values(p, p.value.at(b, kv, high), count, n);
    held->high = to;
  }

  // Packs n keys behind those that are packed.
  void add_keys(const Problem& p, const char* key, int64_t count, int64_t n) const {
    if constexpr (kHasKeyPanels<E>)
      if (has_long_keys) return add_long_keys(p, key, count, n);
    by_stored<E>(p.type, [&]<class S>(S) {
      pack_rows<S>(key, p.key.strides[2], n, p.D, keys + count * E::row_words(p.D));
    });
  }

  void add_long_keys(const Problem& p, const char* key, int64_t count, int64_t n) const {
    for (int64_t j = count; j < count + n; ++j, key += p.key.strides[2])
      for (int64_t d = 0; d < p.D; d += kTerms) {
        const int64_t terms = p.D - d < kTerms ? p.D - d : kTerms, row = j % E::keys;
        Word* const panel =
            keys + (j - row) * p.D + E::keys * d + row / kPanelRows * kPanelRows * terms;
        for (int64_t t = 0; t < terms; ++t)
          panel[t * kPanelRows + row % kPanelRows] = read<Word>(key + (d + t) * sizeof(Word));
      }
  }

  // Likewise values.
  void add_values(const Problem& p, const char* value, int64_t count, int64_t n) const {
    by_stored<E>(p.type, [&]<class S>(S) { add_stored_values<S>(p, value, count, n); });
  }

  template <class S>
  void add_stored_values(const Problem& p, const char* value, int64_t count, int64_t n) const {
    const int64_t stride = p.value.strides[2], size = sizeof(typename S::Bits);
    if constexpr (E::pack > 1) {
      pack_values<S>(value, stride, n, p.Dv, values + pair_words<E>(count, p.Dv));
      return;
    }
    for (int64_t done = 0, some; done < n; done += some) {
      const int64_t row = (count + done) % E::keys;
      some = n - done < E::keys - row ? n - done : E::keys - row;
      Word* const tile = values + (count + done - row) * p.Dv;
      for (int64_t d = 0; d < p.Dv; d += kPanel) {
        const int64_t columns = p.Dv - d < kPanel ? p.Dv - d : kPanel;
        pack_rows<S>(value + done * stride + d * size, stride, some, columns,
                     tile + d * E::keys + row * columns);
      }
    }
  }
};

// Keys and values of a head that L2 is likely to hold beside the rest: those of half of it, and of
// at most half a megabyte.
template <class E>
static int64_t cached_keys(const Problem& p) {
  const int64_t numbers = p.D + p.Dv > 0 ? p.D + p.Dv : 1;
  const int64_t bytes = numbers * bytes_of(p.type);
  const int64_t half = level2_bytes() / 2, most = half < 512 << 10 ? half : 512 << 10;
  const int64_t keys = most / bytes / E::keys * E::keys;
  return keys > E::keys ? keys : E::keys;
}

// A tile of queries whose sums lack keys.
template <class E>
struct WaitingTile {
  Rows<E> rows;
  SoftmaxState<E> state;
  bool masked;
};

// Without fused multiply-adds the product of a weight and a value is rounded before it is added,
// and takes 150 cycles where it is denormal. Weights times this power of two avoid that: for scores
// that spread over hundreds of nats, portable took 3 times as long without.
#ifdef REGARD_FMA
template <class R>
constexpr R kWeightScale = 1;
#else
template <class R>
constexpr R kWeightScale = R(0x1p64f);
#endif

// How many tiles of queries of a task wait for one another, each until the others have the same
// keys: where keys and values come from beyond L2, of which the tiles' queries and sums take half.
// Not where weights are scaled until the sums are complete.
template <class E>
static int64_t waiting_tiles(const Forward& f) {
  const Problem& p = *f.problem;
  if (kWeightScale<typename E::Real> != 1 || splits<E>(p) > 1) return 1;
  if (p.Lk <= 2 * cached_keys<E>(p)) return 1;
  const int64_t bytes = query_words<E>(p) * int64_t(sizeof(typename E::Word)) +
                        state_size<E>(p) * int64_t(sizeof(typename E::Real));
  const int64_t held = level2_bytes() / 2 / bytes, most = tiles_per_task<E>(f);
  return held < most ? (held > 1 ? held : 1) : most;
}

template <class E>
struct ForwardMemory {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  Rows<E> rows, next;
  Prefetcher prefetcher;
  SoftmaxState<E> state;
  Real* scores;            // [keys][rows]: scores, then weights
  Real* other_scores;      // likewise, of the tile before or after, for tiles
  Real* spare_scores;      // for keys that are added anew while those two are in use, for tiles
  Real* other_statistics;  // of a second state with the same sums, for tiles
  Real* new_maximum;       // [rows]: with the scores of the tile
  Word* weights;           // the weights, packed
  Word* keys;
  Word* values;
  uint32_t* keep_mask;
  PackedKV<E> packed;
  bool masked = false;   // whether some keys were masked for some rows
  bool has_sums = true;  // whether the sums are set, be it to 0
  WaitingTile<E>* waiting = nullptr;

  ForwardMemory(const Forward& f, Scratch& scratch) : packed(f, scratch) {
    const Problem& p = *f.problem;
    rows.q = next.q = scratch.take<Word>(query_words<E>(p));
    scores = scratch.take<Real>(E::keys * E::rows);
    other_scores = E::tiles ? scratch.take<Real>(E::keys * E::rows) : nullptr;
    spare_scores = E::tiles ? scratch.take<Real>(E::keys * E::rows) : nullptr;
    weights = E::pack == 1 ? (Word*)scores
                           : scratch.take<Word>(E::keys / 2 * (E::tiles ? 2 : 1) * E::rows);
    state = state_in<E>(p, scratch.take<Real>(state_size<E>(p)));
    other_statistics = E::tiles ? scratch.take<Real>(kStatistics * E::rows) : nullptr;
    new_maximum = scratch.take<Real>(E::rows);
    keys = scratch.take<Word>(E::keys * E::row_words(p.D));
    values = scratch.take<Word>(pair_words<E>(E::keys, p.Dv));
    keep_mask = p.threshold ? scratch.take<uint32_t>(E::keys * kKeepMaskRows<E>) : nullptr;
    const int64_t wait = waiting_tiles<E>(f);
    if (wait < 2) return;
    waiting = scratch.take<WaitingTile<E>>(wait);
    for (int64_t t = 0; t < wait; ++t) {
      Word* const q = scratch.take<Word>(query_words<E>(p));
      Real* const sums = scratch.take<Real>(state_size<E>(p));
      if (scratch.measures()) continue;
      waiting[t].rows.q = q;
      waiting[t].state = state_in<E>(p, sums);
    }
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
  // Tiles round the weights in any case: these leave the margin from the first tile of keys on.
  const auto exact = E::tiles ? old != old : old == none;
  const Vec<Real> risen = (exact | (higher == kInf<Real>)) ? maximum : higher;
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
REGARD_INLINE static void add_to_totals(const SoftmaxState<E>& state,
                                        const Vec<typename E::Real> (&sum)[V], int v) {
  typedef typename E::Real Real;
  for (int i = 0; i < V; ++i) {
    const int at = (v + i) * E::lanes;
    add_compensated(*(Vec<Real>*)(state.total + at), *(Vec<Real>*)(state.compensation + at),
                    sum[i]);
  }
}

#ifdef REGARD_PAIRS
// Turns the scores of V vectors into weights relative to the base, packed into pairs of
// neighbouring keys, whose sums are added to `sums`, [rows].
template <class E, int V>
static void softmax_pairs(const Scaling<E>& scaling, const SoftmaxState<E>& state,
                          const float* scores, int32_t* pairs, float* sums, int v, int low,
                          int high) {
  constexpr int n = E::lanes;
  F base[V], rounded[V];
  for (int i = 0; i < V; ++i) rounded[i] = *(const F*)(sums + (v + i) * n);
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
        rounded[i] = Pairs::add(rounded[i], pair, ones());
      }
    }
    add_to_totals<E, V>(state, sum, v);
  }
  for (int i = 0; i < V; ++i) *(F*)(sums + (v + i) * n) = rounded[i];
}
#endif

// Turns the scores of V vectors into weights relative to the base, times `weight_scale`, in place
// or packed into `pairs`, with their sums.
template <class E, int V>
static void softmax(const Scaling<E>& scaling, const SoftmaxState<E>& state,
                    typename E::Real* scores, [[maybe_unused]] typename E::Word* pairs,
                    [[maybe_unused]] typename E::Real* sums, typename E::Real weight_scale, int v,
                    int low, int high) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
#ifdef REGARD_PAIRS
  if constexpr (E::pack > 1)
    if (pairs) return softmax_pairs<E, V>(scaling, state, scores, pairs, sums, v, low, high);
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

// The keys of a tile: with heads of up to 64 numbers tiles of half as many stay in L1 with the
// rest.
template <class E>
static int64_t tile_keys(const Problem& p) {
  return E::tiles && p.D <= 64 && p.Dv <= 64 ? E::keys / 2 : E::keys;
}

template <class E>
static void set_key_tile(const Problem& p, const ForwardMemory<E>& m, int64_t kv, int64_t j0,
                         int64_t high, bool nan_safe, KeyTile& tile) {
  const int64_t most = tile_keys<E>(p);
  tile.kv = kv, tile.j0 = j0;
  tile.keys = int(high - j0 < most ? high - j0 : most);
  set_tile_mask(m.rows, j0, tile.keys, tile.tile_mask);
  tile.unmasked = is_unmasked<E>(p, m.rows, tile.tile_mask, j0, tile.keys);
  tile.packed = m.packed && !nan_safe && j0 % E::block == 0;
}

// The keys of a tile as words, packed or in place.
template <class E>
static Matrix keys_of(const Problem& p, const ForwardMemory<E>& m, const KeyTile& tile) {
  const char* const key = p.key.at(m.rows.b, tile.kv, tile.j0);
  const int64_t stride = p.key.strides[2], words = E::row_words(p.D);
  if (few_queries<E>(p)) return {key, stride};
  if (tile.packed && m.packed.keys)
    return {m.packed.keys + (tile.j0 - m.packed.held->low) * words,
            kHasKeyPanels<E> && m.packed.has_long_keys ? kInPanels
                                                       : words * int64_t(sizeof(typename E::Word))};
  if (!PackedKV<E>::are_packed(p, p.key, p.D)) return {key, stride};
  return by_stored<E>(
      p.type, [&]<class S>(S) { return pack_rows<S>(key, stride, tile.keys, p.D, m.keys); });
}

// Whether the values of a tile lie in panels.
template <class E>
static bool in_panels(const ForwardMemory<E>& m, const KeyTile& tile) {
  return E::pack == 1 && tile.packed && m.packed.values;
}

// The values of a tile, likewise; two rows of numbers are one of pairs. Where they lie in panels,
// the memory of these.
template <class E>
static Matrix values_of(const Problem& p, const ForwardMemory<E>& m, const KeyTile& tile) {
  const char* const value = p.value.at(m.rows.b, tile.kv, tile.j0);
  const int64_t stride = p.value.strides[2];
  if (tile.packed && m.packed.values)
    return {m.packed.values + pair_words<E>(tile.j0 - m.packed.held->low, p.Dv),
            (E::tiles ? E::lanes : p.Dv) * int64_t(sizeof(typename E::Word))};
  if (E::pack == 1 && !PackedKV<E>::are_packed(p, p.value, p.Dv)) return {value, stride};
  return by_stored<E>(
      p.type, [&]<class S>(S) { return pack_values<S>(value, stride, tile.keys, p.Dv, m.values); });
}

// Calls `some(v, low, high, V)` for the visible keys of a tile and V vectors from v on: for all of
// them at once where they see the same keys, in whole sums of kSumKeys; else for one. The keys of a
// vector come in their order.
template <class E, class Some>
static void by_vectors(const Rows<E>& rows, const TileMask& tile_mask, int keys, Some some) {
  constexpr std::integral_constant<int, 1> one;
  int begin = 0, end = rows.vectors == E::vectors ? keys : 0;
  for (int v = 0; v < rows.vectors && !tile_mask.fully_visible; ++v) {
    const int low = (tile_mask.low[v] + kSumKeys - 1) / kSumKeys * kSumKeys;
    const int high = tile_mask.high[v] / kSumKeys * kSumKeys;
    begin = low > begin ? low : begin, end = high < end ? high : end;
  }
  if (begin >= end) begin = end = 0;
  for (int v = 0; v < rows.vectors; ++v)
    if (tile_mask.low[v] < begin) some(v, tile_mask.low[v], begin, one);
  if (begin < end) some(0, begin, end, std::integral_constant<int, E::vectors>());
  for (int v = 0; v < rows.vectors; ++v) {
    const int low = tile_mask.low[v] > end ? tile_mask.low[v] : end;
    if (low < tile_mask.high[v]) some(v, low, tile_mask.high[v], one);
  }
}

// Raises the maxima of the rows of a tile to its scores.
template <class E>
static void find_maxima(ForwardMemory<E>& m, const KeyTile& tile) {
  typedef typename E::Real Real;
  by_vectors<E>(m.rows, tile.tile_mask, tile.keys,
                [&]<int V>(int v, int low, int high, std::integral_constant<int, V>) {
                  constexpr int chains = E::tiles ? 4 : 1;  // each waits for the one before
                  Vec<Real> maximum[chains][V];
                  for (auto& chain : maximum)
                    for (int i = 0; i < V; ++i) chain[i] = vector_at<E>(m.new_maximum, 0, v + i);
                  const auto see = [&](int j, int chain) {
                    for (int i = 0; i < V; ++i)
                      maximum[chain][i] =
                          larger(vector_at<E>(m.scores, j, v + i), maximum[chain][i]);
                  };
                  int j = low;
                  for (; j + chains <= high; j += chains)
#pragma GCC unroll 4
                    for (int c = 0; c < chains; ++c) see(j + c, c);
                  for (; j < high; ++j) see(j, 0);
                  for (int i = 0; i < V; ++i) {
                    Vec<Real> top = maximum[0][i];
                    for (int c = 1; c < chains; ++c) top = larger(maximum[c][i], top);
                    vector_at<E>(m.new_maximum, 0, v + i) = top;
                  }
                });
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
  if (!E::tiles && k.stride != kInPanels && tile.unmasked && words <= kTerms &&
      !few_queries<E>(p)) {
    multiply<typename E::Op, false, Epilogue::set_and_maximum>(
        rows.vectors, rows.q, E::rows, k.data, k.stride, words, tile.keys, m.scores, E::rows,
        m.new_maximum, prefetcher);
  } else {
    multiply_keys<E>(p, rows, tile_mask, kv, j0, tile.keys, k, m.scores, prefetcher);
    if (!tile.unmasked)
      finish_scores<E>(p, rows, tile_mask, scaling, j0, tile.keys, m.scores, nullptr);
    find_maxima(m, tile);
  }
  for (int v = 0; v < rows.vectors; ++v) rescale(p, scaling, m.state, m.new_maximum, v);
}

// The weights of a tile from its scores; into `pairs`, optional, where nothing else needs them.
template <class E>
static void softmax_tile(const Problem& p, const Scaling<E>& scaling, ForwardMemory<E>& m,
                         const KeyTile& tile, typename E::Word* pairs,
                         typename E::Real weight_scale) {
  const TileMask& tile_mask = tile.tile_mask;
  typedef typename E::Real Real;
  alignas(64) Real sums[E::rows] = {};
  by_vectors<E>(m.rows, tile_mask, tile.keys,
                [&]<int V>(int v, int low, int high, std::integral_constant<int, V>) {
                  softmax<E, V>(scaling, m.state, m.scores, pairs, sums, weight_scale, v, low,
                                high);
                });
  for (int v = 0; E::rounds && pairs && v < m.rows.vectors; ++v)
    vector_at<E>(m.state.rounded, 0, v) += vector_at<E>(sums, 0, v);
  if (!p.threshold) return;
  draw_keep_mask(p, m.rows, tile.j0, tile.keys, m.keep_mask);
  apply_dropout(m.rows, tile_mask, m.keep_mask, m.scores);
}

// Whether the denominator of weights that are not rounded is needed.
template <class E>
static bool needs_total(const Forward& f) {
  return !(E::tiles && E::rounds) || f.maximum || f.problem->threshold;
}

}  // namespace regard::REGARD_NAMESPACE
