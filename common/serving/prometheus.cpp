#include "common/serving/prometheus.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/base/text.h"

namespace common {
namespace {

// 0.25, 1, 1024
std::string number(double value) { return format("%.12g", value); }

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

// The buckets of a histogram, each with all below it.
std::string to_text(const Distribution& values, const std::string& name, const std::string& labels) {
  std::string text;
  std::int64_t so_far = 0;
  for (std::size_t i = 0; i < values.bounds().size(); ++i) {
    so_far += values.counts()[i];
    text += name;
    text += format("_bucket{%s,le=\"%s\"} %lld\n", labels.c_str(), number(values.bounds()[i]).c_str(),
                   static_cast<long long>(so_far));
  }
  text += name + "_bucket{" + labels + ",le=\"+Inf\"} " + std::to_string(values.count()) + "\n";
  text += name + "_sum{" + labels + "} " + number(values.sum()) + "\n";
  return text + name + "_count{" + labels + "} " + std::to_string(values.count()) + "\n";
}

}  // namespace

std::string metrics_text(const ServerState& state, const std::string& model_name) {
  const std::string labels = "model_name=\"" + escape(model_name) + "\"";
  const Tally& tally = state.tally;
  const EngineStatus& status = state.status;
  const PoolSizes& sizes = state.sizes;
  const int num_blocks = sizes.block_size > 0 ? status.slots.total / sizes.block_size : 0;
  std::string text;
  const auto head = [&](const char* name, const char* type, const char* help) {
    text += format("# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
  };
  const auto value = [&](const char* name, const char* type, const char* help, double amount) {
    head(name, type, help);
    text += name + ("{" + labels + "} ") + number(amount) + "\n";
  };
  const auto histogram = [&](const char* name, const char* help, const Distribution& values) {
    head(name, "histogram", help);
    text += to_text(values, name, labels);
  };
  value("vllm:num_requests_running", "gauge", "Requests in the running batch.", status.num_running);
  value("vllm:num_requests_waiting", "gauge", "Requests in the queue.", state.num_waiting());
  value("vllm:kv_cache_usage_perc", "gauge", "Blocks that have an owner; 1 means all of them.", state.cache_usage());
  head("vllm:cache_config_info", "gauge", "The pool's size.");
  text += "vllm:cache_config_info{" + labels +
          format(",block_size=\"%d\",num_gpu_blocks=\"%d\"} 1\n", sizes.block_size, num_blocks);
  value("vllm:num_preemptions_total", "counter", "Requests that lost their blocks, swapped or to be recomputed.",
        static_cast<double>(tally.num_preemptions()));
  value("vllm:spec_decode_num_draft_tokens_total", "counter", "Guesses of the next tokens that were computed.",
        static_cast<double>(tally.steps.drafts));
  value("vllm:spec_decode_num_accepted_tokens_total", "counter", "Those that have become text.",
        static_cast<double>(tally.steps.accepted));
  value("vllm:prompt_tokens_total", "counter", "Tokens of the prompts of requests that were admitted and have ended.",
        static_cast<double>(tally.prompt_tokens));
  value("vllm:generation_tokens_total", "counter", "Tokens written, of all samples.",
        static_cast<double>(state.num_generated));
  // As in vLLM, without what a request finds when it is resumed after a preemption.
  value("vllm:prefix_cache_queries_total", "counter", "Tokens of prompts that were looked up in the prefix cache.",
        static_cast<double>(status.prefix.prompt_tokens));
  value("vllm:prefix_cache_hits_total", "counter", "Those that were found.",
        static_cast<double>(status.prefix.prompt_tokens_found));
  value("course:prefix_cache_lookups_total", "counter", "Sequences that were looked up in the prefix cache.",
        static_cast<double>(status.prefix.lookups));
  value("course:prefix_cache_lookups_with_hits_total", "counter", "Those that found at least one block.",
        static_cast<double>(status.prefix.hits));
  value("course:prefix_cache_evictions_total", "counter", "Cached blocks whose contents were given up.",
        static_cast<double>(status.prefix.evictions));
  value("course:steps_with_shared_blocks_total", "counter",
        "Steps in which sequences that begin with the same blocks read them once.",
        static_cast<double>(status.shared_reading.steps));
  value("course:shared_blocks_read_total", "counter", "Blocks that were read once for several sequences.",
        static_cast<double>(status.shared_reading.blocks_read));
  value("course:shared_block_reads_saved_total", "counter", "How often they would have been read besides.",
        static_cast<double>(status.shared_reading.blocks_saved));
  if (const HostCacheFigures& host = status.host_cache; host.num_blocks > 0) {
    value("course:host_cache_blocks", "gauge", "Blocks of the prefix cache's second tier, in the host's memory.",
          host.num_blocks);
    value("course:host_cache_blocks_allocated", "gauge", "Those whose memory has been allocated so far.",
          host.num_allocated);
    value("course:host_cache_blocks_used", "gauge", "Those that have a text.", host.num_used);
    value("course:host_cache_stored_total", "counter", "Evicted blocks that were copied there.",
          static_cast<double>(host.stored));
    value("course:host_cache_restored_total", "counter", "Blocks that were copied back into the pool.",
          static_cast<double>(host.restored));
    value("course:host_cache_lookups_with_hits_total", "counter", "Sequences for which at least one was copied back.",
          static_cast<double>(host.hits));
    value("course:host_cache_evictions_total", "counter", "Blocks whose contents the second tier gave up.",
          static_cast<double>(host.evictions));
  }
  if (const WindowPoolFigures& windows = status.window_pool; windows.num_blocks > 0) {
    value("course:window_pool_blocks", "gauge", "Blocks of the layers that see the last tokens only.",
          windows.num_blocks);
    value("course:window_pool_blocks_held", "gauge", "Those that a window reaches.", windows.num_held);
    value("course:window_pool_blocks_cached", "gauge", "Others that hold tokens.", windows.num_cached);
    value("course:window_pool_evictions_total", "counter", "Those whose tokens were given up for others.",
          static_cast<double>(windows.evictions));
    value("course:window_pool_bytes_saved", "gauge",
          "Memory that these layers would need in addition with as many blocks as the others.",
          static_cast<double>(windows.bytes_saved));
  }
  if (status.window_prompts.has_value()) {
    value("course:window_prompts_total", "counter",
          "Sequences that began with cached blocks, although some before them were evicted.",
          static_cast<double>(status.window_prompts->prompts));
    value("course:window_prompt_tokens_saved_total", "counter", "Tokens that they did not compute because of that.",
          static_cast<double>(status.window_prompts->tokens));
  }
  value("course:steps_total", "counter", "Forward passes of the batch.", static_cast<double>(tally.steps.steps));
  head("vllm:request_success_total", "counter", "Requests that have ended, by reason.");
  for (const auto& [name, reason] : {std::pair("length", FinishReason::kLength), std::pair("stop", FinishReason::kStop),
                                     std::pair("abort", FinishReason::kCancelled)}) {
    text += "vllm:request_success_total{" + labels + ",finished_reason=\"" + name + "\"} " +
            std::to_string(tally.num_ended(reason)) + "\n";
  }
  value("course:requests_rejected_total", "counter", "Requests that could never be served.",
        static_cast<double>(tally.num_ended(FinishReason::kRejected)));
  value("course:requests_failed_total", "counter", "Requests that ended by an error.",
        static_cast<double>(tally.num_ended(FinishReason::kFailed)));
  histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", tally.first_token_seconds);
  histogram("vllm:inter_token_latency_seconds", "Between two tokens of a text.", state.between_tokens_seconds);
  histogram("vllm:request_queue_time_seconds", "From arrival to admission.", tally.queue_seconds);
  histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", tally.request_seconds);
  histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", tally.step_tokens);
  return text;
}

}  // namespace common
