// What the vectors of an instruction set promise, lane by lane. tests/test_stored_cases.py compiles
// it with the flags of each, and runs it: natively, or for ARM in qemu.
#include <cmath>
#include <cstdio>
#include <limits>

#include "../kernels/mathematics-inl.h"
#include "../kernels/pairs-inl.h"
#include "../kernels/random-inl.h"

using namespace regard;
using namespace regard::REGARD_NAMESPACE;

static int failed = 0;

static void expect(bool right, const char* what, int lane) {
  if (right) return;
  std::printf("%s, in lane %d\n", what, lane);
  failed = 1;
}

template <class R>
static bool same(R x, R y) {
  return std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y);
}

// Every pair of awkward numbers, in every lane.
template <class R, class V>
static void compares(V) {
  constexpr R inf = std::numeric_limits<R>::infinity(), nan = std::numeric_limits<R>::quiet_NaN();
  constexpr R numbers[] = {nan, -inf, R(-2.5), R(-0.0), R(0), R(1e-30), R(7), inf};
  for (const R x : numbers)
    for (const R y : numbers) {
      V a{}, b{};
      for (int i = 0; i < Simd<R>::lanes; ++i) {
        a[i] = x, b[i] = y;
        const V larger_one = larger(a, b);
        expect(same(larger_one[i], x > y ? x : y), "larger is y where either is NaN", i);
        expect(greater(a, b) == (x > y ? (2u << i) - 1 : 0), "the lane mask of x > y", i);
        expect(same(magnitude(a)[i], std::fabs(x)), "magnitude", i);
        expect(same(square_root(a)[i], std::sqrt(x)), "square root", i);
      }
    }
}

template <class R, class V>
static void transposes(V) {
  constexpr int n = Simd<R>::lanes;
  V t[n];
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) t[i][j] = R(100 * i + j);
  transpose(t);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) expect(t[i][j] == R(100 * j + i), "a transpose", j);
}

static void converts_float16() {
  constexpr int n = Simd<float>::lanes;
  for (int from = 0; from < 65536; from += n) {
    uint16_t bits[n];
    for (int i = 0; i < n; ++i) bits[i] = uint16_t(from + i);
    const F x = numbers<float, Type::float16>((const char*)bits);
    const Simd<float>::Short back = rounded<Type::float16>(x), off = rounded<Type::float16>(x * 1.0003f);
    for (int i = 0; i < n; ++i) {
      expect(same(float(x[i]), half_to_float(bits[i])), "float16 to float", i);
      expect(std::isnan(float(x[i])) || back[i] == bits[i], "float16 and back", i);
      expect(same(half_to_float(off[i]), half_to_float(float_to_half(x[i] * 1.0003f))),
             "float to float16", i);
    }
  }
}

static void multiplies_wide() {
  U x, high, low;
  for (int i = 0; i < Simd<float>::lanes; ++i) x[i] = 0x9e3779b9u * uint32_t(i + 1);
  multiply_wide(x, 0xD2511F53u, high, low);
  for (int i = 0; i < Simd<float>::lanes; ++i) {
    const uint64_t right = uint64_t(x[i]) * 0xD2511F53u;
    expect(high[i] == uint32_t(right >> 32) && low[i] == uint32_t(right), "multiply_wide", i);
  }
}

template <class R, class V>
static void raises_two(V) {
  for (double x = -130; x < 20; x += 0.37) {
    const V found = exp2(V{} + R(x));
    const double right = x < -126 && sizeof(R) == 4 ? 0 : std::exp2(double(R(x)));
    for (int i = 0; i < Simd<R>::lanes; ++i)
      expect(std::fabs(found[i] - right) <= right * (sizeof(R) == 4 ? 3e-7 : 1e-15), "2^x", i);
  }
  constexpr R inf = std::numeric_limits<R>::infinity(), nan = std::numeric_limits<R>::quiet_NaN();
  expect(exp2(V{} - inf)[0] == 0, "2^-inf is 0", 0);
  expect(std::isnan(exp2(V{} + nan)[0]), "2^NaN is NaN", 0);
}

#ifdef REGARD_PAIRS
// Words of pairs: their halves and their products.
static uint16_t half(const I& x, int i) { return read<uint16_t>((const char*)&x + 2 * i); }

static void multiplies_pairs() {
  constexpr int n = Simd<float>::lanes;
  F x, y;
  for (int i = 0; i < n; ++i) x[i] = float(i) - 2.5f, y[i] = 0.25f * float(i + 1);
  const I both = narrow(x, y), pair = pairs_of(x, y);
  const F sum = dot_pairs(F{} + 1.0f, pair, ones()), product = dot_pairs(F{}, pair, pair);
  for (int i = 0; i < n; ++i) {
    expect(bfloat16_to_float(half(both, i)) == y[i], "narrow: y first", i);
    expect(bfloat16_to_float(half(both, n + i)) == x[i], "narrow: then x", i);
    expect(bfloat16_to_float(half(pair, 2 * i)) == x[i], "a pair: x first", i);
    expect(bfloat16_to_float(half(pair, 2 * i + 1)) == y[i], "a pair: then y", i);
    expect(sum[i] == 1 + x[i] + y[i], "a sum of pairs", i);
    expect(product[i] == x[i] * x[i] + y[i] * y[i], "a product of pairs", i);
  }
}

static void orders_pairs() {
  constexpr int n = Simd<float>::lanes;
  uint16_t a[2 * n + 1], b[2 * n];
  for (int i = 0; i < 2 * n; ++i) a[i] = uint16_t(i + 1), b[i] = uint16_t(100 + i);
  a[2 * n] = 999;
  const I x = read<I>(a), y = read<I>(b);
  const I first = interleave<0>(x, y), second = interleave<1>(x, y);
  for (int i = 0; i < n; ++i) {
    expect(half(first, 2 * i) == a[i] && half(first, 2 * i + 1) == b[i], "first halves", i);
    expect(half(second, 2 * i) == a[n + i] && half(second, 2 * i + 1) == b[n + i], "second", i);
  }
  for (int count = 0; count < 2 * n; ++count) {
    const I some = load_some((const char*)a, count);
    for (int i = 0; i < 2 * n; ++i) expect(half(some, i) == (i < count ? a[i] : 0), "some", i);
  }
}
#endif

int main() {
  compares<float>(F{}), compares<double>(G{});
  transposes<float>(F{}), transposes<double>(G{});
  raises_two<float>(F{}), raises_two<double>(G{});
  converts_float16();
  multiplies_wide();
#ifdef REGARD_PAIRS
  multiplies_pairs();
  orders_pairs();
#endif
  return failed;
}
