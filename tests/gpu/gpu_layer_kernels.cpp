// The small kernels of a layer, on a GPU and on the executor, against float64: tokens are looked up, sums are added to
// the residual stream, gates are applied.
#include "common/cuda/model/llama_kernels.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/support/catch.h"

namespace {

using common::DeviceArray;
using common::DeviceMemory;
using common::Precision;
using common::Random;

bool cannot_run() {
#ifdef COURSE_EXECUTOR
  return false;
#else
  return !common::has_cuda_device();
#endif
}

std::vector<float> random_floats(Random& random, std::size_t count) {
  std::vector<float> numbers(count);
  std::generate(numbers.begin(), numbers.end(), [&] { return static_cast<float>(random.normal()); });
  return numbers;
}

// As the precision has them.
std::vector<float> rounded(std::vector<float> numbers, Precision precision) {
  if (precision == Precision::kBFloat16) {
    for (float& number : numbers) {
      number = __bfloat162float(__float2bfloat16_rn(number));
    }
  }
  return numbers;
}

// Numbers of a precision on the device.
class Numbers {
 public:
  Numbers(const std::vector<float>& numbers, Precision precision)
      : precision_(precision), floats_(precision == Precision::kFloat32 ? numbers : std::vector<float>()) {
    std::vector<__nv_bfloat16> halves;
    for (const float number : precision == Precision::kBFloat16 ? numbers : std::vector<float>()) {
      halves.push_back(__float2bfloat16_rn(number));
    }
    halves_ = DeviceArray<__nv_bfloat16>(halves);
  }
  // Poisoned.
  Numbers(std::size_t count, Precision precision) : Numbers(std::vector<float>(count, std::nanf("")), precision) {}

  void* data() const { return precision_ == Precision::kFloat32 ? static_cast<void*>(floats_.data()) : halves_.data(); }
  std::vector<float> download() const {
    if (precision_ == Precision::kFloat32) {
      return floats_.download();
    }
    std::vector<float> numbers;
    for (const __nv_bfloat16 half : halves_.download()) {
      numbers.push_back(__bfloat162float(half));
    }
    return numbers;
  }

 private:
  Precision precision_;
  DeviceArray<float> floats_;
  DeviceArray<__nv_bfloat16> halves_;
};

// Float sums of some thousand numbers, and one rounding to the precision, 2^-8 in bfloat16.
bool is_near(float actual, double exact, Precision precision) {
  const double relative = precision == Precision::kFloat32 ? 1e-5 : 0x1p-8 + 1e-5;
  return std::abs(actual - exact) <= relative * std::abs(exact) + 1e-5;
}

double mean_square(const double* row, std::size_t count) {
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += row[i] * row[i];
  }
  return sum / static_cast<double>(count);
}

constexpr float kEpsilon = 1e-3F;

}  // namespace

