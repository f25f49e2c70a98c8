#include "step_report.h"

#include <algorithm>

namespace stage8 {

int StepReport::padded_tokens() const {
  const auto longest = std::max_element(num_queries.begin(), num_queries.end());
  return longest == num_queries.end() ? 0 : static_cast<int>(num_queries.size()) * *longest;
}

void StepTotals::add(const StepReport& report) {
  const double seconds = report.scheduling_seconds + report.computing_seconds;
  for (const int count : report.num_queries) {
    timing.add(static_cast<std::size_t>(count), seconds * count / report.num_tokens);
  }
  steps += report.num_tokens > 0 ? 1 : 0;
  tokens += report.num_tokens;
  padded_tokens += report.padded_tokens();
  slots_reserved += report.usage.reserved;
  slots_used += report.usage.used;
  running += report.num_running;
  swapped_out += static_cast<std::int64_t>(report.swapped_out.size());
  recomputed += static_cast<std::int64_t>(report.recomputed.size());
  max_running = std::max(max_running, report.num_running);
}

std::vector<common::Counter> counters_of(const Engine& engine, const StepTotals& totals) {
  const std::vector<common::Counter> engines = engine.counters();
  const auto mean = [&](std::int64_t sum) {
    return static_cast<double>(sum) / static_cast<double>(std::max<std::int64_t>(totals.steps, 1));
  };
  const auto of_engine = [&](const char* name) { return common::Counter{name, common::counter(engines, name)}; };
  return {{"max_requests_at_once", static_cast<double>(totals.max_running)},
          {"requests_held", mean(totals.running)},
          of_engine("forward_passes"),
          of_engine("slots_total"),
          {"slots_reserved", mean(totals.slots_reserved)},
          {"slots_used", mean(totals.slots_used)},
          of_engine("kv_bytes_per_token"),
          of_engine("kv_bytes_read"),
          {"preemptions", static_cast<double>(totals.swapped_out + totals.recomputed)},
          of_engine("blocks_copied"),
          of_engine("prefix_lookups"),
          of_engine("prefix_hits"),
          of_engine("prefix_tokens_saved"),
          of_engine("prefix_evictions"),
          {"swapped_out", static_cast<double>(totals.swapped_out)},
          {"steps", static_cast<double>(totals.steps)},
          {"padded_tokens", static_cast<double>(totals.padded_tokens)}};
}

}  // namespace
