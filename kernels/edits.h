// Edits of the weights: which pairs their rectangles have.
#pragma once

#include <cstdint>
#include <limits>

#include "attention.h"

namespace regard {

static inline bool overlaps(const int64_t (&span)[2], int64_t from, int64_t to) {
  return (span[0] > from ? span[0] : from) < (span[1] < to ? span[1] : to);
}

static inline bool includes(const int64_t (&span)[2], int64_t from, int64_t to) {
  return span[0] <= from && to <= span[1];
}

// Whether an edit is of a query of a head.
static inline bool is_of(const Edit& edit, int64_t h, int64_t q) {
  return includes(edit.head, h, h + 1) && includes(edit.query, q, q + 1);
}

static inline bool is_cut(const Edit& edit) {
  return edit.log2_factor == -std::numeric_limits<double>::infinity();
}

// The first key from j on that no edit cuts for a query of a head; where all are, one past the end.
static inline int64_t next_uncut(const Problem& p, int64_t h, int64_t q, int64_t j) {
  for (int64_t e = 0; e < p.edit_count; ++e) {
    const Edit& edit = p.edits[e];
    if (!is_cut(edit) || !is_of(edit, h, q) || !includes(edit.key, j, j + 1)) continue;
    j = edit.key[1];
    e = -1;  // an earlier one may cut that key
  }
  return j;
}

// Whether an edit makes a pair invisible.
static inline bool is_cut(const Problem& p, int64_t h, int64_t q, int64_t j) {
  for (int64_t e = 0; e < p.edit_count; ++e)
    if (is_cut(p.edits[e]) && is_of(p.edits[e], h, q) && includes(p.edits[e].key, j, j + 1))
      return true;
  return false;
}

static inline bool any_cut(const Problem& p) {
  for (int64_t e = 0; e < p.edit_count; ++e)
    if (is_cut(p.edits[e])) return true;
  return false;
}

// What an edit adds to the scores of its pairs, in their unit: see `factor_of`.
static inline double added_score(const Problem& p, const Edit& edit) {
  return edit.log2_factor / factor_of(p);
}

}  // namespace regard
