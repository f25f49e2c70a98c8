#include "shared_reading.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../make_runner.h"
#include "../serve/make_engine.h"
#include "common/app/table.h"
#include "common/app/token_source.h"
#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/text.h"
#include "common/model/presets.h"

namespace stage8 {
namespace {

using common::Token;

// Texts that are written together, after the prompt `first` has been computed.
struct Workload {
  std::string name;
  std::vector<Token> first;
  std::vector<GenerationRequest> requests;
};

std::vector<Token> join(std::vector<Token> first, const std::vector<Token>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::vector<Workload> workloads(const common::TokenSource& source, const SharedReadingOptions& options) {
  const std::vector<Token> prefix = source.take(0, options.prefix_tokens);
  GenerationRequest plain;
  plain.request.max_new_tokens = options.reply_tokens;
  plain.request.sampling.temperature = 1.0F;
  std::vector<Workload> result(4);

  result[0].name = "samples of a prompt";
  result[0].requests.push_back(plain);
  result[0].requests[0].request.prompt = join(prefix, source.take(1, options.own_tokens));
  result[0].requests[0].num_samples = options.num_texts;

  result[1].name = "beams";
  result[1].requests = result[0].requests;
  result[1].requests[0].request.sampling = {};
  result[1].requests[0].length_penalty = 1.0;

  result[2].name = "chats with a prompt in common";
  result[2].first = prefix;
  result[3].name = "texts with nothing in common";
  for (int text = 0; text < options.num_texts; ++text) {
    const std::vector<Token> own = source.take(text + 1, options.own_tokens);
    for (const std::size_t row : {2, 3}) {
      result[row].requests.push_back(plain);
      // The first token differs, so that no block is the same.
      result[row].requests.back().request.prompt = row == 2 ? join(prefix, own) : join(own, prefix);
    }
  }
  return result;
}

struct Run {
  std::int64_t bytes_read = 0;
  double seconds = 0.0;
  bool is_exact = false;  // a GPU adds up in another order, and tokens with nearly equal logits may change places
  std::vector<std::vector<Token>> texts;
};

Run serve(const common::Llama& model, const Workload& workload, const EngineOptions& options, bool shares) {
  std::unique_ptr<Runner> runner = make_runner(model, options);
  if (!share_reading(*runner, shares)) {
    throw common::InputError(
        "no blocks are read together in this build, with these types of numbers, or with several GPUs");
  }
  const std::unique_ptr<Engine> engine = make_engine(model, options, std::move(runner), 0);
  const auto run_to_end = [&] {
    while (engine->step()) {
    }
  };
  const auto bytes_read = [&] {
    return static_cast<std::int64_t>(common::counter(engine->counters(), "kv_bytes_read"));
  };
  if (!workload.first.empty()) {
    GenerationRequest first;
    first.request.prompt = workload.first;
    first.request.max_new_tokens = 1;
    engine->submit(first);
    run_to_end();
  }
  Run result;
  result.is_exact = !engine->runner().is_asynchronous();
  const std::int64_t bytes_before = bytes_read();
  const double begin = common::now_seconds();
  std::vector<int> ids;
  for (const GenerationRequest& request : workload.requests) {
    ids.push_back(engine->submit(request));
  }
  run_to_end();
  result.seconds = common::now_seconds() - begin;
  result.bytes_read = bytes_read() - bytes_before;
  for (const int id : ids) {
    const RequestOutput& output = engine->output(id);
    if (!output.error.empty()) {
      throw common::InputError(output.error);
    }
    for (const common::Completion& completion : output.completions) {
      result.texts.push_back(completion.tokens);
    }
  }
  return result;
}

void print_reading(const common::Session& session, const SharedReadingOptions& options) {
  std::optional<common::Llama> synthetic;
  if (!options.synthetic.empty()) {
    synthetic = common::Llama::synthetic(common::find_preset(options.synthetic).config, 1);
  }
  const common::Llama& model = synthetic ? *synthetic : session.model;
  const common::TokenSource source(session, model.config().vocab_size);
  EngineOptions sized = options.engine;
  const int length = options.prefix_tokens + options.own_tokens + options.reply_tokens;
  if (const int context = max_context(model.config(), sized); length > context) {
    throw common::InputError(common::format("texts of %d tokens are longer than the context of %d", length, context));
  }
  sized.context_length = length;  // layers with a window, beside others that see all, get room for such texts
  const int blocks = options.num_texts * (blocks_needed(length, sized.block_size) + 1);
  sized.num_slots = options.engine.num_slots.value_or(2 * blocks * sized.block_size);  // beams hold two generations
  sized.scheduler.max_sequences = std::max(sized.scheduler.max_sequences, options.num_texts);
  sized.scheduler.token_budget = std::max(sized.scheduler.token_budget, sized.scheduler.max_sequences);

  std::cout << common::format("%d texts of %d tokens: %d in common, %d of each one's own, and a reply of %d\n\n",
                              options.num_texts, length, options.prefix_tokens, options.own_tokens,
                              options.reply_tokens);
  common::Table bytes({"", "K and V read apart", "together", "of it"});
  common::Table times({"", "apart, ms", "together, ms", "gain"});
  for (const Workload& workload : workloads(source, options)) {
    std::array<Run, 2> best;
    // In turns, and the fastest of each: what else the machine does only makes a run slower.
    for (int round = 0; round < options.rounds; ++round) {
      for (const bool shares : {false, true}) {
        Run run = serve(model, workload, sized, shares);
        Run& fastest = best[shares ? 1 : 0];
        if (round == 0 || run.seconds < fastest.seconds) {
          fastest = std::move(run);
        }
      }
    }
    const auto& [apart, together] = best;
    if (together.is_exact && apart.texts != together.texts) {
      throw std::runtime_error("a text that was read together differs from the one that was read apart");
    }
    bytes.add_row(
        {workload.name, common::format_bytes(apart.bytes_read), common::format_bytes(together.bytes_read),
         common::format_percent(static_cast<double>(together.bytes_read), static_cast<double>(apart.bytes_read))});
    times.add_row({workload.name, common::format("%.1f", 1e3 * apart.seconds),
                   common::format("%.1f", 1e3 * together.seconds),
                   common::format("%.2f", apart.seconds / together.seconds)});
  }
  std::cout << bytes.to_string() << "\n" << times.to_string();
}

}  // namespace

common::Command& add_shared_reading_command(common::Program& program, SharedReadingOptions& options) {
  common::Command& command = program.add_session_command(
      "shared-reading", "Show what is saved where sequences read the blocks that they have in common once",
      [&options](const common::Session& session) { print_reading(session, options); },
      {.prompts = false, .sampling = false});
  command.option("--texts", options.num_texts, {1, 1 << 12}, "texts that are written together");
  command.option("--prefix-tokens", options.prefix_tokens, {1, 1 << 20}, "tokens of a prompt that they have in common");
  command.option("--own-tokens", options.own_tokens, {1, 1 << 20}, "tokens of a prompt beside these");
  command.option("--reply-tokens", options.reply_tokens, {1, 1 << 20}, "tokens of each reply");
  command.option("--rounds", options.rounds, {1, 1000}, "how often each is measured; the fastest counts");
  command.option("--synthetic", options.synthetic,
                 "random weights in the shape of a published model: " + common::preset_names(), common::find_preset);
  command.exclude("--synthetic", "--model");
  return command;
}

}  // namespace
