// The scheduler by itself: groups that only count tokens, a manager, no model. For every stage that has one.
#include "tests/support/catch.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

#include STAGE_HEADER(batch.h)
#include STAGE_HEADER(kv_cache.h)
#include STAGE_HEADER(scheduler.h)
#include STAGE_HEADER(step.h)
// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(demo/static_scheduler.h)
// clang-format on

using stage::KvCacheManager;
using stage::Preemption;
using stage::ScheduledTokens;
using stage::Scheduler;
using stage::SchedulerOptions;
using tests::check_ledger;

namespace {

const std::string kNoProblem;

// A prompt of the given length, then one token a step for each of its sequences: their first tokens are the same, later
// ones are not. No two prompts begin alike.
class CountedGroup : public stage::ParallelSampling {
 public:
  CountedGroup(KvCacheManager& manager, stage::SequenceIds& ids, int id, int prompt, int output, int num_sequences)
      : ParallelSampling(manager, ids, id, request(id, prompt, output), num_sequences) {}

  // Does what a forward pass would do.
  void compute(const ScheduledTokens& tokens) {
    for (std::size_t i = 0; i < tokens.sequences.size(); ++i) {
      const stage::SequenceId sequence = tokens.sequences[i];
      manager_.commit(sequence, this->tokens(sequence, manager_.length(sequence), tokens.num_tokens[i]));
    }
    if (tokens.with_logits) {
      std::vector<common::Matrix> logits;
      for (std::size_t i = 0; i < live().size(); ++i) {
        logits.emplace_back(common::Matrix::Zero(1, 16));
        logits.back()(0, static_cast<Eigen::Index>(i)) = 1.0F;
      }
      extend({{}, std::move(logits)}, 0.0);
    }
  }

 private:
  static common::Request request(int id, int prompt, int output) {
    common::Request result;
    result.prompt.assign(static_cast<std::size_t>(prompt), id);
    result.max_new_tokens = output;
    return result;
  }
};

SchedulerOptions make_options(int budget, int max_sequences = 64, Preemption preemption = Preemption::kRecompute) {
  SchedulerOptions options;
  options.token_budget = budget;
  options.max_sequences = max_sequences;
  options.preemption = preemption;
  options.headroom = 0;
  return options;
}

enum class Batching { kContinuous, kStatic, kStaticReservingAhead };

struct Bench {
  Bench(int pool_blocks, int block_size, const SchedulerOptions& scheduler_options, int num_host_blocks = 0,
        Batching batching = Batching::kContinuous)
      : num_blocks(pool_blocks),
        options(scheduler_options),
        manager(pool_blocks, block_size, stage::hash_block, num_host_blocks) {
    if (batching == Batching::kContinuous) {
      scheduler = std::make_unique<Scheduler>(manager, options);
    } else {
      const bool reserve_ahead = batching == Batching::kStaticReservingAhead;
      scheduler = std::make_unique<stage::StaticScheduler>(manager, options, true, reserve_ahead);
    }
  }

  CountedGroup& add(int prompt, int output, int num_sequences = 1) {
    groups.push_back(
        std::make_shared<CountedGroup>(manager, ids, static_cast<int>(groups.size()), prompt, output, num_sequences));
    scheduler->add(groups.back());
    return *groups.back();
  }

  // If it fails, the message says which groups have changed their list: one that preempts itself is among them.
  stage::ScheduledStep schedule() {
    const auto lists = [&] { return "running '" + running() + "' and waiting '" + waiting() + "'"; };
    const std::string before = lists();
    try {
      return scheduler->schedule();
    } catch (const common::CheckError& error) {
      throw common::CheckError(error.what() + (" in schedule(), with " + before + " before, and now ") + lists());
    }
  }

  // "A4 B1": the groups and how many tokens each got. Finished groups end.
  std::string step() {
    const stage::ScheduledStep step = schedule();
    copies = tests::take_copies(manager);
    is_memory_short = step.is_memory_short;
    admitted.clear();
    for (const stage::SequenceGroup* group : step.admitted) {
      admitted += name(*group);
    }
    preempted.clear();
    for (const auto& [group, swapped] : step.preempted) {
      preempted += name(*group) + (swapped ? "s" : "r");
    }
    std::string text;
    int num_tokens = 0;
    for (const stage::ScheduledGroup& scheduled : step.groups) {
      const std::vector<int>& counts = scheduled.tokens.num_tokens;
      const int count = std::accumulate(counts.begin(), counts.end(), 0);
      num_tokens += count;
      text += (text.empty() ? "" : " ") + name(*scheduled.group) + std::to_string(count);
    }
    CHECK(num_tokens == step.num_tokens);
    CHECK(num_tokens <= options.token_budget);
    REQUIRE(wrong_flags(step) == kNoProblem);
    for (const stage::ScheduledGroup& scheduled : step.groups) {
      auto& group = static_cast<CountedGroup&>(*scheduled.group);
      group.compute(scheduled.tokens);
      if (group.finished()) {
        scheduler->remove(group);
      }
    }
    CHECK(check_ledger(manager, num_blocks, manager.block_size()) == kNoProblem);
    return text;
  }

