// Reductions of a matrix of token pairs whose numbers may be negative: what is largest is so in
// size, and is given with its sign. Each chunk of rows has partial results, merged in their order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "effects-inl.h"

namespace regard::REGARD_NAMESPACE {

// The one of larger size, the positive one of equals; NaN where either is.
struct LargerInSize {
  template <class V>
  V operator()(V x, V y) const {
    V a, b;
    if constexpr (std::is_floating_point_v<V>)
      a = std::abs(x), b = std::abs(y);
    else
      a = magnitude(x), b = magnitude(y);
    return (b > a) | (y != y) | ((b == a) & (y > x)) ? y : x;
  }
};

struct SignedPair : Pair {  // its weight is the size
  double value;
};

static bool has_picture(const PairMatrix& x) { return x.pooled_max || x.pooled_mean; }

// Rows of a chunk, whatever the number of threads.
template <class E>
static int64_t pair_chunk_rows(const PairMatrix& x) {
  const int64_t sixteenth = (x.Lq + 15) / 16, rows = sixteenth > 256 ? sixteenth : 256;
  return (rows + E::rows - 1) / E::rows * E::rows;
}

template <class E>
static int64_t pair_chunks(const PairMatrix& x) {
  return (x.Lq + pair_chunk_rows<E>(x) - 1) / pair_chunk_rows<E>(x);
}

// The partial results of a chunk of rows.
template <class E>
struct PairChunk {
  typedef typename E::Real Real;
  int64_t begin, end, first_bin;
  Real* received;          // [Lk]
  Real* pooled_max;        // [bins of its rows][bins[1]]: as FoldLargest keeps it
  uint8_t* seen;           // likewise: whether any pair is unmasked
  double *sum, *unmasked;  // likewise: of the numbers, and how many
  SignedPair* pairs;       // [n]
  int64_t* count;

  PairChunk(const PairMatrix& x, int64_t chunk, Scratch& scratch) {
    const int64_t rows = pair_chunk_rows<E>(x);
    begin = chunk * rows, end = begin + rows < x.Lq ? begin + rows : x.Lq;
    first_bin = has_picture(x) ? bin_of(begin, x.extent[0], x.bins[0]) : 0;
    const int64_t cells = has_picture(x) ? (rows * x.bins[0] / x.extent[0] + 2) * x.bins[1] : 0;
    received = scratch.take<Real>(x.received || x.received_max ? x.Lk : 0);
    pooled_max = scratch.take<Real>(x.pooled_max ? cells : 0);
    seen = scratch.take<uint8_t>(cells + E::lanes);  // and what is read past the last
    sum = scratch.take<double>(x.pooled_mean ? cells : 0);
    unmasked = scratch.take<double>(x.pooled_mean ? cells : 0);
    pairs = scratch.take<SignedPair>(x.n);
    count = scratch.take<int64_t>(1);
  }
};

template <class E>
static int64_t bytes_of_pair_chunk(const PairMatrix& x) {
  Scratch scratch(nullptr);
  PairChunk<E> chunk(x, 0, scratch);
  return scratch.taken();
}

template <class E>
static PairChunk<E> pair_chunk(const PairMatrix& x, int64_t i) {
  Scratch scratch(x.chunks + i * bytes_of_pair_chunk<E>(x));
  return PairChunk<E>(x, i, scratch);
}

template <class E>
struct PairReductions {
  typedef typename E::Real Real;
  int64_t* row_bins;  // [tiles of queries at a time][rows]: counted from the chunk's first
  int64_t* row_bin;   // [rows]: of the tile at work
  int64_t* edges;     // [bins[1] + 1]: the first key of each bin
  SignedPair* pairs;  // [2 n + 64]
  int64_t count = 0;
  SignedPair weakest{};  // of the n strongest so far
  Real over = 0;         // what else must be larger

