// Reductions of the weights, recomputed from query, key and the row statistics. A tile of queries
// of one head goes through its keys once, and all reductions are fused over each tile of scores.
// Those that only compare do so before the exponential.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "fused_heatmap-inl.h"
#include "topk-inl.h"

namespace regard::REGARD_NAMESPACE {

// Reduces the weights of each key of a tile over the rows, into what the key has received.
template <class E, class Both>
static void add_columns(const ReduceMemory<E>& m, int keys, typename E::Real* received, Both both) {
  fold_columns<E>(
      m.rows.vectors, keys, received, [&](int j, int v) { return m.score(j, v); }, both);
}

// The reductions over rows alone, which leave the scores. Every key is visible, before mask and
// ids.
template <class E, bool with_distance>
static void add_rows(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m, int64_t j0,
                     int keys) {
  typedef typename E::Real Real;
  const Real apart = Real(r.key_step);
  constexpr int n = E::lanes;
  for (int v = 0; v < m.rows.vectors; ++v) {
    const Vec<Real> base = m.at(m.normalisers.base, v);
    Vec<Real> off = distances_from<E>(j0 * r.key_step, m.position, v);  // to the query
    Vec<Real> sum = {}, entropy = {}, distance = {};
    const auto add = [&]<int unroll>(int j, std::integral_constant<int, unroll>) {
      Vec<Real> x[unroll], w[unroll];
      for (int i = 0; i < unroll; ++i) x[i] = scaling.exponent(m.score(j + i, v), base);
      exponentials<E, true>(x, w);
      Vec<Real> some[3] = {};  // of a few keys first: fewer roundings of the long sums
      for (int i = 0; i < unroll; ++i) {
        some[0] += w[i];
        some[1] += w[i] * x[i];
        if (with_distance) some[2] += w[i] * magnitude(off), off -= apart;
      }
      sum += some[0], entropy += some[1], distance += some[2];
    };
    int j = 0;
    for (; j + 8 <= keys; j += 8) {
      add(j, std::integral_constant<int, 8>());
      if (j % kMeanwhile == 0) m.meanwhile.step();
    }
    for (; j < keys; ++j) add(j, std::integral_constant<int, 1>());
    const Vec<Real> sums[3] = {sum, entropy, distance};  // the others stay in registers
    for (int i = v * n; i < (v + 1) * n; ++i) {
      if (m.normalisers.inverse[i] == 0) continue;
      m.sum[i] += double(sums[0][i % n]) * double(m.normalisers.inverse[i]);
      m.entropy[i] += double(sums[1][i % n]) * double(m.normalisers.inverse[i]);
      if (with_distance) m.distance[i] += double(sums[2][i % n]) * double(m.normalisers.inverse[i]);
    }
  }
}

// The weights of keys that no row of a vector attends to.
template <class E>
static void clear_outside(ReduceMemory<E>& m, const TileMask& tile_mask, int keys) {
  typedef typename E::Real Real;
  for (int v = 0; v < m.rows.vectors; ++v) {
    for (int j = 0; j < tile_mask.low[v]; ++j) m.score(j, v) = Vec<Real>{};
    for (int j = tile_mask.high[v]; j < keys; ++j) m.score(j, v) = Vec<Real>{};
  }
}

// Turns the scores into weights, in place, fused with the reductions over rows and columns.
template <class E, bool rows, bool columns>
static void weights_of_tile(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m,
                            const TileMask& tile_mask, int64_t j0, int keys, Chunk<E>* chunk) {
  typedef typename E::Real Real;
  const Real apart = Real(r.key_step);
  constexpr int n = E::lanes;
  for (int v = 0; v < m.rows.vectors; ++v) {
    const Vec<Real> base = m.at(m.normalisers.base, v), inverse = m.at(m.normalisers.inverse, v);
    // From the key to the query.
    Vec<Real> off = distances_from<E>((j0 + tile_mask.low[v]) * r.key_step, m.position, v);
    Vec<Real> sum = {}, entropy = {}, distance = {};
    const bool fully_visible = tile_mask.fully_visible && !m.has_nan;
    const Exponential<E> exponential(inverse, r.weights || m.has_nan);
    const auto to_weights = [&]<int unroll>(int j, std::integral_constant<int, unroll>) {
      Vec<Real> x[unroll], w[unroll];
      for (int i = 0; i < unroll; ++i) x[i] = scaling.exponent(m.score(j + i, v), base);
      exponential.template weights<rows>(x, w);
      for (int i = 0; i < unroll; ++i) {
        if (!fully_visible)  // also in a row of NaN
          w[i] = m.score(j + i, v) == -kInf<Real> ? Vec<Real>{} : w[i];
        m.score(j + i, v) = w[i];
      }
      if (rows) {
        Vec<Real> some[3] = {};  // of a few keys first: fewer roundings of the long sums
        for (int i = 0; i < unroll; ++i) {
          some[0] += w[i];
          some[1] += w[i] * x[i];
          some[2] += w[i] * magnitude(off);
          off -= apart;
        }
        sum += some[0], entropy += some[1], distance += some[2];
      }
    };
    int j = tile_mask.low[v];
    for (; j + 4 <= tile_mask.high[v]; j += 4) {
      to_weights(j, std::integral_constant<int, 4>());
      if (j % kMeanwhile == 0) m.meanwhile.step();
    }
    for (; j < tile_mask.high[v]; ++j) to_weights(j, std::integral_constant<int, 1>());
    if (rows) {
      for (int i = 0; i < n; ++i) {
        m.sum[v * n + i] += double(sum[i]);
        m.entropy[v * n + i] += double(entropy[i]);
        m.distance[v * n + i] += double(distance[i]);
      }
    }
  }
  if (m.has_nan)
    for (int i = 0; i < m.rows.count; ++i)
      if (m.normalisers.inverse[i] != m.normalisers.inverse[i])
        for (int j = tile_mask.low[i / n]; j < tile_mask.high[i / n]; ++j)
          if (attends(*r.problem, m.rows, i, j0 + j))
            m.scores[j * E::rows + i] = m.normalisers.inverse[i];
  if (columns) {
    clear_outside(m, tile_mask, keys);
    Real* received = chunk->received + j0;
    if (r.received_max)
      add_columns(m, keys, received, [](auto x, auto y) { return y > x ? y : x; });
    else
      add_columns(m, keys, received, [](auto x, auto y) { return x + y; });
  }
}

template <class E>
static void write_weights(const Reduce& r, const ReduceMemory<E>& m, const TileMask& tile_mask,
                          int64_t j0) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Problem& p = *r.problem;
  for (int v = 0; v < m.rows.vectors; ++v)
    for (int j = tile_mask.low[v]; j < tile_mask.high[v]; j += n) {
      const int width = tile_mask.high[v] - j < n ? tile_mask.high[v] - j : n;
      Vec<Real> t[n];
      load_transposed<Real>(m.scores + j * E::rows + v * n, E::rows, width, t);
      for (int i = 0; i < n && v * n + i < m.rows.count; ++i) {
        const int64_t row =
            (m.rows.b * p.Hq + m.rows.head[v * n + i]) * p.Lq + m.rows.index[v * n + i];
        put<Real, real_type<Real>>((char*)((Real*)r.weights + row * p.Lk + j0 + j), t[i], width);
      }
    }
}

