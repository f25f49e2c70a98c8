// Two GPUs that compute one model: how they exchange data, and what happens when one of them fails. gpu_serving.cpp,
// which is also built for two GPUs, tests their texts.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/several/nccl_group.h"
#include "common/math/sampling.h"
#include "tests/gpu/gpu_built_runner.h"
#include "tests/gpu/gpu_matrices.h"
#include "tests/gpu/gpu_step.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/golden.h"
#include "tests/support/stage_api.h"
#include "tests/support/tiny_llama.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/device_thread.h)
#include STAGE_HEADER(production/tensor_parallel_runner.h)
// clang-format on

using common::Matrix;
using common::NcclGroup;
using common::Token;
using tests::bundled;
using tests::compare;
using tests::make_step;
using tests::shape_of;
using tests::some_tokens;

namespace {

const std::string kNoDifference;

// Runs a task in a thread for each GPU. Returns what each has thrown; empty if nothing.
class Threads {
 public:
  std::vector<std::string> run(const std::function<void(int rank)>& task) {
    for (int rank = 0; rank < 2; ++rank) {
      threads_[rank]->start([&task, rank] { task(rank); });
    }
    std::vector<std::string> problems;
    for (const auto& thread : threads_) {
      const std::exception_ptr thrown = thread->finish();
      try {
        if (thrown) {
          std::rethrow_exception(thrown);
        }
        problems.emplace_back();
      } catch (const std::exception& error) {
        problems.emplace_back(error.what());
      }
    }
    return problems;
  }

 private:
  std::unique_ptr<stage::DeviceThread> threads_[2] = {std::make_unique<stage::DeviceThread>(0),
                                                      std::make_unique<stage::DeviceThread>(1)};
};

// Every kind of sum once. Returns what is wrong with them.
std::string try_sums(NcclGroup& group, int rank) {
  common::Communicator& peers = group[rank];
  const common::Stream stream;
  const std::vector<float> own = rank == 0 ? std::vector{1.0F, 2.0F} : std::vector{10.0F, -2.0F};
  const common::DeviceArray<float> values(own);
  const common::DeviceArray<float> all(std::size_t{4});
  const std::vector<unsigned long long> own_ranks =
      rank == 0 ? std::vector{~0ULL, 3ULL} : std::vector{1ULL, 1ULL << 60};
  const common::DeviceArray<unsigned long long> ranks(own_ranks);
  peers.gather(values.data(), 2, all.data(), stream.get());
  // In a recorded step: every replay adds the parts again.
  const auto graph = std::make_unique<common::Graph>(
      stream, [&] { peers.sum(values.data(), 2, common::Precision::kFloat32, stream.get()); });
  graph->launch(stream);
  graph->launch(stream);
  peers.max(ranks.data(), 2, stream.get());
  common::Event done;
  done.record(stream);
  peers.wait([&] { return done.is_done(); });
  if (all.download() != std::vector{1.0F, 2.0F, 10.0F, -2.0F}) {
    return "gather";
  }
  if (values.download() != std::vector{22.0F, 0.0F}) {
    return "sum";
  }
  if (ranks.download() != std::vector{~0ULL, 1ULL << 60}) {
    return "max";
  }
  return peers.smallest(rank == 0 ? 7 : 5) == 5 ? "" : "smallest";
}

// The GPU's free memory.
std::int64_t free_bytes(int device) {
  std::size_t free = 0;
  std::size_t total = 0;
  CUDA_CHECK(cudaSetDevice(device));
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  CUDA_CHECK(cudaSetDevice(0));
  return static_cast<std::int64_t>(free);
}

// Allocates memory of GPU 1 until at most bytes_left bytes are free.
common::DeviceMemory take_memory(std::int64_t bytes_left) {
  const std::int64_t free = free_bytes(1);
  CUDA_CHECK(cudaSetDevice(1));
  common::DeviceMemory taken(static_cast<std::size_t>(free - bytes_left));
  CUDA_CHECK(cudaSetDevice(0));
  return taken;
}

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

}  // namespace

