#include "../gpu_runner.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/model/cuda_llama.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "kernels.h"
#include "step_inputs.h"

namespace stage7 {
namespace {

using common::DeviceArray;

PageShape page_shape(const KvCacheShape& shape, const GpuOptions& options) {
  return {.num_blocks = shape.num_blocks,
          .num_kv_heads = shape.num_kv_heads,
          .block_size = shape.block_size,
          .head_dim = shape.head_dim,
          .type = common::page_type(options.types)};
}

common::CudaLlama device_model(const common::Llama& model, const GpuOptions& options, int chunk_size) {
  return model.is_synthetic() ? common::CudaLlama(model.config(), 1, options.types, chunk_size)
                              : common::CudaLlama(model, options.types, chunk_size);
}

}  // namespace

struct GpuRunner::Impl {
  Impl(const common::Llama& llama, const KvCacheShape& cache_shape, const GpuOptions& options, int chunk_size,
       const PagedKernels& table)
      : kernels(table),
        shape(page_shape(cache_shape, options)),
        num_layers(cache_shape.num_layers),
        cache_size{cache_shape.num_blocks, shape.block_size, num_layers * shape.bytes_per_block() / shape.block_size},
        model(device_model(llama, options, chunk_size)),
        keys(shape.keys_bytes() * static_cast<std::size_t>(num_layers)),
        values(shape.values_bytes() * static_cast<std::size_t>(num_layers)),
        inputs(chunk_size, std::min(cache_shape.num_blocks,
                                    (llama.config().context_length + shape.block_size - 1) / shape.block_size)),
        workspace(kernels.workspace_bytes(shape, step(chunk_size))),
        logits(static_cast<std::size_t>(llama.config().vocab_size)) {
    // These bytes are NaN in every type, so that a read of a slot that was never written shows.
    CUDA_CHECK(cudaMemsetAsync(keys.data(), 0xFF, keys.bytes(), stream.get()));
    CUDA_CHECK(cudaMemsetAsync(values.data(), 0xFF, values.bytes(), stream.get()));
  }

  // The next tokens of the one sequence.
  StepArrays step(int num_tokens) const {
    return {.batch = {.num_sequences = 1,
                      .num_heads = model.config().num_heads,
                      .context_lengths = inputs.context_lengths(),
                      .block_tables = inputs.block_tables(),
                      .table_starts = inputs.table_starts(),
                      .max_blocks_per_sequence = inputs.max_blocks()},
            .num_decodes = num_tokens == 1 ? 1 : 0,
            .num_tokens = num_tokens,
            .query_starts = inputs.query_starts(),
            .slot_mapping = inputs.slot_mapping()};
  }

  Pages pages(int layer) const {
    const auto index = static_cast<std::size_t>(layer);
    return {static_cast<std::byte*>(keys.data()) + shape.keys_bytes() * index,
            static_cast<std::byte*>(values.data()) + shape.values_bytes() * index, shape};
  }

  common::Matrix read_back(int layer, std::span<const int> slots, bool want_keys);

  const PagedKernels& kernels;
  PageShape shape;
  int num_layers;
  CacheSize cache_size;
  common::Stream stream;
  common::CudaLlama model;
  common::DeviceMemory keys;    // [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
  common::DeviceMemory values;  // the same shape

