#include "tests/gpu/tiled_plans.h"

#include <cstddef>

#include "common/cuda/model/tiled_linear.h"
#include "common/cuda/model/wide_linear.h"

namespace tests {

int max_clusters(int ranks) { return common::max_clusters().at(static_cast<std::size_t>(ranks)); }

namespace {

common::TilePlan plan(const common::FusedLinear& linear, const common::ClusterCounts& clusters) {
  return linear.kernel == common::ProductKernel::kTiles ? common::plan_tiles(linear, 8, clusters)
                                                        : common::plan_wide(linear, 8, clusters);
}

}  // namespace

int planned_ranks(const common::FusedLinear& linear, const std::array<int, 9>& clusters) {
  const common::TilePlan planned = plan(linear, clusters);
  return planned.rows > 0 ? planned.ranks : 0;
}

void tiled_logits(const common::FusedLinear& linear, int rows, int ranks, float* logits, cudaStream_t stream) {
  common::TileFinish finish{.kind = common::TileFinish::Kind::kStoreLogits};
  finish.store_logits = {logits, linear.num_rows};
  common::TilePlan chosen = plan(linear, common::max_clusters());
  if (rows > 0) {
    chosen.rows = rows;
    chosen.ranks = ranks;
  }
  linear.kernel == common::ProductKernel::kTiles ? common::launch_tiled(linear, finish, chosen, stream)
                                                 : common::launch_wide(linear, finish, chosen, stream);
}

}  // namespace tests
