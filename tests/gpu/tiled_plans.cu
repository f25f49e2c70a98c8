#include "tests/gpu/tiled_plans.h"

#include <cstddef>

#include "common/cuda/model/tiled_linear.h"

namespace tests {

int max_clusters(int ranks) { return common::max_clusters().at(static_cast<std::size_t>(ranks)); }

int planned_ranks(const common::FusedLinear& linear, const std::array<int, 9>& clusters) {
  const common::TilePlan plan = common::plan_tiles(linear, 8, clusters);
  return plan.rows > 0 ? plan.ranks : 0;
}

void tiled_logits(const common::FusedLinear& linear, int rows, int ranks, float* logits, cudaStream_t stream) {
  common::TileFinish finish{.kind = common::TileFinish::Kind::kStoreLogits};
  finish.store_logits = {logits, linear.num_rows};
  common::launch_tiled(
      linear, finish, rows == 0 ? common::plan_tiles(linear, 8, common::max_clusters()) : common::TilePlan{rows, ranks},
      stream);
}

}  // namespace tests
