// Float32 attention: a thread block for each query head of each token, in which the warps take
// the tokens of the context in turn. Tensor cores would round the operands to 10 bits (tf32), and the point of this
// path is that it does not round: it exists to be compared with the CPU, not to be fast. So it takes any block size and
// almost any head_dim.
#include "attention_simple.h"

#include <cmath>
#include "common/cuda/ptx.cuh"

#include "checks.h"
#include "common/cuda/runtime/launch.h"
#include "online_softmax.cuh"
#include "page_layout.h"

namespace stage7 {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxDimensions = 256;
constexpr int kValues = kMaxDimensions / 32;  // a thread has dimensions lane, lane + 32, … as far as there are any

// One token's row of the queries: whose it is and how much of the context it sees.
struct QueryRow {
  int sequence;
  int visible;  // 0: the row belongs to no sequence
};

__device__ QueryRow find_row(int token, const Batch& batch, const int* query_starts) {
  if (query_starts == nullptr) {
    return {token, batch.context_lengths[token]};
  }
  if (token < query_starts[0] || token >= query_starts[batch.num_sequences]) {
    return {0, 0};
  }
  int sequence = 0;
  for (int end = batch.num_sequences; end - sequence > 1;) {  // query_starts[sequence] <= token < query_starts[end]
    const int middle = (sequence + end) / 2;
    (query_starts[middle] <= token ? sequence : end) = middle;
  }
  return {sequence, batch.context_lengths[sequence] - (query_starts[sequence + 1] - token - 1)};
}

using PartialRow = SoftmaxRow<kValues>;
using Parts = PartialSoftmax<kMaxDimensions>;
constexpr std::size_t kPartsBytes = Parts::bytes(kWarps, 1);

// What one warp makes of every kWarps-th position.
__device__ PartialRow attend(const Pages& pages, const int* table, int kv_head, int visible,
                             const float (&query)[kValues], float scale) {
  const PageShape& shape = pages.shape;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  PartialRow own;
  for (int position = static_cast<int>(threadIdx.x) / 32; position < visible; position += kWarps) {
    const int row = position % shape.block_size;
    const std::int64_t offset = row_offset(shape, table[position / shape.block_size], kv_head, row);
    const auto* keys = static_cast<const float*>(pages.keys) + offset;
    const auto* values = static_cast<const float*>(pages.values) + offset;
    float value[kValues] = {};
    float score = 0.0F;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int dimension = lane + 32 * i;
      if (dimension < shape.head_dim) {
        score += query[i] * keys[dimension];
        value[i] = values[dimension];
      }
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      score += __shfl_xor_sync(~0U, score, distance);
    }
    score *= scale;
    own.rescale(fmaxf(own.largest, score));
    own.add(common::exp2_fast(score - own.largest), value);
  }
  return own;
}

__global__ void __launch_bounds__(32 * kWarps) attention_kernel(Pages pages, Batch batch, const int* query_starts,
                                                                const float* queries, float* output, float scale) {
  __shared__ __align__(16) unsigned char shared[kPartsBytes];
  const int head_dim = pages.shape.head_dim;
  const int token = static_cast<int>(blockIdx.x) / batch.num_heads;
  const int head = static_cast<int>(blockIdx.x) % batch.num_heads;
  const QueryRow row = find_row(token, batch, query_starts);
  if (row.visible <= 0) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const std::int64_t row_begin = std::int64_t{blockIdx.x} * head_dim;
  float query[kValues] = {};
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (lane + 32 * i < head_dim) {
      query[i] = queries[row_begin + lane + 32 * i];
    }
  }
  const int* table = batch.block_table(row.sequence);
  const int kv_head = head / (batch.num_heads / pages.shape.num_kv_heads);
  const PartialRow own = attend(pages, table, kv_head, row.visible, query, scale);
  const Parts parts(shared, kWarps, 1);
  if (lane == 0) {
    parts.max_and_sum(warp, 0) = make_float2(own.largest, own.sum);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    parts.row(warp, 0)[lane + 32 * i] = own.values[i];
  }
  __syncthreads();
  if (thread < head_dim) {  // a thread a dimension
    const SoftmaxRow<1> merged = merge_parts<1>(parts, kWarps, 0, thread);
    output[row_begin + thread] = merged.values[0] / merged.sum;
  }
}

}  // namespace

void attention_simple(const Pages& pages, const Batch& batch, const int* query_starts, const void* queries,
                      void* output, int num_tokens, cudaStream_t stream) {
  const float scale = score_scale(pages.shape.head_dim);
  const std::int64_t grid = std::int64_t{num_tokens} * batch.num_heads;
  COMMON_CHECK(grid < std::int64_t{1} << 31, "too many tokens for one launch");
  common::launch(attention_kernel, dim3(static_cast<unsigned>(grid)), 32 * kWarps, 0, stream, common::Overlap::kNone,
                 pages, batch, query_starts, static_cast<const float*>(queries), static_cast<float*>(output), scale);
}

}  // namespace
