// How decode attention itself writes the new token: one row of K and one of V for each kv head.
//
// The token's tile is copied into shared memory with the others, before the token's K and V are computed: in its row
// the copy brings what the page had there before. The warp that has the tile then writes the row into the tile and into
// the page. No other thread block reads that row in this launch (a head's last tile is in one share, and a share's tile
// with one warp), so nothing has to wait for the page: the kernel multiplies the row that it got from the model, not
// from the page.
#pragma once

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/paged/attention_launches.h"
#include "common/paged/element.h"
#include "common/paged/float8.cuh"
#include "common/paged/page_layout.h"
#include "common/paged/paged_kernels.h"

namespace common {

// The new row of one warp. 16 lanes have vectors of K and 16 of V; or all 32 lanes have a vector of K and one of V.
template <ScalarType kType, int kHeadDim>
class NewRow {
 public:
  // Starts the loads, unless rows.keys is nullptr.
  __device__ __forceinline__ void load(const NewRows& rows, int sequence, int kv_head) {
    slot_ = rows.slot_mapping[sequence];
    const std::int64_t begin = sequence * rows.row_stride + kv_head * kHeadDim;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (vec() < kVecs) {
        const auto* row = static_cast<const Element*>(is_value(part) ? rows.values : rows.keys) + begin;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          loaded_[part][i].bits = __ldcs(reinterpret_cast<const uint4*>(row) + vec() * kLoads + i);
        }
      }
    }
  }

  // Writes the loaded vectors into row `row` of a tile in shared memory, and into their slot.
  __device__ __forceinline__ void store(const Pages& pages, int kv_head, std::uint32_t tile, int row) const {
    const int block = slot_ / pages.shape.block_size;
    const int row_in_block = slot_ - block * pages.shape.block_size;
    const int tile_rows = rows_per_tile(pages.shape);
    const int row_in_page = row_in_block % tile_rows;
    const std::int64_t page_tile = row_offset(pages.shape, block, kv_head, row_in_block - row_in_page) * kElementBytes;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      std::uint32_t scale = 0;
      const uint4 stored = to_stored(part, scale);
      if (vec() >= kVecs) {
        continue;
      }
      const int matrix = is_value(part) ? Tile::kPair.values : 0;
      common::store_vec(tile + matrix + vec_place(kVecs, kTileRows, row, vec()) * kVecBytes, stored);
      auto* const page = static_cast<std::byte*>(is_value(part) && !kFloat8 ? pages.values : pages.keys) + page_tile +
                         (kFloat8 ? matrix : 0);
      if (slot_ >= 0) {
        *reinterpret_cast<uint4*>(page + vec_place(kVecs, tile_rows, row_in_page, vec()) * kVecBytes) = stored;
      }
      if (kFloat8 && vec() == 0) {
        const int scales = is_value(part) ? Tile::kPair.value_scales : Tile::kPair.key_scales;
        common::store_byte(tile + scales + row, scale);
        if (slot_ >= 0) {
          static_cast<std::uint8_t*>(pages.keys)[page_tile + scales + row_in_page] = static_cast<std::uint8_t>(scale);
        }
      }
    }
    __syncwarp();  // all lanes read the tile
  }

 private:
  static constexpr bool kFloat8 = kType == ScalarType::kFloat8;
  using Tile = SharedTile<kHeadDim, kType>;
  static constexpr int kVecs = Tile::kVecs;
  static constexpr int kElementBytes = kFloat8 ? 1 : 2;
  static constexpr int kLoads = 2 / kElementBytes;      // loads of 8 numbers for one stored vector
  static constexpr int kLanes = kVecs <= 16 ? 16 : 32;  // lanes for K; V has the same number
  static constexpr int kParts = kLanes / 16;

  static __device__ __forceinline__ int vec() { return static_cast<int>(threadIdx.x) % kLanes; }
  static __device__ __forceinline__ bool is_value(int part) {
    return kParts == 2 ? part == 1 : threadIdx.x % 32 >= kLanes;
  }

  // The vector as pages store it; for float8 also the row's scale, which the row's lanes compute together.
  __device__ __forceinline__ uint4 to_stored(int part, std::uint32_t& scale) const {
    if constexpr (kFloat8) {
      std::uint32_t largest = vec() < kVecs ? largest_bits(loaded_[part]) : 0;
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(~0U, largest, distance));
      }
      scale = scale_bits(__uint_as_float(largest));
      return to_float8(loaded_[part], inverse_scale(scale));
    } else {
      return loaded_[part][0].bits;
    }
  }

  int slot_;
  common::Vec16<Element> loaded_[kParts][kLoads];
};

}  // namespace common
