// The gradient of the weights by a rule of query and key, see WeightGradient: dP of vector v of a
// tile of queries, key by key in rising order.
#pragma once

#include <cstdint>
#include <cstring>

#include "divergences-inl.h"

namespace regard::REGARD_NAMESPACE {

static inline bool is_divergence(Rule rule) { return rule >= Rule::kl; }

// What a rule reads of a tile.
template <class E>
struct RuleMemory {
  typedef typename E::Real Real;
  Real* number;                // [rows]; of blocks 1, or 0 for none
  int64_t* position;           // [rows]: among the keys
  const Real* table[E::rows];  // of diagonals, of the blocks of keys, or other_0
  int64_t place[E::rows];      // of the distance to key 0 in the table
  Real* factors;               // [columns][rows]
  Real* cells;                 // [kMostCells][lanes]: of a vector of queries, by block
  int64_t first_cell, cell_count;
  Side<E> sides[2];  // whose tiles it reads

  RuleMemory(const WeightGradient& g, Scratch& scratch)
      : sides{Side<E>(g.sides, 0, scratch), Side<E>(g.sides, 1, scratch)} {
    number = scratch.take<Real>(E::rows);
    position = scratch.take<int64_t>(E::rows);
    factors = scratch.take<Real>(g.rule == Rule::vectors ? g.other.columns * E::rows : 0);
    cells = scratch.take<Real>(g.rule == Rule::blocks ? kMostCells * E::lanes : 0);
  }

  static constexpr int64_t kMostCells = 2 * kKeys;
};

// Whether the tiles of a side are read: not of P alone, whose exponents are known, but for a
// comparison of both, which must be equal where the scores are.
static inline bool is_read(const WeightGradient& g, int side) {
  const bool is_sum = side != g.side || g.sides.term_count[side] > 1;
  return is_divergence(g.rule) && (is_sum || g.rule == Rule::total_variation);
}

template <class E>
static void start_rule(const Problem& p, const WeightGradient& g, const Rows<E>& rows,
                       RuleMemory<E>& m) {
  typedef typename E::Real Real;
  const Real* const numbers = (const Real*)g.numbers;
  const int64_t columns = g.rule == Rule::vectors ? g.other.columns : 0;
  std::memset((void*)m.factors, 0, size_t(columns * E::rows) * sizeof(Real));
  for (int i = 0; i < E::rows; ++i) {
    m.number[i] = 0, m.position[i] = 0;
    m.table[i] = columns ? (const Real*)g.other.data : numbers, m.place[i] = 0;
    if (i >= rows.count) continue;
    const int64_t h = rows.head[i], q = rows.index[i], head = rows.b * p.Hq + h;
    const int64_t position = g.starts[rows.b] + q * g.query_step, row = head * p.Lq + q;
    if (is_divergence(g.rule)) {
      m.number[i] = numbers[row];
      continue;
    }
    m.position[i] = position;
    if (g.rule == Rule::logarithms || g.rule == Rule::distances) m.number[i] = numbers[row];
    if (columns) m.table[i] += rows.b * g.other.strides[0] + h * g.other.strides[1];
    for (int64_t c = 0; c < columns; ++c) m.factors[c * E::rows + i] = numbers[row * columns + c];
    if (g.rule == Rule::diagonals) {
      m.table[i] = numbers + head * g.distances;
      m.place[i] = (position - g.first_distances[rows.b]) / g.distance_step;
    }
    if (g.rule != Rule::blocks) continue;
    const int64_t block = g.query_blocks ? g.query_blocks[rows.b * p.Lq + q] : 0;
    m.number[i] = block < 0 ? 0 : 1;
    m.table[i] = numbers + (head * g.block_counts[0] + (block < 0 ? 0 : block)) * g.block_counts[1];
  }
  for (int side = 0; side < 2 && is_divergence(g.rule); ++side)
    start_side(g.sides, m.sides[side], rows.index[0]);
}

// Fills a tile of both sides of a divergence. Finds its range of
// blocks, where these change so often that it is better to have the numbers of all in the lanes.
template <class E>
static void start_keys(const Problem& p, const WeightGradient& g, const Rows<E>& rows, int64_t j0,
                       int keys, RuleMemory<E>& m) {
  for (int side = 0; side < 2; ++side)
    if (is_read(g, side) && !fill_tile(m.sides[side], j0, keys)) mask_tile(m.sides[side], keys);
  m.cell_count = 0;
  if (g.rule != Rule::blocks || !g.query_blocks) return;
  const int64_t* const ids = g.key_blocks + rows.b * p.Lk + j0;
  int64_t low = ids[0], high = ids[0], changes = 0;
  for (int j = 1; j < keys; ++j) {
    low = ids[j] < low ? ids[j] : low, high = ids[j] > high ? ids[j] : high;
    changes += ids[j] != ids[j - 1];
  }
  m.first_cell = low > 0 ? low : 0;
  const int64_t count = high + 1 - m.first_cell;
  if (changes >= 16 && count <= m.kMostCells && count <= 2 * changes) m.cell_count = count;
}

// Whether all rows of vector v have one table.
template <class E>
static bool has_one_table(const Rows<E>& rows, const RuleMemory<E>& m, int v) {
  bool same = true;
  for (int i = v * E::lanes; i < (v + 1) * E::lanes && i < rows.count; ++i)
    same &= m.table[i] == m.table[v * E::lanes];
  return same;
}

// Number `at` of the table of each row of a vector.
template <class R>
REGARD_INLINE static Vec<R> numbers_of_rows(const R* const* table, bool same, int64_t at) {
  if (same) return broadcast(table[0][at]);
  Vec<R> found = {};
#pragma GCC unroll 16
  for (int i = 0; i < Simd<R>::lanes; ++i) found[i] = table[i][at];
  return found;
}

// dP of blocks: neighbouring keys of one block have the same.
template <class E>
class BlockGradient {
 public:
  typedef typename E::Real Real;

