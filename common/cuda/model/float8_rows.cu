#include "common/cuda/model/float8_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstring>

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
// factor() is what a whole row is multiplied by.

struct PlainRows {
  const __nv_bfloat16* rows;
  int num_cols;

  __device__ __forceinline__ void load(std::int64_t row, int column, float (&values)[kColumns],
                                       float& /*squares*/) const {
    const uint2 word = __ldcg(reinterpret_cast<const uint2*>(rows + row * num_cols + column));
    __nv_bfloat16 halves[kColumns];
    memcpy(halves, &word, sizeof(word));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      values[i] = to_float(halves[i]);
    }
  }
  __device__ __forceinline__ float factor(float /*squares*/) const { return 1.0F; }
};

struct NormalisedRows {
  const float* residual;
  const float* weights;  // [num_cols]
  int num_cols;
  float epsilon;

  __device__ __forceinline__ void load(std::int64_t row, int column, float (&values)[kColumns], float& squares) const {
    const float4 x = load_shared_floats(residual + row * num_cols + column);
    const float4 weight = *reinterpret_cast<const float4*>(weights + column);
    squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    values[0] = x.x * weight.x;
    values[1] = x.y * weight.y;
    values[2] = x.z * weight.z;
    values[3] = x.w * weight.w;
  }
  __device__ __forceinline__ float factor(float squares) const {
    return 1.0F / sqrtf(squares / static_cast<float>(num_cols) + epsilon);
  }
};

struct GatedRows {
  const __nv_bfloat16* gate_up;
  int num_cols;

  __device__ __forceinline__ void load(std::int64_t row, int column, float (&values)[kColumns],
                                       float& /*squares*/) const {
    const Vec16<__nv_bfloat16> pairs{load_past_l1(gate_up + 2 * (row * num_cols + column))};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      values[i] = gated_for<__nv_bfloat16>(pairs[2 * i], pairs[2 * i + 1]);
    }
  }
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
  float values[kPieces][kColumns];
  float squares = 0.0F;
  const auto load = [&](int first, float& sum) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = first + piece * piece_columns;
      if (column < source.num_cols) {
        source.load(row, column, values[piece], sum);
      } else {
#pragma unroll
        for (float& value : values[piece]) {
          value = 0.0F;
        }
      }
    }
  };
  std::uint32_t largest = 0;
  for (int begin = 0; begin < source.num_cols; begin += kPieces * piece_columns) {
    load(begin + thread * kColumns, squares);
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
  const float scale = float8_scale(largest);
  const float inverse = 1.0F / scale;
  const bool has_low_columns = thread % 4 < 2;
  const int word = thread % 2 * 2 + thread % 4 / 2;
  for (int begin = 0; begin < source.num_cols; begin += kPieces * piece_columns) {
    const int first = begin + thread * kColumns;
    if (source.num_cols > kPieces * piece_columns) {
      float unused = 0.0F;
      load(first, unused);
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
  launch_rows(PlainRows{static_cast<const __nv_bfloat16*>(rows), num_cols}, num_tokens, to, stream);
}

void rms_norm_to_float8(const Norm& norm, int num_tokens, const Float8Rows& to, cudaStream_t stream) {
  COMMON_CHECK(norm.rows == nullptr && num_tokens <= norm.num_residual_rows, "rows are taken as they lie");
  launch_rows(NormalisedRows{norm.residual, norm.weights, norm.num_cols, norm.epsilon}, num_tokens, to, stream);
}

void gated_silu_to_float8(const void* gate_up, int size, int num_tokens, const Float8Rows& to, cudaStream_t stream) {
  launch_rows(GatedRows{static_cast<const __nv_bfloat16*>(gate_up), size}, num_tokens, to, stream);
}

}  // namespace common
