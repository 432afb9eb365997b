// The gradients, as in FlashAttention: P is recomputed from the row statistics, and with
// dP^T = V dO^T, delta = dO . O of each row and dS = P (dP - delta) they are dV = P^T dO,
// dK = dS^T Q and dQ^T = K^T dS. S^T and dP^T have the queries in the lanes; dV and dK have the
// numbers of a value and a key there.
//
// A task has a chunk of keys and goes through all queries. It alone adds to its part of dK and dV.
// To dQ the chunks add in ticket order, which makes the sum deterministic. Gradients that nobody
// asks for are not computed; the others have the same bits. Source: Dao et al. 2022. Where dP is a
// rule of query and key, with delta given or asked for, there are no dO, O and V.
#pragma once

#include <cstdint>
#include <cstring>
#include <thread>

#include "backward_tile-inl.h"
#include "forward-inl.h"

namespace regard::REGARD_NAMESPACE {

// The vectors of the sums of dQ that have a query: of tiles both of two.
template <class E>
static int paired_vectors(const Rows<E>& rows) {
  return E::tiles ? (rows.vectors + 1) / 2 * 2 : rows.vectors;
}

// The query in a lane of the sums of dQ, where dS is paired by halves of 128 bits (unpack).
template <class E>
static int query_of_lane(int v, int lane) {
  if (!E::tiles) return v * E::lanes + lane;
  return v / 2 * 2 * E::lanes + lane / 4 * 8 + v % 2 * 4 + lane % 4;
}

// Adds the tile's [D][rows] to dQ, transposed and scaled, and its part of the rows' sums of P dP;
// each is optional. Where nothing else adds to dQ, the first chunk of keys sets its sums and the
// last one rounds them.
template <class E>
static void add_to_queries(const Backward& g, const BackwardMemory<E>& m, bool first, bool last) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Problem& p = *g.problem;
  const Real scale = Real(p.scale);
  for (int i = 0; g.delta && i < m.rows.count; ++i)
    ((Real*)g.delta)[(m.rows.b * p.Hq + m.rows.head[i]) * p.Lq + m.rows.index[i]] += m.sum[i];
  if (!g.query_sum) return;
  const bool sets = first && !g.adds, rounds = last && !g.adds;
  int64_t at[E::rows];  // of the rows in dQ
  for (int i = 0; i < m.rows.count; ++i)
    at[i] = ((m.rows.b * p.Hq + m.rows.head[i]) * p.Lq + m.rows.index[i]) * p.D;
  by_written<E>(rounds ? p.type : real_type<Real>, [&]<class S>(S) {
    const Real* const sum = (const Real*)g.query_sum;
    char* const to = rounds ? g.query_grad : (char*)g.query_sum;
    for (int v = 0; v < paired_vectors(m.rows); ++v)
      for (int64_t d = 0; d < p.D; d += n) {
        const int64_t width = p.D - d < n ? p.D - d : n;
        Vec<Real> t[n];
        load_transposed<Real>(m.query_sum + d * E::rows + v * n, E::rows, width, t);
        for (int i = 0; i < n; ++i) {
          const int row = query_of_lane<E>(v, i);
          if (row >= m.rows.count) continue;
          Vec<Real> x = t[i] * scale;
          if (!sets) x += numbers<Real, real_type<Real>>((const char*)(sum + at[row] + d), width);
          put<Real, S::type>(to + (at[row] + d) * int64_t(sizeof(typename S::Bits)), x, width);
        }
      }
  });
}

// Writes zeros to dQ of queries that see no key.
template <class E>
static void clear_queries(const Backward& g, const Rows<E>& rows) {
  const Problem& p = *g.problem;
  const int64_t bytes = p.D * bytes_of(p.type);
  for (int i = 0; g.query_grad && i < rows.count; ++i)
    std::memset(g.query_grad + ((rows.b * p.Hq + rows.head[i]) * p.Lq + rows.index[i]) * bytes, 0,
                size_t(bytes));
}

