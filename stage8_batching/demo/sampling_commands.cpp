#include "sampling_commands.h"

#include <algorithm>
#include <iostream>
#include <vector>

#include "../engine.h"
#include "common/app/block_map.h"
#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"

namespace stage8 {
namespace {

// What a line of the trace shows of the pool and of the branches, so that it fits a terminal of 80 columns.
struct TraceColumns {
  int num_blocks = 0;
  std::string map_heading;
  std::size_t list_columns = 0;
};

TraceColumns trace_columns(const KvCacheManager& manager, int num_branches) {
  constexpr int kMapAndList = 40;
  constexpr int kMinBlocks = 16;
  const std::vector<int> widest(static_cast<std::size_t>(num_branches), num_branches);
  const auto list = static_cast<int>(common::format_list(widest).size());
  const int all_blocks = manager.usage().total / manager.block_size();
  TraceColumns columns;
  columns.num_blocks = std::min(all_blocks, std::max(kMapAndList - list, kMinBlocks));
  columns.map_heading = columns.num_blocks == all_blocks ? "owners of each block"
                                                         : common::format("owners, 0 to %d", columns.num_blocks - 1);
  columns.map_heading.resize(std::max(columns.map_heading.size(), static_cast<std::size_t>(columns.num_blocks)), ' ');
  columns.list_columns = kMapAndList - columns.map_heading.size();
  return columns;
}

// One character per block: the number of its owners, or '.' if it is free. Then the list, as far as it fits.
std::string draw_pool(const KvCacheManager& manager, const std::vector<int>& parents, const TraceColumns& columns) {
  std::vector<common::MapCell> cells;
  for (int block = 0; block < columns.num_blocks; ++block) {
    const int count = manager.reference_count(block);
    cells.push_back({.color = count - 1, .fill = common::count_digit(count)});
  }
  const std::string padding(columns.map_heading.size() - cells.size(), ' ');
  const std::string list = common::format_list(parents);
  return common::draw_cells(cells, common::use_color(std::cout)) + padding + "  " +
         (list.size() <= columns.list_columns ? list : list.substr(0, columns.list_columns - 3) + "...");
}

// For each branch the number of its parent, counted from 1 in the order before the step. A branch has its parent's
// sequence, or a sequence forked from it.
std::vector<int> find_parents(std::span<const Branch> parents, std::span<const Branch> live) {
  std::vector<int> numbers;
  for (const Branch& branch : live) {
    auto parent = std::find_if(parents.begin(), parents.end(),
                               [&](const Branch& candidate) { return candidate.sequence == branch.sequence; });
    if (parent == parents.end()) {
      parent = std::find_if(parents.begin(), parents.end(), [&](const Branch& candidate) {
        return std::equal(candidate.tokens.begin(), candidate.tokens.end(), branch.tokens.begin(),
                          branch.tokens.end() - 1);
      });
    }
    numbers.push_back(static_cast<int>(parent - parents.begin()) + 1);
  }
  return numbers;
}

double blocks_copied(const Engine& engine) { return common::counter(engine.counters(), "blocks_copied"); }

// Sums over the steps of a run, and the figures of its fullest step.
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

// The branches of the engine's only request; none once it has ended.
std::vector<Branch> live_branches(const Engine& engine) {
  for (const auto& group : engine.scheduler().running()) {
    return group->live();
  }
  for (const auto& group : engine.scheduler().waiting()) {
    return group->live();
  }
  return {};
}

// Serves a request to its end.
SharingTotals run_to_end(Engine& engine, const DecodingOptions& options) {
  const KvCacheManager& manager = engine.scheduler().manager();
  const TraceColumns columns = trace_columns(manager, std::max(options.num_samples, options.beam.width));
  SharingTotals totals;
  if (options.trace) {
    std::cout << "step  live  copied  blocks  separate  " << columns.map_heading << "  continues\n";
  }
  while (!engine.is_idle()) {
    const std::vector<Branch> parents = live_branches(engine);
    const double copied_before = blocks_copied(engine);
    engine.step();
    const std::vector<Branch> live = live_branches(engine);
    const SharingFigures figures = sharing_figures(manager);
    totals.add(figures);
    if (options.trace) {
      std::cout << common::format("%4d  %4d  %6.0f  %6d  %8d  ", totals.steps, static_cast<int>(live.size()),
                                  blocks_copied(engine) - copied_before, figures.blocks, figures.separate_blocks)
                << draw_pool(manager, find_parents(parents, live), columns) << "\n";
    }
  }
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

  common::Table table_{{"prompt", "tokens", "steps", "max blocks", "separate", "saved", "blocks copied"}};
  SharingTotals all_;
  double all_copied_ = 0.0;
  int table_rows_ = 0;
};

void print_text(const std::string& label, const std::string& text) {
  std::cout << label << common::quote(text, 400) << "\n";
}

// make(request) returns the request for the engine; print shows the texts.
template <typename Make, typename Print>
void run_prompts(const common::Session& session, const DecodingOptions& options, const Make& make, const Print& print) {
  EngineOptions engine_options = options.engine;
  SchedulerOptions& scheduler = engine_options.scheduler;
  scheduler.max_sequences = std::max(options.num_samples, options.beam.width);
  scheduler.token_budget = std::max(scheduler.token_budget, scheduler.max_sequences);
  scheduler.run_ahead = false;  // so that all tokens of a step are known when it is shown
  Engine engine(session.model, engine_options);
  SharingTable table;
  common::Progress progress("prompts", static_cast<std::int64_t>(session.requests.size()));
  for (std::size_t i = 0; i < session.requests.size(); ++i, progress.advance()) {
    progress.clear();
    print_text(common::format("%2zu  ", i), session.tokenizer.decode(session.requests[i].prompt));
    const double copied_before = blocks_copied(engine);
    const int id = engine.submit(make(session.requests[i]));
    if (!engine.output(id).error.empty()) {
      throw common::InputError(engine.output(id).error);
    }
    const SharingTotals totals = run_to_end(engine, options);
    table.add(session.requests[i], totals, blocks_copied(engine) - copied_before);
    print(engine.output(id));
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
          print_text(common::format("    %2zu  ", i), session.text_of(output.completions[i]));
        }
      });
}

