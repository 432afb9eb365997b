// The forward pass: S^T = K Q^T, a softmax that runs over blocks of keys, O^T = V^T P^T. Nothing is
// ever summed across lanes.
//
// Where there is one block of queries the keys are computed in pieces, so that threads can share
// them; pieces are put together in their order. Source: Milakov & Gimelshein 2018; Dao et al. 2022.
#pragma once

#include <cstdint>

#include "weights-inl.h"

namespace regard::REGARD_NAMESPACE {

constexpr int64_t kPiece = 2048;  // keys
constexpr int64_t kSoon = 512;    // keys that are left when the memory of what follows is asked for

template <class E>
static int64_t row_blocks_of(const Problem& p) {
  return p.Hkv ? (p.Hq / p.Hkv * p.Lq + E::rows - 1) / E::rows : 0;
}

template <class E>
static int64_t pieces(const Problem& p) {
  return p.group_rows > E::rows || p.Lk <= kPiece ? 1 : (p.Lk + kPiece - 1) / kPiece;
}

// How many neighbouring blocks of rows one thread takes at once: up to eight, while every thread
// has eight turns and a turn is short enough to be waited for.
template <class E>
static int64_t blocks_at_once(const Forward& f) {
  const Problem& p = *f.problem;
  if (pieces<E>(p) > 1) return 1;
  const double products = double(E::rows) * double(p.Lk) * double(p.D + p.Dv);
  int64_t most = 8;
  while (most > 1 && (p.B * p.Hkv * row_blocks_of<E>(p) < most * 8 * f.threads ||
                      double(most) * products > 4e9))
    --most;
  return most;
}

// Keys and values as words, where they are not multiplied as they lie: those that neighbouring
// blocks of queries see are brought into them once.
template <class E>
struct LaidOut {
  typedef typename E::Word Word;
  static constexpr int64_t kMost = 4 << 20;  // bytes of a thread
  struct Part {
    int64_t head, low, high;
  };
  Part* part;              // what is there; 0, nothing of the first head, when the thread begins
  Word* keys = nullptr;    // [high - low][words(D)], or null
  Word* values = nullptr;  // [words(high - low)][Dv], or null: nothing is laid out

  LaidOut(const Forward& f, Scratch& scratch) {
    const Problem& p = *f.problem;
    const int64_t key_words = E::direct && p.D % E::pack == 0 ? 0 : p.Lk * E::words(p.D);
    const int64_t value_words = E::words(p.Lk) * p.Dv;
    part = scratch.take<Part>(1);  // at the beginning, where a thread's memory is kept
    if ((E::direct && E::pack == 1) || row_blocks_of<E>(p) < 2 ||
        (key_words + value_words) * int64_t(sizeof(Word)) > kMost)
      return;
    if (key_words) keys = scratch.take<Word>(key_words);
    values = scratch.take<Word>(value_words);
  }

  // Adds what is missing of the keys from `from` to `to`.
  void add(const Problem& p, int64_t b, int64_t kv, int64_t from, int64_t to) const {
    from -= from % E::pack, to += to < p.Lk ? to % E::pack : 0;
    const int64_t head = b * p.Hkv + kv;
    if (part->head != head || from < part->low || from > part->high) *part = {head, from, from};
    const int64_t high = part->high, there = high - part->low, n = to - high;
    if (n <= 0) return;
    if (keys)
      along<E>(p.key.at(b, kv, high), p.key.strides[2], n, p.D, keys + there * E::words(p.D));
    across<E>(p.value.at(b, kv, high), p.value.strides[2], n, p.Dv,
              values + there / E::pack * p.Dv);
    part->high = to;
  }
};

template <class E>
struct ForwardMemory {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  Rows<E> rows, next;
  Ahead ahead;
  State<E> state;
  Real* scores;   // [kKeys][rows]: scores, then weights
  Real* top;      // [rows]
  Word* weights;  // the weights as they are multiplied
  Word* keys;
  Word* values;
  uint32_t* kept;
  LaidOut<E> laid_out;

