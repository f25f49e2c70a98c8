// Random requests in pools that are far too small, with a second tier of the prefix cache in the host's memory that is
// no larger, and with copies and steps that fail; in most cases the tier's memory arrives meanwhile, or part of it, and
// copies are carried out beside steps, as early as a GPU may. Texts are compared with the texts of the same requests
// served alone, and the tiers with one another: a text that is in both has the same K and V there. Every case is a
// function of its seed, which a failure prints:
//
//   build/tests/host_cache_fuzz_stage8 --cases 300 --seed 1
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/base/parallel.h"
#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/fuzz/requests.h"
#include "tests/stages/host_blocks_runner.h"
#include "tests/stages/late_runner.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/sanitizers.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/host_cache/host_cache_scheduler.h)
// clang-format on

namespace {

using common::Random;
using tests::between;
using tests::FuzzCounts;
using tests::FuzzFailure;

constexpr int kDefaultCases = tests::kSanitized ? 60 : 600;

stage::GenerationRequest random_task(Random& random) {
  stage::GenerationRequest task =
      tests::random_task(random, {.min_prompt = 6, .max_prompt = 30, .max_reply = 14, .num_texts = 6});
  task.request.cache_salt = random.below(8) == 0 ? 1 : 0;
  return task;
}

// A GPU that fails.
class FailingDevice : public tests::FakeRunner, public stage::HostBlocks {
 public:
  explicit FailingDevice(std::unique_ptr<tests::HostBlocksRunner> inner)
      : FakeRunner(std::move(inner)), device_(dynamic_cast<tests::HostBlocksRunner&>(this->inner())) {}

  void allocate(int count) override { device_.allocate(count); }
  int num_allocated() const override { return device_.num_allocated(); }
  std::string why_no_more() const override { return device_.why_no_more(); }
  void copy_beside(std::span<const stage::BlockCopy> copies) override {
    with_fault(tests::RunnerCall::kCopy, [&] { device_.copy_beside(copies); });
  }
  tests::HostBlocksRunner& device() { return device_; }

 private:
  tests::HostBlocksRunner& device_;
};

// A served case, with all that is inside of it.
struct Case {
  Case(Random& random, FuzzCounts& event_counts) : counts(event_counts) {
    tests::ServingOptions options;
    options.block_size = between(random, 1, 6);
    const int longest = 44 * between(random, 1, 2);
    options.num_blocks = longest / options.block_size + between(random, 1, 6);
    options.num_host_cache_blocks =
        random.below(3) == 0 ? between(random, 1, 3) : between(random, 4, 2 * options.num_blocks);
    options.num_host_blocks = random.below(3) == 0 ? 0 : between(random, 1, options.num_blocks);
    options.scheduler.token_budget = random.below(3) == 0 ? between(random, 3, 6) : between(random, 7, 40);
    options.scheduler.headroom = between(random, 0, 1);
    options.scheduler.max_sequences = between(random, 3, 8);
    options.scheduler.preemption = static_cast<stage::Preemption>(random.below(3));
    options.scheduler.token_compute_cost = 10;  // so that blocks are kept
    options.scheduler.run_ahead = random.below(2) == 0;
    options.speculates = random.below(2) == 0;
    const bool is_plain = random.below(4) == 0;  // all memory is there, and all copies are in front of their steps
    const int num_at_start = random.below(3) == 0 ? options.num_host_cache_blocks : between(random, 0, 2);
    options.wrap = [&](std::unique_ptr<stage::Runner> runner) -> std::unique_ptr<stage::Runner> {
      cpu = &dynamic_cast<stage::CpuRunner&>(*runner);
      if (is_plain) {
        auto failing = std::make_unique<tests::FakeRunner>(std::make_unique<tests::LateRunner>(std::move(runner)));
        fake = failing.get();
        return failing;
      }
      auto failing =
          std::make_unique<FailingDevice>(std::make_unique<tests::HostBlocksRunner>(std::move(runner), num_at_start));
      fake = failing.get();
      device = &failing->device();
      return failing;
    };
    serving = std::make_unique<tests::Serving>(options);
    scheduler = &dynamic_cast<const stage::HostCacheScheduler&>(serving->engine.scheduler());
    first_host_block = options.num_blocks + options.num_host_blocks;
  }