void run_beams(const common::Session& session, const DecodingOptions& options) {
  run_prompts(
      session, options,
      [&](const common::Request& request) {
        return GenerationRequest{request, options.beam.width, options.beam.length_penalty};
      },
      [&](const RequestOutput& output) {
        for (const Hypothesis& hypothesis : output.hypotheses) {
          print_text(common::format("    %7.3f  ", hypothesis.score), session.tokenizer.decode(hypothesis.tokens));
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

void print_copies(std::ostream& output, std::span<const BlockCopy> copies) {
  for (const auto& [source, destination] : copies) {
    output << "block " << source << " has other owners: copied to block " << destination << "\n";
  }
}

void add_sharing_commands(common::Shell& shell, KvCacheManager& manager) {
  shell.add("fork", "PARENT CHILD", "start a sequence that shares all tokens of PARENT",
            [&](const auto& arguments, std::ostream&) {
              const SequenceId parent = common::sequence_named(manager, arguments[0], true);
              manager.fork(parent, common::sequence_named(manager, arguments[1], false));
            });
  shell.add("write", "NAME", "put one more token into the cache, and print its slot",
            [&](const auto& arguments, std::ostream& output) {
              const SequenceId sequence = common::sequence_named(manager, arguments[0], true);
              if (!manager.reserve(sequence, 1)) {
                output << "refused: no room for 1 more\n";
                return;
              }
              print_copies(output, manager.pending_copies());
              manager.clear_pending_copies();
              const int position = manager.length(sequence);
              output << "position " << position << " is slot " << manager.slots(sequence, position, 1).front() << "\n";
              manager.commit(sequence, 1);
            });
}

common::Command& add_sample_command(common::Program& program, DecodingOptions& options) {
  common::Command& command =
      program.add_session_command("sample", "Draw several texts from each prompt, which is computed once",
                                  [&](const common::Session& session) { run_samples(session, options); },
                                  {.default_sampling = {.temperature = 0.8F}});
  command.option("--samples", options.num_samples, {1, 1024}, "texts drawn from each prompt");
  command.flag("--trace", options.trace, "show the pool at every step");
  return command;
}

common::Command& add_beam_command(common::Program& program, DecodingOptions& options) {
  common::Command& command = program.add_session_command(
      "beam", "Search for the likeliest text of each prompt",
      [&](const common::Session& session) { run_beams(session, options); }, {.sampling = false});
  command.option("--beams", options.beam.width, {1, 1024}, "hypotheses kept");
  command.option("--length-penalty", options.beam.length_penalty, {0.0, 10.0},
                 "0 favours short texts, 1 compares mean log probabilities");
  command.flag("--trace", options.trace, "show the pool at every step");
  return command;
}

}  // namespace
