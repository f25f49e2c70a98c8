#include "common/app/conversation.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <limits>
#include <new>
#include <optional>
#include <ostream>
#include <random>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/app/command.h"
#include "common/app/drawing_options.h"
#include "common/app/result_file.h"
#include "common/app/text_stream.h"
#include "common/app/words.h"
#include "common/base/check.h"
#include "common/base/json.h"
#include "common/base/machine.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/base/utf8.h"

namespace common {
namespace {

constexpr const char* kHelp =
    "  /regenerate      another reply to the last message\n"
    "  /reset           begin a new conversation\n"
    "  /system TEXT     begin a new one with this system prompt, \"\" for none;\n"
    "                   without a TEXT: show it\n"
    "  /set NAME VALUE  how replies are drawn; without a NAME: show all settings\n"
    "  /save FILE       write the conversation to a file; /load FILE goes on with it\n"
    "  /quit            end, as Ctrl-D does; Ctrl-C ends a reply, or clears a line\n"
    "  /help            this list\n"
    "A line that ends with \\ goes on in the next one; \"\"\" begins and ends a message\n"
    "of several lines. A message that begins with / has a blank before it.\n"
    "Once the context is full, the model no longer reads the oldest messages; /save\n"
    "writes them all the same.\n";

constexpr std::string_view kBlanks = " \t\r\n";
constexpr std::string_view kQuotes = "\"\"\"";

// The settings of /set: an option's name without its dashes, and with _ or - between its words.
class Settings {
 public:
  void option(const std::string& name, int& value, Range<int> range, const std::string&) {
    add(
        name, [&value] { return std::to_string(value); },
        [&value, range](const std::string& text) { value = parse_number(text, range); });
  }
  void option(const std::string& name, std::uint64_t& value, const std::string&) {
    add(
        name, [&value] { return std::to_string(value); },
        [&value](const std::string& text) {
          value = parse_number(text, Range<std::uint64_t>{0, std::numeric_limits<std::uint64_t>::max()});
        });
  }
  void option(const std::string& name, float& value, Range<double> range, const std::string&) {
    add(
        name, [&value] { return format("%g", static_cast<double>(value)); },
        [&value, range](const std::string& text) { value = static_cast<float>(parse_number(text, range)); });
  }

  // "temperature 0.7, top_k 40"
  std::string to_string() const {
    std::string result;
    for (const Setting& setting : settings_) {
      result += (result.empty() ? "" : ", ") + setting.name + " " + setting.get();
    }
    return result;
  }

  // Returns the setting's name. Throws InputError if there is no setting of that name, or if it cannot have the value.
  std::string set(std::string name, const std::string& value) {
    std::replace(name.begin(), name.end(), '-', '_');
    for (const Setting& setting : settings_) {
      if (setting.name == name) {
        try {
          setting.set(value);
        } catch (const InputError& error) {
          throw InputError(name + ": " + error.what());
        }
        return name;
      }
    }
    throw InputError("no setting " + quote(name) + "; there are: " + to_string());
  }

 private:
  struct Setting {
    std::string name;
    std::function<std::string()> get;
    std::function<void(const std::string&)> set;
  };
  void add(const std::string& option, std::function<std::string()> get, std::function<void(const std::string&)> set) {
    std::string name = option.substr(2);
    std::replace(name.begin(), name.end(), '-', '_');
    settings_.push_back({std::move(name), std::move(get), std::move(set)});
  }
  std::vector<Setting> settings_;
};

// A path as shells read it: "~/" is the user's folder.
std::string expanded(const std::string& path) {
  const char* const home = std::getenv("HOME");
  return path.starts_with("~/") && home != nullptr ? home + path.substr(1) : path;
}

// Throws InputError if anything but a regular file is at the path: opening it could block for ever, or give a file only
// in part.
void check_regular(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    throw InputError(path + ": this is no regular file");
  }
}

// Writes the file whole, or throws InputError and leaves an earlier file as it was. Who may read that one may read the
// new one; if it may not be written, it stays.
void write_whole(const std::string& path, const std::string& text) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, error);  // behind a link
  if (std::filesystem::is_symlink(target, error)) {  // renaming would put the file in its place
    throw InputError("can't write to '" + path + "': a link to nothing");
  }
  const std::filesystem::path beside =
      target.parent_path() / format(".%08x.part", std::random_device()());  // no file of the user's
  std::error_code reason = std::make_error_code(std::errc::not_enough_memory);
  try {
    if (std::filesystem::exists(target)) {
      std::filesystem::copy_file(target, beside);
    }
    std::ofstream file(beside, std::ios::trunc);
    file << text;
    file.close();
    if (!file) {
      throw std::system_error(errno, std::generic_category());
    }
    std::filesystem::rename(beside, target);
    return;
  } catch (const std::system_error& failure) {
    reason = failure.code();
  } catch (const std::bad_alloc&) {  // as the reason is by now
  }
  std::filesystem::remove(beside, error);
  throw InputError(write_failure(path, reason));
}

