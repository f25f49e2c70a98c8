#include "../gpu_runner.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/model/cuda_llama.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "host_pages.h"
#include "kernels.h"
#include "step_buffers.h"
#include "step_inputs.h"
#include "step_sampler.h"

namespace stage8 {
namespace {

using common::DeviceArray;

// The shape without the number of blocks.
PageShape page_shape(const KvCacheShape& shape, const GpuOptions& options) {
  return {.num_blocks = 1,
          .num_kv_heads = shape.num_kv_heads,
          .block_size = shape.block_size,
          .head_dim = shape.head_dim,
          .type = common::page_type(options.types)};
}

common::CudaLlama device_model(const common::Llama& model, const GpuOptions& options, int chunk_size,
                               common::Communicator* peers) {
  return model.is_synthetic() ? common::CudaLlama(model.config(), 1, options.types, chunk_size, peers)
                              : common::CudaLlama(model, options.types, chunk_size, peers);
}

std::size_t logits_size(int max_rows, int vocab_size) {
  return static_cast<std::size_t>(max_rows) * static_cast<std::size_t>(vocab_size);
}

PageShape with_blocks(PageShape shape, int num_blocks) {
  shape.num_blocks = num_blocks;
  return shape;
}

}  // namespace

struct GpuRunner::Impl {
  Impl(const common::Llama& llama, const KvCacheShape& cache_shape, const GpuOptions& options, int chunk_size,
       int sequences_announced, const PagedKernels& table, const std::optional<common::MemoryShare>& share,
       common::Communicator* peers, const MakeSampler& make_sampler, int rows_announced)
      : kernels(table),
        block(page_shape(cache_shape, options)),
        num_layers(cache_shape.num_layers),
        model(device_model(llama, options, chunk_size, peers)),
        max_tokens(chunk_size),
        max_sequences(std::min(chunk_size, sequences_announced)),
        max_rows(std::min(chunk_size, std::max(sequences_announced, rows_announced))),
        max_blocks(std::min(share ? std::numeric_limits<int>::max() : cache_shape.num_blocks,
                            (llama.config().context_length + block.block_size - 1) / block.block_size)),
        buffers{{{chunk_size, max_sequences, max_rows, max_blocks}, {chunk_size, max_sequences, max_rows, max_blocks}}},
        workspace(kernels.workspace_bytes(
            block, step(buffers[0].inputs(), {.num_tokens = chunk_size, .num_sequences = max_sequences}))),
        logits(logits_size(max_rows, model.config().vocab_size)),
        sampler(make_sampler ? make_sampler(llama.config().vocab_size, max_rows)
                             : std::make_unique<HostSampler>(llama.config().vocab_size)),
        cache_size(sized(cache_shape, share, peers)),
        shape(with_blocks(block, cache_size.num_blocks)),
        keys(shape.keys_bytes() * static_cast<std::size_t>(num_layers)),
        values(shape.values_bytes() * static_cast<std::size_t>(num_layers)),
        host(shape, num_layers, cache_size.num_host_blocks) {
    // These bytes are NaN in every type, so that a read of a slot that was never written shows.
    CUDA_CHECK(cudaMemsetAsync(keys.data(), 0xFF, keys.bytes(), stream.get()));
    CUDA_CHECK(cudaMemsetAsync(values.data(), 0xFF, values.bytes(), stream.get()));
  }

  // To be called when everything else is allocated: the share is a part of the memory that is still free.
  CacheSize sized(const KvCacheShape& cache_shape, const std::optional<common::MemoryShare>& share,
                  common::Communicator* peers) const {
    CacheSize size{.num_blocks = cache_shape.num_blocks,
                   .block_size = block.block_size,
                   .bytes_per_slot = num_layers * block.bytes_per_block() / block.block_size,
                   .num_host_blocks = cache_shape.num_host_blocks,
                   .reason = ""};
    if (share.has_value()) {
      std::size_t free_bytes = 0;
      std::size_t total_bytes = 0;
      CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
      const auto own = static_cast<std::int64_t>(free_bytes);
      common::CacheRoom room =
          common::room_on_gpus(*share, peers == nullptr ? own : peers->smallest(own),
                               peers == nullptr ? 1 : peers->shard().count, size.block_size, size.bytes_per_slot);
      size.num_blocks = room.num_blocks;
      size.reason = std::move(room.reason);
    }
    return size;
  }

