// Every step of the ladder against float64: the slow kernels of a lesson have to be as right as the fast ones.
#include "common/paged/page_layout.h"
#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_ladder_pages.h"
#include "tests/support/catch.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include GPU_STAGE_HEADER(ladder/prompt_ladder.h)
// clang-format on

namespace {

using tests::BatchSpec;
using tests::GpuBatch;

bool runs_here(const stage::LadderStep& step) {
  return common::device_limits().compute_capability >= step.min_capability &&
         (step.min_capability < 90 || common::kernels_are_native());
}

// Every step against the reference.
void check_all(GpuBatch& batch) {
  const tests::PagesInOrder pages(batch);
  for (const stage::LadderStep& step : stage::ladder()) {
    if (runs_here(step)) {
      CAPTURE(step.name);
      CHECK(batch.check(tests::run_step(step, batch, pages)) == tests::kNoDifference);
    }
  }
}

}  // namespace

TEST_CASE("The ladder: every step, every group, block boundaries and absent sequences", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const int group : tests::some_of({1, 4, 7}, {1, 2, 3, 4, 7, 8})) {
    GpuBatch batch({.group = group,
                    .context_lengths = {1, 15, 0, 16, 17, 48, 100, 127, 128, 129, 0, 257},
                    .query_lengths = {},
                    .seed = static_cast<unsigned>(group)});
    CAPTURE(group);
    check_all(batch);
  }
}

// One context that is cut into many pieces, beside some that are shorter than the number of pieces.
TEST_CASE("The ladder: every step where contexts are cut", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::vector<std::vector<int>> batches = {
      {tests::kOnExecutor ? 1025 : 8193}, {1}, {tests::kOnExecutor ? 300 : 3000, 5, 0, 16, 33}};
  for (const std::vector<int>& lengths : batches) {
    for (const int group : tests::some_of({3, 8}, {1, 3, 4, 8})) {
      GpuBatch batch({.num_kv_heads = 1, .group = group, .context_lengths = lengths, .query_lengths = {}});
      CAPTURE(group);
      check_all(batch);
    }
  }
}

// One launch of each step, so that a profiler's counts can be held against the executor's: LADDER.md has the command.
TEST_CASE("The ladder: the batch that kernel_count counts", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch batch({.num_kv_heads = 1, .group = 4, .context_lengths = {1024}, .query_lengths = {}});
  check_all(batch);
}

TEST_CASE("The ladder: a step gives the same bits each time", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const GpuBatch batch({.context_lengths = tests::some_of({700, 0, 33}, {700, 0, 2000, 33}), .query_lengths = {}});
  const tests::PagesInOrder pages(batch);
  for (const stage::LadderStep& step : stage::ladder()) {
    if (!runs_here(step)) {
      continue;
    }
    CAPTURE(step.name);
    const std::vector<float> once = tests::run_step(step, batch, pages);
    const std::vector<float> again = tests::run_step(step, batch, pages);
    CHECK(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("The ladder's swizzled pages are those of the kernels in common/paged/") {
  for (int row = 0; row < 16; ++row) {
    for (int vec = 0; vec < 16; ++vec) {
      CHECK(stage::swizzled_place(16, row, vec) == common::vec_place(16, 16, row, vec));
    }
  }
}

TEST_CASE("The ladder refuses shapes that it is not for", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::vector<BatchSpec> specs = {
      {.type = common::ScalarType::kFloat32, .context_lengths = {20}, .query_lengths = {}},
      {.head_dim = 64, .context_lengths = {20}, .query_lengths = {}},
      {.block_size = 32, .context_lengths = {20}, .query_lengths = {}},
      {.group = 16, .context_lengths = {20}, .query_lengths = {}}};
  for (const BatchSpec& spec : specs) {
    GpuBatch batch(spec);
    for (const stage::LadderStep& step : stage::ladder()) {
      CAPTURE(step.name);
      CHECK_THROWS_AS(step.workspace_bytes(batch.shape(), batch.batch()), common::CheckError);
      CHECK_THROWS_AS(step.decode(batch.pages_of(stage::kPlainKernels), batch.batch(), batch.queries.data(),
                                  batch.output.data(), batch.output.data(), batch.stream.get()),
                      common::CheckError);
    }
  }
}

namespace {

bool runs_here(const stage::PromptStep& step) {
  // The executor has no wgmma.
  return !step.uses_wgmma ||
         (common::device_limits().compute_capability == 90 && common::kernels_are_native() && !tests::kOnExecutor);
}

std::vector<float> run(const stage::PromptStep& step, const GpuBatch& batch, const tests::PagesInOrder& pages) {
  const common::PageShape& shape = batch.shape();
  const std::size_t bytes =
      step.workspace_bytes == nullptr ? 0 : step.workspace_bytes(shape, batch.batch(), batch.num_tokens());
  return batch.output_of(bytes, [&](void* workspace) {
    if (step.plan != nullptr) {
      step.plan(shape, batch.batch(), batch.query_starts(), batch.num_tokens(), workspace, batch.stream.get());
    }
    step.attend(pages.of(step.rows), batch.batch(), batch.query_starts(), batch.queries.data(), batch.output.data(),
                batch.num_tokens(), workspace, batch.stream.get());
  });
}

}  // namespace

TEST_CASE("The prompts' ladder: every step, whole prompts and chunks, borders of tiles", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const int group : tests::some_of({3}, {1, 3, 16})) {
    GpuBatch batch(
        {.num_kv_heads = 1,
         .group = group,
         .context_lengths = tests::some_of({127, 129, 1, 200, 0, 300}, {383, 384, 385, 1, 1000, 0, 640, 513}),
         .query_lengths = tests::some_of({127, 129, 1, 80, 0, 33}, {383, 384, 385, 1, 600, 0, 33, 513})});
    const tests::PagesInOrder pages(batch);
    for (const stage::PromptStep& step : stage::prompt_ladder()) {
      if (runs_here(step)) {
        CAPTURE(step.name, group);
        CHECK(batch.check(run(step, batch, pages)) == tests::kNoDifference);
      }
    }
  }
}

TEST_CASE("The prompts' ladder refuses shapes that it is not for", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const BatchSpec& spec : {BatchSpec{.head_dim = 64, .context_lengths = {300}, .query_lengths = {300}},
                                BatchSpec{.block_size = 64, .context_lengths = {300}, .query_lengths = {300}}}) {
    const GpuBatch batch(spec);
    const tests::PagesInOrder pages(batch);
    for (const stage::PromptStep& step : stage::prompt_ladder()) {
      CAPTURE(step.name);
      CHECK_THROWS_AS(run(step, batch, pages), common::CheckError);
    }
  }
}

// For tests/gpu/sanitize_gpu.sh.
TEST_CASE("The ladders: each step in a small case", "[.sanitize]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch decodes({.num_kv_heads = 2, .group = 4, .context_lengths = {300, 0, 17}, .query_lengths = {}});
  check_all(decodes);
  GpuBatch prompts({.num_kv_heads = 1, .group = 3, .context_lengths = {130, 0, 40}, .query_lengths = {130, 0, 5}});
  const tests::PagesInOrder pages(prompts);
  for (const stage::PromptStep& step : stage::prompt_ladder()) {
    if (runs_here(step)) {
      CAPTURE(step.name);
      CHECK(prompts.check(run(step, prompts, pages)) == tests::kNoDifference);
    }
  }
}
