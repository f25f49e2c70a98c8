#include "common/serving/report.h"

#include <cstdint>
#include <nlohmann/json.hpp>

#include "common/app/json.h"
#include "common/app/table.h"
#include "common/base/text.h"

namespace common {

double roofline_share(const Tally& tally, const std::optional<ReadLimit>& limit) {
  if (!limit.has_value() || tally.decode_steps == 0) {
    return 0.0;
  }
  const std::int64_t bytes = tally.decode_steps * limit->weight_bytes + tally.decode_reads * limit->bytes_per_slot;
  return static_cast<double>(bytes) / limit->bytes_per_second / tally.decode_seconds;
}

std::string report_table(const ServedEngine& engine, const Tally& tally, const std::optional<ReadLimit>& limit) {
  Table times({"milliseconds", "mean", "P50", "P99"});
  const auto add_spread = [&](const char* name, const Spread& spread) {
    const auto milliseconds = [&](double seconds) {
      return spread.is_empty ? std::string("-") : format("%.2f", 1e3 * seconds);
    };
    times.add_row({name, milliseconds(spread.mean), milliseconds(spread.median), milliseconds(spread.p99)});
  };
  add_spread("to the first token", tally.first_token_seconds.spread());
  add_spread("between tokens", tally.between_tokens_seconds.spread());
  add_spread("from arrival to end, per token", tally.per_token_seconds.spread());
  if (tally.waiting_seconds > 0.0) {
    add_spread("the host's work, per decode step", tally.host_seconds.spread());
  }

  Table table({"measured", "value"});
  const auto add = [&](const char* name, const std::string& value) { table.add_row({name, value}); };
  add("requests finished", format_count(tally.num_finished()));
  const auto num_ended = [&](FinishReason reason) { return std::to_string(tally.num_ended(reason)); };
  add("rejected, cancelled, failed", num_ended(FinishReason::kRejected) + ", " + num_ended(FinishReason::kCancelled) +
                                         ", " + num_ended(FinishReason::kFailed));
  add("output tokens", format_count(tally.output_tokens));
  add("output tokens a second", format("%.1f", tally.output_tokens_per_second()));
  if (tally.decode_seconds > 0.0) {
    add("the same, in steps that only decode",
        format("%.1f", static_cast<double>(tally.decode_tokens) / tally.decode_seconds));
  }
  if (const double share = roofline_share(tally, limit); share > 0.0) {
    add("of reading weights, K and V at full speed", format_percent(share, 1.0));
  }
  add("steps", format_count(tally.steps.steps));
  add("tokens computed", format_count(tally.steps.tokens));
  if (tally.steps.drafts > 0) {
    add("of these, drafts: all, accepted",
        format("%lld, %lld", static_cast<long long>(tally.steps.drafts), static_cast<long long>(tally.steps.accepted)));
  }
  add("tokens that padding would have added", format_count(tally.steps.padded_tokens - tally.steps.tokens));
  add("requests running, mean and max", format("%.1f, %d", tally.running.value(), tally.steps.max_running));
  add("blocks in use", format_percent(tally.blocks_used.value(), 1.0));
  add("slots that hold a token", format_percent(tally.slots_used.value(), 1.0));
  add("the same, while memory is short", format_percent(tally.slots_used_while_memory_short.value(), 1.0));
  add("preempted: recomputed, swapped", format("%lld, %lld", static_cast<long long>(tally.steps.recomputed),
                                               static_cast<long long>(tally.steps.swapped_out)));
  const EngineStatus status = engine.status();
  add("prefix hits", format_count(status.prefix.hits));
  if (status.host_cache.num_blocks > 0) {
    add("blocks evicted to the host, and back", format("%lld, %lld", static_cast<long long>(status.host_cache.stored),
                                                       static_cast<long long>(status.host_cache.restored)));
  }
  if (const WindowPoolFigures& windows = status.window_pool; windows.num_blocks > 0) {
    add("layers with a window: blocks, bytes saved",
        format("%d, ", windows.num_blocks) + format_bytes(windows.bytes_saved));
  }
  if (const SharedReadingFigures& shared = status.shared_reading; shared.steps > 0) {
    add("shared blocks read once, reads saved",
        format("%lld, %lld", static_cast<long long>(shared.blocks_read), static_cast<long long>(shared.blocks_saved)));
  }
  return table.to_string() + "\n" + times.to_string();
}

nlohmann::ordered_json report_json(const ServedEngine& engine, const Tally& tally,
                                   const std::optional<ReadLimit>& limit) {
  const auto spread = [](const Spread& value) {
    return value.is_empty ? nlohmann::ordered_json(nullptr)
                          : nlohmann::ordered_json{{"mean", value.mean}, {"p50", value.median}, {"p99", value.p99}};
  };
  nlohmann::ordered_json document;
  document["requests"] = {{"finished", tally.num_finished()},
                          {"rejected", tally.num_ended(FinishReason::kRejected)},
                          {"cancelled", tally.num_ended(FinishReason::kCancelled)},
                          {"failed", tally.num_ended(FinishReason::kFailed)}};
  document["seconds"] = tally.end;
  document["throughput"] = {{"output_tokens_per_second", tally.output_tokens_per_second()},
                            {"requests_per_second", tally.requests_per_second()}};
  document["seconds_to_first_token"] = spread(tally.first_token_seconds.spread());
  document["seconds_between_tokens"] = spread(tally.between_tokens_seconds.spread());
  document["seconds_per_output_token"] = spread(tally.per_token_seconds.spread());
  document["utilisation"] = {{"blocks", tally.blocks_used.value()},
                             {"slots", tally.slots_used.value()},
                             {"slots_used_while_memory_short", tally.slots_used_while_memory_short.value()}};
  document["steps"] = {{"count", tally.steps.steps},
                       {"tokens", tally.steps.tokens},
                       {"padded_tokens", tally.steps.padded_tokens},
                       {"scheduling_seconds", tally.scheduling_seconds},
                       {"computing_seconds", tally.computing_seconds},
                       {"waiting_for_the_gpu_seconds", tally.waiting_seconds},
                       {"host_seconds", spread(tally.host_seconds.spread())},
                       {"decode_tokens", tally.decode_tokens},
                       {"decode_seconds", tally.decode_seconds},
                       {"decode_share_of_roofline", roofline_share(tally, limit)}};
  document["preemptions"] = {{"recomputed", tally.steps.recomputed}, {"swapped", tally.steps.swapped_out}};
  document["counters"] = to_json(engine.counters());
  return document;
}

}  // namespace common
