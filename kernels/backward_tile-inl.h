// A tile of queries and keys in the backward pass: its memory, P and dS, and both packed for the
// products with them.
#pragma once

#include <cstdint>
#include <limits>

#include "rules-inl.h"
#include "scores-inl.h"

namespace regard::REGARD_NAMESPACE {

// Whether a pass over chunks of keys needs dS, and not P alone.
static bool needs_scores(const Backward& g) { return g.query_sum || g.key_grad || g.delta; }

// Keys of a chunk: more where none of them has a sum, and where tiles multiply, which wait for what
// is read and packed once for every chunk.
template <class E>
static int64_t chunk_of(const Backward& g) {
  if (!g.query_sum && !g.key_grad && !g.value_grad) return 2048;
  return E::tiles || g.problem->Lk > 1024 ? 512 : 256;
}

static bool has_rule(const Backward& g) { return g.weights.rule != Rule::products; }

template <class E>
struct BackwardMemory {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  Rows<E> rows;
  Word* grad;        // [words(Dv)][rows]: dO, transposed as the queries are
  Word* query_rows;  // [words(rows)][D up to lanes]
  Word* grad_rows;   // [words(rows)][Dv up to lanes]
  Real* weights;     // [kKeys][rows]: scores, then weights
  Real* dscores;     // [kKeys][rows]: dP, then dS; by a rule in the place of the weights
  Real* slope;       // [kKeys][rows]: derivative of the cap, or null
  uint32_t* keep_mask;
  Word* key_rows;
  Word* key_pairs;
  Word* value_rows;
  uint16_t* half_weights;  // [kKeys][rows] of bfloat16, where they are multiplied in pairs
  uint16_t* half_dscores;
  Word* dscores_pairs;  // [kKeys / 2][rows], by tiles in the order of query_of_lane
  Real* query_sum;      // [D][rows], likewise
  Real* key_sum;        // [chunk][D up to lanes]
  Real* value_sum;      // [chunk][Dv up to lanes]
  Real* maximum;        // [rows]
  Real* inverse;        // the normaliser, 1 / total; 0 where nothing is visible
  Real* delta;
  Real* sum;  // [rows]: delta as the sum of P dP, without the rounding of the output; or null
  RuleMemory<E> rule;

  BackwardMemory(const Backward& g, Scratch& scratch) : rule(g.weights, scratch) {
    const Problem& p = *g.problem;
    const int64_t D = padded(p.D), Dv = padded(p.Dv), tile = kKeys * E::rows;
    rows.q = scratch.take<Word>(query_words<E>(p));
    grad = scratch.take<Word>(E::row_words(p.Dv) * E::rows);
    query_rows = scratch.take<Word>(E::row_words(E::rows) * D);
    grad_rows = scratch.take<Word>(E::row_words(E::rows) * Dv);
    weights = scratch.take<Real>(tile);
    dscores = has_rule(g) ? weights : scratch.take<Real>(tile);
    slope = has_slope(p) ? scratch.take<Real>(tile) : nullptr;
    keep_mask = p.threshold ? scratch.take<uint32_t>(kKeys * kKeepMaskRows<E>) : nullptr;
    key_rows = scratch.take<Word>(kKeys * E::row_words(p.D));
    key_pairs = E::pack > 1 ? scratch.take<Word>(pair_words<E>(kKeys, p.D)) : key_rows;
    value_rows = scratch.take<Word>(kKeys * E::row_words(p.Dv));
    half_weights = scratch.take<uint16_t>(E::pack > 1 ? E::parts * tile : 0);
    half_dscores = scratch.take<uint16_t>(E::pack > 1 ? E::parts * tile : 0);
    dscores_pairs = scratch.take<Word>(E::pack > 1 ? E::parts * tile / 2 : 0);
    query_sum = scratch.take<Real>(p.D * E::rows);
    key_sum = scratch.take<Real>(g.key_grad ? chunk_of<E>(g) * D : 0);
    value_sum = scratch.take<Real>(g.value_grad ? chunk_of<E>(g) * Dv : 0);
    maximum = scratch.take<Real>(E::rows);
    inverse = scratch.take<Real>(E::rows);
    delta = scratch.take<Real>(E::rows);
    sum = g.delta ? scratch.take<Real>(E::rows) : nullptr;
  }

