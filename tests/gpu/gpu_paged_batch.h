// Attention's inputs on the device, and calls of the kernels on them: what all tests of attention stand on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "tests/gpu/gpu_values.h"

namespace tests {

// What a test says about a batch, on the host.
struct BatchContents {
  stage::PageShape shape;
  int num_heads = 0;
  std::vector<int> context_lengths;
  std::vector<int> block_tables;  // [num_sequences, max_blocks]
  std::vector<int> query_starts;
  std::vector<int> slots;     // of all cached tokens
  std::vector<float> keys;    // [slots.size(), num_kv_heads * head_dim]
  std::vector<float> values;  // likewise
  std::vector<float> queries;
};

// The same on the device: K and V in their slots, every other slot NaN, the output poisoned.
class PagedBatch {
 public:
  const stage::Pages& pages() const { return pages_; }
  const stage::Batch& batch() const { return batch_; }
  const int* query_starts() const { return query_starts_.data(); }
  int num_tokens() const { return num_tokens_; }

  // The output of the kernels that `launch` enqueues on `stream`, as floats. Output and workspace are poisoned first.
  std::vector<float> output_of(std::size_t workspace_bytes, const std::function<void(void* workspace)>& launch) const;
  std::vector<float> decode(const stage::DecodeOptions& options = {}, int num_runs = 1) const;
  std::vector<float> ragged() const;

  common::Stream stream;
  common::DeviceArray<std::byte> queries;
  common::DeviceArray<std::byte> output;

 protected:
  PagedBatch() = default;
  void put(const BatchContents& contents);

 private:
  int num_tokens_ = 0;
  common::DeviceArray<std::byte> keys_;
  common::DeviceArray<std::byte> values_;
  common::DeviceArray<int> context_lengths_;
  common::DeviceArray<int> block_tables_;
  common::DeviceArray<int> query_starts_;
  stage::Pages pages_;
  stage::Batch batch_;
};

inline void PagedBatch::put(const BatchContents& contents) {
  const stage::PageShape& shape = contents.shape;
  num_tokens_ = contents.query_starts.back();
  keys_ = poisoned(shape.elements(), shape.type);
  values_ = poisoned(shape.elements(), shape.type);
  pages_ = {keys_.data(), shape.is_paired() ? nullptr : values_.data(), shape};
  context_lengths_ = common::DeviceArray<int>(contents.context_lengths);
  block_tables_ = common::DeviceArray<int>(contents.block_tables);
  query_starts_ = common::DeviceArray<int>(contents.query_starts);
  const auto num_sequences = static_cast<int>(contents.context_lengths.size());
  batch_ = {.num_sequences = num_sequences,
            .num_heads = contents.num_heads,
            .context_lengths = context_lengths_.data(),
            .block_tables = block_tables_.data(),
            .max_blocks_per_sequence = static_cast<int>(contents.block_tables.size()) / num_sequences};
  const ScalarType type = stage::row_type(shape.type);
  queries = common::DeviceArray<std::byte>(to_bytes(contents.queries, type));
  output = poisoned(static_cast<std::int64_t>(contents.queries.size()), type);
  if (contents.slots.empty()) {
    return;
  }
  const common::DeviceArray<std::byte> rows_of_keys(to_bytes(contents.keys, type));
  const common::DeviceArray<std::byte> rows_of_values(to_bytes(contents.values, type));
  const common::DeviceArray<int> slot_mapping(contents.slots);
  stage::write_to_slots(pages_, rows_of_keys.data(), rows_of_values.data(),
                        std::int64_t{shape.num_kv_heads} * shape.head_dim, slot_mapping.data(),
                        static_cast<int>(contents.slots.size()), stream.get());
  stream.synchronize();
}

inline std::vector<float> PagedBatch::output_of(std::size_t workspace_bytes,
                                                const std::function<void(void* workspace)>& launch) const {
  const common::DeviceArray<std::byte> workspace(workspace_bytes);
  CUDA_CHECK(cudaMemset(workspace.data(), 0xFF, workspace.size()));
  CUDA_CHECK(cudaMemset(output.data(), 0xFF, output.size()));
  CUDA_CHECK(cudaDeviceSynchronize());
  launch(workspace.data());
  stream.synchronize();
  return to_floats(output.download(), stage::row_type(pages_.shape.type));
}

// num_runs calls after one plan, without a pause between them, as the layers of a model. Only the last one writes the
// output that is returned.
inline std::vector<float> PagedBatch::decode(const stage::DecodeOptions& options, int num_runs) const {
  const common::DeviceArray<std::byte> of_other_runs(output.size());
  return output_of(stage::decode_workspace_bytes(pages_.shape, batch_, options), [&](void* workspace) {
    stage::plan_decode(pages_.shape, batch_, workspace, stream.get(), options);
    for (int i = 0; i < num_runs; ++i) {
      // The plan must not overlap with its reader.
      stage::DecodeOptions run = options;
      run.overlap_previous = i > 0;
      void* const result = i + 1 == num_runs ? output.data() : of_other_runs.data();
      stage::decode_attention(pages_, batch_, queries.data(), result, workspace, stream.get(), run);
    }
  });
}

inline std::vector<float> PagedBatch::ragged() const {
  return output_of(stage::ragged_workspace_bytes(pages_.shape, batch_, num_tokens_), [&](void* workspace) {
    stage::plan_ragged(pages_.shape, batch_, query_starts_.data(), num_tokens_, workspace, stream.get());
    stage::ragged_attention(pages_, batch_, query_starts_.data(), queries.data(), output.data(), num_tokens_, workspace,
                            stream.get());
  });
}

}  // namespace tests