// Turns the top-k scores, sorted in the lanes, into weights.
template <class E>
static void weights_of_best(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m) {
  typedef typename E::Real Real;
  for (int64_t i = 0; i < r.k; ++i)
    for (int v = 0; v < m.rows.vectors; ++v) {
      Vec<Real>& best = m.at(m.best + i * E::rows, v);
      const Vec<Real> w = exp2(scaling.exponent(best, m.at(m.normalisers.base, v))) *
                          m.at(m.normalisers.inverse, v);
      best = best == -kInf<Real> ? best : w;
    }
}

// Writes the top-k of a row: strongest first, then keys of weight 0.
template <class E>
static void write_top(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m, int row) {
  typedef typename E::Real Real;
  const Problem& p = *r.problem;
  Candidate<Real>* all = m.candidates + row * m.room(r);
  const int64_t at = (m.rows.b * p.Hq + m.rows.head[row]) * p.Lq + m.rows.index[row];
  Real* values = (Real*)r.top_values + at * r.k;
  int64_t* keys = r.top_keys + at * r.k;
  int64_t n = 0;
  const bool has_nan = m.normalisers.inverse[row] != m.normalisers.inverse[row];
  if (has_nan) {  // its visible keys, in order
    for (int64_t j = m.rows.first[row]; j < m.rows.last[row] && n < r.k; ++j)
      if (attends(p, m.rows, row, j)) all[n++] = {m.normalisers.inverse[row], int32_t(j)};
  } else {
    n = best_of_row(r, m, row);
    for (int64_t i = 0; i < n && r.k > kSortedInLanes; ++i)
      all[i].score = exp2(broadcast((all[i].score - m.normalisers.base[row]) * scaling.factor))[0] *
                     m.normalisers.inverse[row];
    std::sort(all, all + n, ByScore<Real>());
  }
  for (int64_t i = 0; i < n; ++i) values[i] = all[i].score, keys[i] = all[i].key;
  fill_top(all, n, r.k, values, keys);
}

