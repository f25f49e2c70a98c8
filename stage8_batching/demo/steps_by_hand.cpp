#include "steps_by_hand.h"

#include <array>
#include <cstddef>
#include <iostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../engine.h"
#include "common/app/session.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace stage8 {
namespace {

constexpr std::array<const char*, 3> kPrompts = {"Once upon a time", "The king had a garden", "A wolf"};
constexpr int kBlockSize = 4;

char name(int id) { return static_cast<char>('A' + id); }

std::string& append(std::string& text, const std::string& more, const char* between = " ") {
  return text += (text.empty() ? "" : between) + more;
}

std::string list(const std::vector<int>& blocks) {
  std::string text;
  for (const int block : blocks) {
    append(text, std::to_string(block));
  }
  return text;
}

// What the requests do in one step.
struct Row {
  std::array<std::string, kPrompts.size()> positions;  // that are computed; "?": the token was not known
  std::array<std::string, kPrompts.size()> blocks;
  std::string copies;
  std::string tokens;  // drawn, and which requests ended
};

class StepTable {
 public:
  StepTable(const common::Session& session, const StepsOptions& options)
      : session_(session), engine_(session.model, engine_options(options)) {
    engine_.on_pass([this](const RaggedBatch& batch) { note_pass(batch); });
    engine_.on_step([this](const StepReport& report) { note_step(report); });
    for (std::size_t i = 0; i < kPrompts.size(); ++i) {
      GenerationRequest request;
      request.request.prompt = session.tokenizer.encode_prompt(kPrompts[i]);
      request.request.max_new_tokens = options.max_new_tokens;
      if (!options.stop.empty()) {
        request.request.stop_strings = common::StopStrings(
            {options.stop},
            [&session](std::span<const common::Token> tokens) { return session.tokenizer.decode(tokens); });
      }
      request.num_samples = i == 1 ? options.num_samples : 1;
      request.request.sampling.temperature = request.num_samples > 1 ? 1.0F : 0.0F;
      const int id = engine_.submit(request, [this](int of, int sample, common::Token token) {
        const std::string text = common::quote(session_.tokenizer.decode({&token, 1}));
        append(row_.tokens, name(of) + (sample > 0 ? std::to_string(sample) : "") + ":" + text);
      });
      if (engine_.output(id).finished()) {
        throw common::InputError(engine_.output(id).error);
      }
    }
  }

  std::string run() {
    while (engine_.step()) {
    }
    return table_.to_string();
  }

 private:
  static EngineOptions engine_options(const StepsOptions& options) {
    EngineOptions result;
    result.num_slots = options.num_slots;
    result.block_size = kBlockSize;
    result.num_host_slots = options.preemption == Preemption::kRecompute ? 0 : options.num_slots;
    result.scheduler = {.token_budget = options.token_budget,
                        .headroom = 0,
                        .preemption = options.preemption,
                        .run_ahead = options.run_ahead};
    result.gpu.device = Device::kCpu;
    return result;
  }

  // The step has its blocks, and nothing is computed yet.
  void note_pass(const RaggedBatch& batch) {
    note_blocks();
    for (const auto& [source, destination] : engine_.manager().pending_copies()) {
      append(row_.copies, common::format("%d>%d", source, destination));
    }
    for (const auto& group : engine_.scheduler().running()) {
      std::string& positions = row_.positions[static_cast<std::size_t>(group->id())];
      for (const SequenceId sequence : group->sequences()) {
        for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
          if (batch.sequences[i] == sequence) {
            append(positions, positions_of(batch, i));
          }
        }
      }
    }
  }

  static std::string positions_of(const RaggedBatch& batch, std::size_t i) {
    const int first = batch.positions[static_cast<std::size_t>(batch.query_starts[i])];
    const int last = first + batch.num_queries(i) - 1;
    std::string text = first == last ? std::to_string(first) : common::format("%d-%d", first, last);
    for (const PendingToken& pending : batch.pending_tokens) {
      text += pending.index == batch.query_starts[i + 1] - 1 ? "?" : "";
    }
    return text;
  }

  void note_blocks() {
    row_.blocks = {};
    for (const auto& group : engine_.scheduler().running()) {
      for (const SequenceId sequence : group->sequences()) {
        append(row_.blocks[static_cast<std::size_t>(group->id())], list(engine_.manager().block_table(sequence)),
               " / ");
      }
    }
    for (const auto& group : engine_.scheduler().waiting()) {
      row_.blocks[static_cast<std::size_t>(group->id())] = group->sequences().empty() ? "" : "host";
    }
  }

  void note_step(const StepReport& report) {
    if (report.served.empty()) {
      note_blocks();
    }
    for (const int id : report.recomputed) {
      row_.positions[static_cast<std::size_t>(id)] = "preempted";
    }
    for (const int id : report.swapped_out) {
      row_.positions[static_cast<std::size_t>(id)] = "swapped out";
    }
    for (const int id : report.ended) {
      append(row_.tokens, common::format("%c ends", name(id)));
    }
    std::vector<std::string> cells = {std::to_string(report.index)};
    cells.insert(cells.end(), row_.positions.begin(), row_.positions.end());
    cells.insert(cells.end(), row_.blocks.begin(), row_.blocks.end());
    cells.push_back(row_.copies);
    cells.push_back(row_.tokens);
    table_.add_row(cells);
    row_ = {};
  }

  const common::Session& session_;
  Engine engine_;
  Row row_;  // of the current step
  common::Table table_{{"step", "A computes", "B computes", "C computes", "A's blocks", "B's blocks", "C's blocks",
                        "copies", "handed out"}};
};

}  // namespace

common::Command& add_steps_command(common::Program& program, StepsOptions& options) {
  common::Command& command = program.add_session_command(
      "steps", "Three requests in a few blocks, step by step: who computes what, in whose blocks",
      [&](const common::Session& session) { std::cout << StepTable(session, options).run(); },
      {.prompts = false, .sampling = false});
  command.option("--slots", options.num_slots, {1, 1 << 12}, "size of the cache, in tokens; a block has 4");
  command.option("--budget", options.token_budget, {1, 1 << 12}, "max tokens in a step");
  command.option("--max-new-tokens", options.max_new_tokens, {1, 64}, "tokens of each reply");
  command.option("--samples", options.num_samples, {1, 8}, "texts of the second request, B");
  command.choice("--preemption", options.preemption,
                 {{"recompute", Preemption::kRecompute}, {"swap", Preemption::kSwap}},
                 "recompute, or swap to host memory as large as the cache");
  command.flag("--run-ahead", options.run_ahead, "enqueue each step before the tokens of the last one are known");
  command.option("--stop", options.stop, "a text that ends a reply");
  return command;
}

}  // namespace
