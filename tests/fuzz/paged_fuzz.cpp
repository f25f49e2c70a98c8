// Random operations on tiny pools, against a model that is too simple to be wrong. Compiled once a stage, from the
// second on.
//
//   paged_fuzz_stage2 [--operations N] [--seed S]      or with FUZZ_OPERATIONS and FUZZ_SEED in the environment
//
// The model knows the tokens of each sequence and nothing of blocks. The K and V of a position are a pure function of
// the tokens up to there, so whatever the cache should hold can be computed again at any time. Free slots hold NaN.
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
#include <vector>

#include "common/app/compare.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/reference_attention.h"
#include "common/math/sampling.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

namespace {

using common::Matrix;
using common::Random;
using tests::AttentionShape;
using tests::Snapshot;

constexpr int kOperationsPerPool = 2000;
constexpr int kMostSequences = 5;

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void expect(bool condition, const std::string& what) {
  if (!condition) {
    throw Failure(what);
  }
}

// What has come up; a run in which something never did has shown little.
struct Counts {
  long long operations = 0;
  long long allocated = 0;
  long long reserved = 0;
  long long refused = 0;
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
        num_blocks_(1 + below(12)),
        block_size_(1 + below(5)),
        shape_{2, 1 + below(2), 3, 2},
        manager_(tests::make_manager(num_blocks_, block_size_)),
        cache_(tests::cache_shape(shape_, num_blocks_, block_size_)) {
    cache_.fill(std::numeric_limits<float>::quiet_NaN());
  }

