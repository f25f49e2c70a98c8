#include "metrics.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "common/app/json.h"
#include "common/app/table.h"
#include "common/base/text.h"

namespace stage8 {

Spread spread_of(std::vector<double> values) {
  if (values.empty()) {
    return {};
  }
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size())));
    return values[std::max<std::size_t>(rank, 1) - 1];
  };
  return {std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size()), at(0.5), at(0.99),
          false};
}

void Metrics::add(const StepReport& report) {
  const double seconds = report.end - report.begin;
  const auto share = [&](int slots) { return static_cast<double>(slots) / report.usage.total; };
  slots_used.add(share(report.usage.used), seconds);
  blocks_used.add(share(report.usage.reserved), seconds);
  if (report.is_memory_short) {
    slots_used_while_memory_short.add(share(report.usage.used), seconds);
  }
  running.add(report.num_running, seconds);
  // Every sequence has one token, and none of them is a part of more: a request may have several sequences.
  const bool is_decoding = report.num_tokens > 0 && report.num_tokens == static_cast<int>(report.num_queries.size()) &&
                           std::find(report.is_chunk.begin(), report.is_chunk.end(), true) == report.is_chunk.end();
  if (std::exchange(is_decoding_, is_decoding) && is_decoding) {
    decode_steps += 1;
    decode_tokens += report.num_tokens;
    decode_reads += report.num_read;
    host_seconds.push_back(report.scheduling_seconds + report.computing_seconds - report.waiting_seconds);
    decode_seconds += seconds;
  }
  totals.add(report);
  end = report.end;
  scheduling_seconds += report.scheduling_seconds;
  computing_seconds += report.computing_seconds;
  waiting_seconds += report.waiting_seconds;
}

ServingFigures figures_of(const Server& server, const Metrics& metrics) {
  ServingFigures figures;
  std::vector<double> first_token;
  std::vector<double> between_tokens;
  std::vector<double> per_token;
  for (int id = 0; id < server.num_requests(); ++id) {
    const RequestOutput& output = server.output(id);
    if (!output.finished()) {
      continue;
    }
    switch (*output.finish_reason) {
      case common::FinishReason::kRejected:
        figures.rejected += 1;
        continue;
      case common::FinishReason::kFailed:
        figures.failed += 1;
        break;
      case common::FinishReason::kCancelled:
        figures.cancelled += 1;
        break;
      default:
        figures.finished += 1;
    }
    for (const common::Completion& completion : output.completions) {
      figures.output_tokens += static_cast<std::int64_t>(completion.tokens.size());
    }
    const std::vector<double>& times = output.token_times;
    if (!times.empty()) {
      first_token.push_back(times.front() - output.arrival);
    }
    if (!output.completions.empty() && !output.completions.front().tokens.empty()) {
      per_token.push_back((output.end - output.arrival) /
                          static_cast<double>(output.completions.front().tokens.size()));
    }
    for (std::size_t i = 1; i < times.size(); ++i) {
      between_tokens.push_back(times[i] - times[i - 1]);
    }
  }
  if (metrics.end > 0.0) {
    figures.output_tokens_per_second = static_cast<double>(figures.output_tokens) / metrics.end;
    figures.requests_per_second = figures.finished / metrics.end;
  }
  figures.first_token = spread_of(std::move(first_token));
  figures.between_tokens = spread_of(std::move(between_tokens));
  figures.per_token = spread_of(std::move(per_token));
  return figures;
}

double roofline_share(const Server& server, const Metrics& metrics) {
  Engine& engine = server.engine();
  if (metrics.decode_steps == 0) {
    return 0.0;
  }
  const std::optional<ReadLimit> limit = engine.runner().read_limit();
  if (!limit.has_value()) {
    return 0.0;
  }
  const std::int64_t bytes =
      metrics.decode_steps * limit->weight_bytes_per_token + metrics.decode_reads * engine.cache().bytes_per_slot;
  return static_cast<double>(bytes) / limit->bytes_per_second / metrics.decode_seconds;
}

