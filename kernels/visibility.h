// Who sees whom, as an interval of keys for every query.
#pragma once

#include <cstdint>
#include <vector>

namespace regard {

struct Rules {
  int64_t B, Lq, Lk;
  bool causal;
  int64_t left, right;       // the window's sides; -1: open. They and starts are below 2^55
  const int64_t* starts;     // (B,) place of query 0 among the keys
  int64_t step;              // from a query to the place of the next
  const int64_t* lengths;    // (B,) valid keys
  const int64_t* query_ids;  // (B or 1, Lq), or null
  const int64_t* key_ids;    // (B or 1, Lk)
  bool shared_query_ids, shared_key_ids;
};

struct Intervals {
  std::vector<int64_t> first, last;         // (B, Lq)
  std::vector<int64_t> query_ids, key_ids;  // (B, Lq) and (B, Lk); empty where intervals say it all
};

// Documents whose tokens lie next to each other need no ids: they are intervals, which skip blocks.
Intervals intervals_of(const Rules& rules);

}  // namespace regard
