// production/'s decode attention against float64 on the same rounded inputs, over everything that callers may choose.
#include <algorithm>
#include <array>
#include <numeric>

#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_hand_worked.h"
#include "tests/gpu/gpu_refused.h"
#include "tests/support/catch.h"
#include "tests/support/stage_header.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include "common/paged/decode_plan.h"
#include "common/paged/decode_ring.h"
#include "common/paged/decode_shape.h"
// clang-format on

namespace {

using tests::BatchSpec;
using tests::GpuBatch;
using tests::ScalarType;

// All boundaries of blocks and tiles, and sequences that are not there.
BatchSpec boundary_batch(ScalarType type, int head_dim, int block_size, int group) {
  return {
      .type = type,
      .num_kv_heads = 2,
      .group = group,
      .head_dim = head_dim,
      .block_size = block_size,
      .context_lengths = {1, block_size - 1, 0, block_size, block_size + 1, 3 * block_size, 15, 16, 17, 100, 0, 257},
      .query_lengths = {},
      .seed = static_cast<unsigned>(group)};
}

// If decode attention stores the last tokens itself, the result has the same bits and the pages are the same.
void check_new_rows(const GpuBatch& batch, const std::vector<float>& expected,
                    const common::DecodeOptions& options = {}, int num_runs = 1) {
  const auto appended = batch.decode_new_rows(options, num_runs);
  CHECK(std::memcmp(expected.data(), appended.output.data(), expected.size() * sizeof(float)) == 0);
  CHECK(appended.pages_are_equal);
}

// How many tiles all shares of the plan have together.
int planned_tiles(const GpuBatch& batch) {
  const common::PageShape& shape = batch.shape();
  const common::DeviceArray<std::byte> memory(common::decode_workspace_bytes(shape, batch.batch()));
  common::plan_decode(shape, batch.batch(), memory.data(), batch.stream.get());
  batch.stream.synchronize();
  const common::DecodeShape decode = common::decode_shape(shape, batch.batch(), {});
  const common::DecodeWorkspace workspace = common::decode_workspace(memory.data(), decode.num_workers, decode.group,
                                                                     shape.head_dim, batch.batch().num_sequences);
  std::vector<common::TileRange> shares(static_cast<std::size_t>(decode.num_workers));
  CUDA_CHECK(cudaMemcpy(shares.data(), workspace.shares, shares.size() * sizeof(shares[0]), cudaMemcpyDeviceToHost));
  return std::accumulate(shares.begin(), shares.end(), 0,
                         [](int sum, const common::TileRange& share) { return sum + share.num_tiles; });
}

}  // namespace

TEST_CASE("Decode attention: weights 1 and 3, computed by hand", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  tests::HandWorked example(type);
  CHECK(example.check(example.decode(), tests::HandWorked::kLastToken) == tests::kNoDifference);
}

TEST_CASE("Decode attention: every type, head_dim, group and block size (stage 7, invariant 2)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto [type, head_dim, block_size] = GENERATE(from_range(tests::kernel_shapes()));
  for (const int group : tests::some_of({3, 16}, {1, 2, 3, 4, 5, 7, 8, 9, 12, 16})) {
    CAPTURE(tests::name_of(type), head_dim, block_size, group);
    GpuBatch batch(boundary_batch(type, head_dim, block_size, group));
    const std::vector<float> result = batch.decode();
    CHECK(batch.check(result) == tests::kNoDifference);
    check_new_rows(batch, result);
  }
}

TEST_CASE("Decode attention: a query sees its window, and nothing in front of it is read", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto [type, head_dim, block_size] = GENERATE(from_range(tests::kernel_shapes({16, 64})));
  for (const int group : tests::some_of({3}, {4, 16})) {
    for (const int window : tests::some_of({1, 17}, {7, 64, 257})) {
      CAPTURE(tests::name_of(type), head_dim, block_size, group, window);
      BatchSpec spec = boundary_batch(type, head_dim, block_size, group);
      spec.window = window;
      GpuBatch batch(spec);
      const std::vector<float> result = batch.decode();
      CHECK(batch.check(result) == tests::kNoDifference);
      check_new_rows(batch, result);
    }
  }
}

