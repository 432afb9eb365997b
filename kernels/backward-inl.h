// The gradients, as in FlashAttention: P is recomputed from the row statistics, and with
// dP^T = V dO^T, delta = dO . O of each row and dS = P (dP - delta) they are dV = P^T dO,
// dK = dS^T Q and dQ^T = K^T dS. S^T and dP^T have the queries in the lanes; dV and dK have the
// numbers of a value and a key there.
//
// A task has a chunk of keys and goes through all queries. It alone adds to its part of dK and dV.
// To dQ the chunks add in ticket order, which makes the sum deterministic. Gradients that nobody
// asks for are not computed; the others have the same bits. Source: Dao et al. 2022. Where dP is a
// rule of query and key, with delta given or asked for, there are no dO, O and V.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>

#include "forward-inl.h"
#include "rules-inl.h"

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
      m.delta[i] = product_with_output<E>(p, grad[i], g.out.at(m.rows.b, h, q));
  }
  if (g.key_grad) pad_rows<E>(m.rows.query, m.rows.count, p.D, m.query_rows);
  if (has_rule(g)) return start_rule<E>(p, g.weights, m.rows, m.rule);
  transpose_rows<E>(grad, m.rows.count, p.Dv, m.grad);
  if (g.value_grad) pad_rows<E>(grad, m.rows.count, p.Dv, m.grad_rows);
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
      const auto pairs = (I*)(dscores_pairs + place(j / 2));
      pairs[0] = (I)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second);
      pairs[1] = (I)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second);
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

// The vectors of the sums of dQ that have a query: of tiles both of two.
template <class E>
static int paired_vectors(const Rows<E>& rows) {
  return E::tiles ? (rows.vectors + 1) / 2 * 2 : rows.vectors;
}

// The query in a lane of the sums of dQ, where dS is paired by halves of 128 bits (unpack).
template <class E>
static int query_of_lane(int v, int lane) {
  if (!E::tiles) return v * E::lanes + lane;
  return v / 2 * 2 * E::lanes + lane / 4 * 8 + v % 2 * 4 + lane % 4;
}

// Adds the tile's [D][rows] to dQ, transposed and scaled, and its part of the rows' sums of P dP;
// each is optional. Where nothing else adds to dQ, the first chunk of keys sets its sums and the
// last one rounds them.
template <class E>
static void add_to_queries(const Backward& g, const BackwardMemory<E>& m, bool first, bool last) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Problem& p = *g.problem;
  const Real scale = Real(p.scale);
  for (int i = 0; g.delta && i < m.rows.count; ++i)
    ((Real*)g.delta)[(m.rows.b * p.Hq + m.rows.head[i]) * p.Lq + m.rows.index[i]] += m.sum[i];
  const bool sets = first && !g.adds, rounds = last && !g.adds;
  for (int v = 0; g.query_sum && v < paired_vectors(m.rows); ++v)
    for (int64_t d = 0; d < p.D; d += n) {
      const int64_t width = p.D - d < n ? p.D - d : n;
      Vec<Real> t[n];
      load_transposed<Real>(m.query_sum + d * E::rows + v * n, E::rows, width, t);
      for (int i = 0; i < n; ++i) {
        const int row = query_of_lane<E>(v, i);
        if (row >= m.rows.count) continue;
        const int64_t h = m.rows.head[row], q = m.rows.index[row];
        const int64_t at = ((m.rows.b * p.Hq + h) * p.Lq + q) * p.D + d;
        char* const to = (char*)((Real*)g.query_sum + at);
        const Vec<Real> before = sets ? Vec<Real>{} : numbers<Real, real_type<Real>>(to, width);
        const Vec<Real> sum = before + t[i] * scale;
        if (rounds)
          put<Real, E::type>(g.query_grad + at * int64_t(sizeof(typename E::Bits)), sum, width);
        else
          put<Real, real_type<Real>>(to, sum, width);
      }
    }
}