  ForwardMemory(const Forward& f, Scratch& scratch) : laid_out(f, scratch) {
    const Problem& p = *f.problem;
    rows.q = next.q = scratch.take<Word>(query_words<E>(p));
    scores = scratch.take<Real>(kKeys * E::rows);
    weights = E::pack == 1 ? (Word*)scores : scratch.take<Word>(kKeys / 2 * E::rows);
    state = state_in<E>(p, scratch.take<Real>(state_size<E>(p)));
    top = scratch.take<Real>(E::rows);
    keys = scratch.take<Word>(kKeys * E::words(p.D));
    values = scratch.take<Word>(kKeys * p.Dv);
    kept = p.threshold ? scratch.take<uint32_t>(kKeys * kKeptRows<E>) : nullptr;
  }
};

// Where the base of weights must rise, it rises by so many powers of two more: rescaling sums
// rounds them, which adds up where the largest score rises a little with every block.
constexpr int kMargin = 8;

// Moves what was summed so far to a new largest score.
template <class E>
static void rescale(const Problem& p, const Scaling<E>& scaling, const State<E>& state,
                    const typename E::Real* new_top, int v) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const auto at = [&](Real* x) -> Vec<Real>& { return *(Vec<Real>*)(x + v * n); };
  const Vec<Real> top = *(const Vec<Real>*)(new_top + v * n), old = at(state.base);
  at(state.top) = top;
  if (!greater(top, old)) return;
  const Vec<Real> none = Vec<Real>{} - kInf<Real>;  // of a row that has summed nothing yet
  const Vec<Real> higher = top + Real(kMargin) / scaling.factor;
  const Vec<Real> risen = ((old == none) | (higher == kInf<Real>)) ? top : higher;
  const Vec<Real> base = top > old ? risen : old;
  at(state.base) = base;
  if (!greater(old, none)) return;
  const Vec<Real> factor = exp2(scaling.exponent(old, scaling.base(base)));
  at(state.total) *= factor, at(state.rest) *= factor;
  if (E::pack > 1) at(state.rounded) *= factor;
  for (int64_t d = 0; d < p.Dv; ++d) at(state.out + d * E::rows) *= factor;
}

// Adds some weights of V vectors to the sums of their rows. A row may have one weight of 1 and a
// million of 1e-8: the sum of kSummed weights is rounded, and nothing after it is lost.
constexpr int kSummed = 8;
static inline int end_of_sum(int j, int high) {  // the same for any rows that are computed together
  const int end = (j / kSummed + 1) * kSummed;
  return end < high ? end : high;
}
template <class E, int V>
static void add_to_totals(const State<E>& state, const Vec<typename E::Real> (&sum)[V], int v) {
  typedef typename E::Real Real;
  for (int i = 0; i < V; ++i) {
    const int at = (v + i) * E::lanes;
    add_exactly(*(Vec<Real>*)(state.total + at), *(Vec<Real>*)(state.rest + at), sum[i]);
  }
}

#ifdef REGARD_PAIRS
// Turns the scores of V vectors into weights relative to the largest score, as pairs of
// neighbouring keys.
template <class E, int V>
static void softmax_pairs(const Scaling<E>& scaling, const State<E>& state, const float* scores,
                          int32_t* pairs, int v, int low, int high) {
  constexpr int n = E::lanes;
  F base[V], rounded[V] = {};
  for (int i = 0; i < V; ++i) base[i] = scaling.base(*(const F*)(state.base + (v + i) * n));
  const auto exponent = [&](int j, int i) {
    return scaling.exponent(*(const F*)(scores + j * E::rows + (v + i) * n), base[i]);
  };
  for (int j = low; j < high;) {
    F sum[V] = {};
    for (const int end = end_of_sum(j, high); j < end; j += 2) {
      F x[V], y[V];
      for (int i = 0; i < V; ++i) x[i] = exponent(j, i);
      for (int i = 0; i < V; ++i) y[i] = j + 1 < high ? exponent(j + 1, i) : F{} - kInf<float>;
      exp2_each(x);
      exp2_each(y);
      for (int i = 0; i < V; ++i) {
        const I pair = pairs_of(x[i], y[i]);
        *(I*)(pairs + j / 2 * E::rows + (v + i) * n) = pair;
        sum[i] += x[i] + y[i];
        rounded[i] = Pairs::add(rounded[i], pair, I{} + kOnes);
      }
    }
    add_to_totals<E, V>(state, sum, v);
  }
  for (int i = 0; i < V; ++i) *(F*)(state.rounded + (v + i) * n) += rounded[i];
}
#endif

// Without fused multiply-adds the product of a weight and a value is rounded before it is added,
// and takes 150 cycles where that makes it denormal. Multiplied by this power of two weights keep
// clear of it: of scores that spread over hundreds of nats, portable took 3 times as long.
template <class R>
constexpr R kLift = REGARD_LANES == 4 ? R(0x1p64f) : R(1);

