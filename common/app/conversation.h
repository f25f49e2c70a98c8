// `chat`: a conversation with the model, typed on a terminal or read from a pipe.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <vector>

#include "common/app/session.h"
#include "common/model/chat.h"
#include "common/model/generation.h"

namespace common {

class Conversation {
 public:
  // run: of an engine with a cache, in which the next turn may find what this one has computed. The session's first
  // request says how replies are drawn and how long they may be. Both must outlive the conversation. enough_tokens:
  // from how many on a reply ends when a sentence does; 0: never.
  Conversation(const Session& session, const RunRequests& run, std::string system_prompt, int enough_tokens = 0);

  // Answers each line of standard input, to its end. On a terminal with a greeting and prompts, and Ctrl-C ends a
  // reply; a second one in a row ends the conversation. From a pipe, Ctrl-C throws Interrupted. What is wrong with a
  // line is said in one line on stderr. Returns the number of such lines.
  int converse(std::ostream& output);

 private:
  bool is_typed() const;
  void greet(std::ostream& output) const;
  bool obey(const std::string& line, std::ostream& output);
  void reset();
  void answer(const std::string& line, std::ostream& output);
  Completion reply_to(std::vector<Token> prompt, int max_new_tokens, std::ostream& output);
  int room() const;
  void note(std::ostream& output, const std::string& text) const;

  const Session& session_;
  const RunRequests& run_;
  std::string system_prompt_;
  int enough_tokens_;
  std::vector<ChatMessage> messages_;
  int num_slots_;  // of the cache
  int num_replies_ = 0;
};

}  // namespace common
