// Gradients of a call and of its weights.
#include "bind_gradients.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <stdexcept>

#include "bind.h"
#include "dispatch.h"
#include "finite.h"

namespace nb = nanobind;

namespace bindings {
namespace {

regard::Rule rule_of(const std::string& name) {
  constexpr const char* names[] = {// in the order of Rule
                                   "products",   "nothing",        "vectors",        "logarithms",
                                   "distances",  "diagonals",      "blocks",         "kl",
                                   "reverse_kl", "jensen_shannon", "total_variation"};
  for (size_t i = 0; i < std::size(names); ++i)
    if (name == names[i]) return static_cast<regard::Rule>(i);
  throw std::invalid_argument("no gradient of the weights has the rule " + name);
}

}  // namespace

void backward(const Call& call, const Gradients& arrays, int threads) {
  const regard::Target& target = regard::target();
  const Read read(call, threads);
  const regard::Problem& p = read.problem;
  const Shape out{p.B, p.Hq, p.Lq, p.Dv};
  const Terms of_a(arrays.side_a), of_b(arrays.side_b);
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
      .bias_grad = array("bias_grad", arrays.bias_grad, {p.B, p.Hq, p.Lq, p.Lk}),
      .finite = arrays.finite};
  run({target.backward(g), target.bias_gradient(g)}, threads);
}

bool are_finite(const std::vector<ArrayRef>& refs, int threads) {
  for (const ArrayRef& ref : refs) {
    const Shape& shape = shape_of(ref);
    const regard::FiniteScan scan(array("array", ref, shape), shape);
    run({scan.job()}, threads);
    if (!scan.all_finite()) return false;
  }
  return true;
}

void bind_gradients(nb::module_& m) {
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
  m.def("backward", &backward, nb::arg("call"), nb::arg("gradients"), nb::arg("threads"),
        "Computes the gradients from the output, its gradient and the row statistics.");
  m.def("are_finite", &are_finite, nb::arg("arrays"), nb::arg("threads"),
        "Whether all numbers of some arrays are finite.");
}

}  // namespace bindings
