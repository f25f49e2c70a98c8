#include "common/cuda/model/peer_sums.h"

#include <bit>
#include <cstdint>
#include <vector>

#include "common/base/check.h"

namespace common {
namespace {

// Whether this GPU can read the others' memory, as it can from now on. Ranks are the numbers of the devices.
bool enable_peer_access(const Shard& shard) {
  for (int peer = 0; peer < shard.count; ++peer) {
    if (peer == shard.rank) {
      continue;
    }
    int is_possible = 0;
    CUDA_CHECK(cudaDeviceCanAccessPeer(&is_possible, shard.rank, peer));
    if (is_possible == 0) {
      return false;
    }
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      CUDA_CHECK(error);
    }
  }
  return true;
}

}  // namespace

PeerSums::PeerSums(Communicator* peers, std::size_t bytes)
    : peers_(peers),
      parts_{DeviceMemory(bytes), DeviceMemory(bytes)},
      arrived_(peers == nullptr ? 0 : static_cast<std::size_t>(kMaxPeers) * kMaxPeerRows),
      num_sums_(peers == nullptr ? 0 : kMaxPeerRows),
      stop_(1) {
  if (peers_ == nullptr) {
    return;
  }
  reset();
  const Shard shard = peers_->shard();
  const bool can_read =
      peers_->all_reduce() == AllReduce::kPeer && shard.count <= kMaxPeers && enable_peer_access(shard);
  is_direct_ = peers_->smallest(can_read ? 1 : 0) == 1;
  if (!is_direct_) {
    return;
  }
  const auto pointers = [&](const void* own) { return peers_->exchange(std::bit_cast<std::int64_t>(own)); };
  const std::vector<std::int64_t> arrived = pointers(arrived_.data());
  for (std::size_t which = 0; which < sums_.size(); ++which) {
    const std::vector<std::int64_t> parts = pointers(parts_[which].data());
    PartialSum& sum = sums_[which];
    sum.num_parts = shard.count;
    sum.rank = shard.rank;
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      sum.parts[rank] = std::bit_cast<const void*>(parts[rank]);
      sum.arrived[rank] = std::bit_cast<unsigned*>(arrived[rank]);
    }
    sum.num_sums = num_sums_.data();
    sum.stop = stop_.data();
  }
}

void PeerSums::add(int which, Precision part_type, Precision precision, int num_tokens, const Residual& residual,
                   const Normed& normed, cudaStream_t stream) {
  if (is_direct_ && num_tokens <= kMaxPeerRows) {
    add_sum(precision, sums_[static_cast<std::size_t>(which)], part_type, num_tokens, residual, normed, stream);
    return;
  }
  void* const own = part(which);
  peers_->sum(own, static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(residual.num_cols), part_type,
              stream);
  PartialSum sum;
  sum.parts[0] = own;
  sum.num_parts = 1;
  add_sum(precision, sum, part_type, num_tokens, residual, normed, stream);
}

void PeerSums::stop() noexcept { *static_cast<volatile int*>(stop_.data()) = 1; }

void PeerSums::reset() {
  *static_cast<volatile int*>(stop_.data()) = 0;
  CUDA_CHECK(cudaMemset(arrived_.data(), 0, arrived_.size() * sizeof(unsigned)));
  CUDA_CHECK(cudaMemset(num_sums_.data(), 0, num_sums_.size() * sizeof(unsigned)));
  CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace common
