#include "prefix_commands.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/app/token_source.h"
#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/text.h"
#include "lone_sequences.h"

namespace stage8 {
namespace {

using common::Token;
using common::TokenSource;

std::vector<Token> join(std::vector<Token> first, const std::vector<Token>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

struct FirstToken {
  Token token = 0;
  int num_cached = 0;  // of the prompt
  double milliseconds = 0.0;
};

// Starts a sequence, computes its prompt and draws the next token.
FirstToken compute_prompt(Engine& engine, SequenceId sequence, std::span<const Token> prompt) {
  LoneSequences sequences(engine);
  const double begin = common::now_seconds();
  if (!sequences.start(sequence, prompt, 0)) {
    throw common::InputError(common::format("no room for a prompt of %zu tokens; give more --slots", prompt.size()));
  }
  FirstToken first;
  first.num_cached = engine.manager().length(sequence);
  const common::Matrix logits =
      sequences.append(sequence, prompt.subspan(static_cast<std::size_t>(first.num_cached))).value();
  first.token = common::argmax({logits.data(), static_cast<std::size_t>(logits.cols())});
  first.milliseconds = 1e3 * (common::now_seconds() - begin);
  return first;
}

EngineOptions with_prefix_cache(EngineOptions options, bool on) {
  options.prefix_cache = on;
  return options;
}

// More digits of a time that is measured once would be noise.
std::string two_digits(double milliseconds) {
  const double unit = std::pow(10.0, std::floor(std::log10(std::max(milliseconds, 1.0))) - 1.0);
  return common::format(unit < 1.0 ? "%.1f" : "%.0f", std::round(milliseconds / unit) * unit);
}

void print_users(const common::Session& session, const TokenSource& source, const ReuseOptions& options) {
  std::cout << common::format("%d users, a prompt of %d tokens in common and %d tokens of each one's own\n\n",
                              options.num_users, options.prefix_tokens, options.user_tokens);
  common::Table table({"prefix cache", "tokens computed", "blocks", "K and V", "first user, ms", "each other, ms"});
  const std::vector<Token> prefix = source.take(0, options.prefix_tokens);
  const std::int64_t found = options.prefix_tokens / options.engine.block_size * options.engine.block_size;
  const std::int64_t length = std::int64_t{options.prefix_tokens} + options.user_tokens;
  common::Progress progress("tokens of prompts", 2 * length * options.num_users - found * (options.num_users - 1));
  for (const bool on : {false, true}) {
    Engine engine(session.model, with_prefix_cache(options.engine, on));
    int computed = 0;
    double first = 0.0;
    double others = 0.0;
    for (int user = 0; user < options.num_users; ++user) {
      const std::vector<Token> prompt = join(prefix, source.take(user + 1, options.user_tokens));
      const FirstToken result = compute_prompt(engine, user, prompt);
      computed += static_cast<int>(prompt.size()) - result.num_cached;
      progress.advance(static_cast<std::int64_t>(prompt.size()) - result.num_cached);
      (user == 0 ? first : others) += result.milliseconds;
    }
    const Usage usage = engine.manager().usage();
    table.add_row({on ? "on" : "off", common::format_count(computed),
                   common::format_count(usage.reserved / engine.manager().block_size()),
                   common::format_bytes(engine.cache().bytes_per_slot * usage.reserved), two_digits(first),
                   two_digits(others / std::max(options.num_users - 1, 1))});
  }
  progress.clear();
  std::cout << table.to_string();
}

// Questions and answers are in the cache when the next question arrives.
void print_conversation(const common::Session& session, const TokenSource& source, const ReuseOptions& options) {
  std::cout << common::format("\na conversation: questions and answers of %d tokens each\n\n", options.user_tokens);
  common::Table table({"turn", "prompt tokens", "cached", "computed", "cold, ms", "warm, ms"});
  Engine engine(session.model, with_prefix_cache(options.engine, true));
  std::vector<Token> conversation;
  common::Progress progress("turns", options.num_turns);
  for (int turn = 0; turn < options.num_turns; ++turn) {
    conversation = join(conversation, source.take(turn + 1, options.user_tokens));
    const auto num_tokens = static_cast<int>(conversation.size());
    Engine cold_engine(session.model, with_prefix_cache(options.engine, false));
    const FirstToken cold = compute_prompt(cold_engine, turn, conversation);
    const FirstToken warm = compute_prompt(engine, turn, conversation);
    COMMON_CHECK(cold.token == warm.token, "the cache changed the text");
    conversation.push_back(warm.token);
    for (int i = 1; i < options.user_tokens; ++i) {
      const std::optional<common::Matrix> logits = LoneSequences(engine).append(turn, {&conversation.back(), 1});
      if (!logits.has_value()) {
        throw common::InputError("the conversation is longer than the cache; give more --slots");
      }
      conversation.push_back(common::argmax({logits->data(), static_cast<std::size_t>(logits->cols())}));
    }
    engine.manager().free(turn);
    table.add_row({std::to_string(turn + 1), std::to_string(num_tokens), std::to_string(warm.num_cached),
                   std::to_string(num_tokens - warm.num_cached), two_digits(cold.milliseconds),
                   two_digits(warm.milliseconds)});
    progress.advance();
  }
  progress.clear();
  std::cout << table.to_string();
}

// Seconds that the manager takes to start, fill and end a sequence for each prompt. known: it gets the tokens and
// hashes them; otherwise it gets only their number.
double bookkeeping_seconds(const EngineOptions& options, const std::vector<std::vector<Token>>& prompts, bool known) {
  constexpr int kRepetitions = 50;
  double best = 1e9;
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    KvCacheManager manager(blocks_needed(*options.num_slots, options.block_size), options.block_size);
    const double begin = common::now_seconds();
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      const auto sequence = static_cast<SequenceId>(i);
      const auto count = static_cast<int>(prompts[i].size());
      if (known) {
        COMMON_CHECK(manager.allocate(sequence, prompts[i]), "the cache is larger than a prompt");
        manager.commit(sequence, prompts[i]);
      } else {
        COMMON_CHECK(manager.allocate(sequence, count), "the cache is larger than a prompt");
        manager.commit(sequence, count);
      }
      manager.free(sequence);
    }
    best = std::min(best, common::now_seconds() - begin);
  }
  return best;
}

void print_hashing(const common::Session& session, const TokenSource& source, const ReuseOptions& options) {
  std::vector<std::vector<Token>> prompts;
  double prefill = 0.0;
  Engine engine(session.model, with_prefix_cache(options.engine, false));
  common::Progress progress("prompts", options.num_users);
  for (int user = 0; user < options.num_users; ++user) {
    prompts.push_back(source.take(user + 1, options.prefix_tokens));
    prefill += compute_prompt(engine, 0, prompts.back()).milliseconds;
    engine.manager().free(0);
    progress.advance();
  }
  progress.clear();
  const double hashing =
      1e3 * (bookkeeping_seconds(options.engine, prompts, true) - bookkeeping_seconds(options.engine, prompts, false));
  std::cout << common::format("\n%d prompts of %d tokens that share nothing\n\n", options.num_users,
                              options.prefix_tokens);
  common::Table table({"prefill, ms", "hashing and looking up, ms", "share"});
  table.add_row(
      {common::format("%.1f", prefill), common::format("%.3f", hashing), common::format_percent(hashing, prefill)});
  std::cout << table.to_string();
}

void print_reuse(const common::Session& session, const ReuseOptions& options) {
  const int longest =
      std::max(options.prefix_tokens + options.user_tokens, 2 * options.user_tokens * options.num_turns);
  if (longest > session.model.config().context_length) {
    throw common::InputError(common::format("sequences of %d tokens are longer than the model's context of %d", longest,
                                            session.model.config().context_length));
  }
  const TokenSource source(session, session.model.config().vocab_size);
  print_users(session, source, options);
  print_conversation(session, source, options);
  print_hashing(session, source, options);
}

}  // namespace

