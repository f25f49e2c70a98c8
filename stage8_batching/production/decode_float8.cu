// Decode attention over K and V in float8: the kernels of decode_kernel.cuh, compiled a second time.
#include "decode_launch.cuh"

namespace stage8 {

void decode_float8(const DecodeCall& call) { choose_head_dim<ScalarType::kFloat8>(call); }

}  // namespace
