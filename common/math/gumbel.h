// The noise that turns argmax into sampling. If g_0, g_1, … are independent Gumbel numbers, the index of the largest
// logit_i + g_i is distributed as softmax(logits) (Gumbel, 1954; the "Gumbel-max trick"). The alternative, to add up
// probabilities until the sum passes a random number, moves every boundary when a single logit is rounded differently.
// Here, as in greedy decoding, rounding can only swap two tokens whose sums are nearly equal.
//
// A number depends only on (seed, sample, position, token), so there is no generator state, and any thread of a CPU or
// a GPU can compute any number. These are plain functions, so that kernels can include this file.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define COMMON_HOST_DEVICE __host__ __device__
#else
#define COMMON_HOST_DEVICE
#endif

namespace common {

// The n-th number (from 0) of the SplitMix64 generator with this seed. No earlier number is needed: the generator's
// state is a counter and its output a hash of the state (Steele, Lea and Flood, OOPSLA 2014). The constants are the
// published ones; that unsigned arithmetic wraps is part of the algorithm.
COMMON_HOST_DEVICE inline std::uint64_t splitmix64(std::uint64_t seed, std::uint64_t n) {
  std::uint64_t mixed = seed + (n + 1) * 0x9E3779B97F4A7C15ULL;
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

// -log(-log(1 - v)) for v = (bits + 1/2) / 2^32: between -2.82 and 22.88. Precision matters where the noise is large;
// v is small there, and floats are densest near 0. The largest bits would round to v = 1, whose noise is -inf.
COMMON_HOST_DEVICE inline float gumbel_noise(std::uint32_t bits) {
  const float v = (static_cast<float>(bits) + 0.5F) * 0x1.0p-32F;
  return -std::log(-std::log1p(-(v < 1.0F ? v : 0x1.FFFFFEp-1F)));
}

// An upper bound of gumbel_noise for bits that begin with this many zeros: v >= 2^-(zeros + 1), and -log1p(-v) >= v.
// 0.7 is a little more than log(2), which covers the rounding.
COMMON_HOST_DEVICE inline float max_gumbel_noise(int leading_zeros) {
  return 0.7F * static_cast<float>(leading_zeros + 1);
}

}  // namespace common
