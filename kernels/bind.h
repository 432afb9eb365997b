// The bindings: each file has the calls of one subject, and what Python gives them.
#pragma once

namespace nanobind {
class module_;
}

namespace bindings {

void bind_call(nanobind::module_& m);       // a call of attention, and its output
void bind_plans(nanobind::module_& m);      // the same of arrays that are read where they lie
void bind_gradients(nanobind::module_& m);  // its gradients, and those of its weights
void bind_weights(nanobind::module_& m);    // reductions of the weights
void bind_pairs(nanobind::module_& m);      // matrices of token pairs, and how two differ

}  // namespace bindings
