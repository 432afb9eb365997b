// The contract of the kernels: pointers, strides in bytes, sizes. Axes are (B, H, L, D); an axis
// that is broadcast has stride 0.
#pragma once

#include <atomic>
#include <cstdint>

namespace regard {

// Bytes of a core's level-2 cache; a mebibyte where the system does not tell (threads.cpp).
int64_t level2_bytes();

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
  char* into(int64_t i, int64_t j, int64_t k) const { return const_cast<char*>(at(i, j, k)); }
};

// The options of the scores, by their names in Python.
struct ScoreOptions {
  double scale = 1;
  double softcap = 0;  // 0: none
};
struct ScoreOption {
  const char* name;
  double ScoreOptions::* number;
};
constexpr ScoreOption kScoreOptions[] = {
    {"scale", &ScoreOptions::scale},
    {"softcap", &ScoreOptions::softcap},
};

// Weights of a rectangle times a factor, before they are normalised: half-open intervals of query
// heads, queries and keys. A factor of 0 makes its pairs invisible.
struct Edit {
  int64_t head[2], query[2], key[2];
  double log2_factor;  // added to the exponent of 2; -inf: invisible
};

// One call of attention. Sums are held in float, in double for float64: "Real" below.
struct Problem : ScoreOptions {
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;
  int64_t group_rows;  // queries that share a key head, in the call of which this may be a part
  Type type;           // of query, key, value and all that is written
  Array query, key, value;  // rows are contiguous; value is optional
  Array mask, bias;         // (B, Hq, Lq, Lk), optional
  const double* sinks;      // attention sinks: (Hq,), optional
  const Edit* edits;        // optional
  int64_t edit_count;
  // The interval of keys visible to a query, before mask and ids: (B, interval_heads, Lq).
  const int64_t* first;
  const int64_t* last;
  int64_t interval_heads;  // 1, or Hq
  // Whether the mask shows a query any key of a block of kMaskKeys, with the strides of batch
  // element, head and query; optional.
  const uint8_t* mask_blocks;
  int64_t mask_block_strides[3];
  // Queries attend to keys of equal id: (B, Lq) and (B, Lk), or null where intervals suffice.
  const int64_t* query_ids;
  const int64_t* key_ids;
  double dropout;
  uint64_t threshold;  // a weight is kept if its random word is not below it
  // Where dropout counts the first query and the first key, and from each to the next.
  int64_t draw_start[2], draw_step[2];
  uint32_t seed[2];
};

constexpr int64_t kMaskKeys = 128;
constexpr int64_t kFewRows = 8;  // queries that share a key head and may be few (decode-inl.h)

// The index of a query in `first` and `last`.
static inline int64_t interval_at(const Problem& p, int64_t b, int64_t h, int64_t q) {
  return (p.interval_heads == 1 ? b : b * p.Hq + h) * p.Lq + q;
}

// Whether scores have a cap, `cap_scores`, after the scale: their derivative by the scaled ones is
// not 1.
static inline bool has_slope(const Problem& p) { return p.softcap != 0; }
// Whether scores are the plain products of query and key. `factor_of` takes a score to the exponent
// of 2; for plain products it includes the scale, which must not round to 0, and by which what
// edits add is divided.
static inline bool raw_scores(const Problem& p) {
  return !p.bias && !has_slope(p) && p.scale > 1e-30;
}
static inline double factor_of(const Problem& p) {
  constexpr double log2e = 1.44269504088896340736;
  return raw_scores(p) ? p.scale * log2e : log2e;
}

// Row statistics are (B, Hq, Lq) in Real: `maximum`, the largest score, and `total`, the softmax
// denominator: the sum of 2^((score - maximum) * factor_of), with the sink's term. Log-sum-exp is
// maximum * factor_of * ln 2 + ln total. -inf and 0 where nothing is visible. The maximum is the
// sink where its term would be above 2^32.
struct Forward {
  const Problem* problem;
  Array out;      // (B, Hq, Lq, Dv) of the call's type or Real, rows contiguous; optional
  void* maximum;  // optional
  void* total;
  char* partial;  // partial results of a split-K, until `merge`
  int threads;    // that will share the work
};

// The other operand of a product with the weights: Real (B or 1, Hq or 1, L, columns), contiguous.
struct Operand {
  const void* data = nullptr;
  int64_t strides[2] = {};  // of batch element and head, in numbers; 0: the same for all
  int64_t columns = 0;
};

