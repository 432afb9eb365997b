// Reductions over columns, heatmap bins and heads: partial results of each chunk of rows, merged in
// the order of the rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "mathematics-inl.h"
#include "rows-inl.h"

namespace regard::REGARD_NAMESPACE {

static bool has_heatmap(const Reduce& r) { return r.pooled_max || r.pooled_mass; }

static bool has_linear_columns(const Reduce& r) {
  return r.transposed || r.blocks || r.blocks_max || r.diagonals;
}

static bool has_columns(const Reduce& r) {
  return r.received || r.received_max || has_heatmap(r) || r.n || has_linear_columns(r);
}

// Whether W^T y has so few columns that each is a sum over the lanes; else columns are in the
// lanes.
static inline bool is_folded(int64_t columns) { return columns <= 3; }

// Numbers of a chunk's W^T y for each key, and of y for each query.
template <class E>
static int64_t transposed_width(const Reduce& r) {
  const int64_t columns = r.transposed_with.columns;
  return is_folded(columns) ? columns : (columns + E::lanes - 1) / E::lanes * E::lanes;
}

// The most bytes of the chunks of a head: where one has many numbers there are fewer.
constexpr int64_t kChunkBytes = int64_t{256} << 20;

// How many rows of a head are looked at.
static int64_t rows_of_head(const Reduce& r) { return r.rows ? r.row_count : r.problem->Lq; }

// Rows of a chunk, whatever the number of heads and threads: 512 where all of them must be merged.
template <class E>
static int64_t chunk_rows(const Reduce& r) {
  const int64_t Lq = rows_of_head(r);
  const bool merged = r.received || r.received_max || r.pooled_mass || r.n || has_linear_columns(r);
  constexpr int64_t tile = kVectors * E::lanes;  // that of the second pass, in the forward pass too
  const int64_t least = merged ? 512 : tile, sixteenth = (Lq + 15) / 16;
  int64_t rows = sixteenth > least ? sixteenth : least;
  const int64_t numbers = (r.transposed ? r.problem->Lk * transposed_width<E>(r) : 0) +
                          (r.blocks || r.blocks_max ? r.block_counts[0] * r.block_counts[1] : 0);
  const int64_t bytes = numbers * int64_t(sizeof(typename E::Real));
  if (bytes * ((Lq + rows - 1) / rows) > kChunkBytes) {
    const int64_t most = kChunkBytes / bytes > 1 ? kChunkBytes / bytes : 1;
    rows = (Lq + most - 1) / most;
  }
  return (rows + tile - 1) / tile * tile;
}

template <class E>
static int64_t chunks_of(const Reduce& r) {
  return (rows_of_head(r) + chunk_rows<E>(r) - 1) / chunk_rows<E>(r);
}

// The bin of a cell, of n cells in all: bin i has the cells from i * n / bins on.
static inline int64_t bin_of(int64_t cell, int64_t n, int64_t bins) {
  return ((cell + 1) * bins - 1) / n;
}

// The bin of a query (axis 0) or key (axis 1), by its place in the whole that bins are of.
static inline int64_t bin_at(const Reduce& r, int axis, int64_t cell) {
  return bin_of(r.bin_start[axis] + cell * r.bin_step[axis], r.bin_extent[axis], r.bins[axis]);
}

// The place in the whole at which a bin begins.
static inline int64_t start_of_bin(const Reduce& r, int axis, int64_t bin) {
  return bin * r.bin_extent[axis] / r.bins[axis];
}

// The first query or key that is in a bin or after it.
static inline int64_t first_of_bin(const Reduce& r, int axis, int64_t bin) {
  const int64_t ahead = start_of_bin(r, axis, bin) - r.bin_start[axis];
  const int64_t step = r.bin_step[axis], count = axis ? r.problem->Lk : r.problem->Lq;
  const int64_t cell = ahead <= 0 ? 0 : step == 1 ? ahead : (ahead + step - 1) / step;
  return cell < count ? cell : count;
}

// The keys of each bin, where all have as many, next to each other, and one begins with key 0;
// else 0.
static inline int64_t keys_per_bin(const Reduce& r) {
  if (r.bin_extent[1] % r.bins[1] || r.bin_step[1] != 1) return 0;
  const int64_t keys = r.bin_extent[1] / r.bins[1];
  return r.bin_start[1] % keys ? 0 : keys;
}

struct Pair {
  double weight;
  int64_t query, key;
};

// The order of pairs: of equal weights the lower query first, then the lower key. Comparators are
// types of this namespace: instances of std::sort are then of this target alone.
struct Stronger {
  bool operator()(const Pair& x, const Pair& y) const {
    if (x.weight != y.weight) return x.weight > y.weight;
    return x.query != y.query ? x.query < y.query : x.key < y.key;
  }
};

// The partial results of one chunk of a head.
template <class E>
struct Chunk {
  typedef typename E::Real Real;
  Real* received;     // [Lk]
  Real* pooled[2];    // [2][bins[1]]: rows of bins shared with other chunks; by heatmap: max, mass
  Pair* pairs;        // [n]
  int64_t* count;     // of the pairs
  Real* transposed;   // [Lk][transposed_width], or [columns][Lk] where it is folded
  Real* blocks;       // [query blocks][key blocks]
  double* diagonals;  // [distances]