  static int64_t padded(int64_t D) { return (D + E::lanes - 1) / E::lanes * E::lanes; }
};

#ifdef REGARD_TILES
// Packs rows of D numbers for sums over the rows by tiles: [parts][words(rows)][D], word i of a
// step has rows 2 i and 2 i + 1.
template <class E, int part = 0>
static void pad_rows_for_tiles(const char* const* rows, int count, int64_t D, int32_t* out) {
  const int64_t width = BackwardMemory<E>::padded(D);
  if constexpr (part + 1 < E::parts)
    pad_rows_for_tiles<E, part + 1>(rows, count, D, out + E::words(E::rows) * width);
  for (int word = 0; word < E::words(E::rows); ++word)
    for (int64_t d = 0; d < D; d += E::lanes) {
      const auto wide = [&](int r) {
        return r < count ? part_of<part>(numbers<float, E::type>(rows[r] + d * 2, D - d)) : U{};
      };
      store<int32_t>(out + word * width + d, join(wide(2 * word), wide(2 * word + 1)));
    }
}
#endif

// Packs rows of D numbers for sums over the rows, padded to whole vectors.
template <class E>
static void pad_rows(const char* const* rows, int count, int64_t D, typename E::Word* out) {
#ifdef REGARD_TILES
  if constexpr (E::tiles) return pad_rows_for_tiles<E>(rows, count, D, out);
#endif
  const int64_t width = BackwardMemory<E>::padded(D);
  for (int i = 0; i < E::rows; i += E::pack)
    for (int64_t d = 0; d < D; d += E::lanes) {
      typename E::Word* to = out + i / E::pack * width + d;
      if constexpr (E::pack == 1) {
        typedef typename E::Real Real;
        store<Real>(to, i < count ? numbers<Real, E::type>(
                                        rows[i] + d * int64_t(sizeof(typename E::Bits)), D - d)
                                  : Vec<Real>{});
      } else {
        const auto wide = [&](int r) {
          return r < count ? (U)numbers<float, Type::bfloat16>(rows[r] + d * 2, D - d) : U{};
        };
        store<int32_t>(to, (I)(wide(i) >> 16 | wide(i + 1)));
      }
    }
}

// delta of a query: dO . O.
template <class E>
static typename E::Real product_with_output(const Problem& p, const char* grad, const char* out) {
  typedef typename E::Real Real;
  Vec<Real> sum = {};
  for (int64_t d = 0; d < p.Dv; d += E::lanes) {
    const int64_t byte = d * int64_t(sizeof(typename E::Bits));
    sum += numbers<Real, E::type>(grad + byte, p.Dv - d) *
           numbers<Real, E::type>(out + byte, p.Dv - d);
  }
  return sum_lanes<Real>(sum);
}

// Reads statistics, delta and output gradient of a tile of queries.
template <class E>
static void gather_gradients(const Backward& g, BackwardMemory<E>& m) {
  typedef typename E::Real Real;
  const Problem& p = *g.problem;
  const Real* const delta = (const Real*)g.weights.delta;
  const char* grad[E::rows];
  for (int i = 0; i < E::rows; ++i) {
    m.maximum[i] = m.inverse[i] = m.delta[i] = 0;
    if (i >= m.rows.count) continue;
    const int64_t h = m.rows.head[i], q = m.rows.index[i], at = (m.rows.b * p.Hq + h) * p.Lq + q;
    if (!has_rule(g)) grad[i] = g.grad.at(m.rows.b, h, q);
    const Real total = ((const Real*)g.total)[at];
    m.maximum[i] = ((const Real*)g.maximum)[at];
    if (total == 0) continue;
    m.inverse[i] = 1 / total;
    if (delta)
      m.delta[i] = delta[at];
    else if (!has_rule(g))
      m.delta[i] = by_stored<E>(p.type, [&]<class S>(S) {
        return product_with_output<S>(p, grad[i], g.out.at(m.rows.b, h, q));
      });
  }
  const auto pad = [&](const char* const* rows, int64_t D, typename E::Word* out) {
    by_stored<E>(p.type, [&]<class S>(S) { pad_rows<S>(rows, m.rows.count, D, out); });
  };
  if (g.key_grad) pad(m.rows.query, p.D, m.query_rows);
  if (has_rule(g)) return start_rule<E>(p, g.weights, m.rows, m.rule);
  transpose_stored<E>(p, grad, m.rows.count, p.Dv, m.grad);
  if (g.value_grad) pad(grad, p.Dv, m.grad_rows);
}

// What the recomputation of a tile gives.
enum class Recomputed { weights, scores, scaled };  // P; also dS; dS through the cap

// What is written of it: P where dV is made of it, dS where anything is.
struct Written {
  bool weights, scores;

