// The forward pass: FlashAttention, with an online softmax over tiles of keys: S^T = K Q^T,
// P^T = 2^(S^T - base), O^T += V^T P^T. Nothing is summed across lanes.
//
// A single tile of queries is split over the keys (split-K), so that threads can share it; partial
// results are merged in their order. Source: Milakov & Gimelshein 2018; Dao et al. 2022.
#pragma once

#include <cstdint>

#include "pipeline-inl.h"

namespace regard::REGARD_NAMESPACE {

// O^T += V^T P^T for the values of a tile.
template <class E>
static void multiply_values(const Problem& p, ForwardMemory<E>& m, const KeyTile& tile,
                            Prefetcher* prefetcher) {
#ifdef REGARD_TILES
  if constexpr (E::tiles)
    return multiply_now<E, true>(product_with_values(p, m, tile, m.weights), m.rows.vectors);
#endif
  const Matrix v = values_of(p, m, tile);
  const bool panels = in_panels(m, tile);
  for (int c = 0; c < tile.tile_mask.spans; ++c) {
    const TileMask::Span& span = tile.tile_mask.span[c];
    const int first = span.from * E::lanes, begin = span.begin / E::pack;
    const auto add_columns = [&](int64_t d, int64_t columns, const char* values, int64_t stride) {
      multiply<typename E::Op, true, Epilogue::add>(
          span.to - span.from, m.weights + begin * E::rows + first, E::rows,
          values + begin * stride, stride, E::words(span.end - span.begin), columns,
          m.state.out + d * E::rows + first, E::rows, nullptr, prefetcher);
    };
    if (!panels) add_columns(0, p.Dv, (const char*)v.data, v.stride);
    for (int64_t d = 0; panels && d < p.Dv; d += kPanel) {
      const int64_t columns = p.Dv - d < kPanel ? p.Dv - d : kPanel;
      constexpr int64_t size = sizeof(typename E::Word);
      add_columns(d, columns, (const char*)v.data + d * E::keys * size, columns * size);
    }
  }
}

// For add_keys: nobody looks. One object, as each lambda would be a type with code of its own.
constexpr auto kNoLook = [](const KeyTile&) {};

// Clears the denominators of a tile of queries, before any key.
template <class E>
static void clear_denominators(const SoftmaxState<E>& state) {
  typedef typename E::Real Real;
  for (Real* x : {state.total, state.compensation, state.rounded})
    for (int i = 0; i < E::rows; ++i) x[i] = 0;
  for (Real* x : {state.maximum, state.base})
    for (int i = 0; i < E::rows; ++i) x[i] = -kInf<Real>;
}

// Likewise, with its sums.
template <class E>
__attribute__((noinline)) static void clear_sums(const Problem& p, const SoftmaxState<E>& state) {
  for (int64_t x = 0; x < p.Dv * E::rows; ++x) state.out[x] = 0;
  clear_denominators(state);
}

// Attends a tile of queries to the keys from `low` to `high`, after those that its sums have;
// `look` sees the scores of each tile before they become weights. Returns whether some keys were
// masked for some rows: the product 0 * value is then NaN for values of NaN or inf, unless
// `nan_safe`.
template <class E, class Look>
static bool add_keys(const Forward& f, ForwardMemory<E>& m, int64_t kv, int64_t low, int64_t high,
                     bool nan_safe, Look look) {
  typedef typename E::Real Real;
  const Problem& p = *f.problem;
  const SoftmaxState<E>& state = m.state;
  const Scaling<E> scaling(p);
  if (m.packed && !nan_safe) m.packed.add(p, m.rows.b, kv, low, high);
#ifdef REGARD_TILES
  if constexpr (E::tiles)
    if (!nan_safe && !p.threshold) return add_keys_by_tiles<E>(f, m, kv, low, high, look);
#endif
  const Real weight_scale = nan_safe ? 1 : kWeightScale<Real>;
  bool masked = false;
  for (int64_t j0 = low; j0 < high; j0 += tile_keys<E>(p)) {
    KeyTile tile;
    set_key_tile(p, m, kv, j0, high, nan_safe, tile);
    if (!mask_shows(p, m.rows, j0, tile.keys)) continue;
    // The last keys of a step may be masked, but are packed with the others.
    masked |= !tile.unmasked || (tile.packed && tile.keys % E::block);
    Prefetcher* const prefetcher = high - j0 <= kPrefetchDistance ? &m.prefetcher : nullptr;
    score_tile(p, scaling, m, tile, prefetcher);
    look(tile);
    const char* const value = p.value.at(m.rows.b, kv, j0);
    const bool scalar =
        nan_safe &&
        (E::parts > 1 ? !finite_values<E>(p, value, tile.keys)
                      : !tile.unmasked && !all_finite<E>(p, m.rows, scaling, value, j0, tile.keys));
#ifdef REGARD_TILES
    if constexpr (E::tiles)
      if (!p.threshold && !scalar) {
        add_weighted_values(f, m, scaling, tile);
        continue;
      }
#endif
    const bool fused_packing = E::pack > 1 && !p.threshold && !scalar;
    softmax_tile(p, scaling, m, tile, fused_packing ? m.weights : nullptr, weight_scale);
    if (scalar) {
      add_values_nan_safe<E>(p, m.rows, value, j0, tile.keys, tile.tile_mask, m.scores, state);
      continue;
    }
    if constexpr (E::pack > 1)
      if (!fused_packing) pack_weights(m.rows, tile.tile_mask, tile.keys, m.scores, m.weights);
    multiply_values(p, m, tile, prefetcher);
  }
  if (weight_scale != 1) {
    for (int64_t x = 0; x < p.Dv * E::rows; ++x) state.out[x] *= 1 / weight_scale;
    for (int i = 0; i < E::rows; ++i)
      state.total[i] *= 1 / weight_scale, state.compensation[i] *= 1 / weight_scale;
  }
  return masked;
}

// Whether all outputs of a tile are finite.
template <class E>
static bool finite_sums(const Problem& p, const SoftmaxState<E>& state) {
  typedef typename E::Real Real;
  Vec<Real> sum[E::vectors] = {};  // several: an addition waits for the one before
  for (int64_t d = 0; d < p.Dv; ++d)
    for (int v = 0; v < E::vectors; ++v) {
      const Vec<Real> out = *(const Vec<Real>*)(state.out + d * E::rows + v * E::lanes);
      sum[v] += out - out;  // 0, or NaN of NaN and inf
    }
  for (int v = 1; v < E::vectors; ++v) sum[0] += sum[v];
  for (int i = 0; i < E::lanes; ++i)
    if (sum[0][i] != 0) return false;
  return true;
}

// The maximum stays the largest score up to here, which tells the largest weight of a row.
constexpr int kSinkExponent = 32;

// Adds the term of the attention sink to the denominators of a row. A sink whose term would be
// above 2^kSinkExponent is the maximum. Returns the factor from the old maximum to the new one.
template <class E>
static typename E::Real add_sink(const Problem& p, const Scaling<E>& scaling, int64_t head,
                                 typename E::Real& maximum, typename E::Real& total,
                                 typename E::Real& rounded) {
  typedef typename E::Real Real;
  // A sink is one more key, without a value. In double: its term may be nearly all of the total.
  // The difference comes first: it is exact where both are large.
  const double unit = scaling.raw ? p.scale : 1.0;
  const double exponent = (p.sinks[head] - double(maximum) * unit) * kLog2e;
  Real factor = 1, own;
  if (exponent > kSinkExponent) {
    const Real sink = Real(p.sinks[head] * kLog2e / double(scaling.factor));
    const auto base = scaling.base(broadcast(sink));
    factor = exp2(scaling.exponent(broadcast(maximum), base))[0];
    own = exp2(scaling.exponent(broadcast(sink), base))[0];
    maximum = sink;
  } else {
    own = Real(std::exp2(exponent));
  }
  total = total * factor + own, rounded = rounded * factor + own;
  return factor;
}

// Adds the sinks to the denominators of up to a vector of rows, of these heads. Returns the
// normalisers (1 / denominator) of their outputs.
template <class E>
static Vec<typename E::Real> finish_denominators(const Problem& p, const Scaling<E>& scaling,
                                                 const int64_t* heads, int count,
                                                 Vec<typename E::Real>& maximum,
                                                 Vec<typename E::Real>& total,
                                                 Vec<typename E::Real> rounded) {
  typedef typename E::Real Real;
  typedef Vec<Real> V;
  const auto none = maximum == -kInf<Real>;  // no visible key, or scores of NaN
  const V of_none = total == total ? V{} + Real(1) : total;
  total = none ? (total == total ? V{} : total) : total;
  V factor = V{} + Real(1);
  for (int i = 0; p.sinks && i < count; ++i) {
    if (none[i]) continue;
    Real most = maximum[i], sum = total[i], of_rounded = rounded[i];
    factor[i] = add_sink(p, scaling, heads[i], most, sum, of_rounded);
    maximum[i] = most, total[i] = sum, rounded[i] = of_rounded;
  }
  return none ? of_none : factor / rounded * Real(1 / (1 - p.dropout));
}

// Writes the rows of a vector: sums, [Dv][rows], times the normalisers, rounded to the type of the
// output.
template <class E>
static void put_rows(const Array& out, char* const* to, int count, const typename E::Real* sums,
                     Vec<typename E::Real> normaliser, int64_t Dv) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
#ifdef REGARD_PAIRS
  if constexpr (E::type == Type::bfloat16)
    if (out.type == E::type && Dv % 2 == 0) {  // as pairs: half as much is transposed
      const auto half = [&](int64_t d) {
        return upper_halves(*(const F*)(sums + d * E::rows) * normaliser);
      };
      for (int64_t d = 0; d < Dv; d += 2 * n) {
        keep_tiles_awake<E::tiles>();
        const int64_t pairs = (Dv - d) / 2;
        I t[n];
        if (count == n && pairs >= n) {
#pragma GCC unroll 16
          for (int i = 0; i < n; ++i) t[i] = join(half(d + 2 * i), half(d + 2 * i + 1));
          transpose(t);
#pragma GCC unroll 16
          for (int i = 0; i < n; ++i) store<int32_t>(to[i] + d * 2, t[i]);
          continue;
        }
        for (int i = 0; i < n; ++i)
          t[i] = i < pairs ? join(half(d + 2 * i), half(d + 2 * i + 1)) : I{};
        transpose(t);
        for (int i = 0; i < count; ++i)
          __builtin_memcpy(to[i] + d * 2, &t[i], size_t(pairs < n ? pairs : n) * 4);
      }
      return;
    }
#endif
  by_written<E>(out.type, [&]<class S>(S) {
    for (int64_t d = 0; d < Dv; d += n) {
      keep_tiles_awake<E::tiles>();
      Vec<Real> t[n];
      load_transposed<Real>(sums + d * E::rows, E::rows, Dv - d, t);
      for (int i = 0; i < n && i < count; ++i)
        put<Real, S::type>(to[i] + d * int64_t(sizeof(typename S::Bits)), t[i] * normaliser[i],
                           Dv - d);
    }
  });
}

