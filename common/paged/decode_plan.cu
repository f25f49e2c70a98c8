// Cuts the work of a decode step into equal shares, once for each step, on the device: the lengths never travel to the
// host, and a captured graph stays valid while they grow.
#include "common/paged/decode_plan.h"

#include "common/cuda/runtime/launch.h"
#include "common/paged/attention_launches.h"
#include "common/paged/checks.h"
#include "common/paged/decode_shape.h"
#include "common/paged/supported_shapes.h"

namespace common {
namespace {

constexpr int kThreads = 1024;

// tiles_before[s] = the tiles of all sequences before s, all kv heads counted.
__device__ void sum_tiles(std::int64_t* tiles_before, const BatchArrays& batch, int num_kv_heads) {
  __shared__ std::int64_t sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int per_thread = (batch.num_sequences + kThreads - 1) / kThreads;
  const int begin = min(thread * per_thread, batch.num_sequences);
  const int end = min(begin + per_thread, batch.num_sequences);
  std::int64_t own = 0;
  for (int s = begin; s < end; ++s) {
    own += std::int64_t{num_tiles_read_of(batch, batch.context_lengths[s])} * num_kv_heads;
  }
  sums[thread] = own;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    const std::int64_t before = thread >= distance ? sums[thread - distance] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  std::int64_t before = sums[thread] - own;
  for (int s = begin; s < end; ++s) {
    tiles_before[s] = before;
    before += std::int64_t{num_tiles_read_of(batch, batch.context_lengths[s])} * num_kv_heads;
  }
  if (thread == 0) {
    tiles_before[batch.num_sequences] = sums[kThreads - 1];
  }
  __syncthreads();
}

// Where in the line of all tiles a share begins, and which share has a given tile.
struct Cuts {
  std::int64_t num_tiles;
  int num_shares;

  __device__ std::int64_t begin(int share) const { return num_tiles * share / num_shares; }
  // The largest c with begin(c) <= tile.
  __device__ int owner(std::int64_t tile) const { return static_cast<int>(((tile + 1) * num_shares - 1) / num_tiles); }
};

struct Position {
  int sequence;
  int kv_head;
  int tile;                 // of those that are read
  std::int64_t head_begin;  // a place in the line of all tiles
  std::int64_t head_end;
};

__device__ Position find(std::int64_t tile, const std::int64_t* tiles_before, int num_sequences, int num_kv_heads) {
  int low = 0;  // the last sequence with tiles_before[sequence] <= tile: it is not empty
  int high = num_sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tiles_before[middle] <= tile ? low : high) = middle;
  }
  const std::int64_t per_head = (tiles_before[low + 1] - tiles_before[low]) / num_kv_heads;
  const auto head = static_cast<int>((tile - tiles_before[low]) / per_head);
  const std::int64_t head_begin = tiles_before[low] + head * per_head;
  return {low, head, static_cast<int>(tile - head_begin), head_begin, head_begin + per_head};
}

// Where shares end. Sequences of nearly the same length need no share that spans two heads, and a share that ends where
// its head ends stores only one partial result, or none: a second result costs about as much as ten tiles.
enum class Cut {
  kWithinHeads,   // each head is cut into `count` shares: few heads, of about the same length
  kBetweenHeads,  // each share has `count` whole heads: more heads than thread blocks
  kBetweenWarps,  // the same, and each warp has some of them: more heads than warps
  kAnywhere       // the line is cut into equal parts: heads of different lengths
};

struct Cutting {
  Cut cut;
  int num_shares;
  int count;
};

// One thread block merges a head: at most 256 rows, because reading more takes longer than more shares save.
__device__ int max_shares_of_head(const DecodeShape& shape) { return 256 / shape.group; }

// Equal parts of the line: one for each thread block, unless the parts would become too short, or too many for the
// merge.
__device__ Cutting cut_line(std::int64_t total, int num_heads, const DecodeShape& shape) {
  std::int64_t shares = (total + shape.min_tiles - 1) / shape.min_tiles;
  shares = min(shares, std::int64_t{max_shares_of_head(shape)} * num_heads);
  shares = min(shares, std::int64_t{shape.num_workers});
  return {Cut::kAnywhere, static_cast<int>(shares), 0};
}

// Each head is cut into one share for each of its thread blocks: for no more heads than thread blocks.
__device__ Cutting cut_within_heads(int longest, int num_heads, const DecodeShape& shape) {
  const int parts = min(min(shape.num_workers / num_heads, max_shares_of_head(shape)),
                        (longest + shape.min_tiles - 1) / shape.min_tiles);
  return {Cut::kWithinHeads, num_heads * parts, parts};
}

