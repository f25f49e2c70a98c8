// The producers of common/paged/prefill_float8.cuh by themselves, for the executor, which has no wgmma.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>

#include "common/paged/paged_kernels.h"

namespace tests {

// The tokens of one sequence that producers load, from first_token to num_seen, `times` times.
struct LoadedTokens {
  common::Pages pages;  // float8
  const int* table;
  int kv_head;
  int first_token;  // a multiple of 128
  int num_hidden;   // less than 128: blocks that end before first_token + num_hidden are not read
  int num_seen;
  int times;
  // [num_seen - first_token, head_dim]: what consumers find in the rings, the last time.
  __nv_bfloat16* keys;
  __nv_bfloat16* values;
};

inline constexpr int kLoadThreads = 384;
// For heads of 64 dimensions, and of 128.
__global__ void load_tiles_64(LoadedTokens tokens);
__global__ void load_tiles_128(LoadedTokens tokens);
// Dynamic shared memory of each.
std::size_t load_tiles_bytes(int head_dim);

}  // namespace tests
