// Decoding, a few queries against many keys: flash-decoding, a split-K over the keys. It is bound
// by memory bandwidth, so each key and value is read once: the numbers of a row are in the lanes,
// nothing is transposed, and all query heads that share a key head (GQA) use a row while it is in
// the cache.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "forward-inl.h"

namespace regard::REGARD_NAMESPACE {

#if REGARD_LANES == 16 || defined(REGARD_ARM)
constexpr int kDecodeSums = 16;  // vectors of a register block: with what is multiplied, they fit
#else
constexpr int kDecodeSums = 8;
#endif
// In bytes:
constexpr int64_t kDecodeBytes = 256 << 10;         // of the keys of a tile
constexpr int64_t kValueBytes = kDecodeSums << 10;  // of the values that are added at a time
constexpr int64_t kPrefetchStart = 4096;            // prefetched of the keys of the next tile

template <class E>
static bool is_decode(const Problem& p) {
  return few_queries<E>(p) && !p.key_ids && !p.threshold;
}

static int64_t decode_splits(const Problem& p) {
  return p.Lk > kSplitKeys ? (p.Lk + kSplitKeys - 1) / kSplitKeys : 1;
}

template <class E>
static int64_t decode_width(const Problem& p) {
  constexpr int64_t n = E::pack * E::loaded * E::lanes;
  return (p.Dv + n - 1) / n * n;
}

// Where number d of an output is: vectors of one load lie side by side.
template <class E>
static int64_t output_index(int64_t d) {
  constexpr int64_t n = E::lanes, loaded = E::loaded;
  return d / (loaded * n) * (loaded * n) + d % loaded * n + d % (loaded * n) / loaded;
}

// The partial result of one part of a split.
template <class E>
struct DecodeState {
  typename E::Real* out;      // [row][decode_width], in the order of output_index
  typename E::Real* maximum;  // [row]: the largest score
  double* total;              // the denominator: the sum of the weights
  double* rounded;            // that of the weights as rounded to pairs, rescaled as `out` is
  int64_t bytes;

  DecodeState(const Problem& p, Scratch scratch) {
    out = scratch.take<typename E::Real>(kDecodeRows * decode_width<E>(p));
    maximum = scratch.take<typename E::Real>(kDecodeRows);
    total = scratch.take<double>(kDecodeRows);
    rounded = scratch.take<double>(kDecodeRows);
    bytes = scratch.taken();
  }
  static DecodeState at(const Problem& p, char* memory, int64_t i) {
    const int64_t bytes = DecodeState(p, Scratch(nullptr)).bytes;
    return DecodeState(p, Scratch(memory + i * bytes));
  }
};

template <class E>
struct DecodeMemory {
  Rows<E> rows;
  // Weights as the values are multiplied with them: bfloat16 where these are pairs.
  typedef std::conditional_t<(E::pack > 1), uint16_t, typename E::Real> Weight;
  typename E::Real* scores;  // [row][kDecodeKeys]: scores, then weights
  Weight* weights;           // likewise

