// A few queries against many keys: what counts is to read every key and value once, as fast as the
// memory gives them. So numbers of a row are in the lanes here, and nothing is transposed; the rows
// of all heads that share a key use it while it is there.

constexpr int64_t kDecodeRows = 8;  // above, queries in the lanes are faster
constexpr int kDecodeKeys = 512;    // of a block, or fewer where they are long
constexpr int kDecodeVectors = 4;   // of a tile of four rows
// In bytes:
constexpr int64_t kDecodeBytes = 256 << 10;  // of the keys of a block
constexpr int64_t kPage = 4096;
constexpr int64_t kAhead = 16384;  // how far ahead of the sums the memory is asked
constexpr int64_t kStart = 1024;   // what is asked for where reading goes on elsewhere

// Asks for some bytes. Into the second cache: the first has too few lines under way to keep the
// memory busy.
static inline void ask_for(const char* p, int64_t bytes) {
  for (int64_t x = 0; x < bytes; x += 64) __builtin_prefetch(p + x, 0, 2);
}

// Asks for a row that comes some rows after this one.
static inline void ask_ahead(const char* row, int64_t stride, int64_t bytes) {
  ask_for(row + (kAhead / (stride > 0 ? stride : 1) + 1) * stride, bytes);
}

// Asks for the page behind that of a row which is the first of its page: the rest of a page the
// processor fetches by itself, if it is read in its order.
static inline void ask_page(const char* row, int64_t stride) {
  if (int64_t(uintptr_t(row) % kPage) < stride) __builtin_prefetch(row + kPage, 0, 2);
}

// Weights need scores with the same roundings in every pass: those of queries in the lanes.
template <class E>
static bool decodes(const Forward& f) {
  const Problem& p = *f.problem;
  constexpr int64_t most = E::rows < kDecodeRows ? E::rows : kDecodeRows;
  return !f.maximum && !p.mask && !p.key_ids && !p.threshold && p.Hkv && p.value && p.Lk >= kKeys &&
         p.Hq / p.Hkv * p.Lq <= most;
}

static int64_t decode_pieces(const Problem& p) {
  return p.Lk > kPiece ? (p.Lk + kPiece - 1) / kPiece : 1;
}

// What a piece has gathered: out [row][Dv up to lanes], top and total [row].
template <class E>
struct DecodeState {
  typename E::Real *out, *top, *total;
};

template <class E>
static int64_t decode_width(const Problem& p) {
  constexpr int64_t n = E::pack * E::lanes;
  return (p.Dv + n - 1) / n * n;
}

template <class E>
static int64_t decode_state_size(const Problem& p) {
  return kDecodeRows * (decode_width<E>(p) + 2);
}

template <class E>
static DecodeState<E> decode_state(const Problem& p, char* memory, int64_t i) {
  typename E::Real* out = (typename E::Real*)memory + i * decode_state_size<E>(p);
  typename E::Real* top = out + kDecodeRows * decode_width<E>(p);
  return {out, top, top + kDecodeRows};
}

template <class E>
struct DecodeMemory {
  Rows<E> rows;
  // What values are multiplied with: bfloat16 where they are multiplied in pairs.
  typedef std::conditional_t<(E::pack > 1), uint16_t, typename E::Real> Weight;
  typename E::Word* queries;  // [row][words up to lanes]
  typename E::Real* scores;   // [row][kDecodeKeys]: scores, then weights
  Weight* weights;            // likewise

  DecodeMemory(const Problem& p, Scratch& scratch) {
    rows.q = nullptr;
    queries = scratch.take<typename E::Word>(kDecodeRows * width(p));
    scores = scratch.take<typename E::Real>(kDecodeRows * kDecodeKeys);
    weights = E::pack > 1 ? scratch.take<Weight>(kDecodeRows * kDecodeKeys) : (Weight*)scores;
  }
  static int64_t width(const Problem& p) {
    return (E::words(p.D) + E::lanes - 1) / E::lanes * E::lanes;
  }
};

