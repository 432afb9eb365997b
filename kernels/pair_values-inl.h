// A matrix with a number for every token pair: a sum of weights, or what cutting each pair would
// do. The numbers of a tile of queries and all of its keys are computed, [key][row], and then
// reduced, where an effect follows from a whole row whose sums are not known; otherwise tile by
// tile.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>

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

// The weight above which a pair's 1 − w is the sum of the others: at most one of a row's, though
// each of two equal ones may be rounded to a little more than 1/2.
constexpr double kFirst = 0.5625;

// Sums over the weights of each row up to 9/16, and over the one above it: [rows].
template <class E>
struct RowSums {
  typedef typename E::Real Real;
  double *rest, *first, *beside;  // of w g·v, of the same of the one above 9/16, and of w
  Real* all;                      // of w g·v
  Real* left_of_first;            // g·o′ without the one above 9/16, 0 where no other has weight

  explicit RowSums(Scratch& scratch) {
    for (double** x : {&rest, &first, &beside}) *x = scratch.take<double>(E::rows);
    for (Real** x : {&all, &left_of_first}) *x = scratch.take<Real>(E::rows);
  }
};

// The outputs of a tile of queries, and their changes.
template <class E>
struct ChangeMemory {
  typedef typename E::Real Real;
  Real* rest;          // [Dv][rows]: the sum of w v over the weights up to 9/16
  int64_t* first;      // [rows]: the key of the weight above 9/16, or -1
  Real* first_weight;  // [rows]
  Real* of_first;      // [rows]: its change
  Real* squares;       // [rows]: of the size of the output

  ChangeMemory(int64_t Dv, Scratch& scratch) {
    rest = scratch.take<Real>(Dv * E::rows);
    first = scratch.take<int64_t>(E::rows);
    for (Real** x : {&first_weight, &of_first, &squares}) *x = scratch.take<Real>(E::rows);
  }
};

static inline bool is_effect(const PairTerm& t) { return t.kind != PairKind::weight; }
static inline bool is_change(const PairTerm& t) { return t.kind == PairKind::change; }
static inline bool needs_sums(const PairTerm& t) { return t.kind == PairKind::knockout; }

static inline int64_t tiles_of(int64_t keys) { return (keys + kKeys - 1) / kKeys; }

// Calls `each(first key, keys)` for every tile of the keys before `end`.
template <class Each>
static void for_tiles(int64_t end, Each each) {
  for (int64_t j0 = 0; j0 < end; j0 += kKeys) each(j0, int(end - j0 < kKeys ? end - j0 : kKeys));
}

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

// Whether several terms are summed tile by tile: no number depends on the whole row.
static bool sums_tiles(const PairMatrix& x) {
  bool all = x.term_count > 1;
  for (int64_t i = 0; i < x.term_count; ++i) all &= !is_effect(x.terms[i]);
  return all;
}

// Tiles of queries that are at work at a time: several where terms are summed, else one.
constexpr int kSummedTogether = 4;
static int tiles_together(const PairMatrix& x) { return sums_tiles(x) ? kSummedTogether : 1; }

// A tile of queries of one of several terms.
template <class E>
struct TermRows {
  Rows<E> rows;
  Normalisers<E> normalisers;

  TermRows(int64_t words, Scratch& scratch) : normalisers(scratch) {
    rows.q = scratch.take<typename E::Word>(words);
  }
};

template <class E>
struct PairMemory {
  typedef typename E::Real Real;
  ReduceMemory<E> m;  // a term's queries and normalisers; a tile of scores; top-k
  TermRows<E>* of;    // [terms], where these are summed tile by tile
  Real* values;       // [Lk][rows], or one tile at a time
  Real* weights;      // likewise: of an effect; where `values` are if it is the only term
  Real* products;     // likewise: of gradient and value; [kKeys][rows] of output and value
  Real* gradient;     // [Dv][rows]: or the output
  Seen* seen;         // [tiles]
  Seen* own;          // of the term
  bool streams;       // whether the tiles of these queries are reduced one by one
  int64_t high;       // the end of the keys that any row of any of several terms sees
  RowSums<E> sums;
  ChangeMemory<E> change;

