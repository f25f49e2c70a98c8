// What common/ promises outside the model: sampling, comparing, the reference attention, threads, reports, measuring.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/app/block_map.h"
#include "common/app/compare.h"
#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/parallel.h"
#include "common/base/platform.h"
#include "common/base/tensor.h"
#include "common/base/text.h"
#include "common/math/gumbel.h"
#include "common/math/reference_attention.h"
#include "common/math/sampling.h"
#include "tests/support/catch.h"

namespace {

using common::CheckError;
using common::MapCell;
using common::Matrix;
using common::Random;
using common::SamplingOptions;
using common::Table;
using common::Token;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Pearson's statistic. Its mean is the number of free counts and its variance twice that: a fair sampler exceeds
// mean + 6 standard deviations less than once in ten thousand seeds (for the counts used here), and seeds are fixed.
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

TEST_CASE("argmax: refuses what has no answer") {
  CHECK_THROWS_AS(common::argmax(std::vector<float>{}), CheckError);
  CHECK_THROWS_AS(common::argmax(std::vector<float>{-kInfinity, -kInfinity}), CheckError);
  for (std::size_t place = 0; place < 3; ++place) {
    std::vector<float> logits = {1.0F, 2.0F, 3.0F};
    logits[place] = kNan;
    CAPTURE(place);
    CHECK_THROWS_AS(common::argmax(logits), CheckError);
  }
}

TEST_CASE("gumbel noise: exact at both ends and between, below its bound, with the double exponential's shape") {
  const auto exact = [](std::uint32_t bits) { return -std::log(-std::log1p(-(bits + 0.5) * 0x1.0p-32)); };
  const auto is_close = [&](std::uint32_t bits) {
    // float32 rounds v, each logarithm and what lies between: a few units in the last place of numbers up to 23. Where
    // v is near 1 its rounding, to 2^-24 at worst, is divided by 1 - v and by the inner logarithm.
    const double v = (bits + 0.5) * 0x1.0p-32;
    return std::abs(common::gumbel_noise(bits) - exact(bits)) < 1e-5 + 0x1.0p-24 / ((1.0 - v) * -std::log1p(-v));
  };
  CHECK(common::gumbel_noise(0xFFFFFFFFU) == Approx(-2.811).margin(0.001));  // v is 1 - 2^-24 here, no longer 1
  CHECK(common::gumbel_noise(0) == Approx(22.874).margin(0.001));
  for (int zeros = 0; zeros <= 32; ++zeros) {
    // The smallest number with so many leading zeros has the largest noise.
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

TEST_CASE("sample: equal arguments give equal tokens; another seed, sample or position draws by itself") {
  const std::vector<double> probabilities = {0.4, 0.1, 0.3, 0.2};
  const std::vector<float> logits = logits_of(probabilities);
  const SamplingOptions options = options_of(1.0F, 0, 1.0F, 3);
  const SamplingOptions next_seed = options_of(1.0F, 0, 1.0F, 4);
  // How often each pair of tokens comes: first one draw, then one whose seed, sample or position is the next.
  std::vector<std::vector<int>> pairs(4, std::vector<int>(16, 0));
  for (int position = 0; position < 20000; ++position) {
    const Token drawn = common::sample(logits, options, position, 5);
    REQUIRE(common::sample(logits, options, position, 5) == drawn);
    const std::vector<Token> neighbours = {
        common::sample(logits, next_seed, position, 5), common::sample(logits, options, position, 6),
        common::sample(logits, options, position + 1, 5), common::sample(logits, options, 5, position)};
    for (std::size_t i = 0; i < neighbours.size(); ++i) {
      ++pairs[i][static_cast<std::size_t>(drawn * 4 + neighbours[i])];
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

TEST_CASE("sample: rounding moves a draw only where two tokens are level") {
  // A walk through cumulative probabilities would cross one of 5,000 boundaries, each of which every logit moves.
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

TEST_CASE("sample: top-k keeps k tokens, equal logits by lower id") {
  CHECK(tokens_drawn({0.0F, 0.0F, 0.0F, 0.0F, 0.0F}, options_of(1.0F, 3, 1.0F)) == std::set<Token>{0, 1, 2});
  CHECK(tokens_drawn({0.0F, 1.0F, 0.0F, 1.0F, 1.0F}, options_of(1.0F, 2, 1.0F)) == std::set<Token>{1, 3});
  CHECK(tokens_drawn({0.0F, 1.0F, 0.0F, 1.0F, 1.0F}, options_of(1.0F, 4, 1.0F)) == std::set<Token>{0, 1, 3, 4});
  CHECK(tokens_drawn({2.0F, 3.0F, 3.0F}, options_of(100.0F, 1, 1.0F)) == std::set<Token>{1});
  CHECK(tokens_drawn({0.0F, 0.0F}, options_of(1.0F, 100, 1.0F)) == std::set<Token>{0, 1});
}

TEST_CASE("sample: top-p keeps the smallest set that reaches it") {
  const std::vector<float> logits = logits_of({0.125, 0.25, 0.5, 0.125});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.49F)) == std::set<Token>{2});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.51F)) == std::set<Token>{1, 2});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.74F)) == std::set<Token>{1, 2});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.76F)) == std::set<Token>{0, 1, 2});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.88F)) == std::set<Token>{0, 1, 2, 3});
  CHECK(tokens_drawn(logits, options_of(1.0F, 0, 0.0F)) == std::set<Token>{2});
  // Equal logits have weights of exactly 1: half of four tokens is reached by two, and not by three.
  CHECK(tokens_drawn({0.0F, 0.0F, 0.0F, 0.0F}, options_of(1.0F, 0, 0.5F)) == std::set<Token>{0, 1});
}