// Writes zeros to dQ of queries that see no key.
template <class E>
static void clear_queries(const Backward& g, const Rows<E>& rows) {
  const Problem& p = *g.problem;
  const int64_t bytes = p.D * int64_t(sizeof(typename E::Bits));
  for (int i = 0; g.query_grad && i < rows.count; ++i)
    std::memset(g.query_grad + ((rows.b * p.Hq + rows.head[i]) * p.Lq + rows.index[i]) * bytes, 0,
                size_t(bytes));
}

template <class E>
static void write_keys(const typename E::Real* sum, int64_t n, int64_t D, double scale, char* to) {
  typedef typename E::Real Real;
  const int64_t width = BackwardMemory<E>::padded(D);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t d = 0; d < D; d += E::lanes)
      put<Real, E::type>(to + (j * D + d) * int64_t(sizeof(typename E::Bits)),
                         *(const Vec<Real>*)(sum + j * width + d) * Real(scale), D - d);
}

// Adds the same to sums of n keys.
template <class Real>
static void add_keys_to(const Real* sum, int64_t n, int64_t D, int64_t width, double scale,
                        Real* to) {
  for (int64_t j = 0; j < n; ++j)
    for (int64_t d = 0; d < D; ++d) to[j * D + d] += sum[j * width + d] * Real(scale);
}

// A task: a chunk of the keys of a head.
struct KeyChunk {
  int64_t b, kv, begin, end;
};

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
      const auto pairs = (I*)(dscores_pairs + j / 2 * E::rows + v * E::lanes);
      pairs[0] = (I)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second);
      pairs[1] = (I)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second);
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

// add_gradients by tiles: a few keys at a time, whose scores, dP, P and dS stay in L1. `to`: the
// first key in its chunk.
template <class E>
static void add_by_tiles(const Backward& g, BackwardMemory<E>& m, const Matrix& k,
                         const Matrix& value, const Matrix& key_pairs, int64_t j0, int64_t to,
                         int keys) {
  const Problem& p = *g.problem;
  constexpr int products = 2 * E::parts - 1;
  constexpr int64_t part = E::rows * 2, stride = E::parts * part;  // of the left operand
  const int64_t steps = (m.rows.vectors + 1) / 2;                  // of 32 queries
  for (int from = 0; from < keys; from += kSomeKeys) {
    const int some = keys - from < kSomeKeys ? keys - from : kSomeKeys;
    const TileMask tile_mask = tile_mask_of(m.rows, j0 + from, some);
    const auto rows_from = [&](const Matrix& x) {
      return Matrix{(const char*)x.data + from * x.stride, x.stride};
    };
    recompute_halves(g, m, tile_mask, rows_from(k), rows_from(value), j0 + from, some,
                     m.dscores_pairs + from / 2 * E::parts * E::rows);
    const auto add_rows = [&](const uint16_t* a, const int32_t* x, int64_t D, float* sum) {
      const TileMatrix left = {(const char*)a, stride, kTileRows * stride, kTileBytes, part};
      const TileVectors right = {x, D, E::words(E::rows) * D, steps, products};
      multiply_by_tiles<true>(left, some, right, D / E::lanes, sum + (to + from) * D, D);
    };
    if (g.value_grad) add_rows(m.half_weights, m.grad_rows, m.padded(p.Dv), m.value_sum);
    if (g.key_grad) add_rows(m.half_dscores, m.query_rows, m.padded(p.D), m.key_sum);
  }
  if (!g.query_sum) return;
  const TileVectors right = {m.dscores_pairs, E::parts * E::rows, E::rows,
                             E::words(keys) / kTileRows, products};
  multiply_by_tiles<true>(tile_pairs<E>(key_pairs, p.D), p.D, right, paired_vectors(m.rows),
                          m.query_sum, E::rows);
}
#endif

