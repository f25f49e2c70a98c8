// Step 7: copies that nothing waits for, and equal shares.
//
// One lane orders a whole tile from the copy engine (TMA), 4 KB of K or of V with one instruction; a barrier in shared
// memory counts the bytes as they land. So each warp keeps a ring of three tiles: it waits for the oldest, computes,
// and orders the next one into the same place, while two are in flight: 4 warps x 3 tiles x 8 KB = 96 KB for a thread
// block, two of them on a multiprocessor.
//
//     warp 0   tile 0 | tile 4 | tile 8  …
//     warp 1   tile 1 | tile 5 | tile 9  …     warps synchronize where a head ends
//     warp 2   tile 2 | tile 6 | tile 10 …
//     warp 3   tile 3 | tile 7 | tile 11 …
//
// A bulk copy moves bytes as they lie, so it cannot swizzle: the pages have to be swizzled already. From here on the
// ladder reads pages in the order of swizzled_pages.h (16 rows of 128 dimensions are two panels of 128 bytes a row,
// which is for prompts; the swizzle inside of a panel is step 6's).
//
// All tiles of all heads of all sequences stand in one line, and n thread blocks, as many as the device holds at once,
// get the n-th part each. A share may begin in the middle of one head and end in another one, so no thread block waits
// for the longest sequence. A head that was cut is joined by the thread block that finishes its part last, which an
// atomic counter tells: the second launch is gone. The plan, where each sequence's tiles begin in the line, is made
// once for all layers. And a launch may begin while the one before still ends (programmatic dependent launch): its
// first copies are in flight by the time the queries are there.
//
// bytes for 32 x 8,192: 1.07 GB, each once, and at most two partial results of 2 KB (a group of 4) for each thread
// block: 1 MB. flops: 4.3 G.
// measured: 1x8192 16.7 us (44%), 32x8192 272 us (86%), 32xragged 240 us (84%) on an NVIDIA H200, 2026-11-23, at
// 5fcb232
//
// Why it is faster: for ragged batches by the balance, for a single sequence by the merge and the early start. What it
// costs: a search in the plan for each tile, and a merge for nearly every head, because shares end anywhere. A batch of
// equal contexts that fills the device anyway is slower than in step 6.
#include "ladder_call.cuh"
#include "swizzled_pages.h"

namespace stage7 {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
static_assert(kThreads == kDimensions);  // a thread for each dimension of the output

using Vec = common::Vec16<Element>;  // 16 bytes: what a thread moves at once
constexpr int kVecElements = Vec::kElements;
constexpr int kVecsPerRow = kDimensions / kVecElements;  // 16: half a warp moves a row
constexpr int kTileBytes = kBlockTokens * kVecsPerRow * static_cast<int>(sizeof(Vec));
constexpr int kStages = 3;  // tiles that a warp has in flight
constexpr std::size_t kRingBytes = std::size_t{kWarps} * kStages * 2 * kTileBytes;

constexpr int kResident = 2;  // thread blocks on a multiprocessor

// What a thread block has found in its part of a head, for one query.
struct Partial {
  float output[kDimensions];
  float largest;
  float sum;
};

// The workspace. All tiles of all heads of all sequences stand in one line, which is cut into equal shares.
struct Work {
  int* first_tiles;   // [num_sequences + 1]: where a sequence's tiles begin in the line, one kv head after the other
  int* arrivals;      // [num_sequences, num_kv_heads]: shares that have stored their part of the head
  Partial* partials;  // [most_shares, 2, group]: of a head that begins before the share, and of one that begins in it
  int most_shares;
};

// The plan, once for all layers.
__global__ void __launch_bounds__(kThreads)
    plan_shares(const int* context_lengths, int num_sequences, int num_kv_heads, Work work) {
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < num_sequences * num_kv_heads; i += kThreads) {
    work.arrivals[i] = 0;
  }
  if (thread == 0) {
    int tiles = 0;
    for (int sequence = 0; sequence < num_sequences; ++sequence) {
      work.first_tiles[sequence] = tiles;
      tiles += (context_lengths[sequence] + kBlockTokens - 1) / kBlockTokens * num_kv_heads;
    }
    work.first_tiles[num_sequences] = tiles;
  }
}

#if COURSE_BULK_COPY
constexpr int kSteps = kDimensions / 16;  // a product takes 16 dimensions
constexpr int kQueries = 8;               // columns of a product; past the group's end they are padding

// A tile of the line: the head that it belongs to, and its place in it.
struct Place {
  int sequence;
  int kv_head;
  int tile;
  int num_tiles;  // of the head
};

__device__ Place find_tile(const LadderCall& call, const Work& work, int in_line) {
  int sequence = 0;
  for (int end = call.num_sequences; end - sequence > 1;) {  // the last sequence that begins at in_line or before
    const int middle = (sequence + end) / 2;
    (work.first_tiles[middle] <= in_line ? sequence : end) = middle;
  }
  const int first = work.first_tiles[sequence];
  const int num_tiles = (work.first_tiles[sequence + 1] - first) / call.num_kv_heads;
  return {sequence, (in_line - first) / num_tiles, (in_line - first) % num_tiles, num_tiles};
}

