// Products of bfloat16 pairs by tiles (Intel AMX): eight registers of 16 rows of 64 bytes, and one
// instruction that adds the product of two of them to a third.
//
// A product of tiles is sum[r][lane] += the words a(r, t) times x[t][lane] over 16 words t. It has
// the orientation of every pass: rows are keys, or numbers of a value; queries are in the lanes.
//
// Two implementations have the same bits: the instructions, and an emulation of them for tests on
// any processor with AVX-512. Source: Intel, Architecture Instruction Set Extensions, TDPBF16PS.
#pragma once

#include <cstdint>
#include <cstring>

#include "pairs-inl.h"
#include "vectors-inl.h"

namespace regard::REGARD_NAMESPACE {

// The configuration of the tiles of a thread, where they are used. It does not outlive a look at
// the cancellation flag: a signal's handler in Python may use tiles itself.
template <bool used>
struct TileConfiguration {
  TileConfiguration() {}
};

// A product by tiles that is computed a few tiles at a time, where they are used.
template <bool used>
struct StepwiseProduct {
  void step() {}
  void finish() {}
};

#ifndef REGARD_TILES
template <bool used>
static inline void keep_tiles_awake() {}
#endif

#ifdef REGARD_TILES

// The larger, or y where x is NaN. Beside tiles one of two units takes maxima and multiplies; the
// other one compares, and both blend.
REGARD_INLINE static F larger_by_mask(F x, F y) {
  const __mmask16 over = _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ);
  return (F)_mm512_mask_mov_ps((__m512)y, over, (__m512)x);
}

constexpr int kTileRows = 16;   // and words of a row, and lanes
constexpr int kTileBytes = 64;  // of a row

// Adds the products of 16 words of a row, or of a lane each, and 16 words of every lane as
// TDPBF16PS does: the first numbers of the pairs and the second ones each in their order by fused
// multiply-adds from 0, then both to the sum, with denormal numbers as 0.
template <class A>
REGARD_INLINE static F add_words(F sum, A a, const int32_t* x, int64_t ldx) {
  __m512 first = _mm512_setzero_ps(), second = first;
#pragma GCC unroll 16
  for (int t = 0; t < kTileRows; ++t) {
    const I y = *(const I*)(x + t * ldx), z = a(t);
    first = _mm512_fmadd_ps((__m512)(z << 16), (__m512)(y << 16), first);
    second = _mm512_fmadd_ps((__m512)(z & ~0xffff), (__m512)(y & ~0xffff), second);
  }
  return (F)_mm512_add_ps((__m512)sum, _mm512_add_ps(first, second));
}

// While it lives, vectors take denormal numbers for 0, read and written, as tiles do.
class FlushesDenormals {
 public:
  FlushesDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushesDenormals() { _mm_setcsr(before_); }
  FlushesDenormals(const FlushesDenormals&) = delete;
  FlushesDenormals& operator=(const FlushesDenormals&) = delete;

 private:
  const unsigned before_;
};

#if REGARD_TILES == 1

// Configures the tiles of this thread, all of 16 rows of 64 bytes, and releases them: others use
// tiles on the same threads, and live ones slow every context switch.
template <>
class TileConfiguration<true> {
 public:
  TileConfiguration() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = kTileBytes, config.rows[i] = kTileRows;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileConfiguration() { asm volatile("tilerelease"); }
  TileConfiguration(const TileConfiguration&) = delete;
  TileConfiguration& operator=(const TileConfiguration&) = delete;
};

// Tile registers by their numbers. Not the compiler's intrinsics: GCC 12's do not say that they
// read memory, and stores before them may sink below.
template <int n>
REGARD_INLINE static void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(n));
}
template <int n>
REGARD_INLINE static void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(n) : "memory");
}
// Likewise, of what is not loaded again before L1 has lost it: the processor keeps other lines
// there.
template <int n>
REGARD_INLINE static void stream_tile(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(n) : "memory");
}
template <int n>
REGARD_INLINE static void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(n) : "memory");
}
// Tile c += tile a times tile b.
template <int c, int a, int b>
REGARD_INLINE static void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

#else  // emulated

struct Tile {
  alignas(64) int32_t row[kTileRows][kTileRows];
};
static thread_local Tile tile_register[8];
static thread_local bool tiles_are_configured = false;

