#include "common/cuda/fused_linear.h"

#include <algorithm>

#include "common/cuda/fused_kernel.cuh"

namespace common {
namespace {

// ---- what becomes of the sums: rows `row` and `row` + 1 of the product for one token. Called by whole warps, of which
// the lanes with `exists` have something ----------------------------------------------------------------------------

struct NoEpilogueLoads {
  __device__ __forceinline__ void prefetch(int) const {}
  __device__ __forceinline__ float4 load_epilogue(int, int) const { return {}; }
};

template <typename Scalar>
struct RotateAndSplit {
  Rotary rotary;
  Scalar* q;
  Scalar* kv;

  __device__ __forceinline__ void prefetch(int) const {}
  __device__ __forceinline__ float4 load_epilogue(int token, int row) const {
    const int half = rotary.head_dim / 2;
    if (row >= rotary.q_rows + rotary.kv_rows) {
      return {1.0F, 0.0F, 0.0F, 0.0F};
    }
    const float2 turn = __ldcg(rotary.rotation + token * half + row / 2 % half);
    return {turn.x, turn.y, 0.0F, 0.0F};
  }
  __device__ __forceinline__ void operator()(bool exists, int token, int row, float4 turn, float2 sum) const {
    if (exists) {
      Scalar* destination =
          row < rotary.q_rows ? q + token * rotary.q_rows + row : kv + token * 2 * rotary.kv_rows + row - rotary.q_rows;
      *reinterpret_cast<Pair<Scalar>*>(destination) =
          make_pair<Scalar>(sum.x * turn.x - sum.y * turn.y, sum.x * turn.y + sum.y * turn.x);
    }
  }
};

template <typename Scalar>
struct AddToResidual {
  Residual residual;

  __device__ __forceinline__ void prefetch(int row) const {
    if (row < residual.num_cols) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(residual.norm + row));
    }
  }
  __device__ __forceinline__ float4 load_epilogue(int token, int row) const {
    const float2 before = __ldcg(reinterpret_cast<const float2*>(residual.values + token * residual.num_cols + row));
    const float2 norm = *reinterpret_cast<const float2*>(residual.norm + row);
    return {before.x, before.y, norm.x, norm.y};
  }
  __device__ __forceinline__ void operator()(bool exists, int token, int row, float4 loaded, float2 sum) const {
    const float2 after = {loaded.x + sum.x, loaded.y + sum.y};
    static_assert(kSquaresColumns == kTileRows, "the lanes of one token in a warp have what is added up");
    float squares = after.x * after.x + after.y * after.y;
    squares += __shfl_xor_sync(0xFFFFFFFFU, squares, 1);
    squares += __shfl_xor_sync(0xFFFFFFFFU, squares, 2);
    if (exists) {
      const int place = token * residual.num_cols + row;
      *reinterpret_cast<float2*>(residual.values + place) = after;
      *reinterpret_cast<Pair<Scalar>*>(static_cast<Scalar*>(residual.weighted) + place) =
          make_pair<Scalar>(after.x * loaded.z, after.y * loaded.w);
      if (row % kTileRows == 0) {
        residual.squares[place / kSquaresColumns] = squares;
      }
    }
  }
};

template <typename Scalar>
struct GatedSilu : NoEpilogueLoads {
  Scalar* output;
  int num_rows;

  GatedSilu(Scalar* to, int rows) : output(to), num_rows(rows) {}
  __device__ __forceinline__ void operator()(bool exists, int token, int row, float4, float2 sum) const {
    if (exists) {
      output[(token * num_rows + row) / 2] = from_float<Scalar>(gated(sum.x, sum.y));
    }
  }
};

struct StoreLogits : NoEpilogueLoads {
  float* logits;
  int num_rows;

  StoreLogits(float* to, int rows) : logits(to), num_rows(rows) {}
  __device__ __forceinline__ void operator()(bool exists, int token, int row, float4, float2 sum) const {
    if (exists) {
      float* destination = logits + std::int64_t{token} * num_rows + row;
      destination[0] = sum.x;
      if (row + 1 < num_rows) {
        destination[1] = sum.y;
      }
    }
  }
};

// kRingSlots: what the ring holds, 4 KB each.
template <typename Scalar, int kTokens, int kRingSlots, int kSlots, bool kManyBatches, typename Finish>
void launch_shape(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  constexpr int kStages = kRingSlots / kSlots;
  constexpr std::size_t kRingBytes = sizeof(uint4) * kThreads * kSlots * kStages;
  const auto kernel = fused_linear<Scalar, Finish, kTokens, kSlots, kStages, kManyBatches>;
  const int tiles = (linear.num_rows + kTileRows - 1) / kTileRows;
  const int grid = std::min(tiles, device_limits().num_multiprocessors);
  launch(kernel, dim3(static_cast<unsigned>(grid)), kThreads, kRingBytes, stream, Overlap::kPreviousWithoutL1, linear,
         finish);
}

