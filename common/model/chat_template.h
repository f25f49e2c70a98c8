// Which conversation a chat template prints. A GGUF file has the template of its model as a Jinja program. This is no
// interpreter of Jinja: a program is known as a whole, by a hash of everything that decides its output, or not at all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace common {

enum class ChatFormat { kPlain, kChatMl, kLlama2, kLlama3, kGemma };

// What a program prints of the thoughts in a reply's text: what is in front of </think>.
enum class Thoughts {
  kKept,
  kDropped,            // QwQ: of every reply
  kDroppedBeforeLast,  // QwQ, later: of every reply but the last message
  kOfLastAnswer,  // Qwen 3: only of replies behind the last question, and a last message without any gets empty ones
};

struct ChatTemplate {
  ChatFormat format = ChatFormat::kPlain;
  bool begins_with_bos = false;  // ChatML: the other formats always do
  bool has_dates = false;        // Llama 3.1 and later: before the system prompt
  bool has_system_role = true;   // Gemma before 3: a system prompt is an error
  Thoughts thoughts = Thoughts::kKept;
  bool switches_thinking = false;                           // the reply may begin with an empty thought
  std::string_view reply_opening = {};                      // what the program prints of the reply itself
  std::optional<std::string> system_prompt = std::nullopt;  // of a conversation that has none
};

// What decides a Jinja program's output: its tokens, with one kind of quote, one way to name an attribute, literals
// that are added up joined, text outside of tags as literals, and without comments and blanks. Newlines and blanks
// around tags are as transformers and llama.cpp have them: trim_blocks and lstrip_blocks are set.
struct ChatProgram {
  std::string text;
  // ChatML: the text of a literal that is a whole system message; a mark is in its place in `text`.
  std::optional<std::string> system_prompt;
};

// Nothing if the program has characters or escapes that no known program has. Takes time linear in its length.
std::optional<ChatProgram> read_chat_program(std::string_view jinja);

// Nothing if the program is not known.
std::optional<ChatTemplate> find_chat_template(std::string_view jinja);

}  // namespace common
