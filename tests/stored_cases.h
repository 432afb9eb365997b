// The calls of tests/stored_cases.bin: the file, and each call as the kernels read it.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../kernels/attention.h"
#include "../kernels/mask.h"
#include "../kernels/visibility.h"

namespace regard {

// A stored array.
struct Stored {
  Type type = Type::float64;
  std::vector<int64_t> shape;
  std::vector<char> bytes;

  int64_t size() const {
    int64_t n = 1;
    for (const int64_t x : shape) n *= x;
    return n;
  }
};

inline float narrow_number(const char* p, Type type) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  if (type == Type::bfloat16) return std::bit_cast<float>(uint32_t(bits) << 16);
  const float sign = bits & 0x8000 ? -1.0f : 1.0f, fraction = float(bits & 0x3ff);
  const int exponent = bits >> 10 & 31;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

inline double number_at(const char* p, Type type) {
  double wide;
  float single;
  switch (type) {
    case Type::float64:
      return std::memcpy(&wide, p, 8), wide;
    case Type::float32:
      return std::memcpy(&single, p, 4), single;
    default:
      return narrow_number(p, type);
  }
}

class Case {
 public:
  std::string name;
  std::map<std::string, Stored> fields;

  const Stored* find(const std::string& field) const {
    const auto at = fields.find(field);
    return at == fields.end() ? nullptr : &at->second;
  }
  // The numbers of a field in their type; null where it is not stored.
  template <class T>
  const T* data(const std::string& field) const {
    const Stored* x = find(field);
    return x ? reinterpret_cast<const T*>(x->bytes.data()) : nullptr;
  }
  // A single number.
  template <class T>
  T one(const std::string& field, T otherwise = 0) const {
    return find(field) ? *data<T>(field) : otherwise;
  }
  double number(const std::string& field, int64_t i) const {
    const Stored& x = fields.at(field);
    return number_at(x.bytes.data() + i * bytes_of(x.type), x.type);
  }
};

// int64 is stored as float64 is: 8 bytes.
inline Type type_of(const std::string& name) {
  if (name == "float32") return Type::float32;
  if (name == "bfloat16") return Type::bfloat16;
  if (name == "float16") return Type::float16;
  if (name == "float64" || name == "int64") return Type::float64;
  if (name == "bool") return Type::boolean;
  throw std::runtime_error("no array is of the type " + name);
}

// The file is text and numbers: a line "case NAME", then for each array a line with its type, name
// and shape, and its bytes.
inline std::vector<Case> read_cases(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string(path) + " cannot be read");
  std::vector<Case> cases;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string type, name;
    words >> type >> name;
    if (type == "case") {
      cases.push_back({});
      cases.back().name = name;
      continue;
    }
    Stored& x = cases.back().fields[name];
    x.type = type_of(type);
    for (int64_t n; words >> n;) x.shape.push_back(n);
    x.bytes.resize(size_t(x.size() * bytes_of(x.type)));
    if (!file.read(x.bytes.data(), std::streamsize(x.bytes.size())))
      throw std::runtime_error(std::string(path) + " ends within " + name);
  }
  return cases;
}

// A call as the kernels read it, and what it points to.
struct Read {
  Problem problem{};
  Intervals intervals;
  MaskBlocks blocks;
  std::vector<Edit> edits;

  Read(const Case& c, bool with_value) {
    Problem& p = problem;
    read_arrays(c, with_value);
    for (const ScoreOption& option : kScoreOptions)
      p.*option.number = c.one<double>(option.name, p.*option.number);
    p.sinks = c.data<double>("sinks");
    read_edits(c);
    p.dropout = c.one<double>("dropout");
    p.threshold = uint64_t(std::nearbyint(p.dropout * 4294967296.0));
    p.draw_step[0] = p.draw_step[1] = 1;
    const auto seed = uint64_t(c.one<int64_t>("seed"));
    p.seed[0] = uint32_t(seed), p.seed[1] = uint32_t(seed >> 32);
    read_visibility(c);
  }
  Read(const Read&) = delete;

