// A step's attention by every table of kernels, new tokens stored, against float64 on the same rounded inputs.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_hand_worked.h"
#include "tests/gpu/gpu_refused.h"
#include "tests/support/catch.h"
#ifdef COURSE_PRODUCTION
#include "common/paged/windowed_kernels.h"
#endif

namespace {

using tests::BatchSpec;
using tests::GpuBatch;
using tests::KernelTable;
using tests::ScalarType;

bool serves(const KernelTable& table, ScalarType type, int group) {
  return table.kernels->unsupported({.num_kv_heads = 1, .block_size = 16, .head_dim = 128, .type = type}, group)
      .empty();
}

#ifdef COURSE_PRODUCTION
const common::WindowedKernels kWindowed(stage::kPlainKernels);
#endif

// Those that are given windows, too.
std::vector<KernelTable> all_tables() {
  std::vector<KernelTable> tables = tests::kernel_tables();
#ifdef COURSE_PRODUCTION
  tables.push_back({"plain, with windows", &kWindowed});
#endif
  return tables;
}

bool is_production(const KernelTable& table) { return std::strcmp(table.name, "production") == 0; }

// For kernels that are given windows; production kernels have tests of their own for theirs.
int own_window(const KernelTable& table, int window) {
  return table.kernels->has_windows() && !is_production(table) ? window : 0;
}

void check_step(GpuBatch& batch, const KernelTable& table, int num_decodes) {
  const tests::PagedBatch::Appended result = batch.attend(*table.kernels, num_decodes);
  CHECK(batch.check(result.output) == tests::kNoDifference);
  CHECK(result.pages_are_equal);
}

}  // namespace

TEST_CASE("Paged attention: weights 1 and 3, computed by hand", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const KernelTable table = GENERATE(from_range(tests::kernel_tables()));
  const auto type = GENERATE(ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat8);
  CAPTURE(table.name, tests::name_of(type));
  if (serves(table, type, 2)) {
    tests::HandWorked example(type);
    CHECK(example.check(example.attend(*table.kernels, 0).output, tests::HandWorked::kLastTwoTokens) ==
          tests::kNoDifference);
  }
}

TEST_CASE("Paged attention: every type, head_dim, group and block size, decodes beside chunks (stage 7, invariant 2)",
          "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto [table, type, block_size, head_dim] = GENERATE(from_range(tests::served_shapes()));
  for (const int group : tests::some_of({3}, {1, 3, 16, 17})) {
    CAPTURE(table.name, tests::name_of(type), head_dim, block_size, group);
    if (!serves(table, type, group)) {
      continue;
    }
    // Two decodes; then whole prompts, chunks with a past, a single token, sequences without new tokens and without
    // any.
    GpuBatch mixed({.type = type,
                    .num_kv_heads = 2,
                    .group = group,
                    .head_dim = head_dim,
                    .block_size = block_size,
                    .context_lengths = {1, 100, 65, 0, 70, 17, 1, 3 * block_size, block_size + 1},
                    .query_lengths = {1, 1, 65, 0, 33, 0, 1, std::min(block_size, 20), 2},
                    .seed = static_cast<unsigned>(group)});
    check_step(mixed, table, 2);
    // All decodes, and rows of sequences that are not there.
    GpuBatch decodes({.type = type,
                      .num_kv_heads = 2,
                      .group = group,
                      .head_dim = head_dim,
                      .block_size = block_size,
                      .context_lengths = {1, 0, block_size, block_size + 1, 50, 0},
                      .query_lengths = {},
                      .seed = static_cast<unsigned>(group)});
    check_step(decodes, table, 6);
  }
}