  Chunk(const Reduce& r, Scratch& scratch) {
    received = scratch.take<Real>(r.received || r.received_max ? r.problem->Lk : 0);
    pooled[0] = scratch.take<Real>(r.pooled_max ? 2 * r.bins[1] : 0);
    pooled[1] = scratch.take<Real>(r.pooled_mass ? 2 * r.bins[1] : 0);
    pairs = scratch.take<Pair>(r.n);
    count = scratch.take<int64_t>(1);
    transposed = scratch.take<Real>(r.transposed ? r.problem->Lk * transposed_width<E>(r) : 0);
    const bool has_blocks = r.blocks || r.blocks_max;
    blocks = scratch.take<Real>(has_blocks ? r.block_counts[0] * r.block_counts[1] : 0);
    diagonals = scratch.take<double>(r.diagonals ? r.distances : 0);
  }
};

template <class E>
static int64_t one_chunk_bytes(const Reduce& r) {
  Scratch scratch(nullptr);
  Chunk<E> chunk(r, scratch);
  return has_columns(r) ? scratch.taken() : 0;
}

template <class E>
static Chunk<E> chunk_at(const Reduce& r, int64_t head, int64_t i) {
  Scratch scratch(r.chunks + ((head - r.head0) * chunks_of<E>(r) + i) * one_chunk_bytes<E>(r));
  return Chunk<E>(r, scratch);
}

// A task: a chunk of the rows of a head, and its partial results.
template <class E>
struct RowChunk {
  int64_t head, begin, end;
  Chunk<E> found;
};

template <class E>
static RowChunk<E> chunk_of_task(const Reduce& r, int64_t task) {
  const int64_t chunks = chunks_of<E>(r), head = r.head0 + task / chunks,
                c = chunks - 1 - task % chunks, rows = rows_of_head(r);
  const int64_t begin = c * chunk_rows<E>(r), end = begin + chunk_rows<E>(r);
  Scratch none(nullptr);
  return {head, begin, end < rows ? end : rows,
          has_columns(r) ? chunk_at<E>(r, head, c) : Chunk<E>(r, none)};
}

// The initial value of a bin: the identity of sum or max.
template <class Real>
constexpr Real empty_bin_value(bool mass) {
  return mass ? Real(0) : -kInf<Real>;
}

// A row of bins in one chunk, whose rows are `begin` to `end`.
struct BinRow {
  int64_t bin;
  bool earlier, later;  // whether chunks before and after share it

  BinRow(const Reduce& r, int64_t begin, int64_t end, int64_t bin) : bin(bin) {
    earlier = first_of_bin(r, 0, bin) < begin;
    later = first_of_bin(r, 0, bin + 1) > end;
  }

  // Where the chunk accumulates it: in the heatmap itself, unless it is shared.
  template <class E>
  typename E::Real* in(const Reduce& r, int64_t head, const Chunk<E>& chunk, bool mass) const {
    typedef typename E::Real Real;
    const int64_t C = r.bins[1];
    if (earlier || later) return chunk.pooled[mass] + (earlier ? 0 : C);
    return (Real*)(mass ? r.pooled_mass : r.pooled_max) + (head * r.bins[0] + bin) * C;
  }

