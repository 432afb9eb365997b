// The Python module regard._kernels. Bindings only, no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "cpu.h"
#include "dispatch.h"
#include "threads.h"
#include "visibility.h"

namespace nb = nanobind;

namespace {

// An array as Python tells it: where it starts, its strides in bytes, the name of its dtype.
using Told = std::tuple<uintptr_t, std::vector<int64_t>, std::string>;

regard::Type type_of(const std::string& name) {
  if (name == "float32") return regard::Type::float32;
  if (name == "bfloat16") return regard::Type::bfloat16;
  if (name == "float16") return regard::Type::float16;
  if (name == "float64") return regard::Type::float64;
  if (name == "bool") return regard::Type::boolean;
  throw std::invalid_argument("no kernel reads " + name);
}

regard::Array array(const std::optional<Told>& told) {
  regard::Array x;
  if (!told) return x;
  const auto& [address, strides, dtype] = *told;
  x.data = reinterpret_cast<const char*>(address);
  x.type = type_of(dtype);
  for (size_t i = 0; i < 4; ++i) x.strides[i] = strides.at(i);
  return x;
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// One call, with what it owns. The arrays are the caller's, who keeps them alive.
struct Call {
  regard::Problem problem{};
  regard::Intervals intervals;
  std::vector<int64_t> starts;
  int64_t step;
  std::vector<double> sinks;

  Call(Told query, Told key, std::optional<Told> value, std::array<int64_t, 8> sizes, double scale,
       double softcap, bool causal, int64_t left, int64_t right, std::vector<int64_t> starts,
       int64_t step, const std::vector<int64_t>& lengths, uintptr_t query_ids, uintptr_t key_ids,
       bool shared_query_ids, bool shared_key_ids, std::optional<Told> mask,
       std::optional<Told> bias, std::vector<double> sinks, double dropout, int64_t seed)
      : starts(std::move(starts)), step(step), sinks(std::move(sinks)) {
    regard::Problem& p = problem;
    p.B = sizes[0], p.Hq = sizes[1], p.Hkv = sizes[2], p.Lq = sizes[3], p.Lk = sizes[4];
    p.D = sizes[5], p.Dv = sizes[6], p.group_rows = sizes[7];
    p.type = type_of(std::get<2>(query));
    p.query = array(query), p.key = array(key), p.value = array(value);
    p.mask = array(mask), p.bias = array(bias);
    p.sinks = this->sinks.empty() ? nullptr : this->sinks.data();
    p.scale = scale, p.softcap = softcap;
    p.dropout = dropout;
    // Half to even, as Python rounds.
    p.threshold = static_cast<uint64_t>(std::nearbyint(dropout * 4294967296.0));
    p.seed[0] = static_cast<uint32_t>(seed);
    p.seed[1] = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    intervals =
        regard::intervals_of({p.B, p.Lq, p.Lk, causal, left, right, this->starts.data(), step,
                              lengths.data(), at<const int64_t>(query_ids),
                              at<const int64_t>(key_ids), shared_query_ids, shared_key_ids});
    p.first = intervals.first.data(), p.last = intervals.last.data();
    p.query_ids = intervals.query_ids.empty() ? nullptr : intervals.query_ids.data();
    p.key_ids = intervals.key_ids.empty() ? nullptr : intervals.key_ids.data();
  }
};

std::atomic<bool> ending{false};  // Python's end has begun
std::atomic<int> running{0};      // calls that have not come back to Python

// Lets Ctrl-C through, ten times a second at most, and ends when Python does.
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

// Stops what daemon threads still compute: when Python is gone they could not come back to it.
void end() {
  using Clock = std::chrono::steady_clock;
  const auto patience = Clock::now() + std::chrono::seconds(5);
  ending = true;
  nb::gil_scoped_release released;
  while (running && Clock::now() < patience)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void forward(const Call& call, uintptr_t out, uintptr_t maximum, uintptr_t total, int threads) {
  const regard::Target& target = regard::target();
  regard::Forward f{&call.problem,   at<char>(out), at<void>(maximum),
                    at<void>(total), nullptr,       threads};
  const regard::Memory partial = regard::allocate(target.partial_bytes(f));
  f.partial = partial.get();
  run({target.forward(f), target.merge(f)}, threads);
}

void backward(const Call& call, Told grad, Told out, uintptr_t maximum, uintptr_t total,
              uintptr_t query_sum, uintptr_t delta, uintptr_t key_grad, uintptr_t value_grad,
              std::optional<Told> bias_grad, int threads) {
  const regard::Target& target = regard::target();
  const regard::Problem& p = call.problem;
  std::vector<int64_t> turn(static_cast<size_t>(p.B * p.Hkv * target.row_blocks(p)));
  const regard::Backward g{&p,
                           array(grad),
                           array(out),
                           at<void>(maximum),
                           at<void>(total),
                           at<void>(query_sum),
                           at<void>(delta),
                           turn.data(),
                           at<char>(key_grad),
                           at<char>(value_grad),
                           array(bias_grad)};
  run({target.backward(g), target.bias_gradient(g)}, threads);
}

// What is asked of the weights: each is the address of its result, or 0.
void reduce(const Call& call, uintptr_t maximum, uintptr_t total, bool whole_rows,
            uintptr_t weights, uintptr_t entropy, uintptr_t distance, int64_t k,
            uintptr_t top_values, uintptr_t top_keys, uintptr_t received, uintptr_t received_max,
            uintptr_t pooled_max, uintptr_t pooled_mass, std::array<int64_t, 2> bins, int64_t n,
            uintptr_t pair_query, uintptr_t pair_key, uintptr_t pair_weight, int threads) {
  const regard::Target& target = regard::target();
  regard::Reduce r{};
  r.problem = &call.problem, r.maximum = at<void>(maximum), r.total = at<void>(total);
  r.whole_rows = whole_rows;
  r.weights = at<void>(weights), r.entropy = at<double>(entropy);
  r.distance = at<double>(distance), r.starts = call.starts.data(), r.step = call.step;
  r.k = k, r.top_values = at<void>(top_values), r.top_keys = at<int64_t>(top_keys);
  r.received = at<double>(received), r.received_max = at<double>(received_max);
  r.pooled_max = at<void>(pooled_max), r.pooled_mass = at<void>(pooled_mass);
  r.bins[0] = bins[0], r.bins[1] = bins[1];
  r.n = n, r.pair_query = at<int64_t>(pair_query), r.pair_key = at<int64_t>(pair_key);
  r.pair_weight = at<void>(pair_weight);
  // Heads in waves, so that what their chunks hold is written over while it is in the caches.
  constexpr int64_t kWaveBytes = int64_t{4} << 20;
  const int64_t heads = call.problem.B * call.problem.Hq, bytes = target.chunk_bytes(r);
  const int64_t wave = bytes ? std::max<int64_t>(1, kWaveBytes / bytes) : heads;
  const regard::Memory chunks = regard::allocate(bytes * std::min(wave, heads));
  r.chunks = chunks.get();
  for (r.head0 = 0; r.head0 < heads; r.head0 = r.head1) {
    r.head1 = std::min(heads, r.head0 + wave);
    run({target.reduce(r), target.collect(r)}, threads);
  }
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "The compiled part of regard.";
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
  m.def("targets_left_out", &regard::targets_left_out,
        "The instruction sets that the compiler of this build could not make.");
  m.def("preference", &regard::preference, nb::arg("vendor"),
        "The instruction sets of this build, best first on processors of a vendor.");
  nb::class_<Call>(m, "Call", "One call of attention. Arrays are (address, strides, dtype).")
      .def(nb::init<Told, Told, std::optional<Told>, std::array<int64_t, 8>, double, double, bool,
                    int64_t, int64_t, std::vector<int64_t>, int64_t, const std::vector<int64_t>&,
                    uintptr_t, uintptr_t, bool, bool, std::optional<Told>, std::optional<Told>,
                    std::vector<double>, double, int64_t>(),
           nb::arg("query"), nb::arg("key"), nb::arg("value").none(), nb::arg("sizes"),
           nb::arg("scale"), nb::arg("softcap"), nb::arg("causal"), nb::arg("left"),
           nb::arg("right"), nb::arg("starts"), nb::arg("step"), nb::arg("lengths"),
           nb::arg("query_ids"), nb::arg("key_ids"), nb::arg("shared_query_ids"),
           nb::arg("shared_key_ids"), nb::arg("mask").none(), nb::arg("bias").none(),
           nb::arg("sinks"), nb::arg("dropout"), nb::arg("seed"))
      .def_prop_ro(
          "factor", [](const Call& call) { return regard::factor_of(call.problem); },
          "What makes the exponent of 2 of a score.");
  m.def("end", &end, "Stops every call; none is taken any more.");
  m.def("forward", &forward, nb::arg("call"), nb::arg("out"), nb::arg("maximum"), nb::arg("total"),
        nb::arg("threads"), "Computes the output and, where asked, the row statistics.");
  m.def("reduce", &reduce, nb::arg("call"), nb::arg("maximum"), nb::arg("total"),
        nb::arg("whole_rows"), nb::arg("weights") = 0, nb::arg("entropy") = 0,
        nb::arg("distance") = 0, nb::arg("k") = 0, nb::arg("top_values") = 0,
        nb::arg("top_keys") = 0, nb::arg("received") = 0, nb::arg("received_max") = 0,
        nb::arg("pooled_max") = 0, nb::arg("pooled_mass") = 0,
        nb::arg("bins") = std::array<int64_t, 2>{1, 1}, nb::arg("n") = 0, nb::arg("pair_query") = 0,
        nb::arg("pair_key") = 0, nb::arg("pair_weight") = 0, nb::arg("threads"),
        "Computes what is asked of the weights in one pass.");
  m.def("backward", &backward, nb::arg("call"), nb::arg("grad"), nb::arg("out"), nb::arg("maximum"),
        nb::arg("total"), nb::arg("query_sum"), nb::arg("delta"), nb::arg("key_grad"),
        nb::arg("value_grad"), nb::arg("bias_grad").none(), nb::arg("threads"),
        "Computes the gradients from the output, its gradient and the row statistics.");
}
