// Random block tables with shared beginnings: the groups that are found against the best of all ways to make groups.
//
//   fuzz_shared_reading [--steps N] [--seed S]      or with FUZZ_STEPS and FUZZ_SEED in the environment
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "common/math/sampling.h"
#include "common/paged/shared_reading.h"
#include "tests/fuzz/driver.h"
#include "tests/support/sanitizers.h"
#include "tests/support/step_tables.h"

namespace {

using common::Random;
using common::ReadingCosts;
using common::SharedPrefix;
using tests::FuzzCounts;
using tests::FuzzFailure;
using tests::Sequence;

constexpr int kMaxSequences = 6;
constexpr long long kDefaultSteps = tests::kSanitized ? 1'000 : 10'000;

struct Case {
  int block_size = 0;
  std::vector<Sequence> sequences;
  ReadingCosts costs;
};

// Tables are made as sequences make them: by forks, and by going on from a block of another sequence.
Case random_case(std::uint64_t seed) {
  Random random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random.below(static_cast<std::uint64_t>(bound))); };
  Case result;
  result.block_size = 1 + below(4);
  const int longest = below(8) == 0 ? 150 : 6;  // longer than the pieces that are compared at once
  int next_block = 0;
  const int num_sequences = below(kMaxSequences + 1);
  for (int i = 0; i < num_sequences; ++i) {
    Sequence sequence;
    if (i > 0 && below(4) != 0) {
      const std::vector<int>& other = result.sequences[static_cast<std::size_t>(below(i))].table;
      sequence.table.assign(other.begin(), other.begin() + below(static_cast<int>(other.size()) + 1));
    }
    for (int own = (sequence.table.empty() ? 1 : 0) + below(longest); own > 0; --own) {
      sequence.table.push_back(next_block++);
    }
    if (below(8) == 0) {  // a block that is shared without the blocks before it
      sequence.table.back() = below(next_block + 1);
    }
    const auto num_blocks = static_cast<int>(sequence.table.size());
    sequence.context_length = below(10) == 0 ? 0 : num_blocks * result.block_size - below(result.block_size);
    sequence.num_queries = below(3) != 0 ? 1 : 1 + below(sequence.context_length + 1);
    sequence.num_queries = std::min(sequence.num_queries, sequence.context_length);
    result.sequences.push_back(sequence);
  }
  result.costs = {
      .block = 1 + below(10), .query = below(3) == 0 ? 0 : below(6), .group = below(3) == 0 ? below(20) : 0};
  return result;
}

class Oracle {
 public:
  explicit Oracle(const Case& step) : step_(step), group_of_(step.sequences.size(), -1) {}

  // The first blocks that all members share, full before the step: block by block.
  int shared_blocks(const std::vector<int>& members) const {
    for (int index = 0;; ++index) {
      for (const int member : members) {
        const Sequence& sequence = step_.sequences[static_cast<std::size_t>(member)];
        const int num_old = sequence.context_length - sequence.num_queries;
        if ((index + 1) * step_.block_size > num_old ||
            sequence.table[static_cast<std::size_t>(index)] !=
                step_.sequences[static_cast<std::size_t>(members.front())].table[static_cast<std::size_t>(index)]) {
          return index;
        }
      }
    }
  }

  std::int64_t saved(const std::vector<int>& members, int num_blocks) const {
    std::int64_t sum = (static_cast<std::int64_t>(members.size()) - 1) * num_blocks * step_.costs.block;
    for (const int member : members) {
      sum -= step_.sequences[static_cast<std::size_t>(member)].num_queries * step_.costs.query;
    }
    return sum - step_.costs.group;
  }

  // Of all ways to put the sequences from `next` on into the groups so far, new ones, or none.
  std::int64_t most(std::size_t next = 0, int num_groups = 0) {
    if (next == group_of_.size()) {
      std::int64_t sum = 0;
      for (int group = 0; group < num_groups; ++group) {
        std::vector<int> members;
        for (std::size_t i = 0; i < group_of_.size(); ++i) {
          if (group_of_[i] == group) {
            members.push_back(static_cast<int>(i));
          }
        }
        sum += saved(members, shared_blocks(members));
      }
      return sum;
    }
    std::int64_t result = 0;
    const Sequence& sequence = step_.sequences[next];
    for (int group = -1; group <= num_groups; ++group) {
      if (group >= 0 && sequence.num_queries == 0) {
        break;
      }
      group_of_[next] = group;
      result = std::max(result, most(next + 1, std::max(num_groups, group + 1)));
    }
    return result;
  }

 private:
  const Case& step_;
  std::vector<int> group_of_;  // [num_sequences]; -1: none
};

void expect(bool condition, const char* what) {
  if (!condition) {
    throw FuzzFailure(what);
  }
}

void run(std::uint64_t seed, FuzzCounts& counts) {
  const Case step = random_case(seed);
  const tests::Step arrays(step.sequences, step.block_size);
  const std::vector<SharedPrefix> groups = common::find_shared_prefixes(arrays.tables(), step.costs);
  Oracle oracle(step);
  std::set<int> seen;
  std::int64_t saved = 0;
  int previous = -1;
  for (const SharedPrefix& group : groups) {
    expect(group.sequences.size() > 1, "a group has one sequence");
    expect(std::is_sorted(group.sequences.begin(), group.sequences.end()), "a group's sequences are not in order");
    expect(group.sequences.front() > previous, "the groups are not in order");
    previous = group.sequences.front();
    for (const int sequence : group.sequences) {
      expect(seen.insert(sequence).second, "a sequence is in a group twice");
      expect(step.sequences[static_cast<std::size_t>(sequence)].num_queries > 0, "a sequence has no query");
    }
    expect(group.num_blocks == oracle.shared_blocks(group.sequences), "a group shares other blocks");
    const std::int64_t of_group = oracle.saved(group.sequences, group.num_blocks);
    expect(of_group > 0, "a group saves nothing");
    saved += of_group;
    counts.add("groups");
    counts.add("groups of three or more", group.sequences.size() > 2 ? 1 : 0);
    counts.add("groups beyond a piece", group.num_blocks > 64 ? 1 : 0);
  }
  expect(saved == oracle.most(), "other groups save more");
  counts.add("steps without a group", groups.empty() ? 1 : 0);
  counts.add("steps with two groups", groups.size() > 1 ? 1 : 0);
}

}  // namespace

int main(int argc, char** argv) {
  return tests::run_fuzz({argv + 1, argv + argc}, {.unit = "steps", .default_units = kDefaultSteps, .rarest = 100},
                         FuzzCounts({"groups", "groups of three or more", "groups beyond a piece",
                                     "steps without a group", "steps with two groups"}),
                         run);
}
