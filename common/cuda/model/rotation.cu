// Between the product for Q, K and V and attention: see rotate_and_split in llama_kernels.h.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/cuda/model/llama_kernels.h"
#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"

namespace common {
namespace {

constexpr int kThreads = 256;

// A warp has a token's head at a time, in registers.
template <typename Scalar>
__global__ void __launch_bounds__(kThreads)
    rotate_and_split_kernel(Rotary rotary, HeadNorms norms, SumScales scales, Scalar* qkv, Scalar* q) {
  allow_next_launch();
  wait_for_previous_launch();
  constexpr int kPairs = kMaxHeadDim / 64;  // of a lane
  constexpr int kWarps = kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head_dim = rotary.head_dim;
  const int num_q_heads = rotary.q_rows / head_dim;
  const int num_rotated = (rotary.q_rows + rotary.kv_rows) / head_dim;
  // V is left as it is, unless it is scaled or there is something to add.
  const bool is_scaled = scales.tokens != nullptr;
  const int num_heads = num_rotated + (is_scaled || rotary.bias != nullptr ? rotary.kv_rows / head_dim : 0);
  const std::int64_t row = blockIdx.x;
  for (int head = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32; head < num_heads;
       head += static_cast<int>(gridDim.y) * kWarps) {
    Scalar* source = qkv + row * (rotary.q_rows + 2 * rotary.kv_rows) + head * head_dim;
    const float* norm = head < num_q_heads ? norms.q : head < num_rotated ? norms.k : nullptr;
    float2 values[kPairs];
    float2 turns[kPairs];
    float squares = 0.0F;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int i = 64 * pair + 2 * lane;
      if (i < head_dim) {
        using Word = std::conditional_t<sizeof(Scalar) == 2, unsigned, uint2>;
        const Word word = __ldcg(reinterpret_cast<const Word*>(source + i));
        const auto& loaded = reinterpret_cast<const Pair<Scalar>&>(word);
        turns[pair] = head < num_rotated ? __ldcg(rotary.rotation + row * (head_dim / 2) + i / 2) : float2{1.0F, 0.0F};
        values[pair] = {to_float(loaded.first), to_float(loaded.second)};
        if (is_scaled) {
          const float token_scale = __ldcg(scales.tokens + row);
          const std::uint32_t exponents =
              *reinterpret_cast<const std::uint16_t*>(scales.row_exponents + head * head_dim + i);
          values[pair] = {values[pair].x * (token_scale * power_of(exponents, 0)),
                          values[pair].y * (token_scale * power_of(exponents, 1))};
        }
        if (rotary.bias != nullptr) {
          const float2 bias = *reinterpret_cast<const float2*>(rotary.bias + head * head_dim + i);
          values[pair] = {values[pair].x + bias.x, values[pair].y + bias.y};
        }
        squares += values[pair].x * values[pair].x + values[pair].y * values[pair].y;
      }
    }
    float scale = 1.0F;
    if (norm != nullptr) {
      scale = 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + norms.epsilon);
    }
    Scalar* destination = head < num_q_heads ? q + row * rotary.q_rows + head * head_dim : source;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int i = 64 * pair + 2 * lane;
      if (i < head_dim) {
        const float2 weight = norm == nullptr ? float2{1.0F, 1.0F} : *reinterpret_cast<const float2*>(norm + i);
        const float2 value = {values[pair].x * weight.x * scale, values[pair].y * weight.y * scale};
        const float2 turn = turns[pair];
        *reinterpret_cast<Pair<Scalar>*>(destination + i) =
            make_pair<Scalar>(value.x * turn.x - value.y * turn.y, value.x * turn.y + value.y * turn.x);
      }
    }
  }
}

// The same without norms of heads. A thread has 16 bytes of each of kTokensAtOnce tokens, so that their loads are in
// flight together, and the rows' scales are loaded once. It divides only once: with a division for each pair, half of
// its instructions were divisions'.
constexpr int kTokensAtOnce = 4;
template <typename Scalar>
__global__ void __launch_bounds__(kThreads, 4)
    rotate_rows_kernel(Rotary rotary, SumScales scales, int num_tokens, Scalar* qkv, Scalar* q) {
  using Vec = Vec16<Scalar>;
  constexpr int kPairs = Vec::kElements / 2;
  __shared__ float2 turns[kTokensAtOnce * kMaxHeadDim / 2];  // [count, half]
  allow_next_launch();
  wait_for_previous_launch();
  const bool is_scaled = scales.tokens != nullptr;
  const int half = rotary.head_dim / 2;
  const int num_rotated = rotary.q_rows + rotary.kv_rows;
  const int num_cols = num_rotated + rotary.kv_rows;
  const int used_cols = is_scaled || rotary.bias != nullptr ? num_cols : num_rotated;
  const int first_token = static_cast<int>(blockIdx.x) * kTokensAtOnce;
  const int count = min(kTokensAtOnce, num_tokens - first_token);
  const int column = (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x)) * Vec::kElements;
  Scalar* const source = qkv + std::int64_t{first_token} * num_cols + column;
  Vec vecs[kTokensAtOnce];
  float token_scales[kTokensAtOnce];
