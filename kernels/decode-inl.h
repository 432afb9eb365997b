// A few queries against many keys: what counts is to read every key and value once, as fast as the
// memory gives them. So numbers of a row are in the lanes here, and nothing is transposed; the rows
// of all heads that share a key use it while it is there.

constexpr int64_t kDecodeRows = 8;         // above, queries in the lanes are faster
constexpr int kDecodeVectors = 4;          // of a tile
constexpr int64_t kPrefetchBytes = 16384;  // how far ahead of the sums the memory is asked

// How far behind a row the one lies that is asked for when it is read.
static inline int64_t ahead_of(int64_t stride) {
  return (kPrefetchBytes / (stride > 0 ? stride : 1) + 1) * stride;
}

// Asks for some bytes. Into the second cache: the first has too few lines under way to keep the
// memory busy.
static inline void ask_for(const char* p, int64_t bytes) {
  for (int64_t x = 0; x < bytes; x += 64) __builtin_prefetch(p + x, 0, 2);
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
  typename E::Real* scores;   // [row][kKeys]: scores, then weights
  Weight* weights;            // likewise

  DecodeMemory(const Problem& p, Scratch& scratch) {
    rows.q = nullptr;
    queries = scratch.take<typename E::Word>(kDecodeRows * width(p));
    scores = scratch.take<typename E::Real>(kDecodeRows * kKeys);
    weights = E::pack > 1 ? scratch.take<Weight>(kDecodeRows * kKeys) : (Weight*)scores;
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
  const int64_t ahead = ahead_of(stride), whole = p.D / (n * E::pack) * n;
  for (int j = 0; j < keys; j += K) {
    const char* row[K];
    for (int i = 0; i < K; ++i) {
      row[i] = key + (j + i < keys ? j + i : keys - 1) * stride;
      ask_for(row[i] + ahead, p.D * bytes / E::pack);
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
      __builtin_memcpy(scores + r * kKeys + j, (const Real*)&all + r * K, K * sizeof(Real));
  }
}

// out[row] += the weights of R rows times some values: `count` numbers of each, V vectors of sums.
template <class E, int R, int V>
__attribute__((noinline)) static void add_tile(const typename DecodeMemory<E>::Weight* weights,
                                               const char* value, int64_t stride, int keys,
                                               int64_t count, int64_t width,
                                               typename E::Real* out) {
  typedef typename E::Real Real;
  typedef typename E::Word Word;
  constexpr int n = E::lanes;
  constexpr int64_t bytes = sizeof(typename E::Bits);
  const int64_t ahead = ahead_of(stride);
  alignas(64) static constexpr char nothing[V * n * bytes] = {};
  const auto words = [&](const char* p, int v) {  // the numbers of E::pack vectors
    return words_at<E>(p + v * n * bytes, V > E::pack ? E::pack * n : count);
  };
  Vec<Real> sum[R][V] = {};
  for (int j = 0; j < keys; j += E::pack) {
    const char* row = value + j * stride;
    [[maybe_unused]] const char* next = j + 1 < keys ? row + stride : nothing;
    for (int i = 0; i < E::pack; ++i) ask_for(row + i * stride + ahead, V * n * bytes);
    Vec<Word> w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) w[r] = in_register(broadcast(read<Word>(weights + r * kKeys + j)));
#pragma GCC unroll 4
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
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) *(Vec<Real>*)(out + r * width + v * n) += sum[r][v];
}

// The numbers from d on, in tiles of V vectors and then of fewer.
template <class E, int R, int V>
static void add_tiles(const typename DecodeMemory<E>::Weight* weights, const char* value,
                      int64_t stride, int keys, int64_t d, int64_t Dv, int64_t width,
                      typename E::Real* out) {
  constexpr int64_t n = V * E::lanes;
  const auto add = [&](int64_t count) {
    add_tile<E, R, V>(weights, value + d * int64_t(sizeof(typename E::Bits)), stride, keys, count,
                      width, out + d);
  };
  for (; d + n <= Dv; d += n) add(n);
  if constexpr (V > E::pack)
    add_tiles<E, R, V / 2>(weights, value, stride, keys, d, Dv, width, out);
  else if (d < Dv)
    add(Dv - d);
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
  Real* scores = m.scores + r0 * kKeys;
  const int64_t width = m.width(p), out_width = decode_width<E>(p);
  dot_keys<E, R>(p, m.queries + r0 * width, width, p.key.at(m.rows.b, kv, j0), keys, scores);
  bool whole = true;
  const int even = (keys + 2 * n - 1) / (2 * n) * (2 * n);
  for (int r = r0; r < r0 + R; ++r) {
    Real* row = m.scores + r * kKeys;
    const auto hide_rest = [&] {
      for (int j = keys; j < even; ++j) row[j] = -kInf<Real>;
    };
    hide_rest();
    if (r >= m.rows.count) {
      for (int j = 0; j < even; ++j) m.weights[r * kKeys + j] = 0;
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
    for (int j = 0; j < keys; ++j)
      if (j0 + j < m.rows.first[r] || j0 + j >= m.rows.last[r]) row[j] = -kInf<Real>, whole = false;
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
    state.total[r] += weigh_row(scaling, base, keys, row, m.weights + r * kKeys);
  }
  const char* value = p.value.at(m.rows.b, kv, j0);
  if (whole || finite<E>(value, p.value.strides[2], keys, p.Dv))
    return add_tiles<E, R, kDecodeVectors>(m.weights + r0 * kKeys, value, p.value.strides[2], keys,
                                           0, p.Dv, out_width, state.out + r0 * out_width);
  for (int r = r0; r < r0 + R && r < m.rows.count; ++r)
    for (int j = 0; j < keys; ++j) {
      if (!sees(p, m.rows, r, j0 + j)) continue;
      const auto w = m.weights[r * kKeys + j];
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
  for (int64_t j0 = low; j0 < high; j0 += kKeys) {
    const int keys = int(high - j0 < kKeys ? high - j0 : kKeys);
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
    ForwardMemory<E> m(p, scratch);
    return {p.B * p.Hkv * row_blocks_of<E>(p) * pieces<E>(p), scratch.taken(), run_forward<E>, &f};
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
    ForwardMemory<E> m(p, scratch);
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