// Short rows fill few slots. Of long rows, x does not fit into registers: the next batch is loaded while one is used.
template <typename Scalar, int kTokens, int kRingSlots, typename Finish>
void launch_ring(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  if (linear.num_cols <= 3 * kColumnsOfSlot<Scalar>) {
    launch_shape<Scalar, kTokens, kRingSlots, 3, false>(linear, finish, stream);
  } else if (linear.num_cols <= 8 * kColumnsOfSlot<Scalar>) {
    launch_shape<Scalar, kTokens, kRingSlots, 8, false>(linear, finish, stream);
  } else {
    launch_shape<Scalar, kTokens, kRingSlots, 4, true>(linear, finish, stream);
  }
}

// A block may have 227 KB of shared memory on Hopper and on Blackwell in data centres, 163 KB on an A100, and 99 KB on
// smaller chips. A build for the former alone has half as many kernels, and takes half as long.
constexpr bool needs_small_ring() {
#ifdef __CUDA_ARCH_LIST__
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture != 900 && architecture != 1000 && architecture != 1030) {
      return true;
    }
  }
  return false;
#else
  return true;
#endif
}

template <typename Scalar, int kTokens, typename Finish>
void launch_tokens(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  COMMON_CHECK(linear.num_tokens > 0 && linear.num_tokens <= max_fused_tokens(linear.precision, linear.num_cols),
               "fused products are for a few tokens");
  COMMON_CHECK(linear.num_rows > 0 && linear.num_cols > 0 && linear.num_cols % 8 == 0, "rows are 16-byte pieces");
  COMMON_CHECK(linear.weights != nullptr && linear.x != nullptr, "there is something to multiply");
  if (device_limits().shared_bytes_per_block >= std::size_t{216} << 10) {
    launch_ring<Scalar, kTokens, 48>(linear, finish, stream);
  } else if constexpr (needs_small_ring()) {
    launch_ring<Scalar, kTokens, kTokens == 8 ? 16 : 12>(linear, finish, stream);
  } else {
    throw CudaError("these kernels were built for GPUs with more shared memory than this one has");
  }
}

template <typename Scalar, typename Finish>
void launch_product(const FusedLinear& linear, const Finish& finish, cudaStream_t stream) {
  if constexpr (sizeof(Scalar) == 2) {
    if (linear.num_tokens > 16) {
      return launch_tokens<Scalar, 32>(linear, finish, stream);
    }
    if (linear.num_tokens > 8) {
      return launch_tokens<Scalar, 16>(linear, finish, stream);
    }
  }
  launch_tokens<Scalar, 8>(linear, finish, stream);
}

}  // namespace

int max_fused_tokens(Precision precision, int longest_row) {
  // Where cuBLASLt takes over, as measured (H200): SmolLM2-135M's longest row has 1,536 columns, a step of 32 tokens
  // takes 698 us by fused products and 868 by the library; Llama-3.2-1B, 8,192: 973 and 1,107 with 16 tokens, 1,247 and
  // 1,152 with 32; Llama-3-8B, 14,336: 5,201 and 4,822 with 16.
  constexpr int kShortRow = 2048;
  constexpr int kLongRow = 8192;
  if (precision == Precision::kFloat32) {
    return 1;
  }
  return longest_row <= kShortRow ? 32 : longest_row <= kLongRow ? 16 : 8;
}

void fused_qkv(const FusedLinear& linear, const Rotary& rotary, void* q, void* kv, cudaStream_t stream) {
  with_scalar(linear.precision, [&]<typename Scalar>(Scalar) {
    launch_product<Scalar>(linear, RotateAndSplit<Scalar>{rotary, static_cast<Scalar*>(q), static_cast<Scalar*>(kv)},
                           stream);
  });
}

void fused_add(const FusedLinear& linear, const Residual& residual, cudaStream_t stream) {
  COMMON_CHECK(linear.num_rows == residual.num_cols && residual.num_cols % kSquaresColumns == 0,
               "what is added has the residual stream's shape");
  with_scalar(linear.precision, [&]<typename Scalar>(Scalar) {
    launch_product<Scalar>(linear, AddToResidual<Scalar>{residual}, stream);
  });
}

void fused_gated_silu(const FusedLinear& linear, void* output, cudaStream_t stream) {
  with_scalar(linear.precision, [&]<typename Scalar>(Scalar) {
    launch_product<Scalar>(linear, GatedSilu<Scalar>(static_cast<Scalar*>(output), linear.num_rows), stream);
  });
}

void fused_logits(const FusedLinear& linear, float* logits, cudaStream_t stream) {
  with_scalar(linear.precision, [&]<typename Scalar>(Scalar) {
    launch_product<Scalar>(linear, StoreLogits(logits, linear.num_rows), stream);
  });
}

}  // namespace common
