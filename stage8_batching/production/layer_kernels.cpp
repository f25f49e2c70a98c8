#include "layer_kernels.h"

#include <algorithm>

#include "common/base/check.h"

namespace stage8 {
namespace {

constexpr std::size_t kLine = 256;  // workspaces begin at its multiples

}  // namespace

LayerKernels::LayerKernels(const common::PagedKernels& kernels, const common::LlamaConfig& config)
    : kernels_(kernels), window_(config.has_windows() && kernels.has_windows() ? config.window : 0) {
  for (int layer = 0; layer < config.num_layers; ++layer) {
    has_window_.push_back(window_ > 0 && !config.sees_all(layer));
  }
  has_both_ = std::count(has_window_.begin(), has_window_.end(), has_window_.front()) != config.num_layers;
}

const common::Pages& LayerKernels::pages() const {
  COMMON_CHECK(first_layer_.keys != nullptr, "no step has been computed: no block has contents");
  return first_layer_;
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
  if (has_both_ || !has_windows) {
    kernels_.plan(shape, step, part_of(workspace, false), stream);
  }
  if (has_windows) {
    kernels_.plan(shape, with_window(step), part_of(workspace, true), stream);
  }
}

void LayerKernels::attend(const common::Pages& pages, const common::StepArrays& step, const common::LayerRows& rows,
                          void* output, std::span<std::byte> workspace, cudaStream_t stream) const {
  if (first_layer_.keys == nullptr) {
    first_layer_ = pages;  // a step begins with the first layer
  }
  const bool has_window = hides_ && has_window_[static_cast<std::size_t>(layer_of(pages))];
  kernels_.attend(pages, has_window ? with_window(step) : step, rows, output, part_of(workspace, has_window), stream);
}

int LayerKernels::layer_of(const common::Pages& pages) const {
  const std::ptrdiff_t distance =
      static_cast<const std::byte*>(pages.keys) - static_cast<const std::byte*>(first_layer_.keys);
  return static_cast<int>(distance / static_cast<std::ptrdiff_t>(pages.shape.keys_bytes()));
}

common::StepArrays LayerKernels::with_window(common::StepArrays step) const {
  step.batch.window = window_;
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
