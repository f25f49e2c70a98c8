#include "common/cuda/model/peer_sums.h"

#include <bit>
#include <cstdint>
#include <vector>

#include "common/base/check.h"

namespace common {
namespace {

// Whether this GPU can access the others' memory, as it can from now on. Ranks are the numbers of the devices.
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

PeerSums::PeerSums(Communicator* peers, std::size_t part_bytes, int num_cols)
    : peers_(peers),
      parts_{DeviceMemory(part_bytes), DeviceMemory(part_bytes)},
      stop_(1),
      arrived_(peers == nullptr ? 0 : static_cast<std::size_t>(kMaxPeers) * kMaxPeerRows),
      num_sums_(peers == nullptr ? 0 : kMaxPeerRows) {
  if (peers_ == nullptr) {
    return;
  }
  const Shard shard = peers_->shard();
  const auto num_pairs = static_cast<std::int64_t>(kMaxPushedTokens) * (num_cols / 2);  // of a part
  if (peers_->all_reduce() == AllReduce::kPeer) {
    for (DeviceArray<PushedPair>& received : received_) {
      received = DeviceArray<PushedPair>(static_cast<std::size_t>(shard.count * num_pairs));
    }
    first_numbers_ = DeviceArray<unsigned>(kMaxPushedTokens);
  }
  reset();
  const bool has_access =
      peers_->all_reduce() == AllReduce::kPeer && shard.count <= kMaxPeers && enable_peer_access(shard);
  is_direct_ = peers_->smallest(has_access ? 1 : 0) == 1;
  if (!is_direct_) {
    return;
  }
  const auto pointers = [&](const void* own) { return peers_->exchange(std::bit_cast<std::int64_t>(own)); };
  const std::vector<std::int64_t> arrived = pointers(arrived_.data());
  for (std::size_t which = 0; which < sums_.size(); ++which) {
    const std::vector<std::int64_t> parts = pointers(parts_[which].data());
    const std::vector<std::int64_t> received = pointers(received_[which].data());
    PartialSum& sum = sums_[which];
    sum.num_parts = shard.count;
    sum.rank = shard.rank;
    PushedSum& pushed = pushed_sums_[which];
    pushed.num_parts = shard.count;
    PushedPart& own = pushed_parts_[which];
    own.num_places = shard.count;
    own.num_cols = num_cols;
    for (int rank = 0; rank < shard.count; ++rank) {
      const auto i = static_cast<std::size_t>(rank);
      sum.parts[i] = std::bit_cast<const void*>(parts[i]);
      sum.arrived[i] = std::bit_cast<unsigned*>(arrived[i]);
      pushed.parts[i] = received_[which].data() + rank * num_pairs;
      // The other GPUs' come first, because the way to them is longer.
      const auto to = static_cast<std::size_t>((shard.rank + 1 + rank) % shard.count);
      own.places[i] = std::bit_cast<PushedPair*>(received[to]) + shard.rank * num_pairs;
    }
    sum.num_sums = num_sums_.data();
    sum.stop = stop_.data();
    own.number.first_numbers = first_numbers_.data();
    pushed.number.first_numbers = first_numbers_.data();
    pushed.stop = stop_.data();
  }
}

void PeerSums::begin_fused(int num_tokens, int num_sums, cudaStream_t stream) {
  if (pushes(num_tokens)) {
    count_sums(first_numbers_.data(), num_tokens, static_cast<unsigned>(num_sums), stream);
  }
}

void PeerSums::add_fused(int sum, const FusedLinear& linear, const SumNorm& norm, const Residual& residual,
                         cudaStream_t stream) {
  if (norm.weights != nullptr || !pushes(linear.num_tokens)) {
    fused_logits(linear, static_cast<float*>(part(sum)), stream);
    add(sum, Precision::kFloat32, linear.precision, linear.num_tokens, norm, residual, {}, stream);
    return;
  }
  PushedPart own = pushed_parts_[place(sum)];
  own.number.index = static_cast<unsigned>(sum);
  own.residual = peers_->shard().rank == 0 ? residual.values : nullptr;
  fused_push(linear, own, stream);
  PushedSum pushed = pushed_sums_[place(sum)];
  pushed.number.index = own.number.index;
  add_pushed(linear.precision, pushed, linear.num_tokens, residual, stream);
}

void PeerSums::add(int sum, Precision part_type, Precision precision, int num_tokens, const SumNorm& norm,
                   const Residual& residual, const Normed& normed, cudaStream_t stream) {
  if (is_direct_ && num_tokens <= kMaxPeerRows) {
    PartialSum fetched = sums_[place(sum)];
    fetched.norm = norm;
    add_sum(precision, fetched, part_type, num_tokens, residual, normed, stream);
    return;
  }
  void* const own = part(sum);
  peers_->sum(own, static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(residual.num_cols), part_type,
              stream);
  PartialSum added;
  added.parts[0] = own;
  added.num_parts = 1;
  added.norm = norm;
  add_sum(precision, added, part_type, num_tokens, residual, normed, stream);
}

void PeerSums::stop() noexcept { *static_cast<volatile int*>(stop_.data()) = 1; }

void PeerSums::reset() {
  *static_cast<volatile int*>(stop_.data()) = 0;
  CUDA_CHECK(cudaMemset(arrived_.data(), 0, arrived_.size() * sizeof(unsigned)));
  CUDA_CHECK(cudaMemset(num_sums_.data(), 0, num_sums_.size() * sizeof(unsigned)));
  // Counts begin anew, so the numbers of stopped sums are used again.
  if (first_numbers_.size() > 0) {
    for (const DeviceArray<PushedPair>& received : received_) {
      CUDA_CHECK(cudaMemset(received.data(), 0, received.size() * sizeof(PushedPair)));
    }
    CUDA_CHECK(cudaMemset(first_numbers_.data(), 0, first_numbers_.size() * sizeof(unsigned)));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace common
