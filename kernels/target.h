// The instruction set that a file is compiled for; target/*.cpp define it. What is read by itself,
// as editors and tests read a header, is read for `portable`.
//
//   REGARD_NAMESPACE  its own, so that nothing that was compiled with its instructions can be
//   linked
//                     into another
//   REGARD_LANES      floats of a vector
//   REGARD_PAIRS      it has products of bfloat16 pairs; with REGARD_EMULATED, in other
//   instructions
#pragma once

#ifndef REGARD_NAMESPACE
#define REGARD_NAMESPACE portable
#define REGARD_LANES 4
#endif

#if REGARD_LANES > 4
#include <immintrin.h>
#endif
