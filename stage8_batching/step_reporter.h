// Tells what happens in an engine's steps: a report of each, and the sums. It looks on, and decides nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "common/serving/step_report.h"
#include "scheduler.h"

namespace stage8 {

using common::StepReport;
using common::StepTotals;

class StepReporter {
 public:
  // The scheduler must outlive the reporter.
  explicit StepReporter(const Scheduler& scheduler) : scheduler_(scheduler) {}

  // Called with every report. If it throws, what has ended is in the next report once more.
  void on_step(std::function<void(const StepReport&)> callback) { on_step_ = std::move(callback); }

  // In a step, in this order. Times are those of the engine's clock. computed() may come several times, or not at all.
  void begin(double now);
  void scheduled(const ScheduledStep& step);
  void computed(const RaggedBatch& batch) noexcept;
  void end(double now);

  // At any time. Allocates no memory if there are no more such requests than expect_end() was called for.
  void ended(int request) { ended_.push_back(request); }
  void expect_end(std::size_t num_requests);

  StepReport& report() { return report_; }  // of the current step, or of the last one
  const StepTotals& totals() const { return totals_; }

 private:
  const Scheduler& scheduler_;
  std::function<void(const StepReport&)> on_step_;
  StepReport report_;
  StepTotals totals_;
  std::vector<int> ended_;  // requests that have ended and are in no report yet
  std::int64_t num_steps_ = 0;
  double begin_seconds_ = 0.0;  // on the machine's own clock
};

}  // namespace
