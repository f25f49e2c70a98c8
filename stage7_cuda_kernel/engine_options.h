// The options of an engine and of its runner.
#pragma once

#include "attention.h"
#include "common/cuda/precision.h"

namespace stage7 {

enum class Device { kAuto, kCpu, kGpu };

struct GpuOptions {
  Device device = Device::kAuto;  // kAuto: the GPU if there is one, else the CPU, with a note on stderr
  // Of weights, activations, K and V. Sums are always float32. float32 gives the text of all other stages; bfloat16
  // reads half the bytes.
  common::GpuTypes types = {};
};

struct EngineOptions {
  // The cache's size, in tokens.
  int num_slots = 4096;
  // Max tokens in one forward pass: bounds the memory of the activations, however long the prompt is.
  int chunk_size = 256;
  // Slots in a block. The cache is rounded up to whole blocks.
  int block_size = 16;
  // Whether sequences share blocks that others, live or ended, have computed.
  bool prefix_cache = true;
  GpuOptions gpu = {};
};

}  // namespace