TEST_CASE("Two GPUs: sums, and none that waits for a GPU that has failed") {
  if (const std::string reason = NcclGroup::unsupported(2); !reason.empty()) {
    SKIP_TEST(reason);
  }
  constexpr double kMaxWait = 1.0;
  NcclGroup group(2, kMaxWait);
  Threads threads;
  const auto sums = [&](int rank) {
    if (const std::string problem = try_sums(group, rank); !problem.empty()) {
      throw common::CheckError(problem);
    }
  };
  CHECK(threads.run(sums) == std::vector<std::string>(2));
  // GPU 1 does not take part, and reports that or not.
  for (const bool says_so : {true, false}) {
    const std::vector<std::string> problems = threads.run([&](int rank) {
      const common::Stream stream;
      const common::DeviceArray<float> values(std::size_t{2});
      if (rank == 0) {
        group[rank].sum(values.data(), 2, common::Precision::kFloat32, stream.get());
        common::Event done;
        done.record(stream);
        try {
          group[rank].wait([&] { return done.is_done(); });
        } catch (...) {
          group[rank].abort();
          stream.synchronize();  // the enqueued work ends
          throw;
        }
      } else if (says_so) {
        group.fail(rank);
      }
    });
    CAPTURE(says_so);
    CHECK(problems[0] == (says_so ? "another GPU has failed" : "the GPUs have not finished a step after 1 seconds"));
    CHECK(group.failed_rank() == (says_so ? 1 : 0));
    CHECK(threads.run([&](int rank) { group[rank].abort(); }) == std::vector<std::string>(2));
    group.renew();
    CHECK(group.failed_rank() == -1);
    CHECK(threads.run(sums) == std::vector<std::string>(2));
  }
}

TEST_CASE("Two GPUs: logits, keys and values are one GPU's, for every type of cache") {
  if (const std::string reason = NcclGroup::unsupported(2); !reason.empty()) {
    SKIP_TEST(reason);
  }
  // Two sequences: 160 tokens of prompts, whose products are the library's; in bfloat16, 75 and 40 tokens by wide
  // tiles, whose sums are fetched and pushed; then a few tokens, then one each.
  const common::Llama& model = bundled().llama;
  using common::KvCacheType;
  using common::Precision;
  using common::WeightType;
  using stage::AllReduce;
  for (const auto& [precision, kv_cache, weights, all_reduce] :
       {std::tuple{Precision::kFloat32, KvCacheType::kAuto, WeightType::kAuto, AllReduce::kNccl},
        {Precision::kFloat32, KvCacheType::kAuto, WeightType::kAuto, AllReduce::kPeer},
        {Precision::kBFloat16, KvCacheType::kAuto, WeightType::kAuto, AllReduce::kNccl},
        {Precision::kBFloat16, KvCacheType::kAuto, WeightType::kAuto, AllReduce::kPeer},
        {Precision::kBFloat16, KvCacheType::kAuto, WeightType::kFloat8, AllReduce::kNccl},
        {Precision::kBFloat16, KvCacheType::kFloat8, WeightType::kFloat8, AllReduce::kPeer},
        {Precision::kBFloat16, KvCacheType::kFloat8, WeightType::kAuto, AllReduce::kPeer}}) {
    stage::GpuOptions options{.types = {.precision = precision, .kv_cache = kv_cache, .weights = weights}};
    tests::BuiltRunner one(model, shape_of(24), options, 192, 8);
    options.tensor_parallel = 2;
    options.all_reduce = all_reduce;
    stage::TensorParallelRunner two(model, shape_of(24), options, 192, 8, tests::built_kernels(options));
    one.warm_up(192, 4);
    two.warm_up(192, 4);
    CHECK(one.num_recorded_steps() == two.num_recorded_steps());
    tests::BuiltRunner exact(model, shape_of(24), {}, 192, 8);
    double error_of_one = 0.0;  // squared
    double error_of_two = 0.0;
    int lengths[2] = {0, 0};
    int salt = 0;
    for (const auto& [first, second] : {std::pair{90, 70}, {50, 25}, {25, 15}, {10, 3}, {1, 1}, {1, 1}, {1, 2}}) {
      const int counts[2] = {first, second};
      std::vector<Token> tokens;
      std::vector<int> positions;
      std::vector<int> slots;
      std::vector<int> starts = {0};
      std::vector<int> contexts;
      std::vector<int> tables(24);
      std::iota(tables.begin(), tables.end(), 0);
      for (int s = 0; s < 2; ++s) {
        const std::vector<Token> own = some_tokens(counts[s], ++salt);
        tokens.insert(tokens.end(), own.begin(), own.end());
        for (int i = 0; i < counts[s]; ++i) {
          positions.push_back(lengths[s]);
          slots.push_back(192 * s + lengths[s]);
          lengths[s] += 1;
        }
        starts.push_back(static_cast<int>(tokens.size()));
        contexts.push_back(lengths[s]);
      }
      const stage::RaggedBatch step = make_step(tokens, {}, positions, slots, starts, contexts, tables,
                                                std::vector<int>{0, 12, 24}, {starts[1] - 1, starts[2] - 1});
      one.enqueue(step);
      const stage::StepId last = two.enqueue(step);
      const Matrix expected = one.logits();
      const Matrix logits = two.logits();
      CAPTURE(salt);
      if (precision == common::Precision::kFloat32) {
        CHECK(compare(logits, expected, 2e-3F) == kNoDifference);
      }
      exact.enqueue(step);
      const Matrix exact_logits = exact.logits();
      error_of_one += (expected - exact_logits).squaredNorm();
      error_of_two += (logits - exact_logits).squaredNorm();
      const std::vector<Token> drawn = two.wait(last).tokens;
      for (Eigen::Index row = 0; row < logits.rows(); ++row) {
        const Matrix one_row = logits.row(row);
        CHECK(drawn[static_cast<std::size_t>(row)] ==
              common::argmax({one_row.data(), static_cast<std::size_t>(one_row.cols())}));
      }
      if (kv_cache == KvCacheType::kAuto && weights == WeightType::kAuto) {
        for (const int layer : {0, shape_of(1).num_layers - 1}) {
          const float kv_tolerance = precision == common::Precision::kFloat32 ? 1e-3F : 0.25F;
          CHECK(compare(two.keys(layer, slots), one.keys(layer, slots), kv_tolerance) == kNoDifference);
          CHECK(compare(two.values(layer, slots), one.values(layer, slots), kv_tolerance) == kNoDifference);
        }
      }
    }
    // In 16 bits and fewer, roundings add up to as much with two GPUs as with one: they sum in another order, and round
    // each part of a sum once more.
    CAPTURE(error_of_one, error_of_two);
    CHECK(std::sqrt(error_of_two) <= 1.5 * std::sqrt(error_of_one) + 2e-3);
  }
}

