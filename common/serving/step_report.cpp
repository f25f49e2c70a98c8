#include "common/serving/step_report.h"

#include <algorithm>

namespace common {

int StepReport::padded_tokens() const {
  const auto longest = std::max_element(num_queries.begin(), num_queries.end());
  return longest == num_queries.end() ? 0 : static_cast<int>(num_queries.size()) * *longest;
}

void StepTotals::add(const StepReport& report) {
  swapped_out += static_cast<std::int64_t>(report.swapped_out.size());
  recomputed += static_cast<std::int64_t>(report.recomputed.size());
  if (report.num_tokens == 0) {
    return;
  }
  const double seconds = report.scheduling_seconds + report.computing_seconds;
  for (std::size_t i = 0; i < report.num_queries.size(); ++i) {
    const int count = report.num_queries[i];
    const double share = seconds * count / report.num_tokens;
    const int num_drafts = i < report.num_drafts.size() ? report.num_drafts[i] : 0;
    if (num_drafts > 0) {
      drafted += 1;
      drafts += num_drafts;
      timing.add(1, share);
    } else if (report.is_chunk[i]) {
      timing.prefill_tokens += count;
      timing.prefill_seconds += share;
    } else {
      timing.add(static_cast<std::size_t>(count), share);
    }
  }
  accepted += report.num_accepted;
  num_read += report.num_read;
  bytes_saved += report.bytes_saved;
  timing.decode_tokens += report.num_accepted;
  steps += 1;
  tokens += report.num_tokens;
  padded_tokens += report.padded_tokens();
  slots_reserved += report.usage.reserved;
  slots_used += report.usage.used;
  running += report.num_running;
  max_running = std::max(max_running, report.num_running);
}

std::vector<Counter> counters_of(const StepTotals& totals) {
  const auto mean = [&](std::int64_t sum) {
    return static_cast<double>(sum) / static_cast<double>(std::max<std::int64_t>(totals.steps, 1));
  };
  std::vector<Counter> counters = {{"max_requests_at_once", static_cast<double>(totals.max_running)},
                                   {"requests_held", mean(totals.running)},
                                   {"steps", static_cast<double>(totals.steps)},
                                   {"padded_tokens", static_cast<double>(totals.padded_tokens)},
                                   {"slots_reserved", mean(totals.slots_reserved)},
                                   {"slots_used", mean(totals.slots_used)},
                                   {"preemptions", static_cast<double>(totals.swapped_out + totals.recomputed)},
                                   {"swapped_out", static_cast<double>(totals.swapped_out)}};
  if (totals.drafts > 0) {
    const std::vector<Counter> of_drafts = {
        {"drafts", static_cast<double>(totals.drafts)},
        {"drafts_accepted", static_cast<double>(totals.accepted)},
        {"tokens_a_step_with_drafts",
         1.0 + static_cast<double>(totals.accepted) / static_cast<double>(totals.drafted)}};
    counters.insert(counters.end(), of_drafts.begin(), of_drafts.end());
  }
  if (totals.bytes_saved > 0) {
    counters.push_back({"kv_bytes_shared", static_cast<double>(totals.bytes_saved)});
  }
  return counters;
}

}  // namespace common
