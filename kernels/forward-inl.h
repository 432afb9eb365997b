// The forward pass, with queries in the lanes: S^T = K Q^T and O^T = V^T P^T. Rows of key and value
// are read where they are, a number at a time; only the block of queries is transposed. Maximum, sum,
// exp and masks are lane-wise, and nothing is ever summed across lanes.
//
// The rows of a task are those of the query heads that share one key head, one head behind another.

constexpr int kVectors = kLanes == 16 ? 4 : 3;  // of queries: 4 x 4 sums of 32 registers, 4 x 3 of 16
constexpr int kRows = kVectors * kLanes;     // queries of a task
constexpr int kKeys = 128;                    // of a block: 1 % over 64, benchmarks/forward.py
constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504088896341f;

// Scratch of one thread, all of it `[...][kRows]` and aligned.
struct Block {
  float* q;       // [D]
  float* s;       // [kKeys]: scores, then weights
  float* out;     // [Dv]
  int64_t first[kRows], last[kRows];         // the keys that a row may see, before mask and segments
  int64_t head[kRows], index[kRows];         // which query a row is
  int rows;                                  // that are used; the others see nothing
};

// s[r] = k[r] . q for R keys, V vectors of queries.
template <int R, int V>
__attribute__((noinline)) static void products(const float* q, const float* k, int64_t stride,
                                               int64_t D, float* s) {
  F sum[R][V] = {};
#pragma GCC unroll 4
  for (int64_t d = 0; d < D; ++d) {
    F x[V];
    for (int v = 0; v < V; ++v) x[v] = *(const F*)(q + d * kRows + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const F y = in_register(broadcast(k[r * stride + d]));
      for (int v = 0; v < V; ++v) sum[r][v] += x[v] * y;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *(F*)(s + r * kRows + v * kLanes) = sum[r][v];
}

// out[r] += sum over keys of p[key] * v[key][r] for R numbers of the value.
template <int R, int V>
__attribute__((noinline)) static void accumulate(const float* p, const float* value, int64_t stride,
                                                 int64_t keys, float* out) {
  F sum[R][V] = {};  // of this block alone: the error grows with the blocks, not with the keys
#pragma GCC unroll 4
  for (int64_t j = 0; j < keys; ++j) {
    F x[V];
    for (int v = 0; v < V; ++v) x[v] = *(const F*)(p + j * kRows + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const F y = in_register(broadcast(value[j * stride + r]));
      for (int v = 0; v < V; ++v) sum[r][v] += x[v] * y;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *(F*)(out + r * kRows + v * kLanes) += sum[r][v];
}

#define REGARD_BY_VECTORS(name, R, vectors, ...)      \
  switch (vectors) {                                  \
    case 1: name<R, 1>(__VA_ARGS__); break;           \
    case 2: name<R, 2>(__VA_ARGS__); break;           \
    case 3: name<R, 3>(__VA_ARGS__); break;           \
    default: name<R, kVectors>(__VA_ARGS__); break;   \
  }

static void scores(const Forward& f, const Block& block, const float* k, int keys, int vectors) {
  const int64_t stride = f.key_strides[2];
  int j = 0;
  for (; j + 4 <= keys; j += 4)
    REGARD_BY_VECTORS(products, 4, vectors, block.q, k + j * stride, stride, f.D,
                      block.s + j * kRows)
  for (; j < keys; ++j)
    REGARD_BY_VECTORS(products, 1, vectors, block.q, k + j * stride, stride, f.D,
                      block.s + j * kRows)
}

static void add_values(const Forward& f, const Block& block, const float* value, int keys,
                       int vectors) {
  const int64_t stride = f.value_strides[2];
  int64_t d = 0;
  for (; d + 4 <= f.Dv; d += 4)
    REGARD_BY_VECTORS(accumulate, 4, vectors, block.s, value + d, stride, keys,
                      block.out + d * kRows)
  for (; d < f.Dv; ++d)
    REGARD_BY_VECTORS(accumulate, 1, vectors, block.s, value + d, stride, keys,
                      block.out + d * kRows)
}

// As add_values, where a value may be NaN or inf: what a row does not see takes no part.
// Visible are the keys whose score is not -inf before the exponential, kept in `seen`.
static void add_values_carefully(const Forward& f, const Block& block, const float* value, int keys,
                                 int vectors, const uint8_t* seen) {
  for (int j = 0; j < keys; ++j)
    for (int64_t d = 0; d < f.Dv; ++d) {
      const float x = value[j * f.value_strides[2] + d];
      for (int i = 0; i < vectors * kLanes; ++i)
        if (seen[j * kRows + i]) block.out[d * kRows + i] += block.s[j * kRows + i] * x;
    }
}

// Computes what comes between the products and the softmax: softcap, bias, and -inf where invisible.
// `plain` says that every row sees every key of the block, as far as intervals decide.
static void finish_scores(const Forward& f, const Block& block, int64_t b, int64_t j0, int keys,
                          int vectors, bool plain, uint8_t* seen) {
  const int lanes = vectors * kLanes;
  if (f.softcap != 0) {
    const float inverse = 1.0f / f.softcap;
    for (int j = 0; j < keys; ++j)
      for (int v = 0; v < vectors; ++v) {
        F* s = (F*)(block.s + j * kRows + v * kLanes);
        *s = tanh(*s * inverse) * f.softcap;
      }
  }
  if (f.bias) {
    for (int i = 0; i < block.rows; ++i) {
      const float* row = f.bias + b * f.bias_strides[0] + block.head[i] * f.bias_strides[1] +
                         block.index[i] * f.bias_strides[2] + j0 * f.bias_strides[3];
      for (int j = 0; j < keys; ++j) block.s[j * kRows + i] += row[j * f.bias_strides[3]];
    }
  }
  if (!plain) {
    for (int v = 0; v < vectors; ++v) {
      I first, last;
      for (int i = 0; i < kLanes; ++i) {
        const int64_t low = block.first[v * kLanes + i] - j0, high = block.last[v * kLanes + i] - j0;
        first[i] = int32_t(low < 0 ? 0 : low > keys ? keys : low);
        last[i] = int32_t(high < 0 ? 0 : high > keys ? keys : high);
      }
      for (int j = 0; j < keys; ++j) {
        F* s = (F*)(block.s + j * kRows + v * kLanes);
        const I at = broadcast_int(j);
        *s = ((at >= first) & (at < last)) ? *s : broadcast(-kInf);
      }
    }
  }
  if (seen)
    for (int j = 0; j < keys; ++j)
      for (int i = 0; i < lanes; ++i)
        seen[j * kRows + i] = j0 + j >= block.first[i] && j0 + j < block.last[i];
  if (!f.mask && !f.key_segments) return;
  const int64_t* ids = f.key_segments ? f.key_segments + b * f.key_segments_stride + j0 : nullptr;
  for (int i = 0; i < block.rows; ++i) {
    const int64_t h = block.head[i], q = block.index[i];
    const uint8_t* allowed = !f.mask ? nullptr
                                     : f.mask + b * f.mask_strides[0] + h * f.mask_strides[1] +
                                           q * f.mask_strides[2] + j0 * f.mask_strides[3];
    const int64_t id = ids ? f.query_segments[b * f.query_segments_stride + q] : 0;
    for (int j = 0; j < keys; ++j)
      if ((allowed && !allowed[j * f.mask_strides[3]]) || (ids && ids[j] != id)) {
        block.s[j * kRows + i] = -kInf;
        if (seen) seen[j * kRows + i] = 0;
      }
  }
}

// Turns scores into weights relative to the running maximum, and scales what was summed before.
static void softmax(const Forward& f, const Block& block, int keys, int v, F& maximum, F& total) {
  float* s = block.s + v * kLanes;
  F highest = maximum;
  for (int j = 0; j < keys; ++j) {
    const F x = *(const F*)(s + j * kRows);
    highest = x > highest ? x : highest;  // a NaN is passed over here and comes out of exp2
  }
  const F base = highest == -kInf ? F{} : highest;
  if (any(highest != maximum)) {
    const F factor = exp2((maximum - base) * kLog2e);
    total *= factor;
    for (int64_t d = 0; d < f.Dv; ++d) *(F*)(block.out + d * kRows + v * kLanes) *= factor;
    maximum = highest;
  }
  F sum = {};
  for (int j = 0; j < keys; ++j) {
    F* x = (F*)(s + j * kRows);
    *x = exp2((*x - base) * kLog2e);  // first the difference: exact for large scores too
    sum += *x;
  }
  total += sum;
}

// Copies the task's queries into the lanes, scaled, and says what each may see.
static void take_rows(const Forward& f, Block& block, int64_t b, int64_t kv, int64_t row0) {
  const int64_t group = f.Hq / f.Hkv, all = group * f.Lq;
  block.rows = int(all - row0 < kRows ? all - row0 : kRows);
  for (int i = 0; i < kRows; ++i) {
    block.first[i] = block.last[i] = 0;
    if (i >= block.rows) {
      for (int64_t d = 0; d < f.D; ++d) block.q[d * kRows + i] = 0;
      continue;
    }
    const int64_t h = kv * group + (row0 + i) / f.Lq, q = (row0 + i) % f.Lq;
    const int64_t p = f.starts[b] + q;
    int64_t first = f.left >= 0 ? p - f.left : 0, last = f.lengths[b];
    if (f.causal && p + 1 < last) last = p + 1;
    if (f.right >= 0 && p + f.right + 1 < last) last = p + f.right + 1;
    if (first < 0) first = 0;
    if (last < 0) last = 0;
    block.head[i] = h;
    block.index[i] = q;
    block.first[i] = first;
    block.last[i] = last < first ? first : last;
    const float* row = f.query + b * f.query_strides[0] + h * f.query_strides[1] +
                       q * f.query_strides[2];
    for (int64_t d = 0; d < f.D; ++d) block.q[d * kRows + i] = row[d] * f.scale;
  }
}

// Computes one task: up to kRows rows of the heads that share key head kv.
static void rows_forward(const Forward& f, Block& block, uint8_t* seen, int64_t b, int64_t kv,
                         int64_t row0) {
  take_rows(f, block, b, kv, row0);
  const int vectors = (block.rows + kLanes - 1) / kLanes;
  int64_t low = f.Lk, high = 0, low_all = 0, high_all = f.Lk;
  for (int i = 0; i < block.rows; ++i) {
    if (block.first[i] == block.last[i]) { low_all = f.Lk; continue; }
    if (block.first[i] < low) low = block.first[i];
    if (block.last[i] > high) high = block.last[i];
    if (block.first[i] > low_all) low_all = block.first[i];
    if (block.last[i] < high_all) high_all = block.last[i];
  }
  for (int64_t x = 0; x < f.Dv * kRows; ++x) block.out[x] = 0;
  F maximum[kVectors], total[kVectors] = {};
  for (int v = 0; v < kVectors; ++v) maximum[v] = broadcast(-kInf);
  const float* key = f.key + b * f.key_strides[0] + kv * f.key_strides[1];
  const float* value = f.value + b * f.value_strides[0] + kv * f.value_strides[1];
  for (int64_t j0 = low; j0 < high; j0 += kKeys) {
    const int keys = int(high - j0 < kKeys ? high - j0 : kKeys);
    const bool plain = low_all <= j0 && j0 + keys <= high_all;
    scores(f, block, key + j0 * f.key_strides[2], keys, vectors);
    finish_scores(f, block, b, j0, keys, vectors, plain, f.finite ? nullptr : seen);
    for (int v = 0; v < vectors; ++v) softmax(f, block, keys, v, maximum[v], total[v]);
    if (f.finite)
      add_values(f, block, value + j0 * f.value_strides[2], keys, vectors);
    else
      add_values_carefully(f, block, value + j0 * f.value_strides[2], keys, vectors, seen);
  }
  const int64_t group = f.Hq / f.Hkv;
  for (int i = 0; i < block.rows; ++i) {
    const int v = i / kLanes, lane = i % kLanes;
    float sum = total[v][lane], top = maximum[v][lane], grown = 1.0f;
    if (f.sinks && top != -kInf) {
      // The sink takes part like one more key, whose score may be the largest.
      const float sink = f.sinks[block.head[i]];
      const float higher = sink > top ? sink : top;
      grown = exp2(broadcast((top - higher) * kLog2e))[0];
      sum = sum * grown + exp2(broadcast((sink - higher) * kLog2e))[0];
    }
    const float factor = top == -kInf ? 0.0f : grown / sum;
    const int64_t row = row0 + i, h = kv * group + row / f.Lq, q = row % f.Lq;
    float* out = f.out + ((b * f.Hq + h) * f.Lq + q) * f.Dv;
    for (int64_t d = 0; d < f.Dv; ++d) out[d] = block.out[d * kRows + i] * factor;
  }
}

static int64_t tasks(const Forward& f) {
  const int64_t rows = f.Hkv ? f.Hq / f.Hkv * f.Lq : 0;
  return f.B * f.Hkv * ((rows + kRows - 1) / kRows);
}

static int64_t scratch_floats(const Forward& f) {
  return (f.D + f.Dv + kKeys) * kRows + kKeys * kRows / 4;
}

// Takes tasks until none is left. The last rows first: with a causal mask they are the longest.
static void forward(const Forward& f, Work& work, float* scratch, void (*poll)(Work&)) {
  Block block;
  block.q = scratch;
  block.out = block.q + f.D * kRows;
  block.s = block.out + f.Dv * kRows;
  uint8_t* seen = (uint8_t*)(block.s + kKeys * kRows);
  const int64_t rows = f.Hq / f.Hkv * f.Lq, per_head = (rows + kRows - 1) / kRows;
  const int64_t all = tasks(f);
  for (;;) {
    const int64_t task = all - 1 - work.next.fetch_add(1, std::memory_order_relaxed);
    if (task < 0 || work.stop.load(std::memory_order_relaxed)) return;
    const int64_t head = task / per_head;
    rows_forward(f, block, seen, head / f.Hkv, head % f.Hkv, task % per_head * kRows);
    if (poll) poll(work);
  }
}
