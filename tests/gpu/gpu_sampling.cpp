// Sampling on the GPU, compared with the CPU's: equal logits give equal tokens, whatever the options.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "common/cuda/model/cuda_sampler.h"
#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/support/catch.h"

namespace {

using common::DeviceArray;
using common::Random;
using common::SamplingBias;
using common::SamplingOptions;
using common::SamplingParameters;
using common::Token;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kPromptLength = 2;  // of the used tokens

// What the CPU draws from a row of them.
Token sampled(std::span<const float> logits, const SamplingOptions& options, int row, const std::vector<Token>& used) {
  const auto prompt = std::span(used).first(std::min<std::size_t>(kPromptLength, used.size()));
  return common::sample(logits, options, row, row % 5, prompt, std::span(used).subspan(prompt.size()));
}

// What the GPU draws from these rows: row i at position i, sample i % 5.
class Rows {
 public:
  Rows(int vocab_size, int max_rows) : vocab_size_(vocab_size), sampler_(vocab_size, max_rows) {}

  // used: every row's used tokens. The last of them is the row's token in the step, which is pending in every other
  // row.
  std::vector<Token> sample(const std::vector<float>& logits, const std::vector<SamplingOptions>& options,
                            const std::vector<Token>& used = {0}) {
    const auto num_rows = static_cast<int>(options.size());
    std::vector<SamplingParameters> parameters;
    std::vector<SamplingBias> biases;
    std::vector<Token> most_likely;
    for (int i = 0; i < num_rows; ++i) {
      const SamplingOptions& row = options[static_cast<std::size_t>(i)];
      parameters.push_back(common::sampling_parameters(row, i % 5, i));
      parameters.back().num_used = static_cast<int>(used.size()) - 1;
      parameters.back().prompt_length = kPromptLength;
      const std::vector<SamplingBias> own_biases = common::sampling_biases(row, i);
      parameters.back().first_bias = static_cast<int>(biases.size());
      parameters.back().num_biases = static_cast<int>(own_biases.size());
      biases.insert(biases.end(), own_biases.begin(), own_biases.end());
      const std::span<const float> row_logits = std::span(logits).subspan(
          static_cast<std::size_t>(i) * static_cast<std::size_t>(vocab_size_), static_cast<std::size_t>(vocab_size_));
      most_likely.push_back(is_usable(row_logits) ? common::argmax(row_logits) : -1);
    }
    std::vector<int> token_rows(options.size());
    std::vector<int> pending_rows(options.size(), -1);
    for (std::size_t i = 0; i < options.size(); ++i) {
      token_rows[i] = static_cast<int>(options.size() - 1 - i);
      pending_rows[i] = i % 2 == 0 ? 1 : -1;
    }
    const DeviceArray<float> device_logits(logits);
    const DeviceArray<SamplingParameters> rows(parameters);
    const DeviceArray<SamplingBias> device_biases(biases);
    const DeviceArray<int> next(most_likely);
    const DeviceArray<int> device_used(used);
    const DeviceArray<int> device_token_rows(token_rows);
    const DeviceArray<int> tokens(std::vector<int>(options.size(), used.back()));
    const DeviceArray<int> device_pending(pending_rows);
    const DeviceArray<int> pending_tokens(std::vector<int>{-7, used.back()});
    common::SamplingBatch batch{.rows = rows.data(), .num_rows = num_rows};
    batch.have_cuts = std::any_of(options.begin(), options.end(),
                                  [](const SamplingOptions& row) { return row.top_k > 0 || row.top_p < 1.0F; });
    batch.change_logits = std::any_of(parameters.begin(), parameters.end(), [](const SamplingParameters& row) {
      return row.has_penalties() || row.num_biases > 0;
    });
    batch.biases = device_biases.data();
    batch.used = device_used.data();
    batch.token_rows = device_token_rows.data();
    batch.tokens = tokens.data();
    batch.pending_rows = device_pending.data();
    batch.pending_tokens = pending_tokens.data();
    const common::Stream stream;
    sampler_.sample(device_logits.data(), batch, next.data(), stream.get());
    stream.synchronize();
    return next.download();
  }

