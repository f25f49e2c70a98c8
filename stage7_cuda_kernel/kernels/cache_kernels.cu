// Moving K and V: into slots, out of slots, from block to block. Nothing is computed. A thread moves one vector of 16
// bytes of K and the same one of V: neighbouring threads move neighbouring vectors, so that the memory sees a
// warp's 32 accesses as few and long ones.
#include <algorithm>

#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"
#include "kernels.h"
#include "page_layout.h"

namespace stage7 {
namespace {

constexpr int kThreads = 256;
constexpr int kVecBytes = sizeof(uint4);

// Rows as 16-byte vectors, whatever their type.
struct RowMove {
  PageShape shape;
  int elements_per_vec;
  uint4* key_pages;
  uint4* value_pages;
  uint4* key_rows;
  uint4* value_rows;
  std::int64_t row_stride;  // in vectors
  const int* slot_mapping;
  int num_tokens;
};

// blockIdx.x counts the vectors of all tokens by kThreads: vectors of a row fastest, then heads, then tokens. Slot s is
// row s % block_size of block s / block_size.
template <bool kToSlots>
__global__ void __launch_bounds__(kThreads) move_rows(RowMove move) {
  const PageShape& shape = move.shape;
  const int vecs_per_row = shape.head_dim / move.elements_per_vec;
  const int vecs_per_token = shape.num_kv_heads * vecs_per_row;
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t token = index / vecs_per_token;
  const int slot = token < move.num_tokens ? move.slot_mapping[token] : -1;
  if (slot < 0) {
    return;
  }
  const auto vec_of_token = static_cast<int>(index - token * vecs_per_token);
  const int head = vec_of_token / vecs_per_row;
  const int vec = vec_of_token % vecs_per_row;
  const std::int64_t row = row_offset(shape, slot / shape.block_size, head, slot % shape.block_size);
  const std::int64_t paged = row / move.elements_per_vec + vec;
  const std::int64_t flat = token * move.row_stride + vec_of_token;
  if constexpr (kToSlots) {
    move.key_pages[paged] = move.key_rows[flat];
    move.value_pages[paged] = move.value_rows[flat];
  } else {
    move.key_rows[flat] = move.key_pages[paged];
    move.value_rows[flat] = move.value_pages[paged];
  }
}

template <bool kToSlots>
void launch_move(const PagedKernels& kernels, const Pages& pages, void* keys, void* values, std::int64_t row_stride,
                 const int* slot_mapping, int num_tokens, cudaStream_t stream) {
  common::check_pages(kernels, pages);
  COMMON_CHECK(num_tokens >= 0, "a batch has no tokens or some");
  if (num_tokens == 0) {
    return;
  }
  const PageShape& shape = pages.shape;
  common::check_rows(shape, keys, values, row_stride, slot_mapping);
  const int elements_per_vec = kVecBytes / bytes_of(shape.type);
  const RowMove move{.shape = shape,
                     .elements_per_vec = elements_per_vec,
                     .key_pages = static_cast<uint4*>(pages.keys),
                     .value_pages = static_cast<uint4*>(pages.values),
                     .key_rows = static_cast<uint4*>(keys),
                     .value_rows = static_cast<uint4*>(values),
                     .row_stride = row_stride / elements_per_vec,
                     .slot_mapping = slot_mapping,
                     .num_tokens = num_tokens};
  const std::int64_t num_vecs = std::int64_t{num_tokens} * shape.num_kv_heads * shape.head_dim / elements_per_vec;
  COMMON_CHECK(num_vecs < std::int64_t{1} << 32, "a batch has fewer than 2^32 vectors of 16 bytes");
  common::launch(move_rows<kToSlots>, dim3(static_cast<unsigned>((num_vecs + kThreads - 1) / kThreads)), kThreads, 0,
                 stream, common::Overlap::kNone, move);
}

// The list of copies is a parameter of the launch: no allocation, no upload, no wait. Parameters have room for 4 KB.
struct CopyList {
  static constexpr int kMaxCopies = 480;
  PageCopy copies[kMaxCopies];
};

// blockIdx.x counts the vectors of a block by kThreads, blockIdx.y the copies, blockIdx.z the layers.
__global__ void __launch_bounds__(kThreads) copy_vecs(uint4* keys, uint4* values, const __grid_constant__ CopyList list,
                                                      std::int64_t vecs_per_block, std::int64_t vecs_per_layer) {
  const std::int64_t vec = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vec >= vecs_per_block) {
    return;
  }
  const PageCopy copy = list.copies[blockIdx.y];
  const std::int64_t layer = blockIdx.z * vecs_per_layer;
  const std::int64_t source = layer + copy.source * vecs_per_block + vec;
  const std::int64_t destination = layer + copy.destination * vecs_per_block + vec;
  keys[destination] = keys[source];
  values[destination] = values[source];
}

}  // namespace

void PlainKernels::write_to_slots(const Pages& pages, const void* keys, const void* values, std::int64_t row_stride,
                                  const int* slot_mapping, int num_tokens, cudaStream_t stream) const {
  launch_move<true>(*this, pages, const_cast<void*>(keys), const_cast<void*>(values), row_stride, slot_mapping,
                    num_tokens, stream);
}

void PlainKernels::read_from_slots(const Pages& pages, void* keys, void* values, std::int64_t row_stride,
                                   const int* slot_mapping, int num_tokens, cudaStream_t stream) const {
  launch_move<false>(*this, pages, keys, values, row_stride, slot_mapping, num_tokens, stream);
}

void PlainKernels::copy_blocks(void* keys, void* values, int num_layers, const PageShape& shape, const PageCopy* copies,
                               int num_copies, cudaStream_t stream) const {
  common::check_pages(*this, {keys, values, shape});
  common::check_copies(copies, num_copies, num_layers);
  const std::int64_t vecs_per_block = shape.elements_per_block() * bytes_of(shape.type) / kVecBytes;
  const auto grid_of_block = static_cast<unsigned>((vecs_per_block + kThreads - 1) / kThreads);
  for (int first = 0; first < num_copies; first += CopyList::kMaxCopies) {
    const int count = std::min(num_copies - first, CopyList::kMaxCopies);
    CopyList list;
    std::copy_n(copies + first, count, list.copies);
    const dim3 grid(grid_of_block, static_cast<unsigned>(count), static_cast<unsigned>(num_layers));
    common::launch(copy_vecs, grid, kThreads, 0, stream, common::Overlap::kNone, static_cast<uint4*>(keys),
                   static_cast<uint4*>(values), list, vecs_per_block, shape.num_blocks * vecs_per_block);
  }
}

}  // namespace
