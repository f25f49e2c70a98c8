#include "common/app/conversation.h"

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <iterator>
#include <optional>
#include <ostream>
#include <span>
#include <string_view>
#include <utility>

#include "common/app/text_stream.h"
#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/base/utf8.h"

namespace common {
namespace {

constexpr const char* kHelp =
    "  /reset        begin a new conversation\n"
    "  /system TEXT  begin a new one with this system prompt; without TEXT: show it\n"
    "  /quit         end, as Ctrl-D does; Ctrl-C ends a reply\n"
    "  /help         this list\n";

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
      num_slots_(static_cast<int>(counter(run({}, [](int, Token) {}).counters, "slots_total"))) {
  reset();
}

bool Conversation::is_typed() const { return is_input_terminal() && is_terminal(std::cout); }

int Conversation::converse(std::ostream& output) {
  const NoteInterrupts interrupts;
  if (is_typed()) {
    greet(output);
  }
  int num_errors = 0;
  bool was_interrupted = false;
  while (true) {
    output << (is_typed() ? "> " : "") << std::flush;
    std::string line;
    const LineInput input = read_line(line);
    if (input == LineInput::kInterrupted) {
      NoteInterrupts::clear();
      if (!is_typed()) {
        throw Interrupted();
      }
      output << '\n';
      if (was_interrupted) {
        return num_errors;
      }
      was_interrupted = true;
      note(output, "Ctrl-C once more, or Ctrl-D, ends");
      continue;
    }
    if (input == LineInput::kEnd || line == "/quit") {
      output << (input == LineInput::kEnd && is_typed() ? "\n" : "");
      return num_errors;
    }
    try {
      if (line.find_first_not_of(" \t\r") != std::string::npos && !run_command(line, output)) {
        answer(line, output);
      }
    } catch (const InputError& error) {
      output.flush();
      std::cerr << "error: " << error.what() << '\n';
      num_errors += is_typed() ? 0 : 1;
    }
    was_interrupted = NoteInterrupts::is_noted();
    NoteInterrupts::clear();
    if (was_interrupted && !is_typed()) {
      throw Interrupted();
    }
    if (!output.flush()) {
      throw InputError("can't write to standard output");
    }
  }
}

void Conversation::greet(std::ostream& output) const {
  std::string text = "A conversation with " + session_.model_name +
                     ". /help lists the commands, Ctrl-C ends a reply, Ctrl-D the program.";
  if (!has_chat_template(*session_.file)) {
    text += " The model has no chat template: it goes on with what you write. Begin a tale: Once upon a time";
  }
  WordWrap(output, wrap_columns(output), 0).write(text + "\n\n");
}

// Returns false if the line is not a command.
bool Conversation::run_command(const std::string& line, std::ostream& output) {
  if (line.front() != '/') {
    return false;
  }
  const std::string command = line.substr(0, line.find(' '));
  const std::size_t begin = line.find_first_not_of(' ', command.size());
  const std::string text = begin == std::string::npos ? "" : line.substr(begin);
  if (command == "/help") {
    output << kHelp;
  } else if (command == "/reset" && text.empty()) {
    reset();
  } else if (command == "/system" && text.empty()) {
    note(output,
         system_prompt_.empty() ? "no system prompt but the template's own" : "system: " + quote(system_prompt_));
  } else if (command == "/system") {
    check_utf8(text);
    system_prompt_ = text;
    reset();
  } else {
    throw InputError("no command " + quote(line) + "; /help lists them");
  }
  return true;
}

void Conversation::reset() {
  messages_.clear();
  if (!system_prompt_.empty()) {
    messages_.push_back({"system", system_prompt_});
  }
}

int Conversation::room() const { return std::min(session_.model.config().context_length, num_slots_); }

void Conversation::note(std::ostream& output, const std::string& text) const {
  const bool color = use_color(output);
  output << (color ? "\x1b[2m[" : "[") << text << (color ? "]\x1b[0m\n" : "]\n");
}

void Conversation::answer(const std::string& line, std::ostream& output) {
  const std::string where = num_slots_ < session_.model.config().context_length ? "the cache (--slots)" : "the context";
  std::vector<ChatMessage> messages = messages_;
  messages.push_back({"user", line});
  Completion reply;
  int max_new_tokens = 0;
  // A model without a template may take the message for the end of a paragraph: then the reply is the next paragraph.
  for (const char* const ending : {"", "\n"}) {
    messages.back().content = line + ending;
    std::vector<Token> prompt = encode_chat(*session_.file, session_.tokenizer, messages);
    const auto num_tokens = static_cast<int>(prompt.size());
    max_new_tokens = std::min(session_.requests.front().max_new_tokens, room() - num_tokens);
    if (max_new_tokens < 1) {
      throw InputError(
          format("with this message, the conversation has %d tokens, and %s has %d: /reset begins a new one",
                 num_tokens, where.c_str(), room()));
    }
    reply = reply_to(std::move(prompt), max_new_tokens, output);
    if (!reply.tokens.empty() || has_chat_template(*session_.file)) {
      break;
    }
  }
  const std::string text = session_.text_of(reply);
  messages.push_back({"assistant", text, kept_tokens(session_, reply.tokens, text)});
  messages_ = std::move(messages);
  if (reply.finish_reason == FinishReason::kLength && max_new_tokens < session_.requests.front().max_new_tokens) {
    note(output, where + format(" of %d tokens is full: /reset begins a new conversation", room()));
  } else if (reply.finish_reason == FinishReason::kLength) {
    note(output, format("cut after %d tokens (--max-new-tokens)", max_new_tokens));
  }
}

// Writes the reply, and what the cache saved. Ctrl-C ends it.
Completion Conversation::reply_to(std::vector<Token> prompt, int max_new_tokens, std::ostream& output) {
  Request request = session_.requests.front();
  const auto num_tokens = static_cast<std::int64_t>(prompt.size());
  request.prompt = std::move(prompt);
  request.max_new_tokens = max_new_tokens;
  request.sample_index += num_replies_++;  // so that the same message after /reset gets another reply
  const std::int64_t found_before = tokens_found(run_({}, [](int, Token) {}).counters).value_or(0);
  Completion so_far;
  ReplyWriter writer(
      request, [this](std::span<const Token> tokens) { return session_.tokenizer.decode(tokens); }, output);
  bool is_ended = false;
  const auto on_token = [&](int, Token token) {
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
  if (so_far.tokens.empty() && !has_chat_template(*session_.file)) {
    return so_far;
  }
  output << '\n';
  const std::optional<std::int64_t> found = tokens_found(run_({}, [](int, Token) {}).counters);
  if (found.has_value() && (messages_.size() > 1 || *found > found_before)) {
    note(output, format("%s of the conversation's %s tokens were in the prefix cache",
                        format_count(*found - found_before).c_str(), format_count(num_tokens).c_str()));
  }
  return so_far;
}

}  // namespace common
