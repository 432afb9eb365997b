// How far the rows of two sums of weights are apart, from a tile of both at a time: neither is
// stored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>

#include "pair_values-inl.h"

namespace regard::REGARD_NAMESPACE {

// One of the two: its terms, and a tile of scores, or of logarithms to base 2 of a sum of weights;
// -inf where masked.
template <class E>
struct Side {
  typedef typename E::Real Real;
  const PairTerm* terms;
  int64_t count;
  ReduceMemory<E>* of;  // [terms]: the first has the tile in its scores, and the top-k
  Real* weights;        // [kKeys][rows]: of one of several terms
  TileMask seen;        // the keys of a tile that are not all masked, of each vector

  Side(const Divergences& x, int side, Scratch& scratch)
      : terms(x.terms[side]), count(x.term_count[side]) {
    of = scratch.take<ReduceMemory<E>>(count);
    const bool measures = scratch.measures();
    for (int64_t i = 0; i < count; ++i) {
      const Reduce r = reduce_of(terms[i], i ? 0 : x.k);
      if (measures)
        ReduceMemory<E>(r, scratch);
      else
        new (of + i) ReduceMemory<E>(r, scratch);
    }
    weights = scratch.take<Real>(count > 1 ? kKeys * E::rows : 0);
  }
};

template <class E>
static bool scores_of_one(const Side<E>& side, int64_t j0, int keys) {
  typedef typename E::Real Real;
  const Problem& p = *side.terms[0].problem;
  const Scaling<E> scaling(p);
  ReduceMemory<E>& m = side.of[0];
  const Vec<Real> masked = Vec<Real>{} - kInf<Real>;
  if (m.rows.low >= j0 + keys || m.rows.high <= j0 || !mask_shows(p, m.rows, j0, keys))
    return false;
  const TileMask tile_mask = tile_mask_of(m.rows, j0, keys);
  multiply_tile(p, m, tile_mask, j0, keys, m.scores);
  if (!is_unmasked<E>(p, m.rows, tile_mask, j0, keys))
    finish_scores<E>(p, m.rows, tile_mask, scaling, j0, keys, m.scores, nullptr);
  for (int v = 0; v < m.rows.vectors; ++v) {
    for (int j = 0; j < tile_mask.low[v]; ++j) m.score(j, v) = masked;
    for (int j = tile_mask.high[v]; j < keys; ++j) m.score(j, v) = masked;
  }
  return true;
}

template <class E>
static bool log_weights_of_several(const Side<E>& side, int64_t j0, int keys) {
  typedef typename E::Real Real;
  const ReduceMemory<E>& sum = side.of[0];
  bool any = false;
  for (int j = 0; j < keys; ++j)
    for (int v = 0; v < sum.rows.vectors; ++v) sum.score(j, v) = Vec<Real>{};
  for (int64_t i = 0; i < side.count; ++i) {
    const PairTerm& t = side.terms[i];
    const Scaling<E> scaling(*t.problem);
    if (weigh_tile(*t.problem, scaling, side.of[i], j0, keys, side.weights) == Seen::nothing)
      continue;
    any = true;
    for (int j = 0; j < keys; ++j)
      for (int v = 0; v < sum.rows.vectors; ++v) {
        const Vec<Real> w = vector_at<E>(side.weights, j, v);
        sum.score(j, v) += is_masked<Real>(w) ? Vec<Real>{} : w * Real(t.coefficient);
      }
  }
  for (int j = 0; any && j < keys; ++j)
    for (int v = 0; v < sum.rows.vectors; ++v) {
      Vec<Real>& x = sum.score(j, v);
      x = log(x) * Real(kLog2e);
    }
  return any;
}

// Fills a side's tile, where any pair is unmasked; returns whether one is.
template <class E>
static bool fill_tile(Side<E>& side, int64_t j0, int keys) {
  const bool any =
      side.count == 1 ? scores_of_one(side, j0, keys) : log_weights_of_several(side, j0, keys);
  const Rows<E>& rows = side.of[0].rows;
  if (any && side.count == 1)
    side.seen = tile_mask_of(rows, j0, keys);
  else
    for (int v = 0; v < rows.vectors; ++v) side.seen.low[v] = 0, side.seen.high[v] = any * keys;
  return any;
}

// The tile of which the side has nothing.
template <class E>
static void mask_tile(const Side<E>& side, int keys) {
  const auto masked = broadcast(-kInf<typename E::Real>);
  for (int j = 0; j < keys; ++j)
    for (int v = 0; v < side.of[0].rows.vectors; ++v) side.of[0].score(j, v) = masked;
}

// From a side's tile to logarithms, for the rows of a vector.
template <class E>
struct Logarithms {
  typedef typename E::Real Real;
  Vec<Real> base = {}, log_total = {};
  Real factor = 1;

