// The kernels of stage 7, one at a time, on the executor: for readers who write them. Each has to be right, and to ask
// of memory no more than the idea needs. A count here is a limit: what the course's kernel asks for, put together in
// the comment beside it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "common/cuda/executor/counts.h"
#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_ladder_pages.h"
#include "tests/support/catch.h"

namespace {

using common::DeviceArray;
using common::PageShape;
using common::ScalarType;
using common::executor::Counts;
using tests::GpuBatch;

// K and V as Llama 3 8B has them: 8 kv heads of 128 dimensions.
constexpr PageShape kShape{
    .num_blocks = 4, .num_kv_heads = 8, .block_size = 16, .head_dim = 128, .type = ScalarType::kBFloat16};

const stage::LadderStep& step(int number) { return stage::ladder()[static_cast<std::size_t>(number - 1)]; }

// Contexts that end before, at and behind the end of a block, an absent sequence, and contexts that are cut into pieces
// beside some that are too short for it.
constexpr int kContexts[] = {1, 15, 0, 16, 17, 48, 127, 257};

// Weights are at most 2^127, and their sum at least 2^-126, so scores beyond that have to be taken relative to the
// largest: all very small; or large first, small then, and larger still at the end.
std::vector<std::vector<float>> large_scores() {
  std::vector<float> steps(96, 200.0F);
  std::fill(steps.begin() + 32, steps.begin() + 64, -200.0F);
  std::fill(steps.begin() + 64, steps.end(), 400.0F);
  return {{-300.0F}, steps};
}

void check_output(int number, const tests::BatchSpec& spec) {
  GpuBatch batch(spec);
  const tests::PagesInOrder pages(batch);
  CHECK(batch.check(tests::run_step(step(number), batch, pages)) == tests::kNoDifference);
}

void check_step(int number) {
  for (const int group : {1, 3, 4, 8}) {
    CAPTURE(group);
    check_output(
        number, {.group = group, .context_lengths = {std::begin(kContexts), std::end(kContexts)}, .query_lengths = {}});
    check_output(number, {.group = group, .context_lengths = {1025}, .query_lengths = {}});
  }
  for (const std::vector<float>& shifts : large_scores()) {
    const float first_score = shifts.front();
    CAPTURE(first_score);
    check_output(
        number,
        {.num_kv_heads = 1, .context_lengths = {5, 40, 64, 96, 257}, .query_lengths = {}, .score_shifts = shifts});
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
  constexpr int kTokens = 64;  // more than a warp has threads, in case that it takes one vector of many tokens
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
  // 64 tokens of 8 rows of 16 vectors are 8,192 threads, 256 warps. Each stores K and V, and loads both and a slot.
  CHECK(counts.global_stores.requests <= 2 * 256);
  CHECK(counts.global_loads.requests <= 3 * 256);
  const std::int64_t sectors_stored = counts.global_stores.units;
  const std::int64_t sectors_loaded = counts.global_loads.units;
  CHECK(sectors_stored <= 256 * (2 * 16));
  CHECK(sectors_loaded <= 256 * (2 * 16 + 1));
}

TEST_CASE("block copy: a request of a warp is 512 bytes in 16 sectors") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted under a sanitizer");
  }
  const auto keys = tests::poisoned(kShape.elements(), kShape.type);
  const auto values = tests::poisoned(kShape.elements(), kShape.type);
  const std::vector<common::PageCopy> copies = {{0, 3}};
  const common::Stream stream;
  const Counts counts = common::executor::count([&] {
    stage::kPlainKernels.copy_blocks(keys.data(), values.data(), 1, kShape, copies.data(), 1, stream.get());
    stream.synchronize();
  });
  // A block is 16 x 8 rows of 16 vectors, 2,048 threads again. The list is a parameter, not in memory.
  CHECK(counts.global_loads.requests <= 128);
  CHECK(counts.global_stores.requests <= 128);
  const std::int64_t sectors_loaded = counts.global_loads.units;
  const std::int64_t sectors_stored = counts.global_stores.units;
  CHECK(sectors_loaded <= 128 * 16);
  CHECK(sectors_stored <= 128 * 16);
}

