// The noise that turns argmax into sampling, and the numbers by which top-k, top-p and min-p cut. If g_0, g_1, … are
// independent Gumbel numbers, the index of the largest logit_i + g_i is distributed as softmax(logits) (Gumbel, 1954;
// the "Gumbel-max trick"). The alternative, to add up probabilities until the sum passes a random number, moves every
// boundary when a single logit is rounded differently. Here, as in greedy decoding, rounding can only swap two tokens
// whose sums are nearly equal.
//
// A number depends only on (seed, sample, position, token), so there is no generator state, and any thread of a CPU or
// a GPU can compute any number. These are plain functions, so that kernels can include this file.
//
// From the same logits, a CPU and a GPU draw the same token, to the last bit. Their libraries' exp and log differ, so
// neither is called here: all operations are on integers, or are rounded by IEEE 754 in one way (sums, products,
// quotients, fma). No line has a product inside a sum, which a compiler might fuse.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define COMMON_HOST_DEVICE __host__ __device__
#else
#define COMMON_HOST_DEVICE
#endif

namespace common {

// The n-th number (from 0) of the SplitMix64 generator with this seed. No earlier number is needed: the generator's
// state is a counter and its output a hash of the state (Steele, Lea and Flood, OOPSLA 2014). The constants are the
// published ones; that unsigned arithmetic wraps is part of the algorithm.
constexpr std::uint64_t kSplitMixStep = 0x9E3779B97F4A7C15ULL;  // of the state, from a number to the next
COMMON_HOST_DEVICE inline std::uint64_t splitmix64(std::uint64_t seed, std::uint64_t n) {
  std::uint64_t mixed = seed + (n + 1) * kSplitMixStep;
  mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBULL;
  return mixed ^ (mixed >> 31U);
}

// The part of the hash that all tokens of one draw share.
COMMON_HOST_DEVICE inline std::uint64_t noise_key(std::uint64_t seed, int sample_index, std::int64_t position) {
  return splitmix64(splitmix64(seed, static_cast<std::uint64_t>(sample_index)), static_cast<std::uint64_t>(position));
}

// 32 random bits for a token.
COMMON_HOST_DEVICE inline std::uint32_t noise_bits(std::uint64_t key, int token) {
  return static_cast<std::uint32_t>(splitmix64(key, static_cast<std::uint64_t>(token)) >> 32U);
}

// a * b + c, rounded once.
COMMON_HOST_DEVICE inline float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 + …), for |s| up to 0.172: the terms left out are below 2^-34.
COMMON_HOST_DEVICE inline float log_of_ratio(float s) {
  const float square = s * s;
  float sum = fused(square, 1.0F / 11.0F, 1.0F / 9.0F);
  sum = fused(square, sum, 1.0F / 7.0F);
  sum = fused(square, sum, 1.0F / 5.0F);
  sum = fused(square, sum, 1.0F / 3.0F);
  return fused(2.0F * s * square, sum, 2.0F * s);
}

// The natural logarithm of a positive number, subnormal ones excluded: x = 2^exponent * m with m from sqrt(1/2) to
// sqrt(2).
COMMON_HOST_DEVICE inline float same_log(float x) {
  std::int32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  constexpr std::int32_t kSqrtHalf = 0x3F3504F3;
  const std::int32_t exponent = (bits - kSqrtHalf) >> 23;
  bits -= exponent * (1 << 23);
  float m = 0.0F;
  std::memcpy(&m, &bits, sizeof(m));
  return fused(static_cast<float>(exponent), 0.693147181F, log_of_ratio((m - 1.0F) / (m + 1.0F)));
}

// -log(-log(1 - v)) for v = (bits + 1/2) / 2^32: between -3.14 and 22.88. Neither v nor 1 - v is rounded where it is
// near 0.
COMMON_HOST_DEVICE inline float gumbel_noise(std::uint32_t bits) {
  const float v = (static_cast<float>(bits) + 0.5F) * 0x1.0p-32F;
  const float rest = (static_cast<float>(~bits) + 0.5F) * 0x1.0p-32F;  // 1 - v
  return -same_log(v < 0.25F ? log_of_ratio(v / (2.0F - v)) : -same_log(rest));
}

// An upper bound of gumbel_noise for bits that begin with this many zeros: v >= 2^-(zeros + 1), and -log1p(-v) >= v.
// 0.7 is a little more than log(2), which covers the rounding.
COMMON_HOST_DEVICE inline float max_gumbel_noise(int leading_zeros) {
  return 0.7F * static_cast<float>(leading_zeros + 1);
}

