// Calls of attention from Python: reads them, runs them, and computes outputs.
#include "bind_call.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>
#include <thread>

#include "bind.h"
#include "bounds.h"
#include "dispatch.h"

namespace nb = nanobind;

namespace bindings {
namespace {

regard::Type type_of(const ArrayRef& ref) {
  const std::string& name = std::get<4>(ref);
  if (name == "float32") return regard::Type::float32;
  if (name == "bfloat16") return regard::Type::bfloat16;
  if (name == "float16") return regard::Type::float16;
  if (name == "float64") return regard::Type::float64;
  if (name == "bool") return regard::Type::boolean;
  throw std::invalid_argument("no kernel reads " + name);
}

std::vector<regard::Edit> edits_of(const std::vector<EditRef>& refs) {
  std::vector<regard::Edit> edits;
  for (const auto& [ends, log2_factor] : refs)
    edits.push_back({{ends[0], ends[1]}, {ends[2], ends[3]}, {ends[4], ends[5]}, log2_factor});
  return edits;
}

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

}  // namespace

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

Read::Read(const Call& call, int threads, bool few)
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

void Read::read_mask(int threads) {
  regard::Problem& p = problem;
  if (regard::narrow(p, intervals, blocks, threads, nullptr)) {
    p.mask = {};
    return;
  }
  p.mask_blocks = blocks.seen.data();
  std::copy(blocks.strides, blocks.strides + 3, p.mask_block_strides);
}

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
  m.def("forward", &forward, nb::arg("call"), nb::arg("out").none(), nb::arg("maximum"),
        nb::arg("total"), nb::arg("threads"),
        "Computes the output and, where asked, the row statistics.");
  m.def("end", &end, "Stops every call; none is taken any more.");
}

}  // namespace bindings
