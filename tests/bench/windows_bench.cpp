// Attention within a sliding window, beside attention to the whole context and to a context as short as the window: the
// window should cost what the short context costs.
#include <algorithm>
#include <ostream>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/text.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {
namespace {

struct WindowedChunks {
  int num_sequences;
  int new_tokens;  // of each
  int past;
  int window;
  HeadShape shape;
};

const HeadShape kGrouped{.num_heads = 32, .num_kv_heads = 8};
const HeadShape kLongRows{.num_heads = 16, .num_kv_heads = 8, .head_dim = 256};
const HeadShape kFloat8{.num_heads = 32, .num_kv_heads = 8, .type = ScalarType::kFloat8};

const char* type_of(const HeadShape& shape) { return shape.type == ScalarType::kFloat8 ? "float8" : "bfloat16"; }

void print_decodes(const common::Stream& stream, std::ostream& output) {
  std::vector<TimedCase> rows;
  for (const HeadShape& shape : {kGrouped, kLongRows, kFloat8}) {
    rows.push_back({shape, {.batch = 1, .context = 32000, .window = 1024}});
    rows.push_back({shape, {.batch = 32, .context = 32000, .window = 1024}});
    rows.push_back({shape, {.batch = 128, .context = 8000, .window = 128}});
    rows.push_back({shape, {.batch = 32, .context = 0, .window = 1024}});
  }
  const Pool pool = pool_for(rows);
  print_machine(stream, pool, output);
  common::Table table({"type", "heads", "cell", "window", "us", "as short", "whole"});
  common::Progress progress("measuring decodes within windows", static_cast<std::int64_t>(rows.size()));
  for (const auto& [shape, cell] : rows) {
    progress.advance();
    if (!pool.has_room_for(shape, cell)) {
      continue;
    }
    const auto time = [&, &heads = shape](const BenchCell& of) {
      return common::format_microseconds(time_decode(stream, ColdBatches(pool, heads, of)));
    };
    BenchCell whole = cell;
    whole.window = 0;
    // Of ragged lengths, some are shorter than the window.
    const std::string as_short = cell.context == 0 ? "-" : time({.batch = cell.batch, .context = cell.window});
    table.add_row({type_of(shape), name_of(shape), name_of(cell), std::to_string(cell.window), time(cell), as_short,
                   time(whole)});
  }
  progress.clear();
  output << "Decode attention within a window, random blocks, microseconds.\n" << table.to_string() << "\n";
}

void print_chunks(const common::Stream& stream, std::ostream& output) {
  std::vector<WindowedChunks> rows;
  for (const HeadShape& shape : {kGrouped, kLongRows, kFloat8}) {
    rows.push_back({1, 512, 32000, 1024, shape});
    rows.push_back({8, 256, 8000, 1024, shape});
    rows.push_back({1, 16, 32000, 4096, shape});
    rows.push_back({1, 8192, 0, 1024, shape});
  }
  common::Table table({"type", "heads", "chunks", "window", "us", "plan us", "as short", "whole"});
  common::Progress progress("measuring chunks within windows", static_cast<std::int64_t>(rows.size()));
  for (const auto& [num_sequences, new_tokens, past, window, shape] : rows) {
    Prompts prompts{.name = common::format("%dx%d after %d", num_sequences, new_tokens, past),
                    .lengths = std::vector<int>(static_cast<std::size_t>(num_sequences), new_tokens),
                    .shape = shape,
                    .past = past,
                    .window = window};
    const PromptTiming timing = time_prompts(stream, prompts);
    prompts.window = 0;
    const auto time = [&] { return common::format_microseconds(time_prompts(stream, prompts).microseconds); };
    const std::string whole = time();
    prompts.past = std::min(past, window);
    const std::string as_short = past == 0 ? "-" : time();
    table.add_row({type_of(shape), name_of(shape), prompts.name, std::to_string(window),
                   common::format_microseconds(timing.microseconds), common::format("%.1f", timing.plan), as_short,
                   whole});
    progress.advance();
  }
  progress.clear();
  output << "Causal attention within a window, random blocks, microseconds.\n" << table.to_string() << "\n";
}

}  // namespace

void print_window_speed(std::ostream& output) {
  const common::Stream stream;
  print_decodes(stream, output);
  print_chunks(stream, output);
}

}  // namespace
