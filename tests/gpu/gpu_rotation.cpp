// What is done to the sums of Q, K and V before attention, on a GPU and on the executor, against float64.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/support/catch.h"

namespace {

using common::DeviceArray;

struct Shape {
  int head_dim, heads, kv_heads, tokens;
};

float halved(double x) { return __bfloat162float(__float2bfloat16_rn(static_cast<float>(x))); }

}  // namespace

TEST_CASE("Q, K and V are scaled, get their bias, and Q and K are rotated", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const bool is_scaled = GENERATE(false, true);
  const bool has_bias = GENERATE(false, true);
  const bool has_norms = GENERATE(false, true);
  for (const Shape& shape : {Shape{64, 4, 2, 1}, Shape{16, 7, 1, 6}, Shape{128, 32, 8, 5}, Shape{256, 3, 1, 4}}) {
    CAPTURE(is_scaled, has_bias, has_norms, shape.head_dim, shape.tokens);
    const auto tokens = static_cast<std::size_t>(shape.tokens);
    const auto num_pairs = static_cast<std::size_t>(shape.head_dim / 2);
    const auto q_rows = static_cast<std::size_t>(shape.heads * shape.head_dim);
    const auto kv_rows = static_cast<std::size_t>(shape.kv_heads * shape.head_dim);
    const std::size_t cols = q_rows + 2 * kv_rows;
    common::Random random(static_cast<std::uint64_t>(shape.head_dim));
    std::vector<__nv_bfloat16> sums(tokens * cols);
    std::vector<float2> rotation(tokens * num_pairs);
    std::vector<float> bias(cols);
    std::vector<float> norm(static_cast<std::size_t>(shape.head_dim));
    std::vector<float> token_scales(tokens);
    std::vector<std::uint8_t> exponents(cols);
    std::generate(sums.begin(), sums.end(), [&] { return __float2bfloat16_rn(static_cast<float>(random.normal())); });
    std::generate(rotation.begin(), rotation.end(), [&] {
      const double angle = 6.3 * random.uniform();
      return float2{static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
    });
    std::generate(bias.begin(), bias.end(), [&] { return static_cast<float>(random.normal()); });
    std::generate(norm.begin(), norm.end(), [&] { return static_cast<float>(random.uniform() + 0.5); });
    std::generate(token_scales.begin(), token_scales.end(), [&] { return static_cast<float>(random.uniform() + 0.5); });
    std::generate(exponents.begin(), exponents.end(), [&] { return static_cast<std::uint8_t>(125 + random.below(4)); });

    std::vector<double> exact(tokens * cols);
    for (std::size_t token = 0; token < tokens; ++token) {
      double* const own = &exact[token * cols];
      for (std::size_t i = 0; i < cols; ++i) {
        const double scale = is_scaled ? std::ldexp(token_scales[token], exponents[i] - 127) : 1.0;
        own[i] = __bfloat162float(sums[token * cols + i]) * scale + (has_bias ? bias[i] : 0.0F);
      }
      for (std::size_t first = 0; first < q_rows + kv_rows; first += 2 * num_pairs) {
        double squares = 0.0;
        for (std::size_t i = 0; i < 2 * num_pairs; ++i) {
          squares += own[first + i] * own[first + i];
        }
        const double factor = 1.0 / std::sqrt(squares / static_cast<double>(2 * num_pairs) + 1e-5);
        for (std::size_t i = 0; i < num_pairs; ++i) {
          const float2 turn = rotation[token * num_pairs + i];
          double& x = own[first + 2 * i];
          double& y = own[first + 2 * i + 1];
          if (has_norms) {
            x *= factor * norm[2 * i];
            y *= factor * norm[2 * i + 1];
          }
          const double rotated = x * turn.x - y * turn.y;
          y = x * turn.y + y * turn.x;
          x = rotated;
        }
      }
    }

    DeviceArray<__nv_bfloat16> qkv(sums);
    DeviceArray<__nv_bfloat16> q(std::vector<__nv_bfloat16>(tokens * q_rows, __float2bfloat16_rn(-7.0F)));
    const DeviceArray<float2> device_rotation(rotation);
    const DeviceArray<float> device_bias(bias);
    const DeviceArray<float> device_norm(norm);
    const DeviceArray<float> device_scales(token_scales);
    const DeviceArray<std::uint8_t> device_exponents(exponents);
    const common::Stream stream;
    common::rotate_and_split(
        common::Precision::kBFloat16,
        {.rotation = device_rotation.data(),
         .head_dim = shape.head_dim,
         .q_rows = static_cast<int>(q_rows),
         .kv_rows = static_cast<int>(kv_rows),
         .bias = has_bias ? device_bias.data() : nullptr},
        has_norms ? common::HeadNorms{device_norm.data(), device_norm.data(), 1e-5F} : common::HeadNorms{},
        is_scaled ? common::SumScales{device_scales.data(), device_exponents.data()} : common::SumScales{},
        shape.tokens, qkv.data(), q.data(), stream.get());
    stream.synchronize();
    const std::vector<__nv_bfloat16> rotated_q = q.download();
    const std::vector<__nv_bfloat16> rotated_kv = qkv.download();
    std::size_t wrong = 0;
    for (std::size_t token = 0; token < tokens; ++token) {
      for (std::size_t i = 0; i < cols; ++i) {
        const double expected = exact[token * cols + i];
        const float actual =
            __bfloat162float(i < q_rows ? rotated_q[token * q_rows + i] : rotated_kv[token * cols + i]);
        wrong += std::abs(actual - expected) <= std::abs(halved(expected) - expected) + 1e-5 ? 0 : 1;
      }
    }
    CHECK(wrong == 0);
  }
}