  // "B got 1 of 6 tokens, and with_logits is true": the groups of a step, not yet computed, whose flag does not say
  // whether they got everything that the cache lacks.
  static std::string wrong_flags(const stage::ScheduledStep& step) {
    std::string text;
    for (const stage::ScheduledGroup& scheduled : step.groups) {
      const ScheduledTokens missing = scheduled.group->tokens_to_compute();
      const ScheduledTokens& got = scheduled.tokens;
      if (got.with_logits != (missing.with_logits && got.num_tokens == missing.num_tokens)) {
        text += name(*scheduled.group) +
                common::format(" got %d of %d tokens, and with_logits is %s; ",
                               std::accumulate(got.num_tokens.begin(), got.num_tokens.end(), 0),
                               std::accumulate(missing.num_tokens.begin(), missing.num_tokens.end(), 0),
                               got.with_logits ? "true" : "false");
      }
    }
    return text;
  }

  // "015 23 4": the block tables of the running groups' sequences.
  std::string tables() const {
    std::string text;
    for (const auto& group : scheduler->running()) {
      for (const stage::SequenceId sequence : group->sequences()) {
        text += text.empty() ? "" : " ";
        for (const int block : manager.block_table(sequence)) {
          text += std::to_string(block);
        }
      }
    }
    return text;
  }

  // "A running, B waiting".
  std::string states() const {
    const char* const names[] = {"waiting", "running", "swapped", "finished"};
    std::string text;
    for (const auto& group : groups) {
      text += (text.empty() ? "" : ", ") + name(*group) + " " + names[static_cast<int>(group->output().state)];
    }
    return text;
  }

  static std::string name(const stage::SequenceGroup& group) { return {static_cast<char>('A' + group.id())}; }
  std::string running() const {
    std::string text;
    for (const auto& group : scheduler->running()) {
      text += name(*group);
    }
    return text;
  }
  std::string waiting() const {
    std::string text;
    for (const auto& group : scheduler->waiting()) {
      text += name(*group);
    }
    return text;
  }

  int num_blocks;
  SchedulerOptions options;
  KvCacheManager manager;
  stage::SequenceIds ids;
  std::unique_ptr<Scheduler> scheduler;
  std::vector<std::shared_ptr<CountedGroup>> groups;
  std::vector<stage::BlockCopy> copies;  // planned by the last step
  std::string admitted;                  // by the last step
  std::string preempted;                 // by the last step: "Cr" to be computed again, "Cs" swapped
  bool is_memory_short = false;          // in the last step
};

}  // namespace

TEST_CASE("batch: the arrays of two sequences, with no more of a table than the context needs") {
  // Part 8 of the lesson, "By hand": X computes its eleventh token in blocks 7, 1 and 3, Y the last two of six in 2
  // and 5.
  KvCacheManager manager(8, 4);
  constexpr int kX = 0;
  constexpr int kY = 1;
  constexpr int kOther = 2;
  for (int block = 0; block < 8; ++block) {
    REQUIRE(manager.allocate(kOther + block, 4));  // takes the block of this number
  }
  const auto grow = [&](int sequence, int num_slots, std::initializer_list<int> blocks) {
    for (auto block = std::rbegin(blocks); block != std::rend(blocks); ++block) {
      manager.free(kOther + *block);
    }
    REQUIRE(manager.allocate(sequence, num_slots));
    REQUIRE(manager.block_table(sequence) == std::vector<int>(blocks));
  };
  grow(kX, 16, {7, 1, 3, 0});  // more than it needs: the fourth block holds nothing to read
  grow(kY, 6, {2, 5});
  manager.commit(kX, 10);
  manager.commit(kY, 4);

  stage::RaggedBatch batch;
  batch.add(manager, kX, std::vector<common::Token>{100}, true);
  batch.add(manager, kY, std::vector<common::Token>{104, 105}, true);
  CHECK(batch.tokens == std::vector<common::Token>{100, 104, 105});
  CHECK(batch.positions == std::vector<int>{10, 4, 5});
  CHECK(batch.slot_mapping == std::vector<int>{14, 20, 21});
  CHECK(batch.query_starts == std::vector<int>{0, 1, 3});
  CHECK(batch.context_lengths == std::vector<int>{11, 6});
  CHECK(batch.block_tables == std::vector<int>{7, 1, 3, 2, 5});
  CHECK(batch.table_starts == std::vector<int>{0, 3, 5});
  CHECK(batch.logits_rows == std::vector<int>{0, 2});
  CHECK(batch.sequences == std::vector<stage::SequenceId>{kX, kY});
}

