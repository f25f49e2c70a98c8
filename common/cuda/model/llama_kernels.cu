#include "common/cuda/model/llama_kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include "common/cuda/ptx.cuh"

#include <algorithm>

#include "common/cuda/model/ranked.cuh"
#include "common/cuda/model/scalars.cuh"
#include "common/cuda/runtime/launch.h"

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

// squares: of the kSquaresColumns columns of a row that begin with `column`, which is the thread's. All threads of a
// warp call it.
__device__ __forceinline__ void store_squares(const Residual& residual, std::int64_t row, int column, float squares) {
  // A sum is over what neighbouring threads have; threads past the end have nothing.
  for (int columns = kSquaresColumns; columns < residual.squares_columns; columns *= 2) {
    squares += __shfl_xor_sync(0xFFFFFFFFU, squares, columns / kSquaresColumns);
  }
  if (column < residual.num_cols && column % residual.squares_columns == 0) {
    const int count = (residual.num_cols + residual.squares_columns - 1) / residual.squares_columns;
    residual.squares[row * count + column / residual.squares_columns] = squares;
  }
}

// A token's rotation: [half].
__device__ __forceinline__ void look_up_rotation(int position, const double* frequencies, float scale, int half,
                                                 float2* rotation) {
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(half); i += kThreads) {
    double sine;
    double cosine;
    sincos(position * frequencies[i], &sine, &cosine);
    rotation[i] = {static_cast<float>(cosine) * scale, static_cast<float>(sine) * scale};
  }
}

