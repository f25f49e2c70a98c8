// Decodes that read a shared prefix once: the plan, and the kernels against float64 on the same rounded inputs.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "common/base/check.h"
#include "common/math/sampling.h"
#include "tests/gpu/gpu_fixtures.h"
#include "tests/support/catch.h"

// clang-format off
#include "common/paged/shared_attention.h"
// clang-format on

namespace {

using common::SharedPlan;
using common::SharedPrefix;
using common::SharedShape;
using tests::BatchSpec;
using tests::GpuBatch;
using tests::ScalarType;

// A step's plan on the device. costs: of what is searched for in the tables of its first num_decodes sequences.
class PlanOnDevice {
 public:
  PlanOnDevice(const GpuBatch& batch, const BatchSpec& spec, const common::ReadingCosts& costs, int num_decodes) {
    const SharedShape shape = common::shared_shape(batch.shape(), batch.batch());
    const std::vector<int> tables = batch.block_tables();
    const std::vector<int> starts = batch.table_starts();
    const auto count = static_cast<int>(spec.context_lengths.size());
    std::vector<int> query_starts(spec.context_lengths.size() + 1);
    std::iota(query_starts.begin(), query_starts.end(), 0);
    common::StepTables step{.context_lengths = spec.context_lengths,
                            .query_starts = query_starts,
                            .block_tables = tables,
                            .table_starts = starts,
                            .block_size = spec.block_size};
    common::StepTables decodes = step;
    decodes.context_lengths = step.context_lengths.first(static_cast<std::size_t>(num_decodes));
    plan = common::plan_shared_reading(step, common::find_shared_prefixes(decodes, costs), shape);
    std::vector<common::RaggedTask> memory(
        common::shared_arrays(nullptr, count, shape).bytes / sizeof(common::RaggedTask) + 1);
    const common::SharedArrays arrays = common::shared_arrays(memory.data(), count, shape);
    common::write_plan(plan, arrays, count, shape);
    const auto* begin = reinterpret_cast<const std::byte*>(memory.data());
    memory_ = common::DeviceArray<std::byte>(std::vector<std::byte>(begin, begin + arrays.bytes));
  }
  const void* data() const { return memory_.data(); }
  void copy_from(const PlanOnDevice& other) {
    CUDA_CHECK(cudaMemcpy(memory_.data(), other.memory_.data(), memory_.size(), cudaMemcpyDeviceToDevice));
  }

  SharedPlan plan;

 private:
  common::DeviceArray<std::byte> memory_;
};

// The sequences' outputs where all that can be shared is: what differs from the reference, whether the new tokens were
// stored, and whether equal plans give equal bits. The first sequences with one token are decodes. Returns how many
// sequences have read together.
int check_shared(const BatchSpec& spec, int num_runs = 1) {
  GpuBatch batch(spec);
  const auto first_chunk = std::find_if(spec.query_lengths.begin(), spec.query_lengths.end(),
                                        [](int num_queries) { return num_queries > 1; });
  const auto num_decodes = static_cast<int>(spec.query_lengths.empty() ? spec.context_lengths.size()
                                                                       : first_chunk - spec.query_lengths.begin());
  const PlanOnDevice plan(batch, spec, {.block = 1}, num_decodes);
  common::SharingKernels kernels;
  kernels.read_together(plan.data());
  std::vector<float> first;
  for (int run = 0; run < num_runs; ++run) {
    const auto result = batch.attend(kernels, num_decodes);
    CHECK(batch.check(result.output) == tests::kNoDifference);
    CHECK(result.pages_are_equal);
    first = run == 0 ? result.output : first;
    CHECK(std::equal(first.begin(), first.end(), result.output.begin(), [](float left, float right) {
      return std::bit_cast<std::uint32_t>(left) == std::bit_cast<std::uint32_t>(right);
    }));
  }
  return static_cast<int>(plan.plan.order.size());
}

std::vector<int> numbers(int first, int count) {
  std::vector<int> result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

}  // namespace

TEST_CASE("Shared reading: every type, head_dim, group and block size", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const ScalarType type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({64}, {32, 64, 96, 128})));
  const int block_size = GENERATE(from_range(tests::some_of({16}, {8, 16, 32, 64})));
  const int group = GENERATE(from_range(tests::some_of({4}, {1, 3, 4, 7, 8, 16})));
  CAPTURE(static_cast<int>(type), head_dim, block_size, group);
  if (type == ScalarType::kFloat8 && block_size < 16) {
    return;
  }
  // Two prefixes whose sequences stand among each other, one of them no multiple of a kernel's tile; a sequence that
  // shares nothing, and one that is inactive. Own tokens: from one on.
  const int blocks = 192 / block_size;
  const int count = check_shared({.type = type,
                                  .num_kv_heads = 2,
                                  .group = group,
                                  .head_dim = head_dim,
                                  .block_size = block_size,
                                  .context_lengths = {193, 100, 400, 0, 209, 401, 30, 193, 270},
                                  .query_lengths = {},
                                  .seed = static_cast<unsigned>(group),
                                  .shared = {{{0, 4, 7, 8}, blocks}, {{2, 5}, 2 * blocks}}});
  CHECK(count == 6);
}