template <>
class TileConfiguration<true> {
 public:
  TileConfiguration() { tiles_are_configured = true; }
  ~TileConfiguration() { tiles_are_configured = false; }
};

// As the processor, which ends a process that uses tiles without.
static inline Tile& configured(int n) {
  if (!tiles_are_configured) __builtin_trap();
  return tile_register[n];
}

template <int n>
static void zero_tile() {
  std::memset(&configured(n), 0, sizeof(Tile));
}
template <int n>
static void load_tile(const void* p, int64_t stride) {
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy(configured(n).row[r], (const char*)p + r * stride, kTileBytes);
}
template <int n>
static void stream_tile(const void* p, int64_t stride) {
  load_tile<n>(p, stride);
}
template <int n>
static void store_tile(void* p, int64_t stride) {
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy((char*)p + r * stride, configured(n).row[r], kTileBytes);
}
// Not inlined: nothing may move out of where denormal numbers are flushed.
__attribute__((noinline)) static void add_product(Tile& sum, const Tile& a, const Tile& b) {
  for (int r = 0; r < kTileRows; ++r) {
    F* const out = (F*)sum.row[r];
    *out = add_words(*out, [&](int t) { return broadcast(a.row[r][t]); }, b.row[0], kTileRows);
  }
}
template <int c, int a, int b>
static void multiply_tiles() {
  const FlushesDenormals flushes;
  add_product(configured(c), configured(a), configured(b));
}

#endif

// What multiplies tiles sleeps after a fraction of a microsecond without a product, and is waited
// for as long when it wakes (Intel Xeon, as measured; not in its manual). What computes vectors for
// longer calls this now and then, where no number in the tiles is needed any more.
template <bool used>
REGARD_INLINE static void keep_tiles_awake() {
  if (used) multiply_tiles<0, 4, 6>();
}

// The left operand of a product by tiles: word t of row r lies in tile (r / 16, t / 16), whose rows
// are `stride` bytes apart.
struct TileMatrix {
  const char* data;
  int64_t stride;  // in bytes: of rows of a tile,
  int64_t down;    // of tiles below one another,
  int64_t across;  // and beside one another
  int64_t part;    // and of the parts of numbers, where they have two
};

// The right one: x[word][lane], in steps of 16 words.
struct TileVectors {
  const int32_t* data;
  int64_t stride;  // in words: of a row,
  int64_t part;    // and of the parts
  int64_t steps;
  int products;  // of parts (0, 0), (0, 1), (1, 0) and (1, 1)

  // Whether two of them fit in four tiles, as 32 such rows do: what is multiplied with them is then
  // loaded once.
  bool are_held() const { return steps == 2 && products == 1; }
};

// Loads a tile, of which `rows` rows may be read: zeros follow.
template <int n>
REGARD_INLINE static void load_rows(const char* p, int64_t stride, int64_t rows) {
  if (rows >= kTileRows) return load_tile<n>(p, stride);
  alignas(64) char part[kTileRows * kTileBytes] = {};
  for (int64_t r = 0; r < rows; ++r) std::memcpy(part + r * kTileBytes, p + r * stride, kTileBytes);
  load_tile<n>(part, kTileBytes);
}

// Likewise past L1, where all rows are there.
template <int n>
REGARD_INLINE static void stream_rows(const char* p, int64_t stride, int64_t rows) {
  if (rows >= kTileRows) return stream_tile<n>(p, stride);
  load_rows<n>(p, stride, rows);
}

// Stores a tile of sums, of which `rows` rows may be written.
template <int n>
REGARD_INLINE static void store_rows(float* to, int64_t ldo, int64_t rows) {
  if (rows >= kTileRows) return store_tile<n>(to, ldo * 4);
  alignas(64) char part[kTileRows * kTileBytes];
  store_tile<n>(part, kTileBytes);
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * ldo, part + r * kTileBytes, kTileBytes);
}

// Tile n begins a sum of `out`, from there or from 0, after the one that it has is stored; null if
// there is none. What stores a tile takes most of the processor's queue of stores, and would keep
// it while the last product is not there: a sum is stored when the next one needs its tile.
template <int n>
REGARD_INLINE static void begin_sum(bool adds, void* out, void* unstored, int64_t stride) {
  if (unstored) store_tile<n>(unstored, stride);
  // Unknown to the compiler, which would write the code around it twice.
  if (!__builtin_constant_p(adds)) asm("" : "+r"(adds));
  if (adds)
    load_tile<n>(out, stride);
  else
    zero_tile<n>();
}

