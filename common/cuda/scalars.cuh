// The two element types of the model, for kernels.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace common {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename Scalar>
__device__ __forceinline__ Scalar from_float(float x) {
  if constexpr (sizeof(Scalar) == 4) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Two neighbours, as everything that comes in pairs is stored: rotated numbers, and a gate with its up. 8 or 4 bytes.
template <typename Scalar>
struct alignas(2 * sizeof(Scalar)) Pair {
  Scalar first;
  Scalar second;
};

template <typename Scalar>
__device__ __forceinline__ Pair<Scalar> make_pair(float first, float second) {
  return {from_float<Scalar>(first), from_float<Scalar>(second)};
}

// Four neighbours that lie in memory as they are. From L2: activations are written by one launch and read by the next,
// which may already run by then, and nothing of them is worth a place in L1.
__device__ __forceinline__ float4 load_shared_floats(const float* source) {
  return __ldcg(reinterpret_cast<const float4*>(source));
}

// silu(gate) * up, with silu(x) = x / (1 + exp(-x)).
__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0F + expf(-gate)) * up; }

// The sum over a warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFU, value, distance);
  }
  return value;
}

}  // namespace common
