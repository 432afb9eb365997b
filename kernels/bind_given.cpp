#include "bind_given.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace regard {
namespace {

// What there is to know of an array, as its library tells it.
struct Told {
  uintptr_t address = 0;
  int64_t axes = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;
  int64_t unit = 1, item = 1;  // bytes of a stride's unit, and of a number
  const char* dtype = nullptr;
};

// The reference to an array, and how many axes it has.
using Axes = std::optional<std::pair<ArrayRef, int64_t>>;

Axes ref_of(const Told& x) {
  if (!x.dtype || x.axes < 2 || x.axes > 4) return {};
  if (x.shape[x.axes - 1] != 1 && x.strides[x.axes - 1] * x.unit != x.item) return {};
  Shape shape{1, 1, 1, 1}, strides{};
  std::copy(x.shape, x.shape + x.axes, shape.end() - x.axes);
  std::copy(x.strides, x.strides + x.axes, strides.end() - x.axes);
  return {{{x.address, shape, strides, x.unit, x.dtype, std::nullopt}, x.axes}};
}

// Arrays of NumPy, by Python's buffer protocol. Rows of its own formats alone: bfloat16 has none.
Axes read_buffer(PyObject* array) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(array, &buffer, PyBUF_RECORDS_RO)) {
    PyErr_Clear();
    return {};
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  const char* const format = buffer.format;
  Told x{.address = uintptr_t(buffer.buf),
         .axes = buffer.ndim,
         .shape = (const int64_t*)buffer.shape,
         .strides = (const int64_t*)buffer.strides,
         .item = buffer.itemsize};
  if (format && format[0] && !format[1])
    x.dtype = format[0] == 'f'   ? "float32"
              : format[0] == 'd' ? "float64"
              : format[0] == 'e' ? "float16"
                                 : nullptr;
  const auto found = ref_of(x);
  PyBuffer_Release(&buffer);
  return found;
}

// DLPack's table of functions, as of its version 1, of which one is called.
struct ExchangeTable {
  uint32_t major, minor;
  const ExchangeTable* older;
  void *allocate, *give, *take;
  int (*read)(void* array, nb::dlpack::dltensor* found);
  void* stream;
};

// That of a type of tensors; none where it has none that can be used.
const ExchangeTable* exchange_table(PyTypeObject* type) {
  static PyTypeObject* known = nullptr;
  static const ExchangeTable* table = nullptr;
  if (type == known) return table;
  const nb::object capsule =
      nb::getattr(nb::handle((PyObject*)type), "__dlpack_c_exchange_api__", nb::none());
  table = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api"))
    table = (const ExchangeTable*)PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  while (table && table->major != 1) table = table->older;
  if (table && !table->read) table = nullptr;
  Py_INCREF(type);  // lest another gets its address
  Py_XDECREF(known);
  known = type;
  return table;
}

const char* dtype_of(const nb::dlpack::dtype& x) {
  if (x.lanes != 1) return nullptr;
  if (x.code == uint8_t(nb::dlpack::dtype_code::Bfloat) && x.bits == 16) return "bfloat16";
  if (x.code != uint8_t(nb::dlpack::dtype_code::Float)) return nullptr;
  return x.bits == 32 ? "float32" : x.bits == 64 ? "float64" : x.bits == 16 ? "float16" : nullptr;
}

// Tensors, by the table of their type.
Axes read_by_table(const ExchangeTable& table, PyObject* tensor) {
  nb::dlpack::dltensor x{};
  if (table.read(tensor, &x)) {  // one without memory, or without strides
    PyErr_Clear();
    return {};
  }
  if (x.device.device_type != nb::device::cpu::value || !x.strides) return {};
  const int64_t item = x.dtype.bits / 8;
  return ref_of({uintptr_t(x.data) + x.byte_offset, x.ndim, x.shape, x.strides, item, item,
                 dtype_of(x.dtype)});
}

std::string text_of(nb::object x) { return nb::str(x).c_str(); }

// Tensors of a type without a table, by their attributes.
Axes read_by_attributes(nb::handle tensor) {
  if (!nb::cast<bool>(tensor.attr("is_cpu")) || text_of(tensor.attr("layout")) != "torch.strided")
    return {};
  const auto shape = nb::cast<std::vector<int64_t>>(tensor.attr("shape"));
  const auto strides = nb::cast<std::vector<int64_t>>(tensor.attr("stride")());
  const auto item = nb::cast<int64_t>(tensor.attr("element_size")());
  const std::string dtype = text_of(tensor.attr("dtype"));
  Told x{nb::cast<uintptr_t>(tensor.attr("data_ptr")()),
         int64_t(shape.size()),
         shape.data(),
         strides.data(),
         item,
         item};
  for (const char* name : {"float32", "float64", "float16", "bfloat16"})
    if (dtype == std::string("torch.") + name) x.dtype = name;
  return ref_of(x);
}

Axes read(PyObject* array) {
  if (PyObject_CheckBuffer(array)) return read_buffer(array);
  try {
    if (nb::cast<bool>(nb::handle(array).attr("is_neg")())) return {};  // of the other sign there
    if (const ExchangeTable* table = exchange_table(Py_TYPE(array)))
      return read_by_table(*table, array);
    return read_by_attributes(array);
  } catch (nb::python_error&) {  // a nested tensor, which has no shape
  } catch (nb::cast_error&) {
  }
  return {};
}

// Whether the axes, so ordered, lie inside one another in memory.
bool are_nested(const ArrayRef& ref, std::array<size_t, 4> order) {
  const Shape &shape = shape_of(ref), &strides = std::get<2>(ref);
  int64_t inner = 0;
  for (size_t i = 4; i-- > 0;) {
    if (shape[order[i]] == 1) continue;
    if (strides[order[i]] <= inner) return false;
    inner = strides[order[i]];
  }
  return true;
}

}  // namespace

std::optional<ArrayRef> read_array(PyObject* array) {
  const Axes found = read(array);
  return found ? std::optional(found->first) : std::nullopt;
}

std::optional<Given> read_given(PyObject* query, PyObject* key, PyObject* value, bool recording) {
  const auto q = read(query), k = read(key), v = read(value);
  if (!q || !k || !v || q->second != k->second || q->second != v->second) return {};
  Given given{q->first, k->first, v->first, {}, false, false};
  const Shape &of_query = shape_of(given.query), &of_key = shape_of(given.key),
              &of_value = shape_of(given.value);
  const int64_t Lq = of_query[2], Lk = of_key[2];
  if (Lk != of_value[2] || Lq < 1 || Lk < 1 || Lk > INT32_MAX) return {};
  if (recording)
    for (const nb::handle x : {query, key, value})
      given.differentiates |= nb::cast<bool>(x.attr("requires_grad"));
  given.is_like_output = of_query[3] == of_value[3] && (are_nested(given.query, {0, 1, 2, 3}) ||
                                                        are_nested(given.query, {0, 2, 1, 3}));
  const auto add = [&](int64_t number) { given.kind.append((const char*)&number, sizeof number); };
  add(q->second);
  for (const ArrayRef* x : {&given.query, &given.key, &given.value}) {
    const auto& [address, shape, strides, unit, dtype, buffer] = *x;
    given.kind += dtype;
    for (const int64_t number : {unit, shape[0], shape[1], shape[3]}) add(number);
  }
  return given;
}

}  // namespace regard
