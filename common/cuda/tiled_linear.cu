#include "common/cuda/tiled_linear.h"

#include <cuda.h>

#include <algorithm>
#include <array>
#include <utility>

#include "common/cuda/launch.h"

namespace common {
namespace {

int tile_tokens(int num_tokens) { return num_tokens > 32 ? 64 : num_tokens > 16 ? 32 : 16; }

// Larger ones with many tokens leave the ring too few stages.
constexpr int max_tile_rows(int tokens) { return tokens > 32 ? 128 : 256; }

// [rows, cols] of bfloat16 as the copy engine is told about it: copies bring `box_rows` rows of a panel.
CUtensorMap matrix_map(const void* matrix, int rows, int cols, int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    COMMON_CHECK(found == cudaDriverEntryPointSuccess, "the driver knows tensor maps");
    return reinterpret_cast<Encode>(function);
  }();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>(cols) * sizeof(__nv_bfloat16)};
  const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), sizes, row_bytes,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  COMMON_CHECK(result == CUDA_SUCCESS, "a matrix of whole pieces of 16 bytes has a tensor map");
  return map;
}

template <typename Shape>
void launch_shape(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  constexpr std::size_t kShared = 1024 + Shape::kRingBytes + sizeof(TileMemory<Shape>);
  static_assert(kShared <= Shape::kSharedBytes);
  const int tiles = (linear.num_rows + plan.rows - 1) / plan.rows;
  const int clusters = std::min(tiles, max_clusters(plan.ranks));
  COMMON_CHECK(plan.ranks == 1 || clusters == tiles, "a cluster has one tile");
  launch_clusters(tiled_linear<Shape>, dim3(static_cast<unsigned>(clusters * plan.ranks)), plan.ranks, Shape::kThreads,
                  kShared, stream, Overlap::kPreviousWithoutL1,
                  matrix_map(linear.weights, linear.num_rows, linear.num_cols, plan.rows),
                  matrix_map(linear.x, linear.num_x_rows, linear.num_cols, Shape::kTokens), linear, finish, plan);
}

template <int kTokens>
void launch_tokens(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  if (plan.rows <= 64) {
    launch_shape<TileShape<kTokens, 1, 1>>(linear, finish, plan, stream);
  } else if (plan.rows <= 128) {
    launch_shape<TileShape<kTokens, 2, 1>>(linear, finish, plan, stream);
  } else if constexpr (max_tile_rows(kTokens) > 128) {
    launch_shape<TileShape<kTokens, 2, 2>>(linear, finish, plan, stream);
  }
}

}  // namespace

bool can_tile(Precision precision) {
  return precision == Precision::kBFloat16 && device_limits().compute_capability == 90 && can_overlap();
}

int max_clusters(int cluster_size) {
  // As many as fit beside each other depends on how the chip's multiprocessors are grouped.
  static const std::array<int, 9> counts = [] {
    std::array<int, 9> result{};
    using Shape = TileShape<32, 2, 1>;
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
  }();
  return counts.at(static_cast<std::size_t>(cluster_size));
}

// A multiprocessor takes in about 50 bytes a nanosecond, weights and x alike (H200), and a wave of tiles should occupy
// all of them. A cluster's exchange of sums has to be worth it.
TilePlan plan_tiles(const FusedLinear& linear, int row_step) {
  constexpr double kBytesPerNanosecond = 50.0;
  constexpr double kMinPanelTime = 200.0;  // nanoseconds
  const int panels = (linear.num_cols + kPanelColumns - 1) / kPanelColumns;
  const int tokens = tile_tokens(linear.num_tokens);
  const int max_rows = max_tile_rows(tokens);
  TilePlan best;
  double best_time = 0.0;
  for (const auto& [ranks, overhead] : {std::pair{1, 600.0}, {2, 1600.0}, {3, 2400.0}, {4, 1800.0}, {8, 3000.0}}) {
    if (ranks > panels) {
      continue;
    }
    const int at_once = max_clusters(ranks);
    for (int rounds = 1; rounds <= (ranks > 1 ? 1 : 1 + linear.num_rows / at_once); ++rounds) {
      const int even = (linear.num_rows + at_once * rounds - 1) / (at_once * rounds);
      const int rows = (even + row_step - 1) / row_step * row_step;
      if (rows > max_rows) {
        continue;
      }
      const int num_rounds = ((linear.num_rows + rows - 1) / rows + at_once - 1) / at_once;
      const double panel_time = std::max(kMinPanelTime, (rows + tokens) * kPanelRowBytes / kBytesPerNanosecond);
      const double exchanged =
          ranks > 1 ? static_cast<double>(rows) * tokens * sizeof(float) * (ranks - 1) / ranks : 0.0;
      const double time =
          overhead + num_rounds * ((panels + ranks - 1) / ranks) * panel_time + exchanged / kBytesPerNanosecond;
      if (best.rows == 0 || time < best_time) {
        best = {rows, ranks};
        best_time = time;
      }
    }
  }
  return best;
}

void tiled_product(const FusedLinear& linear, const TileFinish& finish, cudaStream_t stream) {
  COMMON_CHECK(can_tile(linear.precision), "tiles are for Hopper, in bfloat16");
  COMMON_CHECK(linear.num_tokens > 0 && linear.num_tokens <= kMaxTiledTokens, "tiles are for some tokens");
  COMMON_CHECK(linear.num_rows > 0 && linear.num_cols > 0 && linear.num_cols % 8 == 0, "rows are 16-byte pieces");
  COMMON_CHECK(linear.weights != nullptr && linear.x != nullptr, "there is something to multiply");
  COMMON_CHECK(linear.rows == nullptr && linear.num_tokens <= linear.num_x_rows, "x is taken as it lies");
  // Squares are summed over 64 rows.
  const int row_step = finish.kind == TileFinish::Kind::kAddToResidual ? kTileSquaresColumns : 8;
  launch_tiled(linear, finish, plan_tiles(linear, row_step), stream);
}

void launch_tiled(const FusedLinear& linear, const TileFinish& finish, const TilePlan& plan, cudaStream_t stream) {
  switch (tile_tokens(linear.num_tokens)) {
    case 16:
      return launch_tokens<16>(linear, finish, plan, stream);
    case 32:
      return launch_tokens<32>(linear, finish, plan, stream);
    default:
      return launch_tokens<64>(linear, finish, plan, stream);
  }
}

}  // namespace common