// Shares of at least 8 tiles, if there are that many: each part of a head adds to the merge. Never an empty one.
__device__ int num_shares(int total, int most_shares) { return min(most_shares, max(1, total / 8)); }
__device__ int share_begin(int total, int shares, int share) {
  return static_cast<int>(std::int64_t{total} * share / shares);
}
__device__ int share_of(int total, int shares, int in_line) {  // the last share that begins at in_line or before
  return static_cast<int>(((in_line + std::int64_t{1}) * shares - 1) / total);
}

__device__ Partial* partials_of(const Work& work, int share, bool begins_in_it, int group) {
  return work.partials + (2 * share + (begins_in_it ? 1 : 0)) * group;
}

// Where a tile of the line begins in keys and in values. The reads of the search and of the table wait for each other,
// so this is called well before the tile is copied.
__device__ std::int64_t tile_offset(const LadderCall& call, const Work& work, int in_line) {
  const Place place = find_tile(call, work, in_line);
  const std::int64_t block = call.block_tables[call.table_starts[place.sequence] + place.tile];
  return (block * call.num_kv_heads + place.kv_head) * kBlockTokens * kDimensions;
}

// Where a vector of a row lies in a tile in shared memory: as in the pages, which are swizzled.
__device__ std::uint32_t vec_address(std::uint32_t tile, int row, int vec) {
  return tile + static_cast<std::uint32_t>(swizzled_place(kBlockTokens, row, vec) * kVecBytes);
}

// Begins to copy K and V of a tile: two instructions of one lane. The barrier counts the bytes.
__device__ void copy_tile(const LadderCall& call, std::int64_t offset, std::uint32_t to, std::uint32_t barrier) {
  common::arrive_expecting(barrier, 2 * kTileBytes);
  common::copy_bulk(to, call.keys + offset, kTileBytes, barrier);
  common::copy_bulk(to + kTileBytes, call.values + offset, kTileBytes, barrier);
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

__global__ void __launch_bounds__(kThreads, kResident) attend(LadderCall call, Work work) {
  COURSE_DYNAMIC_SHARED(128, rings);  // [kWarps, kStages, 2, kTileBytes]
  __shared__ std::uint64_t barriers[kWarps][kStages];
  common::allow_next_launch();
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const auto share = static_cast<int>(blockIdx.x);
  const int total = work.first_tiles[call.num_sequences];
  const int shares = num_shares(total, work.most_shares);
  if (share >= shares) {
    return;
  }
  const int end = share_begin(total, shares, share + 1);
  const int group = call.num_heads / call.num_kv_heads;
  const std::uint32_t ring = common::shared_address(rings) + warp * kStages * 2 * kTileBytes;

  // The warp's tiles are every fourth one of the share: its n-th is copied to place n % kStages of its ring.
  int next = share_begin(total, shares, share) + warp;
  if (lane < kStages) {  // a lane for each place of the ring, so that their searches run side by side
    const std::uint32_t barrier = common::shared_address(&barriers[warp][lane]);
    common::init_barrier(barrier, 1);
    common::fence_barrier_init();
    if (const int first = next + lane * kWarps; first < end) {
      copy_tile(call, tile_offset(call, work, first), ring + lane * 2 * kTileBytes, barrier);
    }
  }
  __syncwarp();
  common::wait_for_previous_launch();  // which writes the queries, and may still read the workspace

  int n = 0;
  for (int begin = next - warp; begin < end;) {  // a head after the other, as far as it is in the share
    const Place place = find_tile(call, work, begin);
    const int head_begin = begin - place.tile;
    const int head_end = head_begin + place.num_tiles;
    const int length = call.context_lengths[place.sequence];
    const std::int64_t first_row = std::int64_t{place.sequence} * call.num_heads + place.kv_head * group;

    WarpAttention own;
    own.start(call.queries + first_row * kDimensions, group);
    for (; next < min(head_end, end); next += kWarps, ++n) {
      const int num_tokens = min(kBlockTokens, length - (next - head_begin) * kBlockTokens);
      const std::uint32_t keys = ring + n % kStages * 2 * kTileBytes;
      const std::uint32_t values = keys + kTileBytes;
      const std::uint32_t barrier = common::shared_address(&barriers[warp][n % kStages]);
      const int later = next + kStages * kWarps;  // the tile that gets this place of the ring
      const std::int64_t later_offset = later < end ? tile_offset(call, work, later) : 0;
      common::wait_barrier(barrier, n / kStages % 2);
      if (num_tokens < kBlockTokens) {  // rows that do not exist: 0 times a NaN would be a NaN
        for (int i = num_tokens * kVecsPerRow + lane; i < kBlockTokens * kVecsPerRow; i += 32) {
          common::store_zeros(vec_address(values, i / kVecsPerRow, i % kVecsPerRow));
        }
        common::fence_copy_engine();
        __syncwarp();
      }
      std::uint32_t weights[2];
      own.weigh(weights, keys, num_tokens, call.scale);
      own.add(values, weights);
      __syncwarp();  // the warp has read its tile
      if (lane == 0 && later < end) {
        copy_tile(call, later_offset, keys, barrier);
      }
    }

    const bool is_whole = place.tile == 0 && head_end <= end;
    Partial* partials = partials_of(work, share, place.tile == 0, group);
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      if (query == group) {
        break;
      }
      float joined_largest;
      float joined_sum;
      float joined;
      join_warps(own, query, joined_largest, joined_sum, joined);
      const std::int64_t row = first_row + query;
      if (is_whole) {
        call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
        continue;
      }
      Partial& partial = partials[query];
      partial.output[thread] = joined;
      if (thread == 0) {
        partial.largest = joined_largest;
        partial.sum = joined_sum;
      }
    }
    begin = head_end;
    if (is_whole) {
      continue;
    }

    // The thread block that stores the last part of a head joins the parts; the head begins in the first one.
    const int first_share = share_of(total, shares, head_begin);
    const int parts = share_of(total, shares, head_end - 1) - first_share + 1;
    int* arrivals = work.arrivals + place.sequence * call.num_kv_heads + place.kv_head;
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (thread == 0) {
      is_last = atomicAdd(arrivals, 1) == parts - 1;
    }
    __syncthreads();
    if (!is_last) {
      continue;
    }
    __threadfence();
    if (thread == 0) {
      *arrivals = 0;  // for the next layer
    }
    for (int query = warp; query < group; query += kWarps) {  // a warp for each query, so that their reads overlap
      const auto part = [&](int i) -> const Partial& {
        return partials_of(work, first_share + i, i == 0, group)[query];
      };
      float joined_largest = -INFINITY;
      for (int i = lane; i < parts; i += 32) {
        joined_largest = fmaxf(joined_largest, part(i).largest);
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        joined_largest = fmaxf(joined_largest, __shfl_xor_sync(~0U, joined_largest, distance));
      }
      float joined_sum = 0.0F;
      float joined[kDimensions / 32] = {};
      for (int i = 0; i < parts; ++i) {
        const float weight = common::exp2_fast(part(i).largest - joined_largest);
        joined_sum += weight * part(i).sum;
#pragma unroll
        for (int j = 0; j < kDimensions / 32; ++j) {
          joined[j] += weight * part(i).output[lane + 32 * j];
        }
      }
#pragma unroll
      for (int j = 0; j < kDimensions / 32; ++j) {
        call.output[(first_row + query) * kDimensions + lane + 32 * j] =
            common::from_float<Element>(joined[j] / joined_sum);
      }
    }
  }
}

