// Ragged causal attention against float64 on the same rounded inputs.
#include "tests/catch.h"
#include "tests/gpu_fixtures.h"
#include "tests/gpu_hand_worked.h"

namespace {

using tests::GpuBatch;
using tests::ScalarType;

}  // namespace

TEST_CASE("Ragged attention: weights 1 and 3, computed by hand", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kFloat32, ScalarType::kFloat16, ScalarType::kBFloat16);
  tests::HandWorked example(type);
  CHECK(example.check(example.ragged(), tests::HandWorked::kLastTwoTokens) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: every type, head_dim, group and block size", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kFloat32, ScalarType::kFloat16, ScalarType::kBFloat16);
  const bool exact = type == ScalarType::kFloat32;
  const int head_dim = exact ? GENERATE(8, 24, 32, 128, 256) : GENERATE(32, 64, 96, 128, 256);
  const int block_size = exact ? GENERATE(1, 3, 4, 16, 100) : GENERATE(8, 16, 32, 64);
  for (const int group : {1, 3, 4, 7, 16}) {
    CAPTURE(tests::name_of(type), head_dim, block_size, group);
    // Whole prompts, chunks with a past, single tokens, sequences without tokens now or without any.
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

TEST_CASE("Ragged attention: long prompts and late chunks", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kFloat16, ScalarType::kBFloat16);
  CAPTURE(tests::name_of(type));
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .group = 4,
                  .context_lengths = {700, 5000, 32768, 8193, 300},
                  .query_lengths = {700, 129, 1, 33, 256}});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: prompts long enough for the wide shape", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // More than 256 tokens a sequence on average, whatever the last one is cut to.
  const auto type = GENERATE(ScalarType::kFloat16, ScalarType::kBFloat16);
  const int head_dim = GENERATE(32, 64, 96, 128, 256);
  const int block_size = GENERATE(8, 64);
  const int group = GENERATE(1, 3, 16);
  CAPTURE(tests::name_of(type), head_dim, block_size, group);
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .group = group,
                  .head_dim = head_dim,
                  .block_size = block_size,
                  .context_lengths = {1, 700, 0, 650},
                  .query_lengths = {1, 700, 0, 449}});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: one row a sequence is decode attention", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch batch({.context_lengths = {90, 1, 400, 1000}, .query_lengths = {}});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: a pool of more than 2^31 elements", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes < std::size_t{12} << 30) {
    SKIP_TEST("the GPU has no room for it");
  }
  GpuBatch batch(
      {.num_kv_heads = 8, .context_lengths = {50, 100}, .query_lengths = {50, 20}, .first_block = (1 << 17) + 5});
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}
