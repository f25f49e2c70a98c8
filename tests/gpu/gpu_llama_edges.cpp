// What the GPU's Llama does at its edges: in graphs, with equal and impossible logits, with bad input, without memory.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/cuda/model/matrix_products.h"
#include "common/cuda/model/read_limit.h"
#include "common/model/presets.h"
#include "tests/gpu/gpu_llama.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"

namespace {

using common::CudaAttentionCall;
using common::CudaAttentionFn;
using common::CudaLlama;
using common::DeviceArray;
using common::Llama;
using common::LlamaConfig;
using common::Matrix;
using common::Precision;
using common::Random;
using tests::copy_queries;
using tests::gpu_logits;
using tests::random_numbers;

const std::string kNoComplaint;

// A published shape with few layers and tokens, and a layer of each kind that it has.
LlamaConfig small_config(const std::string& name, int num_layers, int vocab_size) {
  LlamaConfig config = common::find_preset(name).config;
  config.num_layers = num_layers;
  config.vocab_size = vocab_size;
  config.global_period = config.window > 0 ? 2 : 0;
  return config;
}

std::span<const float> all_of(const Matrix& matrix) { return {matrix.data(), static_cast<std::size_t>(matrix.size())}; }

}  // namespace

TEST_CASE("GPU Llama: a graph's replays equal eager steps, bit for bit", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto precision = GENERATE(Precision::kFloat32, Precision::kBFloat16);
  const int num_tokens = GENERATE(1, 3, 8, 9, 16, 31, 32, 40, 64);
  const LlamaConfig config = small_config(GENERATE("smollm2-135m", "gemma-3-270m"), 3, 49152);
  CudaLlama model(config, 11, {precision}, 64);
  const common::Stream stream;
  DeviceArray<int> tokens(static_cast<std::size_t>(num_tokens));
  DeviceArray<int> positions(static_cast<std::size_t>(num_tokens));
  DeviceArray<int> next(static_cast<std::size_t>(num_tokens));
  std::vector<int> all_rows(static_cast<std::size_t>(num_tokens));
  std::iota(all_rows.begin(), all_rows.end(), 0);
  const DeviceArray<int> rows(all_rows);
  DeviceArray<float> logits(static_cast<std::size_t>(num_tokens * config.vocab_size));
  const auto step = [&] {
    model.forward(
        tokens.data(), positions.data(), num_tokens, [&](const CudaAttentionCall& call) { copy_queries(call, model); },
        stream.get());
    model.logits(rows.data(), num_tokens, logits.data(), stream.get());
    model.argmax(logits.data(), num_tokens, next.data(), stream.get());
  };
  const common::Graph graph(stream, step);
  Random random(5);
  for (int i = 0; i < 5; ++i) {
    tokens.upload(random_numbers(random, num_tokens, config.vocab_size));
    positions.upload(random_numbers(random, num_tokens, config.context_length));
    step();
    const std::vector<float> eager = logits.download();
    const std::vector<int> eager_next = next.download();
    CUDA_CHECK(cudaMemset(logits.data(), 0xFF, logits.size() * sizeof(float)));
    graph.launch(stream);
    CAPTURE(static_cast<int>(precision), num_tokens, i);
    CHECK(tests::compare_bits(logits.download(), eager) == kNoComplaint);
    CHECK(next.download() == eager_next);
    const auto vocab_size = static_cast<std::size_t>(config.vocab_size);
    for (std::size_t row = 0; row < eager_next.size(); ++row) {
      CHECK(eager_next[row] == common::argmax(std::span(eager).subspan(row * vocab_size, vocab_size)));
    }
  }
}

TEST_CASE("GPU Llama: random weights keep activations at size 1 and depend on the seed alone", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  LlamaConfig config = common::find_preset("smollm2-135m").config;
  config.num_layers = 2;
  const std::vector<int> tokens = {1, 2, 3};
  const auto logits_of = [&](std::uint64_t seed) {
    CudaLlama model(config, seed, {Precision::kFloat32}, 3);
    return gpu_logits(model, tokens, tokens, [&](const CudaAttentionCall& call) { copy_queries(call, model); });
  };
  const Matrix logits = logits_of(1);
  CHECK(tests::compare_bits(all_of(logits_of(1)), all_of(logits)) == kNoComplaint);
  CHECK(tests::compare_bits(all_of(logits_of(2)), all_of(logits)) != kNoComplaint);
  // The mean of squares of 147,456 numbers of variance 1: within 2 percent of 1, except in fewer than one run in 10^7.
  const double mean_square = logits.cast<double>().squaredNorm() / static_cast<double>(logits.size());
  CHECK(std::abs(mean_square - 1.0) < 0.02);
}