// out[r][lane] = or += the products of 32 rows, or 16, and 2 vectors, or one: each tile that is
// loaded is used twice. Registers 0 to 3 sum, 4 and 5 have rows, 6 and 7 vectors. `whole`: all rows
// are there.
template <bool adds, int R, int V, bool whole>
static void tile_block(const TileMatrix& a, int64_t there, const TileVectors& x, float* out,
                       int64_t ldo) {
  const int64_t rows = whole ? R * kTileRows : there;
  const auto each_sum = [&](auto what) {
    what.template operator()<0>(out, rows);
    if constexpr (V > 1) what.template operator()<1>(out + kTileRows, rows);
    if constexpr (R > 1) what.template operator()<2>(out + kTileRows * ldo, rows - kTileRows);
    if constexpr (R > 1 && V > 1)
      what.template operator()<3>(out + kTileRows * ldo + kTileRows, rows - kTileRows);
  };
  each_sum([&]<int n>(const float* from, int64_t left) {
    adds ? load_rows<n>((const char*)from, ldo * 4, left) : zero_tile<n>();
  });
  for (int product = 0; product < x.products; ++product)
    for (int64_t s = 0; s < x.steps; ++s) {
      const char* const from = a.data + product / 2 * a.part + s * a.across;
      const int32_t* const y = x.data + product % 2 * x.part + s * kTileRows * x.stride;
      stream_rows<4>(from, a.stride, rows);
      load_tile<6>(y, x.stride * 4);
      multiply_tiles<0, 4, 6>();
      if constexpr (V > 1) {
        load_tile<7>(y + kTileRows, x.stride * 4);
        multiply_tiles<1, 4, 7>();
      }
      if constexpr (R > 1) {
        stream_rows<5>(from + a.down, a.stride, rows - kTileRows);
        multiply_tiles<2, 5, 6>();
        if constexpr (V > 1) multiply_tiles<3, 5, 7>();
      }
    }
  each_sum([&]<int n>(float* to, int64_t left) { store_rows<n>(to, ldo, left); });
}

// A block of the largest size that there are rows and vectors for.
template <bool adds, int R, int V>
static void any_block(const TileMatrix& a, int64_t rows, const TileVectors& x, float* out,
                      int64_t ldo) {
  if constexpr (R > 1)
    if (rows <= kTileRows) return any_block<adds, 1, V>(a, rows, x, out, ldo);
  (rows >= R * kTileRows ? tile_block<adds, R, V, true> : tile_block<adds, R, V, false>)(a, rows, x,
                                                                                         out, ldo);
}

// The same of 32 rows of 32 words, which stay in tiles 0 to 3: 6 and 7 sum.
template <bool adds>
static void multiply_held_rows(const TileMatrix& a, const TileVectors& x, int64_t vectors,
                               float* out, int64_t ldo) {
  const int64_t lda = a.stride, ldx = x.stride * 4, down = kTileRows * ldo;
  const int32_t* y = x.data;
  stream_tile<0>(a.data, lda), stream_tile<1>(a.data + a.across, lda);
  stream_tile<2>(a.data + a.down, lda), stream_tile<3>(a.data + a.down + a.across, lda);
  for (int64_t v = 0; v < vectors; ++v, y += kTileRows, out += kTileRows) {
    float* const unstored = v ? out - kTileRows : nullptr;
    stream_tile<4>(y, ldx), stream_tile<5>(y + kTileRows * x.stride, ldx);
    begin_sum<6>(adds, out, unstored, ldo * 4);
    multiply_tiles<6, 0, 4>();
    begin_sum<7>(adds, out + down, unstored ? unstored + down : nullptr, ldo * 4);
    multiply_tiles<7, 2, 4>(), multiply_tiles<6, 1, 5>(), multiply_tiles<7, 3, 5>();
  }
  store_tile<6>(out - kTileRows, ldo * 4), store_tile<7>(out - kTileRows + down, ldo * 4);
}

