#include "visibility.h"

#include <algorithm>
#include <unordered_map>

namespace regard {
namespace {

struct Run {
  int64_t first, last, count;
};

int64_t floor_div(int64_t x, int64_t by) { return x / by - (x % by < 0); }

}  // namespace

Intervals intervals_of(const Rules& r) {
  Intervals found;
  found.first.resize(size_t(r.B * r.Lq));
  found.last.resize(found.first.size());
  bool scattered = false;
  std::unordered_map<int64_t, Run> runs;
  for (int64_t b = 0; b < r.B; ++b) {
    const int64_t length = r.lengths[b];
    const int64_t* query_ids = nullptr;
    if (r.query_ids) {
      query_ids = r.query_ids + (r.shared_query_ids ? 0 : b * r.Lq);
      const int64_t* key_ids = r.key_ids + (r.shared_key_ids ? 0 : b * r.Lk);
      runs.clear();
      Run* run = nullptr;
      for (int64_t j = 0; j < length; ++j) {
        if (!run || key_ids[j] != key_ids[j - 1])
          run = &runs.try_emplace(key_ids[j], Run{j, j, 0}).first->second;
        run->last = j + 1;
        ++run->count;
      }
      for (const auto& [id, seen] : runs) scattered |= seen.count != seen.last - seen.first;
    }
    Run run = {0, length, 0};  // of the keys with the id of a query
    // A division of each query took a tenth of a narrow window's time.
    const auto key = [&](int64_t at) { return r.key_step == 1 ? at : floor_div(at, r.key_step); };
    for (int64_t i = 0; i < r.Lq; ++i) {
      const int64_t position = r.starts[b] + i * r.query_step;
      if (query_ids && (i == 0 || query_ids[i] != query_ids[i - 1])) {
        const auto found_run = runs.find(query_ids[i]);
        run = found_run == runs.end() ? Run{0, 0, 0} : found_run->second;
      }
      int64_t first = run.first, last = run.last;
      if (r.left >= 0) first = std::max(first, -key(r.left - position));
      if (r.causal) last = std::min(last, key(position) + 1);
      if (r.right >= 0) last = std::min(last, key(position + r.right) + 1);
      if (r.interval_first) {
        first = std::max(first, r.interval_first[(r.shared_interval_first ? 0 : b * r.Lq) + i]);
        last = std::min(last, r.interval_last[(r.shared_interval_last ? 0 : b * r.Lq) + i]);
      }
      found.first[size_t(b * r.Lq + i)] = first;
      found.last[size_t(b * r.Lq + i)] = std::max(first, last);
    }
  }
  if (scattered) {
    for (int64_t b = 0; b < r.B; ++b) {
      const int64_t* q = r.query_ids + (r.shared_query_ids ? 0 : b * r.Lq);
      const int64_t* k = r.key_ids + (r.shared_key_ids ? 0 : b * r.Lk);
      found.query_ids.insert(found.query_ids.end(), q, q + r.Lq);
      found.key_ids.insert(found.key_ids.end(), k, k + r.Lk);
    }
  }
  return found;
}

}  // namespace regard