TEST_CASE("batch: attention of two sequences is that of each alone, over its own blocks") {
  constexpr int kBlockSize = 4;
  constexpr int kX = 0;
  constexpr int kY = 1;
  KvCacheManager manager(8, kBlockSize);
  stage::KvCache cache({2, 8, kBlockSize, 4, 2, 3});  // 4 query heads and 2 of K and V, of 3 dimensions
  const auto fill = [&](int sequence, int length) {
    REQUIRE(manager.allocate(sequence, length));
    const common::Matrix keys = common::Matrix::Random(length, 6);
    const common::Matrix values = common::Matrix::Random(length, 6);
    cache.write(1, manager.slots(sequence, 0, length), keys, values);
  };
  fill(kX, 11);
  fill(kY, 6);
  manager.commit(kX, 8);
  manager.commit(kY, 4);
  stage::RaggedBatch batch;
  batch.add(manager, kX, std::vector<common::Token>{100, 101, 102}, true);
  batch.add(manager, kY, std::vector<common::Token>{104, 105}, true);
  const common::Matrix q = common::Matrix::Random(5, 12);
  const common::Matrix expected[] = {stage::attention(cache, 1, q.topRows(3), manager.block_table(kX), 11),
                                     stage::attention(cache, 1, q.bottomRows(2), manager.block_table(kY), 6)};
  const common::Matrix output = stage::attention(cache, 1, q, batch);
  REQUIRE(output.rows() == 5);
  std::string wrong;
  for (int row = 0; row < 5; ++row) {
    const int sequence = row < 3 ? 0 : 1;
    if (output.row(row) != expected[sequence].row(row - 3 * sequence)) {
      wrong += common::format("row %d, which is row %d of sequence %d; ", row, row - 3 * sequence, sequence);
    }
  }
  CHECK(wrong == kNoProblem);
}

TEST_CASE("a worked schedule of three requests: budget 6, blocks of 4, 6 blocks") {
  // The README's example. A: 5 tokens and 4 more, B: 6 and 3, C: 4 and 2.
  Bench bench(6, 4, make_options(6));
  bench.add(5, 4);
  bench.add(6, 3);
  bench.add(4, 2);
  CHECK(bench.step() == "A5 B1");     // what A leaves of the budget begins B's prompt
  CHECK(bench.step() == "A1 B5");     // B's prompt is complete
  CHECK(bench.step() == "A1 B1 C4");  // both decode; C's prompt fits into the rest
  CHECK(bench.running() == "ABC");
  CHECK(bench.step() == "A1 B1 C1");  // A and C have all their tokens
  CHECK(bench.running().empty());
  CHECK(bench.manager.usage().reserved == 0);
}

TEST_CASE("a step computes at most its budget, and all of it if there is enough work (stage 8, invariant 1)") {
  for (const int budget : {1, 2, 3, 7, 256}) {
    Bench bench(64, 4, make_options(budget));
    for (int i = 0; i < 5; ++i) {
      bench.add(10, 5);
    }
    int left = 5 * (10 + 4);  // the last token of a text is never computed
    while (left > 0) {
      CAPTURE(budget, left);
      const std::string shares = bench.step();
      int total = 0;
      for (std::size_t at = 0; at < shares.size(); ++at) {
        total += shares[at] >= 'A' ? std::stoi(shares.substr(at + 1)) : 0;
      }
      REQUIRE(total > 0);
      left -= total;
      // Less only if all requests run and each has had its one token.
      CHECK((total == budget || bench.waiting().empty()));
    }
    CHECK(left == 0);
    CHECK(bench.scheduler->running().empty());
  }
}

TEST_CASE("the limit on sequences: a request more waits until one has ended (stage 8, invariant 1)") {
  Bench bench(64, 4, make_options(100, 2));
  bench.add(4, 2);
  bench.add(4, 4);
  bench.add(4, 2);
  bench.add(4, 2);
  CHECK(bench.step() == "A4 B4");
  CHECK(bench.waiting() == "CD");
  CHECK_FALSE(bench.is_memory_short);
  CHECK(bench.step() == "A1 B1");  // A has all its tokens
  CHECK(bench.step() == "B1 C4");
  CHECK(bench.waiting() == "D");
}

TEST_CASE("the limit on sequences counts all that a group may come to have (stage 8, invariant 1)") {
  Bench bench(64, 4, make_options(100, 5));
  bench.add(4, 9, 3);
  bench.add(4, 9, 3);
  bench.add(4, 9, 1);
  CHECK(bench.step() == "A4");
  CHECK(bench.waiting() == "BC");  // C would fit, and does not overtake B (invariant 2)
  CHECK(bench.step() == "A3");
  for (int i = 0; i < 7; ++i) {
    bench.step();
  }
  CHECK(bench.step() == "B4 C4");
}

TEST_CASE("what is admitted runs: it is in the step's list of admissions, once, and its state says so") {
  Bench bench(64, 4, make_options(6));
  bench.add(5, 4);
  bench.add(6, 3);
  bench.add(4, 2);
  CHECK(bench.step() == "A5 B1");
  CHECK(bench.admitted == "AB");
  CHECK(bench.states() == "A running, B running, C waiting");
  CHECK(bench.step() == "A1 B5");
  CHECK(bench.admitted.empty());
  CHECK(bench.step() == "A1 B1 C4");
  CHECK(bench.admitted == "C");
}

