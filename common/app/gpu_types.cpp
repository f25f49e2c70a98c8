#include "common/app/gpu_types.h"

namespace common {

void add_type_options(Command& command, GpuTypes& types) {
  command.choice("--precision", types.precision, {{"fp32", Precision::kFloat32}, {"bf16", Precision::kBFloat16}},
                 "fp32 (every stage's text) or, on a GPU, bf16");
  command.choice("--kv-cache", types.kv_cache, {{"auto", KvCacheType::kAuto}, {"fp8", KvCacheType::kFloat8}},
                 "auto (K and V as --precision has them) or, with bf16, fp8");
  command.choice("--weights", types.weights, {{"auto", WeightType::kAuto}, {"fp8", WeightType::kFloat8}},
                 "auto (as --precision has them) or, with bf16, fp8");
  command.choice("--activations", types.activations,
                 {{"auto", ActivationType::kAuto}, {"fp8", ActivationType::kFloat8}},
                 "what --weights fp8 are multiplied with: auto (bf16) or, in steps of many tokens, fp8");
}

std::string contradiction(const GpuTypes& types) {
  if (types.kv_cache == KvCacheType::kFloat8 && types.precision != Precision::kBFloat16) {
    return "K and V in float8 need --precision bf16: their kernels multiply them with queries of 16 bits";
  }
  if (types.weights == WeightType::kFloat8 && types.precision != Precision::kBFloat16) {
    return "weights in float8 need --precision bf16: their kernels multiply them with activations of 16 bits";
  }
  if (types.activations == ActivationType::kFloat8 && types.weights != WeightType::kFloat8) {
    return "activations in float8 need --weights fp8: the library multiplies float8 by float8";
  }
  return "";
}

std::string to_string(const GpuTypes& types) {
  return std::string(types.precision == Precision::kFloat32 ? "float32" : "bfloat16") +
         (types.kv_cache == KvCacheType::kFloat8 ? ", K and V in float8" : "") +
         (types.weights == WeightType::kFloat8 ? ", weights in float8" : "") +
         (types.activations == ActivationType::kFloat8 ? ", activations too" : "");
}

}  // namespace common
