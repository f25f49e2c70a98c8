#include "common/cuda/llama_kernels.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/ranked.cuh"
#include "common/cuda/scalars.cuh"

namespace common {
namespace {

constexpr unsigned kThreads = 256;

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7FFFFFFF); }

// The sum over a block of kThreads, in every thread.
__device__ float block_sum(float value) {
  __shared__ float sums[kThreads / 32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = value;
  }
  __syncthreads();
  float sum = 0.0F;
#pragma unroll
  for (float warps_sum : sums) {
    sum += warps_sum;
  }
  return sum;
}

template <typename Scalar>
__global__ void __launch_bounds__(kThreads) look_up_kernel(Lookup lookup, Residual residual, float2* rotation) {
  wait_for_previous_launch();
  allow_next_launch();
  const int half = lookup.head_dim / 2;
  const std::int64_t row = blockIdx.x;
  int token = lookup.tokens[row];
  if (lookup.pending_rows != nullptr && lookup.pending_rows[row] >= 0) {
    token = lookup.pending_tokens[lookup.pending_rows[row]];
  }
  const bool exists = token >= 0 && token < lookup.vocab_size;
  const auto* source =
      static_cast<const Scalar*>(lookup.embedding) + std::int64_t{exists ? token : 0} * residual.num_cols;
  const std::int64_t first = row * residual.num_cols;
  for (int begin = 0; begin < residual.num_cols; begin += kThreads * kSquaresColumns) {
    const int i = begin + static_cast<int>(threadIdx.x) * kSquaresColumns;
    float squares = 0.0F;
    if (i < residual.num_cols) {
#pragma unroll
      for (int j = i; j < i + kSquaresColumns; ++j) {
        const float value = exists ? to_float(source[j]) : not_a_number();
        residual.values[first + j] = value;
        squares += value * value;
        if (residual.weighted != nullptr) {
          static_cast<Scalar*>(residual.weighted)[first + j] = from_float<Scalar>(value * residual.norm[j]);
        }
      }
    }
    if (residual.weighted == nullptr) {
      continue;
    }
    // A sum is over what neighbouring threads have; those past the end have nothing.
    for (int columns = kSquaresColumns; columns < residual.squares_columns; columns *= 2) {
      squares += __shfl_xor_sync(0xFFFFFFFFU, squares, columns / kSquaresColumns);
    }
    if (i < residual.num_cols && i % residual.squares_columns == 0) {
      const int count = (residual.num_cols + residual.squares_columns - 1) / residual.squares_columns;
      residual.squares[row * count + i / residual.squares_columns] = squares;
    }
  }
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(half); i += kThreads) {
    double sine;
    double cosine;
    sincos(lookup.positions[row] * lookup.frequencies[i], &sine, &cosine);
    rotation[row * half + i] = {static_cast<float>(cosine) * lookup.rotation_scale,
                                static_cast<float>(sine) * lookup.rotation_scale};
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(Norm norm, Scalar* output) {
  wait_for_previous_launch();
  allow_next_launch();
  const int row = norm.rows == nullptr ? static_cast<int>(blockIdx.x) : norm.rows[blockIdx.x];
  const bool exists = row >= 0 && row < norm.num_residual_rows;
  const float* x = norm.residual + std::int64_t{exists ? row : 0} * norm.num_cols;
  float squares = 0.0F;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < norm.num_cols; i += kThreads * 4) {
    const float4 value = load_shared_floats(x + i);
    squares += value.x * value.x + value.y * value.y + value.z * value.z + value.w * value.w;
  }
  const float mean = block_sum(squares) / static_cast<float>(norm.num_cols);
  const float scale = exists ? 1.0F / sqrtf(mean + norm.epsilon) : not_a_number();
  auto* y = reinterpret_cast<Pair<Scalar>*>(output + std::int64_t{blockIdx.x} * norm.num_cols);
  for (int i = static_cast<int>(threadIdx.x) * 4; i < norm.num_cols; i += kThreads * 4) {
    const float4 value = load_shared_floats(x + i);
    const float4 weight = *reinterpret_cast<const float4*>(norm.weights + i);
    y[i / 2] = make_pair<Scalar>(value.x * weight.x * scale, value.y * weight.y * scale);
    y[i / 2 + 1] = make_pair<Scalar>(value.z * weight.z * scale, value.w * weight.w * scale);
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kThreads)
    rotate_and_split_kernel(Rotary rotary, HeadNorms norms, Scalar* qkv, Scalar* q) {
  extern __shared__ float head_scales[];  // of the heads of Q and K, where they are normalised
  wait_for_previous_launch();
  allow_next_launch();
  const int half = rotary.head_dim / 2;
  const std::int64_t row = blockIdx.x;
  const int rotated = rotary.q_rows + rotary.kv_rows;
  Scalar* source = qkv + row * (rotated + rotary.kv_rows);
  const auto load = [&](int i) -> float2 {
    using Word = std::conditional_t<sizeof(Scalar) == 2, unsigned, uint2>;
    const Word word = __ldcg(reinterpret_cast<const Word*>(source + i));
    const auto& pair = reinterpret_cast<const Pair<Scalar>&>(word);
    const float2 bias = rotary.bias == nullptr ? float2{} : *reinterpret_cast<const float2*>(rotary.bias + i);
    return {to_float(pair.first) + bias.x, to_float(pair.second) + bias.y};
  };
  if (norms.q != nullptr) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int head = static_cast<int>(threadIdx.x) / 32; head < rotated / rotary.head_dim; head += kThreads / 32) {
      float squares = 0.0F;
      for (int i = 2 * lane; i < rotary.head_dim; i += 64) {
        const float2 value = load(head * rotary.head_dim + i);
        squares += value.x * value.x + value.y * value.y;
      }
      squares = warp_sum(squares);
      if (lane == 0) {
        head_scales[head] = 1.0F / sqrtf(squares / static_cast<float>(rotary.head_dim) + norms.epsilon);
      }
    }
    __syncthreads();
  }
  const int last = rotary.bias == nullptr ? rotated : rotated + rotary.kv_rows;
  for (int i = static_cast<int>(threadIdx.x) * 2; i < last; i += kThreads * 2) {
    float2 value = load(i);
    float2 turn = {1.0F, 0.0F};
    if (i < rotated) {
      turn = __ldcg(rotary.rotation + row * half + i / 2 % half);
      if (norms.q != nullptr) {
        const float* const norm = i < rotary.q_rows ? norms.q : norms.k;
        const float scale = head_scales[i / rotary.head_dim];
        const float2 weight = *reinterpret_cast<const float2*>(norm + i % rotary.head_dim);
        value = {value.x * weight.x * scale, value.y * weight.y * scale};
      }
    }
    Scalar* destination = i < rotary.q_rows ? q + row * rotary.q_rows + i : source + i;
    *reinterpret_cast<Pair<Scalar>*>(destination) =
        make_pair<Scalar>(value.x * turn.x - value.y * turn.y, value.x * turn.y + value.y * turn.x);
  }
}