  PairReductions(const PairMatrix& x, Scratch& scratch) {
    row_bins = row_bin = scratch.take<int64_t>(tiles_together(x) * E::rows);
    edges = scratch.take<int64_t>(has_picture(x) ? x.bins[1] + 1 : 0);
    pairs = scratch.take<SignedPair>(x.n ? room(x) : 0);
  }
  static int64_t room(const PairMatrix& x) { return 2 * x.n + 64; }
};

template <class E>
static void keep_largest(const PairMatrix& x, PairReductions<E>& r) {
  typedef typename E::Real Real;
  if (r.count < x.n) return;
  std::nth_element(r.pairs, r.pairs + x.n - 1, r.pairs + r.count, Stronger());
  r.count = x.n;
  r.weakest = r.pairs[x.n - 1];
  r.over = std::nextafter(Real(r.weakest.weight), Real(0));
}

// Appends the numbers of a tile that may be among the n strongest.
template <class E>
static void find_largest(const PairMatrix& x, const Rows<E>& rows, const typename E::Real* tile,
                         int64_t j0, int keys, PairReductions<E>& r) {
  typedef typename E::Real Real;
  const auto look = [&](int j, int v) {
    const Vec<Real> found = *(const Vec<Real>*)(tile + j * E::rows + v * E::lanes);
    for (uint32_t bits = greater(magnitude(found), broadcast(r.over)); bits; bits &= bits - 1) {
      const int row = v * E::lanes + __builtin_ctz(bits);
      const double value = double(tile[j * E::rows + row]);
      const SignedPair pair{{std::abs(value), rows.index[row], j0 + j}, value};
      if (!(pair.weight > 0) || (r.weakest.weight > 0 && !Stronger()(pair, r.weakest))) continue;
      r.pairs[r.count++] = pair;
      if (r.count == r.room(x)) keep_largest(x, r);
    }
  };
  for (int j = 0; j < keys; ++j)
    for (int v = 0; v < rows.vectors; ++v) look(j, v);
}

// The size of a number, NaN behind all others and what is masked behind NaN.
template <class Real>
struct BySize {
  Vec<Real> operator()(Vec<Real> x) const {
    const Vec<Real> nan = Vec<Real>{} - Real(1), masked = Vec<Real>{} - kInf<Real>;
    const Vec<Real> behind = is_masked<Real>(x) ? masked : nan;
    return x == x ? magnitude(x) : behind;
  }
  Real operator()(Real x) const { return (*this)(broadcast(x))[0]; }
  template <class Key>
  static Key key(Real x, Key key) {  // with the sign of the number, which its size lacks
    return key ^ -Key(x < 0);        // no branch: signs are unpredictable
  }
};

// Keeps the k numbers of largest size of each row.
template <class E>
static void keep_largest_of_rows(const Reduce& r, ReduceMemory<E>& m, const typename E::Real* tile,
                                 int64_t j0, int keys) {
  TileMask whole;
  for (int v = 0; v < m.rows.vectors; ++v) whole.low[v] = 0, whole.high[v] = keys;
  keep_top(r, m, whole, j0, tile, BySize<typename E::Real>());
}

// Writes the top-k of a row: masked keys, of 0, last.
template <class E>
static void write_largest(const PairMatrix& x, const Reduce& r, ReduceMemory<E>& m, int row) {
  typedef typename E::Real Real;
  Candidate<Real>* all = m.candidates + row * m.room(r);
  Real* const values = (Real*)x.top_values + m.rows.index[row] * x.k;
  int64_t* const keys = x.top_keys + m.rows.index[row] * x.k;
  const int64_t n = best_of_row(r, m, row);
  std::sort(all, all + n, ByScore<Real>());
  for (int64_t i = 0; i < n; ++i) {
    const Real size = all[i].score, nan = std::numeric_limits<Real>::quiet_NaN();
    values[i] = size < 0 ? nan : all[i].key < 0 ? -size : size;
    keys[i] = all[i].key = key_of(all[i].key);
  }
  fill_top(all, n, x.k, values, keys);
}

// How the numbers of a bin are folded: what is `kept` of one, and of two.
template <class Real>
struct FoldSum {
  typedef Vec<Real> Kept;
  static Kept kept(Vec<Real> x) { return x; }
  static Kept both(Kept x, Kept y) { return x + y; }
};

// LargerInSize as an order of integers: the size, NaN above all, and then the sign; 0 of none.
template <class Real>
struct FoldLargest {
  typedef std::conditional_t<sizeof(Real) == 4, U, W> Kept;
  static constexpr int sign = sizeof(Real) * 8 - 1;
  static Kept kept(Vec<Real> x) { return ((Kept)x << 1 | (Kept)x >> sign) ^ 1; }
  static Kept both(Kept x, Kept y) { return x > y ? x : y; }
  static Vec<Real> number(Kept x) { return (Vec<Real>)((x ^ 1) >> 1 | (x ^ 1) << sign); }
};

// The bins of a tile of keys.
struct TileBins {
  int64_t first, last;