TEST_CASE("Shared reading: in a layer with a window, each sequence reads alone", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // The plan is another layer's: what it would read together is not there.
  const int count =
      check_shared({.window = 60, .context_lengths = {193, 170, 209}, .query_lengths = {}, .shared = {{{0, 1, 2}, 6}}});
  CHECK(count > 0);
}

TEST_CASE("Shared reading: a prefix in many parts, and more rows than a task has", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const ScalarType type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({128}, {64, 128})));
  const int count = GENERATE(from_range(tests::some_of({18}, {2, 40})));
  const int num_blocks = GENERATE(from_range(tests::some_of({34}, {2, 66})));
  CAPTURE(static_cast<int>(type), head_dim, count, num_blocks);
  std::vector<int> lengths;
  for (int i = 0; i < count; ++i) {
    lengths.push_back(num_blocks * 16 + 1 + i * 37 % 130);
  }
  const int num_together = check_shared({.type = type,
                                         .num_kv_heads = tests::kOnExecutor ? 1 : 2,
                                         .group = 4,
                                         .head_dim = head_dim,
                                         .context_lengths = lengths,
                                         .query_lengths = {},
                                         .shared = {{numbers(0, count), num_blocks}}},
                                        tests::kOnExecutor ? 1 : 3);
  CHECK(num_together == count);
}

TEST_CASE("Shared reading: what is shared has the far larger scores, or the far smaller ones", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const bool in_prefix = GENERATE(true, false);
  CAPTURE(in_prefix);
  std::vector<float> shifts(160, in_prefix ? 60.0F : 0.0F);
  shifts.insert(shifts.end(), 200, in_prefix ? 0.0F : 60.0F);
  const int count = check_shared({.num_kv_heads = 1,
                                  .context_lengths = {161, 200, 360},
                                  .query_lengths = {},
                                  .score_shifts = shifts,
                                  .shared = {{{0, 1, 2}, 10}}});
  CHECK(count == 3);
}

TEST_CASE("Shared reading: float8's scales differ from row to row, and where the prefix ends", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // The largest score with the exponent of V's scale is the prefix's, or the own tokens'. Or V is so small that float16
  // has no weights between this sum and the prefix's largest score.
  const float of_prefix = GENERATE(1.0F, 1000.0F, 1e-6F);
  const float of_own = of_prefix == 1.0F ? 1000.0F : of_prefix == 1000.0F ? 1.0F : of_prefix;
  CAPTURE(of_prefix, of_own);
  std::vector<float> sizes;
  for (int token = 0; token < 360; ++token) {
    sizes.push_back((token < 160 ? of_prefix : of_own) * (token % 3 == 0 ? 0.125F : 1.0F));
  }
  const int count = check_shared({.type = ScalarType::kFloat8,
                                  .num_kv_heads = 1,
                                  .context_lengths = {161, 200, 360},
                                  .query_lengths = {},
                                  .value_sizes = sizes,
                                  .shared = {{{0, 1, 2}, 10}}});
  CHECK(count == 3);
}

