// From logits to a token. Everything is seeded and portable: no std::*_distribution, whose results differ between
// standard libraries.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/tensor.h"

namespace common {

// A small seeded generator: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : seed_(seed) {}
  std::uint64_t next();                      // all 64 bits
  double uniform();                          // in [0, 1), 53 bits
  std::uint64_t below(std::uint64_t bound);  // in [0, bound), without bias; bound > 0
  double normal();                           // mean 0, variance 1 (Box-Muller)

 private:
  std::uint64_t seed_;
  std::uint64_t num_drawn_ = 0;
};

struct SamplingOptions {
  float temperature = 0.0F;  // 0 is greedy
  int top_k = 0;             // keep the k most likely tokens; 0 keeps all
  float top_p = 1.0F;        // then keep the smallest set of the most likely tokens whose probability reaches top_p
  std::uint64_t seed = 0;
};

// The index of the largest value; the lowest such index on a tie. Throws CheckError if any value is NaN or all are
// -inf, because a silent choice would hide a bug.
Token argmax(std::span<const float> logits);

// Draws one token: temperature, then top-k, then top-p, then the largest of logit / temperature + Gumbel noise among
// the tokens that are left (common/math/gumbel.h). Candidates that are level rank by lower token id. `position` counts
// the tokens before this one in its text, prompt included; `sample_index` tells the texts apart that are drawn from one
// prompt and seed. Equal arguments give equal tokens: nothing is remembered from one call to the next.
Token sample(std::span<const float> logits, const SamplingOptions& options, std::int64_t position,
             int sample_index = 0);

// log(softmax(logits)), computed with the maximum taken out first, sums in double.
std::vector<float> log_softmax(std::span<const float> logits);

}  // namespace common
