// The Llama forward pass on the GPU, compared with the CPU's.
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "common/app/workload.h"
#include "common/cuda/model/matrix_products.h"
#include "common/cuda/runtime/read_memory.h"
#include "common/model/default_model.h"
#include "common/model/gguf.h"
#include "common/model/presets.h"
#include "common/model/tokenizer.h"
#include "tests/gpu/gpu_llama.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/reference_decoder.h"
#include "tests/support/tiny_llama.h"

namespace {

using common::CudaLlama;
using common::Llama;
using common::LlamaConfig;
using common::Matrix;
using common::Precision;
using common::Random;
using common::Token;
using tests::CudaAttentionFn;
using tests::gpu_logits;
using tests::on_host;
using tests::random_numbers;

const std::string kNoComplaint;

// Both sides are float32 sums in orders of their own, each within 4e-5 of float64 (see test_llama.cpp).
constexpr tests::Tolerance kFloatRounding{1e-4, 2e-5};

// The relative error of all logits together, ‖gpu - cpu‖ / ‖cpu‖, that bfloat16 may have. Rounding to 8 bits is an
// error of at most 2^-9, and 2^-9 / sqrt(3) on average. A layer rounds what enters each of its 4 products twice
// (weights and activations), the logits once more each; independent errors add up as squares do. Twice that, because
// errors of early layers pass through the later ones.
double bfloat16_bound(int num_layers, double roundings = 8.0) {
  return 2.0 * std::sqrt(roundings * num_layers + 2.0) * 0x1p-9 / std::sqrt(3.0);
}

std::span<const float> all_of(const Matrix& matrix) { return {matrix.data(), static_cast<std::size_t>(matrix.size())}; }

// What bfloat16 rounds in a layer besides what enters its products: q and k, as products and as they are rotated, v,
// gate and up. Of Gemma's, also the two products that are normalised before they are added.
double all_roundings(const std::string& architecture) { return architecture.starts_with("gemma") ? 17.0 : 15.0; }

std::string complaint(const Matrix& gpu, const Matrix& cpu, Precision precision, int num_layers,
                      double roundings = 8.0) {
  if (precision == Precision::kFloat32) {
    return tests::compare(all_of(gpu), all_of(cpu), kFloatRounding);
  }
  const double error = (gpu - cpu).norm() / cpu.norm();
  return error <= bfloat16_bound(num_layers, roundings) ? "" : "the error is " + std::to_string(error);
}

// A stand-in for attention in which no token sees another, so that any tokens and positions go together.
common::AttentionFn local_attention(const LlamaConfig& config) {
  return [config](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
    Matrix result = q * (0.5F + 0.1F * static_cast<float>(layer));
    for (int head = 0; head < config.num_heads; ++head) {
      const int kv_head = head / config.num_queries_per_kv();
      result.middleCols(Eigen::Index{head} * config.head_dim, config.head_dim) +=
          k.middleCols(Eigen::Index{kv_head} * config.head_dim, config.head_dim) * 0.5F -
          v.middleCols(Eigen::Index{kv_head} * config.head_dim, config.head_dim);
    }
    return result;
  };
}

const common::Gguf& bundled_file() {
  static const common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  return file;
}

const Llama& bundled_model() {
  static const Llama model(bundled_file());
  return model;
}

// One sequence's tokens, given to the model in pieces; returns all their logits.
Matrix logits_in_chunks(CudaLlama& model, std::span<const Token> tokens, std::span<const int> chunks) {
  tests::ReferenceCache cache(model.config());
  const CudaAttentionFn attention = on_host(model, [&](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
    return cache.attend(layer, q, k, v);
  });
  Matrix logits(0, 0);
  std::size_t done = 0;
  for (std::size_t i = 0; done < tokens.size(); ++i) {
    const std::size_t size = std::min(tokens.size() - done, static_cast<std::size_t>(chunks[i % chunks.size()]));
    std::vector<int> positions(size);
    std::iota(positions.begin(), positions.end(), static_cast<int>(done));
    tests::append_rows(logits, gpu_logits(model, tokens.subspan(done, size), positions, attention));
    done += size;
  }
  return logits;
}

}  // namespace