TEST_CASE("Shared reading: beside chunks and drafts, the decodes of a step read together", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // A chunk and a sequence with drafts begin with the same blocks. They read these by themselves.
  const ScalarType type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({64}, {32, 64, 96, 128})));
  const int num_new = GENERATE(from_range(tests::some_of({40}, {2, 40, 300})));
  CAPTURE(static_cast<int>(type), head_dim, num_new);
  const int count = check_shared({.type = type,
                                  .head_dim = head_dim,
                                  .context_lengths = {193, 100, 209, 193, 192 + num_new, 200, num_new},
                                  .query_lengths = {1, 1, 1, 1, num_new, 3, num_new},
                                  .shared = {{{0, 2, 3, 4, 5}, 12}}},
                                 tests::repeats(3));
  CHECK(count == 3);
}

TEST_CASE("Shared reading: beside a chunk so long that decodes have a part of the chip", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kHeads = 16;
  constexpr int kDecodes = tests::kOnExecutor ? 3 : 40;
  const int chunk = tests::kOnExecutor ? 20 : 2 * common::device_limits().num_multiprocessors * 128 / kHeads + 9;
  std::vector<int> lengths;
  for (int i = 0; i < kDecodes; ++i) {
    lengths.push_back(513 + i * 37 % 130);
  }
  std::vector<int> num_queries(lengths.size(), 1);
  lengths.push_back(chunk);
  num_queries.push_back(chunk);
  const int count = check_shared({.num_kv_heads = 1,
                                  .group = kHeads,
                                  .head_dim = 64,
                                  .context_lengths = lengths,
                                  .query_lengths = num_queries,
                                  .shared = {{numbers(0, kDecodes), 32}}},
                                 tests::repeats(3));
  CHECK(count == kDecodes);
}

TEST_CASE("Shared reading: a captured graph follows the plan (stage 7, invariant 6)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const BatchSpec spec{.context_lengths = {97, 40, 130, 100}, .query_lengths = {}, .shared = {{{0, 2, 3}, 6}}};
  GpuBatch batch(spec);
  PlanOnDevice plan(batch, spec, {.block = 1}, 4);
  const PlanOnDevice apart(batch, spec, {.block = 1, .group = 1000}, 4);
  CHECK(plan.plan.order.size() == 3);
  CHECK(apart.plan.order.empty());
  common::SharingKernels kernels;
  kernels.read_together(plan.data());
  const common::Pages& pages = batch.pages_of(kernels);
  const common::StepArrays step = batch.step(4);
  const std::size_t bytes = kernels.workspace_bytes(pages.shape, step);
  const common::DeviceArray<std::byte> memory(bytes);
  const std::span<std::byte> workspace(memory.data(), bytes);
  const int columns = pages.shape.num_kv_heads * pages.shape.head_dim;
  const auto keys = tests::poisoned(4 * columns, ScalarType::kBFloat16);
  const auto values = tests::poisoned(4 * columns, ScalarType::kBFloat16);
  const common::Graph graph(batch.stream, [&] {
    kernels.plan(pages.shape, step, workspace, batch.stream.get());
    // As in the model, another launch stands between the two.
    kernels.read_from_slots(pages, keys.data(), values.data(), columns, step.slot_mapping, 4, batch.stream.get());
    kernels.attend(pages, step, {.queries = batch.queries.data()}, batch.output.data(), workspace, batch.stream.get());
  });
  for (int replay = 0; replay < 3; ++replay) {
    CAPTURE(replay);
    if (replay == 2) {
      plan.copy_from(apart);
    }
    CUDA_CHECK(cudaMemset(batch.output.data(), tests::kUnwritten, batch.output.size()));
    CUDA_CHECK(cudaDeviceSynchronize());
    graph.launch(batch.stream);
    batch.stream.synchronize();
    CHECK(batch.check(tests::to_floats(batch.output.download(), ScalarType::kBFloat16)) == tests::kNoDifference);
  }
}