#else
__global__ void attend(LadderCall /*call*/, Work /*work*/) {}  // runs on compute capability 9.0 and newer
#endif

int most_shares() { return kResident * common::device_limits().num_multiprocessors; }

// The workspace: partials, first_tiles, arrivals.
Work work_of(void* workspace, const BatchArrays& batch, int num_kv_heads) {
  auto* partials = static_cast<Partial*>(workspace);
  auto* first_tiles = reinterpret_cast<int*>(partials + 2 * most_shares() * (batch.num_heads / num_kv_heads));
  return {.first_tiles = first_tiles,
          .arrivals = first_tiles + batch.num_sequences + 1,
          .partials = partials,
          .most_shares = most_shares()};
}

std::size_t workspace_bytes(const PageShape& shape, const BatchArrays& batch) {
  check_ladder(shape, batch);
  const int num_partials = 2 * most_shares() * (batch.num_heads / shape.num_kv_heads);
  const int num_ints = batch.num_sequences + 1 + batch.num_sequences * shape.num_kv_heads;
  return static_cast<std::size_t>(num_partials) * sizeof(Partial) + static_cast<std::size_t>(num_ints) * sizeof(int);
}

void plan(const PageShape& shape, const BatchArrays& batch, void* workspace, cudaStream_t stream) {
  check_ladder(shape, batch);
  common::launch(plan_shares, grid_of(1), kThreads, 0, stream, common::Overlap::kNone, batch.context_lengths,
                 batch.num_sequences, shape.num_kv_heads, work_of(workspace, batch, shape.num_kv_heads));
}

void decode(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (call.num_sequences == 0) {
    return;
  }
  const Work work = work_of(workspace, batch, call.num_kv_heads);
  common::launch(attend, grid_of(work.most_shares), kThreads, kRingBytes, stream, common::Overlap::kPrevious, call,
                 work);
}

}  // namespace

const LadderStep kBalanced = {"7 balanced", workspace_bytes, plan, decode, RowOrder::kSwizzled, 90};

}  // namespace
