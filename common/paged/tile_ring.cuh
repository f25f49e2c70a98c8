// A warp's own ring of tiles in shared memory: while the warp computes on one tile, the next ones are in flight.
//
// Every warp fills and empties its ring alone, so warps of a thread block never wait for each other while they stream.
// On Hopper one thread starts the copy of a whole tile, two bulk copies (K, V), and a barrier in shared memory counts
// the bytes; on older chips the warp's threads copy 16 bytes each. Both keep num_stages tiles in flight.
#pragma once

#include "common/cuda/ptx.cuh"
#include "common/paged/decode_plan.h"
#include "common/paged/element.h"
#include "common/paged/page_layout.h"

namespace common {

// A position in the line of all tiles (decode_plan.h).
struct TileCursor {
  const BatchArrays batch;
  const int num_kv_heads;
  int sequence;
  int kv_head;
  int tile;
  int length;       // the sequence's
  int table_start;  // the sequence's

  __device__ __forceinline__ TileCursor(const BatchArrays& sequences, int num_heads, const TileRange& share)
      : batch(sequences),
        num_kv_heads(num_heads),
        sequence(share.sequence),
        kv_head(share.kv_head),
        tile(share.tile),
        length(share.context_length),
        table_start(share.table_start) {}

  // At least `count` tiles must be left.
  __device__ __forceinline__ void advance(int count) {
    tile += count;
    while (tile >= num_tiles_of(length)) {
      tile -= num_tiles_of(length);
      if (++kv_head == num_kv_heads) {
        kv_head = 0;
        do {
          length = batch.context_lengths[++sequence];
        } while (length == 0);
        table_start = batch.table_starts[sequence];
      }
      tile += first_tile_of(batch, length);
    }
  }

  // To the beginning of the head that is `count` heads further; if it has no tiles, to the next in steps of `step` that
  // has some. There must be one.
  __device__ __forceinline__ void skip_heads(int count, int step) {
    do {
      const int head = kv_head + count;
      sequence += head / num_kv_heads;
      kv_head = head % num_kv_heads;
      length = batch.context_lengths[sequence];
      count = step;
    } while (length == 0);
    tile = first_tile_of(batch, length);
    table_start = batch.table_starts[sequence];
  }

  __device__ __forceinline__ int num_tokens() const { return min(kTileTokens, length - tile * kTileTokens); }
  // How many of the tile's first tokens lie in front of the window.
  __device__ __forceinline__ int num_hidden() const { return max(0, batch.num_hidden(length) - tile * kTileTokens); }
};

// The tiles of a share that one of num_warps warps computes.
__device__ __forceinline__ int tiles_of_warp(const BatchArrays& batch, int num_kv_heads, const TileRange& share,
                                             int warp, int num_warps) {
  if (share.heads_of_warps == 0) {
    return (share.num_tiles - warp + num_warps - 1) / num_warps;
  }
  int tiles = 0;
  for (int head = warp; head < share.heads_of_warps; head += num_warps) {
    const int sequence = share.sequence + (share.kv_head + head) / num_kv_heads;
    tiles += num_tiles_read_of(batch, batch.context_lengths[sequence]);
  }
  return tiles;
}

// The tiles of a thread block that one warp computes: every num_warps-th, beginning with the warp's number; or all of
// the warp's own heads.
// kContiguous, for measuring what paging costs: no table is read; a sequence's one block has the sequence's number.
template <ScalarType kType, int kHeadDim, int kStages, int kWarps, bool kContiguous = false>
class TileRing {
 public:
  using Tile = SharedTile<kHeadDim, kType>;
  static constexpr int kMatrixBytes = Tile::kBytes;  // K or V of a tile
  static constexpr int kPlaceBytes = pair_place_bytes(kType, kHeadDim);
  static constexpr int kBytes = kStages * kPlaceBytes;  // one warp's ring
  static constexpr int kBarrierBytes = kStages * static_cast<int>(sizeof(std::uint64_t));

  // storage: kBytes of this warp's own, barriers: kBarrierBytes. Reads the tables, but no K and V yet.
  __device__ __forceinline__ TileRing(const Pages& pages, const BatchArrays& batch, const TileRange& share,
                                      void* storage, void* barriers)
      : pages_(pages),
        block_tables_(batch.block_tables),
        next_(batch, pages.shape.num_kv_heads, share),
        has_whole_heads_(share.heads_of_warps > 0),
        storage_(common::shared_address(storage)),
        barriers_(common::shared_address(barriers)),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    num_left_ = tiles_of_warp(batch, pages.shape.num_kv_heads, share, warp, kWarps);
    if (num_left_ > 0) {
      has_whole_heads_ ? next_.skip_heads(warp, kWarps) : next_.advance(warp);
      look_up();
    }
#if COURSE_BULK_COPY
    if (lane_ < kStages) {
      common::init_barrier(barriers_ + lane_ * static_cast<int>(sizeof(std::uint64_t)), 1);
    }
    common::fence_barrier_init();
    __syncwarp();
#endif
  }