  BlockGradient(const Problem& p, const WeightGradient& g, const Rows<E>& rows,
                const RuleMemory<E>& m, int v, int64_t j0)
      : ids_(g.key_blocks ? g.key_blocks + rows.b * p.Lk + j0 : nullptr),
        j0_(j0),
        table_(m.table + v * E::lanes),
        some_(vector_at<E>(m.number, 0, v)),
        same_(has_one_table(rows, m, v)),
        cells_(m.cell_count && !same_ ? m.cells - m.first_cell * E::lanes : nullptr) {
    if (cells_) fill_cells(m);
  }

  Vec<Real> operator()(int j, Vec<Real>) {
    const int64_t block = ids_ ? ids_[j] : j0_ + j;
    if (block < 0) return Vec<Real>{};
    if (cells_) return *(const Vec<Real>*)(cells_ + block * E::lanes);
    if (block != last_) found_ = numbers_of_rows<Real>(table_, same_, block) * some_;
    last_ = block;
    return found_;
  }

 private:
  // [block][lanes] from rows of blocks.
  void fill_cells(const RuleMemory<E>& m) const {
    constexpr int n = E::lanes;
    for (int64_t cell = 0; cell < m.cell_count; cell += n) {
      Vec<Real> t[n];
      for (int i = 0; i < n; ++i)
        t[i] = numbers<Real, real_type<Real>>((const char*)(table_[i] + m.first_cell + cell),
                                              m.cell_count - cell);
      transpose(t);
      for (int i = 0; i < n; ++i) *(Vec<Real>*)(m.cells + (cell + i) * n) = t[i] * some_;
    }
  }

  const int64_t* const ids_;
  const int64_t j0_;
  const Real* const* const table_;  // of each row
  const Vec<Real> some_;
  const bool same_;
  const Real* const cells_;
  int64_t last_ = -1;
  Vec<Real> found_ = {};
};

// dP of diagonals: those of neighbouring queries and one key are neighbours too.
template <class E>
class DiagonalGradient {
 public:
  typedef typename E::Real Real;

