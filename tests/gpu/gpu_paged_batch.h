// Attention's inputs on the device, and calls of the kernels on them: the base of all tests of attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "tests/gpu/gpu_values.h"

namespace tests {

// A batch as the test describes it, on the host.
struct BatchContents {
  common::PageShape shape;
  int num_heads = 0;
  std::vector<int> context_lengths;
  std::vector<int> block_tables;  // in any order, with gaps allowed
  std::vector<int> table_starts;  // [num_sequences]
  int max_blocks = 0;
  int window = 0;
  std::vector<int> query_starts;
  std::vector<int> slots;     // of all cached tokens, sequence by sequence; -1: the pages do not have the token
  std::vector<float> keys;    // [slots.size(), num_kv_heads * head_dim]
  std::vector<float> values;  // [slots.size(), num_kv_heads * head_dim]
  std::vector<float> queries;
};

// The batch on the device: K and V in their slots, NaN in every other slot, the output poisoned. Each table of kernels
// has its own order of the rows in a block: K and V are written anew when another one is to read them.
class PagedBatch {
 public:
  const common::Pages& pages_of(const common::PagedKernels& kernels) const;
  const common::PageShape& shape() const { return pages_.shape; }
  const common::BatchArrays& batch() const { return batch_; }
  const int* query_starts() const { return query_starts_.data(); }
  std::vector<int> block_tables() const { return block_tables_.download(); }
  std::vector<int> table_starts() const { return table_starts_.download(); }
  int num_tokens() const { return num_tokens_; }

  // The output of the kernels that `launch` enqueues on `stream`, as floats. Before, the workspace is poisoned, and
  // the output filled with kUnwritten.
  std::vector<float> output_of(std::size_t workspace_bytes, const std::function<void(void* workspace)>& launch) const;
  // With K and V of the new tokens not in the pages yet. `pages_are_equal`: afterwards the pages had the bytes that
  // they have with these tokens written beforehand, or, if they were not to be stored, the poison that was in their
  // slots.
  struct Appended {
    std::vector<float> output;
    bool pages_are_equal = false;
  };
  // By a table of kernels, which stores K and V. The first num_decodes sequences are its decodes.
  Appended attend(const common::PagedKernels& kernels, int num_decodes) const;
  common::StepArrays step(int num_decodes) const;
#ifdef COURSE_PRODUCTION
  std::vector<float> decode(const common::DecodeOptions& options = {}, int num_runs = 1) const;
  Appended decode_new_rows(const common::DecodeOptions& options = {}, int num_runs = 1, bool is_stored = true) const;
  std::vector<float> ragged(const common::RaggedOptions& options = {}, int num_runs = 1) const;
#endif

  common::Stream stream;
  common::DeviceArray<std::byte> queries;
  common::DeviceArray<std::byte> output;

 protected:
  PagedBatch() = default;
  void put(const BatchContents& contents);

 private:
#ifdef COURSE_PRODUCTION
  std::vector<float> decode_runs(const common::DecodeOptions& options, int num_runs,
                                 const common::NewRows& new_rows) const;
#endif
  // The output of `run` on pages of these kernels, in which the new tokens' slots are poisoned.
  Appended appended(const common::PagedKernels& kernels, bool is_stored,
                    const std::function<std::vector<float>()>& run) const;
  common::LayerRows layer_rows() const;