// Reductions of the weights; each is optional: null or 0. Rows and columns are those of every head.
//
// Reductions over columns, bins and heads have partial results for each chunk of rows, merged in
// their order when all chunks of some heads, a wave, are done: sums are deterministic for any
// number of threads.
struct Reduce {
  const Problem* problem;
  void* maximum;
  void* total;
  bool finds_statistics;  // writes these two; for pooled_max alone, of more rows than are split
  bool whole_rows;        // whether the call has all keys of its rows
  void* weights;          // Real (B, Hq, Lq, Lk), zeros
  double* entropy;        // (B, Hq, Lq), nats
  double* distance;       // (B, Hq, Lq), tokens
  const int64_t* starts;  // (B,) position of query 0 among the keys
  int64_t query_step;     // from a query to the position of the next
  int64_t key_step;       // likewise
  int64_t k;              // of top-k
  void* top_values;       // Real (B, Hq, Lq, k)
  int64_t* top_keys;      // (B, Hq, Lq, k)
  double* received;       // (B, Hq, Lk): the sum, or
  double* received_max;   // the maximum
  void* pooled_max;       // Real (B, Hq, bins[0], bins[1]): ln of the largest weight
  void* pooled_mass;      // likewise, of the mean over the queries; NaN in both: no visible pair
  int64_t bins[2];
  // Bins are of bin_extent queries and keys, of which these are every bin_step from bin_start on.
  int64_t bin_extent[2], bin_start[2], bin_step[2];
  int64_t n;            // number of strongest pairs
  const int64_t* rows;  // (B, Hq, row_count), rising: where these are searched for; null: all
  int64_t row_count;    // with `rows`, no other reduction
  int64_t* pair_query;  // (B, Hq, n)
  int64_t* pair_key;
  void* pair_weight;  // Real
  // Linear forms; those of float64 are zeros before.
  Operand product_with;         // x (., ., Lk, columns)
  void* product;                // Real (B, Hq, Lq, columns), zeros: W x
  Operand transposed_with;      // y (., ., Lq, columns)
  double* transposed;           // (B, Hq, Lk, columns): W^T y
  const int64_t* query_blocks;  // (B, Lq): the block of a query; negative: none
  const int64_t* key_blocks;    // (B, Lk)
  int64_t block_counts[2];      // of queries and of keys
  double* blocks;               // (B, Hq, block_counts): the sum over the pairs of both, or
  double* blocks_max;           // the largest weight
  double* diagonals;            // (B, Hq, distances): the sums over the pairs of a distance, which
                                // is query position - key position
  const int64_t* first_distances;  // (B,): the distance of sum 0
  int64_t distance_step;           // from a sum to the next: divides both other steps
  int64_t distances;
  int64_t head0, head1;  // the wave, of B * Hq heads
  char* chunks;          // chunk_bytes for each chunk of each head of the wave
};

// What a number of a matrix of token pairs is: the weight, or what it or cutting its pair does.
enum class PairKind : int { weight, knockout, contribution, relevance, gradient, change };

// A summand of a matrix of token pairs.
struct PairTerm {
  const Problem* problem;  // of one head: B = Hq = Hkv = 1
  const void* maximum;     // Real (Lq,)
  const void* total;
  double coefficient;
  PairKind kind;
  // For all but weights: rows of Real, contiguous.
  const void* value;      // (Lk, Dv)
  const void* gradient;   // (Lq, Dv): that of the loss by the output; a change has none
  const double* of_sink;  // (Lq,): the weight of the sink, optional
  int64_t Dv;
  const void* squares;  // (Lk,), of a change: of the size of each value
  // What one pass leaves for the next, which needs no whole rows then; optional.
  // Of a change, (Lq, Dv): the sum of w v over the weights up to 9/16.
  // Of a knockout, double (Lq, 3): rest, first and beside of RowSums; NaN where not known.
  void* rest;
  bool rest_is_known;  // of a change
};

// Reductions of one matrix of token pairs (Lq, Lk), a sum of terms that are of one type; each is
// optional: null or 0. The largest is the one of largest size, with its sign.
struct PairMatrix {
  const PairTerm* terms;
  int64_t term_count;
  int64_t Lq, Lk;
  int64_t k;            // of top-k
  void* top_values;     // Real (Lq, k)
  int64_t* top_keys;    // (Lq, k)
  int64_t n;            // number of strongest pairs
  int64_t* pair_query;  // (n,)
  int64_t* pair_key;
  void* pair_value;      // Real
  double* received;      // (Lk,): the sum, or
  double* received_max;  // the largest
  int64_t bins[2];
  int64_t extent[2];  // what these divide: (Lq, Lk), or more where the last ones are smaller
  void* pooled_max;   // Real (bins[0], bins[1]); NaN: no unmasked pair
  void* pooled_mean;  // likewise
  char* chunks;       // pair_chunk_bytes
};