TEST_CASE("Decode attention: a window in blocks of all sizes, however the work is cut", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int block_size = GENERATE(8, 32, 64);
  const int window = GENERATE(from_range(tests::some_of({4, 40}, {1, 4, 9, 16, 40, 129, 512})));
  if (type == ScalarType::kFloat8 && block_size == 8) {
    return;  // there are no such pages
  }
  // Lengths for which windows begin in front of, at and behind the borders of blocks and of tiles.
  GpuBatch batch({.type = type,
                  .num_kv_heads = 3,
                  .group = tests::kOnExecutor ? 9 : 4,
                  .head_dim = 64,
                  .block_size = block_size,
                  .window = window,
                  .context_lengths = tests::some_of({70, 1, 0, 44, 68, 45, 0},
                                                    {700, 1, 0, 2000, 33, 16, 1024, 512, 529, 520, 521, 528, 0}),
                  .query_lengths = {}});
  for (const int num_workers : tests::some_of({1, 3, 40}, {1, 2, 3, 7, 40, 132, 264, 1000})) {
    CAPTURE(tests::name_of(type), block_size, window, num_workers);
    const std::vector<float> once = batch.decode({.num_workers = num_workers});
    CHECK(batch.check(once) == tests::kNoDifference);
    const std::vector<float> again = batch.decode({.num_workers = num_workers}, tests::repeats(5));
    CHECK(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("Decode attention: a long context costs what its window costs", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // Equal lengths, lengths that differ, and a head for each warp: the plan cuts each in its way.
  const auto many = static_cast<std::size_t>(12 * common::device_limits().num_multiprocessors);
  const auto lengths =
      GENERATE_COPY(std::vector<int>{1600, 1600}, std::vector<int>{1600, 48, 0, 700, 90}, std::vector<int>(many, 100));
  const int window = 64;
  std::vector<int> seen = lengths;
  int num_split = 0;  // windows that begin within a tile reach into one tile more
  for (int& length : seen) {
    num_split += length > window && length % 16 != 0 ? 1 : 0;
    length = std::min(length, window);
  }
  BatchSpec spec{
      .num_kv_heads = 1, .group = 1, .head_dim = 32, .window = window, .context_lengths = lengths, .query_lengths = {}};
  const GpuBatch batch(spec);
  spec.window = 0;
  spec.context_lengths = seen;
  const GpuBatch short_batch(spec);
  CHECK(planned_tiles(batch) == planned_tiles(short_batch) + num_split);
}

TEST_CASE("Decode attention: a new row without a slot is seen and not stored", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  GpuBatch batch({.type = type, .context_lengths = {1, 16, 17, 0, 300}, .query_lengths = {}});
  const std::vector<float> expected = batch.decode();
  const auto appended = batch.decode_new_rows({}, 1, false);
  CHECK(std::memcmp(expected.data(), appended.output.data(), expected.size() * sizeof(float)) == 0);
  CHECK(appended.pages_are_equal);
}

TEST_CASE("Decode attention: what its thread blocks need of shared memory is known to the byte") {
  const auto bytes = [](ScalarType type, int head_dim, int group) {
    return common::decode_shared_bytes(common::decode_ring(type, head_dim, group, true), type, head_dim, group);
  };
  // A thread block has 99 KB on an RTX 3090 or 4090, and 163 KB on an A100.
  CHECK(bytes(ScalarType::kBFloat16, 128, 7) == 100768);
  CHECK(bytes(ScalarType::kBFloat16, 128, 7) <= 99 * 1024);
  CHECK(bytes(ScalarType::kBFloat16, 128, 8) > 99 * 1024);
  CHECK(bytes(ScalarType::kFloat8, 256, 16) <= 163 * 1024);
  for (const ScalarType type : {ScalarType::kBFloat16, ScalarType::kFloat8}) {
    for (const int head_dim : {32, 64, 96, 128, 256}) {
      for (int group = 1; group <= 16; ++group) {
        CAPTURE(tests::name_of(type), head_dim, group);
        const auto ring = common::small_decode_ring(type, head_dim, group);
        CHECK(common::decode_shared_bytes(ring, type, head_dim, group) <= 99 * 1024);
      }
    }
  }
}

// As on an RTX 3090 or 4090. On a GPU with more, the limit is forced; but not every build has these kernels.
TEST_CASE("Decode attention: thread blocks with 99 KB of shared memory (stage 7, invariant 2)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const tests::SharedMemoryLimit limit(99 << 10);
  const auto [type, head_dim, block_size] = GENERATE(from_range(tests::kernel_shapes()));
  for (const int group : tests::some_of({8, 16}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16})) {
    CAPTURE(tests::name_of(type), head_dim, block_size, group);
    const auto usual = common::decode_ring(type, head_dim, group, true);
    const bool is_usual = common::decode_shared_bytes(usual, type, head_dim, group) <= 99 * 1024;
    if (tests::kOnExecutor && is_usual) {
      continue;  // the kernels of other tests
    }
    const common::PageShape shape{.num_kv_heads = 2, .block_size = block_size, .head_dim = head_dim, .type = type};
    const std::string reason = common::kProductionKernels.unsupported(shape, 2 * group);
    if (!common::serves_small_memory()) {
      CHECK((is_usual || !reason.empty()));  // ragged attention may need more than decode
      continue;
    }
    REQUIRE(reason == "");
    GpuBatch batch(boundary_batch(type, head_dim, block_size, group));
    const std::vector<float> result = batch.decode();
    CHECK(batch.check(result) == tests::kNoDifference);
    check_new_rows(batch, result);
    const std::vector<float> cut = batch.decode({.num_workers = 40}, 2);  // several thread blocks share a head
    CHECK(batch.check(cut) == tests::kNoDifference);
  }
}

TEST_CASE("Decode attention: long contexts", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int group = GENERATE(from_range(tests::some_of({4}, {1, 4, 16})));
  CAPTURE(tests::name_of(type), group);
  GpuBatch batch({.type = type,
                  .num_kv_heads = 1,
                  .group = group,
                  .context_lengths = tests::some_of({2049, 5}, {8191, 8192, 32768, 8193, 5}),
                  .query_lengths = {}});
  CHECK(batch.check(batch.decode()) == tests::kNoDifference);
}

TEST_CASE("Decode attention: however the work is cut, the result is the same (stage 7, invariant 4)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int group = GENERATE(from_range(tests::some_of({3}, {1, 3, 4, 16})));
  const int head_dim = GENERATE(from_range(tests::some_of({128}, {32, 64, 96, 128, 256})));
  GpuBatch batch(
      {.type = type,
       .num_kv_heads = 3,
       .group = group,
       .head_dim = head_dim,
       .context_lengths = tests::some_of({70, 1, 0, 200, 33, 16, 0}, {700, 1, 0, 2000, 33, 16, 1024, 512, 0}),
       .query_lengths = {}});
  for (const int num_workers : tests::some_of({1, 3, 40, 132}, {1, 2, 3, 7, 40, 132, 264, 1000})) {
    CAPTURE(tests::name_of(type), group, head_dim, num_workers);
    const std::vector<float> once = batch.decode({.num_workers = num_workers});
    CHECK(batch.check(once) == tests::kNoDifference);
    // Repeated several times without a pause: every result has the same bits.
    const std::vector<float> again = batch.decode({.num_workers = num_workers}, tests::kOnExecutor ? 2 : 5);
    CHECK(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)) == 0);
    check_new_rows(batch, once, {.num_workers = num_workers}, tests::repeats(3));
  }
  // On few multiprocessors, with the large rings.
  for (const int num_multiprocessors : {1, 3}) {
    CAPTURE(tests::name_of(type), group, head_dim, num_multiprocessors);
    CHECK(batch.check(batch.decode({.num_multiprocessors = num_multiprocessors})) == tests::kNoDifference);
  }
}