template <class E>
static void write_keys(Type type, const typename E::Real* sum, int64_t n, int64_t D, double scale,
                       char* to) {
  typedef typename E::Real Real;
  const int64_t width = BackwardMemory<E>::padded(D);
  by_written<E>(type, [&]<class S>(S) {
    for (int64_t j = 0; j < n; ++j)
      for (int64_t d = 0; d < D; d += E::lanes)
        put<Real, S::type>(to + (j * D + d) * int64_t(sizeof(typename S::Bits)),
                           *(const Vec<Real>*)(sum + j * width + d) * Real(scale), D - d);
  });
}

// Adds the same to sums of n keys.
template <class Real>
static void add_keys_to(const Real* sum, int64_t n, int64_t D, int64_t width, double scale,
                        Real* to) {
  for (int64_t j = 0; j < n; ++j)
    for (int64_t d = 0; d < D; ++d) to[j * D + d] += sum[j * width + d] * Real(scale);
}

// A task: a chunk of the keys of a head.
struct KeyChunk {
  int64_t b, kv, begin, end;
};

#ifdef REGARD_TILES
// add_gradients by tiles: a few keys at a time, whose scores, dP, P and dS stay in L1. `to`: the
// first key in its chunk.
template <class E>
static void add_by_tiles(const Backward& g, BackwardMemory<E>& m, const Matrix& k,
                         const Matrix& value, const Matrix& key_pairs, int64_t j0, int64_t to,
                         int keys) {
  const Problem& p = *g.problem;
  constexpr int products = 2 * E::parts - 1;
  constexpr int64_t part = E::rows * 2, stride = E::parts * part;  // of the left operand
  const int64_t steps = (m.rows.vectors + 1) / 2;                  // of 32 queries
  for (int from = 0; from < keys; from += kSomeKeys) {
    const int some = keys - from < kSomeKeys ? keys - from : kSomeKeys;
    const TileMask tile_mask = tile_mask_of(m.rows, j0 + from, some);
    const auto rows_from = [&](const Matrix& x) {
      return Matrix{(const char*)x.data + from * x.stride, x.stride};
    };
    recompute_halves(g, m, tile_mask, rows_from(k), rows_from(value), j0 + from, some,
                     m.dscores_pairs + from / 2 * E::parts * E::rows);
    const auto add_rows = [&](const uint16_t* a, const int32_t* x, int64_t D, float* sum) {
      const TileMatrix left = {(const char*)a, stride, kTileRows * stride, kTileBytes, part};
      const TileVectors right = {x, D, E::words(E::rows) * D, steps, products};
      multiply_by_tiles<true>(left, some, right, D / E::lanes, sum + (to + from) * D, D);
    };
    if (g.value_grad) add_rows(m.half_weights, m.grad_rows, m.padded(p.Dv), m.value_sum);
    if (g.key_grad) add_rows(m.half_dscores, m.query_rows, m.padded(p.D), m.key_sum);
  }
  if (!g.query_sum) return;
  const TileVectors right = {m.dscores_pairs, E::parts * E::rows, E::rows,
                             E::words(keys) / kTileRows, products};
  multiply_by_tiles<true>(tile_pairs<E>(key_pairs, p.D), p.D, right, paired_vectors(m.rows),
                          m.query_sum, E::rows);
}
#endif

