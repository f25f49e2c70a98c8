// What the shared tests know of a stage's interface, in one place: where its headers are, how tokens get into its
// cache, and how they are attended to. A stage that changes a signature changes one function here; the contract stays.
//
// The build sets STAGE_NUMBER (3) and STAGE_NAMESPACE (stage3), and makes "stage3/" lead to the stage's folder.
#pragma once

#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "common/base/check.h"
#include "common/base/tensor.h"
#include "tests/support/attention_inputs.h"
#include "tests/support/stage_header.h"

#include STAGE_HEADER(attention.h)
#include STAGE_HEADER(kv_cache.h)
#include STAGE_HEADER(kv_cache_manager.h)

namespace stage = STAGE_NAMESPACE;

namespace tests {

// ---- What differs from stage to stage ------------------------------------------------------------------------------

// num_host_blocks: room for swapped blocks; from stage 8 on.
inline stage::KvCacheShape cache_shape(const AttentionShape& shape, int num_blocks, int block_size,
                                       [[maybe_unused]] int num_host_blocks = 0) {
#if STAGE_NUMBER == 1  // the arena, with the slots that the blocks would have
  return cache_shape_of<stage::KvCacheShape>(shape, 1, num_blocks * block_size);
#else
  auto result = cache_shape_of<stage::KvCacheShape>(shape, num_blocks, block_size);
#if STAGE_NUMBER >= 8
  result.num_host_blocks = num_host_blocks;
#endif
  return result;
#endif
}

inline stage::KvCacheManager make_manager(int num_blocks, int block_size, [[maybe_unused]] int num_host_blocks = 0) {
#if STAGE_NUMBER == 1
  return stage::KvCacheManager(num_blocks * block_size);
#elif STAGE_NUMBER >= 8
  return {num_blocks, block_size, stage::hash_block, num_host_blocks};
#else
  return {num_blocks, block_size};
#endif
}

// Starts a sequence that will get at most max_length tokens. From stage 2 on it begins with a single token's slots, so
// that the tests see it grow block by block.
inline bool start_sequence(stage::KvCacheManager& manager, int sequence, [[maybe_unused]] int max_length) {
#if STAGE_NUMBER == 1
  return manager.allocate(sequence, max_length);
#else
  return manager.allocate(sequence, 1);
#endif
}

// The newest q.rows() tokens of the sequence attend to all its context_length tokens.
inline common::Matrix attend(const stage::KvCache& cache, const stage::KvCacheManager& manager, int sequence, int layer,
                             const common::Matrix& q, int context_length) {
#if STAGE_NUMBER == 1
  return stage::attention(cache, layer, q, manager.region(sequence).first, context_length);
#else
  return stage::attention(cache, layer, q, manager.block_table(sequence), context_length);
#endif
}

// The index of the cached head that a query head reads: before stage 4, every query head has its own copy.
inline int stored_head(const AttentionShape& shape, int head) {
  return STAGE_NUMBER < 4 ? head : head / (shape.num_heads / shape.num_kv_heads);
}

#if STAGE_NUMBER >= 5
// Removes the pending copies from the manager, for a test that carries them out itself.
inline std::vector<stage::BlockCopy> take_copies(stage::KvCacheManager& manager) {
  std::vector<stage::BlockCopy> copies(manager.pending_copies().begin(), manager.pending_copies().end());
  manager.clear_pending_copies();
  return copies;
}
#endif

// [num_layers] of [num_tokens, num_heads * head_dim].
using Outputs = std::vector<common::Matrix>;

// ---- The same in every stage ---------------------------------------------------------------------------------------

// A manager and its cache, driven as an engine drives them. Every slot that holds no live token is NaN, at first and
// after each free(), so that reading one stale or foreign row turns the output into NaN.
class PagedSequences {
 public:
  PagedSequences(const AttentionShape& shape, int num_blocks, int block_size)
      : shape_(shape),
        manager_(make_manager(num_blocks, block_size)),
        cache_(cache_shape(shape, num_blocks, block_size)) {
    cache_.fill(std::numeric_limits<float>::quiet_NaN());
  }

  // False if there is no room; nothing has changed then.
  [[nodiscard]] bool start(int sequence, int max_length) { return start_sequence(manager_, sequence, max_length); }

  // Writes the new tokens' K and V and attends with their q, layer by layer. Nothing if the slots run out.
  std::optional<Outputs> append(int sequence, const TokenInputs& inputs) {
    const auto num_tokens = static_cast<int>(inputs.front().q.rows());
    if (!manager_.reserve(sequence, num_tokens)) {
      return std::nullopt;
    }
    const int length = manager_.length(sequence);
    const std::vector<int> slot_mapping = manager_.slots(sequence, length, num_tokens);
#if STAGE_NUMBER >= 5
    cache_.copy_blocks(tests::take_copies(manager_));
#endif
    TokenInputs& written = written_[sequence];
    written.resize(inputs.size());
    Outputs outputs;
    for (std::size_t layer = 0; layer < inputs.size(); ++layer) {
      const auto& [q, k, v] = inputs[layer];
      cache_.write(static_cast<int>(layer), slot_mapping, k, v);
      append_rows(k, written[layer].k);
      append_rows(v, written[layer].v);
      outputs.push_back(attend(cache_, manager_, sequence, static_cast<int>(layer), q, length + num_tokens));
    }
    manager_.commit(sequence, num_tokens);
    return outputs;
  }

#if STAGE_NUMBER >= 5
  void fork(int parent, int child) {
    manager_.fork(parent, child);
    if (const auto found = written_.find(parent); found != written_.end()) {
      written_[child] = found->second;
    }
  }
#endif

  // Ends the sequence and poisons the slots that no other sequence holds.
  void free(int sequence) {
    std::vector<int> slots = manager_.slots(sequence, 0, manager_.length(sequence));
    manager_.free(sequence);
    written_.erase(sequence);
#if STAGE_NUMBER >= 5
    cache_.copy_blocks(tests::take_copies(manager_));  // before anything else is written
    std::erase_if(slots, [&](int slot) { return manager_.reference_count(slot / manager_.block_size()) > 0; });
#endif
    const common::Matrix poison = common::Matrix::Constant(static_cast<Eigen::Index>(slots.size()),
                                                           Eigen::Index{shape_.num_kv_heads} * shape_.head_dim,
                                                           std::numeric_limits<float>::quiet_NaN());
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      cache_.write(layer, slots, poison, poison);
    }
  }

  // All K and V of the sequence in one layer, in the order of its positions: [length, num_kv_heads * head_dim]. The q
  // there is empty.
  const LayerInput& written(int sequence, int layer) const {
    const auto found = written_.find(sequence);
    COMMON_CHECK(found != written_.end(), "nothing was written for this sequence");
    return found->second[static_cast<std::size_t>(layer)];
  }

  const AttentionShape& shape() const { return shape_; }
  stage::KvCacheManager& manager() { return manager_; }
  const stage::KvCacheManager& manager() const { return manager_; }
  const stage::KvCache& cache() const { return cache_; }

 private:
  static void append_rows(const common::Matrix& rows, common::Matrix& all) {
    all.conservativeResize(all.rows() + rows.rows(), rows.cols());
    all.bottomRows(rows.rows()) = rows;
  }

  AttentionShape shape_;
  stage::KvCacheManager manager_;
  stage::KvCache cache_;
  std::map<int, TokenInputs> written_;
};

}  // namespace tests
