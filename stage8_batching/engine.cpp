#include "engine.h"

#include <algorithm>
#include <string>

#include "cache_size.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace stage8 {
namespace {

KvCacheShape cache_shape(const common::LlamaConfig& config, const EngineOptions& options) {
  KvCacheShape shape;
  shape.num_layers = config.num_layers;
  shape.num_blocks = blocks_needed(options.num_slots, options.block_size);
  shape.block_size = options.block_size;
  shape.num_heads = config.num_heads;
  shape.num_kv_heads = config.num_kv_heads;
  shape.head_dim = config.head_dim;
  shape.num_host_blocks = blocks_needed(options.num_host_slots, options.block_size);
  shape.bytes_per_element = options.gpu.precision == Precision::kFloat32 ? 4 : 2;
  if (options.gpu.kv_cache == KvCacheType::kFloat8) {
    shape.bytes_per_element = 1;
    shape.scale_bytes = std::min(shape.head_dim / 16, 8);
  }
  return shape;
}

// The shape with the number of blocks that the memory has room for, if none is given.
KvCacheShape sized(KvCacheShape shape, const EngineOptions& options, GpuRunner* gpu) {
  if (options.num_slots == 0) {
    shape.num_blocks = gpu != nullptr ? gpu->num_blocks() : cpu_num_blocks(shape, options.min_slots);
  }
  return shape;
}

}  // namespace

Engine::Engine(const common::Llama& model, const EngineOptions& options)
    : model_(model),
      options_(options),
      gpu_(make_gpu_runner(model, cache_shape(model.config(), options), options.gpu, options.chunk_size,
                           options.max_sequences, gpu_cache_size(model.config(), options))),
      cache_(sized(cache_shape(model.config(), options), options, gpu_.get()), gpu_ == nullptr),
      manager_(cache_.shape().num_blocks, cache_.shape().block_size, hash_block, cache_.shape().num_host_blocks) {
  if (options_.num_slots == 0) {
    options_.num_slots = cache_.shape().num_slots();
  }
  COMMON_CHECK(options.chunk_size > 0, "a chunk has at least one token");
  COMMON_CHECK(options.max_sequences > 0, "a forward pass has at least one sequence");
}

bool Engine::start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt) {
  return manager_.allocate(sequence, tokens, salt, {.use_prefix_cache = options_.prefix_cache});
}

std::optional<common::Matrix> Engine::append(SequenceId sequence, std::span<const common::Token> tokens) {
  return compute(sequence, tokens) ? std::optional(logits()) : std::nullopt;
}

bool Engine::compute(SequenceId sequence, std::span<const common::Token> tokens) {
  COMMON_CHECK(!tokens.empty(), "nothing to append");
  if (!manager_.reserve(sequence, static_cast<int>(tokens.size()))) {
    return false;
  }
  while (!tokens.empty()) {
    const std::size_t chunk = std::min(tokens.size(), static_cast<std::size_t>(options_.chunk_size));
    RaggedBatch batch;
    batch.add(manager_, sequence, tokens.first(chunk), chunk == tokens.size());
    forward(batch);
    commit(batch);
    tokens = tokens.subspan(chunk);
  }
  return true;
}

int Engine::context_length() const {
  const int models = model_.config().context_length;
  return options_.context_length > 0 ? std::min(options_.context_length, models) : models;
}

std::vector<common::Counter> Engine::counters() const {
  const PrefixStatistics& prefix = manager_.prefix_cache().statistics();
  return {{"forward_passes", static_cast<double>(forward_passes_)},
          {"slots_total", static_cast<double>(options_.num_slots)},
          {"kv_bytes_per_token", static_cast<double>(cache_.shape().bytes_per_slot())},
          {"kv_bytes_read", static_cast<double>(kv_bytes_read_)},
          {"blocks_copied", static_cast<double>(blocks_copied_)},
          {"prefix_lookups", static_cast<double>(prefix.lookups)},
          {"prefix_hits", static_cast<double>(prefix.hits)},
          {"prefix_tokens_saved", static_cast<double>(prefix.tokens_saved)},
          {"prefix_evictions", static_cast<double>(prefix.evictions)}};
}

std::string Engine::rejection(const common::Request& request) const {
  const auto prompt_length = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t length = prompt_length + request.max_new_tokens;
  if (request.prompt.empty()) {
    return "the prompt is empty";
  }
  if (request.max_new_tokens < 1) {
    return "no new tokens are requested";
  }
  if (length > context_length()) {
    const bool is_models = context_length() == model_.config().context_length;
    std::string reason = common::format("a prompt of %lld tokens and %d new ones are more than the %s of %d",
                                        static_cast<long long>(prompt_length), request.max_new_tokens,
                                        is_models ? "model's context" : "--context-length", context_length());
    if (prompt_length < context_length()) {
      reason += common::format("; %lld new ones fit", static_cast<long long>(context_length() - prompt_length));
    }
    return reason;
  }
  return "";
}

void Engine::forward(const RaggedBatch& batch) {
  while (!manager_.pending_copies().empty()) {
    const std::span<const BlockCopy> copies = independent_copies(manager_.pending_copies());
    if (gpu_) {
      gpu_->copy_blocks(copies);
    } else {
      cache_.copy_blocks(copies);
    }
    blocks_copied_ += static_cast<std::int64_t>(copies.size());
    manager_.clear_pending_copies(copies.size());  // those that follow may overwrite what these have read
  }

  if (gpu_) {
    gpu_->forward(batch);
  } else {
    COMMON_CHECK(batch.pending_tokens.empty(), "the CPU needs to know all tokens");
    const common::Matrix hidden =
        model_.forward(batch.tokens, batch.positions,
                       [&](int layer, const common::Matrix& q, const common::Matrix& k, const common::Matrix& v) {
                         cache_.write(layer, batch.slot_mapping, k, v);
                         if (on_layer_) {
                           on_layer_(layer);
                         }
                         return attention(cache_, layer, q, batch, options_.softmax);
                       });
    hidden_ = hidden(batch.logits_rows, Eigen::all);
  }
  forward_passes_ += 1;
  for (const int length : batch.context_lengths) {
    kv_bytes_read_ += cache_.shape().bytes_per_slot() * length;
  }
}

void Engine::commit(const RaggedBatch& batch) {
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    const SequenceId sequence = batch.sequences[i];
    if (!manager_.contains(sequence)) {
      continue;
    }
    COMMON_CHECK(manager_.length(sequence) == batch.positions[static_cast<std::size_t>(batch.query_starts[i])],
                 "another sequence has got this id");
    if (options_.prefix_cache) {
      manager_.commit(sequence, batch.tokens_of(i));
    } else {
      manager_.commit(sequence, batch.num_queries(i));
    }
  }
}

}  // namespace
