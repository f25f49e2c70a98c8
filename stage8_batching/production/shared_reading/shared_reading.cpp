#include "shared_reading.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace stage8 {

std::vector<common::SharedPrefix> SharedReading::groups_of(const RaggedBatch& batch, std::size_t num_sequences,
                                                           int block_size, const common::ReadingCosts& costs) const {
  if (!is_enabled_) {
    return {};
  }
  return common::find_shared_prefixes({.context_lengths = std::span(batch.context_lengths).first(num_sequences),
                                       .query_starts = batch.query_starts,
                                       .block_tables = batch.block_tables,
                                       .table_starts = batch.table_starts,
                                       .block_size = block_size},
                                      costs);
}

void SharedReading::read_together(const RaggedBatch& batch, std::vector<common::SharedPrefix> groups) {
  groups_ = std::move(groups);
  blocks_.clear();
  for (const common::SharedPrefix& group : groups_) {
    const std::span<const int> table = batch.block_table(static_cast<std::size_t>(group.sequences.front()));
    blocks_.insert(blocks_.end(), table.begin(), table.begin() + group.num_blocks);
  }
}

void SharedReading::count() noexcept {
  figures_.steps += groups_.empty() ? 0 : 1;
  figures_.blocks_read += static_cast<std::int64_t>(blocks_.size());
  figures_.blocks_saved += common::num_blocks_saved(groups_);
}

}  // namespace