  StepArrays step(const StepInputs& inputs, const StepCounts& counts) const {
    return {.batch = {.num_sequences = counts.num_sequences,
                      .num_heads = model.config().num_heads,
                      .context_lengths = inputs.context_lengths(),
                      .block_tables = inputs.block_tables(),
                      .table_starts = inputs.table_starts(),
                      .max_blocks_per_sequence = inputs.max_blocks()},
            .num_decodes = counts.num_decodes,
            .num_tokens = counts.num_tokens,
            .query_starts = inputs.query_starts(),
            .slot_mapping = inputs.slot_mapping()};
  }

  Pages pages(int layer) const {
    const auto index = static_cast<std::size_t>(layer);
    return {static_cast<std::byte*>(keys.data()) + shape.keys_bytes() * index,
            static_cast<std::byte*>(values.data()) + shape.values_bytes() * index, shape};
  }

  common::Matrix read_back(int layer, std::span<const int> slots, bool want_keys);
  // Waits for all that is enqueued: [count, vocab_size].
  common::Matrix read_logits(std::size_t first_row, int count) const;

  const PagedKernels& kernels;
  PageShape block;  // with one block: workspaces do not depend on the number of blocks
  int num_layers;
  common::Stream stream;
  common::CudaLlama model;

  int max_tokens;                      // in a step
  int max_sequences;                   // in a step, inactive ones included
  int max_rows;                        // of logits, of a step
  int max_blocks;                      // of a sequence
  std::array<StepBuffers, 2> buffers;  // for steps with even numbers, and with odd numbers
  StepId last;                         // the last step that was enqueued
  common::DeviceMemory workspace;
  DeviceArray<float> logits;  // [num_rows, vocab_size]
  std::unique_ptr<StepSampler> sampler;

  // These are last, because their size may depend on the memory that the others leave free.
  CacheSize cache_size;
  PageShape shape;              // with all blocks
  common::DeviceMemory keys;    // [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
  common::DeviceMemory values;  // the same shape
  HostPages host;               // blocks from num_blocks on
};

std::string GpuRunner::unsupported(const PagedKernels& kernels, const common::LlamaConfig& config,
                                   const KvCacheShape& shape, const GpuOptions& options) {
  const std::string reason = common::CudaLlama::unsupported(config, options.types);
  return reason.empty() ? kernels.unsupported(page_shape(shape, options), shape.num_heads) : reason;
}

GpuRunner::GpuRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
                     int max_sequences, const PagedKernels& kernels, const std::optional<common::MemoryShare>& share,
                     common::Communicator* peers, const MakeSampler& make_sampler, int max_rows) {
  const std::int64_t block_bytes = shape.num_layers * page_shape(shape, options).bytes_per_block();
  try {
    impl_ = std::make_unique<Impl>(model, shape, options, chunk_size, max_sequences, kernels, share, peers,
                                   make_sampler, max_rows);
  } catch (const common::OutOfPinnedMemory&) {
    throw common::InputError("the host has no room for " + common::format_bytes(block_bytes * shape.num_host_blocks) +
                             " of K and V beside the cache; less of it (--host-slots, --host-cache) may fit");
  } catch (const common::OutOfDeviceMemory&) {
    throw common::InputError("the GPU has no room for the model and " +
                             common::format_bytes(block_bytes * shape.num_blocks) +
                             " of K and V; a smaller cache (--slots) may fit");
  }
}

GpuRunner::~GpuRunner() = default;

const CacheSize& GpuRunner::cache() const { return impl_->cache_size; }

