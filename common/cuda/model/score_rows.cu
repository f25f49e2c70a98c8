#include "common/cuda/model/score_rows.h"

#include <cstdint>

#include "common/cuda/model/ranked.cuh"
#include "common/cuda/runtime/launch.h"

namespace common {
namespace {

constexpr int kThreads = 1024;

// What all threads of the warp have, joined: in every thread.
template <typename T, typename Join>
__device__ __forceinline__ T of_warp(T value, const Join& join) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = join(value, __shfl_xor_sync(0xFFFFFFFFU, value, distance));
  }
  return value;
}

// Likewise of the block.
template <typename T, typename Join>
__device__ __forceinline__ T of_block(T value, const Join& join) {
  __shared__ T of_warps[kThreads / 32];
  value = of_warp(value, join);
  __syncthreads();  // until all threads have read what the last call left here
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  value = of_warps[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) {
    value = join(value, of_warps[warp]);
  }
  return value;
}

// A block for each row, which reads the row once for the largest logit and once for the sum. A thread knows the best
// token of those that it reads, which are every kThreads-th. When that one is taken, the thread's warp looks for its
// next best: the row is not read once more for each of them.
__global__ void __launch_bounds__(kThreads)
    score_kernel(const float* logits, int vocab_size, const int* tokens, const int* num_best, RowScore* scores) {
  const auto row = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const float* const row_logits = logits + std::int64_t{row} * vocab_size;
  RowScore& score = scores[row];
  const auto larger = [](unsigned long long left, unsigned long long right) { return max(left, right); };
  const auto sum = [](auto left, auto right) { return left + right; };

  unsigned long long own_best = 0;
#pragma unroll 8
  for (int i = thread; i < vocab_size; i += kThreads) {
    const float logit = __ldcg(row_logits + i);
    own_best = max(own_best, isnan(logit) ? ~0ULL : ranked(logit, static_cast<unsigned>(i)));
  }
  unsigned long long best = of_block(own_best, larger);
  const float largest = best == ~0ULL ? INFINITY : value_of_rank(best);
  if (isinf(largest)) {
    if (thread == 0) {
      score.rank = 0;
    }
    return;
  }

  const float own = __ldcg(row_logits + tokens[row]);
  float exponentials = 0.0F;
  int num_larger = 0;
#pragma unroll 8
  for (int i = thread; i < vocab_size; i += kThreads) {
    const float logit = __ldcg(row_logits + i);
    exponentials += expf(logit - largest);
    num_larger += logit > own ? 1 : 0;
  }
  const float log_sum = logf(of_block(exponentials, sum));
  num_larger = of_block(num_larger, sum);
  if (thread == 0) {
    score.logprob = own - largest - log_sum;
    score.rank = 1 + num_larger;
  }

  for (int place = 0; place < num_best[row]; ++place) {
    const auto token = static_cast<int>(~static_cast<unsigned>(best));
    if (thread == 0) {
      score.best_tokens[place] = token;
      score.best_logprobs[place] = value_of_rank(best) - largest - log_sum;
    }
    const int owner = token % kThreads;
    if (thread / 32 == owner / 32) {
      unsigned long long next = 0;
      for (int i = owner + thread % 32 * kThreads; i < vocab_size; i += 32 * kThreads) {
        const unsigned long long rank = ranked(__ldcg(row_logits + i), static_cast<unsigned>(i));
        next = rank < best ? max(next, rank) : next;
      }
      next = of_warp(next, larger);
      own_best = thread == owner ? next : own_best;
    }
    best = of_block(own_best, larger);
  }
}

}  // namespace

void score_logits(const float* logits, int vocab_size, int num_rows, const int* tokens, const int* num_best,
                  RowScore* scores, cudaStream_t stream) {
  launch(score_kernel, dim3(static_cast<unsigned>(num_rows)), kThreads, 0, stream, Overlap::kNone, logits, vocab_size,
         tokens, num_best, scores);
}

}  // namespace common