  void run(int num_operations) {
    for (int operation = 0; operation < num_operations; ++operation) {
      const Snapshot before = tests::take_snapshot(manager_);
      try {
        step(before);
        check_books();
        if (below(16) == 0) {
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
    std::vector<int> tokens;
    int reserved = 0;  // the most tokens that were ever asked room for
  };

  int below(int bound) { return static_cast<int>(random_.below(static_cast<std::uint64_t>(bound))); }
  int blocks_for(int num_tokens) const { return (num_tokens + block_size_ - 1) / block_size_; }

  void step(const Snapshot& before) {
    const int sequence = below(kMostSequences);
    if (!sequences_.contains(sequence)) {
      start(sequence, before);
      return;
    }
    const int choice = below(20);
    if (choice < 5) {
      free(sequence);
    } else if (choice < 8) {
      reserve(sequence, below(2 * block_size_), before);
    } else if (choice < 18) {
      append(sequence, 1 + below(below(2) == 0 ? 2 : 2 * block_size_), before);
    } else if (choice < 19) {
      misuse(sequence);
      expect(tests::take_snapshot(manager_) == before, "a misuse that was noticed changed something");
    } else {
      attend(sequence);
    }
  }

  void start(int sequence, const Snapshot& before) {
    const int num_tokens = 1 + below(3 * block_size_);
    const bool expected = blocks_for(num_tokens) <= static_cast<int>(before.free_blocks.size());
    const bool allocated = manager_.allocate(sequence, num_tokens);
    expect(allocated == expected, common::format("allocate(%d, %d)", sequence, num_tokens));
    if (allocated) {
      sequences_[sequence].reserved = num_tokens;
      counts_.allocated += 1;
    } else {
      expect(tests::take_snapshot(manager_) == before, "a refused allocate changed something");
      counts_.refused += 1;
    }
  }

  bool reserve(int sequence, int num_tokens, const Snapshot& before) {
    Sequence& owner = sequences_.at(sequence);
    const auto wanted = static_cast<int>(owner.tokens.size()) + num_tokens;
    const std::vector<int>& table_before = before.sequences.at(sequence).block_table;
    const int missing = blocks_for(wanted) - static_cast<int>(table_before.size());
    const bool expected = missing <= static_cast<int>(before.free_blocks.size());
    const bool reserved = manager_.reserve(sequence, num_tokens);
    expect(reserved == expected, common::format("reserve(%d, %d)", sequence, num_tokens));
    if (!reserved) {
      expect(tests::take_snapshot(manager_) == before, "a refused reserve changed something");
      counts_.refused += 1;
      return false;
    }
    owner.reserved = std::max(owner.reserved, wanted);
    const std::vector<int>& table = manager_.block_table(sequence);
    expect(table.size() >= table_before.size() && std::equal(table_before.begin(), table_before.end(), table.begin()),
           "blocks that a sequence had are no longer where they were");
    counts_.reserved += 1;
    return true;
  }

  void append(int sequence, int num_tokens, const Snapshot& before) {
    if (!reserve(sequence, num_tokens, before)) {
      return;
    }
    std::vector<int>& tokens = sequences_.at(sequence).tokens;
    const auto length = static_cast<int>(tokens.size());
    for (int i = 0; i < num_tokens; ++i) {
      tokens.push_back(below(3));  // few different ones, so that sequences often have a prefix in common
    }
    const std::vector<int> slots = manager_.slots(sequence, length, num_tokens);
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      cache_.write(layer, slots, content(tokens, length, layer, 0), content(tokens, length, layer, 1));
    }
    manager_.commit(sequence, num_tokens);
  }

  void free(int sequence) {
    const std::vector<int> slots = manager_.slots(sequence, 0, manager_.capacity(sequence));
    manager_.free(sequence);
    sequences_.erase(sequence);
    const Matrix poison =
        Matrix::Constant(static_cast<Eigen::Index>(slots.size()), Eigen::Index{shape_.num_kv_heads} * shape_.head_dim,
                         std::numeric_limits<float>::quiet_NaN());
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      cache_.write(layer, slots, poison, poison);
    }
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
    expect_refused("a negative commit", [&] { manager_.commit(sequence, -1); });
    expect_refused("a live id taken again", [&] { manager_.allocate(sequence, 1); });
    expect_refused("a negative reserve", [&] { manager_.reserve(sequence, -1); });
    expect_refused("slots beyond the reservation",
                   [&] { manager_.slots(sequence, 0, manager_.capacity(sequence) + 1); });
    expect_refused("a free of nobody", [&] { manager_.free(nobody); });
    expect_refused("a reserve of nobody", [&] { manager_.reserve(nobody, 1); });
  }

  // K (which == 0) or V of the positions from `first` on, all kv heads: a function of the tokens up to each position.
  Matrix content(const std::vector<int>& tokens, int first, int layer, int which) const {
    const auto length = static_cast<int>(tokens.size());
    Matrix rows(length - first, Eigen::Index{shape_.num_kv_heads} * shape_.head_dim);
    std::uint64_t prefix = 0;
    for (int position = 0; position < length; ++position) {
      prefix = Random(prefix * 4 + static_cast<std::uint64_t>(tokens[static_cast<std::size_t>(position)])).next();
      if (position >= first) {
        Random values(prefix + static_cast<std::uint64_t>(2 * layer + which));
        for (Eigen::Index column = 0; column < rows.cols(); ++column) {
          rows(position - first, column) = static_cast<float>(2.0 * values.uniform() - 1.0);
        }
      }
    }
    return rows;
  }

  void check_books() {
    const std::string problem = tests::check_ledger(manager_, num_blocks_, block_size_);
    expect(problem.empty(), problem);
    expect(manager_.sequences().size() == sequences_.size(), "other sequences are live than should be");
    for (const auto& [id, owner] : sequences_) {
      expect(manager_.length(id) == static_cast<int>(owner.tokens.size()), common::format("length of %d", id));
      const auto size = static_cast<int>(manager_.block_table(id).size());
      expect(size == blocks_for(owner.reserved),
             common::format("sequence %d has %d blocks for %d tokens", id, size, owner.reserved));
    }
  }

  // Every sequence finds its own K and V, to the bit, where slots() says they are.
  void read_back() {
    for (const auto& [id, owner] : sequences_) {
      const std::vector<int> slots = manager_.slots(id, 0, static_cast<int>(owner.tokens.size()));
      for (int layer = 0; layer < shape_.num_layers; ++layer) {
        const Matrix k = content(owner.tokens, 0, layer, 0);
        const Matrix v = content(owner.tokens, 0, layer, 1);
        for (int head = 0; head < shape_.num_heads; ++head) {
          const int column = head / (shape_.num_heads / shape_.num_kv_heads) * shape_.head_dim;
          const int stored = tests::stored_head(shape_, head);
          for (std::size_t i = 0; i < slots.size(); ++i) {
            const auto row = static_cast<Eigen::Index>(i);
            // NaN differs from everything, so a poisoned row cannot pass as equal.
            expect(cache_.keys(layer, stored, slots[i], 1) == k.block(row, column, 1, shape_.head_dim) &&
                       cache_.values(layer, stored, slots[i], 1) == v.block(row, column, 1, shape_.head_dim),
                   common::format("sequence %d, position %zu, layer %d, head %d holds something else", id, i, layer,
                                  head));
          }
        }
      }
      counts_.read_back += 1;
    }
  }

  void attend(int sequence) {
    const std::vector<int>& tokens = sequences_.at(sequence).tokens;
    const auto length = static_cast<int>(tokens.size());
    if (length == 0) {
      return;
    }
    const int layer = below(shape_.num_layers);
    const Matrix q = tests::random_matrix(1 + below(length), Eigen::Index{shape_.num_heads} * shape_.head_dim, random_);
    const std::vector<double> expected =
        common::reference_attention(q, content(tokens, 0, layer, 0), content(tokens, 0, layer, 1), shape_.num_heads,
                                    shape_.num_kv_heads, shape_.head_dim);
    for (std::size_t variant = 0; variant < tests::kVariants.size(); ++variant) {
      const Matrix output = tests::attend(cache_, manager_, sequence, layer, q, length, variant);
      const std::string difference = common::compare({output.data(), static_cast<std::size_t>(output.size())}, expected,
                                                     tests::rounding_tolerance(shape_, length));
      expect(difference.empty(), common::format("%s: %s", tests::kVariants[variant], difference.c_str()));
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
  const long long num_operations = setting(arguments, "--operations", "FUZZ_OPERATIONS", 200000);
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
                   "fuzz: %lld operations, seeds %llu to %llu: %lld allocated, %lld reserved, %lld refused, "
                   "%lld read back, %lld attended, %lld misuses noticed",
                   counts.operations, static_cast<unsigned long long>(first_seed),
                   static_cast<unsigned long long>(seed - 1), counts.allocated, counts.reserved, counts.refused,
                   counts.read_back, counts.attended, counts.misused)
            << std::endl;
  const long long least = counts.operations / 200;
  const bool thorough = std::min({counts.allocated, counts.reserved, counts.refused, counts.read_back, counts.attended,
                                  counts.misused}) >= least;
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
