#include "common/cuda/model/float8_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"

namespace common {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kPieces = 4;   // of a thread at a time, in registers
constexpr int kColumns = 4;  // of a piece

// The scale of a row whose largest absolute value has these bits: see Float8Rows. 448 is 1.75 times 2^8, so the
// exponent is one larger where the mantissa is above 1.75. Compared as bits, a NaN is above infinity, and infinity
// above everything else.
__device__ __forceinline__ float float8_scale(std::uint32_t largest_bits) {
  constexpr std::uint32_t kExponent = 0x7F800000;
  constexpr std::uint32_t kSmallest = (127U - 100U) << 23U;
  constexpr std::uint32_t kEight = 8U << 23U;
  if (largest_bits >= kExponent) {
    return __uint_as_float(0x7FFFFFFF);
  }
  return __uint_as_float(max((largest_bits + 0x1FFFFFU) & kExponent, kSmallest + kEight) - kEight);
}

// Two numbers, divided by their scale, rounded to nearest, ties to even; `low` becomes the lower byte.
__device__ __forceinline__ std::uint32_t two_to_float8(float low, float high) {
  return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ std::uint32_t largest_of_warp(std::uint32_t bits) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    bits = max(bits, __shfl_xor_sync(0xFFFFFFFFU, bits, distance));
  }
  return bits;
}

// What rows are made of: load() loads four neighbouring columns, and adds their squares if factor() needs the row's.
// Once all of a thread's columns are on their way, finish() makes numbers of them. For a long row, that is done again,
// with is_again. token_scale is the row's own, where a product has one. The row is the numbers times row_factor(); and
// factor() is what the norm divides it by.

// Two sums of a product, bfloat16, times their rows' powers of 2, whose exponents are bytes `place` and `place` + 1:
// exactly.
__device__ __forceinline__ std::uint32_t scaled_pair(std::uint32_t sums, std::uint32_t exponents, int place) {
  constexpr std::uint32_t kMinusZero = 0x80008000;
  const std::uint32_t powers = __byte_perm(exponents, 0, place == 0 ? 0x4140 : 0x4342) << 7U;
  return multiply_add_pairs(sums, powers, kMinusZero);
}

__device__ __forceinline__ void to_floats(const uint2& word, float (&values)[kColumns]) {
  __nv_bfloat16 numbers[kColumns];
  memcpy(numbers, &word, sizeof(word));
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    values[i] = to_float(numbers[i]);
  }
}

struct PlainRows {
  const void* rows;
  int num_cols;

  __device__ __forceinline__ float token_scale(std::int64_t /*row*/) const { return 1.0F; }
  __device__ __forceinline__ float row_factor(float /*token_scale*/) const { return 1.0F; }
  __device__ __forceinline__ void load(std::int64_t row, int column, float /*token_scale*/, bool /*is_again*/,
                                       float (&values)[kColumns], float& /*squares*/) const {
    to_floats(__ldcg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(rows) + row * num_cols + column)),
              values);
  }
  __device__ __forceinline__ void finish(std::int64_t /*row*/, int /*column*/, bool /*is_again*/,
                                         float (&/*values*/)[kColumns]) const {}
  __device__ __forceinline__ float factor(float /*squares*/) const { return 1.0F; }
};

// kAdds: the residual stream is loaded without the product, and stored with it.
template <bool kAdds>
struct NormalisedRows {
  std::conditional_t<kAdds, float*, const float*> residual;
  const float* weights;  // [num_cols]
  int num_cols;
  float epsilon;
  Float8Product product;

  __device__ __forceinline__ float token_scale(std::int64_t row) const {
    return kAdds ? __ldcg(product.scales.tokens + row) : 1.0F;
  }
  __device__ __forceinline__ float row_factor(float /*token_scale*/) const { return 1.0F; }
  __device__ __forceinline__ void load(std::int64_t row, int column, float token_scale, bool is_again,
                                       float (&values)[kColumns], float& squares) const {
    const float4 x = load_shared_floats(residual + row * num_cols + column);
    values[0] = x.x;
    values[1] = x.y;
    values[2] = x.z;
    values[3] = x.w;
    if (kAdds && !is_again) {
      const uint2 sums = __ldcg(
          reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(product.sums) + row * num_cols + column));
      const std::uint32_t exponents =
          __ldg(reinterpret_cast<const std::uint32_t*>(product.scales.row_exponents + column));
      float added[kColumns];
      to_floats({scaled_pair(sums.x, exponents, 0), scaled_pair(sums.y, exponents, 2)}, added);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        values[i] += added[i] * token_scale;
      }
    }
