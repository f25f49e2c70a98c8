// Causal attention of prompts and chunks. What other kernels reach is in peers/.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <ostream>
#include <span>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/text.h"
#include "common/paged/production_kernels.h"
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

struct Chunks {
  int num_sequences;
  int new_tokens;  // of each
  int past;
  HeadShape shape = kGrouped;
};

std::vector<Chunks> chunks() {
  const HeadShape ungrouped{.num_heads = 32, .num_kv_heads = 32};
  const HeadShape wide_group{.num_heads = 64, .num_kv_heads = 8};
  const HeadShape small{.num_heads = 32, .num_kv_heads = 8, .head_dim = 64};
  const HeadShape long_rows{.num_heads = 16, .num_kv_heads = 8, .head_dim = 256};
  return {{1, 8, 4000},
          {1, 16, 4000},
          {1, 8, 32000},
          {1, 64, 1000},
          {1, 128, 8000},
          {1, 100, 8000},
          {1, 512, 16000},
          {1, 512, 32000},
          {1, 560, 8000},
          {1, 2000, 2000},
          {2, 200, 3000},
          {4, 64, 2000},
          {4, 16, 30000},
          {6, 300, 12000},
          {8, 256, 4000},
          {8, 32, 8000},
          {16, 128, 4000},
          {16, 100, 2000},
          {16, 32, 1000},
          {32, 100, 8000},
          {32, 64, 6000},
          {64, 16, 2000},
          {64, 8, 500},
          {64, 64, 500},
          {64, 128, 0},
          {4, 64, 0},
          {16, 512, 0},
          {1, 256, 0},
          {1, 8192, 0},
          {8, 128, 4000, small},
          {1, 16, 4000, small},
          {1, 8192, 0, small},
          {1, 128, 8000, ungrouped},
          {8, 64, 2000, ungrouped},
          {1, 128, 8000, wide_group},
          {8, 16, 4000, wide_group},
          {1, 2000, 0, wide_group},
          {3, 3000, 0, wide_group},
          {1, 16, 4000, long_rows},
          {8, 256, 4000, long_rows},
          {16, 512, 0, long_rows}};
}

}  // namespace

