#include "common/serving/arrivals.h"

#include <algorithm>
#include <cmath>
#include <istream>
#include <memory>
#include <sstream>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

// A log-normal length with this mean. A spread of 1 puts the median at 61 % of the mean, and one in forty above 4.3
// times the mean.
int draw_length(Random& random, double mean, int max_length) {
  constexpr double kSpread = 1.0;
  const double length = mean * std::exp(kSpread * random.normal() - kSpread * kSpread / 2.0);
  return std::clamp(static_cast<int>(length), 1, max_length);
}

// Keeps a request's result, and ends its text after num_tokens tokens, unless that is 0.
class ResultSink : public RequestSink {
 public:
  ResultSink(ServedEngine& engine, const ServeCallbacks& callbacks, int num_tokens, RequestResult& result)
      : engine_(engine), callbacks_(callbacks), num_tokens_left_(num_tokens), result_(result) {}

  void on_token(int id, int sample, Token token, const TokenLogprobs*) override {
    if (callbacks_.on_token) {
      callbacks_.on_token(id, sample, token);
    }
    if (sample == 0 && num_tokens_left_ > 0 && --num_tokens_left_ == 0) {
      engine_.cancel(id, FinishReason::kStop);
    }
  }
  void on_end(int, RequestResult result) override { result_ = std::move(result); }

 private:
  ServedEngine& engine_;
  const ServeCallbacks& callbacks_;
  int num_tokens_left_;
  RequestResult& result_;
};

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
      throw InputError(format("%s, line %d: expected \"seconds prompt_tokens output_tokens\"", name.c_str(), number));
    }
    if (arrival.time < (arrivals.empty() ? 0.0 : arrivals.back().time)) {
      throw InputError(format("%s, line %d: time goes backwards", name.c_str(), number));
    }
    if (arrival.time > kMaxArrivalTime) {
      throw InputError(format("%s, line %d: later than %.0e seconds", name.c_str(), number, kMaxArrivalTime));
    }
    arrivals.push_back(arrival);
  }
  if (arrivals.empty()) {
    throw InputError(name + ": there are no arrivals in it");
  }
  return arrivals;
}

void check_rate(double rate) {
  if (!(rate == 0.0 || (rate >= 1e-6 && rate <= 1e6))) {
    throw InputError(format("a rate of %g requests a second: it can be from 1e-6 to 1e6", rate));
  }
}

std::vector<double> poisson_times(int count, double rate, std::uint64_t seed) {
  Random random(seed);
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
  Random random(seed);
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
  Random random(seed);
  const auto draw = [&] { return kMinTokens + static_cast<int>(random.below(kMaxOfflineTokens - kMinTokens + 1)); };
  std::vector<Arrival> arrivals;
  for (int i = 0; i < kNumRequests; ++i) {
    const int prompt = draw();
    arrivals.push_back({0.0, prompt, draw()});
  }
  return arrivals;
}

std::vector<RequestResult> serve(ServedEngine& engine, const std::vector<ArrivingRequest>& requests,
                                 const ServeCallbacks& callbacks) {
  std::vector<RequestResult> results(requests.size());
  std::vector<int> ids;
  std::size_t next = 0;
  const auto is_ended = [&] { return callbacks.is_ended && callbacks.is_ended(); };
  const auto cancel_all = [&] {
    for (const int id : ids) {
      engine.cancel(id, FinishReason::kCancelled);
    }
  };
  try {
    while (!is_ended() && (next < requests.size() || !engine.is_idle())) {
      if (engine.is_idle()) {
        engine.clock().wait_until(requests[next].time);
      }
      for (; next < requests.size() && requests[next].time <= engine.clock().now(); ++next) {
        const ArrivingRequest& arriving = requests[next];
        auto sink = std::make_unique<ResultSink>(engine, callbacks, arriving.output_tokens, results[next]);
        ids.push_back(arriving.rejection.empty() ? engine.submit(arriving.request, arriving.time, std::move(sink))
                                                 : engine.reject(arriving.rejection, arriving.time, std::move(sink)));
      }
      if (engine.step() && callbacks.on_step) {
        callbacks.on_step(engine.last_step());
      }
    }
    if (next < requests.size() || !engine.is_idle()) {
      cancel_all();
      while (engine.step()) {  // what is in flight ends with its step
      }
    }
  } catch (...) {
    cancel_all();
    throw;
  }
  results.resize(next);
  return results;
}

}  // namespace common