  // Starts the copies of the first tiles.
  __device__ __forceinline__ void start() {
    for (int i = 0; i < kStages; ++i) {
      start_copy(i);
    }
  }

  // Waits for the next tile. Its K begins at keys() and its V at values(), laid out as in the pages (SharedTile); rows
  // that do not exist hold anything.
  //
  // compute-sanitizer's racecheck (CUDA 13.0) warns of the reads that follow: "invalid async operation
  // synchronization", between lane 0's copy and lane 0's own reads, although the barrier that lane 0 has waited on
  // counts that copy's bytes. It does not see a copy's completion unless a __syncthreads follows, as in ragged
  // attention, where it reports nothing (FlashAttention found the same between warps: AI/RACECHECK_TMA_HAZARD.md of
  // its repository). So for this ring racecheck cannot tell right from wrong, and the tests must: they repeat calls
  // without a pause and compare bits. synccheck needs the number of barriers: --num-cuda-barriers 256.
  __device__ __forceinline__ void wait() {
#if COURSE_BULK_COPY
    common::wait_barrier(barriers_ + stage_ * static_cast<int>(sizeof(std::uint64_t)), parity_);
#else
    common::wait_copies<kStages - 1>();
    __syncwarp();
#endif
  }

  __device__ __forceinline__ std::uint32_t keys() const { return storage_ + stage_ * kPlaceBytes; }
  __device__ __forceinline__ std::uint32_t values() const { return keys() + Tile::kPair.values; }

