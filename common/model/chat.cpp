#include "common/model/chat.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/base/utf8.h"
#include "common/model/chat_template.h"
#include "common/model/unicode.h"

namespace common {
namespace {

constexpr const char* kTemplateKey = "tokenizer.chat_template";
constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";

// --- What a template prints -------------------------------------------------------------------------------------

constexpr const char* kQwen3 = "qwen3";  // ChatML, with thoughts
constexpr std::array<std::pair<const char*, ChatFormat>, 5> kFormats = {{{"chatml", ChatFormat::kChatMl},
                                                                         {"llama2", ChatFormat::kLlama2},
                                                                         {"llama3", ChatFormat::kLlama3},
                                                                         {"gemma", ChatFormat::kGemma},
                                                                         {"none", ChatFormat::kPlain}}};

std::string format_names() {
  std::string names;
  for (const std::string& known : chat_formats()) {
    names += (names.empty() ? "" : ", ") + known;
  }
  return names;
}

[[noreturn]] void refuse(const Gguf& file, const std::string& reason) {
  throw InputError(file.name() + ": chat template: " + reason + "; --chat-template takes one of " + format_names());
}

// A format by its name, as in its first model's template. Without a default system prompt or dates, which are a file's
// own.
ChatTemplate named(const std::string& name) {
  if (name == kQwen3) {
    return {.format = ChatFormat::kChatMl, .thoughts = Thoughts::kOfLastAnswer, .switches_thinking = true};
  }
  const auto* const found =
      std::find_if(kFormats.begin(), kFormats.end(), [&](const auto& known) { return name == known.first; });
  if (found == kFormats.end()) {
    throw InputError("there is no chat template of the name " + quote(name) + " (known: " + format_names() + ")");
  }
  return {.format = found->second};
}

ChatTemplate template_of(const Gguf& file, const ChatOptions& options) {
  if (!options.format.empty()) {
    return named(options.format);
  }
  if (!file.has(kTemplateKey)) {
    return {};
  }
  std::optional<ChatTemplate> found = find_chat_template(file.get_string(kTemplateKey));
  if (!found) {
    refuse(file, "it is not supported");
  }
  return *std::move(found);
}

// --- A conversation in pieces -----------------------------------------------------------------------------------

struct Piece {
  std::string text;
  bool is_special = false;         // the spelling of one special token
  std::vector<Token> tokens = {};  // in a reply: replace the text's tokens
};

// Appends to a conversation's pieces. Neighbouring texts become one piece, so that merges across their borders happen
// as in training.
class Pieces {
 public:
  explicit Pieces(const Gguf& file) : file_(file) {}

  void special(std::string_view spelling) { pieces_.push_back({std::string(spelling), true}); }
  // BOS or EOS; nothing if the vocabulary has none.
  void special_of(const char* key) {
    if (file_.has(key)) {
      special(file_.get_strings("tokenizer.ggml.tokens").at(static_cast<std::size_t>(file_.get_int(key))));
    }
  }
  void text(std::string_view text) {
    if (pieces_.empty() || pieces_.back().is_special || !pieces_.back().tokens.empty()) {
      pieces_.push_back({""});
    }
    pieces_.back().text += text;
  }
  // A message, or its tokens if it has some.
  void content(const ChatMessage& message) { content(message, message.content); }
  void content(const ChatMessage& message, std::string_view printed) {
    if (message.tokens.empty()) {
      text(printed);
    } else {
      pieces_.push_back({message.content, false, message.tokens});
    }
  }
  std::vector<Piece> take() { return std::move(pieces_); }

