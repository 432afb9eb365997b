// The contract between Python and the kernels: pointers, strides in elements, sizes.
#pragma once

#include <atomic>
#include <cstdint>

namespace regard {

// One forward pass. Axes are (B, H, L, D); the last stride of query, key and value is 1.
struct Forward {
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;
  const float* query;  // strides: batch, head, length
  int64_t query_strides[3];
  const float* key;
  int64_t key_strides[3];
  const float* value;
  int64_t value_strides[3];
  float* out;  // (B, Hq, Lq, Dv), contiguous
  float scale;
  float softcap;              // 0: none
  bool causal;
  int64_t left, right;        // the window's sides; -1: open
  const int64_t* starts;      // (B,) place of query 0 among the keys
  const int64_t* lengths;     // (B,) valid keys
  const int64_t* query_segments;  // (B or 1, Lq), or null
  const int64_t* key_segments;    // (B or 1, Lk)
  int64_t query_segments_stride, key_segments_stride;  // of the batch; 0: shared
  const uint8_t* mask;        // null, or bool with the strides of (B, Hq, Lq, Lk)
  int64_t mask_strides[4];
  const float* bias;          // likewise
  int64_t bias_strides[4];
  const float* sinks;         // (Hq,), or null
  bool finite;                // no NaN and no inf in value
};

// What a thread needs besides: where the next task is taken from, and whether to stop.
struct Work {
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
};

// An instruction set: computes tasks until none is left. `scratch` holds `scratch_floats`, 64-byte
// aligned.
struct Target {
  const char* name;
  bool (*runs_here)();
  int64_t (*tasks)(const Forward&);
  int64_t (*scratch_floats)(const Forward&);
  void (*forward)(const Forward&, Work&, float* scratch, void (*poll)(Work&));
};

extern const Target avx512_target, avx2_target, portable_target;

}  // namespace regard
