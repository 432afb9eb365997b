// Linear forms of the weights, which are sums of them: W x, W^T y, and the sums over blocks of
// queries and keys and along diagonals. A tile of weights, [key][row], is added to each.
#pragma once

#include <cstdint>
#include <cstring>

#include "heatmap-inl.h"
#include "weights-inl.h"

namespace regard::REGARD_NAMESPACE {

static bool is_linear(const Reduce& r) {
  return r.product || r.transposed || r.blocks || r.blocks_max || r.diagonals;
}

// Reduces `keys` columns of a tile to one number each, into `out`; `term` gives vector v of key j.
template <class E, class Term, class Both>
static void fold_columns(int vectors, int keys, typename E::Real* out, Term term, Both both) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  for (int j = 0; j < keys; j += n) {
    const int width = keys - j < n ? keys - j : n;
    Vec<Real> t[n];
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {  // past the last key: not used
      t[i] = term(j + i, 0);
      if (vectors == E::vectors)
        for (int v = 1; v < E::vectors; ++v) t[i] = both(t[i], term(j + i, v));
      else
        for (int v = 1; v < vectors; ++v) t[i] = both(t[i], term(j + i, v));
    }
    const Vec<Real> all = fold_each(t, both);
    for (int i = 0; i < width; ++i) out[j + i] = both(out[j + i], all[i]);
  }
}

template <class Real>
static const Real* operand_at(const Operand& x, int64_t b, int64_t h) {
  return (const Real*)x.data + b * x.strides[0] + h * x.strides[1];
}

template <class E>
struct LinearMemory {
  typedef typename E::Real Real;
  Real* product;                    // [columns][rows]: of W x
  Real* other;                      // y: [columns][rows], or [rows][padded columns]
  bool finite;                      // whether y is, of these rows
  Real* cells;                      // [key blocks][rows]
  int64_t low, high;                // the cells that were added to
  Real* diagonals;                  // [.][lanes][lanes]: see add_diagonals
  int64_t first_block, last_block;  // of lanes that were added to
  double* diagonal_sums;            // [.][lanes]: see sum_diagonals

  LinearMemory(const Reduce& r, Scratch& scratch) {
    product = scratch.take<Real>(r.product ? r.product_with.columns * E::rows : 0);
    other = scratch.take<Real>(r.transposed ? transposed_width<E>(r) * E::rows : 0);
    cells = scratch.take<Real>(r.blocks || r.blocks_max ? r.block_counts[1] * E::rows : 0);
    diagonals = scratch.take<Real>(diagonal_size(r));
    diagonal_sums = scratch.take<double>(diagonal_size(r) / E::lanes);
  }

  static int64_t padded_keys(const Reduce& r) {
    return (r.problem->Lk + E::lanes - 1) / E::lanes * E::lanes;
  }
  static int64_t diagonal_size(const Reduce& r) {
    if (!r.diagonals || r.query_step != r.key_step) return 0;
    return (chunk_rows<E>(r) + padded_keys(r) + 2 * E::lanes) * E::lanes;
  }
};

template <class E>
static void start_linear_chunk(const Reduce& r, LinearMemory<E>& m, const Chunk<E>& found) {
  const auto clear = [](auto* x, int64_t n) { std::memset((void*)x, 0, size_t(n) * sizeof(*x)); };
  if (r.transposed) clear(found.transposed, r.problem->Lk * transposed_width<E>(r));
  if (r.blocks || r.blocks_max) {
    clear(found.blocks, r.block_counts[0] * r.block_counts[1]);
    clear(m.cells, r.block_counts[1] * E::rows);
  }
  if (r.diagonals) clear(found.diagonals, r.distances);
  clear(m.diagonals, LinearMemory<E>::diagonal_size(r));
  m.first_block = LinearMemory<E>::diagonal_size(r), m.last_block = -1;
}

