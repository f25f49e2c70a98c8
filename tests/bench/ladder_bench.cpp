// The ladders' tables: a row for each step, a column for each batch or prompt.
#include "stage7/ladder/ladder.h"

#include <optional>
#include <ostream>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/runtime/read_memory.h"
#include "stage7/ladder/prompt_ladder.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {
namespace {

const HeadShape kGrouped{.num_heads = 32, .num_kv_heads = 8};
const HeadShape kUngrouped{.num_heads = 32, .num_kv_heads = 32};

std::vector<TimedCase> cells_of(const KernelBenchOptions& options) {
  if (!options.cell.empty()) {
    const BenchCell cell = parse_cell(options.cell);
    return {{kGrouped, cell}, {kUngrouped, cell}};
  }
  return {{kGrouped, {1, 1024}},  {kGrouped, {8, 1024}}, {kGrouped, {1, 8192}},
          {kGrouped, {32, 8192}}, {kGrouped, {32, 0}},   {kUngrouped, {32, 8192}}};
}

bool runs_here(const LadderStep& step) {
  return common::device_limits().compute_capability >= step.min_capability &&
         (step.min_capability < 90 || common::kernels_are_native());
}

// The pages hold random numbers, so they are as good in the one order of rows as in the other.
double time_step(const common::Stream& stream, const ColdBatches& sets, const LadderStep& step) {
  const PageShape& shape = sets.pages().shape;
  const common::DeviceMemory workspace(step.workspace_bytes(shape, sets.batch(0)));
  if (step.plan != nullptr) {
    step.plan(shape, sets.batch(0), workspace.data(), stream.get());  // lengths are the same in all sets
    stream.synchronize();
  }
  return common::microseconds_per_call(stream, sets.count(), [&](int set) {
    step.decode(sets.pages(), sets.batch(set), sets.queries(), sets.output(), workspace.data(), stream.get());
  });
}

// Reads the same number of bytes in order, and nothing else: the two halves of the pool in turn.
double time_reading(const common::Stream& stream, const ColdBatches& sets, std::int64_t bytes) {
  return common::microseconds_per_call(stream, sets.count(), [&](int set) {
    const void* half = set % 2 == 0 ? sets.pages().keys : sets.pages().values;
    common::read_memory(stream, static_cast<const std::byte*>(half) + set / 2 * bytes, static_cast<std::size_t>(bytes));
  });
}

void print_prompt_ladder(const common::Stream& stream, std::ostream& output) {
  const std::vector<Prompts> all = {{"1x8192", {8192}, kGrouped},
                                    {"4x2048", std::vector<int>(4, 2048), kGrouped},
                                    {"16x512", std::vector<int>(16, 512), kGrouped}};
  std::vector<std::string> header = {"step"};
  for (const Prompts& prompts : all) {
    header.push_back(prompts.name);
  }
  common::Table table(header);
  common::Progress progress("measuring", static_cast<std::int64_t>(all.size() * prompt_ladder().size()));
  for (const PromptStep& step : prompt_ladder()) {
    std::vector<std::string> row = {step.name};
    for (const Prompts& prompts : all) {
      const bool runs_here =
          !step.uses_wgmma || (common::device_limits().compute_capability == 90 && common::kernels_are_native());
      row.push_back(!runs_here ? "-"
                               : common::format("%.0f", flops_of(prompts) /
                                                            time_prompts(stream, prompts, &step).microseconds / 1e6));
      progress.advance();
    }
    table.add_row(std::move(row));
  }
  progress.clear();
  output << "\n" << table.to_string() << "\nCausal attention of prompts, TFLOP/s, the same heads and blocks.\n";
}

}  // namespace

void print_ladder(std::ostream& output, const KernelBenchOptions& options) {
  const std::vector<TimedCase> cells = cells_of(options);
  if (!common::has_cuda_device()) {
    throw common::InputError("measuring the ladder needs a GPU of compute capability 8.0 or newer");
  }
  const common::Stream stream;
  const Pool pool = pool_for(cells);
  const double ceiling = print_machine(stream, pool, output);
  std::vector<std::string> header = {"step"};
  std::vector<std::vector<std::string>> rows(ladder().size() + 1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].push_back(i < ladder().size() ? ladder()[i].name : "reading alone");
  }
  common::Progress progress("measuring", static_cast<std::int64_t>(cells.size() * rows.size()));
  for (const auto& [shape, cell] : cells) {
    header.push_back(name_of(cell) + (shape.num_heads == shape.num_kv_heads ? ", MHA" : ""));
    std::optional<ColdBatches> sets;
    if (pool.has_room_for(shape, cell)) {
      sets.emplace(pool, shape, cell);
    }
    const std::int64_t bytes = kv_bytes_of(shape, cell);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!sets.has_value() || (i < ladder().size() && !runs_here(ladder()[i]))) {
        rows[i].emplace_back("-");
        continue;
      }
      const double microseconds =
          i < ladder().size() ? time_step(stream, *sets, ladder()[i]) : time_reading(stream, *sets, bytes);
      const double part = static_cast<double>(bytes) / microseconds / 1e3 / ceiling;
      rows[i].push_back(common::format_microseconds(microseconds) + common::format(" (%.0f%%)", 100.0 * part));
      progress.advance();
    }
  }
  progress.clear();
  common::Table table(header);
  for (std::vector<std::string>& row : rows) {
    table.add_row(std::move(row));
  }
  output
      << table.to_string()
      << "\nMicroseconds for sequences x tokens, 32 query heads over 8 kv heads (MHA: over 32) of 128 dimensions, in\n"
         "bfloat16 and random blocks of 16. In brackets: K and V, counted once, by the time, in % of the ceiling.\n";
  if (options.cell.empty()) {
    print_prompt_ladder(stream, output);
  }
}

}  // namespace
