// Sums, exponentials, logarithms and tanh of vectors.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "vectors-inl.h"

namespace regard::REGARD_NAMESPACE {

// Compensated sum: sum += x by two-sum, whose rounding error is added to `compensation`. Source:
// Knuth, The Art of Computer Programming 2, 4.2.2, theorem B.
template <class V>
static inline void add_compensated(V& sum, V& compensation, V x) {
  const V both = sum + x, added = both - sum;
  compensation += (sum - (both - added)) + (x - added);
  sum = both;
}

// p[0] f^n + p[1] f^(n - 1) + ... + p[n] by Horner's scheme, of several vectors in step: their
// independent chains hide the latency of a multiply-add.
template <class V, int n, size_t terms>
REGARD_INLINE static void polynomials(const decltype(V{}[0] + 0) (&p)[terms], V (&f)[n]) {
  V sum[n];
  for (V& x : sum) x = V{} + p[0];
  for (size_t k = 1; k < terms; ++k)
    for (int i = 0; i < n; ++i) sum[i] = sum[i] * f[i] + p[k];
  for (int i = 0; i < n; ++i) f[i] = sum[i];
}

// 2^f by a polynomial, to 2e-9 and a few roundings, exactly 1 for 0.
template <int n>
REGARD_INLINE static void exp2_fractions(F (&f)[n]) {
#if REGARD_LANES == 16  // 0 <= f <= 1
  polynomials({0x1.c54174p-13f, 0x1.46d64cp-10f, 0x1.3d0b92p-7f, 0x1.c68912p-5f, 0x1.ebfd58p-3f,
               0x1.62e42cp-1f, 1.0f},
              f);
#else  // |f| <= 1/2
  polynomials({0x1.41fbbcp-13f, 0x1.5f3e52p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f,
               0x1.62e430p-1f, 1.0f},
              f);
#endif
}

// Likewise for |f| <= 1/2, to 4e-18: Taylor's, ln(2)^k / k!.
template <int n>
REGARD_INLINE static void exp2_fractions(G (&f)[n]) {
  constexpr double ln2 = 0.693147180559945309417;
  static constexpr struct Terms {
    double of[14];
    constexpr Terms() : of{} {
      double x = 1;
      for (int k = 0; k < 14; x *= ln2 / ++k) of[13 - k] = x;
    }
  } terms;
  polynomials(terms.of, f);
}

// x becomes 2^x: flushed to 0 below the smallest normal number, and for -inf; NaN stays NaN.
// Intel's processors take 150 cycles to scale to a denormal number or to an underflow.
#if REGARD_LANES == 16
template <int n>
REGARD_INLINE static void exp2_each(F (&x)[n]) {
  F over[n];  // x - floor(x); 0 for -inf, which is left to the scaling
  for (int i = 0; i < n; ++i)
    over[i] = (F)_mm512_reduce_ps((__m512)x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  exp2_fractions(over);
  for (int i = 0; i < n; ++i) {
    const __m512 y = (__m512)x[i];
    const __mmask16 normal = _mm512_cmp_ps_mask(y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    x[i] = (F)_mm512_maskz_scalef_ps(normal, (__m512)over[i], y);
  }
}
// Terms of 2^f for 0 <= f <= 1, to 1e-7 and a few roundings, exactly 1 for 0: one less.
constexpr float kFewTerms[] = {0x1.e974fcp-10f, 0x1.277854p-7f, 0x1.c91ce6p-5f,
                               0x1.ebdb56p-3f,  0x1.62e4bap-1f, 1.0f};
constexpr int kFew = int(sizeof kFewTerms / sizeof kFewTerms[0]);

// powers[i] = 2^x[i] for the terms above, which may be multiplied by a factor: in these lanes, and
// flushed to 0 as by exp2_each. What is flushed is 0 in x too where it is `clears`.
template <bool clears, int n>
REGARD_INLINE static void exp2_by(const F (&terms)[kFew], __mmask16 lanes, F (&x)[n],
                                  F (&powers)[n]) {
  F over[n];
  for (int i = 0; i < n; ++i) {
    over[i] = (F)_mm512_reduce_ps((__m512)x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    powers[i] = terms[0];
  }
  for (int k = 1; k < kFew; ++k)
    for (int i = 0; i < n; ++i) powers[i] = powers[i] * over[i] + terms[k];
  for (int i = 0; i < n; ++i) {
    const __m512 y = (__m512)x[i];
    const __mmask16 normal =
        _mm512_mask_cmp_ps_mask(lanes, y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    powers[i] = (F)_mm512_maskz_scalef_ps(normal, (__m512)powers[i], y);
    if (clears) x[i] = (F)_mm512_maskz_mov_ps(normal, y);
  }
}
// Rounds 2^x to bfloat16, into `rounded`: to 1e-4 and that rounding, and by the same rule for
// exponents near the limits. x becomes 2^x where it is `exact`.
template <bool exact, int n>
REGARD_INLINE static void exp2_rounded(F (&x)[n], F (&rounded)[n]) {
  constexpr float shift = 98304.0f;  // 1.5 * 2^16: numbers from 1 to 2 added to it keep 7 bits
  F over[n];
  for (int i = 0; i < n; ++i)
    over[i] = (F)_mm512_reduce_ps((__m512)x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  for (int i = 0; i < n; ++i) rounded[i] = over[i];
  polynomials({0.07826797f, 0.22630768f, 0.69542435f, 1.0f + shift}, rounded);
  for (int i = 0; i < n; ++i) rounded[i] -= shift;
  if (exact) polynomials(kFewTerms, over);
  for (int i = 0; i < n; ++i) {
    const __m512 y = (__m512)x[i];
    const __mmask16 normal = _mm512_cmp_ps_mask(y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    rounded[i] = (F)_mm512_maskz_scalef_ps(normal, (__m512)rounded[i], y);
    if (exact) x[i] = (F)_mm512_maskz_scalef_ps(normal, (__m512)over[i], y);
  }
}
template <int n>
REGARD_INLINE static void exp2_each(G (&x)[n]) {
  G whole[n];
  for (int i = 0; i < n; ++i) {
    x[i] = larger(broadcast(-1100.0), x[i]);
    whole[i] = (G)_mm512_roundscale_pd((__m512d)x[i], _MM_FROUND_TO_NEAREST_INT);
    x[i] -= whole[i];
  }
  exp2_fractions(x);
  for (int i = 0; i < n; ++i) {
    const __m512d y = (__m512d)whole[i];
    const __mmask8 normal = _mm512_cmp_pd_mask(y, _mm512_set1_pd(-1022.0), _CMP_NLE_UQ);
    x[i] = (G)_mm512_maskz_scalef_pd(normal, (__m512d)x[i], y);
  }
}
#else
template <int n>
REGARD_INLINE static void exp2_each(F (&x)[n]) {
  const F magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F shifted[n];
  // 2^-127 comes out as 0. Looked at first, x needs no register while its power is computed.
  for (int i = 0; i < n; ++i) x[i] = x[i] < -126.0f ? broadcast(-127.0f) : x[i];
  for (int i = 0; i < n; ++i) shifted[i] = x[i] + magic;
  for (int i = 0; i < n; ++i) x[i] -= shifted[i] - magic;
  exp2_fractions(x);
  for (int i = 0; i < n; ++i)  // of the integer only the low bits stay
    x[i] = (F)((U)x[i] + ((U)shifted[i] << 23));
}
template <int n>
REGARD_INLINE static void exp2_each(G (&x)[n]) {
  const G magic = broadcast(6755399441055744.0);  // 1.5 * 2^52
  G shifted[n];
  for (int i = 0; i < n; ++i) x[i] = x[i] < -1022.0 ? broadcast(-1023.0) : x[i];
  for (int i = 0; i < n; ++i) shifted[i] = x[i] + magic;
  for (int i = 0; i < n; ++i) x[i] -= shifted[i] - magic;
  exp2_fractions(x);
  for (int i = 0; i < n; ++i) x[i] = (G)((W)x[i] + ((W)shifted[i] << 52));
}
#endif

template <class V>
static inline V exp2(V x) {
  V one[] = {x};
  exp2_each(one);
  return one[0];
}

// The natural logarithm to a few roundings; -inf for 0. Of numbers that are not negative. Source:
// Cephes, logf.
static inline F log(F x) {
  const auto tiny = x < 0x1p-126f;
  const F scaled = tiny ? x * 0x1p24f : x;
  const I over = (I)scaled - 0x3f3504f3;  // as if the numbers from sqrt(1/2) on had exponent 0
  const F exponent =
      __builtin_convertvector(over >> 23, F) - (tiny ? broadcast(24.0f) : broadcast(0.0f));
  const F f = (F)((over & 0x7fffff) + 0x3f3504f3) - 1.0f, z = f * f;
  F y[] = {f};
  polynomials(
      {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
       -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f},
      y);
  F sum = y[0] * f * z - 2.12194440e-4f * exponent;
  sum = f + (sum - 0.5f * z) + 0.693359375f * exponent;
  sum = x < std::numeric_limits<float>::infinity() ? sum : x;  // inf and NaN
  return x > 0.0f ? sum : x == 0.0f ? broadcast(-std::numeric_limits<float>::infinity()) : x;
}

static inline G log(G x) {
  for (int i = 0; i < Simd<double>::lanes; ++i) x[i] = std::log(x[i]);
  return x;
}

// tanh to a few roundings. Source: Cephes, tanhf.
static inline F tanh(F x) {
  const F z = x * x;
  F small = broadcast(-5.70498872745e-3f);
  small = small * z + 2.06390887954e-2f;
  small = small * z - 5.37397155531e-2f;
  small = small * z + 1.33314422036e-1f;
  small = small * z - 3.33332819422e-1f;
  small = small * z * x + x;
  const F size = x < 0.0f ? -x : x;
  const F e = exp2(size * 2.885390081777927f);
  F large = 1.0f - 2.0f * reciprocal(e + 1.0f);
  large = size > 44.0f ? broadcast(1.0f) : large;
  large = x < 0.0f ? -large : large;
  return size < 0.625f ? small : large;
}

static inline G tanh(G x) {
  for (int i = 0; i < Simd<double>::lanes; ++i) x[i] = std::tanh(x[i]);
  return x;
}

}  // namespace regard::REGARD_NAMESPACE
