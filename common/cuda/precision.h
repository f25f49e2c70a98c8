// The types of numbers on the GPU: of the model's weights and activations, and of K and V.
#pragma once

namespace common {

// kFloat32: weights, activations and sums in float32, without tensor cores. Results equal the CPU's up to rounding.
// kBFloat16: weights and activations in bfloat16; sums, norms and the residual stream in float32.
enum class Precision { kFloat32, kBFloat16 };

// The type of the layers' matrices: the precision's, or float8 (e4m3 with a scale for each row), which needs
// bfloat16. The embedding and the output matrix keep the precision.
enum class WeightType { kAuto, kFloat8 };

// What float8 weights are multiplied with: activations in bfloat16, or in steps of many tokens float8 too (e4m3 with a
// scale for each token).
enum class ActivationType { kAuto, kFloat8 };

// The type of K and V in the pages: the precision's, or float8 (e4m3 with a scale for each token and head), which needs
// bfloat16.
enum class KvCacheType { kAuto, kFloat8 };

struct GpuTypes {
  Precision precision = Precision::kFloat32;
  KvCacheType kv_cache = KvCacheType::kAuto;
  WeightType weights = WeightType::kAuto;
  ActivationType activations = ActivationType::kAuto;

  // Float32 alone: the types of the CPU, and the text of every stage.
  bool is_exact() const { return *this == GpuTypes{}; }
  friend bool operator==(const GpuTypes&, const GpuTypes&) = default;
};

constexpr int bytes_of(Precision precision) { return precision == Precision::kFloat32 ? 4 : 2; }

}  // namespace common
