// CPU features and names, from CPUID.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace regard {

#if defined(__x86_64__) || defined(__i386__)
// The registers that CPUID fills; zeros for a leaf that the processor lacks.
struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;

  explicit Cpuid(unsigned leaf, unsigned subleaf = 0) {
    if (static_cast<unsigned>(__get_cpuid_max(leaf & 0x80000000u, nullptr)) >= leaf)
      __cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  }
};
inline bool all(unsigned bits, unsigned word) { return (word & bits) == bits; }

// Whether the operating system saves these registers on a context switch: bits of XCR0.
inline bool kept(unsigned registers) {
  if (!all(bit_OSXSAVE, Cpuid(1).ecx)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return all(registers, low);
}

// Not by __builtin_cpu_supports: compilers differ in the names that it knows ("f16c" is one), and
// it reads a table of a library that may be older than the compiler.
inline bool runs_avx2() {
  return kept(0x6) && all(bit_AVX | bit_FMA | bit_F16C, Cpuid(1).ecx) &&
         all(bit_AVX2, Cpuid(7).ebx);
}
inline bool runs_avx512() {
  return kept(0xe6) && runs_avx2() &&
         all(bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ, Cpuid(7).ebx);
}
inline bool runs_avx512_bf16() {
  return runs_avx512() && Cpuid(7).eax >= 1 && all(bit_AVX512BF16, Cpuid(7, 1).eax);
}

// What a process needs for tiles (AMX) with bfloat16.
struct TileSupport {
  bool instructions;  // of the processor, which virtual machines may hide
  bool kept;          // by the operating system, on a context switch
  bool given;         // by its kernel, to processes that ask
  int refused = 0;    // what asking failed with, or 0
};

inline TileSupport tile_support() {
  constexpr unsigned tile_and_bf16 = 1u << 24 | 1u << 22, tile_state = 1u << 17 | 1u << 18;
  TileSupport found{runs_avx512() && all(tile_and_bf16, Cpuid(7).edx), kept(tile_state), false};
#if defined(__x86_64__) && defined(__linux__)
  uint64_t states = 0;
  constexpr int supported = 0x1021;  // ARCH_GET_XCOMP_SUPP
  found.given = syscall(SYS_arch_prctl, supported, &states) == 0 && (states >> 18 & 1);
#endif
  return found;
}

// Why tiles cannot be used, or "".
inline std::string obstacle_to(const TileSupport& tiles) {
  if (!tiles.instructions) return "this processor lacks its instructions";
  if (!tiles.kept) return "the operating system does not keep its tiles";
#if defined(__x86_64__) && defined(__linux__)
  if (!tiles.given) return "this Linux kernel gives processes no tiles: 5.16 and newer do";
  if (!tiles.refused) return "";
  return "the operating system refuses tiles to this process (" +
         std::string(std::strerror(tiles.refused)) + ")";
#else
  return "regard asks for tiles on Linux alone";
#endif
}
inline std::string amx_obstacle() { return obstacle_to(tile_support()); }

// Asks the system for tiles, once for the process, its threads and its forks. Why it refuses, or
// "": it does where a signal stack that is in use is too small for them.
inline std::string request_amx() {
  TileSupport tiles = tile_support();
#if defined(__x86_64__) && defined(__linux__)
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  if (obstacle_to(tiles).empty() && syscall(SYS_arch_prctl, request, tile_data) != 0)
    tiles.refused = errno;
#endif
  return obstacle_to(tiles);
}
#elif defined(__aarch64__)
#if defined(__linux__)
inline bool runs_neon() { return getauxval(AT_HWCAP) >> 1 & 1; }         // HWCAP_ASIMD
inline bool runs_neon_bf16() { return getauxval(AT_HWCAP2) >> 14 & 1; }  // HWCAP2_BF16
#elif defined(__APPLE__)
inline bool runs_neon() { return true; }
inline bool runs_neon_bf16() {
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found;
}
#else
inline bool runs_neon() { return true; }
inline bool runs_neon_bf16() { return false; }
#endif
#endif
inline bool runs_portable() { return true; }

// "GenuineIntel"; empty where there is no CPUID.
inline std::string cpu_vendor() {
#if defined(__x86_64__) || defined(__i386__)
  const Cpuid first(0);
  const unsigned words[] = {first.ebx, first.edx, first.ecx};
  return std::string(reinterpret_cast<const char*>(words), sizeof(words));
#else
  return "";
#endif
}

// Which processor it is: 25 is the family of AMD's Zen 3 and 4, 26 of Zen 5, 6 that of most of
// Intel's; zeros where there is no CPUID.
struct CpuNumbers {
  unsigned family = 0, model = 0;
};
inline CpuNumbers cpu_numbers() {
#if defined(__x86_64__) || defined(__i386__)
  const unsigned one = Cpuid(1).eax, family = one >> 8 & 15;
  return {family == 15 ? family + (one >> 20 & 255) : family,
          (one >> 4 & 15) | (family == 15 || family == 6 ? one >> 12 & 0xf0 : 0)};
#else
  return {};
#endif
}

// Returns the brand string of CPUID leaves 0x80000002..4 without its padding.
inline std::string cpu_name() {
#if defined(__x86_64__) || defined(__i386__)
  unsigned words[12];
  for (unsigned part = 0; part < 3; ++part) {
    const Cpuid four(0x80000002u + part);
    std::memcpy(words + 4 * part, &four, sizeof four);
  }
  const char* text = reinterpret_cast<const char*>(words);
  std::string name(text, strnlen(text, sizeof(words)));
  const auto first = name.find_first_not_of(' ');
  if (first == std::string::npos) return "x86-64";
  return name.substr(first, name.find_last_not_of(' ') - first + 1);
#elif defined(__aarch64__)
  return "arm64";
#else
  return "unknown";
#endif
}

}  // namespace regard
