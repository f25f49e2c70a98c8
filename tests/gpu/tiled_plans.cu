#include "tests/gpu/tiled_plans.h"

#include "common/cuda/tiled_linear.h"

namespace tests {

int max_clusters(int ranks) { return common::max_clusters(ranks); }

void tiled_logits(const common::FusedLinear& linear, int rows, int ranks, float* logits, cudaStream_t stream) {
  common::TileFinish finish{.kind = common::TileFinish::Kind::kStoreLogits};
  finish.store_logits = {logits, linear.num_rows};
  common::launch_tiled(linear, finish, rows == 0 ? common::plan_tiles(linear, 8) : common::TilePlan{rows, ranks},
                       stream);
}

}  // namespace tests
