// The strongest keys of each row, and the strongest pairs of a head, of tiles of scores: weights
// are as strong as their scores, and are computed of what is kept alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "reduce_memory-inl.h"

namespace regard::REGARD_NAMESPACE {

// The key of a candidate, which a rank may have marked by its complement.
static inline int32_t key_of(int32_t marked) { return marked < 0 ? ~marked : marked; }

template <class Real>
struct ByScore {
  bool operator()(const Candidate<Real>& x, const Candidate<Real>& y) const {
    return x.score != y.score ? x.score > y.score : key_of(x.key) < key_of(y.key);
  }
};

struct ByKey {
  template <class C>
  bool operator()(const C& x, const C& y) const {
    return x.key < y.key;
  }
};

// A lower bound of the k-th best score of a tile, for every row: the k-th best of the maxima of
// small groups, and a little less. -inf where there are too few groups.
template <class E, class Rank>
static Vec<typename E::Real> kth_lower_bound(const Reduce& r, ReduceMemory<E>& m, int v, int low,
                                             int high, const typename E::Real* tile, Rank rank) {
  typedef typename E::Real Real;
  const auto score = [&](int j) {
    return rank(*(const Vec<Real>*)(tile + j * E::rows + v * E::lanes));
  };
  const int group = int(kKeys / (2 * r.k));
  if (group < 2) return Vec<Real>{} - kInf<Real>;
  Vec<Real>* const best = m.pending;
  for (int64_t i = 0; i < r.k; ++i) best[i] = Vec<Real>{} - kInf<Real>;
  for (int j = low; j + group <= high; j += group) {
    Vec<Real> x = score(j);
    for (int i = 1; i < group; ++i) x = larger(score(j + i), x);
    for (int64_t i = 0; i < r.k; ++i) {
      const Vec<Real> old = best[i];
      best[i] = larger(x, old);
      x = x < old ? x : old;
    }
  }
  const Vec<Real> kth = best[r.k - 1];
  return kth - (kth < 0 ? -kth : kth) * Real(1e-6) - Real(1e-30);
}

// Inserts the first `depth` pending scores of each row among its k best.
template <class E>
static void insert_pending(const Reduce& r, ReduceMemory<E>& m, int v,
                           const Integer<typename E::Real>* depth) {
  typedef typename E::Real Real;
  const Int<Real> depths = *(const Int<Real>*)depth;
  Integer<Real> deepest = 0;
  for (int i = 0; i < E::lanes; ++i) deepest = depth[i] > deepest ? depth[i] : deepest;
  for (Integer<Real> d = 0; d < deepest; ++d) {
    const Vec<Real> x = Int<Real>{} + d < depths ? m.pending[d] : Vec<Real>{} - kInf<Real>;
    const Int<Real> key = m.pending_key[d];
    for (int64_t i = r.k - 1; i >= 0; --i) {
      Vec<Real>& best = m.at(m.best + i * E::rows, v);
      Int<Real>& best_key = m.best_key[i * kVectors + v];
      if (i > 0) {
        const Vec<Real> above = m.at(m.best + (i - 1) * E::rows, v);
        const Int<Real> moved = x > above ? m.best_key[(i - 1) * kVectors + v] : key;
        best_key = x > best ? moved : best_key;
        best = larger(x < above ? x : above, best);
      } else {
        best_key = x > best ? key : best_key;
        best = larger(x, best);
      }
    }
  }
}

// Writes the places, key * n + lane, of the bits of `bits(key)` for some keys, and past them;
// returns their number. Without a branch on it: it is unpredictable.
#if REGARD_LANES == 16
template <int n, class Bits>
static inline int places_over(int32_t* to, int low, int high, Bits bits) {
  int32_t* end = to;
  __m512i place =
      _mm512_add_epi32(_mm512_set1_epi32(low * n),
                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  for (int j = low; j < high; ++j) {
    const uint32_t found = bits(j);
    _mm512_storeu_si512(end, _mm512_maskz_compress_epi32(__mmask16(found), place));
    place = _mm512_add_epi32(place, _mm512_set1_epi32(n));
    end += __builtin_popcount(found);
  }
  return int(end - to);
}
#else
template <int n, class Bits>
static inline int places_over(int32_t* to, int low, int high, Bits bits) {
  constexpr int keys_a_word = 64 / n;
  int32_t* end = to;
  for (int j = low; j < high; j += keys_a_word) {
    uint64_t all = 0;  // lane masks of the keys, one behind another
    for (int i = 0; i < keys_a_word && j + i < high; ++i) all |= uint64_t(bits(j + i)) << i * n;
    const int count = __builtin_popcountll(all);
    for (int at = 0; at == 0 || at < count; at += 4)  // four at a time
      for (int i = 0; i < 4; ++i, all &= all - 1)
        end[at + i] = j * n + __builtin_ctzll(all | uint64_t{1} << 63);
    end += count;
  }
  return int(end - to);
}
#endif

// Updates the top-k of the rows with a tile of scores. Ties keep the first key.
//
// Scores over the k-th best of their row are compacted into its lane, and inserted together with
// those of the other rows: one insertion alone would cost as much as one for every lane.
template <class E, class Rank>
static void sort_top(const Reduce& r, ReduceMemory<E>& m, const TileMask& tile_mask, int64_t j0,
                     const typename E::Real* tile, Rank rank) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  for (int v = 0; v < m.rows.vectors; ++v) {
    const int low = tile_mask.low[v], high = tile_mask.high[v];
    Vec<Real> over = m.at(m.best + (r.k - 1) * E::rows, v);
    if (!greater(over, Vec<Real>{} - kInf<Real>))
      over = kth_lower_bound(r, m, v, low, high, tile, rank);
    const Real* const scores = tile + v * n;
    int found = 0;
    constexpr int some = ReduceMemory<E>::overlaps ? kMeanwhile : kKeys;
    for (int from = low; from < high; from += some) {
      const int to = from + some < high ? from + some : high;
      found += places_over<n>(m.found + found, from, to, [&](int j) {
        return greater(rank(*(const Vec<Real>*)(scores + j * E::rows)), over);
      });
      m.meanwhile.step();
    }
    alignas(64) Integer<Real> depth[n] = {};
    for (int x = 0; x < found; ++x) {
      const unsigned place = unsigned(m.found[x]), j = place / n, i = place % n;
      const int64_t at = depth[i]++ * n + i;
      const Real score = scores[j * E::rows + i];
      ((Real*)m.pending)[at] = rank(score);
      ((Integer<Real>*)m.pending_key)[at] = rank.key(score, Integer<Real>(j0 + j));
    }
    insert_pending(r, m, v, depth);
  }
}

// Keeps the k best candidates of a row.
template <class E>
static void keep_best(const Reduce& r, ReduceMemory<E>& m, int row) {
  typedef typename E::Real Real;
  Candidate<Real>* all = m.candidates + row * m.room(r);
  if (m.counts[row] < r.k) return;
  std::nth_element(all, all + r.k - 1, all + m.counts[row], ByScore<Real>());
  m.counts[row] = int(r.k);
  m.threshold[row] = all[r.k - 1].score;
}

// Appends the scores of a tile that may be among the k best of their rows. Keys come in rising
// order, so that ties keep the first.
template <class E, class Rank>
static void find_top(const Reduce& r, ReduceMemory<E>& m, const TileMask& tile_mask, int64_t j0,
                     const typename E::Real* tile, Rank rank) {
  for (int v = 0; v < m.rows.vectors; ++v) {
    auto threshold = m.at(m.threshold, v);
    for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j) {
      const auto scores = rank(*(const Vec<typename E::Real>*)(tile + j * E::rows + v * E::lanes));
      for (uint32_t bits = greater(scores, threshold); bits; bits &= bits - 1) {
        const int row = v * E::lanes + __builtin_ctz(bits);
        const auto score = tile[j * E::rows + row];
        m.candidates[row * m.room(r) + m.counts[row]++] = {rank(score),
                                                           rank.key(score, int32_t(j0 + j))};
        if (m.counts[row] == m.room(r) ||
            (m.counts[row] == r.k && m.threshold[row] == -kInf<typename E::Real>)) {
          keep_best(r, m, row);
          threshold = m.at(m.threshold, v);
        }
      }
    }
  }
}

