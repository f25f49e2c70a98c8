// Prompts, step 3: wgmma. Four warps, a warpgroup, multiply 64 rows at once, and the tensor cores fetch Q, K and V out
// of shared memory by themselves (common/cuda/ptx.cuh).
//
// So a warp's registers hold output and scores and nothing else, and its instructions are the softmax. wgmma knows no
// rows longer than 128 bytes: a matrix with 128 dimensions lies in two panels of 64, with step 2's swizzle inside of a
// panel. That is the order of swizzled_pages.h, and why it has panels: one bulk copy brings 16 rows of a panel, 2
// KB, to where wgmma reads them. Of V, wgmma sums over the rows, so nothing is transposed beforehand.
//
// The warpgroup waits for each product at once: scores, softmax, then V, tile by tile. Two thread blocks share a
// multiprocessor, so that one multiplies while the other computes its softmax.
//
// flops and bytes: as step 2.
//
// Why it is faster: no instruction fetches an operand. Where it is still slow: the tensor cores idle whenever both
// thread blocks compute a softmax; one thread starts copies only between tiles; and a tile on the diagonal is computed
// whole, though half of it is masked.
#include "prompt_call.cuh"
#include "swizzled_pages.h"

namespace stage7 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 64;  // queries of a thread block: what a warpgroup multiplies at once
constexpr int kTileTokens = 64;
constexpr int kStages = 2;  // a tile to compute on, a tile in flight

// In shared memory, queries, keys and values lie in two panels, of 64 dimensions each: a row of a panel is 128 bytes.
constexpr int kPanelRowBytes = 128;
constexpr int kPanelBytes = kTileTokens * kPanelRowBytes;
constexpr int kTileBytes = 2 * kPanelBytes;
constexpr int kSharedBytes = (1 + 2 * kStages) * kTileBytes;  // queries, K and V of each stage
static_assert(kRows == kTileTokens);

#if COURSE_WGMMA
static_assert(kThreads == common::kWarpgroupThreads && kRows == common::kWarpgroupRows &&
              kPanelRowBytes == common::kPanelRowBytes);

using Vec = common::Vec16<Element>;
constexpr int kVecElements = Vec::kElements;
constexpr int kVecsPerRow = kDimensions / kVecElements;
constexpr int kPagePanelBytes = kBlockTokens * kPanelRowBytes;  // a page's rows have the same two panels
constexpr int kSteps = kDimensions / 16;                        // a product sums over 16 dimensions, or over 16 tokens

// Begins to copy K and V of the tile's blocks, as far as there are any: four panels for each, by one thread.
__device__ void copy_tile(const PromptCall& call, const int* table, int kv_head, int begin, int seen,
                          std::uint32_t keys, std::uint32_t barrier) {
  const int first = begin / kBlockTokens;
  const int num_blocks = min(kTileTokens / kBlockTokens, (seen - begin + kBlockTokens - 1) / kBlockTokens);
  common::arrive_expecting(barrier, num_blocks * 4 * kPagePanelBytes);
  for (int i = 0; i < num_blocks; ++i) {
    const std::int64_t block = table[first + i];
    const std::int64_t offset = (block * call.num_kv_heads + kv_head) * kBlockTokens * kDimensions;
    for (int panel = 0; panel < 2; ++panel) {
      const int place = panel * kPanelBytes + i * kPagePanelBytes;
      const std::int64_t from = offset + panel * kPagePanelBytes / static_cast<int>(sizeof(Element));
      common::copy_bulk(keys + place, call.keys + from, kPagePanelBytes, barrier);
      common::copy_bulk(keys + kTileBytes + place, call.values + from, kPagePanelBytes, barrier);
    }
  }
}

// Where a vector of a row lies in two panels: swizzled, as in the pages.
__device__ std::uint32_t vec_address(std::uint32_t tile, int row, int vec) {
  return tile +
         static_cast<std::uint32_t>(vec / 8 * kPanelBytes + row * kPanelRowBytes + (vec % 8 ^ row % 8) * kVecBytes);
}

