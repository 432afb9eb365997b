// Reductions of matrices of token pairs, and how far two sums of weights are apart.
#include "bind_pairs.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <utility>

#include "bind.h"
#include "dispatch.h"
#include "threads.h"

namespace nb = nanobind;

namespace bindings {
namespace {

regard::PairKind pair_kind(const std::string& name) {
  constexpr const char* kNames[] = {"weight",    "knockout", "contribution",
                                    "relevance", "gradient", "change"};
  for (int i = 0; i < 6; ++i)
    if (name == kNames[i]) return regard::PairKind(i);
  throw std::invalid_argument("no kernel computes the kind " + name);
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
  const Terms read(given);
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
  const Terms of_a(a), of_b(b);
  regard::Divergences x = sides_of(of_a, of_b);
  x.kl = at<double>(asked.kl), x.reverse_kl = at<double>(asked.reverse_kl);
  x.jensen_shannon = at<double>(asked.jensen_shannon);
  x.total_variation = at<double>(asked.total_variation);
  x.k = asked.k, x.overlap = at<double>(asked.overlap);
  run({regard::target().diverge(x)}, threads);
}

}  // namespace

Head::Head(const regard::Problem& whole, int64_t b, int64_t h) : problem(whole) {
  regard::Problem& p = problem;
  const int64_t kv = h / (p.Hq / p.Hkv);
  for (const auto& [array, head] :
       {std::pair(&p.query, h), std::pair(&p.key, kv), std::pair(&p.value, kv),
        std::pair(&p.mask, h), std::pair(&p.bias, h)})
    array->data = array->at(b, head, 0);
  const int64_t interval = regard::interval_at(whole, b, h, 0);
  p.first += interval, p.last += interval;
  if (p.sinks) p.sinks += h;
  if (p.mask_blocks) p.mask_blocks += b * p.mask_block_strides[0] + h * p.mask_block_strides[1];
  if (p.query_ids) p.query_ids += b * p.Lq;
  if (p.key_ids) p.key_ids += b * p.Lk;
  for (int64_t i = 0; i < p.edit_count; ++i) {
    const regard::Edit& edit = whole.edits[i];
    if (edit.head[0] > h || edit.head[1] <= h) continue;
    edits.push_back(edit);
    edits.back().head[0] = 0, edits.back().head[1] = 1;
  }
  p.edits = edits.data(), p.edit_count = int64_t(edits.size());
  p.B = p.Hq = p.Hkv = p.interval_heads = 1;
}

Terms::Terms(const std::vector<PairTerm>& given) {
  for (const PairTerm& t : given) {
    if (!t.call) throw std::invalid_argument("a term is of a call");
    const regard::Problem& whole = t.call->read.problem;
    if (t.b < 0 || t.b >= whole.B || t.h < 0 || t.h >= whole.Hq)
      throw std::out_of_range("a term is of a head of its call");
    const regard::Problem& p = heads.emplace_back(whole, t.b, t.h).problem;
    const regard::Problem& first = problem();
    if (p.Lq != first.Lq || p.Lk != first.Lk || p.type != first.type)
      throw std::invalid_argument("terms are of one size and type");
    const size_t real = p.type == regard::Type::float64 ? sizeof(double) : sizeof(float);
    const auto rows = uintptr_t((t.b * whole.Hq + t.h) * p.Lq) * real;
    terms.push_back({.problem = &p,
                     .maximum = at<const void>(t.maximum + rows),
                     .total = at<const void>(t.total + rows),
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

void bind_pairs(nb::module_& m) {
  nb::class_<ReadCall>(m, "ReadCall", "A call that is read once, for terms of its heads.")
      .def(nb::init<const Call&, int>(), nb::arg("call"), nb::arg("threads"));
  nb::class_<PairTerm>(m, "PairTerm", "A summand of a matrix of token pairs.")
      .def(nb::init<>())
      .def_rw("call", &PairTerm::call)
      .def_rw("b", &PairTerm::b)
      .def_rw("h", &PairTerm::h)
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

}  // namespace bindings
