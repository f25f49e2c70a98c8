// Moves K and V with more bytes in flight than a stage's cache_kernels.cu has, and converts to float8 and back. It
// computes nothing, so the measure is bytes read plus bytes written in a second, compared with a plain device-to-device
// copy.
#include <algorithm>

#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"
#include "common/paged/element.h"
#include "common/paged/float8.cuh"
#include "common/paged/page_layout.h"
#include "common/paged/production_kernels.h"
#include "common/paged/supported_shapes.h"

namespace common {
namespace {

constexpr int kThreads = 256;

// Bfloat16 rows as 16-byte vectors.
struct SlotCopy {
  uint4* key_pages;
  uint4* value_pages;
  uint4* key_rows;
  uint4* value_rows;
  const int* slot_mapping;
  std::int64_t row_stride;  // in vectors
  std::int64_t num_vecs;    // of all rows of keys, including tokens that only fill up a group
  int num_tokens;
  int token_shift;  // log2 of a group's tokens
  int panel_shift;  // log2 of the vectors of a panel's row
  PageVecs layout;
};

// A thread moves kUnroll vectors of K and as many of V. All loads are issued before the first store, so that a few
// hundred nanoseconds of latency are paid once and not eight times. Neighbouring threads move neighbouring vectors
// of a panel (page_layout.h), and then the same panel of the next token of a group of 4: in a block those 4 rows are
// neighbours too, so that memory sees 512 bytes in one piece and not 128.
template <bool kToSlots, int kUnroll>
__global__ void __launch_bounds__(kThreads) copy_slots(SlotCopy copy) {
  const auto vecs_per_token = static_cast<unsigned>(copy.layout.num_kv_heads * copy.layout.vecs_per_row);
  // In a decode step this launch stands between two others of a few microseconds: it starts while the previous launch
  // ends, and lets the next one do the same.
  common::wait_for_previous_launch();
  common::allow_next_launch();
  std::int64_t paged[kUnroll];
  std::int64_t flat[kUnroll];
  uint4 key[kUnroll];
  uint4 value[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const std::int64_t index = (std::int64_t{blockIdx.x} * kUnroll + i) * kThreads + threadIdx.x;
    paged[i] = -1;
    if (index < copy.num_vecs) {
      // A batch has less than 2^32 vectors (checked), so that 32-bit division, which is much faster, is enough.
      const unsigned vecs_per_group = vecs_per_token << copy.token_shift;
      const unsigned group = static_cast<unsigned>(index) / vecs_per_group;
      const unsigned in_group = static_cast<unsigned>(index) - group * vecs_per_group;
      const unsigned panel = in_group >> (copy.panel_shift + copy.token_shift);
      const unsigned token = (group << copy.token_shift) + (in_group >> copy.panel_shift) % (1U << copy.token_shift);
      const unsigned rest = (panel << copy.panel_shift) + in_group % (1U << copy.panel_shift);
      const int slot = token < static_cast<unsigned>(copy.num_tokens) ? copy.slot_mapping[token] : -1;
      if (slot >= 0) {
        const int head = static_cast<int>(rest) / copy.layout.vecs_per_row;
        const int vec = static_cast<int>(rest) - head * copy.layout.vecs_per_row;
        const int block = slot / copy.layout.block_size;
        const int row = slot - block * copy.layout.block_size;
        paged[i] = copy.layout.place(block, head, row, vec);
        flat[i] = token * copy.row_stride + rest;
        key[i] = kToSlots ? __ldcs(copy.key_rows + flat[i]) : __ldcs(copy.key_pages + paged[i]);
        value[i] = kToSlots ? __ldcs(copy.value_rows + flat[i]) : __ldcs(copy.value_pages + paged[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (paged[i] >= 0) {
      (kToSlots ? copy.key_pages[paged[i]] : copy.key_rows[flat[i]]) = key[i];
      (kToSlots ? copy.value_pages[paged[i]] : copy.value_rows[flat[i]]) = value[i];
    }
  }
}

// The same for pages of float8. A row, one token's K or V of one head, is rounded when it is stored, and converted back
// to bfloat16 when it is read.
struct Float8Copy {
  std::uint8_t* pages;
  Element* rows[2];  // of keys, of values
  const int* slot_mapping;
  std::int64_t row_stride;  // in elements
  unsigned num_rows;        // of keys
  unsigned lanes;           // threads for a row: 16 elements each; rounded up to a power of 2
  PageShape shape;
};

// Neighbouring threads have neighbouring parts of a row; the threads of one row find its largest element together.
template <bool kToSlots>
__global__ void __launch_bounds__(kThreads) copy_float8_slots(Float8Copy copy) {
  common::wait_for_previous_launch();
  common::allow_next_launch();
  const PageShape& shape = copy.shape;
  const int vecs_per_row = shape.head_dim / kVecBytes;
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  const unsigned row = index / copy.lanes;
  const int vec = static_cast<int>(index & (copy.lanes - 1));
  const unsigned token = row / static_cast<unsigned>(shape.num_kv_heads);
  const int head = static_cast<int>(row - token * static_cast<unsigned>(shape.num_kv_heads));
  const int slot = row < copy.num_rows && vec < vecs_per_row ? copy.slot_mapping[token] : -1;
  const int row_in_block = slot % shape.block_size;
  const int row_in_tile = row_in_block % kTileRows;
  const PairLayout layout = pair_layout(ScalarType::kFloat8, shape.head_dim);
  std::uint8_t* const pair = copy.pages + row_offset(shape, slot / shape.block_size, head, row_in_block - row_in_tile);
  std::uint8_t* const scales[2] = {pair + layout.key_scales + row_in_tile, pair + layout.value_scales + row_in_tile};
  const int place = vec_place(vecs_per_row, kTileRows, row_in_tile, vec) * kVecBytes;
  uint4* const stored[2] = {reinterpret_cast<uint4*>(pair + place),
                            reinterpret_cast<uint4*>(pair + layout.values + place)};
  const std::int64_t flat = token * copy.row_stride + head * shape.head_dim + vec * kVecBytes;
  if constexpr (kToSlots) {
    common::Vec16<Element> vecs[2][2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (slot >= 0) {
        vecs[i / 2][i % 2].bits = __ldcs(reinterpret_cast<const uint4*>(copy.rows[i / 2] + flat) + i % 2);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t largest = largest_bits(vecs[i]);
      for (unsigned distance = copy.lanes / 2; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(~0U, largest, static_cast<int>(distance)));
      }
      const std::uint32_t scale = scale_bits(__uint_as_float(largest));
      if (slot >= 0) {
        *stored[i] = to_float8(vecs[i], inverse_scale(scale));
        if (vec == 0) {
          *scales[i] = static_cast<std::uint8_t>(scale);
        }
      }
    }
  } else if (slot >= 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 vecs[2];
      to_bfloat16(vecs, *stored[i], *scales[i]);
      reinterpret_cast<uint4*>(copy.rows[i] + flat)[0] = vecs[0];
      reinterpret_cast<uint4*>(copy.rows[i] + flat)[1] = vecs[1];
    }
  }
}

template <bool kToSlots>
void launch_copy_float8(const Pages& pages, void* keys, void* values, std::int64_t row_stride, const int* slot_mapping,
                        int num_tokens, cudaStream_t stream) {
  unsigned lanes = 1;
  while (static_cast<int>(lanes) * kVecBytes < pages.shape.head_dim) {
    lanes *= 2;
  }
  const std::int64_t num_rows = std::int64_t{num_tokens} * pages.shape.num_kv_heads;
  COMMON_CHECK(num_rows * lanes < (std::int64_t{1} << 32) - kThreads,
               "a batch has fewer than 2^32 vectors of 16 bytes");
  const Float8Copy copy{.pages = static_cast<std::uint8_t*>(pages.keys),
                        .rows = {static_cast<Element*>(keys), static_cast<Element*>(values)},
                        .slot_mapping = slot_mapping,
                        .row_stride = row_stride,
                        .num_rows = static_cast<unsigned>(num_rows),
                        .lanes = lanes,
                        .shape = pages.shape};
  const auto grid = static_cast<unsigned>((num_rows * lanes + kThreads - 1) / kThreads);
  common::launch(copy_float8_slots<kToSlots>, dim3(grid), kThreads, 0, stream, common::Overlap::kPrevious, copy);
}

template <bool kToSlots>
void launch_copy_slots(const Pages& pages, void* keys, void* values, std::int64_t row_stride, const int* slot_mapping,
                       int num_tokens, cudaStream_t stream) {
  check_pages(kProductionShapes, pages);
  const PageShape& shape = pages.shape;
  COMMON_CHECK(num_tokens >= 0, "a batch has no tokens or some");
  if (num_tokens == 0) {
    return;
  }
  const int vec = kVecBytes / bytes_of(row_type(shape.type));
  check_rows(shape, keys, values, row_stride, slot_mapping);
  if (shape.type == ScalarType::kFloat8) {
    return launch_copy_float8<kToSlots>(pages, keys, values, row_stride, slot_mapping, num_tokens, stream);
  }
  // Whole rows are neighbours anyway, and a single token has none.
  const bool panels = vecs_per_panel(shape.head_dim / vec) < shape.head_dim / vec;
  const int token_shift = panels && num_tokens > 1 ? 2 : 0;
  const int panel_shift = 3;
  SlotCopy copy{.key_pages = static_cast<uint4*>(pages.keys),
                .value_pages = static_cast<uint4*>(pages.values),
                .key_rows = static_cast<uint4*>(keys),
                .value_rows = static_cast<uint4*>(values),
                .slot_mapping = slot_mapping,
                .row_stride = row_stride / vec,
                .num_vecs = ((num_tokens + (std::int64_t{1} << token_shift) - 1) >> token_shift << token_shift) *
                            shape.num_kv_heads * shape.head_dim / vec,
                .num_tokens = num_tokens,
                .token_shift = token_shift,
                .panel_shift = panel_shift,
                .layout = page_vecs(shape)};
  COMMON_CHECK(copy.num_vecs < std::int64_t{1} << 32, "a batch has fewer than 2^32 vectors of 16 bytes");
  // A decode step moves too few vectors to fill the chip with four for each thread.
  const bool large = copy.num_vecs >= std::int64_t{8} * kThreads * common::device_limits().num_multiprocessors;
  const std::int64_t vecs_per_block = (large ? 4 : 1) * kThreads;
  const auto grid = static_cast<unsigned>((copy.num_vecs + vecs_per_block - 1) / vecs_per_block);
  common::launch(large ? copy_slots<kToSlots, 4> : copy_slots<kToSlots, 1>, dim3(grid), kThreads, 0, stream,
                 common::Overlap::kPrevious, copy);
}

// One thread block moves kChunk vectors of one block of K or V in one layer; blockIdx.y counts layers, and in each of
// them keys and values. All of its loads are in flight before the first store. Its limit is the order in which memory
// is touched: the kernel copies 5 % faster when the plan's blocks happen to lie in order. (Tried on an H200: 128 to
// 1024 threads with 2 to 16 vectors each, bulk copies through shared memory by a persistent grid, other orders of pairs
// and layers. None was faster; hints to L2 were worth 1.5 %.)
constexpr int kChunk = 8 * kThreads;

// The list of copies is a parameter of the launch: no allocation, no upload, no wait. Parameters have room for 4 KB.
struct CopyList {
  static constexpr int kMaxCopies = 480;
  PageCopy copies[kMaxCopies];
};

__global__ void __launch_bounds__(kThreads)
    copy_block_chunks(uint4* keys, uint4* values, const __grid_constant__ CopyList list, std::int64_t vecs_per_block,
                      std::int64_t vecs_per_layer, int chunks_per_block, int num_arrays) {
  const PageCopy copy = list.copies[blockIdx.x / chunks_per_block];
  const std::int64_t begin = std::int64_t{blockIdx.x % chunks_per_block} * kChunk + threadIdx.x;
  uint4* layer = (blockIdx.y % num_arrays == 0 ? keys : values) + blockIdx.y / num_arrays * vecs_per_layer;
  const uint4* source = layer + copy.source * vecs_per_block;
  uint4* destination = layer + copy.destination * vecs_per_block;
  uint4 vecs[kChunk / kThreads];
  const common::CachePolicy policy = common::streaming_policy();
#pragma unroll
  for (int i = 0; i < kChunk / kThreads; ++i) {
    if (begin + i * kThreads < vecs_per_block) {
      vecs[i] = common::load_once(source + begin + i * kThreads, policy);
    }
  }
#pragma unroll
  for (int i = 0; i < kChunk / kThreads; ++i) {
    if (begin + i * kThreads < vecs_per_block) {
      common::store_once(destination + begin + i * kThreads, vecs[i], policy);
    }
  }
}

}  // namespace

void ProductionKernels::write_to_slots(const Pages& pages, const void* keys, const void* values,
                                       std::int64_t row_stride, const int* slot_mapping, int num_tokens,
                                       cudaStream_t stream) const {
  launch_copy_slots<true>(pages, const_cast<void*>(keys), const_cast<void*>(values), row_stride, slot_mapping,
                          num_tokens, stream);
}

void ProductionKernels::read_from_slots(const Pages& pages, void* keys, void* values, std::int64_t row_stride,
                                        const int* slot_mapping, int num_tokens, cudaStream_t stream) const {
  launch_copy_slots<false>(pages, keys, values, row_stride, slot_mapping, num_tokens, stream);
}

void ProductionKernels::copy_blocks(void* keys, void* values, int num_layers, const PageShape& shape,
                                    const PageCopy* copies, int num_copies, cudaStream_t stream) const {
  check_pages(kProductionShapes, {keys, values, shape});
  check_copies(copies, num_copies, num_layers);
  if (num_copies == 0) {
    return;
  }
  const std::int64_t vecs_per_block = shape.elements_per_block() * bytes_of(shape.type) / kVecBytes;
  const std::int64_t chunks_per_block = (vecs_per_block + kChunk - 1) / kChunk;
  const int num_arrays = shape.is_paired() ? 1 : 2;
  for (int first = 0; first < num_copies; first += CopyList::kMaxCopies) {
    const int count = std::min(num_copies - first, CopyList::kMaxCopies);
    CopyList list;
    std::copy_n(copies + first, count, list.copies);
    const dim3 grid(static_cast<unsigned>(chunks_per_block * count), static_cast<unsigned>(num_arrays * num_layers));
    common::launch(copy_block_chunks, grid, kThreads, 0, stream, common::Overlap::kNone, static_cast<uint4*>(keys),
                   static_cast<uint4*>(values), list, vecs_per_block, shape.num_blocks * vecs_per_block,
                   static_cast<int>(chunks_per_block), num_arrays);
  }
}

}  // namespace common