  static Written of(const Backward& g, Recomputed what) {
    return {g.value_grad != nullptr, what == Recomputed::scores || g.query_sum || g.key_grad};
  }
};

// Turns the scores of vector v of the queries into P, dropped out, and with dP that into dS,
// through the cap where it has a slope. `gradient(j, exponent)` gives dP, or P dP of what has no
// dropout and no value; without scores it is not called.
template <class E, bool unmasked, class Gradient>
static void finish_weights(const Problem& p, const Scaling<E>& scaling, BackwardMemory<E>& m,
                           const TileMask& tile_mask, int v, Written written,
                           typename E::Real* slope, Gradient gradient) {
  typedef typename E::Real Real;
  const auto at = [&](Real* x, int j) -> Vec<Real>& { return vector_at<E>(x, j, v); };
  const Vec<Real> inverse = at(m.inverse, 0), delta = at(m.delta, 0);
  // Where nothing is visible, or the lane is not used, every exponent is -inf.
  const Vec<Real> base = inverse == 0 ? broadcast(kInf<Real>) : scaling.base(at(m.maximum, 0));
  // Denormal weights are flushed to 0, as in every pass.
  const Vec<Real> least = std::numeric_limits<Real>::min() / inverse;
  const bool drops = p.threshold, sums = m.sum, bends = slope;
  const bool scores = written.scores || sums;
  const Real dropout_scale = Real(1 / (1 - p.dropout));
  Vec<Real> sum = {};
  const auto without_masked = [](Vec<Real> w, Vec<Real> x) {
    return unmasked ? x : w == 0 ? Vec<Real>{} : x;
  };
  const auto finish = [&]<int unroll>(int j0, std::integral_constant<int, unroll>) {
    Vec<Real> x[unroll], e[unroll];
    for (int i = 0; i < unroll; ++i) e[i] = x[i] = scaling.exponent(at(m.weights, j0 + i), base);
    exp2_each(e);
    Vec<Real> some = {};  // of a few keys first: fewer roundings of the long sum
#pragma GCC unroll 4
    for (int i = 0; i < unroll; ++i) {
      const int j = j0 + i;
      Vec<Real> w = e[i] < least ? Vec<Real>{} : e[i] * inverse;
      // A masked key gets no gradient, even in a row of NaN.
      if (!unmasked) w = at(m.weights, j) == -kInf<Real> ? Vec<Real>{} : w;
      const uint32_t* keep_mask = m.keep_mask + j * kKeepMaskRows<E> + v * E::lanes;
      if (written.weights) at(m.weights, j) = drops ? keep<Real>(keep_mask, w) * dropout_scale : w;
      if (!scores) continue;
      if constexpr (gives_products<Gradient>) {
        Vec<Real> wdw = gradient(j, x[i]);
        if (!unmasked) wdw = at(m.weights, j) == -kInf<Real> ? Vec<Real>{} : wdw;
        if (sums) some += wdw;
        if (!written.scores) continue;
        const Vec<Real> ds = wdw - w * delta;
        at(m.dscores, j) = bends ? ds * at(slope, j) : ds;
        continue;
      }
      Vec<Real> dw = gradient(j, x[i]);
      if (drops) dw = keep<Real>(keep_mask, dw) * dropout_scale;
      if (sums) some += without_masked(w, w * dw);
      if (!written.scores) continue;
      const Vec<Real> ds = without_masked(w, w * (dw - delta));
      at(m.dscores, j) = bends ? ds * at(slope, j) : ds;
    }
    sum += some;
  };
  int j = tile_mask.low[v];
  for (; j + 4 <= tile_mask.high[v]; j += 4) finish(j, std::integral_constant<int, 4>());
  for (; j < tile_mask.high[v]; ++j) finish(j, std::integral_constant<int, 1>());
  if (m.sum) at(m.sum, 0) += sum;
}

// Recomputes P of a tile of keys and, given its values or by the rule, dS.
template <class E>
static void recompute_weights(const Backward& g, BackwardMemory<E>& m, const TileMask& tile_mask,
                              const Matrix& k, const Matrix& value, int64_t j0, int keys,
                              Recomputed what) {
  typedef typename E::Real Real;
  const Problem& p = *g.problem;
  const Rows<E>& rows = m.rows;
  const Scaling<E> scaling(p);
  const int64_t kv = rows.head[0] / (p.Hq / p.Hkv);
  multiply_keys<E>(p, rows, tile_mask, kv, j0, keys, k, m.weights);
  if (what != Recomputed::weights && !has_rule(g))
    multiply_rows<E>(rows, tile_mask, m.grad, value, keys, p.Dv, m.dscores);
  const bool unmasked = is_unmasked<E>(p, rows, tile_mask, j0, keys);
  Real* slope = what == Recomputed::scaled ? m.slope : nullptr;
  if (!unmasked) finish_scores<E>(p, rows, tile_mask, scaling, j0, keys, m.weights, slope);
  if (p.threshold) draw_keep_mask(p, rows, j0, keys, m.keep_mask);
  const Written written = Written::of(g, what);
  if (has_rule(g)) start_keys<E>(p, g.weights, rows, j0, keys, m.rule);
  for (int v = 0; v < rows.vectors; ++v) {
    const auto finish = [&](auto gradient) {
      (unmasked ? finish_weights<E, true, decltype(gradient)>
                : finish_weights<E, false, decltype(gradient)>)(p, scaling, m, tile_mask, v,
                                                                written, slope, gradient);
    };
    if (has_rule(g))
      by_rule<E>(p, g.weights, rows, m.rule, v, j0, vector_at<E>(m.inverse, 0, v), finish);
    else
      finish([&](int j, Vec<Real>) { return vector_at<E>(m.dscores, j, v); });
  }
}

#ifdef REGARD_TILES
constexpr int kSomeKeys = 2 * kTileRows;  // whose scores, dP, P and dS stay in L1

// A part of the numbers of two vectors, those of x before those of y, rounded where it is the only
// one.
template <class E, int part>
static I halves_of_part(F x, F y) {
  return E::parts > 1 ? upper_halves_of(part_of<part>(x), part_of<part>(y)) : halves_of(x, y);
}

// Pairs of two keys' dS of 32 queries, in the order of query_of_lane.
static void write_pairs(I first, I second, int32_t* to) {
  ((I*)to)[0] = (I)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second);
  ((I*)to)[1] = (I)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second);
}

