#include "speculation.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../make_runner.h"
#include "../serve/make_engine.h"
#include "common/app/notes.h"
#include "common/app/result_file.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/text.h"
#include "common/base/utf8.h"
#include "common/model/chat.h"
#include "common/model/presets.h"
#include "lone_sequences.h"
#include "quoting_runner.h"

namespace stage8 {
namespace {

// One kind of text.
struct Workload {
  std::string name;
  std::vector<common::Request> requests = {};
  bool quotes = false;  // whether each reply is made to repeat its prompt, as a model's is that quotes
};

// What some requests have shown.
struct Sums {
  double seconds = 0.0;  // from the first token on
  int tokens = 0;        // after it: a prompt's step draws the first
  int drafts = 0;
  int accepted = 0;

  void add(const Sums& other) {
    seconds += other.seconds;
    tokens += other.tokens;
    drafts += other.drafts;
    accepted += other.accepted;
  }
};

// 0 as long as there is no such counter.
int count(const Engine& engine, std::string_view name) {
  const std::vector<common::Counter> counters = engine.counters();
  const auto found = std::find_if(counters.begin(), counters.end(),
                                  [&](const common::Counter& counter) { return counter.name == name; });
  return found == counters.end() ? 0 : static_cast<int>(found->value);
}

// Serves the request, and nothing beside it. Adds up what it shows, and returns its text. salt: the last one used.
std::vector<common::Token> serve(Engine& engine, const common::Request& request, int num_drafts, std::uint64_t& salt,
                                 Sums& sums) {
  const int drafts_before = count(engine, "drafts");
  const int accepted_before = count(engine, "drafts_accepted");
  common::Request run = request;
  run.num_speculative_tokens = num_drafts;
  run.cache_salt = ++salt;  // finds nothing of earlier runs
  const int id = engine.submit({.request = run});
  while (engine.step()) {
  }
  const RequestOutput& output = engine.output(id);
  if (!output.error.empty()) {
    throw common::InputError(output.error);
  }
  sums.tokens += static_cast<int>(output.token_times.size()) - 1;
  sums.seconds += output.token_times.back() - output.token_times.front();
  sums.drafts += count(engine, "drafts") - drafts_before;
  sums.accepted += count(engine, "drafts_accepted") - accepted_before;
  return output.completions.front().tokens;
}

// The session's requests greedily, at temperature 1, and with replies that quote.
std::vector<Workload> workloads(std::span<const common::Request> requests, int max_new_tokens) {
  std::vector<Workload> result = {{"greedy"}, {"temperature 1"}, {.name = "quotes", .quotes = true}};
  for (const common::Request& request : requests) {
    common::Request changed = request;
    changed.max_new_tokens = max_new_tokens;
    changed.stop_tokens.clear();
    changed.sampling = {};
    result[0].requests.push_back(changed);
    changed.sampling.temperature = 1.0F;
    result[1].requests.push_back(changed);
    changed.sampling = {};
    result[2].requests.push_back(changed);
  }
  return result;
}

// A file of prompts of several kinds: a line "== KIND" begins a prompt, which goes on to the next such line.
struct PromptOfKind {
  std::string kind;
  std::string text = {};
};

std::vector<PromptOfKind> read_prompts(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<PromptOfKind> prompts;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("== ")) {
      prompts.push_back({line.substr(3)});
    } else if (prompts.empty()) {
      throw common::InputError(path + ": a file of prompts begins with a line \"== KIND\"");
    } else {
      prompts.back().text += (prompts.back().text.empty() ? "" : "\n") + line;
    }
  }
  if (prompts.empty()) {
    throw common::InputError(path + ": cannot read prompts");
  }
  for (PromptOfKind& prompt : prompts) {
    prompt.text.erase(prompt.text.find_last_not_of('\n') + 1);
    if (prompt.text.empty()) {
      throw common::InputError(path + ": a prompt of the kind " + common::quote(prompt.kind) + " is empty");
    }
    try {
      common::check_utf8(prompt.text);
    } catch (const common::InputError& error) {
      throw common::InputError(path + ": " + error.what());
    }
  }
  return prompts;
}

