// The text of GET /metrics, in the format that Prometheus reads:
// https://prometheus.io/docs/instrumenting/exposition_formats
#pragma once

#include <cstdint>
#include <string>

#include "common/serving/distribution.h"
#include "common/serving/served_engine.h"
#include "common/serving/tally.h"

namespace common {

// A server's counts, and its current state.
struct ServerState {
  Tally tally;
  EngineStatus status;  // if the engine has failed: nothing runs, waits or is stored
  PoolSizes sizes;
  int num_posted = 0;  // requests that wait for the engine to take them
  // Counted as steps hand tokens out, while the tally counts requests that have ended.
  std::int64_t num_generated = 0;  // tokens of all samples; a beam search has them at its end
  Distribution between_tokens_seconds = Tally().between_tokens_seconds;  // with its bounds; of a request's first sample

  int num_waiting() const { return status.num_waiting + num_posted; }
  double cache_usage() const {  // the share of blocks with an owner
    return status.slots.total > 0 ? static_cast<double>(status.slots.reserved) / status.slots.total : 0.0;
  }
};

// model_name becomes a label of every line. The names are vLLM's (v0.11.0) where it counts the same.
std::string metrics_text(const ServerState& state, const std::string& model_name);

}  // namespace common
