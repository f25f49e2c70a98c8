// Random operations on sequences that share blocks. Compiled for each stage from 5 on.
//
//   sharing_fuzz_stage5 [--operations N] [--seed S]      or with FUZZ_OPERATIONS and FUZZ_SEED in the environment
//
// Copies are carried out as late as allowed: just before the next write. By then, free slots hold NaN.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/fuzz/fuzzed_pool.h"
#include "tests/support/sanitizers.h"

namespace {

using common::Random;
using tests::expect;
using tests::FuzzCounts;
using tests::Snapshot;

constexpr int kOperationsPerPool = 2000;
constexpr int kMaxSequences = 6;
// Release builds run longer.
constexpr long long kDefaultOperations = tests::kSanitized ? 100'000 : 1'000'000;

class Pool : public tests::FuzzedPool {
 public:
  // Random numbers in a fixed order: blocks, slots of a block, kv heads.
  static Pool make(std::uint64_t seed, FuzzCounts& counts) {
    Random random(seed);
    const auto larger_of_two = [&](std::uint64_t bound) {
      const std::uint64_t first = random.below(bound);
      return static_cast<int>(1 + std::max(first, random.below(bound)));
    };
    const int num_blocks = larger_of_two(12);
    const int block_size = larger_of_two(5);
    const auto num_kv_heads = static_cast<int>(1 + random.below(2));
    return {random, counts, num_blocks, block_size, {2, num_kv_heads, 2, 2}};
  }

 private:
  using FuzzedPool::FuzzedPool;

  void step(const Snapshot& before) override {
    quiet_ = below(quiet_ ? 12 : 24) == 0 ? !quiet_ : quiet_;
    const int sequence = below(kMaxSequences);
    if (!sequences_.contains(sequence)) {
      if (sequences_.empty() || below(4) == 0) {
        start(sequence, 1 + below(2 * block_size_), before);
      } else {
        fork(sequence, before);
      }
      return;
    }
    const int choice = below(24);
    if (choice < (before.free_blocks.size() < 2 ? 12 : 3)) {
      free(sequence, before);
    } else if (choice < 6 || (quiet_ && choice < 19)) {
      reserve(sequence, below(below(4) != 0 ? 3 : 2 * block_size_), before);
    } else if (choice < 19) {
      append(sequence, 1 + below(below(4) != 0 ? 2 : 2 * block_size_), before);
    } else if (choice < 20) {
      misuse(sequence);
      expect_unchanged(before, "a misuse that was noticed");
    } else if (choice < 22) {
      check_can_reserve();
      expect_unchanged(before, "can_reserve()");
    } else if (choice < 23) {
      take_copies();
    } else if (!quiet_) {
      attend(sequence);
    }
  }

  bool may_read() const override { return !quiet_; }

  void expect_unchanged(const Snapshot& before, const char* operation) override {
    FuzzedPool::expect_unchanged(before, operation);
    if (below(2) == 0) {
      take_copies();  // finds it if one was planned
    }
  }

  // A fork takes and frees no block, and the child gets the parent's blocks that hold tokens.
  void fork(int child, const Snapshot& before) {
    const auto parent = std::next(sequences_.begin(), below(static_cast<int>(sequences_.size())));
    const int num_blocks = blocks_for(parent->second.length());
    manager_.fork(parent->first, child);
    sequences_[child] = {parent->second.prefixes, num_blocks};
    std::vector<int> shared = before.sequences.at(parent->first).block_table;
    shared.resize(static_cast<std::size_t>(num_blocks));
    expect(manager_.block_table(child) == shared, "the block table of child %d is not that of its parent %d", child,
           parent->first);
    expect(manager_.free_blocks() == before.free_blocks, "a fork took or freed blocks");
    expect_others_unchanged(child, before);
    counts_.add("forked");
  }

  void on_copy(int source, int destination) override { planned_.emplace_back(source, destination); }

  void append(int sequence, int num_tokens, const Snapshot& before) {
    // Slots that were reserved earlier may be written without reserving again, unless a fork came in between.
    const bool reserved_ahead = num_tokens <= manager_.capacity(sequence) - manager_.length(sequence) &&
                                tests::check_writable(manager_, sequence, num_tokens).empty();
    if ((reserved_ahead && below(2) == 0) || reserve(sequence, num_tokens, before)) {
      write(sequence, num_tokens);
      counts_.add("appended");
    }
  }

  // Frees a sequence: the blocks that only it had are free again, and no others (stage 5, invariant 6).
  void free(int sequence, const Snapshot& before) {
    std::vector<int> expected = before.free_blocks;
    for (const int block : before.sequences.at(sequence).block_table) {
      if (num_owners(before, block) == 1) {
        expected.push_back(block);
        poisoned_[static_cast<std::size_t>(block)] = false;
      }
    }
    manager_.free(sequence);
    sequences_.erase(sequence);
    std::vector<int> free_blocks = manager_.free_blocks();
    std::sort(free_blocks.begin(), free_blocks.end());
    std::sort(expected.begin(), expected.end());
    if (free_blocks != expected) {
      throw tests::FuzzFailure("the free blocks are " + tests::to_string(free_blocks) + ", expected " +
                               tests::to_string(expected) + ": those before and the private ones");
    }
    expect_others_unchanged(sequence, before);
  }

