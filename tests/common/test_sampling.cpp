// Random numbers, greedy choice and sampling.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "common/base/check.h"
#include "common/math/gumbel.h"
#include "common/math/sampling.h"
#include "common/model/generation.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/sanitizers.h"

namespace {

using common::CheckError;
using common::InputError;
using common::Random;
using common::SamplingOptions;
using common::Token;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Pearson's statistic. Its mean is the number of free counts and its variance twice that: with a fair sampler and the
// counts used here, less than one seed in ten thousand exceeds mean + 6 standard deviations. The seeds are fixed.
bool fits(const std::vector<int>& counts, const std::vector<double>& probabilities) {
  double draws = 0.0;
  for (const int count : counts) {
    draws += count;
  }
  double statistic = 0.0;
  int num_possible = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double expected = draws * probabilities[i];
    if (expected == 0.0) {
      if (counts[i] != 0) {
        return false;
      }
      continue;
    }
    statistic += (counts[i] - expected) * (counts[i] - expected) / expected;
    ++num_possible;
  }
  const double free_counts = num_possible - 1;
  return statistic <= free_counts + 6.0 * std::sqrt(2.0 * free_counts);
}

std::vector<int> count_samples(const std::vector<float>& logits, const SamplingOptions& options, int draws) {
  std::vector<int> counts(logits.size(), 0);
  for (int position = 0; position < draws; ++position) {
    ++counts[static_cast<std::size_t>(common::sample(logits, options, position))];
  }
  return counts;
}

std::set<Token> tokens_drawn(const std::vector<float>& logits, const SamplingOptions& options) {
  const std::vector<int> counts = count_samples(logits, options, 2000);
  std::set<Token> drawn;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) {
      drawn.insert(static_cast<Token>(i));
    }
  }
  return drawn;
}

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits(probabilities.size());
  std::transform(probabilities.begin(), probabilities.end(), logits.begin(),
                 [](double probability) { return static_cast<float>(std::log(probability)); });
  return logits;
}

SamplingOptions options_of(float temperature, int top_k, float top_p, std::uint64_t seed = 1) {
  return {.temperature = temperature, .top_k = top_k, .top_p = top_p, .seed = seed};
}

}  // namespace

TEST_CASE("random: the published SplitMix64 sequence") {
  // https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
  Random random(1234567);
  CHECK(random.next() == 6457827717110365317ULL);
  CHECK(random.next() == 3203168211198807973ULL);
  CHECK(random.next() == 9817491932198370423ULL);
  CHECK(random.next() == 4593380528125082431ULL);
  CHECK(random.next() == 16408922859458223821ULL);
}

TEST_CASE("random: uniform is the upper 53 bits, in [0, 1)") {
  CHECK(Random(1234567).uniform() == static_cast<double>(6457827717110365317ULL >> 11U) / 9007199254740992.0);
  Random random(2);
  std::vector<int> tenths(10, 0);
  for (int i = 0; i < 100000; ++i) {
    const double value = random.uniform();
    REQUIRE((value >= 0.0 && value < 1.0));
    ++tenths[static_cast<std::size_t>(value * 10.0)];
  }
  CHECK(fits(tenths, std::vector<double>(10, 0.1)));
}

TEST_CASE("random: below stays below its bound, without bias") {
  Random random(3);
  CHECK_THROWS_AS(random.below(0), CheckError);
  CHECK(random.below(1) == 0);
  std::vector<int> sevenths(7, 0);
  for (int i = 0; i < 70000; ++i) {
    const std::uint64_t value = random.below(7);
    REQUIRE(value < 7);
    ++sevenths[value];
  }
  CHECK(fits(sevenths, std::vector<double>(7, 1.0 / 7.0)));

  // A plain remainder by 3 * 2^62 would send half of all draws to the first third.
  constexpr std::uint64_t kThird = std::uint64_t{1} << 62U;
  std::vector<int> thirds(3, 0);
  for (int i = 0; i < 30000; ++i) {
    ++thirds[random.below(3 * kThird) / kThird];
  }
  CHECK(fits(thirds, std::vector<double>(3, 1.0 / 3.0)));
}