// The tokens of a message that was read from a file. Empty: there are none, or not of this vocabulary.
std::vector<Token> tokens_of(const Json& message, int vocab_size) {
  std::vector<Token> tokens;
  const Json* const listed = message.find("tokens");
  if (listed == nullptr || !listed->is_array()) {
    return {};
  }
  for (const Json& entry : *listed) {
    if (!entry.is_number_integer() || !(entry.get<double>() >= 0.0 && entry.get<double>() < vocab_size)) {
      return {};
    }
    tokens.push_back(entry.get<Token>());
  }
  return tokens;
}

// The reply as its tokens, up to a stop string, which may end within one.
std::vector<Token> kept_tokens(const Session& session, std::span<const Token> tokens, const std::string& text) {
  std::size_t count = tokens.size();
  while (session.tokenizer.decode(tokens.first(count)).size() > text.size()) {
    --count;
  }
  std::vector<Token> result(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count));
  const std::string rest = text.substr(session.tokenizer.decode(result).size());
  if (valid_utf8_length(rest) > 0) {
    const std::vector<Token> last = session.tokenizer.encode(rest);
    result.insert(result.end(), last.begin(), last.end());
  }
  return result;
}

// Whether a sentence ends here, outside of any speech.
bool ends_sentence(std::string_view text) {
  if (std::count(text.begin(), text.end(), '"') % 2 != 0) {
    return false;
  }
  const std::size_t last = text.find_last_not_of('"');
  return last != std::string_view::npos && std::string_view(".!?").find(text[last]) != std::string_view::npos;
}

std::optional<std::int64_t> tokens_found(const std::vector<Counter>& counters) {
  for (const Counter& entry : counters) {
    if (entry.name == "prefix_tokens_saved") {
      return static_cast<std::int64_t>(entry.value);
    }
  }
  return std::nullopt;
}

// Writes a reply without the blanks that it begins with.
class ReplyWriter {
 public:
  ReplyWriter(const Request& request, StopStrings::Decode decode, std::ostream& output)
      : reply_(request.stop_strings, std::move(decode)), wrap_(output, wrap_columns(output), 0) {}
  void add(Token token) { write(reply_.add(token)); }
  void finish() { write(reply_.finish()); }

 private:
  void write(const std::string& text) {
    const std::size_t begin = has_begun_ ? 0 : text.find_first_not_of(" \n");
    if (begin != std::string::npos) {
      wrap_.write(std::string_view(text).substr(begin));
      has_begun_ = has_begun_ || begin < text.size();
    }
  }

  ReplyStream reply_;
  WordWrap wrap_;
  bool has_begun_ = false;
};

}  // namespace

Conversation::Conversation(const Session& session, const RunRequests& run, std::string system_prompt, int enough_tokens)
    : session_(session),
      run_(run),
      system_prompt_(std::move(system_prompt)),
      enough_tokens_(enough_tokens),
      drawn_(session.requests.front()),
      num_slots_(static_cast<int>(counter(run({}, [](int, Token) {}).counters, "slots_total"))) {
  drawn_.prompt.clear();
  reset();
}

bool Conversation::is_typed() const { return is_input_terminal() && is_terminal(std::cout); }