  static bool is_usable(std::span<const float> logits) {
    bool any = false;
    for (const float logit : logits) {
      if (std::isnan(logit)) {
        return false;
      }
      any = any || logit > -kInfinity;
    }
    return any;
  }

 private:
  int vocab_size_;
  common::CudaSampler sampler_;
};

// Flat to steep, with ties and with tokens that are impossible.
std::vector<float> random_logits(Random& random, int size, int kind) {
  std::vector<float> logits(static_cast<std::size_t>(size));
  const double spread = kind % 4 == 0 ? 0.3 : kind % 4 == 1 ? 2.0 : kind % 4 == 2 ? 8.0 : 1.0;
  for (float& logit : logits) {
    logit = static_cast<float>(spread * random.normal());
    if (kind % 4 == 3) {
      logit = std::round(logit * 4.0F) / 4.0F;  // many are level
    }
    if (kind % 5 == 4 && random.below(3) == 0) {
      logit = -kInfinity;
    }
  }
  return logits;
}

const SamplingOptions kFilters[] = {
    {.temperature = 1.0F},
    {.temperature = 0.3F, .seed = 99},
    {.temperature = 1.0F, .top_k = 1},
    {.temperature = 1.0F, .top_k = 40},
    {.temperature = 1.0F, .top_p = 0.9F},
    {.temperature = 0.8F, .top_p = 0.5F, .seed = 7},
    {.temperature = 1.0F, .top_p = 0.0F},
    {.temperature = 1.0F, .min_p = 0.05F},
    {.temperature = 1.3F, .top_k = 500, .top_p = 0.95F, .min_p = 0.001F},
    {.temperature = 1.0F, .repetition_penalty = 1.3F},
    {.temperature = 0.0F, .repetition_penalty = 1.3F},
    {.temperature = 1.7F, .top_k = 50, .top_p = 0.8F, .min_p = 0.01F, .repetition_penalty = 0.7F},
    {.temperature = 1e-30F, .top_k = 3},
    {.temperature = 1.0F, .top_k = 40, .top_p = 0.95F},
    {.temperature = 0.8F, .top_k = 5000},
    {.temperature = 0.9F, .presence_penalty = 0.8F, .frequency_penalty = -0.3F},
    {.temperature = 0.9F, .top_k = 20, .repetition_penalty = 1.2F, .frequency_penalty = 0.9F},
    {.logit_bias = {{17, 9.0F}, {3, 4.0F}, {17, -5.0F}, {-1, 1.0F}, {1 << 20, 1.0F}, {900, -100.0F}}},
    {.temperature = 1.2F,
     .top_p = 0.9F,
     .presence_penalty = 0.4F,
     .logit_bias = {{12, 8.0F}, {3, 8.0F}},
     .late_tokens = {12, 500, 501},
     .min_length = 100},
    {},
};

}  // namespace

TEST_CASE("GPU: ten thousand draws for each filter are the CPU's, to the last one") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kRows = 250;
  const std::vector<Token> used = {3, 17, 900, 3, 12, -1, 5000, 17};
  Random random(5);
  std::vector<int> num_wrong(std::size(kFilters));
  for (int round = 0; round < 40; ++round) {
    const int vocab_size = round % 3 == 0 ? 1009 : round % 3 == 1 ? 1500 : 4099;
    Rows rows(vocab_size, kRows);
    std::vector<float> logits;
    for (int i = 0; i < kRows; ++i) {
      const std::vector<float> row = random_logits(random, vocab_size, i + round);
      logits.insert(logits.end(), row.begin(), row.end());
    }
    for (std::size_t filter = 0; filter < std::size(kFilters); ++filter) {
      const std::vector<Token> drawn = rows.sample(logits, std::vector<SamplingOptions>(kRows, kFilters[filter]), used);
      for (int i = 0; i < kRows; ++i) {
        const std::span<const float> row = std::span(logits).subspan(
            static_cast<std::size_t>(i) * static_cast<std::size_t>(vocab_size), static_cast<std::size_t>(vocab_size));
        const Token expected = sampled(row, kFilters[filter], i, used);
        num_wrong[filter] += drawn[static_cast<std::size_t>(i)] != expected ? 1 : 0;
      }
    }
  }
  CHECK(num_wrong == std::vector<int>(std::size(kFilters)));
}

