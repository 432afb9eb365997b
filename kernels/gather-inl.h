// Weights of chosen pairs, each by itself: the queries and the keys of a tile of pairs are in the
// lanes. They have the bits that they have in the matrix.
#pragma once

#include <cstdint>

#include "heatmap-inl.h"

namespace regard::REGARD_NAMESPACE {

constexpr int64_t kPairsOfTask = 4096;

template <class E>
struct GatherMemory {
  typedef typename E::Real Real;
  Rows<E> rows;              // of the pairs: a query may come again
  const char* key[E::rows];  // of each pair
  typename E::Word* keys;    // [words(D)][rows]
  Real* scores;              // [1][rows]
  Normalisers<E> normalisers;

  GatherMemory(const Gather& g, Scratch& scratch) : normalisers(scratch) {
    rows.q = scratch.take<typename E::Word>(query_words<E>(*g.problem));
    keys = scratch.take<typename E::Word>(E::row_words(g.problem->D) * E::rows);
    scores = scratch.take<Real>(E::rows);
  }
};

// Fills the queries, keys and normalisers of up to E::rows pairs of a head, from `first` on.
template <class E>
static void describe_pairs(const Gather& g, GatherMemory<E>& m, int64_t head, int64_t first) {
  typedef typename E::Real Real;
  const Problem& p = *g.problem;
  Rows<E>& rows = m.rows;
  const int64_t b = head / p.Hq, h = head % p.Hq, kv = h / (p.Hq / p.Hkv);
  rows.b = b;
  rows.count = int(g.pairs - first < E::rows ? g.pairs - first : E::rows);
  rows.vectors = (rows.count + E::lanes - 1) / E::lanes;
  for (int i = 0; i < E::rows; ++i) {
    m.normalisers.clear(i);
    m.scores[i] = 0;
    if (i >= rows.count) continue;
    const int64_t q = g.queries[first + i], at = interval_at(p, b, h, q), row = head * p.Lq + q;
    rows.head[i] = h, rows.index[i] = q, rows.first[i] = p.first[at], rows.last[i] = p.last[at];
    rows.query[i] = p.query.at(b, h, q);
    m.key[i] = p.key.at(b, kv, g.keys[first + i]);
    m.normalisers.set(i, ((const Real*)g.maximum)[row], ((const Real*)g.total)[row]);
  }
}

#ifdef REGARD_TILES
// The product of each query with its key, as tiles add it. Not inlined: nothing may move out of
// where denormal numbers are flushed.
template <class E>
__attribute__((noinline)) static void add_pairs_by_tiles(const Problem& p, GatherMemory<E>& m) {
  const int64_t words = E::words(p.D);
  for (int v = 0; v < m.rows.vectors; ++v) {
    F sum = {};
    for (int parts = 0; parts < E::parts * E::parts; ++parts)
      for (int64_t w = 0; w < words; w += kTileRows) {
        const int64_t k = parts / 2 * words + w, q = parts % 2 * words + w;
        const int32_t* const key = m.keys + k * E::rows + v * E::lanes;
        const auto word = [&](int t) { return *(const I*)(key + t * E::rows); };
        sum = add_words(sum, word, m.rows.q + q * E::rows + v * E::lanes, E::rows);
      }
    vector_at<E>(m.scores, 0, v) = sum;
  }
}
#endif

// The product of each query with its key, in the order of the terms of multiply_keys.
template <class E>
static void multiply_pairs(const Problem& p, GatherMemory<E>& m) {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  Rows<E>& rows = m.rows;
  if (few_queries<E>(p)) {
    Rows<E> one = rows;
    one.count = 1;
    alignas(64) Real products[kDecodeKeys];
    for (int i = 0; i < rows.count; ++i) {
      one.query[0] = rows.query[i];
      load_queries<E>(p, one);
      by_stored<typename E::OfFew>(p.type, [&]<class Few>(Few) {
        dot_keys<Few, 1>(p, few_rows(one), m.key[i], 1, products);
      });
      m.scores[i] = products[0];
    }
    return;
  }
  transpose_stored<E>(p, rows.query, rows.count, p.D, rows.q);
  transpose_stored<E>(p, m.key, rows.count, p.D, m.keys);
#ifdef REGARD_TILES
  if constexpr (E::tiles) {
    {
      const FlushesDenormals flushes;
      add_pairs_by_tiles(p, m);
    }
    for (int i = 0; E::parts > 1 && i < rows.count; ++i)
      if (m.scores[i] - m.scores[i] != 0)
        m.scores[i] = product_of_parts(m.keys + i, E::rows, rows.q + i, E::rows, E::words(p.D));
    return;
  }
#endif
  const int64_t words = E::words(p.D);
  for (int v = 0; v < rows.vectors; ++v)
    for (int64_t w = 0; w < words; w += kTerms) {
      Vec<Real> sum = {};
      for (int64_t t = w; t < words && t < w + kTerms; ++t)
        sum = E::Op::add(sum, *(const Vec<Word>*)(rows.q + t * E::rows + v * E::lanes),
                         *(const Vec<Word>*)(m.keys + t * E::rows + v * E::lanes));
      Vec<Real>& score = vector_at<E>(m.scores, 0, v);
      score = w ? score + sum : sum;
    }
}

// Scales, caps, biases and edits the scores, as finish_scores; what is cut does not attend.
template <class E>
static void finish_pairs(const Gather& g, const Scaling<E>& scaling, GatherMemory<E>& m,
                         int64_t first) {
  typedef typename E::Real Real;
  const Problem& p = *g.problem;
  for (int v = 0; !scaling.raw && v < m.rows.vectors; ++v) {
    Vec<Real>& s = vector_at<E>(m.scores, 0, v);
    s = cap_scores<Real>(p, s * Real(p.scale), nullptr);
  }
  for (int i = 0; p.bias && i < m.rows.count; ++i)
    m.scores[i] += number<Real>(p.bias.at(m.rows.b, m.rows.head[i], m.rows.index[i]) +
                                    g.keys[first + i] * p.bias.strides[3],
                                p.bias.type);
  for (int64_t e = 0; e < p.edit_count; ++e)
    for (int i = 0; i < m.rows.count; ++i) {
      const int64_t j = g.keys[first + i];
      const Edit& edit = p.edits[e];
      if (!is_cut(edit) && is_of(edit, m.rows.head[i], m.rows.index[i]) &&
          includes(edit.key, j, j + 1))
        m.scores[i] += Real(added_score(p, edit));
    }
}

template <class E>
static void run_gather(const void* pass, int64_t task, char* memory, const Stop& stop) {
  typedef typename E::Real Real;
  const Gather& g = *(const Gather*)pass;
  const Problem& p = *g.problem;
  const Scaling<E> scaling(p);
  Scratch scratch(memory);
  GatherMemory<E> m(g, scratch);
  const int64_t tasks = (g.pairs + kPairsOfTask - 1) / kPairsOfTask, head = task / tasks;
  const int64_t begin = task % tasks * kPairsOfTask;
  const int64_t end = begin + kPairsOfTask < g.pairs ? begin + kPairsOfTask : g.pairs;
  for (int64_t first = begin; first < end; first += E::rows) {
    if (stopped(stop)) return;
    describe_pairs(g, m, head, first);
    multiply_pairs(p, m);
    finish_pairs(g, scaling, m, first);
    for (int v = 0; v < m.rows.vectors; ++v) {
      Vec<Real>& s = vector_at<E>(m.scores, 0, v);
      const Vec<Real> inverse = vector_at<E>(m.normalisers.inverse, 0, v);
      const Vec<Real> w = exp2(scaling.exponent(s, vector_at<E>(m.normalisers.base, 0, v)));
      s = s == -kInf<Real> ? Vec<Real>{} : w * inverse;
    }
    for (int i = 0; i < m.rows.count && first + i < end; ++i) {
      const Real inverse = m.normalisers.inverse[i];
      const bool seen = inverse != 0 && attends(p, m.rows, i, g.keys[first + i]);
      ((Real*)g.weights)[head * g.pairs + first + i] = !seen                ? 0
                                                       : inverse != inverse ? inverse
                                                                            : m.scores[i];
    }
  }
}

static Job gather(const Gather& g) {
  return by_computed<Job>(g.problem->type, [&]<class E>(E) -> Job {
    Scratch scratch(nullptr);
    GatherMemory<E> m(g, scratch);
    const int64_t tasks = (g.pairs + kPairsOfTask - 1) / kPairsOfTask;
    return {g.problem->B * g.problem->Hq * tasks, scratch.taken(), run_gather<E>, &g};
  });
}

}  // namespace regard::REGARD_NAMESPACE
