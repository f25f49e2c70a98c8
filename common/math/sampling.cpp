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
  // The smallest (2^64 mod bound) values would favour some remainders: they are rejected.
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
float finite_maximum(std::span<const float> logits, Token most_likely) {
  const float maximum = logits[static_cast<std::size_t>(most_likely)];
  if (!std::isfinite(maximum)) {
    throw InputError("the model computes a logit that is +inf");
  }
  return maximum;
}

struct Candidate {
  std::uint32_t depth = 0;
  Token token = 0;
  friend bool operator<(const Candidate& a, const Candidate& b) {
    return a.depth != b.depth ? a.depth < b.depth : a.token < b.token;
  }
};

// weight_of_class, by class.
const std::vector<std::uint64_t>& class_weights() {
  static const std::vector<std::uint64_t> weights = [] {
    std::vector<std::uint64_t> result(kNumClasses);
    for (std::uint32_t index = 0; index < kNumClasses; ++index) {
      result[index] = weight_of_class(index);
    }
    return result;
  }();
  return weights;
}

// The fewest of the most likely candidates whose weights reach the target. Sums them up in groups of classes, and sorts
// only the group in which the target lies.
void keep_top_p(std::vector<Candidate>& candidates, float top_p) {
  constexpr unsigned kGroupBits = 5;  // 32 classes
  const std::vector<std::uint64_t>& weights = class_weights();
  const auto group_of = [](const Candidate& candidate) { return class_of(candidate.depth) >> kGroupBits; };
  std::vector<std::uint64_t> sums(kNumClasses >> kGroupBits);
  std::uint64_t total = 0;
  for (const Candidate& candidate : candidates) {
    const std::uint64_t weight = weights[class_of(candidate.depth)];
    sums[group_of(candidate)] += weight;
    total += weight;
  }
  std::uint64_t missing = top_p_target(top_p, total);
  std::uint32_t last_group = 0;
  while (sums[last_group] < missing) {
    missing -= sums[last_group++];
  }
  const auto middle = std::partition(candidates.begin(), candidates.end(),
                                     [&](const Candidate& candidate) { return group_of(candidate) < last_group; });
  const auto end = std::partition(middle, candidates.end(),
                                  [&](const Candidate& candidate) { return group_of(candidate) == last_group; });
  std::sort(middle, end);
  auto kept = middle;
  for (std::uint64_t mass = 0; mass < missing; ++kept) {
    mass += weights[class_of(kept->depth)];
  }
  candidates.erase(kept, candidates.end());
}

// The tokens that min-p, top-k and then top-p keep, in any order.
std::vector<Candidate> keep_most_likely(std::span<const float> logits, float max_logit,
                                        const SamplingOptions& options) {
  const float least = min_score(options);
  std::vector<Candidate> candidates;
  candidates.reserve(logits.size());
  for (std::size_t token = 0; token < logits.size(); ++token) {
    const float score = score_of(logits[token], max_logit, options.temperature);
    if (score >= least) {
      candidates.push_back({depth_of(score), static_cast<Token>(token)});
    }
  }
  const auto top_k = static_cast<std::size_t>(options.top_k);
  if (top_k > 0 && top_k < candidates.size()) {
    std::nth_element(candidates.begin(), candidates.begin() + options.top_k, candidates.end());
    candidates.resize(top_k);
  }
  if (options.top_p < 1.0F) {
    keep_top_p(candidates, options.top_p);
  }
  return candidates;
}

bool changes_logits(const SamplingOptions& options) {
  return has_penalties(options) || !options.logit_bias.empty() || !options.late_tokens.empty();
}

// Applies the options that depend on the token, its position and the tokens before, in the order that SamplingOptions
// says.
std::vector<float> adjusted(std::span<const float> logits, const SamplingOptions& options, std::int64_t position,
                            std::span<const Token> prompt, std::span<const Token> reply) {
  std::vector<float> result(logits.begin(), logits.end());
  for (const Token token : options.late_tokens) {
    if (position < options.min_length && token >= 0 && static_cast<std::size_t>(token) < result.size()) {
      result[static_cast<std::size_t>(token)] = -std::numeric_limits<float>::infinity();
    }
  }
  for (const auto& [token, bias] : options.logit_bias) {
    if (token >= 0 && static_cast<std::size_t>(token) < result.size()) {
      result[static_cast<std::size_t>(token)] += bias;
    }
  }
  if (!has_penalties(options)) {
    return result;
  }
  std::vector<bool> is_used(logits.size());
  std::vector<int> num_in_reply(logits.size());
  for (const std::span<const Token> tokens : {prompt, reply}) {
    for (const Token token : tokens) {
      const auto index = static_cast<std::size_t>(token);
      if (index < result.size() && !is_used[index]) {
        is_used[index] = true;
        result[index] = penalised(result[index], options.repetition_penalty);
      }
    }
  }
  for (const Token token : reply) {
    const auto index = static_cast<std::size_t>(token);
    if (index < result.size()) {
      num_in_reply[index] += 1;
    }
  }
  for (std::size_t index = 0; index < result.size(); ++index) {
    if (num_in_reply[index] > 0) {
      result[index] =
          penalised_in_reply(result[index], options.presence_penalty, options.frequency_penalty, num_in_reply[index]);
    }
  }
  return result;
}

}  // namespace

