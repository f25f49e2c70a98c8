#include "common/math/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <numeric>
#include <string>

#include "common/base/check.h"
#include "common/math/gumbel.h"

namespace common {

std::uint64_t Random::next() { return splitmix64(seed_, num_drawn_++); }

double Random::uniform() { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }

std::uint64_t Random::below(std::uint64_t bound) {
  COMMON_CHECK(bound > 0, "the bound must be positive");
  // The 2^64 mod bound smallest values would favour some remainders: they are rejected.
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

// The largest logit, which must be finite: the softmax is computed relative to it.
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

// The tokens that top-k and then top-p keep, in order of token id.
std::vector<Token> keep_most_likely(std::span<const float> logits, float temperature, int top_k, double top_p) {
  const double maximum = finite_maximum(logits);
  const auto weight = [&](Token token) {  // proportional to its probability
    return std::exp((logits[static_cast<std::size_t>(token)] - maximum) / temperature);
  };
  // Ranks by logit, not by weight: the weights of all very small logits are 0.
  const auto less_likely = [&](Token a, Token b) {
    const float logit_a = logits[static_cast<std::size_t>(a)];
    const float logit_b = logits[static_cast<std::size_t>(b)];
    return logit_a < logit_b || (logit_a == logit_b && a > b);
  };
  std::vector<Token> heap(logits.size());
  std::iota(heap.begin(), heap.end(), 0);
  // A heap yields the few most likely tokens of a large vocabulary without sorting the rest.
  std::make_heap(heap.begin(), heap.end(), less_likely);

  std::size_t limit = heap.size();
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
  }
  if (top_p < 1.0) {
    // top_p is a share of what top-k kept, not of the whole vocabulary.
    double total = 0.0;
    for (const Token token : kept.empty() ? heap : kept) {
      total += weight(token);
    }
    double mass = 0.0;
    std::size_t count = 0;
    do {  // keeps at least one token, even if top_p is 0
      if (count == kept.size()) {
        pop();
      }
      mass += weight(kept[count]);
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

Token sample(std::span<const float> logits, const SamplingOptions& options, std::int64_t position, int sample_index) {
  check_options(options);
  const Token most_likely = argmax(logits);
  if (options.temperature == 0.0F) {
    return most_likely;
  }
  const auto maximum = static_cast<float>(finite_maximum(logits));
  const std::uint64_t key = noise_key(options.seed, sample_index, position);
  Token best = most_likely;
  float best_score = gumbel_noise(noise_bits(key, most_likely));
  const auto consider = [&](Token token) {
    // Relative to the maximum: divided by a tiny temperature, the difference may become -inf, but never NaN.
    const float score = (logits[static_cast<std::size_t>(token)] - maximum) / options.temperature;
    // Most tokens cannot win with any noise, and most of the others cannot win with noise as small as the leading zeros
    // of their hash allow. A large vocabulary takes some ten thousand comparisons, a few thousand hashes and a few
    // dozen logarithms.
    if (score + max_gumbel_noise(32) < best_score) {
      return;
    }
    const std::uint32_t bits = noise_bits(key, token);
    if (score + max_gumbel_noise(std::countl_zero(bits)) < best_score) {
      return;
    }
    const float noisy_score = score + gumbel_noise(bits);
    if (noisy_score > best_score || (noisy_score == best_score && token < best)) {
      best = token;
      best_score = noisy_score;
    }
  };

  const bool keep_all =
      (options.top_k == 0 || static_cast<std::size_t>(options.top_k) >= logits.size()) && options.top_p == 1.0F;
  if (keep_all) {
    for (std::size_t token = 0; token < logits.size(); ++token) {
      consider(static_cast<Token>(token));
    }
  } else {
    for (const Token token : keep_most_likely(logits, options.temperature, options.top_k, options.top_p)) {
      consider(token);
    }
  }
  return best;
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