TEST_CASE("Shared reading: random batches", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  common::Random random(7);
  const auto below = [&](int end) { return static_cast<int>(random.below(static_cast<std::uint64_t>(end))); };
  int num_together = 0;
  const int num_rounds = tests::kOnExecutor ? 6 : 12;
  for (int round = 0; round < num_rounds; ++round) {
    const int num_sequences = 2 + below(tests::kOnExecutor ? 8 : 25);
    BatchSpec spec{.type = below(2) == 0 ? ScalarType::kBFloat16 : ScalarType::kFloat8,
                   .num_kv_heads = 1 + below(3),
                   .group = 1 + below(8),
                   .head_dim = std::vector<int>{32, 64, 128}[static_cast<std::size_t>(below(3))],
                   .block_size = 16 << below(3),
                   .context_lengths = {},
                   .query_lengths = {},
                   .seed = static_cast<unsigned>(round)};
    spec.shared.resize(static_cast<std::size_t>(1 + below(3)));
    for (SharedPrefix& prefix : spec.shared) {
      prefix.num_blocks = 1 + below((tests::kOnExecutor ? 300 : 600) / spec.block_size);
    }
    for (int s = 0; s < num_sequences; ++s) {
      const auto which = static_cast<std::size_t>(below(static_cast<int>(spec.shared.size()) + 1));
      const bool is_alone = which == spec.shared.size();
      if (!is_alone) {
        spec.shared[which].sequences.push_back(s);
      }
      const int shared = is_alone ? 0 : spec.shared[which].num_blocks * spec.block_size + 1;
      spec.context_lengths.push_back(shared + below(200));
    }
    std::erase_if(spec.shared, [](const SharedPrefix& prefix) { return prefix.sequences.empty(); });
    if (below(2) == 0) {  // the last sequence has a chunk
      spec.query_lengths.assign(spec.context_lengths.size(), 1);
      spec.query_lengths.back() = std::min(2 + below(100), spec.context_lengths.back());
    }
    CAPTURE(round, num_sequences, spec.num_kv_heads, spec.group, spec.head_dim, spec.block_size);
    num_together += check_shared(spec);
  }
  CHECK(num_together > num_rounds);
}