// Initialises the partial results of a chunk.
template <class E>
static void start_chunk(const Reduce& r, ReduceMemory<E>& m, const RowChunk<E>& chunk) {
  if (r.received || r.received_max)
    for (int64_t j = 0; j < r.problem->Lk; ++j) chunk.found.received[j] = 0;
  if (has_heatmap(r)) start_bins(r, m.bins, chunk);
  if (is_linear(r)) start_linear_chunk(r, m.linear, chunk.found);
}

// Turns a tile of scores into weights where a reduction needs them, and reduces.
template <class E>
static void reduce_weights(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m,
                           const TileMask& tile_mask, int64_t j0, int keys, RowChunk<E>& chunk) {
  const bool rows = r.entropy || r.distance, columns = r.received || r.received_max;
  const bool linear = is_linear(r);
  const bool whole = tile_mask.fully_visible && !m.has_nan && !columns && !r.weights && !linear;
  Chunk<E>* const found = &chunk.found;
  const auto meanwhile = [&] { m.meanwhile.step(); };
  if (linear && !rows && !columns && !r.weights && !r.pooled_mass && !m.has_nan &&
      add_fused(r, scaling, m.rows, m.linear, m.scores, m.normalisers, tile_mask, chunk.begin, j0,
                keys, meanwhile))
    return;
  if (whole && !rows &&
      pool_mass(r, m.rows, m.bins, scaling, m.normalisers, m.scores, j0, keys, meanwhile))
    return;
  if (rows && columns)
    weights_of_tile<E, true, true>(r, scaling, m, tile_mask, j0, keys, found);
  else if (rows && whole && !r.pooled_mass)
    (r.distance ? add_rows<E, true> : add_rows<E, false>)(r, scaling, m, j0, keys);
  else if (rows)
    weights_of_tile<E, true, false>(r, scaling, m, tile_mask, j0, keys, found);
  else if (columns)
    weights_of_tile<E, false, true>(r, scaling, m, tile_mask, j0, keys, found);
  else
    weights_of_tile<E, false, false>(r, scaling, m, tile_mask, j0, keys, found);
  if (linear) {
    if (!columns) clear_outside(m, tile_mask, keys);
    add_linear(r, m.rows, m.linear, m.scores, tile_mask, j0, keys, chunk);
  }
  if (r.pooled_mass) pool_tile<E, true>(r, m.rows, m.bins, m.scores, tile_mask, j0, keys);
  if (r.weights) write_weights(r, m, tile_mask, j0);
}

// scores[key][row]: the products of a tile, where they are visible.
template <class E>
static void multiply_tile(const Problem& p, ReduceMemory<E>& m, const TileMask& tile_mask,
                          int64_t j0, int keys, typename E::Real* scores) {
  const int64_t kv = m.rows.head[0] / (p.Hq / p.Hkv);
  if (!E::tiles && m.rows.count <= kLoneRows && kLoneRows <= E::lanes && !few_queries<E>(p))
    return multiply_lone<E>(p, m.rows, kv, j0, keys, m.lone, scores);
  const Matrix k = few_queries<E>(p) ? Matrix{} : m.keys.at(p, m.rows.b, kv, j0, keys);
  multiply_keys<E>(p, m.rows, tile_mask, kv, j0, keys, k, scores);
}

