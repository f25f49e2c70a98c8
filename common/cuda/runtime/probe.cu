// A kernel that does nothing: if the device can load it, it can load all others, which were compiled for the same
// architectures.
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/launch.h"

namespace common {
namespace {

__global__ void probe() {}

}  // namespace

bool can_load_kernels() {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  (void)cudaGetLastError();
  return error == cudaSuccess;
}

bool kernels_are_native() { return can_overlap(); }

bool serves_small_memory() { return kServesSmallMemory; }

}  // namespace common