TEST_CASE("Decode attention: shuffled pages give the bits of pages in order", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  BatchSpec spec{.type = type, .context_lengths = {1000, 77, 300}, .query_lengths = {}};
  GpuBatch shuffled(spec);
  spec.in_order = true;
  GpuBatch in_order(spec);
  const std::vector<float> a = shuffled.decode();
  const std::vector<float> b = in_order.decode();
  CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

TEST_CASE("Decode attention: a captured graph follows the lengths (stage 7, invariant 6)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch batch({.context_lengths = {90, 1, 40, 600}, .query_lengths = {}});
  const std::vector<float> expected = batch.decode();
  const common::PageShape shape = batch.shape();
  const common::DeviceArray<std::byte> workspace(common::decode_workspace_bytes(shape, batch.batch()));
  // Recorded for a batch in which every sequence is inactive …
  common::DeviceArray<int> lengths(std::vector<int>(4, 0));
  common::BatchArrays changing = batch.batch();
  changing.context_lengths = lengths.data();
  CUDA_CHECK(cudaMemset(batch.output.data(), 0xFF, batch.output.size()));
  CUDA_CHECK(cudaDeviceSynchronize());
  const common::Graph graph(batch.stream, [&] {
    common::plan_decode(shape, changing, workspace.data(), batch.stream.get());
    common::decode_attention(batch.pages_of(common::kProductionKernels), changing, batch.queries.data(),
                             batch.output.data(), workspace.data(), batch.stream.get());
    common::decode_attention(batch.pages_of(common::kProductionKernels), changing, batch.queries.data(),
                             batch.output.data(), workspace.data(), batch.stream.get(), {.overlap_previous = true});
  });
  graph.launch(batch.stream);
  batch.stream.synchronize();
  const auto untouched = tests::to_floats(batch.output.download(), shape.type);
  CHECK(std::all_of(untouched.begin(), untouched.end(), [](float x) { return std::isnan(x); }));
  // … and replayed for one in which none is.
  lengths.upload(std::vector<int>{90, 1, 40, 600});
  graph.launch(batch.stream);
  batch.stream.synchronize();
  const auto result = tests::to_floats(batch.output.download(), shape.type);
  CHECK(std::memcmp(result.data(), expected.data(), result.size() * sizeof(float)) == 0);
}

TEST_CASE("Decode attention: more sequences than the plan has threads", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  std::vector<int> lengths(1030);
  std::generate(lengths.begin(), lengths.end(), [s = -1]() mutable { return ++s % 3 == 0 ? 0 : 1 + s % 20; });
  lengths.back() = 100;
  GpuBatch batch({.num_kv_heads = 1, .group = 1, .head_dim = 64, .context_lengths = lengths, .query_lengths = {}});
  CHECK(batch.check(batch.decode()) == tests::kNoDifference);
}

// More heads than multiprocessors have a kernel of their own. Up to twice as many, a share is a head; beyond, if
// contexts are short and about equal, it is several whole heads, absent ones counted; and else equal parts of all
// tiles.
TEST_CASE("Decode attention: more heads than multiprocessors (stage 7, invariant 4)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({64}, {32, 64, 96, 128, 256})));
  // Wide groups with two dimensions alone: the reference, in float64 on the CPU, takes seconds for each thousand heads.
  const int group = !tests::kOnExecutor && (head_dim == 64 || head_dim == 128) ? 16 : 3;
  const int heads_per_multiprocessor = GENERATE(1, 2);
  CAPTURE(tests::name_of(type), head_dim, group, heads_per_multiprocessor);
  constexpr int kKvHeads = 8;
  const int num_sequences = heads_per_multiprocessor * common::device_limits().num_multiprocessors / kKvHeads + 5;
  std::vector<int> lengths(static_cast<std::size_t>(num_sequences));
  std::generate(lengths.begin(), lengths.end(), [s = -1]() mutable { return ++s % 7 == 3 ? 0 : 17 + s % 20; });
  BatchSpec spec{.type = type,
                 .num_kv_heads = kKvHeads,
                 .group = group,
                 .head_dim = head_dim,
                 .context_lengths = lengths,
                 .query_lengths = {}};
  GpuBatch even(spec);
  const std::vector<float> once = even.decode();
  CHECK(even.check(once) == tests::kNoDifference);
  const std::vector<float> again = even.decode({}, tests::repeats(3));
  CHECK(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)) == 0);
  check_new_rows(even, once);
  spec.context_lengths[1] = tests::kOnExecutor ? 500 : 1500;
  GpuBatch ragged(spec);
  const std::vector<float> of_ragged = ragged.decode();
  CHECK(ragged.check(of_ragged) == tests::kNoDifference);
  check_new_rows(ragged, of_ragged);
}