// Loads y of a tile of rows, 0 in unused lanes.
template <class E>
static void load_other(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m) {
  typedef typename E::Real Real;
  const int64_t columns = r.transposed_with.columns, width = transposed_width<E>(r);
  std::memset((void*)m.other, 0, size_t(width * E::rows) * sizeof(Real));
  const Real* y = operand_at<Real>(r.transposed_with, rows.b, rows.head[0]);
  y += rows.index[0] * columns;
  m.finite = finite<Element<real_type<Real>>>((const char*)y, columns * int64_t(sizeof(Real)),
                                              rows.count, columns);
  for (int i = 0; i < rows.count; ++i)
    for (int64_t c = 0; c < columns; ++c)
      m.other[is_folded(columns) ? c * E::rows + i : i * width + c] = y[i * columns + c];
}

template <class E>
static void start_linear_rows(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m) {
  typedef typename E::Real Real;
  if (r.product)
    std::memset((void*)m.product, 0, size_t(r.product_with.columns * E::rows) * sizeof(Real));
  if (r.transposed) load_other(r, rows, m);
  m.low = r.block_counts[1], m.high = 0;
}

// Whether a tile has pairs that are masked: their weights are 0, but 0 * NaN is NaN.
static inline bool has_masked(const Problem& p, const TileMask& tile_mask) {
  return !tile_mask.fully_visible || p.mask || p.key_ids || any_cut(p);
}

// Calls `add(j, i, weight)` for the unmasked pairs of a tile: the slow path for operands of NaN or
// inf.
template <class E, class Add>
static void each_unmasked(const Problem& p, const Rows<E>& rows, int64_t j0, int keys,
                          const typename E::Real* weights, Add add) {
  for (int j = 0; j < keys; ++j)
    for (int i = 0; i < rows.count; ++i)
      if (attends(p, rows, i, j0 + j)) add(j, i, weights[j * E::rows + i]);
}

// [columns][rows] += x^T W^T.
template <class E>
static void add_product(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m,
                        const typename E::Real* weights, bool masked, int64_t j0, int keys) {
  typedef typename E::Real Real;
  const int64_t columns = r.product_with.columns, stride = columns * int64_t(sizeof(Real));
  const Real* x = operand_at<Real>(r.product_with, rows.b, rows.head[0]) + j0 * columns;
  if (masked && !finite<Element<real_type<Real>>>((const char*)x, stride, keys, columns))
    return each_unmasked(*r.problem, rows, j0, keys, weights, [&](int j, int i, Real w) {
      for (int64_t c = 0; c < columns; ++c) m.product[c * E::rows + i] += w * x[j * columns + c];
    });
  multiply<Plain<Real>, true, Epilogue::add>(rows.vectors, weights, E::rows, x, stride, keys,
                                             columns, m.product, E::rows);
}

// [key][columns] += W^T y, or [columns][key] where few columns are folded.
template <class E>
static void add_transposed(const Reduce& r, const Rows<E>& rows, const LinearMemory<E>& m,
                           const typename E::Real* weights, bool masked, int64_t j0, int keys,
                           typename E::Real* out) {
  typedef typename E::Real Real;
  const int64_t columns = r.transposed_with.columns, width = transposed_width<E>(r);
  const int64_t Lk = r.problem->Lk;
  const bool folded = is_folded(columns);
  if (masked && !m.finite)
    return each_unmasked(*r.problem, rows, j0, keys, weights, [&](int j, int i, Real w) {
      for (int64_t c = 0; c < columns; ++c)
        out[folded ? c * Lk + j0 + j : (j0 + j) * width + c] +=
            w * m.other[folded ? c * E::rows + i : i * width + c];
    });
  if (!folded)
    return multiply<Plain<Real>, false, Epilogue::add>(int(width / E::lanes), m.other, width,
                                                       weights, E::rows * int64_t(sizeof(Real)),
                                                       rows.count, keys, out + j0 * width, width);
  for (int64_t c = 0; c < columns; ++c) {
    const Real* const y = m.other + c * E::rows;
    fold_columns<E>(
        rows.vectors, keys, out + c * Lk + j0,
        [&](int j, int v) {
          return *(const Vec<Real>*)(weights + j * E::rows + v * E::lanes) *
                 *(const Vec<Real>*)(y + v * E::lanes);
        },
        [](auto x, auto y) { return x + y; });
  }
}

struct Sum {
  template <class V>
  V operator()(V x, V y) const {
    return x + y;
  }
};

