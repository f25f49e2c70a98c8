// Element types of the CUDA kernels as tests see them, and the headers of the stage under test.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/support/float8.h"

// GPU_STAGE_HEADER(kernels/kernels.h) is "stage7/kernels/kernels.h". It takes two macros, because # does not expand its
// argument.
#define GPU_TESTS_QUOTE(path) #path
// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#define GPU_TESTS_PATH(folder, file) GPU_TESTS_QUOTE(folder/file)  // NOLINT(bugprone-macro-parentheses)
// clang-format on
#define GPU_STAGE_HEADER(file) GPU_TESTS_PATH(STAGE_NAMESPACE, file)

// clang-format off
#include GPU_STAGE_HEADER(kernels/kernels.h)
#ifdef COURSE_PRODUCTION
#include "common/paged/attention_launches.h"
#include "common/paged/production_kernels.h"
#endif
// clang-format on

namespace stage = STAGE_NAMESPACE;

namespace tests {

using common::ScalarType;

// On the executor a kernel takes a thousand times as long: there, tests take fewer and smaller cases of each kind.
#ifdef COURSE_EXECUTOR
inline constexpr bool kOnExecutor = true;
#else
inline constexpr bool kOnExecutor = false;
#endif

inline std::vector<int> some_of(std::vector<int> on_executor, std::vector<int> all) {
  return kOnExecutor ? std::move(on_executor) : std::move(all);
}

// How often a kernel runs where a test looks for races: the executor has none.
inline constexpr int repeats(int on_gpu) { return kOnExecutor ? 1 : on_gpu; }

// As long as it lives, kernels get no more shared memory for a thread block.
class SharedMemoryLimit {
 public:
  explicit SharedMemoryLimit(std::size_t bytes) : before_(std::exchange(common::shared_memory_limit, bytes)) {}
  ~SharedMemoryLimit() { common::shared_memory_limit = before_; }
  SharedMemoryLimit(const SharedMemoryLimit&) = delete;
  SharedMemoryLimit& operator=(const SharedMemoryLimit&) = delete;

 private:
  std::size_t before_;
};

inline const char* name_of(ScalarType type) {
  return type == ScalarType::kFloat32 ? "float32" : type == ScalarType::kBFloat16 ? "bfloat16" : "float8";
}

// The tables of kernels in this build.
struct KernelTable {
  const char* name;
  const common::PagedKernels* kernels;
};

inline std::vector<KernelTable> kernel_tables() {
  std::vector<KernelTable> tables = {{"plain", &stage::kPlainKernels}};
#ifdef COURSE_PRODUCTION
  tables.push_back({"production", &common::kProductionKernels});
#endif
  return tables;
}

// A table with pages that it serves.
struct ServedShape {
  KernelTable table;
  ScalarType type;
  int block_size;
  int head_dim;
};

inline std::vector<ServedShape> served_shapes() {
  std::vector<ServedShape> shapes;
  const std::vector<int> block_sizes = some_of({12, 16}, {1, 3, 8, 12, 16, 24, 64, 100});
  const std::vector<int> head_dims = some_of({24, 256}, {8, 24, 32, 64, 80, 96, 128, 256});
  for (const KernelTable& table : kernel_tables()) {
    for (const ScalarType type : {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat8}) {
      for (const int block_size : block_sizes) {
        for (const int head_dim : head_dims) {
          if (table.kernels
                  ->unsupported({.num_kv_heads = 1, .block_size = block_size, .head_dim = head_dim, .type = type}, 1)
                  .empty()) {
            shapes.push_back({table, type, block_size, head_dim});
          }
        }
      }
    }
  }
  return shapes;
}

// Host copies of device arrays: raw bytes of float32 or bfloat16.
inline std::vector<std::byte> to_bytes(const std::vector<float>& values, ScalarType type) {
  const auto size = static_cast<std::size_t>(common::bytes_of(type));
  std::vector<std::byte> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (type == ScalarType::kFloat32) {
      std::memcpy(&bytes[i * size], &values[i], size);
    } else {
      const __nv_bfloat16 half = __float2bfloat16_rn(values[i]);
      std::memcpy(&bytes[i * size], &half, size);
    }
  }
  return bytes;
}

inline std::vector<float> to_floats(const std::vector<std::byte>& bytes, ScalarType type) {
  const auto size = static_cast<std::size_t>(common::bytes_of(type));
  std::vector<float> values(bytes.size() / size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (type == ScalarType::kFloat32) {
      std::memcpy(&values[i], &bytes[i * size], size);
    } else {
      __nv_bfloat16 half;
      std::memcpy(&half, &bytes[i * size], size);
      values[i] = __bfloat162float(half);
    }
  }
  return values;
}

