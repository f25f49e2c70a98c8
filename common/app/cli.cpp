#include "common/app/cli.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <istream>
#include <iterator>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "common/app/conversation.h"
#include "common/app/drawing_options.h"
#include "common/app/json.h"
#include "common/app/line_reader.h"
#include "common/app/notes.h"
#include "common/app/plan.h"
#include "common/app/progress.h"
#include "common/app/result_file.h"
#include "common/app/table.h"
#include "common/app/text_stream.h"
#include "common/app/workload.h"
#include "common/base/check.h"
#include "common/base/machine.h"
#include "common/base/parallel.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/base/utf8.h"
#include "common/model/chat.h"
#include "common/model/default_model.h"
#include "common/model/gguf.h"
#include "common/model/presets.h"
#include "common/model/recommended_sampling.h"

namespace common {
namespace {

constexpr int kMaxLogprobs = 20;  // as in vLLM and in OpenAI's interface

Gguf open_model(const std::string& path) {
  return path.empty() ? Gguf::parse(default_model(), "the bundled model") : Gguf::open(path);
}

std::string counter_text(double value) {
  const auto whole = static_cast<std::int64_t>(value);
  return static_cast<double>(whole) == value ? format_count(whole) : format("%.1f", value);
}

std::string tokens_per_second(std::int64_t tokens, double seconds) {
  return seconds > 0.0 ? format("%.1f", static_cast<double>(tokens) / seconds) : "-";
}

// How many tokens would have gone through the model if it kept no keys and values: the whole text for each token drawn.
std::int64_t tokens_without_cache(const Session& session, const std::vector<Completion>& completions) {
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < completions.size(); ++i) {
    const bool drew_stop_token = completions[i].finish_reason == FinishReason::kStop &&
                                 !session.requests[i].stop_strings.found_after(completions[i].tokens);
    const std::int64_t num_drawn = std::ssize(completions[i].tokens) + (drew_stop_token ? 1 : 0);
    tokens += num_drawn * std::ssize(session.requests[i].prompt) + num_drawn * (num_drawn - 1) / 2;
  }
  return tokens;
}

// A line for each token: its log-probability and rank, and the most likely tokens in its place.
void print_logprobs(const Session& session, const Completion& completion) {
  const auto spelled = [&](const TokenLogprob& entry) {
    return format("%8.4f ", static_cast<double>(entry.logprob)) +
           quote(session.tokenizer.decode({&entry.token, 1}, true));
  };
  for (const TokenLogprobs& entry : completion.logprobs) {
    std::cout << "    " << spelled(entry.drawn) << "  rank " << entry.rank << "  best:";
    for (const TokenLogprob& other : entry.best) {
      std::cout << spelled(other);
    }
    std::cout << '\n';
  }
}

void print_texts(const Session& session, const RunResult& result, bool is_quiet) {
  for (std::size_t i = 0; i < result.completions.size(); ++i) {
    const Completion& completion = result.completions[i];
    const std::string text = session.text_of(completion);
    if (is_quiet) {
      std::cout << text << '\n';
      continue;
    }
    print_prompt(std::cout, i, session.prompts[i]);
    WordWrap(std::cout, wrap_columns(std::cout), kTextIndent).write(text + why_nothing(completion));
    std::cout << '\n';
    print_logprobs(session, result.completions[i]);
  }
}

bool have_all_failed(const RunResult& result) {
  return std::all_of(result.completions.begin(), result.completions.end(),
                     [](const Completion& completion) { return !completion.error.empty(); });
}

void print_counters(const RunResult& result) {
  Table table({"counter", "value"});
  for (const Counter& entry : result.counters) {
    std::string label = entry.name;
    std::replace(label.begin(), label.end(), '_', ' ');
    table.add_row({label, counter_text(entry.value)});
  }
  table.add_row({"utilisation",
                 format_percent(counter(result.counters, "slots_used"), counter(result.counters, "slots_reserved"))});
  std::cout << '\n' << table.to_string();
}

// Replies of no more than a token have no speed: a prompt's computation gives the first one.
void print_timing(const Timing& timing) {
  std::cout << format("\nprompts  %s tokens/s\n",
                      tokens_per_second(timing.prefill_tokens, timing.prefill_seconds).c_str());
  if (timing.decode_tokens > 0) {
    std::cout << format("replies  %s tokens/s, %.2f ms a token\n",
                        tokens_per_second(timing.decode_tokens, timing.decode_seconds).c_str(),
                        timing.milliseconds_per_token());
  }
}

nlohmann::ordered_json to_json(const Session& session, const TokenLogprobs& logprobs) {
  const auto entry_of = [&](const TokenLogprob& entry) {
    return nlohmann::ordered_json{{"token", entry.token},
                                  {"text", session.tokenizer.decode({&entry.token, 1}, true)},
                                  {"logprob", entry.logprob}};
  };
  nlohmann::ordered_json result = entry_of(logprobs.drawn);
  result["rank"] = logprobs.rank;
  for (const TokenLogprob& entry : logprobs.best) {
    result["best"].push_back(entry_of(entry));
  }
  return result;
}

std::string to_json(const std::string& stage, const Session& session, const RunResult& result) {
  nlohmann::ordered_json document;
  document["stage"] = stage;
  document["model"] = session.model_name;
  document["requests"] = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < result.completions.size(); ++i) {
    const Completion& completion = result.completions[i];
    nlohmann::ordered_json entry;
    entry["prompt"] = session.prompts[i];
    entry["prompt_tokens"] = session.requests[i].prompt.size();
    entry["text"] = session.text_of(completion);
    entry["tokens"] = completion.tokens;
    entry["finish_reason"] = to_string(completion.finish_reason);
    for (const TokenLogprobs& logprobs : completion.logprobs) {
      entry["logprobs"].push_back(to_json(session, logprobs));
    }
    if (!completion.error.empty()) {
      entry["error"] = completion.error;
    }
    document["requests"].push_back(entry);
  }
  document["counters"] = to_json(result.counters);
  document["timing"] = {{"prefill_tokens", result.timing.prefill_tokens},
                        {"prefill_seconds", result.timing.prefill_seconds},
                        {"decode_tokens", result.timing.decode_tokens},
                        {"decode_seconds", result.timing.decode_seconds},
                        {"milliseconds_per_token", result.timing.milliseconds_per_token()}};
  // A reply may end in the middle of a character. Here its bytes become U+FFFD; "tokens" is exact.
  return document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// The text of a file or, for "-", of standard input, without the line end that editors and `echo` put behind a text.
std::string read_prompt(const std::string& path) {
  std::error_code ignored;
  if (path != "-" && std::filesystem::is_directory(path, ignored)) {
    throw InputError(path + ": a directory, not a file with a prompt");
  }
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
  }
  std::istream& input = path == "-" ? std::cin : file;
  std::string text;
  try {
    text.assign(std::istreambuf_iterator<char>(input), {});
  } catch (const std::ios_base::failure&) {  // for a device's error, but not for the end of a file
    input.setstate(std::ios_base::failbit);
  }
  if (!input) {
    throw InputError(path + ": cannot read the prompt: " + std::generic_category().message(errno));
  }
  for (const char end : {'\n', '\r'}) {
    if (text.ends_with(end)) {
      text.pop_back();
    }
  }
  const std::string name = path == "-" ? "standard input" : path;
  if (text.empty()) {
    throw InputError(name + ": the prompt is empty");
  }
  try {
    check_utf8(text);
  } catch (const InputError& error) {
    throw InputError(name + ": " + error.what());
  }
  return text;
}

