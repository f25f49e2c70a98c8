// A tiny manager and cache under random operations, beside a model that is too simple to be wrong. For stages 2 and
// later.
//
// The model knows the tokens of each sequence, and how many blocks it should have. K and V of a position are a pure
// function of the tokens up to there: it does not matter which sequence computed them, and the cache's expected
// contents can be computed again at any time. Free slots hold NaN.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "common/base/text.h"
#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/compare.h"
#include "tests/support/ledger.h"
#include "tests/support/reference_attention.h"
#include "tests/support/stage_api.h"

namespace tests {

inline void expect(bool condition, const char* what) {
  if (!condition) {
    throw FuzzFailure(what);
  }
}

// The message is formatted only if the condition does not hold.
template <typename... Arguments>
void expect(bool condition, const char* what, const Arguments&... arguments) {
  if (!condition) {
    throw FuzzFailure(common::format(what, arguments...));
  }
}

inline void expect_none(const std::string& problem) { expect(problem.empty(), problem.c_str()); }

class FuzzedPool {
 public:
  FuzzedPool(common::Random random, FuzzCounts& counts, int num_blocks, int block_size, const AttentionShape& shape)
      : random_(random),
        counts_(counts),
        num_blocks_(num_blocks),
        block_size_(block_size),
        shape_(shape),
        manager_(make_manager(num_blocks, block_size)),
        cache_(cache_shape(shape, num_blocks, block_size)) {
    cache_.fill(std::numeric_limits<float>::quiet_NaN());
  }
  FuzzedPool(const FuzzedPool&) = delete;
  FuzzedPool& operator=(const FuzzedPool&) = delete;
  virtual ~FuzzedPool() = default;

  void run(int num_operations) {
    for (int operation = 0; operation < num_operations; ++operation) {
      const Snapshot before = take_snapshot(manager_);
      try {
        step(before);
        check_books();
        if (may_read() && below(16) == 0) {
          read_back();
        }
      } catch (const std::exception& error) {
        throw FuzzFailure(common::format("operation %d on %d blocks of %d: ", operation, num_blocks_, block_size_) +
                          error.what() + "\n  before: " + to_string(before) +
                          "\n  after:  " + to_string(take_snapshot(manager_)));
      }
    }
  }

 protected:
  struct Sequence {
    std::vector<std::uint64_t> prefixes;  // by position: a number that stands for all tokens up to there
    int num_blocks = 0;
    int length() const { return static_cast<int>(prefixes.size()); }
  };

  // Runs one random operation.
  virtual void step(const Snapshot& before) = 0;
  // Called before the cache is read or written.
  virtual void prepare() {}
  virtual bool may_read() const { return true; }
  // Called when a sequence has got a block of its own in place of a shared one.
  virtual void on_copy(int /*source*/, int /*destination*/) {}

  int below(int bound) { return static_cast<int>(random_.below(static_cast<std::uint64_t>(bound))); }
  int blocks_for(int num_tokens) const { return (num_tokens + block_size_ - 1) / block_size_; }

  virtual void expect_unchanged(const Snapshot& before, const char* operation) {
    expect(take_snapshot(manager_) == before, "%s changed something", operation);
  }

  void start(int sequence, int num_tokens, const Snapshot& before) {
    const bool expected = blocks_for(num_tokens) <= static_cast<int>(before.free_blocks.size());
    const bool allocated = manager_.allocate(sequence, num_tokens);
    expect(allocated == expected, "allocate(%d, %d) returned %s", sequence, num_tokens, allocated ? "true" : "false");
    if (allocated) {
      sequences_[sequence].num_blocks = blocks_for(num_tokens);
      counts_.add("allocated");
    } else {
      expect_unchanged(before, "a refused allocate");
      counts_.add("refused");
    }
  }

