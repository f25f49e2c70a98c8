// Measures a run: how long requests wait, and how full the memory is. Fed with every step, read at the end.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "../server.h"

namespace stage8 {

// Of a set of numbers; all 0 if it is empty, which is not the same as numbers that are 0. median and p99: the smallest
// that at least 50 % or 99 % of them do not exceed.
struct Spread {
  double mean = 0.0;
  double median = 0.0;
  double p99 = 0.0;
  bool is_empty = true;
};
Spread spread_of(std::vector<double> values);

// Mean over time: every step counts for as long as it takes.
class TimeMean {
 public:
  void add(double value, double seconds) {
    sum_ += value * seconds;
    seconds_ += seconds;
  }
  double value() const { return seconds_ > 0.0 ? sum_ / seconds_ : 0.0; }

 private:
  double sum_ = 0.0;
  double seconds_ = 0.0;
};

struct Metrics {
  // Of the steps.
  TimeMean slots_used;                     // that hold a token, share of the cache; a shared one counts once
  TimeMean slots_used_while_memory_short;  // the same, over the steps in which requests waited for blocks
  TimeMean blocks_used;                    // that have an owner, share of the cache
  TimeMean running;                        // requests
  StepTotals totals;
  double end = 0.0;  // of the last step
  double scheduling_seconds = 0.0;
  double computing_seconds = 0.0;
  double waiting_seconds = 0.0;
  // Of steps that only decode, as the step before did.
  std::vector<double> host_seconds;  // of each of them, without waiting for a GPU
  std::int64_t decode_steps = 0;
  std::int64_t decode_tokens = 0;
  std::int64_t decode_reads = 0;  // of a token's K and V
  double decode_seconds = 0.0;

  void add(const StepReport& report);

 private:
  bool is_decoding_ = false;
};

struct ServingFigures {
  int finished = 0;
  int rejected = 0;
  int failed = 0;
  int cancelled = 0;
  std::int64_t output_tokens = 0;  // of all samples
  double output_tokens_per_second = 0.0;
  double requests_per_second = 0.0;
  Spread first_token;     // seconds from arrival to the first token; a search has none before its end
  Spread between_tokens;  // seconds
  Spread per_token;       // seconds from arrival to the end, divided by the tokens of the reply
};
ServingFigures figures_of(const Server& server, const Metrics& metrics);

// On a GPU, for the steps that only decode: the time that reading their weights, K and V takes at the measured
// bandwidth of the memory, as a share of the time that the steps took. 0: there were none.
double roofline_share(const Server& server, const Metrics& metrics);

// The report as tables, and as JSON.
std::string metrics_table(const Server& server, const Metrics& metrics);
nlohmann::ordered_json metrics_json(const Server& server, const Metrics& metrics);

}  // namespace
