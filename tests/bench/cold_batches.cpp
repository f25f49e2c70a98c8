#include "tests/bench/cold_batches.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/sampling.h"

namespace stage7 {
namespace {

constexpr std::int64_t kBytesOfAllSets = 600'000'000;  // ten times the L2 cache of an H200

template <typename T>
void shuffle(std::vector<T>& values, common::Random& random) {
  for (std::size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[static_cast<std::size_t>(random.below(i))]);
  }
}

int blocks_of(int length, int block_size) { return (length + block_size - 1) / block_size; }

PageShape page_shape(const HeadShape& shape, std::int64_t num_blocks) {
  return {.num_blocks = num_blocks,
          .num_kv_heads = shape.num_kv_heads,
          .block_size = shape.block_size,
          .head_dim = shape.head_dim,
          .type = shape.type};
}

std::int64_t blocks_of_all_sets(const HeadShape& shape, const BenchCell& cell) {
  std::int64_t blocks = 0;
  for (const int length : lengths_of(cell)) {
    blocks += blocks_of(length, shape.block_size);
  }
  return blocks * num_sets_of(shape, cell);
}

// Fills float8 pages with random numbers, by way of `rows`, which are bfloat16.
void fill_with_float8(const Pages& pages, const common::DeviceMemory& rows) {
  const std::int64_t columns = std::int64_t{pages.shape.num_kv_heads} * pages.shape.head_dim;
  const auto num_rows = static_cast<std::int64_t>(rows.bytes() / 2) / columns;
  const std::int64_t num_slots = pages.shape.num_blocks * pages.shape.block_size;
  for (std::int64_t first = 0; first < num_slots; first += num_rows) {
    std::vector<int> slots(static_cast<std::size_t>(std::min(num_rows, num_slots - first)));
    std::iota(slots.begin(), slots.end(), static_cast<int>(first));
    const common::DeviceArray<int> device_slots(slots);
    common::kProductionKernels.write_to_slots(pages, rows.data(), rows.data(), columns, device_slots.data(),
                                              static_cast<int>(slots.size()), nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
  }
}

common::DeviceMemory random_rows(std::size_t size, std::uint64_t seed) {
  const std::vector<std::uint16_t> numbers = random_bf16(size, seed);
  common::DeviceMemory rows(numbers.size() * sizeof(std::uint16_t));
  CUDA_CHECK(cudaMemcpy(rows.data(), numbers.data(), rows.bytes(), cudaMemcpyHostToDevice));
  return rows;
}

int positive_number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number > 0 ? number : 0;
}

}  // namespace

std::string name_of(const HeadShape& shape) {
  const std::string name = common::format("%d/%d x %d", shape.num_heads, shape.num_kv_heads, shape.head_dim);
  return shape.block_size == 16 ? name : name + common::format(", blocks of %d", shape.block_size);
}

std::string name_of(const BenchCell& cell) {
  return std::to_string(cell.batch) + "x" + (cell.context == 0 ? "ragged" : std::to_string(cell.context));
}

BenchCell parse_cell(const std::string& text) {
  const std::size_t cross = text.find('x');
  if (cross != std::string::npos) {
    const std::string_view context = std::string_view(text).substr(cross + 1);
    const BenchCell cell{.batch = positive_number(std::string_view(text).substr(0, cross)),
                         .context = positive_number(context)};
    const bool has_context = cell.context > 0 || context == "ragged";
    if (cell.batch > 0 && cell.batch <= 1024 && cell.context <= 1 << 20 && has_context) {
      return cell;
    }
  }
  throw common::InputError("a cell is sequences x tokens, as 8x1024 or 32xragged (at most 1024x1048576), not " +
                           common::quote(text));
}

std::vector<int> lengths_of(const BenchCell& cell) {
  std::vector<int> lengths(static_cast<std::size_t>(cell.batch), cell.context);
  if (cell.context == 0) {
    constexpr double kShortest = 250.0;
    constexpr double kLongest = 32765.0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const double part = static_cast<double>(i) / static_cast<double>(std::max<std::size_t>(1, lengths.size() - 1));
      lengths[i] = static_cast<int>(std::lround(kShortest * std::pow(kLongest / kShortest, part)));
    }
    common::Random random(3);
    shuffle(lengths, random);
  }
  return lengths;
}

std::int64_t kv_bytes_of(const HeadShape& shape, const BenchCell& cell) {
  std::int64_t num_tokens = 0;
  for (const int length : lengths_of(cell)) {
    num_tokens += cell.window > 0 ? std::min(length, cell.window) : length;
  }
  const int row_bytes = shape.type == ScalarType::kFloat8 ? shape.head_dim + 1 : 2 * shape.head_dim;
  return 2 * num_tokens * shape.num_kv_heads * row_bytes;  // K and V
}

std::int64_t pool_bytes_of(const HeadShape& shape, const BenchCell& cell) {
  return 2 * page_shape(shape, blocks_of_all_sets(shape, cell)).elements() * bytes_of(shape.type);
}

int num_sets_of(const HeadShape& shape, const BenchCell& cell) {
  const std::int64_t kv_bytes = kv_bytes_of(shape, cell);
  return static_cast<int>((kBytesOfAllSets + 2 * kv_bytes - 1) / (2 * kv_bytes)) * 2;
}

