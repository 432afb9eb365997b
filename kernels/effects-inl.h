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
      V w = vector_at<E>(m.weights + m.at(j0), j, v0 + v);
      V g = vector_at<E>(m.products + m.at(j0), j, v0 + v);
      if (!all) {
        const Int<Real> masked = is_masked<Real>(w);
        w = masked ? V{} : w, g = masked ? V{} : g;
      }
      const Int<Real> is_first = w > Real(kFirst);
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
  multiply_values(t, m, tile_mask, j0, m.products + m.at(j0));
  if (!needs_sums(t) || m.streams) return;
  const bool all = seen == Seen::all;
  if (all && !may_have_first(m) && rows.vectors == kVectors)  // in the order in which they lie
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

// What a pass leaves of a row's sums: the first of them is written last, and not NaN once all are
// known. Another thread may read and write the same numbers at once. Not std::atomic_ref: clang's
// library has it since 19.
class KeptSums {
 public:
  template <class E>
  KeptSums(const PairTerm& t, const Rows<E>& rows, int i)
      : kept_((double*)t.rest + 3 * rows.index[i]) {}

  bool known() const { return load(0) == load(0); }
  template <class E>
  void read(RowSums<E>& sums, int i) const {
    sums.rest[i] = load(0), sums.first[i] = load(1), sums.beside[i] = load(2);
  }
  template <class E>
  void write(const RowSums<E>& sums, int i) const {
    store(1, sums.first[i]), store(2, sums.beside[i]), store(0, sums.rest[i]);
  }

 private:
  double load(int i) const {
    double x;
    __atomic_load(kept_ + i, &x, __ATOMIC_ACQUIRE);
    return x;
  }
  void store(int i, double x) const { __atomic_store(kept_ + i, &x, __ATOMIC_RELEASE); }
  double* kept_;
};

// Reads the sums of a tile of queries; returns whether all are known.
template <class E>
static bool known_sums(const PairTerm& t, PairMemory<E>& m) {
  for (int i = 0; i < m.m.rows.count; ++i)
    if (!t.rest || !KeptSums(t, m.m.rows, i).known()) return false;
  for (int i = 0; i < m.m.rows.count; ++i) KeptSums(t, m.m.rows, i).read(m.sums, i);
  return true;
}

template <class E>
static void keep_sums(const PairTerm& t, const PairMemory<E>& m) {
  for (int i = 0; t.rest && i < m.m.rows.count; ++i) KeptSums(t, m.m.rows, i).write(m.sums, i);
}