#pragma unroll
    for (const float value : values) {
      squares += value * value;
    }
  }
  __device__ __forceinline__ void finish(std::int64_t row, int column, bool is_again, float (&values)[kColumns]) const {
    if constexpr (kAdds) {
      if (!is_again) {
        *reinterpret_cast<float4*>(residual + row * num_cols + column) = {values[0], values[1], values[2], values[3]};
      }
    }
    const float4 weight = __ldg(reinterpret_cast<const float4*>(weights + column));
    values[0] *= weight.x;
    values[1] *= weight.y;
    values[2] *= weight.z;
    values[3] *= weight.w;
  }
  __device__ __forceinline__ float factor(float squares) const {
    return 1.0F / sqrtf(squares / static_cast<float>(num_cols) + epsilon);
  }
};

struct GatedRows {
  Float8Product gate_up;
  int num_cols;

  __device__ __forceinline__ float token_scale(std::int64_t row) const { return __ldcg(gate_up.scales.tokens + row); }
  __device__ __forceinline__ float row_factor(float token_scale) const { return token_scale * token_scale; }
  __device__ __forceinline__ void load(std::int64_t row, int column, float token_scale, bool /*is_again*/,
                                       float (&values)[kColumns], float& /*squares*/) const {
    const uint4 sums = load_past_l1(static_cast<const __nv_bfloat16*>(gate_up.sums) + 2 * (row * num_cols + column));
    const uint2 exponents = __ldg(reinterpret_cast<const uint2*>(gate_up.scales.row_exponents + 2 * column));
    const Vec16<__nv_bfloat16> pairs{{scaled_pair(sums.x, exponents.x, 0), scaled_pair(sums.y, exponents.x, 2),
                                      scaled_pair(sums.z, exponents.y, 0), scaled_pair(sums.w, exponents.y, 2)}};
    // silu(gate) * up = token_scale^2 * gate * up / (1 + e^-(token_scale * gate)), of sums without the token's scale.
    constexpr float kLog2E = 1.4426950408889634F;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float gate = pairs[2 * i];
      values[i] = __fdividef(gate, 1.0F + exp2_fast(-kLog2E * token_scale * gate)) * pairs[2 * i + 1];
    }
  }
  __device__ __forceinline__ void finish(std::int64_t /*row*/, int /*column*/, bool /*is_again*/,
                                         float (&/*values*/)[kColumns]) const {}
  __device__ __forceinline__ float factor(float /*squares*/) const { return 1.0F; }
};