TEST_CASE("One GPU or two: what Gemma's layers add is normalised as a whole") {
  const int num_gpus = GENERATE(1, 2);
  if (const std::string reason = NcclGroup::unsupported(num_gpus); !reason.empty()) {
    SKIP_TEST(reason);
  }
  tests::TinyModel tiny;
  tiny.architecture = "gemma3";
  tiny.vocab_size = 2048;  // of some_tokens()
  tiny.hidden_size = 64;
  tiny.num_heads = 4;
  tiny.head_dim = 32;
  tiny.feed_forward_size = 208;
  tiny.write_head_dim = true;
  tiny.spread = 0.8;
  tests::add_layer_kinds(tiny);
  const tests::Bytes bytes = tiny.builder().build();
  const common::Gguf file = common::Gguf::parse(bytes, "tiny.gguf");
  const common::Llama model(file);
  const stage::KvCacheShape shape{.num_layers = tiny.num_layers,
                                  .num_blocks = 4,
                                  .block_size = 16,
                                  .num_heads = tiny.num_heads,
                                  .num_kv_heads = tiny.num_kv_heads,
                                  .head_dim = tiny.head_dim};
  std::vector<int> table(4);
  std::iota(table.begin(), table.end(), 0);
  tests::BuiltRunner exact(model, shape, {}, 48, 8);
  for (const common::Precision precision : {common::Precision::kFloat32, common::Precision::kBFloat16}) {
    for (const stage::AllReduce all_reduce : {stage::AllReduce::kNccl, stage::AllReduce::kPeer}) {
      stage::GpuOptions options{.types = {.precision = precision}};
      tests::BuiltRunner whole(model, shape, options, 48, 8);
      options.tensor_parallel = num_gpus;
      options.all_reduce = all_reduce;
      stage::TensorParallelRunner shared(model, shape, options, 48, 8, tests::built_kernels(options));
      double error_of_whole = 0.0;  // squared
      double error_of_shared = 0.0;
      int length = 0;
      // In float32 the library's products, and one token's. In bfloat16 wide tiles, and few tokens' by rows.
      for (const int count : {40, 9, 1, 1, 3}) {
        std::vector<int> positions(static_cast<std::size_t>(count));
        std::iota(positions.begin(), positions.end(), length);
        length += count;
        const stage::RaggedBatch step = make_step(some_tokens(count, length), {}, positions, positions, {0, count},
                                                  {length}, table, {0, 4}, {count - 1});
        exact.enqueue(step);
        whole.enqueue(step);
        shared.enqueue(step);
        const Matrix exact_logits = exact.logits();
        const Matrix logits = shared.logits();
        CAPTURE(num_gpus, static_cast<int>(precision), static_cast<int>(all_reduce), length);
        if (precision == common::Precision::kFloat32) {
          CHECK(compare(logits, exact_logits, 2e-3F) == kNoDifference);
        }
        error_of_whole += (whole.logits() - exact_logits).squaredNorm();
        error_of_shared += (logits - exact_logits).squaredNorm();
      }
      CAPTURE(error_of_whole, error_of_shared);
      CHECK(std::sqrt(error_of_shared) <= 1.5 * std::sqrt(error_of_whole) + 2e-3);
    }
  }
}