// About equal contexts of at least as many heads as there are warps: a warp has whole heads, absent ones counted.
TEST_CASE("Decode attention: as many heads as warps (stage 7, invariant 4)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  const int head_dim = GENERATE(from_range(tests::some_of({64}, {32, 64, 96, 128, 256})));
  const int group = GENERATE(3, 16);
  const int window = GENERATE(0, 33);
  CAPTURE(tests::name_of(type), head_dim, group, window);
  GpuBatch batch({.type = type,
                  .num_kv_heads = 8,
                  .group = group,
                  .head_dim = head_dim,
                  .window = window,
                  .context_lengths = {70, 80, 65, 0, 79, 80, 66, 70, 71, 72, 73},
                  .query_lengths = {}});
  for (const int num_workers : {1, 2}) {
    CAPTURE(num_workers);
    const std::vector<float> once = batch.decode({.num_workers = num_workers});
    CHECK(batch.check(once) == tests::kNoDifference);
    const std::vector<float> again = batch.decode({.num_workers = num_workers}, tests::repeats(3));
    CHECK(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)) == 0);
    check_new_rows(batch, once, {.num_workers = num_workers});
  }
}

TEST_CASE("Decode attention: a pool of more than 2^31 elements (stage 7, invariant 1)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  if (!tests::has_room_for(std::size_t{12} << 30)) {
    SKIP_TEST("the GPU has no room for it");
  }
  // 8 heads x 16 tokens x 128 dimensions: 2^14 elements a block, and the blocks in use lie past the 2^17th.
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  GpuBatch batch({.type = type,
                  .num_kv_heads = 8,
                  .context_lengths = {50, 1000},
                  .query_lengths = {},
                  .first_block = (1 << 17) + 5});
  CHECK(batch.shape().elements() > std::int64_t{1} << 31);
  CHECK(batch.check(batch.decode()) == tests::kNoDifference);
}

