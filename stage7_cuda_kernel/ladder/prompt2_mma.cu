// Prompts, step 2: mma.sync, the matrix instruction of all chips since Ampere.
//
// A thread block has 64 rows, 16 for each of its four warps, and walks the tokens that these rows see in tiles of 32.
// The products are as in decoding's step 6, not transposed: there are rows enough to fill 16. S = Q K^T has 16 rows
// and 8 tokens for each product. What a lane has of S is what a left operand needs of P, so O = P V follows without an
// exchange between lanes. All four warps read the same tile, so they copy it together, swizzled, and while they compute
// on one tile the copy of the next is in flight.
//
// flops for one prompt of 8,192 tokens, 32 heads of 128 dimensions: 4 * 32 * 128 * 8,192^2 / 2 = 550 G. bytes: a tile
// serves 64 rows, 64 flops for each byte that comes from L2.
//
// Why it is faster: a product is 2,048 multiplications with additions in one instruction of a warp, where step 1
// has 32. Why it is slow: the device could do 750 Tflop/s (common/paged/KERNELS.md, "Where the machine's numbers come
// from"). An mma has 16 rows and reads both operands from registers. A warp first fetches all of K and V that it
// multiplies from shared memory; that costs instructions, and registers that its output needs. And while it computes a
// softmax, it multiplies nothing.
#include "prompt_call.cuh"

namespace stage7 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;  // queries of a thread block
constexpr int kTileTokens = 32;
constexpr int kStages = 2;  // a tile to compute on, a tile in flight

using Vec = common::Vec16<Element>;
constexpr int kVecElements = Vec::kElements;
constexpr int kVecsPerRow = kDimensions / kVecElements;
constexpr int kTileBytes = kTileTokens * kVecsPerRow * static_cast<int>(sizeof(Vec));
constexpr int kSteps = kDimensions / 16;  // a product sums over 16 dimensions, or over 16 tokens

// Where a vector of a row lies in a tile in shared memory: swizzled.
__device__ std::uint32_t vec_address(std::uint32_t tile, int row, int vec) {
  return tile + static_cast<std::uint32_t>((row * kVecsPerRow + (vec ^ (row % 8))) * static_cast<int>(sizeof(Vec)));
}

// Begins to copy K and V of tokens begin to begin + 31. Tokens from `seen` on become zeros: 0 times a NaN would be a
// NaN.
__device__ void copy_tile(const PromptCall& call, const int* table, int kv_head, int begin, int seen,
                          std::uint32_t keys) {
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kTileTokens * kVecsPerRow; i += kThreads) {
    const int row = i / kVecsPerRow;
    const int vec = i % kVecsPerRow;
    const bool exists = begin + row < seen;
    const std::int64_t offset =
        row_offset(call, table, kv_head, min(begin + row, seen - 1)) + std::int64_t{vec} * kVecElements;
    common::copy_vec_async(vec_address(keys, row, vec), call.keys + offset, exists);
    common::copy_vec_async(vec_address(keys + kTileBytes, row, vec), call.values + offset, exists);
  }
}