TEST_CASE("GPU Llama: the most likely token, ties, NaN and infinities", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const int vocab_size : {9, 4096, 4097, 128256}) {
    LlamaConfig config = common::find_preset("smollm2-135m").config;
    config.num_layers = 1;
    config.vocab_size = vocab_size;
    CudaLlama model(config, 1, {Precision::kBFloat16}, 16);
    Random random(static_cast<std::uint64_t>(vocab_size));
    const auto size = static_cast<std::size_t>(vocab_size);
    const auto last = size - 1;
    std::vector<std::vector<float>> rows(8, std::vector<float>(size));
    for (std::vector<float>& row : rows) {
      std::generate(row.begin(), row.end(), [&] { return static_cast<float>(random.normal()); });
    }
    rows[1][2] = rows[1][last] = rows[1][5] = 10.0F;
    rows[2].assign(size, -3.5F);
    rows[3].assign(size, -kInfinity);
    rows[3][last] = -1e38F;
    rows[4].assign(size, -1.0F);
    rows[4][3] = -0.0F;
    rows[4][last] = 0.0F;
    rows[5][last] = kInfinity;
    rows[6][last] = kNaN;
    rows[6][0] = kInfinity;
    rows[7].assign(size, -kInfinity);
    std::vector<float> all;
    std::vector<int> expected;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      all.insert(all.end(), rows[i].begin(), rows[i].end());
      expected.push_back(i < 6 ? common::argmax(rows[i]) : -1);
    }
    const DeviceArray<float> logits(all);
    DeviceArray<int> next(rows.size());
    const common::Stream stream;
    for (int run = 0; run < 2; ++run) {  // what one call leaves behind must not matter to the next
      next.upload(std::vector<int>(rows.size(), -7));
      model.argmax(logits.data(), static_cast<int>(rows.size()), next.data(), stream.get());
      CAPTURE(vocab_size, run);
      CHECK(next.download() == expected);
    }
  }
}

TEST_CASE("GPU Llama: tokens and rows that do not exist are NaN, and only they", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto precision = GENERATE(Precision::kFloat32, Precision::kBFloat16);
  const int num_tokens = GENERATE(1, 4, 12, 32, 33);
  const LlamaConfig config = small_config(GENERATE("smollm2-135m", "gemma-3-270m"), 2, 1000);
  CudaLlama model(config, 1, {precision}, 33);
  Random random(9);
  std::vector<int> tokens = random_numbers(random, num_tokens, config.vocab_size);
  const std::vector<int> positions = random_numbers(random, num_tokens, 100);
  const CudaAttentionFn attention = [&](const CudaAttentionCall& call) { copy_queries(call, model); };
  const Matrix expected = gpu_logits(model, tokens, positions, attention);
  for (const int row : {-1, num_tokens, 1 << 30}) {
    CHECK(gpu_logits(model, tokens, positions, attention, {row}).array().isNaN().all());
  }
  for (const int token : {-1, config.vocab_size}) {
    tokens.back() = token;
    const Matrix logits = gpu_logits(model, tokens, positions, attention);
    CAPTURE(static_cast<int>(precision), num_tokens, token);
    CHECK(logits.row(num_tokens - 1).array().isNaN().all());
    CHECK(logits.topRows(num_tokens - 1) == expected.topRows(num_tokens - 1));
  }
}

TEST_CASE("GPU Llama: what is too large is refused in one sentence, and nothing leaks", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto free_bytes = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
  };
  const auto refusal = [](const LlamaConfig& config, int max_tokens) -> std::string {
    try {
      const CudaLlama model(config, 1, {Precision::kBFloat16}, max_tokens);
    } catch (const common::OutOfDeviceMemory& error) {
      return error.what();
    }
    return "";
  };
  LlamaConfig small = common::find_preset("smollm2-135m").config;
  small.num_layers = 1;
  LlamaConfig large = common::find_preset("llama-3-8b").config;
  large.num_layers = 4000;
  // From here on, the driver and the libraries hold all the memory that they keep.
  (void)CudaLlama(small, 1, {Precision::kFloat32}, 100);
  (void)refusal(large, 1);
  const std::size_t before = free_bytes();
  for (const std::string& message : {refusal(large, 1), refusal(small, 1 << 30)}) {
    CHECK(message.find("the GPU is out of memory: ") == 0);
    CHECK(message.find('\n') == std::string::npos);
    CHECK(free_bytes() == before);
  }
  (void)CudaLlama(small, 1, {Precision::kFloat32}, 100);
  CHECK(free_bytes() == before);
}

