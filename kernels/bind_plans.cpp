// Calls that are like another in all but their arrays, which are read where they lie.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_call.h"
#include "bind_given.h"
#include "bind_gradients.h"

namespace nb = nanobind;

namespace bindings {
namespace {

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

// The gradients of a call with the plain options of another into arrays like its own, or none; of
// what `forward_of` gave. Returns whether they are right: not where the gradient of the output is
// not read where it lies, or not all is finite. `query_sum`: as in Gradients, or none.
bool backward_of(const Call& options, const regard::Given& given, nb::handle grad, nb::handle out,
                 uintptr_t maximum, uintptr_t total, nb::handle query_sum, nb::handle query_grad,
                 nb::handle key_grad, nb::handle value_grad, int threads) {
  const auto of_output = regard::read_array(grad.ptr());
  if (!of_output) return false;
  const auto address = [](nb::handle x) { return x.is_none() ? 0 : std::get<0>(filled_ref(x)); };
  Gradients arrays;
  arrays.grad = of_output, arrays.out = filled_ref(out);
  arrays.maximum = maximum, arrays.total = total;
  arrays.query_sum = address(query_sum), arrays.query_grad = address(query_grad);
  arrays.key_grad = address(key_grad), arrays.value_grad = address(value_grad);
  bool finite = true;
  arrays.finite = &finite;
  backward(call_like(options, given), arrays, threads);
  return finite;
}

}  // namespace

void bind_plans(nb::module_& m) {
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
  m.def("forward_of", &forward_of, nb::arg("options"), nb::arg("given"), nb::arg("out"),
        nb::arg("maximum"), nb::arg("total"), nb::arg("threads"),
        "Computes the output of a call with the plain options of another and, where asked, the row "
        "statistics.");
  m.def("forward_with", &forward_with, nb::arg("options"), nb::arg("given"), nb::arg("out"),
        nb::arg("threads"), nb::arg("mask").none(), nb::arg("starts"), nb::arg("lengths"),
        nb::arg("ends"), nb::arg("ids"), nb::arg("edits"),
        "Computes such an output with a mask, positions, lengths, intervals, segments and edits; "
        "empty where there are none.");
  m.def("backward_of", &backward_of, nb::arg("options"), nb::arg("given"), nb::arg("grad"),
        nb::arg("out"), nb::arg("maximum"), nb::arg("total"), nb::arg("query_sum").none(),
        nb::arg("query_grad").none(), nb::arg("key_grad").none(), nb::arg("value_grad").none(),
        nb::arg("threads"),
        "Computes those of query, key and value of a call with the plain options of another; False "
        "where not all is finite, or is read where it lies.");
}

}  // namespace bindings
