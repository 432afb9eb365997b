// From the products of a tile to its scores, and from these to exponents: scale, cap, bias, edits
// and masks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "mathematics-inl.h"
#include "products-inl.h"

namespace regard::REGARD_NAMESPACE {

// From products to exponents. Where it is `raw`, scores are the products and `factor` includes the
// scale; else finish_scores computes them in place.
template <class E>
struct Scaling {
  typedef typename E::Real Real;
  bool raw;
  Real factor;  // from a score to the exponent of 2

  explicit Scaling(const Problem& p) : raw(raw_scores(p)), factor(Real(factor_of(p))) {}

  // The exponent of 2 of a score, relative to `base`. The difference comes first: it is exact for
  // large scores too.
  static Vec<Real> base(Vec<Real> maximum) {
    return maximum == -kInf<Real> ? Vec<Real>{} : maximum;
  }
  Vec<Real> exponent(Vec<Real> score, Vec<Real> base) const { return (score - base) * factor; }
};

// Weights of exponents, in the lanes of a vector of queries: 2^x times a normaliser. Those of the
// second pass of bfloat16 by tiles are to 1e-7: beside tiles one unit less multiplies.
template <class E>
class Exponential {
 public:
  typedef typename E::Real Real;
  static constexpr bool has_few_terms = E::tiles && E::rounds;
  // `exact`: as everywhere else, for weights that are given out one by one, or may be NaN.
  explicit Exponential(Vec<Real> normaliser, bool exact) : normaliser_(normaliser), exact_(exact) {
#ifdef REGARD_TILES
    if constexpr (has_few_terms) {
      for (int k = 0; k < kFew; ++k) terms_[k] = normaliser * kFewTerms[k];
      lanes_ = _mm512_cmp_ps_mask((__m512)normaliser, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    }
#endif
  }

  // Lanes without normaliser have weights of 0. An infinite x becomes one by which 0 may be
  // multiplied, where it is `clears`.
  template <bool clears, int n>
  REGARD_INLINE void weights(Vec<Real> (&x)[n], Vec<Real> (&w)[n]) const {
#ifdef REGARD_TILES
    if constexpr (has_few_terms)
      if (!exact_) return exp2_by<clears>(terms_, lanes_, x, w);
#endif
    for (int i = 0; i < n; ++i) w[i] = x[i];
    exp2_each(w);
    for (int i = 0; i < n; ++i) {
      w[i] = normaliser_ != 0 ? w[i] * normaliser_ : Vec<Real>{};
      if (clears) x[i] = larger(Vec<Real>{} - 1e4f, x[i]);
    }
  }

 private:
  const Vec<Real> normaliser_;
  const bool exact_;
#ifdef REGARD_TILES
  std::conditional_t<has_few_terms, F[kFew], char> terms_;
  uint16_t lanes_;
#endif
};

// The same without a normaliser.
template <class E, bool clears, int n>
REGARD_INLINE static void exponentials(Vec<typename E::Real> (&x)[n],
                                       Vec<typename E::Real> (&w)[n]) {
#ifdef REGARD_TILES
  if constexpr (E::tiles && E::rounds) {
    F terms[kFew];
    for (int k = 0; k < kFew; ++k) terms[k] = F{} + kFewTerms[k];
    return exp2_by<clears>(terms, __mmask16(~0), x, w);
  }
#endif
  for (int i = 0; i < n; ++i) w[i] = x[i];
  exp2_each(w);
  for (int i = 0; clears && i < n; ++i) x[i] = larger(Vec<typename E::Real>{} - 1e4f, x[i]);
}

// The entries (i, j0 + j) of a mask or a bias for the rows of one vector and `n` keys: t[j][i].
template <class R>
static void entries(const Array& x, const char* const* rows, int count, int64_t j0, int n,
                    Vec<R>* t) {
  constexpr int lanes = Simd<R>::lanes;
  const int64_t step = x.strides[3], size = bytes_of(x.type);
  bool same = true;
  for (int i = 1; i < count; ++i) same &= rows[i] == rows[0];
  if (same) {
    for (int j = 0; j < n; ++j) t[j] = broadcast(number<R>(rows[0] + (j0 + j) * step, x.type));
    return;
  }
  for (int i = 0; i < lanes; ++i) {
    t[i] = Vec<R>{};
    if (i >= count) continue;
    const char* p = rows[i] + j0 * step;
    if (step == size && n == lanes) {
      switch (x.type) {
        case Type::float32:
          t[i] = numbers<R, Type::float32>(p);
          continue;
        case Type::float64:
          t[i] = numbers<R, Type::float64>(p);
          continue;
        case Type::bfloat16:
          t[i] = numbers<R, Type::bfloat16>(p);
          continue;
        case Type::float16:
          t[i] = numbers<R, Type::float16>(p);
          continue;
        default:
          t[i] = __builtin_convertvector(read<typename Simd<R>::Byte>(p), Vec<R>);
          continue;
      }
    }
    for (int j = 0; j < n; ++j) t[i][j] = number<R>(p + j * step, x.type);
  }
  transpose(*(Vec<R>(*)[lanes])t);
}

// The cap: what options make of scaled scores before the bias. `slope`, optional, takes its
// derivative, for NaN 0: a score that is hidden may be NaN, and its weight of 0 times NaN is none.
template <class Real>
static inline Vec<Real> cap_scores(const Problem& p, Vec<Real> s, Vec<Real>* slope) {
  if (p.softcap == 0) return s;
  const Real cap = Real(p.softcap);
  s = tanh(s / cap);
  if (slope) *slope = s == s ? Real(1) - s * s : Vec<Real>{};
  return s * cap;
}

// Applies scale and cap to the scores of vector v. `slope`, optional, takes the derivative of the
// cap.
template <class E>
static void scale_scores(const Problem& p, const TileMask& tile_mask, int v,
                         typename E::Real* scores, typename E::Real* slope) {
  typedef typename E::Real Real;
  const Real scale = Real(p.scale);
  for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j) {
    Vec<Real>& s = vector_at<E>(scores, j, v);
    s = cap_scores<Real>(p, s * scale, slope ? &vector_at<E>(slope, j, v) : nullptr);
  }
}

// Applies score = both(score, entry) to vector v and the entries of a mask or a bias.
template <class E, class Both>
static void apply_entries(const Array& x, const Rows<E>& rows, const TileMask& tile_mask, int v,
                          int64_t j0, typename E::Real* scores, Both both) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int count = rows.count - v * n < n ? rows.count - v * n : n, high = tile_mask.high[v];
  const char* row[n];
  Vec<Real> tile[n];
  for (int i = 0; i < count; ++i)
    row[i] = x.at(rows.b, rows.head[v * n + i], rows.index[v * n + i]);
  for (int j = tile_mask.low[v]; j < high; j += n) {
    const int m = high - j < n ? high - j : n;
    entries<Real>(x, row, count, j0 + j, m, tile);
    for (int i = 0; i < m; ++i) {
      Vec<Real>& score = vector_at<E>(scores, j + i, v);
      score = both(score, tile[i]);
    }
  }
}