std::vector<std::string> read_prompts(const SessionOptions& options) {
  std::vector<std::string> prompts;
  for (const std::string& prompt : options.prompts) {
    prompts.push_back(prompt == "-" ? read_prompt("-") : prompt);
  }
  for (const std::string& path : options.prompt_files) {
    prompts.push_back(read_prompt(path));
  }
  return prompts;
}

Session load(const SessionOptions& options) {
  set_num_threads(options.num_threads > 0 ? options.num_threads
                                          : std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  const auto opened = std::make_shared<const Gguf>(open_model(options.model_path));
  const Gguf& file = *opened;
  Session session{file.name(), Llama(file, *options.windows), Tokenizer(file), {}, {}};
  session.file = opened;
  session.windows = *options.windows;
  if (const int window = session.model.config().window; window > 0 && session.windows == Windows::kUnknown) {
    print_note("layers of this model see the last " + format_count(window) +
               " tokens only, which this program does not compute: the context ends there");
  }
  const std::vector<std::string> prompts = read_prompts(options);
  const bool fixed_workload = prompts.empty();
  if (fixed_workload && options.chat) {
    throw UsageError("--chat needs a --prompt to answer");
  }
  session.chat.format = options.chat_format;
  if (options.chat && !has_chat_template(file, session.chat)) {
    print_note("the model has no chat template: with --chat, too, it goes on with the prompt");
  }
  for (const std::string& prompt : prompts) {
    std::vector<ChatMessage> messages = {{"user", prompt}};
    if (!options.system_prompt.empty()) {
      messages.insert(messages.begin(), {"system", options.system_prompt});
    }
    session.prompts.push_back(prompt);
    session.requests.push_back(
        {options.chat ? encode_chat(file, session.tokenizer, messages, session.chat)
                      : session.tokenizer.encode_prompt(prompt),
         options.max_new_tokens, options.sampling, options.sample_index,
         options.chat ? chat_stop_tokens(file, session.tokenizer, session.chat) : session.tokenizer.ends()});
  }
  if (fixed_workload) {
    for (const WorkloadItem& item : workload()) {
      session.prompts.push_back(item.prompt);
      session.requests.push_back({session.tokenizer.encode_prompt(item.prompt), item.max_new_tokens, options.sampling,
                                  options.sample_index, session.tokenizer.ends()});
    }
  }
  if (!options.stop_strings.empty()) {
    // The stop strings have a tokenizer of their own, because the session's may move.
    const auto tokenizer = std::make_shared<const Tokenizer>(file);
    session.stop_strings = {options.stop_strings,
                            [tokenizer](std::span<const Token> tokens) { return tokenizer->decode(tokens); }};
  }
  for (std::size_t i = 0; i < session.requests.size(); ++i) {
    session.requests[i].sampling.seed += i;  // so that equal prompts get different texts
    session.requests[i].stop_strings = session.stop_strings;
    session.requests[i].num_logprobs = options.num_logprobs;
  }
  return session;
}

struct PictureOptions {
  std::vector<Picture> pictures;
  std::string name;  // empty: a list is wanted
  std::string path = "-";
};

void draw_picture(const PictureOptions& options) {
  const ResultFile file(options.path);
  for (const Picture& picture : options.pictures) {
    if (options.name.empty()) {
      std::cout << picture.name << "  " << picture.caption << '\n';
    } else if (options.name == picture.name) {
      file.write(picture.draw());
    }
  }
}

struct SceneOptions {
  std::vector<SceneScript> scripts;
  std::string name;
  bool shell = false;
  bool record = false;
};

// Prints the state after each command. A wrong command is no reason to stop: its line says what is wrong.
void play_scene(const SceneScript& script, bool shell) {
  const std::unique_ptr<Scene> scene = make_scene(script);
  std::cout << first_state(script, *scene) << '\n';
  int num_wrong = 0;
  const auto play = [&](const std::string& commands) {
    for (const std::string& command : split_commands(commands)) {
      const std::string state = state_after(*scene, command);
      num_wrong += nlohmann::json::parse(state).contains("error") ? 1 : 0;
      std::cout << state << std::endl;
    }
  };
  if (!shell) {
    play(script.commands);
  }
  for (std::string line; shell && std::getline(std::cin, line);) {
    play(line);
  }
  if (num_wrong > 0) {
    throw InputError(counted(num_wrong, "command") + (num_wrong == 1 ? " was" : " were") +
                     " wrong; \"error\" in the states above says why");
  }
}

// {"name": {"title": "...", "states": [...]}, ...}
void record_scenes(const std::vector<SceneScript>& scripts) {
  nlohmann::ordered_json record;
  for (const SceneScript& script : scripts) {
    const std::unique_ptr<Scene> scene = make_scene(script);
    nlohmann::ordered_json states = {nlohmann::ordered_json::parse(first_state(script, *scene))};
    for (const std::string& command : split_commands(script.commands)) {
      states.push_back(nlohmann::ordered_json::parse(state_after(*scene, command)));
    }
    record[script.name] = {{"title", script.title}, {"states", std::move(states)}};
  }
  std::cout << record.dump() << '\n';
}

void run_scenes(const SceneOptions& options) {
  if (options.record) {
    record_scenes(options.scripts);
    return;
  }
  for (const SceneScript& script : options.scripts) {
    if (options.name == script.name) {
      play_scene(script, options.shell);
    }
  }
}

struct GenerateOptions {
  SessionOptions session;
  std::string json_path;
  bool stream = false;
  bool quiet = false;
};

// Ctrl-C ends the run, and the texts so far are printed. A result that goes into a file is there whole or not at all.
RunResult run_interruptibly(const Session& session, bool is_streamed, bool is_quiet, bool has_texts,
                            const StartEngine& start_engine) {
  std::int64_t total = 0;
  for (const Request& request : session.requests) {
    total += request.max_new_tokens;
  }
  std::optional<NoteInterrupts> interrupts;
  if (has_texts) {
    interrupts.emplace();
  }
  const double start = now_seconds();
  RunResult so_far{std::vector<Completion>(session.requests.size()), {}, {}};
  TextStream stream(session, std::cout, is_quiet);
  std::int64_t num_tokens = 0;
  try {
    Progress progress("generating", total);
    RunResult result = start_engine(session)(session.requests, [&](int request, Token token) {
      num_tokens += 1;
      so_far.completions.at(static_cast<std::size_t>(request)).tokens.push_back(token);
      if (is_streamed) {
        stream.add(request, token);
      } else {
        progress.advance();
      }
      if (NoteInterrupts::is_noted()) {
        throw Interrupted();
      }
    });
    if (!NoteInterrupts::is_noted()) {
      if (is_streamed && !have_all_failed(result)) {
        stream.finish(result.completions);
      }
      return result;
    }
  } catch (const Interrupted&) {  // a stage may report it as the requests' error instead
  }
  if (is_streamed) {
    stream.finish(so_far.completions);
  } else {
    print_texts(session, so_far, is_quiet);
  }
  if (is_quiet) {
    throw Interrupted();
  }
  std::cout << format("\ninterrupted after %s tokens, %s tokens/s\n", format_count(num_tokens).c_str(),
                      tokens_per_second(num_tokens, now_seconds() - start).c_str());
  throw Interrupted();
}

void generate(const std::string& stage, const GenerateOptions& options, const StartEngine& start) {
  const ResultFile json(options.json_path);
  const Session session = load(options.session);
  const bool is_live = is_terminal(std::cout) && !json.is_wanted() && options.session.num_logprobs == 0;
  const bool is_streamed = options.stream || is_live;
  RunResult result = run_interruptibly(session, is_streamed, options.quiet, !json.is_wanted(), start);
  const std::int64_t tokens_computed = result.timing.prefill_tokens + result.timing.decode_tokens;
  result.counters.insert(
      result.counters.begin(),
      {{"tokens_computed", static_cast<double>(tokens_computed)},
       {"tokens_without_cache", static_cast<double>(tokens_without_cache(session, result.completions))}});
  if (!json.is_wanted() && have_all_failed(result)) {
    throw InputError(result.completions.front().error);
  }
  if (json.is_wanted()) {
    json.write(to_json(stage, session, result));
  } else {
    if (!is_streamed) {
      print_texts(session, result, options.quiet);
    }
    if (!options.quiet) {
      print_counters(result);
      print_timing(result.timing);
    }
  }
  if (!std::cout.flush()) {
    throw InputError("can't write to standard output");
  }
  for (const Completion& completion : result.completions) {
    if (!completion.error.empty()) {
      throw InputError(completion.error);
    }
  }
}

struct ChatCommandOptions {
  SessionOptions session;
  bool keeps_history = false;
};

void chat(const ChatCommandOptions& chat_options, const StartEngine& start) {
  const SessionOptions& options = chat_options.session;
  // The most that stage 8 makes room for unless --slots says more: the other stages' default.
  constexpr int kMaxRoom = 4096;
  constexpr int kReplyTokens = 512;
  constexpr int kParagraphTokens = 120;
  SessionOptions plain = options;
  plain.system_prompt.clear();
  Session session = load(plain);
  session.prompts.clear();
  session.requests.resize(1);
  Request& request = session.requests.front();
  request.stop_tokens = chat_stop_tokens(*session.file, session.tokenizer, session.chat);
  request.sampling = with_recommendations(options.sampling, *session.file);
  if (!has_chat_template(*session.file, session.chat)) {  // a reply ends where its paragraph does
    const std::vector<Token> line_end = session.tokenizer.encode("\n");
    request.stop_tokens.insert(request.stop_tokens.end(), line_end.begin(), line_end.end());
  }
  request.prompt.resize(1);
  request.max_new_tokens = std::min(session.model.config().context_length, kMaxRoom) - 1;
  const RunRequests run = start(session);
  const bool is_given = options.max_new_tokens > 0;
  const int usual = has_chat_template(*session.file, session.chat) ? kReplyTokens : kParagraphTokens;
  request.max_new_tokens = is_given ? options.max_new_tokens : usual;
  const int enough_tokens = is_given || has_chat_template(*session.file, session.chat) ? 0 : kParagraphTokens / 2;
  check_utf8(options.system_prompt);
  const std::string history_path = chat_options.keeps_history ? state_path("chat_history") : "";
  if (Conversation(session, run, options.system_prompt, enough_tokens).converse(std::cout, history_path) > 0) {
    throw InputError("not every line could be answered");
  }
}

void add_model_options(Command& command, SessionOptions& options) {
  command.file("--model", options.model_path, std::string(kLoadableModels) + " (default: the bundled model)");
  command.option("--threads", options.num_threads, {1, 1024},
                 "threads for the model's arithmetic (default: one for each processor)");
}

void add_chat_template(Command& command, SessionOptions& options) {
  command.option("--chat-template", options.chat_format,
                 "chatml, qwen3, llama2, llama3, gemma or none, in place of the model's own template",
                 check_chat_format);
}

void add_prompt_options(Command& command, SessionOptions& options) {
  const auto check_prompt = [](const std::string& text) {
    if (text.empty()) {
      throw InputError("the prompt is empty");
    }
  };
  command.option("--prompt", options.prompts, "text to continue; may be given several times; -: standard input",
                 check_prompt);
  command.file("--prompt-file", options.prompt_files, "a file with a text to continue; may be given several times");
  command.flag("--chat", options.chat, "answer each prompt, with the model's chat template");
  command.option("--system", options.system_prompt, "with --chat: what the model is told first");
  command.require("--system", "--chat");
  command.option("--max-new-tokens", options.max_new_tokens, {1, 1 << 24},
                 "maximum number of tokens to generate for a --prompt");
}

void add_sampling_options(Command& command, SessionOptions& options) {
  add_drawing_options(command, options.sampling);
  command.option("--sample-index", options.sample_index, {0, 1 << 24},
                 "different indices draw different texts from one prompt and seed");
  const auto add_stop_string = [&options](const std::string& text) {
    if (text.empty()) {
      throw InputError("an empty text would end every reply");
    }
    options.stop_strings.push_back(text);
  };
  command.option("--stop", add_stop_string, "a text that ends a reply, and is no part of it");
}

}  // namespace

