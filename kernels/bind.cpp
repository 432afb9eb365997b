// The Python module regard._kernels. Bindings only, no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chrono>
#include <optional>
#include <tuple>

#include "cpu.h"
#include "dispatch.h"

namespace nb = nanobind;

namespace {

// An array as Python tells it: where it starts, and its strides in elements.
using Array = std::tuple<uintptr_t, std::vector<int64_t>>;

template <class T>
const T* data(const Array& array) {
  return reinterpret_cast<const T*>(std::get<0>(array));
}

template <class T, size_t N>
const T* read(const std::optional<Array>& array, int64_t (&strides)[N]) {
  if (!array) return nullptr;
  for (size_t i = 0; i < N; ++i) strides[i] = std::get<1>(*array).at(i);
  return data<T>(*array);
}

// Lets Ctrl-C through, ten times a second at most.
void poll(regard::Work& work) {
  using Clock = std::chrono::steady_clock;
  static thread_local Clock::time_point last = Clock::now();
  const auto now = Clock::now();
  if (now - last < std::chrono::milliseconds(100)) return;
  last = now;
  nb::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) work.stop = true;
}

void forward(Array query, Array key, Array value, uintptr_t out, std::array<int64_t, 7> sizes,
             float scale, float softcap, bool causal, int64_t left, int64_t right, Array starts,
             Array lengths, std::optional<Array> query_segments, std::optional<Array> key_segments,
             std::optional<Array> mask, std::optional<Array> bias, std::optional<Array> sinks,
             bool finite, int threads) {
  regard::Forward f{};
  f.B = sizes[0], f.Hq = sizes[1], f.Hkv = sizes[2], f.Lq = sizes[3], f.Lk = sizes[4];
  f.D = sizes[5], f.Dv = sizes[6];
  f.query = read<float>(query, f.query_strides);
  f.key = read<float>(key, f.key_strides);
  f.value = read<float>(value, f.value_strides);
  f.out = reinterpret_cast<float*>(out);
  f.scale = scale, f.softcap = softcap, f.causal = causal, f.left = left, f.right = right;
  f.starts = data<int64_t>(starts);
  f.lengths = data<int64_t>(lengths);
  int64_t stride[1] = {0};
  f.query_segments = read<int64_t>(query_segments, stride), f.query_segments_stride = stride[0];
  f.key_segments = read<int64_t>(key_segments, stride), f.key_segments_stride = stride[0];
  f.mask = read<uint8_t>(mask, f.mask_strides);
  f.bias = read<float>(bias, f.bias_strides);
  f.sinks = sinks ? data<float>(*sinks) : nullptr;
  f.finite = finite;
  bool done;
  {
    nb::gil_scoped_release released;
    done = regard::run_forward(f, threads, poll);
  }
  if (!done) throw nb::python_error();
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "The compiled part of regard.";
  m.def("cpu_name", &regard::cpu_name,
        "The processor's own name for itself, or the architecture's where it has none.");
  m.def("target", [] { return std::string(regard::target().name); },
        "The instruction set in use; REGARD_TARGET forces one.");
  m.def("targets", [] {
    std::vector<std::string> names;
    for (const regard::Target* t : regard::targets_here()) names.emplace_back(t->name);
    return names;
  }, "The instruction sets that this processor runs, best first.");
  m.def("forward", &forward, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("out"),
        nb::arg("sizes"), nb::arg("scale"), nb::arg("softcap"), nb::arg("causal"), nb::arg("left"),
        nb::arg("right"), nb::arg("starts"), nb::arg("lengths"), nb::arg("query_segments").none(),
        nb::arg("key_segments").none(), nb::arg("mask").none(), nb::arg("bias").none(),
        nb::arg("sinks").none(), nb::arg("finite"), nb::arg("threads"),
        "Computes one forward pass. Arrays are (address, strides in elements).");
}