// Adds the gradients of a tile of queries and the keys from j0 on.
template <class E>
static void add_gradients(const Backward& g, BackwardMemory<E>& m, const KeyChunk& chunk,
                          int64_t j0, int keys) {
  typedef typename E::Real Real;
  typedef typename E::Op Op;
  constexpr int n = E::lanes;
  const Problem& p = *g.problem;
  if (!mask_shows(p, m.rows, j0, keys)) return;
  const int64_t D = m.padded(p.D), Dv = m.padded(p.Dv), stride = p.key.strides[2];
  const char* key = p.key.at(chunk.b, chunk.kv, j0);
  const Matrix k = as_rows<E>(key, stride, keys, p.D, m.key_rows);
  Matrix value{};
  if (needs_scores(g) && !has_rule(g))
    value =
        as_rows<E>(p.value.at(chunk.b, chunk.kv, j0), p.value.strides[2], keys, p.Dv, m.value_rows);
  const bool pairs = E::pack > 1 && g.query_sum;
  const Matrix key_pairs = pairs ? as_pairs<E>(key, stride, keys, p.D, m.key_pairs) : k;
#ifdef REGARD_TILES
  if constexpr (E::tiles)
    return add_by_tiles(g, m, k, value, key_pairs, j0, j0 - chunk.begin, keys);
#endif
  const TileMask tile_mask = tile_mask_of(m.rows, j0, keys);
  recompute_weights(g, m, tile_mask, k, value, j0, keys,
                    needs_scores(g) ? Recomputed::scaled : Recomputed::weights);
  if (!g.value_grad && !g.key_grad && !g.query_sum) return;
  const void* weights = m.weights;
  const void* dscores = m.dscores;
  const typename E::Word* dscores_words = (const typename E::Word*)m.dscores;
  int64_t size = sizeof(Real);
  if constexpr (E::pack > 1) {
    pack_dscores(m, tile_mask, keys, Written::of(g, Recomputed::scaled));
    weights = m.half_weights, dscores = m.half_dscores, dscores_words = m.dscores_pairs, size = 2;
  }
  for (int x = 0; x < tile_mask.spans; ++x) {
    const TileMask::Span& span = tile_mask.span[x];
    const int first = span.from * n, height = span.end - span.begin, lead = span.begin / E::pack;
    const int64_t terms = (span.to - span.from) * n / E::pack;
    const int64_t at = (span.begin * E::rows + first) * size, to = j0 - chunk.begin + span.begin;
    if (g.value_grad)
      multiply<Op, false, Epilogue::add>(int(Dv / n), m.grad_rows + first / E::pack * Dv, Dv,
                                         (const char*)weights + at, E::rows * size, terms, height,
                                         m.value_sum + to * Dv, Dv);
    if (g.key_grad)
      multiply<Op, false, Epilogue::add>(int(D / n), m.query_rows + first / E::pack * D, D,
                                         (const char*)dscores + at, E::rows * size, terms, height,
                                         m.key_sum + to * D, D);
    if (g.query_sum)
      multiply<Op, true, Epilogue::add>(
          span.to - span.from, dscores_words + lead * E::rows + first, E::rows,
          (const char*)key_pairs.data + lead * key_pairs.stride, key_pairs.stride, E::words(height),
          p.D, m.query_sum + first, E::rows);
  }
}

// Adds the gradients of a tile of queries and the keys from `low` to `high` of a chunk.
template <class E>
static void add_tile(const Backward& g, BackwardMemory<E>& m, const KeyChunk& chunk, int64_t low,
                     int64_t high) {
  typedef typename E::Real Real;
  const Problem& p = *g.problem;
  const TileConfiguration<E::tiles> configuration;
  load_queries<E>(p, m.rows);
  gather_gradients(g, m);
  std::memset((void*)m.query_sum, 0, size_t(p.D * E::rows) * sizeof(Real));
  if (m.sum) std::memset((void*)m.sum, 0, E::rows * sizeof(Real));
  for (int64_t j0 = low; j0 < high; j0 += kKeys)
    add_gradients(g, m, chunk, j0, int(high - j0 < kKeys ? high - j0 : kKeys));
}