// Adds the sinks, normalises, and writes output rows and row statistics.
template <class E>
__attribute__((noinline)) static void write_rows(const Forward& f, const Rows<E>& rows,
                                                 const SoftmaxState<E>& state) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Problem& p = *f.problem;
  const Scaling<E> scaling(p);
  for (int first = 0; first < rows.count; first += n) {
    const auto at = [&](Real* x) -> Vec<Real>& { return *(Vec<Real>*)(x + first); };
    const int count = rows.count - first < n ? rows.count - first : n;
    Vec<Real> maximum = at(state.maximum), reference = E::tiles ? at(state.base) : maximum;
    const auto from_base = [&](Vec<Real> score) {
      return exp2(scaling.exponent(scaling.base(at(state.base)), scaling.base(score)));
    };
    const Vec<Real> sum =
        needs_total<E>(f) ? at(state.total) + at(state.compensation) : at(state.rounded);
    // With dropout the rounded denominator lacks the dropped weights.
    const Vec<Real> rounded = E::rounds && !p.threshold ? at(state.rounded) : sum;
    const auto finish = [&](Vec<Real> factor, Vec<Real>& score, Vec<Real>& total) {
      return factor * finish_denominators(p, scaling, rows.head + first, count, score, total,
                                          rounded * factor);
    };
    const Vec<Real> factor = from_base(reference);  // between the two
    Vec<Real> total = sum * factor;
    const Vec<Real> normaliser = finish(factor, reference, total);
    if (!E::tiles) {
      maximum = reference;
    } else if (f.maximum) {  // tiles know it only then
      total = sum * from_base(maximum);
      finish(from_base(maximum), maximum, total);
    }
    char* to[n];
    for (int i = 0; i < count; ++i) {
      const int64_t head = rows.head[first + i], index = rows.index[first + i];
      const int64_t row = (rows.b * p.Hq + head) * p.Lq + index;
      if (f.maximum) ((Real*)f.maximum)[row] = maximum[i], ((Real*)f.total)[row] = total[i];
      to[i] = f.out.into(rows.b, head, index);
    }
    put_rows<E>(f.out, to, count, state.out + first, normaliser, p.Dv);
  }
}

