// Heatmaps: a tile of scores or weights pooled into bins of queries and keys, by the maximum or the
// mass.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "chunks-inl.h"
#include "scores-inl.h"

namespace regard::REGARD_NAMESPACE {

// What makes weights of the scores of a tile of queries, from their row statistics: [rows].
template <class E>
struct Normalisers {
  typedef typename E::Real Real;
  Real* base;       // of the exponents
  Real* inverse;    // the normaliser, 1 / total; 0 where nothing is visible
  Real* log_total;  // log2 of the denominator

  explicit Normalisers(Scratch& scratch) {
    for (Real** x : {&base, &inverse, &log_total}) *x = scratch.take<Real>(E::rows);
  }
  void clear(int i) { base[i] = inverse[i] = log_total[i] = 0; }
  void set(int i, Real maximum, Real total) {
    base[i] = maximum == -kInf<Real> ? 0 : maximum;
    inverse[i] = total == 0 ? 0 : 1 / total;
    log_total[i] = total == 0 ? 0 : std::log2(total);
  }
  Vec<Real> log2_weight(const Scaling<E>& scaling, Vec<Real> score, int v) const {
    return scaling.exponent(score, vector_at<E>(base, 0, v)) - vector_at<E>(log_total, 0, v);
  }
};

// The bins that a tile of queries is pooled into.
template <class E>
struct Bins {
  typedef typename E::Real Real;
  int keys;          // of a bin, as of `keys_per_bin`
  int64_t begun;     // the first row of bins that is still to be emptied
  int64_t* edges;    // [bins + 1]: the first key of each bin
  int64_t* row_bin;  // [rows]
  Real** row[2];     // [rows]: where its row of bins is accumulated, by heatmap: max, mass

  Bins(const Reduce& r, Scratch& scratch) {
    edges = scratch.take<int64_t>(has_heatmap(r) ? r.bins[1] + 1 : 0);
    row_bin = scratch.take<int64_t>(has_heatmap(r) ? E::rows : 0);
    for (Real**& x : row) x = scratch.take<Real*>(has_heatmap(r) ? E::rows : 0);
  }
};

// Begins with the bins of a chunk.
template <class E>
static void start_bins(const Reduce& r, Bins<E>& bins, const RowChunk<E>& chunk) {
  bins.keys = int(keys_per_bin(r));
  bins.begun = bin_at(r, 0, chunk.begin);
  for (int64_t x = 0; x <= r.bins[1]; ++x) bins.edges[x] = first_of_bin(r, 1, x);
}

// Finds the bins of the next tile of queries; new ones are emptied, and near then.
template <class E>
static void find_bins(const Reduce& r, const Rows<E>& rows, Bins<E>& bins,
                      const RowChunk<E>& chunk) {
  for (int i = 0; i < rows.count; ++i) {
    bins.row_bin[i] = bin_at(r, 0, rows.index[i]);
    for (; bins.begun <= bins.row_bin[i]; ++bins.begun) {
      const BinRow row(r, chunk.begin, chunk.end, bins.begun);
      if (r.pooled_max) row.clear_bins(r, chunk.head, chunk.found, false);
      if (r.pooled_mass) row.clear_bins(r, chunk.head, chunk.found, true);
    }
    const BinRow row(r, chunk.begin, chunk.end, bins.row_bin[i]);
    if (r.pooled_max) bins.row[0][i] = row.in(r, chunk.head, chunk.found, false);
    if (r.pooled_mass) bins.row[1][i] = row.in(r, chunk.head, chunk.found, true);
  }
}

// Accumulates t[column][row] of a vector of rows into `width` bins from `bin` on.
template <class E, bool mass>
REGARD_INLINE static void add_to_bins(const Rows<E>& rows, const Bins<E>& bins,
                                      Vec<typename E::Real>* t, int v, int64_t bin, int width) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const auto both = [](Vec<Real> x, Vec<Real> y) { return mass ? x + y : larger(y, x); };
  const int first = v * n, count = rows.count - first < n ? rows.count - first : n;
  transpose(*(Vec<Real>(*)[n])t);
  for (int i = 0; i < count; ++i) {
    Real* to = bins.row[mass][first + i] + bin;
    Vec<Real> x = mass ? t[i] : larger(t[i], Vec<Real>{} + empty_bin_value<Real>(mass));
    // Rows of one bin are reduced before they are written.
    for (; i + 1 < count && bins.row_bin[first + i + 1] == bins.row_bin[first + i]; ++i)
      x = both(x, t[i + 1]);
    if (width == n)
      store<Real>(to, both(load<Real>(to), x));
    else
      for (int c = 0; c < width; ++c) to[c] = mass ? to[c] + x[c] : x[c] > to[c] ? x[c] : to[c];
  }
}

struct Nothing {
  void operator()() const {}
};

