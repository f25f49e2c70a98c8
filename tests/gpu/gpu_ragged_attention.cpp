// production/'s ragged causal attention against float64 on the same rounded inputs.
#include <limits>
#include <numeric>
#include <vector>

#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_hand_worked.h"
#include "tests/gpu/gpu_refused.h"
#include "tests/support/catch.h"

// clang-format off
#include "common/paged/ragged_plan.h"
// clang-format on

namespace {

using common::RaggedKernel;
using tests::BatchSpec;
using tests::GpuBatch;
using tests::ScalarType;

// How many tasks the plan makes of the batch, parts of contexts counted, how many contexts of tasks it cuts, and how
// many tokens all tasks read.
struct Tasks {
  int num_tasks;
  int num_merges;
  int num_tokens;
};
Tasks planned(const GpuBatch& batch) {
  const common::PageShape& shape = batch.shape();
  const common::DeviceArray<std::byte> memory(common::ragged_workspace_bytes(shape, batch.batch(), batch.num_tokens()));
  common::plan_ragged(shape, batch.batch(), batch.query_starts(), batch.num_tokens(), memory.data(),
                      batch.stream.get());
  batch.stream.synchronize();
  const common::RaggedWorkspace workspace =
      common::ragged_workspace(memory.data(), shape, batch.batch(), batch.num_tokens());
  common::RaggedQueue queue{};
  CUDA_CHECK(cudaMemcpy(&queue, workspace.queue, sizeof(queue), cudaMemcpyDeviceToHost));
  std::vector<common::RaggedTask> tasks(static_cast<std::size_t>(queue.num_tasks));
  CUDA_CHECK(cudaMemcpy(tasks.data(), workspace.tasks, tasks.size() * sizeof(tasks[0]), cudaMemcpyDeviceToHost));
  return {queue.num_tasks, queue.num_merges,
          std::accumulate(tasks.begin(), tasks.end(), 0, [](int sum, const common::RaggedTask& task) {
            return sum + task.end_token - task.first_token;
          })};
}

}  // namespace

TEST_CASE("Ragged attention: weights 1 and 3, computed by hand", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  tests::HandWorked example(type);
  CHECK(example.check(example.ragged(), tests::HandWorked::kLastTwoTokens) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: every type, head_dim, group and block size (stage 7, invariant 2)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto [type, head_dim, block_size] = GENERATE(from_range(tests::kernel_shapes()));
  for (const int group : tests::some_of({3}, {1, 3, 4, 7, 16})) {
    CAPTURE(tests::name_of(type), head_dim, block_size, group);
    // Whole prompts, chunks with a past, single tokens, sequences without new tokens and without any.
    GpuBatch batch({.type = type,
                    .num_kv_heads = 2,
                    .group = group,
                    .head_dim = head_dim,
                    .block_size = block_size,
                    .context_lengths = {65, 1, 0, 130, 63, 64, 100, 17, 33},
                    .query_lengths = {65, 1, 0, 40, 1, 64, 0, 2, 32},
                    .seed = static_cast<unsigned>(group)});
    CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
  }
}

TEST_CASE("Ragged attention: queries see their windows, and nothing in front of the first is read", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto [type, head_dim, block_size] = GENERATE(from_range(tests::kernel_shapes()));
  for (const int group : tests::some_of({3}, {4})) {
    for (const int window : tests::some_of({1, 65}, {7, 65, 250})) {
      // Whole prompts, chunks that begin in front of, at and behind the window of the first token, and single tokens.
      GpuBatch batch({.type = type,
                      .num_kv_heads = 2,
                      .group = group,
                      .head_dim = head_dim,
                      .block_size = block_size,
                      .window = window,
                      .context_lengths = {65, 1, 0, 130, 63, 164, 100, 17, 133, 257},
                      .query_lengths = {65, 1, 0, 40, 1, 64, 0, 2, 33, 9},
                      .seed = static_cast<unsigned>(group)});
      CAPTURE(tests::name_of(type), head_dim, block_size, group, window);
      CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
    }
  }
}

TEST_CASE("Ragged attention: windows, however contexts are cut, by each kernel", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({64}, {64, 256})));
  const int block_size = GENERATE(8, 64);
  const int window = GENERATE(from_range(tests::some_of({30, 150}, {30, 700})));
  if (type == ScalarType::kFloat8 && block_size == 8) {
    return;  // there are no such pages
  }
  // Windows of a task's rows begin in several tiles, and rows see nothing of some parts. Of the longest, most tiles lie
  // between where windows begin and where they end.
  for (const int group : tests::some_of({1}, {8})) {
    GpuBatch batch({.type = type,
                    .num_kv_heads = 2,
                    .group = group,
                    .head_dim = head_dim,
                    .block_size = block_size,
                    .window = window,
                    .context_lengths = tests::some_of({260, 0, 180, 300}, {129, 0, 260, 383, 385, 641, 1, 1500, 900}),
                    .query_lengths = tests::some_of({140, 0, 2, 20}, {2, 0, 200, 1, 2, 40, 1, 300, 900})});
    for (const int part_tokens : tests::some_of({128, 1 << 20}, {0, 256})) {
      for (const RaggedKernel kernel : {RaggedKernel::kShort, RaggedKernel::kWide, RaggedKernel::kChosen}) {
        if (tests::kOnExecutor && kernel == RaggedKernel::kChosen) {
          continue;  // it is one of the others
        }
        CAPTURE(tests::name_of(type), head_dim, block_size, window, group, part_tokens, static_cast<int>(kernel));
        const std::vector<float> result = batch.ragged({kernel, part_tokens});
        CHECK(batch.check(result) == tests::kNoDifference);
        CHECK(batch.ragged({kernel, part_tokens}, tests::repeats(2)) == result);
      }
    }
  }
}

