#include "common/paged/supported_shapes.h"

#include <algorithm>
#include <cstddef>

#include "common/cuda/runtime/device.h"
#include "common/paged/checks.h"
#include "common/paged/decode_ring.h"
#include "common/paged/head_dims.h"
#include "common/paged/ragged_tile.h"

namespace common {

std::string ProductionShapes::unsupported(const PageShape& shape, int num_heads) const {
  if (shape.type == ScalarType::kFloat32) {
    return "the production kernels are for bfloat16 and float8";
  }
  if (std::string reason = unsupported_by_all(shape, num_heads); !reason.empty()) {
    return reason;
  }
  const int head_dim = shape.head_dim;
  const int block_size = shape.block_size;
  const bool is_float8 = shape.type == ScalarType::kFloat8;
  const std::string kernels = is_float8 ? "the float8 kernels need " : "the bfloat16 kernels need ";
  // A tile's scales are 16 bytes, the smallest copy: a block cannot be half a tile.
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
  const bool is_small = common::serves_small_memory();
  const DecodeRing ring =
      is_small ? small_decode_ring(shape.type, head_dim, group) : decode_ring(shape.type, head_dim, group, true);
  const std::size_t shared_bytes = std::max(decode_shared_bytes(ring, shape.type, head_dim, group),
                                            ragged_shared_bytes(head_dim, head_dim > 128 && is_small));
  if (common::has_cuda_device() && shared_bytes > common::shared_bytes_per_block()) {
    return kernels + std::to_string(shared_bytes) + " bytes of shared memory for " + std::to_string(group) +
           " query heads of " + std::to_string(head_dim) + " dimensions to a kv head, and a thread block on " +
           common::device_limits().name + " can have " + std::to_string(common::shared_bytes_per_block());
  }
  return {};
}

}  // namespace common