  template <class E>
  void clear_bins(const Reduce& r, int64_t head, const Chunk<E>& chunk, bool mass) const {
    typename E::Real* to = in(r, head, chunk, mass);
    for (int64_t x = 0; x < r.bins[1]; ++x) to[x] = empty_bin_value<typename E::Real>(mass);
  }
};

// Whether any query of a bin attends to any key of it; `has_nan`: one whose weights are NaN.
template <class E>
static bool bin_attends(const Reduce& r, int64_t head, int64_t row_bin, int64_t column_bin,
                        bool has_nan) {
  typedef typename E::Real Real;
  const Problem& p = *r.problem;
  const int64_t j0 = first_of_bin(r, 1, column_bin), b = head / p.Hq;
  const int64_t j1 = first_of_bin(r, 1, column_bin + 1);
  const int64_t i1 = first_of_bin(r, 0, row_bin + 1);
  for (int64_t i = first_of_bin(r, 0, row_bin); i < i1; ++i) {
    const int64_t at = interval_at(p, b, head % p.Hq, i), first = p.first[at], last = p.last[at];
    const int64_t low = first > j0 ? first : j0, high = last < j1 ? last : j1;
    const Real total = ((const Real*)r.total)[head * p.Lq + i];
    if (low >= high || (has_nan && total == total)) continue;
    const int64_t h = head % p.Hq;
    for (int64_t j = next_uncut(p, h, i, low); j < high; j = next_uncut(p, h, i, j + 1))
      if ((!p.key_ids || p.query_ids[b * p.Lq + i] == p.key_ids[b * p.Lk + j]) &&
          (!p.mask || *(p.mask.at(b, head % p.Hq, i) + j * p.mask.strides[3])))
        return true;
  }
  return false;
}

template <class E>
static int64_t collect_bytes(const Reduce& r) {
  const int64_t pairs = chunks_of<E>(r) * r.n * int64_t(sizeof(Pair));
  const int64_t bins = r.bins[1] + E::lanes;  // and what is read past the last
  return pairs > bins ? pairs : bins;
}

// The lanes of some bins that are seen, of a byte for each.
template <class Real>
static inline Int<Real> seen_lanes(const uint8_t* seen) {
  return __builtin_convertvector(read<typename Simd<Real>::Byte>(seen), Int<Real>) != 0;
}

// Merges the heatmaps of a head's chunks, takes logarithms, and sets bins without a visible pair to
// NaN; `seen` has room for a row of bins.
template <class E, bool mass>
__attribute__((hot, noinline)) static void collect_heatmap(const Reduce& r, int64_t head,
                                                           bool has_nan, uint8_t* seen) {
  typedef typename E::Real Real;
  const Problem& p = *r.problem;
  const int64_t chunks = chunks_of<E>(r), height = p.Lq;
  const int64_t R = r.bins[0], C = r.bins[1];
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Real* pooled = (Real*)(mass ? r.pooled_mass : r.pooled_max) + head * R * C;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t begin = c * chunk_rows<E>(r);
    const int64_t end = begin + chunk_rows<E>(r) < height ? begin + chunk_rows<E>(r) : height;
    const Chunk<E> chunk = chunk_at<E>(r, head, c);
    const int64_t first = bin_at(r, 0, begin), last = bin_at(r, 0, end - 1);
    for (int64_t bin = first; bin <= last; bin += last > first ? last - first : 1) {
      const BinRow row(r, begin, end, bin);
      if (!row.earlier && !row.later) continue;
      const Real* part = row.in(r, head, chunk, mass);
      Real* sum = pooled + bin * C;
      for (int64_t x = 0; x < C; ++x) {
        const Real before = row.earlier ? sum[x] : empty_bin_value<Real>(mass);
        sum[x] = mass ? before + part[x] : part[x] > before ? part[x] : before;
      }
    }
  }
  for (int64_t y = 0; y < R; ++y) {
    Real* row = pooled + y * C;
    const int64_t top = first_of_bin(r, 0, y), bottom = first_of_bin(r, 0, y + 1);
    const int64_t queries = start_of_bin(r, 0, y + 1) - start_of_bin(r, 0, y);  // of the whole
    int64_t seen_low = C, seen_high = 0;
    std::memset(seen, 0, size_t(C));  // which bins the intervals reach
    for (int64_t i = top; i < bottom; ++i) {
      const int64_t at = interval_at(p, head / p.Hq, head % p.Hq, i);
      const int64_t low = p.first[at], high = p.last[at];
      if (low >= high) continue;
      const int64_t from = bin_at(r, 1, low), to = bin_at(r, 1, high - 1) + 1;
      std::memset(seen + from, 1, size_t(to - from));
      if (from < seen_low) seen_low = from;
      if (to > seen_high) seen_high = to;
    }
    for (int64_t x = seen_low; r.bin_step[1] > 1 && x < seen_high; ++x)  // which have any key
      seen[x] &= first_of_bin(r, 1, x) < first_of_bin(r, 1, x + 1);
    std::fill(row, row + seen_low, Real(nan));
    for (int64_t x = seen_low; x < seen_high; x += E::lanes) {
      char* const at = (char*)(row + x);
      const Vec<Real> part = numbers<Real, real_type<Real>>(at, seen_high - x);
      const Vec<Real> logs = mass ? log(part / Real(queries)) : part * Real(kLn2);
      const Vec<Real> found = seen_lanes<Real>(seen + x) ? logs : broadcast(Real(nan));
      put<Real, real_type<Real>>(at, found, seen_high - x);
    }
    std::fill(row + (seen_high > seen_low ? seen_high : C), row + C, Real(nan));
    if (p.mask || p.key_ids || any_cut(p))
      for (int64_t x = 0; x < C; ++x)
        if (row[x] == -kInf<Real> && !bin_attends<E>(r, head, y, x, false)) row[x] = Real(nan);
    if (has_nan)
      for (int64_t x = 0; x < C; ++x)
        if (bin_attends<E>(r, head, y, x, true)) row[x] = Real(nan);
  }
}

