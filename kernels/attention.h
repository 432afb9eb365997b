// What the passes read and write: pointers, strides in bytes, sizes. Axes are (B, H, L, D); an axis
// that is broadcast has stride 0.
#pragma once

#include <atomic>
#include <cstdint>

namespace regard {

enum class Type : int { float32, bfloat16, float16, float64, boolean };

static inline int64_t bytes_of(Type type) {
  return type == Type::float64 ? 8 : type == Type::float32 ? 4 : type == Type::boolean ? 1 : 2;
}

struct Array {
  const char* data = nullptr;
  int64_t strides[4] = {};
  Type type = Type::float32;

  explicit operator bool() const { return data != nullptr; }
  const char* at(int64_t i, int64_t j, int64_t k) const {
    return data + i * strides[0] + j * strides[1] + k * strides[2];
  }
};

// One call of attention. Sums are held in float, in double for float64: "Real" below.
struct Problem {
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;
  int64_t group_rows;  // queries that share a key head, in the call of which this may be a part
  Type type;           // of query, key, value and all that is written
  Array query, key, value;  // numbers of a row lie next to each other; value may be absent
  Array mask, bias;         // (B, Hq, Lq, Lk), or absent
  const double* sinks;      // (Hq,), or null
  double scale, softcap;    // softcap 0: none
  // The keys that a query may see, before mask and ids: (B, Lq).
  const int64_t* first;
  const int64_t* last;
  // Only equal ids see each other: (B, Lq) and (B, Lk), or null where the intervals say it all.
  const int64_t* query_ids;
  const int64_t* key_ids;
  double dropout;
  uint64_t threshold;  // a weight is kept if its random word is not below it
  uint32_t seed[2];
};

// Whether scores are left as the products of query and key, with the scale in `factor_of`: from a
// score to the exponent of 2.
static inline bool raw_scores(const Problem& p) { return !p.bias && p.softcap == 0 && p.scale > 0; }
static inline double factor_of(const Problem& p) {
  constexpr double log2e = 1.44269504088896340736;
  return raw_scores(p) ? p.scale * log2e : log2e;
}

// Row statistics are (B, Hq, Lq) in Real: the largest score, and the sum of
// 2^((score - maximum) * factor_of), the sink's included. -inf and 0 where a row sees nothing.
struct Forward {
  const Problem* problem;
  char* out;      // (B, Hq, Lq, Dv), contiguous
  void* maximum;  // or null, if nobody asks
  void* total;
  char* partial;  // where the parts of rows that are computed in pieces wait for the others
  int threads;    // that will share the work
};

// What is asked of the weights; null or 0 where it is not. Rows and columns are those of every
// head.
//
// What columns, bins and heads collect is kept apart for each chunk of rows, and put together in
// their order when all chunks of some heads, a wave, are there: no sum depends on the threads.
struct Reduce {
  const Problem* problem;
  const void* maximum;
  const void* total;
  bool whole_rows;        // whether the call has all keys of its rows
  void* weights;          // Real (B, Hq, Lq, Lk), zeros
  double* entropy;        // (B, Hq, Lq), nats
  double* distance;       // (B, Hq, Lq), tokens
  const int64_t* starts;  // (B,) place of query 0 among the keys
  int64_t step;           // from a query to the place of the next
  int64_t k;              // of top-k
  void* top_values;       // Real (B, Hq, Lq, k)
  int64_t* top_keys;      // (B, Hq, Lq, k)
  double* received;       // (B, Hq, Lk): the sum, or
  double* received_max;   // the maximum
  void* pooled_max;       // Real (B, Hq, bins[0], bins[1]): ln of the largest weight
  void* pooled_mass;      // likewise, of the mean over the queries; NaN: nothing is visible
  int64_t bins[2];
  int64_t n;            // of the strongest pairs
  int64_t* pair_query;  // (B, Hq, n)
  int64_t* pair_key;
  void* pair_weight;     // Real
  int64_t head0, head1;  // the wave, of B * Hq heads
  char* chunks;          // chunk_bytes for each chunk of each head of the wave
};

struct Backward {
  const Problem* problem;
  Array grad, out;  // (B, Hq, Lq, Dv): of the output, and the output
  const void* maximum;
  const void* total;
  void* query_sum;   // Real (B, Hq, Lq, D), zeros
  void* delta;       // Real (B, Hq, Lq), zeros: the sum of P dP of each row; or null
  int64_t* turn;     // (B, Hkv, blocks of rows), zeros: how many chunks have added to query_sum
  char* key_grad;    // (B, Hkv, Lk, D), contiguous
  char* value_grad;  // (B, Hkv, Lk, Dv)
  Array bias_grad;   // Real, with the strides of the bias: 0 where it is broadcast; or absent
};

// Whether a thread shall end early. The calling thread asks as well, and tells the others.
struct Stop {
  std::atomic<bool>* asked;
  bool (*poll)();  // null in the other threads
};
static inline bool stopped(const Stop& stop) {
  if (stop.poll && stop.poll()) stop.asked->store(true, std::memory_order_relaxed);
  return stop.asked->load(std::memory_order_relaxed);
}

// Tasks that any thread may take in their order. `scratch` is one thread's own, 64-byte aligned;
// its first 64 bytes are 0 before the first task, for what a task leaves to the thread's next.
struct Job {
  int64_t tasks = 0;
  int64_t scratch_bytes = 0;
  void (*run)(const void* pass, int64_t task, char* scratch, const Stop& stop) = nullptr;
  const void* pass = nullptr;
};

// An instruction set.
struct Target {
  const char* name;
  Job (*forward)(const Forward&);
  Job (*merge)(const Forward&);  // of what forward left in pieces; maybe no tasks
  int64_t (*partial_bytes)(const Forward&);
  Job (*reduce)(const Reduce&);
  Job (*collect)(const Reduce&);          // what the chunks hold; no tasks where nothing is
  int64_t (*chunk_bytes)(const Reduce&);  // of all chunks of a head
  Job (*backward)(const Backward&);
  Job (*bias_gradient)(const Backward&);
  int64_t (*row_blocks)(const Problem&);  // of one key head
};

extern const Target avx512_bf16_target, avx512_target, avx2_target, portable_target,
    avx512_bf16_emulated_target;

}  // namespace regard