// Turns the weights of a tile into effects, in place, in the order in which they lie.
template <class E, class Effect>
static void finish_pairs(const PairMemory<E>& m, int64_t j0, int keys, Effect effect) {
  typedef typename E::Real Real;
  const auto each = [&](auto hidden) {
    for (int j = 0; j < keys; ++j)
      for (int v = 0; v < m.m.rows.vectors; ++v) {
        Vec<Real>& w = vector_at<E>(m.weights + m.at(j0), j, v);
        w = hidden(w, effect(w, vector_at<E>(m.products + m.at(j0), j, v), v));
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
  const auto without = [&](V w, V g, int v) {  // a weight up to 9/16
    return w * reciprocal(Real(1) - w) * (vector_at<E>(m.sums.all, 0, v) - g);
  };
  if (!may_have_first(m)) return finish_pairs(m, j0, keys, without);
  finish_pairs(m, j0, keys, [&](V w, V g, int v) {
    return w > Real(kFirst) ? w * (vector_at<E>(m.sums.left_of_first, 0, v) - g) : without(w, g, v);
  });
}

// Begins a term: its rows, their normalisers, and the sums that are known.
template <class E>
static void start_term(const PairMatrix& x, const PairTerm& t, int64_t row, int64_t end,
                       PairMemory<E>& m) {
  describe_rows(*t.problem, m.m.rows, 0, 0, row, end);
  load_queries<E>(*t.problem, m.m.rows);
  start_rows(reduce_of(t, x.k), m.m);
  if (is_effect(t)) start_effects(t, m);
}

// Whether the numbers of a pair follow from it, and from what is known of its row.
template <class E>
static bool rows_are_known(const PairTerm& t, PairMemory<E>& m) {
  if (is_change(t)) return t.rest_is_known && !may_have_first(m);
  return !needs_sums(t) || known_sums(t, m);
}

// Computes the weights of a tile, and what a row's sums need of it; `to`: where the weights are.
template <class E>
static Seen compute_tile(const PairTerm& t, PairMemory<E>& m, int64_t j0, int keys,
                         typename E::Real* to) {
  const Problem& p = *t.problem;
  const Seen seen = m.own[j0 / kKeys] = weigh_tile(p, Scaling<E>(p), m.m, j0, keys, to);
  if (is_effect(t) && seen != Seen::nothing)
    (is_change(t) ? add_outputs<E> : multiply_effects<E>)(t, m, j0, keys, seen);
  return seen;
}

template <class E>
static void finish_rows(const PairTerm& t, PairMemory<E>& m) {
  finish_sums(m.m.rows, m.sums);
  if (is_change(t)) finish_outputs(t, m);
  if (needs_sums(t) && !m.streams) keep_sums(t, m);
}

// Adds a term, one of several, to the values of a tile of queries.
template <class E>
static void add_term(const PairMatrix& x, const PairTerm& t, int64_t row, int64_t end,
                     PairMemory<E>& m) {
  start_term(x, t, row, end, m);
  for_tiles(x.Lk, [&](int64_t j0, int keys) {
    const auto to = is_effect(t) ? m.weights + m.at(j0) : m.m.scores;
    const Seen seen = compute_tile(t, m, j0, keys, to);
    if (!is_effect(t)) add_tile(m, t, j0, keys, seen, to);
  });
  if (!is_effect(t)) return;
  finish_rows(t, m);
  for_tiles(x.Lk, [&](int64_t j0, int keys) {
    const Seen seen = m.own[j0 / kKeys];
    if (seen == Seen::nothing) return;
    finish_effects(t, m, j0, keys);
    add_tile(m, t, j0, keys, seen, m.weights + m.at(j0));
  });
}

// Adds the weights of a tile to the values of the same keys: as they come from the exponential,
// where nothing is masked. `scores`: memory for a tile.
template <class E>
static void add_weights(const PairTerm& t, PairMemory<E>& m, int64_t j0, int keys,
                        typename E::Real* scores) {
  typedef Vec<typename E::Real> V;
  const Scaling<E> scaling(*t.problem);
  TileMask tile_mask;
  const Seen seen = score_pairs(*t.problem, scaling, m.m, j0, keys, scores, tile_mask);
  Seen& known = m.seen[j0 / kKeys];
  if (seen != Seen::all || known == Seen::some) {
    if (seen != Seen::nothing) weigh_pairs(scaling, m.m, keys, seen, tile_mask, scores);
    return add_tile(m, t, j0, keys, seen, scores);
  }
  const V coefficient = broadcast(typename E::Real(t.coefficient));
  for (int v = 0; v < m.m.rows.vectors; ++v) {
    const auto value = [&](int j) -> V& { return vector_at<E>(m.values, j, v); };
    const auto put = [&](int j, V w) { value(j) = w * coefficient; };
    const auto add = [&](int j, V w) { value(j) += w * coefficient; };
    if (known == Seen::all)
      pair_weights<E, true>(scaling, m.m, v, 0, keys, scores, add);
    else
      pair_weights<E, true>(scaling, m.m, v, 0, keys, scores, put);
  }
  known = Seen::all;
}

// Puts the rows of one of several terms to work.
template <class E>
static void turn_to(PairMemory<E>& m, int64_t term) {
  m.m.rows = m.of[term].rows, m.m.normalisers = m.of[term].normalisers;
}

// Sums several terms for some tiles of queries, and hands on each tile of keys of which any is
// unmasked: `each` as below. A term's keys are multiplied by all of these queries while they are
// near.
template <class E, class Each>
static void sum_tiles(const PairMatrix& x, int64_t row, int64_t end, PairMemory<E>* tiles,
                      Each each) {
  const int64_t left = (end - row + E::rows - 1) / E::rows;
  const int count = int(left < kSummedTogether ? left : kSummedTogether);
  const auto for_queries = [&](auto next) {
    for (int i = 0; i < count; ++i) next(tiles[i], row + i * E::rows);
  };
  for (int64_t term = 0; term < x.term_count; ++term)
    for_queries([&](PairMemory<E>& m, int64_t first) {
      turn_to(m, term);
      start_term(x, x.terms[term], first, end, m);
      m.of[term].rows = m.m.rows;
      m.streams = true;
      m.high = term && m.high > m.m.rows.high ? m.high : m.m.rows.high;
    });
  for_tiles(x.Lk, [&](int64_t j0, int keys) {
    const int64_t tile = j0 / kKeys;
    const auto seen = [&](const PairMemory<E>& m) {
      return int(m.high - j0 < keys ? m.high - j0 : keys);
    };
    for_queries([&](PairMemory<E>& m, int64_t) { m.seen[tile] = Seen::nothing; });
    for (int64_t term = 0; term < x.term_count; ++term)
      for_queries([&](PairMemory<E>& m, int64_t) {
        turn_to(m, term);
        if (seen(m) > 0) add_weights(x.terms[term], m, j0, seen(m), tiles->m.scores);
      });
    for_queries([&](PairMemory<E>& m, int64_t) {
      if (m.seen[tile] != Seen::nothing) each(m, j0, seen(m), m.seen[tile]);
    });
  });
}

// Ends the values of a tile of the only term, while its numbers are near.
template <class E>
static void finish_tile(const PairTerm& t, PairMemory<E>& m, int64_t j0, int keys) {
  typedef typename E::Real Real;
  if (is_effect(t)) finish_effects(t, m, j0, keys);
  if (t.coefficient == 1) return;
  for (int j = 0; j < keys; ++j)
    for (int v = 0; v < m.m.rows.vectors; ++v) {
      Vec<Real>& value = vector_at<E>(m.values + m.at(j0), j, v);
      value = is_masked<Real>(value) ? value : value * Real(t.coefficient);
    }
}

// Computes the values of the tiles of queries that are at work at a time, and hands on each tile of
// keys of which any is unmasked, while its numbers are near: `each(memory of the queries, first
// key, keys, how much is unmasked)`.
template <class E, class Each>
static void compute_values(const PairMatrix& x, int64_t row, int64_t end, PairMemory<E>* tiles,
                           Each each) {
  const PairTerm& t = x.terms[0];
  if (sums_tiles(x)) return sum_tiles(x, row, end, tiles, each);
  PairMemory<E>& m = *tiles;
  m.streams = false;
  if (x.term_count > 1) {
    std::memset((void*)m.seen, 0, size_t(tiles_of(x.Lk)));
    for (int64_t i = 0; i < x.term_count; ++i) add_term(x, x.terms[i], row, end, m);
    return for_tiles(x.Lk, [&](int64_t j0, int keys) {
      if (m.seen[j0 / kKeys] != Seen::nothing) each(m, j0, keys, m.seen[j0 / kKeys]);
    });
  }
  const auto finish = [&](int64_t j0, int keys, Seen seen) {
    if (seen == Seen::nothing) return;
    finish_tile(t, m, j0, keys);
    each(m, j0, keys, seen);
  };
  start_term(x, t, row, end, m);
  m.streams = rows_are_known(t, m);
  if (m.streams && is_effect(t)) finish_rows(t, m);
  for_tiles(m.m.rows.high, [&](int64_t j0, int keys) {
    const Seen seen = compute_tile(t, m, j0, keys, m.values + m.at(j0));
    if (m.streams) finish(j0, keys, seen);
  });
  if (m.streams) return;
  finish_rows(t, m);
  for_tiles(m.m.rows.high, [&](int64_t j0, int keys) { finish(j0, keys, m.own[j0 / kKeys]); });
}

}  // namespace regard::REGARD_NAMESPACE