int Conversation::converse(std::ostream& output, const std::string& history_path) {
  const NoteInterrupts interrupts(is_typed());
  LineReader reader(history_path);
  if (is_typed()) {
    greet(output);
  }
  int num_errors = 0;
  bool was_interrupted = false;
  while (true) {
    output.flush();
    std::string message;
    const LineInput input = read_message(reader, message);
    if (input == LineInput::kInterrupted || input == LineInput::kCleared) {
      NoteInterrupts::clear();
      if (!is_typed()) {
        throw Interrupted();
      }
      const bool is_empty = input == LineInput::kInterrupted;
      if (is_empty && was_interrupted) {
        return num_errors;
      }
      was_interrupted = is_empty;
      if (is_empty) {
        note(output, "Ctrl-C once more, or Ctrl-D, ends");
      }
      continue;
    }
    was_interrupted = false;
    if (input == LineInput::kEnd || message == "/quit") {
      output << (input == LineInput::kEnd && is_typed() ? "\n" : "");
      return num_errors;
    }
    try {
      if (message.find_first_not_of(kBlanks) != std::string::npos) {
        reader.remember(message);
        if (!run_command(message, output)) {
          const bool is_escaped = message.starts_with(" /");
          answer(messages_, message.substr(is_escaped ? 1 : 0), output);
        }
      }
    } catch (const InputError& error) {
      output.flush();
      std::cerr << "error: " << error.what() << '\n';
      num_errors += is_typed() ? 0 : 1;
    }
    const bool is_ended = NoteInterrupts::is_noted();
    NoteInterrupts::clear();
    if (is_ended && !is_typed()) {
      throw Interrupted();
    }
    if (!output.flush()) {
      throw InputError("can't write to standard output");
    }
  }
}

// A line, or the lines up to the first without a backslash at its end, or the lines between two marks of three quotes.
LineInput Conversation::read_message(LineReader& reader, std::string& message) {
  const std::string more = "... ";
  LineInput input = reader.read("> ", message);
  const bool is_quoted = input == LineInput::kLine && message.starts_with(kQuotes);
  if (is_quoted) {
    message.erase(0, kQuotes.size());
  }
  const auto is_open = [&] { return is_quoted ? !message.ends_with(kQuotes) : message.ends_with('\\'); };
  std::string line;
  while (input == LineInput::kLine && is_open()) {
    message.resize(message.size() - (is_quoted ? 0 : 1));
    input = reader.read(more, line);
    if (input == LineInput::kLine) {
      message += '\n' + line;
    } else if (input == LineInput::kInterrupted) {
      input = LineInput::kCleared;
    }
  }
  if (is_quoted && message.ends_with(kQuotes)) {
    message.resize(message.size() - kQuotes.size());
  }
  // What stands before the end of the input is a message too.
  return input == LineInput::kEnd && !message.empty() ? LineInput::kLine : input;
}

void Conversation::greet(std::ostream& output) const {
  std::string text = "A conversation with " + session_.model_name +
                     ". /help lists the commands, Ctrl-C ends a reply, Ctrl-D the program.";
  if (!has_chat_template(*session_.file, session_.chat)) {
    text += " The model has no chat template: it goes on with what you write. Begin a tale: Once upon a time";
  }
  WordWrap(output, wrap_columns(output), 0).write(text + "\n\n");
}

// Returns false if the message is not a command.
bool Conversation::run_command(const std::string& message, std::ostream& output) {
  if (message.front() != '/') {
    return false;
  }
  const std::string line = message.substr(0, message.find_last_not_of(kBlanks) + 1);
  const std::string command = line.substr(0, line.find(' '));
  const std::size_t begin = line.find_first_not_of(' ', command.size());
  const std::string text = begin == std::string::npos ? "" : line.substr(begin);
  if (command == "/help") {
    output << kHelp;
  } else if (command == "/reset" && text.empty()) {
    begin_anew(output);
  } else if (command == "/system" && text.empty()) {
    note(output,
         system_prompt_.empty() ? "no system prompt but the template's own" : "system: " + quote(system_prompt_));
  } else if (command == "/system") {
    check_utf8(text);
    system_prompt_ = text == "\"\"" ? "" : text;
    begin_anew(output);
  } else if (command == "/set") {
    change_setting(text, output);
  } else if (command == "/regenerate" && text.empty()) {
    regenerate(output);
  } else if (command == "/save" || command == "/load") {
    if (text.empty() || text.find('\n') != std::string::npos) {  // a paste may have several lines
      throw InputError(command + " needs the name of a file, and nothing else");
    }
    command == "/save" ? save(expanded(text), output) : load(expanded(text), output);
  } else {
    throw InputError("no command " + quote(line) + "; /help lists them, and a blank before the / makes it a message");
  }
  return true;
}

