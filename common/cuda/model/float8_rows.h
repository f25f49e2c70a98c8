// Small kernels that write activations in float8, for products with float8 weights. All pointers are device pointers.
// Their only caller, CudaLlama, checks the shapes. Launches overlap: see launch.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/cuda/model/llama_kernels.h"

namespace common {

// Activations, e4m3 times a scale for each row. The columns of a row are a multiple of 16 and lie in the order of
// float8 weights (scalars.cuh): a product may add up its columns in any order that both sides have.
//
// Before it is rounded, a row is divided by the smallest power of 2 with which no number is beyond 448, at least
// 2^-100. A row with a NaN or an infinity becomes NaN, scale included.
struct Float8Rows {
  std::uint8_t* values = nullptr;  // [num_tokens, num_cols]
  float* scales = nullptr;         // [num_tokens]
};

// A product of such rows with float8 weights, as the library leaves it.
struct Float8Product {
  const void* sums = nullptr;  // [num_tokens, num_rows], bfloat16
  SumScales scales;
};

// rows: [num_tokens, num_cols], bfloat16.
void round_to_float8(const void* rows, int num_cols, int num_tokens, const Float8Rows& to, cudaStream_t stream);

// rms_norm of all rows of a residual stream. What the norm multiplies a row by becomes a part of its scale.
void rms_norm_to_float8(const Norm& norm, int num_tokens, const Float8Rows& to, cudaStream_t stream);

// The same after the product has been added to the stream. Its tokens' scales may lie where new ones are written.
void add_and_norm_to_float8(const Float8Product& product, const Residual& residual, float epsilon, int num_tokens,
                            const Float8Rows& to, cudaStream_t stream);

// gated_silu of a product, [num_tokens, 2 * size]. Its tokens' scales may lie where new ones are written.
void gated_silu_to_float8(const Float8Product& gate_up, int size, int num_tokens, const Float8Rows& to,
                          cudaStream_t stream);

}  // namespace common
