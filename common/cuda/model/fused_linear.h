// Matrix products for the tokens of a decode step, with everything around them fused in. Reading the weights takes most
// of the time, so their copies start before the previous launch has finished. Three kernels do that: one for a handful
// of tokens (fused_kernel.cuh), and on Hopper two by tiles (tiled_kernel.cuh, wide_kernel.cuh). product_kernel.h
// chooses.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda/model/linear_arguments.h"
#include "common/cuda/model/pushed_sum.h"

namespace common {

// q: [num_tokens, q_rows]; kv: [num_tokens, 2 * kv_rows], K and then V.
void fused_qkv(const FusedLinear& linear, const Rotary& rotary, void* q, void* kv, cudaStream_t stream);

// Adds the product to the residual stream.
void fused_add(const FusedLinear& linear, const Residual& residual, cudaStream_t stream);

// The product is a part of a sum over several GPUs, and goes to all of them (pushed_sum.h).
void fused_push(const FusedLinear& linear, const PushedPart& part, cudaStream_t stream);

// The rows of the weights alternate between gate and up. output: [num_tokens, num_rows / 2]: silu(gate) * up.
void fused_gated_silu(const FusedLinear& linear, void* output, cudaStream_t stream);

// logits: [num_tokens, num_rows].
void fused_logits(const FusedLinear& linear, float* logits, cudaStream_t stream);

}  // namespace common