TEST_CASE("Two GPUs: the smaller memory sizes the cache, and none is left behind") {
  if (const std::string reason = NcclGroup::unsupported(2); !reason.empty()) {
    SKIP_TEST(reason);
  }
  const common::Llama& model = bundled().llama;
  const auto make = [&](int num_blocks, const std::optional<common::MemoryShare>& share) {
    const stage::GpuOptions options{.tensor_parallel = 2};
    return std::make_unique<stage::TensorParallelRunner>(model, shape_of(num_blocks), options, 64, 8,
                                                         tests::built_kernels(options), share);
  };
  make(4, {})->warm_up(64, 2);  // allocates what a process allocates only once
  const std::int64_t before[2] = {free_bytes(0), free_bytes(1)};
  {
    const common::DeviceMemory taken = take_memory(4096 * kMiB);
    const auto runner = make(0, common::MemoryShare{.memory_fraction = 0.5, .max_slots = std::int64_t{1} << 30});
    // 1/2 of 4 GiB or a little less, of 6 layers' K and V of one kv head of 32 dimensions.
    const std::int64_t block_bytes = std::int64_t{2} * 6 * 16 * 32 * 4;
    CHECK(runner->cache().num_blocks * block_bytes < 2048 * kMiB);
    CHECK(runner->cache().num_blocks * block_bytes > 1024 * kMiB);
  }
  {
    const common::DeviceMemory taken = take_memory(1024 * kMiB);
    std::string message;
    try {
      make(100000, {});
    } catch (const common::InputError& error) {
      message = error.what();
    }
    CHECK(message.starts_with("GPU 1: the GPU has no room for the model and "));
  }
  for (const int device : {0, 1}) {
    CHECK(free_bytes(device) >= before[device] - 64 * kMiB);
  }
}

TEST_CASE("Two GPUs: what can't be shared out is refused with its numbers") {
  if (const std::string reason = NcclGroup::unsupported(1); !reason.empty()) {
    SKIP_TEST(reason);
  }
  const common::LlamaConfig& config = bundled().llama.config();
  const auto reason = [&](int count) {
    return stage::TensorParallelRunner::unsupported(stage::kPlainKernels, config, shape_of(4),
                                                    {.tensor_parallel = count});
  };
  CHECK(reason(1).empty());
  CHECK(reason(3) == "3 GPUs can't share 8 query heads evenly");
  CHECK(reason(4) == "4 GPUs can't share 2 kv heads evenly");
  CHECK(stage::TensorParallelRunner::unsupported(stage::kPlainKernels, config, shape_of(4),
                                                 {.types = {.precision = common::Precision::kBFloat16,
                                                            .weights = common::WeightType::kFloat8,
                                                            .activations = common::ActivationType::kFloat8},
                                                  .tensor_parallel = 2}) ==
        "activations in float8 are for a single GPU, without --tensor-parallel");
}
