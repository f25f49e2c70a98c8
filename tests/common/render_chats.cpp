// Prints what a chat template makes of conversations, for test_chat_templates.py. Standard input is JSON:
// {"template": "a Jinja program", "conversations": [[{"role": …, "content": …}, …], …]}. The output is null if the
// template is refused, or a list with two entries for each conversation, thinking switched on and off: the text, or
// null if the template takes no such conversation.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/model/chat.h"
#include "common/model/gguf.h"
#include "tests/support/gguf_builder.h"

using nlohmann::json;

int main() {
  const json input = json::parse(std::cin);
  tests::GgufBuilder builder;
  builder.add("tokenizer.chat_template", input.at("template").get<std::string>());
  builder.add_array("tokenizer.ggml.tokens", std::vector<std::string>{"<s>", "</s>"});
  builder.add("tokenizer.ggml.bos_token_id", 0).add("tokenizer.ggml.eos_token_id", 1);
  const tests::Bytes bytes = builder.build();
  const common::Gguf file = common::Gguf::parse(bytes, "chat.gguf");
  try {
    common::chat_format(file);
  } catch (const common::InputError&) {
    std::cout << json();
    return 0;
  }
  json output = json::array();
  for (const json& conversation : input.at("conversations")) {
    std::vector<common::ChatMessage> messages;
    for (const json& message : conversation) {
      messages.push_back({message.at("role"), message.at("content")});
    }
    for (const bool thinks : {true, false}) {
      try {
        output.push_back(common::apply_chat_template(file, messages, {.enable_thinking = thinks}));
      } catch (const common::InputError&) {
        output.push_back(nullptr);
      }
    }
  }
  std::cout << output;
}
