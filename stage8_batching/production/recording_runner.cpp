#include "recording_runner.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/step_buffers.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/model/cuda_llama.h"
#include "device_sampler.h"
#include "speculation/token_cost.h"

namespace stage8 {
namespace {

// Steps are recorded for 1, 2, 4, 8, 16, 24, … sequences. Inactive sequences fill the rest.
int recorded_size(int num_sequences) {
  int size = 1;
  while (size < num_sequences) {
    size += std::min(size, 8);
  }
  return size;
}

common::PageShape page_shape(const KvCacheShape& shape, const GpuOptions& options) {
  return {.num_blocks = 1,
          .num_kv_heads = shape.num_kv_heads,
          .block_size = shape.block_size,
          .head_dim = shape.head_dim,
          .type = common::page_type(options.types)};
}

common::PageShape with_blocks(common::PageShape shape, int num_blocks) {
  shape.num_blocks = num_blocks;
  return shape;
}

KvCacheShape without_host_blocks(KvCacheShape shape) {
  shape.num_host_blocks = 0;
  return shape;
}

// Of layers of both kinds, those that see all may get more blocks than the runner is made with; and if all layers have
// a window, a text may be longer than the pool. Then a table may be as long as the model's context, as if the number of
// blocks were not known.
std::optional<common::MemoryShare> share_for(const std::optional<common::MemoryShare>& share, const KvCacheShape& shape,
                                             const common::LlamaConfig& config, bool is_alone) {
  const bool has_long_tables = config.has_windows() && (is_alone || config.global_period == 0);
  return share.has_value() || !has_long_tables
             ? share
             : common::MemoryShare{.memory_fraction = 1.0, .max_slots = shape.num_slots()};
}

int most_blocks(const common::MemoryShare& share, int block_size) {
  return static_cast<int>(std::min<std::int64_t>((share.max_slots + block_size - 1) / block_size,
                                                 std::numeric_limits<int>::max() / block_size - 1));
}

// Of the batch's sequences, those with one token before the first longer one.
std::size_t num_decodes(const RaggedBatch& batch) {
  std::size_t count = 0;
  while (count < batch.num_sequences() && batch.num_queries(count) == 1) {
    count += 1;
  }
  return count;
}

CacheSize with_host_blocks(CacheSize size, int num_host_blocks) {
  size.num_host_blocks = num_host_blocks;
  return size;
}

}  // namespace

RecordingRunner::RecordingRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options,
                                 int chunk_size, int max_sequences, const common::PagedKernels& kernels,
                                 const std::optional<common::MemoryShare>& share, common::Communicator* peers)
    : RecordingRunner(model, shape, options, chunk_size, max_sequences, share, peers,
                      std::make_unique<Tables>(kernels, page_shape(shape, options), model.config())) {}

RecordingRunner::RecordingRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options,
                                 int chunk_size, int max_sequences, const std::optional<common::MemoryShare>& share,
                                 common::Communicator* peers, std::unique_ptr<Tables> tables)
    : GpuRunner(
          model, without_host_blocks(shape), options, chunk_size, recorded_size(max_sequences), tables->layers,
          share_for(share, shape, model.config(), peers == nullptr), peers,
          [peers](int vocab_size, int max_rows) {
            return std::make_unique<DeviceSampler>(vocab_size, max_rows, peers);
          },
          kMaxGpuTokens),
      tables_(std::move(tables)),
      plans_(tables_->sharing == nullptr
                 ? nullptr
                 : std::make_unique<SharedPlans>(page_shape(shape, options), shape.num_heads, this->max_sequences())),
      size_(with_host_blocks(GpuRunner::cache(), shape.num_host_blocks)),
      page_(page_shape(shape, options)),
      max_blocks_(share.has_value() ? std::max(size_.num_blocks, most_blocks(*share, shape.block_size))
                                    : size_.num_blocks),
      host_blocks_(std::in_place, with_blocks(page_, size_.num_blocks), shape.num_layers, shape.num_host_blocks),
      vocab_size_(model.config().vocab_size),
      max_tokens_(chunk_size) {
  if (!share.has_value()) {
    size_.reason.clear();
    if (size_.num_blocks < shape.num_blocks) {
      throw common::InputError("the GPU has no room for the model and " +
                               common::format_bytes(size_.bytes_per_slot * shape.num_slots()) +
                               " of K and V; a smaller cache (--slots) may fit");
    }
  }
}