// kGeneral: embeddings are scaled, and there may be a second rotation.
template <typename Scalar, bool kGeneral>
__global__ void __launch_bounds__(kThreads) look_up_kernel(Lookup lookup, Residual residual, float2* rotation) {
  // In this order. The launches that follow order weights before they wait, and attention reads tables and its plan:
  // none of them may start before everything enqueued before the step has finished.
  wait_for_previous_launch();
  allow_next_launch();
  const int half = lookup.head_dim / 2;
  const std::int64_t row = blockIdx.x;
  int token = lookup.tokens[row];
  if (lookup.pending_rows != nullptr && lookup.pending_rows[row] >= 0) {
    token = lookup.pending_tokens[lookup.pending_rows[row]];
  }
  const bool exists = token >= 0 && token < lookup.num_tokens;
  token -= lookup.first_token;
  const bool is_here = exists && token >= 0 && token < lookup.vocab_size;
  const auto* source =
      static_cast<const Scalar*>(lookup.embedding) + std::int64_t{is_here ? token : 0} * residual.num_cols;
  const std::int64_t first = row * residual.num_cols;
  for (int begin = 0; begin < residual.num_cols; begin += kThreads * kSquaresColumns) {
    const int i = begin + static_cast<int>(threadIdx.x) * kSquaresColumns;
    float squares = 0.0F;
    if (i < residual.num_cols) {
#pragma unroll
      for (int j = i; j < i + kSquaresColumns; ++j) {
        float value = is_here ? to_float(source[j]) : exists ? 0.0F : not_a_number();
        if constexpr (kGeneral) {
          value *= lookup.embedding_scale;
        }
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
    store_squares(residual, row, i, squares);
  }
  const int position = lookup.positions[row];
  look_up_rotation(position, lookup.frequencies, lookup.rotation_scale, half, rotation + row * half);
  if constexpr (kGeneral) {
    if (lookup.window_frequencies != nullptr) {
      look_up_rotation(position, lookup.window_frequencies, 1.0F, half, rotation + (gridDim.x + row) * half);
    }
  }
}

// Loads eight neighbouring numbers that another kernel has written, perhaps on another GPU.
__device__ __forceinline__ void load_eight(const float* source, float (&values)[kSquaresColumns]) {
  const float4 first = __ldcv(reinterpret_cast<const float4*>(source));
  const float4 second = __ldcv(reinterpret_cast<const float4*>(source) + 1);
  memcpy(values, &first, sizeof(first));
  memcpy(values + 4, &second, sizeof(second));
}
__device__ __forceinline__ void load_eight(const __nv_bfloat16* source, float (&values)[kSquaresColumns]) {
  const uint4 word = __ldcv(reinterpret_cast<const uint4*>(source));
  __nv_bfloat16 halves[kSquaresColumns];
  memcpy(halves, &word, sizeof(word));
#pragma unroll
  for (int i = 0; i < kSquaresColumns; ++i) {
    values[i] = to_float(halves[i]);
  }
}

// Reports to the other GPUs' blocks for the same row that this GPU's part is stored, and waits for theirs.
//
// Blocks that wait keep their places on the multiprocessors, so there may be more rows than places only because every
// GPU starts its blocks in the order of their rows: the lowest row that has not met has its block running, or next in
// line, on every GPU, so it meets, and its block ends. That takes one row for each block, in order, and a grid of its
// own for each sum: the next launch's blocks get places after all of this one's, on each GPU.
__device__ __forceinline__ void meet_peers(const PartialSum& sum) {
  const unsigned number = sum.num_sums[blockIdx.x] + 1;
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer < sum.num_parts && peer != sum.rank) {
    __threadfence_system();
    store_release_system(sum.arrived[peer] + sum.rank * kMaxPeerRows + blockIdx.x, number);
    const unsigned* const flag = sum.arrived[sum.rank] + peer * kMaxPeerRows + blockIdx.x;
    for (unsigned tries = 1;; ++tries) {
      const unsigned arrived = load_acquire_system(flag);
      // A GPU that is ahead may have gone on to the next sum. Numbers begin anew after 2^32.
      if (static_cast<int>(arrived - number) >= 0 ||
          (tries % 4096 == 0 && *static_cast<const volatile int*>(sum.stop) != 0)) {
        break;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    sum.num_sums[blockIdx.x] = number;
  }
}

// The sum of all parts, in the same order on every GPU.
template <typename Part>
__device__ __forceinline__ void load_sum(const PartialSum& sum, std::int64_t place, float (&added)[kSquaresColumns]) {
#pragma unroll
  for (float& number : added) {
    number = 0.0F;
  }
  for (int part = 0; part < sum.num_parts; ++part) {
    float numbers[kSquaresColumns];
    load_eight(static_cast<const Part*>(sum.parts[part]) + place, numbers);
#pragma unroll
    for (int j = 0; j < kSquaresColumns; ++j) {
      added[j] += numbers[j];
    }
  }
}

// A block for each row. Eight columns for each thread: rows are of whole pieces of 16 bytes in either type.
// kNormalised: the sum is, before it is added; its parts are loaded a second time then.
template <typename Scalar, typename Part, bool kNormalised>
__global__ void __launch_bounds__(kThreads) add_sum_kernel(PartialSum sum, Residual residual, Normed normed) {
  wait_for_previous_launch();
  allow_next_launch();
  const std::int64_t row = blockIdx.x;
  if (sum.num_sums != nullptr) {
    meet_peers(sum);
  }
  float sum_scale = 1.0F;
  if constexpr (kNormalised) {
    float squares = 0.0F;
    for (int i = static_cast<int>(threadIdx.x) * kSquaresColumns; i < residual.num_cols;
         i += static_cast<int>(kThreads) * kSquaresColumns) {
      float added[kSquaresColumns];
      load_sum<Part>(sum, row * residual.num_cols + i, added);
#pragma unroll
      for (const float number : added) {
        squares += number * number;
      }
    }
    sum_scale = 1.0F / sqrtf(block_sum(squares) / static_cast<float>(residual.num_cols) + sum.norm.epsilon);
    __syncthreads();  // all have read what the next block_sum() overwrites
  }
  float row_squares = 0.0F;  // of the thread's columns
  for (int begin = 0; begin < residual.num_cols; begin += kThreads * kSquaresColumns) {
    const int i = begin + static_cast<int>(threadIdx.x) * kSquaresColumns;
    const std::int64_t place = row * residual.num_cols + i;
    float squares = 0.0F;
    if (i < residual.num_cols) {
      float values[kSquaresColumns];
      load_eight(residual.values + place, values);
      if (sum.num_parts > 0) {
        float added[kSquaresColumns];
        load_sum<Part>(sum, place, added);
#pragma unroll
        for (int j = 0; j < kSquaresColumns; ++j) {
          if constexpr (kNormalised) {
            added[j] = added[j] * sum.norm.weights[i + j] * sum_scale;
          }
          values[j] += added[j];
        }
        auto* const destination = reinterpret_cast<float4*>(residual.values + place);
        destination[0] = {values[0], values[1], values[2], values[3]};
        destination[1] = {values[4], values[5], values[6], values[7]};
      }
#pragma unroll
      for (const float value : values) {
        squares += value * value;
      }
      row_squares += squares;
      if (residual.weighted != nullptr) {
        auto* const weighted = static_cast<Scalar*>(residual.weighted) + place;
#pragma unroll
        for (int j = 0; j < kSquaresColumns; j += 2) {
          *reinterpret_cast<Pair<Scalar>*>(weighted + j) =
              make_pair<Scalar>(values[j] * residual.norm[i + j], values[j + 1] * residual.norm[i + j + 1]);
        }
      }
    }
    if (residual.weighted != nullptr) {
      store_squares(residual, row, i, squares);
    }
  }
  if (normed.output == nullptr) {
    return;
  }
  const float mean = block_sum(row_squares) / static_cast<float>(residual.num_cols);
  const float scale = 1.0F / sqrtf(mean + normed.epsilon);
  for (int i = static_cast<int>(threadIdx.x) * kSquaresColumns; i < residual.num_cols;
       i += static_cast<int>(kThreads) * kSquaresColumns) {
    const std::int64_t place = row * residual.num_cols + i;
    float values[kSquaresColumns];
    load_eight(residual.values + place, values);  // the thread's own
    auto* const output = static_cast<Scalar*>(normed.output) + place;
#pragma unroll
    for (int j = 0; j < kSquaresColumns; j += 2) {
      *reinterpret_cast<Pair<Scalar>*>(output + j) =
          make_pair<Scalar>(values[j] * residual.norm[i + j] * scale, values[j + 1] * residual.norm[i + j + 1] * scale);
    }
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

// gelu(gate) * up. GELU, approximated as x / 2 (1 + tanh(s / 2)) with s = 2 sqrt(2 / pi) (x + 0.044715 x^3), is
// x / (1 + exp(-s)).
__device__ __forceinline__ float gated_by_gelu(float gate, float up) {
  constexpr float kScale = 1.5957691216F;
  const float s = kScale * (gate + 0.044715F * gate * gate * gate);
  return gate / (1.0F + expf(-s)) * up;
}

template <typename Scalar, bool kGelu>
__global__ void __launch_bounds__(kThreads) gated_kernel(const Scalar* gate_up, std::int64_t size, Scalar* output) {
  wait_for_previous_launch();
  allow_next_launch();
  // A thread's outputs are 16 bytes.
  using Vec = Vec16<Scalar>;
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * Vec::kElements;
  if (i < size) {
    const auto* const source = reinterpret_cast<const uint4*>(gate_up + 2 * i);
    const Vec pairs[2] = {{__ldcg(source)}, {__ldcg(source + 1)}};
    alignas(16) Pair<Scalar> outputs[Vec::kElements / 2];
#pragma unroll
    for (int pair = 0; pair < Vec::kElements / 2; ++pair) {
      const Vec& own = pairs[pair / (Vec::kElements / 4)];
      const int first = pair % (Vec::kElements / 4) * 4;
      const auto number = [](float gate, float up) { return kGelu ? gated_by_gelu(gate, up) : gated(gate, up); };
      outputs[pair] = make_pair<Scalar>(number(own[first], own[first + 1]), number(own[first + 2], own[first + 3]));
    }
    *reinterpret_cast<uint4*>(output + i) = *reinterpret_cast<const uint4*>(outputs);
  }
}

struct Best {
  unsigned long long rank;
  unsigned num_finished;  // blocks
};

constexpr int kLogitsPerBlock = 16 * kThreads;

// The token whose logit has this rank; -1 if it is NaN or -infinity.
__device__ __forceinline__ int token_of_rank(unsigned long long rank) {
  const auto rank_of_infinity = static_cast<unsigned>(~0xFF800000U);  // of -infinity
  const bool valid = rank != ~0ULL && static_cast<unsigned>(rank >> 32) != rank_of_infinity;
  return valid ? static_cast<int>(~static_cast<unsigned>(rank)) : -1;
}

__global__ void __launch_bounds__(kThreads) argmax_kernel(const float* logits, int vocab_size, int first_token,
                                                          Best* scratch, unsigned long long* ranks, int* next_tokens) {
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
  unsigned long long best = has_nan ? ~0ULL : ranked(largest, index_of_largest + static_cast<unsigned>(first_token));
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
      if (ranks != nullptr) {
        ranks[blockIdx.y] = best;
      } else {
        next_tokens[blockIdx.y] = token_of_rank(best);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    tokens_of_ranks_kernel(const unsigned long long* ranks, int num_rows, int num_tokens, int* next_tokens) {
  wait_for_previous_launch();
  allow_next_launch();
  const auto row = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (row < num_rows) {
    // If a GPU has failed, the ranks may be any numbers. The step is dropped, but what is enqueued reads its tokens.
    const int token = token_of_rank(__ldcg(ranks + row));
    next_tokens[row] = token >= 0 && token < num_tokens ? token : -1;
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

// A block has a row.
__global__ void __launch_bounds__(kThreads)
    store_rows_float8_kernel(const float* source, int num_cols, int row_step, std::uint8_t* destination,
                             float* row_scales, std::uint8_t* row_exponents) {
  __shared__ float largest_of_warps[kThreads / 32];
  const float* row = source + std::int64_t{blockIdx.x} * num_cols;
  float largest = 0.0F;
  for (int i = static_cast<int>(threadIdx.x); i < num_cols; i += kThreads) {
    largest = fmaxf(largest, fabsf(row[i]));
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, distance));
  }
  if (threadIdx.x % 32 == 0) {
    largest_of_warps[threadIdx.x / 32] = largest;
  }
  __syncthreads();
  for (const float other : largest_of_warps) {
    largest = fmaxf(largest, other);
  }
  constexpr float kLargest = 448.0F;
  int exponent = 0;
  const float fraction = frexpf(largest / kLargest, &exponent);  // 0.5 to 1
  const float scale = ldexpf(1.0F, fraction == 0.5F ? exponent - 1 : exponent);
  const std::int64_t to_row = std::int64_t{blockIdx.x} * row_step;
  for (int i = static_cast<int>(threadIdx.x); i < num_cols; i += kThreads) {
    destination[to_row * num_cols + i / 16 * 16 + i % 8 / 2 * 4 + i % 2 * 2 + i % 16 / 8] =
        __nv_cvt_float_to_fp8(row[i] / scale, __NV_SATFINITE, __NV_E4M3);
  }
  if (threadIdx.x == 0) {
    row_scales[to_row] = scale;
    row_exponents[to_row] = static_cast<std::uint8_t>(__float_as_uint(scale) >> 23U);
  }
}

// A thread has 16 columns.
__global__ void __launch_bounds__(kThreads)
    unpack_float8_kernel(const uint4* weights, const float* row_scales, std::int64_t num_vectors, int vectors_of_row,
                         uint4* output) {
  wait_for_previous_launch();
  allow_next_launch();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < num_vectors) {
    const uint4 packed = weights[i];
    const __nv_bfloat162 scale = __float2bfloat162_rn(row_scales[i / vectors_of_row]);
    const std::uint32_t words[] = {packed.x, packed.y, packed.z, packed.w};
    std::uint32_t pairs[8];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      unpack_four(words[word], pairs[word], pairs[4 + word]);
    }
#pragma unroll
    for (std::uint32_t& pair : pairs) {
      const __nv_bfloat162 scaled = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), scale);
      pair = reinterpret_cast<const std::uint32_t&>(scaled);
    }
    output[2 * i] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    output[2 * i + 1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
  }
}

template <typename Scalar>
__global__ void fill_uniform_kernel(std::uint64_t seed, std::uint64_t first, float half_width, std::int64_t size,
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
    const bool is_general = lookup.embedding_scale != 1.0F || lookup.window_frequencies != nullptr;
    launch(is_general ? look_up_kernel<Scalar, true> : look_up_kernel<Scalar, false>,
           dim3(static_cast<unsigned>(num_tokens)), kThreads, 0, stream, Overlap::kPreviousWithoutL1, lookup, residual,
           rotation);
  });
}

void add_sum(Precision precision, const PartialSum& sum, Precision type, int num_tokens, const Residual& residual,
             const Normed& normed, cudaStream_t stream) {
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    with_scalar(type, [&]<typename Part>(Part) {
      launch(sum.norm.weights == nullptr ? add_sum_kernel<Scalar, Part, false> : add_sum_kernel<Scalar, Part, true>,
             dim3(static_cast<unsigned>(num_tokens)), kThreads, 0, stream, Overlap::kPreviousWithoutL1, sum, residual,
             normed);
    });
  });
}

