#include "gpu_runner.h"

#include <iostream>
#include <set>
#include <string>

#include "common/base/check.h"
#ifdef COURSE_CUDA
#include "common/cuda/device.h"
#include "kernels/cuda_runner.h"
#endif

namespace stage7 {

namespace {

// Says where the work is done: once, and on stderr, apart from the results.
void tell(const std::string& where) {
  static std::set<std::string> said;
  if (said.insert(where).second) {
    std::cerr << "note: computing on " << where << "\n";
  }
}

// Why there can be no runner; empty if there can.
std::string obstacle([[maybe_unused]] const common::LlamaConfig& config, [[maybe_unused]] const KvCacheShape& shape,
                     [[maybe_unused]] Precision precision) {
#ifdef COURSE_CUDA
  return common::has_cuda_device() ? CudaRunner::unsupported(config, shape, precision)
                                   : "there is no GPU here that the kernels run on";
#else
  return "this program was built without CUDA";
#endif
}

}  // namespace

std::unique_ptr<GpuRunner> make_gpu_runner(const common::Llama& model, const KvCacheShape& shape,
                                           const GpuOptions& options, [[maybe_unused]] int chunk_size) {
  if (options.device == Device::kCpu && options.precision == Precision::kFloat32) {
    return nullptr;
  }
  const std::string reason = options.device == Device::kCpu ? "the CPU computes in float32 only"
                                                            : obstacle(model.config(), shape, options.precision);
  if (reason.empty()) {
#ifdef COURSE_CUDA
    tell(common::device_limits().name + (options.precision == Precision::kFloat32 ? " in float32" : " in bfloat16"));
    return std::make_unique<CudaRunner>(model, shape, options.precision, chunk_size);
#endif
  }
  if (options.device != Device::kAuto || options.precision != Precision::kFloat32) {
    throw common::InputError(reason);
  }
  tell("the CPU: " + reason);
  return nullptr;
}

}  // namespace