TEST_CASE("sample: temperature comes first, then top-k, then top-p") {
  // Half of the four tokens that top-k keeps, not of all eight.
  const std::vector<float> equal(8, 0.0F);
  CHECK(tokens_drawn(equal, options_of(1.0F, 4, 0.5F)) == std::set<Token>{0, 1});
  // The best has 90 % at temperature 1, but 75 % at 2: too little to reach 80 % alone.
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
  for (int position = 0; position < 16; ++position) {
    drawn.push_back(common::sample(logits, options, position));
  }
  CHECK(drawn == std::vector<Token>{4, 0, 5, 0, 1, 4, 5, 0, 1, 4, 5, 1, 4, 0, 4, 4});
}

TEST_CASE("sample: refuses logits and options that make no sense") {
  const SamplingOptions plain = options_of(1.0F, 0, 1.0F);
  CHECK_THROWS_AS(common::sample(std::vector<float>{}, plain, 0), CheckError);
  CHECK_THROWS_AS(common::sample(std::vector<float>{0.0F, kNan}, plain, 0), CheckError);
  CHECK_THROWS_AS(common::sample(std::vector<float>{0.0F, kInfinity}, plain, 0), CheckError);
  CHECK_THROWS_AS(common::sample(std::vector<float>{-kInfinity}, plain, 0), CheckError);
  const std::vector<float> logits = {0.0F, 1.0F};
  for (const SamplingOptions& options :
       {options_of(-1.0F, 0, 1.0F), options_of(kNan, 0, 1.0F), options_of(kInfinity, 0, 1.0F),
        options_of(1.0F, -1, 1.0F), options_of(1.0F, 0, -0.1F), options_of(1.0F, 0, 1.1F), options_of(1.0F, 0, kNan)}) {
    CAPTURE(options.temperature, options.top_k, options.top_p);
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
    // Adding 1024 rounds a logit to 2^-13 at worst: half of that, twice.
    CHECK(common::compare(common::log_softmax(logits), expected, {.absolute = 1.3e-4}).empty());
  }
  CHECK(common::log_softmax(std::vector<float>{3e38F, -3e38F})[0] == 0.0F);
  CHECK(common::log_softmax(std::vector<float>{0.0F, -kInfinity}) == std::vector<float>{0.0F, -kInfinity});
}

TEST_CASE("log_softmax: sums in double") {
  // One token of weight 1 and 2^20 of weight 2^-25 each: in float every small one would be lost beside the 1.
  std::vector<float> logits((1U << 20U) + 1, static_cast<float>(-25.0 * std::log(2.0)));
  logits[0] = 0.0F;
  CHECK(std::abs(common::log_softmax(logits)[0] + std::log1p(1.0 / 32.0)) < 1e-6);
}

TEST_CASE("log_softmax: refuses what argmax refuses, and +inf") {
  CHECK_THROWS_AS(common::log_softmax(std::vector<float>{}), CheckError);
  CHECK_THROWS_AS(common::log_softmax(std::vector<float>{0.0F, kNan}), CheckError);
  CHECK_THROWS_AS(common::log_softmax(std::vector<float>{-kInfinity}), CheckError);
  CHECK_THROWS_AS(common::log_softmax(std::vector<float>{0.0F, kInfinity}), CheckError);
}

TEST_CASE("compare: the bound is absolute + relative * |expected|, and belongs to it") {
  using Floats = std::vector<float>;
  using Doubles = std::vector<double>;
  CHECK(common::compare(Floats{}, Doubles{}, {}).empty());
  CHECK(common::compare(Floats{1.0F, -2.0F}, Doubles{1.0, -2.0}, {}).empty());
  CHECK(common::compare(Floats{0.0F}, Floats{-0.0F}, {}).empty());
  CHECK_FALSE(common::compare(Floats{1.0F}, Doubles{std::nextafter(1.0, 2.0)}, {}).empty());

  const float above = std::nextafter(5.5F, 9.0F);
  for (const float sign : {1.0F, -1.0F}) {
    CAPTURE(sign);
    const Doubles expected = {4.0 * sign};
    CHECK(common::compare(Floats{5.5F * sign}, expected, {.absolute = 0.5, .relative = 0.25}).empty());
    CHECK_FALSE(common::compare(Floats{above * sign}, expected, {.absolute = 0.5, .relative = 0.25}).empty());
    CHECK(common::compare(Floats{5.5F * sign}, expected, {.absolute = 1.5}).empty());
    CHECK_FALSE(common::compare(Floats{above * sign}, expected, {.absolute = 1.5}).empty());
    CHECK(common::compare(Floats{5.0F * sign}, expected, {.relative = 0.25}).empty());
    CHECK_FALSE(common::compare(Floats{5.0F * sign}, expected, {.relative = 0.24}).empty());
  }
}

TEST_CASE("compare: NaN and infinity never pass, on either side, at any tolerance") {
  const common::Tolerance generous = {.absolute = std::numeric_limits<double>::infinity(), .relative = 1.0};
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    for (const float other : {1.0F, bad}) {
      CAPTURE(bad, other);
      CHECK_FALSE(common::compare(std::vector<float>{bad}, std::vector<float>{other}, generous).empty());
      CHECK_FALSE(common::compare(std::vector<float>{other}, std::vector<float>{bad}, generous).empty());
      CHECK_FALSE(common::compare(std::vector<float>{bad}, std::vector<double>{other}, generous).empty());
      CHECK_FALSE(common::compare(std::vector<float>{other}, std::vector<double>{bad}, generous).empty());
    }
  }
  // A tolerance that is no number allows nothing.
  CHECK_FALSE(common::compare(std::vector<float>{1.0F}, std::vector<float>{1.0F},
                              {.absolute = std::numeric_limits<double>::quiet_NaN()})
                  .empty());
}

