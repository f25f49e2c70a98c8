#include "spread_tables.h"

#include <cstdint>

#include "common/cuda/device.h"

namespace stage8 {
namespace {

constexpr unsigned kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    spread_kernel(const int* flat, const int* starts, int max_blocks, int* tables) {
  const int first = starts[blockIdx.x];
  const int length = starts[blockIdx.x + 1] - first;
  int* const row = tables + std::int64_t{blockIdx.x} * max_blocks;
  for (int i = static_cast<int>(threadIdx.x); i < length; i += kThreads) {
    row[i] = flat[first + i];
  }
}

}  // namespace

void spread_tables(const int* flat, const int* starts, int num_sequences, int max_blocks, int* tables,
                   cudaStream_t stream) {
  spread_kernel<<<static_cast<unsigned>(num_sequences), kThreads, 0, stream>>>(flat, starts, max_blocks, tables);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace
