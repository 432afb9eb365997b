// The forward pass by tiles of the processor, as a software pipeline: while the scores of a tile of
// keys become weights, tiles multiply the weights of the one before with their values, and the keys
// of the one after with the queries.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "forward_tile-inl.h"

namespace regard::REGARD_NAMESPACE {

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

}  // namespace regard::REGARD_NAMESPACE