  DiagonalGradient(const WeightGradient& g, const Rows<E>& rows, const RuleMemory<E>& m, int v,
                   int64_t j0)
      : table_(m.table + v * E::lanes),
        place_(m.place + v * E::lanes),
        count_(rows.count - v * E::lanes < E::lanes ? rows.count - v * E::lanes : E::lanes),
        distances_(g.distances),
        step_(g.key_step / g.distance_step),
        back_(j0 * step_) {
    bool neighbours = has_one_table(rows, m, v);
    for (int i = 1; i < count_; ++i) neighbours &= place_[i] == place_[0] + i;
    if (neighbours) last_ = distances_ - E::lanes;
  }

  Vec<Real> operator()(int j, Vec<Real>) const {
    const int64_t back = back_ + j * step_, at = place_[0] - back;
    if (at >= 0 && at <= last_) return load<Real>(table_[0] + at);
    Vec<Real> found = {};
    for (int i = 0; i < count_; ++i)
      if (place_[i] >= back && place_[i] - back < distances_)
        found[i] = table_[i][place_[i] - back];
    return found;
  }

 private:
  const Real* const* const table_;  // of each row
  const int64_t* const place_;
  const int count_;
  const int64_t distances_, step_, back_;
  int64_t last_ = -1;  // place from which as many distances as lanes can be loaded
};

// dP of vectors: their products.
template <class E>
class VectorGradient {
 public:
  typedef typename E::Real Real;

  VectorGradient(const WeightGradient& g, const Rows<E>& rows, const RuleMemory<E>& m, int v,
                 int64_t j0)
      : table_(m.table + v * E::lanes),
        factors_(m.factors + v * E::lanes),
        same_(has_one_table(rows, m, v)),
        columns_(g.other.columns),
        j0_(j0) {}

  Vec<Real> operator()(int j, Vec<Real>) const {
    Vec<Real> sum = {};
    for (int64_t c = 0; c < columns_; ++c)
      sum += *(const Vec<Real>*)(factors_ + c * E::rows) *
             numbers_of_rows<Real>(table_, same_, (j0_ + j) * columns_ + c);
    return sum;
  }

 private:
  const Real* const* const table_;  // of each row
  const Real* const factors_;
  const bool same_;
  const int64_t columns_, j0_;
};

// dP of a divergence, by the logarithms to base 2 of P, or of the sum it is in, and of the other.
template <class E>
class DivergenceGradient {
 public:
  typedef typename E::Real Real;

  DivergenceGradient(const WeightGradient& g, const RuleMemory<E>& m, int v)
      : rule_(g.rule),
        own_(is_read(g, g.side) ? m.sides[g.side].of[0].scores + v * E::lanes : nullptr),
        other_(m.sides[1 - g.side].of[0].scores + v * E::lanes),
        log_own_(m.sides[g.side], v),
        log_other_(m.sides[1 - g.side], v),
        log_total_(vector_at<E>(m.sides[g.side].of[0].normalisers.log_total, 0, v)),
        number_(vector_at<E>(m.number, 0, v)) {}

  Vec<Real> operator()(int j, Vec<Real> exponent) const {
    const Vec<Real> known =
        own_ ? log_own_(*(const Vec<Real>*)(own_ + j * E::rows)) : exponent - log_total_;
    const Vec<Real> own = larger(broadcast(Real(-1e4)), known);  // dP must be a number
    return number_ * slope(own, log_other_(*(const Vec<Real>*)(other_ + j * E::rows)));
  }

 private:
  Vec<Real> slope(Vec<Real> own, Vec<Real> other) const {
    const Vec<Real> by = own - other, none = {};
    if (rule_ == Rule::total_variation)
      return by > 0 ? none + Real(0.5) : by < 0 ? none - Real(0.5) : none;
    if (rule_ == Rule::jensen_shannon) {  // ln(2 P / (P + other)) / 2
      const Vec<Real> size = magnitude(by), high = by < 0 ? none - by : none;
      const Vec<Real> sum = log(Real(1) + exp2(none - size));
      return Real(0.5) * (Real(kLn2) * (Real(1) - high) - sum);
    }
    return other == -kInf<Real> ? none : by * Real(kLn2);
  }

