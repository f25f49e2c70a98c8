// The precisions of the model on the GPU.
#pragma once

namespace common {

// kFloat32: weights, activations and sums in float32, without tensor cores. Results equal the CPU's up to rounding.
// kBFloat16: weights and activations in bfloat16; sums, norms and the residual stream in float32.
enum class Precision { kFloat32, kBFloat16 };

constexpr int bytes_of(Precision precision) { return precision == Precision::kFloat32 ? 4 : 2; }

}  // namespace common