// Keys whose scores are reduced together.
struct ScoreTile {
  int64_t j0;
  int keys = 0;  // 0: there are no more
  TileMask tile_mask;
};

// The first tile from j0 on of which any key is shown.
template <class E>
static void find_keys(const Problem& p, const Rows<E>& rows, int64_t j0, ScoreTile& tile) {
  tile.keys = 0;
  for (; j0 < rows.high; j0 += kKeys) {
    const int keys = int(rows.high - j0 < kKeys ? rows.high - j0 : kKeys);
    if (!mask_shows(p, rows, j0, keys)) continue;
    tile.j0 = j0, tile.keys = keys, tile.tile_mask = tile_mask_of(rows, j0, keys);
    return;
  }
}

// Begins to compute the scores of the next keys by tiles, while vectors reduce others; false where
// they must be computed at once.
template <class E>
static bool start_multiplying([[maybe_unused]] const Problem& p,
                              [[maybe_unused]] ReduceMemory<E>& m,
                              [[maybe_unused]] const ScoreTile& next) {
#ifdef REGARD_TILES
  if constexpr (ReduceMemory<E>::overlaps) {
    if (!next.keys || next.keys % (2 * kTileRows) || m.rows.vectors % 2 || few_queries<E>(p) ||
        p.D == 0)
      return false;
    const int64_t kv = m.rows.head[0] / (p.Hq / p.Hkv);
    int low = next.keys, high = 0;  // the keys that any row sees, in whole blocks
    for (int v = 0; v < m.rows.vectors; ++v) {
      if (next.tile_mask.low[v] < low) low = next.tile_mask.low[v];
      if (next.tile_mask.high[v] > high) high = next.tile_mask.high[v];
    }
    constexpr int block = 2 * kTileRows;
    low = low / block * block, high = (high + block - 1) / block * block;
    if (low >= high) return true;
    const Matrix k = m.keys.at(p, m.rows.b, kv, next.j0, next.keys);
    const Matrix seen = {(const char*)k.data + low * k.stride, k.stride};
    m.meanwhile.start({tile_rows<E>(seen, p.D), high - low, tile_columns<E>(m.rows.q, p.D),
                       m.next_scores + low * E::rows, E::rows},
                      m.rows.vectors);
    return true;
  }
#endif
  return false;
}

// Runs all reductions over the scores of a tile.
template <class E>
static void reduce_tile(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m,
                        const ScoreTile& tile, RowChunk<E>& chunk) {
  const Problem& p = *r.problem;
  const int64_t j0 = tile.j0;
  const int keys = tile.keys;
  const TileMask& tile_mask = tile.tile_mask;
  if (!is_unmasked<E>(p, m.rows, tile_mask, j0, keys))
    finish_scores<E>(p, m.rows, tile_mask, scaling, j0, keys, m.scores, nullptr);
  if (r.k) keep_top(r, m, tile_mask, j0, m.scores, AsItIs());
  if (r.n) find_pairs(r, scaling, m, tile_mask, j0);
  if (r.pooled_max)
    pool_tile<E, false>(
        r, m.rows, m.bins, m.scores, tile_mask, j0, keys,
        [&](Vec<typename E::Real> score, int v) {
          return m.normalisers.log2_weight(scaling, score, v);
        },
        [&] { m.meanwhile.step(); });
  if (r.entropy || r.distance || r.received || r.received_max || r.pooled_mass || r.weights ||
      is_linear(r))
    reduce_weights(r, scaling, m, tile_mask, j0, keys, chunk);
}

