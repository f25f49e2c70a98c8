// Random requests that arrive, are cancelled, preempted and resumed, in pools that are far too small, against the texts
// that each of them gets alone. Every case is a function of its seed, which a failure prints:
//
//   build/tests/serving_fuzz_stage8 --cases 300 --seed 1
#include <cstdlib>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include "common/math/sampling.h"
#include "tests/stages/serving_fixtures.h"

namespace {

using common::Random;

constexpr int kDefaultCases = 400;

struct Counts {
  long long cases = 0, tasks = 0, steps = 0, cancelled = 0, swapped = 0, recomputed = 0, samples = 0, beams = 0,
            hits = 0;
};

int between(Random& random, int least, int most) {
  return least +
         static_cast<int>(random.below(static_cast<std::uint64_t>(most) - static_cast<std::uint64_t>(least) + 1));
}

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
    task.beam = stage::BeamOptions{between(random, 1, 3), 1.0};
  }
  return task;
}

std::string run_case(std::uint64_t seed, Counts& counts) {
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
  options.scheduler.static_batches = random.below(10) == 0;
  options.scheduler.run_ahead = random.below(2) == 0;
  tests::Serving serving(options);

  std::vector<stage::GenerationRequest> tasks;
  std::set<int> cancelled;
  const int num_tasks = between(random, 3, 12);
  std::vector<int> streamed(static_cast<std::size_t>(num_tasks));
  serving.server.on_token([&](int id, int, common::Token) { streamed[static_cast<std::size_t>(id)] += 1; });
  while (static_cast<int>(tasks.size()) < num_tasks || !serving.server.is_idle()) {
    if (static_cast<int>(tasks.size()) < num_tasks && (serving.server.is_idle() || random.below(2) == 0)) {
      tasks.push_back(random_task(random, 3));
      counts.samples += tasks.back().num_samples > 1 ? 1 : 0;
      counts.beams += tasks.back().beam ? 1 : 0;
      serving.server.submit(tasks.back());
    }
    if (!tasks.empty() && random.below(40) == 0) {
      const int id = between(random, 0, static_cast<int>(tasks.size()) - 1);
      if (!serving.server.output(id).finished) {
        serving.server.stop(id, common::FinishReason::kCancelled);
        cancelled.insert(id);
      }
    }
    if (serving.server.step()) {
      counts.steps += 1;
      counts.swapped += static_cast<long long>(serving.reports.back().swapped_out.size());
      counts.recomputed += static_cast<long long>(serving.reports.back().recomputed.size());
      if (std::string problem = serving.problem(); !problem.empty()) {
        return problem;
      }
    }
    if (serving.reports.size() > 20000) {
      return "it does not end";
    }
  }
  for (int id = 0; id < num_tasks; ++id) {
    const stage::RequestOutput& output = serving.server.output(id);
    const stage::GenerationRequest& task = tasks[static_cast<std::size_t>(id)];
    if (output.finish_reason == common::FinishReason::kRejected) {
      continue;  // a group too large for the budget, the limit or the pool
    }
    if (output.finish_reason == common::FinishReason::kFailed) {
      return "failed: " + output.error;
    }
    counts.tasks += 1;
    const bool is_cancelled = cancelled.contains(id);
    counts.cancelled += is_cancelled ? 1 : 0;
    if (is_cancelled && task.beam.has_value()) {
      continue;  // nothing was promised
    }
    if (const std::string problem = tests::compare_output(output, tests::served_alone(task), is_cancelled);
        !problem.empty()) {
      return common::format("request %d: ", id) + problem;
    }
    std::size_t written = 0;
    for (const common::Completion& completion : output.completions) {
      written += completion.tokens.size();
    }
    if (!task.beam.has_value() && static_cast<std::size_t>(streamed[static_cast<std::size_t>(id)]) != written) {
      return common::format("request %d: not every token was streamed once", id);
    }
  }
  counts.cases += 1;
  counts.hits += static_cast<long long>(common::counter(serving.engine.counters(), "prefix_hits"));
  return serving.leak();
}

int run(const std::vector<std::string>& arguments) {
  const auto setting = [&](const std::string& option, const char* variable, long long fallback) {
    for (std::size_t i = 0; i + 1 < arguments.size(); ++i) {
      if (arguments[i] == option) {
        return std::stoll(arguments[i + 1]);
      }
    }
    const char* const value = std::getenv(variable);
    return value != nullptr ? std::stoll(value) : fallback;
  };
  const long long num_cases = setting("--cases", "FUZZ_CASES", kDefaultCases);
  const auto first_seed = static_cast<std::uint64_t>(setting("--seed", "FUZZ_SEED", 1));
  Counts counts;
  for (std::uint64_t seed = first_seed; seed < first_seed + static_cast<std::uint64_t>(num_cases); ++seed) {
    std::string problem;
    try {
      problem = run_case(seed, counts);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (!problem.empty()) {
      std::cout << common::format("fuzz failed with --cases 1 --seed %llu: ", static_cast<unsigned long long>(seed))
                << problem << std::endl;
      return 1;
    }
  }
  std::cout << common::format(
                   "fuzz: %lld cases, %lld tasks (%lld of several samples, %lld beams), %lld steps, %lld cancelled, "
                   "%lld swapped out, %lld recomputed, %lld prefix hits",
                   counts.cases, counts.tasks, counts.samples, counts.beams, counts.steps, counts.cancelled,
                   counts.swapped, counts.recomputed, counts.hits)
            << std::endl;
  const bool thorough =
      std::min({counts.samples, counts.beams, counts.cancelled, counts.swapped, counts.recomputed, counts.hits}) * 10 >=
      counts.cases;
  if (!thorough && num_cases >= 100) {
    std::cout << "fuzz failed: something hardly ever came up" << std::endl;
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return run({argv + 1, argv + argc}); }
