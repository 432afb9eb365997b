// The arrays that Python gives: as the bindings hand them on, and read where they lie.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

struct _object;  // Python's PyObject

namespace regard {

// A reference to a caller's array: address, shape, strides, bytes of a unit of strides, name of the
// dtype; in a build with checks also address and bytes of the buffer.
using Shape = std::array<int64_t, 4>;
using Buffer = std::tuple<uintptr_t, int64_t>;
using ArrayRef = std::tuple<uintptr_t, Shape, Shape, int64_t, std::string, std::optional<Buffer>>;

inline const Shape& shape_of(const ArrayRef& ref) { return std::get<1>(ref); }

// Query, key and value of a call, as (B, H, L, D) where they have fewer axes.
struct Given {
  ArrayRef query, key, value;
  std::string kind;     // in bytes, all that a plan depends on: dtypes, and sizes but the lengths
  bool is_like_output;  // whether the output has the query's size and the order of its axes
  bool differentiates;  // whether a gradient is wanted for one of them
};

// An array of NumPy, or a tensor of torch in CPU memory. None of what is not read where it lies:
// more than four axes, rows with gaps, other dtypes, devices and layouts.
std::optional<ArrayRef> read_array(_object* array);

// The same of three arrays of one library, with keys and values of one length, and none empty.
// `recording`: whether torch records gradients.
std::optional<Given> read_given(_object* query, _object* key, _object* value, bool recording);

}  // namespace regard