inline std::vector<float> rounded(const std::vector<float>& values, ScalarType type) {
  return to_floats(to_bytes(values, type), type);
}

// What pages of this type hold after they stored rows of head_dim numbers, which come as rows of row_type(type).
inline std::vector<float> stored(const std::vector<float>& rows, ScalarType type, int head_dim) {
  const std::vector<float> numbers = rounded(rows, common::row_type(type));
  return type == ScalarType::kFloat8 ? through_float8(numbers, static_cast<std::size_t>(head_dim)) : numbers;
}

inline std::vector<float> random_values(std::size_t size, common::Random& random) {
  std::vector<float> values(size);
  std::generate(values.begin(), values.end(), [&] { return static_cast<float>(random.normal()); });
  return values;
}

// All bits set: a NaN in every type, and an invalid scale.
inline common::DeviceArray<std::byte> poisoned(std::int64_t elements, ScalarType type) {
  common::DeviceArray<std::byte> array(static_cast<std::size_t>(elements * common::bytes_of(type)));
  CUDA_CHECK(cudaMemset(array.data(), 0xFF, array.size()));
  CUDA_CHECK(cudaDeviceSynchronize());
  return array;
}

inline bool is_poisoned(const common::DeviceArray<std::byte>& array) {
  const std::vector<std::byte> bytes = array.download();
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte x) { return x == std::byte{0xFF}; });
}

// How an array is laid out, from the outside in: {"layer", 3}, {"block", 9}, {"vector", 96}. The last is of 16 bytes.
using Extents = std::vector<std::pair<const char*, std::int64_t>>;

// Empty if both are equal. Otherwise one line: the first vector that is not as expected, by its place, what is wrong
// with it, and how many there are.
inline std::string compare_bytes(const std::string& array, const std::vector<std::byte>& actual,
                                 const std::vector<std::byte>& expected, const Extents& extents) {
  constexpr std::size_t kVecBytes = 16;
  COMMON_CHECK(actual.size() == expected.size() && actual.size() % kVecBytes == 0, "both have as many whole vectors");
  const auto is_equal = [&](std::size_t vec) {
    return std::memcmp(&actual[vec * kVecBytes], &expected[vec * kVecBytes], kVecBytes) == 0;
  };
  const auto is_poison = [&](const std::vector<std::byte>& bytes, std::size_t vec) {
    return std::all_of(&bytes[vec * kVecBytes], &bytes[vec * kVecBytes] + kVecBytes,
                       [](std::byte x) { return x == std::byte{0xFF}; });
  };
  const std::size_t num_vecs = actual.size() / kVecBytes;
  std::size_t first = num_vecs;
  std::size_t num_different = 0;
  for (std::size_t vec = num_vecs; vec-- > 0;) {
    if (!is_equal(vec)) {
      first = vec;
      ++num_different;
    }
  }
  if (num_different == 0) {
    return {};
  }
  std::string place;
  auto rest = static_cast<std::int64_t>(first);
  for (auto part = extents.rbegin(); part != extents.rend(); ++part) {
    place = std::string(part->first) + " " + std::to_string(rest % part->second) + (place.empty() ? "" : ", ") + place;
    rest /= part->second;
  }
  const char* what = is_poison(actual, first)     ? " was not written"
                     : is_poison(expected, first) ? " must not be written"
                                                  : " has other bytes than it should";
  return array + ": " + place + what + "; " + std::to_string(num_different) + " of " + std::to_string(num_vecs) +
         " vectors are wrong";
}

// What outputs are filled with before a kernel runs: large numbers, about 8e37. With a NaN, a row that must not be
// written would look untouched to a kernel that divides 0 by 0.
inline constexpr int kUnwritten = 0x7E;

inline bool is_unwritten(float x) { return std::bit_cast<std::uint32_t>(x) >> 16 == 0x7E7E; }

// A pointer that is aligned to 2 bytes only; the kernels read 16 at once.
inline void* off_by_2(const void* pointer) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(pointer) + 2);
}

inline bool has_room_for(std::size_t bytes) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  return free_bytes >= bytes;
}

inline std::vector<int> shuffled(int count, common::Random& random) {
  std::vector<int> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<std::size_t>(random.uniform() * static_cast<double>(i))]);
  }
  return order;
}

}  // namespace tests
