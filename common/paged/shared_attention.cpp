#include "common/paged/shared_attention.h"

#include <cstddef>
#include <memory>
#include <string>

#include "common/paged/attention_launches.h"
#include "common/paged/checks.h"
#include "common/paged/ragged_plan.h"

namespace common {
namespace {

std::size_t whole_lines(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// A step that reads together: what is computed behind the prefixes, and where results over these lie. In the workspace
// they come first.
struct SharedStep {
  SharedShape shape;
  SharedArrays arrays;
  StepArrays own;  // the decodes begin behind their prefixes
  RaggedPartials partials;
  std::size_t bytes;

  SharedStep(const PageShape& pages, const StepArrays& step, const void* plan, std::byte* workspace)
      : shape(shared_shape(pages, step.batch)),
        arrays(shared_arrays(const_cast<void*>(plan), step.batch.num_sequences, shape)),
        own(step),
        partials{} {
    own.batch.context_lengths = arrays.own_lengths;
    own.batch.table_starts = arrays.own_starts;
    const std::size_t num_rows = static_cast<std::size_t>(shape.max_tasks) *
                                 static_cast<std::size_t>(shape.num_kv_heads) *
                                 static_cast<std::size_t>(shape.task_rows);
    const std::size_t sum_bytes = whole_lines(num_rows * sizeof(float2));
    bytes = sum_bytes + whole_lines(num_rows * static_cast<std::size_t>(pages.head_dim) * sizeof(float));
    if (workspace != nullptr) {
      partials.max_and_sum = reinterpret_cast<float2*>(workspace);
      partials.outputs = reinterpret_cast<float*>(workspace + sum_bytes);
    }
  }
};

}  // namespace

std::unique_ptr<SharingKernels> sharing_kernels(const PagedKernels& kernels, const PageShape& shape) {
  const bool can_share = &kernels == &kProductionKernels && shared_reading_obstacle(shape).empty();
  return can_share ? std::make_unique<SharingKernels>() : nullptr;
}

bool SharingKernels::reads_together(const StepArrays& step) const {
  return plan_ != nullptr && step.num_decodes > 0 && step.batch.window == 0;
}

std::size_t SharingKernels::workspace_bytes(const PageShape& shape, const StepArrays& largest) const {
  const std::size_t bytes = ProductionKernels::workspace_bytes(shape, largest);
  return shared_reading_obstacle(shape).empty() ? bytes + SharedStep(shape, largest, nullptr, nullptr).bytes : bytes;
}

void SharingKernels::plan(const PageShape& shape, const StepArrays& step, std::span<std::byte> workspace,
                          cudaStream_t stream) const {
  if (!reads_together(step)) {
    ProductionKernels::plan(shape, step, workspace, stream);
    return;
  }
  check_step(*this, shape, step);
  const std::string obstacle = shared_reading_obstacle(shape);
  COMMON_CHECK(obstacle.empty(), obstacle);
  const SharedStep shared(shape, step, plan_, workspace.data());
  COMMON_CHECK(shared.bytes <= workspace.size(), "the workspace has room for the step");
  ProductionKernels::plan(shape, shared.own, workspace.subspan(shared.bytes), stream);
}

void SharingKernels::attend(const Pages& pages, const StepArrays& step, const LayerRows& rows, void* output,
                            std::span<std::byte> workspace, cudaStream_t stream) const {
  if (!reads_together(step)) {
    ProductionKernels::attend(pages, step, rows, output, workspace, stream);
    return;
  }
  check_pages(*this, pages);
  check_step(*this, pages.shape, step);
  COMMON_CHECK(rows.queries != nullptr && output != nullptr, "queries and output are given");
  COMMON_CHECK(is_aligned(rows.queries) && is_aligned(output), "queries and output begin at multiples of 16 bytes");
  const SharedStep shared(pages.shape, step, plan_, workspace.data());
  RaggedWorkspace tasks{};
  tasks.queue = shared.arrays.queue;
  tasks.tasks = shared.arrays.tasks;
  tasks.partials = shared.partials;
  tasks.shape = {.kernel = shared.shape.kernel,
                 .rows = shared.shape.task_rows,
                 .num_workers = shared.shape.num_workers,
                 .max_tasks = shared.shape.max_tasks,
                 .max_places = shared.shape.max_tasks * shared.shape.num_kv_heads,
                 .part_tokens = 0};
  attend_tasks(pages, step.batch, rows.queries, shared.arrays.order, output, tasks, false, stream);
  // Without a chunk, decode attention may begin while the tasks are computed: it fills its rings with what earlier
  // steps have written.
  attend_behind({.rows = shared.arrays.rows,
                 .outputs = shared.partials.outputs,
                 .max_and_sum = shared.partials.max_and_sum,
                 .place_rows = shared.shape.task_rows},
                pages, shared.own, rows, output, workspace.subspan(shared.bytes), stream);
}

}  // namespace common