Program::Program(std::string name, const std::string& idea) : name_(std::move(name)), command_line_(name_, idea) {
  bench_options_.session.windows = &windows_;
}

Command& Program::add_generate(StartEngine start) {
  const auto options = std::make_shared<GenerateOptions>();
  options->session.windows = &windows_;
  Command& command = command_line_.add("generate", "Generate text: for --prompt, or for the course's fixed workload",
                                       [this, options, start = std::move(start)] { generate(name_, *options, start); });
  add_model_options(command, options->session);
  add_prompt_options(command, options->session);
  add_chat_template(command, options->session);
  command.require("--chat-template", "--chat");
  add_sampling_options(command, options->session);
  command.option("--logprobs", options->session.num_logprobs, {0, kMaxLogprobs},
                 "print each token's log-probability, and those of N most likely tokens");
  command.flag("--stream", options->stream, "write each token as it comes, as on a terminal");
  command.flag("--quiet", options->quiet, "write the texts alone: no prompts, no counters, no times");
  command.file("--json", options->json_path, "write texts, counters and timings to a file instead ('-': stdout)");
  command.exclude("--quiet", "--logprobs");
  command.exclude("--stream", "--json");
  command.exclude("--stream", "--logprobs");
  return command;
}

Command& Program::add_chat(StartEngine start) {
  const auto all = std::make_shared<ChatCommandOptions>();
  SessionOptions* const options = &all->session;
  options->windows = &windows_;
  options->max_new_tokens = 0;  // not given
  options->sampling.temperature = 0.7F;
  options->sampling.top_k = 40;
  options->sampling.top_p = 0.95F;
  Command& command = command_line_.add("chat", "Talk with the model: what you type is answered, line by line",
                                       [all, start = std::move(start)] { chat(*all, start); });
  add_model_options(command, *options);
  command.option("--system", options->system_prompt, "what the model is told first");
  add_chat_template(command, *options);
  command.option("--max-new-tokens", options->max_new_tokens, {1, 1 << 24},
                 "maximum number of tokens of a reply (default: 512; 120 if the model has no chat template)");
  add_sampling_options(command, *options);
  if (LineReader::can_edit()) {
    command.flag("--keep-history", all->keeps_history,
                 "keep what is typed for the next conversation, in a file under $XDG_STATE_HOME (or ~/.local/state)");
  }
  return command;
}

