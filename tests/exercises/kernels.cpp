// The kernels of stage 7, one at a time, on the executor: for those who write them. Each has to be right, and to ask of
// memory no more than the idea needs. A count here is a limit: what the course's kernel asks for, put together in the
// comment beside it.
#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "common/cuda/executor/counts.h"
#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_ladder_pages.h"
#include "tests/support/catch.h"

namespace {

using common::DeviceArray;
using common::executor::Counts;
using stage::PageShape;
using stage::ScalarType;
using tests::GpuBatch;

// K and V as Llama 3 8B has them: 8 kv heads of 128 dimensions.
constexpr PageShape kShape{
    .num_blocks = 4, .num_kv_heads = 8, .block_size = 16, .head_dim = 128, .type = ScalarType::kBFloat16};

const stage::LadderStep& step(int number) { return stage::ladder()[static_cast<std::size_t>(number - 1)]; }

// Contexts that end before, at and behind the end of a block, an absent sequence, and one that is cut into pieces.
void check_step(int number) {
  const std::vector<std::vector<int>> batches = {{1, 15, 0, 16, 17, 48, 127, 129}, {1025}};
  for (const std::vector<int>& lengths : batches) {
    for (const int group : {1, 3, 4, 8}) {
      GpuBatch batch({.group = group, .context_lengths = lengths, .query_lengths = {}});
      const tests::PagesInOrder pages(batch);
      const std::string wrong = batch.check(tests::run_step(step(number), batch, pages));
      CAPTURE(group, lengths.front(), wrong);
      CHECK(wrong.empty());
    }
  }
}

// What a step asks of memory for 1,024 tokens and 4 query heads on one kv head, as build/kernel_count has it. The
// numbers below: a row of K or V is 256 bytes, so a request of 32 times 16 bytes is 2 rows, in 16 sectors. K and V of
// the context are 2 x 1,024 rows: 1,024 requests, 16,384 sectors. A thread block has 4 warps.
Counts count_step(int number) {
  const GpuBatch batch({.num_kv_heads = 1, .group = 4, .context_lengths = {1024}, .query_lengths = {}});
  const tests::PagesInOrder pages(batch);
  return common::executor::count([&] { (void)tests::run_step(step(number), batch, pages); });
}

}  // namespace

TEST_CASE("write to slots: a request of a warp is 512 bytes in 16 sectors") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted under a sanitizer");
  }
  constexpr int kTokens = 16;
  const DeviceArray<std::byte> rows(std::vector<std::byte>(std::size_t{kTokens} * 8 * 256));
  std::vector<int> order(kTokens);
  for (int token = 0; token < kTokens; ++token) {
    order[static_cast<std::size_t>(token)] = (token * 5 + 3) % 64;
  }
  const DeviceArray<int> slots(order);
  const auto keys = tests::poisoned(kShape.elements(), kShape.type);
  const auto values = tests::poisoned(kShape.elements(), kShape.type);
  const common::Stream stream;
  const Counts counts = common::executor::count([&] {
    stage::kPlainKernels.write_to_slots({keys.data(), values.data(), kShape}, rows.data(), rows.data(), 8 * 128,
                                        slots.data(), kTokens, stream.get());
    stream.synchronize();
  });
  // 16 tokens of 8 rows of 16 vectors are 2,048 threads, 64 warps. Each stores K and V, and loads both and a slot.
  CHECK(counts.global_stores.requests <= 128);
  CHECK(counts.global_stores.units <= 128 * 16);
  CHECK(counts.global_loads.requests <= 128 + 64);
  CHECK(counts.global_loads.units <= 128 * 16 + 64);
}

TEST_CASE("block copy: a request of a warp is 512 bytes in 16 sectors") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted under a sanitizer");
  }
  const auto keys = tests::poisoned(kShape.elements(), kShape.type);
  const auto values = tests::poisoned(kShape.elements(), kShape.type);
  const std::vector<stage::PageCopy> copies = {{0, 3}};
  const common::Stream stream;
  const Counts counts = common::executor::count([&] {
    stage::kPlainKernels.copy_blocks(keys.data(), values.data(), 1, kShape, copies.data(), 1, stream.get());
    stream.synchronize();
  });
  // A block is 16 x 8 rows of 16 vectors, 2,048 threads again. The list is a parameter, not in memory.
  CHECK(counts.global_loads.requests <= 128);
  CHECK(counts.global_loads.units <= 128 * 16);
  CHECK(counts.global_stores.requests <= 128);
  CHECK(counts.global_stores.units <= 128 * 16);
}