TEST_CASE("random: normal has mean 0, variance 1 and the shape of a bell") {
  constexpr int kDraws = 200000;
  Random random(4);
  double sum = 0.0;
  double sum_of_squares = 0.0;
  // Below -1, to 0, to 1, above.
  std::vector<int> parts(4, 0);
  for (int i = 0; i < kDraws; ++i) {
    const double value = random.normal();
    REQUIRE(std::isfinite(value));
    sum += value;
    sum_of_squares += value * value;
    ++parts[value < -1.0 ? 0 : value < 0.0 ? 1 : value < 1.0 ? 2 : 3];
  }
  // Five standard errors: 1 / sqrt(n) for the mean and sqrt(2 / n) for the variance.
  CHECK(std::abs(sum / kDraws) < 5.0 / std::sqrt(kDraws));
  CHECK(std::abs(sum_of_squares / kDraws - 1.0) < 5.0 * std::sqrt(2.0 / kDraws));
  const double tail = 0.5 * std::erfc(1.0 / std::sqrt(2.0));
  CHECK(fits(parts, {tail, 0.5 - tail, 0.5 - tail, tail}));
}

TEST_CASE("argmax: the largest, the lowest index on a tie") {
  CHECK(common::argmax(std::vector<float>{0.0F, 3.0F, 2.0F}) == 1);
  CHECK(common::argmax(std::vector<float>{1.0F, 3.0F, 3.0F, 3.0F}) == 1);
  CHECK(common::argmax(std::vector<float>{-0.0F, 0.0F}) == 0);
  CHECK(common::argmax(std::vector<float>{-5.0F}) == 0);
  CHECK(common::argmax(std::vector<float>{-kInfinity, -kInfinity, -3e38F}) == 2);
}

TEST_CASE("argmax: refuses logits without a maximum") {
  CHECK_THROWS_AS(common::argmax(std::vector<float>{}), InputError);
  CHECK_THROWS_AS(common::argmax(std::vector<float>{-kInfinity, -kInfinity}), InputError);
  for (std::size_t place = 0; place < 3; ++place) {
    std::vector<float> logits = {1.0F, 2.0F, 3.0F};
    logits[place] = kNan;
    CAPTURE(place);
    CHECK_THROWS_AS(common::argmax(logits), InputError);
  }
}

TEST_CASE("gumbel noise: exact at both ends and between, below its bound, with the double exponential's shape") {
  const auto exact = [](std::uint32_t bits) { return -std::log(-std::log1p(-(bits + 0.5) * 0x1.0p-32)); };
  const auto is_close = [&](std::uint32_t bits) {
    // float32 rounds each logarithm and each result between: the error is a few units in the last place of numbers up
    // to 23. Neither v nor 1 - v loses digits near 0.
    return std::abs(common::gumbel_noise(bits) - exact(bits)) < 1e-5;
  };
  CHECK(std::abs(common::gumbel_noise(0xFFFFFFFFU) - -3.130) < 0.001);
  CHECK(std::abs(common::gumbel_noise(0) - 22.874) < 0.001);
  for (int zeros = 0; zeros <= 32; ++zeros) {
    // The smallest number with this many leading zeros has the largest noise.
    const auto smallest = static_cast<std::uint32_t>((std::uint64_t{1} << 32U) >> (zeros + 1U));
    CAPTURE(zeros, smallest);
    CHECK(common::gumbel_noise(smallest) <= common::max_gumbel_noise(zeros));
    CHECK(is_close(smallest));
  }
  Random random(2);
  std::vector<int> tenths(10, 0);
  for (int i = 0; i < 100000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.next() >> 32U);
    REQUIRE(is_close(bits));
    const double probability = std::exp(-std::exp(-static_cast<double>(common::gumbel_noise(bits))));
    ++tenths[static_cast<std::size_t>(probability * 10.0)];
  }
  CHECK(fits(tenths, std::vector<double>(10, 0.1)));
}

TEST_CASE("sample: greedy is argmax, the lowest id on a tie") {
  for (int position = 0; position < 100; ++position) {
    REQUIRE(common::sample(std::vector<float>{1.0F, 7.0F, 7.0F}, options_of(0.0F, 0, 1.0F), position, position) == 1);
  }
}

