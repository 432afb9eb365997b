#include "mask.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace regard {
namespace {

constexpr int64_t kRowsOfTask = 64;

// The keys that one row of a mask shows.
struct Shown {
  int64_t first, last, count;
};

// Reads one row, and tells which of its blocks show any key.
Shown read_row(const char* row, int64_t stride, int64_t keys, uint8_t* seen) {
  Shown shown{keys, 0, 0};
  for (int64_t j0 = 0; j0 < keys; j0 += kMaskKeys) {
    const int64_t n = std::min(kMaskKeys, keys - j0);
    uint8_t block[kMaskKeys] = {};
    if (stride == 1)
      std::memcpy(block, row + j0, size_t(n));
    else
      for (int64_t j = 0; j < n; ++j) block[j] = uint8_t(row[(j0 + j) * stride]);
    uint8_t count = 0;  // at most kMaskKeys
    for (int64_t j = 0; j < kMaskKeys; ++j) count = uint8_t(count + (block[j] != 0));
    seen[j0 / kMaskKeys] = count != 0;
    if (count == 0) continue;
    shown.count += count;
    int64_t low = 0, high = n;
    if (count != n) {
      while (!block[low]) ++low;
      while (!block[high - 1]) --high;
    }
    if (shown.first == keys) shown.first = j0 + low;
    shown.last = j0 + high;
  }
  return shown;
}

struct Scan {
  const Problem* problem;
  int64_t sizes[3];  // of the mask: batch elements, heads and queries that have masks of their own
  int64_t blocks;
  uint8_t* seen;
  Shown* shown;

  int64_t rows() const { return sizes[0] * sizes[1] * sizes[2]; }

  static void run(const void* pass, int64_t task, char*, const Stop&) {
    const Scan& scan = *static_cast<const Scan*>(pass);
    const Array& mask = scan.problem->mask;
    const int64_t end = std::min((task + 1) * kRowsOfTask, scan.rows());
    for (int64_t row = task * kRowsOfTask; row < end; ++row) {
      const int64_t q = row % scan.sizes[2], h = row / scan.sizes[2] % scan.sizes[1];
      const char* const from = mask.at(row / scan.sizes[2] / scan.sizes[1], h, q);
      scan.shown[row] =
          read_row(from, mask.strides[3], scan.problem->Lk, scan.seen + row * scan.blocks);
    }
  }
};

}  // namespace

bool narrow(const Problem& p, Intervals& intervals, MaskBlocks& blocks, int threads,
            bool (*poll)()) {
  const int64_t* strides = p.mask.strides;
  Scan scan{&p, {strides[0] ? p.B : 1, strides[1] ? p.Hq : 1, strides[2] ? p.Lq : 1}, 0, {}, {}};
  scan.blocks = (p.Lk + kMaskKeys - 1) / kMaskKeys;
  std::vector<Shown> shown(static_cast<size_t>(scan.rows()));
  blocks.seen.resize(static_cast<size_t>(scan.rows() * scan.blocks));
  scan.seen = blocks.seen.data(), scan.shown = shown.data();
  const Job job{(scan.rows() + kRowsOfTask - 1) / kRowsOfTask, 0, Scan::run, &scan};
  run(job, scan.rows() * p.Lk < (int64_t{1} << 20) ? 1 : threads, poll);
  const int64_t step[3] = {scan.sizes[0] > 1 ? scan.sizes[1] * scan.sizes[2] : 0,
                           scan.sizes[1] > 1 ? scan.sizes[2] : 0, scan.sizes[2] > 1};
  for (int axis = 0; axis < 3; ++axis) blocks.strides[axis] = step[axis] * scan.blocks;
  bool complete = true;
  Intervals narrowed = intervals;
  narrowed.heads = scan.sizes[1];
  narrowed.first.resize(static_cast<size_t>(p.B * narrowed.heads * p.Lq));
  narrowed.last.resize(narrowed.first.size());
  for (int64_t b = 0; b < p.B; ++b)
    for (int64_t h = 0; h < narrowed.heads; ++h)
      for (int64_t q = 0; q < p.Lq; ++q) {
        const Shown& row = shown[size_t(b * step[0] + h * step[1] + q * step[2])];
        const auto from = size_t(b * p.Lq + q), to = size_t((b * narrowed.heads + h) * p.Lq + q);
        const int64_t first = std::max(intervals.first[from], row.first);
        narrowed.first[to] = first;
        narrowed.last[to] = std::max(first, std::min(intervals.last[from], row.last));
        complete &= row.count == 0 || row.count == row.last - row.first;
      }
  intervals = std::move(narrowed);
  return complete;
}

}  // namespace regard