TEST_CASE("Ragged attention: a long context costs what its window costs", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const int past = GENERATE(2000, 2001, 2100);
  const int window = GENERATE(5, 128, 400);
  BatchSpec spec{.num_kv_heads = 2,
                 .group = 4,
                 .head_dim = 64,
                 .window = window,
                 .context_lengths = {past + 8},
                 .query_lengths = {8}};
  // One task, in parts or not: its first row's window, the other seven tokens, and less than a tile in front.
  const Tasks tasks = planned(GpuBatch(spec));
  CHECK(tasks.num_tokens >= window + 7);
  CHECK(tasks.num_tokens < window + 7 + 128);
  if (window <= 128) {
    CHECK(tasks.num_merges == 0);
  }
}

TEST_CASE("Ragged attention: long prompts and late chunks", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int chunk = GENERATE(from_range(tests::some_of({129}, {129, 1029})));  // in the middle 224 tokens or 404
  CAPTURE(tests::name_of(type), chunk);
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .group = 4,
                  .context_lengths = tests::some_of({70, 500, 1025, 300}, {700, 5000, 32768, 8193, 300}),
                  .query_lengths = tests::some_of({70, chunk, 1, 33}, {700, chunk, 1, 33, 256})});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: prompts around every border of a tile", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(64, 128);
  const int past = GENERATE(from_range(tests::some_of({31}, {0, 31})));
  CAPTURE(tests::name_of(type), head_dim, past);
  std::vector<int> prompts;
  for (int border = tests::kOnExecutor ? 384 : 320; border <= 384;
       border += 32) {  // steps of the diagonal tiles; 384 is one of whole tiles too
    prompts.insert(prompts.end(), {border - 1, border, border + 1});
  }
  std::vector<int> contexts = prompts;
  for (int& context : contexts) {
    context += past;
  }
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .group = 2,
                  .head_dim = head_dim,
                  .context_lengths = contexts,
                  .query_lengths = prompts});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

