// The types of numbers on a GPU, as options and in words.
#pragma once

#include <string>

#include "common/app/command.h"
#include "common/cuda/precision.h"

namespace common {

// --precision, --kv-cache, --weights, --activations
void add_type_options(Command& command, GpuTypes& types);

// Why these types do not go together; empty if they do.
std::string contradiction(const GpuTypes& types);

// "bfloat16, weights in float8"
std::string to_string(const GpuTypes& types);

}  // namespace common