// Greedy replies by kind, and all of them at temperature 1. A reply ends where the model ends it.
std::vector<Workload> workloads(const common::Session& session, const std::string& path, int max_new_tokens) {
  const common::Gguf& file = *session.file;
  const bool is_chat = common::has_chat_template(file);
  if (!is_chat) {
    common::print_note("the model has no chat template: it goes on with the prompts");
  }
  std::vector<Workload> result;
  Workload sampled = {"all, temperature 1"};
  for (const PromptOfKind& prompt : read_prompts(path)) {
    common::Request request;
    request.prompt =
        is_chat ? common::encode_chat(file, session.tokenizer, std::vector{common::ChatMessage{"user", prompt.text}})
                : session.tokenizer.encode_prompt(prompt.text);
    request.max_new_tokens = max_new_tokens;
    request.stop_tokens = common::chat_stop_tokens(file, session.tokenizer);
    request.sampling.seed = sampled.requests.size();
    if (result.empty() || result.back().name != prompt.kind) {
      result.push_back({prompt.kind});
    }
    result.back().requests.push_back(request);
    request.sampling.temperature = 1.0F;
    sampled.requests.push_back(std::move(request));
  }
  result.push_back(std::move(sampled));
  return result;
}

// The same greedy requests for other engines (tests/bench/vllm_drafts.py).
std::string tokens_of(const std::vector<Workload>& workloads) {
  nlohmann::ordered_json document;
  for (const Workload& workload : std::span(workloads).first(workloads.size() - 1)) {
    for (const common::Request& request : workload.requests) {
      document["max_new_tokens"] = request.max_new_tokens;
      document["stop_tokens"] = request.stop_tokens;
      document["prompts"].push_back({{"kind", workload.name}, {"tokens", request.prompt}});
    }
  }
  return document.dump() + "\n";
}

void print_texts(Engine& engine, const std::vector<Workload>& workloads, const SpeculateOptions& options) {
  common::Table table({"texts", "drafts", "accepted", "tokens a step", "plain", "with drafts", "gain"});
  std::uint64_t salt = 0;
  int num_texts = 0;
  int num_different = 0;
  for (const Workload& workload : workloads) {
    Sums plain;
    Sums drafted;
    for (const common::Request& request : workload.requests) {
      dynamic_cast<QuotingRunner&>(engine.runner())
          .quote(workload.quotes ? request.prompt : std::vector<common::Token>());
      Sums best_plain;
      Sums best_drafted;
      bool is_different = false;
      // In turns, and the fastest of each: what else the machine does only makes a run slower.
      for (int round = 0; round < options.rounds; ++round) {
        std::array<std::vector<common::Token>, 2> texts;
        for (const bool has_drafts : {false, true}) {
          Sums sums;
          texts[has_drafts ? 1 : 0] = serve(engine, request, has_drafts ? options.num_drafts : 0, salt, sums);
          Sums& best = has_drafts ? best_drafted : best_plain;
          best = round == 0 || sums.seconds < best.seconds ? sums : best;
        }
        // In 16 bits, tokens whose logits differ by rounding may change places.
        is_different = is_different || texts[0] != texts[1];
        if (is_different && options.engine.gpu.types.is_exact()) {
          throw std::runtime_error("a text with drafts differs from the one without");
        }
      }
      ++num_texts;
      num_different += is_different ? 1 : 0;
      plain.add(best_plain);
      drafted.add(best_drafted);
    }
    const double per_step = static_cast<double>(drafted.tokens) / std::max(drafted.tokens - drafted.accepted, 1);
    table.add_row({workload.name, std::to_string(drafted.drafts), std::to_string(drafted.accepted),
                   common::format("%.2f", per_step), common::format("%.0f tokens/s", plain.tokens / plain.seconds),
                   common::format("%.0f tokens/s", drafted.tokens / drafted.seconds),
                   common::format("%.2f", plain.seconds / drafted.seconds)});
  }
  std::cout << table.to_string();
  if (num_different > 0) {
    std::cout << common::format(
        "\n%d of %d texts differ from those without drafts: in 16 bits, tokens with nearly equal logits\n"
        "change places where a step rounds differently\n",
        num_different, num_texts);
  }
}

