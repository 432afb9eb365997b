#include "finite.h"

#include <algorithm>
#include <cstring>

namespace regard {
namespace {

constexpr int64_t kNumbersOfTask = 1 << 18;

// Whether none of some numbers has the largest exponent, all ones: one more carries into the sign.
// `Bits` are an unsigned number's.
template <class Bits, Bits exponent>
bool is_row_finite(const char* row, int64_t stride, int64_t numbers) {
  constexpr Bits one = exponent & (~exponent + 1), sign = Bits(exponent + one);
  Bits found = 0;
  const auto look = [&](const char* at) {
    Bits bits;
    std::memcpy(&bits, at, sizeof bits);
    found |= Bits((bits & exponent) + one);
  };
  if (stride == int64_t(sizeof(Bits)))
    for (int64_t i = 0; i < numbers; ++i) look(row + i * int64_t(sizeof(Bits)));
  else
    for (int64_t i = 0; i < numbers; ++i) look(row + i * stride);
  return !(found & sign);
}

bool is_row_finite(Type type, const char* row, int64_t stride, int64_t numbers) {
  switch (type) {
    case Type::float32:
      return is_row_finite<uint32_t, 0x7f800000>(row, stride, numbers);
    case Type::bfloat16:
      return is_row_finite<uint16_t, 0x7f80>(row, stride, numbers);
    case Type::float16:
      return is_row_finite<uint16_t, 0x7c00>(row, stride, numbers);
    case Type::float64:
      return is_row_finite<uint64_t, 0x7ff0000000000000>(row, stride, numbers);
    case Type::boolean:
      break;
  }
  return true;
}

}  // namespace

FiniteScan::FiniteScan(const Array& x, const std::array<int64_t, 4>& shape) : array(x) {
  const auto size = [&](size_t axis) {  // as it lies in memory
    return x.strides[axis] ? shape[axis] : std::min<int64_t>(shape[axis], 1);
  };
  for (size_t axis = 0; axis < 3; ++axis) sizes[axis] = size(axis);
  numbers = size(3);
  if (x.strides[2] == numbers * x.strides[3]) numbers *= sizes[2], sizes[2] = 1;
  rows_of_task = std::max<int64_t>(1, kNumbersOfTask / std::max<int64_t>(1, numbers));
}

Job FiniteScan::job() const {
  const int64_t rows = sizes[0] * sizes[1] * sizes[2];
  return {(rows + rows_of_task - 1) / rows_of_task, 0, run, this};
}

void FiniteScan::run(const void* pass, int64_t task, char*, const Stop&) {
  const FiniteScan& scan = *static_cast<const FiniteScan*>(pass);
  const Array& x = scan.array;
  const int64_t* const sizes = scan.sizes;
  const int64_t end = std::min((task + 1) * scan.rows_of_task, sizes[0] * sizes[1] * sizes[2]);
  for (int64_t row = task * scan.rows_of_task; row < end && scan.finite; ++row) {
    const int64_t i = row / sizes[2];
    const char* const from = x.at(i / sizes[1], i % sizes[1], row % sizes[2]);
    if (!is_row_finite(x.type, from, x.strides[3], scan.numbers)) scan.finite = false;
  }
}

}  // namespace regard