template <class E>
static int64_t forward_tasks(const Forward& f) {
  const Problem& p = *f.problem;
  const int64_t n = tiles_per_task<E>(f);
  return (p.B * p.Hkv * row_tiles_of<E>(p) + n - 1) / n * splits<E>(p);
}

// Fills `rows` with those of a tile of the batch.
template <class E>
static void describe_tile(const Problem& p, Rows<E>& rows, int64_t tile) {
  const int64_t tiles = row_tiles_of<E>(p), head = tile / tiles, group = p.Hq / p.Hkv;
  describe_rows(p, rows, head / p.Hkv, head % p.Hkv * group, tile % tiles * E::rows, group * p.Lq);
}

// The key head of a tile of queries.
template <class E>
static int64_t key_head_of(const Problem& p, const Rows<E>& rows) {
  return rows.head[0] / (p.Hq / p.Hkv);
}

// Gives the prefetcher the output rows of a tile and what the next tile, if there is one, reads
// first and this one did not.
template <class E>
__attribute__((noinline)) static void plan_prefetch(const Forward& f, ForwardMemory<E>& m,
                                                    const Rows<E>* after) {
  const Problem& p = *f.problem;
  const int64_t size = bytes_of(p.type);
  const auto in_head = [&](const Rows<E>& rows) {
    const int64_t left = p.Lq - rows.index[0];
    return rows.count < left ? rows.count : left;
  };
  m.prefetcher.clear();
  if (after) {
    const Rows<E>& next = *after;
    const int64_t kv = key_head_of(p, next);
    const bool same = next.b == m.rows.b && kv == key_head_of(p, m.rows);
    const int64_t low = same && m.rows.high > next.low ? m.rows.high : next.low;
    const int64_t keys = next.high - low < E::keys ? next.high - low : E::keys;
    m.prefetcher.add(next.query[0], p.query.strides[2], in_head(next), p.D * size);
    m.prefetcher.add(p.key.at(next.b, kv, low), p.key.strides[2], keys, p.D * size);
    m.prefetcher.add(p.value.at(next.b, kv, low), p.value.strides[2], keys, p.Dv * size);
  }
  m.prefetcher.add(f.out.at(m.rows.b, m.rows.head[0], m.rows.index[0]), f.out.strides[2],
                   in_head(m.rows), p.Dv * bytes_of(f.out.type));
}

