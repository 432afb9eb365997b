// How far cutting a token pair moves the output: w/(1-w) |o - v|. The squares of o and v cancel
// where these are close, and there differences are summed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "pair_values-inl.h"

namespace regard::REGARD_NAMESPACE {

// to[.][row]: numbers (Lq, Dv) of a tile of queries.
template <class E>
static void transpose_numbers(const void* numbers, const Rows<E>& rows, int64_t Dv,
                              typename E::Real* to) {
  const int64_t stride = Dv * int64_t(sizeof(typename E::Real));
  const char* row[E::rows];
  for (int i = 0; i < rows.count; ++i) row[i] = (const char*)numbers + rows.index[i] * stride;
  transpose_rows<Wide<E>>(row, rows.count, Dv, to);
}

// to[key][row]: the products of the values of a tile and the gradient, or the output.
template <class E>
static void multiply_values(const PairTerm& t, const PairMemory<E>& m, const TileMask& tile_mask,
                            int64_t j0, typename E::Real* to) {
  const int64_t stride = t.Dv * int64_t(sizeof(typename E::Real));
  const Matrix values{(const char*)t.value + j0 * stride, stride};
  for (int c = 0; c < tile_mask.spans; ++c)
    multiply_span<Wide<E>>(tile_mask.span[c], m.gradient, values, t.Dv, to);
}

template <class E>
static void start_change(const PairTerm& t, PairMemory<E>& m) {
  typedef typename E::Real Real;
  if (t.rest_is_known)
    transpose_numbers<E>(t.rest, m.m.rows, t.Dv, m.change.rest);
  else
    std::memset((void*)m.change.rest, 0, size_t(t.Dv * E::rows) * sizeof(Real));
  for (int i = 0; i < E::rows; ++i) m.change.first[i] = -1, m.change.first_weight[i] = 0;
}

// Finds the weight above 9/16 of each row of vector v, and adds the others of a tile.
template <class E>
static void find_firsts(PairMemory<E>& m, int v, int64_t j0, int keys) {
  typedef typename E::Real Real;
  Vec<Real> beside = {};
  for (int j = 0; j < keys; ++j) {
    const Vec<Real> w = vector_at<E>(m.weights + m.at(j0), j, v);
    beside += is_masked<Real>(w) | (w > Real(kFirst)) ? Vec<Real>{} : w;
    for (uint32_t bits = greater(w, broadcast(Real(kFirst))); bits; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      m.change.first[v * E::lanes + lane] = j0 + j;
      m.change.first_weight[v * E::lanes + lane] = w[lane];
    }
  }
  for (int i = 0; i < E::lanes; ++i) m.sums.beside[v * E::lanes + i] += double(beside[i]);
}

// rest[.][row] += w v of the pairs of a tile that are not masked, whose values may be NaN.
template <class E>
static void add_unmasked(const PairTerm& t, PairMemory<E>& m, const typename E::Real* tile,
                         const typename E::Real* weights, int64_t j0, int keys) {
  typedef typename E::Real Real;
  for (int j = 0; j < keys; ++j) {
    const Real* const value = (const Real*)t.value + (j0 + j) * t.Dv;
    for (int v = 0; v < m.m.rows.vectors; ++v) {
      const Int<Real> masked =
          is_masked<Real>(*(const Vec<Real>*)(tile + j * E::rows + v * E::lanes));
      const Vec<Real> w = *(const Vec<Real>*)(weights + j * E::rows + v * E::lanes);
      for (int64_t d = 0; d < t.Dv; ++d)
        vector_at<E>(m.change.rest, int(d), v) += masked ? Vec<Real>{} : w * value[d];
    }
  }
}

// Adds a tile to the outputs, but for weights above 9/16, which are kept.
template <class E>
static void add_outputs(const PairTerm& t, PairMemory<E>& m, int64_t j0, int keys, Seen seen) {
  typedef typename E::Real Real;
  bool any_first = false;
  for (int v = 0; v < m.m.rows.vectors; ++v)
    if (may_have_first(m.m, v)) find_firsts(m, v, j0, keys), any_first = true;
  if (t.rest_is_known) return;
  const Real *const tile = m.weights + m.at(j0), *weights = tile;
  if (any_first || seen != Seen::all) {
    for (int j = 0; j < keys; ++j)
      for (int v = 0; v < m.m.rows.vectors; ++v) {
        const Vec<Real> w = *(const Vec<Real>*)(tile + j * E::rows + v * E::lanes);
        m.m.score(j, v) = is_masked<Real>(w) | (w > Real(kFirst)) ? Vec<Real>{} : w;
      }
    weights = m.m.scores;
  }
  const int64_t stride = t.Dv * int64_t(sizeof(Real));
  const char* const values = (const char*)t.value + j0 * stride;
  if (seen != Seen::all && !finite<Wide<E>>(values, stride, keys, t.Dv))
    return add_unmasked(t, m, tile, weights, j0, keys);
  multiply<Plain<Real>, true, Epilogue::add>(m.m.rows.vectors, weights, E::rows, values, stride,
                                             keys, t.Dv, m.change.rest, E::rows);
}

// The change of the weight above 9/16 of a row: the output without its key is the mean over the
// others, and 0 where these have no weight.
template <class E>
static double change_of_first(const PairTerm& t, const PairMemory<E>& m, int row) {
  typedef typename E::Real Real;
  const Real* const value = (const Real*)t.value + m.change.first[row] * t.Dv;
  const double beside = m.sums.beside[row];
  double squares = 0;
  for (int64_t d = 0; d < t.Dv; ++d) {
    const double left = beside == 0 ? 0 : double(m.change.rest[d * E::rows + row]) / beside;
    squares += (left - double(value[d])) * (left - double(value[d]));
  }
  return double(m.change.first_weight[row]) * std::sqrt(squares);
}

// The outputs of a tile of queries, where the gradient of other effects is, and their sizes.
template <class E>
static void finish_outputs(const PairTerm& t, PairMemory<E>& m) {
  typedef typename E::Real Real;
  ChangeMemory<E>& change = m.change;
  std::memcpy((void*)m.gradient, change.rest, size_t(t.Dv * E::rows) * sizeof(Real));
  for (int i = 0; i < m.m.rows.count; ++i) {
    const int64_t first = change.first[i], row = m.m.rows.index[i];
    for (int64_t d = 0; d < t.Dv && t.rest && !t.rest_is_known; ++d)
      ((Real*)t.rest)[row * t.Dv + d] = change.rest[d * E::rows + i];
    change.of_first[i] = first < 0 ? Real(0) : Real(change_of_first(t, m, i));
    for (int64_t d = 0; d < t.Dv && first >= 0; ++d)
      m.gradient[d * E::rows + i] +=
          change.first_weight[i] * ((const Real*)t.value)[first * t.Dv + d];
  }
  for (int v = 0; v < m.m.rows.vectors; ++v) {
    Vec<Real> squares = {};
    for (int64_t d = 0; d < t.Dv; ++d) {
      const Vec<Real> x = vector_at<E>(m.gradient, int(d), v);
      squares += x * x;
    }
    vector_at<E>(change.squares, 0, v) = squares;
  }
}

// |o - v|^2 of the rows of a vector, by differences.
template <class E>
__attribute__((noinline)) static Vec<typename E::Real> squared_distances(
    const typename E::Real* output, const typename E::Real* value, int64_t Dv) {
  typedef typename E::Real Real;
  Vec<Real> sum[2] = {};
  for (int64_t d = 0; d < Dv; ++d) {
    const Vec<Real> apart = *(const Vec<Real>*)(output + d * E::rows) - value[d];
    sum[d % 2] += apart * apart;
  }
  return sum[0] + sum[1];
}

// Turns the weights of vector v of a tile into changes, in place. The rounding of |o|^2 + |v|^2
// grows with |o|^2 + |v|^2 by |o - v| in |o - v|, and counts w times in the change: where w is not
// small beside |o - v|, differences are summed. A change is exact to a few roundings of the values.
template <class E, bool firsts>
static void finish_changes_of(const PairTerm& t, const PairMemory<E>& m, int v, int low, int high,
                              int64_t j0) {
  typedef typename E::Real Real;
  typedef Vec<Real> V;
  const V of_first = vector_at<E>(m.change.of_first, 0, v);
  const V of_output = vector_at<E>(m.change.squares, 0, v);
  for (int j = low; j < high; ++j) {
    V& pair = vector_at<E>(m.weights + m.at(j0), j, v);
    const V w = pair, both = of_output + ((const Real*)t.squares)[j0 + j];
    V squares = both - Real(2) * vector_at<E>(m.products, j, v);
    if (greater(Real(64) * w * w * both, squares))
      squares = squared_distances<E>(m.gradient + v * E::lanes,
                                     (const Real*)t.value + (j0 + j) * t.Dv, t.Dv);
    V change = w * reciprocal(Real(1) - w) * square_root(larger(V{}, squares));
    if (firsts) change = w > Real(kFirst) ? of_first : change;
    pair = is_masked<Real>(w) ? w : change;
  }
}

// Turns the weights of a tile into changes, in place.
template <class E>
static void finish_changes(const PairTerm& t, const PairMemory<E>& m, int64_t j0, int keys) {
  const TileMask tile_mask = tile_mask_of(m.m.rows, j0, keys);
  multiply_values(t, m, tile_mask, j0, m.products);
  for (int v = 0; v < m.m.rows.vectors; ++v)
    (may_have_first(m.m, v)
         ? finish_changes_of<E, true>
         : finish_changes_of<E, false>)(t, m, v, tile_mask.low[v], tile_mask.high[v], j0);
}

}  // namespace regard::REGARD_NAMESPACE
