// Step 6: tensor cores. A group's queries are a matrix, and so are the keys of a block.
//
// The products of a tile, 16 tokens of one kv head, with up to 8 queries are 8 instructions of a warp for the scores
// and 8 for the output. They are computed transposed, S^T = K Q^T and O^T = V^T P^T, because a product has 16 rows and
// 8 columns: tokens and dimensions fill the rows, and a group needs only 8 columns. A column of S^T, the scores of a
// query, then lies in the same lanes as that query's column of O^T.
//
// A product's operands are in registers, in an arrangement that ldmatrix makes out of rows in shared memory. So a warp
// copies its tile there first (cp.async: not by way of registers), and waits. An ldmatrix reads the same vector of 8
// rows at once. Rows are 256 bytes apart, so all 8 would lie in the same 4 of the 32 banks: 8 accesses one after the
// other. Therefore vector v of row r is stored at place v ^ r % 8, and the 8 vectors lie in 8 different columns of 16
// bytes, which together are all 32 banks: one access. This is a swizzle. The copy makes it: each lane says where its
// vector goes.
//
// bytes for 32 x 8,192: 1.07 GB, each once. flops: 4.3 G; the tensor cores do 8.6 G, for 4 of 8 columns are padding,
// and could do 190 G in the time that the bytes take.
// measured: 1x8192 20.0 us (37%), 32x8192 252 us (93%), 32xragged 331 us (60%) on an NVIDIA H200, 2026-11-23, at
// 5fcb232
//
// Why it is faster: 261 instructions of a warp for a tile and a group of 4 where step 5 takes 1,622, 34 M in all: the
// device starts them in 36 us. Copies need no registers, so 4 thread blocks with 4 tiles of 8 KB each, 128 KB, can be
// in flight on a multiprocessor. Where it is not: a warp orders no tile while it computes, so others have to. All
// contexts are cut into the same number of pieces: in a ragged batch the longest piece sets the time, and most of the
// device idles meanwhile. And the second launch is step 5's.
#include <algorithm>

#include "ladder_call.cuh"

namespace stage7 {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
static_assert(kThreads == kDimensions);  // a thread for each dimension of the output

using Vec = common::Vec16<Element>;  // 16 bytes: what a thread moves at once
constexpr int kVecElements = Vec::kElements;
constexpr int kVecsPerRow = kDimensions / kVecElements;  // 16: half a warp moves a row
constexpr int kTileBytes = kBlockTokens * kVecsPerRow * static_cast<int>(sizeof(Vec));

constexpr int kResident = 4;  // thread blocks on a multiprocessor

// What a thread block has found in its piece of a context, for one query.
struct Partial {
  float output[kDimensions];
  float largest;
  float sum;
};

// A context is cut between blocks, into `splits` pieces or, if there are fewer blocks, one for each: none is empty.
__device__ int num_pieces(int length, int splits) { return min(splits, (length + kBlockTokens - 1) / kBlockTokens); }

constexpr int kSteps = kDimensions / 16;  // a product takes 16 dimensions
constexpr int kQueries = 8;               // columns of a product; past the group's end they are padding

// Where a tile begins, the part of a block that one kv head has, in keys and in values.
__device__ std::int64_t tile_offset(const LadderCall& call, const int* table, int kv_head, int tile) {
  const std::int64_t block = table[tile];
  return (block * call.num_kv_heads + kv_head) * kBlockTokens * kDimensions;
}

// Where a vector of a row lies in a tile in shared memory: swizzled.
__device__ std::uint32_t vec_address(std::uint32_t tile, int row, int vec) {
  return tile + static_cast<std::uint32_t>((row * kVecsPerRow + (vec ^ (row % 8))) * static_cast<int>(sizeof(Vec)));
}

// Begins to copy a tile's first num_tokens rows. The other rows become zeros: 0 times a NaN would be a NaN.
__device__ void copy_tile(std::uint32_t tile, const Element* rows, int num_tokens) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kBlockTokens * kVecsPerRow / 32; ++i) {
    const int row = i * 2 + lane / kVecsPerRow;
    const int vec = lane % kVecsPerRow;
    common::copy_vec_async(vec_address(tile, row, vec), rows + row * kDimensions + vec * kVecElements,
                           row < num_tokens);
  }
  common::commit_copies();
}