// The first key of a tile of queries. Tiles of keys are aligned, so that a row's bits do not depend
// on the rows beside it.
template <class E>
static int64_t first_key(const Rows<E>& rows) {
  return rows.low - rows.low % E::keys;
}

// Adds keys anew where the sums of a tile of queries need it, which may have `masked` keys.
// `other`, optional: whose queries are in the place of these.
template <class E>
__attribute__((noinline)) static void check_sums(const Forward& f, ForwardMemory<E>& m, int64_t low,
                                                 int64_t high, bool masked,
                                                 const Rows<E>* other = nullptr) {
  const Problem& p = *f.problem;
  const bool may_lose = kWeightScale<typename E::Real> != 1 || E::parts > 1;  // infinite sums
  if ((masked || may_lose) && !finite_sums(p, m.state)) {
    clear_sums(p, m.state);
    if (other) load_queries<E>(p, m.rows);
    add_keys(f, m, key_head_of(p, m.rows), low, high, true, kNoLook);
    if (other) load_queries<E>(p, *other);
  }
}

// Attends tiles of queries to some keys after others: all of them to those that L2 has, then to the
// next. To a row keys come in the same order as without.
template <class E>
static void run_by_cached_keys(const Forward& f, ForwardMemory<E>& m, int64_t tile, int64_t tiles,
                               const Stop& stop) {
  const Problem& p = *f.problem;
  int64_t first = p.Lk, last = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    WaitingTile<E>& waiting = m.waiting[t];
    describe_tile(p, waiting.rows, tile + t);
    load_queries<E>(p, waiting.rows);
    clear_sums(p, waiting.state);
    waiting.masked = false;
    if (first_key(waiting.rows) < first) first = first_key(waiting.rows);
    if (waiting.rows.high > last) last = waiting.rows.high;
  }
  for (int64_t j = first; j < last; j += cached_keys<E>(p))
    for (int64_t t = 0; t < tiles; ++t) {
      if (stopped(stop)) return;
      const TileConfiguration<E::tiles> configuration;
      WaitingTile<E>& waiting = m.waiting[t];
      const int64_t from = first_key(waiting.rows) > j ? first_key(waiting.rows) : j;
      const int64_t end = j + cached_keys<E>(p);
      const int64_t to = waiting.rows.high < end ? waiting.rows.high : end;
      if (from >= to) continue;
      m.rows = waiting.rows, m.state = waiting.state;
      waiting.masked |= add_keys(f, m, key_head_of(p, m.rows), from, to, false, kNoLook);
    }
  for (int64_t t = 0; t < tiles; ++t) {
    const TileConfiguration<E::tiles> configuration;
    m.rows = m.waiting[t].rows, m.state = m.waiting[t].state;
    check_sums(f, m, first_key(m.rows), m.rows.high, m.waiting[t].masked);
    write_rows(f, m.rows, m.state);
  }
}