std::vector<int> shuffled(std::int64_t size) {
  std::vector<int> order(static_cast<std::size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  common::Random random(1);
  shuffle(order, random);
  return order;
}

std::vector<std::uint16_t> random_bf16(std::size_t size, std::uint64_t seed) {
  constexpr std::size_t kPeriod = 1'000'003;  // a prime, so that no two rows of the same batch begin alike
  common::Random random(seed);
  std::vector<std::uint16_t> values(size);
  for (std::size_t i = 0; i < size; ++i) {
    if (i >= kPeriod) {
      values[i] = values[i - kPeriod];
      continue;
    }
    const auto value = static_cast<float>(random.normal());
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    values[i] = static_cast<std::uint16_t>(bits >> 16U);
  }
  return values;
}

common::DeviceMemory random_pages(const PageShape& shape, std::uint64_t seed) {
  const auto size = static_cast<std::size_t>(shape.elements());
  common::DeviceMemory rows = random_rows(size, seed);
  if (shape.type != ScalarType::kFloat8) {
    return rows;
  }
  common::DeviceMemory pages(size);
  fill_with_float8({pages.data(), pages.data(), shape}, rows);
  return pages;
}

Pool::Pool(std::int64_t bytes) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  constexpr std::size_t kAlignment = 4096;
  const std::size_t each = std::min(static_cast<std::size_t>(bytes), free_bytes / 10 * 8) / 2 / kAlignment * kAlignment;
  keys = common::DeviceMemory(each);
  values = common::DeviceMemory(each);
  const std::vector<std::uint16_t> numbers = random_bf16(std::size_t{1} << 23);
  const std::size_t chunk = std::min(each, numbers.size() * sizeof(std::uint16_t));
  for (const common::DeviceMemory* memory : {&keys, &values}) {
    auto* begin = static_cast<std::byte*>(memory->data());
    CUDA_CHECK(cudaMemcpy(begin, numbers.data(), chunk, cudaMemcpyHostToDevice));
    for (std::size_t done = chunk; done < each; done *= 2) {
      CUDA_CHECK(cudaMemcpy(begin + done, begin, std::min(done, each - done), cudaMemcpyDeviceToDevice));
    }
  }
  CUDA_CHECK(cudaDeviceSynchronize());
}

bool Pool::has_room_for(const HeadShape& shape, const BenchCell& cell) const {
  return static_cast<std::size_t>(pool_bytes_of(shape, cell)) <= 2 * keys.bytes();
}

ColdBatches::ColdBatches(const Pool& pool, const HeadShape& shape, const BenchCell& cell, PageOrder order)
    : count_(num_sets_of(shape, cell)) {
  const std::int64_t num_blocks = blocks_of_all_sets(shape, cell);
  COMMON_CHECK(pool.has_room_for(shape, cell), "the pool is too small");
  pages_ = {pool.keys.data(), pool.values.data(), page_shape(shape, num_blocks)};
  std::vector<int> blocks = shuffled(num_blocks);
  if (order == PageOrder::kInOrder) {
    std::iota(blocks.begin(), blocks.end(), 0);
  }
  const std::vector<int> lengths = lengths_of(cell);
  const int max_blocks = blocks_of(*std::max_element(lengths.begin(), lengths.end()), shape.block_size);
  const auto row = static_cast<std::size_t>(max_blocks);
  std::vector<int> tables(static_cast<std::size_t>(count_) * lengths.size() * row, 0);
  std::size_t next = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count_) * lengths.size(); ++i) {
    const int own = blocks_of(lengths[i % lengths.size()], shape.block_size);
    std::copy_n(&blocks[next], own, &tables[i * row]);
    next += static_cast<std::size_t>(own);
  }
  tables_ = common::DeviceArray<int>(tables);
  std::vector<int> starts(lengths.size());
  std::generate(starts.begin(), starts.end(), [&, next = -max_blocks]() mutable { return next += max_blocks; });
  table_starts_ = common::DeviceArray<int>(starts);
  lengths_ = common::DeviceArray<int>(lengths);
  output_ = common::DeviceMemory(lengths.size() * static_cast<std::size_t>(shape.num_heads * shape.head_dim) * 2);
  if (shape.type == ScalarType::kFloat8) {
    queries_ = random_rows(std::size_t{1} << 24, 2);
    fill_with_float8(pages_, queries_);
  }
  first_ = {.num_sequences = cell.batch,
            .num_heads = shape.num_heads,
            .context_lengths = lengths_.data(),
            .block_tables = tables_.data(),
            .table_starts = table_starts_.data(),
            .max_blocks_per_sequence = max_blocks,
            .window = cell.window};
}

Pages ColdBatches::contiguous(int set) const {
  Pages own = pages_;
  own.shape.num_blocks = first_.num_sequences;
  own.shape.block_size *= first_.max_blocks_per_sequence;
  COMMON_CHECK(own.shape.elements() * count_ == pages_.shape.elements(), "sequences are equally long");
  const std::int64_t begin = set * own.shape.elements() * bytes_of(own.shape.type);
  own.keys = static_cast<std::byte*>(own.keys) + begin;
  own.values = static_cast<std::byte*>(own.values) + begin;
  return own;
}

BatchArrays ColdBatches::batch(int set) const {
  BatchArrays own = first_;
  own.block_tables += std::int64_t{set} * own.num_sequences * own.max_blocks_per_sequence;
  return own;
}

}  // namespace
