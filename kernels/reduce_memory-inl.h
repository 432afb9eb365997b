// What a task of the second pass works in: the scores of a tile of queries, and what is kept of
// each row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "heatmap-inl.h"
#include "linear-inl.h"
#include "scores-inl.h"

namespace regard::REGARD_NAMESPACE {

// Top-k up to this k is kept sorted in the lanes; above it, as candidates over a rising threshold.
constexpr int64_t kSortedInLanes = 64;

template <class Real>
struct Candidate {
  Real score;
  int32_t key;
};

template <class E>
struct ReduceMemory {
  typedef typename E::Real Real;
  // Whether tiles compute the scores of the next keys, while vectors reduce.
  static constexpr bool overlaps =
      E::tiles && E::parts == 1 && std::is_same_v<E, typename E::OfForward>;
  Rows<E> rows;
  Real* scores;       // [kKeys][rows]
  Real* next_scores;  // likewise; the same ones where nothing overlaps
  StepwiseProduct<overlaps> meanwhile;
  KeyRows<E> keys;
  typename E::Word* lone;  // of multiply_lone
  Normalisers<E> normalisers;
  int64_t* position;  // [rows]: of the query, among the keys
  Bins<E> bins;
  LinearMemory<E> linear;
  double* sum;      // [rows]: of the weights
  double* entropy;  // of weight * exponent
  double* distance;
  Real* threshold;  // of top-k
  Real* pair_threshold;
  Real* best;           // [k][rows]: sorted in the lanes
  Int<Real>* best_key;  // [k][vectors]
  Vec<Real>* pending;   // [kKeys]: a tile's scores over the k-th best of their rows
  Int<Real>* pending_key;
  int32_t* found;               // [kKeys * lanes]: their places in the tile
  Candidate<Real>* candidates;  // [rows][2 k + 32]
  int* counts;
  Pair* pairs;
  int64_t pair_count = 0;
  Pair weakest = {0, -1, -1};  // of the n strongest so far; 0 while there are fewer
  bool has_nan;                // whether the weights of a row are NaN

  // `keeps_keys`: as of KeyRows.
  ReduceMemory(const Reduce& r, Scratch& scratch, bool keeps_keys = false)
      : keys(*r.problem, keeps_keys, scratch),
        normalisers(scratch),
        bins(r, scratch),
        linear(r, scratch) {
    const Problem& p = *r.problem;
    rows.q = scratch.take<typename E::Word>(query_words<E>(p));
    scores = scratch.take<Real>(kKeys * E::rows);
    next_scores = overlaps ? scratch.take<Real>(kKeys * E::rows) : scores;
    lone = scratch.take<typename E::Word>(lone_words<E>(p));
    position = scratch.take<int64_t>(E::rows);
    for (Real** x : {&threshold, &pair_threshold}) *x = scratch.take<Real>(E::rows);
    for (double** x : {&sum, &entropy, &distance}) *x = scratch.take<double>(E::rows);
    const int64_t sorted = r.k <= kSortedInLanes ? r.k : 0;
    best = scratch.take<Real>(sorted * E::rows);
    best_key = scratch.take<Int<Real>>(sorted * kVectors);
    pending = scratch.take<Vec<Real>>(sorted ? kKeys : 0);
    pending_key = scratch.take<Int<Real>>(sorted ? kKeys : 0);
    found = scratch.take<int32_t>(sorted ? kKeys * E::lanes + 16 : 0);
    candidates = scratch.take<Candidate<Real>>(r.k ? E::rows * room(r) : 0);
    counts = scratch.take<int>(E::rows);
    pairs = scratch.take<Pair>(r.n ? pair_room(r) : 0);
  }

  static int64_t room(const Reduce& r) { return 2 * r.k + 32; }
  static int64_t pair_room(const Reduce& r) { return 2 * r.n + 64; }

  Vec<Real>& at(Real* x, int v) const { return *(Vec<Real>*)(x + v * E::lanes); }
  Vec<Real>& score(int j, int v) const { return at(scores + j * E::rows, v); }
};

template <class E>
static void start_rows(const Reduce& r, ReduceMemory<E>& m) {
  typedef typename E::Real Real;
  const Problem& p = *r.problem;
  m.has_nan = false;
  if (r.k <= kSortedInLanes)
    for (int64_t x = 0; x < r.k * E::rows; ++x) m.best[x] = -kInf<Real>;
  for (int i = 0; i < E::rows; ++i) {
    m.normalisers.clear(i);
    m.position[i] = 0;
    m.sum[i] = m.entropy[i] = m.distance[i] = 0;
    m.threshold[i] = -kInf<Real>;
    m.counts[i] = 0;
    if (i >= m.rows.count) continue;
    const int64_t at = (m.rows.b * p.Hq + m.rows.head[i]) * p.Lq + m.rows.index[i];
    const Real maximum = ((const Real*)r.maximum)[at], total = ((const Real*)r.total)[at];
    m.normalisers.set(i, maximum, total);
    m.position[i] = r.starts[m.rows.b] + m.rows.index[i] * r.query_step;
    m.has_nan |= total != total;
  }
}

}  // namespace regard::REGARD_NAMESPACE