// The products of R rows of queries with `keys` keys: scores[row][key].
template <class E, int R>
__attribute__((noinline)) static void dot_keys(const Problem& p, const typename E::Word* queries,
                                               int64_t width, const char* key, int keys,
                                               typename E::Real* scores) {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  constexpr int n = E::lanes, K = n / R;
  const int64_t stride = p.key.strides[2], bytes = E::pack * int64_t(sizeof(typename E::Bits));
  const int64_t whole = p.D / (n * E::pack) * n;
  for (int j = 0; j < keys; j += K) {
    const char* row[K];
    for (int i = 0; i < K; ++i) {
      row[i] = key + (j + i < keys ? j + i : keys - 1) * stride;
      ask_ahead(row[i], stride, p.D * bytes / E::pack);
    }
    Vec<Real> sum[n] = {};
    const auto add = [&](int64_t w, int64_t count) {
      Vec<Word> q[R];
      for (int r = 0; r < R; ++r) q[r] = *(const Vec<Word>*)(queries + r * width + w);
      for (int i = 0; i < K; ++i) {
        const Vec<Word> k = words_at<E>(row[i] + w * bytes, count);
        for (int r = 0; r < R; ++r) sum[r * K + i] = E::Op::add(sum[r * K + i], q[r], k);
      }
    };
    for (int64_t w = 0; w < whole; w += n) add(w, n * E::pack);
    if (whole < width) add(whole, p.D - whole * E::pack);
    const Vec<Real> all = fold_each(sum, [](Vec<Real> x, Vec<Real> y) { return x + y; });
    for (int r = 0; r < R; ++r)  // behind the last key too, where there is room
      __builtin_memcpy(scores + r * kDecodeKeys + j, (const Real*)&all + r * K, K * sizeof(Real));
  }
}

