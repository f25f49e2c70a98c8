// Writing to slots, reading them back, copying blocks: nothing is computed, so everything must be equal to the bit.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <span>

#include "tests/gpu/gpu_fixtures.h"
#include "tests/support/catch.h"

namespace {

using common::DeviceArray;
using common::PageShape;
using tests::ScalarType;

// All slots of the pool in order, as rows [slot, num_kv_heads * head_dim]: how a row is swizzled concerns
// only the kernels. What was never written is still poison.
std::vector<std::byte> all_slots(const common::PagedKernels& kernels, const common::Pages& pages, bool values,
                                 const common::Stream& stream) {
  const auto num_slots = static_cast<int>(pages.shape.num_blocks) * pages.shape.block_size;
  const std::int64_t columns = std::int64_t{pages.shape.num_kv_heads} * pages.shape.head_dim;
  std::vector<int> slots(static_cast<std::size_t>(num_slots));
  std::iota(slots.begin(), slots.end(), 0);
  const DeviceArray<int> device_slots(slots);
  const auto keys = tests::poisoned(num_slots * columns, common::row_type(pages.shape.type));
  const auto other = tests::poisoned(num_slots * columns, common::row_type(pages.shape.type));
  kernels.read_from_slots(pages, keys.data(), other.data(), columns, device_slots.data(), num_slots, stream.get());
  stream.synchronize();
  return values ? other.download() : keys.download();
}

}  // namespace

TEST_CASE("Rows land in their slots and nowhere else (stage 7, invariant 3)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto [table, type, block_size, head_dim] = GENERATE(from_range(tests::served_shapes()));
  if (type == ScalarType::kFloat8) {
    return;  // rounded: below
  }
  CAPTURE(table.name, tests::name_of(type), block_size, head_dim);
  const PageShape shape{
      .num_blocks = 50, .num_kv_heads = 3, .block_size = block_size, .head_dim = head_dim, .type = type};
  common::Random random(7);
  const auto size = static_cast<std::size_t>(common::bytes_of(type));
  constexpr int kTokens = 40;
  // K and V side by side in one matrix, with some columns before and between, as a fused projection leaves them.
  const int columns = shape.num_kv_heads * head_dim;
  const int stride = 2 * columns + 64;
  const std::vector<std::byte> rows =
      tests::to_bytes(tests::random_values(std::size_t{kTokens + 1} * static_cast<std::size_t>(stride), random), type);
  std::vector<int> slots = tests::shuffled(50 * block_size, random);
  slots.resize(kTokens + 1);  // the last is no token's: the last thread block has threads for more than kTokens
  slots[3] = -1;
  slots[kTokens - 1] = -1;

  const auto keys = tests::poisoned(shape.elements(), type);
  const auto values = tests::poisoned(shape.elements(), type);
  const auto row_bytes = static_cast<std::size_t>(columns) * size;
  std::vector<std::byte> expected_keys(static_cast<std::size_t>(50 * block_size) * row_bytes, std::byte{0xFF});
  std::vector<std::byte> expected_values = expected_keys;
  for (std::size_t token = 0; token < kTokens; ++token) {
    if (slots[token] >= 0) {
      const std::size_t from = (token * static_cast<std::size_t>(stride) + 32) * size;
      const std::size_t to = static_cast<std::size_t>(slots[token]) * row_bytes;
      std::memcpy(&expected_keys[to], &rows[from], row_bytes);
      std::memcpy(&expected_values[to], &rows[from + row_bytes], row_bytes);
    }
  }
  const DeviceArray<std::byte> device_rows(rows);
  const DeviceArray<int> device_slots(slots);
  const common::Pages pages{keys.data(), values.data(), shape};
  const common::Stream stream;
  std::byte* key_rows = device_rows.data() + 32 * size;
  std::byte* value_rows = key_rows + static_cast<std::size_t>(columns) * size;
  table.kernels->write_to_slots(pages, key_rows, value_rows, stride, device_slots.data(), kTokens, stream.get());
  stream.synchronize();
  const auto vecs_per_row = static_cast<std::int64_t>(row_bytes) / (16 * shape.num_kv_heads);
  const tests::Extents of_slots = {
      {"slot", 50 * block_size}, {"kv head", shape.num_kv_heads}, {"vector", vecs_per_row}};
  CHECK(tests::compare_bytes("K", all_slots(*table.kernels, pages, false, stream), expected_keys, of_slots) ==
        tests::kNoDifference);
  CHECK(tests::compare_bytes("V", all_slots(*table.kernels, pages, true, stream), expected_values, of_slots) ==
        tests::kNoDifference);

  // And back: the skipped rows stay as they were.
  const auto back = tests::poisoned(std::int64_t{kTokens + 1} * stride, type);
  std::vector<std::byte> expected = back.download();
  for (std::size_t token = 0; token < kTokens; ++token) {
    if (slots[token] >= 0) {
      const std::size_t first = (token * static_cast<std::size_t>(stride) + 32) * size;
      std::memcpy(&expected[first], &rows[first], static_cast<std::size_t>(2 * columns) * size);
    }
  }
  table.kernels->read_from_slots(pages, back.data() + 32 * size,
                                 back.data() + static_cast<std::size_t>(columns + 32) * size, stride,
                                 device_slots.data(), kTokens, stream.get());
  stream.synchronize();
  const tests::Extents of_rows = {{"token", kTokens + 1}, {"vector", static_cast<std::int64_t>(stride * size) / 16}};
  CHECK(tests::compare_bytes("rows", back.download(), expected, of_rows) == tests::kNoDifference);
}