// Computes the scores of a tile of queries, and reduces them.
template <class E>
static void reduce_keys(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m,
                        RowChunk<E>& chunk) {
  const Problem& p = *r.problem;
  ScoreTile tiles[2], *tile = tiles, *next = tiles + 1;
  const auto multiply = [&](const ScoreTile& x, typename E::Real* scores) {
    multiply_tile(p, m, x.tile_mask, x.j0, x.keys, scores);
  };
  find_keys(p, m.rows, m.rows.low, *tile);
  if (tile->keys) multiply(*tile, m.scores);
  while (tile->keys) {
    find_keys(p, m.rows, tile->j0 + kKeys, *next);
    const bool meanwhile = start_multiplying(p, m, *next);
    reduce_tile(r, scaling, m, *tile, chunk);
    m.meanwhile.finish();
    if (next->keys && !meanwhile) multiply(*next, m.next_scores);
    std::swap(m.scores, m.next_scores);
    std::swap(tile, next);
  }
}

// Writes the reductions over the rows of a tile.
template <class E>
static void write_rows(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m) {
  typedef typename E::Real Real;
  const Problem& p = *r.problem;
  if (r.k && r.k <= kSortedInLanes) weights_of_best(r, scaling, m);
  for (int i = 0; i < m.rows.count; ++i) {
    const int64_t at = (m.rows.b * p.Hq + m.rows.head[i]) * p.Lq + m.rows.index[i];
    if (r.entropy) {
      // Without a sink whole rows sum to 1, up to the rounding of their total.
      const double rounding = p.sinks || !r.whole_rows ? 1 : m.sum[i];
      const double total = double(((const Real*)r.total)[at]) * rounding;
      r.entropy[at] =
          total == 0 ? 0 : kLn2 * (std::log2(total) * m.sum[i] - m.entropy[i]) / rounding;
    }
    if (r.distance) r.distance[at] = m.distance[i];
    if (r.k) write_top(r, scaling, m, i);
  }
}

template <class E>
static ReduceMemory<E> reduce_memory(const Reduce& r, Scratch& scratch) {
  const int64_t rows = rows_of_head(r), chunk = chunk_rows<E>(r);
  const bool several = (rows < chunk ? rows : chunk) > E::rows;
  return {r, scratch, several && KeyRows<E>::can_keep(*r.problem)};
}

template <class E>
static void run_reduce(const void* pass, int64_t task, char* memory, const Stop& stop) {
  const Reduce& r = *(const Reduce*)pass;
  const Problem& p = *r.problem;
  Scratch scratch(memory);
  ReduceMemory<E> m = reduce_memory<E>(r, scratch);
  const Scaling<E> scaling(p);
  RowChunk<E> chunk = chunk_of_task<E>(r, task);
  start_chunk(r, m, chunk);
  const int64_t* const listed = r.rows ? r.rows + chunk.head * r.row_count : nullptr;
  for (int64_t row = chunk.begin; row < chunk.end; row += E::rows) {
    if (stopped(stop)) return;
    const TileConfiguration<E::tiles> configuration;
    describe_rows(p, m.rows, chunk.head / p.Hq, chunk.head % p.Hq, row, chunk.end, listed);
    load_queries<E>(p, m.rows);
    start_rows(r, m);
    if (is_linear(r)) start_linear_rows(r, m.rows, m.linear);
    if (has_heatmap(r)) find_bins(r, m.rows, m.bins, chunk);
    if (r.n) set_pair_threshold(scaling, m);
    reduce_keys(r, scaling, m, chunk);
    write_rows(r, scaling, m);
    if (is_linear(r)) finish_linear_rows(r, m.rows, m.linear, chunk);
  }
  if (is_linear(r)) finish_linear_chunk(r, m.linear, chunk);
  if (!r.n) return;
  keep_strongest(r, m);
  *chunk.found.count = m.pair_count;
  for (int64_t i = 0; i < m.pair_count; ++i) chunk.found.pairs[i] = m.pairs[i];
}

static Job reduce(const Reduce& r) {
  return by_computed<Job>(r.problem->type, [&]<class T>(T) -> Job {
    typedef typename T::OfForward E;
    if (r.finds_statistics) return fused_heatmap<E>(r);
    Scratch scratch(nullptr);
    reduce_memory<E>(r, scratch);
    return {(r.head1 - r.head0) * chunks_of<E>(r), scratch.taken(), run_reduce<E>, &r};
  });
}

}  // namespace regard::REGARD_NAMESPACE