TEST_CASE("sample: the largest of logit / temperature + noise, although most noise is never computed") {
  Random random(6);
  std::vector<float> logits(3000);
  int num_unlikely = 0;
  for (int position = 0; position < 300; ++position) {
    // A flat distribution, in which any token may win, to a steep one.
    const double spread = 0.1 * (position % 60);
    for (float& logit : logits) {
      logit = static_cast<float>(spread * random.normal());
    }
    const float temperature = position % 2 == 0 ? 1.0F : 0.7F;
    const std::uint64_t key = common::noise_key(9, 4, position);
    const float maximum = logits[static_cast<std::size_t>(common::argmax(logits))];
    std::vector<float> scores;
    for (std::size_t token = 0; token < logits.size(); ++token) {
      scores.push_back((logits[token] - maximum) / temperature +
                       common::gumbel_noise(common::noise_bits(key, static_cast<int>(token))));
    }
    const Token drawn = common::sample(logits, options_of(temperature, 0, 1.0F, 9), position, 4);
    REQUIRE(drawn == common::argmax(scores));
    num_unlikely += drawn != common::argmax(logits) ? 1 : 0;
  }
  CHECK(num_unlikely > 200);
}

TEST_CASE("sample: equal arguments give equal tokens; another seed, sample or position draws independently") {
  const std::vector<double> probabilities = {0.4, 0.1, 0.3, 0.2};
  const std::vector<float> logits = logits_of(probabilities);
  const SamplingOptions options = options_of(1.0F, 0, 1.0F, 3);
  const SamplingOptions next_seed = options_of(1.0F, 0, 1.0F, 4);
  // Counts each pair of tokens: one draw, then a draw whose seed, sample or position is the next.
  std::vector<std::vector<int>> pairs(4, std::vector<int>(16, 0));
  for (int position = 0; position < 20000; ++position) {
    const Token drawn = common::sample(logits, options, position, 5);
    REQUIRE(common::sample(logits, options, position, 5) == drawn);
    const std::vector<Token> neighbours = {
        common::sample(logits, next_seed, position, 5), common::sample(logits, options, position, 6),
        common::sample(logits, options, position + 1, 5), common::sample(logits, options, 5, position)};
    for (std::size_t i = 0; i < neighbours.size(); ++i) {
      ++pairs[i][static_cast<std::size_t>(drawn) * 4 + static_cast<std::size_t>(neighbours[i])];
    }
  }
  std::vector<double> expected;
  for (const double first : probabilities) {
    for (const double second : probabilities) {
      expected.push_back(first * second);
    }
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    CAPTURE(i);
    CHECK(fits(pairs[i], expected));
  }
}

TEST_CASE("sample: rounding moves a draw only if two tokens are nearly equal") {
  // A walk through cumulative probabilities would have 5,000 boundaries, each of which every logit moves.
  Random random(12);
  std::vector<float> logits(5000);
  std::vector<float> rounded(5000);
  int num_different = 0;
  for (int position = 0; position < 1000; ++position) {
    for (std::size_t i = 0; i < logits.size(); ++i) {
      logits[i] = static_cast<float>(random.normal());
      rounded[i] = logits[i] + static_cast<float>(1e-5 * random.normal());
    }
    num_different += common::sample(logits, options_of(1.0F, 0, 1.0F), position) !=
                             common::sample(rounded, options_of(1.0F, 0, 1.0F), position)
                         ? 1
                         : 0;
  }
  CHECK(num_different <= 1);
}

TEST_CASE("sample: draws by the softmax at a temperature") {
  const std::vector<double> probabilities = {0.4, 0.05, 0.3, 0.15, 0.1};
  const std::vector<float> logits = logits_of(probabilities);
  CHECK(fits(count_samples(logits, options_of(1.0F, 0, 1.0F), 500000), probabilities));
  for (const double temperature : {0.5, 2.0}) {
    CAPTURE(temperature);
    // softmax(log(p) / T) is p^(1/T), normalised.
    std::vector<double> heated;
    double sum = 0.0;
    for (const double probability : probabilities) {
      heated.push_back(std::pow(probability, 1.0 / temperature));
      sum += heated.back();
    }
    for (double& probability : heated) {
      probability /= sum;
    }
    const std::vector<int> counts = count_samples(logits, options_of(static_cast<float>(temperature), 0, 1.0F), 100000);
    CHECK(fits(counts, heated));
    CHECK_FALSE(fits(counts, probabilities));
  }
}

