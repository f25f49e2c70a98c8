#include "common/cuda/runtime/launch.h"

#include <map>
#include <utility>

namespace common {

void prepare_kernel(const void* kernel, std::size_t shared_bytes, bool without_l1) {
  struct Attributes {
    std::size_t shared_bytes = 40 * 1024;  // without opting in, a kernel gets 48 KB, its static arrays included
    bool without_l1 = false;
  };
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
