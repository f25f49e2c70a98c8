// From logits to a token. All randomness is seeded and portable: std::*_distribution is not used, because its results
// differ between standard libraries.
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

// The index of the largest value, the lowest one on a tie. Throws CheckError if any value is NaN or all are -inf:
// returning some token would hide a bug.
Token argmax(std::span<const float> logits);

// Draws one token: applies temperature, top-k and top-p in this order and returns the token with the largest
// logit / temperature + Gumbel noise of those that are left (common/math/gumbel.h), the lowest id on a tie. `position`
// is the number of tokens before this one, prompt included. `sample_index` makes several texts from one prompt and seed
// differ. Equal arguments give equal tokens: no state is kept between calls. Throws CheckError on options out of range
// and on logits that argmax refuses or that contain +inf.
Token sample(std::span<const float> logits, const SamplingOptions& options, std::int64_t position,
             int sample_index = 0);

// log(softmax(logits)), with the maximum subtracted first and sums in double. Throws CheckError as sample does.
std::vector<float> log_softmax(std::span<const float> logits);

}  // namespace common