TEST_CASE("GPU Llama: bad arguments are refused before anything is launched", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  LlamaConfig config = common::find_preset("smollm2-135m").config;
  config.num_layers = 1;
  CHECK_THROWS_AS((CudaLlama(config, 1, {Precision::kBFloat16}, 0)), common::CheckError);
  LlamaConfig odd = config;
  odd.feed_forward_size = 1532;
  CHECK_THROWS_AS((CudaLlama(odd, 1, {Precision::kBFloat16}, 1)), common::InputError);
  LlamaConfig narrow = config;
  narrow.feed_forward_size = 1528;
  CHECK(CudaLlama::unsupported(narrow, {}).empty());
  CHECK(CudaLlama::unsupported(narrow, {.weights = common::WeightType::kFloat8}) ==
        "on the GPU, the feed-forward size must be a multiple of 16 with float8 weights, and this model's is 1528");
  CHECK_THROWS_AS((CudaLlama(config, 1, {.precision = Precision::kFloat32, .weights = common::WeightType::kFloat8}, 1)),
                  common::CheckError);
  LlamaConfig wide = config;
  wide.head_dim = 264;
  const LlamaConfig gemma = common::find_preset("gemma-3-270m").config;
  CHECK(CudaLlama::unsupported(gemma, {.weights = common::WeightType::kFloat8}).empty());
  if (common::float8_obstacle().empty()) {
    CHECK(CudaLlama::unsupported(
              gemma, {.weights = common::WeightType::kFloat8, .activations = common::ActivationType::kFloat8}) ==
          "on the GPU, the layers of Gemma 3 are not computed with float8 activations");
  }
  CHECK(CudaLlama::unsupported(wide, {}) == "on the GPU, a head has at most 256 dimensions, and this model's have 264");

  CudaLlama model(config, 1, {Precision::kBFloat16}, 4);
  const common::Stream stream;
  const DeviceArray<int> numbers(std::vector<int>{0, 1, 2, 3});
  const DeviceArray<float> logits(static_cast<std::size_t>(4 * config.vocab_size));
  const int* given = numbers.data();
  const CudaAttentionFn attention = [&](const CudaAttentionCall& call) { copy_queries(call, model); };
  CHECK_THROWS_AS(model.logits(given, 1, logits.data(), stream.get()), common::CheckError);  // before any forward
  for (const int num_tokens : {-1, 0, 5}) {
    CHECK_THROWS_AS(model.forward(given, given, num_tokens, attention, stream.get()), common::CheckError);
  }
  CHECK_THROWS_AS(model.forward(nullptr, given, 4, attention, stream.get()), common::CheckError);
  CHECK_THROWS_AS(model.forward(given, nullptr, 4, attention, stream.get()), common::CheckError);
  CHECK_THROWS_AS(model.forward(given, given, 4, nullptr, stream.get()), common::CheckError);
  model.forward(given, given, 4, attention, stream.get());
  for (const int num_rows : {-1, 0, 5}) {
    CHECK_THROWS_AS(model.logits(given, num_rows, logits.data(), stream.get()), common::CheckError);
    CHECK_THROWS_AS(model.argmax(logits.data(), num_rows, numbers.data(), stream.get()), common::CheckError);
  }
  CHECK_THROWS_AS(model.logits(nullptr, 1, logits.data(), stream.get()), common::CheckError);
  CHECK_THROWS_AS(model.logits(given, 1, nullptr, stream.get()), common::CheckError);
  CHECK_THROWS_AS(model.argmax(logits.data(), 1, nullptr, stream.get()), common::CheckError);
  stream.synchronize();
}

TEST_CASE("GPU Llama: the bytes that a token reads", "[gpu]") {
  for (const bool tied : {true, false}) {
    LlamaConfig config = common::find_preset("smollm2-135m").config;
    config.num_layers = 2;
    config.vocab_size = 1000;
    config.tied_output = tied;
    config.qkv_bias = tied;
    config.qk_norm = !tied;
    config.post_norms = !tied;
    CHECK(common::weight_bytes_per_token(config, {}) == Llama(config, 1).weight_bytes_per_token());
  }
}