TEST_CASE("compare: one line says how many differ and which is worst") {
  const std::vector<double> expected = {1.0, 2.0, 3.0, 4.0};
  CHECK(common::compare(std::vector<float>{1.0F, 2.5F, 3.75F, 4.5F}, expected, {.absolute = 0.25}) ==
        "3 of 4 differ, worst at [2]: actual 3.75, expected 3, bound 0.25");
  // The largest excess over the bound, not the largest error.
  CHECK(common::compare(std::vector<float>{1.5F, 2.0F, 3.0F, 4.75F}, expected, {.relative = 0.125}) ==
        "2 of 4 differ, worst at [0]: actual 1.5, expected 1, bound 0.125");
  // The first value that is not finite, before and after worse neighbours.
  CHECK(common::compare(std::vector<float>{99.0F, kNan, kInfinity, 99.0F}, expected, {.absolute = 0.25}) ==
        "4 of 4 differ, first non-finite at [1]: actual nan, expected 2, bound 0.25");
  CHECK(common::compare(std::vector<float>{1.0F}, expected, {}) == "sizes differ: actual has 1 values, expected has 4");
  CHECK(common::compare(std::vector<float>{}, std::vector<float>{1.0F}, {}) ==
        "sizes differ: actual has 0 values, expected has 1");
}

TEST_CASE("compare_bits: the same bytes, and no NaN") {
  using Floats = std::vector<float>;
  CHECK(common::compare_bits(Floats{}, Floats{}).empty());
  CHECK(common::compare_bits(Floats{1.0F, -0.0F, 1e-45F}, Floats{1.0F, -0.0F, 1e-45F}).empty());
  CHECK(common::compare_bits(Floats{1.0F, 0.0F, -0.0F}, Floats{1.0F, -0.0F, 0.0F}) ==
        "2 of 3 differ in their bits, first at [1]: actual 0, expected -0 (0x00000000, 0x80000000)");
  CHECK_FALSE(common::compare_bits(Floats{1.0F}, Floats{std::nextafter(1.0F, 2.0F)}).empty());
  CHECK(contains(common::compare_bits(Floats{0.0F, kNan}, Floats{0.0F, kNan}), "1 of 2 differ"));
  CHECK(common::compare_bits(Floats{1.0F}, Floats{1.0F, 2.0F}) == "sizes differ: actual has 1 values, expected has 2");
}

TEST_CASE("reference attention: two tokens by hand") {
  // One head of one dimension, so the scale is 1. The second query scores 2 * 0 = 0 and 2 * ln(3) / 2 = ln 3: weights
  // 1/4 and 3/4. The first sees its own token alone.
  Matrix q(2, 1);
  q << 5.0F, 2.0F;
  Matrix k(2, 1);
  k << 0.0F, static_cast<float>(std::log(3.0) / 2.0);
  Matrix v(2, 1);
  v << 8.0F, 16.0F;
  const std::vector<double> actual = common::reference_attention(q, k, v, 1, 1, 1);
  REQUIRE(actual.size() == 2);
  CHECK(actual[0] == 8.0);
  // The logarithm was rounded to float: 6e-8 relative, times a slope of 3/16 and values 8 apart.
  CHECK(std::abs(actual[1] - 14.0) < 1e-6);

  // The last query alone, as in decoding, sees as much.
  CHECK(common::reference_attention(q.bottomRows(1), k, v, 1, 1, 1) == std::vector<double>{actual[1]});
}

TEST_CASE("reference attention: scores are scaled by 1 / sqrt(head_dim)") {
  // Four dimensions of q.k = 4 ln 3 and scale 1/2: a score of 2 ln 3, weights 1/10 and 9/10.
  const Matrix q = Matrix::Constant(1, 4, 1.0F);
  Matrix k = Matrix::Zero(2, 4);
  k.row(1).setConstant(static_cast<float>(std::log(3.0)));
  Matrix v(2, 4);
  v << 10.0F, 20.0F, 30.0F, 40.0F, 0.0F, 0.0F, 0.0F, 0.0F;
  const std::vector<double> actual = common::reference_attention(q, k, v, 1, 1, 4);
  REQUIRE(actual.size() == 4);
  for (std::size_t d = 0; d < 4; ++d) {
    CHECK(std::abs(actual[d] - static_cast<double>(d + 1)) < 1e-5);
  }
}

TEST_CASE("reference attention: one-hot keys and huge scores pick one value") {
  // Key p is 1e4 times the p-th unit vector. A query in the same form picks its position outright: other weights are
  // exp(-5e7) = 0, exactly.
  constexpr int kLength = 4;
  const Matrix keys = Matrix::Identity(kLength, kLength) * 1e4F;
  Matrix v(kLength, kLength);
  v << 11.0F, 12.0F, 13.0F, 14.0F,  //
      21.0F, 22.0F, 23.0F, 24.0F,   //
      31.0F, 32.0F, 33.0F, 34.0F,   //
      41.0F, 42.0F, 43.0F, 44.0F;
  Matrix q(2, kLength);
  q.row(0) = keys.row(1);  // stands at position 2, asks for 1
  q.row(1) = keys.row(3);  // stands at position 3, asks for itself
  CHECK(common::reference_attention(q, keys, v, 1, 1, kLength) ==
        std::vector<double>{21.0, 22.0, 23.0, 24.0, 41.0, 42.0, 43.0, 44.0});

  // The first query now asks for position 3, which it must not see: the three it sees tie.
  q.row(0) = keys.row(3);
  const std::vector<double> tied = common::reference_attention(q, keys, v, 1, 1, kLength);
  for (std::size_t d = 0; d < kLength; ++d) {
    CHECK(std::abs(tied[d] - (21.0 + static_cast<double>(d))) < 1e-12);
  }
}

TEST_CASE("reference attention: query heads share kv heads in consecutive groups") {
  // Kv head g holds the value g + 1 in every position: the output names the head that was read.
  constexpr int kHeadDim = 2;
  constexpr int kLength = 3;
  const Matrix q = Matrix::Ones(1, Eigen::Index{12} * kHeadDim);
  for (const int num_kv_heads : {1, 2, 3, 4, 6, 12}) {
    Matrix v(kLength, Eigen::Index{num_kv_heads} * kHeadDim);
    for (Eigen::Index column = 0; column < v.cols(); ++column) {
      const Eigen::Index kv_head = column / kHeadDim;
      v.col(column).setConstant(static_cast<float>(kv_head + 1));
    }
    const Matrix k = Matrix::Ones(v.rows(), v.cols());
    const std::vector<double> actual = common::reference_attention(q, k, v, 12, num_kv_heads, kHeadDim);
    REQUIRE(actual.size() == 24);
    for (int head = 0; head < 12; ++head) {
      CAPTURE(num_kv_heads, head);
      const int kv_head = head * num_kv_heads / 12;
      CHECK(std::abs(actual[static_cast<std::size_t>(head) * kHeadDim] - (kv_head + 1)) < 1e-12);
      CHECK(std::abs(actual[static_cast<std::size_t>(head) * kHeadDim + 1] - (kv_head + 1)) < 1e-12);
    }
  }
}

