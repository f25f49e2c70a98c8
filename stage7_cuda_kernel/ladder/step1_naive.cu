// Step 1: the formula as it stands. A thread block for each query head; three passes; every score goes through memory.
//
// Scores first, with a thread for each token. Then the largest score, the weights 2^(score - largest) and their sum.
// Then the output, with a thread for each dimension. Correct, and a fair picture of what a first kernel looks like.
//
// bytes, for 32 sequences of 8,192 tokens, 32 query heads, 8 kv heads: K and V are 32 * 8,192 * 8 * 128 * 2 * 2 = 1.07
// GB, and each of the 4 query heads of a group loads all of it: 4.3 GB. Scores: 34 MB, written twice and read twice.
// flops: 4 * 32 * 128 * 262,144 = 4.3 G, so 4 for each byte of K and V: far below the 160 that the device could do in
// the time it reads a byte. measured: 1x8192 1,325 us (1%), 32x8192 2,672 us (9%), 32xragged 5,759 us (3%) on an NVIDIA
// H200, 2026-11-22
//
// Why it is slow: in the first pass neighbouring threads read neighbouring tokens, 256 bytes apart. An instruction of a
// warp loads 32 elements of 2 bytes, and memory moves in sectors of 32 bytes: 1,024 bytes for 64. The other 15
// elements of each sector are needed by the next 15 instructions, if the cache still has the sector by then. The third
// pass loads 64 neighbouring bytes for a warp, but all four warps walk all tokens. Both compute an address for each
// element: a token costs a query head 169 instructions of a warp (83 and 85 in the two passes), of which 8 are
// products: 1,417 M in all, and the device starts 132 x 4 in each of 1.8 G cycles a second, so 1.5 ms if none ever
// waited. Memory is not the reason: the caches catch what is loaded again, and 1.4 GB come from memory (both counted by
// Nsight Compute).
#include "ladder_parts.cuh"

namespace stage7 {
namespace {

static_assert(kThreads == kDimensions);  // a thread for each dimension

__device__ __forceinline__ std::int64_t element_offset(const HeadPages& head, int position, int dimension) {
  return head.vec_offset(position, dimension / kVecElements) + dimension % kVecElements;
}

// all_scores: [num_sequences, num_heads, context]
__global__ void __launch_bounds__(kThreads) attend(LadderCall call, float* all_scores, int context) {
  const auto query_head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto thread = static_cast<int>(threadIdx.x);
  const int length = call.batch.context_lengths[sequence];
  if (length == 0) {
    return;
  }
  const HeadPages head(call, sequence, query_head / (call.batch.num_heads / call.pages.shape.num_kv_heads));
  const Element* query = call.queries + head_row(call, sequence, query_head);
  float* scores = all_scores + (std::int64_t{sequence} * call.batch.num_heads + query_head) * context;

  float largest = -INFINITY;
  for (int position = thread; position < length; position += kThreads) {
    float score = 0.0F;
    for (int dimension = 0; dimension < kDimensions; ++dimension) {
      score +=
          common::to_float(query[dimension]) * common::to_float(head.keys[element_offset(head, position, dimension)]);
    }
    scores[position] = score * call.scale;
    largest = fmaxf(largest, scores[position]);
  }
  largest = over_thread_block(largest, [](float a, float b) { return fmaxf(a, b); });

  float sum = 0.0F;
  for (int position = thread; position < length; position += kThreads) {
    scores[position] = exp2f(scores[position] - largest);
    sum += scores[position];
  }
  sum = over_thread_block(sum, [](float a, float b) { return a + b; });  // its barrier: all weights are written

  float output = 0.0F;
  for (int position = 0; position < length; ++position) {
    output += scores[position] * common::to_float(head.values[element_offset(head, position, thread)]);
  }
  call.output[head_row(call, sequence, query_head) + thread] = common::from_float<Element>(output / sum);
}

void decode(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (batch.num_sequences > 0) {
    common::launch(attend, grid_of(batch.num_heads, batch.num_sequences), kThreads, 0, stream, common::Overlap::kNone,
                   call, static_cast<float*>(workspace), max_context(batch));
  }
}

}  // namespace

const LadderStep kNaive = {"1 naive", score_bytes, nullptr, decode};

}  // namespace
