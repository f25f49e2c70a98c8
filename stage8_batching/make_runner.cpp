#include "make_runner.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "common/app/cache_room.h"
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
#include "production/recording_runner.h"
#include "production/tensor_parallel_runner.h"
#endif
#endif
#ifdef COURSE_PRODUCTION
#include "production/cpu/scoring_cpu_runner.h"
#endif

namespace stage8 {

namespace {

// The model's, with the context that the options allow.
common::LlamaConfig limited(common::LlamaConfig config, const EngineOptions& options) {
  config.context_length = max_context(config, options);
  return config;
}

// num_blocks: from the options, if they have a number of slots.
KvCacheShape cache_shape(const common::LlamaConfig& config, const EngineOptions& options) {
  KvCacheShape shape;
  shape.num_layers = config.num_layers;
  shape.num_blocks = blocks_needed(options.num_slots.value_or(0), options.block_size);
  shape.block_size = options.block_size;
  shape.num_heads = config.num_heads;
  shape.num_kv_heads = config.num_kv_heads;
  shape.head_dim = config.head_dim;
  shape.num_host_blocks = blocks_needed(options.num_host_slots, options.block_size);
  return shape;
}

// If production/ and common/paged/ are built, the first one's runners are used, and the second one's kernels if they
// serve the shape.
#ifdef COURSE_PRODUCTION
using BuiltCpuRunner = ScoringCpuRunner;
#else
using BuiltCpuRunner = CpuRunner;
#endif
#ifdef COURSE_CUDA
#ifdef COURSE_PRODUCTION
using BuiltGpuRunner = RecordingRunner;
#else
using BuiltGpuRunner = GpuRunner;
#endif

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
  if (options.device == Device::kCpu && options.tensor_parallel > 1) {
    return "--tensor-parallel is for GPUs";
  }
  if (options.device == Device::kCpu) {
    return "the CPU computes in float32 only";
  }
  if (std::string reason = common::contradiction(options.types); !reason.empty()) {
    return reason;
  }
#ifdef COURSE_CUDA
  const common::PagedKernels& kernels = choose_kernels(config, shape, options).kernels;
  if (options.tensor_parallel > 1) {
#ifdef COURSE_PRODUCTION
    return TensorParallelRunner::unsupported(kernels, config, shape, options);
#else
    return "--tensor-parallel needs production/, which is left out of this build (COURSE_PRODUCTION)";
#endif
  }
  return common::has_cuda_device() ? BuiltGpuRunner::unsupported(kernels, config, shape, options)
                                   : common::device_obstacle();
#else
  return "this program was built without CUDA; 'cmake --preset cuda && cmake --build --preset cuda' builds one with it";
#endif
}

std::unique_ptr<Runner> make_cpu_runner(const common::Llama& model, const EngineOptions& options, KvCacheShape shape) {
  common::CacheRoom room{shape.num_blocks, ""};
  if (!options.num_slots.has_value()) {
    room = common::room_in_host(options.min_slots, EngineOptions().min_slots, shape.block_size, shape.bytes_per_slot());
    shape.num_blocks = room.num_blocks;
  }
  return std::make_unique<BuiltCpuRunner>(model, shape, room.reason);
}

#ifdef COURSE_CUDA
std::unique_ptr<Runner> make_gpu_runner(const common::Llama& model, const EngineOptions& options,
                                        const KvCacheShape& shape) {
  const GpuOptions& gpu = options.gpu;
  const bool is_parallel = gpu.tensor_parallel > 1;
  const KernelChoice choice = choose_kernels(model.config(), shape, gpu);
  common::print_note("computing on " + (is_parallel ? std::to_string(gpu.tensor_parallel) + " x " : std::string()) +
                     common::device_limits().name + " in " + common::to_string(gpu.types) + choice.note);
  std::optional<common::MemoryShare> share;
  if (!options.num_slots.has_value()) {
    share = memory_share(model.config(), options);
  }
#ifdef COURSE_PRODUCTION
  if (is_parallel) {
    return std::make_unique<TensorParallelRunner>(model, shape, gpu, options.scheduler.token_budget,
                                                  options.scheduler.max_sequences, choice.kernels, share);
  }
#endif
  return std::make_unique<BuiltGpuRunner>(model, shape, gpu, options.scheduler.token_budget,
                                          options.scheduler.max_sequences, choice.kernels, share);
}
#endif

std::unique_ptr<Runner> choose_runner(const common::Llama& model, const EngineOptions& options) {
  const KvCacheShape shape = cache_shape(model.config(), options);
  const GpuOptions& gpu = options.gpu;
  // Whether the options ask for nothing that only a GPU has.
  const bool is_exact = gpu.types.is_exact() && gpu.tensor_parallel == 1;
  if (gpu.device == Device::kCpu && is_exact) {
    return make_cpu_runner(model, options, shape);
  }
  const std::string reason = obstacle(limited(model.config(), options), shape, gpu);
  if (reason.empty()) {
#ifdef COURSE_CUDA
    return make_gpu_runner(model, options, shape);
#endif
  }
  if (gpu.device != Device::kAuto || !is_exact) {
    throw common::InputError(reason);
  }
  common::note_cpu(reason);
  return make_cpu_runner(model, options, shape);
}

}  // namespace

common::MemoryShare memory_share(const common::LlamaConfig& config, const EngineOptions& options) {
  const std::int64_t filled = std::int64_t{options.scheduler.max_sequences} * max_context(config, options);
  return {options.memory_fraction, std::max<std::int64_t>(filled, options.min_slots)};
}

std::unique_ptr<Runner> make_runner(const common::Llama& model, const EngineOptions& options) {
  std::unique_ptr<Runner> runner = choose_runner(model, options);
  if (const CacheSize& size = runner->cache(); !size.reason.empty()) {
    common::print_note(
        common::cache_note(std::int64_t{size.num_blocks} * size.block_size, size.bytes_per_slot, size.reason));
  }
  return runner;
}

std::optional<common::ReadLimit> read_limit([[maybe_unused]] const common::Llama& model,
                                            [[maybe_unused]] const EngineOptions& options,
                                            [[maybe_unused]] const CacheSize& cache) {
#ifdef COURSE_CUDA
  const GpuOptions& gpu = options.gpu;
  const common::LlamaConfig config = limited(model.config(), options);
  if (gpu.device != Device::kCpu && obstacle(config, cache_shape(config, options), gpu).empty()) {
    return common::device_read_limit(model.config(), gpu.types, cache.bytes_per_slot, gpu.tensor_parallel);
  }
#endif
  return std::nullopt;
}

}  // namespace
