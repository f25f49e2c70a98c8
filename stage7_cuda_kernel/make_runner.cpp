#include "make_runner.h"

#include <string>

#include "common/app/notes.h"
#include "common/base/check.h"
#include "cpu_runner.h"
#include "kv_cache.h"
#ifdef COURSE_CUDA
#include "common/cuda/runtime/device.h"
#include "gpu_runner.h"
#include "kernels/kernels.h"
#ifdef COURSE_PRODUCTION
#include "common/paged/production_kernels.h"
#endif
#endif

namespace stage7 {

namespace {

KvCacheShape cache_shape(const common::LlamaConfig& config, const EngineOptions& options) {
  KvCacheShape shape;
  shape.num_layers = config.num_layers;
  shape.num_blocks = blocks_needed(options.num_slots, options.block_size);
  shape.block_size = options.block_size;
  shape.num_heads = config.num_heads;
  shape.num_kv_heads = config.num_kv_heads;
  shape.head_dim = config.head_dim;
  return shape;
}

#ifdef COURSE_CUDA
// The one place that knows common/paged/: if it is built, its kernels are used where they serve the shape.
struct KernelChoice {
  const common::PagedKernels& kernels = kPlainKernels;
  std::string note;  // why the faster kernels are not used
};

KernelChoice choose_kernels([[maybe_unused]] const common::LlamaConfig& config,
                            [[maybe_unused]] const KvCacheShape& shape, [[maybe_unused]] const GpuOptions& options) {
#ifdef COURSE_PRODUCTION
  if (options.precision != Precision::kFloat32) {
    const std::string reason = GpuRunner::unsupported(common::kProductionKernels, config, shape, options);
    if (reason.empty() || options.kv_cache == KvCacheType::kFloat8) {
      return {.kernels = common::kProductionKernels, .note = {}};
    }
    return {.note = ", with the plain kernels: " + reason};
  }
#endif
  return {};
}
#endif

// Why no GPU can be used; empty if one can.
std::string obstacle([[maybe_unused]] const common::LlamaConfig& config, [[maybe_unused]] const KvCacheShape& shape,
                     const GpuOptions& options) {
  const bool is_float8 = options.kv_cache == KvCacheType::kFloat8;
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
  if (options.activations == ActivationType::kFloat8 && options.weights != WeightType::kFloat8) {
    return "activations in float8 need --weights fp8: the library multiplies float8 by float8";
  }
#ifdef COURSE_CUDA
  return common::has_cuda_device()
             ? GpuRunner::unsupported(choose_kernels(config, shape, options).kernels, config, shape, options)
             : common::device_obstacle();
#else
  return "this program was built without CUDA";
#endif
}

}  // namespace

std::unique_ptr<Runner> make_runner(const common::Llama& model, const EngineOptions& options) {
  const KvCacheShape shape = cache_shape(model.config(), options);
  const GpuOptions& gpu = options.gpu;
  // Whether the options ask for nothing that only a GPU has.
  const bool is_exact = gpu.precision == Precision::kFloat32 && gpu.kv_cache == KvCacheType::kAuto &&
                        gpu.weights == WeightType::kAuto && gpu.activations == ActivationType::kAuto;
  if (gpu.device == Device::kCpu && is_exact) {
    return std::make_unique<CpuRunner>(model, shape);
  }
  const std::string reason = obstacle(model.config(), shape, gpu);
  if (reason.empty()) {
#ifdef COURSE_CUDA
    const KernelChoice choice = choose_kernels(model.config(), shape, gpu);
    common::print_note("computing on " + common::device_limits().name +
                       (gpu.precision == Precision::kFloat32 ? " in float32" : " in bfloat16") +
                       (gpu.kv_cache == KvCacheType::kFloat8 ? ", K and V in float8" : "") +
                       (gpu.weights == WeightType::kFloat8 ? ", weights in float8" : "") +
                       (gpu.activations == ActivationType::kFloat8 ? ", activations too" : "") + choice.note);
    return std::make_unique<GpuRunner>(model, shape, gpu, options.chunk_size, choice.kernels);
#endif
  }
  if (gpu.device != Device::kAuto || !is_exact) {
    throw common::InputError(reason);
  }
  common::note_cpu(reason);
  return std::make_unique<CpuRunner>(model, shape);
}

}  // namespace