template <class E>
static void run_backward(const void* pass, int64_t task, char* memory, const Stop& stop) {
  typedef typename E::Real Real;
  const Backward& g = *(const Backward*)pass;
  const Problem& p = *g.problem;
  Scratch scratch(memory);
  BackwardMemory<E> m(g, scratch);
  // One chunk of every head, then the next: few tasks then wait for a ticket.
  const int64_t size = chunk_of<E>(g), heads = p.B * p.Hkv, c = task / heads, head = task % heads;
  const int64_t begin = c * size, end = begin + size < p.Lk ? begin + size : p.Lk;
  const KeyChunk chunk{head / p.Hkv, head % p.Hkv, begin, end};
  const int64_t group = p.Hq / p.Hkv, tiles = row_tiles_of<E>(p);
  const auto clear = [&](Real* sum, int64_t D) {
    std::memset((void*)sum, 0, size_t((end - begin) * m.padded(D)) * sizeof(Real));
  };
  if (g.key_grad) clear(m.key_sum, p.D);
  if (g.value_grad) clear(m.value_sum, p.Dv);
  for (int64_t r = 0; r < tiles; ++r) {
    describe_rows(p, m.rows, chunk.b, chunk.kv * group, r * E::rows, group * p.Lq);
    if (c == 0 && m.rows.low >= m.rows.high) clear_queries(g, m.rows);
    const int64_t low = m.rows.low > begin ? m.rows.low : begin;
    const int64_t high = m.rows.high < end ? m.rows.high : end;
    if (low >= high) continue;
    add_tile(g, m, chunk, low, high);
    if (!g.query_sum && !g.delta) continue;
    // Ticket order: earlier chunks add first. Not std::atomic_ref: clang's library has it since 19.
    int64_t* const ticket = g.ticket + head * tiles + r;
    const int64_t first = m.rows.low / size, last = (m.rows.high - 1) / size;
    while (__atomic_load_n(ticket, __ATOMIC_ACQUIRE) != c - first) {
      if (stopped(stop)) return;
      std::this_thread::yield();
    }
    add_to_queries(g, m, c == first, c == last);
    __atomic_fetch_add(ticket, 1, __ATOMIC_RELEASE);
  }
  const int64_t bytes = int64_t(sizeof(typename E::Bits)), row = head * p.Lk + begin;
  const auto finish = [&](const Real* sum, int64_t D, double scale, char* to) {
    if (!to) return;
    if (g.adds)
      add_keys_to<Real>(sum, end - begin, D, m.padded(D), scale, (Real*)to + row * D);
    else
      write_keys<E>(sum, end - begin, D, scale, to + row * D * bytes);
  };
  finish(m.key_sum, p.D, p.scale, g.key_grad);
  finish(m.value_sum, p.Dv, 1.0, g.value_grad);
}

// The gradient of the bias: a task has a part of it, and sums over the axes along which the bias is
// broadcast.
struct BiasParts {
  int64_t batch, heads, rows, keys;  // number of parts of each axis

  template <class E>
  static BiasParts of(const Problem& p, const Array& bias, E) {
    const int64_t* s = bias.strides;
    return {s[0] ? p.B : 1, s[1] ? p.Hq : 1, s[2] ? (p.Lq + E::rows - 1) / E::rows : 1,
            s[3] ? (p.Lk + kSplitKeys - 1) / kSplitKeys : 1};
  }
};

