#include "tensor_parallel_runner.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/several/shard.h"

namespace stage8 {
namespace {

constexpr double kMaxWait = 60.0;  // seconds, for a step

KvCacheShape shard_shape(KvCacheShape shape, int count) {
  shape.num_heads /= count;
  shape.num_kv_heads /= count;
  return shape;
}

}  // namespace

std::string TensorParallelRunner::unsupported(const common::PagedKernels& kernels, const common::LlamaConfig& config,
                                              const KvCacheShape& shape, const GpuOptions& options) {
  const int count = options.tensor_parallel;
  std::string reason = options.types.activations == common::ActivationType::kFloat8
                           ? "activations in float8 are for a single GPU, without --tensor-parallel"
                           : common::why_not_shared(config, count);
  if (reason.empty()) {
    reason = ShardRunner::unsupported(kernels, common::shard_config(config, count), shard_shape(shape, count), options);
  }
  return reason.empty() ? common::NcclGroup::unsupported(count) : reason;
}

TensorParallelRunner::TensorParallelRunner(const common::Llama& model, const KvCacheShape& shape,
                                           const GpuOptions& options, int chunk_size, int max_sequences,
                                           const common::PagedKernels& kernels,
                                           const std::optional<common::MemoryShare>& share)
    : group_(options.tensor_parallel, kMaxWait, options.all_reduce),
      runners_(static_cast<std::size_t>(options.tensor_parallel)) {
  const int count = options.tensor_parallel;
  for (int device = 0; device < count; ++device) {
    threads_.push_back(std::make_unique<DeviceThread>(device));
  }
  const KvCacheShape own = shard_shape(shape, count);
  run_together([&](std::size_t rank) {
    runners_[rank] = std::make_unique<ShardRunner>(model, own, options, chunk_size, max_sequences, kernels, share,
                                                   group_[static_cast<int>(rank)]);
  });
  size_ = runners_.front()->cache();
  size_.bytes_per_slot *= count;
}

TensorParallelRunner::~TensorParallelRunner() {
  // A GPU may still read the memory of another one.
  (void)run([&](std::size_t rank) { runners_[rank]->finish(); });
  (void)run([&](std::size_t rank) { runners_[rank].reset(); });
}

std::vector<std::exception_ptr> TensorParallelRunner::run(const Task& task) {
  for (std::size_t rank = 0; rank < threads_.size(); ++rank) {
    threads_[rank]->start([&task, rank] { task(rank); });
  }
  std::vector<std::exception_ptr> thrown;
  for (const auto& thread : threads_) {
    thrown.push_back(thread->finish());
  }
  return thrown;
}

void TensorParallelRunner::run_all(const Task& task) {
  for (const std::exception_ptr& error : run(task)) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

void TensorParallelRunner::disconnect(const std::vector<std::exception_ptr>& thrown) {
  is_connected_ = false;
  // When the last GPU aborts, NCCL frees what its kernels use, so no kernel may still run. GPUs that wait for another
  // GPU abort first, and their kernels end. The GPU that has enqueued least waits for no other.
  std::vector<int> is_idle(runners_.size(), 1);
  std::atomic<int> num_idle = 0;
  StepId newest;
  for (const auto& runner : runners_) {
    newest.value = std::max(newest.value, runner ? runner->last().value : 0);
  }
  (void)run([&](std::size_t rank) {
    if (runners_[rank]) {
      ShardRunner& runner = *runners_[rank];
      runner.drop_step(!thrown[rank], newest);
      (void)group_[static_cast<int>(rank)].wait_quietly([&] { return runner.is_idle() || num_idle > 0; });
      is_idle[rank] = runner.is_idle() ? 1 : 0;
    }
    num_idle += is_idle[rank];
  });
  for (const int those : {0, 1}) {
    (void)run([&](std::size_t rank) {
      if (is_idle[rank] == those && runners_[rank]) {
        runners_[rank]->disconnect();
      } else if (is_idle[rank] == those) {
        group_[static_cast<int>(rank)].abort();
      }
    });
  }
}

void TensorParallelRunner::run_together(const Task& task) {
  if (group_.failed_rank() >= 0) {
    if (is_connected_) {  // a GPU has failed, and only a thread that waited for a step knows
      disconnect(std::vector<std::exception_ptr>(runners_.size()));
    }
    group_.renew();
    run_all([&](std::size_t rank) { runners_[rank]->connect(); });
    is_connected_ = true;
  }
  const std::vector<std::exception_ptr> thrown = run([&](std::size_t rank) {
    try {
      task(rank);
    } catch (...) {
      group_.fail(static_cast<int>(rank));  // the others stop waiting
      throw;
    }
  });
  const int failed = group_.failed_rank();
  if (failed < 0) {
    return;
  }
  // GPUs without an exception have enqueued work that never ends.
  disconnect(thrown);
  try {
    std::rethrow_exception(thrown[static_cast<std::size_t>(failed)]);
  } catch (const common::CudaError& error) {
    throw common::CudaError("GPU " + std::to_string(failed) + ": " + error.what());
  } catch (const common::InputError& error) {
    throw common::InputError("GPU " + std::to_string(failed) + ": " + error.what());
  }
}

void TensorParallelRunner::copy_blocks(std::span<const BlockCopy> copies) {
  run_all([&](std::size_t rank) { runners_[rank]->copy_blocks(copies); });
}

void TensorParallelRunner::allocate(int count) {
  run_all([&](std::size_t rank) { runners_[rank]->allocate(count); });
}

int TensorParallelRunner::num_allocated() const {
  int count = size_.num_host_blocks;
  for (const auto& runner : runners_) {
    count = std::min(count, runner->num_allocated());
  }
  return count;
}

std::string TensorParallelRunner::why_no_more() const {
  std::string reason;
  for (const auto& runner : runners_) {
    reason = reason.empty() ? runner->why_no_more() : reason;
  }
  return reason;
}

void TensorParallelRunner::copy_beside(std::span<const BlockCopy> copies) {
  run_all([&](std::size_t rank) { runners_[rank]->copy_beside(copies); });
}

StepId TensorParallelRunner::enqueue(const RaggedBatch& step) {
  std::vector<StepId> ids(runners_.size());
  run_together([&](std::size_t rank) { ids[rank] = runners_[rank]->enqueue(step); });
  last_ = ids.front();  // every GPU counts the same steps
  draws_tokens_[last_.value % 2] = std::all_of(step.sampling_rows.begin(), step.sampling_rows.end(),
                                               [](const SamplingRow& row) { return row.draws_token; });
  return last_;
}

void TensorParallelRunner::warm_up(int max_tokens, int max_sequences) {
  run_together([&](std::size_t rank) { runners_[rank]->warm_up(max_tokens, max_sequences); });
}

common::Matrix TensorParallelRunner::side_by_side(const std::function<common::Matrix(ShardRunner&)>& part) {
  std::vector<common::Matrix> parts(runners_.size());
  run_all([&](std::size_t rank) { parts[rank] = part(*runners_[rank]); });
  return side_by_side(parts);
}

common::Matrix TensorParallelRunner::side_by_side(std::span<const common::Matrix> parts) {
  const Eigen::Index cols = parts.front().cols();
  common::Matrix all(parts.front().rows(), cols * static_cast<Eigen::Index>(parts.size()));
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    all.middleCols(cols * static_cast<Eigen::Index>(rank), cols) = parts[rank];
  }
  return all;
}

StepResult TensorParallelRunner::wait(StepId step) {
  if (step.value <= dropped_.value) {
    throw common::CudaError("the step was dropped when a GPU failed");
  }
  try {
    if (draws_tokens_[step.value % 2]) {
      return runners_.front()->wait(step);  // every GPU has drawn the same
    }
    std::vector<StepResult> parts(runners_.size());
    run_all([&](std::size_t rank) { parts[rank] = runners_[rank]->wait(step); });
    StepResult result = {parts.front().tokens, {}};
    for (std::size_t row = 0; row < result.tokens.size(); ++row) {
      std::vector<common::Matrix> columns;
      for (StepResult& part : parts) {
        columns.push_back(std::move(part.logits[row]));
      }
      result.logits.push_back(side_by_side(columns));
    }
    return result;
  } catch (...) {
    dropped_ = last_;
    throw;
  }
}

common::Matrix TensorParallelRunner::logits() {
  return side_by_side([](ShardRunner& runner) { return runner.logits(); });
}

common::Matrix TensorParallelRunner::keys(int layer, std::span<const int> slots) {
  return side_by_side([&](ShardRunner& runner) { return runner.keys(layer, slots); });
}

common::Matrix TensorParallelRunner::values(int layer, std::span<const int> slots) {
  return side_by_side([&](ShardRunner& runner) { return runner.values(layer, slots); });
}

int TensorParallelRunner::num_recorded_steps() const { return runners_.front()->num_recorded_steps(); }

}  // namespace
