// The counts since a server began: the one place that counts steps and requests. The table and the JSON of a
// run, GET /metrics and the page all read it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/model/generation.h"
#include "common/serving/distribution.h"
#include "common/serving/served_engine.h"
#include "common/serving/step_report.h"

namespace common {

class Tally {
 public:
  explicit Tally(Keep keep = Keep::kCounts);

  void add(const StepReport& report);
  void add(const RequestResult& result);

  // About the steps.
  StepTotals steps;
  TimeMean slots_used;                     // the share of slots with a token; a shared slot counts once
  TimeMean slots_used_while_memory_short;  // the same, over the steps in which requests waited for blocks
  TimeMean blocks_used;                    // the share of blocks with an owner
  TimeMean running;                        // requests
  Distribution step_tokens;                // tokens of a step that computed something
  double end = 0.0;                        // when the last step ended
  double scheduling_seconds = 0.0;
  double computing_seconds = 0.0;
  double waiting_seconds = 0.0;

  // About steps that only decode, after a step that only decoded.
  std::int64_t decode_steps = 0;
  std::int64_t decode_tokens = 0;
  std::int64_t decode_reads = 0;  // how often a token's K and V were read
  double decode_seconds = 0.0;
  Distribution host_seconds;  // of each such step, without the wait for a GPU

  // About the requests that have ended.
  std::int64_t prompt_tokens = 0;    // of requests that were admitted
  std::int64_t output_tokens = 0;    // of all samples
  Distribution first_token_seconds;  // from arrival to the first token; a search has none before its end
  Distribution between_tokens_seconds;
  Distribution per_token_seconds;  // from arrival to the end, divided by the tokens of the first sample
  Distribution queue_seconds;      // from arrival to admission
  Distribution request_seconds;    // from arrival to the end, of requests that were admitted

  std::int64_t num_ended(FinishReason reason) const { return ended_[static_cast<std::size_t>(reason)]; }
  // Requests that ended by themselves: neither rejected, nor cancelled, nor failed.
  std::int64_t num_finished() const { return num_ended(FinishReason::kLength) + num_ended(FinishReason::kStop); }
  std::int64_t num_preemptions() const { return steps.swapped_out + steps.recomputed; }
  double output_tokens_per_second() const;
  double requests_per_second() const;

 private:
  bool is_decoding_ = false;
  std::array<std::int64_t, 5> ended_ = {};  // by FinishReason
};

}  // namespace common
