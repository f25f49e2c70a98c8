// Step 2: 16 bytes for each thread, side by side. Other instructions for the same bytes; and weights are formed in the
// pass over V, so that scores are written once and read once.
//
// A row of K or V is 256 bytes: half a warp reads it with a load of 16 bytes for each thread, and the warp reads two
// rows. Everything loaded is used at once: 16 sectors for 512 bytes. The block table is read once for each row. A
// score is spread over 16 threads, 8 products each; four exchanges between the threads join them. Each half-warp has
// four tokens' loads in flight before it uses the first, because a load takes about 600 ns: to reach 4,577 GB/s,
// Little's law needs 4,577 * 600 = 2.7 MB in flight, 21 KB for each multiprocessor, all the time; several times that in
// practice, because a load takes longer when memory is busy, and requests come in bursts.
//
// bytes and flops for 32 x 8,192: as step 1, 4.3 GB loaded and 4.3 Gflop.
// measured: 1x8192 597 us (1%), 32x8192 824 us (28%), 32xragged 2,429 us (8%) on an NVIDIA H200, 2026-11-23, at 5fcb232
//
// Why it is faster: not because memory delivers fewer bytes. It is 57 instructions for a token and query head in place
// of 85, since an address serves 8 elements. It is an eighth of the loads, 2.5 in place of 20, and an eighth of the
// sectors that they ask for, 17.5 in place of 148 (as the executor counts).
// Where it is still slow: a single sequence. Its 32 thread blocks leave 100 multiprocessors idle, and walk the context
// twice.
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

// A number of each thread, combined. All threads of the thread block call it, and get the result.
template <typename Operation>
__device__ float over_thread_block(float own, Operation operation) {
  __shared__ float parts[kThreads];
  __syncthreads();  // threads may still read the numbers of an earlier call
  parts[threadIdx.x] = own;
  __syncthreads();
  float result = parts[0];
  for (int i = 1; i < kThreads; ++i) {
    result = operation(result, parts[i]);
  }
  return result;
}

// all_scores: [num_sequences, num_heads, max_context]
__global__ void __launch_bounds__(kThreads) attend(LadderCall call, float* all_scores) {
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
  float* scores = all_scores + row * call.max_context;

  float largest = -INFINITY;
  for (int begin = 0; begin < length; begin += kHalfWarps * kUnroll) {
    Vec keys[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {  // past the end: the last token again, so that no thread diverges
      const int position = min(begin + i * kHalfWarps + half_warp, length - 1);
      keys[i] = load_vec(call.keys + row_offset(call, table, kv_head, position), vec);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int position = begin + i * kHalfWarps + half_warp;
      const float score = over_half_warp(dot(query, keys[i])) * call.scale;
      largest = fmaxf(largest, score);
      if (vec == 0 && position < length) {
        scores[position] = score;
      }
    }
  }
  largest = over_thread_block(largest, [](float a, float b) { return fmaxf(a, b); });  // all scores are written

  float sum = 0.0F;  // of the half-warp's weights
  float output[kVecElements] = {};
  for (int begin = 0; begin < length; begin += kHalfWarps * kUnroll) {
    Vec values[kUnroll];
    float weights[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int position = min(begin + i * kHalfWarps + half_warp, length - 1);
      values[i] = load_vec(call.values + row_offset(call, table, kv_head, position), vec);
      const bool exists = begin + i * kHalfWarps + half_warp < length;
      weights[i] = exists ? common::exp2_fast(scores[position] - largest) : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      sum += weights[i];
#pragma unroll
      for (int j = 0; j < kVecElements; ++j) {
        output[j] += weights[i] * values[i][j];
      }
    }
  }

  // The half-warps' results, joined: a thread for each dimension.
  __shared__ float sums[kHalfWarps];
  __shared__ float outputs[kHalfWarps][kDimensions];
  if (vec == 0) {
    sums[half_warp] = sum;
  }
#pragma unroll
  for (int j = 0; j < kVecElements; ++j) {
    outputs[half_warp][vec * kVecElements + j] = output[j];
  }
  __syncthreads();
  float joined_sum = 0.0F;
  float joined = 0.0F;
  for (int i = 0; i < kHalfWarps; ++i) {
    joined_sum += sums[i];
    joined += outputs[i][thread];
  }
  call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
}

std::size_t workspace_bytes(const PageShape& shape, const BatchArrays& batch) {
  check_ladder(shape, batch);
  return sizeof(float) * static_cast<std::size_t>(batch.num_sequences) * static_cast<std::size_t>(batch.num_heads) *
         static_cast<std::size_t>(batch.max_blocks_per_sequence * kBlockTokens);
}

void decode(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (call.num_sequences > 0) {
    common::launch(attend, grid_of(call.num_heads, call.num_sequences), kThreads, 0, stream, common::Overlap::kNone,
                   call, static_cast<float*>(workspace));
  }
}

}  // namespace

const LadderStep kCoalesced = {"2 coalesced", workspace_bytes, nullptr, decode};

}  // namespace