void rms_norm(Precision precision, const Norm& norm, int num_tokens, void* output, cudaStream_t stream) {
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    launch(rms_norm_kernel<Scalar>, dim3(static_cast<unsigned>(num_tokens)), kThreads, 0, stream,
           Overlap::kPreviousWithoutL1, norm, static_cast<Scalar*>(output));
  });
}

namespace {

template <bool kGelu>
void launch_gated(Precision precision, const void* gate_up, int size, int num_tokens, void* output,
                  cudaStream_t stream) {
  const std::int64_t items = std::int64_t{num_tokens} * size;
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    constexpr std::int64_t kItems = std::int64_t{kThreads} * Vec16<Scalar>::kElements;  // of a block
    const dim3 grid(static_cast<unsigned>((items + kItems - 1) / kItems));
    launch(gated_kernel<Scalar, kGelu>, grid, kThreads, 0, stream, Overlap::kPreviousWithoutL1,
           static_cast<const Scalar*>(gate_up), items, static_cast<Scalar*>(output));
  });
}

}  // namespace

void gated_silu(Precision precision, const void* gate_up, int size, int num_tokens, void* output, cudaStream_t stream) {
  launch_gated<false>(precision, gate_up, size, num_tokens, output, stream);
}

void gated_gelu(Precision precision, const void* gate_up, int size, int num_tokens, void* output, cudaStream_t stream) {
  launch_gated<true>(precision, gate_up, size, num_tokens, output, stream);
}