// A token's score, (logit - largest logit) / temperature: at most 0. Relative to the largest: divided by a tiny
// temperature, the difference may become -inf, but never NaN.
COMMON_HOST_DEVICE inline float score_of(float logit, float max_logit, float temperature) {
  return (logit - max_logit) / temperature;
}

// How far a score is below 0, in units of 2^-25, rounded down: tokens are ranked by this number, and then by id. All
// scores of -32 and below have the same depth: their tokens cannot win, since noise differs by 26.1 at most.
constexpr std::uint32_t kMaxDepth = (1U << 30U) - 1;
COMMON_HOST_DEVICE inline std::uint32_t depth_of(float score) {
  const float depth = -score * 0x1.0p25F;
  return depth < 0x1.0p30F ? static_cast<std::uint32_t>(depth) : kMaxDepth;
}

// For top-p, tokens of one class, whose scores lie within 1/1024 of each other, count as equally likely (to 0.05 %).
// Their probabilities then add up to a product, and a GPU only has to count them.
constexpr unsigned kClassBits = 15;  // the upper half of a depth's bits
constexpr std::uint32_t kNumClasses = 1U << kClassBits;
COMMON_HOST_DEVICE inline std::uint32_t class_of(std::uint32_t depth) { return depth >> kClassBits; }

// A number proportional to the probability of a token of this class: e^-((index + 1/2) / 1024), in units of 2^-40.
// Integers: in whatever order a GPU's threads add them, the sum is the same.
COMMON_HOST_DEVICE inline std::uint64_t weight_of_class(std::uint32_t index) {
  constexpr std::uint64_t kLog2E = 0xB8AA3B29U;                            // in units of 2^-31
  const std::uint64_t halvings = (2 * std::uint64_t{index} + 1) * kLog2E;  // in units of 2^-42
  const auto whole = static_cast<unsigned>(halvings >> 42U);
  if (whole > 40) {
    return 0;
  }
  // 2^-f = 2^-(1/2) e^x with x = (1/2 - f) log(2), |x| < 0.347, and e^x by its series, in units of 2^-30.
  const auto fraction = static_cast<std::int64_t>((halvings >> 10U) & 0xFFFFFFFFU);                      // 2^-32
  const auto x = static_cast<std::int32_t>((((std::int64_t{1} << 31U) - fraction) * 744261118) >> 32U);  // log(2) 2^30
  const auto next_term = [x](std::int32_t sum, std::int32_t coefficient) {
    return coefficient + static_cast<std::int32_t>((std::int64_t{sum} * x) >> 30U);
  };
  constexpr std::int32_t kOne = 1 << 30;
  std::int32_t sum = kOne / 5040;
  sum = next_term(sum, kOne / 720);
  sum = next_term(sum, kOne / 120);
  sum = next_term(sum, kOne / 24);
  sum = next_term(sum, kOne / 6);
  sum = next_term(sum, kOne / 2);
  sum = next_term(sum, kOne);
  sum = next_term(sum, kOne);
  constexpr std::uint64_t kSqrtHalf = 3037000500U;  // 2^-(1/2), in units of 2^-32
  return static_cast<std::uint64_t>(sum) * kSqrtHalf >> (22U + whole);
}

// The sum of weights that top-p asks for: at least 1, so that a token is kept even if top_p is 0.
COMMON_HOST_DEVICE inline std::uint64_t top_p_target(float top_p, std::uint64_t total) {
  const double share = static_cast<double>(top_p) * static_cast<double>(total);
  if (!(share < static_cast<double>(total))) {
    return total;
  }
  const auto whole = static_cast<std::uint64_t>(share);
  return whole == 0 || static_cast<double>(whole) < share ? whole + 1 : whole;
}

// What a logit becomes if its token is in the prompt or the reply already (Keskar et al., arXiv 1909.05858, section
// 4.1, with the distinction by sign that all implementations make): a penalty above 1 makes it less likely.
COMMON_HOST_DEVICE inline float penalised(float logit, float repetition_penalty) {
  return logit > 0.0F ? logit / repetition_penalty : logit * repetition_penalty;
}

// What a logit becomes if its token is in the reply `count` times, at least once (OpenAI's penalties).
COMMON_HOST_DEVICE inline float penalised_in_reply(float logit, float presence_penalty, float frequency_penalty,
                                                   int count) {
  return logit - fused(frequency_penalty, static_cast<float>(count), presence_penalty);
}

}  // namespace common