#ifdef COURSE_PRODUCTION

TEST_CASE("Float8 rows are rounded to the nearest, each by a scale of its own (stage 7, invariant 9)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const int block_size = GENERATE(16, 32, 64);
  const int head_dim = GENERATE(32, 64, 96, 128, 256);
  const int num_tokens = GENERATE(1, 40);
  CAPTURE(block_size, head_dim, num_tokens);
  const PageShape shape{
      .num_blocks = 50, .num_kv_heads = 3, .block_size = block_size, .head_dim = head_dim, .type = ScalarType::kFloat8};
  common::Random random(7);
  const int columns = 3 * head_dim;
  const int stride = 2 * columns + 64;
  const auto count = static_cast<std::size_t>(num_tokens);
  const auto row = static_cast<std::size_t>(columns);
  // Rows of all sizes; some of zeros, some with a single number, and ties between neighbours.
  std::vector<float> numbers = tests::random_values(count * static_cast<std::size_t>(stride), random);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::size_t head = i / static_cast<std::size_t>(head_dim);
    numbers[i] *= head % 7 == 3 ? 0.0F : std::ldexp(1.0F, static_cast<int>(head * 5 % 60) - 30);
    if (head % 7 == 5 && i % static_cast<std::size_t>(head_dim) != 1) {
      numbers[i] = 0.0F;
    }
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(head_dim); ++i) {
    numbers[32 + i] = i == 0 ? 448.0F : 16.0F + static_cast<float>(i % 32);  // odd ones lie between two of float8
  }
  numbers = tests::rounded(numbers, ScalarType::kBFloat16);
  std::vector<int> slots = tests::shuffled(50 * block_size, random);
  slots.resize(count);
  if (num_tokens > 1) {
    slots[3] = -1;
    slots[count - 1] = -1;
  }
  const auto keys = tests::poisoned(shape.elements(), shape.type);
  const auto values = tests::poisoned(shape.elements(), shape.type);
  const DeviceArray<std::byte> device_rows(tests::to_bytes(numbers, ScalarType::kBFloat16));
  const DeviceArray<int> device_slots(slots);
  const common::Pages pages{keys.data(), values.data(), shape};
  const common::Stream stream;
  common::kProductionKernels.write_to_slots(pages, device_rows.data() + 64, device_rows.data() + 64 + 2 * row, stride,
                                            device_slots.data(), num_tokens, stream.get());
  stream.synchronize();
  for (const bool is_values : {false, true}) {
    const std::vector<float> found =
        tests::to_floats(all_slots(common::kProductionKernels, pages, is_values, stream), common::row_type(shape.type));
    std::vector<bool> written(found.size() / row, false);
    for (std::size_t token = 0; token < count; ++token) {
      if (slots[token] < 0) {
        continue;
      }
      const auto slot = static_cast<std::size_t>(slots[token]);
      written[slot] = true;
      const std::size_t from = token * static_cast<std::size_t>(stride) + 32 + (is_values ? row : 0);
      const std::vector<float> expected =
          tests::through_float8(std::span(numbers).subspan(from, row), static_cast<std::size_t>(head_dim));
      CAPTURE(is_values, token);
      CHECK(tests::compare_bits(std::span(found).subspan(slot * row, row), expected) == tests::kNoDifference);
    }
    for (std::size_t slot = 0; slot < written.size(); ++slot) {
      if (!written[slot]) {
        const auto own = std::span(found).subspan(slot * row, row);
        CHECK(std::all_of(own.begin(), own.end(), [](float x) { return std::isnan(x); }));
      }
    }
  }
}

