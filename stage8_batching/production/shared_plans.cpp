#include "shared_plans.h"

#include <utility>

#include "common/base/check.h"

namespace stage8 {
namespace {

std::size_t plan_bytes(const common::PageShape& shape, int num_heads, int max_sequences) {
  const common::SharedShape own = common::shared_shape(shape, {.num_sequences = max_sequences, .num_heads = num_heads});
  return common::shared_arrays(nullptr, max_sequences, own).bytes;
}

}  // namespace

SharedPlans::SharedPlans(const common::PageShape& shape, int num_heads, int max_sequences)
    : shape_(shape),
      num_heads_(num_heads),
      costs_(common::shared_reading_costs(shape, num_heads)),
      buffers_{Buffers(plan_bytes(shape, num_heads, max_sequences)),
               Buffers(plan_bytes(shape, num_heads, max_sequences))} {}

common::SharedShape SharedPlans::shape_for(int num_sequences) const {
  return common::shared_shape(shape_, {.num_sequences = num_sequences, .num_heads = num_heads_});
}

std::vector<common::SharedPrefix> SharedPlans::upload(std::size_t which, const RaggedBatch& batch,
                                                      std::span<const common::SharedPrefix> groups, int num_sequences,
                                                      const common::Stream& stream) {
  const common::SharedShape shape = shape_for(num_sequences);
  common::SharedPlan plan = common::plan_shared_reading({.context_lengths = batch.context_lengths,
                                                         .query_starts = batch.query_starts,
                                                         .block_tables = batch.block_tables,
                                                         .table_starts = batch.table_starts,
                                                         .block_size = shape_.block_size},
                                                        groups, shape);
  if (plan.prefixes.empty()) {
    return {};
  }
  Buffers& own = buffers_[which];
  own.read.wait();
  const common::SharedArrays arrays = common::shared_arrays(own.host.data(), num_sequences, shape);
  COMMON_CHECK(arrays.bytes <= own.host.size(), "a step has at most as many sequences as were announced");
  common::write_plan(plan, arrays, num_sequences, shape);
  CUDA_CHECK(cudaMemcpyAsync(own.device.data(), own.host.data(), arrays.bytes, cudaMemcpyHostToDevice, stream.get()));
  return std::move(plan.prefixes);
}

}  // namespace
