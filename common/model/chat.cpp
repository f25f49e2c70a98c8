#include "common/model/chat.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

constexpr const char* kTemplateKey = "tokenizer.chat_template";

[[noreturn]] void refuse(const Gguf& file, const std::string& reason) {
  throw InputError(file.name() + ": chat template: " + reason);
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

// The template without differences that do not matter: no blanks, one kind of quote, every newline as its escape, and
// message['role'] for message.role.
std::string normalised(std::string text) {
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  replace_all(text, "\"", "'");
  replace_all(text, "\n", "\\n");
  replace_all(text, "message.role", "message['role']");
  replace_all(text, "message.content", "message['content']");
  replace_all(text, "'+'", "");  // joins adjacent literals
  return text;
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// Whether the program prints all messages by this one expression. One that also trims, or treats some roles
// differently, contains another expression, or this one more than once.
bool prints_messages_by(const std::string& program, std::string_view expression) {
  const std::size_t at = program.find(expression);
  return at != std::string::npos && !contains(std::string_view(program).substr(at + 1), expression);
}

// The value of the string literal whose opening quote is at `begin`; nothing if it is not closed.
std::optional<std::string> read_literal(std::string_view text, std::size_t begin) {
  const char closing_quote = text[begin];
  std::string value;
  for (std::size_t i = begin + 1; i < text.size(); ++i) {
    if (text[i] == closing_quote) {
      return value;
    }
    const bool escaped = text[i] == '\\' && i + 1 < text.size();
    i += escaped ? 1 : 0;
    value.push_back(escaped && text[i] == 'n' ? '\n' : text[i]);
  }
  return std::nullopt;
}

// --- What a template prints -------------------------------------------------------------------------------------

enum class Format { kPlain, kChatMl, kLlama2, kLlama3, kGemma };

constexpr const char* kQwen3 = "qwen3";  // ChatML, with thoughts
constexpr std::array<std::pair<const char*, Format>, 5> kFormats = {{{"chatml", Format::kChatMl},
                                                                     {"llama2", Format::kLlama2},
                                                                     {"llama3", Format::kLlama3},
                                                                     {"gemma", Format::kGemma},
                                                                     {"none", Format::kPlain}}};

struct Template {
  Format format = Format::kPlain;
  std::optional<std::string> system_prompt = std::nullopt;  // default, if a conversation has none
  std::string system_opening = {};                          // Llama 3.1 and later: precedes any system prompt
  bool drops_thoughts = false;                              // Qwen 3: earlier replies lose what is before </think>
  bool switches_thinking = false;                           // Qwen 3: may begin the reply with an empty thought
  bool repeats_bos = false;                                 // Llama 2: before each user message
  bool trims = false;                                       // the messages
};

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";

// ChatML's default system prompt is a literal that holds a whole system message:
// '<|im_start|>system\n ... <|im_end|>\n'. A literal that is only the beginning of one must go on with the
// conversation's own system prompt.
std::optional<std::string> default_system_prompt(const Gguf& file, const std::string& chat_template) {
  const std::string opening = std::string(kStart) + "system\n";
  const std::string closing = std::string(kEnd) + "\n";
  std::optional<std::string> found;
  for (std::size_t at = chat_template.find(kStart); at != std::string::npos; at = chat_template.find(kStart, at + 1)) {
    const bool opens_literal = at > 0 && (chat_template[at - 1] == '\'' || chat_template[at - 1] == '"');
    const std::optional<std::string> literal = opens_literal ? read_literal(chat_template, at - 1) : std::nullopt;
    if (!literal || !literal->starts_with(opening)) {
      continue;
    }
    std::string rest = normalised(chat_template.substr(chat_template.find(chat_template[at - 1], at) + 1));
    if (*literal == opening && (rest.starts_with("+messages[0]") || rest.starts_with("}}"))) {
      continue;
    }
    if (found || !literal->ends_with(closing)) {
      refuse(file, "its system prompt is not one fixed text");
    }
    found = literal->substr(opening.size(), literal->size() - opening.size() - closing.size());
  }
  return found;
}

// The first literal after this text; empty if there is none.
std::string literal_behind(const std::string& text, std::string_view marker) {
  for (std::size_t at = text.find(marker); at != std::string::npos; at = text.find(marker, at + 1)) {
    const std::size_t begin = at + marker.size();
    if (begin < text.size() && (text[begin] == '\'' || text[begin] == '"')) {
      return read_literal(text, begin).value_or("");
    }
  }
  return "";
}

// Llama 3.1 and later say when their training data ended and what day it is. The day is the one that the template has
// for programs that do not give it, so that a prompt is the same every day.
std::string dates_of(const std::string& chat_template) {
  constexpr std::string_view kCutting = "Cutting Knowledge Date: ";
  const std::size_t at = chat_template.find(kCutting);
  if (at == std::string::npos || at == 0) {
    return "";
  }
  return read_literal(chat_template, at - 1).value_or("") +
         "Today Date: " + literal_behind(chat_template, "date_string = ") + "\n\n";
}

Template recognise(const Gguf& file) {
  if (!file.has(kTemplateKey)) {
    return {};
  }
  const std::string& chat_template = file.get_string(kTemplateKey);
  const std::string program = normalised(chat_template);
  const bool trims = contains(program, "|trim") || contains(program, ".strip()");
  const bool is_chat_ml =
      prints_messages_by(program, "'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>\\n'") ||
      prints_messages_by(program, "'<|im_start|>'+message['role']+'\\n'+content+'<|im_end|>\\n'");
  if (is_chat_ml && contains(program, "'<|im_start|>assistant\\n'")) {
    return {.format = Format::kChatMl,
            .system_prompt = default_system_prompt(file, chat_template),
            .drops_thoughts = contains(program, ".split('</think>')[-1]"),
            .switches_thinking =
                contains(program, "enable_thinking") && contains(program, "'<think>\\n\\n</think>\\n\\n'")};
  }
  constexpr std::string_view kLlama3 =
      "'<|start_header_id|>'+message['role']+'<|end_header_id|>\\n\\n'+message['content']";
  if (contains(program, "'<|start_header_id|>assistant<|end_header_id|>\\n\\n'") &&
      prints_messages_by(program, kLlama3)) {
    return {.format = Format::kLlama3, .system_opening = dates_of(chat_template), .trims = trims};
  }
  // Blanks matter here, and the program above has none left.
  if (contains(program, "<<SYS>>\\n'+") && contains(chat_template, "[INST] ") && contains(chat_template, " [/INST]")) {
    const std::string system_prompt = literal_behind(chat_template, "set system_message = ");
    return {.format = Format::kLlama2,
            .system_prompt = system_prompt.empty() ? std::nullopt : std::optional(system_prompt),
            .repeats_bos = contains(program, "bos_token+'[INST]"),
            .trims = contains(program, ".strip()+'[/INST]")};
  }
  if (contains(program, "'<start_of_turn>model\\n'") && prints_messages_by(program, "'<start_of_turn>'+role+'\\n'+")) {
    return {.format = Format::kGemma, .trims = trims};
  }
  refuse(file, "its format is not supported (supported: ChatML, Llama 2, Llama 3, Qwen, Gemma)");
}

// A format by its name, as the template of its first model is. Without a default system prompt or dates: those are a
// file's own.
Template named(const std::string& name) {
  const auto* const found =
      std::find_if(kFormats.begin(), kFormats.end(), [&](const auto& known) { return name == known.first; });
  if (name == kQwen3) {
    return {.format = Format::kChatMl, .drops_thoughts = true, .switches_thinking = true};
  }
  if (found == kFormats.end()) {
    std::string names;
    for (const std::string& known : chat_formats()) {
      names += (names.empty() ? "" : ", ") + known;
    }
    throw InputError("there is no chat template of the name " + quote(name) + " (known: " + names + ")");
  }
  const Format format = found->second;
  return {.format = format,
          .repeats_bos = format == Format::kLlama2,
          .trims = format == Format::kLlama2 || format == Format::kLlama3 || format == Format::kGemma};
}

Template template_of(const Gguf& file, const ChatOptions& options) {
  return options.format.empty() ? recognise(file) : named(options.format);
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
  Pieces(const Gguf& file, const Template& chat_template) : file_(file), template_(chat_template) {}

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
  void content(const ChatMessage& message) {
    if (message.tokens.empty()) {
      text(trimmed(message.content));
    } else {
      pieces_.push_back({message.content, false, message.tokens});
    }
  }
  std::string trimmed(const std::string& content) const {
    constexpr const char* kBlanks = " \t\r\n";
    const std::size_t begin = content.find_first_not_of(kBlanks);
    if (!template_.trims) {
      return content;
    }
    return begin == std::string::npos ? "" : content.substr(begin, content.find_last_not_of(kBlanks) + 1 - begin);
  }
  std::vector<Piece> take() { return std::move(pieces_); }

 private:
  const Gguf& file_;
  const Template& template_;
  std::vector<Piece> pieces_;
};

// The messages as the template wants them: with a system prompt if it has one, without earlier thoughts.
std::vector<ChatMessage> completed(const Template& chat_template, std::span<const ChatMessage> messages) {
  std::vector<ChatMessage> result(messages.begin(), messages.end());
  const bool has_system = !result.empty() && result.front().role == "system";
  if (chat_template.system_prompt && !result.empty() && !has_system) {
    result.insert(result.begin(), ChatMessage{"system", *chat_template.system_prompt});
  }
  if (!chat_template.system_opening.empty() && !has_system) {
    result.insert(result.begin(), ChatMessage{"system", ""});
  }
  if (chat_template.drops_thoughts) {
    constexpr std::string_view kThought = "</think>";
    for (ChatMessage& message : result) {
      const std::size_t thought = message.content.rfind(kThought);
      if (message.role == "assistant" && thought != std::string::npos) {
        const std::size_t begin = message.content.find_first_not_of('\n', thought + kThought.size());
        message.content = begin == std::string::npos ? "" : message.content.substr(begin);
        message.tokens.clear();
      }
    }
  }
  return result;
}

// Puts the system prompt before the first other message, with these marks around it.
std::vector<ChatMessage> without_system_role(std::vector<ChatMessage> messages, const std::string& before,
                                             const std::string& after) {
  if (messages.size() > 1 && messages[0].role == "system") {
    messages[1].content = before + messages[0].content + after + messages[1].content;
    messages.erase(messages.begin());
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

void add_chat_ml(Pieces& pieces, const std::vector<ChatMessage>& messages, bool has_empty_thought) {
  for (const ChatMessage& message : messages) {
    pieces.special(kStart);
    pieces.text(message.role + "\n");
    pieces.content(message);
    pieces.special(kEnd);
    pieces.text("\n");
  }
  pieces.special(kStart);
  pieces.text("assistant\n");
  if (has_empty_thought) {
    pieces.text("<think>\n\n</think>\n\n");
  }
}

void add_llama2(Pieces& pieces, const Template& chat_template, const std::vector<ChatMessage>& messages) {
  bool is_first = true;
  for (const ChatMessage& message : without_system_role(messages, "<<SYS>>\n", "\n<</SYS>>\n\n")) {
    if (message.role == "assistant") {
      if (message.tokens.empty()) {
        pieces.text(" ");
        pieces.text(pieces.trimmed(message.content));
        pieces.text(" ");
      } else {
        pieces.content(message);  // begins with a blank as the model writes it
      }
      pieces.special_of(kEosKey);
      continue;
    }
    if (is_first || chat_template.repeats_bos) {
      pieces.special_of(kBosKey);
    }
    is_first = false;
    pieces.text("[INST] ");
    pieces.text(pieces.trimmed(message.content));
    pieces.text(" [/INST]");
  }
}

void add_llama3(Pieces& pieces, const Template& chat_template, const std::vector<ChatMessage>& messages) {
  const auto add_header = [&](const std::string& role) {
    pieces.special("<|start_header_id|>");
    pieces.text(role);
    pieces.special("<|end_header_id|>");
    pieces.text("\n\n");
  };
  pieces.special_of(kBosKey);
  for (const ChatMessage& message : messages) {
    add_header(message.role);
    pieces.text(message.role == "system" ? chat_template.system_opening : "");
    pieces.content(message);
    pieces.special("<|eot_id|>");
  }
  add_header("assistant");
}

void add_gemma(Pieces& pieces, const std::vector<ChatMessage>& messages) {
  pieces.special_of(kBosKey);
  for (const ChatMessage& message : without_system_role(messages, "", "\n\n")) {
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
  const Template chat_template = template_of(file, options);
  const std::vector<ChatMessage> conversation = completed(chat_template, messages);
  Pieces pieces(file, chat_template);
  switch (chat_template.format) {
    case Format::kPlain:
      add_plain(pieces, conversation);
      break;
    case Format::kChatMl:
      add_chat_ml(pieces, conversation, chat_template.switches_thinking && !options.enable_thinking);
      break;
    case Format::kLlama2:
      add_llama2(pieces, chat_template, conversation);
      break;
    case Format::kLlama3:
      add_llama3(pieces, chat_template, conversation);
      break;
    case Format::kGemma:
      add_gemma(pieces, conversation);
      break;
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

bool has_chat_template(const Gguf& file) { return file.has(kTemplateKey); }

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
  const Template chat_template = template_of(file, options);
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
  std::vector<Token> result;
  if (tokenizer.eos().has_value()) {
    result.push_back(*tokenizer.eos());
  }
  const Format format = template_of(file, options).format;
  const char* const end = format == Format::kChatMl   ? "<|im_end|>"
                          : format == Format::kLlama3 ? "<|eot_id|>"
                          : format == Format::kGemma  ? "<end_of_turn>"
                                                      : nullptr;
  if (end != nullptr && find_special(file, tokenizer, end) != tokenizer.eos()) {
    result.push_back(find_special(file, tokenizer, end));
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