// [key block][rows] += the weights of its keys: neighbours of one block first.
template <class E, int V, class Both>
static void add_cells(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m,
                      const typename E::Real* weights, int64_t j0, int keys, Both both) {
  typedef typename E::Real Real;
  const int64_t* ids = r.key_blocks + rows.b * r.problem->Lk + j0;
  for (int v0 = 0; v0 < rows.vectors; v0 += V)
    for (int j = 0; j < keys;) {
      const int64_t id = ids[j];
      const auto weight = [&](int v) {
        return *(const Vec<Real>*)(weights + j * E::rows + (v0 + v) * E::lanes);
      };
      Vec<Real> sum[V];
      for (int v = 0; v < V; ++v) sum[v] = weight(v);
      for (++j; j < keys && ids[j] == id; ++j)
        for (int v = 0; v < V; ++v) sum[v] = both(sum[v], weight(v));
      if (id < 0) continue;
      if (id < m.low) m.low = id;
      if (id >= m.high) m.high = id + 1;
      for (int v = 0; v < V; ++v) {
        Vec<Real>* const cell = (Vec<Real>*)(m.cells + id * E::rows + (v0 + v) * E::lanes);
        *cell = both(*cell, sum[v]);
      }
    }
}

template <class E, class Both>
static void add_to_cells(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m,
                         const typename E::Real* weights, int64_t j0, int keys, Both both) {
  if (rows.vectors == E::vectors)
    add_cells<E, E::vectors>(r, rows, m, weights, j0, keys, both);
  else
    add_cells<E, 1>(r, rows, m, weights, j0, keys, both);
}

// Adds the cells of a tile of rows to the blocks of its queries, and empties them.
template <class E, class Both>
static void add_blocks(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m,
                       typename E::Real* blocks, Both both) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int64_t* ids = r.query_blocks + rows.b * r.problem->Lq;
  for (int64_t cell = m.low; cell < m.high; cell += n)
    for (int v = 0; v < rows.vectors; ++v) {
      const int64_t width = m.high - cell < n ? m.high - cell : n;
      Vec<Real> t[n];
      load_transposed<Real>(m.cells + cell * E::rows + v * n, E::rows, width, t);
      const int first = v * n, count = rows.count - first < n ? rows.count - first : n;
      for (int i = 0; i < count;) {
        const int64_t id = ids[rows.index[first + i]];
        Vec<Real> sum = t[i];
        for (++i; i < count && ids[rows.index[first + i]] == id; ++i) sum = both(sum, t[i]);
        if (id < 0) continue;
        char* const to = (char*)(blocks + id * r.block_counts[1] + cell);
        put<Real, real_type<Real>>(to, both(numbers<Real, real_type<Real>>(to, width), sum), width);
      }
    }
  if (m.low < m.high)
    std::memset((void*)(m.cells + m.low * E::rows), 0,
                size_t((m.high - m.low) * E::rows) * sizeof(Real));
}

// The index of the block of lanes that weights of some queries and keys are added to: both are
// numbers of lanes apart, from the first row of the chunk and from key 0.
template <class E>
static int64_t diagonal_block(const Reduce& r, int64_t query, int64_t key) {
  return (query + LinearMemory<E>::padded_keys(r)) / E::lanes - key / E::lanes;
}

// Notes a block that is added to.
template <class E>
static void see_block(LinearMemory<E>& m, int64_t block) {
  if (block < m.first_block) m.first_block = block;
  if (block > m.last_block) m.last_block = block;
}

// Adds the weights to the sums of their diagonals. The queries of a vector are neighbours, and so
// are their diagonals of one key; the next key's are one lane further. Each key of `lanes` has sums
// of its own, so that all vectors are aligned: sum_diagonals adds them.
template <class E>
static void add_diagonals(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m,
                          const typename E::Real* weights, int64_t begin, int64_t j0, int keys) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  for (int v = 0; v < rows.vectors; ++v)
    for (int j = 0; j < keys;) {
      const int64_t key = j0 + j, skipped = key % n;
      const int64_t block = diagonal_block<E>(r, rows.index[0] - begin + v * n, key);
      see_block(m, block);
      Vec<Real>* to = (Vec<Real>*)m.diagonals + block * n + skipped;
      const int left = n - int(skipped), end = keys - j < left ? keys : j + left;
      for (; j < end; ++j, ++to) *to += *(const Vec<Real>*)(weights + j * E::rows + v * n);
    }
}

