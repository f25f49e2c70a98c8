// What can be chosen about an engine, and about the runner under it.
#pragma once

#include "attention.h"
#include "common/cuda/model/precision.h"

namespace stage7 {

enum class Device { kAuto, kCpu, kGpu };
// Of weights, activations, K and V. Sums are float32 either way. float32 gives the text of all other stages; bfloat16
// reads half the bytes.
using common::Precision;
// Of the weights of the layers: that of the precision, or float8 (e4m3 with a scale for each row), likewise.
using common::WeightType;
// Of K and V in the pages: that of the precision, or float8 (e4m3 with a scale for each token and head), which goes
// with bfloat16.
enum class KvCacheType { kAuto, kFloat8 };

struct GpuOptions {
  Device device = Device::kAuto;  // kAuto: the GPU if there is one, else the CPU, with a note on stderr
  Precision precision = Precision::kFloat32;
  KvCacheType kv_cache = KvCacheType::kAuto;
  WeightType weights = WeightType::kAuto;
};

struct EngineOptions {
  // The cache's size, in tokens.
  int num_slots = 4096;
  // Max tokens in one forward pass: bounds the memory of the activations, however long the prompt is.
  int chunk_size = 256;
  // Slots in a block. The cache is rounded up to whole blocks.
  int block_size = 16;
  SoftmaxMode softmax = SoftmaxMode::kOnline;
  // Whether sequences share blocks that others, live or ended, have computed.
  bool prefix_cache = true;
  GpuOptions gpu = {};
};

}  // namespace