TEST_CASE("admission takes blocks for the tokens that the step may still compute, and not for the whole prompt") {
  Bench bench(64, 4, make_options(6));
  bench.add(4, 2);
  bench.add(20, 2);
  CHECK(bench.step() == "A4 B2");
  CHECK(bench.tables() == "0 1");
}

TEST_CASE("admission uses the prefix cache only if the scheduler is told to") {
  for (const bool use_prefix_cache : {true, false}) {
    Bench bench(64, 4, make_options(64));
    bench.scheduler = std::make_unique<Scheduler>(bench.manager, bench.options, use_prefix_cache);
    bench.add(8, 1);
    CHECK(bench.step() == "A8");
    const auto again = std::make_shared<CountedGroup>(bench.manager, bench.ids, 0, 8, 1, 1);  // the same prompt
    bench.scheduler->add(again);
    CAPTURE(use_prefix_cache);
    CHECK(bench.step() == (use_prefix_cache ? "A4" : "A8"));
  }
}

TEST_CASE("a request that gets no token is not in the step") {
  Bench bench(64, 4, make_options(6));
  bench.add(4, 9);
  bench.add(2, 9);
  CHECK(bench.step() == "A4 B2");
  CHECK(bench.step() == "A1 B1");
  // As if A had been preempted and resumed: it lacks all its six tokens, and they are the whole budget.
  bench.groups[0]->free_blocks();
  bench.manager.reset_prefix_cache();
  REQUIRE(bench.groups[0]->allocate({}));
  CHECK(bench.step() == "A6");  // and no "B0"
}

TEST_CASE("no request is admitted before an earlier one, even where only the later one fits (stage 8, invariant 2)") {
  Bench bench(8, 4, make_options(64));
  bench.add(17, 4);  // 5 blocks of 8
  bench.add(16, 4);  // 4 blocks: not now
  bench.add(1, 2);   // 1 block: it would fit
  CHECK(bench.step() == "A17");
  CHECK(bench.waiting() == "BC");
  CHECK(bench.step() == "A1");
  CHECK(bench.step() == "A1");
  CHECK(bench.step() == "A1");
  CHECK(bench.step() == "B16 C1");
}

TEST_CASE("the latest arrival is preempted for an earlier one, and resumed first (stage 8, invariant 3)") {
  // The table of the lesson: `stage8 steps`. A: 6 tokens and 8 more, B: 6 and 8, C: 4 and 8.
  Bench bench(6, 4, make_options(8));
  bench.add(6, 8);
  bench.add(6, 8);
  bench.add(4, 8);
  CHECK(bench.step() == "A6 B2");
  CHECK(bench.step() == "A1 B4 C3");
  CHECK(bench.step() == "A1 B1 C1");
  CHECK(bench.tables() == "01 23 4");
  CHECK(bench.step() == "A1 B1");  // A opens the last block. C needs one and is the latest: it waits with what it has
  CHECK(bench.preempted.empty());
  CHECK(bench.tables() == "015 23 4");
  CHECK(bench.step() == "A1 B1");
  CHECK(bench.preempted == "Cr");  // for B, which gets its block
  CHECK(bench.tables() == "015 234");
  CHECK(bench.is_memory_short);
  CHECK(bench.step() == "A1 B1");
  CHECK(bench.step() == "A1 B1");
  CHECK(bench.step() == "A1");
  CHECK(bench.preempted == "Br");
  CHECK(bench.waiting() == "BC");
  CHECK(bench.step() == "B4 C4");  // 8 of B's 12 tokens are found in the prefix cache
  CHECK(bench.tables() == "234 5");
  CHECK(bench.step() == "B1 C1");
  for (int i = 0; i < 6; ++i) {
    CAPTURE(i);
    CHECK(bench.step() == "C1");
  }
  CHECK(bench.scheduler->running().empty());
}

TEST_CASE("what has been preempted leaves its place to others, and takes one again when it is resumed") {
  Bench bench(4, 4, make_options(64, 2));
  bench.add(8, 5);
  bench.add(8, 2);
  bench.add(1, 2);
  CHECK(bench.step() == "A8 B8");
  CHECK(bench.step() == "A1");
  CHECK(bench.preempted == "Br");
  CHECK(bench.waiting() == "BC");
  CHECK(bench.step() == "A1");  // B, first in the queue, finds one block of the three that it needs
  CHECK(bench.step() == "A1");
  CHECK(bench.step() == "A1");
  CHECK(bench.running().empty());
  CHECK(bench.step() == "B5 C1");  // B's first block is in the prefix cache; A has taken the second
}

