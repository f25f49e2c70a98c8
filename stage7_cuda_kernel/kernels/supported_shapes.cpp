// What the kernels can do, for the host to ask before it begins.
#include <limits>

#include "decode_ring.h"
#include "head_dims.h"
#include "kernels.h"

namespace stage7 {

std::string unsupported(const PageShape& shape, int num_heads) {
  const int head_dim = shape.head_dim;
  const int block_size = shape.block_size;
  if (shape.num_kv_heads <= 0 || num_heads <= 0 || num_heads % shape.num_kv_heads != 0) {
    return "the kernels need query heads that share kv heads evenly, not " + std::to_string(num_heads) + " over " +
           std::to_string(shape.num_kv_heads);
  }
  if (block_size > 0 && shape.num_blocks > std::numeric_limits<int>::max() / block_size) {
    return "the kernels number slots in 32 bits, and " + std::to_string(shape.num_blocks) + " blocks of " +
           std::to_string(block_size) + " have more";
  }
  if (shape.type == ScalarType::kFloat32) {
    if (block_size < 1) {
      return "the float32 kernels need blocks of at least one token, not " + std::to_string(block_size);
    }
    // Rows of whole 16-byte vectors; a thread block's shared memory has room for 256 dimensions for each warp.
    if (head_dim < 8 || head_dim % 8 != 0 || head_dim > 256) {
      return "the float32 kernels need a head dimension that is a multiple of 8 up to 256, not " +
             std::to_string(head_dim);
    }
    return {};
  }
  const bool is_float8 = shape.type == ScalarType::kFloat8;
  const std::string kernels = is_float8 ? "the float8 kernels need " : "the bfloat16 kernels need ";
  // A tile's scales are 16 bytes, which a copy takes as a whole: half a tile is no block.
  if ((block_size != 8 || is_float8) && block_size != 16 && block_size != 32 && block_size != 64) {
    return kernels + "blocks of " + (is_float8 ? "" : "8, ") + "16, 32 or 64 tokens, not " + std::to_string(block_size);
  }
  if (!is_head_dim(head_dim)) {
    return kernels + "a head dimension of " + list_head_dims() + ", not " + std::to_string(head_dim);
  }
  const int group = num_heads / shape.num_kv_heads;
  if (group > 16) {
    return kernels + "at most 16 query heads to a kv head, not " + std::to_string(group);
  }
  const std::size_t shared_bytes =
      decode_shared_bytes(decode_ring(shape.type, head_dim, group, true), shape.type, head_dim, group);
  if (common::has_cuda_device() && shared_bytes > common::device_limits().shared_bytes_per_block) {
    return kernels + std::to_string(shared_bytes) + " bytes of shared memory for " + std::to_string(group) +
           " query heads of " + std::to_string(head_dim) + " dimensions to a kv head, and a thread block on " +
           common::device_limits().name + " can have " + std::to_string(common::device_limits().shared_bytes_per_block);
  }
  return {};
}

}  // namespace
