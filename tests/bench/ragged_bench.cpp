// Causal attention of prompts and chunks. What other kernels reach is in peers/.
#include <algorithm>
#include <ostream>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/text.h"
#include "stage7/ladder/prompt_ladder.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {
namespace {

const HeadShape kGrouped{.num_heads = 32, .num_kv_heads = 8};

std::vector<Prompts> rows() {
  const std::vector<int> one = {8192};
  const std::vector<int> four(4, 2048);
  const std::vector<int> many(16, 512);
  const std::vector<int> mixed = {4096, 2048, 1024, 512, 256, 128, 64, 64};
  const HeadShape ungrouped{.num_heads = 32, .num_kv_heads = 32};
  const HeadShape small{.num_heads = 9, .num_kv_heads = 3, .head_dim = 64};
  return {{"1x8192", one, kGrouped},
          {"4x2048", four, kGrouped},
          {"16x512", many, kGrouped},
          {"4096 … 64", mixed, kGrouped},
          {"4x512 after 4096", std::vector<int>(4, 512), kGrouped, 4096},
          {"1x8192", one, ungrouped},
          {"16x512", many, ungrouped},
          {"1x8192", one, small},
          {"16x512", many, small},
          {"1x8192", one, {.num_heads = 28, .num_kv_heads = 4}},
          {"1x8192", one, {.num_heads = 64, .num_kv_heads = 8}},
          {"1x8192", one, {.num_heads = 16, .num_kv_heads = 8, .head_dim = 256}}};
}

}  // namespace

PromptTiming time_prompts(const common::Stream& stream, const Prompts& row, const PromptStep* step) {
  std::vector<int> starts = {0};
  std::vector<int> contexts;
  for (const int length : row.lengths) {
    starts.push_back(starts.back() + length);
    contexts.push_back(length + row.past);
  }
  const int block_size = row.shape.block_size;
  const int max_blocks = (*std::max_element(contexts.begin(), contexts.end()) + block_size - 1) / block_size;
  const std::vector<int> tables = shuffled(static_cast<std::int64_t>(contexts.size()) * max_blocks);
  const PageShape shape{.num_blocks = static_cast<std::int64_t>(tables.size()),
                        .num_kv_heads = row.shape.num_kv_heads,
                        .block_size = block_size,
                        .head_dim = row.shape.head_dim,
                        .type = row.shape.type};
  const common::DeviceMemory keys = random_pages(shape, 2);
  const common::DeviceMemory values = random_pages(shape, 3);
  const std::size_t columns =
      static_cast<std::size_t>(row.shape.num_heads) * static_cast<std::size_t>(row.shape.head_dim);
  const common::DeviceArray<std::uint16_t> queries(random_bf16(static_cast<std::size_t>(starts.back()) * columns));
  const common::DeviceArray<std::uint16_t> output(queries.size());
  const common::DeviceArray<int> device_starts(starts);
  const common::DeviceArray<int> device_contexts(contexts);
  const common::DeviceArray<int> device_tables(tables);
  std::vector<int> table_starts(contexts.size());
  std::generate(table_starts.begin(), table_starts.end(),
                [&, next = -max_blocks]() mutable { return next += max_blocks; });
  const common::DeviceArray<int> device_table_starts(table_starts);
  const Batch batch{.num_sequences = static_cast<int>(contexts.size()),
                    .num_heads = row.shape.num_heads,
                    .context_lengths = device_contexts.data(),
                    .block_tables = device_tables.data(),
                    .table_starts = device_table_starts.data(),
                    .max_blocks_per_sequence = max_blocks};
  const common::DeviceMemory workspace(ragged_workspace_bytes(shape, batch, starts.back()));
  const auto plan = [&](int) {
    plan_ragged(shape, batch, device_starts.data(), starts.back(), workspace.data(), stream.get());
  };
  plan(0);
  stream.synchronize();
  const Pages pages{keys.data(), values.data(), shape};
  const double microseconds = common::microseconds_per_call(
      stream, 4,
      [&](int) {
        if (step != nullptr) {
          step->attend(pages, batch, device_starts.data(), queries.data(), output.data(), starts.back(),
                       workspace.data(), stream.get());
          return;
        }
        ragged_attention(pages, batch, device_starts.data(), queries.data(), output.data(), starts.back(),
                         workspace.data(), stream.get());
      },
      200e3);
  return {microseconds, common::microseconds_per_call(stream, 20, plan, 1e3)};
}

double flops_of(const Prompts& row) {
  double visible = 0.0;  // pairs of tokens; half of length^2 among the new ones
  for (const int length : row.lengths) {
    visible += 0.5 * length * length + static_cast<double>(length) * row.past;
  }
  return 4.0 * row.shape.num_heads * row.shape.head_dim * visible;
}

void print_ragged_speed(std::ostream& output) {
  const common::Stream stream;
  common::Table table({"heads", "prompts", "us", "plan us", "TFLOP/s"});
  const std::vector<Prompts> all = rows();
  common::Progress progress("measuring ragged attention", static_cast<std::int64_t>(all.size()));
  for (const Prompts& row : all) {
    const PromptTiming timing = time_prompts(stream, row);
    table.add_row({name_of(row.shape), row.name, common::format_microseconds(timing.microseconds),
                   common::format("%.1f", timing.plan),
                   common::format("%.0f", flops_of(row) / timing.microseconds / 1e6)});
    progress.advance();
  }
  progress.clear();
  output << "Causal attention, bfloat16, random blocks, 8,192 new tokens in most rows.\n" << table.to_string() << "\n";
}

}  // namespace
