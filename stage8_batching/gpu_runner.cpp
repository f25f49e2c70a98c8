#include "gpu_runner.h"

#include <iostream>
#include <set>
#include <string>

#include "common/base/check.h"
#ifdef COURSE_CUDA
#include "common/cuda/runtime/device.h"
#include "kernels/cuda_runner.h"
#include "kernels/tensor_parallel_runner.h"
#endif

namespace stage8 {

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
                     const GpuOptions& options) {
  const bool is_float8 = options.kv_cache == KvCacheType::kFloat8;
  if (options.device == Device::kCpu && options.tensor_parallel > 1) {
    return "--tensor-parallel is for GPUs";
  }
  if (options.device == Device::kCpu && options.weights == WeightType::kFloat8) {
    return "the CPU reads weights as the file has them, not in float8";
  }
  if (options.device == Device::kCpu) {
    return is_float8 ? "the CPU stores K and V in float32 only" : "the CPU computes in float32 only";
  }
  if (is_float8 && options.precision != Precision::kBFloat16) {
    return "K and V in float8 need --precision bf16: their kernels multiply them with queries of 16 bits";
  }
  if (options.weights == WeightType::kFloat8 && options.precision != Precision::kBFloat16) {
    return "weights in float8 need --precision bf16: their kernels multiply them with activations of 16 bits";
  }
#ifdef COURSE_CUDA
  if (options.tensor_parallel > 1) {
    return TensorParallelRunner::unsupported(config, shape, options);
  }
  return common::has_cuda_device() ? CudaRunner::unsupported(config, shape, options) : common::device_obstacle();
#else
  return "this program was built without CUDA";
#endif
}

}  // namespace

std::unique_ptr<GpuRunner> make_gpu_runner(const common::Llama& model, const KvCacheShape& shape,
                                           const GpuOptions& options, [[maybe_unused]] int chunk_size,
                                           [[maybe_unused]] int max_sequences,
                                           [[maybe_unused]] const GpuCacheSize& size) {
  // What the CPU can do as well.
  const bool is_exact = options.precision == Precision::kFloat32 && options.kv_cache == KvCacheType::kAuto &&
                        options.weights == WeightType::kAuto && options.tensor_parallel == 1;
  if (options.device == Device::kCpu && is_exact) {
    return nullptr;
  }
  const std::string reason = obstacle(model.config(), shape, options);
  if (reason.empty()) {
#ifdef COURSE_CUDA
    const bool is_parallel = options.tensor_parallel > 1;
    tell((is_parallel ? std::to_string(options.tensor_parallel) + " x " : "") + common::device_limits().name +
         (options.precision == Precision::kFloat32 ? " in float32" : " in bfloat16") +
         (options.kv_cache == KvCacheType::kFloat8 ? ", K and V in float8" : "") +
         (options.weights == WeightType::kFloat8 ? ", weights in float8" : ""));
    if (is_parallel) {
      return std::make_unique<TensorParallelRunner>(model, shape, options, chunk_size, max_sequences, size);
    }
    return std::make_unique<CudaRunner>(model, shape, options, chunk_size, max_sequences, size);
#endif
  }
  if (options.device != Device::kAuto || !is_exact) {
    throw common::InputError(reason);
  }
  tell("the CPU: " + reason);
  return nullptr;
}

}  // namespace
