// The heatmap of the largest weights of rows whose statistics are not known: one pass finds both.
// The maxima of the scores are pooled for each row by itself, since they become weights only at its
// end.
#pragma once

#include <cstdint>

#include "forward-inl.h"
#include "heatmap-inl.h"

namespace regard::REGARD_NAMESPACE {

static Forward statistics_of(const Reduce& r) {
  return {r.problem, {}, r.maximum, r.total, nullptr, 1};
}

template <class E>
struct FusedHeatmapMemory {
  typedef typename E::Real Real;
  ForwardMemory<E> forward;
  Normalisers<E> normalisers;
  Bins<E> own, shared;  // own: of each row by itself
  Real* largest;        // [rows][bins]: scores

  FusedHeatmapMemory(const Reduce& r, Scratch& scratch)
      : forward(statistics_of(r), scratch),
        normalisers(scratch),
        own(r, scratch),
        shared(r, scratch),
        largest(scratch.take<Real>(E::rows * r.bins[1])) {}
};

// Adds the rows of a tile to the heatmap, now that their statistics are known.
template <class E>
static void add_largest(const Reduce& r, const Scaling<E>& scaling, FusedHeatmapMemory<E>& m) {
  typedef typename E::Real Real;
  const Rows<E>& rows = m.forward.rows;
  const int64_t C = r.bins[1];
  for (int i = 0; i < rows.count; ++i) {
    const int64_t at = (rows.b * r.problem->Hq + rows.head[i]) * r.problem->Lq + rows.index[i];
    m.normalisers.set(i, ((const Real*)r.maximum)[at], ((const Real*)r.total)[at]);
    const Vec<Real> base = broadcast(m.normalisers.base[i]);
    const Vec<Real> log_total = broadcast(m.normalisers.log_total[i]);
    for (int64_t x = 0; x < C; x += E::lanes) {
      char* const to = (char*)(m.shared.row[0][i] + x);
      const Vec<Real> score = numbers<Real, real_type<Real>>((char*)(m.own.row[0][i] + x), C - x);
      const Vec<Real> old = numbers<Real, real_type<Real>>(to, C - x);
      const Vec<Real> log = scaling.exponent(score, base) - log_total;
      put<Real, real_type<Real>>(to, larger(log, old), C - x);
    }
  }
}

template <class E>
static void run_fused_heatmap(const void* pass, int64_t task, char* memory, const Stop& stop) {
  typedef typename E::Real Real;
  const Reduce& r = *(const Reduce*)pass;
  const Problem& p = *r.problem;
  const Forward f = statistics_of(r);
  const Scaling<E> scaling(p);
  Scratch scratch(memory);
  FusedHeatmapMemory<E> m(r, scratch);
  Rows<E>& rows = m.forward.rows;
  const RowChunk<E> chunk = chunk_of_task<E>(r, task);
  start_bins(r, m.shared, chunk);
  m.own.keys = m.shared.keys;
  for (int64_t x = 0; x <= r.bins[1]; ++x) m.own.edges[x] = m.shared.edges[x];
  for (int i = 0; i < E::rows; ++i)
    m.own.row_bin[i] = i, m.own.row[0][i] = m.largest + i * r.bins[1];
  for (int64_t row = chunk.begin; row < chunk.end; row += E::rows) {
    if (stopped(stop)) return;
    const TileConfiguration<E::tiles> configuration;
    describe_rows(p, rows, chunk.head / p.Hq, chunk.head % p.Hq, row, chunk.end);
    load_queries<E>(p, rows);
    find_bins(r, rows, m.shared, chunk);
    for (int64_t x = 0; x < rows.count * r.bins[1]; ++x) m.largest[x] = -kInf<Real>;
    const auto pool = [&](const KeyTile& tile) {
      pool_tile<E, false>(r, rows, m.own, m.forward.scores, tile.tile_mask, tile.j0, tile.keys);
    };
    clear_sums(p, m.forward.state);
    add_keys(f, m.forward, key_head_of(p, rows), first_key(rows), rows.high, false, pool);
    write_rows(f, rows, m.forward.state);
    add_largest(r, scaling, m);
  }
}

template <class E>
static Job fused_heatmap(const Reduce& r) {
  Scratch scratch(nullptr);
  FusedHeatmapMemory<E> m(r, scratch);
  return {(r.head1 - r.head0) * chunks_of<E>(r), scratch.taken(), run_fused_heatmap<E>, &r};
}

}  // namespace regard::REGARD_NAMESPACE