// The time of steps with several tokens of one sequence, over that of a step with one. On a GPU, that is one which is
// enqueued before the tokens of the step before are known.
void print_costs(Engine& engine, const SpeculateOptions& options) {
  constexpr int kContext = 128;
  constexpr int kSteps = 16;
  constexpr int kMaxTokens = 16;
  constexpr SequenceId kSequence = 0;  // all requests have ended
  LoneSequences sequences(engine);
  const std::vector<common::Token> text(kContext, 1);
  if (!sequences.start(kSequence, text, 0) || !sequences.append(kSequence, text)) {
    throw common::InputError("the cache is too small to measure steps");
  }
  COMMON_CHECK(engine.manager().reserve(kSequence, kMaxTokens), "the cache has room for a few tokens more");
  common::Table table({"tokens in a step", "time", "each beyond the first"});
  const bool can_run_ahead = engine.runner().is_asynchronous();
  const auto seconds_of = [&](int count, bool runs_ahead) {
    const double begin = common::now_seconds();
    StepId last;
    for (int step = 0; step < kSteps; ++step) {
      RaggedBatch batch;
      batch.add(engine.manager(), kSequence, std::span(text).first(static_cast<std::size_t>(count)), false);
      batch.logits_rows.resize(static_cast<std::size_t>(count));
      std::iota(batch.logits_rows.begin(), batch.logits_rows.end(), 0);
      const StepId before = last;
      last = engine.forward(batch);  // never committed, so that the same slots are written again
      if (!runs_ahead || step > 0) {
        engine.runner().wait(runs_ahead ? before : last);
      }
    }
    engine.runner().wait(last);
    return common::now_seconds() - begin;
  };
  const auto fastest = [&](int count, bool runs_ahead) {
    double best = seconds_of(count, runs_ahead);
    for (int round = 1; round < options.rounds; ++round) {
      best = std::min(best, seconds_of(count, runs_ahead));
    }
    return best;
  };
  double unit = 0.0;
  if (can_run_ahead) {
    unit = fastest(1, true);
    table.add_row({"1, run ahead", "1.00", ""});
  }
  double single = 0.0;
  for (const int count : {1, 2, 3, 4, 6, 8, 12, 16}) {
    const double seconds = fastest(count, false);
    single = count == 1 ? seconds : single;
    unit = unit == 0.0 ? single : unit;
    table.add_row({std::to_string(count), common::format("%.2f", seconds / unit),
                   count == 1 ? "" : common::format("%.2f", (seconds - single) / unit / (count - 1))});
  }
  engine.manager().free(kSequence);
  std::cout << "\n" << table.to_string();
}

}  // namespace

common::Command& add_speculate_command(common::Program& program, SpeculateOptions& options) {
  common::Command& command = program.add_session_command(
      "speculate", "Measure what drafts gain, beside plain decoding, and what more tokens in a step cost",
      [&options](const common::Session& session) {
        const common::ResultFile tokens(options.tokens);
        const std::vector<Workload> texts = options.prompts.empty()
                                                ? workloads(session.requests, options.max_new_tokens)
                                                : workloads(session, options.prompts, options.max_new_tokens);
        if (tokens.is_wanted()) {
          tokens.write(tokens_of(texts));
          return;
        }
        EngineOptions sized = options.engine;
        sized.num_slots = options.engine.num_slots.value_or(4096);
        std::optional<common::Llama> synthetic;
        if (!options.synthetic.empty()) {
          synthetic = common::Llama::synthetic(common::find_preset(options.synthetic).config, 1);
        }
        const common::Llama& model = synthetic ? *synthetic : session.model;
        const std::unique_ptr<Engine> engine =
            make_engine(model, sized, std::make_unique<QuotingRunner>(make_runner(model, sized)), options.num_drafts);
        print_texts(*engine, texts, options);
        print_costs(*engine, options);
      },
      {.sampling = false});
  command.file("--prompts", options.prompts,
               "a file with prompts of several kinds, each after a line \"== KIND\": a row for each kind");
  command.file("--tokens", options.tokens,
               "only write these prompts as tokens into a file (-: standard output), for other engines");
  command.require("--tokens", "--prompts");
  command.exclude("--prompts", "--prompt");
  command.exclude("--prompts", "--prompt-file");
  command.exclude("--prompts", "--chat");  // the model's template, if it has one
  command.remove("--max-new-tokens");      // also for the prompts of the file
  command.option("--max-new-tokens", options.max_new_tokens, {1, 1 << 24}, "maximum number of tokens of a reply");
  command.option("--speculate", options.num_drafts, {1, common::kMaxDrafts}, "max drafts a step");
  command.option("--synthetic", options.synthetic,
                 "random weights in the shape of a published model: " + common::preset_names(), common::find_preset);
  command.exclude("--synthetic", "--model");
  command.option("--rounds", options.rounds, {1, 1000}, "how often each is measured; the fastest counts");
  return command;
}

}  // namespace