  TileBins(const PairMatrix& x, int64_t j0, int keys)
      : first(bin_of(j0, x.extent[1], x.bins[1])),
        last(bin_of(j0 + keys - 1, x.extent[1], x.bins[1])) {}
};

// The first key of a bin in a tile.
static inline int edge_in(const int64_t* edges, int64_t bin, int64_t j0, int keys) {
  const int64_t j = edges[bin] - j0;
  return int(j < 0 ? 0 : j > keys ? keys : j);
}

// Folds a tile into bins of keys and queries: `add(bin of the rows, first bin of keys, width,
// numbers)`, with as few calls as rows of a vector that share a bin allow.
template <class Fold, class E, class Add>
static void pool_pairs(const PairMatrix& x, const Rows<E>& rows, const PairReductions<E>& r,
                       const typename E::Real* tile, int64_t j0, int keys, Add add) {
  typedef typename E::Real Real;
  typedef typename Fold::Kept Kept;
  constexpr int n = E::lanes;
  const TileBins bins(x, j0, keys);
  for (int64_t bin = bins.first; bin <= bins.last; bin += n) {
    const int width = int(bins.last + 1 - bin < n ? bins.last + 1 - bin : n);
    int edges[n + 1];
    for (int i = 0; i <= width; ++i) edges[i] = edge_in(r.edges, bin + i, j0, keys);
    for (int v = 0; v < rows.vectors; ++v) {
      const auto kept = [&](int j) {
        return Fold::kept(*(const Vec<Real>*)(tile + j * E::rows + v * n));
      };
      Vec<Real> t[n] = {};
      for (int i = 0; i < width; ++i) {
        int j = edges[i];
        auto found = kept(j++);
        for (; j < edges[i + 1]; ++j) found = Fold::both(found, kept(j));
        t[i] = (Vec<Real>)found;
      }
      transpose(t);
      const int first = v * n, count = rows.count - first < n ? rows.count - first : n;
      for (int i = 0; i < count; ++i) {
        const int64_t to = r.row_bin[first + i];
        Kept found = (Kept)t[i];
        for (; i + 1 < count && r.row_bin[first + i + 1] == to; ++i)
          found = Fold::both(found, (Kept)t[i + 1]);
        add(to, bin, width, found);
      }
    }
  }
}

// Counts the unmasked pairs of each bin, of a tile where all of them are so.
template <class E>
static void count_all(const PairMatrix& x, const Rows<E>& rows, const PairReductions<E>& r,
                      int64_t j0, int keys, PairChunk<E>& chunk) {
  const TileBins bins(x, j0, keys);
  const int64_t width = bins.last + 1 - bins.first;
  for (int i = 0; i < rows.count;) {
    const int64_t of_rows = r.row_bin[i], at = of_rows * x.bins[1] + bins.first;
    int count = 0;
    for (; i < rows.count && r.row_bin[i] == of_rows; ++i) ++count;
    std::memset(chunk.seen + at, 1, size_t(width));
    for (int64_t bin = 0; x.pooled_mean && bin < width; ++bin)
      chunk.unmasked[at + bin] +=
          double(count) * (edge_in(r.edges, bins.first + bin + 1, j0, keys) -
                           edge_in(r.edges, bins.first + bin, j0, keys));
  }
}

// Adds a tile, 0 where masked, to the heatmaps.
template <class E>
static void pool_values(const PairMatrix& x, const Rows<E>& rows, const PairReductions<E>& r,
                        const typename E::Real* tile, int64_t j0, int keys, PairChunk<E>& chunk) {
  typedef typename E::Real Real;
  const int64_t C = x.bins[1];
  typedef FoldLargest<Real> Largest;
  if (x.pooled_max)
    pool_pairs<Largest>(
        x, rows, r, tile, j0, keys,
        [&](int64_t row, int64_t bin, int width, typename Largest::Kept found) {
          char* const to = (char*)(chunk.pooled_max + row * C + bin);
          const auto known = (typename Largest::Kept)numbers<Real, real_type<Real>>(to, width);
          put<Real, real_type<Real>>(to, (Vec<Real>)Largest::both(known, found), width);
        });
  if (x.pooled_mean)
    pool_pairs<FoldSum<Real>>(x, rows, r, tile, j0, keys,
                              [&](int64_t row, int64_t bin, int width, Vec<Real> found) {
                                double* const to = chunk.sum + row * C + bin;
                                for (int i = 0; i < width; ++i) to[i] += double(found[i]);
                              });
}

// Counts what is unmasked, and puts 0 for what is masked.
template <class E>
static void clear_masked(const PairMatrix& x, const PairReductions<E>& r, ReduceMemory<E>& m,
                         typename E::Real* tile, int64_t j0, int keys, PairChunk<E>& chunk) {
  typedef typename E::Real Real;
  for (int j = 0; j < keys; ++j)
    for (int v = 0; v < m.rows.vectors; ++v) {
      Vec<Real>& value = vector_at<E>(tile, j, v);
      const Int<Real> masked = is_masked<Real>(value);
      m.score(j, v) = masked ? Vec<Real>{} : Vec<Real>{} + Real(1);
      value = masked ? Vec<Real>{} : value;
    }
  if (has_picture(x))
    pool_pairs<FoldSum<Real>>(x, m.rows, r, m.scores, j0, keys,
                              [&](int64_t row, int64_t bin, int width, Vec<Real> found) {
                                for (int i = 0; i < width; ++i) {
                                  const int64_t at = row * x.bins[1] + bin + i;
                                  if (found[i] > 0) chunk.seen[at] = 1;
                                  if (x.pooled_mean) chunk.unmasked[at] += double(found[i]);
                                }
                              });
}

// The memory of the tiles of queries that are reduced at a time.
template <class E>
static PairMemory<E>* pair_memories(const PairMatrix& x, const Reduce& of_top, Scratch& scratch) {
  PairMemory<E>* const tiles = scratch.take<PairMemory<E>>(tiles_together(x));
  for (int i = 0; i < tiles_together(x); ++i) {
    const PairMemory<E> tile(x, of_top, scratch);
    if (!scratch.measures()) new (tiles + i) PairMemory<E>(tile);
  }
  return tiles;
}

// Runs all reductions over a tile of keys.
template <class E>
static void reduce_values(const PairMatrix& x, const Reduce& of_top, PairMemory<E>& m,
                          PairReductions<E>& r, int64_t j0, int keys, Seen seen,
                          PairChunk<E>& chunk) {
  typedef typename E::Real Real;
  Real* const tile = m.values + m.at(j0);
  if (x.k) keep_largest_of_rows(of_top, m.m, tile, j0, keys);
  if (x.n) find_largest(x, m.m.rows, tile, j0, keys, r);
  if (!has_picture(x) && !x.received && !x.received_max) return;
  if (seen != Seen::all)
    clear_masked(x, r, m.m, tile, j0, keys, chunk);
  else if (has_picture(x))
    count_all(x, m.m.rows, r, j0, keys, chunk);
  pool_values(x, m.m.rows, r, tile, j0, keys, chunk);
  const auto value = [&](int j, int v) {
    return *(const Vec<Real>*)(tile + j * E::rows + v * E::lanes);
  };
  if (x.received) fold_columns<E>(m.m.rows.vectors, keys, chunk.received + j0, value, Sum());
  if (x.received_max)
    fold_columns<E>(m.m.rows.vectors, keys, chunk.received + j0, value, LargerInSize());
}

template <class E>
static void run_reduce_pairs(const void* pass, int64_t task, char* memory, const Stop& stop) {
  const PairMatrix& x = *(const PairMatrix*)pass;
  const Reduce of_top = reduce_of(x.terms[0], x.k);
  Scratch scratch(memory);
  PairMemory<E>* const tiles = pair_memories<E>(x, of_top, scratch);
  PairReductions<E> r(x, scratch);
  const int64_t rows = tiles_together(x) * E::rows, at = pair_chunks<E>(x) - 1 - task;
  PairChunk<E> chunk = pair_chunk<E>(x, at);
  std::memset((void*)(x.chunks + at * bytes_of_pair_chunk<E>(x)), 0,
              size_t(bytes_of_pair_chunk<E>(x)));
  for (int64_t bin = 0; has_picture(x) && bin <= x.bins[1]; ++bin)
    r.edges[bin] = bin * x.extent[1] / x.bins[1];
  for (int64_t row = chunk.begin; row < chunk.end; row += rows) {
    if (stopped(stop)) return;
    const TileConfiguration<E::tiles> configuration;
    for (int64_t i = 0; has_picture(x) && i < rows && row + i < chunk.end; ++i)
      r.row_bins[i] = bin_of(row + i, x.extent[0], x.bins[0]) - chunk.first_bin;
    compute_values(x, row, chunk.end, tiles, [&](auto& m, int64_t j0, int keys, Seen seen) {
      r.row_bin = r.row_bins + (&m - tiles) * E::rows;
      reduce_values(x, of_top, m, r, j0, keys, seen, chunk);
    });
    for (int64_t i = 0; x.k && i < rows && row + i < chunk.end; ++i)
      write_largest(x, of_top, tiles[i / E::rows].m, int(i % E::rows));
  }
  if (!x.n) return;
  keep_largest(x, r);
  *chunk.count = r.count;
  for (int64_t i = 0; i < r.count; ++i) chunk.pairs[i] = r.pairs[i];
}

// Merges a row of bins of the chunks from `from` to `end`, which have its rows.
template <class E>
__attribute__((hot, noinline)) static void collect_bins(const PairMatrix& x, int64_t row,
                                                        const PairChunk<E>* from,
                                                        const PairChunk<E>* end) {
  typedef typename E::Real Real;
  typedef FoldLargest<Real> Largest;
  const int64_t C = x.bins[1];
  const Vec<Real> nan = broadcast(std::numeric_limits<Real>::quiet_NaN());
  for (int64_t i = 0; i < C; i += E::lanes) {
    const int n = int(C - i < E::lanes ? C - i : E::lanes);
    Int<Real> seen = {};
    typename Largest::Kept largest = {};
    double sum[E::lanes] = {}, unmasked[E::lanes] = {};
    for (const PairChunk<E>* chunk = from; chunk < end; ++chunk) {
      const int64_t at = (row - chunk->first_bin) * C + i;
      seen |= seen_lanes<Real>(chunk->seen + at);
      if (x.pooled_max)
        largest = Largest::both(largest, (typename Largest::Kept)numbers<Real, real_type<Real>>(
                                             (const char*)(chunk->pooled_max + at), n));
      for (int j = 0; x.pooled_mean && j < n; ++j)
        sum[j] += chunk->sum[at + j], unmasked[j] += chunk->unmasked[at + j];
    }
    const auto write = [&](void* bins, Vec<Real> found) {
      put<Real, real_type<Real>>((char*)((Real*)bins + row * C + i), seen ? found : nan, n);
    };
    if (x.pooled_max) write(x.pooled_max, Largest::number(largest));
    if (!x.pooled_mean) continue;
    Vec<Real> mean;
    for (int j = 0; j < E::lanes; ++j) mean[j] = Real(sum[j] / unmasked[j]);
    write(x.pooled_mean, mean);
  }
}

// The chunks of a matrix, and the strongest pairs of all of them.
template <class E>
struct Collected {
  int64_t count;
  PairChunk<E>* chunks;
  SignedPair* pairs;