PromptTiming time_prompts(const common::Stream& stream, const Prompts& row, const PromptStep* step,
                          const common::RaggedOptions& options) {
  std::vector<int> starts(static_cast<std::size_t>(row.num_decodes) + 1);
  std::iota(starts.begin(), starts.end(), 0);
  std::vector<int> contexts(static_cast<std::size_t>(row.num_decodes), row.decode_context);
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
  PageShape all_sets = shape;
  all_sets.num_blocks *= row.num_sets;
  const common::DeviceMemory keys = random_pages(all_sets, 2);
  const common::DeviceMemory values = random_pages(all_sets, 3);
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
  const BatchArrays batch{.num_sequences = static_cast<int>(contexts.size()),
                          .num_heads = row.shape.num_heads,
                          .context_lengths = device_contexts.data(),
                          .block_tables = device_tables.data(),
                          .table_starts = device_table_starts.data(),
                          .max_blocks_per_sequence = max_blocks,
                          .window = row.window};
  const StepArrays mixed{.batch = batch,
                         .num_decodes = row.num_decodes,
                         .num_tokens = starts.back(),
                         .query_starts = device_starts.data()};
  const common::DeviceMemory workspace(row.num_decodes > 0
                                           ? common::kProductionKernels.workspace_bytes(shape, mixed)
                                           : common::ragged_workspace_bytes(shape, batch, starts.back(), options));
  const std::span<std::byte> room(static_cast<std::byte*>(workspace.data()), workspace.bytes());
  const auto plan = [&](int) {
    if (row.num_decodes > 0) {
      common::kProductionKernels.plan(shape, mixed, room, stream.get());
      return;
    }
    common::plan_ragged(shape, batch, device_starts.data(), starts.back(), workspace.data(), stream.get(), options);
  };
  plan(0);
  stream.synchronize();
  const double microseconds = common::microseconds_per_call(
      stream, std::max(4, row.num_sets),
      [&](int call) {
        const std::size_t set =
            static_cast<std::size_t>(call % row.num_sets) * (keys.bytes() / all_sets.num_blocks) * shape.num_blocks;
        const Pages pages{static_cast<std::byte*>(keys.data()) + set, static_cast<std::byte*>(values.data()) + set,
                          shape};
        if (row.num_decodes > 0) {
          common::kProductionKernels.attend(pages, mixed, {.queries = queries.data()}, output.data(), room,
                                            stream.get());
          return;
        }
        if (step != nullptr) {
          step->attend(pages, batch, device_starts.data(), queries.data(), output.data(), starts.back(),
                       workspace.data(), stream.get());
          return;
        }
        common::ragged_attention(pages, batch, device_starts.data(), queries.data(), output.data(), starts.back(),
                                 workspace.data(), stream.get(), options);
      },
      row.num_sets > 1 ? 60e3 : 200e3);
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

void print_chunk_speed(std::ostream& output) {
  const common::Stream stream;
  const Pool pool(std::int64_t{2} << 30);
  const double ceiling = print_machine(stream, pool, output);
  common::Table table({"heads", "chunks", "us", "cold us", "TFLOP/s", "of the ceiling", "plan us", "mma, whole",
                       "mma, parts", "wgmma, whole"});
  const std::vector<Chunks> all = chunks();
  common::Progress progress("measuring chunks after a cached prefix", static_cast<std::int64_t>(all.size()));
  for (const Chunks& row : all) {
    const int context = row.past + row.new_tokens;
    Prompts prompts{common::format("%dx%d after %d", row.num_sequences, row.new_tokens, row.past),
                    std::vector<int>(static_cast<std::size_t>(row.num_sequences), row.new_tokens), row.shape, row.past};
    const auto time = [&](const common::RaggedOptions& options) {
      return common::format_microseconds(time_prompts(stream, prompts, nullptr, options).microseconds);
    };
    const PromptTiming chosen = time_prompts(stream, prompts);
    constexpr int kWhole = std::numeric_limits<int>::max() / 2;
    const common::RaggedKernel mma = row.new_tokens > 256 ? common::RaggedKernel::kWide : common::RaggedKernel::kShort;
    const std::string others[] = {time({mma, kWhole}), time({mma, 0}),
                                  time({common::RaggedKernel::kWarpgroups, kWhole})};
    prompts.num_sets = std::min(32, num_sets_of(row.shape, {row.num_sequences, context}));
    const double cold = time_prompts(stream, prompts).microseconds;
    const double bytes = static_cast<double>(kv_bytes_of(row.shape, {row.num_sequences, context}));
    table.add_row({name_of(row.shape), prompts.name, common::format_microseconds(chosen.microseconds),
                   common::format_microseconds(cold),
                   common::format("%.0f", flops_of(prompts) / chosen.microseconds / 1e6),
                   common::format("%.0f %%", 100.0 * bytes / cold / 1e3 / ceiling), common::format("%.1f", chosen.plan),
                   others[0], others[1], others[2]});
    progress.advance();
  }
  progress.clear();
  output << "Chunks of prompts after a cached prefix, bfloat16, random blocks. Cold: K and V are not in the L2 cache.\n"
         << table.to_string() << "\n";
}

void print_mixed_speed(std::ostream& output) {
  struct Mixed {
    int num_decodes;
    int decode_context;
    Chunks chunks;
  };
  const std::vector<Mixed> all = {{63, 1000, {1, 2000, 0}},
                                  {63, 4000, {1, 2000, 0}},
                                  {63, 1000, {1, 512, 8000}},
                                  {31, 2000, {1, 128, 8000}},
                                  {63, 1000, {1, 16, 4000}}};
  const common::Stream stream;
  common::Table table({"heads", "decodes", "chunk", "us", "decodes alone", "chunk alone"});
  common::Progress progress("measuring steps that decode too", static_cast<std::int64_t>(all.size()));
  for (const auto& [num_decodes, decode_context, chunks] : all) {
    const auto& [num_sequences, new_tokens, past, shape] = chunks;
    Prompts prompts{.name = common::format("%dx%d after %d", num_sequences, new_tokens, past),
                    .lengths = std::vector<int>(static_cast<std::size_t>(num_sequences), new_tokens),
                    .shape = shape,
                    .past = past};
    const auto time = [&] { return common::format_microseconds(time_prompts(stream, prompts).microseconds); };
    const std::string chunk = time();
    prompts.num_decodes = num_decodes;
    prompts.decode_context = decode_context;
    const std::string both = time();
    prompts.lengths.clear();
    table.add_row({name_of(shape), common::format("%dx1 after %d", num_decodes, decode_context - 1), prompts.name, both,
                   time(), chunk});
    progress.advance();
  }
  progress.clear();
  output << "Attention of steps in which sequences decode beside a chunk of a prompt, bfloat16, random blocks.\n"
         << table.to_string() << "\n";
}

}  // namespace