// Keeps the k of each row that `rank` makes largest, with those of a tile, [key][row]. It takes
// vectors and numbers.
template <class E, class Rank>
static void keep_top(const Reduce& r, ReduceMemory<E>& m, const TileMask& tile_mask, int64_t j0,
                     const typename E::Real* tile, Rank rank) {
  if (r.k <= kSortedInLanes)
    sort_top(r, m, tile_mask, j0, tile, rank);
  else
    find_top(r, m, tile_mask, j0, tile, rank);
}

struct AsItIs {
  template <class X>
  X operator()(X x) const {
    return x;
  }
  template <class X, class Key>
  static Key key(X, Key key) {
    return key;
  }
};

// Puts the k best of a row into its candidates; returns their number.
template <class E>
static int64_t best_of_row(const Reduce& r, ReduceMemory<E>& m, int row) {
  Candidate<typename E::Real>* const all = m.candidates + row * m.room(r);
  if (r.k > kSortedInLanes) {
    keep_best(r, m, row);
    return m.counts[row];
  }
  int64_t n = 0;
  const int v = row / E::lanes, lane = row % E::lanes;
  for (; n < r.k && m.best[n * E::rows + row] != -kInf<typename E::Real>; ++n)
    all[n] = {m.best[n * E::rows + row], int32_t(m.best_key[n * kVectors + v][lane])};
  return n;
}

