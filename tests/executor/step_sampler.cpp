// The samplers of a step on the executor of kernels: the device draws what the host draws.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "common/cuda/executor/counts.h"
#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/gpu/gpu_values.h"
#include "tests/support/catch.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(kernels/step_sampler.h)
#include STAGE_HEADER(production/device_sampler.h)
// clang-format on

namespace {

using common::Token;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Token largest(std::span<const float> logits) {
  const bool any_nan = std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  const auto best = std::max_element(logits.begin(), logits.end());
  return any_nan || *best == -kInfinity ? -1 : static_cast<Token>(best - logits.begin());
}

// A step's rows of logits, and what it knows of their texts. Row i's token is token i of the step.
struct Step {
  int vocab_size = 0;
  std::vector<stage::SamplingRow> rows;
  std::vector<float> logits;        // [num_rows, vocab_size]
  std::vector<int> positions;       // by row: of its token
  std::vector<Token> tokens;        // by row; 0 where it is pending
  std::vector<int> pending_rows;    // by row: the row of the step before that drew its token; -1: it is known
  std::vector<Token> drawn_before;  // by row of the step before
};

std::vector<Token> draw(stage::StepSampler& sampler, std::size_t which, const Step& step) {
  stage::RaggedBatch batch;
  std::vector<Token> most_likely;
  const auto vocab_size = static_cast<std::size_t>(step.vocab_size);
  for (std::size_t row = 0; row < step.rows.size(); ++row) {
    most_likely.push_back(largest(std::span(step.logits).subspan(row * vocab_size, vocab_size)));
    batch.logits_rows.push_back(static_cast<int>(row));
    if (step.pending_rows[row] >= 0) {
      batch.pending_tokens.push_back({static_cast<int>(row), step.pending_rows[row]});
    }
  }
  batch.tokens = step.tokens;
  batch.positions = step.positions;
  batch.sampling_rows = step.rows;
  const common::Stream stream;
  const common::DeviceArray<float> logits(step.logits);
  const common::DeviceArray<int> token_rows(batch.logits_rows);
  const common::DeviceArray<int> tokens(step.tokens);
  const common::DeviceArray<int> pending_rows(step.pending_rows);
  const common::DeviceArray<int> pending_tokens(step.drawn_before);
  const common::DeviceArray<int> next_tokens(most_likely);
  sampler.upload(which, batch, stream);
  sampler.draw(which,
               {.logits = logits.data(),
                .token_rows = token_rows.data(),
                .tokens = tokens.data(),
                .pending_rows = pending_rows.data(),
                .pending_tokens = pending_tokens.data(),
                .next_tokens = next_tokens.data()},
               stream);
  stream.synchronize();
  return next_tokens.download();
}

// Flat to steep, some with many ties, some with tokens that are impossible, a few without an answer.
std::vector<float> random_logits(common::Random& random, int vocab_size) {
  std::vector<float> logits(static_cast<std::size_t>(vocab_size));
  const float spread = std::vector<float>{0.0F, 0.1F, 1.0F, 3.0F, 8.0F}[random.below(5)];
  const bool are_level = random.below(3) == 0;
  const bool are_impossible = random.below(4) == 0;
  for (float& logit : logits) {
    logit = spread * static_cast<float>(random.normal());
    logit = are_level ? std::round(logit) : logit;
    logit = are_impossible && random.below(2) == 0 ? -kInfinity : logit;
  }
  for (std::uint64_t peaks = random.below(4); peaks > 0; --peaks) {
    logits[random.below(logits.size())] += 12.0F;
  }
  if (random.below(12) == 0) {
    logits[random.below(logits.size())] = random.below(2) == 0 ? std::nanf("") : kInfinity;
  }
  return logits;
}

template <typename T>
T one_of(common::Random& random, const std::vector<T>& values) {
  return values[random.below(values.size())];
}

stage::SamplingRow random_row(common::Random& random, int vocab_size) {
  // Some tokens turn up again and again, and some do not exist.
  const auto token = [&] {
    const int size = random.below(2) == 0 ? 12 : vocab_size + 5;
    return static_cast<Token>(random.below(static_cast<std::uint64_t>(size))) - 2;
  };
  stage::SamplingRow row;
  row.sample_index = static_cast<int>(random.below(3));
  common::SamplingOptions& options = row.options;
  options.temperature = one_of<float>(random, {0.0F, 1e-30F, 0.3F, 1.0F, 1.0F, 2.0F, 100.0F});
  options.top_k = one_of<int>(random, {0, 0, 1, 5, 40, 300, 1500, 3000, vocab_size, vocab_size + 1});
  options.top_p = one_of<float>(random, {1.0F, 1.0F, 0.95F, 0.5F, 0.0F, 0.9999F});
  options.min_p = one_of<float>(random, {0.0F, 0.0F, 0.01F, 0.5F, 1.0F});
  options.seed = random.next();
  options.repetition_penalty = one_of<float>(random, {1.0F, 1.0F, 1.3F, 0.7F});
  options.presence_penalty = one_of<float>(random, {0.0F, 0.0F, 0.7F, -1.1F});
  options.frequency_penalty = one_of<float>(random, {0.0F, 0.0F, 0.3F, -0.1F});
  for (std::uint64_t i = one_of<std::uint64_t>(random, {0, 0, 0, 7, 1500}); i > 0; --i) {
    options.logit_bias.push_back({token(), static_cast<float>(3.0 * random.normal())});
  }
  for (std::uint64_t i = one_of<std::uint64_t>(random, {0, 0, 9}); i > 0; --i) {
    options.late_tokens.push_back(token());
  }
  options.min_length = 9 + static_cast<std::int64_t>(random.below(4));  // the position is 10
  for (std::uint64_t i = one_of<std::uint64_t>(random, {0, 1, 30, 1200}); i > 0; --i) {
    row.used.push_back(token());
  }
  row.prompt_length = static_cast<int>(random.below(row.used.size() + 2));
  return row;
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
  constexpr int kVocabSize = 700;
  const std::vector<stage::SamplingRow> rows = {
      {.options = {.temperature = 1.0F}, .sample_index = 3, .used = {}},
      {.options = {.temperature = 0.8F, .top_k = 5}, .used = {}},
      {.options = {.temperature = 1.5F, .top_p = 0.7F, .seed = 7}, .used = {}},
      {.options = {.temperature = 0.0F, .repetition_penalty = 1.5F}, .used = {4, 8, 15}},
      {.options = {.temperature = 0.2F, .repetition_penalty = 5.0F}, .used = {16, 23, 42}},
      {.options = {.temperature = 0.2F, .frequency_penalty = 9.0F}, .used = {16, 23, 42}, .prompt_length = 3},
      {.options = {}, .used = {}},
      {.options = {.temperature = 1.0F}, .used = {}},  // a logit is NaN
      {.options = {.temperature = 1.0F}, .used = {}},  // a logit is infinite
  };
  const std::size_t num_rows = rows.size();
  std::vector<std::unique_ptr<stage::StepSampler>> samplers;
  samplers.push_back(std::make_unique<stage::HostSampler>(kVocabSize));
  samplers.push_back(std::make_unique<stage::DeviceSampler>(kVocabSize, static_cast<int>(num_rows), nullptr));
  std::vector<std::vector<Token>> drawn;
  for (const auto& sampler : samplers) {
    common::Random random(11);
    std::vector<Token> before(num_rows);
    for (int number = 0; number < 4; ++number) {
      Step step{.vocab_size = kVocabSize,
                .rows = rows,
                .logits = std::vector<float>(num_rows * kVocabSize),
                .positions = {},
                .tokens = {},
                .pending_rows = {},
                .drawn_before = before};
      for (std::size_t row = 0; row < num_rows; ++row) {
        const auto own = std::span(step.logits).subspan(row * kVocabSize, kVocabSize);
        std::generate(own.begin(), own.end(), [&] { return static_cast<float>(2.0 * random.normal()); });
        // Rows 4 and 5 like best what they had before, at a price that a penalty makes too high.
        if (row == 4 || row == 5) {
          own[static_cast<std::size_t>(before[row])] += 10.0F;
        }
        own[100] = row == 7 ? std::nanf("") : row == 8 ? kInfinity : own[100];
        const bool is_pending = number > 0 && row < 7;
        step.pending_rows.push_back(is_pending ? static_cast<int>(row) : -1);
        step.tokens.push_back(is_pending ? 0 : 5);
        step.positions.push_back(10 + number);
      }
      const Token greedy = largest(std::span(step.logits).subspan(6 * kVocabSize, kVocabSize));
      before = draw(*sampler, static_cast<std::size_t>(number) % 2, step);
      CHECK(before[6] == greedy);
      CHECK(before[7] == -1);
      CHECK(before[8] == -1);
      drawn.push_back(before);
    }
  }
  for (std::size_t step = 0; step < 4; ++step) {
    CAPTURE(step);
    CHECK(drawn[step] == drawn[4 + step]);
  }
}

TEST_CASE("Samplers: a bias counts where no row of the step has a penalty") {
  const Step step{.vocab_size = 64,
                  .rows = {{.options = {.temperature = 0.0F, .logit_bias = {{7, 5.0F}}}, .used = {}}},
                  .logits = std::vector<float>(64, 1.0F),
                  .positions = {10},
                  .tokens = {5},
                  .pending_rows = {-1},
                  .drawn_before = {0}};
  stage::DeviceSampler device(64, 1, nullptr);
  CHECK(draw(device, 0, step) == std::vector<Token>{7});
}

TEST_CASE("Samplers: the device draws what the host draws, whatever the options, the logits and the tokens before") {
  constexpr std::size_t kRows = 24;
  for (const int vocab_size : {50, 700, 2048, 2049, 6001}) {
    stage::HostSampler host(vocab_size);
    stage::DeviceSampler device(vocab_size, kRows, nullptr);
    // As on a GPU with less shared memory, where the counts of top-k and top-p lie in device memory.
    constexpr std::size_t kSmall = 99 * 1024;
    stage::DeviceSampler on_small_gpu = [&] {
      const tests::SharedMemoryLimit limit(kSmall);
      return stage::DeviceSampler(vocab_size, kRows, nullptr);
    }();
    common::Random random(static_cast<std::uint64_t>(vocab_size));
    for (std::size_t round = 0; round < 6; ++round) {
      Step step{.vocab_size = vocab_size,
                .rows = {},
                .logits = {},
                .positions = std::vector<int>(kRows, 9),
                .tokens = {},
                .pending_rows = {},
                .drawn_before = {7, -1, 3, 1, 5}};
      for (std::size_t row = 0; row < kRows; ++row) {
        step.rows.push_back(random_row(random, vocab_size));
        const std::vector<float> logits = random_logits(random, vocab_size);
        step.logits.insert(step.logits.end(), logits.begin(), logits.end());
        step.pending_rows.push_back(static_cast<int>(random.below(6)) - 1);
        step.tokens.push_back(step.pending_rows.back() >= 0 ? 0 : static_cast<Token>(random.below(12)) - 1);
      }
      // The host reads as many rows of the step before as the batch has pending tokens of: all, with the last one.
      step.pending_rows.front() = 4;
      step.tokens.front() = 0;
      const std::vector<Token> expected = draw(host, round % 2, step);
      const std::vector<Token> drawn = draw(device, round % 2, step);
      for (std::size_t row = 0; row < kRows; ++row) {
        const common::SamplingOptions& options = step.rows[row].options;
        CAPTURE(vocab_size, round, row, options.temperature, options.top_k, options.top_p, options.min_p);
        CHECK(drawn[row] == expected[row]);
      }
      const tests::SharedMemoryLimit limit(kSmall);
      CHECK(draw(on_small_gpu, round % 2, step) == expected);
    }
  }
}

// The device guesses from a sixteenth of a row how deep the tokens lie that top-k keeps, and lists these tokens. Here
// the tokens read are the likely ones, so the guess is too small, and most draws are of a token that is not listed.
TEST_CASE("Samplers: the device draws what the host draws, where too few tokens are listed for top-k") {
  constexpr int kVocabSize = 6001;
  constexpr std::size_t kRows = 16;
  common::Random random(13);
  Step step{.vocab_size = kVocabSize,
            .rows = {},
            .logits = {},
            .positions = std::vector<int>(kRows, 9),
            .tokens = std::vector<Token>(kRows),
            .pending_rows = std::vector<int>(kRows, -1),
            .drawn_before = {0}};
  for (std::size_t row = 0; row < kRows; ++row) {
    const common::SamplingOptions options = {
        .temperature = 3.0F, .top_k = row % 2 == 0 ? 40 : 1000, .seed = random.next()};
    step.rows.push_back({.options = options, .used = {}});
    for (int token = 0; token < kVocabSize; ++token) {
      const bool is_read = token / 8 % 16 == 0;
      step.logits.push_back(static_cast<float>(random.normal()) + (is_read ? 3.0F : 0.0F));
    }
  }
  stage::HostSampler host(kVocabSize);
  stage::DeviceSampler device(kVocabSize, kRows, nullptr);
  CHECK(draw(device, 0, step) == draw(host, 0, step));
}

// Without top-k and top-p the device computes sums only for tokens whose bounds are large. Here bounds mislead.
TEST_CASE("Samplers: with temperature alone the device draws what the host draws, wherever bounds are far from sums") {
  constexpr int kVocabSize = 9001;  // three blocks of threads
  constexpr std::size_t kRows = 24;
  stage::HostSampler host(kVocabSize);
  stage::DeviceSampler device(kVocabSize, kRows, nullptr);
  common::Random random(12);
  for (int round = 0; round < 30; ++round) {
    Step step{.vocab_size = kVocabSize,
              .rows = {},
              .logits = {},
              .positions = std::vector<int>(kRows, round),
              .tokens = std::vector<Token>(kRows),
              .pending_rows = std::vector<int>(kRows, -1),
              .drawn_before = {0}};
    for (std::size_t row = 0; row < kRows; ++row) {
      common::SamplingOptions options = {.temperature = one_of<float>(random, {0.5F, 1.0F, 1.7F}),
                                         .seed = random.next()};
      std::vector<float> logits(kVocabSize, -kInfinity);
      if (row % 4 < 2) {
        // Few tokens, so that little noise wins, of one warp or of all.
        for (int i = 0; i < 6; ++i) {
          logits[row % 4 == 0 ? 64 + random.below(32) : random.below(kVocabSize)] = static_cast<float>(random.normal());
        }
      } else if (row % 4 == 2) {
        // One likely token, and thousands that need much noise but are many.
        std::fill(logits.begin(), logits.end(), -9.0F * options.temperature);
        logits[random.below(4096)] = 0.0F;
      } else {
        // One token, and thousands that min-p leaves out by little.
        options.min_p = 0.5F;
        std::fill(logits.begin(), logits.end(), -0.695F * options.temperature);
        logits[random.below(kVocabSize)] = 0.0F;
      }
      step.rows.push_back({.options = options, .used = {}});
      step.logits.insert(step.logits.end(), logits.begin(), logits.end());
    }
    CAPTURE(round);
    CHECK(draw(device, static_cast<std::size_t>(round) % 2, step) ==
          draw(host, static_cast<std::size_t>(round) % 2, step));
  }
}

TEST_CASE("Samplers: with top-k and top-p a row is read once, and a sixteenth of it before") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted in this build");
  }
  constexpr int kVocabSize = 40000;
  const auto rows_read = [](const common::SamplingOptions& options) {
    common::Random random(3);
    Step step{.vocab_size = kVocabSize,
              .rows = {{.options = options, .used = {}}},
              .logits = std::vector<float>(kVocabSize),
              .positions = {9},
              .tokens = {1},
              .pending_rows = {-1},
              .drawn_before = {0}};
    for (float& logit : step.logits) {
      logit = static_cast<float>(3.0 * random.normal());
    }
    step.logits[123] = 18.0F;
    step.logits[456] = 17.0F;
    stage::DeviceSampler device(kVocabSize, 1, nullptr);
    stage::HostSampler host(kVocabSize);
    std::vector<Token> drawn;
    const auto counts = common::executor::count([&] { drawn = draw(device, 0, step); });
    CHECK(drawn == draw(host, 0, step));
    return 32.0 * static_cast<double>(counts.global_loads.units) / (sizeof(float) * kVocabSize);  // sectors
  };
  CHECK(rows_read({.temperature = 0.8F}) < 1.2);
  CHECK(rows_read({.temperature = 0.8F, .top_k = 40, .top_p = 0.95F}) < 1.5);
  CHECK(rows_read({.temperature = 0.8F, .top_p = 0.7F}) < 1.5);
  CHECK(rows_read({.temperature = 0.8F, .top_k = 5000}) > 3.0);  // more than are listed
}