std::size_t argmax_scratch_bytes(int num_rows) { return sizeof(Best) * static_cast<std::size_t>(num_rows); }

namespace {

void launch_argmax(const float* logits, int vocab_size, int first_token, int num_rows, void* scratch,
                   unsigned long long* ranks, int* next_tokens, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((vocab_size + kLogitsPerBlock - 1) / kLogitsPerBlock),
                  static_cast<unsigned>(num_rows));
  launch(argmax_kernel, grid, kThreads, 0, stream, Overlap::kPreviousWithoutL1, logits, vocab_size, first_token,
         static_cast<Best*>(scratch), ranks, next_tokens);
}

}  // namespace

void argmax_rows(const float* logits, int vocab_size, int num_rows, void* scratch, int* next_tokens,
                 cudaStream_t stream) {
  launch_argmax(logits, vocab_size, 0, num_rows, scratch, nullptr, next_tokens, stream);
}

void rank_rows(const float* logits, int vocab_size, int first_token, int num_rows, void* scratch,
               unsigned long long* ranks, cudaStream_t stream) {
  launch_argmax(logits, vocab_size, first_token, num_rows, scratch, ranks, nullptr, stream);
}

void tokens_of_ranks(const unsigned long long* ranks, int num_rows, int num_tokens, int* next_tokens,
                     cudaStream_t stream) {
  launch(tokens_of_ranks_kernel, dim3((static_cast<unsigned>(num_rows) + kThreads - 1) / kThreads), kThreads, 0, stream,
         Overlap::kPreviousWithoutL1, ranks, num_rows, num_tokens, next_tokens);
}