TEST_CASE("A float8 row with an infinity or a NaN is NaN, and its neighbours are not", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const PageShape shape{
      .num_blocks = 1, .num_kv_heads = 4, .block_size = 16, .head_dim = 64, .type = ScalarType::kFloat8};
  std::vector<float> row(256, 1.0F);
  row[64 + 5] = std::numeric_limits<float>::infinity();
  row[128 + 63] = std::numeric_limits<float>::quiet_NaN();
  const auto keys = tests::poisoned(shape.elements(), shape.type);
  const auto values = tests::poisoned(shape.elements(), shape.type);
  const DeviceArray<std::byte> device_rows(tests::to_bytes(row, ScalarType::kBFloat16));
  const DeviceArray<int> slots(std::vector<int>{0});
  const common::Pages pages{keys.data(), values.data(), shape};
  const common::Stream stream;
  common::kProductionKernels.write_to_slots(pages, device_rows.data(), device_rows.data(), 256, slots.data(), 1,
                                            stream.get());
  stream.synchronize();
  const std::vector<float> found =
      tests::to_floats(all_slots(common::kProductionKernels, pages, true, stream), ScalarType::kBFloat16);
  for (std::size_t i = 0; i < 256; ++i) {
    CAPTURE(i);
    CHECK((i / 64 == 1 || i / 64 == 2 ? std::isnan(found[i]) : found[i] == 1.0F));
  }
}

#endif  // COURSE_PRODUCTION

TEST_CASE("Many rows take the wide path and land the same", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const tests::KernelTable table = GENERATE(from_range(tests::kernel_tables()));
  CAPTURE(table.name);
  const PageShape shape{
      .num_blocks = 1200, .num_kv_heads = 8, .block_size = 16, .head_dim = 128, .type = ScalarType::kBFloat16};
  common::Random random(11);
  constexpr int kTokens = 10001;
  std::vector<int> slots = tests::shuffled(1200 * 16, random);
  slots.resize(kTokens);
  const auto rows = tests::to_bytes(tests::random_values(std::size_t{kTokens} * 1024, random), shape.type);
  const DeviceArray<std::byte> device_rows(rows);
  const DeviceArray<int> device_slots(slots);
  const auto keys = tests::poisoned(shape.elements(), shape.type);
  const auto values = tests::poisoned(shape.elements(), shape.type);
  const common::Stream stream;
  const common::Pages pages{keys.data(), values.data(), shape};
  table.kernels->write_to_slots(pages, device_rows.data(), device_rows.data(), 1024, device_slots.data(), kTokens,
                                stream.get());
  stream.synchronize();
  std::vector<std::byte> expected(std::size_t{1200} * 16 * 2048, std::byte{0xFF});
  for (std::size_t token = 0; token < kTokens; ++token) {
    std::memcpy(&expected[static_cast<std::size_t>(slots[token]) * 2048], &rows[token * 2048], 2048);
  }
  const tests::Extents of_slots = {{"slot", 1200 * 16}, {"kv head", 8}, {"vector", 16}};
  CHECK(tests::compare_bytes("K", all_slots(*table.kernels, pages, false, stream), expected, of_slots) ==
        tests::kNoDifference);
  CHECK(tests::compare_bytes("V", all_slots(*table.kernels, pages, true, stream), expected, of_slots) ==
        tests::kNoDifference);
}