// Adds the gradients of a tile of queries and the keys from j0 on.
template <class E>
static void add_gradients(const Backward& g, BackwardMemory<E>& m, const KeyChunk& chunk,
                          int64_t j0, int keys) {
  typedef typename E::Real Real;
  typedef typename E::Op Op;
  constexpr int n = E::lanes;
  const Problem& p = *g.problem;
  if (!mask_shows(p, m.rows, j0, keys)) return;
  const int64_t D = m.padded(p.D), Dv = m.padded(p.Dv), stride = p.key.strides[2];
  const char* key = p.key.at(chunk.b, chunk.kv, j0);
  const Matrix k = stored_rows<E>(p, key, stride, keys, p.D, m.key_rows);
  Matrix value{};
  if (needs_scores(g) && !has_rule(g))
    value = stored_rows<E>(p, p.value.at(chunk.b, chunk.kv, j0), p.value.strides[2], keys, p.Dv,
                           m.value_rows);
  const bool pairs = E::pack > 1 && g.query_sum;
  const Matrix key_pairs = pairs ? as_pairs<E>(key, stride, keys, p.D, m.key_pairs) : k;
#ifdef REGARD_TILES
  if constexpr (E::tiles)
    return add_by_tiles(g, m, k, value, key_pairs, j0, j0 - chunk.begin, keys);
#endif
  const TileMask tile_mask = tile_mask_of(m.rows, j0, keys);
  recompute_weights(g, m, tile_mask, k, value, j0, keys,
                    needs_scores(g) ? Recomputed::scaled : Recomputed::weights);
  if (!g.value_grad && !g.key_grad && !g.query_sum) return;
  const void* weights = m.weights;
  const void* dscores = m.dscores;
  const typename E::Word* dscores_words = (const typename E::Word*)m.dscores;
  int64_t size = sizeof(Real);
  if constexpr (E::pack > 1) {
    pack_dscores(m, tile_mask, keys, Written::of(g, Recomputed::scaled));
    weights = m.half_weights, dscores = m.half_dscores, dscores_words = m.dscores_pairs, size = 2;
  }
  for (int x = 0; x < tile_mask.spans; ++x) {
    const TileMask::Span& span = tile_mask.span[x];
    const int first = span.from * n, height = span.end - span.begin, lead = span.begin / E::pack;
    const int64_t terms = (span.to - span.from) * n / E::pack;
    const int64_t at = (span.begin * E::rows + first) * size, to = j0 - chunk.begin + span.begin;
    if (g.value_grad)
      multiply<Op, false, Epilogue::add>(int(Dv / n), m.grad_rows + first / E::pack * Dv, Dv,
                                         (const char*)weights + at, E::rows * size, terms, height,
                                         m.value_sum + to * Dv, Dv);
    if (g.key_grad)
      multiply<Op, false, Epilogue::add>(int(D / n), m.query_rows + first / E::pack * D, D,
                                         (const char*)dscores + at, E::rows * size, terms, height,
                                         m.key_sum + to * D, D);
    if (g.query_sum)
      multiply<Op, true, Epilogue::add>(
          span.to - span.from, dscores_words + lead * E::rows + first, E::rows,
          (const char*)key_pairs.data + lead * key_pairs.stride, key_pairs.stride, E::words(height),
          p.D, m.query_sum + first, E::rows);
  }
}

// Adds the gradients of a tile of queries and the keys from `low` to `high` of a chunk.
template <class E>
static void add_tile(const Backward& g, BackwardMemory<E>& m, const KeyChunk& chunk, int64_t low,
                     int64_t high) {
  typedef typename E::Real Real;
  const Problem& p = *g.problem;
  const TileConfiguration<E::tiles> configuration;
  load_queries<E>(p, m.rows);
  gather_gradients(g, m);
  std::memset((void*)m.query_sum, 0, size_t(p.D * E::rows) * sizeof(Real));
  if (m.sum) std::memset((void*)m.sum, 0, E::rows * sizeof(Real));
  for (int64_t j0 = low; j0 < high; j0 += kKeys)
    add_gradients(g, m, chunk, j0, int(high - j0 < kKeys ? high - j0 : kKeys));
}

// Clears `finite` where a key or value of the chunk is not, or, at the first chunk, a query or
// gradient of its heads.
template <class E>
static void check_finite(const Backward& g, const KeyChunk& chunk) {
  const Problem& p = *g.problem;
  bool all = true;
  const auto check = [&](const Array& x, int64_t h, int64_t begin, int64_t end, int64_t D) {
    all = all && by_stored<E>(p.type, [&]<class S>(S) {
            return finite<S>(x.at(chunk.b, h, begin), x.strides[2], end - begin, D);
          });
  };
  check(p.key, chunk.kv, chunk.begin, chunk.end, p.D);
  check(p.value, chunk.kv, chunk.begin, chunk.end, p.Dv);
  const int64_t group = p.Hq / p.Hkv, first = chunk.kv * group;
  for (int64_t h = first; chunk.begin == 0 && h < first + group; ++h) {
    check(p.query, h, 0, p.Lq, p.D);
    check(g.grad, h, 0, p.Lq, p.Dv);
  }
  if (!all) __atomic_store_n(g.finite, false, __ATOMIC_RELAXED);
}