void store_rows(Precision precision, const float* source, std::int64_t num_rows, int num_cols, int row_step,
                void* destination, cudaStream_t stream) {
  const std::int64_t size = num_rows * num_cols;
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    launch(store_rows_kernel<Scalar>, blocks_for(size), kThreads, 0, stream, Overlap::kNone, source, size, num_cols,
           row_step, static_cast<Scalar*>(destination));
  });
}

void store_rows_float8(const float* source, std::int64_t num_rows, int num_cols, int row_step, void* destination,
                       float* row_scales, std::uint8_t* row_exponents, cudaStream_t stream) {
  COMMON_CHECK(num_cols % 16 == 0, "rows are 16-byte pieces");
  launch(store_rows_float8_kernel, dim3(static_cast<unsigned>(num_rows)), kThreads, 0, stream, Overlap::kNone, source,
         num_cols, row_step, static_cast<std::uint8_t*>(destination), row_scales, row_exponents);
}

void unpack_float8(const void* weights, const float* row_scales, std::int64_t num_rows, int num_cols, void* output,
                   cudaStream_t stream) {
  const std::int64_t num_vectors = num_rows * num_cols / 16;
  const dim3 grid(static_cast<unsigned>((num_vectors + kThreads - 1) / kThreads));
  launch(unpack_float8_kernel, grid, kThreads, 0, stream, Overlap::kPreviousWithoutL1,
         static_cast<const uint4*>(weights), row_scales, num_vectors, num_cols / 16, static_cast<uint4*>(output));
}

void fill_uniform(Precision precision, std::uint64_t seed, std::uint64_t first, float half_width, std::int64_t size,
                  void* destination, cudaStream_t stream) {
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    launch(fill_uniform_kernel<Scalar>, blocks_for(size), kThreads, 0, stream, Overlap::kNone, seed, first, half_width,
           size, static_cast<Scalar*>(destination));
  });
}

void fill_floats(float* destination, std::int64_t size, float value, cudaStream_t stream) {
  launch(fill_floats_kernel, blocks_for(size), kThreads, 0, stream, Overlap::kNone, destination, size, value);
}

}  // namespace common
