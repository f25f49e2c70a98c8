// Decode attention beside this machine's read ceiling. What other kernels reach is in peers/.
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

// The usual shapes, in the usual batches.
const std::vector<TimedCase> kRows = {
    {kGrouped, {1, 1024}},     {kGrouped, {1, 8192}},     {kGrouped, {1, 32768}},    {kGrouped, {8, 1024}},
    {kGrouped, {8, 8192}},     {kGrouped, {8, 32768}},    {kGrouped, {32, 1024}},    {kGrouped, {32, 8192}},
    {kGrouped, {32, 32768}},   {kGrouped, {128, 1024}},   {kGrouped, {128, 8192}},   {kGrouped, {32, 0}},
    {kUngrouped, {1, 1024}},   {kUngrouped, {1, 8192}},   {kUngrouped, {1, 32768}},  {kUngrouped, {8, 1024}},
    {kUngrouped, {8, 8192}},   {kUngrouped, {8, 32768}},  {kUngrouped, {32, 1024}},  {kUngrouped, {32, 8192}},
    {kUngrouped, {32, 32768}}, {kUngrouped, {128, 1024}}, {kUngrouped, {128, 8192}}, {kUngrouped, {32, 0}},
};

// Shapes that the kernels were not tuned for.
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

std::vector<TimedCase> rows_of(const KernelBenchOptions& options) {
  std::vector<TimedCase> rows = kRows;
  if (!options.cell.empty()) {
    const BenchCell wanted = parse_cell(options.cell);
    std::erase_if(rows, [&](const TimedCase& row) { return name_of(row.cell) != name_of(wanted); });
    if (rows.empty()) {
      rows = {{kGrouped, wanted}, {kUngrouped, wanted}};
    }
    for (const HeadShape& shape : kOtherShapes) {
      rows.push_back({shape, wanted});
    }
    return rows;
  }
  for (const HeadShape& shape : kOtherShapes) {
    for (const BenchCell& cell : {BenchCell{1, 8192}, BenchCell{8, 8192}, BenchCell{32, 8192}, BenchCell{32, 0}}) {
      rows.push_back({shape, cell});
    }
  }
  return rows;
}

// What paging itself costs: the same kernel on the same number of bytes, without blocks and table, with blocks in
// order, and with blocks in random order.
void print_paging(const common::Stream& stream, const Pool& pool, const std::vector<TimedCase>& rows,
                  std::ostream& output) {
  common::Table table({"heads", "cell", "contiguous", "blocks in order", "blocks shuffled", "difference"});
  common::Progress progress("measuring what paging costs", static_cast<std::int64_t>(rows.size()));
  for (const TimedCase& row : rows) {
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
  const common::DeviceMemory workspace(common::decode_workspace_bytes(shape, sets.batch(0)));
  common::plan_decode(shape, sets.batch(0), workspace.data(), stream.get());
  stream.synchronize();
  return common::microseconds_per_call(stream, sets.count(), [&](int set) {
    const common::DecodeOptions options{.overlap_previous = true};
    if (contiguous) {
      contiguous_attention(sets.contiguous(set), sets.batch(set), sets.queries(), sets.output(), workspace.data(),
                           stream.get(), options);
    } else {
      common::decode_attention(sets.pages(), sets.batch(set), sets.queries(), sets.output(), workspace.data(),
                               stream.get(), options);
    }
  });
}

double time_decode_plan(const common::Stream& stream, const ColdBatches& sets) {
  const PageShape& shape = sets.pages().shape;
  const common::DeviceMemory workspace(common::decode_workspace_bytes(shape, sets.batch(0)));
  return common::microseconds_per_call(
      stream, 20, [&](int) { common::plan_decode(shape, sets.batch(0), workspace.data(), stream.get()); }, 1e3);
}

void print_decode_speed(const KernelBenchOptions& options, std::ostream& output) {
  const std::vector<TimedCase> rows = rows_of(options);
  const common::Stream stream;
  const Pool pool = pool_for(rows);
  const double ceiling = print_machine(stream, pool, output);
  common::Table table({"heads", "cell", "MB", "us", "ceiling"});
  double fastest_plan = std::numeric_limits<double>::infinity();
  double slowest_plan = 0.0;
  common::Progress progress("measuring decode attention", static_cast<std::int64_t>(rows.size()));
  for (const TimedCase& row : rows) {
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
    table.add_row(
        {name_of(row.shape), name_of(row.cell), common::format("%.1f", static_cast<double>(bytes) / 1e6), time, part});
    progress.advance();
  }
  progress.clear();
  output << "Decode attention, bfloat16, random blocks.\n"
         << table.to_string()
         << common::format("plan_decode, once a step and not in the times above: %.1f to %.1f us\n\n", fastest_plan,
                           slowest_plan);
  std::vector<TimedCase> few = rows;
  if (options.cell.empty()) {
    std::erase_if(few, [](const TimedCase& row) {
      const bool is_usual = row.shape.block_size == 16 && row.shape.num_heads == 32 && row.shape.num_kv_heads >= 8;
      return !is_usual || (row.cell.context != 8192 && row.cell.batch * row.cell.context != 1024);
    });
  }
  print_paging(stream, pool, few, output);
}

}  // namespace
