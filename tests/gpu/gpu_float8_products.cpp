// Float8 multiplied by float8: the library's products against float64 of the same rounded numbers, and a whole model.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "common/app/workload.h"
#include "common/base/text.h"
#include "common/cuda/model/matrix_products.h"
#include "common/model/presets.h"
#include "tests/gpu/gpu_llama.h"
#include "tests/support/catch.h"
#include "tests/support/float8.h"
#include "tests/support/golden.h"
#include "tests/support/reference_decoder.h"
#include "tests/support/tiny_llama.h"

namespace {

using common::ActivationType;
using common::CudaLlama;
using common::DeviceArray;
using common::Llama;
using common::LlamaConfig;
using common::Matrix;
using common::Precision;
using common::Random;
using common::Token;
using common::WeightType;
using tests::gpu_logits;

// Empty if this machine multiplies float8 by float8.
std::string obstacle() { return common::has_cuda_device() ? common::float8_obstacle() : "there is no GPU"; }

// Of a normal distribution. Rounding is slow by its definition, so the bytes are drawn from some that are rounded.
std::vector<std::uint8_t> random_bytes(Random& random, std::size_t count) {
  static const std::vector<std::uint8_t> rounded = [] {
    Random own(11);
    std::vector<std::uint8_t> some(1 << 14);
    std::generate(some.begin(), some.end(), [&] { return tests::float8_byte(100.0 * own.normal()); });
    return some;
  }();
  std::vector<std::uint8_t> bytes(count);
  std::generate(bytes.begin(), bytes.end(), [&] { return rounded[random.below(rounded.size())]; });
  return bytes;
}

double relative_error(const std::vector<float>& actual, const std::vector<double>& exact) {
  double errors = 0.0;
  double squares = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    errors += (actual[i] - exact[i]) * (actual[i] - exact[i]);
    squares += exact[i] * exact[i];
  }
  return std::sqrt(errors / squares);
}

// Sequences side by side in one step: row i of a step is sequence sequences[i]'s next token.
Matrix logits_of_texts(CudaLlama& model, const std::vector<std::vector<Token>>& texts) {
  std::vector<int> tokens;
  std::vector<int> positions;
  for (const std::vector<Token>& text : texts) {
    tokens.insert(tokens.end(), text.begin(), text.end());
    for (std::size_t i = 0; i < text.size(); ++i) {
      positions.push_back(static_cast<int>(i));
    }
  }
  std::vector<tests::ReferenceCache> caches(texts.size(), tests::ReferenceCache(model.config()));
  const common::AttentionFn attention = [&](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
    Matrix result(q.rows(), q.cols());
    Eigen::Index first = 0;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const auto count = static_cast<Eigen::Index>(texts[i].size());
      result.middleRows(first, count) =
          caches[i].attend(layer, q.middleRows(first, count), k.middleRows(first, count), v.middleRows(first, count));
      first += count;
    }
    return result;
  };
  return gpu_logits(model, tokens, positions, tests::on_host(model, attention));
}

struct Difference {
  double equal = 0.0;     // share of most probable next tokens that are the same
  double mean = 0.0;      // mean change of the log-probability of the text's own next token
  double absolute = 0.0;  // mean absolute change
  int num_tokens = 0;
};

// begins: from which token of each text on.
Difference compare_texts(const Matrix& one, const Matrix& other, const std::vector<std::vector<Token>>& texts,
                         const std::vector<std::size_t>& begins) {
  const auto log_probability = [](const Matrix& logits, Eigen::Index row, Token token) {
    const Eigen::ArrayXd shifted = (logits.row(row).array() - logits.row(row).maxCoeff()).cast<double>();
    return shifted(token) - std::log(shifted.exp().sum());
  };
  Difference found;
  Eigen::Index first = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    for (std::size_t j = begins[i]; j < texts[i].size(); ++j) {
      const Eigen::Index row = first + static_cast<Eigen::Index>(j) - 1;
      const double change = log_probability(other, row, texts[i][j]) - log_probability(one, row, texts[i][j]);
      found.equal += common::argmax(tests::row_of(one, row)) == common::argmax(tests::row_of(other, row)) ? 1.0 : 0.0;
      found.mean += change;
      found.absolute += std::abs(change);
      ++found.num_tokens;
    }
    first += static_cast<Eigen::Index>(texts[i].size());
  }
  found.equal /= found.num_tokens;
  found.mean /= found.num_tokens;
  found.absolute /= found.num_tokens;
  return found;
}

}  // namespace