TEST_CASE("Blocks are copied in every layer (stage 7, invariant 5)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const auto [table, type, block_size, head_dim] = GENERATE(from_range(tests::served_shapes()));
  CAPTURE(table.name, tests::name_of(type), block_size, head_dim);
  constexpr int kLayers = 3;
  const PageShape shape{
      .num_blocks = 9, .num_kv_heads = 3, .block_size = block_size, .head_dim = head_dim, .type = type};
  common::Random random(5);
  const auto random_bytes = [&] {
    std::vector<std::byte> all(static_cast<std::size_t>(kLayers * shape.elements() * common::bytes_of(shape.type)));
    std::generate(all.begin(), all.end(), [&] { return static_cast<std::byte>(random.below(256)); });
    return all;
  };
  const std::vector<std::byte> keys = random_bytes();
  const std::vector<std::byte> values = random_bytes();
  const DeviceArray<std::byte> device_keys(keys);
  const DeviceArray<std::byte> device_values(values);
  const std::vector<common::PageCopy> copies = {{0, 8}, {0, 3}, {5, 1}, {7, 2}};
  const common::Stream stream;
  {
    const auto short_lived = std::make_unique<std::vector<common::PageCopy>>(copies);
    table.kernels->copy_blocks(device_keys.data(), device_values.data(), kLayers, shape, short_lived->data(),
                               static_cast<int>(copies.size()), stream.get());
    std::fill(short_lived->begin(), short_lived->end(), common::PageCopy{1, 7});
  }
  stream.synchronize();
  auto expected_keys = keys;
  auto expected_values = values;
  const auto bytes = static_cast<std::size_t>(shape.elements_per_block() * common::bytes_of(type));
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    for (const common::PageCopy& copy : copies) {
      const std::size_t from = (layer * 9 + static_cast<std::size_t>(copy.source)) * bytes;
      const std::size_t to = (layer * 9 + static_cast<std::size_t>(copy.destination)) * bytes;
      std::memcpy(&expected_keys[to], &keys[from], bytes);
      if (!shape.is_paired()) {  // then values are with the keys, and this array is left alone
        std::memcpy(&expected_values[to], &values[from], bytes);
      }
    }
  }
  const tests::Extents parts = {
      {"layer", kLayers}, {"block", shape.num_blocks}, {"vector", static_cast<std::int64_t>(bytes) / 16}};
  CHECK(tests::compare_bytes("K", device_keys.download(), expected_keys, parts) == tests::kNoDifference);
  CHECK(tests::compare_bytes("V", device_values.download(), expected_values, parts) == tests::kNoDifference);
}

TEST_CASE("Blocks are copied in a pool of more than 2^31 elements (stage 7, invariant 1)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  if (!tests::has_room_for(std::size_t{20} << 30)) {
    SKIP_TEST("the GPU has no room for it");
  }
  const tests::KernelTable table = GENERATE(from_range(tests::kernel_tables()));
  CAPTURE(table.name);
  // Blocks of 2^14 elements: the last ones of the first layer lie past 2^31, and so does the second layer.
  constexpr int kLayers = 2;
  constexpr int kBlocks = (1 << 17) + 3;
  const PageShape shape{
      .num_blocks = kBlocks, .num_kv_heads = 8, .block_size = 16, .head_dim = 128, .type = ScalarType::kBFloat16};
  REQUIRE(shape.elements_per_block() * (kBlocks - 2) > std::int64_t{1} << 31);
  const auto keys = tests::poisoned(kLayers * shape.elements(), shape.type);
  const auto values = tests::poisoned(kLayers * shape.elements(), shape.type);
  const auto bytes = static_cast<std::size_t>(shape.elements_per_block() * 2);
  const auto at = [&](const DeviceArray<std::byte>& pool, int layer, int block) {
    return pool.data() +
           (std::size_t{kBlocks} * static_cast<std::size_t>(layer) + static_cast<std::size_t>(block)) * bytes;
  };
  // All bytes of a block are equal, and each block that is copied has a value of its own.
  const std::vector<common::PageCopy> copies = {{2, kBlocks - 1}, {kBlocks - 2, 1}};
  int fill = 0;
  for (const DeviceArray<std::byte>* pool : {&keys, &values}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const common::PageCopy& copy : copies) {
        CUDA_CHECK(cudaMemset(at(*pool, layer, copy.source), ++fill, bytes));
      }
    }
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  const common::Stream stream;
  table.kernels->copy_blocks(keys.data(), values.data(), kLayers, shape, copies.data(), static_cast<int>(copies.size()),
                             stream.get());
  stream.synchronize();
  fill = 0;
  std::vector<std::byte> block(bytes);
  for (const DeviceArray<std::byte>* pool : {&keys, &values}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const common::PageCopy& copy : copies) {
        const std::vector<std::byte> expected(bytes, static_cast<std::byte>(++fill));
        for (const int number : {copy.source, copy.destination}) {
          CAPTURE(layer, number, fill);
          CUDA_CHECK(cudaMemcpy(block.data(), at(*pool, layer, number), bytes, cudaMemcpyDeviceToHost));
          CHECK((block == expected));
        }
      }
    }
  }
}