// Fills the rest of a row's k with the first keys that are not among the n it has, and 0.
template <class Real>
static void fill_top(Candidate<Real>* all, int64_t n, int64_t k, Real* values, int64_t* keys) {
  if (n == k) return;
  std::sort(all, all + n, ByKey());
  const Candidate<Real>*used = all, *const end = all + n;
  for (int64_t j = 0; n < k; ++j) {
    if (used < end && used->key == j)
      ++used;
    else
      values[n] = 0, keys[n++] = j;
  }
}

// Keeps the n strongest pairs of the head so far.
template <class E>
static void keep_strongest(const Reduce& r, ReduceMemory<E>& m) {
  if (m.pair_count < r.n) return;
  std::nth_element(m.pairs, m.pairs + r.n - 1, m.pairs + m.pair_count, Stronger());
  m.pair_count = r.n;
  m.weakest = m.pairs[r.n - 1];
}

// The score that a pair of each row must exceed to be among the strongest, less a margin for
// rounding; NaN where the weights are.
template <class E>
static void set_pair_threshold(const Scaling<E>& scaling, ReduceMemory<E>& m) {
  typedef typename E::Real Real;
  constexpr Real flushed = Real(std::numeric_limits<Real>::min_exponent - 2);  // of exp2, to 0
  // Below it the logarithm of a weight is not exact enough.
  constexpr double denormal = 4 * double(std::numeric_limits<Real>::min());
  const Real least = m.weakest.weight < denormal ? -kInf<Real> : Real(std::log2(m.weakest.weight));
  for (int i = 0; i < E::rows; ++i) {
    const Real exponent = least + m.normalisers.log_total[i], base = m.normalisers.base[i];
    const Real below = (exponent < flushed ? flushed : exponent) / scaling.factor;
    const Real sizes = std::abs(base) + std::abs(below) + 4 / scaling.factor;
    m.pair_threshold[i] = base + below - sizes * Real(1e-6);
  }
}

template <class E>
static void find_pairs(const Reduce& r, const Scaling<E>& scaling, ReduceMemory<E>& m,
                       const TileMask& tile_mask, int64_t j0) {
  typedef typename E::Real Real;
  const auto look = [&](int v, int j) {
    for (uint32_t bits = greater(m.score(j, v), m.at(m.pair_threshold, v)); bits;
         bits &= bits - 1) {
      const int row = v * E::lanes + __builtin_ctz(bits);
      if (row >= m.rows.count) break;
      const Real x = (m.scores[j * E::rows + row] - m.normalisers.base[row]) * scaling.factor;
      const double weight = double(exp2(broadcast(x))[0] * m.normalisers.inverse[row]);
      const Pair pair = {weight, m.rows.index[row], j0 + j};
      if (!(weight > 0) || !Stronger()(pair, m.weakest)) continue;
      m.pairs[m.pair_count++] = pair;
      if (m.pair_count == m.pair_room(r)) {
        keep_strongest(r, m);
        set_pair_threshold(scaling, m);
      }
    }
  };
  for (int v = 0; v < m.rows.vectors; ++v) {
    int j = tile_mask.low[v];
    for (; j + 4 <= tile_mask.high[v]; j += 4) {
      const Vec<Real> x = larger(m.score(j, v), m.score(j + 1, v));
      const Vec<Real> y = larger(m.score(j + 2, v), m.score(j + 3, v));
      if (!(greater(x, m.at(m.pair_threshold, v)) | greater(y, m.at(m.pair_threshold, v))))
        continue;
      for (int i = 0; i < 4; ++i) look(v, j + i);
    }
    for (; j < tile_mask.high[v]; ++j) look(v, j);
  }
}

}  // namespace regard::REGARD_NAMESPACE
