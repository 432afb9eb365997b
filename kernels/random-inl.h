// Philox: counter-based random numbers, which need no state, so that any pass draws the same.
#pragma once

#include <cstdint>

#include "vectors-inl.h"

namespace regard::REGARD_NAMESPACE {

// The two halves of x * m, lane by lane.
static inline void multiply_wide(U x, uint32_t m, U& high, U& low) {
#if REGARD_LANES == 16
  const W even = (W)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi32(int(m)));
  const W odd = (W)_mm512_mul_epu32((__m512i)((W)x >> 32), _mm512_set1_epi32(int(m)));
#elif REGARD_LANES == 8
  const W even = (W)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi32(int(m)));
  const W odd = (W)_mm256_mul_epu32((__m256i)((W)x >> 32), _mm256_set1_epi32(int(m)));
#elif defined(REGARD_ARM)
  const uint32x4_t y = (uint32x4_t)x;
  const W even = (W)vmull_n_u32(vget_low_u32(vuzp1q_u32(y, y)), m);
  const W odd = (W)vmull_n_u32(vget_low_u32(vuzp2q_u32(y, y)), m);
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

}  // namespace regard::REGARD_NAMESPACE
