// What a kernel does with two sums of a product, of rows `row` and `row` + 1 for one token. load_epilogue() loads what
// that needs while the sums are computed. Whole warps call these; lanes with `exists` have sums.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/cuda/model/linear_arguments.h"
#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"

namespace common {

struct NoEpilogueLoads {
  __device__ __forceinline__ void prefetch(int) const {}
  __device__ __forceinline__ float4 load_epilogue(int, int) const { return {}; }
};

// kGeneral: there may be a bias, and perhaps nothing is rotated.
template <typename Scalar, bool kGeneral = true>
struct RotateAndSplit {
  Rotary rotary{};
  Scalar* q = nullptr;
  Scalar* kv = nullptr;

  __device__ __forceinline__ void prefetch(int) const {}
  __device__ __forceinline__ float4 load_epilogue(int token, int row) const {
    const int half = rotary.head_dim / 2;
    float2 bias{};
    if constexpr (kGeneral) {
      bias = rotary.bias == nullptr ? float2{} : *reinterpret_cast<const float2*>(rotary.bias + row);
    }
    if (row >= rotary.q_rows + rotary.kv_rows || (kGeneral && rotary.rotation == nullptr)) {
      return {1.0F, 0.0F, bias.x, bias.y};
    }
    const float2 turn = __ldcg(rotary.rotation + token * half + row / 2 % half);
    return {turn.x, turn.y, bias.x, bias.y};
  }
  __device__ __forceinline__ void operator()(bool exists, int token, int row, float4 turn, float2 sum) const {
    if (!exists) {
      return;
    }
    if constexpr (kGeneral) {
      sum = {sum.x + turn.z, sum.y + turn.w};
    }
    Scalar* const destination =
        row < rotary.q_rows ? q + token * rotary.q_rows + row : kv + token * 2 * rotary.kv_rows + row - rotary.q_rows;
    *reinterpret_cast<Pair<Scalar>*>(destination) =
        make_pair<Scalar>(sum.x * turn.x - sum.y * turn.y, sum.x * turn.y + sum.y * turn.x);
  }
};

// kSquaresColumns: the columns of each sum of squares. The lanes that have these columns are neighbours, two each.
template <typename Scalar, int kSquaresColumns>
struct AddToResidual {
  Residual residual{};

  __device__ __forceinline__ void prefetch(int row) const {
    if (row < residual.num_cols) {
      prefetch_to_l2(residual.norm + row);
    }
  }
  __device__ __forceinline__ float4 load_epilogue(int token, int row) const {
    const float2 before = __ldcg(reinterpret_cast<const float2*>(residual.values + token * residual.num_cols + row));
    const float2 norm = *reinterpret_cast<const float2*>(residual.norm + row);
    return {before.x, before.y, norm.x, norm.y};
  }
  // Returns the sum times the next norm's weights, and adds its squares to `squares`.
  __device__ __forceinline__ Pair<Scalar> add(int token, int row, float4 loaded, float2 sum, float& squares) const {
    const float2 after = {loaded.x + sum.x, loaded.y + sum.y};
    *reinterpret_cast<float2*>(residual.values + token * residual.num_cols + row) = after;
    squares += after.x * after.x + after.y * after.y;
    return make_pair<Scalar>(after.x * loaded.z, after.y * loaded.w);
  }
  __device__ __forceinline__ Scalar* weighted(int token, int row) const {
    return static_cast<Scalar*>(residual.weighted) + token * residual.num_cols + row;
  }
  // Of the columns from `row` on.
  __device__ __forceinline__ void store_squares(int token, int row, float squares) const {
    const int count = (residual.num_cols + kSquaresColumns - 1) / kSquaresColumns;
    if (row % kSquaresColumns == 0) {
      residual.squares[token * count + row / kSquaresColumns] = squares;
    }
  }
  __device__ __forceinline__ void operator()(bool exists, int token, int row, float4 loaded, float2 sum) const {
    float squares = 0.0F;
    if (exists) {
      *reinterpret_cast<Pair<Scalar>*>(weighted(token, row)) = add(token, row, loaded, sum, squares);
    }
#pragma unroll
    for (int distance = 1; distance < kSquaresColumns / 2; distance *= 2) {
      squares += __shfl_xor_sync(0xFFFFFFFFU, squares, distance);
    }
    if (exists) {
      store_squares(token, row, squares);
    }
  }
};

template <typename Scalar>
struct GatedSilu : NoEpilogueLoads {
  Scalar* output = nullptr;
  int num_rows = 0;

  GatedSilu() = default;
  GatedSilu(Scalar* to, int rows) : output(to), num_rows(rows) {}
  __device__ __forceinline__ Scalar* destination(int token, int row) const {
    return output + (token * num_rows + row) / 2;
  }
  __device__ __forceinline__ void operator()(bool exists, int token, int row, float4, float2 sum) const {
    if (exists) {
      *destination(token, row) = from_float<Scalar>(gated_for<Scalar>(sum.x, sum.y));
    }
  }
};

// Stores the sums in the memory of several GPUs, each with the number of the sum that they are a part of.
struct PushSums {
  PushedPart part{};

  __device__ __forceinline__ void prefetch(int) const {}
  __device__ __forceinline__ float4 load_epilogue(int token, int row) const {
    const unsigned number = __ldcg(part.number.first_numbers + token) + part.number.index;
    float2 before{};
    if (part.residual != nullptr) {
      before = __ldcg(reinterpret_cast<const float2*>(part.residual + token * part.num_cols + row));
    }
    return {before.x, before.y, __uint_as_float(number), 0.0F};
  }
  __device__ __forceinline__ void operator()(bool exists, int token, int row, float4 loaded, float2 sum) const {
    if (exists) {
      const unsigned number = __float_as_uint(loaded.z);
      const PushedPair pair = {__float_as_uint(loaded.x + sum.x), number, __float_as_uint(loaded.y + sum.y), number};
      const int place = (token * part.num_cols + row) / 2;
      for (int i = 0; i < part.num_places; ++i) {
        store_two_words_system(part.places[i] + place, pair);
      }
    }
  }
};

struct StoreLogits : NoEpilogueLoads {
  float* logits = nullptr;
  int num_rows = 0;

  StoreLogits() = default;
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

}  // namespace common