TEST_CASE("what has been preempted is running no more: its state, and the places of all its sequences") {
  Bench bench(4, 4, make_options(6, 4));
  bench.add(4, 6);
  bench.add(12, 2, 3);  // may come to have three sequences: with A, the four that there are places for
  CHECK(bench.step() == "A4 B2");
  CHECK(bench.step() == "A1 B5");
  CHECK(bench.step() == "A1 B1");
  CHECK(bench.step() == "A1");
  CHECK(bench.step() == "A1");
  CHECK(bench.states() == "A running, B running");
  CHECK(bench.step() == "A1");  // A's ninth token takes a block of B's, and is its last
  CHECK(bench.preempted == "Br");
  CHECK(bench.states().ends_with("B waiting"));
  CHECK(bench.step().starts_with("B"));  // there are four places again: B finds its three
  CHECK(bench.states().ends_with("B running"));
}

TEST_CASE("memory is short where a request pauses for want of a block and others wait, though none is preempted") {
  Bench bench(4, 4, make_options(6, 1));
  bench.add(13, 2);
  bench.add(1, 2);  // waits for a place
  CHECK(bench.step() == "A6");
  CHECK_FALSE(bench.is_memory_short);
  constexpr int kOther = 100;
  REQUIRE(bench.manager.allocate(kOther, 8));
  CHECK(bench.step() == "A2");
  CHECK(bench.preempted.empty());
  CHECK(bench.is_memory_short);
  bench.manager.free(kOther);
  CHECK(bench.step() == "A5");
  CHECK_FALSE(bench.is_memory_short);
}

TEST_CASE("a group is preempted as a whole, and goes on as a whole or not at all (stage 8, invariant 3)") {
  for (const int num_blocks : {6, 7}) {
    Bench bench(num_blocks, 4, make_options(64));
    bench.add(8, 8);
    bench.add(7, 3, 2);  // two sequences
    bench.add(24, 2);
    CAPTURE(num_blocks);
    CHECK(bench.step() == "A8 B7");
    CHECK(bench.step() == "A1 B2");  // A takes a block, and B one to copy its shared block to: six are in use
    CHECK(bench.waiting() == "C");
    CHECK(bench.step() == "A1");  // B needs two more and is the latest: it waits with what it has
    CHECK(bench.preempted.empty());
    CHECK(bench.running() == "AB");
    CHECK(static_cast<int>(bench.manager.free_blocks().size()) == num_blocks - 6);
    CHECK(bench.step() == "A1");
    CHECK(bench.step() == "A1");
    CHECK(bench.step() == "A1");  // A's third block is full
    CHECK(bench.preempted == (num_blocks == 6 ? "Br" : ""));
    CHECK(bench.running() == (num_blocks == 6 ? "A" : "AB"));
    CHECK(bench.waiting() == (num_blocks == 6 ? "BC" : "C"));
  }
}

TEST_CASE(
    "a preempted group is computed again in three phases: what all have in common, the rest of each, a token each") {
  Bench bench(8, 4, make_options(8));
  bench.add(6, 8);
  bench.add(6, 8, 2);
  bench.add(4, 8);
  CHECK(bench.step() == "A6 B2");
  CHECK(bench.step() == "A1 B4 C3");
  CHECK(bench.step() == "A1 B2 C1");  // each of B's samples writes its second token into a block of its own
  CHECK(bench.tables() == "01 25 23 4");
  CHECK(bench.step() == "A1 B2 C1");
  CHECK(bench.step() == "A1 B2");
  CHECK(bench.preempted == "Cr");
  CHECK(bench.tables() == "016 257 234");
  CHECK(bench.step() == "A1 B2");
  CHECK(bench.step() == "A1 B2");
  CHECK(bench.step() == "A1");
  CHECK(bench.preempted == "Br");
  CHECK(bench.step() == "B3 C5");  // 7 tokens in common; 4 are found
  CHECK(bench.tables() == "24 75");
  // The second sample is forked: four tokens each, without the last. The budget leaves nothing for C.
  CHECK(bench.step() == "B8");
  CHECK(bench.tables() == "236 241 75");
  CHECK(bench.step() == "B2 C1");
}

TEST_CASE(
    "an earlier group's chunk preempts a later one, before it makes do with fewer tokens (stage 8, invariant 2)") {
  Bench bench(9, 4, make_options(16));
  bench.add(6, 8, 2);
  bench.add(4, 12);
  for (int i = 0; i < 6; ++i) {
    bench.step();
  }
  // As if A had been preempted and resumed: it has blocks for the 7 tokens that its two texts have in common.
  bench.groups[0]->free_blocks();
  bench.manager.reset_prefix_cache();
  REQUIRE(bench.groups[0]->allocate({}));
  constexpr int kOther = 100;
  REQUIRE(bench.manager.allocate(kOther, 12));
  CHECK(bench.step() == "A7 B1");
  CHECK(bench.manager.free_blocks().size() == 1);
  CHECK(bench.step() == "A8");  // two times four tokens; one alone would fit without preempting
  CHECK(bench.preempted == "Br");
}