// text: "NAME VALUE", or empty.
void Conversation::change_setting(const std::string& text, std::ostream& output) {
  Settings settings;
  add_drawing_options(settings, drawn_.sampling);
  settings.option("--max-tokens", drawn_.max_new_tokens, {1, 1 << 24}, "");
  if (!text.empty()) {
    const std::size_t end = std::min(text.find_first_of(" ="), text.size());
    const std::size_t begin = std::min(text.find_first_not_of(" =", end), text.size());
    const std::string name = settings.set(text.substr(0, end), text.substr(begin));
    if (name == "seed") {
      num_replies_ = 0;  // the same messages get the same replies
    } else if (name == "max_tokens") {
      enough_tokens_ = 0;
    }
  }
  note(output, settings.to_string());
}

void Conversation::regenerate(std::ostream& output) {
  if (messages_.empty() || messages_.back().role != "assistant") {
    throw InputError("there is no reply yet");
  }
  if (is_greedy(drawn_.sampling)) {
    note(output, "the temperature is 0: the reply is the same");
  }
  std::vector<ChatMessage> before = messages_;
  answer({before.begin(), before.end() - 2}, before.end()[-2].content, output);
  if (NoteInterrupts::is_noted()) {  // in the middle of the new reply
    messages_ = std::move(before);
    note(output, "the reply before is kept");
  }
}

// The messages as JSON, in the form in which OpenAI's API takes them. A reply also has its tokens: its text may be
// encoded as others, which the cache does not hold.
void Conversation::save(const std::string& path, std::ostream& output) const {
  check_regular(path);
  Json document = {{"model", session_.model_name}, {"messages", Json::array()}};
  for (const ChatMessage& message : messages_) {
    document["messages"].push_back({{"role", message.role}, {"content", message.content}});
    if (!message.tokens.empty()) {
      document["messages"].back()["tokens"] = message.tokens;
    }
  }
  write_whole(path, document.dump() + "\n");
  note(output, counted(static_cast<int>(messages_.size()), "message") + " in " + path);
}

// Reads what save() has written, or messages without tokens. Throws InputError, and changes nothing, if it is neither.
void Conversation::load(const std::string& path, std::ostream& output) {
  constexpr std::size_t kMaxBytes = 64 << 20;
  constexpr int kMaxDepth = 32;
  std::vector<ChatMessage> messages;
  check_regular(path);
  try {
    std::ifstream file(path);
    if (!file) {
      throw InputError(path + ": cannot open: " + std::generic_category().message(errno));
    }
    // What a file of /proc holds is not known before it is read.
    std::string text;
    std::array<char, 1 << 16> part{};
    while (text.size() <= kMaxBytes && (file.read(part.data(), std::ssize(part)), file.gcount() > 0)) {
      text.append(part.data(), static_cast<std::size_t>(file.gcount()));
    }
    if (file.bad()) {
      throw InputError(path + ": cannot read");
    }
    if (text.size() > kMaxBytes) {
      throw InputError(path + ": it is larger than any conversation, 64 MiB");
    }
    const Json document = Json::parse(text, kMaxDepth);
    const Json* const listed = document.is_object() ? document.find("messages") : nullptr;
    if (listed == nullptr || !listed->is_array()) {
      throw JsonError("there are no messages");
    }
    for (const Json& entry : *listed) {
      if (!entry.is_object() || !entry.at("role").is_string() || !entry.at("content").is_string()) {
        throw JsonError("a message has no role or no content");
      }
      ChatMessage message{entry.at("role").text(), entry.at("content").text()};
      const bool is_system = messages.empty() && message.role == "system";
      const bool is_reply = !messages.empty() && messages.back().role == "user";
      if (!is_system && message.role != (is_reply ? "assistant" : "user")) {
        throw InputError(path + ": messages of user and assistant do not take turns");
      }
      std::vector<Token> tokens = tokens_of(entry, session_.model.config().vocab_size);
      if (is_reply && session_.tokenizer.decode(tokens) == message.content) {  // else of another model
        message.tokens = std::move(tokens);
      }
      messages.push_back(std::move(message));
    }
  } catch (const JsonError&) {
    throw InputError(path + ": it is no conversation that /save has written");
  }
  if (!messages.empty() && messages.back().role == "user") {
    messages.pop_back();  // it has no reply
  }
  messages_ = std::move(messages);
  num_left_out_ = 0;
  is_warned_ = false;
  system_prompt_ = !messages_.empty() && messages_.front().role == "system" ? messages_.front().content : "";
  note(output, counted(static_cast<int>(messages_.size()), "message") + " from " + path);
}