// This needs no GPU.
TEST_CASE("Shared reading: a plan has every row of every prefix once, and every token once", "[gpu]") {
  common::Random random(GENERATE(1, 2, 3));
  const auto below = [&](int end) { return static_cast<int>(random.below(static_cast<std::uint64_t>(end))); };
  for (int round = 0; round < 300; ++round) {
    const int block_size = 8 << below(4);
    const int task_rows = 64 << below(2);
    SharedShape shape{.kernel = common::RaggedKernel::kShort,
                      .task_rows = task_rows,
                      .group = 1 + below(16),
                      .num_kv_heads = 1 + below(8),
                      .num_workers = 1 + below(140),
                      .max_tasks = 1 + below(80)};
    const int num_decodes = 1 + below(100);
    const int num_sequences = num_decodes + below(3);
    std::vector<SharedPrefix> prefixes(static_cast<std::size_t>(1 + below(5)));
    std::vector<int> lengths;
    std::vector<int> starts;
    std::vector<int> query_starts = {0};
    for (SharedPrefix& prefix : prefixes) {
      prefix.num_blocks = 1 + below(300);
    }
    for (int s = 0; s < num_sequences; ++s) {
      const auto which = static_cast<std::size_t>(below(static_cast<int>(prefixes.size()) + 1));
      const bool is_chunk = s >= num_decodes;
      const bool is_alone = is_chunk || which == prefixes.size();
      if (!is_alone) {
        prefixes[which].sequences.push_back(s);
      }
      lengths.push_back((is_alone ? 0 : prefixes[which].num_blocks * block_size + 1) + below(500));
      starts.push_back(s * 1000);
      query_starts.push_back(query_starts.back() + (is_chunk ? 2 + below(100) : 1));
    }
    std::erase_if(prefixes, [](const SharedPrefix& prefix) { return prefix.sequences.size() < 2; });
    const SharedPlan plan = common::plan_shared_reading({.context_lengths = lengths,
                                                         .query_starts = query_starts,
                                                         .block_tables = {},
                                                         .table_starts = starts,
                                                         .block_size = block_size},
                                                        prefixes, shape);
    CAPTURE(round, block_size, task_rows, shape.group, shape.num_kv_heads, shape.num_workers, shape.max_tasks);
    REQUIRE(static_cast<int>(plan.tasks.size()) <= shape.max_tasks);
    REQUIRE(plan.rows.size() == lengths.size());
    // What the plan says that it reads together is what no sequence reads by itself.
    std::int64_t num_together = 0;
    for (const SharedPrefix& prefix : plan.prefixes) {
      num_together += std::ssize(prefix.sequences) * prefix.num_blocks * block_size;
    }
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      num_together -= lengths[s] - plan.own_lengths[s];
    }
    REQUIRE(num_together == 0);
    // Each sequence finds, in the places that its rows name, results over tokens 0 … n - 1, and the rest is its own.
    std::set<std::pair<int, int>> rows_taken;  // place of a part, row
    for (int s = 0; s < num_sequences; ++s) {
      const auto index = static_cast<std::size_t>(s);
      const common::PrefixRows& rows = plan.rows[index];
      const int num_shared = lengths[index] - plan.own_lengths[index];
      REQUIRE(num_shared % common::kPrefixStep == 0);
      REQUIRE(plan.own_starts[index] == starts[index] + num_shared / block_size);
      if (rows.num_parts == 0) {
        REQUIRE(num_shared == 0);
        continue;
      }
      REQUIRE(plan.own_lengths[index] > 0);
      const auto prefix = std::find_if(prefixes.begin(), prefixes.end(), [&](const SharedPrefix& one) {
        return std::find(one.sequences.begin(), one.sequences.end(), s) != one.sequences.end();
      });
      REQUIRE(prefix != prefixes.end());
      REQUIRE(prefix->num_blocks * block_size - num_shared < common::kPrefixStep);
      int next_token = 0;
      for (int part = 0; part < rows.num_parts; ++part) {
        const auto task = std::find_if(plan.tasks.begin(), plan.tasks.end(), [&](const common::RaggedTask& one) {
          return one.first_place == rows.first_place && one.part == part;
        });
        REQUIRE(task != plan.tasks.end());
        REQUIRE(task->is_partial());
        REQUIRE(task->num_parts == rows.num_parts);
        REQUIRE(task->sequence == prefix->sequences.front());
        REQUIRE(task->first_token == next_token);
        REQUIRE(task->end_token > next_token);
        REQUIRE(task->seen_by_first >= task->end_token);
        next_token = task->end_token;
        REQUIRE((task->first_token % common::kPartTokens == 0));
        const int row = task->first_row + rows.row;
        REQUIRE(rows.row + shape.group <= task_rows);
        REQUIRE(row + shape.group <= task->end_row);
        REQUIRE(row % shape.group == 0);
        REQUIRE(plan.order[static_cast<std::size_t>(task->first_query + row / shape.group)] == s);
        REQUIRE(rows_taken.insert({rows.first_place + part, rows.row}).second);
      }
      REQUIRE(next_token == num_shared);
    }
    // No task computes rows that no sequence has.
    int num_rows = 0;
    for (const common::RaggedTask& task : plan.tasks) {
      num_rows += (task.end_row - task.first_row) / shape.group;
    }
    REQUIRE(num_rows == static_cast<int>(rows_taken.size()));
    REQUIRE(std::is_sorted(plan.tasks.begin(), plan.tasks.end(), [](const auto& left, const auto& right) {
      return left.end_token - left.first_token > right.end_token - right.first_token;
    }));
  }
}