// Turns the scores of V vectors into weights relative to the largest score, times `lift`, where
// they stand or as pairs.
template <class E, int V>
static void softmax(const Scaling<E>& scaling, const State<E>& state, typename E::Real* scores,
                    [[maybe_unused]] typename E::Word* pairs, typename E::Real lift, int v, int low,
                    int high) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
#ifdef REGARD_PAIRS
  if constexpr (E::pack > 1)
    if (pairs) return softmax_pairs<E, V>(scaling, state, scores, pairs, v, low, high);
#endif
  Vec<Real> base[V];
  for (int i = 0; i < V; ++i) base[i] = scaling.base(*(const Vec<Real>*)(state.base + (v + i) * n));
  const auto score = [&](int j, int i) -> Vec<Real>& {
    return *(Vec<Real>*)(scores + j * E::rows + (v + i) * n);
  };
  for (int j = low; j < high;) {
    Vec<Real> sum[V] = {};
    for (const int end = end_of_sum(j, high); j < end; ++j) {
      Vec<Real> x[V];
      for (int i = 0; i < V; ++i) x[i] = scaling.exponent(score(j, i), base[i]);
      exp2_each(x);
      if (kLift<Real> != 1)
        for (int i = 0; i < V; ++i) x[i] *= lift;
      for (int i = 0; i < V; ++i) score(j, i) = x[i], sum[i] += x[i];
    }
    add_to_totals<E, V>(state, sum, v);
  }
}

// Some neighbouring keys of a head, and which of the queries see them.
struct Block {
  int64_t kv, j0;
  int keys;
  Reach reach;
  bool simple;    // every query sees every key, and scores are the products
  bool laid_out;  // keys and values are there as words
};

template <class E>
static Block block_of(const Problem& p, const ForwardMemory<E>& m, int64_t kv, int64_t j0,
                      int64_t high, bool careful) {
  const int keys = int(high - j0 < kKeys ? high - j0 : kKeys);
  const Reach reach = reach_of(m.rows, j0, keys);
  return {kv,
          j0,
          keys,
          reach,
          reach.plain && raw_scores(p) && !p.mask && !p.key_ids,
          m.laid_out.values && !careful && j0 % E::pack == 0};
}

// Computes the scores of a block and raises the largest ones of the rows, and the base of their
// weights.
template <class E>
static void score_block(const Problem& p, const Scaling<E>& scaling, ForwardMemory<E>& m,
                        const Block& block, Ahead* ahead) {
  typedef typename E::Real Real;
  const Rows<E>& rows = m.rows;
  const Reach& reach = block.reach;
  const int64_t kv = block.kv, j0 = block.j0, words = E::words(p.D);
  const LaidOut<E>& there = m.laid_out;
  const Matrix k =
      block.laid_out && there.keys
          ? Matrix{there.keys + (j0 - there.part->low) * words,
                   words * int64_t(sizeof(typename E::Word))}
          : along<E>(p.key.at(rows.b, kv, j0), p.key.strides[2], block.keys, p.D, m.keys);
  __builtin_memcpy(m.top, m.state.top, sizeof(Real) * E::rows);
  if (block.simple && words <= kTerms && !few_queries<E>(p)) {
    multiply<typename E::Op, false, Into::set_and_maximum>(rows.vectors, rows.q, E::rows, k.data,
                                                           k.stride, words, block.keys, m.scores,
                                                           E::rows, m.top, ahead);
  } else {
    multiply_keys<E>(p, rows, reach, kv, j0, block.keys, k, m.scores, ahead);
    if (!block.simple) finish_scores<E>(p, rows, reach, scaling, j0, block.keys, m.scores, nullptr);
    for (int v = 0; v < rows.vectors; ++v) {
      Vec<Real> top = vector_at<E>(m.top, 0, v);
      for (int j = reach.low[v]; j < reach.high[v]; ++j)
        top = larger(vector_at<E>(m.scores, j, v), top);
      vector_at<E>(m.top, 0, v) = top;
    }
  }
  for (int v = 0; v < rows.vectors; ++v) rescale(p, scaling, m.state, m.top, v);
}

