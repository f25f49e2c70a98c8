// Chooses the runner: the one place that knows which there are.
#pragma once

#include <memory>

#include "common/model/llama.h"
#include "engine_options.h"
#include "runner.h"

namespace stage7 {

// On a GPU or on the CPU: by request or, with Device::kAuto and a note on stderr, on the CPU if there is no GPU or its
// kernels do not support the shape. Throws InputError if the options can't be met, or if the memory is too small. The
// model must outlive the runner.
std::unique_ptr<Runner> make_runner(const common::Llama& model, const EngineOptions& options);

}  // namespace