// Masks the keys outside the intervals of the rows of vector v.
template <class E>
static void mask_outside(const Rows<E>& rows, const TileMask& tile_mask, int v, int64_t j0,
                         int keys, typename E::Real* scores, Vec<typename E::Real> masked) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int low = tile_mask.low[v], high = tile_mask.high[v];
  const auto inside = [&](int64_t j) { return int(j < 0 ? 0 : j > keys ? keys : j); };
  const int seen_low = inside(rows.seen_low[v] - j0), seen_high = inside(rows.seen_high[v] - j0);
  if (seen_low <= low && seen_high >= high) return;
  typedef typename Simd<Real>::Int64 Wide;
  const auto ends = [&](const int64_t* x) {
    Wide end;
    __builtin_memcpy(&end, x + v * n, sizeof end);
    end -= j0;
    end = end < 0 ? Wide{} : end;
    return __builtin_convertvector(end > keys ? Wide{} + keys : end, Int<Real>);
  };
  const Int<Real> first = ends(rows.first), last = ends(rows.last);
  const auto mask_range = [&](int from, int to) {
    for (int j = from; j < to; ++j) {
      const Int<Real> key = Int<Real>{} + j;
      Vec<Real>& score = vector_at<E>(scores, j, v);
      score = ((key >= first) & (key < last)) ? score : masked;
    }
  };
  const int from = seen_low < low ? low : seen_low < high ? seen_low : high;
  mask_range(low, from);
  mask_range(seen_high > from ? seen_high : from, high);
}

