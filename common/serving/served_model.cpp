#include "common/serving/served_model.h"

#include <filesystem>
#include <vector>

#include "common/base/check.h"
#include "common/model/chat.h"
#include "common/model/presets.h"

namespace common {

ServedModel::ServedModel(const Session& session, const std::string& synthetic) : session_(session), shape_(synthetic) {
  if (!synthetic.empty()) {
    synthetic_ = Llama::synthetic(find_preset(synthetic).config, 1, session.windows);
  }
}

std::string ServedModel::name() const {
  if (is_synthetic()) {
    return shape_;
  }
  return session_.model_name == "the bundled model" ? "tales-5m"
                                                    : std::filesystem::path(session_.model_name).stem().string();
}

std::string ServedModel::decode(std::span<const Token> tokens, bool show_special) const {
  if (!is_synthetic()) {
    return session_.tokenizer.decode(tokens, show_special);
  }
  std::string text;
  for (const Token token : tokens) {
    text += ' ';
    text += std::to_string(token);
  }
  return text;
}

std::string ServedModel::decode_text(std::span<const Token> tokens) const {
  return is_synthetic() ? decode(tokens) : session_.tokenizer.decode_text(tokens);
}

std::string chat_problem(const ServedModel& model, const std::string& chat_format) {
  const Session& session = model.session();
  const std::vector<ChatMessage> messages = {{"user", "x"}};  // not every template has system prompts
  try {
    encode_chat(*session.file, session.tokenizer, messages, {chat_format});
    chat_stop_tokens(*session.file, session.tokenizer, {chat_format});
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

}  // namespace common