TEST_CASE("sample: top-k and top-p keep the odds of what they keep") {
  const std::vector<float> logits = logits_of({0.1, 0.4, 0.2, 0.3});
  const std::vector<double> best_two = {0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0};
  CHECK(fits(count_samples(logits, options_of(1.0F, 2, 1.0F), 100000), best_two));
  CHECK(fits(count_samples(logits, options_of(1.0F, 0, 0.6F), 100000), best_two));
}

TEST_CASE("sample: a million draws with each filter have the filter's distribution") {
  // 30 tokens, of probabilities from 0.3 down. The exact distributions are computed here, token by token.
  Random random(31);
  std::vector<double> probabilities;
  double sum = 0.0;
  for (int i = 0; i < 30; ++i) {
    probabilities.push_back(std::exp(2.0 * random.normal()));
    sum += probabilities.back();
  }
  for (double& probability : probabilities) {
    probability /= sum;
  }
  const std::vector<float> logits = logits_of(probabilities);
  const SamplingOptions all_filters[] = {
      {.temperature = 1.0F},
      {.temperature = 0.7F},
      {.temperature = 1.0F, .top_k = 7},
      {.temperature = 1.0F, .top_p = 0.9F},
      {.temperature = 1.0F, .min_p = 0.05F},
      {.temperature = 1.5F, .top_k = 20, .top_p = 0.95F, .min_p = 0.02F},
  };
  for (SamplingOptions options : all_filters) {
    CAPTURE(options.temperature, options.top_k, options.top_p, options.min_p);
    std::vector<std::size_t> order(probabilities.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](std::size_t left, std::size_t right) { return probabilities[left] > probabilities[right]; });
    const auto heated = [&](std::size_t token) {
      return std::pow(probabilities[token], 1.0 / static_cast<double>(options.temperature));
    };
    std::erase_if(order, [&](std::size_t token) { return heated(token) < options.min_p * heated(order.front()); });
    order.resize(options.top_k > 0 ? std::min(order.size(), static_cast<std::size_t>(options.top_k)) : order.size());
    double total = 0.0;
    for (const std::size_t token : order) {
      total += heated(token);
    }
    std::vector<double> expected(probabilities.size(), 0.0);
    double kept = 0.0;
    for (std::size_t i = 0; i < order.size() && kept < options.top_p * total; ++i) {
      expected[order[i]] = heated(order[i]);
      kept += heated(order[i]);
    }
    for (double& probability : expected) {
      probability /= kept;
    }
    options.seed = 5;
    const std::vector<int> counts = count_samples(logits, options, tests::kSanitized ? 200'000 : 1'000'000);
    CHECK(fits(counts, expected));
    if (kept < sum) {
      CHECK(fits(counts, probabilities) ==
            (options.temperature == 1.0F && order.size() == 30 && options.top_p == 1.0F));
    }
  }
}

TEST_CASE("sample: min-p keeps tokens that are likely enough compared with the best") {
  const std::vector<float> logits = logits_of({0.1, 0.4, 0.2, 0.3});
  CHECK(tokens_drawn(logits, {.temperature = 1.0F, .min_p = 0.24F}) == std::set<Token>{0, 1, 2, 3});
  CHECK(tokens_drawn(logits, {.temperature = 1.0F, .min_p = 0.26F}) == std::set<Token>{1, 2, 3});
  CHECK(tokens_drawn(logits, {.temperature = 1.0F, .min_p = 1.0F}) == std::set<Token>{1});
  CHECK(tokens_drawn({2.0F, 2.0F, 1.0F}, {.temperature = 1.0F, .min_p = 1.0F}) == std::set<Token>{0, 1});
  // Temperature comes first: the square roots of 0.1 and 0.4 are as 1 to 2.
  CHECK(tokens_drawn(logits, {.temperature = 2.0F, .min_p = 0.49F}) == std::set<Token>{0, 1, 2, 3});
  // Then min-p, and then top-p takes half of what min-p leaves.
  CHECK(tokens_drawn({0.0F, 0.0F, 0.0F, 0.0F, -1.0F, -1.0F, -1.0F, -1.0F},
                     {.temperature = 1.0F, .top_p = 0.5F, .min_p = 0.5F}) == std::set<Token>{0, 1});
}

