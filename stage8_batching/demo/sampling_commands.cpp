#include "sampling_commands.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <vector>

#include "../serve/serving.h"
#include "../server.h"
#include "common/app/block_map.h"
#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"

namespace stage8 {
namespace {

// The pool's map shows this many blocks at most.
constexpr int kMaxBlocksDrawn = 64;

// One character per block: the number of its owners, or '.' if it is free.
std::string draw_pool(const KvCacheManager& manager) {
  const int num_blocks = std::min(manager.usage().total / manager.block_size(), kMaxBlocksDrawn);
  std::vector<common::MapCell> cells;
  for (int block = 0; block < num_blocks; ++block) {
    const int count = manager.reference_count(block);
    cells.push_back({.color = count - 1, .fill = common::count_digit(count)});
  }
  return common::draw_cells(cells, common::use_color(std::cout));
}

// Sums over the steps of a run, and what its fullest step held.
struct SharingTotals {
  int steps = 0;
  int max_blocks = 0;
  int max_separate_blocks = 0;
  std::int64_t blocks = 0;
  std::int64_t separate_blocks = 0;

  void add(const SharingFigures& figures) {
    steps += 1;
    blocks += figures.blocks;
    separate_blocks += figures.separate_blocks;
    max_blocks = std::max(max_blocks, figures.blocks);
    max_separate_blocks = std::max(max_separate_blocks, figures.separate_blocks);
  }
  std::string saved() const {
    return common::format_percent(static_cast<double>(separate_blocks - blocks), static_cast<double>(separate_blocks));
  }
};

// Serves the request to its end, and adds up what its steps hold.
SharingTotals serve_alone(Engine& engine, const DecodingOptions& options, const GenerationRequest& request,
                          const std::function<void(const RequestOutput&)>& print) {
  SharingTotals totals;
  if (options.trace) {
    std::cout << "step  live  blocks  separate  owners of each block\n";
  }
  RealClock clock;
  const int max_sequences = std::max(request.num_samples, request.beam ? request.beam->width : 1);
  Server server(engine, {.token_budget = engine.options().chunk_size, .max_sequences = max_sequences}, clock);
  server.on_step([&](const StepReport&) {
    const KvCacheManager& manager = engine.manager();
    const SharingFigures figures = sharing_figures(manager);
    totals.add(figures);
    if (options.trace) {
      std::cout << common::format("%4d  %4d  %6d  %8d  ", totals.steps, static_cast<int>(manager.sequences().size()),
                                  figures.blocks, figures.separate_blocks)
                << draw_pool(manager) << "\n";
    }
  });
  const int id = server.submit(request);
  while (server.step()) {
  }
  if (!server.output(id).error.empty()) {
    throw common::InputError(server.output(id).error);
  }
  print(server.output(id));
  return totals;
}

// One row per prompt, and the sums.
class SharingTable {
 public:
  void add(const common::Request& request, const SharingTotals& totals, double blocks_copied) {
    add_row(std::to_string(table_rows_++), common::format_count(static_cast<std::int64_t>(request.prompt.size())),
            totals, blocks_copied);
    all_.steps += totals.steps;
    all_.blocks += totals.blocks;
    all_.separate_blocks += totals.separate_blocks;
    all_.max_blocks = std::max(all_.max_blocks, totals.max_blocks);
    all_.max_separate_blocks = std::max(all_.max_separate_blocks, totals.max_separate_blocks);
    all_copied_ += blocks_copied;
  }
  void print() {
    if (table_rows_ > 1) {
      add_row("all", "", all_, all_copied_);
    }
    std::cout << "\n" << table_.to_string();
  }

 private:
  void add_row(const std::string& name, const std::string& prompt_tokens, const SharingTotals& totals, double copied) {
    table_.add_row({name, prompt_tokens, common::format_count(totals.steps), common::format_count(totals.max_blocks),
                    common::format_count(totals.max_separate_blocks), totals.saved(),
                    common::format_count(static_cast<std::int64_t>(copied))});
  }