// The same where neighbouring queries are not as far apart as neighbouring keys.
template <class E>
static void add_distances(const Reduce& r, const Rows<E>& rows, const typename E::Real* weights,
                          int64_t j0, int keys, double* sums) {
  for (int i = 0; i < rows.count; ++i) {
    const int64_t query =
        r.starts[rows.b] - r.first_distances[rows.b] + rows.index[i] * r.query_step;
    for (int j = 0; j < keys; ++j) {
      const int64_t distance = query - (j0 + j) * r.key_step;
      if (distance >= 0 && distance / r.distance_step < r.distances)
        sums[distance / r.distance_step] += double(weights[j * E::rows + i]);
    }
  }
}

// Adds the sums of a chunk's diagonals in the order of the keys' lanes.
template <class E>
static void sum_diagonals(const Reduce& r, const LinearMemory<E>& m, const RowChunk<E>& chunk) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int64_t b = chunk.head / r.problem->Hq, start = r.starts[b] - r.first_distances[b];
  const int64_t low = m.first_block * n - n, high = m.last_block * n + n;
  if (low >= high) return;
  double* const sums = m.diagonal_sums + n;  // of the lanes of key 0; those of key s are s ahead
  std::memset((void*)(sums + low), 0, size_t(high - low) * sizeof(double));
  for (int s = 0; s < n; ++s)
    for (int64_t block = m.first_block; block <= m.last_block; ++block) {
      const Real* const lanes = m.diagonals + (block * n + s) * n;
      double* const to = sums + block * n - s;
      for (int i = 0; i < n; ++i) to[i] += double(lanes[i]);
    }
  for (int64_t at = low; at < high; ++at) {
    const int64_t steps = at + chunk.begin - LinearMemory<E>::padded_keys(r);
    const int64_t distance = start + steps * r.query_step;
    if (distance >= 0 && distance / r.distance_step < r.distances)
      chunk.found.diagonals[distance / r.distance_step] += sums[at];
  }
}

// Calls `take(j, weights)` for the keys of a tile that vector v of the queries sees, with weights
// that are not normalised yet: 0 where masked. `meanwhile` is called now and then.
template <class E, class Meanwhile, class Take>
static void take_weights(const Scaling<E>& scaling, const typename E::Real* scores,
                         Vec<typename E::Real> base, const TileMask& tile_mask, int v,
                         Meanwhile meanwhile, Take take) {
  typedef typename E::Real Real;
  const auto some = [&]<int unroll>(int j, std::integral_constant<int, unroll>) {
    Vec<Real> x[unroll], w[unroll];
    for (int i = 0; i < unroll; ++i)
      x[i] = scaling.exponent(*(const Vec<Real>*)(scores + (j + i) * E::rows + v * E::lanes), base);
    exponentials<E, false>(x, w);
#pragma GCC unroll 4
    for (int i = 0; i < unroll; ++i) take(j + i, w[i]);
  };
  int j = tile_mask.low[v];
  for (; j + 4 <= tile_mask.high[v]; j += 4) {
    some(j, std::integral_constant<int, 4>());
    if (j % kMeanwhile == 0) meanwhile();
  }
  for (; j < tile_mask.high[v]; ++j) some(j, std::integral_constant<int, 1>());
}

// Whether W x of one column, or diagonals, are the only linear form: weights can then be added as
// they are computed, and need not be stored.
static bool is_one_column(const Reduce& r) {
  return r.product && r.product_with.columns == 1 && !has_linear_columns(r);
}
static bool is_one_diagonal(const Reduce& r) {
  return r.diagonals && r.query_step == r.key_step && !r.product && !r.transposed && !r.blocks &&
         !r.blocks_max;
}

