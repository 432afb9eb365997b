// Computes causal attention with the kernels and compares it with the formula in double: for builds
// that no Python here could load. `scripts/compilers` compiles and runs it.
#include <cmath>
#include <cstdio>
#include <vector>

#include "../kernels/dispatch.h"
#include "../kernels/threads.h"
#include "../kernels/visibility.h"

using namespace regard;

// Numbers without a pattern, between -1 and 1.
static double number(int64_t i) { return std::sin(12.9898 * double(i) + 0.5 * double(i % 7)); }

template <class R>
static std::vector<R> numbers(int64_t count, int64_t from) {
  std::vector<R> x;
  for (int64_t i = 0; i < count; ++i) x.push_back(R(number(from + i)));
  return x;
}

// Row i of what attention is: of keys 0 to i.
template <class R>
static std::vector<double> row(const std::vector<R>& q, const std::vector<R>& k,
                               const std::vector<R>& v, int64_t i, int64_t D) {
  std::vector<double> out(static_cast<size_t>(D));
  double total = 0;
  for (int64_t j = 0; j <= i; ++j) {
    double score = 0;
    for (int64_t d = 0; d < D; ++d) score += double(q[size_t(i * D + d)]) * k[size_t(j * D + d)];
    const double weight = std::exp(score / std::sqrt(double(D)));
    total += weight;
    for (int64_t d = 0; d < D; ++d) out[size_t(d)] += weight * v[size_t(j * D + d)];
  }
  for (double& x : out) x /= total;
  return out;
}

// The largest error of one head of L queries and keys.
template <class R>
static double error(Type type, int64_t L, int64_t D) {
  const auto q = numbers<R>(L * D, 0), k = numbers<R>(L * D, 10000), v = numbers<R>(L * D, 20000);
  std::vector<R> out(size_t(L * D)), maximum(static_cast<size_t>(L)), total(maximum);
  const int64_t start = 0, length = L, size = sizeof(R);
  const Intervals seen = intervals_of(
      {.B = 1, .Lq = L, .Lk = L, .causal = true, .starts = &start, .lengths = &length});
  const auto array = [&](const std::vector<R>& x) {
    return Array{reinterpret_cast<const char*>(x.data()), {0, 0, D * size, size}, type};
  };
  Problem p{};
  p.B = p.Hq = p.Hkv = 1, p.Lq = p.Lk = L, p.D = p.Dv = D;
  p.group_rows = L;
  p.type = type, p.query = array(q), p.key = array(k), p.value = array(v);
  p.scale = 1 / std::sqrt(double(D));
  p.first = seen.first.data(), p.last = seen.last.data();
  p.interval_heads = 1;
  Forward f{&p, array(out), maximum.data(), total.data(), nullptr, 2};
  const Memory partial = allocate(target().partial_bytes(f));
  f.partial = partial.get();
  run(target().forward(f), 2, nullptr);
  run(target().merge(f), 2, nullptr);
  double worst = 0;
  for (int64_t i = 0; i < L; ++i) {
    const std::vector<double> exact = row(q, k, v, i, D);
    for (int64_t d = 0; d < D; ++d)
      worst = std::fmax(worst, std::fabs(exact[size_t(d)] - double(out[size_t(i * D + d)])));
  }
  return worst;
}

int main() {
  int failed = 0, passed = 0;
  for (const int64_t L : {1, 7, 97, 300}) {
    for (const int64_t D : {1, 5, 64}) {
      const double single = error<float>(Type::float32, L, D);
      const double twice = error<double>(Type::float64, L, D);
      for (const bool fine : {single < 2e-6, twice < 1e-14}) ++(fine ? passed : failed);
      if (!(single < 2e-6 && twice < 1e-14))
        std::printf("%d queries of %d numbers: wrong by %g and %g\n", int(L), int(D), single,
                    twice);
    }
  }
  if (failed) std::printf("%d failed, ", failed);
  std::printf("%d passed\n", passed);
  return failed != 0;
}
