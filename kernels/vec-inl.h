// A vector of floats and what the loops need of it. Included once per instruction set, inside its
// namespace: REGARD_LANES says how wide. Written with the compiler's vector types, which turn into
// the instructions of whatever the file is compiled for.

constexpr int kLanes = REGARD_LANES;
typedef float F __attribute__((vector_size(kLanes * 4)));
typedef int32_t I __attribute__((vector_size(kLanes * 4)));

static inline F broadcast(float x) {
  return x - F{};  // x - 0 is x, also for NaN and -0
}

static inline I broadcast_int(int32_t x) { return x - I{}; }

// Keeps the compiler from folding a broadcast into every product that uses it: loaded once and
// used four times, the tile is limited by its multiplications and not by its loads.
static inline F in_register(F x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#endif
  return x;
}

static inline bool any(I mask) {
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= mask[i];
  return found != 0;
}

// 2^f for |f| <= 1/2, to 2e-9 and a few roundings.
static inline F exp2_fraction(F f) {
  F p = broadcast(0x1.41fbbcp-13f);
  p = p * f + 0x1.5f3e52p-10f;
  p = p * f + 0x1.3b2d4cp-7f;
  p = p * f + 0x1.c6aee8p-5f;
  p = p * f + 0x1.ebfbdcp-3f;
  p = p * f + 0x1.62e430p-1f;
  return p * f + 1.0f;
}

// 2^x; exactly 0 for -inf; NaN stays NaN.
#if REGARD_LANES == 16
static inline F exp2(F x) {
  x = (F)_mm512_max_ps((__m512)broadcast(-160.0f), (__m512)x);  // of a NaN the second: x
  const F whole = (F)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  return (F)_mm512_scalef_ps((__m512)exp2_fraction(x - whole), (__m512)whole);
}
#else
static inline F exp2(F x) {
  const I zero = x < -126.0f;
  x = zero ? broadcast(-126.0f) : x;
  const F magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = x + magic;
  const F p = exp2_fraction(x - (shifted - magic));
  const I exponent = ((I)shifted - (I)magic + 127) << 23;
  return zero ? F{} : p * (F)exponent;
}
#endif

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