  DecodeMemory(const Problem& p, Scratch& scratch) {
    rows.q = scratch.take<typename E::Word>(query_words<E>(p));
    scores = scratch.take<typename E::Real>(kDecodeRows * kDecodeKeys);
    weights = E::pack > 1 ? scratch.take<Weight>(kDecodeRows * kDecodeKeys) : (Weight*)scores;
  }
};

// Values that are added next: each is prefetched whole, E::pack of them with every so many keys.
struct Ahead {
  const char* row;  // nullptr: none
  int64_t stride, bytes;
  int keys;
};

// How many values of so many bytes are added at a time.
static inline int values_at_a_time(int64_t bytes) {
  return int(kValueBytes / (bytes + 1)) / 2 * 2 + 2;
}

// A register block of R x V sums: out[row] += the weights of R rows times values, `count` numbers
// of each.
template <class E, int R, int V>
__attribute__((noinline)) static void add_register_block(
    const typename DecodeMemory<E>::Weight* weights, const char* value, int64_t stride, int keys,
    int64_t count, int64_t width, typename E::Real* out, Ahead& ahead) {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  constexpr int n = E::lanes, S = E::pack * E::loaded;  // vectors of one load
  constexpr int64_t bytes = sizeof(typename E::Bits);
  alignas(64) static constexpr char nothing[V * n * bytes] = {};
  const auto words = [&](const char* p, int v) {
    return load_words<E>(p + v * n * bytes, V > S ? S * n : count);
  };
  Vec<Real> sum[R][V] = {};
  for (int j = 0; j < keys;) {
    for (int i = 0; ahead.row && i < E::pack; ++i, ahead.row += ahead.stride)
      prefetch(ahead.row, ahead.bytes);
    for (const int end = keys - j < ahead.keys ? keys : j + ahead.keys; j < end; j += E::pack) {
      const char* row = value + j * stride;
      [[maybe_unused]] const char* next = j + 1 < keys ? row + stride : nothing;
      Vec<Word> w[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        w[r] = in_register(broadcast(read<Word>(weights + r * kDecodeKeys + j)));
#pragma GCC unroll 8
      for (int v = 0; v < V; v += S) {
        const auto x = words(row, v);
        Vec<Word> y[S];
#ifdef REGARD_PAIRS
        if constexpr (E::pack > 1) {
          const I z = words(next, v);
          y[0] = interleave<0>(x, z), y[1] = interleave<1>(x, z);
        } else
#endif
          for (int i = 0; i < S; ++i) y[i] = words_of<E>(x, i);
#pragma GCC unroll 4
        for (int i = 0; i < S; ++i) {
          y[i] = in_register(y[i]);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) sum[r][v + i] = E::Op::add(sum[r][v + i], w[r], y[i]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) *(Vec<Real>*)(out + r * width + v * n) += sum[r][v];
}

// The numbers from d on, in register blocks of V vectors, then of fewer.
template <class E, int R, int V>
static void add_register_blocks(const typename DecodeMemory<E>::Weight* weights, const char* value,
                                int64_t stride, int keys, int64_t d, int64_t Dv, int64_t width,
                                typename E::Real* out, Ahead& ahead) {
  constexpr int64_t n = V * E::lanes;
  const auto add = [&](int64_t count) {
    add_register_block<E, R, V>(weights, value + d * int64_t(sizeof(typename E::Bits)), stride,
                                keys, count, width, out + d, ahead);
  };
  for (; d + n <= Dv; d += n) add(n);
  if constexpr (V > E::pack * E::loaded)
    add_register_blocks<E, R, V / 2>(weights, value, stride, keys, d, Dv, width, out, ahead);
  else if (d < Dv)
    add(Dv - d);
}

// All numbers of some values. A register block takes a few columns of them, so they are added a few
// at a time, and the next are meanwhile prefetched in the order in which they lie.
template <class E, int R>
static void add_values(const typename DecodeMemory<E>::Weight* weights, const char* value,
                       int64_t stride, int keys, int64_t Dv, int64_t width, typename E::Real* out) {
  constexpr int V = kDecodeSums / R < 8 ? kDecodeSums / R : 8;
  const int64_t bytes = Dv * int64_t(sizeof(typename E::Bits));
  const int some = values_at_a_time(bytes);
  const int blocks = int((Dv + V * E::lanes - 1) / (V * E::lanes));
  Ahead ahead{nullptr, stride, bytes, blocks * E::pack};
  for (int j = 0; j < keys; j += some) {
    ahead.row = j + some < keys ? value + (j + some) * stride : nullptr;
    add_register_blocks<E, R, V>(weights + j, value + j * stride, stride,
                                 keys - j < some ? keys - j : some, 0, Dv, width, out, ahead);
  }
}

// The horizontal sum of a compensated sum.
template <class R>
static double sum_compensated(Vec<R> sum, Vec<R> compensation) {
  double all = 0;
  for (int i = 0; i < Simd<R>::lanes; ++i) all += double(sum[i]) + double(compensation[i]);
  return all;
}

// Turns the scores of a row into weights, two vectors at a time, and adds these to its denominator.
template <class E>
static void softmax_row(const Scaling<E>& scaling, const DecodeState<E>& state, int r, int keys,
                        typename E::Real* row,
                        [[maybe_unused]] typename DecodeMemory<E>::Weight* weights) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Vec<Real> base = scaling.base(broadcast(state.maximum[r]));
  Vec<Real> sum = {}, compensation = {};
  [[maybe_unused]] Vec<Real> rounded = {};
  for (int j = 0; j < keys; j += 2 * n) {
    Vec<Real> x[2];
    for (int i = 0; i < 2; ++i) x[i] = scaling.exponent(*(const Vec<Real>*)(row + j + i * n), base);
    exp2_each(x);
    add_compensated(sum, compensation, x[0] + x[1]);
#ifdef REGARD_PAIRS
    if constexpr (E::pack > 1) {
      const I pairs = narrow(x[1], x[0]);
      *(I*)(weights + j) = pairs;
      rounded = Pairs::add(rounded, pairs, ones());
      continue;
    }
#endif
    for (int i = 0; i < 2; ++i) *(Vec<Real>*)(row + j + i * n) = x[i];
  }
  const double all = sum_compensated<Real>(sum, compensation);
  state.total[r] += all;
  state.rounded[r] += E::pack > 1 ? double(sum_lanes<Real>(rounded)) : all;
}

// Applies scale, cap and bias to a row of scores that are not `raw`.
template <class E>
static void finish_row(const Problem& p, const DecodeMemory<E>& m, int r, int64_t j0, int keys,
                       typename E::Real* row) {
  typedef typename E::Real Real;
  for (int j = 0; j < keys; j += E::lanes) {
    Vec<Real>& s = *(Vec<Real>*)(row + j);
    s = cap_scores<Real>(p, s * Real(p.scale), nullptr);
  }
  if (!p.bias) return;
  const char* bias = p.bias.at(m.rows.b, m.rows.head[r], m.rows.index[r]);
  for (int j = 0; j < keys; ++j)
    row[j] += number<Real>(bias + (j0 + j) * p.bias.strides[3], p.bias.type);
}

// Applies the edits to a row of scores. Returns whether any key is cut.
template <class E>
static bool edit_row(const Problem& p, const DecodeMemory<E>& m, int r, int64_t j0, int keys,
                     typename E::Real* row) {
  typedef typename E::Real Real;
  bool cut = false;
  for (int64_t e = 0; e < p.edit_count; ++e) {
    const Edit& edit = p.edits[e];
    if (!is_of(edit, m.rows.head[r], m.rows.index[r]) || !overlaps(edit.key, j0, j0 + keys))
      continue;
    const int from = edit.key[0] > j0 ? int(edit.key[0] - j0) : 0;
    const int to = edit.key[1] < j0 + keys ? int(edit.key[1] - j0) : keys;
    const Real added = Real(added_score(p, edit));
    if (is_cut(edit))
      for (int j = from; j < to; ++j) row[j] = -kInf<Real>;
    else
      for (int j = from; j < to; ++j) row[j] += added;
    cut |= is_cut(edit);
  }
  return cut;
}

// Hides the keys that the mask hides from a row. Returns whether there are any.
template <class E>
static bool mask_row(const Problem& p, const DecodeMemory<E>& m, int r, int64_t j0, int keys,
                     typename E::Real* row) {
  typedef typename E::Real Real;
  const int64_t stride = p.mask.strides[3];
  const char* const mask = p.mask.at(m.rows.b, m.rows.head[r], m.rows.index[r]) + j0 * stride;
  int shown = 0;
  if (stride == 1) {
    for (int j = 0; j < keys; ++j) {
      shown += mask[j] != 0;
      row[j] = mask[j] ? row[j] : -kInf<Real>;
    }
  } else {
    for (int j = 0; j < keys; ++j) {
      shown += mask[j * stride] != 0;
      row[j] = mask[j * stride] ? row[j] : -kInf<Real>;
    }
  }
  return shown < keys;
}

// Updates the maximum of a row, and rescales its sums.
template <class E>
static void raise_maximum(const Problem& p, const Scaling<E>& scaling, const DecodeState<E>& state,
                          int r, int keys, const typename E::Real* row) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const int64_t width = decode_width<E>(p);
  Vec<Real> highest = Vec<Real>{} + state.maximum[r];
  for (int j = 0; j < keys; j += n) highest = larger(*(const Vec<Real>*)(row + j), highest);
  const Real maximum = max_lanes<Real>(highest);
  if (maximum == state.maximum[r]) return;
  const Vec<Real> base = scaling.base(broadcast(maximum));
  const Vec<Real> factor = exp2(scaling.exponent(broadcast(state.maximum[r]), base));
  // `rounded` with the factor of the output, `total` with the exact one.
  state.rounded[r] *= double(factor[0]);
  state.total[r] *= std::exp2(double(state.maximum[r] - maximum) * double(scaling.factor));
  for (int64_t d = 0; d < width; d += n) *(Vec<Real>*)(state.out + r * width + d) *= factor;
  state.maximum[r] = maximum;
}

// The weights of a row from its scores. Returns whether every key is visible to it.
template <class E>
static bool softmax_keys(const Problem& p, const Scaling<E>& scaling, DecodeMemory<E>& m,
                         const DecodeState<E>& state, int r, int64_t j0, int keys) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  Real* const row = m.scores + r * kDecodeKeys;
  const auto weights = m.weights + r * kDecodeKeys;
  const int even = (keys + 2 * n - 1) / (2 * n) * (2 * n);
  const auto mask_range = [&](int from, int to) {
    for (int j = from; j < to; ++j) row[j] = -kInf<Real>;
  };
  mask_range(keys, even);
  if (r >= m.rows.count) {
    for (int j = 0; j < even; ++j) weights[j] = 0;
    return true;
  }
  if (!scaling.raw) {
    finish_row(p, m, r, j0, keys, row);
    mask_range(keys, even);
  }
  bool cut = edit_row(p, m, r, j0, keys, row);
  if (p.mask) cut |= mask_row(p, m, r, j0, keys, row);
  const auto inside = [&](int64_t j) { return int(j < j0 ? 0 : j - j0 > keys ? keys : j - j0); };
  const int first = inside(m.rows.first[r]), last = inside(m.rows.last[r]);
  mask_range(0, first);
  mask_range(last, keys);
  raise_maximum(p, scaling, state, r, keys, row);
  softmax_row(scaling, state, r, keys, row, weights);
  return first == 0 && last == keys && !cut;
}

// The slow path of add_values, for a tile with NaN or inf: skips masked keys.
template <class E>
static void add_visible_values(const Problem& p, const DecodeMemory<E>& m,
                               const DecodeState<E>& state, int r, const char* value, int64_t j0,
                               int keys) {
  typedef typename E::Real Real;
  for (int j = 0; j < keys; ++j) {
    if (!attends(p, m.rows, r, j0 + j)) continue;
    const auto w = m.weights[r * kDecodeKeys + j];
    for (int64_t d = 0; d < p.Dv; ++d)
      state.out[r * decode_width<E>(p) + output_index<E>(d)] +=
          number<Real>((const char*)&w, E::pack > 1 ? E::type : real_type<Real>) *
          number<Real>(value + j * p.value.strides[2] + d * int64_t(sizeof(typename E::Bits)),
                       E::type);
  }
}

// Attends R rows, from r0 on, to the keys from j0 on.
template <class E, int R>
static void decode_tile(const Problem& p, DecodeMemory<E>& m, const DecodeState<E>& state, int r0,
                        int64_t kv, int64_t j0, int keys) {
  const Scaling<E> scaling(p);
  const int64_t width = decode_width<E>(p);
  dot_keys<E, R>(p, m.rows.q + r0 * padded_words<E>(p), p.key.at(m.rows.b, kv, j0), keys,
                 m.scores + r0 * kDecodeKeys);
  const char* const value = p.value ? p.value.at(m.rows.b, kv, j0) : nullptr;
  const int64_t stride = p.value.strides[2], bytes = p.Dv * int64_t(sizeof(typename E::Bits));
  const int first = keys < values_at_a_time(bytes) ? keys : values_at_a_time(bytes);
  bool whole = true;
  for (int r = 0; r < R; ++r) {
    for (int j = first * r / R; value && j < first * (r + 1) / R; ++j)
      prefetch(value + j * stride, bytes);
    whole &= softmax_keys(p, scaling, m, state, r0 + r, j0, keys);
  }
  prefetch(p.key.at(m.rows.b, kv, j0 + keys), kPrefetchStart);
  if (!value) return;
  if (whole || finite<E>(value, stride, keys, p.Dv))
    return add_values<E, R>(m.weights + r0 * kDecodeKeys, value, stride, keys, p.Dv, width,
                            state.out + r0 * width);
  for (int r = r0; r < r0 + R && r < m.rows.count; ++r)
    add_visible_values(p, m, state, r, value, j0, keys);
}

template <class E>
static void run_decode(const void* pass, int64_t task, char* memory, const Stop&) {
  typedef typename E::Real Real;
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  DecodeMemory<E> m(p, scratch);
  const int64_t n = decode_splits(p), head = task / n, split = task % n, kv = head % p.Hkv;
  const int64_t group = p.Hq / p.Hkv;
  describe_rows(p, m.rows, head / p.Hkv, kv * group, 0, group * p.Lq);
  load_queries<E>(p, m.rows);
  const auto state = DecodeState<E>::at(p, f.partial, task);
  std::memset((void*)state.out, 0, size_t(state.bytes));
  for (int64_t r = 0; r < kDecodeRows; ++r) state.maximum[r] = -kInf<Real>;
  const int64_t low = m.rows.low > split * kSplitKeys ? m.rows.low : split * kSplitKeys;
  const int64_t high =
      m.rows.high < (split + 1) * kSplitKeys ? m.rows.high : (split + 1) * kSplitKeys;
  const int64_t bytes = (p.D > p.Dv ? p.D : p.Dv) * int64_t(sizeof(typename E::Bits));
  const int64_t fit = kDecodeBytes / bytes / 32 * 32;  // whole vectors of scores
  const int64_t most = fit < kDecodeKeys ? fit : kDecodeKeys;
  for (int64_t j0 = low; j0 < high; j0 += most) {
    const int keys = int(high - j0 < most ? high - j0 : most);
    by_rows<E>(m.rows.count, [&]<int R>(int r, std::integral_constant<int, R>) {
      decode_tile<E, R>(p, m, state, r, kv, j0, keys);
    });
  }
}

// Numbers of even and of odd index become those of the lower and of the higher.
template <class V>
static void alternate(V (&x)[2]) {
  constexpr int n = sizeof(V) / sizeof(x[0][0]);
  V y[2];
  for (int i = 0; i < 2 * n; ++i) y[i / n][i % n] = x[i % 2][i / 2];
  x[0] = y[0], x[1] = y[1];
}

// Merges the partial results of the rows of a key head in their order, and writes the rows.
template <class E>
static void run_decode_merge(const void* pass, int64_t head, char* memory, const Stop&) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  DecodeMemory<E> m(p, scratch);
  const int64_t group = p.Hq / p.Hkv, splits = decode_splits(p), width = decode_width<E>(p);
  describe_rows(p, m.rows, head / p.Hkv, head % p.Hkv * group, 0, group * p.Lq);
  const Scaling<E> scaling(p);
  const auto part = [&](int64_t i) { return DecodeState<E>::at(p, f.partial, head * splits + i); };
  for (int r = 0; r < m.rows.count; ++r) {
    Real maximum = -kInf<Real>;
    for (int64_t i = 0; i < splits; ++i)
      maximum = part(i).maximum[r] > maximum ? part(i).maximum[r] : maximum;
    const Vec<Real> base = scaling.base(broadcast(maximum));
    const auto factor = [&](int64_t i) {
      return exp2(scaling.exponent(broadcast(part(i).maximum[r]), base));
    };
    double sum = 0, rounded = 0;
    for (int64_t i = 0; i < splits; ++i) {
      const double by = double(factor(i)[0]);
      sum += part(i).total[r] * by, rounded += part(i).rounded[r] * by;
    }
    Vec<Real> most = broadcast(maximum), total = broadcast(Real(sum));
    const Real by = finish_denominators(p, scaling, m.rows.head + r, 1, most, total,
                                        broadcast(Real(rounded)))[0];
    const int64_t row = (m.rows.b * p.Hq + m.rows.head[r]) * p.Lq + m.rows.index[r];
    if (f.maximum) ((Real*)f.maximum)[row] = most[0], ((Real*)f.total)[row] = total[0];
    char* const to = f.out.into(m.rows.b, m.rows.head[r], m.rows.index[r]);
    by_written<E>(f.out.type, [&]<class S>(S) {
      for (int64_t d = 0; d < p.Dv; d += E::loaded * n) {
        Vec<Real> out[E::loaded] = {};
        for (int v = 0; v < E::loaded; ++v) {
          for (int64_t i = 0; i < splits; ++i)
            out[v] += *(const Vec<Real>*)(part(i).out + r * width + d + v * n) * factor(i);
          out[v] *= by;
        }
        if constexpr (E::loaded == 2) alternate(out);
        for (int v = 0; v < E::loaded && d + v * n < p.Dv; ++v)
          put<Real, S::type>(to + (d + v * n) * int64_t(sizeof(typename S::Bits)), out[v],
                             p.Dv - d - v * n);
      }
    });
  }
}

static Job forward(const Forward& f) {
  return by_type<Job>(f.problem->type, [&]<class T>(T) -> Job {
    typedef Computed<typename T::OfForward> E;
    typedef typename T::OfFew Few;
    const Problem& p = *f.problem;
    Scratch scratch(nullptr);
    if (is_decode<Few>(p)) {
      DecodeMemory<Few> m(p, scratch);
      return {p.B * p.Hkv * decode_splits(p), scratch.taken(), run_decode<Few>, &f};
    }
    ForwardMemory<E> m(f, scratch);
    return {forward_tasks<E>(f), scratch.taken(), run_forward<E>, &f};
  });
}

static Job merge(const Forward& f) {
  return by_type<Job>(f.problem->type, [&]<class T>(T) -> Job {
    typedef Computed<typename T::OfForward> E;
    typedef typename T::OfFew Few;
    const Problem& p = *f.problem;
    Scratch scratch(nullptr);
    if (is_decode<Few>(p)) {
      DecodeMemory<Few> m(p, scratch);
      return {p.B * p.Hkv, scratch.taken(), run_decode_merge<Few>, &f};
    }
    ForwardMemory<E> m(f, scratch);
    const int64_t units = splits<E>(p) > 1 ? p.B * p.Hkv : 0;
    return {units, scratch.taken(), run_merge<E>, &f};
  });
}

static int64_t partial_bytes(const Forward& f) {
  return by_type<int64_t>(f.problem->type, [&]<class T>(T) -> int64_t {
    typedef Computed<typename T::OfForward> E;
    typedef typename T::OfFew Few;
    const Problem& p = *f.problem;
    if (is_decode<Few>(p))
      return p.B * p.Hkv * decode_splits(p) * DecodeState<Few>(p, Scratch(nullptr)).bytes;
    const int64_t n = splits<E>(p);
    return n > 1 ? p.B * p.Hkv * n * state_size<E>(p) * int64_t(sizeof(typename E::Real)) : 0;
  });
}

}  // namespace regard::REGARD_NAMESPACE
