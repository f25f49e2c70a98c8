#include "common/cuda/model/tiled_linear.h"

#include <algorithm>
#include <utility>

#include "common/cuda/model/matrix_map.h"
#include "common/cuda/runtime/launch.h"

namespace common {
namespace {

int tile_tokens(int num_tokens) { return num_tokens > 64 ? 128 : num_tokens > 32 ? 64 : num_tokens > 16 ? 32 : 16; }

// Larger tiles with many tokens leave the ring too few stages, or the sums too few registers.
constexpr int max_tile_rows(int tokens, bool is_float8) { return tokens > (is_float8 ? 64 : 32) ? 128 : 256; }

template <typename Shape>
void launch_shape(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  constexpr std::size_t kShared = 1024 + Shape::kRingBytes + sizeof(TileMemory<Shape>);
  static_assert(kShared <= Shape::kSharedBytes);
  launch_clusters(tiled_linear<Shape>, grid_of(linear, plan), plan.ranks, Shape::kThreads, kShared, stream,
                  Overlap::kPreviousWithoutL1,
                  matrix_map(linear.weights, linear.num_rows, linear.num_cols, plan.rows, Shape::kFloat8),
                  matrix_map(linear.x, linear.num_x_rows, linear.num_cols, Shape::kTokens), linear, finish, plan);
}

template <int kTokens, bool kFloat8>
void launch_weights(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  if (plan.rows <= 64) {
    launch_shape<TileShape<kTokens, 1, 1, kFloat8 ? 2 : 1, kFloat8>>(linear, finish, plan, stream);
  } else if (plan.rows <= 128) {
    launch_shape<TileShape<kTokens, 2, 1, 1, kFloat8>>(linear, finish, plan, stream);
  } else if constexpr (max_tile_rows(kTokens, kFloat8) > 128) {
    launch_shape<TileShape<kTokens, 2, 2, 1, kFloat8>>(linear, finish, plan, stream);
  }
}

template <int kTokens>
void launch_tokens(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  if (linear.row_scales != nullptr) {
    launch_weights<kTokens, true>(linear, finish, plan, stream);
  } else if constexpr (kTokens <= 64) {
    launch_weights<kTokens, false>(linear, finish, plan, stream);
  }
}

}  // namespace

bool can_tile(Precision precision) {
  return precision == Precision::kBFloat16 && device_limits().compute_capability == 90 && can_overlap();
}

ClusterCounts max_clusters() {
  // How many clusters fit beside each other depends on how the chip's multiprocessors are grouped.
  static PerDevice<ClusterCounts> counts;
  return counts.get([] {
    ClusterCounts result{};
    using Shape = TileShape<32, 2, 1, 1, false>;
    constexpr int kShared = Shape::kSharedBytes;
    CUDA_CHECK(cudaFuncSetAttribute(tiled_linear<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
    for (int size = 1; size <= 8; ++size) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(static_cast<unsigned>(size));
      config.blockDim = dim3(Shape::kThreads);
      config.dynamicSmemBytes = kShared;
      config.attrs = &attribute;
      config.numAttrs = 1;
      CUDA_CHECK(cudaOccupancyMaxActiveClusters(&result[static_cast<std::size_t>(size)], tiled_linear<Shape>, &config));
    }
    return result;
  });
}

void check_for_tiles(const FusedLinear& linear) {
  COMMON_CHECK(can_tile(linear.precision), "tiles are for Hopper, in bfloat16");
  COMMON_CHECK(
      linear.num_rows > 0 && linear.num_cols > 0 && linear.num_cols % (linear.row_scales == nullptr ? 8 : 16) == 0,
      "rows are 16-byte pieces");
  COMMON_CHECK(linear.weights != nullptr && linear.x != nullptr, "there is something to multiply");
  COMMON_CHECK(linear.rows == nullptr && linear.num_tokens <= linear.num_x_rows, "x is taken as it lies");
}

dim3 grid_of(const FusedLinear& linear, const TilePlan& plan) {
  const int tiles = (linear.num_rows + plan.rows - 1) / plan.rows;
  const int clusters = std::min(tiles, max_clusters().at(static_cast<std::size_t>(plan.ranks)));
  COMMON_CHECK(clusters > 0, "the GPU has room for a cluster");
  COMMON_CHECK(plan.ranks == 1 || clusters == tiles, "a cluster has one tile");
  return dim3(static_cast<unsigned>(clusters * plan.ranks));
}

namespace {

// Larger with float8 weights, because the ring fills, and is waited for, in half the time.
constexpr LaunchOverhead kOverheads[] = {{1, 600.0}, {2, 1600.0}, {3, 2400.0}, {4, 1800.0}, {8, 3000.0}};
constexpr LaunchOverhead kFloat8Overheads[] = {{1, 3200.0}, {2, 5500.0}, {3, 5700.0}, {4, 5500.0}, {8, 6900.0}};

// Nanoseconds that a stage takes. A multiprocessor takes in about 50 bytes a nanosecond, weights and x alike (H200).
// Times with float8 are measured: they depend on how much each warpgroup unpacks.
double stage_time(int rows, int tokens, bool is_float8) {
  if (is_float8) {
    const auto of_rows = [&](double small, double medium, double large) {
      return rows <= 64 ? small : rows <= 128 ? medium : large;
    };
    return tokens <= 32   ? of_rows(315.0, 500.0, 920.0)
           : tokens <= 64 ? of_rows(380.0, 600.0, 1200.0)
                          : of_rows(690.0, 850.0, 2000.0);
  }
  constexpr double kBytesPerNanosecond = 50.0;
  constexpr double kMinTime = 200.0;
  return std::max(kMinTime, (rows + tokens) * kPanelRowBytes / kBytesPerNanosecond);
}

}  // namespace

// A wave of tiles should occupy all multiprocessors.
TilePlan plan_tiles(const FusedLinear& linear, int row_step, const ClusterCounts& clusters) {
  const bool is_float8 = linear.row_scales != nullptr;
  const int stage_columns = is_float8 ? 2 * kPanelColumns : kPanelColumns;
  const int stages = (linear.num_cols + stage_columns - 1) / stage_columns;
  const int tokens = tile_tokens(linear.num_tokens);
  const int max_rows = max_tile_rows(tokens, is_float8);
  TilePlan best;
  double best_time = 0.0;
  for (const auto& [ranks, overhead] : is_float8 ? kFloat8Overheads : kOverheads) {
    if (ranks > stages) {
      continue;
    }
    const int at_once = clusters.at(static_cast<std::size_t>(ranks));
    if (at_once == 0) {  // a slice of a GPU may have no group of `ranks` multiprocessors
      continue;
    }
    for (int rounds = 1; rounds <= (ranks > 1 ? 1 : 1 + linear.num_rows / at_once); ++rounds) {
      const int even = (linear.num_rows + at_once * rounds - 1) / (at_once * rounds);
      const int rows = (even + row_step - 1) / row_step * row_step;
      if (rows > max_rows) {
        continue;
      }
      const int num_rounds = ((linear.num_rows + rows - 1) / rows + at_once - 1) / at_once;
      const double exchanged = ranks > 1 && !is_float8
                                   ? static_cast<double>(rows) * tokens * sizeof(float) * (ranks - 1) / ranks / 50.0
                                   : 0.0;
      const double time =
          overhead + num_rounds * ((stages + ranks - 1) / ranks) * stage_time(rows, tokens, is_float8) + exchanged;
      if (best.rows == 0 || time < best_time) {
        best = {rows, ranks};
        best_time = time;
      }
    }
  }
  return best;
}

void tiled_product(const FusedLinear& linear, const TileFinish& finish, cudaStream_t stream) {
  check_for_tiles(linear);
  const bool is_float8 = linear.row_scales != nullptr;
  COMMON_CHECK(linear.num_tokens > 0 && linear.num_tokens <= max_tiled_tokens(is_float8), "tiles are for some tokens");
  COMMON_CHECK(!is_float8 || linear.num_rows % 2 == 0, "scales are read two at a time");
  // Squares are summed over 64 rows.
  const int row_step = finish.kind == TileFinish::Kind::kAddToResidual ? kTileSquaresColumns : 8;
  launch_tiled(linear, finish, plan_tiles(linear, row_step, max_clusters()), stream);
}

void launch_tiled(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  const bool is_float8 = linear.row_scales != nullptr;
  COMMON_CHECK(linear.num_tokens <= max_tiled_tokens(is_float8), "tiles are for some tokens");
  COMMON_CHECK(plan.rows <= max_tile_rows(tile_tokens(linear.num_tokens), is_float8),
               "there are tiles of so many rows");
  COMMON_CHECK(plan.rows > 0, "the GPU has room for a tile");
  switch (tile_tokens(linear.num_tokens)) {
    case 16:
      return launch_tokens<16>(linear, finish, plan, stream);
    case 32:
      return launch_tokens<32>(linear, finish, plan, stream);
    case 64:
      return launch_tokens<64>(linear, finish, plan, stream);
    default:  // float8 alone
      return launch_tokens<128>(linear, finish, plan, stream);
  }
}

}  // namespace common