// Whether the scores of a tile are its products: every key is visible, and nothing is added.
template <class E>
static bool is_unmasked(const Problem& p, const Rows<E>& rows, const TileMask& tile_mask,
                        int64_t j0, int keys) {
  return tile_mask.fully_visible && raw_scores(p) && !p.mask && !p.key_ids &&
         !edits_meet(p, rows, j0, keys);
}

// Adds an edit to the scores of the rows of vector v, or masks them.
template <class E>
static void apply_edit(const Problem& p, const Edit& edit, const Rows<E>& rows,
                       const TileMask& tile_mask, int v, int64_t j0, typename E::Real* scores,
                       Vec<typename E::Real> masked) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int64_t low = j0 + tile_mask.low[v], high = j0 + tile_mask.high[v];
  const int from = int((edit.key[0] > low ? edit.key[0] : low) - j0);
  const int to = int((edit.key[1] < high ? edit.key[1] : high) - j0);
  Int<Real> of_edit = {};
  bool any = false;
  for (int i = 0; i < n && v * n + i < rows.count; ++i) {
    const bool its = is_of(edit, rows.head[v * n + i], rows.index[v * n + i]);
    of_edit[i] = its ? -1 : 0;
    any |= its;
  }
  if (!any) return;
  const bool cuts = is_cut(edit);
  const Vec<Real> added =
      of_edit != 0 ? broadcast(Real(cuts ? 0 : added_score(p, edit))) : Vec<Real>{};
  for (int j = from; j < to; ++j) {
    Vec<Real>& score = vector_at<E>(scores, j, v);
    score = cuts ? (of_edit != 0 ? masked : score) : score + added;
  }
}

// Applies the edits of a tile.
template <class E>
static void apply_edits(const Problem& p, const Rows<E>& rows, const TileMask& tile_mask,
                        int64_t j0, int keys, typename E::Real* scores,
                        Vec<typename E::Real> masked) {
  for (int64_t e = 0; e < p.edit_count; ++e) {
    if (!meets(p.edits[e], rows, j0, keys, false)) continue;
    for (int v = 0; v < rows.vectors; ++v)
      apply_edit<E>(p, p.edits[e], rows, tile_mask, v, j0, scores, masked);
  }
}

// Applies scale, cap and bias where scores are not `raw`, and edits, and masks: with -inf, unless
// another number is given. `slope`, optional, takes the derivative of the cap.
template <class E>
static void finish_scores(const Problem& p, const Rows<E>& rows, const TileMask& tile_mask,
                          const Scaling<E>& scaling, int64_t j0, int keys, typename E::Real* scores,
                          typename E::Real* slope,
                          Vec<typename E::Real> masked = Vec<typename E::Real>{} -
                                                         kInf<typename E::Real>) {
  typedef Vec<typename E::Real> V;
  constexpr int n = E::lanes;
  for (int v = 0; v < rows.vectors; ++v) {
    if (!scaling.raw) scale_scores<E>(p, tile_mask, v, scores, slope);
    if (p.bias)
      apply_entries<E>(p.bias, rows, tile_mask, v, j0, scores,
                       [](V s, V bias) { return s + bias; });
  }
  apply_edits<E>(p, rows, tile_mask, j0, keys, scores, masked);
  for (int v = 0; v < rows.vectors; ++v) {
    if (!tile_mask.fully_visible) mask_outside<E>(rows, tile_mask, v, j0, keys, scores, masked);
    if (p.mask)
      apply_entries<E>(p.mask, rows, tile_mask, v, j0, scores,
                       [&](V s, V seen) { return seen != 0 ? s : masked; });
  }
  // What is hidden from the rows, and may be NaN, is hidden from unused lanes: sums over a vector's
  // rows have them too, times 0.
  const int last = rows.vectors - 1, used = rows.count - last * n;
  for (int j = tile_mask.low[last]; used < n && j < tile_mask.high[last]; ++j)
    for (int i = used; i < n; ++i) scores[j * E::rows + last * n + i] = masked[0];
  if (!p.key_ids) return;
  const int64_t* ids = p.key_ids + rows.b * p.Lk + j0;
  for (int v = 0; v < rows.vectors; ++v)
    for (int i = v * n; i < rows.count && i < (v + 1) * n; ++i) {
      const int64_t id = p.query_ids[rows.b * p.Lq + rows.index[i]];
      for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j)
        if (ids[j] != id) scores[j * E::rows + i] = masked[0];
    }
}

}  // namespace regard::REGARD_NAMESPACE
