// The visible keys of every query as an interval: causal order, windows, lengths, packed documents.
#pragma once

#include <cstdint>
#include <vector>

namespace regard {

struct Rules {
  int64_t B, Lq, Lk;
  bool causal = false;
  int64_t left = -1, right = -1;  // the window's sides; -1: open. They and starts are below 2^55
  const int64_t* starts;          // (B,) position of query 0 among the keys
  int64_t query_step = 1;         // from a query to the position of the next
  int64_t key_step = 1;           // likewise; key 0 is at 0
  const int64_t* lengths;         // (B,) valid keys
  const int64_t* query_ids = nullptr;  // (B or 1, Lq), optional
  const int64_t* key_ids = nullptr;    // (B or 1, Lk)
  bool shared_query_ids = false, shared_key_ids = false;
  const int64_t* interval_first = nullptr;  // (B or 1, Lq), optional
  const int64_t* interval_last = nullptr;
  bool shared_interval_first = false, shared_interval_last = false;
};

struct Intervals {
  int64_t heads = 1;                        // 1, or Hq where those of a head are its own
  std::vector<int64_t> first, last;         // (B, heads, Lq)
  std::vector<int64_t> query_ids, key_ids;  // (B, Lq), (B, Lk); empty where intervals suffice
};

// Packed documents with contiguous tokens need no ids: they are intervals, which skip whole tiles.
Intervals intervals_of(const Rules& rules);

}  // namespace regard
