// When requests arrive, and how long they are: a trace, read from a file or drawn at random.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "../server.h"

namespace stage8 {

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

// Lengths in the shape of a published trace of conversations, ShareGPT as served in Kwon et al., SOSP 2023, figure 11:
// prompts of 161 tokens and replies of 338 on average, and a few that are much longer. Here: log-normal, cut so that
// prompt and reply fit into max_length.
std::vector<Arrival> chat_arrivals(int count, double rate, int max_length, std::uint64_t seed);

// The offline workload that nano-vllm and Mini-SGLang publish figures for: 256 requests at once, prompts and replies of
// 100 to 1,024 tokens each, uniformly distributed.
inline constexpr int kMaxOfflineTokens = 1024;
std::vector<Arrival> offline_arrivals(std::uint64_t seed);

struct ArrivingRequest {
  double time = 0.0;
  GenerationRequest request;
  // The text ends after this many tokens, as if the model had drawn a stop token; 0: it ends by itself.
  int output_tokens = 0;
  // Why it is rejected on arrival; empty: the server decides.
  std::string rejection = {};
};

// Serves all requests, each from its arrival time on, and cancels them if a step throws. sink: of all of them; it may
// be null.
void serve(Server& server, Clock& clock, const std::vector<ArrivingRequest>& requests, const TokenSink& sink);

}  // namespace