  common::Table table_{{"prompt", "tokens", "steps", "most blocks", "separate", "saved", "blocks copied"}};
  SharingTotals all_;
  double all_copied_ = 0.0;
  int table_rows_ = 0;
};

void print_text(const std::string& label, const common::Session& session, std::span<const common::Token> tokens) {
  std::cout << label << common::quote(session.tokenizer.decode({tokens.begin(), tokens.end()}), 400) << "\n";
}

// Serves the prompts one after the other, as `make` wants them served; print shows the texts.
void run_prompts(const common::Session& session, const DecodingOptions& options,
                 const std::function<GenerationRequest(common::Request)>& make,
                 const std::function<void(const RequestOutput&)>& print) {
  const int max_sequences = std::max(options.num_samples, options.beam.width);
  Engine engine(session.model, with_chunk_size_at_least(max_sequences, options.engine));
  SharingTable table;
  common::Progress progress("prompts", static_cast<std::int64_t>(session.requests.size()));
  for (std::size_t i = 0; i < session.requests.size(); ++i, progress.advance()) {
    progress.clear();
    print_text(common::format("%2zu  ", i), session, session.requests[i].prompt);
    const double copied_before = common::counter(engine.counters(), "blocks_copied");
    const SharingTotals totals = serve_alone(engine, options, make(session.requests[i]), print);
    table.add(session.requests[i], totals, common::counter(engine.counters(), "blocks_copied") - copied_before);
  }
  table.print();
}

void run_samples(const common::Session& session, const DecodingOptions& options) {
  run_prompts(
      session, options,
      [&](const common::Request& request) {
        return GenerationRequest{request, options.num_samples};
      },
      [&](const RequestOutput& output) {
        for (std::size_t i = 0; i < output.completions.size(); ++i) {
          print_text(common::format("    %2zu  ", i), session, output.completions[i].tokens);
        }
      });
}

void run_beams(const common::Session& session, const DecodingOptions& options) {
  run_prompts(
      session, options,
      [&](common::Request request) {
        return GenerationRequest{std::move(request), 1, options.beam};
      },
      [&](const RequestOutput& output) {
        for (const Hypothesis& hypothesis : output.hypotheses) {
          print_text(common::format("    %7.3f  ", hypothesis.score), session, hypothesis.tokens);
        }
      });
}

}  // namespace

SharingFigures sharing_figures(const KvCacheManager& manager) {
  SharingFigures figures;
  const Usage usage = manager.usage();
  figures.blocks = usage.reserved / manager.block_size();
  figures.slots = usage.used;
  for (const SequenceId sequence : manager.sequences()) {
    figures.separate_blocks += static_cast<int>(manager.block_table(sequence).size());
    figures.separate_slots += manager.length(sequence);
  }
  return figures;
}

std::string sharing_summary(const KvCacheManager& manager) {
  const SharingFigures figures = sharing_figures(manager);
  return common::format("%d blocks, %d in separate caches: ", figures.blocks, figures.separate_blocks) +
         common::format_percent(figures.separate_blocks - figures.blocks, figures.separate_blocks) +
         common::format(" saved; %d slots, %d in separate caches: ", figures.slots, figures.separate_slots) +
         common::format_percent(figures.separate_slots - figures.slots, figures.separate_slots) + " saved";
}

void print_copies(std::span<const BlockCopy> copies) {
  for (const auto& [source, destination] : copies) {
    std::cout << "block " << source << " has other owners: copied to block " << destination << "\n";
  }
}

void add_sharing_commands(common::Shell& shell, KvCacheManager& manager) {
  shell.add("fork", "PARENT CHILD", "start a sequence that shares all tokens of PARENT", [&](const auto& arguments) {
    const SequenceId parent = common::sequence_named(manager, arguments[0], true);
    manager.fork(parent, common::sequence_named(manager, arguments[1], false));
  });
  shell.add("write", "NAME", "put one more token into the cache, and print its slot", [&](const auto& arguments) {
    const SequenceId sequence = common::sequence_named(manager, arguments[0], true);
    if (!manager.reserve(sequence, 1)) {
      std::cout << "refused: no room for 1 more\n";
      return;
    }
    print_copies(manager.pending_copies());
    manager.clear_pending_copies();
    const int position = manager.length(sequence);
    std::cout << "position " << position << " is slot " << manager.slots(sequence, position, 1).front() << "\n";
    manager.commit(sequence, 1);
  });
}

common::Command& add_sample_command(common::Program& program, DecodingOptions& options) {
  common::Command& command = program.add_session_command(
      "sample", "Draw several texts from each prompt, which is computed once",
      [&](const common::Session& session) { run_samples(session, options); }, {.temperature = 0.8F});
  command.option("--samples", options.num_samples, {1, 1024}, "texts drawn from each prompt");
  command.flag("--trace", options.trace, "show the pool at every step");
  return command;
}

common::Command& add_beam_command(common::Program& program, DecodingOptions& options) {
  common::Command& command =
      program.add_session_command("beam", "Search for the likeliest text of each prompt",
                                  [&](const common::Session& session) { run_beams(session, options); });
  command.option("--beams", options.beam.width, {1, 1024}, "hypotheses kept");
  command.option("--length-penalty", options.beam.length_penalty, {-10.0, 10.0},
                 "0 favours short texts, 1 compares mean log probabilities");
  command.flag("--trace", options.trace, "show the pool at every step");
  return command;
}

}  // namespace