// Lanes with the same lane % 4 have the scores of the same two queries, for different tokens.
__device__ float max_over_tokens(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 16));
}
__device__ float sum_over_tokens(float x) {
  x += __shfl_xor_sync(~0U, x, 4);
  x += __shfl_xor_sync(~0U, x, 8);
  return x + __shfl_xor_sync(~0U, x, 16);
}

// One warp's online softmaxes over the tiles that it sees. A lane t has queries 2 (t % 4) and the next.
struct WarpAttention {
  std::uint32_t queries[kSteps][2];  // Q^T as the right operand: dimensions 2 (t % 4), the next, and both 8 further, of
                                     // query t / 4
  float largest[2];
  float sum[2];             // what the lane's own tokens add
  float output[kSteps][4];  // O^T: dimensions t / 4 and t / 4 + 8 of each step

  __device__ void start(const Element* group_queries, int group) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto* pairs = reinterpret_cast<const std::uint32_t*>(group_queries + lane / 4 * kDimensions);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      queries[step][0] = lane / 4 < group ? pairs[step * 8 + lane % 4] : 0;
      queries[step][1] = lane / 4 < group ? pairs[step * 8 + lane % 4 + 4] : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        output[step][i] = 0.0F;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = -INFINITY;
      sum[i] = 0.0F;
    }
  }

  // The weights of a tile, P^T as the right operand.
  __device__ void weigh(std::uint32_t (&weights)[2], std::uint32_t keys, int num_tokens, float scale) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float scores[4] = {};  // S^T = K Q^T: tokens t / 4 and t / 4 + 8
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t k[4];
      common::load_matrices(k, vec_address(keys, lane % 16, 2 * step + lane / 16));
      common::multiply_add(scores, k, queries[step][0], queries[step][1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& low = scores[i];
      float& high = scores[i + 2];
      low = lane / 4 < num_tokens ? low * scale : -INFINITY;
      high = lane / 4 + 8 < num_tokens ? high * scale : -INFINITY;
      const float new_largest = fmaxf(largest[i], max_over_tokens(fmaxf(low, high)));
      const float factor = common::exp2_fast(largest[i] - new_largest);
      largest[i] = new_largest;
      low = common::exp2_fast(low - new_largest);
      high = common::exp2_fast(high - new_largest);
      sum[i] = sum[i] * factor + low + high;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        output[step][i] *= factor;
        output[step][i + 2] *= factor;
      }
    }
    // The halves of a result, transposed, are a right operand.
    weights[0] = common::transpose(common::pack(scores[0], scores[1]));
    weights[1] = common::transpose(common::pack(scores[2], scores[3]));
  }

  // O^T += V^T P^T; the load transposes V.
  __device__ void add(std::uint32_t values, const std::uint32_t (&weights)[2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t v[4];
      common::load_matrices_transposed(v, vec_address(values, lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
      common::multiply_add(output[step], v, weights[0], weights[1]);
    }
  }
};

// The warps' results for one query, joined: each thread gets its dimension. All threads of the thread block call it.
__device__ __forceinline__ void join_warps(const WarpAttention& own, int query, float& joined_largest,
                                           float& joined_sum, float& joined) {
  __shared__ float maxima[kWarps];
  __shared__ float sums[kWarps];
  __shared__ float outputs[kWarps][kDimensions];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float sum = sum_over_tokens(own.sum[query % 2]);
  __syncthreads();  // threads may still read the results of the query before
  if (lane == query / 2) {
    maxima[warp] = own.largest[query % 2];
    sums[warp] = sum;
  }
  if (lane % 4 == query / 2) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      outputs[warp][step * 16 + lane / 4] = own.output[step][query % 2];
      outputs[warp][step * 16 + lane / 4 + 8] = own.output[step][query % 2 + 2];
    }
  }
  __syncthreads();
  joined_largest = -INFINITY;
  for (int i = 0; i < kWarps; ++i) {
    joined_largest = fmaxf(joined_largest, maxima[i]);
  }
  joined_sum = 0.0F;
  joined = 0.0F;
  for (int i = 0; i < kWarps; ++i) {
    const float weight = common::exp2_fast(maxima[i] - joined_largest);
    joined_sum += weight * sums[i];
    joined += weight * outputs[i][threadIdx.x];
  }
}