TEST_CASE("Decode attention: bad arguments are refused before anything is launched (stage 7, invariant 6)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch good({.context_lengths = {20}, .query_lengths = {}});
  const common::DeviceArray<std::byte> workspace =
      tests::poisoned(std::int64_t{1} << 23, ScalarType::kBFloat16);  // no plan may be written to it
  struct Call {
    common::Pages pages;
    common::BatchArrays batch;
    const void* queries;
    void* output;
    void* workspace;
  };
  const Call right{good.pages_of(common::kProductionKernels), good.batch(), good.queries.data(), good.output.data(),
                   workspace.data()};
  const auto plan = [&](const Call& call) {
    common::plan_decode(call.pages.shape, call.batch, call.workspace, good.stream.get());
  };
  const auto attend = [&](const Call& call) {
    common::decode_attention(call.pages, call.batch, call.queries, call.output, call.workspace, good.stream.get());
  };
  const auto wrong = tests::refused(right, plan, attend);
  for (const tests::BadBatch& bad : tests::bad_batches()) {
    wrong(bad.what, !bad.of_pages, [&](Call& call) { bad.spoil(call.pages, call.batch); });
  }
  wrong("no workspace", true, [](Call& call) { call.workspace = nullptr; });
  wrong("workspace", true, [](Call& call) { call.workspace = tests::off_by_2(call.workspace); });
  wrong("no queries", false, [](Call& call) { call.queries = nullptr; });
  wrong("queries", false, [](Call& call) { call.queries = tests::off_by_2(call.queries); });
  wrong("no output", false, [](Call& call) { call.output = nullptr; });
  wrong("output", false, [](Call& call) { call.output = tests::off_by_2(call.output); });
  for (const common::NewRows& rows :
       {common::NewRows{good.queries.data(), nullptr, 256, good.query_starts()},
        common::NewRows{tests::off_by_2(good.queries.data()), good.queries.data(), 256, good.query_starts()},
        common::NewRows{good.queries.data(), good.queries.data(), 248, good.query_starts()},
        common::NewRows{good.queries.data(), good.queries.data(), 257, good.query_starts()},
        common::NewRows{good.queries.data(), good.queries.data(), 256, nullptr}}) {
    CHECK_THROWS_AS(
        common::decode_attention(good.pages_of(common::kProductionKernels), good.batch(), good.queries.data(),
                                 good.output.data(), workspace.data(), good.stream.get(), {}, rows),
        common::CheckError);
  }
  Call nothing = right;
  nothing.batch.num_sequences = 0;
  CHECK_NOTHROW(plan(nothing));
  CHECK_NOTHROW(attend(nothing));

  good.stream.synchronize();
  CHECK(tests::is_poisoned(workspace));
  CHECK(tests::is_poisoned(good.output));
}

