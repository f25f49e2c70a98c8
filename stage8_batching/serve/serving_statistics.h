// What a server counts over its life, for GET /metrics, and the text format in which Prometheus reads it:
// https://prometheus.io/docs/instrumenting/exposition_formats
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "../server.h"

namespace stage8 {

// Counts how many values are at most each of some bounds.
class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds.begin(), bounds.end()), counts_(bounds.size()) {}
  void add(double value);
  // In Prometheus's format. labels: "name=\"value\"".
  std::string to_text(const std::string& name, const std::string& labels) const;

 private:
  std::vector<double> bounds_;  // ascending
  std::vector<std::int64_t> counts_;
  std::int64_t count_ = 0;
  double sum_ = 0.0;
};

struct ServingStatistics {
  ServingStatistics();

  int num_running = 0;
  int num_waiting = 0;
  int num_blocks = 0;
  int block_size = 0;
  double cache_usage = 0.0;  // blocks with an owner, share of all
  std::int64_t steps = 0;
  std::int64_t preemptions = 0;
  std::int64_t prompt_tokens = 0;     // of the requests that were admitted and have ended
  std::int64_t generated_tokens = 0;  // of all samples
  PrefixStatistics prefix;
  std::array<std::int64_t, 5> ended = {};  // by common::FinishReason
  Histogram first_token_seconds;
  Histogram between_tokens_seconds;
  Histogram queue_seconds;
  Histogram request_seconds;
  Histogram step_tokens;

  void add(const StepReport& report);
  void add(const RequestOutput& output);
};

// model_name becomes a label of every line. The names are vLLM's (v0.11.0) where it counts the same.
std::string metrics_text(const ServingStatistics& statistics, const std::string& model_name);

}  // namespace