// How far the rows of two sums of weights (Lq, Lk), a and b, are apart, over the keys; each is
// optional: null or 0. All terms are of one type.
struct Divergences {
  const PairTerm* terms[2];
  int64_t term_count[2];
  int64_t Lq, Lk;
  double* kl;  // (Lq,): the sum of a ln(a / b) - a + b
  double* reverse_kl;
  double* jensen_shannon;
  double* total_variation;
  int64_t k;
  double* overlap;  // (Lq,): the share of the k strongest keys in common
};

// The weights of chosen pairs of every head.
struct Gather {
  const Problem* problem;
  const void* maximum;
  const void* total;
  const int64_t* queries;  // (pairs,)
  const int64_t* keys;
  int64_t pairs;
  void* weights;  // Real (B, Hq, pairs)
};

// dP, the gradient of the weight P of query i and key j.
enum class Rule : int {
  products,    // grad_i . value_j, as attention has it
  nothing,     // 0
  vectors,     // numbers_i . other_j of few columns; numbers (B, Hq, Lq, columns)
  logarithms,  // numbers_i (1 + ln P); numbers (B, Hq, Lq)
  distances,   // numbers_i |distance|
  diagonals,   // of the distance: numbers (B, Hq, distances)
  blocks,      // of both blocks: numbers (B, Hq, block_counts); without ids all queries are of
               // block 0, and each key of its own
  kl,          // of a divergence from or to another matrix: numbers_i times its derivative by P;
  reverse_kl,  // numbers (Lq,), and a problem of one head
  jensen_shannon,
  total_variation,
};

// dP and what it is made of: Real numbers, and blocks and distances as in Reduce.
struct WeightGradient {
  Rule rule = Rule::products;
  const void* numbers = nullptr;
  Operand other;  // (B or 1, Hq or 1, Lk, columns)
  // Real (B, Hq, Lq): the sum of P dP of each row; null: for products dO . O, else 0
  const void* delta = nullptr;
  const int64_t* query_blocks = nullptr;
  const int64_t* key_blocks = nullptr;
  int64_t block_counts[2] = {};
  const int64_t* starts = nullptr;
  int64_t query_step = 1, key_step = 1;
  const int64_t* first_distances = nullptr;
  int64_t distance_step = 1, distances = 0;
  Divergences sides{};  // of a divergence: its two sums of weights
  int side = 0;         // that P is the only term of, or one of several
};

struct Backward {
  const Problem* problem;
  Array grad, out;         // (B, Hq, Lq, Dv): dO and O, for products; with delta no O
  WeightGradient weights;  // whose rule may need no grad, out and value
  const void* maximum;
  const void* total;
  void* query_sum;   // Real (B, Hq, Lq, D): of chunks, or to which they are added; optional
  char* query_grad;  // likewise, of the call's type, which may be the same; null where it `adds`
  void* delta;       // Real (B, Hq, Lq), zeros: the sum of P dP of each row; optional
  int64_t* ticket;   // (B, Hkv, tiles of queries), zeros: chunks that have added to the two above
  char* key_grad;    // (B, Hkv, Lk, D), contiguous; optional
  char* value_grad;  // (B, Hkv, Lk, Dv); optional
  bool adds;         // to these three, which are Real then
  Array bias_grad;   // Real, optional, with the strides of the bias: 0 where it is broadcast
  bool* finite;      // becomes false where query, key, value or grad are not; optional
};

// The cancellation flag of a job, which the calling thread sets when its `poll` returns true.
struct Stop {
  std::atomic<bool>* requested;
  bool (*poll)();  // null in the other threads
};
static inline bool stopped(const Stop& stop) {
  if (stop.poll && stop.poll()) stop.requested->store(true, std::memory_order_relaxed);
  return stop.requested->load(std::memory_order_relaxed);
}

// Tasks that threads take in their order. `scratch` belongs to one thread and is 64-byte aligned;
// its first 64 bytes are 0 before the first task: per-thread state kept between tasks.
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
  Job (*merge)(const Forward&);  // of the parts of a split-K; maybe no tasks
  int64_t (*partial_bytes)(const Forward&);
  Job (*reduce)(const Reduce&);
  Job (*collect)(const Reduce&);          // merges the chunks; maybe no tasks
  int64_t (*chunk_bytes)(const Reduce&);  // of all chunks of a head
  Job (*gather)(const Gather&);
  Job (*reduce_pairs)(const PairMatrix&);
  Job (*collect_pairs)(const PairMatrix&);         // merges the chunks
  int64_t (*pair_chunk_bytes)(const PairMatrix&);  // of all of them
  Job (*diverge)(const Divergences&);
  Job (*backward)(const Backward&);
  Job (*bias_gradient)(const Backward&);
  int64_t (*row_tiles)(const Problem&);  // tiles of queries of one key head
};

extern const Target amx_target, avx512_bf16_target, avx512_target, avx2_target, neon_bf16_target,
    neon_target, portable_target, amx_emulated_target, avx512_bf16_emulated_target;

}  // namespace regard