TEST_CASE("a group of three needs a budget for three: with less it waits, and so do all that came later") {
  Bench bench(16, 4, make_options(3));
  bench.add(1, 3);
  bench.add(2, 3, 3);
  bench.add(1, 2);
  CHECK(bench.step() == "A1 B2");
  CHECK(bench.step() == "A1");
  CHECK(bench.step() == "A1");
  CHECK(bench.step() == "B3");
  CHECK(bench.step() == "B3");
  CHECK(bench.step() == "C1");
}

TEST_CASE("a group that the budget is too small for preempts no later one") {
  Bench bench(6, 2, make_options(4));
  bench.add(1, 3, 2);
  bench.add(2, 3, 3);
  bench.add(1, 3);
  CHECK(bench.step() == "A1 B2 C1");
  CHECK(bench.step() == "A2");  // B's three need a block each, and two are free: but the budget has two tokens left
  INFO("B gets no token, because the budget is too small for its three: a block of C's would not help it. Preempted: '"
       << bench.preempted << "'");
  CHECK(bench.preempted.empty());
  CHECK(bench.running() == "ABC");
}

TEST_CASE("a preempted group draws no token before the cache has all of its texts but for their last tokens") {
  for (const int num_tokens : {2, 3, 4}) {
    Bench bench(16, 4, make_options(64));
    CountedGroup& group = bench.add(6, 8, 2);
    for (int i = 0; i < num_tokens; ++i) {
      bench.step();
    }
    // As if it had been preempted and resumed.
    group.free_blocks();
    bench.manager.reset_prefix_cache();
    REQUIRE(group.allocate({}));
    std::string shares;
    while (static_cast<int>(group.live().front().tokens.size()) == num_tokens && shares.size() < 30) {
      shares += bench.step() + " ";
    }
    INFO("two texts of 6 + " << num_tokens << " tokens, the first 7 of which are the same: what is computed up to the "
                             << "step that draws the next tokens");
    CHECK(shares == (num_tokens == 2 ? "A7 A2 " : num_tokens == 3 ? "A7 A2 A2 " : "A7 A4 A2 "));
  }
}

TEST_CASE("the latest arrival is swapped out, with all its sequences (stage 8, invariant 3)") {
  for (const int num_host_blocks : {3, 2}) {
    Bench bench(6, 4, make_options(64, 64, Preemption::kSwap), num_host_blocks);
    bench.add(8, 8);
    bench.add(7, 3, 2);
    INFO("B's two sequences have three blocks, and the host has room for " << num_host_blocks);
    CHECK(bench.step() == "A8 B7");
    CHECK(bench.step() == "A1 B2");
    for (int i = 0; i < 4; ++i) {
      CHECK(bench.step() == "A1");
    }
    // Three blocks. Without room for them on the host, B is computed again after all, and the report says so.
    CHECK(bench.preempted == (num_host_blocks == 3 ? "Bs" : "Br"));
    CHECK(bench.copies.size() == (num_host_blocks == 3 ? 3 : 0));
    CHECK(bench.running() == "A");
    CHECK(bench.waiting() == "B");
    CHECK(bench.groups[1]->output().state ==
          (num_host_blocks == 3 ? stage::RequestState::kSwapped : stage::RequestState::kWaiting));
    if (num_host_blocks == 3) {
      CHECK(bench.step() == "A1");
      CHECK(bench.step() == "A1");  // its last
      INFO("B comes back as it was, with both of its sequences, and each lacks one token");
      CHECK(bench.step() == "B2");
    }
  }
}

TEST_CASE("admission leaves the headroom free, once for each sequence that runs, and none for a group alone") {
  for (const int num_blocks : {3, 4}) {
    SchedulerOptions options = make_options(64);
    options.headroom = 1;
    Bench bench(num_blocks, 4, options);
    bench.add(4, 3, 2);  // one block, and two sequences at most
    bench.add(4, 3);     // one block, which is to leave two free
    CAPTURE(num_blocks);
    CHECK(bench.step() == (num_blocks == 3 ? "A4" : "A4 B4"));
    CHECK(bench.is_memory_short == (num_blocks == 3));
  }
  SchedulerOptions options = make_options(64);
  options.headroom = 3;
  Bench bench(2, 4, options);
  bench.add(7, 2);
  CHECK(bench.step() == "A7");
}

TEST_CASE("a prompt that waits for memory is not hashed before there is a block for it") {
  int num_hashed = 0;
  KvCacheManager manager(6, 4, [&](stage::BlockHash parent, std::span<const common::Token> tokens, std::uint64_t salt) {
    ++num_hashed;
    return stage::hash_block(parent, tokens, salt);
  });
  const std::vector<common::Token> prompt(17, 5);
  REQUIRE(manager.allocate(0, prompt));
  manager.commit(0, prompt);
  REQUIRE(manager.free_blocks().size() == 1);
  num_hashed = 0;
  for (const int num_refusals : {1, 2, 3}) {
    CAPTURE(num_refusals);
    CHECK_FALSE(manager.allocate(1, prompt, 0, {.max_tokens = 4, .spare_blocks = 1}));
    CHECK(num_hashed == 0);
  }
  CHECK(manager.allocate(1, prompt, 0, {.max_tokens = 4, .spare_blocks = 0}));
  CHECK(num_hashed == 4);
  CHECK(manager.length(1) == 16);
}

