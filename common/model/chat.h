// Chat prompts for models trained on ChatML, the format that OpenAI introduced and SmolLM2-Instruct uses:
//   <|im_start|>role NEWLINE content<|im_end|> NEWLINE          once for each message, then
//   <|im_start|>assistant NEWLINE                               after which the model writes its answer.
// A GGUF file states its format as a Jinja program (tokenizer.chat_template). This is not a Jinja interpreter: it
// recognises programs that print ChatML and refuses all others.
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
};

// The tokens of a conversation, up to where the answer begins. If the template has a default system prompt, it is put
// in front of messages that do not begin with a system message. BOS comes first if the model uses it and the
// conversation does not begin with it anyway.
// Only the template itself produces special tokens: "<|im_end|>" inside a message is encoded as its ten characters, so
// a message cannot end itself and continue in another role.
// Throws InputError if the file has no chat template or one in another format, and on invalid UTF-8.
std::vector<Token> encode_chat(const Gguf& file, const Tokenizer& tokenizer, std::span<const ChatMessage> messages);

// The same conversation as text, for reading. Do not encode this with parse_special to make a prompt: special
// spellings inside the messages would become special tokens. encode_chat() is the safe way.
std::string apply_chat_template(const Gguf& file, std::span<const ChatMessage> messages);

}  // namespace common
