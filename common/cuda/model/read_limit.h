// What bounds the speed of decoding on GPUs, to compare timings with.
#pragma once

#include <cstdint>

#include "common/base/machine.h"
#include "common/cuda/precision.h"
#include "common/model/llama.h"

namespace common {

// Bytes of weights that a step with one token reads: every matrix once, and one row of the embedding.
std::int64_t weight_bytes_per_token(const LlamaConfig& config, const GpuTypes& types);

// Measures this GPU's memory, for num_gpus of its kind that compute together, with up to 2 GiB of it. Throws
// OutOfDeviceMemory if less than 256 MiB are free.
ReadLimit device_read_limit(const LlamaConfig& config, const GpuTypes& types, std::int64_t bytes_per_slot,
                            int num_gpus = 1);

}  // namespace common