void Conversation::reset() {
  messages_.clear();
  num_left_out_ = 0;
  is_warned_ = false;
  if (!system_prompt_.empty()) {
    messages_.push_back({"system", system_prompt_});
  }
}

void Conversation::begin_anew(std::ostream& output) {
  reset();
  note(output,
       "a new conversation" + (system_prompt_.empty() ? "" : ", with the system prompt " + quote(system_prompt_)));
}

int Conversation::room() const { return std::min(session_.model.config().context_length, num_slots_); }

// What a prompt leaves to its reply.
int Conversation::reply_room() const { return std::min(drawn_.max_new_tokens, room() / 4); }

// The most tokens with which a conversation has room for a turn or two more.
int Conversation::nearly_full() const { return room() - reply_room() - room() / 4; }

// The messages as tokens, but for the oldest num_left_out behind a system prompt. If they leave too little to a reply,
// raises num_left_out, by whole turns.
std::vector<Token> Conversation::prompt_within_room(const std::vector<ChatMessage>& messages, int& num_left_out) const {
  const int first = messages.front().role == "system" ? 1 : 0;
  const auto encoded = [&] {
    std::vector<ChatMessage> kept = messages;
    kept.erase(kept.begin() + first, kept.begin() + first + num_left_out);
    return encode_chat(*session_.file, session_.tokenizer, kept, session_.chat);
  };
  std::vector<Token> prompt = encoded();
  if (std::ssize(prompt) > room() - reply_room()) {
    while (std::ssize(prompt) > nearly_full() && first + num_left_out + 1 < std::ssize(messages)) {
      num_left_out += 2;
      prompt = encoded();
    }
  }
  return prompt;
}

void Conversation::note(std::ostream& output, const std::string& text) const {
  const bool color = use_color(output);
  output << (color ? "\x1b[2m" : "");
  WordWrap(output, wrap_columns(output), 0).write("[" + text + "]");
  output << (color ? "\x1b[0m\n" : "\n");
}

void Conversation::answer(std::vector<ChatMessage> messages, const std::string& message, std::ostream& output) {
  const std::string where = num_slots_ < session_.model.config().context_length ? "the cache (--slots)" : "the context";
  messages.push_back({"user", message});
  Completion reply;
  int num_left_out = num_left_out_;
  int num_tokens = 0;
  int max_new_tokens = 0;
  // A model without a template may take the message for the end of a paragraph: then the reply is the next paragraph.
  for (const char* const ending : {"", "\n"}) {
    messages.back().content = message + ending;
    const int left_out_before = num_left_out;
    std::vector<Token> prompt = prompt_within_room(messages, num_left_out);
    num_tokens = static_cast<int>(prompt.size());
    max_new_tokens = std::min(drawn_.max_new_tokens, room() - num_tokens);
    if (max_new_tokens < 1) {
      const bool has_system = messages.front().role == "system";
      throw InputError(format("%s %d tokens, and %s has %d",
                              has_system ? "this message and the system prompt have" : "this message has", num_tokens,
                              where.c_str(), room()));
    }
    if (num_left_out > left_out_before) {
      note(output, format("the oldest %d messages are left out from here on: %s has %d tokens", num_left_out,
                          where.c_str(), room()));
    }
    reply = reply_to(std::move(prompt), max_new_tokens, output);
    if (!reply.tokens.empty() || has_chat_template(*session_.file, session_.chat)) {
      break;
    }
  }
  const std::string text = session_.text_of(reply);
  messages.push_back({"assistant", text, kept_tokens(session_, reply.tokens, text)});
  messages_ = std::move(messages);
  is_warned_ = is_warned_ && num_left_out == num_left_out_;  // before each time that messages are left out
  num_left_out_ = num_left_out;
  const bool is_full = reply.finish_reason == FinishReason::kLength && max_new_tokens < drawn_.max_new_tokens;
  if (reply.finish_reason == FinishReason::kLength && !is_full) {
    note(output,
         "cut after " + counted(max_new_tokens, "token") + (is_typed() ? " (/set max_tokens)" : " (--max-new-tokens)"));
  }
  const bool is_nearly_full = num_tokens + static_cast<int>(reply.tokens.size()) > nearly_full();
  if (is_full || (is_nearly_full && !is_warned_)) {
    note(output, where + format(" of %d tokens is %s the oldest messages are left out of what the model reads", room(),
                                is_full ? "full: from now on" : "nearly full: soon"));
  }
  is_warned_ = is_nearly_full;
}