#ifdef REGARD_TILES
// Writes the rows of a tile of queries that has all its sums.
template <class E>
__attribute__((noinline)) static void finish_tile(const Forward& f, ForwardMemory<E>& m,
                                                  const Rows<E>* after) {
  m.scores = m.spare_scores;
  if (!m.has_sums) clear_sums(*f.problem, m.state);
  check_sums(f, m, first_key(m.rows), m.rows.high, m.masked, after);
  keep_tiles_awake<E::tiles>();
  write_rows(f, m.rows, m.state);
}

// Attends tiles of queries to their keys as one pipeline: while the first scores of one become
// weights, the last ones of the tile before are multiplied with their values. They share the memory
// of queries, which the scores alone need, and that of sums, which the values alone need.
template <class E>
static void run_pipeline(const Forward& f, ForwardMemory<E>& first, int64_t tile, int64_t end,
                         const Stop& stop) {
  const Problem& p = *f.problem;
  ForwardMemory<E> second = first;
  second.state = state_in<E>(first.state.out, first.other_statistics);
  ForwardMemory<E>*m = &first, *other = &second;
  ForwardPipeline<E> pipeline(f, first, finish_tile<E>);
  const auto start = [&](ForwardMemory<E>& m, bool continues) {
    load_queries<E>(p, m.rows);
    keep_tiles_awake<E::tiles>();
    clear_denominators(m.state);
    m.masked = m.has_sums = false;
    const int64_t kv = key_head_of(p, m.rows), low = first_key(m.rows), high = m.rows.high;
    if (m.packed) m.packed.add(p, m.rows.b, kv, low, high);
    return continues ? pipeline.continue_with(m, kv, low, high) : pipeline.begin(m, kv, low, high);
  };
  // Whether the keys that are packed for one of them stay where they are for the other.
  const auto follows = [&](const Rows<E>& x, const Rows<E>& y) {
    return y.b == x.b && key_head_of(p, y) == key_head_of(p, x) && first_key(y) >= first_key(x) &&
           first_key(y) <= x.high;
  };
  bool continues = false;  // whether the scores of m's first keys are there, and `other` unfinished
  describe_tile(p, m->rows, tile);
  for (; tile < end; ++tile, std::swap(m, other)) {
    if (stopped(stop)) return;
    const TileConfiguration<E::tiles> configuration;
    const bool more = tile + 1 < end;
    const auto plan = [&] {
      if (more) describe_tile(p, other->rows, tile + 1);
      keep_tiles_awake<E::tiles>();
      plan_prefetch(f, *m, more ? &other->rows : nullptr);
    };
    bool planned = !continues;
    if (planned) {
      plan();
      start(*m, false);
    }
    continues = false;
    while (pipeline.attends(*m)) {
      if (!pipeline.find_next() && planned && more && follows(m->rows, other->rows)) {
        continues = start(*other, true);
        if (!continues) load_queries<E>(p, m->rows);  // in the place of those that see no key
      }
      pipeline.step();
      if (!planned) plan();
      planned = true;
    }
    if (continues) continue;
    pipeline.drain();
    finish_tile<E>(f, *m, nullptr);
  }
}
#endif