template <typename Scalar>
__global__ void __launch_bounds__(kThreads)
    gated_silu_kernel(const Scalar* gate_up, std::int64_t size, Scalar* output) {
  wait_for_previous_launch();
  allow_next_launch();
  // Two outputs per thread: their gates and ups are 8 or 16 bytes.
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * 2;
  if (i < size) {
    Scalar values[4];
    using Word = std::conditional_t<sizeof(Scalar) == 2, uint2, uint4>;
    const Word word = __ldcg(reinterpret_cast<const Word*>(gate_up + 2 * i));
    memcpy(values, &word, sizeof(values));
    *reinterpret_cast<Pair<Scalar>*>(output + i) = make_pair<Scalar>(gated(to_float(values[0]), to_float(values[1])),
                                                                     gated(to_float(values[2]), to_float(values[3])));
  }
}

struct Best {
  unsigned long long rank;
  unsigned num_finished;  // blocks
};

constexpr int kLogitsPerBlock = 16 * kThreads;

__global__ void __launch_bounds__(kThreads)
    argmax_kernel(const float* logits, int vocab_size, Best* scratch, int* next_tokens) {
  __shared__ unsigned long long best_of_warps[kThreads / 32];
  wait_for_previous_launch();
  allow_next_launch();
  const float* row = logits + std::int64_t{blockIdx.y} * vocab_size;
  const unsigned first = blockIdx.x * kLogitsPerBlock + threadIdx.x;
  float largest = -INFINITY;
  unsigned index_of_largest = first;
  bool has_nan = false;
#pragma unroll
  for (unsigned i = 0; i < kLogitsPerBlock; i += kThreads) {
    const float logit = first + i < static_cast<unsigned>(vocab_size) ? __ldcg(row + first + i) : -INFINITY;
    index_of_largest = logit > largest ? first + i : index_of_largest;
    largest = fmaxf(largest, logit);
    has_nan |= isnan(logit);
  }
  unsigned long long best = has_nan ? ~0ULL : ranked(largest, index_of_largest);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    best = max(best, __shfl_xor_sync(0xFFFFFFFFU, best, distance));
  }
  if (threadIdx.x % 32 == 0) {
    best_of_warps[threadIdx.x / 32] = best;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const unsigned long long other : best_of_warps) {
      best = max(best, other);
    }
    Best& shared = scratch[blockIdx.y];
    atomicMax(&shared.rank, best);
    __threadfence();
    if (atomicAdd(&shared.num_finished, 1) == gridDim.x - 1) {  // the last block of the row
      __threadfence();
      best = atomicExch(&shared.rank, 0ULL);
      shared.num_finished = 0;
      const auto rank_of_infinity = static_cast<unsigned>(~0xFF800000U);  // of -infinity
      const bool valid = best != ~0ULL && static_cast<unsigned>(best >> 32) != rank_of_infinity;
      next_tokens[blockIdx.y] = valid ? static_cast<int>(~static_cast<unsigned>(best)) : -1;
    }
  }
}

