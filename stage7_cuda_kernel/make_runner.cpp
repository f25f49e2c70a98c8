#include "make_runner.h"

#include <optional>
#include <string>

#include "common/app/gpu_types.h"
#include "common/app/notes.h"
#include "common/base/check.h"
#include "cpu_runner.h"
#include "kv_cache.h"
#ifdef COURSE_CUDA
#include "common/cuda/model/read_limit.h"
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
  if (options.types.precision != common::Precision::kFloat32) {
    const std::string reason = GpuRunner::unsupported(common::kProductionKernels, config, shape, options);
    if (reason.empty() || !GpuRunner::unsupported(kPlainKernels, config, shape, options).empty()) {
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
  if (options.device == Device::kCpu) {
    return "the CPU computes in float32 only";
  }
  if (std::string reason = common::contradiction(options.types); !reason.empty()) {
    return reason;
  }
#ifdef COURSE_CUDA
  return common::has_cuda_device()
             ? GpuRunner::unsupported(choose_kernels(config, shape, options).kernels, config, shape, options)
             : common::device_obstacle();
#else
  return "this program was built without CUDA; 'cmake --preset cuda && cmake --build --preset cuda' builds one with it";
#endif
}

}  // namespace

std::unique_ptr<Runner> make_runner(const common::Llama& model, const EngineOptions& options) {
  const KvCacheShape shape = cache_shape(model.config(), options);
  const GpuOptions& gpu = options.gpu;
  // Whether the options ask for nothing that only a GPU has.
  const bool is_exact = gpu.types.is_exact();
  if (gpu.device == Device::kCpu && is_exact) {
    return std::make_unique<CpuRunner>(model, shape);
  }
  const std::string reason = obstacle(model.config(), shape, gpu);
  if (reason.empty()) {
#ifdef COURSE_CUDA
    const KernelChoice choice = choose_kernels(model.config(), shape, gpu);
    common::print_note("computing on " + common::device_limits().name + " in " + common::to_string(gpu.types) +
                       choice.note);
    return std::make_unique<GpuRunner>(model, shape, gpu, options.chunk_size, choice.kernels);
#endif
  }
  if (gpu.device != Device::kAuto || !is_exact) {
    throw common::InputError(reason);
  }
  common::note_cpu(reason);
  return std::make_unique<CpuRunner>(model, shape);
}

std::optional<common::ReadLimit> read_limit([[maybe_unused]] const common::Llama& model,
                                            [[maybe_unused]] const EngineOptions& options,
                                            [[maybe_unused]] const CacheSize& cache) {
#ifdef COURSE_CUDA
  const GpuOptions& gpu = options.gpu;
  if (gpu.device != Device::kCpu && obstacle(model.config(), cache_shape(model.config(), options), gpu).empty()) {
    return common::device_read_limit(model.config(), gpu.types, cache.bytes_per_slot);
  }
#endif
  return std::nullopt;
}

}  // namespace