// Writes the reply, and what the cache saved; on a terminal also how fast it was. Ctrl-C ends it.
Completion Conversation::reply_to(std::vector<Token> prompt, int max_new_tokens, std::ostream& output) {
  Request request = drawn_;
  const auto num_tokens = static_cast<std::int64_t>(prompt.size());
  request.prompt = std::move(prompt);
  request.max_new_tokens = max_new_tokens;
  request.sample_index += num_replies_++;  // so that the same message after /reset gets another reply
  const std::int64_t found_before = tokens_found(run_({}, [](int, Token) {}).counters).value_or(0);
  Completion so_far;
  ReplyWriter writer(
      request, [this](std::span<const Token> tokens) { return session_.tokenizer.decode(tokens); }, output);
  bool is_ended = false;
  const double start = now_seconds();
  double first_token = 0.0;  // when it came
  double last_token = 0.0;
  const auto on_token = [&](int, Token token) {
    last_token = now_seconds();
    first_token = so_far.tokens.empty() ? last_token : first_token;
    so_far.tokens.push_back(token);
    writer.add(token);
    const bool is_long = enough_tokens_ > 0 && std::ssize(so_far.tokens) >= enough_tokens_;
    is_ended =
        NoteInterrupts::is_noted() || !output || (is_long && ends_sentence(session_.tokenizer.decode(so_far.tokens)));
    if (is_ended) {
      throw Interrupted();
    }
  };
  try {
    const Completion completion = run_({&request, 1}, on_token).completions.front();
    if (!completion.error.empty() && !is_ended) {  // else a stage may report Interrupted as an error
      throw InputError(completion.error);
    }
    so_far.finish_reason = completion.finish_reason;
  } catch (const Interrupted&) {
    so_far.finish_reason = FinishReason::kCancelled;
  }
  writer.finish();
  if (so_far.tokens.empty() && !has_chat_template(*session_.file, session_.chat)) {
    return so_far;
  }
  output << (is_typed() && NoteInterrupts::is_noted() ? "^C\n" : "\n");
  std::string said;
  if (is_typed() && !so_far.tokens.empty()) {
    said = counted(static_cast<int>(so_far.tokens.size()), "token") +
           format(", the first after %.0f ms", 1e3 * (first_token - start));
    constexpr std::size_t kTokensOfASpeed = 8;  // fewer tell nothing: a server that runs ahead hands them out in pairs
    if (so_far.tokens.size() > kTokensOfASpeed) {
      said +=
          format(", then %.0f tokens/s", static_cast<double>(so_far.tokens.size() - 1) / (last_token - first_token));
    }
  }
  const std::optional<std::int64_t> found = tokens_found(run_({}, [](int, Token) {}).counters);
  if (found.has_value() && (messages_.size() > 1 || *found > found_before)) {
    said += (said.empty() ? "" : "; ") + format("%s of the conversation's %s tokens were in the prefix cache",
                                                format_count(*found - found_before).c_str(),
                                                format_count(num_tokens).c_str());
  }
  if (!said.empty()) {
    note(output, said);
  }
  return so_far;
}

}  // namespace common