TEST_CASE("GPU Llama: the bundled model's logits, whole, in chunks and token by token", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto precision = GENERATE(Precision::kFloat32, Precision::kBFloat16);
  CudaLlama model(bundled_model(), {precision}, 300);
  Random random(1);
  const std::vector<int> tokens = random_numbers(random, 33, model.config().vocab_size);
  tests::ReferenceCache cache(model.config());
  const Matrix expected = tests::next_logits(bundled_model(), cache, tokens);
  for (const std::vector<int>& chunks : {std::vector<int>{33}, {8, 9, 1, 15}, {2, 7}, {1}}) {
    CAPTURE(static_cast<int>(precision), chunks);
    const Matrix logits = logits_in_chunks(model, tokens, chunks);
    CHECK(complaint(logits, expected, precision, model.config().num_layers) == kNoComplaint);
  }
}

TEST_CASE("GPU Llama: in float32, the CPU's greedy text", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const common::Tokenizer tokenizer(bundled_file());
  CudaLlama model(bundled_model(), {Precision::kFloat32}, 300);
  const std::vector<Token> prompt = tokenizer.encode_prompt(common::workload()[0].prompt);
  const std::vector<tests::GreedyStep> expected = tests::decode_greedily(bundled_model(), prompt, 24);

  tests::ReferenceCache cache(model.config());
  const CudaAttentionFn attention = on_host(model, [&](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
    return cache.attend(layer, q, k, v);
  });
  std::vector<Token> next = prompt;
  for (const tests::GreedyStep& step : expected) {
    std::vector<int> positions(next.size());
    std::iota(positions.begin(), positions.end(), cache.length());
    const Matrix logits = gpu_logits(model, next, positions, attention, {static_cast<int>(next.size()) - 1});
    next = {common::argmax(tests::row_of(logits, 0))};
    REQUIRE(next[0] == step.token);
  }
}

TEST_CASE("GPU Llama: published shapes, any number of tokens, positions out of order", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::string name = GENERATE("smollm2-135m", "llama-3.2-1b", "llama-3-8b", "gemma-3-270m");
  LlamaConfig config = common::find_preset(name).config;
  config.num_layers = 2;
  config.vocab_size = 4099;  // no multiple of anything
  if (config.window > 0) {
    config.global_period = 2;  // a layer of each kind
  }
  config.rotates_halves = false;  // else q has another order on a GPU, and the stand-in adds v to it
  std::vector<int> sizes = {1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257};
  if (name == "smollm2-135m") {
    sizes.push_back(1100);  // with the library's algorithm for 1,152
  }
  const Llama cpu_model(config, 7, common::Windows::kComputed);  // no token sees another
  Random random(3);
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    CudaLlama model(cpu_model, {precision}, sizes.back());
    for (const int num_tokens : sizes) {
      const std::vector<int> tokens = random_numbers(random, num_tokens, config.vocab_size);
      const std::vector<int> positions = random_numbers(random, num_tokens, config.context_length);
      const common::AttentionFn attention = local_attention(config);
      const Matrix expected = cpu_model.logits(cpu_model.forward(tokens, positions, attention));
      CAPTURE(name, static_cast<int>(precision), num_tokens);
      const Matrix logits = gpu_logits(model, tokens, positions, on_host(model, attention));
      const double roundings = config.qk_norm ? all_roundings(name) : 8.0;
      CHECK(complaint(logits, expected, precision, config.num_layers, roundings) == kNoComplaint);
    }
  }
}

