// Step 1: the formula as it stands. A thread block for each query head; three passes; every score goes through memory.
//
// Scores first, with a thread for each token. Then the largest score, the weights 2^(score - largest) and their sum.
// Then the output, with a thread for each dimension. Correct, and a fair picture of what a first kernel looks like.
//
// bytes, for 32 sequences of 8,192 tokens, 32 query heads, 8 kv heads: K and V are 32 * 8,192 * 8 * 128 * 2 * 2 = 1.07
// GB, and each of the 4 query heads of a group loads all of it: 4.3 GB. Scores: 34 MB, written twice and read twice.
// flops: 4 * 32 * 128 * 262,144 = 4.3 G, so 4 for each byte of K and V: far below the 164 that the device could do in
// the time it reads a byte.
// measured: 1x8192 2,992 us (0%), 32x8192 6,910 us (3%), 32xragged 13,993 us (1%) on an NVIDIA H200, 2026-11-23, at
// 5fcb232
//
// Why it is slow: it moves two bytes at a time. A token costs a query head 85 instructions of a warp, 23 in the first
// pass and 62 in the third, where all four warps walk all tokens; 20 of them are loads and 8 are products. That is 713
// M in all, and the device starts 132 x 4 in each of 1.8 G cycles a second: 0.75 ms if none ever waited. And they wait:
// in the first pass neighbouring threads read neighbouring tokens, 256 bytes apart, so a load of a warp asks for 32
// sectors of 32 bytes and uses 2 bytes of each. That makes 148 sectors for a token and query head, where 28 would hold
// everything that the loads ask for. The next 15 loads use the other 15 elements of a sector, if it is still in the
// cache. Mostly it is: 1.4 GB come from memory (Nsight Compute, at 5fcb232). The bytes of K and V are not what the step
// waits for, but the cache, which looks up 32 lines for each such load.
#include "ladder_call.cuh"

namespace stage7 {
namespace {

constexpr int kThreads = 128;
static_assert(kThreads == kDimensions);  // a thread for each dimension of the output

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
  const auto head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const int length = call.context_lengths[sequence];
  if (length == 0) {
    return;
  }
  const int* table = call.block_tables + call.table_starts[sequence];
  const int kv_head = head / (call.num_heads / call.num_kv_heads);
  const std::int64_t row = std::int64_t{sequence} * call.num_heads + head;
  const Element* query = call.queries + row * kDimensions;
  float* scores = all_scores + row * call.max_context;

  float largest = -INFINITY;
  for (int position = thread; position < length; position += kThreads) {
    const Element* key = call.keys + row_offset(call, table, kv_head, position);
    float score = 0.0F;
    for (int i = 0; i < kDimensions; ++i) {
      score += common::to_float(query[i]) * common::to_float(key[i]);
    }
    scores[position] = score * call.scale;
    largest = fmaxf(largest, scores[position]);
  }
  largest = over_thread_block(largest, [](float a, float b) { return fmaxf(a, b); });

  float sum = 0.0F;
  for (int position = thread; position < length; position += kThreads) {
    scores[position] = common::exp2_fast(scores[position] - largest);
    sum += scores[position];
  }
  sum = over_thread_block(sum, [](float a, float b) { return a + b; });  // its barrier: all weights are written

  float output = 0.0F;
  for (int position = 0; position < length; ++position) {
    const Element* value = call.values + row_offset(call, table, kv_head, position);
    output += scores[position] * common::to_float(value[thread]);
  }
  call.output[row * kDimensions + thread] = common::from_float<Element>(output / sum);
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

const LadderStep kNaive = {"1 naive", workspace_bytes, nullptr, decode};

}  // namespace
