// How many blocks a cache gets where nothing says how many slots it has: arithmetic, which needs no GPU.
#include <cstdint>
#include <limits>
#include <string>

#include "common/base/check.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/stage_header.h"

#include STAGE_HEADER(cache_size.h)

namespace stage = STAGE_NAMESPACE;

namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

// LLaMA-2-7B's in 16 bits: 8 MiB a block.
constexpr int kBlockSize = 16;
constexpr std::int64_t kBytesPerSlot = 512 * 1024;

stage::CacheSize fitted(const stage::MemoryShare& share, std::int64_t free_bytes, int num_gpus = 1) {
  stage::CacheSize size{.block_size = kBlockSize, .bytes_per_slot = kBytesPerSlot};
  stage::fit_into_gpus(size, share, free_bytes, num_gpus);
  return size;
}

}  // namespace

TEST_CASE("cache size: a share of what a GPU has free, in whole blocks") {
  const stage::MemoryShare share{.memory_fraction = 0.5, .max_slots = 1 << 30};
  const stage::CacheSize size = fitted(share, 4 * kGiB);
  CHECK(size.num_blocks == 256);
  CHECK(fitted(share, 4 * kGiB - 1).num_blocks == 255);
  CHECK(tests::contains(size.reason, "0.5 of the "));
  CHECK(tests::contains(size.reason, "that the GPU has free beside the model"));
  CHECK(tests::contains(fitted(share, 4 * kGiB, 2).reason, "fullest of 2 GPUs"));
  CHECK(tests::contains(stage::note(size), "a cache of 4,096 slots, "));
  CHECK(fitted(share, 16 << 20).num_blocks == 1);
  CHECK_THROWS_AS(fitted(share, (16 << 20) - 1), common::InputError);
}

TEST_CASE("cache size: no more than the sequences of a step can fill, rounded up to whole blocks") {
  const stage::CacheSize size = fitted({.memory_fraction = 0.9, .max_slots = 1000}, 64 * kGiB);
  CHECK(size.num_blocks == 63);
  CHECK(size.reason == "all that the sequences of a step can fill");
  // Slot numbers are ints.
  const stage::CacheSize largest =
      fitted({.memory_fraction = 1.0, .max_slots = std::int64_t{1} << 40}, std::int64_t{1} << 60);
  CHECK(std::int64_t{largest.num_blocks} * kBlockSize <= std::numeric_limits<int>::max());
  CHECK(largest.num_blocks == std::numeric_limits<int>::max() / kBlockSize);
}

TEST_CASE("cache size: a step's sequences can fill as much as their contexts allow") {
  const common::LlamaConfig& config = tests::small_model().config();
  stage::EngineOptions options;
  options.scheduler.max_sequences = 200;
  CHECK(stage::memory_share(config, options).max_slots == 200 * tests::kSmallContext);
  options.context_length = 30;
  CHECK(stage::memory_share(config, options).max_slots == 200 * 30);
  options.context_length = 1000;  // more than the model has
  CHECK(stage::memory_share(config, options).max_slots == 200 * tests::kSmallContext);
  options.scheduler.max_sequences = 1;
  CHECK(stage::memory_share(config, options).max_slots == options.min_slots);
}

TEST_CASE("cache size: on a CPU, what is needed, or the default") {
  stage::CacheSize size{.block_size = kBlockSize, .bytes_per_slot = 64};
  stage::fit_into_host(size, 4096);
  CHECK(size.num_blocks == 256);
  CHECK(size.reason == "the default on a CPU");
  stage::fit_into_host(size, 5000);
  CHECK(size.num_blocks == 313);
  CHECK(size.reason == "what the longest request needs");
}