  PairMemory(const PairMatrix& x, const Reduce& r, Scratch& scratch)
      : m(r, scratch, keeps_keys(x)), sums(scratch), change(changed_size(x), scratch) {
    const int64_t tiles = sums_tiles(x) ? 1 : tiles_of(x.Lk);
    const int64_t keys = tiles * kKeys + E::lanes;  // and what is read past the last
    int64_t queries = 0, words = 0, lone = 0, Dv = 0;
    bool effects = false, products_of_rows = false;
    for (int64_t i = 0; i < x.term_count; ++i) {
      const Problem& p = *x.terms[i].problem;
      const auto raise = [](int64_t& most, int64_t n) { most = n > most ? n : most; };
      raise(queries, query_words<E>(p)), raise(words, kKeys * E::row_words(p.D));
      raise(lone, lone_words<E>(p)), raise(Dv, x.terms[i].Dv);
      effects |= is_effect(x.terms[i]);
      products_of_rows |= is_effect(x.terms[i]) && !is_change(x.terms[i]);
    }
    m.rows.q = scratch.take<typename E::Word>(queries);
    of = scratch.take<TermRows<E>>(sums_tiles(x) ? x.term_count : 0);
    for (int64_t i = 0; sums_tiles(x) && i < x.term_count; ++i) {
      const TermRows<E> term(queries, scratch);
      if (!scratch.measures()) new (of + i) TermRows<E>(term);
    }
    if (x.term_count > 1) m.keys = KeyRows<E>(words, false, scratch);
    m.lone = scratch.take<typename E::Word>(lone);
    values = scratch.take<Real>(keys * E::rows);
    weights = effects && x.term_count > 1 ? scratch.take<Real>(keys * E::rows) : values;
    products = scratch.take<Real>((products_of_rows ? keys : effects ? kKeys : 0) * E::rows);
    gradient = scratch.take<Real>(Dv * E::rows);
    seen = scratch.take<Seen>(tiles_of(x.Lk));
    own = scratch.take<Seen>(tiles_of(x.Lk));
  }

  // Where the numbers of a tile of keys lie.
  int64_t at(int64_t j0) const { return streams ? 0 : j0 * E::rows; }

  static bool keeps_keys(const PairMatrix& x) {
    return x.term_count == 1 && x.Lq > E::rows && KeyRows<E>::can_keep(*x.terms[0].problem);
  }

  static int64_t changed_size(const PairMatrix& x) {
    int64_t Dv = 0;
    for (int64_t i = 0; i < x.term_count; ++i)
      if (is_change(x.terms[i]) && x.terms[i].Dv > Dv) Dv = x.terms[i].Dv;
    return Dv;
  }
};

// Whether an edit cuts any pair of a tile.
template <class E>
static bool any_cut(const Problem& p, const Rows<E>& rows, int64_t j0, int keys) {
  for (int64_t e = 0; e < p.edit_count; ++e)
    if (is_cut(p.edits[e]) && meets(p.edits[e], rows, j0, keys, false)) return true;
  return false;
}

// Whether any row of a vector may have a weight above 9/16: none is larger than 1 / total, which is
// compared with less, since both are rounded.
template <class E>
static bool may_have_first(const ReduceMemory<E>& m, int v) {
  const auto inverse = m.at(m.normalisers.inverse, v);
  return greater(inverse, broadcast(typename E::Real(0.5)));
}