TEST_CASE("A sum is normalised before it is added to the residual stream, or added as it is", "[gpu]") {
  if (cannot_run()) {
    SKIP_TEST("there is no GPU");
  }
  const auto precision = GENERATE(Precision::kFloat32, Precision::kBFloat16);
  const auto part_type = GENERATE(Precision::kFloat32, Precision::kBFloat16);
  const bool is_normalised = GENERATE(true, false);
  const bool is_fused = GENERATE(true, false);  // what is written besides is for a fused product, or for the library
  Random random(1);
  // Columns: fewer than a warp's, a row that leaves some threads idle, and more than a block takes at a time.
  for (const std::size_t cols : {8, 640, 2056, 4104}) {
    for (const std::size_t num_parts : {1, 3}) {
      const std::size_t rows = num_parts == 1 ? 3 : 1;
      const std::size_t size = rows * cols;
      const std::vector<float> before = random_floats(random, size);
      const std::vector<float> weights = random_floats(random, cols);
      const std::vector<float> next_weights = random_floats(random, cols);
      std::vector<double> exact(size, 0.0);
      std::vector<Numbers> parts;
      common::PartialSum sum;
      sum.num_parts = static_cast<int>(num_parts);
      for (std::size_t part = 0; part < num_parts; ++part) {
        const std::vector<float> numbers = rounded(random_floats(random, size), part_type);
        for (std::size_t i = 0; i < size; ++i) {
          exact[i] += numbers[i];
        }
        parts.emplace_back(numbers, part_type);
        sum.parts[part] = parts.back().data();
      }
      for (std::size_t row = 0; row < rows; ++row) {
        double* const own = &exact[row * cols];
        const double scale = 1.0 / std::sqrt(mean_square(own, cols) + kEpsilon);
        for (std::size_t i = 0; i < cols; ++i) {
          own[i] = before[row * cols + i] + (is_normalised ? own[i] * scale * weights[i] : own[i]);
        }
      }

      const int squares_columns = cols == 640 ? common::kTileSquaresColumns : common::kSquaresColumns;
      const std::size_t squares_of_row = (cols - 1) / static_cast<std::size_t>(squares_columns) + 1;
      const DeviceArray<float> values(before);
      const DeviceArray<float> norm(weights);
      const DeviceArray<float> next_norm(next_weights);
      const Numbers output(size, precision);
      const DeviceArray<float> squares(std::vector<float>(rows * squares_of_row, std::nanf("")));
      const common::Stream stream;
      if (is_normalised) {
        sum.norm = {norm.data(), kEpsilon};
      }
      common::add_sum(precision, sum, part_type, static_cast<int>(rows),
                      {.values = values.data(),
                       .norm = next_norm.data(),
                       .weighted = is_fused ? output.data() : nullptr,
                       .squares = squares.data(),
                       .squares_columns = squares_columns,
                       .num_cols = static_cast<int>(cols)},
                      {is_fused ? nullptr : output.data(), kEpsilon}, stream.get());
      stream.synchronize();
      CAPTURE(precision, part_type, is_normalised, is_fused, cols, num_parts);
      const std::vector<float> after = values.download();
      const std::vector<float> written = output.download();
      std::size_t wrong = 0;
      for (std::size_t row = 0; row < rows; ++row) {
        const double scale = 1.0 / std::sqrt(mean_square(&exact[row * cols], cols) + kEpsilon);
        for (std::size_t i = 0; i < cols; ++i) {
          const double number = exact[row * cols + i];
          wrong += is_near(after[row * cols + i], number, Precision::kFloat32) ? 0 : 1;
          const double next = number * next_weights[i] * (is_fused ? 1.0 : scale);
          wrong += is_near(written[row * cols + i], next, precision) ? 0 : 1;
        }
      }
      CHECK(wrong == 0);
      const std::vector<float> sums = squares.download();
      for (std::size_t i = 0; i < sums.size() && is_fused; ++i) {
        const std::size_t first = i % squares_of_row * static_cast<std::size_t>(squares_columns);
        const std::size_t count = std::min(static_cast<std::size_t>(squares_columns), cols - first);
        const double expected =
            mean_square(&exact[i / squares_of_row * cols + first], count) * static_cast<double>(count);
        wrong += is_near(sums[i], expected, Precision::kFloat32) ? 0 : 1;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("A token's embedding is scaled, and its position turned into one rotation or two", "[gpu]") {
  if (cannot_run()) {
    SKIP_TEST("there is no GPU");
  }
  const auto precision = GENERATE(Precision::kFloat32, Precision::kBFloat16);
  const float embedding_scale = GENERATE(1.0F, 25.0F);
  const bool has_windows = GENERATE(false, true);
  constexpr std::size_t kCols = 2056;
  constexpr std::size_t kVocabSize = 5;
  constexpr std::size_t kHalf = 20;
  constexpr float kRotationScale = 0.75F;
  const std::vector<int> tokens = {4, 0, 5, 2};  // 5 does not exist
  const std::vector<int> positions = {0, 7, 1, 40000};
  Random random(2);
  const std::vector<float> table = rounded(random_floats(random, kVocabSize * kCols), precision);
  std::vector<double> frequencies(kHalf);
  std::vector<double> window_frequencies(kHalf);
  for (std::size_t i = 0; i < kHalf; ++i) {
    frequencies[i] = std::pow(1e6, -static_cast<double>(i) / kHalf);
    window_frequencies[i] = std::pow(1e4, -static_cast<double>(i) / kHalf);
  }
  const Numbers embedding(table, precision);
  const DeviceArray<int> device_tokens(tokens);
  const DeviceArray<int> device_positions(positions);
  const DeviceArray<double> device_frequencies(frequencies);
  const DeviceArray<double> device_window_frequencies(window_frequencies);
  const DeviceArray<float> values(std::vector<float>(tokens.size() * kCols, -7.0F));
  const std::size_t num_turns = tokens.size() * kHalf;
  const DeviceArray<float2> rotation(std::vector<float2>(2 * num_turns, float2{-7.0F, -7.0F}));
  const common::Stream stream;
  common::look_up(precision,
                  {.tokens = device_tokens.data(),
                   .positions = device_positions.data(),
                   .embedding = embedding.data(),
                   .frequencies = device_frequencies.data(),
                   .rotation_scale = kRotationScale,
                   .window_frequencies = has_windows ? device_window_frequencies.data() : nullptr,
                   .embedding_scale = embedding_scale,
                   .vocab_size = kVocabSize,
                   .num_tokens = kVocabSize,
                   .head_dim = 2 * kHalf},
                  static_cast<int>(tokens.size()), {.values = values.data(), .num_cols = kCols}, rotation.data(),
                  stream.get());
  stream.synchronize();
  CAPTURE(precision, embedding_scale, has_windows);
  const std::vector<float> found = values.download();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const int token = tokens[i / kCols];
    if (token == static_cast<int>(kVocabSize)) {
      wrong += std::isnan(found[i]) ? 0 : 1;
    } else {
      wrong += found[i] == table[static_cast<std::size_t>(token) * kCols + i % kCols] * embedding_scale ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
  const std::vector<float2> turns = rotation.download();
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const bool is_second = i >= num_turns;
    const double scale = is_second ? 1.0 : kRotationScale;
    const double angle = positions[i % num_turns / kHalf] * (is_second ? window_frequencies : frequencies)[i % kHalf];
    const bool is_written = !is_second || has_windows;
    wrong += std::abs(turns[i].x - (is_written ? std::cos(angle) * scale : -7.0)) <= 1e-6 ? 0 : 1;
    wrong += std::abs(turns[i].y - (is_written ? std::sin(angle) * scale : -7.0)) <= 1e-6 ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("Gates by SiLU and by GELU", "[gpu]") {
  if (cannot_run()) {
    SKIP_TEST("there is no GPU");
  }
  const auto precision = GENERATE(Precision::kFloat32, Precision::kBFloat16);
  const bool gelu = GENERATE(false, true);
  constexpr std::size_t kSize = 1048;  // more than a block's outputs with two tokens, in either precision
  constexpr std::size_t kTokens = 2;
  Random random(3);
  std::vector<float> gate_up = random_floats(random, 2 * kTokens * kSize);
  for (std::size_t i = 0; i < gate_up.size(); i += 2) {
    gate_up[i] *= 3.0F;
  }
  const std::array<float, 8> extremes = {0.0F, -0.0F, 20.0F, -20.0F, 1e4F, -1e4F, 3e38F, -3e38F};
  for (std::size_t i = 0; i < extremes.size(); ++i) {
    gate_up[2 * i] = extremes[i];
    gate_up[2 * i + 1] = 0.5F;
  }
  gate_up = rounded(gate_up, precision);
  const Numbers source(gate_up, precision);
  const Numbers output(kTokens * kSize, precision);
  const common::Stream stream;
  (gelu ? common::gated_gelu : common::gated_silu)(precision, source.data(), kSize, kTokens, output.data(),
                                                   stream.get());
  stream.synchronize();
  CAPTURE(precision, gelu);
  const std::vector<float> computed = output.download();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < computed.size(); ++i) {
    const double x = gate_up[2 * i];
    const double by_tanh = 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    const double exact = (gelu ? by_tanh : x / (1.0 + std::exp(-x))) * gate_up[2 * i + 1];
    wrong += is_near(computed[i], exact, precision) ? 0 : 1;
  }
  CHECK(wrong == 0);
}
