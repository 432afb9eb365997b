// Which instruction sets come first on which processors: the one table of it.
#pragma once

#include <string>

namespace regard {

struct Preference {
  const char* vendor;  // of CPUID
  unsigned family;     // 0: any
  const char* order;   // best first; what is not in a build is passed over
};

// benchmarks/targets.py measures it. Targets differ for bfloat16 alone where they are equally wide.
constexpr Preference kPreferences[] = {
    // Zen 4 and 5 begin as many products of pairs as of floats.
    {"AuthenticAMD", 25, "amx avx512_bf16 avx512 avx2 portable"},
    {"AuthenticAMD", 26, "amx avx512_bf16 avx512 avx2 portable"},
    // These begin a product of pairs every second cycle, and two of floats in every one: plain
    // AVX-512 is 1.4 to 1.8 times as fast.
    {"GenuineIntel", 0, "amx avx512 avx512_bf16 avx2 portable"},
};
// Of processors that nobody has measured: the instruction that is made for it.
constexpr const char* kDefaultOrder = "amx avx512_bf16 avx512 avx2 neon_bf16 neon portable";

inline std::string order_of(const std::string& vendor, unsigned family) {
  for (const Preference& p : kPreferences)
    if (vendor == p.vendor && (!p.family || family == p.family)) return p.order;
  return kDefaultOrder;
}

}  // namespace regard
