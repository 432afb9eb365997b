// SIMD vectors and their operations, in the compiler's vector types, which become the instructions
// of the target that the file is compiled for.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "target.h"

// For functions that a loop must inline: a call would spill its vectors.
#define REGARD_INLINE __attribute__((always_inline)) inline
#define REGARD_INLINE_LAMBDA __attribute__((always_inline))

namespace regard::REGARD_NAMESPACE {

template <class R>
struct Simd;
template <>
struct Simd<float> {
  static constexpr int lanes = REGARD_LANES;
  typedef float Vec __attribute__((vector_size(REGARD_LANES * 4)));
  typedef int32_t Int __attribute__((vector_size(REGARD_LANES * 4)));
  typedef int32_t Int32 __attribute__((vector_size(REGARD_LANES * 4)));  // as many lanes each
  typedef int64_t Int64 __attribute__((vector_size(REGARD_LANES * 8)));
  typedef uint16_t Short __attribute__((vector_size(REGARD_LANES * 2)));
  typedef uint8_t Byte __attribute__((vector_size(REGARD_LANES)));
};
template <>
struct Simd<double> {
  static constexpr int lanes = REGARD_LANES / 2;
  typedef double Vec __attribute__((vector_size(REGARD_LANES * 4)));
  typedef int64_t Int __attribute__((vector_size(REGARD_LANES * 4)));
  typedef int32_t Int32 __attribute__((vector_size(REGARD_LANES * 2)));
  typedef int64_t Int64 __attribute__((vector_size(REGARD_LANES * 4)));
  typedef uint8_t Byte __attribute__((vector_size(REGARD_LANES / 2)));
};
template <>
struct Simd<int32_t> {
  typedef int32_t Vec __attribute__((vector_size(REGARD_LANES * 4)));
};
template <class R>
using Vec = typename Simd<R>::Vec;
template <class R>
using Int = typename Simd<R>::Int;
template <class R>
using Integer = std::remove_cvref_t<decltype(Int<R>{}[0])>;
typedef Vec<float> F;
typedef Vec<double> G;
typedef Int<float> I;
typedef uint32_t U __attribute__((vector_size(REGARD_LANES * 4)));
typedef uint64_t W __attribute__((vector_size(REGARD_LANES * 4)));

static inline F broadcast(float x) { return x - F{}; }  // x - 0 is x, also for NaN and -0
static inline G broadcast(double x) { return x - G{}; }
static inline I broadcast(int32_t x) { return x - I{}; }

// An unaligned load of a T.
template <class T>
static inline T read(const void* p) {
  T x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

// The bits of x as a T, as std::bit_cast, which GCC 10 has not.
template <class T, class S>
static inline T bits_as(S x) {
  static_assert(sizeof(T) == sizeof(S));
  return read<T>(&x);
}

template <class R>
static inline Vec<R> load(const void* p) {
  Vec<R> x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

template <class R>
static inline void store(void* p, Vec<R> x) {
  __builtin_memcpy(p, &x, sizeof x);
}

// Keeps the compiler from folding a broadcast into every product that uses it: loaded once and used
// four times, it leaves the tile bound by its multiply-adds and not by the load ports.
template <class V>
static inline V in_register(V x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#endif
  return x;
}

// The lane mask of x > y: one bit for each lane.
#if REGARD_LANES == 16
static inline uint32_t greater(F x, F y) {
  return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ);
}
static inline uint32_t greater(G x, G y) {
  return _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_GT_OQ);
}
#elif REGARD_LANES == 8
static inline uint32_t greater(F x, F y) { return uint32_t(_mm256_movemask_ps((__m256)(x > y))); }
static inline uint32_t greater(G x, G y) { return uint32_t(_mm256_movemask_pd((__m256d)(x > y))); }
#elif defined(REGARD_ARM)
static inline uint32_t greater(F x, F y) {
  return vaddvq_u32((uint32x4_t)((U)(x > y) & U{1, 2, 4, 8}));
}
static inline uint32_t greater(G x, G y) {
  return uint32_t(vaddvq_u64((uint64x2_t)((W)(x > y) & W{1, 2})));
}
#else
template <class V>
static inline uint32_t greater(V x, V y) {
  const auto mask = x > y;
  uint32_t bits = 0;
  for (size_t i = 0; i < sizeof(V) / sizeof(x[0]); ++i) bits |= uint32_t(mask[i] != 0) << i;
  return bits;
}
#endif

// The larger of the two; y where either is NaN, which is no rule of an instruction of NEON.
#if REGARD_LANES == 16
static inline F larger(F x, F y) { return (F)_mm512_max_ps((__m512)x, (__m512)y); }
static inline G larger(G x, G y) { return (G)_mm512_max_pd((__m512d)x, (__m512d)y); }
#elif REGARD_LANES == 8
static inline F larger(F x, F y) { return (F)_mm256_max_ps((__m256)x, (__m256)y); }
static inline G larger(G x, G y) { return (G)_mm256_max_pd((__m256d)x, (__m256d)y); }
#else
template <class V>
static inline V larger(V x, V y) {
  return x > y ? x : y;
}
#endif

#if REGARD_LANES == 16
// To two roundings, by a step of Newton's method: an instruction takes 18 cycles on Intel.
static inline F square_root(F x) {
  if (_mm512_fpclass_ps_mask((__m512)x, 0xff)) return (F)_mm512_sqrt_ps((__m512)x);
  const F y = (F)_mm512_rsqrt14_ps((__m512)x), root = x * y;
  return root + 0.5f * y * (x - root * root);
}
static inline G square_root(G x) { return (G)_mm512_sqrt_pd((__m512d)x); }
#elif REGARD_LANES == 8
static inline F square_root(F x) { return (F)_mm256_sqrt_ps((__m256)x); }
static inline G square_root(G x) { return (G)_mm256_sqrt_pd((__m256d)x); }
#elif defined(REGARD_ARM)
static inline F square_root(F x) { return (F)vsqrtq_f32((float32x4_t)x); }
static inline G square_root(G x) { return (G)vsqrtq_f64((float64x2_t)x); }
#else
template <class V>
static inline V square_root(V x) {
  for (size_t i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = std::sqrt(x[i]);
  return x;
}
#endif

// 1 / x to two roundings, where both are normal numbers: a division takes 16 cycles on Intel.
#if REGARD_LANES == 16
static inline F reciprocal(F x) {
  const F y = (F)_mm512_rcp14_ps((__m512)x);
  return y + y * (1.0f - x * y);
}
#else
static inline F reciprocal(F x) { return 1.0f / x; }
#endif
static inline G reciprocal(G x) { return 1.0 / x; }

template <class V>
static inline V magnitude(V x) {
  typedef std::conditional_t<sizeof(x[0]) == 4, U, W> Bits;
  return (V)((Bits)x & (~Bits{} >> 1));
}

// The sum and the maximum of the lanes, in an order of their own.
template <class R>
static inline R sum_lanes(Vec<R> x) {
  R part[Simd<R>::lanes];
  store<R>(part, x);
  for (int half = Simd<R>::lanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}

template <class R>
static inline R max_lanes(Vec<R> x) {
  R top = x[0];
  for (int i = 1; i < Simd<R>::lanes; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// One butterfly step of a transpose: exchanges the off-diagonal blocks of `half` lanes of two rows
// that are `half` apart.
#if REGARD_LANES == 16
template <int half, class V>
static inline void exchange(V& x, V& y) {
  constexpr int bytes = half * int(sizeof(x[0]));  // of a block
  const __m512 a = (__m512)x, b = (__m512)y;
  if constexpr (bytes == 32) {
    x = (V)_mm512_shuffle_f32x4(a, b, 0x44);
    y = (V)_mm512_shuffle_f32x4(a, b, 0xee);
  } else if constexpr (bytes == 16) {
    x = (V)_mm512_mask_shuffle_f32x4(a, 0xf0f0, b, b, 0xa0);
    y = (V)_mm512_mask_shuffle_f32x4(b, 0x0f0f, a, a, 0xf5);
  } else if constexpr (bytes == 8) {
    x = (V)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
    y = (V)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
  } else {
    x = (V)_mm512_mask_moveldup_ps(a, 0xaaaa, b);
    y = (V)_mm512_mask_movehdup_ps(b, 0x5555, a);
  }
}
#else
// A shuffle of the lanes of x and y; those of y are numbered after those of x. GCC has the first
// way since version 12, clang has no other.
template <int... lane, class V>
static inline V shuffle(V x, V y) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(x, y, lane...);
#else
  return __builtin_shuffle(x, y, decltype(x > y){lane...});
#endif
}
template <int half, class V, size_t... i>
static inline void exchange_lanes(V& x, V& y, std::index_sequence<i...>) {
  constexpr int n = sizeof...(i);
  const V low = shuffle<(int(i) & half ? n + int(i) - half : int(i))...>(x, y);
  y = shuffle<(int(i) & half ? n + int(i) : int(i) + half)...>(x, y);
  x = low;
}
template <int half, class V>
static inline void exchange(V& x, V& y) {
#if REGARD_LANES == 8  // a first Zen has 8 operations for vperm2f128, and 3 for these two
  if constexpr (half * sizeof(x[0]) == 16) {
    const __m256 a = (__m256)x, b = (__m256)y;
    x = (V)_mm256_insertf128_ps(a, _mm256_castps256_ps128(b), 1);
    y = (V)_mm256_blend_ps(b, _mm256_castps128_ps256(_mm256_extractf128_ps(a, 1)), 0x0f);
    return;
  }
#endif
  exchange_lanes<half>(x, y, std::make_index_sequence<sizeof(V) / sizeof(x[0])>());
}
#endif

template <int half, class V, int n>
static inline void exchange_all(V (&t)[n]) {
  if constexpr (half > 0) {
    exchange_all<half / 2>(t);
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i)
      if (!(i & half)) exchange<half>(t[i], t[i + half]);
  }
}

// t[i][j] becomes t[j][i].
template <class V, int n>
static inline void transpose(V (&t)[n]) {
  static_assert(sizeof(V) == n * sizeof(t[0][0]));
  exchange_all<n / 2>(t);
}

// Horizontal reductions of n vectors at once: lane i of the result is that of t[i].
template <int half, class V, int n, class Both>
static inline void fold_halves(V (&t)[n], Both both) {
#pragma GCC unroll 16
  for (int i = 0; i < half; ++i) {
    exchange<half>(t[i], t[i + half]);
    t[i] = both(t[i], t[i + half]);
  }
  if constexpr (half > 1) fold_halves<half / 2>(t, both);
}
template <class V, int n, class Both>
static inline V fold_each(V (&t)[n], Both both) {
  fold_halves<n / 2>(t, both);
  return t[0];
}

// Vectors that lie `stride` numbers apart, transposed: t[i] has number i of each. Vectors past
// `count` are 0.
template <class R, int n>
static inline void load_transposed(const R* from, int64_t stride, int64_t count, Vec<R> (&t)[n]) {
  if (count >= n) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) t[i] = *(const Vec<R>*)(from + i * stride);
  } else {
    for (int i = 0; i < n; ++i) t[i] = i < count ? *(const Vec<R>*)(from + i * stride) : Vec<R>{};
  }
  transpose(t);
}

}  // namespace regard::REGARD_NAMESPACE
