#include "common/serving/pool_snapshot.h"

#include <algorithm>
#include <cstddef>

namespace common {

std::vector<BlockState> block_states(const PoolSnapshot& pool, int max_blocks) {
  std::vector<BlockState> states(static_cast<std::size_t>(std::min(pool.num_blocks, max_blocks)));
  std::vector<int> last_owner(states.size(), -1);
  for (const PoolSnapshot::Owner& owner : pool.running) {
    for (const PoolSnapshot::Sequence& sequence : owner.sequences) {
      int num_tokens = sequence.length;  // in this block and those after it
      for (const int block : sequence.block_table) {
        if (const auto index = static_cast<std::size_t>(block); index < states.size()) {
          BlockState& state = states[index];
          state.num_owners += last_owner[index] == owner.id ? 0 : 1;
          last_owner[index] = owner.id;
          state.owner = state.num_tables == 0 ? owner.id : std::min(state.owner, owner.id);
          state.num_tables += 1;
          state.num_tokens = std::max(state.num_tokens, std::clamp(num_tokens, 0, pool.block_size));
        }
        num_tokens -= pool.block_size;
      }
    }
  }
  for (const int block : pool.cached_blocks) {
    if (const auto index = static_cast<std::size_t>(block); index < states.size()) {
      states[index].num_tokens = pool.block_size;
      states[index].is_cached = true;
    }
  }
  return states;
}

}  // namespace common
