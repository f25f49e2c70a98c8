#include "tests/bench/kernel_bench.h"

#include <algorithm>
#include <ostream>

#include "common/base/check.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {

Pool pool_for(const std::vector<TimedCase>& cases) {
  std::int64_t bytes = 0;
  for (const auto& [shape, cell] : cases) {
    bytes = std::max(bytes, pool_bytes_of(shape, cell) + 8192);  // K's and V's memory is whole pages of 4,096
  }
  return Pool(bytes);
}

double print_machine(const common::Stream& stream, const Pool& pool, std::ostream& output) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 34;
  const double ceiling = common::read_ceiling(stream, pool.keys.data(), std::min(kMaxBytes, pool.keys.bytes()));
  output << common::machine_line(ceiling) << "\n\n" << std::flush;
  return ceiling;
}

void print_kernel_speed(const std::string& which, std::ostream& output, const KernelBenchOptions& options) {
  if (which != "decode" && which != "ragged" && which != "chunks" && which != "mixed" && which != "cache" &&
      which != "shared" && which != "windows" && which != "float8" && which != "sampling" && which != "products" &&
      which != "all") {
    throw common::InputError(
        "kernels to measure are decode, ragged, chunks, mixed, shared, windows, cache, float8, sampling, products or "
        "all, not " +
        which);
  }
  if (!common::has_cuda_device()) {
    throw common::InputError("measuring kernels needs a GPU of compute capability 8.0 or newer");
  }
  if (which == "decode" || which == "all") {
    print_decode_speed(options, output);
  }
  if (which == "ragged" || which == "all") {
    print_ragged_speed(output);
  }
  if (which == "chunks") {
    print_chunk_speed(output);
  }
  if (which == "mixed") {
    print_mixed_speed(output);
  }
  if (which == "shared") {
    print_shared_speed(output);
  }
  if (which == "windows") {
    print_window_speed(output);
  }
  if (which == "cache" || which == "all") {
    print_cache_speed(output);
  }
  if (which == "float8") {
    print_float8_speed(options, output);
  }
  if (which == "sampling") {
    print_sampling_speed(output);
  }
  if (which == "products") {
    print_product_speed(output);
  }
}

}  // namespace
