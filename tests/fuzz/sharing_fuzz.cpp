// Random operations of sequences that share blocks, on tiny pools, against a model that is too simple to be wrong.
// Compiled once a stage, from the fifth on.
//
//   sharing_fuzz_stage5 [--operations N] [--seed S]      or with FUZZ_OPERATIONS and FUZZ_SEED in the environment
//
// The model knows the tokens of each sequence. The K and V of a position are a pure function of the tokens up to there,
// so that it does not matter to the model who computed them, and whatever the cache should hold can be computed again.
// Copies are carried out as late as is allowed: just before the next write. Free slots hold NaN by then.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/app/compare.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/reference_attention.h"
#include "common/math/sampling.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/ledger.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

namespace {

using common::Matrix;
using common::Random;
using tests::AttentionShape;
using tests::Snapshot;

constexpr int kOperationsPerPool = 2000;
constexpr int kMostSequences = 6;
// The long run is that of a release build.
constexpr long long kDefaultOperations = tests::kSanitized ? 100'000 : 1'000'000;

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void expect(bool condition, const char* what) {
  if (!condition) {
    throw Failure(what);
  }
}

// What has come up; a run in which something never did has shown little.
struct Counts {
  long long operations = 0;
  long long allocated = 0;
  long long forked = 0;
  long long appended = 0;
  long long copied = 0;
  long long copied_late = 0;  // other operations came between the plan and the copy
  long long refused = 0;
  long long foretold = 0;  // calls of can_reserve()
  long long read_back = 0;
  long long attended = 0;
  long long misused = 0;
};

// One pool of random size and what the model knows about it.
class Pool {
 public:
  Pool(std::uint64_t seed, Counts& counts)
      : random_(seed),
        counts_(counts),
        num_blocks_(1 + std::max(below(12), below(12))),
        block_size_(1 + std::max(below(5), below(5))),
        shape_{2, 1 + below(2), 2, 2},
        manager_(tests::make_manager(num_blocks_, block_size_)),
        cache_(tests::cache_shape(shape_, num_blocks_, block_size_)),
        poisoned_(static_cast<std::size_t>(num_blocks_), true) {
    cache_.fill(std::numeric_limits<float>::quiet_NaN());
  }

  void run(int num_operations) {
    for (int operation = 0; operation < num_operations; ++operation) {
      const Snapshot before = tests::take_snapshot(manager_);
      try {
        quiet_ = below(quiet_ ? 12 : 24) == 0 ? !quiet_ : quiet_;
        step(before);
        check_books();
        if (!quiet_ && below(16) == 0) {
          read_back();
        }
      } catch (const std::exception& error) {
        throw Failure(common::format("operation %d on %d blocks of %d: ", operation, num_blocks_, block_size_) +
                      error.what() + "\n  before: " + tests::to_string(before) +
                      "\n  after:  " + tests::to_string(tests::take_snapshot(manager_)));
      }
      counts_.operations += 1;
    }
  }

 private:
  struct Sequence {
    std::vector<std::uint64_t> prefixes;  // by position: a number that stands for all tokens up to there
    int num_blocks = 0;
  };

  int below(int bound) { return static_cast<int>(random_.below(static_cast<std::uint64_t>(bound))); }
  int blocks_for(int num_tokens) const { return (num_tokens + block_size_ - 1) / block_size_; }
  static int length_of(const Sequence& owner) { return static_cast<int>(owner.prefixes.size()); }