  // Submits the tasks in between the steps, and serves them. fails: some calls of the runner throw.
  void serve(Random& random, const std::vector<stage::GenerationRequest>& tasks, bool fails) {
    std::size_t num_submitted = 0;
    while (num_submitted < tasks.size() || !serving->engine.is_idle()) {
      if (num_submitted < tasks.size() && (serving->engine.is_idle() || random.below(2) == 0)) {
        serving->submit(tasks[num_submitted++]);
      }
      if (num_submitted > 0 && random.below(40) == 0) {
        const int id = serving->engine.num_requests() - 1 - between(random, 0, static_cast<int>(num_submitted) - 1);
        if (!serving->engine.output(id).finished()) {
          serving->engine.stop(id, common::FinishReason::kCancelled);
          cancelled.insert(id);
        }
      }
      if (fails && random.below(12) == 0) {
        const bool is_copy = random.below(3) > 0;  // several in a row: then a step fails, and its copies are left
        fake->fail(is_copy ? tests::RunnerCall::kCopy : tests::RunnerCall::kWait, is_copy ? between(random, 1, 4) : 1,
                   random.below(2) == 0);
        counts.add("faults");
      }
      if (device != nullptr && device->why_no_more().empty() && random.below(10) == 0) {
        device->grow(between(random, 1, 4));
        if (random.below(20) == 0) {
          device->grow_no_more("no more host blocks");
        }
      }
      if (!serving->engine.step()) {
        continue;
      }
      counts.add("swapped out", static_cast<long long>(serving->reports.back().swapped_out.size()));
      counts.add("recomputed", static_cast<long long>(serving->reports.back().recomputed.size()));
      if (std::string problem = serving->problem(); !problem.empty()) {
        throw FuzzFailure(problem);
      }
      check_host_cache();
      if (serving->reports.size() > 20000) {
        throw FuzzFailure("the engine is still busy after 20,000 steps");
      }
    }
    if (const std::string problem = serving->leak(); !problem.empty()) {
      throw FuzzFailure(problem);
    }
  }

  // The ledger of the host's tier.
  void check_host_cache() const {
    const stage::HostCache& host = scheduler->host_cache();
    std::set<int> used(host.in_use().begin(), host.in_use().end());
    if (used.size() != host.in_use().size() || host.num_used() > host.num_blocks() ||
        (!used.empty() &&
         (*used.begin() < first_host_block || *used.rbegin() >= first_host_block + host.num_blocks()))) {
      throw FuzzFailure("the host's tier uses a block twice, or one that it does not have");
    }
    if (device != nullptr && host.num_there() + serving->options.num_host_blocks > device->num_allocated()) {
      throw FuzzFailure("the host's tier has blocks that are not allocated");
    }
    const stage::HostCacheStatistics& statistics = host.statistics();
    if (statistics.stored - statistics.evictions != host.num_used()) {
      throw FuzzFailure(common::format("%lld blocks came and %lld went, but %d are there",
                                       static_cast<long long>(statistics.stored),
                                       static_cast<long long>(statistics.evictions), host.num_used()));
    }
  }

  // Every text that is in both tiers has the same K and V in both, but for the order of additions. Needs an idle engine
  // and a block without a text, into which host blocks are copied to be read.
  void compare_tiers() {
    const stage::HostCache& host = scheduler->host_cache();
    const stage::KvCacheManager& manager = scheduler->manager();
    if (manager.free_blocks().empty() || !host.pending_copies().empty() || !manager.pending_copies().empty()) {
      return;
    }
    stage::KvCache& cache = cpu->kv_cache();
    const int free_block = manager.free_blocks().back();
    const int size = manager.block_size();
    const stage::PrefixCache& pool = manager.prefix_cache();
    for (const int block : pool.evictable()) {
      const stage::PrefixCache::Entry& entry = pool.entry(block);
      const std::vector<int> found = host.find(entry.parent_text, entry.tokens, entry.salt);
      if (found.empty()) {
        continue;
      }
      counts.add("in both tiers");
      const stage::BlockCopy copy = {found.front(), free_block};
      cache.copy_blocks({&copy, 1});
      for (int layer = 0; layer < cache.shape().num_layers; ++layer) {
        for (int head = 0; head < cache.shape().num_kv_heads; ++head) {
          expect_equal(cache.keys(layer, head, free_block * size, size), cache.keys(layer, head, block * size, size));
          expect_equal(cache.values(layer, head, free_block * size, size),
                       cache.values(layer, head, block * size, size));
        }
      }
    }
  }

