// Chat prompts. A GGUF file states the format that its model was trained on as a Jinja program
// (tokenizer.chat_template). This is not a Jinja interpreter: it recognises the programs that print one of these, where
// NL is a line end, and refuses all others.
//   ChatML, SmolLM2, Qwen   <|im_start|>user NL text<|im_end|> NL          then <|im_start|>assistant NL
//   Llama 3                 <|start_header_id|>user<|end_header_id|> NL NL text<|eot_id|>
//   Llama 2                 <s>[INST] text [/INST] reply </s>              the system prompt between <<SYS>> marks
//   Gemma                   <start_of_turn>user NL text<end_of_turn> NL    without a role for system prompts
// A model without a template only continues plain text: in its conversations, a reply continues the message before it,
// and each other message begins a line.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "common/model/gguf.h"
#include "common/model/tokenizer.h"

namespace common {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
  // In a reply: the tokens that the model drew. Encoding its text might give other tokens, and a cache holds these.
  std::vector<Token> tokens = {};
};

struct ChatOptions {
  std::string format = {};  // one of chat_formats(), in place of the file's template; empty: the file's
  // False: the reply begins behind an empty thought, as Qwen 3's template does it. Changes nothing if
  // !can_switch_thinking().
  bool enable_thinking = true;
};

// Whether conversations have a template: the file's, or a format but "none".
bool has_chat_template(const Gguf& file, const ChatOptions& options = {});

// "chatml", "llama2" …: the formats of above, and "none".
std::vector<std::string> chat_formats();
// Throws InputError unless it is one of them.
void check_chat_format(const std::string& name);
// The format of the file's template, or the one chosen. Throws InputError as encode_chat() does.
std::string chat_format(const Gguf& file, const ChatOptions& options = {});
bool can_switch_thinking(const Gguf& file, const ChatOptions& options = {});

// The tokens of a conversation, up to where the answer begins. If the template has a default system prompt, it is put
// in front of messages that do not begin with a system message. BOS comes first if the model uses it and the
// conversation does not begin with it anyway.
// Only the template itself produces special tokens: "<|im_end|>" inside a message is encoded as its ten characters, so
// a message cannot end itself and continue in another role.
// Throws InputError if the file's chat template is none of the above, or if there is no format of the name chosen, and
// on invalid UTF-8.
std::vector<Token> encode_chat(const Gguf& file, const Tokenizer& tokenizer, std::span<const ChatMessage> messages,
                               const ChatOptions& options = {});

// The tokens that end a reply: Tokenizer::ends(), and the template's own.
std::vector<Token> chat_stop_tokens(const Gguf& file, const Tokenizer& tokenizer, const ChatOptions& options = {});

// The same conversation as text, for reading. Do not encode this with parse_special to make a prompt: special
// spellings inside the messages would become special tokens. encode_chat() is the safe way.
std::string apply_chat_template(const Gguf& file, std::span<const ChatMessage> messages,
                                const ChatOptions& options = {});

}  // namespace common