// The same for any number of rows and vectors.
template <bool adds>
static void multiply_by_tiles(const TileMatrix& a, int64_t rows, const TileVectors& x,
                              int64_t vectors, float* out, int64_t ldo) {
  if (rows == 2 * kTileRows && x.are_held() && vectors)
    return multiply_held_rows<adds>(a, x, vectors, out, ldo);
  for (int64_t r = 0; r < rows; r += 2 * kTileRows)
    for (int64_t v = 0; v < vectors; v += 2) {
      TileMatrix from = a;
      TileVectors y = x;
      from.data += r / kTileRows * a.down, y.data += v * kTileRows;
      (v + 1 < vectors
           ? any_block<adds, 2, 2>
           : any_block<adds, 2, 1>)(from, rows - r, y, out + r * ldo + v * kTileRows, ldo);
    }
}

// A product of `rows` rows, of sums [rows][lanes of the vectors].
struct TileProduct {
  TileMatrix a;
  int64_t rows;
  TileVectors x;
  float* out;
  int64_t ldo;
  bool adds = true;  // whether a product that adds has sums to add to

  bool is_whole() const { return rows > 0 && rows % (2 * kTileRows) == 0; }  // of whole blocks
  int64_t count() const { return rows / (2 * kTileRows) * 4 * x.steps * x.products; }  // of tiles
};

// Computes a product of whole blocks and 2 vectors, whose rows lie `ldx` and `ldo` bytes apart. The
// processor multiplies tiles while it computes what `between` does after every `every`-th product
// of two tiles. Strides are constants: address arithmetic would take as long as the vectors.
template <bool adds, int every, int64_t ldx, int64_t ldo, class Between>
REGARD_INLINE static void multiply_meanwhile(const TileProduct& product, Between between) {
  const int64_t lda = product.a.stride, down = product.a.down;
  const char* a = product.a.data;
  char *out = (char*)product.out, *unstored = nullptr;
  constexpr int64_t place[] = {0, kTileBytes, kTileRows * ldo, kTileRows * ldo + kTileBytes};
  for (int64_t r = 0; r < product.rows; r += 2 * kTileRows) {
    bool first = true;
    const auto begin = [&]<int n>(std::integral_constant<int, n>) REGARD_INLINE_LAMBDA {
      if (first)
        begin_sum<n>(adds && product.adds, out + place[n], unstored ? unstored + place[n] : nullptr,
                     ldo);
    };
    for (int part = 0; part < product.x.products; ++part) {
      const char* from = a + part / 2 * product.a.part;
      const char* x = (const char*)(product.x.data + part % 2 * product.x.part);
      for (int64_t s = 0; s < product.x.steps; ++s) {
        stream_tile<4>(from, lda), load_tile<6>(x, ldx);
        begin(std::integral_constant<int, 0>());
        multiply_tiles<0, 4, 6>();
        if (every == 1) between();
        load_tile<7>(x + kTileBytes, ldx);
        begin(std::integral_constant<int, 1>());
        multiply_tiles<1, 4, 7>();
        between();
        stream_tile<5>(from + down, lda);
        begin(std::integral_constant<int, 2>());
        multiply_tiles<2, 5, 6>();
        if (every == 1) between();
        begin(std::integral_constant<int, 3>());
        multiply_tiles<3, 5, 7>();
        between();
        from += product.a.across, x += kTileRows * ldx, first = false;
      }
    }
    unstored = out;
    a += 2 * down, out += 2 * kTileRows * ldo;
  }
  store_tile<0>(unstored, ldo), store_tile<1>(unstored + place[1], ldo);
  store_tile<2>(unstored + place[2], ldo), store_tile<3>(unstored + place[3], ldo);
}

// The same for vectors that stay in tiles 0 to 3. The last sums stay in 6 and 7, those of
// `unstored`, until store_held or another such product.
template <bool adds, int64_t ldx, int64_t ldo, class Between>
REGARD_INLINE static void multiply_held_meanwhile(const TileProduct& product, char*& unstored,
                                                  Between between) {
  const int64_t lda = product.a.stride;
  const char *a = product.a.data, *x = (const char*)product.x.data;
  char* out = (char*)product.out;
  bool first = true;
  for (int64_t r = 0; r < product.rows; r += kTileRows) {
    stream_tile<4>(a, lda);
    if (first) load_tile<0>(x, ldx);
    between();
    begin_sum<6>(adds && product.adds, out, unstored, ldo);
    multiply_tiles<6, 4, 0>();
    if (first) load_tile<1>(x + kTileBytes, ldx);
    between();
    begin_sum<7>(adds && product.adds, out + kTileBytes, unstored ? unstored + kTileBytes : nullptr,
                 ldo);
    multiply_tiles<7, 4, 1>();
    stream_tile<5>(a + product.a.across, lda);
    if (first) load_tile<2>(x + kTileRows * ldx, ldx);
    between();
    multiply_tiles<6, 5, 2>();
    if (first) load_tile<3>(x + kTileRows * ldx + kTileBytes, ldx);
    between();
    multiply_tiles<7, 5, 3>();
    unstored = out, first = false;
    a += product.a.down, out += kTileRows * ldo;
  }
}
REGARD_INLINE static void store_held(char*& unstored, int64_t ldo) {
  if (unstored) store_tile<6>(unstored, ldo), store_tile<7>(unstored + kTileBytes, ldo);
  unstored = nullptr;
}

