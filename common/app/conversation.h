// `chat`: a conversation with the model, typed on a terminal or read from a pipe.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <vector>

#include "common/app/line_reader.h"
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

  // Answers the messages of standard input until its end. A message is a line; one that ends with a backslash goes on
  // in the next, and one that begins with """ goes on to the next """. On a terminal there are a greeting, prompts and
  // a line editor, what is typed during a reply waits until it has ended, and Ctrl-C ends a reply, or clears a line;
  // twice in a row at an empty prompt it ends the conversation. While reading a pipe, Ctrl-C throws Interrupted. A
  // faulty message is reported in one line on stderr. Returns the number of faulty messages. history_path: as for a
  // LineReader.
  int converse(std::ostream& output, const std::string& history_path = "");

 private:
  bool is_typed() const;
  void greet(std::ostream& output) const;
  static LineInput read_message(LineReader& reader, std::string& message);
  bool run_command(const std::string& message, std::ostream& output);
  void change_setting(const std::string& text, std::ostream& output);
  void regenerate(std::ostream& output);
  void save(const std::string& path, std::ostream& output) const;
  void load(const std::string& path, std::ostream& output);
  void reset();
  void begin_anew(std::ostream& output);
  // Goes on from these messages, and keeps them with both new ones once there is a reply; else nothing has changed.
  void answer(std::vector<ChatMessage> messages, const std::string& message, std::ostream& output);
  Completion reply_to(std::vector<Token> prompt, int max_new_tokens, std::ostream& output);
  int room() const;
  int reply_room() const;
  int nearly_full() const;
  std::vector<Token> prompt_within_room(const std::vector<ChatMessage>& messages, int& num_left_out) const;
  void note(std::ostream& output, const std::string& text) const;

  const Session& session_;
  const RunRequests& run_;
  std::string system_prompt_;
  int enough_tokens_;
  Request drawn_;  // how replies are drawn, and how long they may be; without a prompt
  std::vector<ChatMessage> messages_;
  int num_left_out_ = 0;    // of the messages, the oldest, which the model no longer reads; even
  bool is_warned_ = false;  // the user knows that the room is nearly full
  int num_slots_;           // the cache's
  int num_replies_ = 0;
};

}  // namespace common