TEST_CASE("reference attention: each head scores with its own keys") {
  // Two positions, two kv heads of two dimensions: head 0's key at position 0 is huge, head 1's at position 1.
  const Matrix q = Matrix::Constant(1, 4, 1e4F);
  Matrix k = Matrix::Zero(2, 4);
  k(0, 1) = 1.0F;
  k(1, 2) = 1.0F;
  Matrix v(2, 4);
  v << 1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 7.0F, 8.0F;
  CHECK(common::reference_attention(q, k, v, 2, 2, 2) == std::vector<double>{1.0, 2.0, 7.0, 8.0});
}

TEST_CASE("reference attention: refuses shapes that do not fit") {
  const auto attend = [](int queries, int q_columns, int length, int kv_columns, int v_length, int num_heads,
                         int num_kv_heads) {
    return common::reference_attention(Matrix::Zero(queries, q_columns), Matrix::Zero(length, kv_columns),
                                       Matrix::Zero(v_length, kv_columns), num_heads, num_kv_heads, 2);
  };
  CHECK(attend(1, 8, 3, 4, 3, 4, 2) == std::vector<double>(8, 0.0));
  CHECK(attend(0, 8, 3, 4, 3, 4, 2).empty());
  CHECK_THROWS_AS(attend(1, 6, 3, 4, 3, 4, 2), CheckError);  // q too narrow
  CHECK_THROWS_AS(attend(1, 8, 3, 6, 3, 4, 2), CheckError);  // k too wide
  CHECK_THROWS_AS(attend(1, 8, 3, 4, 2, 4, 2), CheckError);  // v too short
  CHECK_THROWS_AS(attend(4, 8, 3, 4, 3, 4, 2), CheckError);  // more queries than tokens
  CHECK_THROWS_AS(attend(1, 8, 3, 6, 3, 4, 3), CheckError);  // 3 does not divide 4
  CHECK_THROWS_AS(attend(1, 0, 3, 0, 3, 0, 0), CheckError);
}

namespace {

// Restores the number of threads, which all tests of this program share.
class ThreadsForTest {
 public:
  explicit ThreadsForTest(int num_threads) : before_(common::num_threads()) { common::set_num_threads(num_threads); }
  ~ThreadsForTest() { common::set_num_threads(before_); }
  ThreadsForTest(const ThreadsForTest&) = delete;
  ThreadsForTest& operator=(const ThreadsForTest&) = delete;