TEST_CASE("sample: the repetition penalty makes used tokens less likely, each once") {
  const std::vector<float> logits = {2.0F, 1.5F, -1.0F, -1.5F};
  const auto greedy = [&](float penalty, const std::vector<Token>& prompt, const std::vector<Token>& reply) {
    return common::sample(logits, {.repetition_penalty = penalty}, 9, 0, prompt, reply);
  };
  CHECK(greedy(1.0F, {0}, {1}) == 0);
  CHECK(greedy(1.5F, {0}, {}) == 1);  // 2 / 1.5 = 1.33
  CHECK(greedy(1.3F, {0}, {}) == 0);  // 2 / 1.3 = 1.54
  CHECK(greedy(1.3F, {0, 0}, {0}) == 0);
  CHECK(greedy(1.5F, {3}, {0}) == 1);
  CHECK(greedy(100.0F, {0}, {1}) == 0);  // 0.02 and 0.015, and the negative ones are lower still
  CHECK(greedy(1e-3F, {2}, {}) == 0);
  CHECK(greedy(0.5F, {}, {1}) == 1);      // a penalty below 1 rewards
  CHECK(greedy(1.5F, {-1, 4}, {}) == 0);  // no tokens of this vocabulary
  const std::vector<double> probabilities = {0.5, 0.25, 0.25};
  std::vector<int> counts(3, 0);
  const std::vector<Token> used = {0};
  for (int position = 0; position < 100000; ++position) {
    ++counts[static_cast<std::size_t>(common::sample(
        std::vector<float>{2.0F, 1.0F, 1.0F}, {.temperature = 1.0F, .repetition_penalty = 2.0F}, position, 0, used))];
  }
  CHECK(fits(counts, std::vector<double>(3, 1.0 / 3.0)));
  CHECK_FALSE(fits(counts, probabilities));
}

TEST_CASE("sample: presence and frequency penalties count the reply alone, and a bias is added to its token") {
  const std::vector<float> logits = {2.0F, 1.5F, -1.0F, -1.5F};
  const auto greedy = [&](const SamplingOptions& options, const std::vector<Token>& reply) {
    return common::sample(logits, options, 9, 0, std::vector<Token>{0, 0, 0}, reply);
  };
  CHECK(greedy({.presence_penalty = 2.0F}, {}) == 0);  // the prompt's tokens do not count
  CHECK(greedy({.presence_penalty = 0.6F}, {0}) == 1);
  CHECK(greedy({.presence_penalty = 0.4F}, {0, 0, 0}) == 0);  // once, however often
  CHECK(greedy({.frequency_penalty = 0.2F}, {0, 0}) == 0);
  CHECK(greedy({.frequency_penalty = 0.2F}, {0, 0, 0}) == 1);
  CHECK(greedy({.presence_penalty = 0.3F, .frequency_penalty = 0.3F}, {0}) == 1);
  CHECK(greedy({.presence_penalty = -4.0F}, {2}) == 2);  // a negative one rewards
  CHECK(greedy({.frequency_penalty = 2.0F}, {-1, 4, 1 << 30}) == 0);
  CHECK(greedy({.logit_bias = {{3, 4.0F}}}, {}) == 3);
  CHECK(greedy({.logit_bias = {{3, 3.4F}}}, {}) == 0);
  CHECK(greedy({.logit_bias = {{0, -100.0F}, {1, -100.0F}, {-1, 100.0F}, {4, 100.0F}}}, {}) == 2);
  // In this order: (-1 + 2) / 2 is 0.5, and -1 * 2 + 2 would be 0.
  CHECK(common::sample(std::vector<float>{0.25F, -1.0F}, {.repetition_penalty = 2.0F, .logit_bias = {{1, 2.0F}}}, 9, 0,
                       std::vector<Token>{1}) == 1);
  for (const SamplingOptions& options :
       {SamplingOptions{.presence_penalty = 0.1F}, SamplingOptions{.frequency_penalty = -0.1F},
        SamplingOptions{.logit_bias = {{0, 0.0F}}}, SamplingOptions{.late_tokens = {0}},
        SamplingOptions{.repetition_penalty = 1.1F}}) {
    CHECK_FALSE(common::is_greedy(options));
  }
  CHECK(common::is_greedy(SamplingOptions{}));
}