TEST_CASE("what is swapped back in leaves the headroom free, too") {
  SchedulerOptions options = make_options(64, 64, Preemption::kSwap);
  options.headroom = 2;
  Bench bench(9, 4, options, 9);
  bench.add(4, 16);  // takes a second block for its fifth token, and a third for its ninth
  bench.add(8, 16);
  REQUIRE(bench.step() == "A4 B8");
  // Other sequences leave two blocks: for A's second and for B's third.
  constexpr int kOther = 100;
  for (int i = 0; i < 4; ++i) {
    REQUIRE(bench.manager.allocate(kOther + i, 4));
  }
  for (int i = 0; i < 4; ++i) {
    REQUIRE(bench.step() == "A1 B1");
  }
  REQUIRE(bench.step() == "A1");
  REQUIRE(bench.preempted == "Bs");
  // B needs three blocks, and two are free. Two more must stay free for A.
  for (int i = 0; i < 3; ++i) {
    CAPTURE(i);
    CHECK(bench.waiting() == "B");
    CHECK(bench.is_memory_short);
    bench.manager.free(kOther + i);
    bench.step();
  }
  CHECK(bench.running() == "AB");
  CHECK_FALSE(bench.is_memory_short);
}

TEST_CASE("a prompt gets as many tokens as there are blocks for, one chunk after the other") {
  Bench bench(4, 4, make_options(6));
  bench.add(13, 2);
  CHECK(bench.step() == "A6");
  constexpr int kOther = 100;
  REQUIRE(bench.manager.allocate(kOther, 8));
  CHECK(bench.step() == "A2");            // no block is free, and its second one has room for two
  CHECK(bench.is_memory_short == false);  // no request waits
  bench.manager.free(kOther);
  CHECK(bench.step() == "A5");
}

namespace {

// Random requests in tight pools, to the end. Checks after every step that it computed something, and that all running
// requests arrived before all waiting ones. Returns how many were preempted.
int serve_at_random(bool with_groups, bool with_swapping) {
  common::Random random(5);
  const auto between = [&](int least, int most) {
    return least +
           static_cast<int>(random.below(static_cast<std::uint64_t>(most) - static_cast<std::uint64_t>(least) + 1));
  };
  int num_preempted = 0;
  for (int round = 0; round < 300; ++round) {
    const int block_size = between(1, 5);
    const int host_blocks = between(0, 30);
    const auto preemption = static_cast<Preemption>(random.below(3));
    SchedulerOptions options =
        make_options(between(3, 20), between(3, 9), with_swapping ? preemption : Preemption::kRecompute);
    Bench bench((with_groups ? 3 : 2) * ((23 + block_size - 1) / block_size), block_size, options, host_blocks,
                with_swapping && round % 7 == 0 ? Batching::kStatic : Batching::kContinuous);
    int next = 0;
    for (int step = 0;
         step < 3000 && (next < 12 || !bench.scheduler->running().empty() || !bench.scheduler->waiting().empty());
         ++step) {
      while (next < 12 && (random.below(3) == 0 || (bench.running() + bench.waiting()).empty())) {
        bench.add(between(1, 12), between(6, 12), with_groups ? between(1, 3) : 1);
        next += 1;
      }
      const std::string before = "running '" + bench.running() + "' and waiting '" + bench.waiting() + "'";
      if (bench.step().empty()) {
        FAIL("a step computes nothing, with " + before + " before it, and a budget of "
             << options.token_budget << ". Blocks without an owner now: "
             << bench.num_blocks - bench.manager.usage().reserved / block_size << " of " << bench.num_blocks);
      }
      num_preempted += static_cast<int>(bench.preempted.size()) / 2;
      const std::string all = bench.running() + bench.waiting();
      REQUIRE(std::is_sorted(all.begin(), all.end()));
    }
    CHECK(bench.running().empty());
    CHECK(bench.waiting().empty());
    CHECK(bench.manager.usage().reserved == 0);
    CHECK(bench.manager.num_free_host_blocks() == host_blocks);
  }
  return num_preempted;
}

}  // namespace

TEST_CASE("every step computes something until all have ended: single sequences (stage 8, invariant 4)") {
  CHECK(serve_at_random(false, false) > 60);
}

TEST_CASE("every step computes something until all have ended: with groups (stage 8, invariant 4)") {
  CHECK(serve_at_random(true, false) > 60);
}

TEST_CASE("every step computes something until all have ended: with swapping and static batches (invariant 4)") {
  CHECK(serve_at_random(true, true) > 60);
}

TEST_CASE("static batches: no request is admitted before all have ended") {
  Bench bench(64, 4, make_options(8), 0, Batching::kStatic);
  bench.add(6, 2);
  bench.add(6, 5);
  CHECK(bench.step() == "A6 B2");
  CHECK(bench.step() == "A1 B4");  // A has ended; the batch was complete when the queue was empty
  bench.add(3, 2);
  CHECK(bench.step() == "B1");
  CHECK(bench.step() == "B1");
  CHECK(bench.step() == "B1");
  CHECK(bench.step() == "B1");
  CHECK(bench.waiting() == "C");
  CHECK(bench.step() == "C3");
}

