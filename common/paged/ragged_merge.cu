// Joins the parts of contexts that ragged attention's plan has cut. The parts of a row are added in their order, so
// that equal plans give equal bits.
//
// bytes: each part's rows once, from L2, where the launch before has just written them. A warp has a row, and loads
// several parts at once: what takes time is the way to L2 and back, and not the bytes.
#include "common/paged/ragged_merge.h"

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/paged/element.h"
#include "common/paged/head_dims.h"
#include "common/paged/online_softmax.cuh"

namespace common {
namespace {

constexpr int kWarps = 8;
constexpr int kResident = 2;

struct RaggedMerge {
  const RaggedQueue* queue;
  const RaggedTask* merges;
  RaggedPartials partials;
  Element* output;
  int rows;  // of a task
  int num_heads;
  int num_kv_heads;
};

template <int kHeadDim>
__device__ __forceinline__ SoftmaxRow<kWarpValues<kHeadDim>> merge_row(const RaggedPartials& partials,
                                                                       std::int64_t first_place, int num_parts,
                                                                       int rows, int row) {
  constexpr int kValues = kWarpValues<kHeadDim>;
  constexpr int kDepth = kHeadDim > 128 ? 4 : 8;
  const int dimension = static_cast<int>(threadIdx.x) % 32 * kValues;
  SoftmaxRow<kValues> merged;
  for (int begin = 0; begin < num_parts; begin += kDepth) {
    float2 max_and_sum[kDepth];
    float values[kDepth][kValues];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      max_and_sum[i] = {-INFINITY, 0.0F};
#pragma unroll
      for (float& value : values[i]) {
        value = 0.0F;
      }
      if (begin + i < num_parts) {
        const std::int64_t place = (first_place + begin + i) * rows + row;
        max_and_sum[i] = partials.max_and_sum[place];
        load_floats(values[i], partials.outputs + place * kHeadDim + dimension);
      }
    }
    float largest = merged.largest;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      largest = fmaxf(largest, max_and_sum[i].x);
    }
    merged.rescale(largest);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      merged.add_part(max_and_sum[i], values[i]);
    }
  }
  return merged;
}

template <int kHeadDim>
__global__ void __launch_bounds__(32 * kWarps, kResident) merge_kernel(RaggedMerge call) {
  common::wait_for_previous_launch();
  const int warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int dimension = static_cast<int>(threadIdx.x) % 32 * kWarpValues<kHeadDim>;
  const int group = call.num_heads / call.num_kv_heads;
  const int num_rows = call.queue->num_merges * call.num_kv_heads * call.rows;
  for (int i = warp; i < num_rows; i += static_cast<int>(gridDim.x) * kWarps) {
    const int row = i % call.rows;
    const int kv_head = i / call.rows % call.num_kv_heads;
    const RaggedTask& task = call.merges[i / call.rows / call.num_kv_heads];
    const int row_of_sequence = task.first_row + row;
    if (row_of_sequence < task.end_row) {
      const std::int64_t first_place = RaggedPartials::place_of(task, 0, kv_head, call.num_kv_heads);
      const auto merged = merge_row<kHeadDim>(call.partials, first_place, task.num_parts, call.rows, row);
      const std::int64_t query = (task.first_query + std::int64_t{row_of_sequence / group}) * call.num_heads +
                                 kv_head * group + row_of_sequence % group;
      store_output(merged, call.output + query * kHeadDim + dimension);
    }
  }
}

}  // namespace

void merge_parts_of_contexts(const RaggedWorkspace& workspace, const PageShape& shape, int num_heads, void* output,
                             cudaStream_t stream) {
  const RaggedMerge call{.queue = workspace.queue,
                         .merges = workspace.merges,
                         .partials = workspace.partials,
                         .output = static_cast<Element*>(output),
                         .rows = workspace.shape.rows,
                         .num_heads = num_heads,
                         .num_kv_heads = shape.num_kv_heads};
  const int grid = kResident * common::device_limits().num_multiprocessors;
  with_head_dim(shape.head_dim, [&](auto head_dim) {
    common::launch(merge_kernel<head_dim>, dim3(static_cast<unsigned>(grid)), 32 * kWarps, 0, stream,
                   common::Overlap::kPrevious, call);
  });
}

}  // namespace common