TEST_CASE("sample: late tokens are not drawn before there are enough others, whatever their logits and biases") {
  const std::vector<float> logits = {1.0F, kInfinity, std::nanf(""), 3.0F};
  const SamplingOptions options = {
      .temperature = 0.5F, .logit_bias = {{0, 50.0F}, {3, 50.0F}}, .late_tokens = {3, 2, -1, 1, 4}, .min_length = 7};
  CHECK(common::sample(logits, options, 6) == 0);
  CHECK_THROWS_AS(common::sample(logits, options, 7), common::InputError);
  CHECK(common::sample(std::vector<float>{1.0F, 2.0F, 3.0F, 3.5F}, options, 7) == 3);
}

TEST_CASE("next_token: the forced tokens first, then none that stops before there are enough") {
  const std::vector<float> logits = {3.0F, 2.0F, 1.0F, 0.0F};
  common::Request request;
  request.prompt = {0};
  request.max_new_tokens = 9;
  request.stop_tokens = {0, 1, 77};
  common::Completion completion;
  const auto next = [&] {
    const Token token = common::next_token(request, logits, completion);
    completion.tokens.push_back(token);
    return token;
  };
  CHECK(common::is_greedy(request));
  request.min_tokens = 2;
  CHECK_FALSE(common::needs_logits(request));
  CHECK_FALSE(common::is_greedy(request));
  CHECK(next() == 2);
  CHECK(next() == 2);
  CHECK(next() == 0);
  completion = {};
  request.min_tokens = 0;
  request.num_logprobs = 1;
  CHECK(common::needs_logits(request));
  request.forced = {3, 0};
  CHECK(next() == 3);
  CHECK(next() == 0);
  CHECK(next() == 0);
  CHECK(completion.logprobs[0].rank == 4);  // the model's own
  CHECK(completion.logprobs[0].drawn.logprob == completion.logprobs[1].drawn.logprob - 3.0F);
}

TEST_CASE("scores: weights are powers of e, to 7 digits and the last unit, and ranks are exact") {
  for (std::uint32_t index = 0; index < common::kNumClasses; ++index) {
    const double exact = std::exp(-(index + 0.5) / 1024.0) * 0x1.0p40;
    const auto weight = static_cast<double>(common::weight_of_class(index));
    REQUIRE(std::abs(weight - exact) <= 1.0 + 1e-7 * exact);
  }
  CHECK(common::weight_of_class(common::kNumClasses - 1) == 0);
  CHECK(common::depth_of(-kInfinity) == common::kMaxDepth);
  CHECK(common::depth_of(-32.0F) == common::kMaxDepth);
  CHECK(common::depth_of(-0.0F) == 0);
  CHECK(common::depth_of(-1.0F) == 1U << 25U);
  CHECK(common::class_of(common::depth_of(-1.0F)) == 1024);
  CHECK(common::class_of(common::kMaxDepth) == common::kNumClasses - 1);
  CHECK(common::top_p_target(0.0F, 7) == 1);
  CHECK(common::top_p_target(0.5F, 7) == 4);
  CHECK(common::top_p_target(1.0F, 7) == 7);
}

TEST_CASE("top_logprobs: the drawn token, its rank and the best, of the distribution before all options") {
  const std::vector<float> logits = logits_of({0.1, 0.4, 0.4, 0.1});
  const common::TokenLogprobs result = common::top_logprobs(logits, 3, 3);
  CHECK(result.drawn.token == 3);
  CHECK(std::abs(result.drawn.logprob - std::log(0.1)) < 1e-6);
  CHECK(result.rank == 3);
  REQUIRE(result.best.size() == 3);
  CHECK(result.best[0].token == 1);
  CHECK(result.best[1].token == 2);
  CHECK(result.best[2].token == 0);
  CHECK(std::abs(result.best[1].logprob - std::log(0.4)) < 1e-6);
  CHECK(common::top_logprobs(logits, 1, 9).best.size() == 4);
  CHECK(common::top_logprobs(logits, 1, 9).rank == 1);
}