TEST_CASE("static batches: a batch stays open while only the budget keeps requests out") {
  Bench bench(64, 4, make_options(8), 0, Batching::kStatic);
  bench.add(8, 3);
  bench.add(4, 2);
  CHECK(bench.step() == "A8");
  CHECK(bench.step() == "A1 B4");
}

TEST_CASE("reserving ahead: room for the longest text is taken at once, and is never too little") {
  Bench bench(8, 4, make_options(64), 0, Batching::kStaticReservingAhead);
  bench.add(4, 12);  // 4 blocks
  bench.add(4, 12);
  bench.add(1, 1);
  CHECK(bench.step() == "A4 B4");
  CHECK(bench.manager.usage().reserved == 32);
  CHECK(bench.manager.usage().used == 8);
  CHECK(bench.waiting() == "C");
}

namespace {

// How the later of two requests is preempted: "Bs" or "Br". num_sequences: of each. It holds 2 blocks of 3 slots, with
// 4 tokens; or, as a group of two, 3 blocks, one of them shared, with 5 tokens.
void check_preempted(std::int64_t block_swap_cost, std::int64_t token_compute_cost, const std::string& expected,
                     int num_sequences = 1) {
  SchedulerOptions options = make_options(64, 64, Preemption::kAuto);
  options.block_swap_cost = block_swap_cost;
  options.token_compute_cost = token_compute_cost;
  const bool is_single = num_sequences == 1;
  Bench bench(is_single ? 4 : 5, 3, options, 4);
  bench.add(is_single ? 6 : 5, 4);
  bench.add(is_single ? 4 : 3, 4, num_sequences);
  REQUIRE(bench.step() == (is_single ? "A6 B4" : "A5 B3"));
  REQUIRE((is_single || bench.step() == "A1 B2"));
  REQUIRE(bench.step() == "A1");
  INFO("B holds " << (is_single ? "2 blocks and 4 tokens" : "3 blocks and 5 tokens, each counted once")
                  << "; to swap a block costs " << block_swap_cost << ", to compute a token " << token_compute_cost
                  << " (s: swapped, r: recomputed)");
  CHECK(bench.preempted == expected);
}

}  // namespace

TEST_CASE("auto compares the bytes that a swap moves with the tokens that would be recomputed") {
  check_preempted(10, 5, "Br");  // 20 against 20
  check_preempted(10, 6, "Bs");  // 20 against 24
}

TEST_CASE("auto: what the sequences of a group share moves once, and would be computed once") {
  check_preempted(10, 6, "Br", 2);  // 30 against 30
  check_preempted(10, 7, "Bs", 2);  // 30 against 35
}

TEST_CASE("auto: costs of any unit are multiplied without overflow") {
  check_preempted(5'000'000'000, 3'300'000'000, "Bs");  // 10.0e9 against 13.2e9
}

TEST_CASE("running ahead: a placeholder's note names its place among the tokens, and its row in the step before") {
  Bench bench(32, 4, make_options(64));
  const auto names = [](const std::string& text, std::optional<int> row) {
    return text + (row.has_value() ? " is drawn from row " + std::to_string(*row) + "; " : " is not pending; ");
  };
  CountedGroup& a = bench.add(6, 8, 2);
  const CountedGroup& b = bench.add(5, 8);
  CountedGroup& c = bench.add(4, 8);
  for (int i = 0; i < 3; ++i) {
    bench.step();
  }
  // As if A had been preempted and resumed: it lacks the seven tokens that its two texts have in common.
  a.free_blocks();
  bench.manager.reset_prefix_cache();
  REQUIRE(a.allocate({}));
  const CountedGroup& d = bench.add(3, 8);

  // Tokens: B's, C's, A's seven, D's three. Rows of logits: B's, C's, D's.
  stage::Step before(bench.manager, bench.schedule().groups);
  before.enqueued({}, 3, true);
  before.confirm(bench.manager, {});
  REQUIRE(names("B", b.pending_row()) + names("C", c.pending_row()) + names("D", d.pending_row()) ==
          names("B", 0) + names("C", 1) + names("D", 2));
  bench.scheduler->remove(c);

  // Tokens: one of each of A's texts, without logits, then B's and D's.
  stage::Step step(bench.manager, bench.schedule().groups);
  std::string notes;
  for (const auto& [index, row] : step.batch().pending_tokens) {
    notes += names("token " + std::to_string(index), row);
  }
  REQUIRE(notes == names("token 2", 0) + names("token 3", 2));
  stage::RaggedBatch batch = step.batch();
  batch.resolve_pending(std::vector<common::Token>{11, 12, 13});
  CHECK(batch.tokens == std::vector<common::Token>{0, 1, 11, 13});
}
