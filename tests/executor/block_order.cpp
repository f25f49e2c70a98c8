// Kernels whose thread blocks share work, with their blocks and threads in random orders: a block may store its part of
// a head long before or after its neighbours, and any of them may be the last one, which merges the parts.
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/cuda/executor/executor.h"
#include "tests/gpu/gpu_fixtures.h"
#include "tests/support/catch.h"

namespace {

using tests::GpuBatch;
using tests::ScalarType;

template <typename Work>
auto with_seed(std::uint64_t seed, const Work& work) {
  common::executor::set_seed(seed);
  auto result = work();
  common::executor::set_seed(0);
  return result;
}

}  // namespace

TEST_CASE("Block order: decode attention has the same bits, whichever thread block comes first or last") {
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  // One long sequence among short ones. For 12 heads, 8 thread blocks get equal parts of the line, which begin and end
  // inside of heads: such a thread block has parts of two. Of 40, each has a part of one head.
  const int num_workers = GENERATE(8, 40);
  GpuBatch batch(
      {.type = type, .num_kv_heads = 3, .group = 3, .context_lengths = {1000, 40, 0, 70}, .query_lengths = {}});
  const std::vector<float> in_order = batch.decode({.num_workers = num_workers});
  CHECK(batch.check(in_order) == tests::kNoDifference);
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    CAPTURE(tests::name_of(type), num_workers, seed);
    const auto shuffled = with_seed(seed, [&] { return batch.decode({.num_workers = num_workers}, 2); });
    CHECK(std::memcmp(in_order.data(), shuffled.data(), in_order.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("Block order: chunks of prompts are right, whichever thread block comes first or last") {
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  GpuBatch batch({.type = type,
                  .num_kv_heads = 2,
                  .group = 3,
                  .context_lengths = {300, 0, 90, 1, 40},
                  .query_lengths = {20, 2, 1, 1, 40}});
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    CAPTURE(tests::name_of(type), seed);
    CHECK(batch.check(with_seed(seed, [&] { return batch.ragged({}, 2); })) == tests::kNoDifference);
  }
}
