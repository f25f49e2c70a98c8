// How several GPUs add up their parts of a sum.
#pragma once

namespace common {

// kNccl: always by NCCL. kPeer: with few tokens by kernels that read the other GPUs' memory.
enum class AllReduce { kNccl, kPeer };

}  // namespace common
