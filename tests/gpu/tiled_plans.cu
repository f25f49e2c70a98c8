#include "tests/gpu/tiled_plans.h"

#include <cstddef>

#include "common/cuda/model/tiled_linear.h"
#include "common/cuda/model/wide_linear.h"

namespace tests {

using common::FusedLinear;
using common::ProductKernel;
using common::TileFinish;

int max_clusters(int ranks) { return common::max_clusters().at(static_cast<std::size_t>(ranks)); }

int planned_ranks(const FusedLinear& linear, const std::array<int, 9>& clusters) {
  const common::TilePlan planned = linear.kernel == ProductKernel::kTiles ? common::plan_tiles(linear, 8, clusters)
                                                                          : common::plan_wide(linear, 16, clusters);
  return planned.rows > 0 ? planned.ranks : 0;
}

namespace {

void launch(const FusedLinear& linear, Cut cut, const TileFinish& finish, cudaStream_t stream) {
  const common::TilePlan plan{cut.rows, cut.ranks};
  linear.kernel == ProductKernel::kTiles ? common::launch_tiled(linear, finish, plan, stream)
                                         : common::launch_wide(linear, finish, plan, stream);
}

}  // namespace

void tiled_logits(const FusedLinear& linear, Cut cut, float* logits, cudaStream_t stream) {
  if (cut.rows == 0) {
    return common::fused_logits(linear, logits, stream);
  }
  TileFinish finish{.kind = TileFinish::Kind::kStoreLogits};
  finish.store_logits = {logits, linear.num_rows};
  launch(linear, cut, finish, stream);
}

void tiled_qkv(const FusedLinear& linear, Cut cut, const common::Rotary& rotary, void* q, void* kv,
               cudaStream_t stream) {
  if (cut.rows == 0) {
    return common::fused_qkv(linear, rotary, q, kv, stream);
  }
  TileFinish finish{.kind = TileFinish::Kind::kGeneralRotateAndSplit};
  finish.rotate_and_split = {rotary, static_cast<__nv_bfloat16*>(q), static_cast<__nv_bfloat16*>(kv)};
  launch(linear, cut, finish, stream);
}

void tiled_add(const FusedLinear& linear, Cut cut, const common::Residual& residual, cudaStream_t stream) {
  if (cut.rows == 0) {
    return common::fused_add(linear, residual, stream);
  }
  TileFinish finish{.kind = TileFinish::Kind::kAddToResidual};
  finish.add_to_residual = {residual};
  launch(linear, cut, finish, stream);
}

void tiled_gated_silu(const FusedLinear& linear, Cut cut, void* output, cudaStream_t stream) {
  if (cut.rows == 0) {
    return common::fused_gated_silu(linear, output, stream);
  }
  TileFinish finish{.kind = TileFinish::Kind::kGatedSilu};
  finish.gated_silu = {static_cast<__nv_bfloat16*>(output), linear.num_rows};
  launch(linear, cut, finish, stream);
}

}  // namespace tests