TEST_CASE("Block copy: a list of any length (stage 7, invariant 5)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const tests::KernelTable table = GENERATE(from_range(tests::kernel_tables()));
  const int count = GENERATE(479, 480, 481, 1300);
  CAPTURE(table.name, count);
  const PageShape shape{
      .num_blocks = 2600, .num_kv_heads = 1, .block_size = 16, .head_dim = 32, .type = ScalarType::kBFloat16};
  const auto block_bytes = static_cast<std::size_t>(shape.elements_per_block() * 2);
  std::vector<std::byte> pages(static_cast<std::size_t>(shape.num_blocks) * block_bytes);
  std::vector<common::PageCopy> copies(static_cast<std::size_t>(count));
  std::generate(copies.begin(), copies.end(), [i = 0]() mutable {
    const int source = i++;
    return common::PageCopy{source, 2599 - source};
  });
  for (std::size_t i = 0; i < pages.size(); ++i) {
    pages[i] = static_cast<std::byte>((i / block_bytes * 7 + i / block_bytes / 256) % 251);
  }
  const DeviceArray<std::byte> keys(pages);
  const DeviceArray<std::byte> values(pages);
  const common::Stream stream;
  table.kernels->copy_blocks(keys.data(), values.data(), 1, shape, copies.data(), count, stream.get());
  stream.synchronize();
  for (const common::PageCopy& copy : copies) {
    std::memcpy(&pages[static_cast<std::size_t>(copy.destination) * block_bytes],
                &pages[static_cast<std::size_t>(copy.source) * block_bytes], block_bytes);
  }
  const tests::Extents parts = {{"block", shape.num_blocks}, {"vector", static_cast<std::int64_t>(block_bytes) / 16}};
  CHECK(tests::compare_bytes("K", keys.download(), pages, parts) == tests::kNoDifference);
  CHECK(tests::compare_bytes("V", values.download(), pages, parts) == tests::kNoDifference);
}