TEST_CASE("plain attention: decodes beside chunks of prompts") {
  for (const ScalarType type : {ScalarType::kFloat32, ScalarType::kBFloat16}) {
    for (const int head_dim : {40, 128}) {
      GpuBatch batch({.type = type,
                      .group = 3,
                      .head_dim = head_dim,
                      .context_lengths = {1, 17, 0, 40, 33},
                      .query_lengths = {1, 1, 0, 9, 0}});
      CAPTURE(tests::name_of(type), head_dim);
      CHECK(batch.check(batch.attend(stage::kPlainKernels, 2).output) == tests::kNoDifference);
    }
  }
}

TEST_CASE("step 2 is right") { check_step(2); }

TEST_CASE("step 2: an eighth of the requests, and all of each sector is used") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted under a sanitizer");
  }
  const Counts counts = count_step(2);
  // For each of the 4 heads, K and V: 1,024 requests. The block table, once for each of them: 1,024 of a sector. The
  // scores, in the second pass: 512 of a sector. For each of the 16 warps: a length, where the table begins (a sector
  // each), and the query, 8 sectors.
  CHECK(counts.global_loads.requests <= 4 * (1024 + 1024 + 512) + 16 * 3);
  CHECK(counts.global_loads.units <= 4 * (16384 + 1024 + 512) + 16 * 10);
  CHECK(counts.global_loads.units == counts.global_loads.ideal);
}

TEST_CASE("step 3 is right") { check_step(3); }

TEST_CASE("step 3: one pass, and no score goes through memory") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted under a sanitizer");
  }
  const Counts counts = count_step(3);
  // As step 2, but the block table once for a row of K and V together, and no scores.
  CHECK(counts.global_loads.requests <= 4 * (1024 + 512) + 16 * 3);
  CHECK(counts.global_loads.units <= 4 * (16384 + 512) + 16 * 10);
  // Only the output is written: 16 warps store 32 numbers of 2 bytes each, in 2 sectors.
  CHECK(counts.global_stores.requests <= 16);
  CHECK(counts.global_stores.units <= 32);
}

TEST_CASE("step 4 is right") { check_step(4); }

TEST_CASE("step 4: as many pieces as fill the device") {
  constexpr std::size_t kPartialBytes = 130 * sizeof(float);  // 128 sums, the largest score and the sum
  const auto partials = [](int num_kv_heads, const std::vector<int>& lengths) {
    const GpuBatch batch({.num_kv_heads = num_kv_heads, .context_lengths = lengths, .query_lengths = {}});
    return step(4).workspace_bytes(batch.pages().shape, batch.batch()) / kPartialBytes;
  };
  // 132 multiprocessors with room for 8 thread blocks each are 1,056 places, and there are 4 query heads to a kv head.
  CHECK(partials(1, {1024}) == 4 * 8);                    // 264 places for each head, but only 8 pieces of 128 tokens
  CHECK(partials(8, {8192}) == 32 * 33);                  // 33 places for each head
  CHECK(partials(8, {1024, 1024, 1024}) == 96 * 8);       // 11 places, 8 pieces of 128 tokens
  CHECK(partials(8, std::vector<int>(32, 256)) == 1024);  // one place for each head: nothing is cut
}

TEST_CASE("step 5 is right") { check_step(5); }

TEST_CASE("step 5: K and V are loaded once for the group") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted under a sanitizer");
  }
  const Counts counts = count_step(5);
  // K and V once: 1,024 requests; the block table for each row: 512. The context is in 8 pieces, so 32 warps walk it,
  // each with a length, where the table begins, and 4 queries of 8 sectors. The merge: 16 warps load a length, and of 8
  // pieces the largest score (twice), the sum, and 128 bytes of output, which take 5 sectors where they do not begin at
  // a multiple of 32.
  CHECK(counts.global_loads.requests <= 1024 + 512 + 32 * 6 + 16 * (1 + 8 * 4));
  CHECK(counts.global_loads.units <= 16384 + 512 + 32 * 34 + 16 * (1 + 8 * 8));
}

TEST_CASE("step 6 is right") { check_step(6); }

TEST_CASE("step 6: 16 products for a tile, and no bank conflicts") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted under a sanitizer");
  }
  const Counts counts = count_step(6);
  // 64 tiles: 8 products of 16 dimensions for the scores, and 8 for the output. Each has an operand to load.
  CHECK(counts.matrix_products <= 64 * 16);
  CHECK(counts.matrix_loads <= 64 * 16);
  CHECK(counts.bank_conflicts() == 0);
  // Tiles are copied past the registers, 16 bytes at a time: K and V are 2 x 1,024 rows of 16 vectors.
  CHECK(counts.async_copies <= 2 * 1024 * 16);
}
