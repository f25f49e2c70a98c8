// The options of an engine and of its runner.
#pragma once

#include "attention.h"
#include "common/cuda/precision.h"

namespace stage7 {

enum class Device { kAuto, kCpu, kGpu };
// The type of weights, activations, K and V. Sums are always float32. float32 gives the text of all other stages;
// bfloat16 reads half the bytes.
using common::Precision;
// The type of the layers' weights: the precision's, or float8 (e4m3 with a scale for each row), which reads fewer
// bytes.
using common::WeightType;
// What float8 weights are multiplied with: activations in bfloat16, or in steps of many tokens float8 too.
using common::ActivationType;
// The type of K and V in the pages: the precision's, or float8 (e4m3 with a scale for each token and head), which needs
// bfloat16.
enum class KvCacheType { kAuto, kFloat8 };

struct GpuOptions {
  Device device = Device::kAuto;  // kAuto: the GPU if there is one, else the CPU, with a note on stderr
  Precision precision = Precision::kFloat32;
  KvCacheType kv_cache = KvCacheType::kAuto;
  WeightType weights = WeightType::kAuto;
  ActivationType activations = ActivationType::kAuto;
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
