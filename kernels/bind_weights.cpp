// Reductions of the weights of a call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "bind.h"
#include "bind_call.h"
#include "dispatch.h"
#include "threads.h"

namespace nb = nanobind;

namespace bindings {
namespace {

// Reductions of the weights: each is the address of its result, or 0.
struct Asked {
  uintptr_t maximum = 0, total = 0;
  bool finds_statistics = false, whole_rows = true;
  uintptr_t weights = 0, entropy = 0, distance = 0;
  int64_t k = 0;
  uintptr_t top_values = 0, top_keys = 0, received = 0, received_max = 0;
  uintptr_t pooled_max = 0, pooled_mass = 0;
  std::array<int64_t, 2> bins{1, 1};
  std::optional<std::array<int64_t, 2>> bin_extent;  // by default the queries and keys
  std::array<int64_t, 2> bin_start{0, 0}, bin_step{1, 1};
  int64_t n = 0, row_count = 0;
  uintptr_t rows = 0;
  uintptr_t pair_query = 0, pair_key = 0, pair_weight = 0;
  using Pair = std::array<int64_t, 2>;
  uintptr_t product = 0, product_with = 0, transposed = 0, transposed_with = 0;
  Pair product_strides{}, transposed_strides{};  // of batch element and head, in numbers
  int64_t product_columns = 0, transposed_columns = 0;
  uintptr_t query_blocks = 0, key_blocks = 0, blocks = 0, blocks_max = 0;
  Pair block_counts{};
  uintptr_t diagonals = 0, first_distances = 0;
  int64_t distance_step = 1, distances = 0;
};

regard::Operand operand(uintptr_t address, const Asked::Pair& strides, int64_t columns) {
  return {at<const void>(address), {strides[0], strides[1]}, columns};
}

void reduce(const Call& call, const Asked& asked, int threads) {
  const regard::Target& target = regard::target();
  const Read read(call, threads, asked.rows != 0);
  const auto extent = asked.bin_extent.value_or(std::array{read.problem.Lq, read.problem.Lk});
  regard::Reduce r{
      .problem = &read.problem,
      .maximum = at<void>(asked.maximum),
      .total = at<void>(asked.total),
      .finds_statistics = asked.finds_statistics,
      .whole_rows = asked.whole_rows,
      .weights = at<void>(asked.weights),
      .entropy = at<double>(asked.entropy),
      .distance = at<double>(asked.distance),
      .starts = call.starts.data(),
      .query_step = call.query_step,
      .key_step = call.key_step,
      .k = asked.k,
      .top_values = at<void>(asked.top_values),
      .top_keys = at<int64_t>(asked.top_keys),
      .received = at<double>(asked.received),
      .received_max = at<double>(asked.received_max),
      .pooled_max = at<void>(asked.pooled_max),
      .pooled_mass = at<void>(asked.pooled_mass),
      .bins = {asked.bins[0], asked.bins[1]},
      .bin_extent = {extent[0], extent[1]},
      .bin_start = {asked.bin_start[0], asked.bin_start[1]},
      .bin_step = {asked.bin_step[0], asked.bin_step[1]},
      .n = asked.n,
      .rows = at<int64_t>(asked.rows),
      .row_count = asked.row_count,
      .pair_query = at<int64_t>(asked.pair_query),
      .pair_key = at<int64_t>(asked.pair_key),
      .pair_weight = at<void>(asked.pair_weight),
      .product_with = operand(asked.product_with, asked.product_strides, asked.product_columns),
      .product = at<void>(asked.product),
      .transposed_with =
          operand(asked.transposed_with, asked.transposed_strides, asked.transposed_columns),
      .transposed = at<double>(asked.transposed),
      .query_blocks = at<const int64_t>(asked.query_blocks),
      .key_blocks = at<const int64_t>(asked.key_blocks),
      .block_counts = {asked.block_counts[0], asked.block_counts[1]},
      .blocks = at<double>(asked.blocks),
      .blocks_max = at<double>(asked.blocks_max),
      .diagonals = at<double>(asked.diagonals),
      .first_distances = at<const int64_t>(asked.first_distances),
      .distance_step = asked.distance_step,
      .distances = asked.distances,
      .head0 = 0,
      .head1 = 0,
      .chunks = nullptr};
  // Heads go in waves, so that the partial results of their chunks stay in the cache.
  constexpr int64_t kWaveBytes = int64_t{4} << 20;
  const int64_t heads = read.problem.B * read.problem.Hq, bytes = target.chunk_bytes(r);
  const int64_t wave = bytes ? std::max<int64_t>(1, kWaveBytes / bytes) : heads;
  const regard::Memory chunks = regard::allocate(bytes * std::min(wave, heads));
  r.chunks = chunks.get();
  for (r.head0 = 0; r.head0 < heads; r.head0 = r.head1) {
    r.head1 = std::min(heads, r.head0 + wave);
    run({target.reduce(r), target.collect(r)}, threads);
  }
}

// The weights of `pairs` pairs of every head, by the addresses of their queries and keys.
void gather(const Call& call, uintptr_t maximum, uintptr_t total, uintptr_t queries, uintptr_t keys,
            int64_t pairs, uintptr_t weights, int threads) {
  const Read read(call, threads);
  const regard::Gather g{.problem = &read.problem,
                         .maximum = at<const void>(maximum),
                         .total = at<const void>(total),
                         .queries = at<const int64_t>(queries),
                         .keys = at<const int64_t>(keys),
                         .pairs = pairs,
                         .weights = at<void>(weights)};
  run({regard::target().gather(g)}, threads);
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::class_<Asked>(m, "Asked", "What is asked of the weights: addresses of the results, or 0.")
      .def(nb::init<>())
      .def_rw("maximum", &Asked::maximum)
      .def_rw("total", &Asked::total)
      .def_rw("finds_statistics", &Asked::finds_statistics)
      .def_rw("whole_rows", &Asked::whole_rows)
      .def_rw("weights", &Asked::weights)
      .def_rw("entropy", &Asked::entropy)
      .def_rw("distance", &Asked::distance)
      .def_rw("k", &Asked::k)
      .def_rw("top_values", &Asked::top_values)
      .def_rw("top_keys", &Asked::top_keys)
      .def_rw("received", &Asked::received)
      .def_rw("received_max", &Asked::received_max)
      .def_rw("pooled_max", &Asked::pooled_max)
      .def_rw("pooled_mass", &Asked::pooled_mass)
      .def_rw("bins", &Asked::bins)
      .def_rw("bin_extent", &Asked::bin_extent, nb::arg().none())
      .def_rw("bin_start", &Asked::bin_start)
      .def_rw("bin_step", &Asked::bin_step)
      .def_rw("n", &Asked::n)
      .def_rw("rows", &Asked::rows)
      .def_rw("row_count", &Asked::row_count)
      .def_rw("pair_query", &Asked::pair_query)
      .def_rw("pair_key", &Asked::pair_key)
      .def_rw("pair_weight", &Asked::pair_weight)
      .def_rw("product", &Asked::product)
      .def_rw("product_with", &Asked::product_with)
      .def_rw("product_strides", &Asked::product_strides)
      .def_rw("product_columns", &Asked::product_columns)
      .def_rw("transposed", &Asked::transposed)
      .def_rw("transposed_with", &Asked::transposed_with)
      .def_rw("transposed_strides", &Asked::transposed_strides)
      .def_rw("transposed_columns", &Asked::transposed_columns)
      .def_rw("query_blocks", &Asked::query_blocks)
      .def_rw("key_blocks", &Asked::key_blocks)
      .def_rw("block_counts", &Asked::block_counts)
      .def_rw("blocks", &Asked::blocks)
      .def_rw("blocks_max", &Asked::blocks_max)
      .def_rw("diagonals", &Asked::diagonals)
      .def_rw("first_distances", &Asked::first_distances)
      .def_rw("distance_step", &Asked::distance_step)
      .def_rw("distances", &Asked::distances);
  m.def("reduce", &reduce, nb::arg("call"), nb::arg("asked"), nb::arg("threads"),
        "Computes what is asked of the weights in one pass.");
  m.def("gather", &gather, nb::arg("call"), nb::arg("maximum"), nb::arg("total"),
        nb::arg("queries"), nb::arg("keys"), nb::arg("pairs"), nb::arg("weights"),
        nb::arg("threads"), "Computes the weights of chosen pairs.");
}

}  // namespace bindings