// The larger; NaN where either is.
struct LargerOrNan {
  template <class V>
  V operator()(V x, V y) const {
    return (y > x) | (y != y) ? y : x;
  }
};

// Merges the linear forms of the chunks of a head, in their order.
template <class E>
static void collect_linear(const Reduce& r, int64_t head) {
  const int64_t Lk = r.problem->Lk, columns = r.transposed_with.columns;
  const int64_t width = transposed_width<E>(r), cells = r.block_counts[0] * r.block_counts[1];
  for (int64_t c = 0; c < chunks_of<E>(r); ++c) {
    const Chunk<E> part = chunk_at<E>(r, head, c);
    if (r.transposed)
      for (int64_t j = 0; j < Lk; ++j)
        for (int64_t x = 0; x < columns; ++x)
          r.transposed[(head * Lk + j) * columns + x] +=
              double(part.transposed[is_folded(columns) ? x * Lk + j : j * width + x]);
    for (int64_t x = 0; x < cells; ++x) {
      if (r.blocks) r.blocks[head * cells + x] += double(part.blocks[x]);
      if (r.blocks_max)
        r.blocks_max[head * cells + x] =
            LargerOrNan()(r.blocks_max[head * cells + x], double(part.blocks[x]));
    }
    if (r.diagonals)
      for (int64_t x = 0; x < r.distances; ++x)
        r.diagonals[head * r.distances + x] += part.diagonals[x];
  }
}

// But for heatmaps it takes no time: it is compiled for size.
template <class E>
__attribute__((cold)) static void run_collect(const void* pass, int64_t task, char* memory,
                                              const Stop&) {
  typedef typename E::Real Real;
  const Reduce& r = *(const Reduce*)pass;
  const Problem& p = *r.problem;
  const int64_t head = r.head0 + task, chunks = chunks_of<E>(r);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  bool has_nan = false;
  for (int64_t i = 0; i < p.Lq; ++i) {
    const Real total = ((const Real*)r.total)[head * p.Lq + i];
    has_nan |= total != total;
  }
  if (double* received = r.received ? r.received : r.received_max) {
    received += head * p.Lk;
    for (int64_t j = 0; j < p.Lk; ++j) received[j] = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const Real* part = chunk_at<E>(r, head, c).received;
      for (int64_t j = 0; j < p.Lk; ++j) {
        const double x = double(part[j]);
        received[j] = r.received ? received[j] + x : x > received[j] ? x : received[j];
      }
    }
    if (has_nan && r.received_max)
      for (int64_t i = 0; i < p.Lq; ++i) {
        const Real total = ((const Real*)r.total)[head * p.Lq + i];
        const int64_t b = head / p.Hq, at = interval_at(p, b, head % p.Hq, i);
        if (total == total) continue;
        for (int64_t j = p.first[at]; j < p.last[at]; ++j)
          if ((!p.key_ids || p.query_ids[b * p.Lq + i] == p.key_ids[b * p.Lk + j]) &&
              (!p.mask || *(p.mask.at(b, head % p.Hq, i) + j * p.mask.strides[3])) &&
              !is_cut(p, head % p.Hq, i, j))
            received[j] = nan;
      }
  }
  if (has_linear_columns(r)) collect_linear<E>(r, head);
  if (r.pooled_max) collect_heatmap<E, false>(r, head, has_nan, (uint8_t*)memory);
  if (r.pooled_mass) collect_heatmap<E, true>(r, head, has_nan, (uint8_t*)memory);
  if (r.n) {
    Pair* all = (Pair*)memory;
    int64_t count = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const Chunk<E> chunk = chunk_at<E>(r, head, c);
      for (int64_t i = 0; i < *chunk.count; ++i) all[count++] = chunk.pairs[i];
    }
    std::sort(all, all + count, Stronger());
    for (int64_t i = 0; i < r.n; ++i) {
      const Pair pair = i < count ? all[i] : Pair{0, -1, -1};
      r.pair_query[head * r.n + i] = pair.query;
      r.pair_key[head * r.n + i] = pair.key;
      ((Real*)r.pair_weight)[head * r.n + i] = Real(pair.weight);
    }
  }
}

static Job collect(const Reduce& r) {
  return by_computed<Job>(r.problem->type, [&]<class E>(E) -> Job {
    return {has_columns(r) ? r.head1 - r.head0 : 0, collect_bytes<E>(r), run_collect<E>, &r};
  });
}

static int64_t chunk_bytes(const Reduce& r) {
  return by_computed<int64_t>(r.problem->type, [&]<class E>(E) -> int64_t {
    return one_chunk_bytes<E>(r) * chunks_of<E>(r);
  });
}

}  // namespace regard::REGARD_NAMESPACE
