#include "layer_kernels.h"

#include <algorithm>

#include "common/base/check.h"

namespace stage8 {
namespace {

constexpr std::size_t kLine = 256;  // workspaces begin at its multiples

}  // namespace

LayerKernels::LayerKernels(const common::PagedKernels& kernels, const common::LlamaConfig& config)
    : windowed_(kernels),
      kernels_(kernels.has_windows() ? kernels : windowed_),
      window_(config.has_windows() ? config.window : 0) {
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const bool has_window = window_ > 0 && !config.sees_all(layer);
    rows_.push_back(static_cast<int>(std::count(has_window_.begin(), has_window_.end(), has_window)));
    has_window_.push_back(has_window);
  }
  has_both_ = std::count(has_window_.begin(), has_window_.end(), has_window_.front()) != config.num_layers;
}

const common::Pages& LayerKernels::pages() const {
  COMMON_CHECK(first_layer_.keys != nullptr, "no step has been computed: no block has contents");
  return first_layer_;
}

void LayerKernels::divide(std::int64_t num_blocks, std::int64_t num_parts) {
  COMMON_CHECK(has_both_ && num_parts > 0 && first_layer_.keys == nullptr,
               "there are two kinds of layers, and no step");
  num_blocks_ = num_blocks;
  num_parts_ = num_parts;
}

void LayerKernels::use_parts(const int* block_tables, const int* slot_mapping) {
  block_tables_ = block_tables;
  slot_mapping_ = slot_mapping;
}

common::Pages LayerKernels::pages_of(bool has_window) const {
  common::Pages result = pages();
  const std::int64_t num_before =
      has_window ? num_blocks_ * std::count(has_window_.begin(), has_window_.end(), false) : 0;
  const auto behind = [&](void* memory, std::size_t bytes) {
    const std::int64_t block_bytes = static_cast<std::int64_t>(bytes) / first_layer_.shape.num_blocks;
    return static_cast<std::byte*>(memory) + num_before * block_bytes;
  };
  result.keys = behind(result.keys, first_layer_.shape.keys_bytes());
  result.values = behind(result.values, first_layer_.shape.values_bytes());
  result.shape.num_blocks = has_window ? num_parts_ : num_blocks_;
  return result;
}

common::Pages LayerKernels::own(const common::Pages& pages) const {
  if (!is_divided()) {
    return pages;
  }
  const auto layer = static_cast<std::size_t>(layer_of(pages));
  common::Pages result = pages_of(has_window_[layer]);
  const auto row = static_cast<std::size_t>(rows_[layer]);
  result.keys = static_cast<std::byte*>(result.keys) + row * result.shape.keys_bytes();
  result.values = static_cast<std::byte*>(result.values) + row * result.shape.values_bytes();
  return result;
}

void LayerKernels::copy(bool has_window, std::span<const BlockCopy> copies, cudaStream_t stream) const {
  if (copies.empty()) {
    return;
  }
  std::vector<common::PageCopy> launch;
  for (const auto& [source, destination] : copies) {
    launch.push_back({source, destination});
  }
  const common::Pages first = pages_of(has_window);
  const auto num_layers = static_cast<int>(std::count(has_window_.begin(), has_window_.end(), has_window));
  kernels_.copy_blocks(first.keys, first.values, num_layers, first.shape, launch.data(),
                       static_cast<int>(launch.size()), stream);
}

void LayerKernels::copy_blocks(void* keys, void* values, int num_layers, const common::PageShape& shape,
                               const common::PageCopy* copies, int num_copies, cudaStream_t stream) const {
  COMMON_CHECK(!is_divided(), "of pages that are divided, layers of one kind are copied at a time");
  kernels_.copy_blocks(keys, values, num_layers, shape, copies, num_copies, stream);
}

std::size_t LayerKernels::workspace_bytes(const common::PageShape& shape, const common::StepArrays& largest) const {
  const std::size_t whole = kernels_.workspace_bytes(shape, largest);
  if (window_ == 0) {
    return whole;
  }
  const std::size_t own = std::max(whole, kernels_.workspace_bytes(shape, with_window(largest)));
  return has_both_ ? 2 * ((own + kLine - 1) / kLine * kLine) : own;
}

void LayerKernels::plan(const common::PageShape& shape, const common::StepArrays& step, std::span<std::byte> workspace,
                        cudaStream_t stream) const {
  const bool has_windows = hides_ && window_ > 0;
  COMMON_CHECK(has_windows || !is_divided(), "pages that are divided are for steps with windows");
  const auto with_blocks = [&](std::int64_t num_blocks) {
    common::PageShape own = shape;
    own.num_blocks = is_divided() ? num_blocks : shape.num_blocks;
    return own;
  };
  if (has_both_ || !has_windows) {
    kernels_.plan(with_blocks(num_blocks_), step, part_of(workspace, false), stream);
  }
  if (has_windows) {
    kernels_.plan(with_blocks(num_parts_), with_window(step), part_of(workspace, true), stream);
  }
}

void LayerKernels::attend(const common::Pages& pages, const common::StepArrays& step, const common::LayerRows& rows,
                          void* output, std::span<std::byte> workspace, cudaStream_t stream) const {
  if (first_layer_.keys == nullptr) {
    first_layer_ = pages;  // a step begins with the first layer
  }
  const bool has_window = hides_ && has_window_[static_cast<std::size_t>(layer_of(pages))];
  kernels_.attend(own(pages), has_window ? with_window(step) : step, rows, output, part_of(workspace, has_window),
                  stream);
}

int LayerKernels::layer_of(const common::Pages& pages) const {
  const std::ptrdiff_t distance =
      static_cast<const std::byte*>(pages.keys) - static_cast<const std::byte*>(first_layer_.keys);
  return static_cast<int>(distance / static_cast<std::ptrdiff_t>(pages.shape.keys_bytes()));
}

common::StepArrays LayerKernels::with_window(common::StepArrays step) const {
  step.batch.window = window_;
  if (block_tables_ != nullptr) {
    step.batch.block_tables = block_tables_;
    step.slot_mapping = slot_mapping_;
  }
  return step;
}

std::span<std::byte> LayerKernels::part_of(std::span<std::byte> workspace, bool has_window) const {
  if (!has_both_) {
    return workspace;
  }
  const std::size_t half = workspace.size() / 2 / kLine * kLine;
  return has_window ? workspace.subspan(half) : workspace.first(half);
}

}  // namespace
