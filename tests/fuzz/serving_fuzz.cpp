// Random requests that arrive, are cancelled, preempted and resumed, in pools that are far too small. Their texts are
// compared with the texts of the same requests served alone. Every case is a function of its seed, which a failure
// prints:
//
//   build/tests/serving_fuzz_stage8 --cases 300 --seed 1
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/fuzz/requests.h"
#include "tests/stages/serving_fixtures.h"

namespace {

using common::Random;
using tests::between;
using tests::FuzzCounts;
using tests::FuzzFailure;

constexpr int kDefaultCases = 400;

stage::GenerationRequest random_task(Random& random, int num_kinds) {
  stage::GenerationRequest task;
  // Few different prompts, so that some are found in the prefix cache.
  task.request = tests::make_request(between(random, 1, 16), between(random, 1, 28), between(random, 0, 3));
  task.request.sampling.seed = random.below(1000);
  if (random.below(3) == 0) {
    for (common::Token token = 0; token < tests::kSmallVocabulary; token += 11) {
      task.request.stop_tokens.push_back(token);
    }
  }
  const int kind = between(random, 1, num_kinds);
  if (kind == 2) {
    task.num_samples = between(random, 2, 4);
    task.request.sampling.temperature = 1.2F;
  } else if (kind == 3) {
    task.num_samples = between(random, 1, 3);
    task.length_penalty = 1.0;
  }
  return task;
}

void run_case(std::uint64_t seed, FuzzCounts& counts) {
  Random random(seed);
  tests::ServingOptions options;
  options.block_size = between(random, 1, 6);
  const int longest = 44 * between(random, 1, 2);
  options.num_blocks = longest / options.block_size + between(random, 1, 6);
  options.num_host_blocks = random.below(4) == 0 ? 0 : between(random, 1, options.num_blocks);
  options.prefix_cache = random.below(4) > 0;
  options.scheduler.token_budget = random.below(3) == 0 ? between(random, 1, 4) : between(random, 5, 40);
  options.scheduler.headroom = between(random, 0, 1);
  options.scheduler.max_sequences = between(random, 3, 12);
  options.scheduler.preemption = static_cast<stage::Preemption>(random.below(3));
  options.scheduler.token_compute_cost = between(random, 1, 3);
  options.scheduler.block_swap_cost = between(random, 1, 9);
  options.static_batches = random.below(10) == 0;
  options.scheduler.run_ahead = random.below(2) == 0;
  tests::Serving serving(options);

  std::vector<stage::GenerationRequest> tasks;
  std::set<int> cancelled;
  const int num_tasks = between(random, 3, 12);
  std::vector<int> streamed(static_cast<std::size_t>(num_tasks));
  serving.on_token = [&](int id, int, common::Token) { streamed[static_cast<std::size_t>(id)] += 1; };
  while (static_cast<int>(tasks.size()) < num_tasks || !serving.engine.is_idle()) {
    if (static_cast<int>(tasks.size()) < num_tasks && (serving.engine.is_idle() || random.below(2) == 0)) {
      tasks.push_back(random_task(random, 3));
      const bool is_search = tasks.back().length_penalty.has_value();
      counts.add("with several samples", tasks.back().num_samples > 1 && !is_search ? 1 : 0);
      counts.add("beam searches", is_search ? 1 : 0);
      serving.submit(tasks.back());
    }
    if (!tasks.empty() && random.below(40) == 0) {
      const int id = between(random, 0, static_cast<int>(tasks.size()) - 1);
      if (!serving.engine.output(id).finished()) {
        serving.engine.stop(id, common::FinishReason::kCancelled);
        cancelled.insert(id);
      }
    }
    if (serving.engine.step()) {
      counts.add("steps");
      counts.add("swapped out", static_cast<long long>(serving.reports.back().swapped_out.size()));
      counts.add("recomputed", static_cast<long long>(serving.reports.back().recomputed.size()));
      if (std::string problem = serving.problem(); !problem.empty()) {
        throw FuzzFailure(problem);
      }
    }
    if (serving.reports.size() > 20000) {
      throw FuzzFailure("the engine is still busy after 20,000 steps");
    }
  }
  for (int id = 0; id < num_tasks; ++id) {
    const stage::RequestOutput& output = serving.engine.output(id);
    const stage::GenerationRequest& task = tasks[static_cast<std::size_t>(id)];
    if (output.finish_reason == common::FinishReason::kRejected) {
      continue;  // a group too large for the budget, the limit or the pool
    }
    if (output.finish_reason == common::FinishReason::kFailed) {
      throw FuzzFailure(common::format("request %d failed: ", id) + output.error);
    }
    counts.add("requests");
    const bool is_cancelled = cancelled.contains(id);
    counts.add("cancelled", is_cancelled ? 1 : 0);
    if (is_cancelled && task.length_penalty.has_value()) {
      continue;  // a cancelled beam search promises nothing
    }
    if (const std::string problem = tests::compare_output(output, tests::served_alone(task), is_cancelled);
        !problem.empty()) {
      throw FuzzFailure(common::format("request %d: ", id) + problem);
    }
    tests::check_streamed(id, task, output, streamed[static_cast<std::size_t>(id)]);
  }
  counts.add("prefix hits", static_cast<long long>(common::counter(serving.engine.counters(), "prefix_hits")));
  if (const std::string problem = serving.leak(); !problem.empty()) {
    throw FuzzFailure(problem);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return tests::run_fuzz({argv + 1, argv + argc},
                         {.unit = "cases", .default_units = kDefaultCases, .rarest = 10, .min_seeds = 99},
                         FuzzCounts({"requests", "with several samples", "beam searches", "steps", "cancelled",
                                     "swapped out", "recomputed", "prefix hits"}),
                         run_case);
}
