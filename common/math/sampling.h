// From logits to a token. All randomness is seeded and portable: std::*_distribution is not used, because its results
// differ between standard libraries.
#pragma once

#include <cstdint>
#include <span>
#include <string>
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

// Added to a token's logit. A token outside of the vocabulary has none.
struct TokenBias {
  Token token = 0;
  float bias = 0.0F;
};

// In the order in which they apply: late_tokens, logit_bias, repetition_penalty, frequency_penalty and
// presence_penalty, temperature, min_p, top_k, top_p (vLLM's order).
struct SamplingOptions {
  float temperature = 0.0F;  // 0 is greedy
  int top_k = 0;             // keep the k most likely tokens; 0 keeps all
  float top_p = 1.0F;        // then keep the smallest set of the most likely tokens whose probability reaches top_p
  float min_p = 0.0F;        // keep tokens that are at least min_p times as likely as the most likely one
  float repetition_penalty = 1.0F;  // divides positive logits of tokens that have been used, multiplies negative ones
  std::uint64_t seed = 0;
  // OpenAI's penalties count the reply alone: subtracted from the logit of a token that it has, and once more for each
  // time.
  float presence_penalty = 0.0F;
  float frequency_penalty = 0.0F;
  std::vector<TokenBias> logit_bias = {};
  // Not drawn as long as the text, prompt included, is shorter than min_length.
  std::vector<Token> late_tokens = {};
  std::int64_t min_length = 0;
};

// Why the options can't be used; empty if they can.
std::string problem_of(const SamplingOptions& options);

// Whether the next token is always the one with the largest logit.
bool is_greedy(const SamplingOptions& options);

// Whether the tokens before play a part.
bool has_penalties(const SamplingOptions& options);

// The least score (common/math/gumbel.h) that min_p keeps. Computed on the host, also for a GPU.
float min_score(const SamplingOptions& options);

// The index of the largest value, the lowest one on a tie. Throws InputError if any value is NaN or all are -inf, which
// a model's file can cause: returning some token would hide it.
Token argmax(std::span<const float> logits);

// A token that a GPU has drawn. Throws InputError if it is -1, which stands for logits that argmax or sample refuse.
Token drawn_token(Token token);

// Draws one token: of the tokens that the options keep, the one with the largest logit / temperature + Gumbel noise
// (common/math/gumbel.h), the lowest id on a tie. `position` is the number of tokens before this one, prompt included.
// `sample_index` makes several texts from one prompt and seed differ. `prompt` and `reply` are the tokens before, which
// only penalties need. Equal arguments give equal tokens: no state is kept between calls. Throws
// CheckError on options out of range, and InputError on logits that argmax refuses or that contain +inf.
Token sample(std::span<const float> logits, const SamplingOptions& options, std::int64_t position, int sample_index = 0,
             std::span<const Token> prompt = {}, std::span<const Token> reply = {});

// log(softmax(logits)), with the maximum subtracted first and sums in double. Throws InputError as sample does.
std::vector<float> log_softmax(std::span<const float> logits);

struct TokenLogprob {
  Token token = 0;
  float logprob = 0.0F;
};

// A drawn token, and the most likely tokens in its place. Natural logarithms of the model's own probabilities: before
// temperature, filters and penalty, as vLLM reports them by default.
struct TokenLogprobs {
  TokenLogprob drawn;
  int rank = 1;                    // of the drawn token: 1 for the most likely
  std::vector<TokenLogprob> best;  // by probability, the lower id first on a tie
};
TokenLogprobs top_logprobs(std::span<const float> logits, Token drawn, int num_best);

}  // namespace common