// Makes weights of the scores of a block; `pairs`, where they go straight to the values.
template <class E>
static void softmax_block(const Problem& p, const Scaling<E>& scaling, ForwardMemory<E>& m,
                          const Block& block, typename E::Word* pairs, typename E::Real lift) {
  const Reach& reach = block.reach;
  if (reach.plain && m.rows.vectors == kVectors)
    softmax<E, kVectors>(scaling, m.state, m.scores, pairs, lift, 0, 0, block.keys);
  else
    for (int v = 0; v < m.rows.vectors; ++v)
      softmax<E, 1>(scaling, m.state, m.scores, pairs, lift, v, reach.low[v], reach.high[v]);
  if (!p.threshold) return;
  draw(p, m.rows, block.j0, block.keys, m.kept);
  drop(m.rows, reach, m.kept, m.scores);
}

// Adds the values of a block, which begin at `value`, times their weights.
template <class E>
static void multiply_values(const Problem& p, ForwardMemory<E>& m, const Block& block,
                            const char* value, Ahead* ahead) {
  const LaidOut<E>& there = m.laid_out;
  const Matrix v = block.laid_out
                       ? Matrix{there.values + (block.j0 - there.part->low) / E::pack * p.Dv,
                                p.Dv * int64_t(sizeof(typename E::Word))}
                       : across<E>(value, p.value.strides[2], block.keys, p.Dv, m.values);
  for (int c = 0; c < block.reach.cuts; ++c) {
    const Reach::Cut& cut = block.reach.cut[c];
    const int first = cut.from * E::lanes, begin = cut.begin / E::pack;
    multiply<typename E::Op, true, Into::add>(
        cut.to - cut.from, m.weights + begin * E::rows + first, E::rows,
        (const char*)v.data + begin * v.stride, v.stride, E::words(cut.end - cut.begin), p.Dv,
        m.state.out + first, E::rows, nullptr, ahead);
  }
}

// Computes the keys from `low` to `high` for a block of queries. Returns whether some keys were
// hidden from some of them; then their values take no part, even if NaN or inf, only where it is
// `careful`.
template <class E>
static bool add_keys(const Forward& f, ForwardMemory<E>& m, int64_t kv, int64_t low, int64_t high,
                     bool careful) {
  typedef typename E::Real Real;
  const Problem& p = *f.problem;
  const State<E>& state = m.state;
  const Scaling<E> scaling(p);
  if (m.laid_out.values && !careful) m.laid_out.add(p, m.rows.b, kv, low, high);
  for (int64_t x = 0; x < state_size<E>(p); ++x) state.out[x] = 0;
  for (int i = 0; i < E::rows; ++i) state.top[i] = state.base[i] = -kInf<Real>;
  const Real lift = careful ? 1 : kLift<Real>;
  bool hidden = false;
  for (int64_t j0 = low; j0 < high; j0 += kKeys) {
    const Block block = block_of(p, m, kv, j0, high, careful);
    // Of a last pair only the first may be seen; it is laid out as two.
    hidden |= !block.simple || (block.laid_out && block.keys % E::pack);
    Ahead* const ahead = high - j0 <= kSoon ? &m.ahead : nullptr;
    score_block(p, scaling, m, block, ahead);
    const char* const value = p.value.at(m.rows.b, kv, j0);
    const bool one_by_one =
        careful && !block.simple && !all_finite<E>(p, m.rows, scaling, value, j0, block.keys);
    const bool straight = E::pack > 1 && !p.threshold && !one_by_one;
    softmax_block(p, scaling, m, block, straight ? m.weights : nullptr, lift);
    if (one_by_one) {
      add_values_carefully<E>(p, m.rows, value, j0, block.keys, block.reach, m.scores, state);
      continue;
    }
    if constexpr (E::pack > 1)
      if (!straight) pack_weights(m.rows, block.reach, block.keys, m.scores, m.weights);
    multiply_values(p, m, block, value, ahead);
  }
  if (lift != 1) {
    for (int64_t x = 0; x < p.Dv * E::rows; ++x) state.out[x] *= 1 / lift;
    for (int i = 0; i < E::rows; ++i) state.total[i] *= 1 / lift, state.rest[i] *= 1 / lift;
  }
  return hidden;
}

// Whether all that was summed is finite.
template <class E>
static bool finite_sums(const Problem& p, const State<E>& state) {
  typedef typename E::Real Real;
  Vec<Real> sum = {};
  for (int64_t x = 0; x < p.Dv * E::rows; x += E::lanes) {
    const Vec<Real> out = *(const Vec<Real>*)(state.out + x);
    sum += out - out;  // 0, or NaN of NaN and inf
  }
  for (int i = 0; i < E::lanes; ++i)
    if (sum[i] != 0) return false;
  return true;
}