// The same for pairs of vectors, in steps of four products of two tiles: what computes vectors
// calls `step` now and then, and `finish` where the product is needed. No other tiles are used
// before. Vectors of 32 words stay in tiles 0 to 3.
template <>
class StepwiseProduct<true> {
 public:
  void start(const TileProduct& product, int vectors) {
    product_ = product;
    pairs_ = vectors / 2, pair_ = 0, row_ = 0, step_ = 0;
    left_ = product.rows / (2 * kTileRows) * pairs_ * product.x.steps;
    unstored_ = nullptr;
  }
  REGARD_INLINE void step() {
    if (left_) multiply();
  }
  REGARD_INLINE void finish() {
    while (left_) multiply();
    store_held(unstored_, product_.ldo * 4);
  }

 private:
  REGARD_INLINE void multiply() {
    --left_;
    const int64_t lda = product_.a.stride, ldx = product_.x.stride * 4, ldo = product_.ldo * 4;
    const char* const x = (const char*)(product_.x.data + pair_ * 2 * kTileRows);
    char* const out = (char*)(product_.out + pair_ * 2 * kTileRows) + row_ * ldo;
    const char* const from = product_.a.data + row_ / kTileRows * product_.a.down;
    product_.x.are_held() ? multiply_held(from, lda, x, ldx, out, ldo)
                          : multiply_block(from, lda, x, ldx, out, ldo);
    if (row_ < product_.rows) return;
    row_ = 0, ++pair_;
  }

  REGARD_INLINE void multiply_held(const char* from, int64_t lda, const char* x, int64_t ldx,
                                   char* out, int64_t ldo) {
    if (row_ == 0) {
      load_tile<0>(x, ldx), load_tile<1>(x + kTileBytes, ldx);
      load_tile<2>(x + kTileRows * ldx, ldx), load_tile<3>(x + kTileRows * ldx + kTileBytes, ldx);
    }
    stream_tile<4>(from, lda), stream_tile<5>(from + product_.a.across, lda);
    begin_sum<6>(false, out, unstored_, ldo);
    multiply_tiles<6, 4, 0>();
    begin_sum<7>(false, out, unstored_ ? unstored_ + kTileBytes : nullptr, ldo);
    multiply_tiles<7, 4, 1>();
    multiply_tiles<6, 5, 2>(), multiply_tiles<7, 5, 3>();
    unstored_ = out, row_ += kTileRows;
  }
  REGARD_INLINE void multiply_block(const char* from, int64_t lda, const char* x, int64_t ldx,
                                    char* out, int64_t ldo) {
    from += step_ * product_.a.across, x += step_ * kTileRows * ldx;
    if (step_ == 0) zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    stream_tile<4>(from, lda), load_tile<6>(x, ldx), multiply_tiles<0, 4, 6>();
    load_tile<7>(x + kTileBytes, ldx), multiply_tiles<1, 4, 7>();
    stream_tile<5>(from + product_.a.down, lda), multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
    if (++step_ < product_.x.steps) return;
    char* const below = out + kTileRows * ldo;
    store_tile<0>(out, ldo), store_tile<1>(out + kTileBytes, ldo);
    store_tile<2>(below, ldo), store_tile<3>(below + kTileBytes, ldo);
    step_ = 0, row_ += 2 * kTileRows;
  }

  TileProduct product_;
  int64_t left_ = 0, row_, step_;
  int pairs_, pair_;
  char* unstored_ = nullptr;
};

#endif

}  // namespace regard::REGARD_NAMESPACE
