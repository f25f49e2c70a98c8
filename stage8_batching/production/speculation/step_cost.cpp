#include "step_cost.h"

namespace stage8 {
namespace {

// Of one GPU.
double gpu_weight_bytes(const Engine& engine) {
  const GpuOptions& gpu = engine.options().gpu;
  const double bytes = gpu.weights == WeightType::kFloat8 ? 1.0 : gpu.precision == Precision::kBFloat16 ? 2.0 : 4.0;
  return bytes * static_cast<double>(engine.model().num_parameters()) / gpu.tensor_parallel;
}

}  // namespace

TokenCost token_cost(Engine& engine) {
  if (!engine.runner().is_asynchronous()) {
    return kCpuTokenCost;
  }
  return gpu_token_cost(engine.model().config().num_layers, gpu_weight_bytes(engine));
}

double draft_step_cost(Engine& draft, Engine& engine) {
  if (!engine.runner().is_asynchronous()) {
    return static_cast<double>(draft.model().weight_bytes_per_token()) /
           static_cast<double>(engine.model().weight_bytes_per_token());
  }
  const auto seconds = [](const Engine& of) {
    return gpu_step_seconds(of.model().config().num_layers, gpu_weight_bytes(of));
  };
  return (seconds(draft) + kGpuWaiting) / seconds(engine);
}

}  // namespace
