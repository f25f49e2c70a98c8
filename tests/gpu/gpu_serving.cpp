// The engine with its cache on the device, always a step ahead, must produce the texts of single runs on the CPU.
#include "tests/support/catch.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "common/app/workload.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/several/nccl_group.h"
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

// The same tests with the model on one GPU, and shared out among several.
#ifdef TENSOR_PARALLEL
constexpr int kNumGpus = TENSOR_PARALLEL;
#else
constexpr int kNumGpus = 1;
#endif

stage::EngineOptions gpu_options(int num_slots, int num_host_slots = 0) {
  stage::EngineOptions options;
  options.num_slots = num_slots;
  options.num_host_slots = num_host_slots;
  options.gpu.device = stage::Device::kGpu;
  options.gpu.tensor_parallel = kNumGpus;
  options.gpu.all_reduce = num_slots < 4096 ? stage::AllReduce::kPeer : stage::AllReduce::kNccl;
  return options;
}

// Why these tests can't be run here; empty if they can.
std::string missing() {
  if (!common::has_cuda_device()) {
    return "there is no GPU";
  }
  return kNumGpus == 1 ? "" : common::NcclGroup::unsupported(kNumGpus);
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

// A fault at one of the calls that the runner makes. 0: none.
std::atomic<int> calls_until_fault = 0;
std::atomic<bool> is_wait = false;  // the call that failed

// Several GPUs have a thread each, and it fails in one of them.
void count_call(const char* call) {
  if (calls_until_fault > 0 && --calls_until_fault == 0) {
    const std::string_view text = call;
    const auto has = [&](std::string_view part) { return text.find(part) != std::string_view::npos; };
    // With several GPUs, the host asks again and again whether a step is over: Event::is_done(). GpuRunner::logits()
    // brings its result to the host.
    is_wait = has("Synchronize") || has("result.data()") || (kNumGpus > 1 && text == "status");
    throw common::CudaError(std::string("a fault in ") + call);
  }
}

// Serves them all; one of the device calls fails. Returns what is wrong in the end, and sets `is_over` if there were
// fewer calls.
std::string serve_with_fault(stage::Engine& engine, const std::vector<GenerationRequest>& tasks,
                             const std::vector<std::vector<common::Completion>>& expected, int fault, bool& is_over) {
  const int first = engine.num_requests();
  for (const GenerationRequest& task : tasks) {
    engine.submit(task);
  }
  calls_until_fault = fault;
  while (engine.step()) {
  }
  is_over = calls_until_fault > 0;
  calls_until_fault = 0;
  int num_failed = 0;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const stage::RequestOutput& output = engine.output(first + static_cast<int>(i));
    const bool has_failed = output.finish_reason == common::FinishReason::kFailed;
    num_failed += has_failed ? 1 : 0;
    if (std::string problem = compare_output(output, expected[i], has_failed); !problem.empty()) {
      return "request " + std::to_string(i) + ": " + problem + " " + output.error;
    }
  }
  // If the wait for a step fails, all of its requests fail; a pass that can't begin is tried again.
  const int max_failed = is_wait ? static_cast<int>(tasks.size()) : 1;
  if (num_failed > (is_over ? 0 : max_failed)) {
    return std::to_string(num_failed) + " requests have failed";
  }
  if (engine.manager().usage().reserved != 0 || engine.manager().num_free_host_blocks() != 50) {
    return "blocks are lost";
  }
  return "";
}

}  // namespace