 private:
  const Gguf& file_;
  std::vector<Piece> pieces_;
};

// Python's strip(), which Jinja's trim is too: its white space is Unicode's and the four separators of ASCII.
std::string_view stripped(std::string_view text) {
  std::size_t begin = text.size();
  std::size_t end = 0;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Character character = decode_utf8(text, at);
    const bool is_separator = character.code_point >= 0x1C && character.code_point <= 0x1F;
    const std::size_t next = at + character.num_bytes;
    if (!is_separator && !is_space(character.code_point)) {
      begin = std::min(begin, at);
      end = next;
    }
    at = next;
  }
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

std::string_view without_newlines(std::string_view text, bool at_end) {
  text.remove_prefix(std::min(text.find_first_not_of('\n'), text.size()));
  const std::size_t last = text.find_last_not_of('\n');
  return at_end ? text.substr(0, last == text.npos ? 0 : last + 1) : text;
}

constexpr std::string_view kThoughtEnd = "</think>";

// A reply as Qwen 3's template takes it apart.
struct Reply {
  std::string_view thoughts;
  std::string_view text;
};

Reply split_reply(std::string_view content) {
  const std::size_t last = content.rfind(kThoughtEnd);
  if (last == content.npos) {
    return {{}, content};
  }
  constexpr std::string_view kThoughtBegin = "<think>";
  std::string_view thoughts = content.substr(0, content.find(kThoughtEnd));
  if (const std::size_t begin = thoughts.rfind(kThoughtBegin); begin != thoughts.npos) {
    thoughts.remove_prefix(begin + kThoughtBegin.size());
  }
  return {without_newlines(thoughts, true), without_newlines(content.substr(last + kThoughtEnd.size()), false)};
}

void replace_content(ChatMessage& message, std::string content) {
  if (content != message.content) {
    message.content = std::move(content);
    message.tokens.clear();
  }
}

// The last message that is a user's question, not the result of a tool in its place. As in Qwen 3's template, the last
// message if there is no question.
std::size_t last_question(std::span<const ChatMessage> messages) {
  for (std::size_t i = messages.size(); i > 0; --i) {
    const std::string& content = messages[i - 1].content;
    const bool is_result = content.starts_with("<tool_response>") && content.ends_with("</tool_response>");
    if (messages[i - 1].role == "user" && !is_result) {
      return i - 1;
    }
  }
  return messages.size() - 1;
}

void treat_thoughts(Thoughts thoughts, std::vector<ChatMessage>& messages) {
  const std::size_t question = last_question(messages);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    ChatMessage& message = messages[i];
    if (message.role != "assistant" || thoughts == Thoughts::kKept) {
      continue;
    }
    const Reply reply = split_reply(message.content);
    const bool is_last = i + 1 == messages.size();
    if (thoughts == Thoughts::kDropped || thoughts == Thoughts::kDroppedBeforeLast) {
      if (thoughts == Thoughts::kDropped || !is_last) {
        replace_content(message, std::string(without_newlines(reply.text, false)));
      }
    } else if (i > question && (is_last || !reply.thoughts.empty())) {
      std::string content = "<think>\n";
      content.append(reply.thoughts).append("\n</think>\n\n").append(without_newlines(reply.text, false));
      replace_content(message, std::move(content));
    } else {
      replace_content(message, std::string(reply.text));
    }
  }
}

// The messages as the template expects them: with a system prompt if it has one, without the thoughts that it drops.
std::vector<ChatMessage> completed(const ChatTemplate& chat_template, std::span<const ChatMessage> messages) {
  std::vector<ChatMessage> result(messages.begin(), messages.end());
  if (result.empty()) {
    return result;
  }
  treat_thoughts(chat_template.thoughts, result);
  if (result.front().role == "system") {
    if (!chat_template.has_system_role) {
      throw InputError("the model's chat template has no system prompts");
    }
  } else if (chat_template.system_prompt || chat_template.has_dates) {
    result.insert(result.begin(), ChatMessage{"system", chat_template.system_prompt.value_or("")});
  }
  return result;
}

// The messages behind the system prompt, which is put before the first of them, with these marks around it.
std::vector<ChatMessage> without_system_role(std::vector<ChatMessage> messages, const std::string& before,
                                             const std::string& after) {
  const std::optional<std::string> system_prompt =
      !messages.empty() && messages[0].role == "system" ? std::optional(messages[0].content) : std::nullopt;
  messages.erase(messages.begin(), messages.begin() + (system_prompt ? 1 : 0));
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if ((messages[i].role == "user") != (i % 2 == 0)) {
      throw InputError("the model's chat template takes messages of user and assistant in turn, the user's first");
    }
  }
  if (system_prompt && !messages.empty()) {
    messages[0].content = before + *system_prompt + after + messages[0].content;
  }
  return messages;
}