template <typename Scalar>
__global__ void store_rows_kernel(const float* source, std::int64_t size, int num_cols, int row_step,
                                  Scalar* destination) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    destination[i / num_cols * row_step * num_cols + i % num_cols] = from_float<Scalar>(source[i]);
  }
}

template <typename Scalar>
__global__ void draw_uniform_kernel(std::uint64_t seed, std::uint64_t first, float half_width, std::int64_t size,
                                    Scalar* destination) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    // SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), whose state after n numbers is seed + n * a constant.
    std::uint64_t z = seed + (first + static_cast<std::uint64_t>(i) + 1) * 0x9E3779B97F4A7C15U;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
    z = (z ^ z >> 27) * 0x94D049BB133111EBU;
    z ^= z >> 31;
    const float unit = (static_cast<float>(z >> 40) + 0.5F) * 0x1p-23F - 1.0F;  // 24 bits, in (-1, 1)
    destination[i] = from_float<Scalar>(unit * half_width);
  }
}

__global__ void fill_floats_kernel(float* destination, std::int64_t size, float value) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    destination[i] = value;
  }
}

dim3 blocks_for(std::int64_t items) {
  return dim3(static_cast<unsigned>(std::clamp<std::int64_t>((items + kThreads - 1) / kThreads, 1, 1 << 16)));
}

}  // namespace

void look_up(Precision precision, const Lookup& lookup, int num_tokens, const Residual& residual, float2* rotation,
             cudaStream_t stream) {
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    launch(look_up_kernel<Scalar>, dim3(static_cast<unsigned>(num_tokens)), kThreads, 0, stream,
           Overlap::kPreviousWithoutL1, lookup, residual, rotation);
  });
}

void rms_norm(Precision precision, const Norm& norm, int num_tokens, void* output, cudaStream_t stream) {
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    launch(rms_norm_kernel<Scalar>, dim3(static_cast<unsigned>(num_tokens)), kThreads, 0, stream,
           Overlap::kPreviousWithoutL1, norm, static_cast<Scalar*>(output));
  });
}

void rotate_and_split(Precision precision, const Rotary& rotary, const HeadNorms& norms, int num_tokens, void* qkv,
                      void* q, cudaStream_t stream) {
  const int num_normed = norms.q == nullptr ? 0 : (rotary.q_rows + rotary.kv_rows) / rotary.head_dim;
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    launch(rotate_and_split_kernel<Scalar>, dim3(static_cast<unsigned>(num_tokens)), kThreads,
           static_cast<std::size_t>(num_normed) * sizeof(float), stream, Overlap::kPreviousWithoutL1, rotary, norms,
           static_cast<Scalar*>(qkv), static_cast<Scalar*>(q));
  });
}

void gated_silu(Precision precision, const void* gate_up, int size, int num_tokens, void* output, cudaStream_t stream) {
  const std::int64_t items = std::int64_t{num_tokens} * size;
  const dim3 grid(static_cast<unsigned>((items / 2 + kThreads - 1) / kThreads));
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    launch(gated_silu_kernel<Scalar>, grid, kThreads, 0, stream, Overlap::kPreviousWithoutL1,
           static_cast<const Scalar*>(gate_up), items, static_cast<Scalar*>(output));
  });
}

std::size_t argmax_scratch_bytes(int num_rows) { return sizeof(Best) * static_cast<std::size_t>(num_rows); }

void argmax_rows(const float* logits, int vocab_size, int num_rows, void* scratch, int* next_tokens,
                 cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((vocab_size + kLogitsPerBlock - 1) / kLogitsPerBlock),
                  static_cast<unsigned>(num_rows));
  launch(argmax_kernel, grid, kThreads, 0, stream, Overlap::kPreviousWithoutL1, logits, vocab_size,
         static_cast<Best*>(scratch), next_tokens);
}

void store_rows(Precision precision, const float* source, std::int64_t num_rows, int num_cols, int row_step,
                void* destination, cudaStream_t stream) {
  const std::int64_t size = num_rows * num_cols;
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    store_rows_kernel<<<blocks_for(size), kThreads, 0, stream>>>(source, size, num_cols, row_step,
                                                                 static_cast<Scalar*>(destination));
  });
  CUDA_CHECK(cudaGetLastError());
}

void draw_uniform(Precision precision, std::uint64_t seed, std::uint64_t first, float half_width, std::int64_t size,
                  void* destination, cudaStream_t stream) {
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    draw_uniform_kernel<<<blocks_for(size), kThreads, 0, stream>>>(seed, first, half_width, size,
                                                                   static_cast<Scalar*>(destination));
  });
  CUDA_CHECK(cudaGetLastError());
}

void fill_floats(float* destination, std::int64_t size, float value, cudaStream_t stream) {
  fill_floats_kernel<<<blocks_for(size), kThreads, 0, stream>>>(destination, size, value);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace common