  static void expect_equal(const common::MatrixView& host, const common::MatrixView& pool) {
    if (!((host - pool).cwiseAbs().maxCoeff() < 1e-4F)) {
      throw FuzzFailure("a text has other K or V on the host than in the pool");
    }
  }

  FuzzCounts& counts;
  stage::CpuRunner* cpu = nullptr;
  tests::FakeRunner* fake = nullptr;
  tests::HostBlocksRunner* device = nullptr;  // nullptr: the runner is none
  std::unique_ptr<tests::Serving> serving;
  const stage::HostCacheScheduler* scheduler = nullptr;
  int first_host_block = 0;
  std::set<int> cancelled;
};

void run_case(std::uint64_t seed, FuzzCounts& counts) {
  common::set_num_threads(1);  // they would wait for each other longer than they compute
  Random random(seed);
  Case served(random, counts);
  std::vector<stage::GenerationRequest> tasks;
  for (int left = between(random, 4, 10); left > 0; --left) {
    tasks.push_back(random_task(random));
  }
  std::vector<std::vector<common::Completion>> expected;
  for (const stage::GenerationRequest& task : tasks) {
    expected.push_back(tests::served_alone(task));
  }
  const bool has_faults = random.below(3) == 0;
  for (int round = 0; round < 3; ++round) {  // the same again, when others have used the pool
    const bool fails = has_faults && round < 2;
    served.serve(random, tasks, fails);
    if (!fails) {  // else the last copies may be in front of a step that never was
      served.compare_tiers();
    }
    for (const tests::RunnerCall call : {tests::RunnerCall::kCopy, tests::RunnerCall::kWait}) {
      served.fake->fail(call, 0);
    }
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const int id = round * static_cast<int>(tasks.size()) + static_cast<int>(i);
      const stage::RequestOutput& output = served.serving->engine.output(id);
      if (output.finish_reason == common::FinishReason::kRejected) {
        continue;  // a group too large for the budget, the limit or the pool
      }
      const bool has_failed = output.finish_reason == common::FinishReason::kFailed;
      if (has_failed && (!fails || output.error != tests::RunnerFault().what())) {
        throw FuzzFailure(common::format("request %d failed: ", id) + output.error);
      }
      const bool is_part = has_failed || served.cancelled.contains(id);
      counts.add("failed", has_failed ? 1 : 0);
      if (is_part && tasks[i].length_penalty.has_value()) {
        continue;  // a beam search that does not end promises nothing
      }
      counts.add("requests");
      counts.add("several samples", tasks[i].num_samples > 1 && !tasks[i].length_penalty.has_value() ? 1 : 0);
      counts.add("beam searches", tasks[i].length_penalty.has_value() ? 1 : 0);
      if (const std::string problem = tests::compare_output(output, expected[i], is_part); !problem.empty()) {
        throw FuzzFailure(common::format("request %d: ", id) + problem);
      }
    }
  }
  const stage::HostCacheStatistics& statistics = served.scheduler->host_cache().statistics();
  counts.add("stored", statistics.stored);
  counts.add("restored", statistics.restored);
  counts.add("given up by the host", statistics.evictions);
  if (served.device != nullptr) {
    counts.add("beside a step", static_cast<long long>(served.device->num_beside()));
    counts.add("behind a step", static_cast<long long>(served.device->num_behind()));
    const stage::HostCache& host = served.scheduler->host_cache();
    counts.add("tiers that stay small", host.num_there() < host.num_blocks() ? 1 : 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return tests::run_fuzz({argv + 1, argv + argc},
                         {.unit = "cases", .default_units = kDefaultCases, .rarest = 20, .min_seeds = 59},
                         FuzzCounts({"requests", "several samples", "beam searches", "swapped out", "recomputed",
                                     "faults", "failed", "stored", "restored", "given up by the host", "in both tiers",
                                     "beside a step", "behind a step", "tiers that stay small"}),
                         run_case);
}