TEST_CASE("GPU Llama: shapes that fit no tile, and logits of chosen rows", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // Vocabulary, hidden size, heads, their size, feed-forward size. Just beyond what a block or a cluster takes, or just
  // not, and so small that most blocks have little to do.
  using Sizes = std::array<int, 5>;
  const Sizes sizes = GENERATE(Sizes{1003, 72, 9, 8, 104}, Sizes{61, 776, 3, 24, 1528}, Sizes{517, 1536, 1, 8, 776},
                               Sizes{77, 1544, 3, 8, 104}, Sizes{24, 64, 1, 8, 17416});
  const LlamaConfig config{.vocab_size = sizes[0],
                           .context_length = 100,
                           .hidden_size = sizes[1],
                           .num_layers = 2,
                           .num_heads = sizes[2],
                           .num_kv_heads = 1,
                           .head_dim = sizes[3],
                           .feed_forward_size = sizes[4]};
  const Llama cpu_model(config, 7);
  const common::AttentionFn attention = local_attention(config);
  Random random(5);
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    CudaLlama model(cpu_model, {precision}, 70);
    for (const int num_tokens : {1, 5, 9, 16, 17, 24, 32, 33, 64, 65}) {
      const std::vector<int> tokens = random_numbers(random, num_tokens, config.vocab_size);
      const std::vector<int> positions = random_numbers(random, num_tokens, config.context_length);
      const Matrix expected = cpu_model.logits(cpu_model.forward(tokens, positions, attention));
      for (const int num_rows : {1, 8, 13, 32, 70}) {
        std::vector<int> rows = random_numbers(random, num_rows, num_tokens);
        Matrix chosen(num_rows, config.vocab_size);
        for (int i = 0; i < num_rows; ++i) {
          chosen.row(i) = expected.row(rows[static_cast<std::size_t>(i)]);
        }
        rows[rows.size() / 2] = num_tokens;  // a row that the forward pass did not have
        chosen.row(num_rows / 2).setZero();
        CAPTURE(config.hidden_size, static_cast<int>(precision), num_tokens, num_rows);
        Matrix logits = gpu_logits(model, tokens, positions, on_host(model, attention), rows);
        CHECK(logits.row(num_rows / 2).array().isNaN().all());
        logits.row(num_rows / 2).setZero();
        if (num_rows > 1) {
          CHECK(complaint(logits, chosen, precision, config.num_layers) == kNoComplaint);
        }
      }
    }
  }
}

// The differences between architectures: biases, norms of heads and of what is added, the gate's function, which
// numbers are rotated together and how fast.
TEST_CASE("GPU Llama: every architecture against float64", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  tests::TinyModel tiny;
  tiny.architecture = GENERATE("llama", "qwen2", "qwen3", "gemma3");
  add_layer_kinds(tiny);
  tiny.vocab_size = 101;
  tiny.hidden_size = 64;
  tiny.feed_forward_size = 2056;  // long enough for the kernel by tiles
  tiny.write_head_dim = true;
  tiny.spread = 0.8;
  const int variant = GENERATE(0, 1, 2);
  if (variant == 0) {
    tiny.head_dim = 80;  // more than a warp computes at once
    tiny.freq_base = 1e6F;
  } else if (variant == 1) {
    tiny.num_heads = 7;
    tiny.num_kv_heads = 1;
    tiny.head_dim = 24;
    tiny.tied = false;
    tiny.scaling = "yarn";
    tiny.freq_base = 10000.0F;
    tiny.trained_length = 2048;
  } else {
    tiny.num_heads = 5;
    tiny.num_kv_heads = 5;
    tiny.head_dim = 8;
    tiny.tied = false;
    tiny.scaling = "linear";
    tiny.rope_factors = {1.0F, 2.0F, 4.0F, 8.0F};
  }
  const tests::Bytes bytes = tiny.builder().build();
  const common::Gguf file = common::Gguf::parse(bytes, "tiny.gguf");
  const Llama cpu_model(file);
  Random random(3);
  const std::vector<int> tokens = random_numbers(random, 70, tiny.vocab_size);
  const std::vector<double> expected = tests::SlowLlama(file).logits(tokens);
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    CudaLlama model(cpu_model, {precision}, 70);
    for (const std::vector<int>& chunks : {std::vector<int>{70}, {20, 49, 1}, {1, 8, 2, 16, 12}}) {
      CAPTURE(tiny.architecture, variant, static_cast<int>(precision), chunks);
      const Matrix logits = logits_in_chunks(model, tokens, chunks);
      if (precision == Precision::kFloat32) {
        CHECK(tests::compare(all_of(logits), expected, kFloatRounding) == kNoComplaint);
      } else {
        const Eigen::Map<const Eigen::VectorXd> exact(expected.data(), static_cast<Eigen::Index>(expected.size()));
        const Eigen::Map<const Eigen::VectorXf> computed(logits.data(), logits.size());
        const double error = (computed.cast<double>() - exact).norm() / exact.norm();
        CHECK(error <= bfloat16_bound(tiny.num_layers, all_roundings(tiny.architecture)));
      }
    }
  }
}

