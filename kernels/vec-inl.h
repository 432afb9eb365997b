// Vectors and what the loops need of them. Included once per instruction set, inside its namespace:
// REGARD_LANES says how many floats wide. Written with the compiler's vector types, which turn into
// the instructions of whatever the file is compiled for.

// What must be part of the loop around it: a call would put its vectors in memory.
#define REGARD_INLINE __attribute__((always_inline)) inline

template <class R>
struct Simd;
template <>
struct Simd<float> {
  static constexpr int lanes = REGARD_LANES;
  typedef float Vec __attribute__((vector_size(REGARD_LANES * 4)));
  typedef int32_t Int __attribute__((vector_size(REGARD_LANES * 4)));
  typedef int32_t Int32 __attribute__((vector_size(REGARD_LANES * 4)));  // as many lanes each
  typedef uint16_t Short __attribute__((vector_size(REGARD_LANES * 2)));
  typedef uint8_t Byte __attribute__((vector_size(REGARD_LANES)));
};
template <>
struct Simd<double> {
  static constexpr int lanes = REGARD_LANES / 2;
  typedef double Vec __attribute__((vector_size(REGARD_LANES * 4)));
  typedef int64_t Int __attribute__((vector_size(REGARD_LANES * 4)));
  typedef int32_t Int32 __attribute__((vector_size(REGARD_LANES * 2)));
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

// Reads a T that may lie anywhere.
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

// Keeps the compiler from folding a broadcast into every product that uses it: loaded once and
// used four times, the tile is limited by its multiplications and not by its loads.
template <class V>
static inline V in_register(V x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#endif
  return x;
}

// A bit for every lane in which x > y.
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
#else
template <class V>
static inline uint32_t greater(V x, V y) {
  const auto mask = x > y;
  uint32_t bits = 0;
  for (size_t i = 0; i < sizeof(V) / sizeof(x[0]); ++i) bits |= uint32_t(mask[i] != 0) << i;
  return bits;
}
#endif

// The larger of the two; y where x is NaN.
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

// sum += x; what that rounds off goes to `rest`. Source: Knuth, The Art of Computer Programming 2,
// 4.2.2, theorem B.
template <class V>
static inline void add_exactly(V& sum, V& rest, V x) {
  const V both = sum + x, added = both - sum;
  rest += (sum - (both - added)) + (x - added);
  sum = both;
}

// p[0] f^n + p[1] f^(n - 1) + ... + p[n], of several vectors step by step: alone each would wait
// for its own last product.
template <class V, int n, size_t terms>
REGARD_INLINE static void polynomials(const decltype(V{}[0] + 0) (&p)[terms], V (&f)[n]) {
  V sum[n];
  for (V& x : sum) x = V{} + p[0];
  for (size_t k = 1; k < terms; ++k)
    for (int i = 0; i < n; ++i) sum[i] = sum[i] * f[i] + p[k];
  for (int i = 0; i < n; ++i) f[i] = sum[i];
}

// 2^f to 2e-9 and a few roundings, exactly 1 for 0.
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

// x becomes 2^x: exactly 0 where that is less than the smallest normal number, and for -inf; NaN
// stays NaN. Intel's processors take 150 cycles to scale to a denormal number or to an underflow.
#if REGARD_LANES == 16
template <int n>
REGARD_INLINE static void exp2_each(F (&x)[n]) {
  F over[n];  // the whole number below; 0 for -inf, which is left to the scaling
  for (int i = 0; i < n; ++i)
    over[i] = (F)_mm512_reduce_ps((__m512)x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  exp2_fractions(over);
  for (int i = 0; i < n; ++i) {
    const __m512 y = (__m512)x[i];
    const __mmask16 normal = _mm512_cmp_ps_mask(y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    x[i] = (F)_mm512_maskz_scalef_ps(normal, (__m512)over[i], y);
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
  F shifted[n], over[n];
  for (int i = 0; i < n; ++i) shifted[i] = x[i] + magic;
  for (int i = 0; i < n; ++i) over[i] = x[i] - (shifted[i] - magic);
  exp2_fractions(over);
  for (int i = 0; i < n; ++i) {
    const U scaled = (U)over[i] + ((U)shifted[i] << 23);  // of the integer only the low bits stay
    x[i] = x[i] < -126.0f ? F{} : (F)scaled;
  }
}
template <int n>
REGARD_INLINE static void exp2_each(G (&x)[n]) {
  const G magic = broadcast(6755399441055744.0);  // 1.5 * 2^52
  G shifted[n], over[n];
  for (int i = 0; i < n; ++i) shifted[i] = x[i] + magic;
  for (int i = 0; i < n; ++i) over[i] = x[i] - (shifted[i] - magic);
  exp2_fractions(over);
  for (int i = 0; i < n; ++i) {
    const W scaled = (W)over[i] + ((W)shifted[i] << 52);
    x[i] = x[i] < -1022.0 ? G{} : (G)scaled;
  }
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
  F large = 1.0f - 2.0f / (e + 1.0f);
  large = size > 44.0f ? broadcast(1.0f) : large;
  large = x < 0.0f ? -large : large;
  return size < 0.625f ? small : large;
}

static inline G tanh(G x) {
  for (int i = 0; i < Simd<double>::lanes; ++i) x[i] = std::tanh(x[i]);
  return x;
}

// Exchanges the blocks of `half` lanes off the diagonal, of rows that are `half` apart.
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
// The lanes of x and y with these numbers; those of y come after those of x. GCC has the first way
// since version 12, clang has no other.
template <int... lane, class V>
static inline V pick(V x, V y) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(x, y, lane...);
#else
  return __builtin_shuffle(x, y, decltype(x > y){lane...});
#endif
}
template <int half, class V, size_t... i>
static inline void exchange_lanes(V& x, V& y, std::index_sequence<i...>) {
  constexpr int n = sizeof...(i);
  const V low = pick<(int(i) & half ? n + int(i) - half : int(i))...>(x, y);
  y = pick<(int(i) & half ? n + int(i) : int(i) + half)...>(x, y);
  x = low;
}
template <int half, class V>
static inline void exchange(V& x, V& y) {
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

// Puts the lanes of each vector together: lane i of the result is all of t[i].
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

// Some vectors, `stride` numbers apart, transposed: t[i] has number i of each. Of fewer than n the
// others are 0.
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

// Numbers as they are stored, and as they are computed with.
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

static inline int64_t bytes_of(Type type) {
  return type == Type::float64 ? 8 : type == Type::float32 ? 4 : type == Type::boolean ? 1 : 2;
}

// The numbers at p and after it, one for each lane.
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
#endif
  } else {
    Vec<R> x;
    for (int i = 0; i < n; ++i) x[i] = number<R>(p + i * sizeof(Bits), type);
    return x;
  }
}

// Of the first `count`; the other lanes are 0.
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

// Lanes as bfloat16 or float16.
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
#else
  } else {
    Simd<float>::Short bits;
    for (int i = 0; i < Simd<float>::lanes; ++i) bits[i] = float_to_half(x[i]);
    return bits;
#endif
  }
}