// Nor do these.
TEST_CASE("Shared reading: a chunk has no prefix", "[gpu]") {
  const std::vector<int> lengths = {40, 40, 60};
  const std::vector<int> starts = {0, 3, 6};
  const SharedShape shape{.kernel = common::RaggedKernel::kShort,
                          .task_rows = 64,
                          .group = 4,
                          .num_kv_heads = 1,
                          .num_workers = 1,
                          .max_tasks = 8};
  const auto plan_of = [&](const std::vector<int>& query_starts, const std::vector<int>& sequences) {
    const std::vector<SharedPrefix> prefixes = {{sequences, 2}};
    return common::plan_shared_reading({.context_lengths = lengths,
                                        .query_starts = query_starts,
                                        .block_tables = {},
                                        .table_starts = starts,
                                        .block_size = 16},
                                       prefixes, shape);
  };
  CHECK(plan_of({0, 1, 2, 22}, {0, 1}).own_lengths == std::vector<int>{8, 8, 60});
  CHECK_THROWS_AS(plan_of({0, 1, 2, 22}, {0, 1, 2}), common::CheckError);
  CHECK_THROWS_AS(plan_of({0, 20, 21, 22}, {1, 2}), common::CheckError);
}

TEST_CASE("Shared reading: what is chosen where it was measured", "[gpu]") {
  const auto costs_of = [](ScalarType type) {
    return common::shared_reading_costs({.num_kv_heads = 8, .block_size = 16, .head_dim = 128, .type = type}, 32);
  };
  const common::ReadingCosts wide = costs_of(ScalarType::kBFloat16);
  const common::ReadingCosts narrow = costs_of(ScalarType::kFloat8);
  CHECK(wide.block == 8 * 16 * 2 * 256);
  CHECK(wide.group_block == wide.block);
  CHECK(narrow.group_block == wide.group_block);
  CHECK(narrow.group == wide.group);
  CHECK(narrow.query == wide.query);
  // Sequences that share a prefix of 32/8 heads of 128, in blocks of 16. The times are in h200.json.
  const auto reads_together = [](const common::ReadingCosts& costs, int num_sequences, int num_shared) {
    const int num_blocks = num_shared / 16;
    std::vector<int> lengths(static_cast<std::size_t>(num_sequences), num_shared + 16);
    std::vector<int> queries(lengths.size() + 1);
    std::vector<int> starts(lengths.size() + 1);
    std::vector<int> tables;
    for (int s = 0; s < num_sequences; ++s) {
      queries[static_cast<std::size_t>(s) + 1] = s + 1;
      for (int block = 0; block < num_blocks; ++block) {
        tables.push_back(block);
      }
      tables.push_back(num_blocks + s);
      starts[static_cast<std::size_t>(s) + 1] = static_cast<int>(tables.size());
    }
    return !common::find_shared_prefixes({lengths, queries, tables, starts, 16}, costs).empty();
  };
  CHECK(reads_together(wide, 16, 2048));
  CHECK(reads_together(wide, 32, 1000));
  CHECK_FALSE(reads_together(wide, 4, 8192));
  CHECK(reads_together(narrow, 8, 8192));
  CHECK(reads_together(narrow, 4, 16384));
  CHECK_FALSE(reads_together(narrow, 32, 1000));
  CHECK(reads_together(common::beside_chunk(wide, 512), 16, 2048));
  CHECK_FALSE(reads_together(common::beside_chunk(wide, 2000), 16, 2048));
  CHECK(reads_together(common::beside_chunk(wide, 2000), 64, 1000));
  CHECK_FALSE(reads_together(common::beside_chunk(narrow, 2000), 64, 1000));
  CHECK(reads_together(common::beside_chunk(narrow, 2000), 64, 2048));
}