Token argmax(std::span<const float> logits) {
  std::size_t best = 0;
  float best_logit = -std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) {
      throw InputError("the model computes NaN as logit " + std::to_string(i));
    }
    if (logits[i] > best_logit) {
      best = i;
      best_logit = logits[i];
    }
  }
  if (best_logit == -std::numeric_limits<float>::infinity()) {
    throw InputError("the model computes -inf for all logits");
  }
  return static_cast<Token>(best);
}

Token drawn_token(Token token) {
  if (token < 0) {
    throw InputError("the model computes NaN or +inf as a logit, or -inf for all");
  }
  return token;
}

std::string problem_of(const SamplingOptions& options) {
  const auto is_share = [](float value) { return value >= 0.0F && value <= 1.0F; };  // NaN is none
  if (!std::isfinite(options.temperature) || options.temperature < 0.0F) {
    return "temperature must be at least 0";
  }
  if (options.top_k < 0) {
    return "top_k must be at least 0";
  }
  if (!is_share(options.top_p)) {
    return "top_p must lie in [0, 1]";
  }
  if (!is_share(options.min_p)) {
    return "min_p must lie in [0, 1]";
  }
  if (!std::isfinite(options.repetition_penalty) || options.repetition_penalty <= 0.0F) {
    return "repetition_penalty must be more than 0";
  }
  if (!std::isfinite(options.presence_penalty) || !std::isfinite(options.frequency_penalty)) {
    return "presence_penalty and frequency_penalty must be finite";
  }
  if (!std::all_of(options.logit_bias.begin(), options.logit_bias.end(),
                   [](const TokenBias& entry) { return std::isfinite(entry.bias); })) {
    return "each logit_bias must be finite";
  }
  return "";
}

bool is_greedy(const SamplingOptions& options) { return options.temperature == 0.0F && !changes_logits(options); }

bool has_penalties(const SamplingOptions& options) {
  return options.repetition_penalty != 1.0F || options.presence_penalty != 0.0F || options.frequency_penalty != 0.0F;
}

float min_score(const SamplingOptions& options) { return std::log(options.min_p); }

Token sample(std::span<const float> logits, const SamplingOptions& options, std::int64_t position, int sample_index,
             std::span<const Token> prompt, std::span<const Token> reply) {
  COMMON_CHECK(problem_of(options).empty(), problem_of(options));
  std::vector<float> changed;
  if (changes_logits(options)) {
    changed = adjusted(logits, options, position, prompt, reply);
    logits = changed;
  }
  const Token most_likely = argmax(logits);
  if (options.temperature == 0.0F) {
    return most_likely;
  }
  const float max_logit = finite_maximum(logits, most_likely);
  const std::uint64_t key = noise_key(options.seed, sample_index, position);
  Token best = most_likely;
  float best_score = gumbel_noise(noise_bits(key, most_likely));
  const auto consider = [&](Token token) {
    const float score = score_of(logits[static_cast<std::size_t>(token)], max_logit, options.temperature);
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

  const bool has_top_k = options.top_k > 0 && static_cast<std::size_t>(options.top_k) < logits.size();
  if (has_top_k || options.top_p < 1.0F || options.min_p > 0.0F) {
    // At a high temperature even the most likely token may be cut: others are level with it.
    best_score = -std::numeric_limits<float>::infinity();
    for (const Candidate& candidate : keep_most_likely(logits, max_logit, options)) {
      consider(candidate.token);
    }
  } else {
    for (std::size_t token = 0; token < logits.size(); ++token) {
      consider(static_cast<Token>(token));
    }
  }
  return best;
}

std::vector<float> log_softmax(std::span<const float> logits) {
  const double maximum = finite_maximum(logits, argmax(logits));
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

TokenLogprobs top_logprobs(std::span<const float> logits, Token drawn, int num_best) {
  const std::vector<float> logprobs = log_softmax(logits);
  const auto entry = [&](Token token) { return TokenLogprob{token, logprobs[static_cast<std::size_t>(token)]}; };
  TokenLogprobs result;
  result.drawn = entry(drawn);
  result.rank += static_cast<int>(
      std::count_if(logprobs.begin(), logprobs.end(), [&](float logprob) { return logprob > result.drawn.logprob; }));
  std::vector<Token> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const std::size_t count = std::min(tokens.size(), static_cast<std::size_t>(num_best));
  std::partial_sort(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count), tokens.end(),
                    [&](Token left, Token right) {
                      const float left_logit = logits[static_cast<std::size_t>(left)];
                      const float right_logit = logits[static_cast<std::size_t>(right)];
                      return left_logit > right_logit || (left_logit == right_logit && left < right);
                    });
  for (std::size_t i = 0; i < count; ++i) {
    result.best.push_back(entry(tokens[i]));
  }
  return result;
}

}  // namespace common
