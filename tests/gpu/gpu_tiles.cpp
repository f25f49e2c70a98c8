// The products by tiles, however they are cut, against float64.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <Eigen/Core>

#include "common/cuda/model/fused_linear.h"
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

enum class Tiles { kOfBFloat16, kOfFloat8, kWide };

// The most tokens that they serve.
int max_tokens(Tiles tiles) {
  return tiles == Tiles::kWide ? common::kMaxWideTokens : common::max_tiled_tokens(tiles == Tiles::kOfFloat8);
}

// Whether there are tiles of `rows` rows, each shared among `ranks` blocks.
bool has_shape(Tiles tiles, int num_tokens, int rows, int ranks) {
  return tiles == Tiles::kWide ? rows <= 128 && ranks != 3
                               : rows <= 128 || num_tokens <= (tiles == Tiles::kOfFloat8 ? 64 : 32);
}

// A product of random numbers, with every size of tile and cluster that it can have.
void check_tiles(Tiles tiles, int num_rows, int num_cols, const std::vector<int>& token_counts) {
  constexpr int kMaxTokens = 128;
  const bool float8 = tiles == Tiles::kOfFloat8;
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
  DeviceArray<float> device_logits(static_cast<std::size_t>(expected.size()));
  const common::Stream stream;
  // The products are exact, and each addition of 16 of them to a sum cuts off less than 2^-21 of it.
  const int num_additions = num_cols / 16 + 1;
  const double tolerance = num_additions * 0x1p-21;
  bool has_more_rows = false;  // in x than there are tokens, as in the engine: every other time
  for (const int num_tokens : token_counts) {
    if (num_tokens > max_tokens(tiles)) {
      continue;
    }
    has_more_rows = !has_more_rows;
    std::vector<__nv_bfloat16> x_and_nan = x_values;
    std::fill(x_and_nan.begin() + std::ptrdiff_t{num_tokens} * num_cols, x_and_nan.end(), __float2bfloat16_rn(NAN));
    const DeviceArray<__nv_bfloat16> device_x(x_and_nan);
    const FusedLinear linear{
        .kernel = tiles == Tiles::kWide ? common::ProductKernel::kWideTiles : common::ProductKernel::kTiles,
        .weights = float8 ? static_cast<const void*>(device_float8.data()) : device_bfloat16.data(),
        .row_scales = float8 ? device_scales.data() : nullptr,
        .num_rows = num_rows,
        .num_cols = num_cols,
        .num_tokens = num_tokens,
        .x = device_x.data(),
        .num_x_rows = has_more_rows ? kMaxTokens : num_tokens};
    const auto check = [&](int rows, int ranks) {
      CUDA_CHECK(cudaMemset(device_logits.data(), 0xFF, device_logits.size() * sizeof(float)));
      CUDA_CHECK(cudaDeviceSynchronize());
      tests::tiled_logits(linear, {rows, ranks}, device_logits.data(), stream.get());
      const std::vector<float> logits = device_logits.download();
      const Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>> computed(
          logits.data(), num_tokens, num_rows);
      const auto exact = expected.topRows(num_tokens);
      CAPTURE(static_cast<int>(tiles), num_rows, num_cols, num_tokens, linear.num_x_rows, rows, ranks);
      CHECK((computed.cast<double>() - exact).norm() <= tolerance * exact.norm());
      const auto end = logits.begin() + std::ptrdiff_t{num_tokens} * num_rows;
      CHECK(std::all_of(end, logits.end(), [](float logit) { return std::isnan(logit); }));  // as memset left it
    };
    check(0, 0);
    for (const int ranks : {1, 2, 3, 4, 8}) {
      for (const int rows : {8, 64, 72, 128, 200, 256}) {
        const bool has_columns = ranks <= (num_cols + (float8 ? 127 : 63)) / (float8 ? 128 : 64);
        const bool is_one_wave = ranks == 1 || (num_rows + rows - 1) / rows <= tests::max_clusters(ranks);
        if (has_shape(tiles, num_tokens, rows, ranks) && has_columns && is_one_wave) {
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
  FusedLinear wide = linear;
  wide.kernel = common::ProductKernel::kWideTiles;
  wide.num_tokens = 128;
  CHECK(tests::planned_ranks(wide, {0, 132, 66, 43, 32, 22, 16, 15, 15}) > 1);
  CHECK(tests::planned_ranks(wide, {0, 14, 0, 0, 0, 0, 0, 0, 0}) == 1);
  CHECK(tests::planned_ranks(wide, {}) == 0);
}

TEST_CASE("GPU tiles: every size of tile and cluster, for every number of tokens, against float64", "[gpu]") {
  if (!common::has_cuda_device() || !common::can_tile(common::Precision::kBFloat16)) {
    SKIP_TEST("there is no GPU that multiplies by tiles");
  }
  const Tiles tiles = GENERATE(Tiles::kOfBFloat16, Tiles::kOfFloat8, Tiles::kWide);
  // Rows and columns: fewer than a tile or a panel has, no multiple of either, many of both.
  const auto shape = GENERATE(std::pair{64, 16}, std::pair{8, 2064}, std::pair{1000, 272}, std::pair{666, 1552},
                              std::pair{665, 72}, std::pair{1536, 1040});
  if (tiles == Tiles::kOfFloat8 && shape.first % 2 != 0) {
    return;  // its scales are read two at a time
  }
  check_tiles(tiles, shape.first, shape.second, {1, 16, 17, 32, 33, 64, 65, 100, 128});
}

namespace {

// What the four products of a layer leave behind for some tokens.
struct LayerResult {
  std::vector<float> residual;
  std::vector<float> squares;
  std::vector<__nv_bfloat16> weighted;
  std::vector<__nv_bfloat16> q;
  std::vector<__nv_bfloat16> kv;
  std::vector<__nv_bfloat16> gated;
};

struct LayerSizes {
  int num_cols;  // of x, and of the residual stream
  int q_rows;
  int kv_rows;
  int head_dim;
  bool has_bias;
  bool is_rotated;
};

// What a product is added to, and what two products then make of that, three times in a row and without waiting. By
// wide tiles all tokens at once, or 64 at a time by tiles.
LayerResult finish_layer(const LayerSizes& sizes, int num_tokens, bool wide, tests::Cut cut) {
  common::Random random(11);
  const auto floats = [&](int rows, int cols) {
    std::vector<float> values(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
    for (float& value : values) {
      value = static_cast<float>(random.normal());
    }
    return values;
  };
  const auto numbers = [&](int rows, int cols) {
    std::vector<__nv_bfloat16> values(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
    for (__nv_bfloat16& value : values) {
      value = random_bfloat16(random);
    }
    return values;
  };
  const int qkv_rows = sizes.q_rows + 2 * sizes.kv_rows;
  const int num_sums = (sizes.num_cols + common::kTileSquaresColumns - 1) / common::kTileSquaresColumns;
  const DeviceArray<__nv_bfloat16> x(numbers(num_tokens, sizes.num_cols));
  const DeviceArray<__nv_bfloat16> weights(numbers(std::max(qkv_rows, sizes.num_cols), sizes.num_cols));
  const DeviceArray<float> rotation(floats(num_tokens, sizes.head_dim));
  const DeviceArray<float> bias(floats(1, qkv_rows));
  const DeviceArray<float> norm(floats(1, sizes.num_cols));
  const DeviceArray<float> residual(floats(num_tokens, sizes.num_cols));
  const auto count = [&](int cols) { return static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(cols); };
  const DeviceArray<float> squares(count(num_sums));
  const DeviceArray<__nv_bfloat16> weighted(count(sizes.num_cols));
  const DeviceArray<__nv_bfloat16> q(count(sizes.q_rows));
  const DeviceArray<__nv_bfloat16> kv(count(qkv_rows));
  const DeviceArray<__nv_bfloat16> gated(count(qkv_rows / 2));
  for (const DeviceArray<__nv_bfloat16>* array : {&q, &kv}) {
    CUDA_CHECK(cudaMemset(array->data(), 0, array->size() * sizeof(__nv_bfloat16)));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  const common::Stream stream;
  const int tokens_at_once = wide ? num_tokens : 64;
  for (int first = 0; first < num_tokens; first += tokens_at_once) {
    const int tokens = std::min(tokens_at_once, num_tokens - first);
    const auto rows_from_first = [&](int cols) { return std::ptrdiff_t{first} * cols; };
    const auto linear = [&](int rows, const DeviceArray<__nv_bfloat16>& of, bool has_squares) {
      return FusedLinear{.kernel = wide ? common::ProductKernel::kWideTiles : common::ProductKernel::kTiles,
                         .weights = weights.data(),
                         .num_rows = rows,
                         .num_cols = sizes.num_cols,
                         .num_tokens = tokens,
                         .x = of.data() + rows_from_first(sizes.num_cols),
                         .num_x_rows = tokens,
                         .squares = has_squares ? squares.data() + rows_from_first(num_sums) : nullptr,
                         .epsilon = 1e-5F};
    };
    const float* const added_bias = sizes.has_bias ? bias.data() : nullptr;
    const common::Rotary rotary = sizes.is_rotated
                                      ? common::Rotary{.rotation = reinterpret_cast<const float2*>(rotation.data()) +
                                                                   rows_from_first(sizes.head_dim / 2),
                                                       .head_dim = sizes.head_dim,
                                                       .q_rows = sizes.q_rows,
                                                       .kv_rows = sizes.kv_rows,
                                                       .bias = added_bias}
                                      : common::Rotary::none(qkv_rows, added_bias);
    const common::Residual to{.values = residual.data() + rows_from_first(sizes.num_cols),
                              .norm = norm.data(),
                              .weighted = weighted.data() + rows_from_first(sizes.num_cols),
                              .squares = squares.data() + rows_from_first(num_sums),
                              .squares_columns = common::kTileSquaresColumns,
                              .num_cols = sizes.num_cols};
    for (int layer = 0; layer < 3; ++layer) {
      tests::tiled_add(linear(sizes.num_cols, x, false), cut, to, stream.get());
      tests::tiled_qkv(linear(qkv_rows, weighted, true), cut, rotary, q.data() + rows_from_first(sizes.q_rows),
                       kv.data() + rows_from_first(2 * rotary.kv_rows), stream.get());
      tests::tiled_gated_silu(linear(qkv_rows, weighted, true), cut, gated.data() + rows_from_first(qkv_rows / 2),
                              stream.get());
    }
  }
  stream.synchronize();
  return {residual.download(), squares.download(), weighted.download(), q.download(), kv.download(), gated.download()};
}

double number_of(float value) { return static_cast<double>(value); }
double number_of(__nv_bfloat16 value) { return static_cast<double>(__bfloat162float(value)); }

// The largest difference, as a part of the numbers' root mean square or of the number itself, whichever is larger.
template <typename Number>
double worst_difference(const std::vector<Number>& computed, const std::vector<Number>& expected) {
  REQUIRE(computed.size() == expected.size());
  double squares = 0.0;
  for (const Number number : expected) {
    squares += number_of(number) * number_of(number);
  }
  const double usual = std::sqrt(squares / static_cast<double>(expected.size()));
  double worst = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(number_of(computed[i]) - number_of(expected[i]));
    const double relative = difference == 0.0 ? 0.0 : difference / std::max(usual, std::abs(number_of(expected[i])));
    worst = relative <= worst ? worst : relative;  // NaN is the worst
  }
  return worst;
}

}  // namespace

TEST_CASE("GPU tiles: what is done with the sums, for many tokens as for 64 at a time", "[gpu]") {
  if (!common::has_cuda_device() || !common::can_tile(common::Precision::kBFloat16)) {
    SKIP_TEST("there is no GPU that multiplies by tiles");
  }
  const LayerSizes sizes = GENERATE(
      LayerSizes{2048, 2048, 512, 64, false, true},  // tiles that clusters share
      LayerSizes{512, 8192, 2048, 128, true, true},  // some tiles for a block
      LayerSizes{1024, 2048, 1024, 128, true, false},
      LayerSizes{264, 24, 8, 8, true, true},  // too few rows, and not enough at once, for lanes to exchange pairs
      LayerSizes{328, 400, 80, 16, false, true});
  const int num_tokens = GENERATE(1, 64, 65, 100, 128);
  // As in the engine; tiles of two sizes, and tiles that clusters share.
  const tests::Cut cut = GENERATE(tests::Cut{}, tests::Cut{64, 1}, tests::Cut{128, 1}, tests::Cut{64, 2},
                                  tests::Cut{128, 4}, tests::Cut{64, 8});
  const int num_rows = std::max(sizes.num_cols, sizes.q_rows + 2 * sizes.kv_rows);
  const bool is_one_wave = cut.ranks <= 1 || (num_rows + cut.rows - 1) / cut.rows <= tests::max_clusters(cut.ranks);
  if (!is_one_wave || cut.ranks > (sizes.num_cols + 63) / 64) {
    return;
  }
  const LayerResult expected = finish_layer(sizes, num_tokens, false, {});
  const LayerResult computed = finish_layer(sizes, num_tokens, true, cut);
  CAPTURE(sizes.num_cols, sizes.q_rows, num_tokens, cut.rows, cut.ranks);
  // Sums are added up in another order.
  CHECK(worst_difference(computed.residual, expected.residual) < 1e-5);
  CHECK(worst_difference(computed.squares, expected.squares) < 1e-5);
  // Then one may be rounded up and one down.
  constexpr double kRounding = 0x1p-7;
  CHECK(worst_difference(computed.weighted, expected.weighted) <= kRounding);
  // These are products of `weighted`: a column that was rounded otherwise there moves their sums a little.
  constexpr double kMoved = 0x1p-10;
  CHECK(worst_difference(computed.q, expected.q) <= kRounding + kMoved);
  CHECK(worst_difference(computed.kv, expected.kv) <= kRounding + kMoved);
  CHECK(worst_difference(computed.gated, expected.gated) <= kRounding + kMoved);
}

// For tests/gpu/sanitize_gpu.sh.
TEST_CASE("GPU tiles: each kernel in a small case", "[.sanitize]") {
  if (!common::has_cuda_device() || !common::can_tile(common::Precision::kBFloat16)) {
    SKIP_TEST("there is no GPU that multiplies by tiles");
  }
  check_tiles(GENERATE(Tiles::kOfBFloat16, Tiles::kOfFloat8, Tiles::kWide), 400, 528, {17, 64, 65, 128});
  finish_layer({512, 512, 128, 64, true, true}, 100, true, {});
  finish_layer({512, 512, 128, 64, true, true}, 100, true, {128, 4});
}