Command& Program::add_session_command(const std::string& name, const std::string& description,
                                      std::function<void(const Session&)> run, const SessionInput& input) {
  const auto options = std::make_shared<SessionOptions>();
  options->windows = &windows_;
  options->sampling = input.default_sampling;
  Command& command =
      command_line_.add(name, description, [options, run = std::move(run), before_loading = input.before_loading] {
        if (before_loading) {
          before_loading();
        }
        run(load(*options));
      });
  add_model_options(command, *options);
  if (input.prompts) {
    add_prompt_options(command, *options);
  }
  if (input.sampling) {
    add_sampling_options(command, *options);
  }
  return command;
}

Command& Program::add_bench(std::function<BenchTarget(const Session&)> target,
                            std::function<AttentionTarget(const AttentionShape&)> attention) {
  Command& command = command_line_.add(
      "bench", "Measure speed, and compare it with this machine's memory bandwidth",
      [this, target = std::move(target), attention = std::move(attention)] { bench(target, attention); });
  BenchOptions& options = bench_options_;
  add_model_options(command, options.session);
  command.option("--prompt-tokens", options.prompt_tokens, {2, 1 << 24}, "length of the prompt");
  command.option("--new-tokens", options.new_tokens, {1, 1 << 24}, "tokens decoded after it");
  command.option("--synthetic", options.synthetic,
                 "random weights in the shape of a published model: " + preset_names(), find_preset);
  command.exclude("--synthetic", "--model");
  command.flag("--attention", options.attention, "measure attention alone, at growing context lengths");
  command.option("--max-context", options.max_context, {64, 1 << 20}, "the longest context for --attention");
  bench_command_ = &command;
  return command;
}