  int num_tokens_ = 0;
  common::DeviceArray<std::byte> keys_;
  common::DeviceArray<std::byte> values_;
  mutable const common::PagedKernels* written_by_ = nullptr;
  // Rows of the cached tokens, and their slots.
  common::DeviceArray<std::byte> rows_of_keys_;
  common::DeviceArray<std::byte> rows_of_values_;
  common::DeviceArray<int> slots_;
  common::DeviceArray<int> context_lengths_;
  common::DeviceArray<int> block_tables_;
  common::DeviceArray<int> table_starts_;
  common::DeviceArray<int> query_starts_;
  common::DeviceArray<std::byte> new_rows_;  // [num_tokens, 2 * num_kv_heads * head_dim]: K and V of the new tokens
  common::DeviceArray<int> new_slots_;       // [num_tokens]; -1 in the row of an inactive sequence
  common::Pages pages_;
  common::BatchArrays batch_;
};

inline void PagedBatch::put(const BatchContents& contents) {
  const common::PageShape& shape = contents.shape;
  num_tokens_ = contents.query_starts.back();
  keys_ = poisoned(shape.elements(), shape.type);
  values_ = poisoned(shape.elements(), shape.type);
  pages_ = {keys_.data(), shape.is_paired() ? nullptr : values_.data(), shape};
  context_lengths_ = common::DeviceArray<int>(contents.context_lengths);
  block_tables_ = common::DeviceArray<int>(contents.block_tables);
  table_starts_ = common::DeviceArray<int>(contents.table_starts);
  query_starts_ = common::DeviceArray<int>(contents.query_starts);
  const auto num_sequences = static_cast<int>(contents.context_lengths.size());
  batch_ = {.num_sequences = num_sequences,
            .num_heads = contents.num_heads,
            .context_lengths = context_lengths_.data(),
            .block_tables = block_tables_.data(),
            .table_starts = table_starts_.data(),
            .max_blocks_per_sequence = contents.max_blocks,
            .window = contents.window};
  const ScalarType type = common::row_type(shape.type);
  queries = common::DeviceArray<std::byte>(to_bytes(contents.queries, type));
  output = poisoned(static_cast<std::int64_t>(contents.queries.size()), type);
  const std::size_t columns = static_cast<std::size_t>(shape.num_kv_heads) * static_cast<std::size_t>(shape.head_dim);
  std::vector<float> new_rows;
  std::vector<int> new_slots;
  std::size_t end = 0;  // of the sequence's cached tokens
  for (std::size_t s = 0; s < contents.context_lengths.size(); ++s) {
    end += static_cast<std::size_t>(contents.context_lengths[s]);
    for (int before_end = contents.query_starts[s + 1] - contents.query_starts[s]; before_end > 0; --before_end) {
      const bool is_active = contents.context_lengths[s] > 0;
      const std::size_t token = end - static_cast<std::size_t>(before_end);
      new_slots.push_back(is_active ? contents.slots[token] : -1);
      for (const std::vector<float>* matrix : {&contents.keys, &contents.values}) {
        const std::vector<float> none(columns);
        const auto row = is_active ? matrix->begin() + static_cast<std::ptrdiff_t>(token * columns) : none.begin();
        new_rows.insert(new_rows.end(), row, row + static_cast<std::ptrdiff_t>(columns));
      }
    }
  }
  new_rows_ = common::DeviceArray<std::byte>(to_bytes(new_rows, type));
  new_slots_ = common::DeviceArray<int>(new_slots);
  rows_of_keys_ = common::DeviceArray<std::byte>(to_bytes(contents.keys, type));
  rows_of_values_ = common::DeviceArray<std::byte>(to_bytes(contents.values, type));
  slots_ = common::DeviceArray<int>(contents.slots);
}

inline const common::Pages& PagedBatch::pages_of(const common::PagedKernels& kernels) const {
  if (written_by_ != &kernels && slots_.size() > 0) {
    CUDA_CHECK(cudaMemset(pages_.keys, 0xFF, keys_.size()));
    CUDA_CHECK(cudaMemset(values_.data(), 0xFF, values_.size()));
    CUDA_CHECK(cudaDeviceSynchronize());
    kernels.write_to_slots(pages_, rows_of_keys_.data(), rows_of_values_.data(),
                           std::int64_t{shape().num_kv_heads} * shape().head_dim, slots_.data(),
                           static_cast<int>(slots_.size()), stream.get());
    stream.synchronize();
    written_by_ = &kernels;
  }
  return pages_;
}

inline std::vector<float> PagedBatch::output_of(std::size_t workspace_bytes,
                                                const std::function<void(void* workspace)>& launch) const {
  const common::DeviceArray<std::byte> workspace(workspace_bytes);
  CUDA_CHECK(cudaMemset(workspace.data(), 0xFF, workspace.size()));
  CUDA_CHECK(cudaMemset(output.data(), kUnwritten, output.size()));
  CUDA_CHECK(cudaDeviceSynchronize());
  launch(workspace.data());
  stream.synchronize();
  return to_floats(output.download(), common::row_type(shape().type));
}

inline common::LayerRows PagedBatch::layer_rows() const {
  const int columns = shape().num_kv_heads * shape().head_dim;
  return {.queries = queries.data(),
          .keys = new_rows_.data(),
          .values = new_rows_.data() + columns * common::bytes_of(common::row_type(shape().type)),
          .row_stride = 2 * std::int64_t{columns}};
}

inline PagedBatch::Appended PagedBatch::appended(const common::PagedKernels& kernels, bool is_stored,
                                                 const std::function<std::vector<float>()>& run) const {
  const common::Pages& pages = pages_of(kernels);
  const common::LayerRows rows = layer_rows();
  const common::DeviceArray<std::byte> poison =
      poisoned(static_cast<std::int64_t>(new_slots_.size()) * rows.row_stride, common::row_type(shape().type));
  const auto write = [&](const void* keys, const void* values) {
    kernels.write_to_slots(pages, keys, values, rows.row_stride, new_slots_.data(), num_tokens_, stream.get());
    stream.synchronize();
  };
  const auto bytes = [&] { return std::pair(keys_.download(), values_.download()); };
  const auto written = bytes();
  write(poison.data(), poison.data());
  const auto expected = is_stored ? written : bytes();
  Appended result;
  result.output = run();
  result.pages_are_equal = bytes() == expected;
  write(rows.keys, rows.values);
  return result;
}

inline common::StepArrays PagedBatch::step(int num_decodes) const {
  return {.batch = batch_,
          .num_decodes = num_decodes,
          .num_tokens = num_tokens_,
          .query_starts = query_starts_.data(),
          .slot_mapping = new_slots_.data()};
}

inline PagedBatch::Appended PagedBatch::attend(const common::PagedKernels& kernels, int num_decodes) const {
  const common::StepArrays own = step(num_decodes);
  const std::size_t bytes = kernels.workspace_bytes(shape(), own);
  return appended(kernels, true, [&] {
    return output_of(bytes, [&](void* memory) {
      const std::span<std::byte> workspace(static_cast<std::byte*>(memory), bytes);
      kernels.plan(shape(), own, workspace, stream.get());
      stream.synchronize();  // what attend() may overlap with writes no plan
      kernels.attend(pages_of(kernels), own, layer_rows(), output.data(), workspace, stream.get());
    });
  });
}

#ifdef COURSE_PRODUCTION

// num_runs calls after one plan, without a pause between them, as the layers of a model. Only the last one writes the
// output that is returned.
inline std::vector<float> PagedBatch::decode_runs(const common::DecodeOptions& options, int num_runs,
                                                  const common::NewRows& new_rows) const {
  const common::DeviceArray<std::byte> of_other_runs(output.size());
  const common::Pages& pages = pages_of(common::kProductionKernels);
  return output_of(common::decode_workspace_bytes(shape(), batch_, options), [&](void* workspace) {
    common::plan_decode(shape(), batch_, workspace, stream.get(), options);
    for (int i = 0; i < num_runs; ++i) {
      // The plan must not overlap with its reader.
      common::DecodeOptions run = options;
      run.overlap_previous = i > 0;
      void* const result = i + 1 == num_runs ? output.data() : of_other_runs.data();
      common::decode_attention(pages, batch_, queries.data(), result, workspace, stream.get(), run, new_rows);
    }
  });
}

inline std::vector<float> PagedBatch::decode(const common::DecodeOptions& options, int num_runs) const {
  return decode_runs(options, num_runs, {});
}

inline PagedBatch::Appended PagedBatch::decode_new_rows(const common::DecodeOptions& options, int num_runs,
                                                        bool is_stored) const {
  const common::LayerRows rows = layer_rows();
  const common::DeviceArray<int> nowhere(std::vector<int>(new_slots_.size(), -1));
  const int* const slots = is_stored ? new_slots_.data() : nowhere.data();
  return appended(common::kProductionKernels, is_stored, [&] {
    return decode_runs(options, num_runs, {rows.keys, rows.values, rows.row_stride, slots});
  });
}

// num_runs calls after one plan, as the layers of a model.
inline std::vector<float> PagedBatch::ragged(const common::RaggedOptions& options, int num_runs) const {
  const common::Pages& pages = pages_of(common::kProductionKernels);
  const std::size_t bytes = common::ragged_workspace_bytes(shape(), batch_, num_tokens_, options);
  return output_of(bytes, [&](void* workspace) {
    common::plan_ragged(shape(), batch_, query_starts_.data(), num_tokens_, workspace, stream.get(), options);
    for (int i = 0; i < num_runs; ++i) {
      common::ragged_attention(pages, batch_, query_starts_.data(), queries.data(), output.data(), num_tokens_,
                               workspace, stream.get(), options);
    }
  });
}

#endif  // COURSE_PRODUCTION

}  // namespace tests