void GpuRunner::copy_blocks(std::span<const BlockCopy> copies) {
  while (!copies.empty()) {
    const std::span<const BlockCopy> independent = independent_copies(copies);
    std::vector<PageCopy> launch;
    for (const BlockCopy& copy : independent) {
      if (impl_->host.contains(copy.source) || impl_->host.contains(copy.destination)) {
        impl_->host.copy(impl_->keys.data(), impl_->values.data(), copy.source, copy.destination, impl_->stream);
      } else {
        launch.push_back({copy.source, copy.destination});
      }
    }
    impl_->kernels.copy_blocks(impl_->keys.data(), impl_->values.data(), impl_->num_layers, impl_->shape, launch.data(),
                               static_cast<int>(launch.size()), impl_->stream.get());
    copies = copies.subspan(independent.size());
  }
}

int GpuRunner::padded_sequences(const RaggedBatch& step) const { return static_cast<int>(step.num_sequences()); }

StepId GpuRunner::enqueue(const RaggedBatch& batch) {
  const StepId next{impl_->last.value + 1};
  const auto index = static_cast<std::size_t>(next.value % 2);
  StepBuffers& own = impl_->buffers[index];
  const StepBuffers& other = impl_->buffers[1 - index];
  try {
    const int num_sequences = padded_sequences(batch);
    const int padding = num_sequences - static_cast<int>(batch.num_sequences());
    const common::Stream& path = own.begin(batch, impl_->shape.block_size, num_sequences, other, impl_->stream);
    impl_->sampler->upload(index, batch, path);
    own.end_uploads(impl_->stream);
    const StepInputs& inputs = own.inputs();
    launch({.buffers = static_cast<int>(index),
            .num_tokens = inputs.num_tokens(),
            .num_sequences = num_sequences,
            .num_decodes = inputs.num_decodes() + padding,
            .num_rows = inputs.num_rows() + padding});
    impl_->sampler->draw(index,
                         {.logits = impl_->logits.data(),
                          .token_rows = inputs.logits_rows(),
                          .tokens = inputs.tokens(),
                          .pending_rows = inputs.pending_rows(),
                          .pending_tokens = other.argmax(),
                          .next_tokens = own.argmax()},
                         impl_->stream);
    own.end(impl_->stream);
  } catch (...) {
    abandon(own);
    throw;
  }
  impl_->last = next;
  return next;
}

void GpuRunner::abandon(const StepBuffers& step) noexcept { step.abandon(impl_->stream); }

void GpuRunner::launch(const StepCounts& counts) {
  const StepBuffers& own = impl_->buffers[static_cast<std::size_t>(counts.buffers)];
  const StepBuffers& other = impl_->buffers[static_cast<std::size_t>(1 - counts.buffers)];
  const StepInputs& inputs = own.inputs();
  const cudaStream_t stream = impl_->stream.get();
  const StepArrays step = impl_->step(inputs, counts);
  const std::span<std::byte> workspace(static_cast<std::byte*>(impl_->workspace.data()), impl_->workspace.bytes());
  impl_->kernels.plan(impl_->shape, step, workspace, stream);
  const auto attend = [&](const common::CudaAttentionCall& call) {
    const LayerRows rows{.queries = call.q, .keys = call.k, .values = call.v, .row_stride = call.kv_row_stride};
    impl_->kernels.attend(impl_->pages(call.layer), step, rows, call.output, workspace, call.stream);
  };
  impl_->model.forward(inputs.tokens(), inputs.positions(), counts.num_tokens, attend, stream,
                       {.rows = inputs.pending_rows(), .tokens = other.argmax()});
  if (counts.num_rows > 0) {
    impl_->model.logits(inputs.logits_rows(), counts.num_rows, impl_->logits.data(), stream);
    impl_->model.argmax(impl_->logits.data(), counts.num_rows, own.argmax(), stream);
  }
}

const common::Stream& GpuRunner::stream() const { return impl_->stream; }

int GpuRunner::max_sequences() const { return impl_->max_sequences; }

common::CudaLlama& GpuRunner::model() { return impl_->model; }

StepId GpuRunner::last() const { return impl_->last; }

const StepBuffers& GpuRunner::buffers(StepId step) const {
  return impl_->buffers[static_cast<std::size_t>(step.value % 2)];
}

void GpuRunner::skip_to(StepId last) { impl_->last = last; }

