#include "shared_reading.h"

namespace stage8 {

std::vector<common::SharedPrefix> SharedReading::groups_of(const RaggedBatch& batch, int block_size,
                                                           const common::ReadingCosts& costs) const {
  if (!is_enabled_) {
    return {};
  }
  return common::find_shared_prefixes({.context_lengths = batch.context_lengths,
                                       .query_starts = batch.query_starts,
                                       .block_tables = batch.block_tables,
                                       .table_starts = batch.table_starts,
                                       .block_size = block_size},
                                      costs);
}

void SharedReading::count(std::span<const common::SharedPrefix> groups) {
  figures_.steps += groups.empty() ? 0 : 1;
  for (const common::SharedPrefix& group : groups) {
    figures_.blocks_read += group.num_blocks;
  }
  figures_.blocks_saved += common::num_blocks_saved(groups);
}

}  // namespace
