// The gradient of the bias: dS, summed over the axes along which the bias is broadcast.
#pragma once

#include <cstdint>

#include "backward_tile-inl.h"
#include "forward_tile-inl.h"

namespace regard::REGARD_NAMESPACE {

// A task has a part of it, and sums over the axes along which it is broadcast.
struct BiasParts {
  int64_t batch, heads, rows, keys;  // number of parts of each axis

  template <class E>
  static BiasParts of(const Problem& p, const Array& bias, E) {
    const int64_t* s = bias.strides;
    return {s[0] ? p.B : 1, s[1] ? p.Hq : 1, s[2] ? (p.Lq + E::rows - 1) / E::rows : 1,
            s[3] ? (p.Lk + kSplitKeys - 1) / kSplitKeys : 1};
  }
};

template <class E>
static void run_bias(const void* pass, int64_t task, char* memory, const Stop& stop) {
  typedef typename E::Real Real;
  constexpr int n = E::lanes;
  const Backward& g = *(const Backward*)pass;
  const Problem& p = *g.problem;
  Scratch scratch(memory);
  BackwardMemory<E> m(g, scratch);
  const Array& bias = g.bias_grad;
  const BiasParts parts = BiasParts::of(p, bias, E());
  const int64_t key_part = task % parts.keys, row_part = task / parts.keys % parts.rows;
  const int64_t h_part = task / parts.keys / parts.rows % parts.heads;
  const int64_t b_part = task / parts.keys / parts.rows / parts.heads;
  const int64_t tiles = (p.Lq + E::rows - 1) / E::rows, group = p.Hq / p.Hkv;
  const int64_t b0 = parts.batch > 1 ? b_part : 0, b1 = parts.batch > 1 ? b_part + 1 : p.B;
  const int64_t h0 = parts.heads > 1 ? h_part : 0, h1 = parts.heads > 1 ? h_part + 1 : p.Hq;
  const int64_t r0 = parts.rows > 1 ? row_part : 0, r1 = parts.rows > 1 ? row_part + 1 : tiles;
  for (int64_t b = b0; b < b1; ++b)
    for (int64_t h = h0; h < h1; ++h)
      for (int64_t r = r0; r < r1; ++r) {
        if (stopped(stop)) return;
        const TileConfiguration<E::tiles> configuration;
        describe_rows(p, m.rows, b, h, r * E::rows, p.Lq);
        int64_t low = m.rows.low, high = m.rows.high;
        if (parts.keys > 1) {
          if (low < key_part * kSplitKeys) low = key_part * kSplitKeys;
          if (high > (key_part + 1) * kSplitKeys) high = (key_part + 1) * kSplitKeys;
        }
        if (low >= high) continue;
        load_queries<E>(p, m.rows);
        gather_gradients(g, m);
        for (int64_t j0 = low; j0 < high; j0 += kKeys) {
          const int keys = int(high - j0 < kKeys ? high - j0 : kKeys);
          if (!mask_shows(p, m.rows, j0, keys)) continue;
          const TileMask tile_mask = tile_mask_of(m.rows, j0, keys);
          const int64_t kv = h / group;
          const Matrix k =
              stored_rows<E>(p, p.key.at(b, kv, j0), p.key.strides[2], keys, p.D, m.key_rows);
          Matrix value{};
          if (!has_rule(g))
            value = stored_rows<E>(p, p.value.at(b, kv, j0), p.value.strides[2], keys, p.Dv,
                                   m.value_rows);
          recompute_weights(g, m, tile_mask, k, value, j0, keys, Recomputed::scores);
          for (int v = 0; v < m.rows.vectors; ++v)
            for (int j = tile_mask.low[v]; j < tile_mask.high[v]; ++j) {
              const Vec<Real> ds = *(const Vec<Real>*)(m.dscores + j * E::rows + v * n);
              char* to = const_cast<char*>(bias.at(b, h, 0)) + (j0 + j) * bias.strides[3];
              if (!bias.strides[2]) {
                *(Real*)to += sum_lanes<Real>(ds);
                continue;
              }
              for (int i = 0; i < n && v * n + i < m.rows.count; ++i)
                *(Real*)(to + m.rows.index[v * n + i] * bias.strides[2]) += ds[i];
            }
        }
      }
}

static Job bias_gradient(const Backward& g) {
  return by_computed<Job>(g.problem->type, [&]<class E>(E) -> Job {
    if (!g.bias_grad) return {};
    Scratch scratch(nullptr);
    BackwardMemory<E> m(g, scratch);
    const BiasParts parts = BiasParts::of(*g.problem, g.bias_grad, E());
    return {parts.batch * parts.heads * parts.rows * parts.keys, scratch.taken(), run_bias<E>, &g};
  });
}

}  // namespace regard::REGARD_NAMESPACE
