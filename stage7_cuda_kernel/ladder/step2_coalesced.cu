// Step 2: 16 bytes for each thread, side by side. Other instructions for the same bytes; and weights are formed in the
// pass over V, so that scores are written once and read once.
//
// A row of K or V is 256 bytes: half a warp reads it with one load of 16 bytes for each thread, and the warp reads two
// rows. All that is loaded is used at once, the block is looked up once for each row, and an instruction moves 512
// bytes in place of 64. A score is spread over 16 threads, 8 products each; four exchanges between the threads join
// them. Each half-warp has four tokens' loads in flight before it uses the first, because a load takes about 600 ns:
// to reach 4,577 GB/s, Little's law needs 4,577 * 600 = 2.7 MB in flight, 20 KB for each multiprocessor, all the time;
// several times that in practice, because a load takes longer when memory is busy, and requests come in bursts (step 6
// keeps 192 KB in flight).
//
// The permutation of vectors (page_layout.h) costs nothing here: the half-warp reads all 16 of them anyway.
//
// bytes and flops for 32 x 8,192: as step 1, 4.3 GB loaded and 4.3 Gflop.
// measured: 1x8192 354 us (2%), 32x8192 794 us (30%), 32xragged 1,620 us (12%) on an NVIDIA H200, 2026-11-22
//
// Why it is faster: about a third of step 1's instructions, 62 for a token and query head, 522 M in all, since an
// address serves 8 elements; and L2 delivers 1.4 GB in place of 3.3. Where it is still slow: a single sequence. Its 32
// thread blocks leave 100 multiprocessors idle, and walk the context twice.
#include "common/cuda/ptx.cuh"
#include "half_warps.cuh"

namespace stage7 {
namespace {

constexpr int kUnroll = 4;  // a half-warp's tokens in flight

// all_scores: [num_sequences, num_heads, context]. The 1 lets the compiler use enough registers for four loads: by
// default it uses 32 and loads one token after the other.
__global__ void __launch_bounds__(kThreads, 1) attend(LadderCall call, float* all_scores, int context) {
  extern __shared__ __align__(16) unsigned char shared[];
  const auto query_head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto thread = static_cast<int>(threadIdx.x);
  const int half_warp = thread / kVecsPerRow;
  const int vec = thread % kVecsPerRow;
  const int length = call.batch.context_lengths[sequence];
  if (length == 0) {
    return;
  }
  const HeadPages head(call, sequence, query_head / (call.batch.num_heads / call.pages.shape.num_kv_heads));
  const ElementVec query = load_vec(call.queries + head_row(call, sequence, query_head) + vec * kVecElements);
  float* scores = all_scores + (std::int64_t{sequence} * call.batch.num_heads + query_head) * context;

  float largest = -INFINITY;
  for (int begin = 0; begin < length; begin += kHalfWarps * kUnroll) {
    ElementVec keys[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {  // past the end: the last token again, so that no thread diverges
      keys[i] = load_vec(head.keys + head.vec_offset(min(begin + i * kHalfWarps + half_warp, length - 1), vec));
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
  largest = over_thread_block(largest, [](float a, float b) { return fmaxf(a, b); });

  HalfWarpRow own;
  own.largest = largest;
  for (int begin = 0; begin < length; begin += kHalfWarps * kUnroll) {
    ElementVec values[kUnroll];
    float weights[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int position = begin + i * kHalfWarps + half_warp;
      const int existing = min(position, length - 1);
      values[i] = load_vec(head.values + head.vec_offset(existing, vec));
      weights[i] = position < length ? common::exp2_fast(scores[existing] - largest) : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      own.add(weights[i], values[i]);
    }
  }
  const PartialSoftmax<kDimensions> exchange(shared, kHalfWarps, 1);
  store_half_warp(own, exchange, 0);
  __syncthreads();
  if (thread < 32) {
    write_output(call, exchange, kHalfWarps, 0, head_row(call, sequence, query_head));
  }
}

void decode(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (batch.num_sequences > 0) {
    common::launch(attend, grid_of(batch.num_heads, batch.num_sequences), kThreads,
                   PartialSoftmax<kDimensions>::bytes(kHalfWarps, 1), stream, common::Overlap::kNone, call,
                   static_cast<float*>(workspace), max_context(batch));
  }
}

}  // namespace

const LadderStep kCoalesced = {"2 coalesced", score_bytes, nullptr, decode};

}  // namespace