  // Releases the tile: the next tile not yet copied gets its place. All lanes have read it with ordinary loads, and the
  // copy engine writes there next: the manual requires a fence between the two, in both directions (PTX ISA 9.0,
  // section 9.7.9.25.2, "Async Proxy"), and __syncwarp orders every lane's fence before lane 0's copy.
  __device__ __forceinline__ void release() {
#if COURSE_BULK_COPY
    common::fence_copy_engine();
#endif
    __syncwarp();
    start_copy(stage_);
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // Sets all rows of V to 0 but those from first_token to num_tokens: they were never written, or are another
  // sequence's, and 0 times a NaN would be a NaN.
  __device__ __forceinline__ void clear_other_values(int first_token, int num_tokens) const {
    const int num_kept = num_tokens - first_token;
    for (int i = lane_; i < (kTileTokens - num_kept) * Tile::kVecs; i += 32) {
      const int row = i / Tile::kVecs + (i < first_token * Tile::kVecs ? 0 : num_kept);
      common::store_zeros(values() + vec_place(Tile::kVecs, kTileTokens, row, i % Tile::kVecs) * kVecBytes);
    }
#if COURSE_BULK_COPY
    common::fence_copy_engine();  // the next copy into this place must come after these stores
#endif
    __syncwarp();
  }

 private:
  // The tile's block, or its two blocks if blocks are shorter than a tile: loaded one tile ahead of the copy. Of two
  // blocks, the first may lie in front of the window: then the second one's tokens are copied in place of its tokens,
  // which are hidden.
  __device__ __forceinline__ void look_up() {
    if constexpr (kContiguous) {
      blocks_[0] = next_.sequence;
      return;
    }
    const int* table = block_tables_ + next_.table_start;
    const int first = next_.tile * kTileTokens / pages_.shape.block_size;
    if (pages_.shape.block_size >= kTileTokens) {
      blocks_[0] = table[first];
    } else {
      blocks_[0] = table[first + (next_.num_hidden() < pages_.shape.block_size ? 0 : 1)];
      blocks_[1] = next_.num_tokens() > pages_.shape.block_size ? table[first + 1] : 0;
    }
  }

  __device__ __forceinline__ void start_copy(int stage) {
    if (num_left_ > 0) {
      const int block_size = kContiguous ? kTileTokens : pages_.shape.block_size;
      const std::uint32_t target = storage_ + stage * kPlaceBytes;
#if COURSE_BULK_COPY
      const std::uint32_t barrier = barriers_ + stage * static_cast<int>(sizeof(std::uint64_t));
#else
      const std::uint32_t barrier = 0;
#endif
      copy_tile(target, block_size, barrier);
      if (--num_left_ > 0) {
        if (!has_whole_heads_) {
          next_.advance(kWarps);
        } else if (++next_.tile == num_tiles_of(next_.length)) {
          next_.skip_heads(kWarps, kWarps);
        }
        look_up();
      }
    }
#if !COURSE_BULK_COPY
    common::commit_copies();  // even an empty group: wait() counts groups
#endif
  }

  // Copies K and V of the tile. Each is one stretch of memory. In blocks of 8, panels have half the height and lie in
  // one block or two: a lane then copies such a panel into the upper or the lower half of a panel of the tile.
  __device__ __forceinline__ void copy_tile(std::uint32_t target, int block_size, std::uint32_t barrier) {
    const int num_tokens = next_.num_tokens();
    const int row = kContiguous ? next_.tile * kTileTokens : next_.tile * kTileTokens % block_size;
    if constexpr (kType == ScalarType::kFloat8) {
      return copy_pair(target, row, barrier);
    }
#if COURSE_BULK_COPY
    const bool halves = block_size < kTileTokens;
    const int num_blocks = halves && num_tokens > block_size ? 2 : 1;
    const int bytes = halves ? Tile::kPanelBytes / 2 : kMatrixBytes;
    const int part = halves ? lane_ / Tile::kPanels : 0;
    const int panel = halves ? lane_ % Tile::kPanels : 0;
    if (lane_ == 0) {
      common::arrive_expecting(barrier, (halves ? num_blocks : 2) * kMatrixBytes);
    }
    __syncwarp();
    if (lane_ < (halves ? num_blocks * Tile::kPanels : 1)) {
      const std::int64_t offset = row_offset(pages_.shape, part == 0 ? blocks_[0] : blocks_[1], next_.kv_head, row) +
                                  Tile::panel_offset(panel, kTileTokens / 2);
      const std::uint32_t place = target + panel * Tile::kPanelBytes + part * bytes;
      const common::CachePolicy policy = common::streaming_policy();
      common::copy_bulk_once(place, static_cast<const Element*>(pages_.keys) + offset, bytes, barrier, policy);
      common::copy_bulk_once(place + Tile::kPair.values, static_cast<const Element*>(pages_.values) + offset, bytes,
                             barrier, policy);
    }
#else
    constexpr int kVecElements = kVecBytes / static_cast<int>(sizeof(Element));
    for (int i = lane_; i < num_tokens * Tile::kVecs; i += 32) {
      const int token = i / Tile::kVecs;
      const int vec = i % Tile::kVecs;
      const std::int64_t offset =
          row_offset(pages_.shape, token < block_size ? blocks_[0] : blocks_[1], next_.kv_head, row) +
          vec_place(Tile::kVecs, min(block_size, kTileRows), token % block_size, vec) * kVecElements;
      const std::uint32_t place = target + vec_place(Tile::kVecs, kTileRows, token, vec) * kVecBytes;
      common::copy_vec_async(place, static_cast<const Element*>(pages_.keys) + offset);
      common::copy_vec_async(place + Tile::kPair.values, static_cast<const Element*>(pages_.values) + offset);
    }
#endif
  }

  // Float8: copies K, V and their scales as the page has them.
  __device__ __forceinline__ void copy_pair(std::uint32_t target, int row, std::uint32_t barrier) {
    const auto* pair =
        static_cast<const std::uint8_t*>(pages_.keys) + row_offset(pages_.shape, blocks_[0], next_.kv_head, row);
#if COURSE_BULK_COPY
    if (lane_ == 0) {
      common::arrive_expecting(barrier, Tile::kPair.bytes);
      common::copy_bulk_once(target, pair, Tile::kPair.bytes, barrier, common::streaming_policy());
    }
#else
    for (int i = lane_ * kVecBytes; i < Tile::kPair.bytes; i += 32 * kVecBytes) {
      common::copy_vec_async(target + i, pair + i);
    }
#endif
  }

  const Pages pages_;
  const int* const block_tables_;
  TileCursor next_;  // the next tile to copy
  const bool has_whole_heads_;
  int num_left_;  // this warp's tiles that are not copied yet
  int blocks_[2] = {0, 0};
  const std::uint32_t storage_;
  const std::uint32_t barriers_;
  const int lane_;
  int stage_ = 0;  // where the tile in use lies
  int parity_ = 0;
};

}  // namespace common