  void step(const Snapshot& before) {
    const int sequence = below(kMostSequences);
    if (!sequences_.contains(sequence)) {
      if (sequences_.empty() || below(4) == 0) {
        start(sequence, before);
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
      expect_unchanged(before, "a misuse that was noticed changed something");
    } else if (choice < 22) {
      foretell();
      expect_unchanged(before, "a question changed something");
    } else if (choice < 23) {
      take_copies();
    } else if (!quiet_) {
      attend(sequence);
    }
  }

  void expect_unchanged(const Snapshot& before, const char* what) {
    expect(tests::take_snapshot(manager_) == before, what);
    if (below(2) == 0) {
      take_copies();  // finds it if one was planned
    }
  }

  void start(int sequence, const Snapshot& before) {
    const int num_tokens = 1 + below(2 * block_size_);
    const bool expected = blocks_for(num_tokens) <= static_cast<int>(before.free_blocks.size());
    const bool allocated = manager_.allocate(sequence, num_tokens);
    expect(allocated == expected, "allocate");
    if (allocated) {
      sequences_[sequence].num_blocks = blocks_for(num_tokens);
      counts_.allocated += 1;
    } else {
      expect_unchanged(before, "a refused allocate changed something");
      counts_.refused += 1;
    }
  }

  // No block is taken, none is given back, and the child has those that hold tokens.
  void fork(int child, const Snapshot& before) {
    const auto parent = std::next(sequences_.begin(), below(static_cast<int>(sequences_.size())));
    const int num_blocks = blocks_for(length_of(parent->second));
    manager_.fork(parent->first, child);
    sequences_[child] = {parent->second.prefixes, num_blocks};
    std::vector<int> shared = before.sequences.at(parent->first).block_table;
    shared.resize(static_cast<std::size_t>(num_blocks));
    expect(manager_.block_table(child) == shared, "the child's table is not the parent's");
    expect(manager_.free_blocks() == before.free_blocks, "a fork took or gave back blocks");
    expect_others_unchanged(child, before);
    counts_.forked += 1;
  }

  bool reserve(int sequence, int num_tokens, const Snapshot& before) {
    Sequence& owner = sequences_.at(sequence);
    const std::vector<int>& table_before = before.sequences.at(sequence).block_table;
    const int num_blocks = std::max(owner.num_blocks, blocks_for(length_of(owner) + num_tokens));
    const auto tail = static_cast<std::size_t>(length_of(owner) / block_size_);
    // The only block that has tokens and gets more.
    const bool copies = num_tokens > 0 && length_of(owner) % block_size_ != 0 &&
                        before.reference_counts[static_cast<std::size_t>(table_before[tail])] > 1;
    const int missing = num_blocks - owner.num_blocks + (copies ? 1 : 0);
    const bool expected = missing <= static_cast<int>(before.free_blocks.size());
    const bool reserved = manager_.reserve(sequence, num_tokens);
    expect(reserved == expected, "reserve");
    if (!reserved) {
      expect_unchanged(before, "a refused reserve changed something");
      counts_.refused += 1;
      return false;
    }
    owner.num_blocks = num_blocks;
    std::vector<int> table = manager_.block_table(sequence);
    table.resize(table_before.size());
    if (copies) {
      planned_.emplace_back(table_before[tail], table[tail]);
      expect(table[tail] != table_before[tail], "a shared block was not replaced");
      table[tail] = table_before[tail];
    }
    expect(table == table_before, "blocks that a sequence had are no longer where they were");
    expect(manager_.free_blocks().size() + static_cast<std::size_t>(missing) == before.free_blocks.size(),
           "another number of blocks was taken than needed");
    const std::string problem = tests::check_writable(manager_, sequence, num_tokens);
    expect(problem.empty(), problem.c_str());
    expect_others_unchanged(sequence, before);
    return true;
  }

  void append(int sequence, int num_tokens, const Snapshot& before) {
    // What was reserved earlier may be written to without asking again, unless a fork came in between.
    const bool reserved_ahead = num_tokens <= manager_.capacity(sequence) - manager_.length(sequence) &&
                                tests::check_writable(manager_, sequence, num_tokens).empty();
    if (!(reserved_ahead && below(2) == 0) && !reserve(sequence, num_tokens, before)) {
      return;
    }
    std::vector<std::uint64_t>& prefixes = sequences_.at(sequence).prefixes;
    const auto length = static_cast<int>(prefixes.size());
    for (int i = 0; i < num_tokens; ++i) {
      // Few different tokens, so that sequences part and yet often have the same text.
      const std::uint64_t previous = prefixes.empty() ? 0 : prefixes.back();
      prefixes.push_back(Random(previous * 4 + static_cast<std::uint64_t>(below(3))).next());
    }
    prepare_to_write();
    const std::vector<int> slots = manager_.slots(sequence, length, num_tokens);
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      cache_.write(layer, slots, content(prefixes, length, layer, 0), content(prefixes, length, layer, 1));
    }
    manager_.commit(sequence, num_tokens);
    counts_.appended += 1;
  }

  // What only this sequence had comes back, and nothing else (stage 5, invariant 6).
  void free(int sequence, const Snapshot& before) {
    std::vector<int> expected = before.free_blocks;
    for (const int block : before.sequences.at(sequence).block_table) {
      if (before.reference_counts[static_cast<std::size_t>(block)] == 1) {
        expected.push_back(block);
        poisoned_[static_cast<std::size_t>(block)] = false;
      }
    }
    manager_.free(sequence);
    sequences_.erase(sequence);
    std::vector<int> free_blocks = manager_.free_blocks();
    std::sort(free_blocks.begin(), free_blocks.end());
    std::sort(expected.begin(), expected.end());
    expect(free_blocks == expected, "free gave back other blocks than the private ones");
    expect_others_unchanged(sequence, before);
  }