common::Command& add_prefix_command(common::Program& program, ReuseOptions& options) {
  common::Command& command = program.add_session_command(
      "prefix", "Show what the prefix cache saves, and what it costs",
      [&](const common::Session& session) { print_reuse(session, options); }, {.prompts = false, .sampling = false});
  command.option("--users", options.num_users, {1, 1 << 16}, "users of one prompt");
  command.option("--prefix-tokens", options.prefix_tokens, {1, 1 << 20}, "length of the prompt they have in common");
  command.option("--user-tokens", options.user_tokens, {1, 1 << 20}, "length of what each user asks");
  command.option("--turns", options.num_turns, {1, 1 << 10}, "turns of the conversation");
  return command;
}

void add_prefix_commands(common::Shell& shell, KvCacheManager& manager) {
  shell.add("prompt", "NAME TEXT", "start a sequence whose tokens are TEXT's characters",
            [&](const auto& arguments, std::ostream& output) {
              const SequenceId sequence = common::sequence_named(manager, arguments[0], false);
              const std::vector<Token> tokens(arguments[1].begin(), arguments[1].end());
              if (!manager.allocate(sequence, tokens)) {
                output << "refused: no room for " << tokens.size() << "\n";
                return;
              }
              const int num_cached = manager.length(sequence);
              output << num_cached << " of " << tokens.size() << " tokens are in the cache\n";
              manager.commit(sequence, std::span<const Token>(tokens).subspan(static_cast<std::size_t>(num_cached)));
            });
  shell.add("reset", "", "empty the prefix cache", [&](const auto&, std::ostream&) { manager.reset_prefix_cache(); });
}

}  // namespace