  bool reserve(int sequence, int num_tokens, const Snapshot& before) {
    Sequence& owner = sequences_.at(sequence);
    const std::vector<int>& table_before = before.sequences.at(sequence).block_table;
    const int num_blocks = std::max(owner.num_blocks, blocks_for(owner.length() + num_tokens));
    const auto tail = static_cast<std::size_t>(owner.length() / block_size_);
    // Only the tail block has tokens and gets more.
    const bool copies =
        num_tokens > 0 && owner.length() % block_size_ != 0 && num_owners(before, table_before[tail]) > 1;
    const int missing = num_blocks - owner.num_blocks + (copies ? 1 : 0);
    const bool expected = missing <= static_cast<int>(before.free_blocks.size());
    const bool reserved = manager_.reserve(sequence, num_tokens);
    expect(reserved == expected, "reserve(%d, %d) returned %s", sequence, num_tokens, reserved ? "true" : "false");
    if (!reserved) {
      expect_unchanged(before, "a refused reserve");
      counts_.add("refused");
      return false;
    }
    owner.num_blocks = num_blocks;
    std::vector<int> table = manager_.block_table(sequence);
    table.resize(table_before.size());
    if (copies) {
      expect(table[tail] != table_before[tail],
             "sequence %d still has block %d, which it shares and is about to write to", sequence, table[tail]);
      on_copy(table_before[tail], table[tail]);
      table[tail] = table_before[tail];
    }
    expect(table == table_before, "blocks that a sequence had are no longer where they were");
    expect(manager_.free_blocks().size() + static_cast<std::size_t>(missing) == before.free_blocks.size(),
           "%d blocks were needed, and %zu were taken", missing,
           before.free_blocks.size() - manager_.free_blocks().size());
#if STAGE_NUMBER >= 5
    expect_none(check_writable(manager_, sequence, num_tokens));
#endif
    expect_others_unchanged(sequence, before);
    counts_.add("reserved");
    return true;
  }

  // Writes into reserved slots.
  void write(int sequence, int num_tokens) {
    std::vector<std::uint64_t>& prefixes = sequences_.at(sequence).prefixes;
    const auto length = static_cast<int>(prefixes.size());
    for (int i = 0; i < num_tokens; ++i) {
      // There are few different tokens, so that sequences often begin with the same text.
      const std::uint64_t previous = prefixes.empty() ? 0 : prefixes.back();
      prefixes.push_back(common::Random(previous * 4 + static_cast<std::uint64_t>(below(3))).next());
    }
    prepare();
    const std::vector<int> slots = manager_.slots(sequence, length, num_tokens);
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      cache_.write(layer, slots, content(prefixes, length, layer, 0), content(prefixes, length, layer, 1));
    }
    manager_.commit(sequence, num_tokens);
  }

  void poison(const std::vector<int>& slots) {
    const common::Matrix rows = common::Matrix::Constant(static_cast<Eigen::Index>(slots.size()),
                                                         Eigen::Index{shape_.num_kv_heads} * shape_.head_dim,
                                                         std::numeric_limits<float>::quiet_NaN());
    for (int layer = 0; layer < shape_.num_layers && !slots.empty(); ++layer) {
      cache_.write(layer, slots, rows, rows);
    }
  }

  template <typename Action>
  void expect_refused(const char* what, const Action& action) {
    expect(is_refused_as_a_bug(action), "%s is not noticed", what);
    counts_.add("misuses noticed");
  }

  void expect_others_unchanged(int sequence, const Snapshot& before) {
    for (const auto& [id, owner] : sequences_) {
      expect(id == sequence || manager_.block_table(id) == before.sequences.at(id).block_table,
             "an operation on sequence %d changed the block table of %d", sequence, id);
    }
  }

