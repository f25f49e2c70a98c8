// The kernels that only move bytes.
#include <algorithm>
#include <ostream>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/text.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {
namespace {

constexpr int kBlockSize = 16;

PageShape shape_of(std::int64_t num_blocks, ScalarType type = ScalarType::kBFloat16) {
  return {.num_blocks = num_blocks, .num_kv_heads = 8, .block_size = kBlockSize, .head_dim = 128, .type = type};
}

struct Row {
  std::string kernel;
  int count;
  double microseconds;
  double bytes;  // read and written
};

// Memory that has been written to: pages that never were can be faster to read than real ones.
common::DeviceMemory touched(std::size_t bytes) {
  common::DeviceMemory memory(bytes);
  CUDA_CHECK(cudaMemset(memory.data(), 1, bytes));
  CUDA_CHECK(cudaDeviceSynchronize());
  return memory;
}

// scattered: each token goes into a block of its own, as in a decode step. Otherwise tokens go into blocks in random
// order that they share with their neighbours, as in a prompt.
Row time_write(const common::Stream& stream, int num_tokens, bool scattered, ScalarType type = ScalarType::kBFloat16) {
  const PageShape shape = shape_of(1 << 14, type);
  const std::vector<int> blocks = shuffled(shape.num_blocks);
  std::vector<int> slots(blocks.size() * kBlockSize);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::size_t block = scattered ? i % blocks.size() : i / kBlockSize;
    const std::size_t row = scattered ? i / blocks.size() : i % kBlockSize;
    slots[i] = blocks[block] * kBlockSize + static_cast<int>(row);
  }
  const common::DeviceArray<int> device_slots(slots);
  const std::size_t bytes = static_cast<std::size_t>(shape.elements()) * 2;
  const common::DeviceMemory keys = touched(bytes);
  const common::DeviceMemory values = touched(bytes);
  const common::DeviceMemory rows = touched(2 * bytes);
  const std::int64_t stride = std::int64_t{shape.num_kv_heads} * shape.head_dim;
  const int num_sets = static_cast<int>(slots.size()) / num_tokens;
  const int calls = std::min(num_sets, 200);
  const double microseconds = common::microseconds_per_call(stream, calls, [&](int call) {
    const std::int64_t first = std::int64_t{call} * (num_sets / calls) * num_tokens;
    const std::byte* own = static_cast<const std::byte*>(rows.data()) + first * stride * 2;
    common::kProductionKernels.write_to_slots({keys.data(), values.data(), shape}, own, own + bytes, stride,
                                              device_slots.data() + first, num_tokens, stream.get());
  });
  return {scattered ? "write_to_slots, a block each" : "write_to_slots, whole blocks", num_tokens, microseconds,
          4.0 * static_cast<double>(stride) * 2.0 * num_tokens};
}

Row time_copy(const common::Stream& stream, int num_pairs) {
  constexpr int kLayers = 16;
  const PageShape shape = shape_of(4096);
  const std::size_t bytes = static_cast<std::size_t>(kLayers * shape.elements()) * 2;
  const common::DeviceMemory keys = touched(bytes);
  const common::DeviceMemory values = touched(bytes);
  const std::vector<int> blocks = shuffled(shape.num_blocks);
  std::vector<PageCopy> copies;
  for (std::size_t i = 0; i < blocks.size(); i += 2) {
    copies.push_back({blocks[i], blocks[i + 1]});
  }
  const int calls = static_cast<int>(copies.size()) / num_pairs;
  const double microseconds = common::microseconds_per_call(stream, calls, [&](int call) {
    common::kProductionKernels.copy_blocks(keys.data(), values.data(), kLayers, shape,
                                           copies.data() + std::int64_t{call} * num_pairs, num_pairs, stream.get());
  });
  return {"copy_blocks, 16 layers", num_pairs, microseconds,
          2.0 * 2.0 * 2.0 * static_cast<double>(shape.elements_per_block()) * kLayers * num_pairs};
}

// The runtime's own copy as a yardstick. It is not in a graph, where it would be another, slower copy.
Row time_device_copy(const common::Stream& stream) {
  constexpr std::size_t kBytes = std::size_t{1} << 32;
  const common::DeviceMemory from = touched(kBytes);
  const common::DeviceMemory to = touched(kBytes);
  common::Event first;
  common::Event last;
  double microseconds = 0.0;
  for (int i = 0; i < 3; ++i) {
    first.record(stream);
    CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream.get()));
    last.record(stream);
    microseconds = common::Event::microseconds(first, last);
  }
  return {"cudaMemcpy of 4 GiB", 1, microseconds, 2.0 * static_cast<double>(kBytes)};
}

}  // namespace

double time_writing(const common::Stream& stream, ScalarType type, int num_tokens) {
  return time_write(stream, num_tokens, false, type).microseconds;
}

void print_cache_speed(std::ostream& output) {
  const common::Stream stream;
  common::Table table({"kernel", "tokens, pairs", "us", "GB/s"});
  common::Progress progress("measuring the cache's kernels", 11);
  const auto add = [&](const Row& row) {
    table.add_row({row.kernel, common::format_count(row.count), common::format_microseconds(row.microseconds),
                   common::format("%.0f", row.bytes / row.microseconds / 1e3)});
    progress.advance();
  };
  add(time_device_copy(stream));
  add(time_write(stream, 128, true));
  add(time_write(stream, 1024, true));
  add(time_write(stream, 128, false));
  add(time_write(stream, 1024, false));
  add(time_write(stream, 8192, false));
  add(time_write(stream, 65536, false));
  add(time_write(stream, 65536, true));
  add(time_copy(stream, 16));
  add(time_copy(stream, 256));
  add(time_copy(stream, 1024));
  progress.clear();
  output << "Writing and copying blocks, bfloat16, 8 kv heads of 128 dimensions; bytes are read and written ones.\n"
         << table.to_string() << "\n";
}

}  // namespace