  // Compares can_reserve() with a count of the blocks that some sequences need, one after another.
  void check_can_reserve() {
    std::vector<int> some;
    for (const auto& [id, owner] : sequences_) {
      some.insert(some.begin() + below(static_cast<int>(some.size()) + 1), id);
    }
    const int count = 1 + below(static_cast<int>(some.size()));
    some.resize(static_cast<std::size_t>(count));
    const int num_tokens = below(2 * block_size_);
    Snapshot books = tests::take_snapshot(manager_);
    int missing = 0;
    for (const int sequence : some) {
      const auto& [table, length, capacity] = books.sequences.at(sequence);
      missing += std::max(blocks_for(length + num_tokens) - static_cast<int>(table.size()), 0);
      if (num_tokens > 0 && length % block_size_ != 0) {
        int& owners =
            books.reference_counts[static_cast<std::size_t>(table[static_cast<std::size_t>(length / block_size_)])];
        missing += owners > 1 ? 1 : 0;
        owners = std::max(owners - 1, 1);
      }
    }
    const auto num_available = static_cast<int>(books.free_blocks.size() + books.cached_blocks.size());
    expect(manager_.can_reserve(some, num_tokens) == (missing <= num_available),
           "can_reserve(%s, %d) is wrong: %d blocks are needed, and %d are available", tests::to_string(some).c_str(),
           num_tokens, missing, num_available);
    counts_.add("predicted");
  }

  void misuse(int sequence) {
    const int room = manager_.capacity(sequence) - manager_.length(sequence);
    const int unknown = kMaxSequences + below(3);
    expect_refused("a commit beyond the reservation", [&] { manager_.commit(sequence, room + 1); });
    expect_refused("a live id taken again", [&] { manager_.allocate(sequence, 1); });
    expect_refused("a fork onto a live id", [&] { manager_.fork(sequences_.begin()->first, sequence); });
    expect_refused("a fork onto itself", [&] { manager_.fork(sequence, sequence); });
    expect_refused("a fork of an unknown sequence", [&] { manager_.fork(unknown, unknown + 1); });
    expect_refused("a negative reserve", [&] { manager_.reserve(sequence, -1); });
    expect_refused("a free of an unknown sequence", [&] { manager_.free(unknown); });
    expect_refused("a question about an unknown sequence", [&] { manager_.can_reserve({&unknown, 1}, 1); });
  }

  // The planned copies are the expected ones. They wait until prepare().
  void take_copies() {
    std::vector<stage::BlockCopy> copies = tests::take_copies(manager_);
    const bool equal = std::equal(copies.begin(), copies.end(), planned_.begin(), planned_.end(),
                                  [](const stage::BlockCopy& actual, const std::pair<int, int>& expected) {
                                    return actual.source == expected.first && actual.destination == expected.second;
                                  });
    expect(equal, "%zu copies are planned, and writes to shared blocks need %zu, or others", copies.size(),
           planned_.size());
    counts_.add("blocks copied", static_cast<long long>(copies.size()));
    planned_.clear();
    waiting_.insert(waiting_.end(), copies.begin(), copies.end());
    counts_.add("of them together with others", static_cast<long long>(copies.empty() ? 0 : copies.size() - 1));
  }

  // Carries the copies out, sometimes in two portions, and poisons the free blocks.
  void prepare() override {
    take_copies();
    const std::span<const stage::BlockCopy> copies(waiting_);
    const auto first = static_cast<std::size_t>(below(static_cast<int>(copies.size()) + 1));
    cache_.copy_blocks(copies.first(first));
    cache_.copy_blocks(copies.subspan(first));
    waiting_.clear();
    std::vector<int> slots;
    for (const int block : manager_.free_blocks()) {
      for (int row = 0; !poisoned_[static_cast<std::size_t>(block)] && row < block_size_; ++row) {
        slots.push_back(block * block_size_ + row);
      }
      poisoned_[static_cast<std::size_t>(block)] = true;
    }
    poison(slots);
  }

  bool quiet_ = false;                        // nothing is written for a while, so that planned copies pile up
  std::vector<std::pair<int, int>> planned_;  // what the manager should have planned since the last take_copies()
  std::vector<stage::BlockCopy> waiting_;     // taken, and not carried out yet
  std::vector<bool> poisoned_ = std::vector<bool>(static_cast<std::size_t>(num_blocks_), true);  // by block
};

}  // namespace

int main(int argc, char** argv) {
  return tests::run_fuzz(
      {argv + 1, argv + argc},
      {.unit = "operations", .default_units = kDefaultOperations, .units_per_seed = kOperationsPerPool, .rarest = 400},
      FuzzCounts({"allocated", "reserved", "forked", "appended", "blocks copied", "of them together with others",
                  "refused", "predicted", "read back", "attended", "misuses noticed"}),
      [](std::uint64_t seed, FuzzCounts& counts) { Pool::make(seed, counts).run(kOperationsPerPool); });
}
