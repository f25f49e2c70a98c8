// Ragged causal attention against float64 on the same rounded inputs.
#include <functional>
#include <limits>

#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_hand_worked.h"
#include "tests/support/catch.h"

namespace {

using tests::GpuBatch;
using tests::ScalarType;

}  // namespace

TEST_CASE("Ragged attention: weights 1 and 3, computed by hand", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kFloat32, ScalarType::kBFloat16);
  tests::HandWorked example(type);
  CHECK(example.check(example.ragged(), tests::HandWorked::kLastTwoTokens) == tests::kNoDifference);
}

TEST_CASE("Ragged attention: every type, head_dim, group and block size (stage 7, invariant 2)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kFloat32, ScalarType::kBFloat16);
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
  GpuBatch batch({.num_kv_heads = 1,
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
  const int head_dim = GENERATE(32, 64, 96, 128, 256);
  const int block_size = GENERATE(8, 64);
  const int group = GENERATE(1, 3, 16);
  CAPTURE(head_dim, block_size, group);
  GpuBatch batch({.num_kv_heads = 1,
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
      tests::poisoned(std::int64_t{1} << 20, ScalarType::kBFloat16);  // in which no plan may appear
  struct Call {
    stage::Pages pages;
    stage::Batch batch;
    const int* query_starts;
    const void* queries;
    void* output;
    int num_tokens;
    void* workspace;
  };
  const Call right{good.pages(),       good.batch(), good.query_starts(), good.queries.data(),
                   good.output.data(), 20,           workspace.data()};
  const auto plan = [&](const Call& call) {
    stage::plan_ragged(call.pages.shape, call.batch, call.query_starts, call.num_tokens, call.workspace,
                       good.stream.get());
  };
  const auto attend = [&](const Call& call) {
    stage::ragged_attention(call.pages, call.batch, call.query_starts, call.queries, call.output, call.num_tokens,
                            call.workspace, good.stream.get());
  };
  const auto off_by_2 = [](const void* pointer) {
    return const_cast<void*>(static_cast<const void*>(static_cast<const std::byte*>(pointer) + 2));
  };
  const auto wrong = [&](const char* what, const std::function<void(Call&)>& change, bool plan_too) {
    CAPTURE(what);
    Call call = right;
    change(call);
    CHECK_THROWS_AS(attend(call), common::CheckError);
    if (plan_too) {
      CHECK_THROWS_AS(plan(call), common::CheckError);
    }
  };
  wrong(
      "block size", [](Call& call) { call.pages.shape.block_size = 12; }, true);
  wrong(
      "head_dim", [](Call& call) { call.pages.shape.head_dim = 80; }, true);
  wrong(
      "no blocks", [](Call& call) { call.pages.shape.num_blocks = 0; }, true);
  wrong(
      "uneven groups", [](Call& call) { call.batch.num_heads = 7; }, true);
  wrong(
      "group of 17", [](Call& call) { call.batch.num_heads = 34; }, true);
  wrong(
      "sequences", [](Call& call) { call.batch.num_sequences = -1; }, true);
  wrong(
      "no lengths", [](Call& call) { call.batch.context_lengths = nullptr; }, true);
  wrong(
      "no tables", [](Call& call) { call.batch.block_tables = nullptr; }, true);
  wrong(
      "empty tables", [](Call& call) { call.batch.max_blocks_per_sequence = 0; }, true);
  wrong(
      "tokens", [](Call& call) { call.num_tokens = -1; }, true);
  wrong(
      "no query_starts", [](Call& call) { call.query_starts = nullptr; }, true);
  wrong(
      "no workspace", [](Call& call) { call.workspace = nullptr; }, true);
  wrong(
      "workspace", [&](Call& call) { call.workspace = off_by_2(call.workspace); }, true);
  wrong(
      "no keys", [](Call& call) { call.pages.keys = nullptr; }, false);
  wrong(
      "values", [&](Call& call) { call.pages.values = off_by_2(call.pages.values); }, false);
  wrong(
      "no queries", [](Call& call) { call.queries = nullptr; }, false);
  wrong(
      "queries", [&](Call& call) { call.queries = off_by_2(call.queries); }, false);
  wrong(
      "no output", [](Call& call) { call.output = nullptr; }, false);
  wrong(
      "output", [&](Call& call) { call.output = off_by_2(call.output); }, false);
  // A task has 128 rows here: 2^31 tokens x 16 query heads make 2^28 of them, for each of 16 kv heads.
  wrong(
      "too many tokens for one launch",
      [](Call& call) {
        call.num_tokens = std::numeric_limits<int>::max();
        call.pages.shape.num_kv_heads = 16;
        call.batch.num_heads = 256;
      },
      false);
  Call nothing = right;
  nothing.batch.num_sequences = 0;
  CHECK_NOTHROW(plan(nothing));
  CHECK_NOTHROW(attend(nothing));
  nothing = right;
  nothing.num_tokens = 0;
  CHECK_NOTHROW(plan(nothing));
  CHECK_NOTHROW(attend(nothing));

  good.stream.synchronize();
  const auto untouched = [](const std::vector<std::byte>& bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](std::byte x) { return x == std::byte{0xFF}; });
  };
  CHECK(untouched(workspace.download()));
  CHECK(untouched(good.output.download()));
}
