// A runner that computes as another runner does, except for the faults that a test asks for: what an engine makes of
// failing hardware, on any machine. For every stage from the seventh on.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "tests/stages/stage_engine.h"

#include STAGE_HEADER(make_runner.h)

namespace tests {

enum class RunnerCall { kCopy, kEnqueue, kWait };

struct RunnerFault : std::runtime_error {
  RunnerFault() : std::runtime_error("the runner has failed") {}
};

class FakeRunner : public stage::Runner {
 public:
  explicit FakeRunner(std::unique_ptr<stage::Runner> inner) : inner_(std::move(inner)) {}

  // The next `count` such calls throw, before they do anything or after they have done everything. Calls that copy
  // nothing do not count.
  void fail(RunnerCall call, int count = 1, bool is_done = false) { faults_[call] = {count, is_done}; }
  // Called with each batch before it is computed.
  void on_batch(std::function<void(const stage::RaggedBatch&)> see) { see_ = std::move(see); }
  // Called with each result before the engine gets it.
  void on_result(std::function<void(stage::StepResult&)> change) { change_ = std::move(change); }
  int calls(RunnerCall call) { return calls_[call]; }  // failed ones included

  const stage::CacheSize& cache() const override { return inner_->cache(); }
  void copy_blocks(std::span<const stage::BlockCopy> copies) override {
    if (!copies.empty()) {
      with_fault(RunnerCall::kCopy, [&] { inner_->copy_blocks(copies); });
    }
  }
  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    if (see_) {
      see_(batch);
    }
    stage::StepId step;
    with_fault(RunnerCall::kEnqueue, [&] { step = inner_->enqueue(batch); });
    return step;
  }
#if STAGE_NUMBER >= 8
  // As a GPU's does, from the server's point of view.
  bool is_asynchronous() const override { return true; }
#endif
  stage::StepResult wait(stage::StepId step) override {
    stage::StepResult result;
    with_fault(RunnerCall::kWait, [&] { result = inner_->wait(step); });
    if (change_) {
      change_(result);
    }
    return result;
  }

 protected:
  stage::Runner& inner() { return *inner_; }

  template <typename Function>
  void with_fault(RunnerCall call, const Function& function) {
    calls_[call] += 1;
    Fault& fault = faults_[call];
    const bool fails = fault.count > 0;
    fault.count -= fails ? 1 : 0;
    if (fails && !fault.is_done) {
      throw RunnerFault();
    }
    function();
    if (fails) {
      throw RunnerFault();
    }
  }

 private:
  struct Fault {
    int count = 0;
    bool is_done = false;
  };

  std::unique_ptr<stage::Runner> inner_;
  std::map<RunnerCall, Fault> faults_;
  std::map<RunnerCall, int> calls_;
  std::function<void(const stage::RaggedBatch&)> see_;
  std::function<void(stage::StepResult&)> change_;
};

// An engine on the CPU, and the runner that it has.
struct FakeEngine {
  explicit FakeEngine(const common::Llama& model, const stage::EngineOptions& given = tight_options())
      : options(on_cpu(given)) {
    auto cpu = stage::make_runner(model, options);
    auto fake = std::make_unique<FakeRunner>(std::move(cpu));
    runner = fake.get();
    engine.emplace(model, options, std::move(fake));
  }

  stage::EngineOptions options;
  FakeRunner* runner = nullptr;
  std::optional<SequenceEngine> engine;

 private:
  static stage::EngineOptions on_cpu(stage::EngineOptions given) {
    given.gpu.device = stage::Device::kCpu;
    return given;
  }
};

}  // namespace tests