template <class E>
static bool may_have_first(const PairMemory<E>& m) {
  bool any = false;
  for (int v = 0; v < m.m.rows.vectors; ++v) any |= may_have_first(m.m, v);
  return any;
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

// Turns the scores of vector v into weights, and leaves what is masked; `put(key, weights)` takes
// them.
template <class E, bool all, class Put>
REGARD_INLINE static void pair_weights(const Scaling<E>& scaling, const ReduceMemory<E>& m, int v,
                                       int low, int high, const typename E::Real* tile, Put put) {
  typedef typename E::Real Real;
  const Vec<Real> base = m.at(m.normalisers.base, v), inverse = m.at(m.normalisers.inverse, v);
  const auto some = [&]<int unroll>(int j, std::integral_constant<int, unroll>) {
    Vec<Real> w[unroll];
    const auto score = [&](int i) {
      return *(const Vec<Real>*)(tile + (j + i) * E::rows + v * E::lanes);
    };
    for (int i = 0; i < unroll; ++i) w[i] = scaling.exponent(score(i), base);
    exp2_each(w);
    for (int i = 0; i < unroll; ++i) {
      const Vec<Real> weight = inverse != 0 ? w[i] * inverse : Vec<Real>{};
      put(j + i, all ? weight : is_masked<Real>(score(i)) ? score(i) : weight);
    }
  };
  int j = low;
  for (; j + 4 <= high; j += 4) some(j, std::integral_constant<int, 4>());
  for (; j < high; ++j) some(j, std::integral_constant<int, 1>());
}

// The scores of a tile of keys, [key][row], and their mask, where anything is unmasked.
template <class E>
static Seen score_pairs(const Problem& p, const Scaling<E>& scaling, ReduceMemory<E>& m, int64_t j0,
                        int keys, typename E::Real* tile, TileMask& tile_mask) {
  if (m.rows.low >= j0 + keys || m.rows.high <= j0 || !mask_shows(p, m.rows, j0, keys))
    return Seen::nothing;
  set_tile_mask(m.rows, j0, keys, tile_mask);
  multiply_tile(p, m, tile_mask, j0, keys, tile);
  if (!is_unmasked<E>(p, m.rows, tile_mask, j0, keys))
    finish_scores<E>(p, m.rows, tile_mask, scaling, j0, keys, tile, nullptr,
                     masked_pairs<typename E::Real>());
  const bool all = tile_mask.fully_visible && !p.mask && !p.key_ids &&
                   !any_cut(p, m.rows, j0, keys) && m.rows.count == m.rows.vectors * E::lanes;
  return all ? Seen::all : Seen::some;
}

// Turns the scores of a tile of keys into weights.
template <class E>
static void weigh_pairs(const Scaling<E>& scaling, const ReduceMemory<E>& m, int keys, Seen seen,
                        const TileMask& tile_mask, typename E::Real* tile) {
  typedef typename E::Real Real;
  for (int v = 0; v < m.rows.vectors; ++v) {
    const auto put = [&](int j, Vec<Real> weight) { vector_at<E>(tile, j, v) = weight; };
    if (seen == Seen::all) {
      pair_weights<E, true>(scaling, m, v, 0, keys, tile, put);
      continue;
    }
    const int low = tile_mask.low[v], high = tile_mask.high[v];
    pair_weights<E, false>(scaling, m, v, low, high, tile, put);
    for (int j = 0; j < low; ++j) put(j, masked_pairs<Real>());
    for (int j = high; j < keys; ++j) put(j, masked_pairs<Real>());
  }
  if (seen != Seen::all) mask_unused(m.rows, keys, tile);
}

// The weights of a tile of keys, [key][row].
template <class E>
static Seen weigh_tile(const Problem& p, const Scaling<E>& scaling, ReduceMemory<E>& m, int64_t j0,
                       int keys, typename E::Real* tile) {
  TileMask tile_mask;
  const Seen seen = score_pairs(p, scaling, m, j0, keys, tile, tile_mask);
  if (seen != Seen::nothing) weigh_pairs(scaling, m, keys, seen, tile_mask, tile);
  return seen;
}

// Adds the numbers of a tile of a term to the values of the same keys: what is masked in both
// stays.
template <class E>
__attribute__((noinline)) static void add_tile(PairMemory<E>& m, const PairTerm& t, int64_t j0,
                                               int keys, Seen seen, const typename E::Real* tile) {
  typedef typename E::Real Real;
  typedef Vec<Real> V;
  Seen& known = m.seen[j0 / kKeys];
  if (seen == Seen::nothing) return;
  const Real coefficient = Real(t.coefficient);
  const auto each = [&](auto sum) {
    for (int j = 0; j < keys; ++j)
      for (int v = 0; v < m.m.rows.vectors; ++v) {
        V& value = vector_at<E>(m.values + m.at(j0), j, v);
        value = sum(value, *(const V*)(tile + j * E::rows + v * E::lanes));
      }
  };
  if (known == Seen::nothing)
    each([&](V, V x) { return is_masked<Real>(x) ? x : x * coefficient; });
  else if (known == Seen::all && seen == Seen::all)
    each([&](V sum, V x) { return sum + x * coefficient; });
  else
    each([&](V sum, V x) {
      const V added = is_masked<Real>(sum) ? x * coefficient : sum + x * coefficient;
      return is_masked<Real>(x) ? sum : added;
    });
  if (known != Seen::all) known = seen;
}

}  // namespace regard::REGARD_NAMESPACE