// Takes the sink of a row in; returns what turns its sum of values into its output.
template <class E>
static typename E::Real settle(const Problem& p, const Scaling<E>& scaling, int64_t head,
                               typename E::Real& top, typename E::Real& total,
                               typename E::Real rounded) {
  typedef typename E::Real Real;
  if (top == -kInf<Real>) {  // the sums are 0, or NaN: of the scores, or let through by -inf
    if (total != total) return total;
    total = 0;
    return 1;
  }
  Real grown = 1;
  if (p.sinks) {
    // The sink takes part like one more key, whose score may be the largest.
    const Real sink = Real(p.sinks[head] * kLog2e / double(scaling.factor));
    const Real higher = sink > top ? sink : top;
    const auto base = scaling.base(broadcast(higher));
    grown = exp2(scaling.exponent(broadcast(top), base))[0];
    const Real own = exp2(scaling.exponent(broadcast(sink), base))[0];
    top = higher, total = total * grown + own, rounded = rounded * grown + own;
  }
  return grown / rounded * Real(1 / (1 - p.dropout));
}

// Takes the sinks in, divides by the sums, and writes rows and statistics.
template <class E>
static void write_rows(const Forward& f, const Rows<E>& rows, const State<E>& state) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Problem& p = *f.problem;
  const Scaling<E> scaling(p);
  alignas(64) Real factor[E::rows];  // first from weights to those relative to the largest score
  for (int v = 0; v < rows.vectors; ++v) {
    const auto at = [&](Real* x) -> Vec<Real>& { return *(Vec<Real>*)(x + v * n); };
    at(factor) = exp2(scaling.exponent(scaling.base(at(state.base)), scaling.base(at(state.top))));
  }
  char* to[E::rows];
  for (int i = 0; i < rows.count; ++i) {
    Real top = state.top[i];
    const Real sum = state.total[i] + state.rest[i];
    // With dropout the weights that were multiplied are not all of them.
    const Real rounded = E::pack > 1 && !p.threshold ? state.rounded[i] : sum;
    Real total = sum * factor[i];
    factor[i] *= settle(p, scaling, rows.head[i], top, total, rounded * factor[i]);
    const int64_t row = (rows.b * p.Hq + rows.head[i]) * p.Lq + rows.index[i];
    if (f.maximum) ((Real*)f.maximum)[row] = top, ((Real*)f.total)[row] = total;
    to[i] = f.out + row * p.Dv * int64_t(sizeof(typename E::Bits));
  }
  for (int v = 0; v < rows.vectors; ++v) {
    for (int64_t d = 0; d < p.Dv; d += n) {
      Vec<Real> t[n];
      load_transposed<Real>(state.out + d * E::rows + v * n, E::rows, p.Dv - d, t);
      for (int i = 0; i < n && v * n + i < rows.count; ++i)
        put<Real, E::type>(to[v * n + i] + d * int64_t(sizeof(typename E::Bits)),
                           t[i] * factor[v * n + i], p.Dv - d);
    }
  }
}

template <class E>
static int64_t forward_tasks(const Forward& f) {
  const Problem& p = *f.problem;
  const int64_t n = blocks_at_once<E>(f);
  return (p.B * p.Hkv * row_blocks_of<E>(p) + n - 1) / n * pieces<E>(p);
}

// Says which rows are those of a block of the batch, and what they see.
template <class E>
static void find_block(const Problem& p, Rows<E>& rows, int64_t block) {
  const int64_t blocks = row_blocks_of<E>(p), head = block / blocks, group = p.Hq / p.Hkv;
  find(p, rows, head / p.Hkv, head % p.Hkv * group, block % blocks * E::rows, group * p.Lq);
}