constexpr const char* kBosKey = "tokenizer.ggml.bos_token_id";
constexpr const char* kEosKey = "tokenizer.ggml.eos_token_id";

void add_plain(Pieces& pieces, const std::vector<ChatMessage>& messages) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    pieces.text(i > 0 && messages[i].role != "assistant" ? "\n" : "");
    pieces.content(messages[i]);
  }
}

void add_chat_ml(Pieces& pieces, const ChatTemplate& chat_template, const std::vector<ChatMessage>& messages) {
  if (chat_template.begins_with_bos) {
    pieces.special_of(kBosKey);
  }
  for (const ChatMessage& message : messages) {
    pieces.special(kStart);
    pieces.text(message.role + "\n");
    pieces.content(message);
    pieces.special(kEnd);
    pieces.text("\n");
  }
  pieces.special(kStart);
  pieces.text("assistant\n");
}

void add_llama2(Pieces& pieces, const std::vector<ChatMessage>& messages) {
  for (const ChatMessage& message : without_system_role(messages, "<<SYS>>\n", "\n<</SYS>>\n\n")) {
    const std::string_view content = stripped(message.content);
    if (message.role == "user") {
      pieces.special_of(kBosKey);
      pieces.text("[INST] ");
      pieces.text(content);
      pieces.text(" [/INST]");
    } else if (message.role == "assistant") {
      // A model writes the blank itself.
      pieces.content(message, " " + std::string(content) + " ");
      pieces.special_of(kEosKey);
    }
  }
}

void add_llama3(Pieces& pieces, const ChatTemplate& chat_template, const std::vector<ChatMessage>& messages) {
  // The date that the template has for callers that state none, so that a prompt is the same every day.
  constexpr std::string_view kDates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n";
  const auto add_header = [&](const std::string& role) {
    pieces.special("<|start_header_id|>");
    pieces.text(role);
    pieces.special("<|end_header_id|>");
    pieces.text("\n\n");
  };
  pieces.special_of(kBosKey);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    add_header(messages[i].role);
    pieces.text(i == 0 && chat_template.has_dates ? kDates : "");
    pieces.content(messages[i], stripped(messages[i].content));
    pieces.special("<|eot_id|>");
  }
  add_header("assistant");
}

void add_gemma(Pieces& pieces, std::vector<ChatMessage> messages) {
  pieces.special_of(kBosKey);
  for (std::size_t i = messages.empty() || messages[0].role != "system" ? 0 : 1; i < messages.size(); ++i) {
    const std::string content(stripped(messages[i].content));
    messages[i].content = messages[i].tokens.empty() ? content : messages[i].content;
  }
  for (const ChatMessage& message : without_system_role(std::move(messages), "", "\n\n")) {
    pieces.special("<start_of_turn>");
    pieces.text(message.role == "assistant" ? "model\n" : message.role + "\n");
    pieces.content(message);
    pieces.special("<end_of_turn>");
    pieces.text("\n");
  }
  pieces.special("<start_of_turn>");
  pieces.text("model\n");
}

