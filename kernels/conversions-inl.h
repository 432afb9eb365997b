// Conversions between the types that arrays store and those that the kernels compute in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention.h"
#include "vectors-inl.h"

namespace regard::REGARD_NAMESPACE {

// The bits that a type is stored in, and the type that it is computed in.
template <Type type>
struct Stored;
template <>
struct Stored<Type::float32> {
  typedef float Bits;
  typedef float Real;
};
template <>
struct Stored<Type::float64> {
  typedef double Bits;
  typedef double Real;
};
template <>
struct Stored<Type::bfloat16> {
  typedef uint16_t Bits;
  typedef float Real;
};
template <>
struct Stored<Type::float16> {
  typedef uint16_t Bits;
  typedef float Real;
};

template <class R>
constexpr Type real_type = std::is_same_v<R, float> ? Type::float32 : Type::float64;

static inline float half_to_float(uint16_t half) {
  uint32_t bits = bits_as<uint32_t>(bits_as<float>((half & 0x7fffu) << 13) * 0x1p112f);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= uint32_t(half & 0x8000) << 16;
  return bits_as<float>(bits);
}

static inline uint16_t float_to_half(float x) {
  const uint32_t sign = bits_as<uint32_t>(x) >> 16 & 0x8000;
  const float size = x < 0 ? -x : x;
  uint32_t bits = bits_as<uint32_t>(size);
  if (x != x) return uint16_t(sign | 0x7e00);
  if (size >= 65520.0f) return uint16_t(sign | 0x7c00);
  if (size < 0x1p-14f) {  // 0.5 counts in steps of the smallest half
    return uint16_t(sign | (bits_as<uint32_t>(size + 0.5f) - 0x3f000000));
  }
  bits += 0xc8000fff + (bits >> 13 & 1);  // the exponents' difference, and a half of the last bit
  return uint16_t(sign | bits >> 13);
}

static inline float bfloat16_to_float(uint16_t x) { return bits_as<float>(uint32_t(x) << 16); }

// One number of any type.
template <class R>
static inline R number(const char* p, Type type) {
  switch (type) {
    case Type::float32:
      return R(read<float>(p));
    case Type::float64:
      return R(read<double>(p));
    case Type::bfloat16:
      return R(bfloat16_to_float(read<uint16_t>(p)));
    case Type::float16:
      return R(half_to_float(read<uint16_t>(p)));
    default:
      return R(read<uint8_t>(p) != 0);
  }
}

// A vector of the numbers from p on, converted.
template <class R, Type type>
static inline Vec<R> numbers(const char* p) {
  constexpr int n = Simd<R>::lanes;
  typedef typename Stored<type>::Bits Bits;
  if constexpr (std::is_same_v<R, Bits>) {
    return load<R>(p);
  } else if constexpr (type == Type::bfloat16 && std::is_same_v<R, float>) {
    return (F)(__builtin_convertvector(read<Simd<float>::Short>(p), U) << 16);
#if REGARD_LANES == 16
  } else if constexpr (type == Type::float16 && std::is_same_v<R, float>) {
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif REGARD_LANES == 8
  } else if constexpr (type == Type::float16 && std::is_same_v<R, float>) {
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(REGARD_ARM)
  } else if constexpr (type == Type::float16 && std::is_same_v<R, float>) {
    return (F)vcvt_f32_f16(read<float16x4_t>(p));
#endif
  } else {
    Vec<R> x;
    for (int i = 0; i < n; ++i) x[i] = number<R>(p + i * sizeof(Bits), type);
    return x;
  }
}

// A masked load: the first `count` numbers; the other lanes are 0.
template <class R, Type type>
static inline Vec<R> numbers(const char* p, int64_t count) {
  constexpr int n = Simd<R>::lanes;
  if (count >= n) return numbers<R, type>(p);
#if REGARD_LANES == 16
  if constexpr (type == Type::float32 && std::is_same_v<R, float>)
    return (F)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
#endif
  alignas(64) char part[n * sizeof(typename Stored<type>::Bits)] = {};
  __builtin_memcpy(part, p, size_t(count) * sizeof(typename Stored<type>::Bits));
  return numbers<R, type>(part);
}

// Lanes rounded to nearest even, as bfloat16 or float16.
template <Type type>
static inline Simd<float>::Short rounded(F x) {
  if constexpr (type == Type::bfloat16) {
    const U bits = (U)x, up = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return __builtin_convertvector(x == x ? up : (bits >> 16) | 0x40u, Simd<float>::Short);
#if REGARD_LANES == 16
  } else {
    return (Simd<float>::Short)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif REGARD_LANES == 8
  } else {
    return (Simd<float>::Short)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(REGARD_ARM)
  } else {
    return (Simd<float>::Short)vcvt_f16_f32((float32x4_t)x);
#else
  } else {
    Simd<float>::Short bits;
    for (int i = 0; i < Simd<float>::lanes; ++i) bits[i] = float_to_half(x[i]);
    return bits;
#endif
  }
}

// A masked store of the first `count` lanes, rounded to the stored type.
template <class R, Type type>
static inline void put(char* p, Vec<R> x, int64_t count) {
  const auto write = [&](const auto& lanes) {
    constexpr size_t size = sizeof lanes[0];
    if (count >= Simd<R>::lanes)
      __builtin_memcpy(p, &lanes, sizeof lanes);
    else
      __builtin_memcpy(p, &lanes, size_t(count) * size);
  };
  if constexpr (std::is_same_v<R, typename Stored<type>::Bits>)
    write(x);
  else
    write(rounded<type>(x));
}

}  // namespace regard::REGARD_NAMESPACE