// The reference has the same rounded weights, so what is left is bfloat16's rounding of activations and of the
// embedding.
TEST_CASE("GPU Llama: float8 weights against float64, by rows, by tiles and unpacked", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::string architecture = GENERATE("llama", "qwen2", "qwen3", "gemma3");
  // Rows for each way to divide the columns: short rows, rows that fill the registers, and longer rows; the last two
  // are also long enough for the kernel by tiles.
  const int feed_forward_size = GENERATE(272, 1808, 2064, 4112);
  const tests::TinyModel tiny = tests::uneven_float8_model(architecture, feed_forward_size);
  const tests::Bytes bytes = tiny.builder().build();
  const common::Gguf file = common::Gguf::parse(bytes, "tiny.gguf");
  Random random(3);
  const std::vector<int> tokens = random_numbers(random, 130, tiny.vocab_size);
  const std::vector<double> expected = tests::SlowLlama(file).logits(tokens);
  CudaLlama model(Llama(file), {.precision = Precision::kBFloat16, .weights = common::WeightType::kFloat8}, 130);
  for (const std::vector<int>& chunks : {std::vector<int>{130}, {20, 64, 46}, {1, 8, 2, 16, 32}, {128, 2}}) {
    CAPTURE(tiny.architecture, tiny.feed_forward_size, chunks);
    const Matrix logits = logits_in_chunks(model, tokens, chunks);
    const Eigen::Map<const Eigen::VectorXd> exact(expected.data(), static_cast<Eigen::Index>(expected.size()));
    const Eigen::Map<const Eigen::VectorXf> computed(logits.data(), logits.size());
    CHECK((computed.cast<double>() - exact).norm() / exact.norm() <=
          bfloat16_bound(tiny.num_layers, all_roundings(architecture)));
  }
}

TEST_CASE("GPU Llama: float8 weights by rows, by tiles and by the library are the same weights", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::string name = GENERATE("llama-3.2-1b", "llama-3-8b", "smollm2-135m");
  LlamaConfig config = common::find_preset(name).config;
  config.num_layers = 2;
  config.vocab_size = 4099;
  CudaLlama model(config, 7, {.precision = Precision::kBFloat16, .weights = common::WeightType::kFloat8}, 130);
  Random random(3);
  const std::vector<int> tokens = random_numbers(random, 130, config.vocab_size);
  const auto attention = [&](const auto& call) { tests::copy_queries(call, model); };
  const Matrix expected = gpu_logits(model, tokens, tokens, attention);  // by the library
  for (const int num_tokens : {1, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128}) {
    CAPTURE(name, num_tokens);
    const auto first = std::span(tokens).first(static_cast<std::size_t>(num_tokens));
    const Matrix logits = gpu_logits(model, first, first, attention);
    CHECK(complaint(logits, expected.topRows(num_tokens), Precision::kBFloat16, config.num_layers) == kNoComplaint);
  }
}

