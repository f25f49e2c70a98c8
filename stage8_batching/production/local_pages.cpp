#include "local_pages.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "host_cache/host_blocks.h"

namespace stage8 {

LocalPages::LocalPages(std::shared_ptr<LocalPool> pool, const common::PageShape& shape, int num_layers, int max_tokens,
                       std::size_t max_table_blocks)
    : pool_(std::move(pool)),
      max_tokens_(static_cast<std::size_t>(max_tokens)),
      host_parts_(shape, num_layers, pool_->size().num_host_blocks),
      buffers_{Buffers(max_tokens_ + max_table_blocks), Buffers(max_tokens_ + max_table_blocks)} {}

void LocalPages::copy_planned(const LayerKernels& kernels, const common::Stream& stream) {
  while (!pool_->pending_copies().empty()) {
    const std::span<const BlockCopy> copies = independent_copies(pool_->pending_copies());
    copy(kernels, copies, stream);
    pool_->clear_pending_copies(copies.size());  // later copies may overwrite what these have read
  }
}

void LocalPages::copy(const LayerKernels& kernels, std::span<const BlockCopy> copies, const common::Stream& stream) {
  const LocalPoolSize& size = pool_->size();
  // Parts of host blocks have numbers behind all blocks', and there are fewer parts.
  const auto number = [&](int part) { return part < size.num_blocks ? part : part - size.num_blocks + size.num_parts; };
  std::vector<BlockCopy> numbered;
  for (const auto& [source, destination] : copies) {
    numbered.push_back({number(source), number(destination)});
  }
  const auto [beside, behind] = split_copies(numbered, last_parts_, size.num_parts);
  if (!beside.empty()) {
    host_parts_.copy_beside(kernels.pages_of(true), beside, stream);
  }
  if (!behind.empty()) {
    host_parts_.copy_behind(kernels.pages_of(true), behind, stream,
                            [&](std::span<const BlockCopy> inside) { kernels.copy(true, inside, stream.get()); });
  }
}

void LocalPages::upload(std::size_t which, const RaggedBatch& batch, int num_tokens, const common::Stream& stream) {
  host_parts_.before_step(stream);
  Buffers& own = buffers_[which];
  own.read.wait();
  const std::size_t used = max_tokens_ + batch.block_tables.size();
  COMMON_CHECK(static_cast<std::size_t>(num_tokens) <= max_tokens_ && used <= own.host.size(),
               "a step has at most the tokens and the tables that were announced");
  // A block that no window reaches may have no part. Nothing is read there, but the table leads into the pages.
  const auto part_of = [&](int block) { return std::max(pool_->part_of(block), 0); };
  const int block_size = pool_->size().block_size;
  int* const padding = std::transform(
      batch.slot_mapping.begin(), batch.slot_mapping.end(), own.host.data(),
      [&](int slot) { return slot < 0 ? slot : part_of(slot / block_size) * block_size + slot % block_size; });
  std::fill(padding, own.host.data() + num_tokens, -1);
  std::transform(batch.block_tables.begin(), batch.block_tables.end(), own.host.data() + max_tokens_, part_of);
  CUDA_CHECK(
      cudaMemcpyAsync(own.device.data(), own.host.data(), used * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
  own.read.record(stream);  // if the step is not launched
  last_parts_.clear();
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    const int first_seen = std::max(0, batch.context_lengths[i] - batch.num_queries(i) + 1 - pool_->size().window);
    const std::span<const int> seen = batch.block_table(i).subspan(static_cast<std::size_t>(first_seen / block_size));
    std::transform(seen.begin(), seen.end(), std::back_inserter(last_parts_), part_of);
  }
}

}  // namespace
