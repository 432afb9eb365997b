// The Python module regard._kernels. Bindings only, no arithmetic.
#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "cpu.h"
#include "dispatch.h"

namespace nb = nanobind;

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
  bindings::bind_call(m);
  bindings::bind_plans(m);
  bindings::bind_gradients(m);
  bindings::bind_weights(m);
  bindings::bind_pairs(m);
}
