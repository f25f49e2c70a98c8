// The server with its cache on the device: the texts of lone runs on the CPU, with a step always ahead.
#include "tests/support/catch.h"

#include <algorithm>
#include <string>
#include <vector>

#include "common/app/workload.h"
#include "common/cuda/device.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/golden.h"

using common::Token;
using stage::GenerationRequest;
using stage::Preemption;
using tests::bundled;
using tests::compare_output;
using tests::greedy_request;

namespace {

const std::string kNoProblem;

stage::EngineOptions gpu_options(int num_slots, int num_host_slots = 0) {
  stage::EngineOptions options;
  options.num_slots = num_slots;
  options.num_host_slots = num_host_slots;
  options.gpu.device = stage::Device::kGpu;
  return options;
}

// The fixed workload, its texts a little shorter.
std::vector<GenerationRequest> workload_tasks() {
  std::vector<GenerationRequest> tasks;
  for (const common::WorkloadItem& item : common::workload()) {
    tasks.push_back({greedy_request(item.prompt, std::min(item.max_new_tokens, 40))});
  }
  return tasks;
}

std::vector<std::vector<common::Completion>> lone_texts(const std::vector<GenerationRequest>& tasks) {
  std::vector<std::vector<common::Completion>> texts;
  texts.reserve(tasks.size());
  for (const GenerationRequest& task : tasks) {
    texts.push_back(tests::served_alone(task, bundled().llama));
  }
  return texts;
}

}  // namespace

TEST_CASE("GPU: the texts are those of lone runs, for every budget and preemption (stage 8, invariants 6 and 7)") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::vector<GenerationRequest> tasks = workload_tasks();
  const std::vector<std::vector<common::Completion>> expected = lone_texts(tasks);
  for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
    for (const int num_slots : {320, 4096}) {
      for (const int budget : {2, 3, 256}) {
        for (const bool run_ahead : {true, false}) {
          stage::Engine engine(bundled().llama, gpu_options(num_slots, 400));
          stage::RealClock clock;
          stage::SchedulerOptions scheduler;
          scheduler.preemption = preemption;
          scheduler.token_budget = budget;
          scheduler.run_ahead = run_ahead;
          stage::Server server(engine, scheduler, clock);
          for (const GenerationRequest& task : tasks) {
            server.submit(task);
          }
          while (server.step()) {
          }
          CAPTURE(static_cast<int>(preemption), num_slots, budget, run_ahead);
          for (std::size_t i = 0; i < tasks.size(); ++i) {
            CAPTURE(i);
            CHECK(compare_output(server.output(static_cast<int>(i)), expected[i]) == kNoProblem);
          }
          CHECK(engine.manager().usage().reserved == 0);
          CHECK(engine.manager().num_free_host_blocks() == 25);
          const double preemptions = common::counter(server.counters(), "preemptions");
          CHECK((preemptions > 0) == (num_slots == 320 && budget == 256));
        }
      }
    }
  }
}

TEST_CASE("GPU: samples, beams and single texts share steps, and some are cancelled on the way") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  std::vector<GenerationRequest> tasks = workload_tasks();
  tasks.resize(8);
  tasks[1].num_samples = 3;
  tasks[1].request.sampling.temperature = 0.8F;
  tasks[4].beam = stage::BeamOptions{3, 1.0};
  const std::vector<std::vector<common::Completion>> expected = lone_texts(tasks);
  stage::Engine engine(bundled().llama, gpu_options(640, 640));
  stage::RealClock clock;
  stage::Server server(engine, {.preemption = Preemption::kSwap}, clock);
  for (const GenerationRequest& task : tasks) {
    server.submit(task);
  }
  for (int step = 0; server.step(); ++step) {
    if (step == 5) {
      server.stop(2, common::FinishReason::kCancelled);
      server.stop(7, common::FinishReason::kCancelled);
    }
  }
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    CAPTURE(i);
    CHECK(compare_output(server.output(static_cast<int>(i)), expected[i], i == 2 || i == 7) == kNoProblem);
  }
  CHECK(engine.manager().usage().reserved == 0);
  CHECK(engine.manager().num_free_host_blocks() == 40);
}
