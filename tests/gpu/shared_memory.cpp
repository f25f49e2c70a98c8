// COURSE_SHARED_BYTES=101376 gpu_decode_attention_stage7: kernels get no more than this many bytes of shared memory for
// a thread block, here 99 KB, as on an RTX 3090 or 4090. For builds that have the kernels for such GPUs, as
// CUDAARCHS=80-virtual.
#include <cstdlib>
#include <iostream>
#include <string>

#include "common/cuda/runtime/device.h"

namespace {

const bool kIsLimited = [] {
  if (const char* text = std::getenv("COURSE_SHARED_BYTES"); text != nullptr) {
    common::shared_memory_limit = std::stoull(text);
    std::cout << "thread blocks have at most " << common::shared_memory_limit << " bytes of shared memory" << std::endl;
  }
  return true;
}();

}  // namespace