TEST_CASE("sample: top-k keeps k tokens, equal logits by lower id") {
  CHECK(tokens_drawn({0.0F, 0.0F, 0.0F, 0.0F, 0.0F}, options_of(1.0F, 3, 1.0F)) == std::set<Token>{0, 1, 2});
  CHECK(tokens_drawn({0.0F, 1.0F, 0.0F, 1.0F, 1.0F}, options_of(1.0F, 2, 1.0F)) == std::set<Token>{1, 3});
  CHECK(tokens_drawn({0.0F, 1.0F, 0.0F, 1.0F, 1.0F}, options_of(1.0F, 4, 1.0F)) == std::set<Token>{0, 1, 3, 4});
  CHECK(tokens_drawn({2.0F, 3.0F, 3.0F}, options_of(100.0F, 1, 1.0F)) == std::set<Token>{1});
  CHECK(tokens_drawn({0.0F, 0.0F}, options_of(1.0F, 100, 1.0F)) == std::set<Token>{0, 1});
}

TEST_CASE("sample: at a high temperature even the token with the largest logit may be cut") {
  // Scores are compared in units of 2^-25: the last three tokens are equal, and the lowest of their ids is kept.
  const std::vector<float> logits = {9.999999F, 10.0F, 10.000002F, 10.000003F};
  CHECK(tokens_drawn(logits, options_of(100.0F, 1, 1.0F)) == std::set<Token>{1});
  CHECK(tokens_drawn(logits, options_of(100.0F, 2, 1.0F)) == std::set<Token>{1, 2});
  CHECK(tokens_drawn(logits, options_of(100.0F, 0, 0.25F)) == std::set<Token>{1});
  CHECK(tokens_drawn(logits, options_of(100.0F, 0, 0.5F)) == std::set<Token>{1, 2});
}

TEST_CASE("sample: top-p keeps the smallest set that reaches it") {
  const std::vector<float> logits = logits_of({0.125, 0.25, 0.5, 0.125});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.49F)) == std::set<Token>{2});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.51F)) == std::set<Token>{1, 2});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.74F)) == std::set<Token>{1, 2});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.76F)) == std::set<Token>{0, 1, 2});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.88F)) == std::set<Token>{0, 1, 2, 3});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.0F)) == std::set<Token>{2});
  // Equal logits have weights of exactly 1: two of four tokens reach one half, and the third is not needed.
  CHECK(tokens_drawn({0.0F, 0.0F, 0.0F, 0.0F}, options_of(1.0F, 0, 0.5F)) == std::set<Token>{0, 1});
}

TEST_CASE("sample: temperature comes first, then top-k, then top-p") {
  // top-p keeps half of the four tokens that top-k keeps, not half of all eight.
  const std::vector<float> equal(8, 0.0F);
  CHECK(tokens_drawn(equal, options_of(1.0F, 4, 0.5F)) == std::set<Token>{0, 1});
  // The best token has 90 % at temperature 1, but 75 % at 2, which is too little to reach 80 % alone.
  const std::vector<float> logits = logits_of({0.9, 0.1});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.8F)) == std::set<Token>{0});
  CHECK(tokens_drawn(logits, options_of(2.0F, 0, 0.8F)) == std::set<Token>{0, 1});
}

TEST_CASE("sample: options that cut nothing draw what no options draw") {
  Random numbers(7);
  std::vector<float> logits(50);
  for (float& logit : logits) {
    logit = static_cast<float>(numbers.normal());
  }
  for (int position = 0; position < 1000; ++position) {
    REQUIRE(common::sample(logits, options_of(1.0F, 0, 1.0F), position) ==
            common::sample(logits, options_of(1.0F, 50, 0.9999999F), position));
  }
}

TEST_CASE("sample: an impossible token is never drawn, a far one never ranks by chance") {
  CHECK(tokens_drawn({-kInfinity, 0.0F, -kInfinity, 0.0F}, options_of(1.0F, 0, 1.0F)) == std::set<Token>{1, 3});
  CHECK(tokens_drawn({-kInfinity, 0.0F, -kInfinity, 0.0F}, options_of(1.0F, 3, 1.0F)) == std::set<Token>{1, 3});
  CHECK(tokens_drawn({-1e30F, 1e30F, 0.0F}, options_of(1.0F, 2, 1.0F)) == std::set<Token>{1});
  CHECK(tokens_drawn({5.0F, 5.1F, 5.0F}, options_of(1e-30F, 0, 1.0F)) == std::set<Token>{1});
}

