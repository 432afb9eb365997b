// Reductions of matrices of token pairs, and how far two sums of weights are apart.
#include "bind_pairs.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>

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

}  // namespace

Terms::Terms(const std::vector<PairTerm>& given, int threads) {
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

}  // namespace bindings