  void expect_others_unchanged(int sequence, const Snapshot& before) {
    for (const auto& [id, owner] : sequences_) {
      expect(id == sequence || manager_.block_table(id) == before.sequences.at(id).block_table,
             "an operation changed another sequence's table");
    }
  }

  // can_reserve() says what happens if one sequence after the other is given room.
  void foretell() {
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
    const bool possible = missing <= static_cast<int>(books.free_blocks.size() + books.cached_blocks.size());
    expect(manager_.can_reserve(some, num_tokens) == possible, "can_reserve was wrong");
    counts_.foretold += 1;
  }

  template <typename Action>
  void expect_refused(const char* what, const Action& action) {
    if (!tests::is_refused_as_a_bug(action)) {
      throw Failure(std::string("not noticed: ") + what);
    }
    counts_.misused += 1;
  }

  void misuse(int sequence) {
    const int room = manager_.capacity(sequence) - manager_.length(sequence);
    const int nobody = kMostSequences + below(3);
    expect_refused("a commit beyond the reservation", [&] { manager_.commit(sequence, room + 1); });
    expect_refused("a live id taken again", [&] { manager_.allocate(sequence, 1); });
    expect_refused("a fork onto a live id", [&] { manager_.fork(sequences_.begin()->first, sequence); });
    expect_refused("a fork onto itself", [&] { manager_.fork(sequence, sequence); });
    expect_refused("a fork of nobody", [&] { manager_.fork(nobody, nobody + 1); });
    expect_refused("a negative reserve", [&] { manager_.reserve(sequence, -1); });
    expect_refused("a free of nobody", [&] { manager_.free(nobody); });
    expect_refused("a question about nobody", [&] { manager_.can_reserve({&nobody, 1}, 1); });
  }

  // The plan is as expected. The copies wait.
  void take_copies() {
    std::vector<stage::BlockCopy> copies = tests::take_copies(manager_);
    const bool equal = std::equal(copies.begin(), copies.end(), planned_.begin(), planned_.end(),
                                  [](const stage::BlockCopy& actual, const std::pair<int, int>& expected) {
                                    return actual.source == expected.first && actual.destination == expected.second;
                                  });
    expect(equal, "other copies are planned than writes to shared blocks need");
    counts_.copied += static_cast<long long>(copies.size());
    planned_.clear();
    waiting_.insert(waiting_.end(), copies.begin(), copies.end());
    counts_.copied_late += static_cast<long long>(copies.empty() ? 0 : copies.size() - 1);
  }

  // Carries the copies out, at times in two portions, and poisons what nobody owns.
  void prepare_to_write() {
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
    const Matrix poison =
        Matrix::Constant(static_cast<Eigen::Index>(slots.size()), Eigen::Index{shape_.num_kv_heads} * shape_.head_dim,
                         std::numeric_limits<float>::quiet_NaN());
    for (int layer = 0; layer < shape_.num_layers && !slots.empty(); ++layer) {
      cache_.write(layer, slots, poison, poison);
    }
  }

  // K (which == 0) or V of the positions from `first` on, all kv heads: a function of the tokens up to each position.
  Matrix content(const std::vector<std::uint64_t>& prefixes, int first, int layer, int which) const {
    Matrix rows(static_cast<Eigen::Index>(prefixes.size()) - first,
                Eigen::Index{shape_.num_kv_heads} * shape_.head_dim);
    for (Eigen::Index row = 0; row < rows.rows(); ++row) {
      Random values(prefixes[static_cast<std::size_t>(first + row)] + static_cast<std::uint64_t>(2 * layer + which));
      for (Eigen::Index column = 0; column < rows.cols(); ++column) {
        rows(row, column) = static_cast<float>(2.0 * values.uniform() - 1.0);
      }
    }
    return rows;
  }

  void check_books() {
    const std::string problem = tests::check_ledger(manager_, num_blocks_, block_size_);
    expect(problem.empty(), problem.c_str());
    expect(manager_.sequences().size() == sequences_.size(), "other sequences are live than should be");
    for (const auto& [id, owner] : sequences_) {
      expect(manager_.length(id) == length_of(owner), "a sequence has another length");
      expect(static_cast<int>(manager_.block_table(id).size()) == owner.num_blocks,
             "a sequence has another number of blocks");
    }
  }