__global__ void __launch_bounds__(kThreads) attend(PromptCall call) {
  __shared__ __align__(128) unsigned char tiles[kStages][2][kTileBytes];
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const auto head = static_cast<int>(blockIdx.y);
  const Rows rows = find_rows(call, kRows, static_cast<int>(blockIdx.x));
  if (rows.count == 0) {
    return;
  }
  const int* table = call.block_tables + call.table_starts[rows.sequence];
  const int kv_head = head / (call.num_heads / call.num_kv_heads);
  const int seen = rows.position + rows.count;  // by the last row
  copy_tile(call, table, kv_head, 0, seen, common::shared_address(tiles[0]));
  common::commit_copies();

  // A lane has two of the warp's rows, t / 4 and 8 further. Q as the left operand: of each row, dimensions 2 (t % 4),
  // the next, and both 8 further.
  const int own[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};
  std::uint32_t queries[kSteps][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = std::int64_t{rows.first + min(own[half], rows.count - 1)} * call.num_heads + head;
    const auto* pairs = reinterpret_cast<const std::uint32_t*>(call.queries + row * kDimensions);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      queries[step][half] = pairs[step * 8 + lane % 4];
      queries[step][half + 2] = pairs[step * 8 + lane % 4 + 4];
    }
  }

  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};                      // of the lane's own columns
  float output[kDimensions / 8][4] = {};  // 8 dimensions each: 2 (t % 4) and the next of the two rows
  int stage = 0;
  for (int begin = 0; begin < seen; begin += kTileTokens, stage = 1 - stage) {
    if (begin + kTileTokens < seen) {
      copy_tile(call, table, kv_head, begin + kTileTokens, seen, common::shared_address(tiles[1 - stage]));
    }
    common::commit_copies();
    common::wait_copies<1>();
    __syncthreads();
    const std::uint32_t keys = common::shared_address(tiles[stage]);
    const std::uint32_t values = keys + kTileBytes;

    float scores[kTileTokens / 8][4] = {};  // 8 tokens each: 2 (t % 4) and the next of the two rows
#pragma unroll
    for (int tokens = 0; tokens < kTileTokens; tokens += 16) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        std::uint32_t k[4];
        common::load_matrices(k, vec_address(keys, tokens + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
        common::multiply_add(scores[tokens / 8], queries[step], k[0], k[1]);
        common::multiply_add(scores[tokens / 8 + 1], queries[step], k[2], k[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = rows.position + own[half] + 1 - begin - lane % 4 * 2;
      float new_largest = largest[half];
#pragma unroll
      for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          scores[n][i] = n * 8 + i % 2 < visible ? scores[n][i] * call.scale : -INFINITY;
          new_largest = fmaxf(new_largest, scores[n][i]);
        }
      }
      new_largest = fmaxf(new_largest, __shfl_xor_sync(~0U, new_largest, 1));
      new_largest = fmaxf(new_largest, __shfl_xor_sync(~0U, new_largest, 2));
      const float factor = common::exp2_fast(largest[half] - new_largest);
      largest[half] = new_largest;
      sum[half] *= factor;
#pragma unroll
      for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          scores[n][i] = common::exp2_fast(scores[n][i] - new_largest);
          sum[half] += scores[n][i];
        }
      }
#pragma unroll
      for (int n = 0; n < kDimensions / 8; ++n) {
        output[n][half * 2] *= factor;
        output[n][half * 2 + 1] *= factor;
      }
    }

#pragma unroll
    for (int tokens = 0; tokens < kTileTokens; tokens += 16) {
      const int n = tokens / 8;
      const std::uint32_t weights[4] = {
          common::pack(scores[n][0], scores[n][1]), common::pack(scores[n][2], scores[n][3]),
          common::pack(scores[n + 1][0], scores[n + 1][1]), common::pack(scores[n + 1][2], scores[n + 1][3])};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        std::uint32_t v[4];
        common::load_matrices_transposed(v, vec_address(values, tokens + lane % 16, 2 * step + lane / 16));
        common::multiply_add(output[2 * step], weights, v[0], v[1]);
        common::multiply_add(output[2 * step + 1], weights, v[2], v[3]);
      }
    }
    __syncthreads();  // all warps have read the tile
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(~0U, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0U, sum[half], 2);
    if (own[half] < rows.count) {
      const std::int64_t row = std::int64_t{rows.first + own[half]} * call.num_heads + head;
      auto* pairs = reinterpret_cast<std::uint32_t*>(call.output + row * kDimensions);
#pragma unroll
      for (int n = 0; n < kDimensions / 8; ++n) {
        pairs[n * 4 + lane % 4] = common::pack(output[n][half * 2] / sum[half], output[n][half * 2 + 1] / sum[half]);
      }
    }
  }
}

void attend_prompts(const Pages& pages, const BatchArrays& batch, const int* query_starts, const void* queries,
                    void* output, int num_tokens, void* /*workspace*/, cudaStream_t stream) {
  const PromptCall call = prompt_call(pages, batch, query_starts, queries, output);
  if (num_tokens > 0) {
    common::launch(attend, prompt_grid(call, num_tokens, kRows), kThreads, 0, stream, common::Overlap::kNone, call);
  }
}

}  // namespace

const PromptStep kPromptMma = {"2 mma", attend_prompts};

}  // namespace
