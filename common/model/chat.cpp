#include "common/model/chat.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>

#include "common/base/check.h"

namespace common {
namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";
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

// All messages must be printed by this one expression. A template that also trims, or treats some roles differently,
// contains another expression, or this one more than once.
bool prints_chatml(const std::string& chat_template) {
  constexpr std::string_view kMessage = "'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>\\n'";
  constexpr std::string_view kAnswer = "'<|im_start|>assistant\\n'";
  const std::string text = normalised(chat_template);
  const std::size_t message = text.find(kMessage);
  return message != std::string::npos && text.find(kMessage, message + 1) == std::string::npos &&
         text.find(kAnswer) != std::string::npos;
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

// A default system prompt is a literal that holds a whole system message: '<|im_start|>system\n ... <|im_end|>\n'.
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
    if (found || !literal->ends_with(closing)) {
      refuse(file, "its system prompt is not one fixed text");
    }
    found = literal->substr(opening.size(), literal->size() - opening.size() - closing.size());
  }
  return found;
}

// The messages with the template's default system prompt, if the template adds it. Throws if it is not supported.
std::vector<ChatMessage> complete(const Gguf& file, std::span<const ChatMessage> messages) {
  if (!file.has(kTemplateKey)) {
    refuse(file, "there is none; this model only continues plain text");
  }
  const std::string& chat_template = file.get_string(kTemplateKey);
  if (!prints_chatml(chat_template)) {
    refuse(file, "its format is not supported (supported: ChatML, \"<|im_start|>role ... <|im_end|>\")");
  }
  std::vector<ChatMessage> result(messages.begin(), messages.end());
  const std::optional<std::string> system_prompt = default_system_prompt(file, chat_template);
  if (system_prompt && !messages.empty() && messages.front().role != "system") {
    result.insert(result.begin(), ChatMessage{"system", *system_prompt});
  }
  return result;
}

Token find_special(const Gguf& file, const Tokenizer& tokenizer, std::string_view spelling) {
  const std::optional<Token> token = tokenizer.find(spelling);
  if (!token) {
    refuse(file, "the vocabulary has no special token " + std::string(spelling));
  }
  return *token;
}

std::string body(const ChatMessage& message) { return message.role + "\n" + message.content; }

}  // namespace

std::vector<Token> encode_chat(const Gguf& file, const Tokenizer& tokenizer, std::span<const ChatMessage> messages) {
  const std::vector<ChatMessage> conversation = complete(file, messages);
  const Token start = find_special(file, tokenizer, kStart);
  const Token end = find_special(file, tokenizer, kEnd);
  std::vector<Token> result;
  // Role, newline and content are encoded together, so that merges across their borders happen as in training.
  const auto append_text = [&](const std::string& text) {
    const std::vector<Token> tokens = tokenizer.encode(text);
    result.insert(result.end(), tokens.begin(), tokens.end());
  };
  for (const ChatMessage& message : conversation) {
    result.push_back(start);
    append_text(body(message));
    result.push_back(end);
    append_text("\n");
  }
  result.push_back(start);
  append_text("assistant\n");
  if (tokenizer.add_bos() && result.front() != tokenizer.bos()) {
    result.insert(result.begin(), *tokenizer.bos());
  }
  return result;
}

std::string apply_chat_template(const Gguf& file, std::span<const ChatMessage> messages) {
  std::string text;
  for (const ChatMessage& message : complete(file, messages)) {
    text.append(kStart).append(body(message)).append(kEnd).append("\n");
  }
  return text.append(kStart).append("assistant\n");
}

}  // namespace common
