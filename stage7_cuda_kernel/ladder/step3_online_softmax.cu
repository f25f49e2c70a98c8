// Step 3: one pass. The online softmax of stage 3 keeps scores and weights in registers.
//
// K and V of a token are read together, and nothing is written but the output. Each half-warp runs its own online
// softmax over every eighth token: the largest score so far, the sum of the weights 2^(score - largest), and the sum of
// weights times V; a larger score multiplies both sums by 2^(old largest - new largest). The eight results are joined
// at the end in shared memory, as stage 3 joins blocks: bring all to the largest maximum, then add.
//
// bytes for 32 x 8,192: still 4.3 GB loaded, since each query head reads the K and V of its group; the scores are gone,
// and so is the workspace. flops: 4.3 G, and a few more for rescaling.
// measured: 1x8192 249 us (3%), 32x8192 572 us (41%), 32xragged 1,026 us (20%) on an NVIDIA H200, 2026-11-23, at
// 5fcb232
//
// Why it is faster: twice the loads in flight, because V does not wait for all of K; no barrier between passes; 46
// instructions for a token and query head instead of 57. Without groups (MHA) a large batch is read at the ceiling from
// here on, and no later step is faster. With groups the four heads find each other's K and V in L1 (1.2 GB go through
// L2, 1.1 come from memory), but each of them unpacks and multiplies for itself: 382 M instructions, 402 us at the
// least. And with one sequence of 1,024 tokens there are 32 thread blocks for 132 multiprocessors, in this step as in
// the steps before: three of four are idle.
#include "ladder_call.cuh"

namespace stage7 {
namespace {

constexpr int kThreads = 128;
static_assert(kThreads == kDimensions);  // a thread for each dimension of the output

using Vec = common::Vec16<Element>;  // 16 bytes: what a thread moves at once
constexpr int kVecElements = Vec::kElements;
constexpr int kVecsPerRow = kDimensions / kVecElements;  // 16: half a warp moves a row
constexpr int kHalfWarps = kThreads / kVecsPerRow;
constexpr int kUnroll = 4;  // rows that a half-warp has in flight

constexpr int kResident = 8;  // thread blocks on a multiprocessor

__device__ Vec load_vec(const Element* row, int vec) {
  return {*reinterpret_cast<const uint4*>(row + vec * kVecElements)};
}

__device__ float dot(const Vec& a, const Vec& b) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kVecElements; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

// The sum of a number of each thread of a half-warp; all 16 get it.
__device__ float over_half_warp(float x) {
#pragma unroll
  for (int distance = kVecsPerRow / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(~0U, x, distance);
  }
  return x;
}

// kResident thread blocks fit, with registers for K and V of four tokens in each thread. By default the compiler uses
// fewer registers, and not all of a thread's loads are in flight at once.
__global__ void __launch_bounds__(kThreads, kResident) attend(LadderCall call) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int half_warp = thread / kVecsPerRow;
  const int vec = thread % kVecsPerRow;
  const auto head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const int length = call.context_lengths[sequence];
  if (length == 0) {
    return;
  }
  const int* table = call.block_tables + call.table_starts[sequence];
  const int kv_head = head / (call.num_heads / call.num_kv_heads);
  const std::int64_t row = std::int64_t{sequence} * call.num_heads + head;
  const Vec query = load_vec(call.queries + row * kDimensions, vec);

  // The half-warp's online softmax over every eighth token.
  float largest = -INFINITY;
  float sum = 0.0F;
  float output[kVecElements] = {};
  for (int begin = 0; begin < length; begin += kHalfWarps * kUnroll) {
    Vec keys[kUnroll];
    Vec values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {  // past the end: the last token again, so that no thread diverges
      const int position = min(begin + i * kHalfWarps + half_warp, length - 1);
      const std::int64_t offset = row_offset(call, table, kv_head, position);
      keys[i] = load_vec(call.keys + offset, vec);
      values[i] = load_vec(call.values + offset, vec);
    }
    float scores[kUnroll];
    float new_largest = largest;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      scores[i] = over_half_warp(dot(query, keys[i])) * call.scale;
      new_largest = fmaxf(new_largest, scores[i]);
    }
    const float factor = common::exp2_fast(largest - new_largest);
    largest = new_largest;
    sum *= factor;
#pragma unroll
    for (int j = 0; j < kVecElements; ++j) {
      output[j] *= factor;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool exists = begin + i * kHalfWarps + half_warp < length;
      const float weight = exists ? common::exp2_fast(scores[i] - largest) : 0.0F;
      sum += weight;
#pragma unroll
      for (int j = 0; j < kVecElements; ++j) {
        output[j] += weight * values[i][j];
      }
    }
  }

  // The half-warps' results, joined: a thread for each dimension.
  __shared__ float maxima[kHalfWarps];
  __shared__ float sums[kHalfWarps];
  __shared__ float outputs[kHalfWarps][kDimensions];
  if (vec == 0) {
    maxima[half_warp] = largest;
    sums[half_warp] = sum;
  }
#pragma unroll
  for (int j = 0; j < kVecElements; ++j) {
    outputs[half_warp][vec * kVecElements + j] = output[j];
  }
  __syncthreads();
  float joined_largest = -INFINITY;
  for (int i = 0; i < kHalfWarps; ++i) {
    joined_largest = fmaxf(joined_largest, maxima[i]);
  }
  float joined_sum = 0.0F;
  float joined = 0.0F;
  for (int i = 0; i < kHalfWarps; ++i) {
    const float weight = common::exp2_fast(maxima[i] - joined_largest);
    joined_sum += weight * sums[i];
    joined += weight * outputs[i][thread];
  }
  call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
}

std::size_t workspace_bytes(const PageShape& shape, const BatchArrays& batch) {
  check_ladder(shape, batch);
  return 0;
}

void decode(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* /*workspace*/,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (call.num_sequences > 0) {
    common::launch(attend, grid_of(call.num_heads, call.num_sequences), kThreads, 0, stream, common::Overlap::kNone,
                   call);
  }
}

}  // namespace

const LadderStep kOnlineSoftmax = {"3 online softmax", workspace_bytes, nullptr, decode};

}  // namespace