 private:
  int before_;
};

using Range = std::pair<int, int>;

std::vector<Range> ranges_of(int count) {
  std::mutex mutex;
  std::vector<Range> ranges;
  common::parallel_for(count, [&](int begin, int end) {
    const std::lock_guard lock(mutex);
    ranges.emplace_back(begin, end);
  });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

}  // namespace

TEST_CASE("parallel_for: every index exactly once, at most one contiguous range a thread") {
  for (int threads = 1; threads <= 5; ++threads) {
    const ThreadsForTest use(threads);
    CHECK(common::num_threads() == threads);
    for (const int count : {0, 1, threads - 1, threads, threads + 1, 1000}) {
      CAPTURE(threads, count);
      std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
      std::atomic<int> calls = 0;
      std::atomic<int> empty_calls = 0;
      common::parallel_for(count, [&](int begin, int end) {
        ++calls;
        empty_calls += begin >= end ? 1 : 0;
        for (int i = begin; i < end; ++i) {
          ++visits[static_cast<std::size_t>(i)];
        }
      });
      CHECK(calls == std::min(threads, count));
      CHECK(empty_calls == 0);
      CHECK(std::all_of(visits.begin(), visits.end(), [](const std::atomic<int>& n) { return n == 1; }));
    }
  }
}

TEST_CASE("parallel_for: ranges depend on count and number of threads alone") {
  const ThreadsForTest use(3);
  const std::vector<Range> expected = {{0, 3}, {3, 6}, {6, 10}};
  for (int repeat = 0; repeat < 20; ++repeat) {
    REQUIRE(ranges_of(10) == expected);
  }
  // 3 * 2^30 passes 2^31.
  const std::vector<Range> large = ranges_of(1 << 30);
  CHECK(large == std::vector<Range>{{0, 357913941}, {357913941, 715827882}, {715827882, 1073741824}});
}

TEST_CASE("parallel_for: nested calls run on the calling thread, with the same ranges") {
  const ThreadsForTest use(3);
  std::atomic<int> strangers = 0;
  std::atomic<int> right = 0;
  common::parallel_for(3, [&](int, int) {
    const std::thread::id outer = std::this_thread::get_id();
    std::vector<Range> ranges;  // unprotected: only one thread may touch it
    common::parallel_for(10, [&](int begin, int end) {
      strangers += std::this_thread::get_id() == outer ? 0 : 1;
      ranges.emplace_back(begin, end);
    });
    right += ranges == std::vector<Range>{{0, 3}, {3, 6}, {6, 10}} ? 1 : 0;
  });
  CHECK(strangers == 0);
  CHECK(right == 3);
}

TEST_CASE("parallel_for: threads really run at the same time, the caller among them") {
  const ThreadsForTest use(3);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::atomic<int> arrived = 0;
  // Each body waits for the other two: run one after the other, this would never end. The time limit makes it a
  // failure.
  const double limit = common::now_seconds() + 30.0;
  common::parallel_for(3, [&](int, int) {
    {
      const std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    }
    ++arrived;
    while (arrived < 3 && common::now_seconds() < limit) {
      std::this_thread::yield();
    }
  });
  CHECK(arrived == 3);
  CHECK(ids.size() == 3);
  CHECK(ids.count(std::this_thread::get_id()) == 1);
}

TEST_CASE("parallel_for: rethrows the first exception when all are done") {
  for (const int threads : {1, 2, 4}) {
    CAPTURE(threads);
    const ThreadsForTest use(threads);
    for (int thrower = 0; thrower < threads; ++thrower) {
      std::atomic<int> finished = 0;
      std::string caught;
      try {
        common::parallel_for(threads, [&](int begin, int) {
          if (begin == thrower) {
            throw std::runtime_error("range " + std::to_string(begin));
          }
          sleep_ms(5);
          ++finished;
        });
      } catch (const std::runtime_error& error) {
        caught = error.what();
      }
      CHECK(caught == "range " + std::to_string(thrower));
      CHECK(finished == threads - 1);
    }
    CHECK(ranges_of(100).size() == static_cast<std::size_t>(threads));  // still works
  }

  const ThreadsForTest use(3);
  std::string caught;
  try {
    common::parallel_for(3, [](int begin, int) {
      sleep_ms(begin == 1 ? 0 : 100 + 50 * begin);
      throw std::runtime_error(std::to_string(begin));
    });
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  CHECK(caught == "1");
}

TEST_CASE("parallel_for: an exception inside a nested call reaches the outer caller") {
  const ThreadsForTest use(2);
  CHECK_THROWS_AS(common::parallel_for(2,
                                       [](int, int) {
                                         common::parallel_for(2, [](int begin, int) {
                                           if (begin == 1) {
                                             throw common::InputError("inner");
                                           }
                                         });
                                       }),
                  common::InputError);
}

TEST_CASE("parallel_for: tens of thousands of short loops lose nothing") {
  for (const int threads : {2, 4}) {
    const ThreadsForTest use(threads);
    std::vector<std::int64_t> sums(8, 0);  // plain integers: parallel_for itself must order the accesses
    constexpr int kLoops = 20000;
    for (int loop = 0; loop < kLoops; ++loop) {
      common::parallel_for(8, [&](int begin, int end) {
        for (int i = begin; i < end; ++i) {
          sums[static_cast<std::size_t>(i)] += loop + i;
        }
      });
    }
    for (int i = 0; i < 8; ++i) {
      CAPTURE(threads, i);
      CHECK(sums[static_cast<std::size_t>(i)] == std::int64_t{kLoops} * (kLoops - 1) / 2 + std::int64_t{kLoops} * i);
    }
  }
}

TEST_CASE("parallel_for: wakes threads that went to sleep, workers and caller") {
  const ThreadsForTest use(3);
  std::vector<int> runs(3, 0);
  for (int loop = 0; loop < 60; ++loop) {
    sleep_ms(loop % 3);  // workers give up spinning
    common::parallel_for(3, [&](int begin, int) {
      if (begin == loop % 4) {
        sleep_ms(2);  // the others are done long before; begin 1 and 2 keep the caller waiting
      }
      ++runs[static_cast<std::size_t>(begin)];
    });
  }
  CHECK(runs == std::vector<int>{60, 60, 60});
}

TEST_CASE("parallel_for: calls from several threads take turns") {
  const ThreadsForTest use(2);
  std::array<std::int64_t, 3> sums = {};
  {
    std::vector<std::jthread> callers;
    callers.reserve(sums.size());
    for (std::int64_t& total : sums) {
      callers.emplace_back([&total] {
        for (int loop = 0; loop < 500; ++loop) {
          std::atomic<std::int64_t> sum = 0;
          common::parallel_for(100, [&](int begin, int end) { sum += end - begin; });
          total += sum;
        }
      });
    }
  }
  CHECK(sums == std::array<std::int64_t, 3>{50000, 50000, 50000});
}

TEST_CASE("set_num_threads: at least one, never inside a loop") {
  const ThreadsForTest use(2);
  CHECK_THROWS_AS(common::set_num_threads(0), CheckError);
  CHECK_THROWS_AS(common::set_num_threads(-3), CheckError);
  CHECK_THROWS_AS(common::parallel_for(2, [](int, int) { common::set_num_threads(3); }), CheckError);
  CHECK_THROWS_AS(common::parallel_for(1, [](int, int) { common::set_num_threads(3); }), CheckError);
  CHECK_THROWS_AS(common::parallel_for(-1, [](int, int) {}), CheckError);
  CHECK(common::num_threads() == 2);
}

#if defined(__linux__)
TEST_CASE("set_num_threads: n threads are the caller and n - 1 workers") {
  const auto threads_of_process = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const ThreadsForTest use(1);
  // The system lists a joined thread for a moment longer, and sanitizers have threads of their own: so the count must
  // settle, and only differences are compared.
  sleep_ms(200);
  const auto alone = threads_of_process();
  common::set_num_threads(4);
  CHECK(threads_of_process() - alone == 3);
  common::set_num_threads(1);
  const double limit = common::now_seconds() + 10.0;
  while (threads_of_process() != alone && common::now_seconds() < limit) {
    sleep_ms(1);
  }
  CHECK(threads_of_process() == alone);
}
#endif

TEST_CASE("format: printf into a string of any length") {
  CHECK(common::format("plain") == "plain");
  CHECK(common::format("%d of %s, %.2f", 3, "four", 2.5) == "3 of four, 2.50");
  CHECK(common::format("%s", "").empty());
  const std::string long_text(5000, 'x');
  CHECK(common::format("%s", long_text.c_str()) == long_text);
}

TEST_CASE("format_bytes: three significant digits and a binary unit") {
  CHECK(common::format_bytes(0) == "0 B");
  CHECK(common::format_bytes(896) == "896 B");
  CHECK(common::format_bytes(1023) == "1023 B");
  CHECK(common::format_bytes(1024) == "1.00 KiB");
  CHECK(common::format_bytes(23040) == "22.5 KiB");
  CHECK(common::format_bytes(std::int64_t{512} * 1024) == "512 KiB");
  CHECK(common::format_bytes(1675037245) == "1.56 GiB");
  CHECK(common::format_bytes(-23040) == "-22.5 KiB");
  // No rounding to a fourth digit: 9.996, 99.96 and 999.6 KiB.
  CHECK(common::format_bytes(10236) == "10.0 KiB");
  CHECK(common::format_bytes(102359) == "100 KiB");
  CHECK(common::format_bytes(1023590) == "0.976 MiB");
  CHECK(common::format_bytes(std::int64_t{1023} * 1024) == "0.999 MiB");
  CHECK(common::format_bytes(1024 * 1024 - 1) == "1.00 MiB");
  CHECK(common::format_bytes(std::int64_t{1} << 40U) == "1.00 TiB");
  CHECK(common::format_bytes(std::int64_t{1} << 50U) == "1.00 PiB");
  CHECK(common::format_bytes(std::numeric_limits<std::int64_t>::max()) == "8.00 EiB");
  CHECK(common::format_bytes(std::numeric_limits<std::int64_t>::min()) == "-8.00 EiB");
}

TEST_CASE("format_count: commas between thousands") {
  CHECK(common::format_count(0) == "0");
  CHECK(common::format_count(999) == "999");
  CHECK(common::format_count(1000) == "1,000");
  CHECK(common::format_count(123456) == "123,456");
  CHECK(common::format_count(1234567) == "1,234,567");
  CHECK(common::format_count(-123) == "-123");
  CHECK(common::format_count(-1234) == "-1,234");
  CHECK(common::format_count(std::numeric_limits<std::int64_t>::min()) == "-9,223,372,036,854,775,808");
}

TEST_CASE("format_percent: one decimal, and a dash for a share of nothing") {
  CHECK(common::format_percent(15, 16) == "93.8 %");
  CHECK(common::format_percent(0, 7) == "0.0 %");
  CHECK(common::format_percent(7, 7) == "100.0 %");
  CHECK(common::format_percent(0, 0) == "-");
  CHECK(common::format_percent(5, 0) == "-");
}

TEST_CASE("table: numbers align right, text left, as Markdown") {
  Table table({"stage", "slots", "waste", "note"});
  table.add_row({"1", "1,234", "93.8 %", "contiguous"});
  table.add_row({"22", "7", "-", "2 of 3 blocks"});
  table.add_row({"3", "-12.5 KiB", "", "x"});
  CHECK(table.to_string() ==
        "| stage |     slots |  waste | note          |\n"
        "| ----: | --------: | -----: | ------------- |\n"
        "|     1 |     1,234 | 93.8 % | contiguous    |\n"
        "|    22 |         7 |      - | 2 of 3 blocks |\n"
        "|     3 | -12.5 KiB |        | x             |\n");
}

TEST_CASE("table: what counts as a number") {
  // A column of one cell is a number column exactly if its line of dashes ends in a colon.
  const auto is_number = [](const std::string& cell) {
    Table table({"h"});
    table.add_row({cell});
    return contains(table.to_string(), ": |");
  };
  for (const char* number : {"0", "-3", "+1.5", ".5", "1,000", "22.5 KiB", "93.8 %", "4x", "16 tokens/s", "2.5ms"}) {
    CAPTURE(number);
    CHECK(is_number(number));
  }
  for (const char* text : {"", "-", "stage1", "[7, 1, 3]", "2 of 3", "KiB 3", "- 3", "+", ".", "a"}) {
    CAPTURE(text);
    CHECK_FALSE(is_number(text));
  }
}

TEST_CASE("table: cells count display columns, not bytes") {
  Table table({"größe", "é"});
  table.add_row({"…", "1 µs"});
  table.add_row({"日本", "10 ms"});
  CHECK(table.to_string() ==
        "| größe |     é |\n"
        "| ----- | ----: |\n"
        "| …     |  1 µs |\n"
        "| 日本    | 10 ms |\n");
}

TEST_CASE("table: edges") {
  // No rows is all text; dashes are at least three; a bar inside a cell would end it.
  CHECK(Table({"a", "long"}).to_string() == "| a   | long |\n| --- | ---- |\n");
  Table bars({"a|b"});
  bars.add_row({"|"});
  CHECK(bars.to_string() == "| a\\|b |\n| ---- |\n| \\|   |\n");
  Table table({"a", "b"});
  CHECK_THROWS_AS(table.add_row({"1"}), CheckError);
  CHECK_THROWS_AS(table.add_row({"1", "2", "3"}), CheckError);
  CHECK_THROWS_AS(table.add_row({"1", "2\n"}), CheckError);
  CHECK_THROWS_AS(Table({}), CheckError);
}

namespace {

std::vector<MapCell> cells_of(const std::vector<int>& owners) {
  std::vector<MapCell> cells(owners.size());
  std::transform(owners.begin(), owners.end(), cells.begin(), [](int owner) { return MapCell{.owner = owner}; });
  return cells;
}

}  // namespace

TEST_CASE("draw_map: letters in rows that open with an index") {
  const std::vector<MapCell> cells = cells_of({0, 0, 0, 0, -1, -1, 1, 1, 25, 26, 51});
  CHECK(common::draw_map(cells, 8, false) == "   0  AAAA..BB\n   8  Zaz\n");
  CHECK(common::draw_map(cells, 11, false) == "   0  AAAA..BBZaz\n");
  CHECK(common::draw_map(cells_of({52, 1000, -7}), 8, false) == "   0  ##.\n");
  CHECK(common::draw_map({}, 8, false).empty());
  CHECK_THROWS_AS(common::draw_map(cells, 0, false), CheckError);
}

TEST_CASE("draw_map: fill replaces the letter") {
  const std::vector<MapCell> cells = {{.owner = 0, .fill = 0}, {.owner = 0, .fill = '_'}, {.owner = -1, .fill = 'x'}};
  CHECK(common::draw_map(cells, 4, false) == "   0  A_x\n");
}

TEST_CASE("draw_map: indexes widen together beyond four digits") {
  const std::string map = common::draw_map(std::vector<MapCell>(10001), 5000, false);
  CHECK(map.substr(0, 8) == "    0  .");
  CHECK(contains(map, "\n 5000  ."));
  CHECK(contains(map, "\n10000  .\n"));
}

TEST_CASE("draw_map: with color each owner has a background, nobody has none, rows end clean") {
  const std::string on_a = "\033[38;5;16;48;5;117m";
  const std::string on_b = "\033[38;5;16;48;5;215m";
  CHECK(common::draw_map(cells_of({0, 0, 1, -1, -1, 1, 1, 0}), 6, true) ==
        "   0  " + on_a + "AA" + on_b + "B\033[0m.." + on_b + "B\033[0m\n   6  " + on_b + "B" + on_a + "A\033[0m\n");
  CHECK(common::draw_map(cells_of({-1, -2}), 6, true) == "   0  ..\n");

  // A dozen neighbours are told apart by colour alone.
  std::set<std::string> looks;
  for (int owner = 0; owner < 12; ++owner) {
    const std::vector<MapCell> cells = {{.owner = owner, .fill = '*'}};
    looks.insert(common::draw_map(cells, 1, true));
  }
  CHECK(looks.size() == 12);
}

TEST_CASE("quote: one line, escaped") {
  CHECK(common::quote("") == "\"\"");
  CHECK(common::quote("plain text") == "\"plain text\"");
  CHECK(common::quote("a\nb\tc\rd\"e\\f") == R"("a\nb\tc\rd\"e\\f")");
  CHECK(common::quote(std::string_view("\0\x1b[31m\x7f", 7)) == R"("\x00\x1b[31m\x7f")");
  CHECK(common::quote("größe 日本 🙂") == "\"größe 日本 🙂\"");
  CHECK(common::quote("\xC2\x9B"
                      "31m") == R"("\xc2\x9b31m")");   // U+009B opens a terminal command, as ESC [ does
  CHECK(common::quote("\xC2\xA0") == "\"\xC2\xA0\"");  // U+00A0 is the first above the control characters
}

TEST_CASE("quote: bytes that are no UTF-8 are escaped, so that the message is") {
  CHECK(common::quote("a\xFF"
                      "b") == R"("a\xffb")");
  CHECK(common::quote("\x80") == R"("\x80")");
  CHECK(common::quote("\xE6\x97") == R"("\xe6\x97")");  // cut short
  CHECK(common::quote("\xE6\x97x") == R"("\xe6\x97x")");
  CHECK(common::quote("\xC0\xAF") == R"("\xc0\xaf")");  // an overlong '/'
  CHECK(common::quote("\xE0\x80\xAF") == R"("\xe0\x80\xaf")");
  CHECK(common::quote("\xF0\x80\x80\xAF") == R"("\xf0\x80\x80\xaf")");
  CHECK(common::quote("\xED\xA0\x80") == R"("\xed\xa0\x80")");          // a surrogate
  CHECK(common::quote("\xF4\x90\x80\x80") == R"("\xf4\x90\x80\x80")");  // past U+10FFFF
  CHECK(common::quote("\xF4\x8F\xBF\xBF") == "\"\xF4\x8F\xBF\xBF\"");   // the last code point
}

TEST_CASE("quote: cut after max_length bytes, never inside a character") {
  CHECK(common::quote("abcdef", 6) == "\"abcdef\"");
  CHECK(common::quote("abcdefg", 6) == "\"abcdef\"...");
  CHECK(common::quote("abc", 0) == "\"\"...");
  CHECK(common::quote("", 0) == "\"\"");
  CHECK(common::quote("a日本", 7) == "\"a日本\"");
  CHECK(common::quote("a日本", 6) == "\"a日\"...");
  CHECK(common::quote("a日本", 4) == "\"a日\"...");
  CHECK(common::quote("a日本", 3) == "\"a\"...");
  CHECK(common::quote("\n\n\n", 2) == R"("\n\n"...)");  // counted before escaping
  CHECK(common::quote(std::string(80, 'x')) == "\"" + std::string(80, 'x') + "\"");
  CHECK(common::quote(std::string(81, 'x')) == "\"" + std::string(80, 'x') + "\"...");
}

namespace {

// Puts a pseudo-terminal or a pipe in the place of stdout or stderr, and collects what is written.
class Redirect {
 public:
  Redirect(int descriptor, bool terminal) : descriptor_(descriptor), saved_(dup(descriptor)) {
    int write_end = -1;
    if (terminal) {
      read_end_ = posix_openpt(O_RDWR | O_NOCTTY);
      if (read_end_ >= 0 && grantpt(read_end_) == 0 && unlockpt(read_end_) == 0) {
        write_end = open(ptsname(read_end_), O_RDWR | O_NOCTTY);
      }
    } else {
      std::array<int, 2> ends = {-1, -1};
      if (pipe(ends.data()) == 0) {
        read_end_ = ends[0];
        write_end = ends[1];
      }
    }
    ready_ = write_end >= 0 && fcntl(read_end_, F_SETFL, O_NONBLOCK) == 0 && dup2(write_end, descriptor_) >= 0;
    if (write_end >= 0) {
      close(write_end);
    }
  }
  ~Redirect() {
    dup2(saved_, descriptor_);
    close(saved_);
    if (read_end_ >= 0) {
      close(read_end_);
    }
  }
  Redirect(const Redirect&) = delete;
  Redirect& operator=(const Redirect&) = delete;

  bool ready() const { return ready_; }

  // What came since the last call.
  std::string written() const {
    std::string text;
    std::array<char, 4096> buffer = {};
    for (auto n = read(read_end_, buffer.data(), buffer.size()); n > 0; n = read(read_end_, buffer.data(), 4096)) {
      text.append(buffer.data(), static_cast<std::size_t>(n));
    }
    return text;
  }

 private:
  int descriptor_;
  int saved_;
  int read_end_ = -1;
  bool ready_ = false;
};

// Sets or unsets NO_COLOR and puts back what was there.
class NoColor {
 public:
  explicit NoColor(const char* value) {
    const char* before = std::getenv("NO_COLOR");
    was_set_ = before != nullptr;
    before_ = was_set_ ? before : "";
    set(value);
  }
  ~NoColor() { set(was_set_ ? before_.c_str() : nullptr); }
  NoColor(const NoColor&) = delete;
  NoColor& operator=(const NoColor&) = delete;

 private:
  static void set(const char* value) {
    if (value == nullptr) {
      unsetenv("NO_COLOR");
    } else {
      setenv("NO_COLOR", value, 1);
    }
  }
  bool was_set_;
  std::string before_;
};

// use_color(stdout) and use_color(stderr) while the given descriptor is redirected.
std::pair<bool, bool> colors_with(int descriptor, bool terminal, const char* no_color) {
  const NoColor environment(no_color);
  const Redirect redirect(descriptor, terminal);
  return {common::use_color(std::cout), common::use_color(std::cerr)};
}

bool have_terminals() { return Redirect(STDERR_FILENO, true).ready(); }

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) {
    ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("use_color: no color into a pipe or another stream") {
  CHECK_FALSE(colors_with(STDOUT_FILENO, false, nullptr).first);
  CHECK_FALSE(colors_with(STDERR_FILENO, false, nullptr).second);
  std::ostringstream text;
  CHECK_FALSE(common::use_color(text));
}

TEST_CASE("use_color: a terminal has color unless NO_COLOR says otherwise") {
  if (!have_terminals()) {
    SKIP_TEST("no pseudo-terminals here");
  }
  for (const char* value : {static_cast<const char*>(nullptr), ""}) {
    CHECK(colors_with(STDOUT_FILENO, true, value).first);
    CHECK(colors_with(STDERR_FILENO, true, value).second);
  }
  for (const char* value : {"1", "0", "false"}) {
    CHECK_FALSE(colors_with(STDOUT_FILENO, true, value).first);
    CHECK_FALSE(colors_with(STDERR_FILENO, true, value).second);
  }
}

TEST_CASE("progress: silent when stderr is not a terminal") {
  std::string written;
  {
    const Redirect redirect(STDERR_FILENO, false);
    common::Progress progress("Reading", 10);
    sleep_ms(1050);
    progress.advance(5);
    progress.clear();
    written = redirect.written();
  }
  CHECK(written.empty());
}

TEST_CASE("progress: on a terminal, after a second, at most ten times a second, and wiped in the end") {
  if (!have_terminals()) {
    SKIP_TEST("no pseudo-terminals here");
  }
  const double start = common::now_seconds();
  std::string early;
  std::string late;
  std::string cleared;
  std::string cleared_again;
  std::string unknown;
  std::string destroyed;
  double drawing_seconds = 0.0;
  {
    const Redirect redirect(STDERR_FILENO, true);
    common::Progress known("Reading", 3000);
    auto total_unknown = std::make_unique<common::Progress>("Counting", 0);
    while (common::now_seconds() - start < 0.9) {
      known.advance(0);
      sleep_ms(1);
    }
    early = redirect.written();
    sleep_ms(150);
    const double first_draw = common::now_seconds();
    known.advance(1500);
    while (common::now_seconds() - first_draw < 0.35) {
      known.advance(0);
      sleep_ms(1);
    }
    drawing_seconds = common::now_seconds() - first_draw;
    late = redirect.written();
    known.clear();
    cleared = redirect.written();
    known.clear();
    cleared_again = redirect.written();
    total_unknown->advance(1234);
    unknown = redirect.written();
    total_unknown.reset();
    destroyed = redirect.written();
  }
  const std::string wipe = "\r\033[K";
  const std::string line = wipe + "Reading: 1,500 of 3,000 (50.0 %)";
  CHECK(early.empty());
  CHECK(late.substr(0, line.size()) == line);
  CHECK(count_of(late, line) >= 2);
  CHECK(count_of(late, line) <= 1 + static_cast<int>(drawing_seconds / 0.1));
  CHECK(cleared == wipe);
  CHECK(cleared_again.empty());
  CHECK(unknown == wipe + "Counting: 1,234");
  CHECK(destroyed == wipe);
}

TEST_CASE("machine: the clock goes forward, in seconds") {
  const double start = common::now_seconds();
  sleep_ms(20);
  const double passed = common::now_seconds() - start;
  CHECK(passed >= 0.02);
  CHECK(passed < 10.0);
}

TEST_CASE("machine: peak memory is in bytes and covers what was touched") {
  constexpr std::size_t kBytes = std::size_t{96} << 20U;
  const std::vector<char> touched(kBytes, 'x');
  CHECK(touched[kBytes / 2] == 'x');
  const std::int64_t peak = common::peak_resident_bytes();
  CHECK(peak >= static_cast<std::int64_t>(kBytes));
  CHECK(peak < std::int64_t{1} << 40U);
}

TEST_CASE("machine: read bandwidth is measured for the given time, by any number of threads") {
  for (const int threads : {1, 2, 3}) {
    CAPTURE(threads);
    const double start = common::now_seconds();
    // Not a whole number of chunks, and not a multiple of the threads.
    const double bandwidth = common::measure_read_bandwidth(threads, (std::size_t{4} << 20U) + 1000, 0.05);
    CHECK(common::now_seconds() - start >= 0.05);
    // Slower than a hard disk or faster than any cache would be a wrong unit.
    CHECK(bandwidth > 1e8);
    CHECK(bandwidth < 1e14);
  }
  CHECK_THROWS_AS(common::measure_read_bandwidth(0, 1U << 20U, 0.01), CheckError);
  CHECK_THROWS_AS(common::measure_read_bandwidth(4, 100, 0.01), CheckError);
}
