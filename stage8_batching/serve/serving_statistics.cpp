#include "serving_statistics.h"

#include <algorithm>
#include <utility>

#include "common/base/text.h"

namespace stage8 {
namespace {

constexpr std::array<double, 14> kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                             0.25,  0.5,    1.0,   2.5,  5.0,   10.0, 60.0};
constexpr std::array<double, 10> kTokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024};

// 0.25, 1, 1024
std::string number(double value) { return common::format("%.12g", value); }

// A label's value, with the characters escaped that would end it.
std::string escape(const std::string& text) {
  std::string result;
  for (const char character : text) {
    result += character == '\n'                       ? "\\n"
              : character == '"' || character == '\\' ? std::string{'\\', character}
                                                      : std::string{character};
  }
  return result;
}

}  // namespace

void Histogram::add(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  if (static_cast<std::size_t>(bucket) < counts_.size()) {
    counts_[static_cast<std::size_t>(bucket)] += 1;
  }
  count_ += 1;
  sum_ += value;
}

std::string Histogram::to_text(const std::string& name, const std::string& labels) const {
  std::string text;
  std::int64_t so_far = 0;
  for (std::size_t i = 0; i < bounds_.size(); ++i) {
    so_far += counts_[i];
    text += name;
    text += common::format("_bucket{%s,le=\"%s\"} %lld\n", labels.c_str(), number(bounds_[i]).c_str(),
                           static_cast<long long>(so_far));
  }
  text += name + "_bucket{" + labels + ",le=\"+Inf\"} " + std::to_string(count_) + "\n";
  text += name + "_sum{" + labels + "} " + number(sum_) + "\n";
  return text + name + "_count{" + labels + "} " + std::to_string(count_) + "\n";
}

ServingStatistics::ServingStatistics()
    : first_token_seconds(kSeconds),
      between_tokens_seconds(kSeconds),
      queue_seconds(kSeconds),
      request_seconds(kSeconds),
      step_tokens(kTokens) {}

void ServingStatistics::add(const StepReport& report) {
  preemptions += static_cast<std::int64_t>(report.swapped_out.size() + report.recomputed.size());
  if (report.num_tokens > 0) {
    steps += 1;
    step_tokens.add(report.num_tokens);
  }
}

void ServingStatistics::add(const RequestOutput& output) {
  ended.at(static_cast<std::size_t>(output.finish_reason.value())) += 1;
  for (const common::Completion& completion : output.completions) {
    generated_tokens += static_cast<std::int64_t>(completion.tokens.size());
  }
  if (output.admission >= 0.0) {
    queue_seconds.add(output.admission - output.arrival);
    request_seconds.add(output.end - output.arrival);
  }
  const std::vector<double>& times = output.token_times;
  if (!times.empty()) {
    first_token_seconds.add(times.front() - output.arrival);
  }
  for (std::size_t i = 1; i < times.size(); ++i) {
    between_tokens_seconds.add(times[i] - times[i - 1]);
  }
}

std::string metrics_text(const ServingStatistics& statistics, const std::string& model_name) {
  const std::string labels = "model_name=\"" + escape(model_name) + "\"";
  std::string text;
  const auto head = [&](const char* name, const char* type, const char* help) {
    text += common::format("# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
  };
  const auto value = [&](const char* name, const char* type, const char* help, double amount) {
    head(name, type, help);
    text += name + ("{" + labels + "} ") + number(amount) + "\n";
  };
  const auto histogram = [&](const char* name, const char* help, const Histogram& values) {
    head(name, "histogram", help);
    text += values.to_text(name, labels);
  };
  value("vllm:num_requests_running", "gauge", "Requests in the running batch.", statistics.num_running);
  value("vllm:num_requests_waiting", "gauge", "Requests in the queue.", statistics.num_waiting);
  value("vllm:kv_cache_usage_perc", "gauge", "Blocks that have an owner; 1 means all of them.", statistics.cache_usage);
  head("vllm:cache_config_info", "gauge", "The pool's size.");
  text += "vllm:cache_config_info{" + labels +
          common::format(",block_size=\"%d\",num_gpu_blocks=\"%d\"} 1\n", statistics.block_size, statistics.num_blocks);
  value("vllm:num_preemptions_total", "counter", "Requests that lost their blocks, swapped or to be recomputed.",
        static_cast<double>(statistics.preemptions));
  value("vllm:prompt_tokens_total", "counter", "Tokens of the prompts of requests that were admitted and have ended.",
        static_cast<double>(statistics.prompt_tokens));
  value("vllm:generation_tokens_total", "counter", "Tokens written by requests that have ended, of all samples.",
        static_cast<double>(statistics.generated_tokens));
  value("vllm:prefix_cache_hits_total", "counter", "Tokens that were found in the prefix cache.",
        static_cast<double>(statistics.prefix.tokens_saved));
  value("course:prefix_cache_lookups_total", "counter", "Sequences that were looked up in the prefix cache.",
        static_cast<double>(statistics.prefix.lookups));
  value("course:prefix_cache_lookups_with_hits_total", "counter", "Those that found at least one block.",
        static_cast<double>(statistics.prefix.hits));
  value("course:prefix_cache_evictions_total", "counter", "Cached blocks whose contents were given up.",
        static_cast<double>(statistics.prefix.evictions));
  value("course:steps_total", "counter", "Forward passes of the batch.", static_cast<double>(statistics.steps));
  head("vllm:request_success_total", "counter", "Requests that have ended, by reason.");
  const auto num_ended = [&](common::FinishReason reason) {
    return statistics.ended.at(static_cast<std::size_t>(reason));
  };
  for (const auto& [name, reason] :
       {std::pair("length", common::FinishReason::kLength), std::pair("stop", common::FinishReason::kStop),
        std::pair("abort", common::FinishReason::kCancelled)}) {
    text += "vllm:request_success_total{" + labels + ",finished_reason=\"" + name + "\"} " +
            std::to_string(num_ended(reason)) + "\n";
  }
  value("course:requests_rejected_total", "counter", "Requests that could never be served.",
        static_cast<double>(num_ended(common::FinishReason::kRejected)));
  value("course:requests_failed_total", "counter", "Requests that ended by an error.",
        static_cast<double>(num_ended(common::FinishReason::kFailed)));
  histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", statistics.first_token_seconds);
  histogram("vllm:inter_token_latency_seconds", "Between two tokens of a text.", statistics.between_tokens_seconds);
  histogram("vllm:request_queue_time_seconds", "From arrival to admission.", statistics.queue_seconds);
  histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", statistics.request_seconds);
  histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", statistics.step_tokens);
  return text;
}

}  // namespace