// Each share has several whole heads, the fewest that leave no head over: for more heads than thread blocks.
__device__ Cutting cut_between_heads(int num_heads, const DecodeShape& shape) {
  const int heads = (num_heads + shape.num_workers - 1) / shape.num_workers;
  return {Cut::kBetweenHeads, (num_heads + heads - 1) / heads, heads};
}

// Each warp has several whole heads, the fewest that leave no head over. shape.min_tiles: a thread block's warps.
__device__ Cutting cut_between_warps(int num_heads, const DecodeShape& shape) {
  const int num_warps = shape.num_workers * shape.min_tiles;
  const int heads = (num_heads + num_warps - 1) / num_warps * shape.min_tiles;
  return {Cut::kBetweenWarps, (num_heads + heads - 1) / heads, heads};
}

// The number of tiles of the longest share: the launch takes as long as that share.
__device__ std::int64_t longest_share(const Cutting& cutting, std::int64_t total, int longest) {
  switch (cutting.cut) {
    case Cut::kWithinHeads:
      return (longest + cutting.count - 1) / cutting.count;
    case Cut::kBetweenHeads:
      return std::int64_t{longest} * cutting.count;
    default:
      return (total + cutting.num_shares - 1) / cutting.num_shares;
  }
}

// Shares that end with their heads, if the longest of them is then at most four tiles for each warp longer than equal
// parts of the line would be (measured: more loses 1 to 2 % where contexts are long).
__device__ Cutting choose_cutting(std::int64_t total, int longest, int num_heads, const DecodeShape& shape) {
  if (total == 0) {
    return {Cut::kAnywhere, 0, 0};
  }
  // If no warp then has more than an eighth above the average: that is less than a merge of a head for each warp costs.
  const Cutting warps = cut_between_warps(num_heads, shape);
  const std::int64_t longest_of_warp = std::int64_t{longest} * (warps.count / shape.min_tiles);
  if (shape.heads_for_warps && 8 * longest_of_warp * shape.num_workers * shape.min_tiles <= 9 * total) {
    return warps;
  }
  const Cutting line = cut_line(total, num_heads, shape);
  const Cutting heads = num_heads <= shape.num_workers ? cut_within_heads(longest, num_heads, shape)
                                                       : cut_between_heads(num_heads, shape);
  const std::int64_t allowed = longest_share(line, total, longest) + 4 * shape.min_tiles;
  return longest_share(heads, total, longest) <= allowed ? heads : line;
}

// Share c if each head is cut into shares_per_head shares, or into its single tiles if these are fewer.
__device__ TileRange part_of_head(int c, int shares_per_head, const BatchArrays& batch, int num_kv_heads) {
  const int head = c / shares_per_head;
  const int part = c - head * shares_per_head;
  const int length = batch.context_lengths[head / num_kv_heads];
  const std::int64_t num_tiles = num_tiles_read_of(batch, length);
  const auto num_parts = static_cast<int>(num_tiles < shares_per_head ? num_tiles : shares_per_head);
  if (part >= num_parts) {
    return {};
  }
  const auto begin = static_cast<int>(num_tiles * part / num_parts);
  const auto end = static_cast<int>(num_tiles * (part + 1) / num_parts);
  const int first = head * shares_per_head;
  return {.sequence = head / num_kv_heads,
          .kv_head = head % num_kv_heads,
          .tile = first_tile_of(batch, length) + begin,
          .num_tiles = end - begin,
          .first_contributor = first,
          .last_contributor = first + num_parts - 1,
          .last_contributor_of_last_head = first + num_parts - 1,
          .context_length = length,
          .table_start = 0,
          .heads_of_warps = 0};
}

// The share c if each share has heads_per_share whole heads, inactive ones counted.
__device__ TileRange whole_heads(int c, int heads_per_share, const std::int64_t* tiles_before, const BatchArrays& batch,
                                 int num_kv_heads) {
  const auto line_begin = [&](int head) {
    const int s = head / num_kv_heads;
    if (s >= batch.num_sequences) {
      return tiles_before[batch.num_sequences];
    }
    return tiles_before[s] + std::int64_t{head % num_kv_heads} * num_tiles_read_of(batch, batch.context_lengths[s]);
  };
  const std::int64_t begin = line_begin(c * heads_per_share);
  const std::int64_t end = line_begin((c + 1) * heads_per_share);
  if (begin == end) {
    return {};
  }
  const Position first = find(begin, tiles_before, batch.num_sequences, num_kv_heads);
  const int length = batch.context_lengths[first.sequence];
  return {.sequence = first.sequence,
          .kv_head = first.kv_head,
          .tile = first_tile_of(batch, length),
          .num_tiles = static_cast<int>(end - begin),
          .first_contributor = c,
          .last_contributor = c,
          .last_contributor_of_last_head = c,
          .context_length = length,
          .table_start = 0,
          .heads_of_warps = 0};
}