  Collected(const PairMatrix& x, Scratch& scratch)
      : count(pair_chunks<E>(x)),
        chunks(scratch.take<PairChunk<E>>(count)),
        pairs(scratch.take<SignedPair>(count * x.n)) {}
};

// Compiled for size, as `run_collect`.
template <class E>
__attribute__((cold)) static void run_collect_pairs(const void* pass, int64_t, char* memory,
                                                    const Stop&) {
  typedef typename E::Real Real;
  const PairMatrix& x = *(const PairMatrix*)pass;
  Scratch scratch(memory);
  const Collected<E> of(x, scratch);
  for (int64_t c = 0; c < of.count; ++c) of.chunks[c] = pair_chunk<E>(x, c);
  const PairChunk<E>*from = of.chunks, *const last = of.chunks + of.count;
  for (int64_t row = 0; has_picture(x) && row < x.bins[0]; ++row) {
    while (from < last && bin_of(from->end - 1, x.extent[0], x.bins[0]) < row) ++from;
    const PairChunk<E>* end = from;
    while (end < last && end->first_bin <= row) ++end;
    collect_bins(x, row, from, end);
  }
  SignedPair* const all = of.pairs;
  int64_t count = 0;
  for (const PairChunk<E>* one = of.chunks; one < last; ++one) {
    const PairChunk<E>& chunk = *one;
    for (int64_t j = 0; x.received && j < x.Lk; ++j) x.received[j] += double(chunk.received[j]);
    for (int64_t j = 0; x.received_max && j < x.Lk; ++j)
      x.received_max[j] = LargerInSize()(x.received_max[j], double(chunk.received[j]));
    for (int64_t i = 0; x.n && i < *chunk.count; ++i) all[count++] = chunk.pairs[i];
  }
  std::sort(all, all + count, Stronger());
  for (int64_t i = 0; i < x.n; ++i) {
    const SignedPair pair = i < count ? all[i] : SignedPair{{0, -1, -1}, 0};
    x.pair_query[i] = pair.query, x.pair_key[i] = pair.key;
    ((Real*)x.pair_value)[i] = Real(pair.value);
  }
}

static Job reduce_pairs(const PairMatrix& x) {
  return by_computed<Job>(x.terms[0].problem->type, [&]<class E>(E) -> Job {
    Scratch scratch(nullptr);
    pair_memories<E>(x, reduce_of(x.terms[0], x.k), scratch);
    PairReductions<E> r(x, scratch);
    return {pair_chunks<E>(x), scratch.taken(), run_reduce_pairs<E>, &x};
  });
}

static Job collect_pairs(const PairMatrix& x) {
  return by_computed<Job>(x.terms[0].problem->type, [&]<class E>(E) -> Job {
    Scratch scratch(nullptr);
    const Collected<E> memory(x, scratch);
    return {1, scratch.taken(), run_collect_pairs<E>, &x};
  });
}

static int64_t pair_chunk_bytes(const PairMatrix& x) {
  return by_computed<int64_t>(x.terms[0].problem->type, [&]<class E>(E) -> int64_t {
    return pair_chunks<E>(x) * bytes_of_pair_chunk<E>(x);
  });
}

}  // namespace regard::REGARD_NAMESPACE