 private:
  static Array array(const Case& c, const char* name, const int64_t (&shape)[4]) {
    const Stored* x = c.find(name);
    if (!x) return {};
    Array found{x->bytes.data(), {}, x->type};
    int64_t step = bytes_of(x->type);
    for (int axis = 3; axis >= 0; --axis) {
      const int64_t own = x->shape[size_t(axis)];
      if (own != 1 && own != shape[axis]) throw std::runtime_error(std::string(name) + "'s shape");
      found.strides[axis] = own == 1 ? 0 : step;
      step *= own;
    }
    return found;
  }

  void read_arrays(const Case& c, bool with_value) {
    Problem& p = problem;
    const Stored &q = c.fields.at("query"), &k = c.fields.at("key"), &v = c.fields.at("value");
    p.B = q.shape[0], p.Hq = q.shape[1], p.Lq = q.shape[2], p.D = q.shape[3];
    p.Hkv = k.shape[1], p.Lk = k.shape[2], p.Dv = with_value ? v.shape[3] : 0;
    p.group_rows = p.Hq / p.Hkv * p.Lq;
    p.type = q.type;
    p.query = array(c, "query", {p.B, p.Hq, p.Lq, p.D});
    p.key = array(c, "key", {p.B, p.Hkv, p.Lk, p.D});
    if (with_value) p.value = array(c, "value", {p.B, p.Hkv, p.Lk, p.Dv});
    p.mask = array(c, "mask", {p.B, p.Hq, p.Lq, p.Lk});
    p.bias = array(c, "bias", {p.B, p.Hq, p.Lq, p.Lk});
  }

  void read_edits(const Case& c) {
    const Stored* logs = c.find("edit_logs");
    for (int64_t e = 0; logs && e < logs->size(); ++e) {
      const int64_t* at = c.data<int64_t>("edit_ranges") + 6 * e;
      const double log = c.number("edit_logs", e);
      edits.push_back({{at[0], at[1]}, {at[2], at[3]}, {at[4], at[5]}, log});
    }
    problem.edits = edits.data(), problem.edit_count = int64_t(edits.size());
  }

  void read_visibility(const Case& c) {
    Problem& p = problem;
    const auto shared = [&](const char* name) {
      const Stored* x = c.find(name);
      return x && x->shape[0] == 1;
    };
    intervals = intervals_of({.B = p.B,
                              .Lq = p.Lq,
                              .Lk = p.Lk,
                              .causal = c.one<int64_t>("causal") != 0,
                              .left = c.one<int64_t>("window_left", -1),
                              .right = c.one<int64_t>("window_right", -1),
                              .starts = c.data<int64_t>("starts"),
                              .lengths = c.data<int64_t>("lengths"),
                              .query_ids = c.data<int64_t>("query_ids"),
                              .key_ids = c.data<int64_t>("key_ids"),
                              .shared_query_ids = shared("query_ids"),
                              .shared_key_ids = shared("key_ids"),
                              .interval_first = c.data<int64_t>("interval_first"),
                              .interval_last = c.data<int64_t>("interval_last"),
                              .shared_interval_first = shared("interval_first"),
                              .shared_interval_last = shared("interval_last")});
    if (p.mask && narrow(p, intervals, blocks, 1, nullptr)) p.mask = {};
    if (p.mask) {
      p.mask_blocks = blocks.seen.data();
      std::memcpy(p.mask_block_strides, blocks.strides, sizeof blocks.strides);
    }
    p.first = intervals.first.data(), p.last = intervals.last.data();
    p.interval_heads = intervals.heads;
    p.query_ids = intervals.query_ids.empty() ? nullptr : intervals.query_ids.data();
    p.key_ids = intervals.key_ids.empty() ? nullptr : intervals.key_ids.data();
  }
};

}  // namespace regard