TEST_CASE("Slots and blocks: bad arguments are refused before anything is launched (stage 7, invariant 6)", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const tests::KernelTable table = GENERATE(from_range(tests::kernel_tables()));
  CAPTURE(table.name);
  const PageShape shape{
      .num_blocks = 4, .num_kv_heads = 2, .block_size = 16, .head_dim = 128, .type = ScalarType::kBFloat16};
  const auto keys = tests::poisoned(shape.elements(), shape.type);
  const auto values = tests::poisoned(shape.elements(), shape.type);
  const DeviceArray<std::byte> rows(std::vector<std::byte>(std::size_t{64} * 256 * 2, std::byte{1}));
  const DeviceArray<int> slots(std::vector<int>{0, 1, 2, 3});
  const std::vector<common::PageCopy> copies = {{0, 1}};
  const common::Stream stream;
  struct Call {
    common::Pages pages;
    void* keys;
    void* values;
    std::int64_t stride;
    const int* slots;
    int count;  // of tokens, or of copies
    int num_layers;
    const common::PageCopy* copies;
  };
  const Call right{
      {keys.data(), values.data(), shape}, rows.data(), rows.data(), 256, slots.data(), 1, 1, copies.data()};
  const auto write = [&](const Call& call) {
    table.kernels->write_to_slots(call.pages, call.keys, call.values, call.stride, call.slots, call.count,
                                  stream.get());
  };
  const auto read = [&](const Call& call) {
    table.kernels->read_from_slots(call.pages, call.keys, call.values, call.stride, call.slots, call.count,
                                   stream.get());
  };
  const auto copy = [&](const Call& call) {
    table.kernels->copy_blocks(call.pages.keys, call.pages.values, call.num_layers, call.pages.shape, call.copies,
                               call.count, stream.get());
  };
  const auto wrong = [&](const char* what, bool for_slots, bool for_copies, const std::function<void(Call&)>& change) {
    CAPTURE(what);
    Call call = right;
    change(call);
    if (for_slots) {
      CHECK_THROWS_AS(write(call), common::CheckError);
      CHECK_THROWS_AS(read(call), common::CheckError);
    }
    if (for_copies) {
      CHECK_THROWS_AS(copy(call), common::CheckError);
    }
  };
  wrong("block size", true, true, [](Call& call) { call.pages.shape.block_size = 0; });
  wrong("head_dim", true, true, [](Call& call) { call.pages.shape.head_dim = 84; });
  wrong("no kv heads", true, true, [](Call& call) { call.pages.shape.num_kv_heads = 0; });
  wrong("no blocks", true, true, [](Call& call) { call.pages.shape.num_blocks = 0; });
  wrong("no pages", true, true, [](Call& call) { call.pages.keys = nullptr; });
  wrong("pages", true, true, [](Call& call) { call.pages.values = tests::off_by_2(call.pages.values); });
  wrong("count", true, true, [](Call& call) { call.count = -1; });
  wrong("no keys", true, false, [](Call& call) { call.keys = nullptr; });
  wrong("no values", true, false, [](Call& call) { call.values = nullptr; });
  wrong("rows", true, false, [](Call& call) { call.keys = tests::off_by_2(call.keys); });
  wrong("no slots", true, false, [](Call& call) { call.slots = nullptr; });
  wrong("rows that overlap", true, false, [](Call& call) { call.stride = 248; });
  wrong("rows of half vectors", true, false, [](Call& call) { call.stride = 260; });
  // 32 vectors for each token: 2^27 tokens have 2^32.
  wrong("too many tokens", true, false, [](Call& call) { call.count = 1 << 27; });
  wrong("no layers", false, true, [](Call& call) { call.num_layers = 0; });
  wrong("too many layers", false, true, [](Call& call) { call.num_layers = 32768; });
  wrong("no copies", false, true, [](Call& call) { call.copies = nullptr; });
  Call nothing = right;
  nothing.count = 0;
  nothing.keys = nullptr;
  nothing.slots = nullptr;
  nothing.copies = nullptr;
  CHECK_NOTHROW(write(nothing));
  CHECK_NOTHROW(read(nothing));
  CHECK_NOTHROW(copy(nothing));

  stream.synchronize();
  CHECK(tests::is_poisoned(keys));
  CHECK(tests::is_poisoned(values));
  CHECK((rows.download() == std::vector<std::byte>(rows.size(), std::byte{1})));
}

TEST_CASE("The number of a slot has to fit into 32 bits") {
  PageShape shape{.num_blocks = (1 << 27) - 1, .num_kv_heads = 1, .block_size = 16, .head_dim = 64};
  CHECK(stage::kPlainKernels.unsupported(shape, 1).empty());
  ++shape.num_blocks;
  CHECK(stage::kPlainKernels.unsupported(shape, 1).find("32 bits") != std::string::npos);
}

#ifdef COURSE_PRODUCTION
TEST_CASE("A kernel's attributes are set once, and not at each launch", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  static int num_settings;
  num_settings = 0;
  tests::GpuBatch batch(
      {.type = ScalarType::kBFloat16, .head_dim = 128, .context_lengths = {100}, .query_lengths = {}});
  (void)batch.decode();
  common::device_call_hook = [](const char* call) {
    num_settings += std::strstr(call, "cudaFuncSetAttribute") != nullptr ? 1 : 0;
  };
  (void)batch.decode();
  common::device_call_hook = nullptr;
  CHECK(num_settings == 0);
}
#endif

TEST_CASE("Device memory that is not there is a clear error", "[gpu]") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  CUDA_CHECK(cudaMemGetInfo(&before, &total));
  CHECK_THROWS_AS(common::DeviceMemory(std::size_t{1} << 50), common::OutOfDeviceMemory);
  CUDA_CHECK(cudaMemGetInfo(&after, &total));
  CHECK(before == after);
  CHECK(common::DeviceMemory(1024).data() != nullptr);  // the failure has left no error behind
}
