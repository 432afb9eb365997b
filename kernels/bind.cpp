// The Python module regard._kernels. Bindings only, no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cpu.h"

NB_MODULE(_kernels, m) {
  m.doc() = "The compiled part of regard.";
  m.def("cpu_name", &regard::cpu_name,
        "The processor's own name for itself, or the architecture's where it has none.");
}