// The memory where the rows of a block will be written, and what the next one, if there is one,
// reads that this one does not.
template <class E>
static void look_ahead(const Forward& f, ForwardMemory<E>& m, bool more) {
  const Problem& p = *f.problem;
  constexpr int64_t size = sizeof(typename E::Bits);
  const auto row = [&](const Rows<E>& rows) {
    return (rows.b * p.Hq + rows.head[0]) * p.Lq + rows.index[0];
  };
  m.ahead.clear();
  m.ahead.add(f.out + row(m.rows) * p.Dv * size, 0, 1, m.rows.count * p.Dv * size);
  if (!more) return;
  const Rows<E>& next = m.next;
  const int64_t kv = next.head[0] / (p.Hq / p.Hkv), left = p.Lq - next.index[0];
  const bool same = next.b == m.rows.b && kv == m.rows.head[0] / (p.Hq / p.Hkv);
  const int64_t low = same && m.rows.high > next.low ? m.rows.high : next.low;
  const int64_t keys = next.high - low < kKeys ? next.high - low : kKeys;
  m.ahead.add(next.query[0], p.query.strides[2], next.count < left ? next.count : left, p.D * size);
  m.ahead.add(p.key.at(next.b, kv, low), p.key.strides[2], keys, p.D * size);
  m.ahead.add(p.value.at(next.b, kv, low), p.value.strides[2], keys, p.Dv * size);
}

// A task is some neighbouring blocks of rows, upwards, as memory is read best, or a piece of one
// block. The last rows come first: with a causal mask they are the longest.
template <class E>
static void run_forward(const void* pass, int64_t task, char* memory, const Stop& stop) {
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  ForwardMemory<E> m(f, scratch);
  const int64_t n = pieces<E>(p), piece = task % n, together = blocks_at_once<E>(f);
  const int64_t end = p.B * p.Hkv * row_blocks_of<E>(p) - task / n * together;
  int64_t block = end > together ? end - together : 0;
  find_block(p, m.next, block);
  for (; block < end; ++block) {
    if (stopped(stop)) return;
    m.rows = m.next;
    load_queries<E>(p, m.rows);
    if (block + 1 < end) find_block(p, m.next, block + 1);
    look_ahead(f, m, block + 1 < end);
    // Sums begin where they would with any other rows in the block: a row's bits are its own.
    int64_t low = m.rows.low - m.rows.low % kKeys, high = m.rows.high;
    if (n > 1) {
      if (low < piece * kPiece) low = piece * kPiece;
      if (high > (piece + 1) * kPiece) high = (piece + 1) * kPiece;
      m.state = state_in<E>(
          p, f.partial + (block * n + piece) * state_size<E>(p) * sizeof(typename E::Real));
    }
    const int64_t kv = m.rows.head[0] / (p.Hq / p.Hkv);
    const bool hidden = add_keys(f, m, kv, low, high, false);
    if ((hidden || kLift<typename E::Real> != 1) && !finite_sums(p, m.state))
      add_keys(f, m, kv, low, high, true);
    if (n == 1) write_rows(f, m.rows, m.state);
  }
}

// Puts the pieces of a block of rows together.
template <class E>
static void run_merge(const void* pass, int64_t unit, char* memory, const Stop&) {
  typedef typename E::Real Real;
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  ForwardMemory<E> m(f, scratch);
  const int64_t n = pieces<E>(p), size = state_size<E>(p);
  find_block(p, m.rows, unit);
  const Scaling<E> scaling(p);
  const State<E>& sum = m.state;
  for (int64_t x = 0; x < size; ++x) sum.out[x] = 0;
  for (int v = 0; v < m.rows.vectors; ++v) {
    const int at = v * E::lanes;
    const auto vec = [&](const Real* x) -> Vec<Real>& { return *(Vec<Real>*)(x + at); };
    vec(sum.top) = Vec<Real>{} - kInf<Real>;
    for (int64_t i = 0; i < n; ++i) {
      const State<E> part = state_in<E>(p, f.partial + (unit * n + i) * size * sizeof(Real));
      vec(sum.top) = larger(vec(part.top), vec(sum.top));
    }
    vec(sum.base) = vec(sum.top);
    const auto base = scaling.base(vec(sum.top));
    for (int64_t i = 0; i < n; ++i) {
      const State<E> part = state_in<E>(p, f.partial + (unit * n + i) * size * sizeof(Real));
      const Vec<Real> factor = exp2(scaling.exponent(vec(part.base), base));
      add_exactly(vec(sum.total), vec(sum.rest), vec(part.total) * factor);
      vec(sum.rest) += vec(part.rest) * factor;
      vec(sum.rounded) += vec(part.rounded) * factor;
      for (int64_t d = 0; d < p.Dv; ++d)
        vec(sum.out + d * E::rows) += vec(part.out + d * E::rows) * factor;
    }
  }
  write_rows(f, m.rows, sum);
}

}  // namespace regard::REGARD_NAMESPACE