// Tiles are computed from the last to the first. Where scores rise by more than a weight may, or by more than a float's
// exponent holds, what came before is scaled down.
TEST_CASE("Ragged attention: scores that rise far towards the first token", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({64}, {64, 128, 256})));
  CAPTURE(tests::name_of(type), head_dim);
  std::vector<float> shifts;
  for (const float shift : {171.0F, 170.0F, 24.0F, 20.0F, 0.0F, 1.0F}) {
    shifts.insert(shifts.end(), 130, shift);
  }
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .head_dim = head_dim,
                  .context_lengths = tests::some_of({300}, {780, 500, 300}),
                  .query_lengths = tests::some_of({20}, {780, 40, 3}),
                  .score_shifts = shifts});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: prompts long enough for the wide shape", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // More than 256 tokens for each sequence on average, whatever the last one is cut to.
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({128}, {32, 64, 96, 128, 256})));
  const int block_size = GENERATE(from_range(tests::some_of({64}, {16, 64, 8})));
  const int group = GENERATE(from_range(tests::some_of({3}, {1, 3, 16})));
  CAPTURE(tests::name_of(type), head_dim, block_size, group);
  if (type == ScalarType::kFloat8 && block_size == 8) {
    return;  // there are no such pages
  }
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .group = group,
                  .head_dim = head_dim,
                  .block_size = block_size,
                  .context_lengths = tests::some_of({1, 260, 0, 350}, {1, 700, 0, 650}),
                  .query_lengths = tests::some_of({1, 260, 0, 149}, {1, 700, 0, 449})});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: one row for each sequence is decode attention", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch batch({.context_lengths = {90, 1, 400, 1000}, .query_lengths = {}});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: however contexts are cut, the result is the same", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({64}, {64, 128, 256})));
  const int group = GENERATE(from_range(tests::some_of({4}, {1, 4, 8})));
  CAPTURE(tests::name_of(type), head_dim, group);
  // Chunks after cached prefixes. Contexts end around the borders of parts, and chunks begin before such borders, so
  // that some rows see nothing of the last part.
  GpuBatch batch({.type = type,
                  .num_kv_heads = 2,
                  .group = group,
                  .head_dim = head_dim,
                  .context_lengths = tests::some_of({129, 0, 260, 384}, {127, 128, 129, 0, 260, 383, 384, 385, 641, 1}),
                  .query_lengths = tests::some_of({2, 0, 9, 1}, {1, 8, 2, 0, 200, 1, 16, 2, 40, 1})});
  for (const int part_tokens : tests::some_of({128, 256}, {0, 128, 256, 1 << 20})) {
    for (const RaggedKernel kernel : {RaggedKernel::kShort, RaggedKernel::kWide, RaggedKernel::kChosen}) {
      if (tests::kOnExecutor && kernel == RaggedKernel::kChosen) {
        continue;  // it is one of the others
      }
      CAPTURE(part_tokens, static_cast<int>(kernel));
      const std::vector<float> result = batch.ragged({kernel, part_tokens});
      CHECK(batch.check(result) == tests::kNoDifference);
      // The order in which parts are computed is left to chance, the order in which they are added is not.
      CHECK(batch.ragged({kernel, part_tokens}, tests::repeats(2)) == result);
    }
  }
}

TEST_CASE("Ragged attention: parts of contexts, for other shapes", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({32, 256}, {32, 64, 96, 128, 256})));
  const int block_size = GENERATE(from_range(tests::some_of({64}, {16, 64, 8})));
  CAPTURE(tests::name_of(type), head_dim, block_size);
  if (type == ScalarType::kFloat8 && block_size == 8) {
    return;  // there are no such pages
  }
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .group = 5,
                  .head_dim = head_dim,
                  .block_size = block_size,
                  .context_lengths = {400, 150},
                  .query_lengths = {30, 150}});
  CHECK(batch.check(batch.ragged({RaggedKernel::kChosen, 128})) == tests::kNoDifference);
}

// As on an RTX 3090 or 4090. On a GPU with more, the limit is forced; but not every build has these kernels.
TEST_CASE("Ragged attention: thread blocks with 99 KB of shared memory (stage 7, invariant 2)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const tests::SharedMemoryLimit limit(99 << 10);
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({256}, {32, 64, 96, 128, 256})));
  const int block_size = GENERATE(from_range(tests::some_of({16}, {16, 64, 8})));
  CAPTURE(tests::name_of(type), head_dim, block_size);
  if (type == ScalarType::kFloat8 && block_size == 8) {
    return;  // there are no such pages
  }
  const common::PageShape shape{.num_kv_heads = 1, .block_size = block_size, .head_dim = head_dim, .type = type};
  if (!common::kProductionKernels.unsupported(shape, 3).empty()) {
    CHECK(!common::serves_small_memory());
    return;
  }
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .group = 3,
                  .head_dim = head_dim,
                  .block_size = block_size,
                  .context_lengths = {150, 1, 0, 200},
                  .query_lengths = {150, 1, 0, 9}});
  for (const RaggedKernel kernel : {RaggedKernel::kShort, RaggedKernel::kWide}) {
    CHECK(batch.check(batch.ragged({kernel, 128})) == tests::kNoDifference);
  }
}

TEST_CASE("Ragged attention: a few tokens after a long context keep all multiprocessors busy", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const int num_multiprocessors = common::device_limits().num_multiprocessors;
  GpuBatch chunk({.num_kv_heads = 2,
                  .group = 4,
                  .head_dim = 64,
                  .context_lengths = tests::some_of({1500}, {4000}),
                  .query_lengths = {9}});
  const Tasks of_chunk = planned(chunk);
  CHECK(of_chunk.num_merges == 1);
  CHECK(of_chunk.num_tasks > 8);
  CHECK(chunk.check(chunk.ragged()) == tests::kNoDifference);
  // A context that is as short as a task's smallest part stays whole; so do contexts that are many in any case.
  GpuBatch prompt({.num_kv_heads = 2, .group = 4, .head_dim = 64, .context_lengths = {100}, .query_lengths = {100}});
  CHECK(planned(prompt).num_merges == 0);
  GpuBatch many({.num_kv_heads = 8,
                 .group = 1,
                 .head_dim = 32,
                 .context_lengths = std::vector<int>(static_cast<std::size_t>(num_multiprocessors), 300),
                 .query_lengths = std::vector<int>(static_cast<std::size_t>(num_multiprocessors), 2)});
  CHECK(planned(many).num_merges == 0);
}