// Scales far apart in one context, among them rows of zeros: a weight that meets V is scaled before it is rounded, and
// must neither vanish nor overflow.
TEST_CASE("Decode attention: float8 rows of all sizes in one context", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const int group = GENERATE(from_range(tests::some_of({4}, {1, 4, 16})));
  const float value_size = GENERATE(1.0F, 1e-6F, 1e6F);
  CAPTURE(group, value_size);
  GpuBatch batch({.type = ScalarType::kFloat8,
                  .num_kv_heads = 2,
                  .group = group,
                  .context_lengths = tests::some_of({1, 16, 17, 300}, {1, 16, 17, 300, 2000}),
                  .query_lengths = {},
                  .value_sizes = {value_size, 0.0F, 30.0F * value_size, 0.01F * value_size, 3.0F * value_size}});
  CHECK(batch.check(batch.decode()) == tests::kNoDifference);
  CHECK(batch.check(batch.ragged()) == tests::kNoDifference);
}

// For tests/gpu/sanitize_gpu.sh: each kernel, for few heads, one of them cut, and for more heads than multiprocessors.
TEST_CASE("Decode attention: each kernel in a small case", "[.sanitize]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kKvHeads = 8;
  const auto type = GENERATE(ScalarType::kBFloat16, ScalarType::kFloat8);
  for (const int head_dim : {32, 64, 96, 128, 256}) {
    for (const int group : {3, 16}) {
      CAPTURE(tests::name_of(type), head_dim, group);
      BatchSpec spec{.type = type,
                     .num_kv_heads = 2,
                     .group = group,
                     .head_dim = head_dim,
                     .context_lengths = {500, 0, 17, 40},
                     .query_lengths = {}};
      GpuBatch few(spec);
      const std::vector<float> of_few = few.decode();
      CHECK(few.check(of_few) == tests::kNoDifference);
      check_new_rows(few, of_few);
      if (common::serves_small_memory()) {
        const tests::SharedMemoryLimit limit(99 << 10);
        CHECK(few.check(few.decode()) == tests::kNoDifference);
      }
      spec.num_kv_heads = kKvHeads;
      spec.context_lengths.assign(static_cast<std::size_t>(common::device_limits().num_multiprocessors / kKvHeads + 1),
                                  17);
      spec.context_lengths[1] = 300;
      GpuBatch many(spec);
      CHECK(many.check(many.decode()) == tests::kNoDifference);
    }
  }
}