// Adds the weights of a tile of scores, none of which is NaN, to the only linear form. Returns
// whether it could.
template <class E, class Meanwhile>
static bool add_fused(const Reduce& r, const Scaling<E>& scaling, const Rows<E>& rows,
                      LinearMemory<E>& m, const typename E::Real* scores,
                      const Normalisers<E>& normalisers, const TileMask& tile_mask, int64_t begin,
                      int64_t j0, int keys, Meanwhile meanwhile) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  if (!is_one_column(r) && !is_one_diagonal(r)) return false;
  const Real* const x =
      r.product ? operand_at<Real>(r.product_with, rows.b, rows.head[0]) + j0 : nullptr;
  if (x && has_masked(*r.problem, tile_mask) &&
      !finite<Element<real_type<Real>>>((const char*)x, sizeof(Real), keys, 1))
    return false;
  for (int v = 0; v < rows.vectors; ++v) {
    const int low = tile_mask.low[v], high = tile_mask.high[v];
    if (low >= high) continue;
    const Vec<Real> base = vector_at<E>(normalisers.base, 0, v);
    const Vec<Real> inverse = vector_at<E>(normalisers.inverse, 0, v);
    const auto normalised = [&](Vec<Real> w) { return inverse != 0 ? w * inverse : Vec<Real>{}; };
    if (x) {
      Vec<Real> sum = {};
      take_weights<E>(scaling, scores, base, tile_mask, v, meanwhile,
                      [&](int j, Vec<Real> w) { sum += w * x[j]; });
      vector_at<E>(m.product, 0, v) += normalised(sum);
      continue;
    }
    const int64_t query = rows.index[0] - begin + v * n;
    see_block(m, diagonal_block<E>(r, query, j0 + low));
    see_block(m, diagonal_block<E>(r, query, j0 + high - 1));
    Vec<Real>* const to = (Vec<Real>*)m.diagonals + diagonal_block<E>(r, query, 0) * n;
    take_weights<E>(scaling, scores, base, tile_mask, v, meanwhile, [&](int j, Vec<Real> w) {
      to[2 * ((j0 + j) % n) - (j0 + j)] += normalised(w);  // vector key % n of the block
    });
  }
  return true;
}

// Adds a tile of weights, 0 where masked, to all linear forms.
template <class E>
static void add_linear(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m,
                       const typename E::Real* weights, const TileMask& tile_mask, int64_t j0,
                       int keys, const RowChunk<E>& chunk) {
  const bool masked = has_masked(*r.problem, tile_mask);
  if (r.product) add_product(r, rows, m, weights, masked, j0, keys);
  if (r.transposed) add_transposed(r, rows, m, weights, masked, j0, keys, chunk.found.transposed);
  if (r.blocks) add_to_cells(r, rows, m, weights, j0, keys, Sum());
  if (r.blocks_max) add_to_cells(r, rows, m, weights, j0, keys, LargerOrNan());
  if (!r.diagonals) return;
  if (r.query_step == r.key_step)
    add_diagonals(r, rows, m, weights, chunk.begin, j0, keys);
  else
    add_distances(r, rows, weights, j0, keys, chunk.found.diagonals);
}

// Ends the linear forms of a tile of rows.
template <class E>
static void finish_linear_rows(const Reduce& r, const Rows<E>& rows, LinearMemory<E>& m,
                               const RowChunk<E>& chunk) {
  typedef typename E::Real Real;
  if (r.product) {
    const int64_t columns = r.product_with.columns;
    const int64_t at = (rows.b * r.problem->Hq + rows.head[0]) * r.problem->Lq + rows.index[0];
    Real* const out = (Real*)r.product + at * columns;
    for (int i = 0; i < rows.count; ++i)
      for (int64_t c = 0; c < columns; ++c) out[i * columns + c] = m.product[c * E::rows + i];
  }
  if (r.blocks) add_blocks(r, rows, m, chunk.found.blocks, Sum());
  if (r.blocks_max) add_blocks(r, rows, m, chunk.found.blocks, LargerOrNan());
}

template <class E>
static void finish_linear_chunk(const Reduce& r, const LinearMemory<E>& m,
                                const RowChunk<E>& chunk) {
  if (r.diagonals && r.query_step == r.key_step) sum_diagonals(r, m, chunk);
}

}  // namespace regard::REGARD_NAMESPACE
