#include "arrivals.h"

#include <algorithm>
#include <cmath>
#include <istream>
#include <sstream>

#include "common/base/check.h"
#include "common/base/text.h"

namespace stage8 {
namespace {

// A log-normal length with this mean. A spread of 1 puts the median at 61 % of the mean, and one in forty above 4.3
// times the mean.
int draw_length(common::Random& random, double mean, int max_length) {
  constexpr double kSpread = 1.0;
  const double length = mean * std::exp(kSpread * random.normal() - kSpread * kSpread / 2.0);
  return std::clamp(static_cast<int>(length), 1, max_length);
}

}  // namespace

std::vector<Arrival> read_arrivals(std::istream& input, const std::string& name) {
  std::vector<Arrival> arrivals;
  std::string line;
  for (int number = 1; std::getline(input, line); ++number) {
    std::istringstream fields(line.substr(0, line.find('#')));
    Arrival arrival;
    if ((fields >> std::ws).eof()) {
      continue;
    }
    std::string rest;
    const bool complete = static_cast<bool>(fields >> arrival.time >> arrival.prompt_tokens >> arrival.output_tokens);
    if (!complete || fields >> rest || !std::isfinite(arrival.time) || arrival.prompt_tokens < 1 ||
        arrival.output_tokens < 1) {
      throw common::InputError(
          common::format("%s, line %d: expected \"seconds prompt_tokens output_tokens\"", name.c_str(), number));
    }
    if (arrival.time < (arrivals.empty() ? 0.0 : arrivals.back().time)) {
      throw common::InputError(common::format("%s, line %d: time goes backwards", name.c_str(), number));
    }
    if (arrival.time > kMaxArrivalTime) {
      throw common::InputError(
          common::format("%s, line %d: later than %.0e seconds", name.c_str(), number, kMaxArrivalTime));
    }
    arrivals.push_back(arrival);
  }
  if (arrivals.empty()) {
    throw common::InputError(name + ": there are no arrivals in it");
  }
  return arrivals;
}

void check_rate(double rate) {
  if (!(rate == 0.0 || (rate >= 1e-6 && rate <= 1e6))) {
    throw common::InputError(common::format("a rate of %g requests a second: it can be from 1e-6 to 1e6", rate));
  }
}

std::vector<double> poisson_times(int count, double rate, std::uint64_t seed) {
  common::Random random(seed);
  std::vector<double> times;
  double time = 0.0;
  for (int i = 0; i < count; ++i) {
    times.push_back(time);
    time += rate > 0.0 ? -std::log(1.0 - random.uniform()) / rate : 0.0;
  }
  return times;
}

std::vector<Arrival> chat_arrivals(int count, double rate, int max_length, std::uint64_t seed) {
  constexpr double kMeanPrompt = 161.31;
  constexpr double kMeanReply = 337.99;
  COMMON_CHECK(max_length > 1, "a prompt and a reply have a token each");
  common::Random random(seed);
  std::vector<Arrival> arrivals;
  for (const double time : poisson_times(count, rate, seed + 1)) {
    const int prompt = draw_length(random, kMeanPrompt, max_length / 2);
    arrivals.push_back({time, prompt, draw_length(random, kMeanReply, max_length - prompt)});
  }
  return arrivals;
}

std::vector<Arrival> offline_arrivals(std::uint64_t seed) {
  constexpr int kNumRequests = 256;
  constexpr int kMinTokens = 100;
  common::Random random(seed);
  const auto draw = [&] { return kMinTokens + static_cast<int>(random.below(kMaxOfflineTokens - kMinTokens + 1)); };
  std::vector<Arrival> arrivals;
  for (int i = 0; i < kNumRequests; ++i) {
    const int prompt = draw();
    arrivals.push_back({0.0, prompt, draw()});
  }
  return arrivals;
}

void serve(Server& server, Clock& clock, const std::vector<ArrivingRequest>& requests, const TokenSink& sink) {
  const int first = server.num_requests();
  const auto take_token = [&, first](int id, int sample, common::Token token) {
    if (sink) {
      sink(id, sample, token);
    }
    const int length = requests[static_cast<std::size_t>(id - first)].output_tokens;
    if (length > 0 && static_cast<int>(server.output(id).token_times.size()) == length) {
      server.stop(id, common::FinishReason::kStop);
    }
  };
  std::size_t next = 0;
  try {
    while (next < requests.size() || !server.is_idle()) {
      if (server.is_idle()) {
        clock.wait_until(requests[next].time);
      }
      for (; next < requests.size() && requests[next].time <= clock.now(); ++next) {
        const ArrivingRequest& arriving = requests[next];
        if (arriving.rejection.empty()) {
          server.submit(arriving.request, take_token, arriving.time);
        } else {
          server.reject(arriving.rejection, arriving.time);
        }
      }
      server.step();
    }
  } catch (...) {
    for (int id = first; id < server.num_requests(); ++id) {
      server.stop(id, common::FinishReason::kCancelled);
    }
    throw;
  }
}

}  // namespace
