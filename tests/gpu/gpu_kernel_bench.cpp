// What the kernel benchmark is made of: a cache without blocks to compare with, and the batches it measures.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "tests/bench/cold_batches.h"
#include "tests/bench/contiguous_attention.h"
#include "tests/gpu/gpu_fixtures.h"
#include "tests/support/catch.h"

namespace {

using tests::GpuBatch;
using tests::ScalarType;

// The batch's K or V, a row of `capacity` tokens for each sequence and head: [sequence, kv_head, capacity, head_dim].
// What no page holds stays NaN. The pages' blocks are copied as they are: the order of the vectors inside a row depends
// on the row's number modulo 8, which is the same in a block and in a longer row.
std::vector<std::byte> without_blocks(const void* pages, const common::PageShape& shape,
                                      const std::vector<int>& lengths, const std::vector<int>& tables,
                                      const std::vector<int>& table_starts, int capacity) {
  const std::size_t block_bytes =
      2 * static_cast<std::size_t>(shape.block_size) * static_cast<std::size_t>(shape.head_dim);
  const auto heads = static_cast<std::size_t>(shape.num_kv_heads);
  const auto blocks_of_row = static_cast<std::size_t>(capacity / shape.block_size);
  std::vector<std::byte> from(static_cast<std::size_t>(shape.elements()) * 2);
  CUDA_CHECK(cudaMemcpy(from.data(), pages, from.size(), cudaMemcpyDeviceToHost));
  std::vector<std::byte> rows(lengths.size() * heads * blocks_of_row * block_bytes, std::byte{0xFF});
  for (std::size_t row = 0; row < lengths.size() * heads; ++row) {
    const std::size_t sequence = row / heads;
    for (std::size_t i = 0; static_cast<int>(i) * shape.block_size < lengths[sequence]; ++i) {
      const auto block = static_cast<std::size_t>(tables[static_cast<std::size_t>(table_starts[sequence]) + i]);
      std::memcpy(&rows[(row * blocks_of_row + i) * block_bytes], &from[(block * heads + row % heads) * block_bytes],
                  block_bytes);
    }
  }
  return rows;
}

}  // namespace

TEST_CASE("Decode attention: a cache without blocks gives the bits of pages", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const int group = GENERATE(4, 16);
  const int num_kv_heads = GENERATE(2, 40);  // of 5 sequences: few heads, and more than multiprocessors
  const std::vector<int> lengths = {1000, 77, 0, 16, 300};
  GpuBatch batch({.num_kv_heads = num_kv_heads, .group = group, .context_lengths = lengths, .query_lengths = {}});
  const std::vector<float> expected = batch.decode();
  const std::vector<int> tables = batch.block_tables();
  const std::vector<int> starts = batch.table_starts();
  constexpr int kCapacity = 1024;
  common::Pages cache = batch.pages_of(common::kProductionKernels);
  const common::DeviceArray<std::byte> keys(
      without_blocks(cache.keys, cache.shape, lengths, tables, starts, kCapacity));
  const common::DeviceArray<std::byte> values(
      without_blocks(cache.values, cache.shape, lengths, tables, starts, kCapacity));
  const common::DeviceArray<std::byte> workspace(common::decode_workspace_bytes(cache.shape, batch.batch()));
  common::plan_decode(cache.shape, batch.batch(), workspace.data(), batch.stream.get());
  cache.keys = keys.data();
  cache.values = values.data();
  cache.shape.num_blocks = static_cast<std::int64_t>(lengths.size());
  cache.shape.block_size = kCapacity;
  common::BatchArrays without_table = batch.batch();
  without_table.block_tables = without_table.context_lengths;  // not read
  CUDA_CHECK(cudaMemset(batch.output.data(), tests::kUnwritten, batch.output.size()));
  CUDA_CHECK(cudaDeviceSynchronize());
  stage::contiguous_attention(cache, without_table, batch.queries.data(), batch.output.data(), workspace.data(),
                              batch.stream.get());
  batch.stream.synchronize();
  const std::vector<float> result = tests::to_floats(batch.output.download(), ScalarType::kBFloat16);
  CHECK(std::memcmp(result.data(), expected.data(), result.size() * sizeof(float)) == 0);
  CHECK(batch.check(result) == tests::kNoDifference);
}

// This needs no GPU.
TEST_CASE("A cell is sequences x tokens, and its page sets exceed the cache", "[gpu]") {
  CHECK(stage::name_of(stage::parse_cell("8x1024")) == "8x1024");
  CHECK(stage::name_of(stage::parse_cell("32xragged")) == "32xragged");
  for (const char* text : {"", "8", "8x", "x8", "8x0", "0x8", "8x-1", "8x1024 ", "8xsome", "2000x8", "8x1x1"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(stage::parse_cell(text), common::InputError);
  }
  const std::vector<int> ragged = stage::lengths_of({.batch = 32, .context = 0});
  CHECK(*std::min_element(ragged.begin(), ragged.end()) == 250);
  CHECK(*std::max_element(ragged.begin(), ragged.end()) == 32765);
  CHECK(!std::is_sorted(ragged.begin(), ragged.end()));
  const stage::HeadShape shape;
  CHECK(stage::kv_bytes_of(shape, {.batch = 1, .context = 1024}) == 4 << 20);
  for (const char* text : {"1x1024", "8x8192", "128x8192", "32xragged"}) {
    const stage::BenchCell cell = stage::parse_cell(text);
    CAPTURE(text);
    CHECK(stage::num_sets_of(shape, cell) % 2 == 0);
    CHECK(stage::num_sets_of(shape, cell) * stage::kv_bytes_of(shape, cell) >= 600'000'000);
  }
}