#ifdef REGARD_PAIRS
// The processor's instructions for bfloat16: sum + x0 y0 + x1 y1 of pairs, numbers rounded to
// bfloat16, and those of y before those of x.
#ifndef REGARD_EMULATED
static inline F dot_pairs(F sum, I x, I y) {
  return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
static inline __m256i narrow(F x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
static inline I narrow(F x, F y) { return (I)_mm512_cvtne2ps_pbh((__m512)x, (__m512)y); }
#else  // in those of plain AVX-512, for tests: denormal numbers are kept here
static inline F dot_pairs(F sum, I x, I y) {
  const F high = (F)(x & ~0xffff) * (F)(y & ~0xffff) + sum;
  return (F)(x << 16) * (F)(y << 16) + high;
}
static inline __m256i narrow(F x) { return (__m256i)rounded<Type::bfloat16>(x); }
static inline I narrow(F x, F y) {
  return (I)_mm512_inserti64x4(_mm512_castsi256_si512(narrow(y)), narrow(x), 1);
}
#endif
#endif

// Writes the first `count` lanes, rounded to the stored type.
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

// The two halves of x * m, lane by lane.
static inline void multiply_wide(U x, uint32_t m, U& high, U& low) {
#if REGARD_LANES == 16
  const W even = (W)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi32(int(m)));
  const W odd = (W)_mm512_mul_epu32((__m512i)((W)x >> 32), _mm512_set1_epi32(int(m)));
#elif REGARD_LANES == 8
  const W even = (W)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi32(int(m)));
  const W odd = (W)_mm256_mul_epu32((__m256i)((W)x >> 32), _mm256_set1_epi32(int(m)));
#else
  const W even = ((W)x & 0xffffffffu) * m, odd = ((W)x >> 32) * m;
#endif
  const W upper = W{} + 0xffffffff00000000u;
  high = (U)((even >> 32) | (odd & upper));
  low = (U)((even & ~upper) | (odd << 32));
}

// Four random words a lane for the counter (c0, c1, c2, 0). Source: Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3", Philox-4x32-10.
static inline void philox(uint32_t c0, U c1, U c2, const uint32_t (&seed)[2], U (&x)[4]) {
  x[0] = U{} + c0, x[1] = c1, x[2] = c2, x[3] = U{};
  uint32_t k0 = seed[0], k1 = seed[1];
  for (int round = 0; round < 10; ++round) {
    U high0, low0, high1, low1;
    multiply_wide(x[0], 0xD2511F53u, high0, low0);
    multiply_wide(x[2], 0xCD9E8D57u, high1, low1);
    x[0] = high1 ^ x[1] ^ k0;
    x[1] = low1;
    x[2] = high0 ^ x[3] ^ k1;
    x[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}
