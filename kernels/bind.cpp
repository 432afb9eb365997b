// The Python module regard._kernels. Bindings only, no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "bind_given.h"
#include "bounds.h"
#include "cpu.h"
#include "dispatch.h"
#include "finite.h"
#include "mask.h"
#include "threads.h"
#include "visibility.h"

namespace nb = nanobind;

namespace {

using regard::ArrayRef, regard::Shape, regard::shape_of;

regard::Type type_of(const ArrayRef& ref) {
  const std::string& name = std::get<4>(ref);
  if (name == "float32") return regard::Type::float32;
  if (name == "bfloat16") return regard::Type::bfloat16;
  if (name == "float16") return regard::Type::float16;
  if (name == "float64") return regard::Type::float64;
  if (name == "bool") return regard::Type::boolean;
  throw std::invalid_argument("no kernel reads " + name);
}

// The array broadcast to a shape.
regard::Array array(const char* name, const ArrayRef& ref, const Shape& shape) {
  const auto& [address, own, strides, unit, dtype, buffer] = ref;
  regard::Array x;
  x.data = reinterpret_cast<const char*>(address);
  x.type = type_of(ref);
  for (size_t i = 0; i < 4; ++i) {
    if (own[i] != 1 && own[i] != shape[i])
      throw std::invalid_argument(std::string(name) + " has another shape than the call");
    // An array without numbers may have no address, which must not be moved.
    x.strides[i] = own[i] == 1 || !x.data ? 0 : strides[i] * unit;
  }
  if (buffer) {
    const auto& [begin, bytes] = *buffer;
    if (!regard::lies_within(x, shape, regard::bytes_of(x.type), begin, bytes))
      throw std::out_of_range(std::string(name) + " reaches beyond its memory");
  }
  return x;
}

regard::Array array(const char* name, const std::optional<ArrayRef>& ref, const Shape& shape) {
  return ref ? array(name, *ref, shape) : regard::Array{};
}

// Intervals of heads, queries and keys, and the logarithm of the factor to base 2.
using EditRef = std::tuple<std::array<int64_t, 6>, double>;

std::vector<regard::Edit> edits_of(const std::vector<EditRef>& refs) {
  std::vector<regard::Edit> edits;
  for (const auto& [ends, log2_factor] : refs)
    edits.push_back({{ends[0], ends[1]}, {ends[2], ends[3]}, {ends[4], ends[5]}, log2_factor});
  return edits;
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The arguments of a call. The arrays are the caller's, who keeps them alive.
struct Call : regard::ScoreOptions {
  ArrayRef query, key;
  std::optional<ArrayRef> value, mask, bias;
  int64_t group_rows = 0;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  std::vector<int64_t> starts, lengths;
  int64_t query_step = 1, key_step = 1;
  uintptr_t query_ids = 0, key_ids = 0;
  bool shared_query_ids = false, shared_key_ids = false;
  uintptr_t interval_first = 0, interval_last = 0;
  bool shared_interval_first = false, shared_interval_last = false;
  std::vector<double> sinks;
  std::vector<EditRef> edits;
  double dropout = 0;
  int64_t seed = 0;
  std::array<int64_t, 2> draw_start{0, 0}, draw_step{1, 1};
};

// The call as the kernels read it, without the intervals of visible keys and the edits, which are
// only counted.
regard::Problem problem_of(const Call& call) {
  const Shape &q = shape_of(call.query), &k = shape_of(call.key);
  regard::Problem p{};
  static_cast<regard::ScoreOptions&>(p) = call;
  p.B = q[0], p.Hq = q[1], p.Hkv = k[1], p.Lq = q[2], p.Lk = k[2];
  p.D = q[3], p.Dv = call.value ? shape_of(*call.value)[3] : 0;
  p.group_rows = call.group_rows;
  p.type = type_of(call.query);
  p.query = array("query", call.query, q);
  p.key = array("key", call.key, {p.B, p.Hkv, p.Lk, p.D});
  p.value = array("value", call.value, {p.B, p.Hkv, p.Lk, p.Dv});
  p.mask = array("mask", call.mask, {p.B, p.Hq, p.Lq, p.Lk});
  p.bias = array("bias", call.bias, {p.B, p.Hq, p.Lq, p.Lk});
  p.sinks = call.sinks.empty() ? nullptr : call.sinks.data();
  p.edit_count = int64_t(call.edits.size());
  p.dropout = call.dropout;
  // Half to even, as Python rounds.
  p.threshold = static_cast<uint64_t>(std::nearbyint(call.dropout * 4294967296.0));
  for (size_t axis = 0; axis < 2; ++axis)
    p.draw_start[axis] = call.draw_start[axis], p.draw_step[axis] = call.draw_step[axis];
  p.seed[0] = static_cast<uint32_t>(call.seed);
  p.seed[1] = static_cast<uint32_t>(static_cast<uint64_t>(call.seed) >> 32);
  return p;
}

// A call as the kernels read it, and the intervals and edits that it points to.
struct Read {
  regard::Problem problem;
  std::vector<regard::Edit> edits;
  regard::Intervals intervals;
  regard::MaskBlocks blocks;

  // A mask is read whole for what it hides everywhere, unless a `few` rows are all that is read.
  Read(const Call& call, int threads, bool few = false)
      : problem(problem_of(call)), edits(edits_of(call.edits)) {
    regard::Problem& p = problem;
    p.edits = edits.data();
    const auto enough = static_cast<size_t>(p.B);
    if (call.starts.size() != enough || call.lengths.size() != enough)
      throw std::invalid_argument("starts and lengths have one number for each of the batch");
    intervals = regard::intervals_of({.B = p.B,
                                      .Lq = p.Lq,
                                      .Lk = p.Lk,
                                      .causal = call.causal,
                                      .left = call.window_left,
                                      .right = call.window_right,
                                      .starts = call.starts.data(),
                                      .query_step = call.query_step,
                                      .key_step = call.key_step,
                                      .lengths = call.lengths.data(),
                                      .query_ids = at<const int64_t>(call.query_ids),
                                      .key_ids = at<const int64_t>(call.key_ids),
                                      .shared_query_ids = call.shared_query_ids,
                                      .shared_key_ids = call.shared_key_ids,
                                      .interval_first = at<const int64_t>(call.interval_first),
                                      .interval_last = at<const int64_t>(call.interval_last),
                                      .shared_interval_first = call.shared_interval_first,
                                      .shared_interval_last = call.shared_interval_last});
    if (p.mask && !few) read_mask(threads);
    p.first = intervals.first.data(), p.last = intervals.last.data();
    p.interval_heads = intervals.heads;
    p.query_ids = intervals.query_ids.empty() ? nullptr : intervals.query_ids.data();
    p.key_ids = intervals.key_ids.empty() ? nullptr : intervals.key_ids.data();
  }

 private:
  void read_mask(int threads) {
    regard::Problem& p = problem;
    if (regard::narrow(p, intervals, blocks, threads, nullptr)) {
      p.mask = {};
      return;
    }
    p.mask_blocks = blocks.seen.data();
    std::copy(blocks.strides, blocks.strides + 3, p.mask_block_strides);
  }
};

std::atomic<bool> ending{false};  // Python's end has begun
std::atomic<int> running{0};      // calls that have not come back to Python

// The poll of a job: checks for Ctrl-C at most ten times a second, and for Python's end.
bool interrupted() {
  if (ending) return true;
  using Clock = std::chrono::steady_clock;
  static thread_local Clock::time_point last = Clock::now();
  const auto now = Clock::now();
  if (now - last < std::chrono::milliseconds(100)) return false;
  last = now;
  nb::gil_scoped_acquire held;
  return PyErr_CheckSignals() != 0;
}

// Runs the jobs one after another, without Python's lock.
void run(std::initializer_list<regard::Job> jobs, int threads) {
  const struct Counted {
    Counted() { ++running; }
    ~Counted() { --running; }
  } counted;
  bool done = true;
  {
    nb::gil_scoped_release released;
    for (const regard::Job& job : jobs) done = done && regard::run(job, threads, interrupted);
  }
  if (done) return;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemExit, "Python is ending");
  throw nb::python_error();
}

// Cancels the calls of daemon threads, which could not return to a Python that is gone.
void end() {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  ending = true;
  nb::gil_scoped_release released;
  while (running && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void forward(const Call& call, const std::optional<ArrayRef>& out, uintptr_t maximum,
             uintptr_t total, int threads) {
  const regard::Target& target = regard::target();
  const Read read(call, threads);
  const regard::Problem& p = read.problem;
  regard::Forward f{.problem = &p,
                    .out = array("out", out, {p.B, p.Hq, p.Lq, p.Dv}),
                    .maximum = at<void>(maximum),
                    .total = at<void>(total),
                    .partial = nullptr,
                    .threads = threads};
  const regard::Memory partial = regard::allocate(target.partial_bytes(f));
  f.partial = partial.get();
  run({target.forward(f), target.merge(f)}, threads);
}

// A call with the plain options of another. Where none are given, every key is valid, and the
// queries are the last of the valid ones. `ends` of the intervals, and `ids` of queries and keys:
// an address, and whether all of the batch share them.
Call call_like(const Call& options, const regard::Given& given,
               const std::optional<ArrayRef>& mask = {}, std::vector<int64_t> starts = {},
               std::vector<int64_t> lengths = {},
               const std::vector<std::tuple<uintptr_t, bool>>& ends = {},
               const std::vector<std::tuple<uintptr_t, bool>>& ids = {},
               std::vector<EditRef> edits = {}) {
  Call call = options;
  call.query = given.query, call.key = given.key, call.value = given.value, call.mask = mask;
  const Shape &q = shape_of(given.query), &k = shape_of(given.key);
  call.group_rows = q[1] / k[1] * q[2];
  if (lengths.empty()) lengths.assign(size_t(q[0]), k[2]);
  if (starts.empty())
    for (const int64_t length : lengths) starts.push_back(length - q[2]);
  call.starts = std::move(starts), call.lengths = std::move(lengths);
  call.edits = std::move(edits);
  call.interval_first = call.interval_last = 0;
  if (!ends.empty()) {
    std::tie(call.interval_first, call.shared_interval_first) = ends.at(0);
    std::tie(call.interval_last, call.shared_interval_last) = ends.at(1);
  }
  call.query_ids = call.key_ids = 0;
  if (!ids.empty()) {
    std::tie(call.query_ids, call.shared_query_ids) = ids.at(0);
    std::tie(call.key_ids, call.shared_key_ids) = ids.at(1);
  }
  return call;
}

// An array of a caller that was made to be filled.
ArrayRef filled_ref(nb::handle x) {
  const auto ref = regard::read_array(x.ptr());
  if (!ref) throw std::invalid_argument("an array cannot be filled where it lies");
  return *ref;
}

void forward_of(const Call& options, const regard::Given& given, nb::handle out, uintptr_t maximum,
                uintptr_t total, int threads) {
  const Call call = call_like(options, given);
  forward(call, filled_ref(out), maximum, total, threads);
}

void forward_with(const Call& options, const regard::Given& given, nb::handle out, int threads,
                  const std::optional<ArrayRef>& mask, std::vector<int64_t> starts,
                  std::vector<int64_t> lengths,
                  const std::vector<std::tuple<uintptr_t, bool>>& ends,
                  const std::vector<std::tuple<uintptr_t, bool>>& ids, std::vector<EditRef> edits) {
  const Call call = call_like(options, given, mask, std::move(starts), std::move(lengths), ends,
                              ids, std::move(edits));
  forward(call, filled_ref(out), 0, 0, threads);
}

// A summand of a matrix of token pairs: the weights of one head, or their effects.
struct PairTerm {
  Call call;
  uintptr_t maximum = 0, total = 0;
  double coefficient = 1;
  std::string kind = "weight";
  uintptr_t value = 0, gradient = 0, of_sink = 0, squares = 0, rest = 0;
  int64_t value_size = 0;
  bool rest_is_known = false;
};

regard::PairKind pair_kind(const std::string& name) {
  constexpr const char* kNames[] = {"weight",    "knockout", "contribution",
                                    "relevance", "gradient", "change"};
  for (int i = 0; i < 6; ++i)
    if (name == kNames[i]) return regard::PairKind(i);
  throw std::invalid_argument("no kernel computes the kind " + name);
}

// Terms as the kernels read them: of one head, size and type.
struct Terms {
  std::deque<Read> reads;
  std::vector<regard::PairTerm> terms;

  Terms(const std::vector<PairTerm>& given, int threads) {
    for (const PairTerm& t : given) {
      reads.emplace_back(t.call, threads);
      const regard::Problem& p = reads.back().problem;
      if (p.B != 1 || p.Hq != 1 || p.Hkv != 1)
        throw std::invalid_argument("a term is a matrix of one head");
      const regard::Problem& first = problem();
      if (p.Lq != first.Lq || p.Lk != first.Lk || p.type != first.type)
        throw std::invalid_argument("terms are of one size and type");
      terms.push_back({.problem = &p,
                       .maximum = at<const void>(t.maximum),
                       .total = at<const void>(t.total),
                       .coefficient = t.coefficient,
                       .kind = pair_kind(t.kind),
                       .value = at<const void>(t.value),
                       .gradient = at<const void>(t.gradient),
                       .of_sink = at<const double>(t.of_sink),
                       .Dv = t.value_size,
                       .squares = at<const void>(t.squares),
                       .rest = at<void>(t.rest),
                       .rest_is_known = t.rest_is_known});
    }
  }
  const regard::Problem& problem() const { return reads.front().problem; }
};

// Two sums of weights to compare: both of one size and type, or of no terms.
regard::Divergences sides_of(const Terms& a, const Terms& b) {
  regard::Divergences found{};
  if (a.terms.empty() && b.terms.empty()) return found;
  if (a.terms.empty() || b.terms.empty())
    throw std::invalid_argument("two sums of weights are compared");
  const regard::Problem &p = a.problem(), &other = b.problem();
  if (p.Lq != other.Lq || p.Lk != other.Lk || p.type != other.type)
    throw std::invalid_argument("terms are of one size and type");
  const Terms* const sides[] = {&a, &b};
  for (int i = 0; i < 2; ++i) {
    found.terms[i] = sides[i]->terms.data();
    found.term_count[i] = int64_t(sides[i]->terms.size());
  }
  found.Lq = p.Lq, found.Lk = p.Lk;
  return found;
}

// The arrays of a gradient: the addresses of those that have no strides, or 0. Those of the rule
// are described in WeightGradient.
struct Gradients {
  std::optional<ArrayRef> grad, out, bias_grad;
  uintptr_t maximum = 0, total = 0, delta = 0;
  uintptr_t query_sum = 0, query_grad = 0, key_grad = 0, value_grad = 0;
  std::string rule = "products";
  uintptr_t numbers = 0, other = 0, given_delta = 0;
  std::array<int64_t, 2> other_strides{};  // of batch element and head, in numbers
  int64_t columns = 0;
  uintptr_t query_blocks = 0, key_blocks = 0, first_distances = 0;
  std::array<int64_t, 2> block_counts{};
  int64_t distance_step = 1, distances = 0;
  std::vector<PairTerm> side_a, side_b;  // of a divergence
  int side = 0;
  bool adds = false;
};

regard::Rule rule_of(const std::string& name) {
  constexpr const char* names[] = {// in the order of Rule
                                   "products",   "nothing",        "vectors",        "logarithms",
                                   "distances",  "diagonals",      "blocks",         "kl",
                                   "reverse_kl", "jensen_shannon", "total_variation"};
  for (size_t i = 0; i < std::size(names); ++i)
    if (name == names[i]) return static_cast<regard::Rule>(i);
  throw std::invalid_argument("no gradient of the weights has the rule " + name);
}

void backward(const Call& call, const Gradients& arrays, int threads) {
  const regard::Target& target = regard::target();
  const Read read(call, threads);
  const regard::Problem& p = read.problem;
  const Shape out{p.B, p.Hq, p.Lq, p.Dv};
  const Terms of_a(arrays.side_a, threads), of_b(arrays.side_b, threads);
  const regard::Divergences sides = sides_of(of_a, of_b);
  if (sides.term_count[0] && (p.B != 1 || p.Hq != 1 || p.Lq != sides.Lq || p.Lk != sides.Lk ||
                              p.type != of_a.problem().type))
    throw std::invalid_argument("a divergence is of one head, size and type");
  std::vector<int64_t> ticket(static_cast<size_t>(p.B * p.Hkv * target.row_tiles(p)));
  const regard::Backward g{
      .problem = &p,
      .grad = array("grad", arrays.grad, out),
      .out = array("out", arrays.out, out),
      .weights = {.rule = rule_of(arrays.rule),
                  .numbers = at<const void>(arrays.numbers),
                  .other = {.data = at<const void>(arrays.other),
                            .strides = {arrays.other_strides[0], arrays.other_strides[1]},
                            .columns = arrays.columns},
                  .delta = at<const void>(arrays.given_delta),
                  .query_blocks = at<const int64_t>(arrays.query_blocks),
                  .key_blocks = at<const int64_t>(arrays.key_blocks),
                  .block_counts = {arrays.block_counts[0], arrays.block_counts[1]},
                  .starts = call.starts.data(),
                  .query_step = call.query_step,
                  .key_step = call.key_step,
                  .first_distances = at<const int64_t>(arrays.first_distances),
                  .distance_step = arrays.distance_step,
                  .distances = arrays.distances,
                  .sides = sides,
                  .side = arrays.side},
      .maximum = at<void>(arrays.maximum),
      .total = at<void>(arrays.total),
      .query_sum = at<void>(arrays.query_sum),
      .query_grad = at<char>(arrays.query_grad),
      .delta = at<void>(arrays.delta),
      .ticket = ticket.data(),
      .key_grad = at<char>(arrays.key_grad),
      .value_grad = at<char>(arrays.value_grad),
      .adds = arrays.adds,
      .bias_grad = array("bias_grad", arrays.bias_grad, {p.B, p.Hq, p.Lq, p.Lk})};
  run({target.backward(g), target.bias_gradient(g)}, threads);
}

// Whether all numbers of some arrays are finite.
bool are_finite(const std::vector<ArrayRef>& refs, int threads) {
  for (const ArrayRef& ref : refs) {
    const Shape& shape = shape_of(ref);
    const regard::FiniteScan scan(array("array", ref, shape), shape);
    run({scan.job()}, threads);
    if (!scan.all_finite()) return false;
  }
  return true;
}

// The gradients of a call with the plain options of another into arrays like its own, or none; of
// what `forward_of` gave. Returns whether it was computed: not where the gradient of the output is
// not read where it lies, or not all is finite. `query_sum`: as in Gradients, or none.
bool backward_of(const Call& options, const regard::Given& given, nb::handle grad, nb::handle out,
                 uintptr_t maximum, uintptr_t total, nb::handle query_sum, nb::handle query_grad,
                 nb::handle key_grad, nb::handle value_grad, int threads) {
  const auto of_output = regard::read_array(grad.ptr());
  if (!of_output) return false;
  if (!are_finite({given.query, given.key, given.value, *of_output}, threads)) return false;
  const auto address = [](nb::handle x) { return x.is_none() ? 0 : std::get<0>(filled_ref(x)); };
  Gradients arrays;
  arrays.grad = of_output, arrays.out = filled_ref(out);
  arrays.maximum = maximum, arrays.total = total;
  arrays.query_sum = address(query_sum), arrays.query_grad = address(query_grad);
  arrays.key_grad = address(key_grad), arrays.value_grad = address(value_grad);
  backward(call_like(options, given), arrays, threads);
  return true;
}

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

// Reductions of a matrix of token pairs: each is the address of its result, or 0.
struct PairsAsked {
  int64_t k = 0, n = 0;
  uintptr_t top_values = 0, top_keys = 0, pair_query = 0, pair_key = 0, pair_value = 0;
  uintptr_t received = 0, received_max = 0;
  uintptr_t pooled_max = 0, pooled_mean = 0;
  std::array<int64_t, 2> bins{1, 1}, extent{0, 0};
};

void reduce_pairs(const std::vector<PairTerm>& given, const PairsAsked& asked, int threads) {
  const regard::Target& target = regard::target();
  const Terms read(given, threads);
  const std::vector<regard::PairTerm>& terms = read.terms;
  regard::PairMatrix x{.terms = terms.data(),
                       .term_count = int64_t(terms.size()),
                       .Lq = read.problem().Lq,
                       .Lk = read.problem().Lk,
                       .k = asked.k,
                       .top_values = at<void>(asked.top_values),
                       .top_keys = at<int64_t>(asked.top_keys),
                       .n = asked.n,
                       .pair_query = at<int64_t>(asked.pair_query),
                       .pair_key = at<int64_t>(asked.pair_key),
                       .pair_value = at<void>(asked.pair_value),
                       .received = at<double>(asked.received),
                       .received_max = at<double>(asked.received_max),
                       .bins = {asked.bins[0], asked.bins[1]},
                       .extent = {asked.extent[0], asked.extent[1]},
                       .pooled_max = at<void>(asked.pooled_max),
                       .pooled_mean = at<void>(asked.pooled_mean),
                       .chunks = nullptr};
  const regard::Memory chunks = regard::allocate(target.pair_chunk_bytes(x));
  x.chunks = chunks.get();
  run({target.reduce_pairs(x), target.collect_pairs(x)}, threads);
}

// What is asked of two sums of weights: each is the address of its result, or 0.
struct DivergencesAsked {
  uintptr_t kl = 0, reverse_kl = 0, jensen_shannon = 0, total_variation = 0, overlap = 0;
  int64_t k = 0;
};

void diverge(const std::vector<PairTerm>& a, const std::vector<PairTerm>& b,
             const DivergencesAsked& asked, int threads) {
  const Terms of_a(a, threads), of_b(b, threads);
  regard::Divergences x = sides_of(of_a, of_b);
  x.kl = at<double>(asked.kl), x.reverse_kl = at<double>(asked.reverse_kl);
  x.jensen_shannon = at<double>(asked.jensen_shannon);
  x.total_variation = at<double>(asked.total_variation);
  x.k = asked.k, x.overlap = at<double>(asked.overlap);
  run({regard::target().diverge(x)}, threads);
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

void bind_call(nb::module_& m) {
  nb::class_<Call> call(m, "Call", "One call of attention; what is not set is not there.");
  for (const auto& [name, number] : regard::kScoreOptions) call.def_rw(name, number);
  call.def(nb::init<>())
      .def_rw("query", &Call::query)
      .def_rw("key", &Call::key)
      .def_rw("value", &Call::value, nb::arg().none())
      .def_rw("mask", &Call::mask, nb::arg().none())
      .def_rw("bias", &Call::bias, nb::arg().none())
      .def_rw("group_rows", &Call::group_rows)
      .def_rw("causal", &Call::causal)
      .def_rw("window_left", &Call::window_left)
      .def_rw("window_right", &Call::window_right)
      .def_rw("starts", &Call::starts)
      .def_rw("lengths", &Call::lengths)
      .def_rw("query_step", &Call::query_step)
      .def_rw("key_step", &Call::key_step)
      .def_rw("query_ids", &Call::query_ids)
      .def_rw("key_ids", &Call::key_ids)
      .def_rw("shared_query_ids", &Call::shared_query_ids)
      .def_rw("shared_key_ids", &Call::shared_key_ids)
      .def_rw("interval_first", &Call::interval_first)
      .def_rw("interval_last", &Call::interval_last)
      .def_rw("shared_interval_first", &Call::shared_interval_first)
      .def_rw("shared_interval_last", &Call::shared_interval_last)
      .def_rw("sinks", &Call::sinks)
      .def_rw("edits", &Call::edits)
      .def_rw("dropout", &Call::dropout)
      .def_rw("seed", &Call::seed)
      .def_rw("draw_start", &Call::draw_start)
      .def_rw("draw_step", &Call::draw_step)
      .def_prop_ro(
          "factor", [](const Call& call) { return regard::factor_of(problem_of(call)); },
          "What makes the exponent of 2 of a score.");
  nb::class_<Gradients>(m, "Gradients", "The arrays of a gradient, without its call's.")
      .def(nb::init<>())
      .def_rw("grad", &Gradients::grad, nb::arg().none())
      .def_rw("out", &Gradients::out, nb::arg().none())
      .def_rw("bias_grad", &Gradients::bias_grad, nb::arg().none())
      .def_rw("maximum", &Gradients::maximum)
      .def_rw("total", &Gradients::total)
      .def_rw("query_sum", &Gradients::query_sum)
      .def_rw("query_grad", &Gradients::query_grad)
      .def_rw("delta", &Gradients::delta)
      .def_rw("key_grad", &Gradients::key_grad)
      .def_rw("value_grad", &Gradients::value_grad)
      .def_rw("rule", &Gradients::rule)
      .def_rw("numbers", &Gradients::numbers)
      .def_rw("other", &Gradients::other)
      .def_rw("other_strides", &Gradients::other_strides)
      .def_rw("columns", &Gradients::columns)
      .def_rw("given_delta", &Gradients::given_delta)
      .def_rw("query_blocks", &Gradients::query_blocks)
      .def_rw("key_blocks", &Gradients::key_blocks)
      .def_rw("block_counts", &Gradients::block_counts)
      .def_rw("first_distances", &Gradients::first_distances)
      .def_rw("distance_step", &Gradients::distance_step)
      .def_rw("distances", &Gradients::distances)
      .def_rw("side_a", &Gradients::side_a)
      .def_rw("side_b", &Gradients::side_b)
      .def_rw("side", &Gradients::side)
      .def_rw("adds", &Gradients::adds);
}

void bind_given(nb::module_& m) {
  using regard::Given;
  nb::class_<Given>(m, "Given", "Query, key and value of a call, read where they lie.")
      .def_prop_ro("kind", [](const Given& x) { return nb::bytes(x.kind.data(), x.kind.size()); })
      .def_prop_ro("products",
                   [](const Given& x) {
                     const Shape &q = shape_of(x.query), &k = shape_of(x.key);
                     return double(q[0] * q[1] * q[2]) * double(k[2]) * double(q[3] + 1);
                   })
      .def_ro("is_like_output", &Given::is_like_output)
      .def_ro("differentiates", &Given::differentiates);
  m.def(
      "given",
      [](nb::handle query, nb::handle key, nb::handle value, bool recording) {
        return regard::read_given(query.ptr(), key.ptr(), value.ptr(), recording);
      },
      nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("recording"),
      "Reads the arrays of a call; None where they are not to be read where they lie.");
}

void bind_asked(nb::module_& m) {
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
}

void bind_pairs(nb::module_& m) {
  nb::class_<PairTerm>(m, "PairTerm", "A summand of a matrix of token pairs.")
      .def(nb::init<>())
      .def_rw("call", &PairTerm::call)
      .def_rw("maximum", &PairTerm::maximum)
      .def_rw("total", &PairTerm::total)
      .def_rw("coefficient", &PairTerm::coefficient)
      .def_rw("kind", &PairTerm::kind)
      .def_rw("value", &PairTerm::value)
      .def_rw("gradient", &PairTerm::gradient)
      .def_rw("of_sink", &PairTerm::of_sink)
      .def_rw("squares", &PairTerm::squares)
      .def_rw("rest", &PairTerm::rest)
      .def_rw("rest_is_known", &PairTerm::rest_is_known)
      .def_rw("value_size", &PairTerm::value_size);
  nb::class_<PairsAsked>(m, "PairsAsked", "What is asked of such a matrix: addresses, or 0.")
      .def(nb::init<>())
      .def_rw("k", &PairsAsked::k)
      .def_rw("n", &PairsAsked::n)
      .def_rw("top_values", &PairsAsked::top_values)
      .def_rw("top_keys", &PairsAsked::top_keys)
      .def_rw("pair_query", &PairsAsked::pair_query)
      .def_rw("pair_key", &PairsAsked::pair_key)
      .def_rw("pair_value", &PairsAsked::pair_value)
      .def_rw("received", &PairsAsked::received)
      .def_rw("received_max", &PairsAsked::received_max)
      .def_rw("pooled_max", &PairsAsked::pooled_max)
      .def_rw("pooled_mean", &PairsAsked::pooled_mean)
      .def_rw("bins", &PairsAsked::bins)
      .def_rw("extent", &PairsAsked::extent);
  nb::class_<DivergencesAsked>(m, "DivergencesAsked", "What is asked of two: addresses, or 0.")
      .def(nb::init<>())
      .def_rw("kl", &DivergencesAsked::kl)
      .def_rw("reverse_kl", &DivergencesAsked::reverse_kl)
      .def_rw("jensen_shannon", &DivergencesAsked::jensen_shannon)
      .def_rw("total_variation", &DivergencesAsked::total_variation)
      .def_rw("k", &DivergencesAsked::k)
      .def_rw("overlap", &DivergencesAsked::overlap);
  m.def("diverge", &diverge, nb::arg("a"), nb::arg("b"), nb::arg("asked"), nb::arg("threads"),
        "Computes how far the rows of two sums of weights are apart, in one pass.");
  m.def("reduce_pairs", &reduce_pairs, nb::arg("terms"), nb::arg("asked"), nb::arg("threads"),
        "Computes what is asked of a matrix of token pairs in one pass.");
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "The compiled part of regard.";
#ifndef REGARD_CHECKS
  // A daemon thread that computes while Python ends keeps its call, and with it all of this.
  nb::set_leak_warnings(false);
#endif
  m.def("cpu_name", &regard::cpu_name,
        "The processor's own name for itself, or the architecture's where it has none.");
  m.def(
      "target", [] { return std::string(regard::target().name); },
      "The instruction set in use; REGARD_TARGET forces one.");
  m.def(
      "targets",
      [] {
        std::vector<std::string> names;
        for (const regard::Target* t : regard::targets_here()) names.emplace_back(t->name);
        return names;
      },
      "The instruction sets that this processor runs, best first.");
  m.def("obstacles", &regard::obstacles,
        "The instruction sets of this build that do not run here, with the reason.");
#if defined(__x86_64__)
  m.def(
      "amx_obstacle",
      [](bool instructions, bool kept, bool given, int refused) {
        return regard::obstacle_to({instructions, kept, given, refused});
      },
      nb::arg("instructions"), nb::arg("kept"), nb::arg("given"), nb::arg("refused"),
      "Why a process cannot use tiles, or '': of its processor, its system and its kernel.");
#endif
  m.def("targets_left_out", &regard::targets_left_out,
        "The instruction sets that the compiler of this build could not make.");
  m.def("preference", &regard::preference, nb::arg("vendor"), nb::arg("family") = 0,
        nb::arg("features") = nb::none(),
        "The instruction sets of this build, best first on a processor; of those that it has.");
  m.def(
      "processor",
      [] {
        const regard::CpuNumbers cpu = regard::cpu_numbers();
        return nb::make_tuple(regard::cpu_vendor(), cpu.family, cpu.model);
      },
      "Vendor, family and model of the processor, as CPUID tells them; '', 0 and 0 without.");
  // Whether references carry their buffer, and arrays are checked to lie in it.
#ifdef REGARD_CHECKS
  m.attr("checks") = true;
#else
  m.attr("checks") = false;
#endif
  bind_call(m);
  bind_given(m);
  bind_asked(m);
  bind_pairs(m);
  m.def("end", &end, "Stops every call; none is taken any more.");
  m.def("forward", &forward, nb::arg("call"), nb::arg("out").none(), nb::arg("maximum"),
        nb::arg("total"), nb::arg("threads"),
        "Computes the output and, where asked, the row statistics.");
  m.def("forward_of", &forward_of, nb::arg("options"), nb::arg("given"), nb::arg("out"),
        nb::arg("maximum"), nb::arg("total"), nb::arg("threads"),
        "Computes the output of a call with the plain options of another and, where asked, the row "
        "statistics.");
  m.def("forward_with", &forward_with, nb::arg("options"), nb::arg("given"), nb::arg("out"),
        nb::arg("threads"), nb::arg("mask").none(), nb::arg("starts"), nb::arg("lengths"),
        nb::arg("ends"), nb::arg("ids"), nb::arg("edits"),
        "Computes such an output with a mask, positions, lengths, intervals, segments and edits; "
        "empty where there are none.");
  m.def("reduce", &reduce, nb::arg("call"), nb::arg("asked"), nb::arg("threads"),
        "Computes what is asked of the weights in one pass.");
  m.def("gather", &gather, nb::arg("call"), nb::arg("maximum"), nb::arg("total"),
        nb::arg("queries"), nb::arg("keys"), nb::arg("pairs"), nb::arg("weights"),
        nb::arg("threads"), "Computes the weights of chosen pairs.");
  m.def("backward", &backward, nb::arg("call"), nb::arg("gradients"), nb::arg("threads"),
        "Computes the gradients from the output, its gradient and the row statistics.");
  m.def("backward_of", &backward_of, nb::arg("options"), nb::arg("given"), nb::arg("grad"),
        nb::arg("out"), nb::arg("maximum"), nb::arg("total"), nb::arg("query_sum").none(),
        nb::arg("query_grad").none(), nb::arg("key_grad").none(), nb::arg("value_grad").none(),
        nb::arg("threads"),
        "Computes those of query, key and value of a call with the plain options of another; False "
        "where not all is finite, or is read where it lies.");
  m.def("are_finite", &are_finite, nb::arg("arrays"), nb::arg("threads"),
        "Whether all numbers of some arrays are finite.");
}