// out[row] += the weights of R rows times some values: `count` numbers of each, V vectors of sums.
// `ask`: whether the memory is asked for the same numbers further on.
template <class E, int R, int V, bool ask>
__attribute__((noinline)) static void add_tile(const typename DecodeMemory<E>::Weight* weights,
                                               const char* value, int64_t stride, int keys,
                                               int64_t count, int64_t width,
                                               typename E::Real* out) {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  constexpr int n = E::lanes;
  constexpr int64_t bytes = sizeof(typename E::Bits);
  alignas(64) static constexpr char nothing[V * n * bytes] = {};
  const auto words = [&](const char* p, int v) {  // the numbers of E::pack vectors
    return words_at<E>(p + v * n * bytes, V > E::pack ? E::pack * n : count);
  };
  Vec<Real> sum[R][V] = {};
  for (int j = 0; j < keys; j += E::pack) {
    const char* row = value + j * stride;
    [[maybe_unused]] const char* next = j + 1 < keys ? row + stride : nothing;
    if (ask)
      for (int i = 0; i < E::pack; ++i) ask_ahead(row + i * stride, stride, V * n * bytes);
    Vec<Word> w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      w[r] = in_register(broadcast(read<Word>(weights + r * kDecodeKeys + j)));
#pragma GCC unroll 8
    for (int v = 0; v < V; v += E::pack) {
      Vec<Word> y[E::pack] = {words(row, v)};
#ifdef REGARD_PAIRS
      if constexpr (E::pack > 1) {
        const I x = y[0], z = words(next, v);
        y[0] = interleave<0>(x, z), y[1] = interleave<1>(x, z);
      }
#endif
#pragma GCC unroll 4
      for (int i = 0; i < E::pack; ++i) {
        y[i] = in_register(y[i]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][v + i] = E::Op::add(sum[r][v + i], w[r], y[i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) *(Vec<Real>*)(out + r * width + v * n) += sum[r][v];
}

// The numbers from d on, in tiles of V vectors and then of fewer, of as many rows as fit.
template <class E, int R, int V, bool ask>
static void add_tiles(const typename DecodeMemory<E>::Weight* weights, const char* value,
                      int64_t stride, int keys, int64_t d, int64_t Dv, int64_t width,
                      typename E::Real* out) {
  constexpr int64_t n = V * E::lanes;
  constexpr int fit = 4 * kDecodeVectors / V, T = fit < R ? fit : R;
  const auto add = [&](int64_t count) {
    for (int r = 0; r < R; r += T)
      add_tile<E, T, V, ask>(weights + r * kDecodeKeys,
                             value + d * int64_t(sizeof(typename E::Bits)), stride, keys, count,
                             width, out + r * width + d);
  };
  for (; d + n <= Dv; d += n) add(n);
  if constexpr (V > E::pack)
    add_tiles<E, R, V / 2, ask>(weights, value, stride, keys, d, Dv, width, out);
  else if (d < Dv)
    add(Dv - d);
}

// All numbers of some values: a page after the other where a tile takes whole values, so that they
// are read strictly in their order.
template <class E, int R>
static void add_values(const typename DecodeMemory<E>::Weight* weights, const char* value,
                       int64_t stride, int keys, int64_t Dv, int64_t width, typename E::Real* out) {
  constexpr int V = 2 * kDecodeVectors;
  if (Dv > V * E::lanes)
    return add_tiles<E, R, kDecodeVectors, true>(weights, value, stride, keys, 0, Dv, width, out);
  const int64_t bytes = Dv * int64_t(sizeof(typename E::Bits));
  const int page = int(kPage / (bytes + 1)) / 2 * 2 + 2;  // values
  for (int j = 0; j < keys; j += page) {
    const int some = keys - j < page ? keys - j : page;
    for (int i = j; i < j + some; ++i) {
      const char* row = value + i * stride;
      if (stride < 2 * bytes)
        ask_page(row, stride);
      else
        ask_ahead(row, stride, bytes);
    }
    add_tiles<E, R, V, false>(weights + j, value + j * stride, stride, some, 0, Dv, width, out);
  }
}

// Makes weights of a row's scores, two vectors at a time; returns their sum as they are multiplied.
template <class E>
static typename E::Real weigh_row(const Scaling<E>& scaling, Vec<typename E::Real> base, int keys,
                                  typename E::Real* row,
                                  [[maybe_unused]] typename DecodeMemory<E>::Weight* weights) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  Vec<Real> sum = {};
  for (int j = 0; j < keys; j += 2 * n) {
    Vec<Real> x[2];
    for (int i = 0; i < 2; ++i) x[i] = scaling.exponent(*(const Vec<Real>*)(row + j + i * n), base);
    exp2_each(x);
#ifdef REGARD_PAIRS
    if constexpr (E::pack > 1) {
      const I rounded = (I)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
      *(I*)(weights + j) = rounded;
      sum = Pairs::add(sum, rounded, I{} + kOnes);
      continue;
    }
#endif
    for (int i = 0; i < 2; ++i) *(Vec<Real>*)(row + j + i * n) = x[i], sum += x[i];
  }
  return sum_lanes<Real>(sum);
}

template <class E, int R>
static void decode_block(const Problem& p, DecodeMemory<E>& m, const DecodeState<E>& state, int r0,
                         int64_t kv, int64_t j0, int keys) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Scaling<E> scaling(p);
  Real* scores = m.scores + r0 * kDecodeKeys;
  const int64_t width = m.width(p), out_width = decode_width<E>(p);
  dot_keys<E, R>(p, m.queries + r0 * width, width, p.key.at(m.rows.b, kv, j0), keys, scores);
  const char* const value = p.value.at(m.rows.b, kv, j0);
  ask_for(value, kStart);
  bool whole = true;
  const int even = (keys + 2 * n - 1) / (2 * n) * (2 * n);
  for (int r = r0; r < r0 + R; ++r) {
    Real* row = m.scores + r * kDecodeKeys;
    const auto hide_rest = [&] {
      for (int j = keys; j < even; ++j) row[j] = -kInf<Real>;
    };
    hide_rest();
    if (r >= m.rows.count) {
      for (int j = 0; j < even; ++j) m.weights[r * kDecodeKeys + j] = 0;
      continue;
    }
    if (!scaling.raw) {
      const Real cap = Real(p.softcap);
      for (int j = 0; j < keys; j += n) {
        Vec<Real>& s = *(Vec<Real>*)(row + j);
        s *= Real(p.scale);
        if (p.softcap != 0) s = tanh(s / cap) * cap;
      }
      if (p.bias) {
        const char* bias = p.bias.at(m.rows.b, m.rows.head[r], m.rows.index[r]);
        for (int j = 0; j < keys; ++j)
          row[j] += number<Real>(bias + (j0 + j) * p.bias.strides[3], p.bias.type);
      }
      hide_rest();
    }
    const auto inside = [&](int64_t j) { return int(j < j0 ? 0 : j - j0 > keys ? keys : j - j0); };
    const int first = inside(m.rows.first[r]), last = inside(m.rows.last[r]);
    for (int j = 0; j < first; ++j) row[j] = -kInf<Real>;
    for (int j = last; j < keys; ++j) row[j] = -kInf<Real>;
    whole &= first == 0 && last == keys;
    Vec<Real> highest = Vec<Real>{} + state.top[r];
    for (int j = 0; j < keys; j += n) highest = larger(*(const Vec<Real>*)(row + j), highest);
    const Real top = max_lanes<Real>(highest);
    const Vec<Real> base = scaling.base(broadcast(top));
    if (top != state.top[r]) {
      const Vec<Real> factor = exp2(scaling.exponent(broadcast(state.top[r]), base));
      state.total[r] *= factor[0];
      for (int64_t d = 0; d < out_width; d += n)
        *(Vec<Real>*)(state.out + r * out_width + d) *= factor;
      state.top[r] = top;
    }
    state.total[r] += weigh_row(scaling, base, keys, row, m.weights + r * kDecodeKeys);
  }
  ask_for(p.key.at(m.rows.b, kv, j0 + keys), kStart);
  if (whole || finite<E>(value, p.value.strides[2], keys, p.Dv))
    return add_values<E, R>(m.weights + r0 * kDecodeKeys, value, p.value.strides[2], keys, p.Dv,
                            out_width, state.out + r0 * out_width);
  for (int r = r0; r < r0 + R && r < m.rows.count; ++r)
    for (int j = 0; j < keys; ++j) {
      if (!sees(p, m.rows, r, j0 + j)) continue;
      const auto w = m.weights[r * kDecodeKeys + j];
      for (int64_t d = 0; d < p.Dv; ++d)
        state.out[r * out_width + d] +=
            number<Real>((const char*)&w, E::pack > 1 ? E::type : real_type<Real>) *
            number<Real>(value + j * p.value.strides[2] + d * int64_t(sizeof(typename E::Bits)),
                         E::type);
    }
}

template <class E>
static void run_decode(const void* pass, int64_t task, char* memory, const Stop&) {
  typedef typename E::Real Real;
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  DecodeMemory<E> m(p, scratch);
  const int64_t n = decode_pieces(p), head = task / n, piece = task % n, kv = head % p.Hkv;
  const int64_t group = p.Hq / p.Hkv;
  find(p, m.rows, head / p.Hkv, kv * group, 0, group * p.Lq);
  std::memset((void*)m.queries, 0, size_t(kDecodeRows * m.width(p)) * sizeof(typename E::Word));
  for (int r = 0; r < m.rows.count; ++r)
    for (int64_t w = 0; w < E::words(p.D); w += E::lanes)
      *(Vec<typename E::Word>*)(m.queries + r * m.width(p) + w) = words_at<E>(
          m.rows.query[r] + w * E::pack * int64_t(sizeof(typename E::Bits)), p.D - w * E::pack);
  const DecodeState<E> state = decode_state<E>(p, f.partial, task);
  std::memset((void*)state.out, 0, size_t(decode_state_size<E>(p)) * sizeof(Real));
  for (int64_t r = 0; r < kDecodeRows; ++r) state.top[r] = -kInf<Real>;
  const int64_t low = m.rows.low > piece * kPiece ? m.rows.low : piece * kPiece;
  const int64_t high = m.rows.high < (piece + 1) * kPiece ? m.rows.high : (piece + 1) * kPiece;
  const int64_t bytes = (p.D > p.Dv ? p.D : p.Dv) * int64_t(sizeof(typename E::Bits));
  const int64_t fit = kDecodeBytes / bytes / 32 * 32;  // whole vectors of scores
  const int64_t most = fit < kDecodeKeys ? fit : kDecodeKeys;
  for (int64_t j0 = low; j0 < high; j0 += most) {
    const int keys = int(high - j0 < most ? high - j0 : most);
    for (int r = 0; r < m.rows.count;) {
      if (E::lanes >= 4 && m.rows.count - r > 2) {
        constexpr int R = E::lanes >= 4 ? 4 : 1;
        decode_block<E, R>(p, m, state, r, kv, j0, keys), r += R;
      } else if (m.rows.count - r > 1) {
        decode_block<E, 2>(p, m, state, r, kv, j0, keys), r += 2;
      } else {
        decode_block<E, 1>(p, m, state, r, kv, j0, keys), r += 1;
      }
    }
  }
}

// Puts the pieces of the rows of a key head together, and writes them.
template <class E>
static void run_decode_merge(const void* pass, int64_t head, char* memory, const Stop&) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Forward& f = *(const Forward*)pass;
  const Problem& p = *f.problem;
  Scratch scratch(memory);
  DecodeMemory<E> m(p, scratch);
  const int64_t group = p.Hq / p.Hkv, pieces = decode_pieces(p), width = decode_width<E>(p);
  find(p, m.rows, head / p.Hkv, head % p.Hkv * group, 0, group * p.Lq);
  const Scaling<E> scaling(p);
  for (int r = 0; r < m.rows.count; ++r) {
    Real top = -kInf<Real>, total = 0;
    for (int64_t i = 0; i < pieces; ++i) {
      const Real x = decode_state<E>(p, f.partial, head * pieces + i).top[r];
      top = x > top ? x : top;
    }
    const Vec<Real> base = scaling.base(broadcast(top));
    const auto factor = [&](const DecodeState<E>& part) {
      return exp2(scaling.exponent(broadcast(part.top[r]), base));
    };
    for (int64_t i = 0; i < pieces; ++i) {
      const DecodeState<E> part = decode_state<E>(p, f.partial, head * pieces + i);
      total += part.total[r] * factor(part)[0];
    }
    const Real by = settle(p, scaling, m.rows.head[r], top, total, total);
    const int64_t row = (m.rows.b * p.Hq + m.rows.head[r]) * p.Lq + m.rows.index[r];
    for (int64_t d = 0; d < p.Dv; d += n) {
      Vec<Real> sum = {};
      for (int64_t i = 0; i < pieces; ++i) {
        const DecodeState<E> part = decode_state<E>(p, f.partial, head * pieces + i);
        sum += *(const Vec<Real>*)(part.out + r * width + d) * factor(part);
      }
      put<Real, E::type>(f.out + (row * p.Dv + d) * int64_t(sizeof(typename E::Bits)), sum * by,
                         p.Dv - d);
    }
  }
}

static Job forward(const Forward& f) {
  return by_type<Job>(f.problem->type, [&]<class E>(E) -> Job {
    const Problem& p = *f.problem;
    Scratch scratch(nullptr);
    if (decodes<E>(f)) {
      DecodeMemory<E> m(p, scratch);
      return {p.B * p.Hkv * decode_pieces(p), scratch.taken(), run_decode<E>, &f};
    }
    ForwardMemory<E> m(f, scratch);
    return {forward_tasks<E>(f), scratch.taken(), run_forward<E>, &f};
  });
}

static Job merge(const Forward& f) {
  return by_type<Job>(f.problem->type, [&]<class E>(E) -> Job {
    const Problem& p = *f.problem;
    Scratch scratch(nullptr);
    if (decodes<E>(f)) {
      DecodeMemory<E> m(p, scratch);
      return {p.B * p.Hkv, scratch.taken(), run_decode_merge<E>, &f};
    }
    ForwardMemory<E> m(f, scratch);
    const int64_t units = pieces<E>(p) > 1 ? p.B * p.Hkv : 0;
    return {units, scratch.taken(), run_merge<E>, &f};
  });
}

static int64_t partial_bytes(const Forward& f) {
  return by_type<int64_t>(f.problem->type, [&]<class E>(E) -> int64_t {
    const Problem& p = *f.problem;
    if (decodes<E>(f))
      return p.B * p.Hkv * decode_pieces(p) * decode_state_size<E>(p) *
             int64_t(sizeof(typename E::Real));
    const int64_t n = pieces<E>(p);
    return n > 1 ? p.B * p.Hkv * n * state_size<E>(p) * int64_t(sizeof(typename E::Real)) : 0;
  });
}