__global__ void __launch_bounds__(kThreads) attend(PromptCall call) {
  COURSE_DYNAMIC_SHARED(1024, shared);
  __shared__ std::uint64_t barriers[kStages];
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
  const std::uint32_t queries = common::shared_address(shared);
  const std::uint32_t tiles = queries + kTileBytes;
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      common::init_barrier(common::shared_address(&barriers[stage]), 1);
    }
    common::fence_barrier_init();
    for (int stage = 0; stage < kStages && stage * kTileTokens < seen; ++stage) {
      copy_tile(call, table, kv_head, stage * kTileTokens, seen, tiles + stage * 2 * kTileBytes,
                common::shared_address(&barriers[stage]));
    }
  }
  for (int i = thread; i < kRows * kVecsPerRow; i += kThreads) {
    const int own_row = min(i / kVecsPerRow, rows.count - 1);  // past the end: the last row again
    const std::int64_t row = std::int64_t{rows.first + own_row} * call.num_heads + head;
    const Element* from = call.queries + row * kDimensions + i % kVecsPerRow * kVecElements;
    common::store_vec(vec_address(queries, i / kVecsPerRow, i % kVecsPerRow), *reinterpret_cast<const uint4*>(from));
  }
  common::fence_copy_engine();  // wgmma reads shared memory as the copy engine does
  __syncthreads();

  // A lane has two of the warp's rows, t / 4 and 8 further.
  const int own[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};
  float largest[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};                   // of the lane's own columns
  float output[kDimensions / 2] = {};  // four for every 8 dimensions: 2 (t % 4) and the next of the two rows
  for (int begin = 0; begin < seen; begin += kTileTokens) {
    const int tile = begin / kTileTokens;
    const std::uint32_t keys = tiles + tile % kStages * 2 * kTileBytes;
    const std::uint32_t values = keys + kTileBytes;
    const std::uint32_t barrier = common::shared_address(&barriers[tile % kStages]);
    common::wait_barrier(barrier, tile / kStages % 2);
    if (seen - begin < kTileTokens) {  // rows that do not exist: 0 times a NaN would be a NaN
      for (int i = (seen - begin) * kVecsPerRow + thread; i < kTileTokens * kVecsPerRow; i += kThreads) {
        common::store_zeros(vec_address(values, i / kVecsPerRow, i % kVecsPerRow));
      }
      common::fence_copy_engine();
      __syncthreads();
    }

    float scores[kTileTokens / 2];  // four for every 8 tokens, as in the output
    const common::SharedMatrix q(queries, kPanelBytes);
    const common::SharedMatrix k(keys, kPanelBytes);
    common::fence_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int place = step / 4 * kPanelBytes + step % 4 * 32;
      common::multiply_rows<kTileTokens>(scores, q.descriptor(place), k.descriptor(place), step > 0);
    }
    common::commit_products();
    common::wait_products<0>();
    common::fence_registers(scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int visible = rows.position + own[half] + 1 - begin - lane % 4 * 2;
      float new_largest = largest[half];
#pragma unroll
      for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          scores[n * 4 + i] = n * 8 + i % 2 < visible ? scores[n * 4 + i] * call.scale : -INFINITY;
          new_largest = fmaxf(new_largest, scores[n * 4 + i]);
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
          scores[n * 4 + i] = common::exp2_fast(scores[n * 4 + i] - new_largest);
          sum[half] += scores[n * 4 + i];
        }
      }
#pragma unroll
      for (int n = 0; n < kDimensions / 8; ++n) {
        output[n * 4 + half * 2] *= factor;
        output[n * 4 + half * 2 + 1] *= factor;
      }
    }

    std::uint32_t weights[kTileTokens / 16][4];
#pragma unroll
    for (int i = 0; i < kTileTokens / 4; ++i) {
      weights[i / 4][i % 4] = common::pack(scores[2 * i], scores[2 * i + 1]);
    }
    const common::SharedMatrix v(values, kPanelBytes);
    common::fence_products();
#pragma unroll
    for (int step = 0; step < kTileTokens / 16; ++step) {
      common::multiply_registers_by_columns<kDimensions>(output, weights[step],
                                                         v.descriptor(step * 16 * kPanelRowBytes));
    }
    common::commit_products();
    common::wait_products<0>();
    common::fence_registers(output);
    __syncthreads();  // all warps have read the tile
    if (thread == 0 && begin + kStages * kTileTokens < seen) {
      copy_tile(call, table, kv_head, begin + kStages * kTileTokens, seen, keys, barrier);
    }
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
        pairs[n * 4 + lane % 4] =
            common::pack(output[n * 4 + half * 2] / sum[half], output[n * 4 + half * 2 + 1] / sum[half]);
      }
    }
  }
}

#else
__global__ void attend(PromptCall /*call*/) {}  // runs on compute capability 9.0
#endif

void attend_prompts(const Pages& pages, const BatchArrays& batch, const int* query_starts, const void* queries,
                    void* output, int num_tokens, void* /*workspace*/, cudaStream_t stream) {
  const PromptCall call = prompt_call(pages, batch, query_starts, queries, output);
  if (num_tokens > 0) {
    common::launch(attend, prompt_grid(call, num_tokens, kRows), kThreads, kSharedBytes, stream, common::Overlap::kNone,
                   call);
  }
}

}  // namespace

const PromptStep kPromptWgmma = {"3 wgmma", attend_prompts, RowOrder::kSwizzled, true};

}  // namespace
