// A matrix with a number for every token pair: a sum of weights, or what cutting each pair would
// do. The numbers of a tile of queries and all of its keys are computed, [key][row], and then
// reduced, since an effect follows from a whole row.
#pragma once

#include <cstdint>
#include <cstring>

#include "reduce-inl.h"

namespace regard::REGARD_NAMESPACE {

// The number of a masked pair: a NaN that no arithmetic gives.
template <class Real>
static inline Vec<Real> masked_pairs() {
  return (Vec<Real>)(Int<Real>{} + (sizeof(Real) == 8 ? Integer<Real>(0x7ff8d1edd1edd1ed)
                                                      : Integer<Real>(0x7fd1edd1)));
}

template <class Real>
static inline Int<Real> is_masked(Vec<Real> x) {
  return (Int<Real>)x == (Int<Real>)masked_pairs<Real>();
}

// How much of a tile of keys is unmasked.
enum class Seen : char { nothing, some, all };

// The type of values, gradients and results: Real, whatever is stored.
template <class E>
using Wide = Element<real_type<typename E::Real>>;

// Sums over the weights of each row up to 1/2, and over the one above it: [rows].
template <class E>
struct RowSums {
  typedef typename E::Real Real;
  double *rest, *first, *beside;  // of w g·v, of the same of the one above 1/2, and of w
  Real *of_rest, *of_first, *of_beside;

  explicit RowSums(Scratch& scratch) {
    for (double** x : {&rest, &first, &beside}) *x = scratch.take<double>(E::rows);
    for (Real** x : {&of_rest, &of_first, &of_beside}) *x = scratch.take<Real>(E::rows);
  }
};

static inline bool is_effect(const PairTerm& t) { return t.kind != PairKind::weight; }
static inline bool needs_sums(const PairTerm& t) { return t.kind == PairKind::knockout; }

static inline int64_t tiles_of(int64_t keys) { return (keys + kKeys - 1) / kKeys; }

// The reductions of the weights of a term, as far as it is read with them.
static inline Reduce reduce_of(const PairTerm& t, int64_t k) {
  static constexpr int64_t start = 0;
  Reduce r{};
  r.problem = t.problem;
  r.maximum = const_cast<void*>(t.maximum), r.total = const_cast<void*>(t.total);
  r.starts = &start;
  r.k = k;
  return r;
}

template <class E>
struct PairMemory {
  typedef typename E::Real Real;
  ReduceMemory<E> m;  // a term's queries and normalisers; a tile of scores; top-k
  Real* values;       // [Lk][rows]
  Real* weights;      // [Lk][rows]: of an effect; where `values` are if it is the only term
  Real* products;     // [Lk][rows]: of gradient and value
  Real* gradient;     // [Dv][rows]
  Seen* seen;         // [tiles]
  Seen* own;          // of the term
  RowSums<E> sums;