// A thread block has a row, in registers, unless it is longer: then it loads it a second time, because the largest
// number must be known before the first is rounded.
//
// Four neighbouring threads have 16 columns, a thread four of them, and each writes a word. Word w has columns 2 w,
// 2 w + 8, 2 w + 1 and 2 w + 9: of threads 0 and 2 words 0 and 1, of threads 1 and 3 words 2 and 3.
template <typename Source>
__global__ void __launch_bounds__(kMaxThreads) round_rows_kernel(Source source, Float8Rows to) {
  __shared__ std::uint32_t largest_of_warps[kMaxThreads / 32];
  __shared__ float squares_of_warps[kMaxThreads / 32];
  wait_for_previous_launch();
  allow_next_launch();
  const std::int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  const int piece_columns = num_threads * kColumns;  // from a thread's piece to its next
  const float token_scale = source.token_scale(row);
  float values[kPieces][kColumns];
  float squares = 0.0F;
  const auto load = [&](int first, bool is_again, float& sum) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = first + piece * piece_columns;
      if (column < source.num_cols) {
        source.load(row, column, token_scale, is_again, values[piece], sum);
      } else {
#pragma unroll
        for (float& value : values[piece]) {
          value = 0.0F;
        }
      }
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = first + piece * piece_columns;
      if (column < source.num_cols) {
        source.finish(row, column, is_again, values[piece]);
      }
    }
  };
  std::uint32_t largest = 0;
  for (int begin = 0; begin < source.num_cols; begin += kPieces * piece_columns) {
    load(begin + thread * kColumns, false, squares);
#pragma unroll
    for (const auto& piece : values) {
#pragma unroll
      for (const float value : piece) {
        largest = max(largest, __float_as_uint(fabsf(value)));
      }
    }
  }
  largest = largest_of_warp(largest);
  squares = warp_sum(squares);
  if (thread % 32 == 0) {
    largest_of_warps[thread / 32] = largest;
    squares_of_warps[thread / 32] = squares;
  }
  __syncthreads();
  // Each warp finishes for itself.
  const bool is_warp = thread % 32 < num_threads / 32;
  largest = largest_of_warp(is_warp ? largest_of_warps[thread % 32] : 0);
  squares = warp_sum(is_warp ? squares_of_warps[thread % 32] : 0.0F);
  const float row_factor = source.row_factor(token_scale);
  const float scale = float8_scale(__float_as_uint(__uint_as_float(largest) * row_factor));
  const float inverse = row_factor / scale;
  const bool has_low_columns = thread % 4 < 2;
  const int word = thread % 2 * 2 + thread % 4 / 2;
  for (int begin = 0; begin < source.num_cols; begin += kPieces * piece_columns) {
    const int first = begin + thread * kColumns;
    if (source.num_cols > kPieces * piece_columns) {
      float unused = 0.0F;
      load(first, true, unused);
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const float(&numbers)[kColumns] = values[piece];
      const std::uint32_t low = two_to_float8(numbers[0] * inverse, numbers[1] * inverse);
      const std::uint32_t high = two_to_float8(numbers[2] * inverse, numbers[3] * inverse);
      const std::uint32_t taken = __shfl_xor_sync(0xFFFFFFFFU, has_low_columns ? high : low, 2);
      const int column = first + piece * piece_columns;
      if (column < source.num_cols) {
        *reinterpret_cast<std::uint32_t*>(to.values + row * source.num_cols + column / 16 * 16 + word * 4) =
            has_low_columns ? __byte_perm(low, taken, 0x5140) : __byte_perm(taken, high, 0x5140);
      }
    }
  }
  if (thread == 0) {
    to.scales[row] = scale * source.factor(squares);
  }
}

template <typename Source>
void launch_rows(const Source& source, int num_tokens, const Float8Rows& to, cudaStream_t stream) {
  COMMON_CHECK(num_tokens > 0 && source.num_cols % 16 == 0, "rows are pieces of 16 columns");
  constexpr int kThreadColumns = kPieces * kColumns;
  const int threads = std::min((source.num_cols / kThreadColumns + 31) / 32 * 32, kMaxThreads);
  launch(round_rows_kernel<Source>, dim3(static_cast<unsigned>(num_tokens)), threads, 0, stream,
         Overlap::kPreviousWithoutL1, source, to);
}

}  // namespace

void round_to_float8(const void* rows, int num_cols, int num_tokens, const Float8Rows& to, cudaStream_t stream) {
  launch_rows(PlainRows{rows, num_cols}, num_tokens, to, stream);
}

void rms_norm_to_float8(const Norm& norm, int num_tokens, const Float8Rows& to, cudaStream_t stream) {
  COMMON_CHECK(norm.rows == nullptr && num_tokens <= norm.num_residual_rows, "rows are taken as they lie");
  launch_rows(NormalisedRows<false>{norm.residual, norm.weights, norm.num_cols, norm.epsilon, {}}, num_tokens, to,
              stream);
}

void add_and_norm_to_float8(const Float8Product& product, const Residual& residual, float epsilon, int num_tokens,
                            const Float8Rows& to, cudaStream_t stream) {
  launch_rows(NormalisedRows<true>{residual.values, residual.norm, residual.num_cols, epsilon, product}, num_tokens, to,
              stream);
}

void gated_silu_to_float8(const Float8Product& gate_up, int size, int num_tokens, const Float8Rows& to,
                          cudaStream_t stream) {
  launch_rows(GatedRows{gate_up, size}, num_tokens, to, stream);
}

}  // namespace common