  // Attention of the sequence's newest tokens over all of it is compared with float64.
  void attend(int sequence) {
    const std::vector<std::uint64_t>& prefixes = sequences_.at(sequence).prefixes;
    const auto length = static_cast<int>(prefixes.size());
    if (length == 0) {
      return;
    }
    prepare();
    const int layer = below(shape_.num_layers);
    const common::Matrix q =
        random_matrix(1 + below(length), Eigen::Index{shape_.num_heads} * shape_.head_dim, random_);
    const std::vector<double> expected =
        tests::reference_attention(q, content(prefixes, 0, layer, 0), content(prefixes, 0, layer, 1), shape_.num_heads,
                                   shape_.num_kv_heads, shape_.head_dim);
    const common::Matrix output = tests::attend(cache_, manager_, sequence, layer, q, length);
    const std::string difference = tests::compare({output.data(), static_cast<std::size_t>(output.size())}, expected,
                                                  rounding_tolerance(shape_, length));
    expect(difference.empty(), "%s", difference.c_str());
    counts_.add("attended");
  }

  static int num_owners(const Snapshot& books, int block) {
    return books.reference_counts.empty() ? 1 : books.reference_counts[static_cast<std::size_t>(block)];
  }

  common::Random random_;
  FuzzCounts& counts_;
  int num_blocks_;
  int block_size_;
  AttentionShape shape_;
  stage::KvCacheManager manager_;
  stage::KvCache cache_;
  std::map<int, Sequence> sequences_;

 private:
  // K (which == 0) or V of the positions from `first` on, all kv heads: a function of the tokens up to each position.
  common::Matrix content(const std::vector<std::uint64_t>& prefixes, int first, int layer, int which) const {
    common::Matrix rows(static_cast<Eigen::Index>(prefixes.size()) - first,
                        Eigen::Index{shape_.num_kv_heads} * shape_.head_dim);
    for (Eigen::Index row = 0; row < rows.rows(); ++row) {
      common::Random values(prefixes[static_cast<std::size_t>(first + row)] +
                            static_cast<std::uint64_t>(2 * layer + which));
      for (Eigen::Index column = 0; column < rows.cols(); ++column) {
        rows(row, column) = static_cast<float>(2.0 * values.uniform() - 1.0);
      }
    }
    return rows;
  }

  void check_books() {
    expect_none(check_ledger(manager_, num_blocks_, block_size_));
    expect(manager_.sequences().size() == sequences_.size(), "%zu sequences are live, expected %zu",
           manager_.sequences().size(), sequences_.size());
    for (const auto& [id, owner] : sequences_) {
      expect(manager_.length(id) == owner.length(), "sequence %d has %d tokens, expected %d", id, manager_.length(id),
             owner.length());
      const auto size = static_cast<int>(manager_.block_table(id).size());
      expect(size == owner.num_blocks, "sequence %d has %d blocks, expected %d", id, size, owner.num_blocks);
    }
  }

  // Every sequence finds its own K and V, to the bit, in the slots that slots() returns.
  void read_back() {
    prepare();
    for (const auto& [id, owner] : sequences_) {
      const std::vector<int> slots = manager_.slots(id, 0, owner.length());
      for (int layer = 0; layer < shape_.num_layers; ++layer) {
        const common::Matrix k = content(owner.prefixes, 0, layer, 0);
        const common::Matrix v = content(owner.prefixes, 0, layer, 1);
        for (int head = 0; head < shape_.num_heads; ++head) {
          const int column = head / (shape_.num_heads / shape_.num_kv_heads) * shape_.head_dim;
          const int stored = stored_head(shape_, head);
          for (std::size_t i = 0; i < slots.size(); ++i) {
            const auto row = static_cast<Eigen::Index>(i);
            // NaN differs from everything, so a poisoned row cannot pass as equal.
            if (cache_.keys(layer, stored, slots[i], 1) != k.block(row, column, 1, shape_.head_dim) ||
                cache_.values(layer, stored, slots[i], 1) != v.block(row, column, 1, shape_.head_dim)) {
              throw FuzzFailure(common::format(
                  "sequence %d finds other K or V than its own at position %zu (slot %d), layer %d, head %d", id, i,
                  slots[i], layer, head));
            }
          }
        }
      }
      counts_.add("read back");
    }
  }
};

}  // namespace tests
