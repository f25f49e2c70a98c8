#include "common/cuda/model/fused_linear.h"

#include <algorithm>

#include "common/cuda/model/finishes.cuh"
#include "common/cuda/model/fused_kernel.cuh"
#include "common/cuda/model/tiled_linear.h"
#include "common/cuda/model/wide_linear.h"

namespace common {
namespace {

template <typename Shape, int kRingBytes, int kSlots, bool kManyBatches, typename Finish>
void launch_shape(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  constexpr int kVisitBytes = static_cast<int>(sizeof(uint4)) * Shape::kThreads * kSlots * Shape::kVisitTiles;
  constexpr int kStages = kRingBytes / kVisitBytes;
  static_assert(kStages > 0);
  const auto kernel = fused_linear<Shape, Finish, kSlots, kStages, kManyBatches>;
  const int tiles = (linear.num_rows + kTileRows - 1) / kTileRows;
  const int grid = std::min(tiles, device_limits().num_multiprocessors);
  launch(kernel, dim3(static_cast<unsigned>(grid)), Shape::kThreads, kStages * kVisitBytes, stream,
         Overlap::kPreviousWithoutL1, linear, finish);
}

// Short rows fill few slots. Of long rows, x does not fit into registers: the next batch is loaded while one is used.
// Float8's slots have twice the columns, and take twice as much of x.
template <typename Shape, int kRingBytes, typename Finish>
void launch_ring(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  constexpr int kShort = Shape::kFloat8 ? 2 : 3;
  constexpr int kMedium = Shape::kFloat8 ? 4 : 8;
  constexpr int kLong = Shape::kFloat8 && (Shape::kTokens == 32 || Shape::kWarps == 16) ? 2 : 4;
  if (linear.num_cols <= kShort * Shape::kColumnsOfSlot) {
    launch_shape<Shape, kRingBytes, kShort, false>(linear, finish, stream);
  } else if (linear.num_cols <= kMedium * Shape::kColumnsOfSlot) {
    launch_shape<Shape, kRingBytes, kMedium, false>(linear, finish, stream);
  } else {
    launch_shape<Shape, kRingBytes, kLong, true>(linear, finish, stream);
  }
}

// Whether a product has a block for every multiprocessor, and 64 KB hold everything that a block copies.
constexpr int kSmallRing = 64 << 10;
template <typename Shape>
bool fits_small_ring(const FusedLinear& linear) {
  const int num_blocks = device_limits().num_multiprocessors;
  const int tiles = (linear.num_rows + kTileRows - 1) / kTileRows;
  const int slots_of_tile = (linear.num_cols + Shape::kColumnsOfSlot - 1) / Shape::kColumnsOfSlot;
  constexpr int kSlotBytes = static_cast<int>(sizeof(uint4)) * Shape::kThreads;
  return tiles >= num_blocks && (tiles + num_blocks - 1) / num_blocks * slots_of_tile <= kSmallRing / kSlotBytes;
}

template <typename Scalar, typename Weight, int kTokens, typename Finish>
void launch_tokens(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  using Shape = RowShape<Scalar, Weight, kTokens, 8>;
  COMMON_CHECK(linear.num_tokens > 0 && linear.num_tokens <= kTokens, "fused products are for a few tokens");
  COMMON_CHECK(linear.num_rows > 0 && linear.num_cols > 0 && linear.num_cols % Shape::kColumns == 0,
               "rows are 16-byte pieces");
  COMMON_CHECK(linear.weights != nullptr && linear.x != nullptr, "there is something to multiply");
  if (shared_bytes_per_block() >= std::size_t{216} << 10) {
    if constexpr (kTokens == 8) {
      if (fits_small_ring<Shape>(linear)) {
        return launch_ring<Shape, kSmallRing>(linear, finish, stream);
      }
    }
    // Unpacking takes time, which twice the warps hide. With more tokens, their x would not fit into registers.
    constexpr int kWarps = Shape::kFloat8 && kTokens == 8 ? 16 : 8;
    launch_ring<RowShape<Scalar, Weight, kTokens, kWarps>, 192 << 10>(linear, finish, stream);
  } else if constexpr (kServesSmallMemory) {
    launch_ring<Shape, kTokens == 8 ? kSmallRing : 48 << 10>(linear, finish, stream);
  } else {
    throw CudaError(kNeedsMoreSharedMemory);
  }
}

template <typename Scalar, typename Weight, typename Finish>
void launch_weights(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  if constexpr (sizeof(Scalar) == 2) {
    if (linear.num_tokens > 16) {
      return launch_tokens<Scalar, Weight, 32>(linear, finish, stream);
    }
    if (linear.num_tokens > 8) {
      return launch_tokens<Scalar, Weight, 16>(linear, finish, stream);
    }
  }
  launch_tokens<Scalar, Weight, 8>(linear, finish, stream);
}

template <typename Scalar, typename Finish>
void launch_product(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  if constexpr (sizeof(Scalar) == 2) {
    if (linear.row_scales != nullptr) {
      return launch_weights<Scalar, Float8>(linear, finish, stream);
    }
  }
  COMMON_CHECK(linear.row_scales == nullptr, "float8 goes with bfloat16");
  launch_weights<Scalar, Scalar>(linear, finish, stream);
}

void product_by_tiles(const FusedLinear& linear, const TileFinish& finish, cudaStream_t stream) {
  linear.kernel == ProductKernel::kTiles ? tiled_product(linear, finish, stream) : wide_product(linear, finish, stream);
}

}  // namespace

void fused_qkv(const FusedLinear& linear, const Rotary& rotary, void* q, void* kv, cudaStream_t stream) {
  if (linear.kernel != ProductKernel::kRows) {
    const bool is_plain = rotary.bias == nullptr && rotary.rotation != nullptr;
    TileFinish finish{.kind = is_plain ? TileFinish::Kind::kRotateAndSplit : TileFinish::Kind::kGeneralRotateAndSplit};
    finish.rotate_and_split = {rotary, static_cast<__nv_bfloat16*>(q), static_cast<__nv_bfloat16*>(kv)};
    return product_by_tiles(linear, finish, stream);
  }
  with_scalar(linear.precision, [&]<typename Scalar>(Scalar) {
    launch_product<Scalar>(linear, RotateAndSplit<Scalar>{rotary, static_cast<Scalar*>(q), static_cast<Scalar*>(kv)},
                           stream);
  });
}

void fused_add(const FusedLinear& linear, const Residual& residual, cudaStream_t stream) {
  COMMON_CHECK(linear.num_rows == residual.num_cols && residual.num_cols % kSquaresColumns == 0,
               "what is added has the residual stream's shape");
  if (linear.kernel != ProductKernel::kRows) {
    COMMON_CHECK(residual.squares_columns == kTileSquaresColumns, "squares are summed as tiles are cut");
    TileFinish finish{.kind = TileFinish::Kind::kAddToResidual};
    finish.add_to_residual = {residual};
    return product_by_tiles(linear, finish, stream);
  }
  COMMON_CHECK(residual.squares_columns == kSquaresColumns, "squares are summed as tiles are cut");
  with_scalar(linear.precision, [&]<typename Scalar>(Scalar) {
    launch_product<Scalar>(linear, AddToResidual<Scalar, kSquaresColumns>{residual}, stream);
  });
}

void fused_gated_silu(const FusedLinear& linear, void* output, cudaStream_t stream) {
  if (linear.kernel != ProductKernel::kRows) {
    TileFinish finish{.kind = TileFinish::Kind::kGatedSilu};
    finish.gated_silu = {static_cast<__nv_bfloat16*>(output), linear.num_rows};
    return product_by_tiles(linear, finish, stream);
  }
  with_scalar(linear.precision, [&]<typename Scalar>(Scalar) {
    launch_product<Scalar>(linear, GatedSilu<Scalar>(static_cast<Scalar*>(output), linear.num_rows), stream);
  });
}

void fused_push(const FusedLinear& linear, const PushedPart& part, cudaStream_t stream) {
  COMMON_CHECK(linear.num_rows == part.num_cols && part.num_cols % kSquaresColumns == 0,
               "a part has the residual stream's shape");
  COMMON_CHECK(linear.num_tokens <= kMaxPushedTokens, "sums are pushed for a few tokens");
  if (linear.kernel != ProductKernel::kRows) {
    TileFinish finish{.kind = TileFinish::Kind::kPushSums};
    finish.push_sums = {part};
    return product_by_tiles(linear, finish, stream);
  }
  with_scalar(linear.precision,
              [&]<typename Scalar>(Scalar) { launch_product<Scalar>(linear, PushSums{part}, stream); });
}

void fused_logits(const FusedLinear& linear, float* logits, cudaStream_t stream) {
  if (linear.kernel != ProductKernel::kRows) {
    TileFinish finish{.kind = TileFinish::Kind::kStoreLogits};
    finish.store_logits = {logits, linear.num_rows};
    return product_by_tiles(linear, finish, stream);
  }
  with_scalar(linear.precision, [&]<typename Scalar>(Scalar) {
    launch_product<Scalar>(linear, StoreLogits(logits, linear.num_rows), stream);
  });
}

}  // namespace common