// A task is some neighbouring tiles of queries in rising order, which hardware prefetchers follow,
// or one part of a split tile. The last rows come first: with a causal mask they take longest.
template <class E>
static void run_forward(const void* pass, int64_t task, char* memory, const Stop& stop) {
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  ForwardMemory<E> m(f, scratch);
  const int64_t n = splits<E>(p), split = task % n, per_task = tiles_per_task<E>(f);
  const int64_t end = p.B * p.Hkv * row_tiles_of<E>(p) - task / n * per_task;
  int64_t tile = end > per_task ? end - per_task : 0;
  if (m.waiting) {
    for (const int64_t wait = waiting_tiles<E>(f); tile < end; tile += wait)
      run_by_cached_keys(f, m, tile, wait < end - tile ? wait : end - tile, stop);
    return;
  }
#ifdef REGARD_TILES
  if constexpr (E::tiles)
    if (n == 1 && !p.threshold) return run_pipeline(f, m, tile, end, stop);
#endif
  describe_tile(p, m.next, tile);
  for (; tile < end; ++tile) {
    if (stopped(stop)) return;
    const TileConfiguration<E::tiles> configuration;
    m.rows = m.next;
    load_queries<E>(p, m.rows);
    keep_tiles_awake<E::tiles>();
    if (tile + 1 < end) describe_tile(p, m.next, tile + 1);
    keep_tiles_awake<E::tiles>();
    plan_prefetch(f, m, tile + 1 < end ? &m.next : nullptr);
    int64_t low = first_key(m.rows), high = m.rows.high;
    if (n > 1) {
      if (low < split * kSplitKeys) low = split * kSplitKeys;
      if (high > (split + 1) * kSplitKeys) high = (split + 1) * kSplitKeys;
      m.state = state_in<E>(
          p, f.partial + (tile * n + split) * state_size<E>(p) * sizeof(typename E::Real));
    }
    clear_sums(p, m.state);
    keep_tiles_awake<E::tiles>();
    const bool masked = add_keys(f, m, key_head_of(p, m.rows), low, high, false, kNoLook);
    check_sums(f, m, low, high, masked);
    keep_tiles_awake<E::tiles>();
    if (n == 1) write_rows(f, m.rows, m.state);
  }
}

// Merges the partial results of a split tile, in their order.
template <class E>
static void run_merge(const void* pass, int64_t unit, char* memory, const Stop&) {
  typedef typename E::Real Real;
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  ForwardMemory<E> m(f, scratch);
  const TileConfiguration<E::tiles> configuration;  // for write_rows
  const int64_t n = splits<E>(p), size = state_size<E>(p);
  describe_tile(p, m.rows, unit);
  const Scaling<E> scaling(p);
  const SoftmaxState<E>& sum = m.state;
  for (int64_t x = 0; x < size; ++x) sum.out[x] = 0;
  for (int v = 0; v < m.rows.vectors; ++v) {
    const int at = v * E::lanes;
    const auto vec = [&](const Real* x) -> Vec<Real>& { return *(Vec<Real>*)(x + at); };
    vec(sum.maximum) = vec(sum.base) = Vec<Real>{} - kInf<Real>;
    for (int64_t i = 0; i < n; ++i) {
      const SoftmaxState<E> part = state_in<E>(p, f.partial + (unit * n + i) * size * sizeof(Real));
      vec(sum.maximum) = larger(vec(part.maximum), vec(sum.maximum));
      vec(sum.base) = larger(vec(part.base), vec(sum.base));
    }
    if (!E::tiles) vec(sum.base) = vec(sum.maximum);
    const auto base = scaling.base(vec(sum.base));
    for (int64_t i = 0; i < n; ++i) {
      const SoftmaxState<E> part = state_in<E>(p, f.partial + (unit * n + i) * size * sizeof(Real));
      const Vec<Real> factor = exp2(scaling.exponent(vec(part.base), base));
      add_compensated(vec(sum.total), vec(sum.compensation), vec(part.total) * factor);
      vec(sum.compensation) += vec(part.compensation) * factor;
      vec(sum.rounded) += vec(part.rounded) * factor;
      for (int64_t d = 0; d < p.Dv; ++d)
        vec(sum.out + d * E::rows) += vec(part.out + d * E::rows) * factor;
    }
  }
  write_rows(f, m.rows, sum);
}

}  // namespace regard::REGARD_NAMESPACE
