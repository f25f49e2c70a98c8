// Engines with options drawn at random, in pools that are too small, and the fixed workload to be served by them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/app/workload.h"
#include "common/math/sampling.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/golden.h"
#include "tests/support/random.h"

namespace tests {

// Prompts of the fixed workload, every other one twice, so that there is more to look up; drawn in all ways.
inline std::vector<stage::GenerationRequest> workload_tasks() {
  std::vector<stage::GenerationRequest> tasks;
  for (const common::WorkloadItem& item : common::workload()) {
    const auto i = static_cast<int>(tasks.size());
    const std::string prompt = i % 2 == 0 ? item.prompt : item.prompt + " " + item.prompt;
    stage::GenerationRequest task{greedy_request(prompt, std::min(item.max_new_tokens, 40))};
    common::SamplingOptions& sampling = task.request.sampling;
    sampling.temperature = i % 3 == 0 ? 0.0F : 0.5F;
    sampling.seed = static_cast<std::uint64_t>(i);
    sampling.top_k = i % 4 == 1 ? 20 : 0;
    sampling.top_p = i % 4 == 2 ? 0.9F : 1.0F;
    sampling.repetition_penalty = i % 5 == 4 ? 1.1F : 1.0F;
    task.request.num_logprobs = i % 6 == 5 ? 2 : 0;  // fetches logits
    task.num_samples = i % 6 == 2 ? 2 : 1;
    tasks.push_back(std::move(task));
  }
  return tasks;
}

// With what drafts cost in the bundled model, there would be few.
inline const stage::TokenCost kCostOfLargeModel = stage::gpu_token_cost(16, 2.5e9);

struct DrawnEngine {
  stage::EngineOptions options;
  int num_drafts = 0;
  stage::TokenCost cost;  // as if drafts and waiting cost nothing, or as in a large model
};

inline DrawnEngine draw_engine(common::Random& random) {
  DrawnEngine engine;
  stage::EngineOptions& options = engine.options;
  options.gpu.device = stage::Device::kGpu;
  options.block_size = between(random, 1, 20);
  options.num_slots = random.below(4) == 0 ? 4096 : between(random, 460, 700);
  options.num_host_slots = random.below(2) == 0 ? 0 : 400;
  stage::SchedulerOptions& scheduler = options.scheduler;
  scheduler.token_budget = between(random, 12, 100);
  scheduler.max_sequences = between(random, 2, 10);
  options.prefix_cache = random.below(4) > 0;
  engine.num_drafts = between(random, 1, common::kMaxDrafts);
  scheduler.headroom = between(random, 0, 1);
  scheduler.preemption = static_cast<stage::Preemption>(random.below(3));
  if (random.below(4) == 0) {
    scheduler.run_ahead = random.below(2) == 0;
  }
  engine.cost =
      random.below(2) == 0 ? stage::TokenCost{.per_token = 0.0, .max_tokens = stage::kMaxGpuTokens} : kCostOfLargeModel;
  return engine;
}

// Serves the tasks, each of which arrives in between two steps. after_step: called after each step.
inline void serve_arriving(
    stage::Engine& engine, common::Random& random, const std::vector<stage::GenerationRequest>& tasks,
    const std::function<void()>& after_step = [] {}) {
  std::size_t num_submitted = 0;
  while (num_submitted < tasks.size() || !engine.is_idle()) {
    if (num_submitted < tasks.size() && (engine.is_idle() || random.below(3) == 0)) {
      engine.submit(tasks[num_submitted++]);
    }
    engine.step();
    after_step();
  }
}

}  // namespace tests