__global__ void __launch_bounds__(kThreads, kResident) attend(LadderCall call, int splits, Partial* partials) {
  __shared__ __align__(128) unsigned char tiles[kWarps][2][kTileBytes];
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const auto kv_head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto piece = static_cast<int>(blockIdx.z);
  const int length = call.context_lengths[sequence];
  const int pieces = num_pieces(length, splits);
  if (piece >= pieces) {
    return;
  }
  const int num_blocks = (length + kBlockTokens - 1) / kBlockTokens;
  const int first = num_blocks * piece / pieces;
  const int end = num_blocks * (piece + 1) / pieces;
  const int* table = call.block_tables + call.table_starts[sequence];
  const int group = call.num_heads / call.num_kv_heads;
  const std::int64_t first_row = std::int64_t{sequence} * call.num_heads + kv_head * group;
  const std::uint32_t keys = common::shared_address(tiles[warp][0]);
  const std::uint32_t values = common::shared_address(tiles[warp][1]);

  WarpAttention own;
  own.start(call.queries + first_row * kDimensions, group);
  for (int tile = first + warp; tile < end; tile += kWarps) {
    const int num_tokens = min(kBlockTokens, length - tile * kBlockTokens);
    const std::int64_t offset = tile_offset(call, table, kv_head, tile);
    copy_tile(keys, call.keys + offset, num_tokens);
    copy_tile(values, call.values + offset, num_tokens);

    common::wait_copies<1>();
    __syncwarp();
    std::uint32_t weights[2];
    own.weigh(weights, keys, num_tokens, call.scale);
    common::wait_copies<0>();
    __syncwarp();
    own.add(values, weights);
    __syncwarp();  // the warp has read its tile
  }

#pragma unroll
  for (int query = 0; query < kQueries; ++query) {
    if (query == group) {
      return;
    }
    float joined_largest;
    float joined_sum;
    float joined;
    join_warps(own, query, joined_largest, joined_sum, joined);
    const std::int64_t row = first_row + query;
    if (splits == 1) {
      call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
      continue;
    }
    Partial& partial = partials[row * splits + piece];
    partial.output[thread] = joined;
    if (thread == 0) {
      partial.largest = joined_largest;
      partial.sum = joined_sum;
    }
  }
}

// The second launch: joins the pieces as `attend` joins what its threads have.
__global__ void __launch_bounds__(kThreads) merge(LadderCall call, int splits, const Partial* partials) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const int pieces = num_pieces(call.context_lengths[sequence], splits);
  if (pieces == 0) {
    return;
  }
  const std::int64_t row = std::int64_t{sequence} * call.num_heads + head;
  partials += row * splits;
  float joined_largest = -INFINITY;
  for (int i = 0; i < pieces; ++i) {
    joined_largest = fmaxf(joined_largest, partials[i].largest);
  }
  float joined_sum = 0.0F;
  float joined = 0.0F;
  for (int i = 0; i < pieces; ++i) {
    const float weight = common::exp2_fast(partials[i].largest - joined_largest);
    joined_sum += weight * partials[i].sum;
    joined += weight * partials[i].output[thread];
  }
  call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
}

// kResident places on every multiprocessor, divided by sequences and heads, rounded down; at most one piece for each 8
// blocks of the longest context, rounded up: each piece adds to the merge. The lengths are known on the device.
int num_splits(const BatchArrays& batch, int num_heads) {
  constexpr int kMinBlocks = 8;
  const int slots = kResident * common::device_limits().num_multiprocessors;
  const int most = (batch.max_blocks_per_sequence + kMinBlocks - 1) / kMinBlocks;
  return std::clamp(slots / std::max(1, batch.num_sequences * num_heads), 1, most);
}

std::size_t workspace_bytes(const PageShape& shape, const BatchArrays& batch) {
  check_ladder(shape, batch);
  return sizeof(Partial) * static_cast<std::size_t>(batch.num_sequences) * static_cast<std::size_t>(batch.num_heads) *
         static_cast<std::size_t>(num_splits(batch, shape.num_kv_heads));
}

void decode(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (call.num_sequences == 0) {
    return;
  }
  auto* partials = static_cast<Partial*>(workspace);
  const int splits = num_splits(batch, call.num_kv_heads);
  common::launch(attend, grid_of(call.num_kv_heads, call.num_sequences, splits), kThreads, 0, stream,
                 common::Overlap::kNone, call, splits, partials);
  if (splits > 1) {
    common::launch(merge, grid_of(call.num_heads, call.num_sequences), kThreads, 0, stream, common::Overlap::kNone,
                   call, splits, partials);
  }
}

}  // namespace

const LadderStep kTensorCores = {"6 tensor cores", workspace_bytes, nullptr, decode};

}  // namespace
