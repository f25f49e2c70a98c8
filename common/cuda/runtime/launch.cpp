#include "common/cuda/runtime/launch.h"

#include <limits>
#include <map>
#include <string>
#include <utility>

namespace common {
namespace {

// As a GPU that has no more would refuse it.
void check_limit(const void* kernel, std::size_t shared_bytes) {
  cudaFuncAttributes attributes{};
  CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  const std::size_t bytes = shared_bytes + attributes.sharedSizeBytes;
  if (bytes > shared_memory_limit) {
    throw CudaError("a kernel asks for " + std::to_string(bytes) + " bytes of shared memory for a thread block, and " +
                    std::to_string(shared_memory_limit) + " is the limit that a test has set");
  }
}

}  // namespace

void prepare_kernel(const void* kernel, std::size_t shared_bytes, bool without_l1) {
  struct Attributes {
    std::size_t shared_bytes = 0;  // without opting in there are 48 KB, which static arrays may fill by themselves
    bool without_l1 = false;
  };
  if (shared_memory_limit != std::numeric_limits<std::size_t>::max()) {
    check_limit(kernel, shared_bytes);
  }
  // Each thread's own, so that launches take no lock. Setting an attribute once more, in another thread, is harmless.
  thread_local std::map<std::pair<int, const void*>, Attributes> all;
  Attributes& set = all[{current_device(), kernel}];
  if (shared_bytes > set.shared_bytes) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
    set.shared_bytes = shared_bytes;
  }
  if (without_l1 && !set.without_l1) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    set.without_l1 = true;
  }
}

}  // namespace common