std::string metrics_table(const Server& server, const Metrics& metrics) {
  const ServingFigures figures = figures_of(server, metrics);
  common::Table times({"milliseconds", "mean", "P50", "P99"});
  const auto add_spread = [&](const char* name, const Spread& spread) {
    const auto milliseconds = [&](double seconds) {
      return spread.is_empty ? std::string("-") : common::format("%.2f", 1e3 * seconds);
    };
    times.add_row({name, milliseconds(spread.mean), milliseconds(spread.median), milliseconds(spread.p99)});
  };
  add_spread("to the first token", figures.first_token);
  add_spread("between tokens", figures.between_tokens);
  add_spread("from arrival to end, per token", figures.per_token);
  if (metrics.waiting_seconds > 0.0) {
    add_spread("the host's work, per decode step", spread_of(metrics.host_seconds));
  }

  common::Table table({"measured", "value"});
  const auto add = [&](const char* name, const std::string& value) { table.add_row({name, value}); };
  add("requests finished", common::format_count(figures.finished));
  add("rejected, cancelled, failed", common::format("%d, %d, %d", figures.rejected, figures.cancelled, figures.failed));
  add("output tokens", common::format_count(figures.output_tokens));
  add("output tokens a second", common::format("%.1f", figures.output_tokens_per_second));
  if (metrics.decode_seconds > 0.0) {
    add("the same, in steps that only decode",
        common::format("%.1f", static_cast<double>(metrics.decode_tokens) / metrics.decode_seconds));
  }
  if (const double share = roofline_share(server, metrics); share > 0.0) {
    add("of reading weights, K and V at full speed", common::format_percent(share, 1.0));
  }
  add("steps", common::format_count(metrics.totals.steps));
  add("tokens computed", common::format_count(metrics.totals.tokens));
  add("tokens that padding would have added",
      common::format_count(metrics.totals.padded_tokens - metrics.totals.tokens));
  add("requests running, mean and max",
      common::format("%.1f, %d", metrics.running.value(), metrics.totals.max_running));
  add("blocks in use", common::format_percent(metrics.blocks_used.value(), 1.0));
  add("slots that hold a token", common::format_percent(metrics.slots_used.value(), 1.0));
  add("the same, while memory is short", common::format_percent(metrics.slots_used_while_memory_short.value(), 1.0));
  add("preempted: recomputed, swapped", common::format("%lld, %lld", static_cast<long long>(metrics.totals.recomputed),
                                                       static_cast<long long>(metrics.totals.swapped_out)));
  add("prefix hits",
      common::format_count(static_cast<std::int64_t>(common::counter(server.counters(), "prefix_hits"))));
  return table.to_string() + "\n" + times.to_string();
}

nlohmann::ordered_json metrics_json(const Server& server, const Metrics& metrics) {
  const ServingFigures figures = figures_of(server, metrics);
  const auto spread = [](const Spread& value) {
    return value.is_empty ? nlohmann::ordered_json(nullptr)
                          : nlohmann::ordered_json{{"mean", value.mean}, {"p50", value.median}, {"p99", value.p99}};
  };
  nlohmann::ordered_json document;
  document["requests"] = {{"finished", figures.finished},
                          {"rejected", figures.rejected},
                          {"cancelled", figures.cancelled},
                          {"failed", figures.failed}};
  document["seconds"] = metrics.end;
  document["throughput"] = {{"output_tokens_per_second", figures.output_tokens_per_second},
                            {"requests_per_second", figures.requests_per_second}};
  document["seconds_to_first_token"] = spread(figures.first_token);
  document["seconds_between_tokens"] = spread(figures.between_tokens);
  document["seconds_per_output_token"] = spread(figures.per_token);
  document["utilisation"] = {{"blocks", metrics.blocks_used.value()},
                             {"slots", metrics.slots_used.value()},
                             {"slots_used_while_memory_short", metrics.slots_used_while_memory_short.value()}};
  document["steps"] = {{"count", metrics.totals.steps},
                       {"tokens", metrics.totals.tokens},
                       {"padded_tokens", metrics.totals.padded_tokens},
                       {"scheduling_seconds", metrics.scheduling_seconds},
                       {"computing_seconds", metrics.computing_seconds},
                       {"waiting_for_the_gpu_seconds", metrics.waiting_seconds},
                       {"host_seconds", spread(spread_of(metrics.host_seconds))},
                       {"decode_tokens", metrics.decode_tokens},
                       {"decode_seconds", metrics.decode_seconds},
                       {"decode_share_of_roofline", roofline_share(server, metrics)}};
  document["preemptions"] = {{"recomputed", metrics.totals.recomputed}, {"swapped", metrics.totals.swapped_out}};
  document["counters"] = common::to_json(server.counters());
  return document;
}

}  // namespace
