#include "step_reporter.h"

#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "common/base/machine.h"

namespace stage8 {
namespace {

common::SlotUsage slot_usage(const KvCacheManager& manager) {
  const Usage usage = manager.usage();
  return {usage.total, usage.reserved, usage.used, usage.cached};
}

}  // namespace

void StepReporter::begin(double now) {
  std::vector<int> ended = std::move(report_.ended);  // for its memory
  ended.clear();
  report_ = {};
  report_.ended = std::move(ended);
  report_.index = num_steps_;
  report_.begin = now;
  begin_seconds_ = common::now_seconds();
}

void StepReporter::scheduled(const ScheduledStep& step) {
  report_.num_tokens = step.num_tokens;
  report_.is_memory_short = step.is_memory_short;
  report_.num_running = static_cast<int>(scheduler_.running().size());
  for (const ScheduledGroup& scheduled : step.groups) {
    const std::vector<int>& counts = scheduled.tokens.num_tokens;
    const bool is_chunk = scheduled.group->begin_chunk(scheduled.tokens.with_logits);
    report_.is_chunk.insert(report_.is_chunk.end(), counts.size(), is_chunk);
    report_.num_queries.insert(report_.num_queries.end(), counts.begin(), counts.end());
    report_.served.push_back(scheduled.group->id());
    report_.num_served.push_back(std::accumulate(counts.begin(), counts.end(), 0));
  }
  for (const SequenceGroup* group : step.admitted) {
    report_.admitted.push_back(group->id());
  }
  for (const auto& [group, swapped] : step.preempted) {
    (swapped ? report_.swapped_out : report_.recomputed).push_back(group->id());
  }
  report_.usage = slot_usage(scheduler_.manager());
  report_.scheduling_seconds = common::now_seconds() - begin_seconds_;
}

void StepReporter::computed(const RaggedBatch& batch) noexcept {
  report_.num_read = std::accumulate(batch.context_lengths.begin(), batch.context_lengths.end(), report_.num_read);
  try {
    report_.usage = slot_usage(scheduler_.manager());
  } catch (const std::bad_alloc&) {  // it stays what it was when the step was scheduled
  }
}

void StepReporter::expect_end(std::size_t num_requests) {
  ended_.reserve(ended_.size() + num_requests);
  report_.ended.reserve(ended_.capacity());  // the two lists take turns
}

void StepReporter::end(double now) {
  report_.computing_seconds = common::now_seconds() - begin_seconds_ - report_.scheduling_seconds;
  report_.end = now;
  report_.num_waiting = static_cast<int>(scheduler_.waiting().size());
  num_steps_ += 1;
  totals_.add(report_);
  std::swap(report_.ended, ended_);
  try {
    if (on_step_) {
      on_step_(report_);  // may end requests
    }
  } catch (...) {
    report_.ended.insert(report_.ended.end(), ended_.begin(), ended_.end());
    std::swap(report_.ended, ended_);
    throw;
  }
}

}  // namespace
