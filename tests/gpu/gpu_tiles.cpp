// The products by tiles, however they are cut, against float64.
#include <cuda_bf16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <Eigen/Core>

#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/gpu/tiled_plans.h"
#include "tests/support/catch.h"

namespace {

using common::DeviceArray;
using common::FusedLinear;
using DoubleMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// e4m3: a sign, 4 bits of exponent, 3 of mantissa.
double value_of_float8(std::uint8_t bits) {
  const int exponent = bits >> 3U & 15U;
  const int mantissa = bits & 7U;
  const double size = exponent > 0 ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return (bits & 0x80U) != 0 ? -size : size;
}

// Where the columns of a row lie: see Float8 (scalars.cuh).
int place_of_column(int column) {
  const int in_group = column % 16;
  return column - in_group + in_group % 8 / 2 * 4 + in_group % 2 * 2 + in_group / 8;
}

__nv_bfloat16 random_bfloat16(common::Random& random) {
  return __float2bfloat16_rn(static_cast<float>(random.normal()));
}

// A product of random numbers, with every size of tile and cluster that it can have.
void check_tiles(bool float8, int num_rows, int num_cols, const std::vector<int>& token_counts) {
  constexpr int kMaxTokens = 128;
  common::Random random(7);
  const auto size = static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(num_cols);
  DoubleMatrix weights(num_rows, num_cols);
  std::vector<std::uint8_t> float8_weights(float8 ? size : 0);
  std::vector<__nv_bfloat16> bfloat16_weights(float8 ? 0 : size);
  std::vector<float> row_scales(static_cast<std::size_t>(num_rows));
  for (int row = 0; row < num_rows; ++row) {
    float& scale = row_scales[static_cast<std::size_t>(row)];
    scale = 0.5F + static_cast<float>(random.uniform());
    const auto first = static_cast<std::size_t>(row) * static_cast<std::size_t>(num_cols);
    for (int col = 0; col < num_cols; ++col) {
      if (float8) {
        const auto drawn = static_cast<std::uint8_t>(random.below(256));
        const auto bits = static_cast<std::uint8_t>((drawn & 0x7FU) == 0x7FU ? drawn - 1U : drawn);  // no NaN
        float8_weights[first + static_cast<std::size_t>(place_of_column(col))] = bits;
        weights(row, col) = value_of_float8(bits) * static_cast<double>(scale);
      } else {
        const __nv_bfloat16 weight = random_bfloat16(random);
        bfloat16_weights[first + static_cast<std::size_t>(col)] = weight;
        weights(row, col) = static_cast<double>(__bfloat162float(weight));
      }
    }
  }
  DoubleMatrix x(kMaxTokens, num_cols);
  std::vector<__nv_bfloat16> x_values(static_cast<std::size_t>(x.size()));
  for (std::size_t i = 0; i < x_values.size(); ++i) {
    x_values[i] = random_bfloat16(random);
    x.data()[i] = static_cast<double>(__bfloat162float(x_values[i]));
  }
  const DoubleMatrix expected = x * weights.transpose();

  const DeviceArray<std::uint8_t> device_float8(float8_weights);
  const DeviceArray<__nv_bfloat16> device_bfloat16(bfloat16_weights);
  const DeviceArray<float> device_scales(row_scales);
  const DeviceArray<__nv_bfloat16> device_x(x_values);
  DeviceArray<float> device_logits(static_cast<std::size_t>(expected.size()));
  const common::Stream stream;
  // The products are exact, and each addition of 16 of them to a sum cuts off less than 2^-21 of it.
  const int num_additions = num_cols / 16 + 1;
  const double tolerance = num_additions * 0x1p-21;
  for (const int num_tokens : token_counts) {
    if (num_tokens > common::max_tiled_tokens(float8)) {
      continue;
    }
    const FusedLinear linear{
        .kernel = common::ProductKernel::kTiles,
        .weights = float8 ? static_cast<const void*>(device_float8.data()) : device_bfloat16.data(),
        .row_scales = float8 ? device_scales.data() : nullptr,
        .num_rows = num_rows,
        .num_cols = num_cols,
        .num_tokens = num_tokens,
        .x = device_x.data(),
        .num_x_rows = num_tokens};
    const auto check = [&](int rows, int ranks) {
      CUDA_CHECK(cudaMemset(device_logits.data(), 0xFF, device_logits.size() * sizeof(float)));
      CUDA_CHECK(cudaDeviceSynchronize());
      tests::tiled_logits(linear, rows, ranks, device_logits.data(), stream.get());
      const std::vector<float> logits = device_logits.download();
      const Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>> computed(
          logits.data(), num_tokens, num_rows);
      const auto exact = expected.topRows(num_tokens);
      CAPTURE(float8, num_rows, num_cols, num_tokens, rows, ranks);
      CHECK((computed.cast<double>() - exact).norm() <= tolerance * exact.norm());
    };
    check(0, 0);
    for (const int ranks : {1, 2, 3, 4, 8}) {
      for (const int rows : {8, 64, 72, 128, 200, 256}) {
        const bool has_shape = rows <= 128 || num_tokens <= (float8 ? 64 : 32);
        const bool has_columns = ranks <= (num_cols + (float8 ? 127 : 63)) / (float8 ? 128 : 64);
        const bool is_one_wave = ranks == 1 || (num_rows + rows - 1) / rows <= tests::max_clusters(ranks);
        if (has_shape && has_columns && is_one_wave) {
          check(rows, ranks);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("Tiles are cut for the clusters that the GPU has room for") {
  // A product with few rows, which several blocks share where they can.
  const FusedLinear linear{
      .kernel = common::ProductKernel::kTiles, .num_rows = 512, .num_cols = 8192, .num_tokens = 32};
  CHECK(tests::planned_ranks(linear, {0, 132, 66, 43, 32, 22, 16, 15, 15}) > 1);
  // A slice of a GPU may have room for no cluster of several blocks, or for nothing.
  CHECK(tests::planned_ranks(linear, {0, 14, 0, 0, 0, 0, 0, 0, 0}) == 1);
  CHECK(tests::planned_ranks(linear, {}) == 0);
}

TEST_CASE("GPU tiles: every size of tile and cluster, for every number of tokens, against float64", "[gpu]") {
  if (!common::has_cuda_device() || !common::can_tile(common::Precision::kBFloat16)) {
    SKIP_TEST("there is no GPU that multiplies by tiles");
  }
  const bool float8 = GENERATE(false, true);
  // Rows and columns: fewer than a tile or a panel has, no multiple of either, many of both.
  const auto shape = GENERATE(std::pair{64, 16}, std::pair{8, 2064}, std::pair{1000, 272}, std::pair{666, 1552},
                              std::pair{1536, 1040});
  check_tiles(float8, shape.first, shape.second, {1, 16, 17, 32, 33, 64, 65, 128});
}

// For tests/gpu/sanitize_gpu.sh.
TEST_CASE("GPU tiles: each kernel in a small case", "[.sanitize]") {
  if (!common::has_cuda_device() || !common::can_tile(common::Precision::kBFloat16)) {
    SKIP_TEST("there is no GPU that multiplies by tiles");
  }
  check_tiles(GENERATE(false, true), 400, 528, {17, 64, 65});
}
