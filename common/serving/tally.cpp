#include "common/serving/tally.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace common {
namespace {

// The bounds of GET /metrics.
constexpr std::array<double, 14> kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                             0.25,  0.5,    1.0,   2.5,  5.0,   10.0, 60.0};
constexpr std::array<double, 10> kTokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024};

}  // namespace

Tally::Tally(Keep keep)
    : step_tokens(keep, kTokens),
      host_seconds(keep, kSeconds),
      first_token_seconds(keep, kSeconds),
      between_tokens_seconds(keep, kSeconds),
      per_token_seconds(keep, kSeconds),
      queue_seconds(keep, kSeconds),
      request_seconds(keep, kSeconds) {}

void Tally::add(const StepReport& report) {
  const double seconds = report.end - report.begin;
  const auto share = [&](int slots) { return static_cast<double>(slots) / report.usage.total; };
  slots_used.add(share(report.usage.used), seconds);
  blocks_used.add(share(report.usage.reserved), seconds);
  if (report.is_memory_short) {
    slots_used_while_memory_short.add(share(report.usage.used), seconds);
  }
  running.add(report.num_running, seconds);
  // Every sequence has one token, besides drafts, and none is part of a larger chunk: a request may have several
  // sequences.
  const int num_drafts = std::accumulate(report.num_drafts.begin(), report.num_drafts.end(), 0);
  const auto num_sequences = static_cast<int>(report.num_queries.size());
  const bool is_decoding = report.num_tokens > 0 && report.num_tokens - num_drafts == num_sequences &&
                           std::find(report.is_chunk.begin(), report.is_chunk.end(), true) == report.is_chunk.end();
  if (std::exchange(is_decoding_, is_decoding) && is_decoding) {
    decode_steps += 1;
    decode_tokens += num_sequences + report.num_accepted;
    decode_reads += report.num_read;
    host_seconds.add(report.scheduling_seconds + report.computing_seconds - report.waiting_seconds);
    decode_seconds += seconds;
  }
  if (report.num_tokens > 0) {
    step_tokens.add(report.num_tokens);
  }
  steps.add(report);
  end = report.end;
  scheduling_seconds += report.scheduling_seconds;
  computing_seconds += report.computing_seconds;
  waiting_seconds += report.waiting_seconds;
}

void Tally::add(const RequestResult& result) {
  ended_.at(static_cast<std::size_t>(result.finish_reason.value())) += 1;
  if (result.finish_reason == FinishReason::kRejected) {
    return;
  }
  for (const Completion& completion : result.completions) {
    output_tokens += static_cast<std::int64_t>(completion.tokens.size());
  }
  const double seconds = result.end - result.arrival;
  if (!result.completions.empty() && !result.completions.front().tokens.empty()) {
    per_token_seconds.add(seconds / static_cast<double>(result.completions.front().tokens.size()));
  }
  if (result.admission >= 0.0) {
    prompt_tokens += result.prompt_tokens;
    queue_seconds.add(result.admission - result.arrival);
    request_seconds.add(seconds);
  }
  const std::vector<double>& times = result.token_times;
  if (!times.empty()) {
    first_token_seconds.add(times.front() - result.arrival);
  }
  for (std::size_t i = 1; i < times.size(); ++i) {
    between_tokens_seconds.add(times[i] - times[i - 1]);
  }
}

double Tally::output_tokens_per_second() const { return end > 0.0 ? static_cast<double>(output_tokens) / end : 0.0; }

double Tally::requests_per_second() const { return end > 0.0 ? static_cast<double>(num_finished()) / end : 0.0; }

}  // namespace common