// pack_dscores for tiles: [key][parts][query] and [pair of keys][parts][lane], with zeros where
// keys are masked, which tiles multiply as well, and in what fills up a step. `pairs`: of them.
template <class E, int part = 0>
static void pack_dscores_for_tiles(BackwardMemory<E>& m, const TileMask& tile_mask, int keys,
                                   Written written, typename E::Word* dscores_pairs) {
  if constexpr (part + 1 < E::parts)
    pack_dscores_for_tiles<E, part + 1>(m, tile_mask, keys, written, dscores_pairs);
  constexpr int n = E::lanes;
  const int vectors = m.rows.vectors;
  for (int v = 0; v < vectors; v += 2) {
    const auto row = [&](const float* x, int j) {
      const auto at = [&](int i) {
        const bool there =
            v + i < vectors && tile_mask.low[v + i] <= j && j < tile_mask.high[v + i];
        return there && j < keys ? *(const F*)(x + j * E::rows + (v + i) * n) : F{};
      };
      return halves_of_part<E, part>(at(0), at(1));
    };
    const auto place = [&](int j) { return (j * E::parts + part) * E::rows + v * n; };
    for (int j = 0; written.weights && j < keys; ++j)
      *(I*)(m.half_weights + place(j)) = row(m.weights, j);
    for (int j = 0; written.scores && j < 2 * E::words(keys); j += 2) {
      const I first = row(m.dscores, j), second = row(m.dscores, j + 1);
      *(I*)(m.half_dscores + place(j)) = first;
      *(I*)(m.half_dscores + place(j + 1)) = second;
      write_pairs(first, second, dscores_pairs + place(j / 2));
    }
  }
}
#endif

