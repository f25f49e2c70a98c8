// The model that a command serves.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "common/app/session.h"

namespace common {

// The session's model or, if `synthetic` names a published shape, one of that shape with random weights.
class ServedModel {
 public:
  // The session must outlive the object.
  ServedModel(const Session& session, const std::string& synthetic);
  const Session& session() const { return session_; }
  const Llama& get() const { return synthetic_ ? *synthetic_ : session_.model; }
  bool is_synthetic() const { return synthetic_.has_value(); }
  // "SmolLM2-135M" of "models/SmolLM2-135M.gguf", or the shape's.
  std::string name() const;
  // The text of tokens. Random weights draw tokens that the session's tokenizer does not know; their texts are numbers.
  std::string decode(std::span<const Token> tokens, bool show_special = false) const;
  std::string decode_text(std::span<const Token> tokens) const;  // as Tokenizer

 private:
  const Session& session_;
  std::string shape_;
  std::optional<Llama> synthetic_;
};

// Why the model can't chat: the message of the InputError that a chat would throw. Empty: it can. chat_format: as
// ChatOptions.
std::string chat_problem(const ServedModel& model, const std::string& chat_format);

}  // namespace common