std::shared_ptr<LocalPool> RecordingRunner::separate_windows(const NumParts& num_parts, int num_blocks) {
  if (!tables_->layers.has_both()) {
    return nullptr;
  }
  const common::LlamaConfig& config = this->model().config();
  const int num_layers = config.num_layers;
  const int num_global = num_layers - config.num_windowed_layers();
  // The most blocks for which all layers find room where they had as many each.
  const std::int64_t room = std::int64_t{size_.num_blocks} * num_layers;
  const auto fits = [&](int count) {
    return std::int64_t{count} * num_global +
               std::int64_t{std::min(num_parts(count), count)} * (num_layers - num_global) <=
           room;
  };
  if (num_blocks == 0) {
    num_blocks = size_.num_blocks;
    for (int above = max_blocks_ + 1; above - num_blocks > 1;) {
      const int middle = num_blocks + (above - num_blocks) / 2;
      (fits(middle) ? num_blocks : above) = middle;
    }
  }
  COMMON_CHECK(fits(num_blocks), "the pages have room for so many blocks and their parts");
  if (num_parts(num_blocks) >= num_blocks) {
    return nullptr;
  }
  COMMON_CHECK(last().value == 0 && local_ == nullptr, "the pages hold nothing yet");
  auto pool = std::make_shared<LocalPool>(LocalPoolSize{.num_parts = num_parts(num_blocks),
                                                        .num_blocks = num_blocks,
                                                        .num_host_blocks = size_.num_host_blocks,
                                                        .block_size = page_.block_size,
                                                        .window = config.window});
  const std::size_t max_table_blocks =
      static_cast<std::size_t>(max_sequences()) * static_cast<std::size_t>(buffers({0}).inputs().max_blocks());
  local_ = std::make_unique<LocalPages>(pool, with_blocks(page_, pool->size().num_parts), num_layers - num_global,
                                        max_tokens_, max_table_blocks);
  host_blocks_.emplace(with_blocks(page_, num_blocks), num_global, size_.num_host_blocks);
  tables_->layers.divide(num_blocks, pool->size().num_parts);
  size_.num_blocks = num_blocks;
  return pool;
}

void RecordingRunner::allocate(int count) {
  host_blocks_->allocate(count);
  if (local_ != nullptr) {
    local_->allocate(count);
  }
}

int RecordingRunner::num_allocated() const {
  const int count = host_blocks_->num_allocated();
  return local_ == nullptr ? count : std::min(count, local_->num_allocated());
}

std::string RecordingRunner::why_no_more() const {
  std::string reason = host_blocks_->why_no_more();
  return reason.empty() && local_ != nullptr ? local_->why_no_more() : reason;
}

void RecordingRunner::poison_parts(std::span<const int> parts) {
  const common::LlamaConfig& config = this->model().config();
  const auto num_layers = static_cast<std::size_t>(config.num_windowed_layers());
  const common::Pages first = tables_->layers.pages_of(true);
  const auto poison = [&](void* memory, std::size_t layer_bytes, int part) {
    const std::size_t bytes = layer_bytes / static_cast<std::size_t>(first.shape.num_blocks);
    if (bytes > 0) {
      CUDA_CHECK(cudaMemset2DAsync(static_cast<std::byte*>(memory) + static_cast<std::size_t>(part) * bytes,
                                   layer_bytes, 0xFF, bytes, num_layers, stream().get()));
    }
  };
  for (const int part : parts) {
    poison(first.keys, first.shape.keys_bytes(), part);
    poison(first.values, first.shape.values_bytes(), part);
  }
}

bool RecordingRunner::set_reading_costs(const common::ReadingCosts& costs) {
  if (plans_ != nullptr) {
    plans_->set_costs(costs);
  }
  return plans_ != nullptr;
}

std::vector<common::SharedPrefix> RecordingRunner::plan_sharing(const RaggedBatch& batch) {
  const auto is_seen = [&](int context_length) { return context_length <= tables_->layers.max_seen(); };
  if (!can_share() || !std::all_of(batch.context_lengths.begin(), batch.context_lengths.end(), is_seen)) {
    return {};
  }
  const std::size_t count = num_decodes(batch);
  const common::ReadingCosts costs =
      common::beside_chunk(plans_->costs(), batch.num_tokens() - static_cast<int>(count));
  const std::vector<common::SharedPrefix> groups = groups_of(batch, count, plans_->shape().block_size, costs);
  if (groups.empty()) {
    return {};
  }
  const auto which = static_cast<std::size_t>((last().value + 1) % 2);
  return plans_->upload(which, batch, groups, padded_sequences(batch), stream());
}

void RecordingRunner::copy_blocks(std::span<const BlockCopy> copies) {
  if (copies.empty()) {  // perhaps before the first step, when pages are not known
    return;
  }
  host_blocks_->copy_behind(tables_->layers.pages(), copies, stream(),
                            [this](std::span<const BlockCopy> inside) { copy_inside(inside); });
}