template <class E>
static void run_bias(const void* pass, int64_t task, char* memory, const Stop& stop) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Backward& g = *(const Backward*)pass;
  const Problem& p = *g.problem;
  Scratch scratch(memory);
  BackwardMemory<E> m(g, scratch);
  const Array& bias = g.bias_grad;
  const BiasParts parts = BiasParts::of(p, bias, E());
  const int64_t key_part = task % parts.keys, row_part = task / parts.keys % parts.rows;
  const int64_t h_part = task / parts.keys / parts.rows % parts.heads;
  const int64_t b_part = task / parts.keys / parts.rows / parts.heads;
  const int64_t tiles = (p.Lq + E::rows - 1) / E::rows, group = p.Hq / p.Hkv;
  const int64_t b0 = parts.batch > 1 ? b_part : 0, b1 = parts.batch > 1 ? b_part + 1 : p.B;
  const int64_t h0 = parts.heads > 1 ? h_part : 0, h1 = parts.heads > 1 ? h_part + 1 : p.Hq;
  const int64_t r0 = parts.rows > 1 ? row_part : 0, r1 = parts.rows > 1 ? row_part + 1 : tiles;
  for (int64_t b = b0; b < b1; ++b)
    for (int64_t h = h0; h < h1; ++h)
      for (int64_t r = r0; r < r1; ++r) {
        if (stopped(stop)) return;
        const TileConfiguration<E::tiles> configuration;
        describe_rows(p, m.rows, b, h, r * E::rows, p.Lq);
        int64_t low = m.rows.low, high = m.rows.high;
        if (parts.keys > 1) {
          if (low < key_part * kSplitKeys) low = key_part * kSplitKeys;
          if (high > (key_part + 1) * kSplitKeys) high = (key_part + 1) * kSplitKeys;
        }
        if (low >= high) continue;
        load_queries<E>(p, m.rows);
        gather_gradients(g, m);
        for (int64_t j0 = low; j0 < high; j0 += kKeys) {
          const int keys = int(high - j0 < kKeys ? high - j0 : kKeys);
          if (!mask_shows(p, m.rows, j0, keys)) continue;
          const TileMask tile_mask = tile_mask_of(m.rows, j0, keys);
          const int64_t kv = h / group;
          const Matrix k = as_rows<E>(p.key.at(b, kv, j0), p.key.strides[2], keys, p.D, m.key_rows);
          Matrix value{};
          if (!has_rule(g))
            value = as_rows<E>(p.value.at(b, kv, j0), p.value.strides[2], keys, p.Dv, m.value_rows);
          recompute_weights(g, m, tile_mask, k, value, j0, keys, Recomputed::scores);
          for (int v = 0; v < m.rows.vectors; ++v)
            for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j) {
              const Vec<Real> ds = *(const Vec<Real>*)(m.dscores + j * E::rows + v * n);
              char* to = const_cast<char*>(bias.at(b, h, 0)) + (j0 + j) * bias.strides[3];
              if (!bias.strides[2]) {
                *(Real*)to += sum_lanes<Real>(ds);
                continue;
              }
              for (int i = 0; i < n && v * n + i < m.rows.count; ++i)
                *(Real*)(to + m.rows.index[v * n + i] * bias.strides[2]) += ds[i];
            }
        }
      }
}

static Job backward(const Backward& g) {
  return by_type<Job>(g.problem->type, [&]<class E>(E) -> Job {
    const Problem& p = *g.problem;
    if (!needs_scores(g) && !g.value_grad) return {};
    Scratch scratch(nullptr);
    BackwardMemory<E> m(g, scratch);
    const int64_t chunks = (p.Lk + chunk_of<E>(g) - 1) / chunk_of<E>(g);
    return {p.B * p.Hkv * chunks, scratch.taken(), run_backward<E>, &g};
  });
}

static Job bias_gradient(const Backward& g) {
  return by_type<Job>(g.problem->type, [&]<class E>(E) -> Job {
    if (!g.bias_grad) return {};
    Scratch scratch(nullptr);
    BackwardMemory<E> m(g, scratch);
    const BiasParts parts = BiasParts::of(*g.problem, g.bias_grad, E());
    return {parts.batch * parts.heads * parts.rows * parts.keys, scratch.taken(), run_bias<E>, &g};
  });
}

static int64_t row_tiles(const Problem& p) {
  return by_type<int64_t>(p.type, [&]<class E>(E) { return row_tiles_of<E>(p); });
}

}  // namespace regard::REGARD_NAMESPACE