  StepInputs inputs;
  common::DeviceMemory workspace;
  DeviceArray<float> logits;  // [1, vocab_size]
  DeviceArray<int> argmax{1};
  common::PinnedArray<int> argmax_on_host{1};
  bool draws_tokens = true;  // whether the last batch asked for a token, not for logits
  StepId last;
  // The launches of a step of one token, recorded. It is last: it uses what is above.
  std::optional<common::Graph> decode_step;
};

std::string GpuRunner::unsupported(const PagedKernels& kernels, const common::LlamaConfig& config,
                                   const KvCacheShape& shape, const GpuOptions& options) {
  const std::string reason = common::CudaLlama::unsupported(config, options.types);
  return reason.empty() ? kernels.unsupported(page_shape(shape, options), shape.num_heads) : reason;
}

GpuRunner::GpuRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
                     const PagedKernels& kernels) {
  try {
    impl_ = std::make_unique<Impl>(model, shape, options, chunk_size, kernels);
  } catch (const common::OutOfDeviceMemory&) {
    const PageShape pages = page_shape(shape, options);
    throw common::InputError("the GPU has no room for the model and " +
                             common::format_bytes(pages.num_blocks * shape.num_layers * pages.bytes_per_block()) +
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
      launch.push_back({copy.source, copy.destination});
    }
    impl_->kernels.copy_blocks(impl_->keys.data(), impl_->values.data(), impl_->num_layers, impl_->shape, launch.data(),
                               static_cast<int>(launch.size()), impl_->stream.get());
    copies = copies.subspan(independent.size());
  }
}

StepId GpuRunner::enqueue(const RaggedBatch& batch) {
  try {
    impl_->inputs.upload(batch, impl_->shape.block_size, impl_->stream);
    if (impl_->inputs.num_tokens() == 1 && impl_->inputs.num_rows() == 1) {
      // Launched one by one, such a step takes the host longer than the GPU. The first one is recorded as a CUDA graph,
      // and later ones replay it with other numbers in the inputs.
      if (!impl_->decode_step) {
        impl_->decode_step.emplace(impl_->stream, [&] { launch(1, 1); });
      }
      impl_->decode_step->launch(impl_->stream);
    } else {
      launch(impl_->inputs.num_tokens(), impl_->inputs.num_rows());
    }
    CUDA_CHECK(cudaMemcpyAsync(impl_->argmax_on_host.data(), impl_->argmax.data(), sizeof(int), cudaMemcpyDeviceToHost,
                               impl_->stream.get()));
    impl_->draws_tokens = batch.draws_tokens;
  } catch (...) {
    (void)cudaStreamSynchronize(impl_->stream.get());  // launches in flight still read the inputs
    throw;
  }
  impl_->last.value += 1;
  return impl_->last;
}

void GpuRunner::launch(int num_tokens, int num_rows) {
  const StepInputs& inputs = impl_->inputs;
  const cudaStream_t stream = impl_->stream.get();
  const StepArrays step = impl_->step(num_tokens);
  const std::span<std::byte> workspace(static_cast<std::byte*>(impl_->workspace.data()), impl_->workspace.bytes());
  impl_->kernels.plan(impl_->shape, step, workspace, stream);
  const auto attend = [&](const common::CudaAttentionCall& call) {
    const LayerRows rows{.queries = call.q, .keys = call.k, .values = call.v, .row_stride = call.kv_row_stride};
    impl_->kernels.attend(impl_->pages(call.layer), step, rows, call.output, workspace, call.stream);
  };
  impl_->model.forward(inputs.tokens(), inputs.positions(), num_tokens, attend, stream);
  if (num_rows > 0) {
    impl_->model.logits(inputs.logits_rows(), num_rows, impl_->logits.data(), stream);
    impl_->model.argmax(impl_->logits.data(), num_rows, impl_->argmax.data(), stream);
  }
}

StepResult GpuRunner::wait(StepId step) {
  COMMON_CHECK(step.value == impl_->last.value, "the result of the last step is kept");
  StepResult result;
  if (!impl_->draws_tokens) {
    result.logits.resize(impl_->inputs.num_rows(), impl_->model.config().vocab_size);
    CUDA_CHECK(cudaMemcpyAsync(result.logits.data(), impl_->logits.data(),
                               static_cast<std::size_t>(result.logits.size()) * sizeof(float), cudaMemcpyDeviceToHost,
                               impl_->stream.get()));
  }
  impl_->stream.synchronize();
  if (impl_->draws_tokens) {
    result.tokens.assign(impl_->argmax_on_host.data(), impl_->argmax_on_host.data() + impl_->inputs.num_rows());
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