TEST_CASE("block copy: addresses of more than 32 bits") {
  // The blocks that are copied are 64 GB behind where the pages begin. Only these two exist: what lies before them is
  // never accessed, so it takes no memory.
  constexpr std::int64_t kFirst = std::int64_t{1} << 21;
  PageShape shape = kShape;
  shape.num_blocks = kFirst + 2;
  const auto block_bytes = static_cast<std::size_t>(shape.elements_per_block() * common::bytes_of(shape.type));
  CHECK(kFirst * static_cast<std::int64_t>(block_bytes) / 16 == std::int64_t{1} << 32);
  std::vector<std::byte> contents(2 * block_bytes);
  for (std::size_t i = 0; i < block_bytes; ++i) {
    contents[i] = static_cast<std::byte>(i % 251);
  }
  const DeviceArray<std::byte> keys(contents);
  const DeviceArray<std::byte> values(contents);
  const auto pages_of = [&](const DeviceArray<std::byte>& blocks) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address outside of the array is what is wanted
    return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(blocks.data()) -
                                   static_cast<std::uintptr_t>(kFirst) * block_bytes);
  };
  const std::vector<common::PageCopy> copies = {{static_cast<int>(kFirst), static_cast<int>(kFirst) + 1}};
  const common::Stream stream;
  stage::kPlainKernels.copy_blocks(pages_of(keys), pages_of(values), 1, shape, copies.data(), 1, stream.get());
  stream.synchronize();
  std::copy_n(contents.begin(), block_bytes, contents.begin() + static_cast<std::ptrdiff_t>(block_bytes));
  const tests::Extents parts = {{"block", 2}, {"vector", static_cast<std::int64_t>(block_bytes) / 16}};
  CHECK(tests::compare_bytes("K", keys.download(), contents, parts) == tests::kNoDifference);
  CHECK(tests::compare_bytes("V", values.download(), contents, parts) == tests::kNoDifference);
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

TEST_CASE("plain attention: scores far below and above 0") {
  for (const std::vector<float>& shifts : large_scores()) {
    const float first_score = shifts.front();
    CAPTURE(first_score);
    GpuBatch batch(
        {.num_kv_heads = 1, .context_lengths = {5, 40, 64, 96}, .query_lengths = {}, .score_shifts = shifts});
    CHECK(batch.check(batch.attend(stage::kPlainKernels, 4).output) == tests::kNoDifference);
  }
}

TEST_CASE("plain attention: each position is read by one of the eight warps") {
  if (!common::executor::can_count()) {
    SKIP_TEST("accesses are not counted under a sanitizer");
  }
  const auto loads = [](int length) {
    const GpuBatch batch({.num_kv_heads = 1, .group = 1, .context_lengths = {length}, .query_lengths = {}});
    (void)batch.attend(stage::kPlainKernels, 1);  // writes the pages
    return common::executor::count([&] { (void)batch.attend(stage::kPlainKernels, 1); }).global_loads.requests;
  };
  // A position: 4 requests for K and 4 for V, of 32 dimensions each, and one for the block table. The query, the new
  // token's row, and what it takes to find the sequence, are the same for each length.
  CHECK(loads(128) - loads(64) <= 64 * (4 + 4 + 1));
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
    return step(4).workspace_bytes(batch.shape(), batch.batch()) / kPartialBytes;
  };
  // 132 multiprocessors with room for 8 thread blocks each are 1,056 places, and there are 4 query heads to a kv head.
  CHECK(partials(1, {1024}) == 4 * 8);                    // 264 places for each head, but only 8 pieces of 128 tokens
  CHECK(partials(1, {128}) == 4 * 1);                     // 8 blocks: a piece
  CHECK(partials(1, {129}) == 4 * 2);                     // 9 blocks: two, since blocks / 8 is rounded up
  CHECK(partials(8, {8192}) == 32 * 33);                  // 33 places for each head
  CHECK(partials(8, {1024, 1024, 1024}) == 96 * 8);       // 11 places, 8 pieces of 128 tokens
  CHECK(partials(8, std::vector<int>(32, 256)) == 1024);  // one place for each head: nothing is cut

  if (!common::executor::can_count()) {
    return;
  }
  // What the kernels store: a partial result for each query head and each of num_pieces' pieces, and the output.
  const auto pieces_stored = [](const std::vector<int>& lengths) {
    const GpuBatch batch({.num_kv_heads = 1, .context_lengths = lengths, .query_lengths = {}});
    const tests::PagesInOrder pages(batch);
    const Counts counts = common::executor::count([&] { (void)tests::run_step(step(4), batch, pages); });
    const auto output_bytes = static_cast<std::int64_t>(lengths.size()) * 4 * 128 * 2;
    return static_cast<double>(counts.global_stores.bytes - output_bytes) / (4 * kPartialBytes);
  };
  CHECK(pieces_stored({1024}) == 8);
  CHECK(pieces_stored({1024, 40}) == 8 + 3);  // 40 tokens are 3 blocks, the last one filled in part: 3 pieces
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