TEST_CASE("GPU: the library's products of float8 and float8, against float64 of the same numbers", "[gpu]") {
  if (const std::string reason = obstacle(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  struct Shape {
    int tokens, rows, cols;
  };
  std::vector<double> values(256);  // of each byte
  for (std::size_t byte = 0; byte < values.size(); ++byte) {
    values[byte] = tests::float8_value(static_cast<std::uint8_t>(byte));
  }
  Random random(5);
  std::string report;
  for (const Shape& shape :
       {Shape{1, 32, 16}, Shape{65, 48, 208}, Shape{66, 1536, 1024}, Shape{100, 512, 1808}, Shape{129, 64, 272},
        Shape{130, 256, 14336}, Shape{257, 1024, 2064}, Shape{600, 192, 512}}) {
    const auto tokens = static_cast<std::size_t>(shape.tokens);
    const auto rows = static_cast<std::size_t>(shape.rows);
    const auto cols = static_cast<std::size_t>(shape.cols);
    const std::vector<std::uint8_t> x = random_bytes(random, tokens * cols);
    const std::vector<std::uint8_t> weights = random_bytes(random, rows * cols);
    const DeviceArray<std::uint8_t> device_x(x);
    const DeviceArray<std::uint8_t> device_weights(weights);
    // Some of the rows, and of each token all: a CPU takes its time.
    const std::size_t row_step = std::max<std::size_t>(1, rows * cols * tokens / 30000000);
    common::MatrixProducts products(Precision::kBFloat16);
    for (const bool adds : {false, true}) {
      const std::vector<float> before(tokens * rows, 0.5F);
      DeviceArray<float> sums(before);
      common::DeviceMemory halves(tokens * rows * 2);
      const common::Stream stream;
      products.multiply({.x = device_x.data(),
                         .weights = device_weights.data(),
                         .is_float8 = true,
                         .num_tokens = shape.tokens,
                         .num_rows = shape.rows,
                         .num_cols = shape.cols,
                         .output = adds ? static_cast<void*>(sums.data()) : halves.data(),
                         .float_output = adds,
                         .add = adds},
                        stream.get());
      stream.synchronize();
      std::vector<float> all;
      if (adds) {
        all = sums.download();
      } else {
        const Matrix matrix =
            tests::download_rows(halves.data(), shape.tokens, shape.rows, shape.rows, Precision::kBFloat16);
        all.assign(matrix.data(), matrix.data() + matrix.size());
      }
      double largest_error = 0.0;
      for (std::size_t token = 0; token < tokens;
           token += std::max<std::size_t>(1, token == 0 ? tokens / 2 : tokens / 9)) {
        std::vector<float> actual;
        std::vector<double> exact;
        for (std::size_t row = token % row_step; row < rows; row += row_step) {
          double sum = 0.0;
          for (std::size_t col = 0; col < cols; ++col) {
            sum += values[x[token * cols + col]] * values[weights[row * cols + col]];
          }
          exact.push_back(sum);
          actual.push_back(all[token * rows + row] - (adds ? 0.5F : 0.0F));
        }
        largest_error = std::max(largest_error, relative_error(actual, exact));
      }
      report += common::format("\n%d tokens, %d x %d, %s: relative error %.5f", shape.tokens, shape.rows, shape.cols,
                               adds ? "added" : "bfloat16", largest_error);
      // A bfloat16 is off by 2^-9 / sqrt(3) in the root mean square. Tensor cores add up a few columns in some 14 bits,
      // and cut.
      CHECK(largest_error <= 0.01);
    }
  }
  WARN(report);
}

// Rounding to float8 with a scale for each row is off by 2.6 % in the root mean square, for each token's activations in
// 4 products of a layer. Twice that, because errors of early layers pass through the later ones, and through softmax
// and silu.
TEST_CASE("GPU Llama: float8 activations against float64, around the number of tokens from which on", "[gpu]") {
  if (const std::string reason = obstacle(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  const std::string architecture = GENERATE("llama", "qwen2", "qwen3");
  const tests::TinyModel tiny = tests::uneven_float8_model(architecture, GENERATE(272, 8208));
  const tests::Bytes bytes = tiny.builder().build();
  const common::Gguf file = common::Gguf::parse(bytes, "tiny.gguf");
  Random random(3);
  const std::vector<int> tokens = tests::random_numbers(random, 200, tiny.vocab_size);
  const std::vector<double> expected = tests::SlowLlama(file).logits(tokens);
  CudaLlama model(
      Llama(file),
      {.precision = Precision::kBFloat16, .weights = WeightType::kFloat8, .activations = ActivationType::kFloat8}, 200);
  CudaLlama weights_only(Llama(file), {.precision = Precision::kBFloat16, .weights = WeightType::kFloat8}, 200);
  for (const std::vector<int>& chunks :
       {std::vector<int>{64, 64, 64, 8}, {65, 65, 70}, {64, 128, 8}, {129, 71}, {200}, {1, 130, 69}}) {
    CAPTURE(tiny.architecture, tiny.feed_forward_size, chunks);
    const auto logits_in_chunks = [&](CudaLlama& of) {
      tests::ReferenceCache cache(of.config());
      const auto attention = tests::on_host(of, [&](int layer, const Matrix& q, const Matrix& k, const Matrix& v) {
        return cache.attend(layer, q, k, v);
      });
      Matrix logits(0, 0);
      std::size_t done = 0;
      for (const int size : chunks) {
        std::vector<int> positions(static_cast<std::size_t>(size));
        std::iota(positions.begin(), positions.end(), static_cast<int>(done));
        const auto chunk = std::span(tokens).subspan(done, positions.size());
        tests::append_rows(logits, gpu_logits(of, chunk, positions, attention));
        done += positions.size();
      }
      return logits;
    };
    const Matrix logits = logits_in_chunks(model);
    const Matrix without = logits_in_chunks(weights_only);
    const Eigen::Map<const Eigen::VectorXd> exact(expected.data(), static_cast<Eigen::Index>(expected.size()));
    const Eigen::Map<const Eigen::VectorXf> computed(logits.data(), logits.size());
    const double error = (computed.cast<double>() - exact).norm() / exact.norm();
    CAPTURE(error);
    CHECK(error <= 2.0 * 0.026 * std::sqrt(4.0 * tiny.num_layers));
    // Up to `most` tokens, the kernels are the same.
    const int most = tiny.feed_forward_size > 8192 ? 64 : 128;
    CHECK((logits == without) == (*std::max_element(chunks.begin(), chunks.end()) <= most));
  }
}

TEST_CASE("GPU Llama: with float8 activations, NaN stays with its token", "[gpu]") {
  if (const std::string reason = obstacle(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  LlamaConfig config = common::find_preset("smollm2-135m").config;
  config.num_layers = 2;
  config.vocab_size = 1000;
  CudaLlama model(
      config, 1,
      {.precision = Precision::kBFloat16, .weights = WeightType::kFloat8, .activations = ActivationType::kFloat8}, 130);
  const auto attention = [&](const auto& call) { tests::copy_queries(call, model); };
  Random random(9);
  std::vector<int> tokens = tests::random_numbers(random, 130, config.vocab_size);
  const Matrix expected = gpu_logits(model, tokens, tokens, attention);
  CHECK(expected.array().isFinite().all());
  CHECK(gpu_logits(model, tokens, tokens, attention) == expected);
  tokens[70] = config.vocab_size;  // no such token
  const Matrix logits = gpu_logits(model, tokens, std::vector<int>(130, 3), attention);
  CHECK(logits.row(70).array().isNaN().all());
  CHECK(logits.topRows(70).array().isFinite().all());
  CHECK(logits.bottomRows(59).array().isFinite().all());
}

TEST_CASE("GPU: a model with float8 activations that was prepared asks the library nothing more", "[gpu]") {
  if (const std::string reason = obstacle(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  const LlamaConfig& config = tests::bundled().llama.config();
  CudaLlama model(
      config, 1,
      {.precision = Precision::kBFloat16, .weights = WeightType::kFloat8, .activations = ActivationType::kFloat8}, 200);
  const common::Stream stream;
  model.prepare(200, 150, stream.get());
  const std::size_t prepared = model.num_prepared();
  for (const int num_tokens : {1, 64, 65, 128, 129, 200}) {
    Random random(1);
    const std::vector<int> tokens = tests::random_numbers(random, num_tokens, config.vocab_size);
    gpu_logits(model, tokens, tokens, [&](const auto& call) { tests::copy_queries(call, model); }, {0});
    CAPTURE(num_tokens);
    CHECK(model.num_prepared() == prepared);
  }
}

// The golden texts of the bundled model, in one step. With COURSE_MODEL=FILE.gguf, that model's texts, which it
// generates in bfloat16 after the beginnings that the course has for its demonstrations.
TEST_CASE("GPU: how far activations in float8 move the next token", "[gpu]") {
  if (const std::string reason = obstacle(); !reason.empty()) {
    SKIP_TEST(reason);
  }
  const char* const path = std::getenv("COURSE_MODEL");
  const bool is_bundled = path == nullptr || *path == '\0';
  std::vector<std::vector<Token>> texts;
  std::vector<std::size_t> begins;
  std::unique_ptr<const common::Gguf> file;
  std::unique_ptr<const Llama> real;
  if (is_bundled) {
    for (const tests::GoldenCase& golden : tests::golden_cases()) {
      texts.push_back(golden.prompt_tokens);
      texts.back().insert(texts.back().end(), golden.generated_tokens.begin(), golden.generated_tokens.end());
      begins.push_back(golden.prompt_tokens.size());
    }
  } else {
    file = std::make_unique<const common::Gguf>(common::Gguf::open(path));
    real = std::make_unique<const Llama>(*file);
    const common::Tokenizer tokenizer(*file);
    for (const auto& item : common::workload()) {
      texts.push_back(tokenizer.encode_prompt(item.prompt));
      begins.push_back(texts.back().size());
    }
  }
  const Llama& llama = is_bundled ? tests::bundled().llama : *real;
  constexpr int kMaxTokens = 2048;
  CudaLlama halves(llama, {Precision::kBFloat16}, kMaxTokens);
  if (!is_bundled) {
    for (int step = 0; step < 32; ++step) {
      const Matrix logits = logits_of_texts(halves, texts);
      Eigen::Index row = -1;
      for (std::vector<Token>& text : texts) {
        row += static_cast<Eigen::Index>(text.size());
        text.push_back(common::argmax(tests::row_of(logits, row)));
      }
    }
  }
  CudaLlama weights(llama, {.precision = Precision::kBFloat16, .weights = WeightType::kFloat8}, kMaxTokens);
  CudaLlama both(
      llama,
      {.precision = Precision::kBFloat16, .weights = WeightType::kFloat8, .activations = ActivationType::kFloat8},
      kMaxTokens);
  const Matrix of_half = logits_of_texts(halves, texts);
  const Matrix of_weights = logits_of_texts(weights, texts);
  const Matrix of_both = logits_of_texts(both, texts);
  const Difference by_weights = compare_texts(of_half, of_weights, texts, begins);
  const Difference by_both = compare_texts(of_half, of_both, texts, begins);
  const Difference by_activations = compare_texts(of_weights, of_both, texts, begins);
  const auto line = [](const char* name, const Difference& found) {
    return common::format("\n%s, %d tokens: %.1f %% equal choices, log-probability %+.4f, absolute %.4f", name,
                          found.num_tokens, 100.0 * found.equal, found.mean, found.absolute);
  };
  WARN(line("float8 weights to bfloat16", by_weights) + line("float8 weights and activations to bfloat16", by_both) +
       line("float8 weights and activations to weights alone", by_activations));
  CHECK(by_both.equal > 0.85);
  CHECK(std::abs(by_both.mean) < 0.1);
  CHECK(by_activations.absolute > 0.0);  // they have another type
  CHECK(by_activations.absolute < 0.25);
}
