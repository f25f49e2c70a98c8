#include "common/math/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <numeric>
#include <string>

#include "common/base/check.h"

namespace common {

std::uint64_t Random::next() {
  // The published constants; unsigned arithmetic wraps, which is part of the algorithm.
  state_ += 0x9E3779B97F4A7C15ULL;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBULL;
  return mixed ^ (mixed >> 31U);
}

double Random::uniform() { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }

std::uint64_t Random::below(std::uint64_t bound) {
  COMMON_CHECK(bound > 0, "nothing lies below 0");
  // 2^64 mod bound values are one too many for a fair remainder: draws that fall on them are thrown away.
  const std::uint64_t surplus = (0 - bound) % bound;
  std::uint64_t drawn = next();
  while (drawn < surplus) {
    drawn = next();
  }
  return drawn % bound;
}

double Random::normal() {
  // The second number of each Box-Muller pair is dropped, so that the state stays one word.
  const double radius_source = 1.0 - uniform();  // in (0, 1]: the logarithm needs it above 0
  const double angle = 2.0 * std::numbers::pi * uniform();
  return std::sqrt(-2.0 * std::log(radius_source)) * std::cos(angle);
}

namespace {

// The largest logit, checked to be one that a softmax can be taken around.
double finite_maximum(std::span<const float> logits) {
  const double maximum = logits[static_cast<std::size_t>(argmax(logits))];
  COMMON_CHECK(std::isfinite(maximum), "a logit is +inf");
  return maximum;
}

void check_options(const SamplingOptions& options) {
  COMMON_CHECK(std::isfinite(options.temperature) && options.temperature >= 0.0F, "temperature must be at least 0");
  COMMON_CHECK(options.top_k >= 0, "top_k must be at least 0");
  COMMON_CHECK(options.top_p >= 0.0F && options.top_p <= 1.0F, "top_p must lie in [0, 1]");
}

// The candidates that top-k and then top-p keep, by rising token id. weights: one per token, not normalised.
std::vector<Token> keep_most_likely(std::span<const float> logits, std::span<const double> weights, int top_k,
                                    double top_p) {
  // Ranks by logit and not by weight: far-off logits all have weight 0 and would lose their order.
  const auto less_likely = [&](Token a, Token b) {
    const float logit_a = logits[static_cast<std::size_t>(a)];
    const float logit_b = logits[static_cast<std::size_t>(b)];
    return logit_a < logit_b || (logit_a == logit_b && a > b);
  };
  std::vector<Token> heap(logits.size());
  std::iota(heap.begin(), heap.end(), 0);
  // A heap gives up the most likely few of a large vocabulary without sorting the rest.
  std::make_heap(heap.begin(), heap.end(), less_likely);

  std::size_t limit = heap.size();
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<Token> kept;
  const auto pop = [&] {
    std::pop_heap(heap.begin(), heap.end(), less_likely);
    kept.push_back(heap.back());
    heap.pop_back();
  };
  if (top_k > 0 && static_cast<std::size_t>(top_k) < limit) {
    limit = static_cast<std::size_t>(top_k);
    while (kept.size() < limit) {
      pop();
    }
    // top_p is a share of what top-k left, not of the whole vocabulary.
    total = 0.0;
    for (const Token token : kept) {
      total += weights[static_cast<std::size_t>(token)];
    }
  }
  if (top_p < 1.0) {
    double mass = 0.0;
    std::size_t count = 0;
    do {  // at least one token stays, whatever top_p
      if (count == kept.size()) {
        pop();
      }
      mass += weights[static_cast<std::size_t>(kept[count])];
      ++count;
    } while (mass < top_p * total && count < limit);
    kept.resize(count);
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

}  // namespace

Token argmax(std::span<const float> logits) {
  std::size_t best = 0;
  float best_logit = -std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    COMMON_CHECK(!std::isnan(logits[i]), "logit " + std::to_string(i) + " is NaN");
    if (logits[i] > best_logit) {
      best = i;
      best_logit = logits[i];
    }
  }
  COMMON_CHECK(best_logit > -std::numeric_limits<float>::infinity(), "no token is possible: all logits are -inf");
  return static_cast<Token>(best);
}

Token sample(std::span<const float> logits, const SamplingOptions& options, Random& random) {
  check_options(options);
  if (options.temperature == 0.0F) {
    return argmax(logits);
  }
  const double maximum = finite_maximum(logits);
  std::vector<double> weights(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    weights[i] = std::exp((logits[i] - maximum) / options.temperature);
  }

  const bool keep_all =
      (options.top_k == 0 || static_cast<std::size_t>(options.top_k) >= logits.size()) && options.top_p == 1.0F;
  std::vector<Token> candidates;
  if (keep_all) {
    candidates.resize(logits.size());
    std::iota(candidates.begin(), candidates.end(), 0);
  } else {
    candidates = keep_most_likely(logits, weights, options.top_k, options.top_p);
  }

  // By token id in both cases, so that neutral options draw the same token as no options.
  double total = 0.0;
  for (const Token token : candidates) {
    total += weights[static_cast<std::size_t>(token)];
  }
  const double target = random.uniform() * total;
  double cumulative = 0.0;
  Token last_possible = candidates.front();
  for (const Token token : candidates) {
    const double weight = weights[static_cast<std::size_t>(token)];
    cumulative += weight;
    if (target < cumulative) {
      return token;
    }
    if (weight > 0.0) {
      last_possible = token;
    }
  }
  return last_possible;  // only if rounding put the target on the very end
}

std::vector<float> log_softmax(std::span<const float> logits) {
  const double maximum = finite_maximum(logits);
  double sum = 0.0;  // at least 1: the maximum itself adds exp(0)
  for (const float logit : logits) {
    sum += std::exp(logit - maximum);
  }
  const double log_sum = std::log(sum);
  std::vector<float> result(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    result[i] = static_cast<float>(logits[i] - maximum - log_sum);
  }
  return result;
}

}  // namespace common
