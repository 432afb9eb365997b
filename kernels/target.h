// The instruction set that a file is compiled for; target/*.cpp define it. What is read by itself,
// as editors and tests read a header, is read for `portable`.
//
//   REGARD_NAMESPACE    its own, so that its instructions are not linked into another target
//   REGARD_LANES        SIMD lanes: floats of a vector
//   REGARD_PAIRS        has dot products of bfloat16 pairs
//   REGARD_PLAIN_PAIRS  computes them in plain AVX-512
//   REGARD_BASE         the target that computes all types but bfloat16 (and, with tiles, float16),
//                       for which this one would have the same code
//   REGARD_TILES        has products of tiles: 1 by its instructions, 2 by an emulation
//   REGARD_ARM          aarch64, by the intrinsics of NEON
#pragma once

#ifndef REGARD_NAMESPACE
#define REGARD_NAMESPACE portable
#define REGARD_LANES 4
#endif

#if defined(REGARD_ARM)
#include <arm_neon.h>
#elif REGARD_LANES > 4
#include <immintrin.h>
#endif

// Whether a product is added before it is rounded.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define REGARD_FMA
#endif
