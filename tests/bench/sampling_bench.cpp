// Drawing a step's tokens: what the sampler adds to the search for the largest logit, which every step has.
#include <cstddef>
#include <ostream>
#include <string>
#include <vector>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/text.h"
#include "common/cuda/model/cuda_sampler.h"
#include "common/cuda/model/llama_kernels.h"
#include "common/math/sampling.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {
namespace {

constexpr int kVocabSize = 128256;  // Llama 3's
constexpr int kMaxRows = 128;
constexpr int kUsedTokens = 1000;  // of each row, and its own token
constexpr int kCalls = 20;

// kPeaked: normally distributed, and some tokens that the model likes. kFlat: without them hundreds of tokens are as
// good as the best. kRandomWeights: flatter still, as a model's with random weights, whose variance is 1.
enum class Shape { kPeaked, kFlat, kRandomWeights };

std::vector<float> random_logits(Shape shape) {
  common::Random random(4);
  std::vector<float> block(std::size_t{8} * kVocabSize);  // rows are repeated after 8
  for (float& logit : block) {
    logit = static_cast<float>((shape == Shape::kRandomWeights ? 1.0 : 3.0) * random.normal());
  }
  for (std::size_t row = 0; shape == Shape::kPeaked && row < 8; ++row) {
    for (int i = 0; i < 8; ++i) {
      block[row * kVocabSize + random.below(kVocabSize)] = 19.0F - static_cast<float>(i);
    }
  }
  std::vector<float> result;
  for (int row = 0; row < kMaxRows; row += 8) {
    result.insert(result.end(), block.begin(), block.end());
  }
  return result;
}

struct Case {
  std::string name;
  common::SamplingOptions options;
  Shape shape = Shape::kPeaked;
};

std::vector<Case> cases() {
  const common::SamplingOptions filtered = {.temperature = 0.8F, .top_k = 40, .top_p = 0.95F};
  common::SamplingOptions changed = filtered;
  changed.repetition_penalty = 1.1F;
  changed.presence_penalty = 0.1F;
  changed.frequency_penalty = 0.1F;
  for (int token = 0; token < 300; ++token) {
    changed.logit_bias.push_back({400 * token, -1.0F});
  }
  return {{"temperature 0.8", {.temperature = 0.8F}},
          {"temperature 0.8, flat", {.temperature = 0.8F}, Shape::kFlat},
          {"temperature 0.8, random weights", {.temperature = 0.8F}, Shape::kRandomWeights},
          {"top-k 40, top-p 0.95", filtered},
          {"top-k 40, top-p 0.95, flat", filtered, Shape::kFlat},
          {"top-p 0.95", {.temperature = 0.8F, .top_p = 0.95F}},
          {"top-p 0.95, flat", {.temperature = 0.8F, .top_p = 0.95F}, Shape::kFlat},
          {"min-p 0.05", {.temperature = 0.8F, .min_p = 0.05F}},
          {"penalties, 300 biases, top-k, top-p", changed}};
}

// Microseconds of a draw from num_rows rows, the search for the largest logits included; without options: of the search
// alone.
double time_draws(const common::Stream& stream, int num_rows, const common::SamplingOptions* options,
                  const std::vector<float>& logits) {
  const common::DeviceArray<float> device_logits(logits);
  const common::DeviceArray<int> next_tokens(kMaxRows);
  const common::DeviceMemory scratch(common::argmax_scratch_bytes(kMaxRows));
  CUDA_CHECK(cudaMemset(scratch.data(), 0, scratch.bytes()));
  std::vector<common::SamplingParameters> parameters;
  std::vector<common::SamplingBias> biases;
  std::vector<int> used;
  std::vector<int> rows;
  common::Random random(5);
  for (int row = 0; options != nullptr && row < num_rows; ++row) {
    parameters.push_back(common::sampling_parameters(*options, 0, row));
    common::SamplingParameters& own = parameters.back();
    own.num_used = own.has_penalties() ? kUsedTokens : 0;
    own.prompt_length = own.num_used / 2;
    own.first_used = static_cast<int>(used.size());
    for (int i = 0; i < own.num_used; ++i) {
      used.push_back(static_cast<int>(random.below(20000)));
    }
    const std::vector<common::SamplingBias> own_biases = common::sampling_biases(*options, row);
    own.first_bias = static_cast<int>(biases.size());
    own.num_biases = static_cast<int>(own_biases.size());
    biases.insert(biases.end(), own_biases.begin(), own_biases.end());
    rows.push_back(row);
  }
  const common::DeviceArray<common::SamplingParameters> device_parameters(parameters);
  const common::DeviceArray<common::SamplingBias> device_biases(biases);
  const common::DeviceArray<int> device_used(used);
  const common::DeviceArray<int> token_rows(rows);
  const common::DeviceArray<int> none(std::vector<int>(rows.size(), -1));
  common::CudaSampler sampler(kVocabSize, kMaxRows);
  common::SamplingBatch batch{.rows = device_parameters.data(), .num_rows = num_rows};
  batch.have_cuts = options != nullptr && (options->top_k > 0 || options->top_p < 1.0F);
  batch.change_logits = options != nullptr && !(used.empty() && biases.empty());
  batch.biases = device_biases.data();
  batch.used = device_used.data();
  batch.token_rows = token_rows.data();
  batch.tokens = token_rows.data();
  batch.pending_rows = none.data();
  batch.pending_tokens = nullptr;
  stream.synchronize();
  return common::microseconds_per_call(stream, kCalls, [&](int) {
    common::argmax_rows(device_logits.data(), kVocabSize, num_rows, scratch.data(), next_tokens.data(), stream.get());
    if (options != nullptr) {
      sampler.sample(device_logits.data(), batch, next_tokens.data(), stream.get());
    }
  });
}

}  // namespace

void print_sampling_speed(std::ostream& output) {
  const std::vector<int> counts = {1, 32, 64, 128};
  const common::Stream stream;
  const std::vector<float> logits[] = {random_logits(Shape::kPeaked), random_logits(Shape::kFlat),
                                       random_logits(Shape::kRandomWeights)};
  common::Table table({"us", "1 row", "32", "64", "128"});
  common::Progress progress("measuring the sampler", cases().size() + 1);
  const auto add = [&](const std::string& name, const common::SamplingOptions* options, Shape shape) {
    std::vector<std::string> cells = {name};
    for (const int num_rows : counts) {
      cells.push_back(
          common::format_microseconds(time_draws(stream, num_rows, options, logits[static_cast<std::size_t>(shape)])));
    }
    table.add_row(cells);
    progress.advance();
  };
  add("largest logit alone", nullptr, Shape::kPeaked);
  for (const Case& entry : cases()) {
    add(entry.name, &entry.options, entry.shape);
  }
  progress.clear();
  output << "Drawing a token from each row of " << common::format_count(kVocabSize)
         << " logits, the search for the largest one included; flat, random weights: no token is far likelier than the "
            "others.\n"
         << table.to_string() << "\n";
}

}  // namespace