TEST_CASE("GPU: the k-th device call fails, for every k of a run: the other texts are those of lone runs") {
  if (const std::string reason = missing(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  std::vector<GenerationRequest> tasks = workload_tasks();
  tasks.resize(5);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    tasks[i].request.max_new_tokens = 6;
    tasks[i].request.sampling.temperature = i == 0 ? 0.0F : 0.9F;
    tasks[i].request.sampling.seed = i;
  }
  tasks[2].num_samples = 3;
  tasks[3].request.sampling.top_p = 0.9F;
  tasks[4].request.sampling.repetition_penalty = 1.2F;
  const std::vector<std::vector<common::Completion>> expected = lone_texts(tasks);
  std::size_t longest = 0;
  for (const GenerationRequest& task : tasks) {
    longest = std::max(longest, task.request.prompt.size());
  }
  stage::EngineOptions options = gpu_options(static_cast<int>(longest) + 48, 200);
  options.block_size = 4;
  options.scheduler = {.token_budget = 20, .headroom = 0, .preemption = Preemption::kSwap};
  // Recorded steps are replayed from the second run on; then every call of a run fails once.
  stage::Engine engine(bundled().llama, options);
  common::device_call_hook = count_call;
  bool is_over = false;
  int k = 0;
  CHECK(serve_with_fault(engine, tasks, expected, 1 << 30, is_over) == kNoProblem);
  // After a fault, several GPUs are connected again, which takes a second.
  const int stride = kNumGpus == 1 ? 1 : 97;
  for (is_over = false; !is_over;) {
    k += stride;
    CAPTURE(k);
    CHECK(serve_with_fault(engine, tasks, expected, k, is_over) == kNoProblem);
  }
  CHECK(k > 100);
  CHECK(k < 5000 * kNumGpus);
  // While steps are recorded: of the first calls of an engine, one in eleven.
  for (int first = 1; first < 400; first += 11 * (stride > 1 ? 8 : 1)) {
    CAPTURE(first);
    stage::Engine fresh(bundled().llama, options);
    CHECK(serve_with_fault(fresh, tasks, expected, first, is_over) == kNoProblem);
    CHECK(serve_with_fault(fresh, tasks, expected, 1 << 30, is_over) == kNoProblem);
  }
  common::device_call_hook = nullptr;
}

TEST_CASE("GPU: sampled texts are the CPU's, whatever the filter, and do not depend on neighbours or running ahead") {
  if (const std::string reason = missing(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  std::vector<GenerationRequest> tasks = workload_tasks();
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    common::SamplingOptions& sampling = tasks[i].request.sampling;
    sampling.temperature = i % 4 == 0 ? 0.0F : 0.9F;
    sampling.seed = i;
    sampling.top_k = i % 3 == 1 ? 40 : 0;
    sampling.top_p = i % 3 == 2 ? 0.9F : 1.0F;
    sampling.min_p = i % 5 == 3 ? 0.05F : 0.0F;
    sampling.repetition_penalty = i % 5 == 4 ? 1.2F : 1.0F;
    sampling.presence_penalty = i % 5 == 2 ? 0.7F : 0.0F;
    sampling.frequency_penalty = i % 5 >= 3 ? 0.4F : 0.0F;
    if (i % 4 == 3) {
      sampling.logit_bias = {{300, 3.0F}, {12, -100.0F}};
      tasks[i].request.min_tokens = 8;
    }
    tasks[i].num_samples = i == 6 ? 3 : 1;
  }
  const std::vector<std::vector<common::Completion>> expected = lone_texts(tasks);
  for (const int num_slots : {640, 4096}) {
    for (const bool run_ahead : {true, false}) {
      stage::EngineOptions options = gpu_options(num_slots, 400);
      options.scheduler = {.preemption = Preemption::kSwap, .run_ahead = run_ahead};
      stage::Engine engine(bundled().llama, options);
      for (const GenerationRequest& task : tasks) {
        engine.submit(task);
      }
      while (engine.step()) {
      }
      CAPTURE(num_slots, run_ahead);
      for (std::size_t i = 0; i < tasks.size(); ++i) {
        CAPTURE(i);
        CHECK(compare_output(engine.output(static_cast<int>(i)), expected[i]) == kNoProblem);
      }
      CHECK(engine.manager().usage().reserved == 0);
    }
  }
}

TEST_CASE("GPU: the texts are those of lone runs, for every budget and preemption (stage 8, invariants 6 and 7)") {
  if (const std::string reason = missing(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  const std::vector<GenerationRequest> tasks = workload_tasks();
  const std::vector<std::vector<common::Completion>> expected = lone_texts(tasks);
  for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
    for (const int num_slots : {320, 4096}) {
      for (const int budget : {2, 3, 256}) {
        for (const bool run_ahead : {true, false}) {
          stage::EngineOptions options = gpu_options(num_slots, 400);
          options.scheduler = {.token_budget = budget, .preemption = preemption, .run_ahead = run_ahead};
          stage::Engine engine(bundled().llama, options);
          for (const GenerationRequest& task : tasks) {
            engine.submit(task);
          }
          while (engine.step()) {
          }
          CAPTURE(static_cast<int>(preemption), num_slots, budget, run_ahead);
          for (std::size_t i = 0; i < tasks.size(); ++i) {
            CAPTURE(i);
            CHECK(compare_output(engine.output(static_cast<int>(i)), expected[i]) == kNoProblem);
          }
          CHECK(engine.manager().usage().reserved == 0);
          CHECK(engine.manager().num_free_host_blocks() == 25);
          const double preemptions = common::counter(engine.counters(), "preemptions");
          CHECK((preemptions > 0) == (num_slots == 320 && budget == 256));
        }
      }
    }
  }
}

TEST_CASE("GPU: samples, beams and single texts share steps, and some are cancelled on the way") {
  if (const std::string reason = missing(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  std::vector<GenerationRequest> tasks = workload_tasks();
  tasks.resize(8);
  tasks[1].num_samples = 3;
  tasks[1].request.sampling.temperature = 0.8F;
  tasks[4].num_samples = 3;
  tasks[4].length_penalty = 1.0;
  const std::vector<std::vector<common::Completion>> expected = lone_texts(tasks);
  stage::EngineOptions options = gpu_options(640, 640);
  options.scheduler.preemption = Preemption::kSwap;
  stage::Engine engine(bundled().llama, options);
  for (const GenerationRequest& task : tasks) {
    engine.submit(task);
  }
  for (int step = 0; engine.step(); ++step) {
    if (step == 5) {
      engine.stop(2, common::FinishReason::kCancelled);
      engine.stop(7, common::FinishReason::kCancelled);
    }
  }
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    CAPTURE(i);
    CHECK(compare_output(engine.output(static_cast<int>(i)), expected[i], i == 2 || i == 7) == kNoProblem);
  }
  CHECK(engine.manager().usage().reserved == 0);
  CHECK(engine.manager().num_free_host_blocks() == 40);
}
