// The samplers of a step on the executor of kernels: the device draws what the host draws.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/support/catch.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(kernels/step_sampler.h)
#include STAGE_HEADER(production/device_sampler.h)
// clang-format on

namespace {

using common::Token;

constexpr int kVocabSize = 700;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Token largest(std::span<const float> logits) {
  const bool any_nan = std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  return any_nan ? -1 : static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace

// The kernel is in llama_kernels.cu, which is not for the executor. A device's memory is the host's here.
std::size_t common::argmax_scratch_bytes(int /*max_rows*/) { return 0; }
void common::argmax_rows(const float* logits, int vocab_size, int num_rows, void* /*scratch*/, int* next_tokens,
                         cudaStream_t /*stream*/) {
  for (int row = 0; row < num_rows; ++row) {
    next_tokens[row] = largest({logits + row * vocab_size, static_cast<std::size_t>(vocab_size)});
  }
}

TEST_CASE("Samplers: the device draws what the host draws, from tokens that were pending too") {
  const std::vector<stage::SamplingRow> rows = {
      {.options = {.temperature = 1.0F}, .sample_index = 3, .used = {}},
      {.options = {.temperature = 0.8F, .top_k = 5}, .used = {}},
      {.options = {.temperature = 1.5F, .top_p = 0.7F, .seed = 7}, .used = {}},
      {.options = {.temperature = 0.0F, .repetition_penalty = 1.5F}, .used = {4, 8, 15}},
      {.options = {.temperature = 0.2F, .repetition_penalty = 5.0F}, .used = {16, 23, 42}},
      {.options = {}, .used = {}},
      {.options = {.temperature = 1.0F}, .used = {}},  // a logit is NaN
      {.options = {.temperature = 1.0F}, .used = {}},  // a logit is infinite
  };
  const std::size_t num_rows = rows.size();
  std::vector<std::unique_ptr<stage::StepSampler>> samplers;
  samplers.push_back(std::make_unique<stage::HostSampler>(kVocabSize));
  samplers.push_back(std::make_unique<stage::DeviceSampler>(kVocabSize, static_cast<int>(num_rows), nullptr));
  const common::Stream stream;
  std::vector<std::vector<Token>> drawn;
  for (const auto& sampler : samplers) {
    common::Random random(11);
    std::vector<Token> before(num_rows);
    for (int step = 0; step < 4; ++step) {
      stage::RaggedBatch batch;
      std::vector<float> logits(num_rows * kVocabSize);
      std::vector<Token> most_likely;
      std::vector<int> pending_rows;
      for (std::size_t row = 0; row < num_rows; ++row) {
        const auto own = std::span(logits).subspan(row * kVocabSize, kVocabSize);
        std::generate(own.begin(), own.end(), [&] { return static_cast<float>(2.0 * random.normal()); });
        // Row 4 likes best what it had before, at a price that a penalty makes too high.
        own[static_cast<std::size_t>(before[4])] += row == 4 ? 10.0F : 0.0F;
        own[100] = row == 6 ? std::nanf("") : row == 7 ? kInfinity : own[100];
        most_likely.push_back(largest(own));
        const bool is_pending = step > 0 && row < 6;
        pending_rows.push_back(is_pending ? static_cast<int>(row) : -1);
        if (is_pending) {
          batch.pending_tokens.push_back({static_cast<int>(row), static_cast<int>(row)});
        }
        batch.tokens.push_back(is_pending ? 0 : 5);
        batch.positions.push_back(10 + step);
        batch.logits_rows.push_back(static_cast<int>(row));
      }
      batch.sampling_rows = rows;
      const common::DeviceArray<float> device_logits(logits);
      const common::DeviceArray<int> token_rows(batch.logits_rows);
      const common::DeviceArray<int> tokens(batch.tokens);
      const common::DeviceArray<int> pending(pending_rows);
      const common::DeviceArray<int> pending_tokens(before);
      const common::DeviceArray<int> next_tokens(most_likely);
      const std::size_t which = static_cast<std::size_t>(step) % 2;
      sampler->upload(which, batch, stream);
      sampler->draw(which,
                    {.logits = device_logits.data(),
                     .token_rows = token_rows.data(),
                     .tokens = tokens.data(),
                     .pending_rows = pending.data(),
                     .pending_tokens = pending_tokens.data(),
                     .next_tokens = next_tokens.data()},
                    stream);
      stream.synchronize();
      before = next_tokens.download();
      CHECK(before[5] == most_likely[5]);
      CHECK(before[6] == -1);
      CHECK(before[7] == -1);
      drawn.push_back(before);
    }
  }
  for (std::size_t step = 0; step < 4; ++step) {
    CAPTURE(step);
    CHECK(drawn[step] == drawn[4 + step]);
  }
}
