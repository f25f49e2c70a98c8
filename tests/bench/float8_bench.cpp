// Attention over float8 K and V beside bfloat16's, in one run.
#include <algorithm>
#include <iterator>
#include <ostream>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/text.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {
namespace {

HeadShape as_float8(HeadShape shape) {
  shape.type = ScalarType::kFloat8;
  return shape;
}

std::vector<TimedCase> decode_rows(const KernelBenchOptions& options) {
  const HeadShape grouped{.num_heads = 32, .num_kv_heads = 8};
  const HeadShape ungrouped{.num_heads = 32, .num_kv_heads = 32};
  if (!options.cell.empty()) {
    return {{grouped, parse_cell(options.cell)}, {ungrouped, parse_cell(options.cell)}};
  }
  std::vector<TimedCase> rows;
  for (const char* cell : {"1x1024", "1x8192", "1x32768", "8x8192", "32x1024", "8x32768", "32x8192", "128x1024",
                           "32x32768", "32xragged"}) {
    rows.push_back({grouped, parse_cell(cell)});
  }
  for (const char* cell : {"1x8192", "8x8192", "32x8192", "32xragged"}) {
    rows.push_back({ungrouped, parse_cell(cell)});
  }
  const BenchCell large = parse_cell("32x8192");
  for (const HeadShape& shape :
       {HeadShape{.num_heads = 32, .num_kv_heads = 8, .head_dim = 64}, HeadShape{.num_heads = 64, .num_kv_heads = 8},
        HeadShape{.num_heads = 32, .num_kv_heads = 2}, HeadShape{.num_heads = 16, .num_kv_heads = 8, .head_dim = 256},
        HeadShape{.num_heads = 32, .num_kv_heads = 8, .block_size = 64}}) {
    rows.push_back({shape, large});
  }
  return rows;
}

}  // namespace

void print_float8_speed(const KernelBenchOptions& options, std::ostream& output) {
  const common::Stream stream;
  const std::vector<TimedCase> rows = decode_rows(options);
  std::vector<TimedCase> all = rows;
  std::transform(rows.begin(), rows.end(), std::back_inserter(all), [](const TimedCase& row) {
    return TimedCase{as_float8(row.shape), row.cell};
  });
  const Pool pool = pool_for(all);
  const double ceiling = print_machine(stream, pool, output);
  common::Table decode({"heads", "cell", "bfloat16 MB", "us", "ceiling", "float8 MB", "us", "ceiling", "faster by"});
  common::Progress progress("measuring decode attention", static_cast<std::int64_t>(rows.size()));
  for (const TimedCase& row : rows) {
    double times[2];
    std::vector<std::string> cells = {name_of(row.shape), name_of(row.cell)};
    for (const bool is_float8 : {false, true}) {
      const HeadShape shape = is_float8 ? as_float8(row.shape) : row.shape;
      const auto bytes = static_cast<double>(kv_bytes_of(shape, row.cell));
      const double microseconds = time_decode(stream, ColdBatches(pool, shape, row.cell));
      times[is_float8 ? 1 : 0] = microseconds;
      cells.push_back(common::format("%.1f", bytes / 1e6));
      cells.push_back(common::format_microseconds(microseconds));
      cells.push_back(common::format("%.1f %%", bytes / microseconds / 10.0 / ceiling));
    }
    cells.push_back(common::format("%.2f", times[0] / times[1]));
    decode.add_row(cells);
    progress.advance();
  }
  progress.clear();
  output << "Decode attention, random blocks.\n" << decode.to_string() << "\n" << std::flush;
  if (!options.cell.empty()) {
    return;
  }
  common::Table prompts({"heads", "prompts", "bfloat16 us", "TFLOP/s", "float8 us", "TFLOP/s"});
  for (const Prompts& row : {
           Prompts{"1x8192", {8192}, {}},
           Prompts{"4x2048", std::vector<int>(4, 2048), {}},
           Prompts{"16x512", std::vector<int>(16, 512), {}},
           Prompts{"32x128", std::vector<int>(32, 128), {}},
           Prompts{"4x512 after 4096", std::vector<int>(4, 512), {}, 4096},
           Prompts{"1x8192", {8192}, {.num_heads = 9, .num_kv_heads = 3, .head_dim = 64}},
       }) {
    std::vector<std::string> cells = {name_of(row.shape), row.name};
    for (const bool is_float8 : {false, true}) {
      Prompts own = row;
      own.shape = is_float8 ? as_float8(row.shape) : row.shape;
      const double microseconds = time_prompts(stream, own).microseconds;
      cells.push_back(common::format_microseconds(microseconds));
      cells.push_back(common::format("%.0f", flops_of(own) / microseconds / 1e6));
    }
    prompts.add_row(cells);
  }
  output << "Causal attention of prompts, random blocks.\n" << prompts.to_string() << "\n" << std::flush;
  common::Table writes({"tokens", "bfloat16 us", "float8 us"});
  for (const int num_tokens : {1, 128, 8192, 65536}) {
    std::vector<std::string> cells = {common::format_count(num_tokens)};
    for (const ScalarType type : {ScalarType::kBFloat16, ScalarType::kFloat8}) {
      cells.push_back(common::format_microseconds(time_writing(stream, type, num_tokens)));
    }
    writes.add_row(cells);
  }
  output << "Writing to slots, 8 kv heads of 128 dimensions, whole blocks.\n" << writes.to_string() << "\n";
}

}  // namespace