  const Rule rule_;
  const Real *const own_, *const other_;
  const Logarithms<E> log_own_, log_other_;
  const Vec<Real> log_total_, number_;
};

// P dP where dP is the ratio -other / own of a Kullback-Leibler divergence: the other itself, times
// the share that P has of its sum. P may be too small for its type, and dP too large.
template <class E>
class RatioGradient {
 public:
  typedef typename E::Real Real;
  static constexpr bool is_product = true;

  RatioGradient(const WeightGradient& g, const RuleMemory<E>& m, int v, Vec<Real> inverse)
      : own_(is_read(g, g.side) ? m.sides[g.side].of[0].scores + v * E::lanes : nullptr),
        other_(m.sides[1 - g.side].of[0].scores + v * E::lanes),
        log_own_(m.sides[g.side], v),
        log_other_(m.sides[1 - g.side], v),
        log_inverse_(own_ ? log(inverse) * Real(1 / kLn2) : inverse),
        number_(vector_at<E>(m.number, 0, v)) {}

  Vec<Real> operator()(int j, Vec<Real> exponent) const {
    const Vec<Real> other = log_other_(*(const Vec<Real>*)(other_ + j * E::rows)), none = {};
    if (!own_) return exponent == -kInf<Real> ? none : none - number_ * exp2(other);
    const Vec<Real> own = log_own_(*(const Vec<Real>*)(own_ + j * E::rows));
    const Vec<Real> share = exponent + log_inverse_ - own;
    const Vec<Real> least = exponent < own ? exponent : own;
    return least == -kInf<Real> ? none : none - number_ * exp2(other + share);
  }

 private:
  const Real *const own_, *const other_;
  const Logarithms<E> log_own_, log_other_;
  const Vec<Real> log_inverse_, number_;
};

// Whether a rule gives P dP instead of dP.
template <class Gradient>
constexpr bool gives_products = requires { Gradient::is_product; };

// Calls `use` with a function that gives dP of a key, j0 + j, or P dP, for the exponent of 2 of its
// weights relative to the largest.
template <class E, class Use>
static void by_rule(const Problem& p, const WeightGradient& g, const Rows<E>& rows,
                    const RuleMemory<E>& m, int v, int64_t j0, Vec<typename E::Real> inverse,
                    Use use) {
  typedef typename E::Real Real;
  const Vec<Real> number = vector_at<E>(m.number, 0, v);
  if (g.rule == (g.side ? Rule::kl : Rule::reverse_kl))
    return use(RatioGradient<E>(g, m, v, inverse));
  if (is_divergence(g.rule)) return use(DivergenceGradient<E>(g, m, v));
  if (g.rule == Rule::blocks) return use(BlockGradient<E>(p, g, rows, m, v, j0));
  if (g.rule == Rule::diagonals) return use(DiagonalGradient<E>(g, rows, m, v, j0));
  if (g.rule == Rule::vectors) return use(VectorGradient<E>(g, rows, m, v, j0));
  if (g.rule == Rule::distances) {
    const Vec<Real> off = distances_from<E>(j0 * g.key_step, m.position, v);
    return use([&](int j, Vec<Real>) { return number * magnitude(off - Real(j * g.key_step)); });
  }
  if (g.rule == Rule::logarithms) {
    // The exponent is -inf where there is no weight, and dP must be a number.
    const Vec<Real> one = inverse == 0 ? Vec<Real>{} : number * (log(inverse) + Real(1));
    const Vec<Real> factor = number * Real(kLn2);
    return use([&](int, Vec<Real> exponent) {
      return one + factor * larger(broadcast(Real(-1e4)), exponent);
    });
  }
  use([](int, Vec<Real>) { return Vec<Real>{}; });
}

}  // namespace regard::REGARD_NAMESPACE