TEST_CASE("sample: the same seed gives the same tokens, on every machine") {
  const std::vector<float> logits = {0.5F, 1.5F, -1.0F, 0.0F, 2.0F, 1.0F, -0.5F, 0.25F};
  const SamplingOptions options = options_of(0.8F, 6, 0.95F, 42);
  std::vector<Token> drawn;
  drawn.reserve(16);
  for (int position = 0; position < 16; ++position) {
    drawn.push_back(common::sample(logits, options, position));
  }
  CHECK(drawn == std::vector<Token>{4, 0, 5, 0, 1, 4, 5, 0, 1, 4, 5, 1, 4, 0, 4, 4});
}

TEST_CASE("sample: refuses logits and options that make no sense") {
  const SamplingOptions plain = options_of(1.0F, 0, 1.0F);
  CHECK_THROWS_AS(common::sample(std::vector<float>{}, plain, 0), InputError);
  CHECK_THROWS_AS(common::sample(std::vector<float>{0.0F, kNan}, plain, 0), InputError);
  CHECK_THROWS_AS(common::sample(std::vector<float>{0.0F, kInfinity}, plain, 0), InputError);
  CHECK_THROWS_AS(common::sample(std::vector<float>{-kInfinity}, plain, 0), InputError);
  const std::vector<float> logits = {0.0F, 1.0F};
  CHECK(common::problem_of(plain).empty());
  for (const SamplingOptions& options :
       {options_of(-1.0F, 0, 1.0F), options_of(kNan, 0, 1.0F), options_of(kInfinity, 0, 1.0F),
        options_of(1.0F, -1, 1.0F), options_of(1.0F, 0, -0.1F), options_of(1.0F, 0, 1.1F), options_of(1.0F, 0, kNan),
        SamplingOptions{.min_p = -0.1F}, SamplingOptions{.min_p = 1.1F}, SamplingOptions{.min_p = kNan},
        SamplingOptions{.repetition_penalty = 0.0F}, SamplingOptions{.repetition_penalty = -1.0F},
        SamplingOptions{.repetition_penalty = kNan}, SamplingOptions{.repetition_penalty = kInfinity},
        SamplingOptions{.presence_penalty = kNan}, SamplingOptions{.frequency_penalty = kInfinity},
        SamplingOptions{.logit_bias = {{0, 0.0F}, {1, kNan}}}, SamplingOptions{.logit_bias = {{0, -kInfinity}}}}) {
    CAPTURE(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty);
    CHECK_FALSE(common::problem_of(options).empty());
    CHECK_THROWS_AS(common::sample(logits, options, 0), CheckError);
  }
}

TEST_CASE("log_softmax: logarithms of the probabilities, however large the logits") {
  const std::vector<double> expected = {std::log(0.1), std::log(0.2), std::log(0.7)};
  for (const float shift : {0.0F, 1024.0F, -1024.0F}) {
    CAPTURE(shift);
    std::vector<float> logits = logits_of({0.1, 0.2, 0.7});
    for (float& logit : logits) {
      logit += shift;
    }
    // Adding 1024 rounds a logit by up to half of 2^-13, and a difference of two logits by twice that.
    CHECK(tests::compare(common::log_softmax(logits), expected, {.absolute = 1.3e-4}).empty());
  }
  CHECK(common::log_softmax(std::vector<float>{3e38F, -3e38F})[0] == 0.0F);
  CHECK(common::log_softmax(std::vector<float>{0.0F, -kInfinity}) == std::vector<float>{0.0F, -kInfinity});
}

TEST_CASE("log_softmax: sums in double") {
  // One token of weight 1 and 2^20 tokens of weight 2^-25 each: in float, every small one would be lost beside the 1.
  std::vector<float> logits((1U << 20U) + 1, static_cast<float>(-25.0 * std::log(2.0)));
  logits[0] = 0.0F;
  CHECK(std::abs(common::log_softmax(logits)[0] + std::log1p(1.0 / 32.0)) < 1e-6);
}

TEST_CASE("log_softmax: refuses what argmax refuses, and +inf") {
  CHECK_THROWS_AS(common::log_softmax(std::vector<float>{}), InputError);
  CHECK_THROWS_AS(common::log_softmax(std::vector<float>{0.0F, kNan}), InputError);
  CHECK_THROWS_AS(common::log_softmax(std::vector<float>{-kInfinity}), InputError);
  CHECK_THROWS_AS(common::log_softmax(std::vector<float>{0.0F, kInfinity}), InputError);
}
