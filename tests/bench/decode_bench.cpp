// Decode attention beside what others reach.
#include <algorithm>
#include <limits>
#include <ostream>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/text.h"
#include "tests/bench/bench_parts.h"
#include "tests/bench/contiguous_attention.h"

namespace stage7 {
namespace {

const HeadShape kGrouped{.num_heads = 32, .num_kv_heads = 8};
const HeadShape kUngrouped{.num_heads = 32, .num_kv_heads = 32};

struct Row {
  HeadShape shape;
  BenchCase cell;
  // Microseconds of the fastest kernel over pages of 16 among FlashInfer 0.6.18, FlashAttention-3 (0251105a), cuDNN
  // 9.19, vLLM's and two Triton kernels, measured on another H200 by the same method; 0: not measured. The goal is 6 %
  // more than a kernel needs that copies the same pages and computes nothing, and never more than that peer.
  double goal = 0.0;
  double peer = 0.0;
  const char* peer_name = "";
};

const std::vector<Row> kRows = {
    {kGrouped, {1, 1024}, 6.3, 7.7, "cuDNN"},
    {kGrouped, {1, 8192}, 14, 16.5, "cuDNN"},
    {kGrouped, {1, 32768}, 40, 41.9, "cuDNN"},
    {kGrouped, {8, 1024}, 13.5, 15.9, "cuDNN"},
    {kGrouped, {8, 8192}, 71, 72.8, "FlashAttention-3"},
    {kGrouped, {8, 32768}, 252, 254, "FlashInfer"},
    {kGrouped, {32, 1024}, 36.5, 39.3, "cuDNN"},
    {kGrouped, {32, 8192}, 250, 251, "FlashInfer"},
    {kGrouped, {32, 32768}, 968, 969, "FlashInfer"},
    {kGrouped, {128, 1024}, 131, 134, "cuDNN"},
    {kGrouped, {128, 8192}, 974, 975, "FlashInfer"},
    {kGrouped, {32, 0}, 223, 238, "FlashAttention-3"},
    {kUngrouped, {1, 1024}, 9.1, 9.3, "FlashInfer"},
    {kUngrouped, {1, 8192}, 38, 40.3, "FlashInfer"},
    {kUngrouped, {1, 32768}, 130, 130, "FlashInfer"},
    {kUngrouped, {8, 1024}, 36, 38.9, "cuDNN"},
    {kUngrouped, {8, 8192}, 249, 250, "FlashInfer"},
    {kUngrouped, {8, 32768}, 962, 964, "FlashInfer"},
    {kUngrouped, {32, 1024}, 130, 132, "cuDNN"},
    {kUngrouped, {32, 8192}, 966, 968, "FlashInfer"},
    {kUngrouped, {32, 32768}, 3830, 3837, "FlashInfer"},
    {kUngrouped, {128, 1024}, 484, 485, "cuDNN"},
    {kUngrouped, {128, 8192}, 3797, 3798, "cuDNN"},
    {kUngrouped, {32, 0}, 850, 854, "FlashAttention-3"},
};

// Shapes that nothing was tuned to.
const std::vector<HeadShape> kOtherShapes = {
    {.num_heads = 9, .num_kv_heads = 3, .head_dim = 64},
    {.num_heads = 28, .num_kv_heads = 4},
    {.num_heads = 64, .num_kv_heads = 8},
    {.num_heads = 32, .num_kv_heads = 2},
    {.num_heads = 16, .num_kv_heads = 8, .head_dim = 256},
    {.num_heads = 32, .num_kv_heads = 8, .block_size = 8},
    {.num_heads = 32, .num_kv_heads = 8, .block_size = 32},
    {.num_heads = 32, .num_kv_heads = 8, .block_size = 64},
};

std::vector<Row> rows_of(const KernelBenchOptions& options) {
  std::vector<Row> rows = kRows;
  if (!options.cell.empty()) {
    const BenchCase wanted = parse_case(options.cell);
    std::erase_if(rows, [&](const Row& row) { return name_of(row.cell) != name_of(wanted); });
    if (rows.empty()) {
      rows = {{kGrouped, wanted}, {kUngrouped, wanted}};
    }
    for (const HeadShape& shape : kOtherShapes) {
      rows.push_back({shape, wanted});
    }
    return rows;
  }
  for (const HeadShape& shape : kOtherShapes) {
    for (const BenchCase& cell : {BenchCase{1, 8192}, BenchCase{8, 8192}, BenchCase{32, 8192}, BenchCase{32, 0}}) {
      rows.push_back({shape, cell});
    }
  }
  return rows;
}

std::string microseconds_or_dash(double microseconds) {
  return microseconds > 0.0 ? common::format_microseconds(microseconds) : "-";
}

// What paging itself costs: the same kernel on as many bytes, without blocks and table, with blocks one after the
// other, and with blocks in random order.
void print_paging(const common::Stream& stream, const Pool& pool, const std::vector<Row>& rows, std::ostream& output) {
  common::Table table({"heads", "cell", "contiguous", "blocks in order", "blocks shuffled", "difference"});
  common::Progress progress("measuring what paging costs", static_cast<std::int64_t>(rows.size()));
  for (const Row& row : rows) {
    progress.advance();
    if (row.shape.head_dim != 128 || row.shape.block_size != 16 || row.cell.context == 0 ||
        !pool.has_room_for(row.shape, row.cell)) {
      continue;
    }
    const ColdBatches in_order(pool, row.shape, row.cell, PageOrder::kInOrder);
    const double contiguous = time_decode(stream, in_order, true);
    const double ordered = time_decode(stream, in_order);
    const double shuffled = time_decode(stream, ColdBatches(pool, row.shape, row.cell));
    table.add_row({name_of(row.shape), name_of(row.cell), common::format_microseconds(contiguous),
                   common::format_microseconds(ordered), common::format_microseconds(shuffled),
                   common::format("%+.1f %%", 100.0 * (shuffled / contiguous - 1.0))});
  }
  progress.clear();
  output
      << "What paging costs: the same kernel on a cache without blocks or table, and on blocks in order and shuffled:\n"
      << table.to_string() << "\n";
}

}  // namespace

double time_decode(const common::Stream& stream, const ColdBatches& sets, bool contiguous) {
  const PageShape& shape = sets.pages().shape;
  const common::DeviceMemory workspace(decode_workspace_bytes(shape, sets.batch(0)));
  plan_decode(shape, sets.batch(0), workspace.data(), stream.get());
  stream.synchronize();
  return common::microseconds_per_call(stream, sets.count(), [&](int set) {
    const auto attention = contiguous ? contiguous_attention : decode_attention;
    attention(contiguous ? sets.contiguous(set) : sets.pages(), sets.batch(set), sets.queries(), sets.output(),
              workspace.data(), stream.get(), {.overlap_previous = true});
  });
}

double time_decode_plan(const common::Stream& stream, const ColdBatches& sets) {
  const PageShape& shape = sets.pages().shape;
  const common::DeviceMemory workspace(decode_workspace_bytes(shape, sets.batch(0)));
  return common::microseconds_per_call(
      stream, 20, [&](int) { plan_decode(shape, sets.batch(0), workspace.data(), stream.get()); }, 1e3);
}

void print_decode_speed(const KernelBenchOptions& options, std::ostream& output) {
  const std::vector<Row> rows = rows_of(options);
  std::vector<TimedCase> cells;
  cells.reserve(rows.size());
  for (const Row& row : rows) {
    cells.push_back({row.shape, row.cell});
  }
  const common::Stream stream;
  const Pool pool = pool_for(cells);
  const double ceiling = print_machine(stream, pool, output);
  common::Table table({"heads", "cell", "MB", "us", "ceiling", "goal", "best paged peer"});
  double fastest_plan = std::numeric_limits<double>::infinity();
  double slowest_plan = 0.0;
  common::Progress progress("measuring decode attention", static_cast<std::int64_t>(rows.size()));
  for (const Row& row : rows) {
    const std::int64_t bytes = kv_bytes_of(row.shape, row.cell);
    std::string time = "-";
    std::string part = "-";
    if (pool.has_room_for(row.shape, row.cell)) {
      const ColdBatches sets(pool, row.shape, row.cell);
      const double microseconds = time_decode(stream, sets);
      const double plan = time_decode_plan(stream, sets);
      fastest_plan = std::min(fastest_plan, plan);
      slowest_plan = std::max(slowest_plan, plan);
      time = common::format_microseconds(microseconds);
      part = common::format("%.1f %%", static_cast<double>(bytes) / microseconds / 10.0 / ceiling);
    }
    table.add_row({name_of(row.shape), name_of(row.cell), common::format("%.1f", static_cast<double>(bytes) / 1e6),
                   time, part, microseconds_or_dash(row.goal),
                   row.peer > 0.0 ? common::format_microseconds(row.peer) + " " + row.peer_name : "-"});
    progress.advance();
  }
  progress.clear();
  output << "Decode attention, bfloat16, random blocks. Peers and goals: of another H200 that reads 4,576 GB/s.\n"
         << table.to_string()
         << common::format("plan_decode, once a step and not in the times above: %.1f to %.1f us\n\n", fastest_plan,
                           slowest_plan);
  std::vector<Row> few = rows;
  if (options.cell.empty()) {
    std::erase_if(few, [](const Row& row) {
      return row.goal == 0.0 || (row.cell.context != 8192 && row.cell.batch * row.cell.context != 1024);
    });
  }
  print_paging(stream, pool, few, output);
}

}  // namespace