void Program::add_block_commands(int& block_size, StartEngine start) {
  add_plan(command_line_);
  bench_command_->flag("--sweep-block-size", bench_options_.sweep_block_size,
                       "waste and block tables of the fixed workload, by block size");
  sweep_block_size_ = [this, &block_size, start = std::move(start)] {
    const Session session = load(bench_options_.session);
    print_block_size_sweep([&](int size) {
      block_size = size;
      const RunResult result = start(session)(session.requests, [](int, Token) {});
      return BlockSizeRow{counter(result.counters, "slots_reserved"), counter(result.counters, "slots_used"),
                          counter(result.counters, "requests_held"), result.timing.milliseconds_per_token()};
    });
  };
}

void Program::add_pictures(std::vector<Picture> pictures) {
  const auto options = std::make_shared<PictureOptions>();
  std::vector<std::pair<std::string, std::string>> names;
  names.reserve(pictures.size());
  for (const Picture& picture : pictures) {
    names.emplace_back(picture.name, picture.name);
  }
  options->pictures = std::move(pictures);
  Command& command = command_line_.add("picture", "Draw a picture of the lesson as SVG; without a name, list them",
                                       [options] { draw_picture(*options); });
  command.choice("name", options->name, names, "which one");
  command.file("--svg", options->path, "write it to this file ('-': stdout)");
}

