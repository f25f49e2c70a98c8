// When requests arrive and how long they are: a trace, read from a file or drawn at random; and serve(), which runs it.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "common/serving/served_engine.h"

namespace common {

struct Arrival {
  double time = 0.0;  // seconds
  int prompt_tokens = 0;
  int output_tokens = 0;
};

// Seconds that a trace may last: 30 years.
inline constexpr double kMaxArrivalTime = 1e9;

// One arrival per line: "seconds prompt_tokens output_tokens", in the order of time; '#' starts a comment. Throws
// InputError naming the line.
std::vector<Arrival> read_arrivals(std::istream& input, const std::string& name);

// Throws InputError unless the rate, in requests a second, is 0 or from 1e-6 to 1e6.
void check_rate(double rate);

// Arrival times of a Poisson process: gaps of mean 1 / rate, exponentially distributed. Rate 0: all at time 0.
std::vector<double> poisson_times(int count, double rate, std::uint64_t seed);

// Lengths distributed as in a published trace of conversations, ShareGPT as served in Kwon et al., SOSP 2023, figure
// 11: prompts of 161 tokens and replies of 338 on average, and a few that are much longer. Here: log-normal, cut so
// that prompt and reply fit into max_length.
std::vector<Arrival> chat_arrivals(int count, double rate, int max_length, std::uint64_t seed);

// The offline workload that nano-vllm and Mini-SGLang publish figures for: 256 requests at once, prompts and replies of
// 100 to 1,024 tokens each, uniformly distributed.
inline constexpr int kMaxOfflineTokens = 1024;
std::vector<Arrival> offline_arrivals(std::uint64_t seed);

struct ArrivingRequest {
  double time = 0.0;
  GenerationRequest request;
  // The text ends after this number of tokens, as if the model had drawn a stop token; 0: it ends by itself.
  int output_tokens = 0;
  // The reason to reject the request on arrival; empty: the engine decides.
  std::string rejection = {};
};

// The callbacks of serve(); each may be null.
struct ServeCallbacks {
  std::function<void(int id, int sample, Token token)> on_token = nullptr;
  std::function<void(const StepReport& report)> on_step = nullptr;  // after each step
  // Asked before each step, and while serve() waits: true ends the run.
  std::function<bool()> is_ended = nullptr;
};

// Serves all requests, each from its arrival time on. Returns their results in the same order, the order of their ids.
// Cancels the requests if a step throws. If the run is ended before its time, the requests that have arrived are
// cancelled and keep their texts so far, and the others have no results.
std::vector<RequestResult> serve(ServedEngine& engine, const std::vector<ArrivingRequest>& requests,
                                 const ServeCallbacks& callbacks = {});

}  // namespace common
