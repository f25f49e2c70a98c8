// Decode attention over K and V in float8: the kernels of decode_kernel.cuh, compiled a second time.
#include "common/paged/decode_launch.cuh"

namespace common {

void decode_float8(const DecodeCall& call) { choose_head_dim<ScalarType::kFloat8>(call); }

}  // namespace common