#ifdef REGARD_PAIRS
template <class E>
static void pack_dscores(BackwardMemory<E>& m, const TileMask& tile_mask, int keys,
                         Written written) {
  typedef Simd<float>::Short Half;
  constexpr int n = E::lanes;
  for (int v = 0; v < m.rows.vectors; ++v)
    for (int j = tile_mask.low[v]; j < tile_mask.high[v]; j += 2) {
      const auto at = [&](const float* x, int i) {
        return i < keys ? *(const F*)(x + i * E::rows + v * n) : F{};
      };
      const auto pack = [&](const float* from, uint16_t* to) {  // room for an even number of keys
        const I halves = narrow(at(from, j + 1), at(from, j));
        for (int i = 0; i < 2; ++i)
          *(Half*)(to + (j + i) * E::rows + v * n) =
              read<Half>((const char*)&halves + i * sizeof(Half));
        return halves;
      };
      if (written.weights) pack(m.weights, m.half_weights);
      if (written.scores)
        *(I*)(m.dscores_pairs + j / 2 * E::rows + v * n) =
            pairs_of(pack(m.dscores, m.half_dscores));
    }
}
#endif

#ifdef REGARD_TILES
// P and dS of keys that every query sees, rounded and packed as pack_dscores_for_tiles does, with
// the bits of finish_weights.
template <class E>
static void finish_halves(const Scaling<E>& scaling, BackwardMemory<E>& m, int keys,
                          Written written, int32_t* dscores_pairs) {
  for (int v = 0; v < m.rows.vectors; v += 2) {
    F inverse[2], delta[2], base[2], least[2];
    for (int i = 0; i < 2; ++i) {
      inverse[i] = vector_at<E>(m.inverse, 0, v + i), delta[i] = vector_at<E>(m.delta, 0, v + i);
      base[i] = inverse[i] == 0 ? broadcast(kInf<float>)
                                : scaling.base(vector_at<E>(m.maximum, 0, v + i));
      least[i] = std::numeric_limits<float>::min() / inverse[i];
    }
    for (int j = 0; j < keys; j += 2) {
      F w[4], ds[4];
      for (int i = 0; i < 4; ++i)
        w[i] = scaling.exponent(vector_at<E>(m.weights, j + i / 2, v + i % 2), base[i % 2]);
      exp2_each(w);
      for (int i = 0; i < 4; ++i) {
        w[i] = w[i] < least[i % 2] ? F{} : w[i] * inverse[i % 2];
        ds[i] = w[i] * (vector_at<E>(m.dscores, j + i / 2, v + i % 2) - delta[i % 2]);
      }
      const int64_t at = j * E::rows + v * E::lanes;
      if (written.weights) {
        *(I*)(m.half_weights + at) = halves_of(w[0], w[1]);
        *(I*)(m.half_weights + at + E::rows) = halves_of(w[2], w[3]);
      }
      const I first = halves_of(ds[0], ds[1]), second = halves_of(ds[2], ds[3]);
      *(I*)(m.half_dscores + at) = first, *(I*)(m.half_dscores + at + E::rows) = second;
      write_pairs(first, second, dscores_pairs + j / 2 * E::rows + v * E::lanes);
    }
  }
}

// Recomputes P and dS of some keys, packed as halves and pairs.
template <class E>
static void recompute_halves(const Backward& g, BackwardMemory<E>& m, const TileMask& tile_mask,
                             const Matrix& k, const Matrix& value, int64_t j0, int keys,
                             int32_t* dscores_pairs) {
  const Problem& p = *g.problem;
  const Recomputed what = needs_scores(g) ? Recomputed::scaled : Recomputed::weights;
  const Written written = Written::of(g, what);
  if constexpr (E::parts == 1)
    if (written.scores && !has_rule(g) && !p.threshold && !m.sum && keys == kSomeKeys &&
        m.rows.vectors % 2 == 0 && is_unmasked<E>(p, m.rows, tile_mask, j0, keys)) {
      const int64_t kv = m.rows.head[0] / (p.Hq / p.Hkv);
      multiply_keys<E>(p, m.rows, tile_mask, kv, j0, keys, k, m.weights);
      multiply_rows<E>(m.rows, tile_mask, m.grad, value, keys, p.Dv, m.dscores);
      return finish_halves<E>(Scaling<E>(p), m, keys, written, dscores_pairs);
    }
  recompute_weights(g, m, tile_mask, k, value, j0, keys, what);
  if (!g.value_grad && !g.key_grad && !g.query_sum) return;
  pack_dscores_for_tiles<E>(m, tile_mask, keys, written, dscores_pairs);
}
#endif

}  // namespace regard::REGARD_NAMESPACE