template <class E>
static void run_backward(const void* pass, int64_t task, char* memory, const Stop& stop) {
  typedef typename E::Real Real;
  const Backward& g = *(const Backward*)pass;
  const Problem& p = *g.problem;
  Scratch scratch(memory);
  BackwardMemory<E> m(g, scratch);
  // One chunk of every head, then the next: few tasks then wait for a ticket.
  const int64_t size = chunk_of<E>(g), heads = p.B * p.Hkv, c = task / heads, head = task % heads;
  const int64_t begin = c * size, end = begin + size < p.Lk ? begin + size : p.Lk;
  const KeyChunk chunk{head / p.Hkv, head % p.Hkv, begin, end};
  if (g.finite) check_finite<E>(g, chunk);
  const int64_t group = p.Hq / p.Hkv, tiles = row_tiles_of<E>(p);
  const auto clear = [&](Real* sum, int64_t D) {
    std::memset((void*)sum, 0, size_t((end - begin) * m.padded(D)) * sizeof(Real));
  };
  if (g.key_grad) clear(m.key_sum, p.D);
  if (g.value_grad) clear(m.value_sum, p.Dv);
  for (int64_t r = 0; r < tiles; ++r) {
    describe_rows(p, m.rows, chunk.b, chunk.kv * group, r * E::rows, group * p.Lq);
    if (c == 0 && m.rows.low >= m.rows.high) clear_queries(g, m.rows);
    const int64_t low = m.rows.low > begin ? m.rows.low : begin;
    const int64_t high = m.rows.high < end ? m.rows.high : end;
    if (low >= high) continue;
    add_tile(g, m, chunk, low, high);
    if (!g.query_sum && !g.delta) continue;
    // Ticket order: earlier chunks add first. Not std::atomic_ref: clang's library has it since 19.
    int64_t* const ticket = g.ticket + head * tiles + r;
    const int64_t first = m.rows.low / size, last = (m.rows.high - 1) / size;
    while (__atomic_load_n(ticket, __ATOMIC_ACQUIRE) != c - first) {
      if (stopped(stop)) return;
      std::this_thread::yield();
    }
    add_to_queries(g, m, c == first, c == last);
    __atomic_fetch_add(ticket, 1, __ATOMIC_RELEASE);
  }
  const int64_t bytes = bytes_of(p.type), row = head * p.Lk + begin;
  const auto finish = [&](const Real* sum, int64_t D, double scale, char* to) {
    if (!to) return;
    if (g.adds)
      add_keys_to<Real>(sum, end - begin, D, m.padded(D), scale, (Real*)to + row * D);
    else
      write_keys<E>(p.type, sum, end - begin, D, scale, to + row * D * bytes);
  };
  finish(m.key_sum, p.D, p.scale, g.key_grad);
  finish(m.value_sum, p.Dv, 1.0, g.value_grad);
}

static Job backward(const Backward& g) {
  return by_computed<Job>(g.problem->type, [&]<class E>(E) -> Job {
    const Problem& p = *g.problem;
    if (!needs_scores(g) && !g.value_grad) return {};
    Scratch scratch(nullptr);
    BackwardMemory<E> m(g, scratch);
    const int64_t chunks = (p.Lk + chunk_of<E>(g) - 1) / chunk_of<E>(g);
    return {p.B * p.Hkv * chunks, scratch.taken(), run_backward<E>, &g};
  });
}

static int64_t row_tiles(const Problem& p) {
  return by_computed<int64_t>(p.type, [&]<class E>(E) { return row_tiles_of<E>(p); });
}

}  // namespace regard::REGARD_NAMESPACE