// For tests/gpu/sanitize_gpu.sh: products by rows, by tiles and by the library, what is fused with them and what stands
// around them.
TEST_CASE("GPU Llama: each kernel in a small case", "[.sanitize]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const tests::TinyModel tiny = tests::uneven_float8_model(GENERATE("llama", "qwen2", "qwen3", "gemma3"), 2064);
  const tests::Bytes bytes = tiny.builder().build();
  const common::Gguf file = common::Gguf::parse(bytes, "tiny.gguf");
  const std::vector<int> chunks = {1, 9, 20, 40, 130};
  Random random(3);
  const std::vector<int> tokens = random_numbers(random, 200, tiny.vocab_size);
  const std::vector<double> expected = tests::SlowLlama(file).logits(tokens);
  std::vector<common::GpuTypes> kinds = {{Precision::kFloat32},
                                         {Precision::kBFloat16},
                                         {.precision = Precision::kBFloat16, .weights = common::WeightType::kFloat8}};
  if (common::float8_obstacle().empty()) {
    kinds.push_back(kinds.back());
    kinds.back().activations = common::ActivationType::kFloat8;
  }
  for (const common::GpuTypes& kind : kinds) {
    if (!CudaLlama::unsupported(Llama(file).config(), kind).empty()) {
      continue;
    }
    CAPTURE(tiny.architecture, static_cast<int>(kind.precision), static_cast<int>(kind.weights));
    CudaLlama model(Llama(file), kind, 130);
    const Matrix logits = logits_in_chunks(model, tokens, chunks);
    const Eigen::Map<const Eigen::VectorXd> exact(expected.data(), static_cast<Eigen::Index>(expected.size()));
    const Eigen::Map<const Eigen::VectorXf> computed(logits.data(), logits.size());
    const double bound = bfloat16_bound(tiny.num_layers, all_roundings(tiny.architecture));
    // Float8 has 4 bits fewer, in steps of many tokens.
    CHECK((computed.cast<double>() - exact).norm() / exact.norm() <=
          (kind.activations == common::ActivationType::kFloat8 ? 16.0 * bound : bound));
    const common::Stream stream;
    const common::DeviceArray<float> row(std::vector<float>(logits.data(), logits.data() + tiny.vocab_size));
    const common::DeviceArray<int> next(1);
    model.argmax(row.data(), 1, next.data(), stream.get());
    CHECK(next.download() == std::vector<int>{common::argmax(tests::row_of(logits, 0))});
    const CudaLlama drawn(model.config(), 7, {.precision = kind.precision, .weights = kind.weights}, 4);
    common::read_memory(stream, row.data(), row.size() * sizeof(float) / 16 * 16);
    stream.synchronize();
  }
}

TEST_CASE("GPU: a model that was prepared asks the matrix library nothing more", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    CudaLlama model(bundled_model().config(), 1, {precision}, 200);
    CHECK(model.num_prepared() == 0);
    const common::Stream stream;
    model.prepare(200, 150, stream.get());
    const std::size_t prepared = model.num_prepared();
    CHECK(prepared > 0);
    Random random(1);
    for (const int num_tokens : {1, 16, 17, 33, 64, 127, 128, 129, 150, 200}) {
      CAPTURE(static_cast<int>(precision), num_tokens);
      const std::vector<int> tokens = random_numbers(random, num_tokens, model.config().vocab_size);
      const std::vector<int> rows = random_numbers(random, std::min(num_tokens, 150), num_tokens);
      gpu_logits(
          model, tokens, tokens, [&](const auto& call) { tests::copy_queries(call, model); }, rows);
      CHECK(model.num_prepared() == prepared);
    }
  }
  CudaLlama model(bundled_model().config(), 1, {Precision::kBFloat16}, 64);
  CHECK_THROWS_AS(model.prepare(65, 1, nullptr), common::CheckError);
  CHECK_THROWS_AS(model.prepare(1, 65, nullptr), common::CheckError);
}
