// Pairs of bfloat16 in words of 32 bits (the VNNI layout), whose dot product is one instruction.
#pragma once

#include <cstdint>

#include "conversions-inl.h"
#include "vectors-inl.h"

namespace regard::REGARD_NAMESPACE {

#ifdef REGARD_PAIRS

// The processor's instructions for bfloat16: sum + x0 y0 + x1 y1 of pairs, numbers rounded to
// bfloat16, those of y before those of x.
#if defined(REGARD_ARM)  // sums are rounded to odd, denormal numbers are 0
static inline F dot_pairs(F sum, I x, I y) {
  return (F)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_s32((int32x4_t)x),
                        vreinterpretq_bf16_s32((int32x4_t)y));
}
static inline I narrow(F x, F y) {
  const bfloat16x8_t lower = vcvtq_low_bf16_f32((float32x4_t)y);
  return (I)vreinterpretq_s32_bf16(vcvtq_high_bf16_f32(lower, (float32x4_t)x));
}
#elif !defined(REGARD_PLAIN_PAIRS)
static inline F dot_pairs(F sum, I x, I y) {
  return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
static inline __m256i narrow(F x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
static inline I narrow(F x, F y) { return (I)_mm512_cvtne2ps_pbh((__m512)x, (__m512)y); }
#else  // in those of plain AVX-512: denormal numbers are kept here
static inline F dot_pairs(F sum, I x, I y) {
  const F high = (F)(x & ~0xffff) * (F)(y & ~0xffff) + sum;
  return (F)(x << 16) * (F)(y << 16) + high;
}
static inline __m256i narrow(F x) { return (__m256i)rounded<Type::bfloat16>(x); }
static inline I narrow(F x, F y) {
  return (I)_mm512_inserti64x4(_mm512_castsi256_si512(narrow(y)), narrow(x), 1);
}
#endif

// The first `count` numbers from p on, fewer than a vector has; the others are 0.
static inline I load_some(const char* p, int64_t count) {
#if defined(REGARD_ARM)
  I x = {};
  __builtin_memcpy(&x, p, size_t(count) * 2);
  return x;
#else
  return (I)_mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, p);
#endif
}

// Interleaves two rows into the VNNI layout, pairs of numbers of x and y, from their first halves
// or their second; and pairs of the numbers of the lower half and the upper half.
#if defined(REGARD_ARM)
template <int half>
static inline I interleave(I x, I y) {
  return (I)(half ? vzip2q_u16((uint16x8_t)x, (uint16x8_t)y)
                  : vzip1q_u16((uint16x8_t)x, (uint16x8_t)y));
}
static inline I pairs_of(I halves) {
  const uint16x8_t x = (uint16x8_t)halves;
  return (I)vzip1q_u16(x, vextq_u16(x, x, 4));
}
#else
template <int half>
static inline I interleave(I x, I y) {
  static constexpr auto order = [] {
    struct {
      alignas(64) uint16_t at[32];
    } o{};
    for (int i = 0; i < 16; ++i)
      o.at[2 * i] = uint16_t(16 * half + i), o.at[2 * i + 1] = uint16_t(32 + 16 * half + i);
    return o;
  }();
  return (I)_mm512_permutex2var_epi16((__m512i)x, read<__m512i>(order.at), (__m512i)y);
}

static inline I pairs_of(I halves) {
  typedef uint16_t S __attribute__((vector_size(64)));
  constexpr auto order = [] {
    struct {
      uint16_t at[32];
    } o{};
    for (int i = 0; i < 16; ++i) o.at[2 * i] = uint16_t(i), o.at[2 * i + 1] = uint16_t(16 + i);
    return o;
  }();
  S index;
  __builtin_memcpy(&index, order.at, 64);
  return (I)_mm512_permutexvar_epi16((__m512i)index, (__m512i)halves);
}
#endif
// Floats whose upper halves are rounded to bfloat16, to nearest even.
static inline U upper_halves(F x) {
  const U bits = (U)x, up = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x == x ? up : bits | 0x400000u;
}
// Pairs of upper halves: those of x in the lower half.
static inline I join(U x, U y) { return (I)((y & 0xffff0000u) | (x >> 16)); }

#ifdef REGARD_TILES
// The upper halves of x, then those of y.
static inline I upper_halves_of(U x, U y) {
  static constexpr auto order = [] {
    struct {
      alignas(64) uint16_t at[32];
    } o{};
    for (int i = 0; i < 32; ++i) o.at[i] = uint16_t(2 * i + 1);
    return o;
  }();
  return (I)_mm512_permutex2var_epi16((__m512i)x, read<__m512i>(order.at), (__m512i)y);
}

// Numbers rounded to bfloat16, to nearest even, those of x before those of y, with denormal numbers
// as 0: every processor with tiles has the instruction.
static inline I halves_of(F x, F y) {
#if REGARD_TILES == 1
  I halves;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(halves) : "v"(x), "v"(y));
  return halves;
#else
  const auto rounded = [](F z) {
    const U sign = (U)z & 0x80000000u, size = (U)z & 0x7fffffffu;
    return size < 0x00800000u ? sign : upper_halves(z);
  };
  return upper_halves_of(rounded(x), rounded(y));
#endif
}
#endif

// Two floats rounded to a pair of bfloat16: x in the lower half.
#ifdef REGARD_PLAIN_PAIRS
static inline I pairs_of(F x, F y) { return join(upper_halves(x), upper_halves(y)); }
#else
static inline I pairs_of(F x, F y) { return pairs_of(narrow(y, x)); }
#endif

// Pairs of 1.
static inline I ones() {
  I x = I{} + 0x3f803f80;
#if defined(REGARD_ARM)
  asm("" : "+w"(x));  // GCC 12 takes a constant of bfloat16 for one of float16
#endif
  return x;
}

#endif

}  // namespace regard::REGARD_NAMESPACE
