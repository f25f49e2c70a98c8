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
  // run: an engine with a cache, in which a turn may find what the turns before computed. The session's first request
  // says how replies are drawn and how long they may be. Both must outlive the conversation. enough_tokens: a reply
  // with at least this many ends at the end of a sentence; 0: it does not.
  Conversation(const Session& session, const RunRequests& run, std::string system_prompt, int enough_tokens = 0);

  // Answers each line of standard input until its end. On a terminal there are a greeting and prompts, and Ctrl-C ends
  // a reply; a second one in a row ends the conversation. While reading a pipe, Ctrl-C throws Interrupted. What is
  // wrong with a line is said in one line on stderr. Returns the number of such lines.
  int converse(std::ostream& output);

 private:
  bool is_typed() const;
  void greet(std::ostream& output) const;
  bool run_command(const std::string& line, std::ostream& output);
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
  int num_slots_;  // the cache's
  int num_replies_ = 0;
};

}  // namespace common
