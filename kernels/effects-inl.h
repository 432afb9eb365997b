// What each weight, or cutting its token pair, does: the weights of a tile of queries are turned
// into effects, and added to those of other terms.
#pragma once

#include <cstdint>
#include <cstring>

#include "changes-inl.h"

namespace regard::REGARD_NAMESPACE {

// gradient[.][row] and the sums of a tile of queries, which begin with the weight of the sink.
template <class E>
static void start_effects(const PairTerm& t, PairMemory<E>& m) {
  if (is_change(t))
    start_change(t, m);
  else
    transpose_numbers<E>(t.gradient, m.m.rows, t.Dv, m.gradient);
  for (int i = 0; i < E::rows; ++i) {
    const bool has_sink = t.of_sink && i < m.m.rows.count;
    m.sums.rest[i] = m.sums.first[i] = 0;
    m.sums.beside[i] = has_sink ? t.of_sink[m.m.rows.index[i]] : 0;
  }
}

// Adds the weights of a tile, and their products with g·v, to the sums of the rows of some vectors.
template <class E, int vectors, bool all, bool firsts>
static void sum_effects(PairMemory<E>& m, int v0, int low, int high, int64_t j0) {
  typedef typename E::Real Real;
  typedef Vec<Real> V;
  V rest[vectors] = {}, first[vectors] = {}, beside[vectors] = {};
  for (int j = low; j < high; ++j)
    for (int v = 0; v < vectors; ++v) {
      V w = vector_at<E>(m.weights + j0 * E::rows, j, v0 + v);
      V g = vector_at<E>(m.products + j0 * E::rows, j, v0 + v);
      if (!all) {
        const Int<Real> masked = is_masked<Real>(w);
        w = masked ? V{} : w, g = masked ? V{} : g;
      }
      const Int<Real> is_first = w > Real(0.5);
      rest[v] += !firsts ? w * g : is_first ? V{} : w * g;
      if (!firsts) continue;
      first[v] += is_first ? w * g : V{};
      beside[v] += is_first ? V{} : w;
    }
  for (int v = 0; v < vectors; ++v)
    for (int i = 0; i < E::lanes; ++i) {
      const int at = (v0 + v) * E::lanes + i;
      m.sums.rest[at] += double(rest[v][i]), m.sums.first[at] += double(first[v][i]);
      m.sums.beside[at] += double(beside[v][i]);
    }
}

// The products of gradient and value of a tile, and the sums over its weights.
template <class E>
static void multiply_effects(const PairTerm& t, PairMemory<E>& m, int64_t j0, int keys, Seen seen) {
  constexpr int kVectors = E::rows / E::lanes;
  const Rows<E>& rows = m.m.rows;
  const TileMask tile_mask = tile_mask_of(rows, j0, keys);
  multiply_values(t, m, tile_mask, j0, m.products + j0 * E::rows);
  if (!needs_sums(t)) return;
  const bool all = seen == Seen::all;
  bool any_first = false;
  for (int v = 0; v < rows.vectors; ++v) any_first |= may_have_first(m.m, v);
  if (all && !any_first && rows.vectors == kVectors)  // in the order in which they lie
    return sum_effects<E, kVectors, true, false>(m, 0, 0, keys, j0);
  for (int v = 0; v < rows.vectors; ++v) {
    const bool firsts = may_have_first(m.m, v);
    (all      ? firsts ? sum_effects<E, 1, true, true> : sum_effects<E, 1, true, false>
     : firsts ? sum_effects<E, 1, false, true>
              : sum_effects<E, 1, false, false>)(m, v, tile_mask.low[v], tile_mask.high[v], j0);
  }
}

template <class E>
static void finish_sums(const Rows<E>& rows, RowSums<E>& sums) {
  typedef typename E::Real Real;
  for (int i = 0; i < rows.vectors * E::lanes; ++i) {
    sums.all[i] = Real(sums.rest[i] + sums.first[i]);
    sums.left_of_first[i] = sums.beside[i] == 0 ? Real(0) : Real(sums.rest[i] / sums.beside[i]);
  }
}

// Turns the weights of a tile into effects, in place, in the order in which they lie.
template <class E, class Effect>
static void finish_pairs(const PairMemory<E>& m, int64_t j0, int keys, Effect effect) {
  typedef typename E::Real Real;
  const auto each = [&](auto hidden) {
    for (int j = 0; j < keys; ++j)
      for (int v = 0; v < m.m.rows.vectors; ++v) {
        Vec<Real>& w = vector_at<E>(m.weights + j0 * E::rows, j, v);
        w = hidden(w, effect(w, vector_at<E>(m.products + j0 * E::rows, j, v), v));
      }
  };
  if (m.own[j0 / kKeys] == Seen::all)
    each([](Vec<Real>, Vec<Real> x) { return x; });
  else
    each([](Vec<Real> w, Vec<Real> x) { return is_masked<Real>(w) ? w : x; });
}

// Turns the weights of a tile into effects, in place. A knockout is w · (g·o′ − g·v), with the
// output o′ that is left without the pair.
template <class E>
static void finish_effects(const PairTerm& t, const PairMemory<E>& m, int64_t j0, int keys) {
  typedef typename E::Real Real;
  typedef Vec<Real> V;
  if (is_change(t)) return finish_changes(t, m, j0, keys);
  if (t.kind == PairKind::contribution)
    return finish_pairs(m, j0, keys, [](V w, V g, int) { return w * g; });
  if (t.kind == PairKind::relevance)
    return finish_pairs(m, j0, keys, [](V w, V g, int) { return w * g < 0 ? V{} : w * g; });
  if (t.kind == PairKind::gradient) return finish_pairs(m, j0, keys, [](V, V g, int) { return g; });
  const auto without = [&](V w, V g, int v) {  // a weight up to 1/2
    return w * reciprocal(Real(1) - w) * (vector_at<E>(m.sums.all, 0, v) - g);
  };
  bool any_first = false;
  for (int v = 0; v < m.m.rows.vectors; ++v) any_first |= may_have_first(m.m, v);
  if (!any_first) return finish_pairs(m, j0, keys, without);
  finish_pairs(m, j0, keys, [&](V w, V g, int v) {
    return w > Real(0.5) ? w * (vector_at<E>(m.sums.left_of_first, 0, v) - g) : without(w, g, v);
  });
}

// Adds a term to the values of a tile of queries; the effects of a single one are not finished.
template <class E>
static void add_term(const PairMatrix& x, const PairTerm& t, int64_t row, int64_t end,
                     PairMemory<E>& m) {
  const Problem& p = *t.problem;
  const Scaling<E> scaling(p);
  const bool only = x.term_count == 1;
  describe_rows(p, m.m.rows, 0, 0, row, end);
  load_queries<E>(p, m.m.rows);
  start_rows(reduce_of(t, x.k), m.m);
  if (is_effect(t)) start_effects(t, m);
  for (int64_t j0 = 0; j0 < x.Lk; j0 += kKeys) {
    const int keys = int(x.Lk - j0 < kKeys ? x.Lk - j0 : kKeys);
    const bool kept = is_effect(t) || (only && t.coefficient == 1);
    typename E::Real* const tile =
        !kept ? m.m.scores : (is_effect(t) ? m.weights : m.values) + j0 * E::rows;
    const Seen seen = m.own[j0 / kKeys] = weigh_tile(p, scaling, m.m, j0, keys, tile);
    if (is_effect(t) && seen != Seen::nothing)
      (is_change(t) ? add_outputs<E> : multiply_effects<E>)(t, m, j0, keys, seen);
    else if (!kept)
      add_tile(m, t, j0, keys, seen, tile);
    if (kept && only) m.seen[j0 / kKeys] = seen;
  }
  if (!is_effect(t)) return;
  finish_sums(m.m.rows, m.sums);
  if (is_change(t)) finish_outputs(t, m);
  if (only) return;
  for (int64_t j0 = 0; j0 < x.Lk; j0 += kKeys) {
    const int keys = int(x.Lk - j0 < kKeys ? x.Lk - j0 : kKeys);
    const Seen seen = m.own[j0 / kKeys];
    if (seen == Seen::nothing) continue;
    finish_effects(t, m, j0, keys);
    add_tile(m, t, j0, keys, seen, m.weights + j0 * E::rows);
  }
}

// Computes the values of a tile of queries, but for what `finish_tile` does.
template <class E>
static void compute_values(const PairMatrix& x, int64_t row, int64_t end, PairMemory<E>& m) {
  std::memset((void*)m.seen, 0, size_t(tiles_of(x.Lk)));
  for (int64_t i = 0; i < x.term_count; ++i) add_term(x, x.terms[i], row, end, m);
}

// Ends the values of a tile of keys: the effects of a single term, while its numbers are near.
template <class E>
static void finish_tile(const PairMatrix& x, PairMemory<E>& m, int64_t j0, int keys) {
  typedef typename E::Real Real;
  const PairTerm& t = x.terms[0];
  if (x.term_count > 1 || !is_effect(t)) return;
  finish_effects(t, m, j0, keys);
  if (t.coefficient == 1) return;
  for (int j = 0; j < keys; ++j)
    for (int v = 0; v < m.m.rows.vectors; ++v) {
      Vec<Real>& value = vector_at<E>(m.values + j0 * E::rows, j, v);
      value = is_masked<Real>(value) ? value : value * Real(t.coefficient);
    }
}

}  // namespace regard::REGARD_NAMESPACE