  PairMemory(const PairMatrix& x, const Reduce& r, Scratch& scratch)
      : m(r, scratch), sums(scratch) {
    const int64_t keys = tiles_of(x.Lk) * kKeys + E::lanes;  // and what is read past the last
    int64_t queries = 0, words = 0, lone = 0, Dv = 0;
    bool effects = false;
    for (int64_t i = 0; i < x.term_count; ++i) {
      const Problem& p = *x.terms[i].problem;
      const auto raise = [](int64_t& most, int64_t n) { most = n > most ? n : most; };
      raise(queries, query_words<E>(p)), raise(words, kKeys * E::row_words(p.D));
      raise(lone, lone_words<E>(p)), raise(Dv, x.terms[i].Dv);
      effects |= is_effect(x.terms[i]);
    }
    m.rows.q = scratch.take<typename E::Word>(queries);
    m.keys = scratch.take<typename E::Word>(words);
    m.lone = scratch.take<typename E::Word>(lone);
    values = scratch.take<Real>(keys * E::rows);
    weights = effects && x.term_count > 1 ? scratch.take<Real>(keys * E::rows) : values;
    products = scratch.take<Real>(effects ? keys * E::rows : 0);
    gradient = scratch.take<Real>(Dv * E::rows);
    seen = scratch.take<Seen>(tiles_of(x.Lk));
    own = scratch.take<Seen>(tiles_of(x.Lk));
  }
};

// Whether an edit cuts any pair of a tile.
template <class E>
static bool any_cut(const Problem& p, const Rows<E>& rows, int64_t j0, int keys) {
  for (int64_t e = 0; e < p.edit_count; ++e)
    if (is_cut(p.edits[e]) && meets(p.edits[e], rows, j0, keys, false)) return true;
  return false;
}

// Masks the lanes without a row.
template <class E>
static void mask_unused(const Rows<E>& rows, int keys, typename E::Real* tile) {
  typedef typename E::Real Real;
  const int v = rows.vectors - 1, used = rows.count - v * E::lanes;
  if (used == E::lanes) return;
  Int<Real> lane;
  for (int i = 0; i < E::lanes; ++i) lane[i] = i;
  for (int j = 0; j < keys; ++j) {
    Vec<Real>& x = vector_at<E>(tile, j, v);
    x = lane < used ? x : masked_pairs<Real>();
  }
}

// Turns scores into weights, and leaves what is masked.
template <class E, bool all>
static void pair_weights(const Scaling<E>& scaling, const ReduceMemory<E>& m, int v, int low,
                         int high, typename E::Real* tile) {
  typedef typename E::Real Real;
  const Vec<Real> base = m.at(m.normalisers.base, v), inverse = m.at(m.normalisers.inverse, v);
  const auto some = [&]<int unroll>(int j, std::integral_constant<int, unroll>) {
    Vec<Real> w[unroll];
    for (int i = 0; i < unroll; ++i) w[i] = scaling.exponent(vector_at<E>(tile, j + i, v), base);
    exp2_each(w);
    for (int i = 0; i < unroll; ++i) {
      Vec<Real>& x = vector_at<E>(tile, j + i, v);
      const Vec<Real> weight = inverse != 0 ? w[i] * inverse : Vec<Real>{};
      x = all ? weight : is_masked<Real>(x) ? x : weight;
    }
  };
  int j = low;
  for (; j + 4 <= high; j += 4) some(j, std::integral_constant<int, 4>());
  for (; j < high; ++j) some(j, std::integral_constant<int, 1>());
}

// The weights of a tile of keys, [key][row].
template <class E>
static Seen weigh_tile(const Problem& p, const Scaling<E>& scaling, const ReduceMemory<E>& m,
                       int64_t j0, int keys, typename E::Real* tile) {
  typedef typename E::Real Real;
  if (m.rows.low >= j0 + keys || m.rows.high <= j0 || !mask_shows(p, m.rows, j0, keys))
    return Seen::nothing;
  const TileMask tile_mask = tile_mask_of(m.rows, j0, keys);
  multiply_tile(p, m, tile_mask, j0, keys, tile);
  if (!is_unmasked<E>(p, m.rows, tile_mask, j0, keys))
    finish_scores<E>(p, m.rows, tile_mask, scaling, j0, keys, tile, nullptr, masked_pairs<Real>());
  const bool all =
      tile_mask.fully_visible && !p.mask && !p.key_ids && !any_cut(p, m.rows, j0, keys);
  for (int v = 0; v < m.rows.vectors; ++v) {
    const int low = tile_mask.low[v], high = tile_mask.high[v];
    (all ? pair_weights<E, true> : pair_weights<E, false>)(scaling, m, v, low, high, tile);
    for (int j = 0; j < low; ++j) vector_at<E>(tile, j, v) = masked_pairs<Real>();
    for (int j = high; j < keys; ++j) vector_at<E>(tile, j, v) = masked_pairs<Real>();
  }
  mask_unused(m.rows, keys, tile);
  return all && m.rows.count == m.rows.vectors * E::lanes ? Seen::all : Seen::some;
}

// Adds a tile, times a coefficient, to the values of the same keys: what is masked in both stays.
template <class E, bool all>
static void add_pairs(const Rows<E>& rows, typename E::Real coefficient, int keys,
                      const typename E::Real* tile, typename E::Real* values) {
  typedef typename E::Real Real;
  for (int j = 0; j < keys; ++j)
    for (int v = 0; v < rows.vectors; ++v) {
      const Vec<Real> x = *(const Vec<Real>*)(tile + j * E::rows + v * E::lanes);
      Vec<Real>& sum = vector_at<E>(values, j, v);
      if (all)
        sum += x * coefficient;
      else
        sum = is_masked<Real>(x)     ? sum
              : is_masked<Real>(sum) ? x * coefficient
                                     : sum + x * coefficient;
    }
}

template <class E>
static void add_tile(PairMemory<E>& m, const PairTerm& t, int64_t j0, int keys, Seen seen,
                     const typename E::Real* tile) {
  typedef typename E::Real Real;
  Seen& known = m.seen[j0 / kKeys];
  Real* const values = m.values + j0 * E::rows;
  if (seen == Seen::nothing) return;
  if (known == Seen::nothing)
    for (int j = 0; j < keys; ++j)
      for (int v = 0; v < m.m.rows.vectors; ++v) vector_at<E>(values, j, v) = masked_pairs<Real>();
  const bool all = known == Seen::all && seen == Seen::all;
  (all ? add_pairs<E, true> : add_pairs<E, false>)(m.m.rows, Real(t.coefficient), keys, tile,
                                                   values);
  if (known != Seen::all) known = seen;
}

// gradient[.][row] and the sums of a tile of queries, which begin with the weight of the sink.
template <class E>
static void start_effects(const PairTerm& t, PairMemory<E>& m) {
  typedef typename E::Real Real;
  const char* rows[E::rows];
  for (int i = 0; i < m.m.rows.count; ++i)
    rows[i] = (const char*)t.gradient + m.m.rows.index[i] * t.Dv * int64_t(sizeof(Real));
  transpose_rows<Wide<E>>(rows, m.m.rows.count, t.Dv, m.gradient);
  for (int i = 0; i < E::rows; ++i) {
    const bool has_sink = t.of_sink && i < m.m.rows.count;
    m.sums.rest[i] = m.sums.first[i] = 0;
    m.sums.beside[i] = has_sink ? t.of_sink[m.m.rows.index[i]] : 0;
  }
}

// Whether any row of a vector may have a weight above 1/2: none is larger than 1 / total.
template <class E>
static bool may_have_first(const ReduceMemory<E>& m, int v) {
  const auto inverse = m.at(m.normalisers.inverse, v);
  return greater(inverse, broadcast(typename E::Real(0.5)));
}

// Adds the weights of a tile, and their products with g·v, to the sums of the rows of vector v.
template <class E, bool all, bool firsts>
static void sum_effects(PairMemory<E>& m, int v, int low, int high, int64_t j0) {
  typedef typename E::Real Real;
  Vec<Real> rest = {}, first = {}, beside = {};
  for (int j = low; j < high; ++j) {
    Vec<Real> w = vector_at<E>(m.weights + j0 * E::rows, j, v);
    Vec<Real> g = vector_at<E>(m.products + j0 * E::rows, j, v);
    if (!all) {
      const Int<Real> masked = is_masked<Real>(w);
      w = masked ? Vec<Real>{} : w, g = masked ? Vec<Real>{} : g;
    }
    const Vec<Real> term = w * g;
    const Int<Real> is_first = w > Real(0.5);
    rest += !firsts ? term : is_first ? Vec<Real>{} : term;
    if (!firsts) continue;
    first += is_first ? term : Vec<Real>{};
    beside += is_first ? Vec<Real>{} : w;
  }
  for (int i = 0; i < E::lanes; ++i) {
    const int at = v * E::lanes + i;
    m.sums.rest[at] += double(rest[i]), m.sums.first[at] += double(first[i]);
    m.sums.beside[at] += double(beside[i]);
  }
}

// The products of gradient and value of a tile, and the sums over its weights.
template <class E>
static void multiply_effects(const PairTerm& t, PairMemory<E>& m, int64_t j0, int keys, Seen seen) {
  typedef typename E::Real Real;
  const Rows<E>& rows = m.m.rows;
  const int64_t stride = t.Dv * int64_t(sizeof(Real));
  const TileMask tile_mask = tile_mask_of(rows, j0, keys);
  for (int c = 0; c < tile_mask.spans; ++c)
    multiply_span<Wide<E>>(tile_mask.span[c], m.gradient,
                           Matrix{(const char*)t.value + j0 * stride, stride}, t.Dv,
                           m.products + j0 * E::rows);
  if (!needs_sums(t)) return;
  const bool all = seen == Seen::all;
  for (int v = 0; v < rows.vectors; ++v) {
    const bool firsts = may_have_first(m.m, v);
    (all      ? firsts ? sum_effects<E, true, true> : sum_effects<E, true, false>
     : firsts ? sum_effects<E, false, true>
              : sum_effects<E, false, false>)(m, v, tile_mask.low[v], tile_mask.high[v], j0);
  }
}

template <class E>
static void finish_sums(const Rows<E>& rows, RowSums<E>& sums) {
  typedef typename E::Real Real;
  for (int i = 0; i < rows.vectors * E::lanes; ++i) {
    sums.of_rest[i] = Real(sums.rest[i]), sums.of_first[i] = Real(sums.first[i]);
    sums.of_beside[i] = Real(sums.beside[i]);
  }
}

// w · (g·o′ − g·v), with the output o′ that is left without the pair: 0 where no weight is.
template <class Real>
static inline Vec<Real> knockout(Vec<Real> w, Vec<Real> g, Vec<Real> rest, Vec<Real> first,
                                 Vec<Real> beside_first) {
  const Int<Real> is_first = w > Real(0.5);
  const Vec<Real> others = is_first ? rest : rest + first - w * g;
  const Vec<Real> beside = is_first ? beside_first : Real(1) - w;
  const Vec<Real> left = beside == 0 ? Vec<Real>{} : others / beside;
  return w * (left - g);
}

// Turns the weights of vector v of a tile into effects, in place.
template <class E, class Effect>
static void finish_vector(const PairMemory<E>& m, int v, int64_t j0, int keys, Effect effect) {
  typedef typename E::Real Real;
  const bool all = m.own[j0 / kKeys] == Seen::all;
  const auto each = [&](auto hidden) {
    for (int j = 0; j < keys; ++j) {
      Vec<Real>& w = vector_at<E>(m.weights + j0 * E::rows, j, v);
      w = hidden(w, effect(w, vector_at<E>(m.products + j0 * E::rows, j, v)));
    }
  };
  if (all)
    each([](Vec<Real>, Vec<Real> x) { return x; });
  else
    each([](Vec<Real> w, Vec<Real> x) { return is_masked<Real>(w) ? w : x; });
}

// Turns the weights of a tile into effects, in place.
template <class E>
static void finish_effects(const PairTerm& t, const PairMemory<E>& m, int64_t j0, int keys) {
  typedef typename E::Real Real;
  typedef Vec<Real> V;
  for (int v = 0; v < m.m.rows.vectors; ++v) {
    const V rest = vector_at<E>(m.sums.of_rest, 0, v), first = vector_at<E>(m.sums.of_first, 0, v);
    const V beside = vector_at<E>(m.sums.of_beside, 0, v);
    if (t.kind == PairKind::contribution)
      finish_vector(m, v, j0, keys, [](V w, V g) { return w * g; });
    else if (t.kind == PairKind::relevance)
      finish_vector(m, v, j0, keys, [](V w, V g) { return w * g < 0 ? V{} : w * g; });
    else if (t.kind == PairKind::gradient)
      finish_vector(m, v, j0, keys, [](V, V g) { return g; });
    else if (may_have_first(m.m, v))
      finish_vector(m, v, j0, keys,
                    [&](V w, V g) { return knockout<Real>(w, g, rest, first, beside); });
    else
      finish_vector(m, v, j0, keys, [&](V w, V g) { return w / (Real(1) - w) * (rest - g); });
  }
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
      multiply_effects(t, m, j0, keys, seen);
    else if (!kept)
      add_tile(m, t, j0, keys, seen, tile);
    if (kept && only) m.seen[j0 / kKeys] = seen;
  }
  if (!is_effect(t)) return;
  finish_sums(m.m.rows, m.sums);
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