struct Unchanged {
  template <class V>
  V operator()(V x, int) const {
    return x;
  }
};

// Pools a tile into the bins of a heatmap: the maximum of scores, or the mass of weights. `finish`
// makes what is accumulated of what was pooled over the keys of a bin, for a vector of rows.
// `meanwhile` is called now and then.
template <class E, bool mass, class Finish = Unchanged, class Meanwhile = Nothing>
static void pool_tile(const Reduce& r, const Rows<E>& rows, const Bins<E>& bins,
                      const typename E::Real* scores, const TileMask& tile_mask, int64_t j0,
                      int keys, Finish finish = {}, Meanwhile meanwhile = {}) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int64_t last_bin = bin_at(r, 1, j0 + keys - 1);
  const Vec<Real> nothing = Vec<Real>{} + empty_bin_value<Real>(mass);
  const int even = bins.keys;
  const auto both = [](Vec<Real> x, Vec<Real> y) { return mass ? x + y : larger(y, x); };
  for (int64_t bin = bin_at(r, 1, j0); bin <= last_bin; bin += n) {
    const int width = int(last_bin + 1 - bin < n ? last_bin + 1 - bin : n);
    for (int v = 0; v < rows.vectors; ++v) {
      const auto score = [&](int64_t j) {
        return *(const Vec<Real>*)(scores + j * E::rows + v * n);
      };
      Vec<Real> t[n];
      const int64_t first = bins.edges[bin] - j0;
      if (even && width == n && tile_mask.low[v] <= first &&
          first + n * even <= tile_mask.high[v]) {
        for (int i = 0; i < n; ++i) {
          const int64_t j = first + i * even;
          t[i] = both(nothing, score(j));
          for (int x = 1; x < even; ++x) t[i] = both(t[i], score(j + x));
          meanwhile();
        }
      } else {
        for (int i = 0; i < n; ++i) {
          t[i] = nothing;
          if (i >= width) continue;
          int64_t from = bins.edges[bin + i] - j0, to = bins.edges[bin + i + 1] - j0;
          if (from < tile_mask.low[v]) from = tile_mask.low[v];
          if (to > tile_mask.high[v]) to = tile_mask.high[v];
          for (int64_t j = from; j < to; ++j) t[i] = both(t[i], score(j));
          meanwhile();
        }
      }
      for (int i = 0; i < n; ++i) t[i] = finish(t[i], v);
      add_to_bins<E, mass>(rows, bins, t, v, bin, width);
    }
  }
}

// Pools the mass of a tile straight from its scores, which it leaves. Every key is visible, before
// mask and ids, and bins have as many keys each. Returns false where a bin crosses the end of the
// tile.
template <class E, class Meanwhile>
static bool pool_mass(const Reduce& r, const Rows<E>& rows, const Bins<E>& bins,
                      const Scaling<E>& scaling, const Normalisers<E>& normalisers,
                      const typename E::Real* scores, int64_t j0, int keys, Meanwhile meanwhile) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int width = bins.keys;
  if (!width || j0 % width || keys % width || width % 4) return false;
  const int64_t first_bin = bin_at(r, 1, j0);
  const int count = keys / width;
  for (int from = 0; from < count; from += n) {
    const int some = count - from < n ? count - from : n;
    for (int v = 0; v < rows.vectors; ++v) {
      const Vec<Real> base = vector_at<E>(normalisers.base, 0, v);
      const Vec<Real> inverse = vector_at<E>(normalisers.inverse, 0, v);
      Vec<Real> t[n], *sum = t;
      for (Vec<Real>& x : t) x = Vec<Real>{};
      int left = width;  // keys of a bin
      // Eight keys in step, of one bin or two, hide the latency of an exponential.
      const auto add = [&]<int unroll>(int j, std::integral_constant<int, unroll>) {
        Vec<Real> x[unroll], w[unroll];
        for (int i = 0; i < unroll; ++i)
          x[i] = scaling.exponent(*(const Vec<Real>*)(scores + (j + i) * E::rows + v * n), base);
        exponentials<E, false>(x, w);
        for (int i = 0; i < unroll; i += 4) {
          *sum += (w[i] + w[i + 1]) + (w[i + 2] + w[i + 3]);
          if ((left -= 4) == 0) left = width, ++sum;
        }
        if (j % kMeanwhile == 0) meanwhile();
      };
      int j = from * width;
      const int end = j + some * width;
      for (; j + 8 <= end; j += 8) add(j, std::integral_constant<int, 8>());
      for (; j < end; j += 4) add(j, std::integral_constant<int, 4>());
      for (Vec<Real>& x : t) x = inverse != 0 ? x * inverse : Vec<Real>{};  // unused lanes too
      add_to_bins<E, true>(rows, bins, t, v, first_bin + from, some);
    }
  }
  return true;
}

}  // namespace regard::REGARD_NAMESPACE
