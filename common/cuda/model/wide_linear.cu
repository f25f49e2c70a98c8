#include "common/cuda/model/wide_linear.h"

#include <algorithm>

#include "common/cuda/model/matrix_map.h"
#include "common/cuda/model/wide_kernel.cuh"
#include "common/cuda/runtime/launch.h"

namespace common {
namespace {

constexpr int kSmallRows = 64;  // of the smaller kind of tile

template <typename Shape>
void launch_shape(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  constexpr std::size_t kShared = 1024 + Shape::kRingBytes + sizeof(WideMemory<Shape>);
  static_assert(kShared <= Shape::kSharedBytes);
  launch_clusters(wide_linear<Shape>, grid_of(linear, plan), plan.ranks, Shape::kThreads, kShared, stream,
                  Overlap::kPreviousWithoutL1, matrix_map(linear.weights, linear.num_rows, linear.num_cols, plan.rows),
                  matrix_map(linear.x, linear.num_x_rows, linear.num_cols, (linear.num_tokens + 63) / 64 * 64), linear,
                  finish, plan);
}

// All times were measured on an H100 with the products of Qwen3 0.6B, Llama 3.2 1B and Llama 3 8B, for 128 tokens; what
// x of at most 64 tokens saves, on an H200.
constexpr LaunchOverhead kOverheads[] = {{1, 4000.0}, {2, 5300.0}, {4, 5800.0}, {8, 6800.0}};

// What a tile of more than 64 rows adds to it.
double overhead_of_rows(int rows) { return rows > kSmallRows ? 2600.0 : 0.0; }

// Nanoseconds for a stage of the ring while `blocks` thread blocks run: the slowest of multiplying, of reading weights
// from memory, and of bringing weights and x, 64 tokens or 128, from the L2 cache.
double stage_time(int rows, int blocks, int num_tokens) {
  const double multiplying = 2.3 * (rows <= kSmallRows ? kSmallRows : kMaxWideRows);
  const double bytes_per_nanosecond = std::min(0.9e-9 * device_limits().memory_bandwidth, 40.0 * blocks);
  const double memory = rows * kPanelRowBytes * static_cast<double>(blocks) / bytes_per_nanosecond;
  const double cache = blocks / 128.0 * ((num_tokens <= 64 ? 100.0 : 115.0) + 2.45 * rows);
  return std::max({multiplying, memory, cache});
}

}  // namespace

TilePlan plan_wide(const FusedLinear& linear, int row_step, const ClusterCounts& clusters) {
  const int stages = (linear.num_cols + kPanelColumns - 1) / kPanelColumns;
  TilePlan best;
  double best_time = 0.0;
  for (const auto& [ranks, overhead] : kOverheads) {
    const int at_once = clusters.at(static_cast<std::size_t>(ranks));
    if (ranks > stages || at_once == 0) {
      continue;
    }
    for (int rows = row_step; rows <= kMaxWideRows; rows += row_step) {
      const int tiles = (linear.num_rows + rows - 1) / rows;
      const int num_rounds = (tiles + at_once - 1) / at_once;
      if (ranks > 1 && num_rounds > 1) {
        continue;
      }
      const int blocks = std::min(tiles, at_once) * ranks;
      const double round_overhead = 500.0;
      const double in_round = ((stages + ranks - 1) / ranks) * stage_time(rows, blocks, linear.num_tokens);
      const double time = overhead + overhead_of_rows(rows) + num_rounds * (round_overhead + in_round);
      if (best.rows == 0 || time < best_time) {
        best = {rows, ranks};
        best_time = time;
      }
    }
  }
  return best;
}

void wide_product(const FusedLinear& linear, const TileFinish& finish, cudaStream_t stream) {
  check_for_tiles(linear);
  COMMON_CHECK(linear.row_scales == nullptr, "weights are bfloat16");
  // Squares are summed over 64 rows, and 16 are stored at once.
  const int row_step = finish.kind == TileFinish::Kind::kAddToResidual ? kTileSquaresColumns : 16;
  launch_wide(linear, finish, plan_wide(linear, row_step, max_clusters()), stream);
}

void launch_wide(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  COMMON_CHECK(plan.rows > 0 && plan.rows <= kMaxWideRows && plan.rows % 8 == 0, "there are tiles of so many rows");
  COMMON_CHECK(plan.ranks == 1 || plan.ranks == 2 || plan.ranks == 4 || plan.ranks == 8, "clusters share sums evenly");
  COMMON_CHECK(linear.num_tokens > 0 && linear.num_tokens <= kMaxWideTokens, "wide products are for some tokens");
  plan.rows <= kSmallRows ? launch_shape<WideShape<kSmallRows>>(linear, finish, plan, stream)
                          : launch_shape<WideShape<kMaxWideRows>>(linear, finish, plan, stream);
}

}  // namespace common
