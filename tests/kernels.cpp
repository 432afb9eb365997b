// What parts of the kernels promise that no call from Python reaches. tests/test_kernel_sources.py
// builds and runs it.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "../kernels/bounds.h"
#include "../kernels/threads.h"

using namespace regard;

static int failed = 0;

static void expect(bool right, const char* what, int64_t where = 0) {
  if (right) return;
  std::printf("%s (%d)\n", what, int(where));
  failed = 1;
}

// How many more allocations succeed.
static std::atomic<int> allocations{1 << 30};

static void* allocate_at(size_t bytes, size_t alignment) {
  if (allocations.fetch_sub(1) <= 0) throw std::bad_alloc();
  return std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
}
void* operator new(size_t bytes) { return allocate_at(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t to) { return allocate_at(bytes, size_t(to)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

// Wherever memory ends, a job is done in full, or std::bad_alloc is thrown before it begins.
static void jobs_survive_the_end_of_memory() {
  std::atomic<int> done{0};
  const auto count = [](const void* pass, int64_t, char*, const Stop&) {
    ++*static_cast<std::atomic<int>*>(const_cast<void*>(pass));
  };
  const Job job{100, 64, count, &done};
  int refused = 0;
  for (int enough = 0; enough < 30; ++enough) {
    done = 0;
    allocations = enough;
    bool thrown = false;
    try {
      run(job, 5, nullptr);
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    allocations = 1 << 30;
    refused += thrown;
    expect(done == (thrown ? 0 : 100), "tasks that were done with so many allocations", enough);
  }
  expect(0 < refused && refused < 20, "calls that were refused for want of memory", refused);
}

static void arrays_lie_within_their_memory() {
  // Two heads of three rows of four floats; the heads are 64 bytes apart, the rows 16.
  constexpr std::array<int64_t, 4> shape{1, 2, 3, 4};
  constexpr uintptr_t memory = 4096;
  const auto within = [&](int64_t offset, Array x, std::array<int64_t, 4> shape, int64_t bytes) {
    x.data = reinterpret_cast<const char*>(memory) + offset;
    return lies_within(x, shape, 4, memory, bytes);
  };
  const Array x{nullptr, {0, 64, 16, 4}, Type::float32};
  const Array back{nullptr, {0, -64, 16, 4}, Type::float32};
  const Array far{nullptr, {0, INT64_MAX, 16, 4}, Type::float32};
  expect(within(0, x, shape, 112), "all of it is there");
  expect(!within(0, x, shape, 111), "the last byte is missing");
  expect(!within(-4, x, shape, 200), "it begins before");
  expect(!within(4, x, shape, 112), "it begins too late");
  expect(within(64, back, shape, 112), "backwards");
  expect(!within(60, back, shape, 112), "backwards, too far");
  expect(!within(0, far, {1, 3, 3, 4}, 112), "further than 64 bits count");
  expect(within(4000, x, {1, 2, 0, 4}, 0), "nothing lies anywhere");
}

int main() {
  jobs_survive_the_end_of_memory();
  arrays_lie_within_their_memory();
  return failed;
}