// The share c of a line that is cut without regard to the ends of heads.
__device__ TileRange part_of_line(int c, const Cuts& cuts, const std::int64_t* tiles_before, const BatchArrays& batch,
                                  int num_kv_heads) {
  const std::int64_t begin = cuts.begin(c);
  const std::int64_t end = cuts.begin(c + 1);
  const Position first = find(begin, tiles_before, batch.num_sequences, num_kv_heads);
  const Position last = find(end - 1, tiles_before, batch.num_sequences, num_kv_heads);
  const int length = batch.context_lengths[first.sequence];
  return {.sequence = first.sequence,
          .kv_head = first.kv_head,
          .tile = first_tile_of(batch, length) + first.tile,
          .num_tiles = static_cast<int>(end - begin),
          .first_contributor = cuts.owner(first.head_begin),
          .last_contributor = cuts.owner(first.head_end - 1),
          .last_contributor_of_last_head = cuts.owner(last.head_end - 1),
          .context_length = length,
          .table_start = 0,
          .heads_of_warps = 0};
}

// The most tiles that are read of a context; all threads get it.
__device__ int longest_context(const BatchArrays& batch) {
  __shared__ int longest;
  if (threadIdx.x == 0) {
    longest = 0;
  }
  __syncthreads();
  for (int s = static_cast<int>(threadIdx.x); s < batch.num_sequences; s += kThreads) {
    atomicMax(&longest, num_tiles_read_of(batch, batch.context_lengths[s]));
  }
  __syncthreads();
  return longest;
}

__global__ void __launch_bounds__(kThreads)
    plan(DecodeWorkspace workspace, BatchArrays batch, int num_kv_heads, DecodeShape shape) {
  const std::int64_t* tiles_before = workspace.tiles_before;
  sum_tiles(workspace.tiles_before, batch, num_kv_heads);
  const int longest = longest_context(batch);
  const int num_heads = batch.num_sequences * num_kv_heads;
  const std::int64_t total = tiles_before[batch.num_sequences];
  const Cutting cutting = choose_cutting(total, longest, num_heads, shape);
  for (int c = static_cast<int>(threadIdx.x); c < shape.num_workers; c += kThreads) {
    workspace.arrivals[c] = 0;
    TileRange share{};
    if (c >= cutting.num_shares) {
      // Nothing to do.
    } else if (cutting.cut == Cut::kWithinHeads) {
      share = part_of_head(c, cutting.count, batch, num_kv_heads);
    } else if (cutting.cut != Cut::kAnywhere) {
      share = whole_heads(c, cutting.count, tiles_before, batch, num_kv_heads);
      if (cutting.cut == Cut::kBetweenWarps && share.num_tiles > 0) {
        // Heads are counted from the share's first, which may have no tiles.
        const int first = c * cutting.count;
        share.sequence = first / num_kv_heads;
        share.kv_head = first % num_kv_heads;
        share.context_length = batch.context_lengths[share.sequence];
        share.heads_of_warps = min(cutting.count, num_heads - first);
      }
    } else {
      share = part_of_line(c, {total, cutting.num_shares}, tiles_before, batch, num_kv_heads);
    }
    share.table_start = share.num_tiles > 0 ? batch.table_starts[share.sequence] : 0;
    workspace.shares[c] = share;
  }
}

}  // namespace

std::size_t decode_workspace_bytes(const PageShape& shape, const BatchArrays& batch, const DecodeOptions& options) {
  check_batch(kProductionShapes, shape, batch);
  const DecodeShape decode = decode_shape(shape, batch, options);
  return decode_workspace(nullptr, decode.num_workers, decode.group, shape.head_dim, batch.num_sequences).bytes;
}

void plan_decode(const PageShape& shape, const BatchArrays& batch, void* workspace, cudaStream_t stream,
                 const DecodeOptions& options) {
  check_batch(kProductionShapes, shape, batch);
  if (batch.num_sequences == 0) {
    return;
  }
  COMMON_CHECK(workspace != nullptr && is_aligned(workspace), "a workspace is given");
  const DecodeShape decode = decode_shape(shape, batch, options);
  common::launch(plan, dim3(1), kThreads, 0, stream, common::Overlap::kNone,
                 decode_workspace(workspace, decode.num_workers, decode.group, shape.head_dim, batch.num_sequences),
                 batch, shape.num_kv_heads, decode);
}

}  // namespace common
