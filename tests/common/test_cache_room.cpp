// How many blocks a cache gets where nothing says how many slots it has: arithmetic, which needs no GPU.
#include <cstdint>
#include <limits>
#include <string>

#include "common/app/cache_room.h"
#include "common/base/check.h"
#include "common/base/platform.h"
#include "tests/support/catch.h"

namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

// LLaMA-2-7B's in 16 bits: 8 MiB a block.
constexpr int kBlockSize = 16;
constexpr std::int64_t kBytesPerSlot = 512 * 1024;

common::CacheRoom fitted(const common::MemoryShare& share, std::int64_t free_bytes, int num_gpus = 1) {
  return common::room_on_gpus(share, free_bytes, num_gpus, kBlockSize, kBytesPerSlot);
}

}  // namespace

TEST_CASE("cache size: a share of what a GPU has free, in whole blocks") {
  const common::MemoryShare share{.memory_fraction = 0.5, .max_slots = 1 << 30};
  const common::CacheRoom size = fitted(share, 4 * kGiB);
  CHECK(size.num_blocks == 256);
  CHECK(fitted(share, 4 * kGiB - 1).num_blocks == 255);
  CHECK(size.reason == "0.5 of the 4.00 GiB that the GPU has free beside the model");
  CHECK(fitted(share, 4 * kGiB, 2).reason == "0.5 of what is free beside the model on the fullest of 2 GPUs");
  CHECK(common::cache_note(4096, kBytesPerSlot, "it fits") ==
        "a cache of 4,096 slots, 2.00 GiB: it fits (--slots sets it)");
  CHECK(fitted(share, 16 << 20).num_blocks == 1);
  CHECK_THROWS_AS(fitted(share, (16 << 20) - 1), common::InputError);
}

TEST_CASE("cache size: no more than the sequences of a step can fill, rounded up to whole blocks") {
  const common::CacheRoom size = fitted({.memory_fraction = 0.9, .max_slots = 1000}, 64 * kGiB);
  CHECK(size.num_blocks == 63);
  CHECK(size.reason == "all that the sequences of a step can fill");
  // Slot numbers are ints.
  const common::CacheRoom largest =
      fitted({.memory_fraction = 1.0, .max_slots = std::int64_t{1} << 40}, std::int64_t{1} << 60);
  CHECK(std::int64_t{largest.num_blocks} * kBlockSize <= std::numeric_limits<int>::max());
  CHECK(largest.num_blocks == std::numeric_limits<int>::max() / kBlockSize);
}

TEST_CASE("cache size: on a CPU, what is needed, or the default") {
  const common::CacheRoom small = common::room_in_host(4096, 4096, kBlockSize, 64);
  CHECK(small.num_blocks == 256);
  CHECK(small.reason == "the default on a CPU");
  const common::CacheRoom large = common::room_in_host(5000, 4096, kBlockSize, 64);
  CHECK(large.num_blocks == 313);
  CHECK(large.reason == "what the longest request needs");
  if (common::available_memory_bytes() > 0) {                                                      // where it is known
    const common::CacheRoom cut = common::room_in_host(1 << 30, 4096, kBlockSize, kBytesPerSlot);  // 512 TiB
    CHECK(cut.num_blocks < (1 << 30) / kBlockSize);
    CHECK(cut.reason == "half of the free memory");
    CHECK_THROWS_AS(common::room_in_host(4096, 4096, kBlockSize, std::int64_t{1} << 50), common::InputError);
  }
}
