// What the processor says of itself.
#pragma once

#include <cstring>
#include <string>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace regard {

// Returns the brand string of CPUID leaves 0x80000002..4 without its padding.
inline std::string cpu_name() {
#if defined(__x86_64__) || defined(__i386__)
  unsigned words[12] = {};
  if (__get_cpuid_max(0x80000000u, nullptr) >= 0x80000004u) {
    for (unsigned leaf = 0; leaf < 3; ++leaf) {
      unsigned* w = words + 4 * leaf;
      __get_cpuid(0x80000002u + leaf, w, w + 1, w + 2, w + 3);
    }
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
