// The options of an engine, of its scheduler and of its runner.
#pragma once

#include <algorithm>
#include <optional>

#include "attention.h"
#include "common/cuda/precision.h"
#include "common/cuda/several/all_reduce.h"
#include "common/model/llama.h"
#include "scheduler.h"

namespace stage8 {

enum class Device { kAuto, kCpu, kGpu };
using common::AllReduce;

struct GpuOptions {
  Device device = Device::kAuto;  // kAuto: the GPU if there is one, else the CPU, with a note on stderr
  // Of weights, activations, K and V. Sums are always float32. float32 gives the text of all other stages; bfloat16
  // reads half the bytes.
  common::GpuTypes types = {};
  int tensor_parallel = 1;  // how many GPUs compute the model together, each with a part of every matrix
  AllReduce all_reduce = AllReduce::kNccl;
};

struct EngineOptions {
  // The cache's size, in tokens. Absent: as large as fits, see common/app/cache_room.h.
  std::optional<int> num_slots = 4096;
  // As large as fits: on a GPU this share of the memory that weights and workspaces leave free; on a CPU min_slots, if
  // they need at most half of the free memory.
  double memory_fraction = 0.9;
  int min_slots = 4096;
  // Max tokens of a prompt and its reply together; 0: the model's limit.
  int context_length = 0;
  // What a step may have. Its token_budget bounds the memory of the activations, however long a prompt is, and its
  // max_sequences that of the logits.
  SchedulerOptions scheduler = {};
  // Slots in a block. The cache is rounded up to whole blocks.
  int block_size = 16;
  // Whether sequences share blocks that others, live or ended, have computed.
  bool prefix_cache = true;
  GpuOptions gpu = {};
  // Room in the host's memory for sequences that are swapped out, in tokens.
  int num_host_slots = 0;
};

// Max tokens of a prompt and its reply together.
inline int max_context(const common::LlamaConfig& config, const EngineOptions& options) {
  return options.context_length > 0 ? std::min(options.context_length, config.context_length) : config.context_length;
}

}  // namespace
