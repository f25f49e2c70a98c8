#include "recording_runner.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

CacheSize with_host_blocks(CacheSize size, int num_host_blocks) {
  size.num_host_blocks = num_host_blocks;
  return size;
}

}  // namespace

std::string RecordingRunner::unsupported(const common::PagedKernels& kernels, const common::LlamaConfig& config,
                                         const KvCacheShape& shape, const GpuOptions& options) {
  std::string reason = GpuRunner::unsupported(kernels, config, shape, options);
  if (reason.empty() && config.has_windows()) {
    return "on the GPU, layers that see the last " + std::to_string(config.window) +
           " tokens only are computed in contexts up to that length: --context-length would do";
  }
  return reason;
}

RecordingRunner::RecordingRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options,
                                 int chunk_size, int max_sequences, const common::PagedKernels& kernels,
                                 const std::optional<common::MemoryShare>& share, common::Communicator* peers)
    : RecordingRunner(model, shape, options, chunk_size, max_sequences, share, peers,
                      std::make_unique<Tables>(kernels, page_shape(shape, options))) {}

RecordingRunner::RecordingRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options,
                                 int chunk_size, int max_sequences, const std::optional<common::MemoryShare>& share,
                                 common::Communicator* peers, std::unique_ptr<Tables> tables)
    : GpuRunner(
          model, without_host_blocks(shape), options, chunk_size, recorded_size(max_sequences), tables->finder, share,
          peers,
          [peers](int vocab_size, int max_rows) {
            return std::make_unique<DeviceSampler>(vocab_size, max_rows, peers);
          },
          kMaxGpuTokens),
      tables_(std::move(tables)),
      plans_(tables_->sharing == nullptr
                 ? nullptr
                 : std::make_unique<SharedPlans>(page_shape(shape, options), shape.num_heads, this->max_sequences())),
      size_(with_host_blocks(GpuRunner::cache(), shape.num_host_blocks)),
      host_blocks_(with_blocks(page_shape(shape, options), size_.num_blocks), shape.num_layers, shape.num_host_blocks),
      vocab_size_(model.config().vocab_size),
      max_tokens_(chunk_size) {}

bool RecordingRunner::set_reading_costs(const common::ReadingCosts& costs) {
  if (plans_ != nullptr) {
    plans_->set_costs(costs);
  }
  return plans_ != nullptr;
}

std::vector<common::SharedPrefix> RecordingRunner::plan_sharing(const RaggedBatch& batch) {
  if (plans_ == nullptr || batch.tokens.size() != batch.num_sequences()) {
    return {};
  }
  const std::vector<common::SharedPrefix> groups = groups_of(batch, plans_->shape().block_size, plans_->costs());
  if (groups.empty()) {
    return {};
  }
  const auto which = static_cast<std::size_t>((last().value + 1) % 2);
  return plans_->upload(which, batch, groups, padded_sequences(batch), stream());
}

void RecordingRunner::copy_blocks(std::span<const BlockCopy> copies) {
  host_blocks_.copy_behind(tables_->finder.pages(), copies, stream(),
                           [this](std::span<const BlockCopy> inside) { GpuRunner::copy_blocks(inside); });
}

void RecordingRunner::copy_beside(std::span<const BlockCopy> copies) {
  host_blocks_.copy_beside(tables_->finder.pages(), copies, stream());
}

StepId RecordingRunner::enqueue(const RaggedBatch& batch) {
  const std::vector<common::ScoredRow> rows = take_rows();
  host_blocks_.before_step(stream());
  read_together(batch, plan_sharing(batch));
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
  launch_recorded(counts);
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