void GpuRunner::warm_up(int max_tokens, int max_sequences) {
  const PageShape& shape = impl_->shape;
  const std::int64_t num_slots = shape.num_blocks * shape.block_size;
  const auto length = static_cast<int>(
      std::min<std::int64_t>({max_tokens, impl_->max_tokens, num_slots, impl_->model.config().context_length}));
  const int max_size = std::min(max_sequences, impl_->max_sequences);
  impl_->model.prepare(length, max_size, impl_->stream.get());
  // A chunk, over a table whose entries are all block 0; its K and V are not stored.
  const int num_blocks = (length + shape.block_size - 1) / shape.block_size;
  RaggedBatch chunk;
  chunk.tokens.assign(static_cast<std::size_t>(length), 0);
  chunk.positions.assign(chunk.tokens.size(), 0);
  chunk.slot_mapping.assign(chunk.tokens.size(), -1);
  chunk.logits_rows = {length - 1};
  chunk.query_starts = {0, length};
  chunk.context_lengths = {length};
  chunk.block_tables.assign(static_cast<std::size_t>(num_blocks), 0);
  chunk.table_starts = {0, num_blocks};
  chunk.sampling_rows = {{{.temperature = 1.0F, .top_k = 1, .top_p = 0.5F}, 0, {}}};
  wait(enqueue(chunk));
}

common::Matrix GpuRunner::logits() { return impl_->read_logits(0, buffers(impl_->last).inputs().num_rows()); }

common::Matrix GpuRunner::Impl::read_logits(std::size_t first_row, int count) const {
  common::Matrix result(count, model.config().vocab_size);
  CUDA_CHECK(cudaMemcpyAsync(result.data(), logits.data() + first_row * static_cast<std::size_t>(result.cols()),
                             static_cast<std::size_t>(result.size()) * sizeof(float), cudaMemcpyDeviceToHost,
                             stream.get()));
  stream.synchronize();
  return result;
}

StepResult GpuRunner::wait(StepId step) {
  COMMON_CHECK(step.value == impl_->last.value || step.value + 1 == impl_->last.value,
               "the tokens of the last two steps are kept");
  const StepBuffers& own = buffers(step);
  StepResult result = {own.argmax_on_host(), {}};
  result.logits.resize(result.tokens.size());
  COMMON_CHECK(own.returned_rows().empty() || step.value == impl_->last.value, "the logits of the last step are kept");
  for (const std::size_t row : own.returned_rows()) {
    result.logits[row] = impl_->read_logits(row, 1);
  }
  return result;
}

common::Matrix GpuRunner::keys(int layer, std::span<const int> slots) { return impl_->read_back(layer, slots, true); }

common::Matrix GpuRunner::values(int layer, std::span<const int> slots) {
  return impl_->read_back(layer, slots, false);
}

common::Matrix GpuRunner::Impl::read_back(int layer, std::span<const int> slots, bool want_keys) {
  const int cols = shape.num_kv_heads * shape.head_dim;
  const std::size_t size = slots.size() * static_cast<std::size_t>(cols);
  const DeviceArray<int> device_slots(slots);
  const common::DeviceMemory rows(2 * size * static_cast<std::size_t>(bytes_of(row_type(shape.type))));
  auto* const second = static_cast<std::byte*>(rows.data()) + rows.bytes() / 2;
  kernels.read_from_slots(pages(layer), rows.data(), second, cols, device_slots.data(), static_cast<int>(slots.size()),
                          stream.get());
  stream.synchronize();
  common::Matrix result(static_cast<Eigen::Index>(slots.size()), cols);
  const void* const source = want_keys ? rows.data() : second;
  if (shape.type == ScalarType::kFloat32) {
    CUDA_CHECK(cudaMemcpy(result.data(), source, size * sizeof(float), cudaMemcpyDeviceToHost));
    return result;
  }
  std::vector<std::uint16_t> halves(size);
  CUDA_CHECK(cudaMemcpy(halves.data(), source, size * sizeof(std::uint16_t), cudaMemcpyDeviceToHost));
  std::transform(halves.begin(), halves.end(), result.data(),
                 [](std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); });
  return result;
}

}  // namespace