void Program::add_scenes(std::vector<SceneScript> scripts) {
  const auto options = std::make_shared<SceneOptions>();
  std::vector<std::pair<std::string, std::string>> names;
  names.reserve(scripts.size());
  for (const SceneScript& script : scripts) {
    names.emplace_back(script.name, script.name);
  }
  options->name = names.front().first;
  options->scripts = std::move(scripts);
  Command& command = command_line_.add("scene", "Go through an example of the lesson: a line of JSON for each state",
                                       [options] { run_scenes(*options); });
  command.choice("name", options->name, names, "which one");
  command.flag("--shell", options->shell, "read commands from standard input instead");
  command.flag("--record", options->record, "all of them in one document, for the course's site");
  command.exclude("--shell", "--record");
}

Command& Program::add_command(const std::string& name, const std::string& description, std::function<void()> run) {
  return command_line_.add(name, description, std::move(run));
}

int Program::run(int argc, char** argv) {
  keep_freed_memory();
  try {
    const int code = command_line_.run(argc, argv);
    if (!std::cout.flush()) {
      throw InputError("can't write to standard output");
    }
    return code;
  } catch (const Interrupted&) {
    return 130;  // as shells report it
  } catch (const InputError& error) {
    std::cerr << name_ << ": " << error.what() << '\n';
  } catch (const CheckError& error) {
    std::cerr << name_ << ": a bug: " << error.what() << '\n';
    return 70;
  } catch (const std::bad_alloc&) {
    std::cerr << name_ << ": not enough memory; a smaller cache (--slots) may fit\n";
  } catch (const std::runtime_error& error) {  // from a library, such as CUDA
    std::cerr << name_ << ": " << error.what() << '\n';
  }
  return 1;
}

void Program::bench(const std::function<BenchTarget(const Session&)>& target,
                    const std::function<AttentionTarget(const AttentionShape&)>& attention) {
  const BenchOptions& options = bench_options_;
  if (options.attention) {
    print_attention_speed(attention, options.max_context);
    return;
  }
  if (options.sweep_block_size) {
    sweep_block_size_();
    return;
  }
  const double begin = now_seconds();
  Session session = load(options.session);
  if (!options.synthetic.empty()) {
    session.model_name = options.synthetic;
    session.model = Llama::synthetic(find_preset(options.synthetic).config, 1, session.windows);
  }
  const double load_seconds = now_seconds() - begin;
  const int context = session.model.config().context_length;
  if (options.prompt_tokens + options.new_tokens > context) {
    throw InputError(format("%d + %d tokens are more than the model's context of %d", options.prompt_tokens,
                            options.new_tokens, context));
  }
  session.bench_tokens = options.prompt_tokens + options.new_tokens;
  session.slots_given = bench_command_->is_given("--slots");
  print_speed(session.model, target(session), options.prompt_tokens, options.new_tokens, load_seconds);
}

}  // namespace common