#pragma unroll
  for (int i = 0; i < kTokensAtOnce; ++i) {
    if (column < used_cols && i < count) {
      token_scales[i] = is_scaled ? __ldcg(scales.tokens + first_token + i) : 1.0F;
      vecs[i].bits = __ldcg(reinterpret_cast<const uint4*>(source + std::int64_t{i} * num_cols));
    }
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count * half; i += kThreads) {
    turns[i] = __ldcg(rotary.rotation + std::int64_t{first_token} * half + i);
  }
  int places[kPairs];  // of a pair's turn; -1: it is of V
  float2 factors[kPairs];
  float2 biases[kPairs];
  int place = column / 2 % half;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const int row = column + 2 * pair;
    places[pair] = row < num_rotated ? place : -1;
    place = place + 1 == half ? 0 : place + 1;
    factors[pair] = {1.0F, 1.0F};
    if (is_scaled && row < used_cols) {
      const std::uint32_t exponents = *reinterpret_cast<const std::uint16_t*>(scales.row_exponents + row);
      factors[pair] = {power_of(exponents, 0), power_of(exponents, 1)};
    }
    const bool is_biased = rotary.bias != nullptr && row < used_cols;
    biases[pair] = is_biased ? *reinterpret_cast<const float2*>(rotary.bias + row) : float2{};
  }
  __syncthreads();
  if (column >= used_cols) {
    return;
  }
#pragma unroll
  for (int i = 0; i < kTokensAtOnce; ++i) {
    if (i >= count) {
      break;
    }
    alignas(16) Pair<Scalar> pairs[kPairs];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const float2 value = {vecs[i][2 * pair] * (token_scales[i] * factors[pair].x) + biases[pair].x,
                            vecs[i][2 * pair + 1] * (token_scales[i] * factors[pair].y) + biases[pair].y};
      const float2 turn = places[pair] < 0 ? float2{1.0F, 0.0F} : turns[i * half + places[pair]];
      pairs[pair] = make_pair<Scalar>(value.x * turn.x - value.y * turn.y, value.x * turn.y + value.y * turn.x);
    }
    Scalar* const destination = column < rotary.q_rows ? q + std::int64_t{first_token + i} * rotary.q_rows + column
                                                       : source + std::int64_t{i} * num_cols;
    *reinterpret_cast<uint4*>(destination) = *reinterpret_cast<const uint4*>(pairs);
  }
}

}  // namespace

void rotate_and_split(Precision precision, const Rotary& rotary, const HeadNorms& norms, const SumScales& scales,
                      int num_tokens, void* qkv, void* q, cudaStream_t stream) {
  COMMON_CHECK(rotary.head_dim <= kMaxHeadDim, "a warp holds a head");
  if (norms.q == nullptr && norms.k == nullptr) {
    with_scalar(precision, [&]<typename Scalar>(Scalar) {
      const int vecs = (rotary.q_rows + 2 * rotary.kv_rows) / Vec16<Scalar>::kElements;
      launch(rotate_rows_kernel<Scalar>,
             dim3(static_cast<unsigned>((num_tokens + kTokensAtOnce - 1) / kTokensAtOnce),
                  static_cast<unsigned>((vecs + kThreads - 1) / kThreads)),
             kThreads, 0, stream, Overlap::kPreviousWithoutL1, rotary, scales, num_tokens, static_cast<Scalar*>(qkv),
             static_cast<Scalar*>(q));
    });
    return;
  }
  // Few tokens: their heads side by side. Many fill the chip by themselves.
  constexpr int kFewTokens = 64;
  const int num_heads = (rotary.q_rows + 2 * rotary.kv_rows) / rotary.head_dim;
  constexpr int kWarps = kThreads / 32;
  const int blocks_of_token = num_tokens > kFewTokens ? 1 : (num_heads + kWarps - 1) / kWarps;
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    launch(rotate_and_split_kernel<Scalar>,
           dim3(static_cast<unsigned>(num_tokens), static_cast<unsigned>(blocks_of_token)), kThreads, 0, stream,
           Overlap::kPreviousWithoutL1, rotary, norms, scales, static_cast<Scalar*>(qkv), static_cast<Scalar*>(q));
  });
}

}  // namespace common