void RecordingRunner::copy_inside(std::span<const BlockCopy> copies) {
  if (!tables_->layers.is_divided()) {
    GpuRunner::copy_blocks(copies);
    return;
  }
  tables_->layers.copy(false, copies, stream().get());
}

void RecordingRunner::copy_beside(std::span<const BlockCopy> copies) {
  host_blocks_->copy_beside(tables_->layers.pages(), copies, stream());
}

StepId RecordingRunner::enqueue(const RaggedBatch& batch) {
  const std::vector<common::ScoredRow> rows = take_rows();
  host_blocks_->before_step(stream());
  read_together(batch, plan_sharing(batch));
  if (local_ != nullptr) {
    // A step in flight may still read parts that have other blocks by now. What writes to them comes behind that step:
    // tables and kernels in the same stream, and the copies of parts that its windows reach.
    const auto num_sequences = static_cast<int>(batch.num_sequences());
    local_->copy_planned(tables_->layers, stream());
    local_->upload((last().value + 1) % 2, batch, batch.num_tokens() + padded_sequences(batch) - num_sequences,
                   stream());
  }
  if (scorer_ == nullptr && !rows.empty()) {
    scorer_ = std::make_unique<RowScorer>(this->model(), vocab_size_, max_tokens_);
  }
  if (scorer_ == nullptr) {
    const StepId own = GpuRunner::enqueue(batch);
    count();
    return own;
  }
  const StepId next{last().value + 1};
  const auto which = static_cast<std::size_t>(next.value % 2);
  scorer_->upload(which, rows, stream());
  GpuRunner::enqueue(batch);
  try {
    scorer_->score(which, stream());
  } catch (...) {
    abandon(buffers(next));
    skip_to({next.value - 1});
    throw;
  }
  count();
  return next;
}

StepResult RecordingRunner::wait(StepId step) {
  StepResult result = GpuRunner::wait(step);
  if (scorer_ != nullptr) {
    scorer_->store(static_cast<std::size_t>(step.value % 2));
  }
  return result;
}

int RecordingRunner::padded_sequences(const RaggedBatch& step) const {
  const auto num_sequences = static_cast<int>(step.num_sequences());
  const int size = recorded_size(num_sequences);
  const bool is_recorded = step.tokens.size() == step.num_sequences() &&
                           step.logits_rows.size() == step.tokens.size() && size <= max_sequences();
  return is_recorded ? size : num_sequences;
}

void RecordingRunner::launch(const StepCounts& counts) {
  const auto which = static_cast<std::size_t>(counts.buffers);
  if (tables_->sharing != nullptr) {
    tables_->sharing->read_together(groups().empty() ? nullptr : plans_->data(which));
  }
  tables_->layers.hide(groups().empty());
  if (local_ != nullptr) {
    tables_->layers.use_parts(local_->block_tables(which), local_->slot_mapping(which));
  }
  launch_recorded(counts);
  if (local_ != nullptr) {
    local_->end(which, stream());
  }
  if (!groups().empty()) {
    plans_->end(which, stream());
  }
}

void RecordingRunner::launch_recorded(const StepCounts& counts) {
  const int size = counts.num_sequences;
  const bool has_one_token_each =
      size == recorded_size(size) && counts.num_tokens == size && counts.num_decodes == size;
  const bool has_one_sequence = size == 1 && counts.num_tokens <= kMaxGpuTokens;
  if (counts.num_rows != counts.num_tokens || !(has_one_token_each || has_one_sequence)) {
    GpuRunner::launch(counts);
    return;
  }
  const std::tuple key(counts.buffers, size, counts.num_tokens, !groups().empty());
  auto found = steps_.find(key);
  if (found == steps_.end()) {
    found = steps_.try_emplace(key, stream(), [&] { GpuRunner::launch(counts); }).first;
  }
  found->second.launch(stream());
}

void RecordingRunner::warm_up(int max_tokens, int max_sequences) {
  const int max_size = std::min(recorded_size(max_sequences), this->max_sequences());
  GpuRunner::warm_up(max_tokens, max_size);
  // Inactive sequences have one token each. Both sets of buffers have recorded steps of their own.
  for (int size = 1; size <= max_size; size = recorded_size(size + 1)) {
    RaggedBatch inactive;
    inactive.tokens.assign(static_cast<std::size_t>(size), 0);
    inactive.positions.assign(inactive.tokens.size(), 0);
    inactive.slot_mapping.assign(inactive.tokens.size(), -1);
    inactive.context_lengths.assign(inactive.tokens.size(), 0);
    inactive.table_starts.assign(inactive.tokens.size() + 1, 0);
    for (int row = 0; row < size; ++row) {
      inactive.logits_rows.push_back(row);
      inactive.query_starts.push_back(row + 1);
    }
    enqueue(inactive);
    wait(enqueue(inactive));
  }
}

}  // namespace