TEST_CASE("Paged attention: sliding windows, or a refusal before anything is launched", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const KernelTable table = GENERATE(from_range(all_tables()));
  const auto type = GENERATE(ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat8);
  const int window = GENERATE(1, 21, 300);
  CAPTURE(table.name, tests::name_of(type), window);
  if (!serves(table, type, 4)) {
    return;
  }
  // Decodes; then a prompt, and a chunk that begins in front of its first token's window.
  GpuBatch batch({.type = type,
                  .num_kv_heads = 2,
                  .group = 4,
                  .window = window,
                  .context_lengths = {1, 100, 17, 65, 70},
                  .query_lengths = {1, 1, 1, 65, 33}});
  if (table.kernels->has_windows()) {
    check_step(batch, table, 3);
    return;
  }
  const common::StepArrays step = batch.step(3);
  CHECK_THROWS_AS(table.kernels->workspace_bytes(batch.shape(), step), common::CheckError);
  CHECK_THROWS_AS(table.kernels->plan(batch.shape(), step, {}, batch.stream.get()), common::CheckError);
  CHECK_THROWS_AS(table.kernels->attend(batch.pages_of(*table.kernels), step, {.queries = batch.queries.data()},
                                        batch.output.data(), {}, batch.stream.get()),
                  common::CheckError);
  CHECK(tests::is_poisoned(batch.output));
}

TEST_CASE("Paged attention: long contexts", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const KernelTable table = GENERATE(from_range(tests::kernel_tables()));
  const auto type = GENERATE(ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat8);
  const int group = GENERATE(1, 4);
  CAPTURE(table.name, tests::name_of(type), group);
  if (serves(table, type, group)) {
    const BatchSpec spec =
        tests::kOnExecutor ? BatchSpec{.context_lengths = {1023, 1025}, .query_lengths = {1, 9}}
                           : BatchSpec{.context_lengths = {8191, 32768, 8193, 5000}, .query_lengths = {1, 1, 700, 33}};
    GpuBatch batch({.type = type,
                    .num_kv_heads = 1,
                    .group = group,
                    .context_lengths = spec.context_lengths,
                    .query_lengths = spec.query_lengths});
    check_step(batch, table, tests::kOnExecutor ? 1 : 2);
  }
}

TEST_CASE("Paged attention: a pool of more than 2^31 elements (stage 7, invariant 1)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  if (!tests::has_room_for(std::size_t{12} << 30)) {
    SKIP_TEST("the GPU has no room for it");
  }
  // 8 heads x 16 tokens x 128 dimensions: 2^14 elements a block, and the blocks in use lie past the 2^17th. (Not
  // attend(): it would compare all of the pages on the host.)
  GpuBatch batch(
      {.num_kv_heads = 8, .context_lengths = {50, 100}, .query_lengths = {1, 20}, .first_block = (1 << 17) + 5});
  CHECK(batch.shape().elements() > std::int64_t{1} << 31);
  const common::StepArrays step = batch.step(1);
  CHECK(batch.check(batch.output_of(0, [&](void*) {
    stage::kPlainKernels.attend(batch.pages_of(stage::kPlainKernels), step, {.queries = batch.queries.data()},
                                batch.output.data(), {}, batch.stream.get());
  })) == tests::kNoDifference);
}

TEST_CASE("Paged attention: a captured graph follows the lengths (stage 7, invariant 6)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const KernelTable table = GENERATE(from_range(all_tables()));
  CAPTURE(table.name);
  GpuBatch batch({.window = own_window(table, 40), .context_lengths = {90, 1, 40, 600}, .query_lengths = {}});
  const common::Pages& pages = batch.pages_of(*table.kernels);
  common::StepArrays step = batch.step(4);
  const std::size_t bytes = table.kernels->workspace_bytes(pages.shape, step);
  const common::DeviceArray<std::byte> memory(bytes);
  const std::span<std::byte> workspace(memory.data(), bytes);
  // Recorded for a batch in which every sequence is inactive, and replayed for a batch in which every one is active.
  common::DeviceArray<int> lengths(std::vector<int>(4, 0));
  step.batch.context_lengths = lengths.data();
  const int columns = pages.shape.num_kv_heads * pages.shape.head_dim;
  const auto keys = tests::poisoned(4 * columns, ScalarType::kBFloat16);
  const auto values = tests::poisoned(4 * columns, ScalarType::kBFloat16);
  const common::Graph graph(batch.stream, [&] {
    table.kernels->plan(pages.shape, step, workspace, batch.stream.get());
    // The launch before attend() may write its rows and nothing else: this one stands in for the model's.
    table.kernels->read_from_slots(pages, keys.data(), values.data(), columns, step.slot_mapping, 4,
                                   batch.stream.get());
    table.kernels->attend(pages, step, {.queries = batch.queries.data()}, batch.output.data(), workspace,
                          batch.stream.get());
  });
  CUDA_CHECK(cudaMemset(batch.output.data(), 0xFF, batch.output.size()));
  CUDA_CHECK(cudaDeviceSynchronize());
  graph.launch(batch.stream);
  batch.stream.synchronize();
  CHECK(tests::is_poisoned(batch.output));
  lengths.upload(std::vector<int>{90, 1, 40, 600});
  graph.launch(batch.stream);
  batch.stream.synchronize();
  CHECK(batch.check(tests::to_floats(batch.output.download(), ScalarType::kBFloat16)) == tests::kNoDifference);
}