  Logarithms(const Side<E>& side, int v) {
    if (side.count > 1) return;
    const Normalisers<E>& of = side.of[0].normalisers;
    base = vector_at<E>(of.base, 0, v), log_total = vector_at<E>(of.log_total, 0, v);
    factor = Scaling<E>(*side.terms[0].problem).factor;
  }
  Vec<Real> operator()(Vec<Real> x) const { return (x - base) * factor - log_total; }
};

// A pair's terms of the divergences, from the logarithms of both weights.
template <class Real>
struct PairOfWeights {
  typedef Vec<Real> V;
  V log_a, log_b, a, b;

  // p ln(p / q) - p + q: what is added is 0 in all, and no term is negative.
  // A weight that is denormal or 0 in its type adds q, be that key masked in the other.
  static V divergence(V log_p, V log_q, V p, V q) {
    const V ratio = (log_p - log_q) * Real(kLn2), found = p * ratio - p + q;
    return p < 4 * std::numeric_limits<Real>::min() ? q : found;
  }
  // (a + b) / 4 · ((1 + u) ln(1 + u) + (1 − u) ln(1 − u)), with u = (a − b) / (a + b): that is
  // (a + b) / 4 · (ln(1 − u²) + u ln(a / b)), where 1 − u² is 4ab / (a + b)².
  V jensen_shannon() const {
    const V both = a + b, share = reciprocal(both == 0 ? V{} + Real(1) : both);
    const V p = a * share, q = b * share, product = Real(4) * p * q;
    const V found = log(product) + (p - q) * ((log_a - log_b) * Real(kLn2));
    return both * Real(0.25) * (product == 0 ? V{} + Real(2 * kLn2) : found);
  }
};

// Pairs whose terms are found in step, which hides the latency of their exponentials.
constexpr int kInStep = 4;

// Adds the terms of a tile to the sums of its rows: [4][rows], of the total variation twice.
template <class E>
static void add_divergences(const Divergences& x, const Side<E>& of_a, const Side<E>& of_b,
                            double* sums) {
  typedef typename E::Real Real;
  typedef Vec<Real> V;
  for (int v = 0; v < of_a.of[0].rows.vectors; ++v) {
    V sum[4] = {};
    const Logarithms<E> log_a(of_a, v), log_b(of_b, v);
    const auto add = [&]<int unroll>(int j, std::integral_constant<int, unroll>) {
      V logs[2 * unroll], weights[2 * unroll];
      for (int i = 0; i < unroll; ++i) {
        logs[2 * i] = weights[2 * i] = log_a(of_a.of[0].score(j + i, v));
        logs[2 * i + 1] = weights[2 * i + 1] = log_b(of_b.of[0].score(j + i, v));
      }
      exp2_each(weights);
      const auto add_terms = [&](int s, auto term) {  // together, then once to what is in memory
        V found = {};
        for (int i = 0; i < 2 * unroll; i += 2)
          found += term(PairOfWeights<Real>{logs[i], logs[i + 1], weights[i], weights[i + 1]});
        sum[s] += found;
      };
      typedef const PairOfWeights<Real>& P;
      if (x.kl) add_terms(0, [](P w) { return w.divergence(w.log_a, w.log_b, w.a, w.b); });
      if (x.reverse_kl) add_terms(1, [](P w) { return w.divergence(w.log_b, w.log_a, w.b, w.a); });
      if (x.jensen_shannon) add_terms(2, [](P w) { return w.jensen_shannon(); });
      if (x.total_variation) add_terms(3, [](P w) { return magnitude(w.a - w.b); });
    };
    const TileMask &a = of_a.seen, &b = of_b.seen;
    const int high = a.high[v] > b.high[v] ? a.high[v] : b.high[v];
    int j = a.low[v] < b.low[v] ? a.low[v] : b.low[v];
    for (; j + kInStep <= high; j += kInStep) add(j, std::integral_constant<int, kInStep>());
    for (; j < high; ++j) add(j, std::integral_constant<int, 1>());
    for (int s = 0; s < 4; ++s)
      for (int i = 0; i < E::lanes; ++i) sums[s * E::rows + v * E::lanes + i] += double(sum[s][i]);
  }
}

// The keys of a row's k strongest, in their order; returns how many have a weight.
template <class E>
__attribute__((noinline)) static int64_t strongest_keys(const Reduce& r, ReduceMemory<E>& m,
                                                        int row) {
  const int64_t n = best_of_row(r, m, row);
  std::sort(m.candidates + row * m.room(r), m.candidates + row * m.room(r) + n, ByKey());
  return n;
}

// The share of the strongest keys of two rows in common; 1 where neither has any.
template <class E>
static double overlap_of(const Reduce& r, ReduceMemory<E>& a, ReduceMemory<E>& b, int row) {
  const int64_t of_a = strongest_keys(r, a, row), of_b = strongest_keys(r, b, row);
  const auto* const keys_a = a.candidates + row * a.room(r);
  const auto* const keys_b = b.candidates + row * b.room(r);
  int64_t common = 0;
  for (int64_t i = 0, j = 0; i < of_a && j < of_b;) {
    common += keys_a[i].key == keys_b[j].key;
    const bool forward = keys_a[i].key <= keys_b[j].key, other = keys_b[j].key <= keys_a[i].key;
    i += forward, j += other;
  }
  const int64_t most = of_a > of_b ? of_a : of_b;
  return most ? double(common) / double(most) : 1;
}

// Begins with the rows of a side; returns the end of the keys that any of them sees.
template <class E>
static int64_t start_side(const Divergences& x, const Side<E>& side, int64_t row) {
  int64_t high = 0;
  for (int64_t i = 0; i < side.count; ++i) {
    const PairTerm& t = side.terms[i];
    describe_rows(*t.problem, side.of[i].rows, 0, 0, row, x.Lq);
    load_queries<E>(*t.problem, side.of[i].rows);
    start_rows(reduce_of(t, i ? 0 : x.k), side.of[i]);
    high = side.of[i].rows.high > high ? side.of[i].rows.high : high;
  }
  return high;
}

template <class E>
static void keep_strongest_keys(const Reduce& r, const Side<E>& side, int64_t j0) {
  ReduceMemory<E>& m = side.of[0];
  keep_top(r, m, side.seen, j0, m.scores, AsItIs());
}

// A task: a tile of queries.
template <class E>
static void run_diverge(const void* pass, int64_t task, char* memory, const Stop& stop) {
  const Divergences& x = *(const Divergences*)pass;
  Scratch scratch(memory);
  Side<E> a(x, 0, scratch), b(x, 1, scratch);
  const Reduce top = reduce_of(a.terms[0], x.k);
  const int64_t row = task * E::rows;
  if (stopped(stop)) return;
  const TileConfiguration<E::tiles> configuration;
  const int64_t high_a = start_side(x, a, row), high_b = start_side(x, b, row);
  double sums[4 * E::rows] = {};
  for_tiles(high_a > high_b ? high_a : high_b, [&](int64_t j0, int keys) {
    const bool in_a = fill_tile(a, j0, keys), in_b = fill_tile(b, j0, keys);
    if (!in_a && !in_b) return;
    if (!in_a) mask_tile(a, keys);
    if (!in_b) mask_tile(b, keys);
    if (x.kl || x.reverse_kl || x.jensen_shannon || x.total_variation)
      add_divergences(x, a, b, sums);
    if (x.k && in_a) keep_strongest_keys(top, a, j0);
    if (x.k && in_b) keep_strongest_keys(top, b, j0);
  });
  double* const results[] = {x.kl, x.reverse_kl, x.jensen_shannon, x.total_variation};
  for (int i = 0; i < a.of[0].rows.count; ++i) {
    for (int s = 0; s < 4; ++s)
      if (results[s]) results[s][row + i] = sums[s * E::rows + i] * (s == 3 ? 0.5 : 1);
    if (x.overlap) x.overlap[row + i] = x.k ? overlap_of(top, a.of[0], b.of[0], i) : 1;
  }
}

static Job diverge(const Divergences& x) {
  return by_computed<Job>(x.terms[0][0].problem->type, [&]<class E>(E) -> Job {
    Scratch scratch(nullptr);
    Side<E> a(x, 0, scratch), b(x, 1, scratch);
    return {(x.Lq + E::rows - 1) / E::rows, scratch.taken(), run_diverge<E>, &x};
  });
}

}  // namespace regard::REGARD_NAMESPACE
