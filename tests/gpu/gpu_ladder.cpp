// Every step of the ladder against float64: the slow kernels of a lesson have to be as right as the fast ones.
#include "tests/gpu/gpu_fixtures.h"
#include "tests/support/catch.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include GPU_STAGE_HEADER(ladder/ladder.h)
#include GPU_STAGE_HEADER(ladder/prompt_ladder.h)
// clang-format on

namespace {

using tests::BatchSpec;
using tests::GpuBatch;

// The step's output for the batch.
std::vector<float> run(const stage::LadderStep& step, const GpuBatch& batch) {
  const stage::PageShape& shape = batch.pages().shape;
  return batch.output_of(step.workspace_bytes(shape, batch.batch()), [&](void* workspace) {
    if (step.plan != nullptr) {
      step.plan(shape, batch.batch(), workspace, batch.stream.get());
      batch.stream.synchronize();
    }
    step.decode(batch.pages(), batch.batch(), batch.queries.data(), batch.output.data(), workspace, batch.stream.get());
  });
}

}  // namespace

TEST_CASE("The ladder: every step, every group, block boundaries and absent sequences", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const int group : {1, 2, 3, 4, 7, 8, 16}) {
    GpuBatch batch({.group = group,
                    .context_lengths = {1, 15, 0, 16, 17, 48, 100, 127, 128, 129, 0, 257},
                    .query_lengths = {},
                    .seed = static_cast<unsigned>(group)});
    for (const stage::LadderStep& step : stage::ladder()) {
      const std::string wrong = batch.check(run(step, batch));
      CAPTURE(step.name, group, wrong);
      CHECK(wrong.empty());
    }
  }
}

// One context that is cut into many pieces, beside some that are shorter than the number of pieces.
TEST_CASE("The ladder: every step where contexts are cut", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::vector<std::vector<int>> batches = {{8193}, {1}, {3000, 5, 0, 16, 33}};
  for (const std::vector<int>& lengths : batches) {
    for (const int group : {1, 3, 4, 16}) {
      GpuBatch batch({.num_kv_heads = 1, .group = group, .context_lengths = lengths, .query_lengths = {}});
      for (const stage::LadderStep& step : stage::ladder()) {
        const std::string wrong = batch.check(run(step, batch));
        CAPTURE(step.name, group, lengths.front(), wrong);
        CHECK(wrong.empty());
      }
    }
  }
}

TEST_CASE("The ladder: a step gives the same bits each time", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch batch({.context_lengths = {700, 0, 2000, 33}, .query_lengths = {}});
  for (const stage::LadderStep& step : stage::ladder()) {
    CAPTURE(step.name);
    const std::vector<float> once = run(step, batch);
    const std::vector<float> again = run(step, batch);
    CHECK(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("The ladder refuses shapes that it is not for", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::vector<BatchSpec> specs = {
      {.type = stage::ScalarType::kFloat32, .context_lengths = {20}, .query_lengths = {}},
      {.head_dim = 64, .context_lengths = {20}, .query_lengths = {}},
      {.block_size = 32, .context_lengths = {20}, .query_lengths = {}}};
  for (const BatchSpec& spec : specs) {
    GpuBatch batch(spec);
    for (const stage::LadderStep& step : stage::ladder()) {
      CAPTURE(step.name);
      CHECK_THROWS_AS(step.workspace_bytes(batch.pages().shape, batch.batch()), common::CheckError);
      CHECK_THROWS_AS(step.decode(batch.pages(), batch.batch(), batch.queries.data(), batch.output.data(),
                                  batch.output.data(), batch.stream.get()),
                      common::CheckError);
    }
  }
}

namespace {

std::vector<float> run(const stage::PromptStep& step, const GpuBatch& batch) {
  const stage::PageShape& shape = batch.pages().shape;
  const std::size_t bytes = stage::ragged_workspace_bytes(shape, batch.batch(), batch.num_tokens());
  return batch.output_of(bytes, [&](void* workspace) {
    stage::plan_ragged(shape, batch.batch(), batch.query_starts(), batch.num_tokens(), workspace, batch.stream.get());
    step.attend(batch.pages(), batch.batch(), batch.queries.data(), batch.output.data(),
                stage::ragged_workspace(workspace, shape, batch.batch(), batch.num_tokens()), batch.stream.get());
  });
}

}  // namespace

TEST_CASE("The prompts' ladder: every step, whole prompts and chunks, borders of tiles", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const int group : {1, 3, 16}) {
    for (const int block_size : {16, 64}) {
      GpuBatch batch({.num_kv_heads = 1,
                      .group = group,
                      .block_size = block_size,
                      .context_lengths = {383, 384, 385, 1, 1000, 0, 640, 513},
                      .query_lengths = {383, 384, 385, 1, 600, 0, 33, 513}});
      for (const stage::PromptStep& step : stage::prompt_ladder()) {
        if (step.serves(batch.pages().shape)) {
          const std::string wrong = batch.check(run(step, batch));
          CAPTURE(step.name, group, block_size, wrong);
          CHECK(wrong.empty());
        }
      }
    }
  }
}

TEST_CASE("The prompts' ladder refuses shapes that it is not for", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch batch({.head_dim = 64, .context_lengths = {300}, .query_lengths = {300}});
  for (const stage::PromptStep& step : stage::prompt_ladder()) {
    CAPTURE(step.name);
    CHECK_THROWS_AS(run(step, batch), common::CheckError);
  }
}
