// A runner that computes a step when it is waited for, as a GPU may, and never a step that has been dropped: what must
// not be read before is not there. It fails where a test asks for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "tests/stages/fake_runner.h"

namespace tests {

class LateRunner : public stage::Runner {
 public:
  explicit LateRunner(std::unique_ptr<stage::Runner> inner) : inner_(std::move(inner)) {}

  // The call with this index, counted from 0, throws. is_done: enqueue and copy_blocks throw when they have done
  // everything; a wait drops all steps that are in flight, and not only its own.
  void fail(RunnerCall call, int index, bool is_done) { fault_ = {call, index, is_done}; }
  void fail_no_more() { fault_.reset(); }
  bool has_failed() const { return has_failed_; }
  // Called before a step is computed, with its id.
  void on_compute(std::function<void(std::uint64_t step)> callback) { on_compute_ = std::move(callback); }
  // Around what the runner does by itself.
  void around(std::function<std::shared_ptr<void>()> guard) { guard_ = std::move(guard); }

  const stage::CacheSize& cache() const override { return inner_->cache(); }
  bool is_asynchronous() const override { return true; }

  void copy_blocks(std::span<const stage::BlockCopy> copies) override {
    const std::shared_ptr<void> guard = guard_ ? guard_() : nullptr;
    const bool fails = is_next(RunnerCall::kCopy);
    if (!fails || fault_->is_done) {
      work_.push_back({{copies.begin(), copies.end()}, std::nullopt, 0});
    }
    if (fails) {
      throw RunnerFault();
    }
  }

  // Copies that a GPU may carry out beside the step that was enqueued last: early, before it has computed anything. If
  // other copies were enqueued behind the step, they are not early.
  void copy_early(std::span<const stage::BlockCopy> copies) {
    const std::shared_ptr<void> guard = guard_ ? guard_() : nullptr;
    const bool fails = is_next(RunnerCall::kCopy);
    if (!fails || fault_->is_done) {
      const bool is_behind_step = !work_.empty() && work_.back().step > 0;
      work_.insert(work_.end() - (is_behind_step ? 1 : 0), {{copies.begin(), copies.end()}, std::nullopt, 0});
    }
    if (fails) {
      throw RunnerFault();
    }
  }

  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    const std::shared_ptr<void> guard = guard_ ? guard_() : nullptr;
    if (is_next(RunnerCall::kEnqueue)) {
      throw RunnerFault();
    }
    work_.push_back({{}, batch, ++last_});
    return {last_};
  }

  stage::StepResult wait(stage::StepId step) override {
    const std::shared_ptr<void> guard = guard_ ? guard_() : nullptr;
    if (is_next(RunnerCall::kWait)) {
      for (Work& work : work_) {
        if (work.step == step.value || (work.step > step.value && fault_->is_done)) {
          work.batch.reset();
        }
      }
      throw RunnerFault();
    }
    while (!work_.empty() && !results_.contains(step.value)) {
      Work work = std::move(work_.front());
      work_.pop_front();
      compute(std::move(work));
    }
    if (!results_.contains(step.value)) {
      throw RunnerFault();  // it has been dropped
    }
    return results_.at(step.value);
  }

 protected:
  // Computes at once what has been enqueued.
  void compute_all() {
    while (!work_.empty()) {
      Work work = std::move(work_.front());
      work_.pop_front();
      compute(std::move(work));
    }
  }

 private:
  struct Fault {
    RunnerCall call = RunnerCall::kCopy;
    int index = 0;
    bool is_done = false;
  };
  // Copies, or a step; without a batch, it has been dropped.
  struct Work {
    std::vector<stage::BlockCopy> copies;
    std::optional<stage::RaggedBatch> batch;
    std::uint64_t step = 0;
  };

  bool is_next(RunnerCall call) {
    const bool fails = fault_.has_value() && fault_->call == call && fault_->index == calls_[call];
    calls_[call] += 1;
    has_failed_ = has_failed_ || fails;
    return fails;
  }

  void compute(Work work) {
    inner_->copy_blocks(work.copies);
    if (!work.batch.has_value()) {
      return;
    }
    if (const auto before = results_.find(work.step - 1); before != results_.end()) {
      work.batch->resolve_pending(before->second.tokens);
    }
    work.batch->pending_tokens.clear();  // of a step that has been dropped: these requests have failed
    stage::RaggedBatch batch = *work.batch;
    batch.sampling_rows.assign(batch.logits_rows.size(), {.draws_token = false});
    if (on_compute_) {
      on_compute_(work.step);
    }
    stage::StepResult& result = results_[work.step] = inner_->wait(inner_->enqueue(batch));
    for (std::size_t row = 0; row < result.logits.size(); ++row) {
      if (work.batch->draws_token(row)) {
        result.tokens[row] = drawn(*work.batch, row, result.logits[row]);
        result.logits[row] = {};
      }
    }
    results_.erase(work.step - std::min<std::uint64_t>(work.step, 2));
  }

  // -1 where there is no token to draw; as on a GPU, this does not affect the other rows.
  static common::Token drawn(const stage::RaggedBatch& batch, std::size_t row, const common::Matrix& logits) {
    try {
      return stage::sampled_token(batch, row, {logits.data(), static_cast<std::size_t>(logits.size())});
    } catch (const common::InputError&) {
      return -1;
    }
  }

  std::unique_ptr<stage::Runner> inner_;
  std::deque<Work> work_;  // enqueued, and not computed yet
  std::map<std::uint64_t, stage::StepResult> results_;
  std::uint64_t last_ = 0;
  std::optional<Fault> fault_;
  std::map<RunnerCall, int> calls_;
  bool has_failed_ = false;
  std::function<void(std::uint64_t)> on_compute_;
  std::function<std::shared_ptr<void>()> guard_;
};

}  // namespace tests