TEST_CASE("GPU: rows with options of their own, over large vocabularies, twice the same") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  Random random(6);
  for (const int vocab_size : {128256, 262208}) {
    std::vector<float> logits;
    std::vector<SamplingOptions> options(std::begin(kFilters), std::end(kFilters));
    options.push_back({.temperature = 1.0F, .top_k = 100000, .top_p = 0.999F});
    options.push_back({.temperature = 1.0F, .top_p = 0.5F});  // the logits are all equal
    const std::size_t num_rows = options.size();
    for (std::size_t i = 0; i < num_rows; ++i) {
      const std::vector<float> row = i + 1 == num_rows ? std::vector<float>(static_cast<std::size_t>(vocab_size), 1.5F)
                                                       : random_logits(random, vocab_size, static_cast<int>(i));
      logits.insert(logits.end(), row.begin(), row.end());
    }
    Rows rows(vocab_size, 64);
    const std::vector<Token> used = {5, 6, 7};
    const std::vector<Token> drawn = rows.sample(logits, options, used);
    CHECK(rows.sample(logits, options, used) == drawn);
    for (std::size_t i = 0; i < num_rows; ++i) {
      CAPTURE(vocab_size, i);
      const std::span<const float> row =
          std::span(logits).subspan(i * static_cast<std::size_t>(vocab_size), static_cast<std::size_t>(vocab_size));
      CHECK(drawn[i] == sampled(row, options[i], static_cast<int>(i), used));
    }
  }
}

TEST_CASE("GPU: what has no answer draws -1, and leaves the other rows alone") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kVocabulary = 5000;
  Random random(7);
  const std::vector<float> good = random_logits(random, kVocabulary, 1);
  std::vector<std::vector<float>> all(4, good);
  all[0][4321] = std::numeric_limits<float>::quiet_NaN();
  all[1].assign(kVocabulary, -kInfinity);
  all[2][77] = kInfinity;
  std::vector<float> logits;
  for (const std::vector<float>& row : all) {
    logits.insert(logits.end(), row.begin(), row.end());
  }
  Rows rows(kVocabulary, 4);
  for (const SamplingOptions& options :
       {SamplingOptions{.temperature = 1.0F}, SamplingOptions{.temperature = 1.0F, .top_k = 9, .top_p = 0.9F}}) {
    for (int round = 0; round < 2; ++round) {
      const std::vector<Token> drawn = rows.sample(logits, std::vector<SamplingOptions>(4, options));
      CHECK(drawn == std::vector<Token>{-1, -1, -1, common::sample(good, options, 3, 3)});
    }
  }
}

// For tests/gpu/sanitize_gpu.sh: a row for each filter.
TEST_CASE("GPU: each kernel of sampling in a small case", "[.sanitize]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kVocabulary = 3001;
  const std::vector<Token> used = {3, 17, 900, 3, -1, 2000};
  const std::vector<SamplingOptions> options(std::begin(kFilters), std::end(kFilters));
  Random random(8);
  std::vector<float> logits;
  std::vector<Token> expected;
  for (std::size_t i = 0; i < options.size(); ++i) {
    const std::vector<float> row = random_logits(random, kVocabulary, static_cast<int>(i));
    logits.insert(logits.end(), row.begin(), row.end());
    expected.push_back(common::sample(row, options[i], static_cast<int>(i), static_cast<int>(i) % 5, used));
  }
  Rows rows(kVocabulary, static_cast<int>(options.size()));
  CHECK(rows.sample(logits, options, used) == expected);
}