TEST_CASE("Ragged attention: a pool of more than 2^31 elements (stage 7, invariant 1)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  if (!tests::has_room_for(std::size_t{12} << 30)) {
    SKIP_TEST("the GPU has no room for it");
  }
  GpuBatch batch(
      {.num_kv_heads = 8, .context_lengths = {50, 100}, .query_lengths = {50, 20}, .first_block = (1 << 17) + 5});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: bad arguments are refused before anything is launched (stage 7, invariant 6)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch good({.context_lengths = {20}, .query_lengths = {20}});
  const common::DeviceArray<std::byte> workspace =
      tests::poisoned(std::int64_t{1} << 20, ScalarType::kBFloat16);  // no plan may be written to it
  struct Call {
    common::Pages pages;
    common::BatchArrays batch;
    const int* query_starts;
    const void* queries;
    void* output;
    int num_tokens;
    void* workspace;
  };
  const Call right{good.pages_of(common::kProductionKernels),
                   good.batch(),
                   good.query_starts(),
                   good.queries.data(),
                   good.output.data(),
                   20,
                   workspace.data()};
  const auto plan = [&](const Call& call) {
    common::plan_ragged(call.pages.shape, call.batch, call.query_starts, call.num_tokens, call.workspace,
                        good.stream.get());
  };
  const auto attend = [&](const Call& call) {
    common::ragged_attention(call.pages, call.batch, call.query_starts, call.queries, call.output, call.num_tokens,
                             call.workspace, good.stream.get());
  };
  const auto wrong = tests::refused(right, plan, attend);
  for (const tests::BadBatch& bad : tests::bad_batches()) {
    wrong(bad.what, !bad.of_pages, [&](Call& call) { bad.spoil(call.pages, call.batch); });
  }
  wrong("tokens", true, [](Call& call) { call.num_tokens = -1; });
  wrong("no query_starts", true, [](Call& call) { call.query_starts = nullptr; });
  wrong("no workspace", true, [](Call& call) { call.workspace = nullptr; });
  wrong("workspace", true, [](Call& call) { call.workspace = tests::off_by_2(call.workspace); });
  wrong("no queries", false, [](Call& call) { call.queries = nullptr; });
  wrong("queries", false, [](Call& call) { call.queries = tests::off_by_2(call.queries); });
  wrong("no output", false, [](Call& call) { call.output = nullptr; });
  wrong("output", false, [](Call& call) { call.output = tests::off_by_2(call.output); });
  // A task has 128 rows here: 2^31 tokens x 16 query heads make 2^28 of them, for each of 16 kv heads.
  wrong("too many tokens for one launch", false, [](Call& call) {
    call.num_tokens = std::numeric_limits<int>::max();
    call.pages.shape.num_kv_heads = 16;
    call.batch.num_heads = 256;
  });
  Call nothing = right;
  nothing.batch.num_sequences = 0;
  CHECK_NOTHROW(plan(nothing));
  CHECK_NOTHROW(attend(nothing));
  nothing = right;
  nothing.num_tokens = 0;
  CHECK_NOTHROW(plan(nothing));
  CHECK_NOTHROW(attend(nothing));

  good.stream.synchronize();
  CHECK(tests::is_poisoned(workspace));
  CHECK(tests::is_poisoned(good.output));
}

// For tests/gpu/sanitize_gpu.sh: each kernel, with contexts whole and cut.
TEST_CASE("Ragged attention: each kernel in a small case", "[.sanitize]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  for (const int head_dim : {32, 64, 96, 128, 256}) {
    GpuBatch batch({.type = type,
                    .num_kv_heads = 1,
                    .group = 3,
                    .head_dim = head_dim,
                    .context_lengths = {300, 33, 0, 1},
                    .query_lengths = {70, 33, 0, 1}});
    for (const RaggedKernel kernel : {RaggedKernel::kShort, RaggedKernel::kWide, RaggedKernel::kChosen}) {
      for (const int part_tokens : {0, 128}) {
        CAPTURE(tests::name_of(type), head_dim, static_cast<int>(kernel), part_tokens);
        CHECK(batch.check(batch.ragged({kernel, part_tokens})) == tests::kNoDifference);
      }
    }
  }
}
