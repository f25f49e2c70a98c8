// Chooses the runner. Only this file knows all kinds of runners.
#pragma once

#include <memory>
#include <optional>

#include "common/app/cache_room.h"
#include "common/base/machine.h"
#include "common/model/llama.h"
#include "engine_options.h"
#include "runner.h"

namespace stage8 {

// How much of a GPU's memory the cache may use if the options do not have its size.
common::MemoryShare memory_share(const common::LlamaConfig& config, const EngineOptions& options);

// A runner on GPUs or on the CPU, as the options say. With Device::kAuto it is the GPU, or the CPU with a note on
// stderr if there is no GPU or its kernels do not support the shape. Throws InputError if the options can't be met, or
// if the memory is too small. The model must outlive the runner.
// Prints the cache's size on stderr if the options do not have it.
std::unique_ptr<Runner> make_runner(const common::Llama& model, const EngineOptions& options);

// What a runner with these options can read on a GPU, measured. Empty if it is on the CPU.
std::optional<common::ReadLimit> read_limit(const common::Llama& model, const EngineOptions& options,
                                            const CacheSize& cache);

}  // namespace