std::vector<Piece> pieces_of(const Gguf& file, std::span<const ChatMessage> messages, const ChatOptions& options) {
  for (const ChatMessage& message : messages) {
    check_utf8(message.content);
  }
  const ChatTemplate chat_template = template_of(file, options);
  const std::vector<ChatMessage> conversation = completed(chat_template, messages);
  Pieces pieces(file);
  switch (chat_template.format) {
    case ChatFormat::kPlain:
      add_plain(pieces, conversation);
      break;
    case ChatFormat::kChatMl:
      add_chat_ml(pieces, chat_template, conversation);
      break;
    case ChatFormat::kLlama2:
      add_llama2(pieces, conversation);
      break;
    case ChatFormat::kLlama3:
      add_llama3(pieces, chat_template, conversation);
      break;
    case ChatFormat::kGemma:
      add_gemma(pieces, conversation);
      break;
  }
  pieces.text(chat_template.reply_opening);
  if (chat_template.switches_thinking && !options.enable_thinking) {
    pieces.text("<think>\n\n</think>\n\n");
  }
  return pieces.take();
}

Token find_special(const Gguf& file, const Tokenizer& tokenizer, std::string_view spelling) {
  const std::optional<Token> token = tokenizer.find(spelling);
  if (!token) {
    refuse(file, "the vocabulary has no special token " + std::string(spelling));
  }
  return *token;
}

}  // namespace

bool has_chat_template(const Gguf& file, const ChatOptions& options) {
  return options.format.empty() ? file.has(kTemplateKey) : named(options.format).format != ChatFormat::kPlain;
}

void check_chat_format(const std::string& name) { named(name); }

std::vector<std::string> chat_formats() {
  std::vector<std::string> names;
  names.reserve(kFormats.size() + 1);
  for (const auto& [name, format] : kFormats) {
    names.emplace_back(name);
  }
  names.insert(names.begin() + 1, kQwen3);
  return names;
}

std::string chat_format(const Gguf& file, const ChatOptions& options) {
  const ChatTemplate chat_template = template_of(file, options);
  if (chat_template.switches_thinking) {
    return kQwen3;
  }
  return std::find_if(kFormats.begin(), kFormats.end(),
                      [&](const auto& known) { return known.second == chat_template.format; })
      ->first;
}

bool can_switch_thinking(const Gguf& file, const ChatOptions& options) {
  return template_of(file, options).switches_thinking;
}

std::vector<Token> encode_chat(const Gguf& file, const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                               const ChatOptions& options) {
  std::vector<Token> result;
  for (const Piece& piece : pieces_of(file, messages, options)) {
    std::vector<Token> tokens = piece.tokens;
    if (piece.is_special) {
      tokens = {find_special(file, tokenizer, piece.text)};
    } else if (tokens.empty()) {
      tokens = tokenizer.encode(piece.text);
    }
    result.insert(result.end(), tokens.begin(), tokens.end());
  }
  if (tokenizer.add_bos() && (result.empty() || result.front() != tokenizer.bos())) {
    result.insert(result.begin(), *tokenizer.bos());
  }
  return result;
}

std::vector<Token> chat_stop_tokens(const Gguf& file, const Tokenizer& tokenizer, const ChatOptions& options) {
  std::vector<Token> result = tokenizer.ends();
  const ChatFormat format = template_of(file, options).format;
  const char* const end = format == ChatFormat::kChatMl   ? "<|im_end|>"
                          : format == ChatFormat::kLlama3 ? "<|eot_id|>"
                          : format == ChatFormat::kGemma  ? "<end_of_turn>"
                                                          : nullptr;
  if (end != nullptr) {
    const Token token = find_special(file, tokenizer, end);
    if (std::find(result.begin(), result.end(), token) == result.end()) {
      result.push_back(token);
    }
  }
  return result;
}

std::string apply_chat_template(const Gguf& file, std::span<const ChatMessage> messages, const ChatOptions& options) {
  std::string text;
  for (const Piece& piece : pieces_of(file, messages, options)) {
    text += piece.text;
  }
  return text;
}

}  // namespace common