TEST_CASE("Paged attention: a step without tokens needs no rows, and launches nothing", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const KernelTable table = GENERATE(from_range(all_tables()));
  CAPTURE(table.name);
  GpuBatch batch({.window = own_window(table, 9), .context_lengths = {20}, .query_lengths = {20}});
  common::StepArrays none = batch.step(0);
  none.num_tokens = 0;
  none.batch.num_sequences = 0;
  CHECK_NOTHROW(table.kernels->attend(batch.pages_of(*table.kernels), none, {}, nullptr, {}, batch.stream.get()));
}

TEST_CASE("Paged attention: bad arguments are refused before anything is launched (stage 7, invariant 6)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const KernelTable table = GENERATE(from_range(all_tables()));
  CAPTURE(table.name);
  GpuBatch good({.window = own_window(table, 9), .context_lengths = {20}, .query_lengths = {20}});
  const auto memory = tests::poisoned(std::int64_t{1} << 20, ScalarType::kBFloat16);  // no plan may be written to it
  const common::Pages& pages = good.pages_of(*table.kernels);
  const auto bytes_of_keys = [&] {
    std::vector<std::byte> bytes(static_cast<std::size_t>(pages.shape.elements()) * 2);
    CUDA_CHECK(cudaMemcpy(bytes.data(), pages.keys, bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  };
  const std::vector<std::byte> keys = bytes_of_keys();
  struct Call {
    common::Pages pages;
    common::StepArrays step;
    common::LayerRows rows;
    void* output;
  };
  const Call right{pages, good.step(0), {.queries = good.queries.data()}, good.output.data()};
  const std::span<std::byte> workspace(memory.data(), memory.size());
  const auto plan = [&](const Call& call) {
    table.kernels->plan(call.pages.shape, call.step, workspace, good.stream.get());
  };
  const auto attend = [&](const Call& call) {
    table.kernels->attend(call.pages, call.step, call.rows, call.output, workspace, good.stream.get());
  };
  const auto wrong = tests::refused(right, plan, attend);
  for (const tests::BadBatch& bad : tests::bad_batches()) {
    if (!is_production(table) && bad.is_plain) {
      CAPTURE(bad.what);
      Call call = right;
      bad.spoil(call.pages, call.step.batch);
      CHECK(table.kernels->unsupported(call.pages.shape, call.step.batch.num_heads) == tests::kNoDifference);
      continue;
    }
    wrong(bad.what, !bad.of_pages, [&](Call& call) { bad.spoil(call.pages, call.step.batch); });
  }
  wrong("no query_starts", true, [](Call& call) { call.step.query_starts = nullptr; });
  wrong("no queries", false, [](Call& call) { call.rows.queries = nullptr; });
  wrong("queries", false, [](Call& call) { call.rows.queries = tests::off_by_2(call.rows.queries); });
  wrong("no output", false, [](Call& call) { call.output = nullptr; });
  wrong("output", false, [](Call& call) { call.output = tests::off_by_2(call.output); });
  wrong("no values", false, [&](Call& call) {
    call.rows.keys = good.queries.data();
    call.rows.row_stride = 256;
  });
  wrong("rows off by two bytes", false, [&](Call& call) {
    call.rows = {good.queries.data(), tests::off_by_2(good.queries.data()), good.queries.data(), 256};
  });
  wrong("rows that overlap", false, [&](Call& call) {
    call.rows = {good.queries.data(), good.queries.data(), good.queries.data(), 248};
  });
  wrong("rows to store, but no queries", false, [&](Call& call) {
    call.rows = {nullptr, good.queries.data(), good.queries.data(), 256};
  });
  wrong("no slots", false, [&](Call& call) {
    call.rows = {good.queries.data(), good.queries.data(), good.queries.data(), 256};
    call.step.slot_mapping = nullptr;
  });
  for (const auto& [num_decodes, num_tokens] : {std::pair{-1, 20}, {2, 20}, {1, 0}, {0, -1}}) {
    CAPTURE(num_decodes, num_tokens);
    Call call = right;
    call.step.num_decodes = num_decodes;
    call.step.num_tokens = num_tokens;
    CHECK_THROWS_AS(plan(call), common::CheckError);
  }
  Call nothing = right;
  nothing.step.batch.num_sequences = 0;
  CHECK_NOTHROW(plan(nothing));
  CHECK_NOTHROW(attend(nothing));
  nothing = right;
  nothing.step.num_tokens = 0;
  CHECK_NOTHROW(plan(nothing));
  CHECK_NOTHROW(attend(nothing));

  good.stream.synchronize();
  CHECK(tests::is_poisoned(memory));
  CHECK(tests::is_poisoned(good.output));
  const bool no_row_is_stored = bytes_of_keys() == keys;
  CHECK(no_row_is_stored);
}

TEST_CASE("What the kernels cannot do is said in words (stage 7, invariant 6)", "[gpu]") {
  CHECK(stage::kPlainKernels.unsupported({.num_kv_heads = 2, .block_size = 5, .head_dim = 40}, 40) ==
        tests::kNoDifference);
  CHECK(stage::kPlainKernels.unsupported({.num_kv_heads = 2, .block_size = 5, .head_dim = 36}, 40) ==
        "the plain kernels need a head dimension that is a multiple of 8 up to 256, not 36");
  CHECK(stage::kPlainKernels.unsupported({.num_kv_heads = 2, .block_size = 5, .head_dim = 264}, 40) ==
        "the plain kernels need a head dimension that is a multiple of 8 up to 256, not 264");
  CHECK(stage::kPlainKernels.unsupported({.num_kv_heads = 2, .block_size = 0, .head_dim = 40}, 40) ==
        "the plain kernels need blocks of at least one token, not 0");
  CHECK(stage::kPlainKernels.unsupported({.num_kv_heads = 2, .block_size = 5, .head_dim = 40}, 41) ==
        "the kernels need query heads that share kv heads evenly, not 41 over 2");
  CHECK_FALSE(stage::kPlainKernels
                  .unsupported({.num_kv_heads = 2, .block_size = 16, .head_dim = 128, .type = ScalarType::kFloat8}, 8)
                  .empty());
#ifdef COURSE_PRODUCTION
  const common::PagedKernels& production = common::kProductionKernels;
  for (const auto& [block_size, head_dim, num_heads] :
       {std::array{12, 128, 8}, {4, 128, 8}, {128, 128, 8}, {16, 80, 8}, {16, 16, 8}, {16, 128, 7}, {16, 128, 34}}) {
    CAPTURE(block_size, head_dim, num_heads);
    CHECK_FALSE(
        production.unsupported({.num_kv_heads = 2, .block_size = block_size, .head_dim = head_dim}, num_heads).empty());
  }
  CHECK(production.unsupported({.num_kv_heads = 2, .block_size = 16, .head_dim = 128}, 8) == tests::kNoDifference);
  CHECK(production.unsupported({.num_kv_heads = 2, .block_size = 8, .head_dim = 128, .type = ScalarType::kFloat8}, 8) ==
        "the float8 kernels need blocks of 16, 32 or 64 tokens, not 8");
  CHECK_FALSE(
      production.unsupported({.num_kv_heads = 2, .block_size = 16, .head_dim = 128, .type = ScalarType::kFloat32}, 8)
          .empty());
#endif
}

#ifdef COURSE_PRODUCTION
TEST_CASE("Paged attention: plain kernels are given windows, for every type, head_dim, group and block size", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto [table, type, block_size, head_dim] = GENERATE(from_range(tests::served_shapes()));
  if (table.kernels != &stage::kPlainKernels) {
    return;
  }
  const std::vector<std::pair<int, int>> groups_and_windows =
      tests::kOnExecutor ? std::vector<std::pair<int, int>>{{3, 21}}
                         : std::vector<std::pair<int, int>>{{1, 16}, {3, 21}, {16, 2}, {17, 65}};
  for (const auto& [group, window] : groups_and_windows) {
    CAPTURE(tests::name_of(type), head_dim, block_size, group, window);
    BatchSpec spec{.context_lengths = {1, 100, window, window + 1, 65, 0, 70, 17, 1, 3 * block_size, block_size + 1},
                   .query_lengths = {1, 1, 1, 1, 65, 0, 33, 0, 1, std::min(block_size, 20), 2}};
    spec.type = type;
    spec.group = group;
    spec.head_dim = head_dim;
    spec.block_size = block_size;
    spec.window = window;
    // Decodes; then whole prompts, chunks with a past, a single token, sequences without new tokens and without any.
    GpuBatch mixed(spec);
    check_step(mixed, {"", &kWindowed}, 4);
    // All decodes, and rows of sequences that are not there.
    spec.context_lengths = {1, 0, block_size, 100, 50, 0};
    spec.query_lengths = {};
    GpuBatch decodes(spec);
    check_step(decodes, {"", &kWindowed}, 6);
  }
}

TEST_CASE("Paged attention: a window that hides nothing changes no bit of what the plain kernels compute", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto type = GENERATE(ScalarType::kFloat32, ScalarType::kBFloat16);
  std::vector<std::vector<float>> outputs;
  for (const int window : {0, 90, 1 << 30}) {
    GpuBatch batch({.type = type, .window = window, .context_lengths = {90, 40, 57}, .query_lengths = {1, 40, 9}});
    outputs.push_back(batch.attend(kWindowed, 1).output);
  }
  CHECK(std::memcmp(outputs[0].data(), outputs[1].data(), outputs[0].size() * sizeof(float)) == 0);
  CHECK(std::memcmp(outputs[0].data(), outputs[2].data(), outputs[0].size() * sizeof(float)) == 0);
}

TEST_CASE("Paged attention: with a window, rows behind the last sequence's stay untouched", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch batch({.window = 9, .context_lengths = {20, 30}, .query_lengths = {5, 3}});
  const std::vector<float> whole = batch.attend(kWindowed, 0).output;
  common::StepArrays step = batch.step(0);
  step.batch.num_sequences = 1;
  const std::size_t bytes = kWindowed.workspace_bytes(batch.shape(), step);
  const std::vector<float> first = batch.output_of(bytes, [&](void* memory) {
    const std::span<std::byte> workspace(static_cast<std::byte*>(memory), bytes);
    kWindowed.plan(batch.shape(), step, workspace, batch.stream.get());
    kWindowed.attend(batch.pages_of(kWindowed), step, {.queries = batch.queries.data()}, batch.output.data(), workspace,
                     batch.stream.get());
  });
  const auto size = static_cast<std::ptrdiff_t>(first.size() / 8 * 5);
  CHECK(std::equal(first.begin(), first.begin() + size, whole.begin()));
  CHECK(std::all_of(first.begin() + size, first.end(), tests::is_unwritten));
}

TEST_CASE("Paged attention: without room for its lists, a window is refused before anything is launched", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  GpuBatch batch({.window = 9, .context_lengths = {20}, .query_lengths = {20}});
  const common::StepArrays step = batch.step(0);
  const auto memory = tests::poisoned(std::int64_t{1} << 16, ScalarType::kBFloat16);
  const std::size_t bytes = kWindowed.workspace_bytes(batch.shape(), step);
  REQUIRE(bytes < memory.size());
  const std::span<std::byte> workspace(memory.data(), bytes - 1);
  CHECK_THROWS_AS(kWindowed.plan(batch.shape(), step, workspace, batch.stream.get()), common::CheckError);
  CHECK_THROWS_AS(kWindowed.attend(batch.pages_of(kWindowed), step, {.queries = batch.queries.data()},
                                   batch.output.data(), workspace, batch.stream.get()),
                  common::CheckError);
  batch.stream.synchronize();
  CHECK(tests::is_poisoned(memory));
  CHECK(tests::is_poisoned(batch.output));
  // Lists of 2^31 rows.
  common::StepArrays large = step;
  large.batch.window = 1 << 20;
  large.batch.max_blocks_per_sequence = 1 << 16;
  large.batch.num_sequences = 1 << 11;
  CHECK_THROWS_AS(kWindowed.workspace_bytes(batch.shape(), large), common::CheckError);
}

// Decodes that take longer than a chunk which fills every multiprocessor more than twice: with wgmma, the two run side
// by side, and attend() has not finished before both have. No test watches the wait that the prefill kernel needs for
// this (wait_for_previous_launch). Without it, this test is green on an H100. So was, in 20 of 20 runs, a test in which
// the launch before let ragged attention begin, took 2 ms, and at its end wrote what the launch after both read.
TEST_CASE("Paged attention: decodes and a large chunk, and the launch after them (stage 7, invariant 2)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kHeads = 32;
  constexpr int kNumDecodes = 12;
  const int chunk = tests::kOnExecutor ? 20 : 2 * common::device_limits().num_multiprocessors * 128 / kHeads + 9;
  std::vector<int> contexts = {1, 100, 0};
  contexts.resize(kNumDecodes, tests::kOnExecutor ? 50 : 12000);
  contexts.insert(contexts.end(), {chunk, 70});
  std::vector<int> queries(kNumDecodes, 1);
  queries.insert(queries.end(), {chunk, 3});
  GpuBatch batch(
      {.num_kv_heads = 8, .group = kHeads / 8, .head_dim = 64, .context_lengths = contexts, .query_lengths = queries});
  const common::PagedKernels& kernels = common::kProductionKernels;
  const std::vector<float> once = batch.attend(kernels, kNumDecodes).output;
  CHECK(batch.check(once) == tests::kNoDifference);

  // Layers, each followed by a launch that reads their output as soon as it may.
  const common::StepArrays step = batch.step(kNumDecodes);
  const common::PageShape& shape = batch.shape();
  const std::size_t bytes = kernels.workspace_bytes(shape, step);
  const int columns = shape.num_kv_heads * shape.head_dim;
  common::PageShape copy_shape = shape;
  copy_shape.num_blocks = 1;
  common::DeviceArray<std::byte> keys = tests::poisoned(copy_shape.elements(), shape.type);
  common::DeviceArray<std::byte> values = tests::poisoned(copy_shape.elements(), shape.type);
  const common::Pages copies{keys.data(), values.data(), copy_shape};
  std::vector<int> numbers(kNumDecodes);
  std::iota(numbers.begin(), numbers.end(), 0);
  const common::DeviceArray<int> slots(numbers);
  for (int layer = 0; layer < (tests::kOnExecutor ? 1 : 20); ++layer) {
    CAPTURE(layer);
    const std::vector<float> result = batch.output_of(bytes, [&](void* memory) {
      const std::span<std::byte> workspace(static_cast<std::byte*>(memory), bytes);
      kernels.plan(shape, step, workspace, batch.stream.get());
      kernels.attend(batch.pages_of(kernels), step, {.queries = batch.queries.data()}, batch.output.data(), workspace,
                     batch.stream.get());
      kernels.write_to_slots(copies, batch.output.data(), batch.output.data(), std::int64_t{kHeads} * shape.head_dim,
                             slots.data(), kNumDecodes, batch.stream.get());
    });
    CHECK(std::memcmp(result.data(), once.data(), once.size() * sizeof(float)) == 0);
    const common::DeviceArray<std::byte> rows(static_cast<std::size_t>(kNumDecodes * columns * 2));
    kernels.read_from_slots(copies, rows.data(), rows.data(), columns, slots.data(), kNumDecodes, batch.stream.get());
    batch.stream.synchronize();
    const std::vector<float> copied = tests::to_floats(rows.download(), shape.type);
    for (int row = 0; row < kNumDecodes; ++row) {
      const auto* const expected = &result[static_cast<std::size_t>(row * kHeads * shape.head_dim)];
      CHECK(std::memcmp(&copied[static_cast<std::size_t>(row * columns)], expected, columns * sizeof(float)) == 0);
    }
  }
}
#endif