  // Every sequence finds its own K and V, to the bit, where slots() says they are.
  void read_back() {
    prepare_to_write();
    for (const auto& [id, owner] : sequences_) {
      const std::vector<int> slots = manager_.slots(id, 0, length_of(owner));
      for (int layer = 0; layer < shape_.num_layers; ++layer) {
        const Matrix k = content(owner.prefixes, 0, layer, 0);
        const Matrix v = content(owner.prefixes, 0, layer, 1);
        for (int head = 0; head < shape_.num_kv_heads; ++head) {
          for (std::size_t i = 0; i < slots.size(); ++i) {
            const auto row = static_cast<Eigen::Index>(i);
            const Eigen::Index column = Eigen::Index{head} * shape_.head_dim;
            // NaN differs from everything, so a poisoned row cannot pass as equal.
            expect(cache_.keys(layer, head, slots[i], 1) == k.block(row, column, 1, shape_.head_dim) &&
                       cache_.values(layer, head, slots[i], 1) == v.block(row, column, 1, shape_.head_dim),
                   "a sequence's K or V is something else");
          }
        }
      }
      counts_.read_back += 1;
    }
  }

  void attend(int sequence) {
    const std::vector<std::uint64_t>& prefixes = sequences_.at(sequence).prefixes;
    const auto length = static_cast<int>(prefixes.size());
    if (length == 0) {
      return;
    }
    prepare_to_write();
    const int layer = below(shape_.num_layers);
    const Matrix q = tests::random_matrix(1 + below(length), Eigen::Index{shape_.num_heads} * shape_.head_dim, random_);
    const std::vector<double> expected =
        common::reference_attention(q, content(prefixes, 0, layer, 0), content(prefixes, 0, layer, 1), shape_.num_heads,
                                    shape_.num_kv_heads, shape_.head_dim);
    for (std::size_t variant = 0; variant < tests::kVariants.size(); ++variant) {
      const Matrix output = tests::attend(cache_, manager_, sequence, layer, q, length, variant);
      const std::string difference = common::compare({output.data(), static_cast<std::size_t>(output.size())}, expected,
                                                     tests::rounding_tolerance(shape_, length));
      expect(difference.empty(), difference.c_str());
    }
    counts_.attended += 1;
  }

  Random random_;
  Counts& counts_;
  int num_blocks_;
  int block_size_;
  AttentionShape shape_;
  stage::KvCacheManager manager_;
  stage::KvCache cache_;
  std::map<int, Sequence> sequences_;
  bool quiet_ = false;                        // nothing is written for a while, so that planned copies pile up
  std::vector<std::pair<int, int>> planned_;  // what the manager should have planned since the last take_copies()
  std::vector<stage::BlockCopy> waiting_;     // taken, and not carried out yet
  std::vector<bool> poisoned_;                // by block
};

// The option, or else the environment variable, or else the default.
long long setting(const std::vector<std::string>& arguments, const std::string& option, const char* variable,
                  long long fallback) {
  const auto found = std::find(arguments.begin(), arguments.end(), option);
  if (found != arguments.end() && std::next(found) != arguments.end()) {
    return std::stoll(*std::next(found));
  }
  const char* value = std::getenv(variable);
  return value != nullptr ? std::stoll(value) : fallback;
}

int run(const std::vector<std::string>& arguments) {
  const long long num_operations = setting(arguments, "--operations", "FUZZ_OPERATIONS", kDefaultOperations);
  const auto first_seed = static_cast<std::uint64_t>(setting(arguments, "--seed", "FUZZ_SEED", 1));
  Counts counts;
  std::uint64_t seed = first_seed;
  try {
    for (; counts.operations < num_operations; ++seed) {
      Pool(seed, counts).run(kOperationsPerPool);
    }
  } catch (const Failure& failure) {
    std::cout << common::format("fuzz failed with --operations %d --seed %llu, ", kOperationsPerPool,
                                static_cast<unsigned long long>(seed))
              << failure.what() << std::endl;
    return 1;
  }
  std::cout << common::format(
                   "fuzz: %lld operations, seeds %llu to %llu: %lld allocated, %lld forked, %lld appended, %lld blocks "
                   "copied, %lld of them together with others, %lld refused, %lld foretold, %lld read back, "
                   "%lld attended, %lld misuses noticed",
                   counts.operations, static_cast<unsigned long long>(first_seed),
                   static_cast<unsigned long long>(seed - 1), counts.allocated, counts.forked, counts.appended,
                   counts.copied, counts.copied_late, counts.refused, counts.foretold, counts.read_back,
                   counts.attended, counts.misused)
            << std::endl;
  const bool thorough =
      std::min({counts.allocated, counts.forked, counts.appended, counts.copied, counts.copied_late, counts.refused,
                counts.foretold, counts.read_back, counts.attended, counts.misused}) >= counts.operations / 400;
  // A single pool may be too small for everything to come up.
  if (!thorough && num_operations / kOperationsPerPool > 10) {
    std::cout << "fuzz failed: some operation hardly ever came up" << std::endl;
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
