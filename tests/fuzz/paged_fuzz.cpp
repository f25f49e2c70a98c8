// Random operations on sequences that share nothing. Compiled for each stage from 2 on.
//
//   paged_fuzz_stage2 [--operations N] [--seed S]      or with FUZZ_OPERATIONS and FUZZ_SEED in the environment
#include <cstdint>
#include <vector>

#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/fuzz/fuzzed_pool.h"

namespace {

using common::Random;
using tests::FuzzCounts;
using tests::Snapshot;

constexpr int kOperationsPerPool = 2000;
constexpr int kMaxSequences = 5;

class Pool : public tests::FuzzedPool {
 public:
  // Random numbers in a fixed order: blocks, slots of a block, kv heads.
  static Pool make(std::uint64_t seed, FuzzCounts& counts) {
    Random random(seed);
    const auto num_blocks = static_cast<int>(1 + random.below(12));
    const auto block_size = static_cast<int>(1 + random.below(5));
    const auto num_kv_heads = static_cast<int>(1 + random.below(2));
    return {random, counts, num_blocks, block_size, {2, num_kv_heads, 3, 2}};
  }

 private:
  using FuzzedPool::FuzzedPool;

  void step(const Snapshot& before) override {
    const int sequence = below(kMaxSequences);
    if (!sequences_.contains(sequence)) {
      start(sequence, 1 + below(3 * block_size_), before);
      return;
    }
    const int choice = below(20);
    if (choice < 5) {
      free(sequence);
    } else if (choice < 8) {
      reserve(sequence, below(2 * block_size_), before);
    } else if (choice < 18) {
      const int num_tokens = 1 + below(below(2) == 0 ? 2 : 2 * block_size_);
      if (reserve(sequence, num_tokens, before)) {
        write(sequence, num_tokens);
      }
    } else if (choice < 19) {
      misuse(sequence);
      expect_unchanged(before, "a misuse that was noticed");
    } else {
      attend(sequence);
    }
  }

  void free(int sequence) {
    const std::vector<int> slots = manager_.slots(sequence, 0, manager_.capacity(sequence));
    manager_.free(sequence);
    sequences_.erase(sequence);
    poison(slots);
  }

  void misuse(int sequence) {
    const int room = manager_.capacity(sequence) - manager_.length(sequence);
    const int unknown = kMaxSequences + below(3);
    expect_refused("a commit beyond the reservation", [&] { manager_.commit(sequence, room + 1); });
    expect_refused("a negative commit", [&] { manager_.commit(sequence, -1); });
    expect_refused("a live id taken again", [&] { manager_.allocate(sequence, 1); });
    expect_refused("a negative reserve", [&] { manager_.reserve(sequence, -1); });
    expect_refused("slots beyond the reservation",
                   [&] { manager_.slots(sequence, 0, manager_.capacity(sequence) + 1); });
    expect_refused("a free of an unknown sequence", [&] { manager_.free(unknown); });
    expect_refused("a reserve for an unknown sequence", [&] { manager_.reserve(unknown, 1); });
  }
};

}  // namespace

int main(int argc, char** argv) {
  return tests::run_fuzz(
      {argv + 1, argv + argc},
      {.unit = "operations", .default_units = 200'000, .units_per_seed = kOperationsPerPool, .rarest = 200},
      FuzzCounts({"allocated", "reserved", "refused", "read back", "attended", "misuses noticed"}),
      [](std::uint64_t seed, FuzzCounts& counts) { Pool::make(seed, counts).run(kOperationsPerPool); });
}
