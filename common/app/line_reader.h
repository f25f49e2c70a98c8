// Lines that are typed on a terminal. With libedit (https://www.thrysoee.dk/editline/) they can be edited: cursor keys,
// search in the lines before, characters of any width, pastes of several lines. Without it the terminal's own line
// discipline is left, which knows Backspace.
#pragma once

#include <memory>
#include <string>

#include "common/base/platform.h"

namespace common {

class LineReader {
 public:
  // history_path: a file with the lines of former runs, which the destructor adds this run's to; empty: lines are kept
  // in memory. A NoteInterrupts has to live as long as the reader.
  explicit LineReader(std::string history_path = "");
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // Shows the prompt, if standard input and output are terminals, and reads a line; a paste may have given it several.
  // What was typed since the last call comes first. Ctrl-C clears the line; kInterrupted: none had been begun, where
  // that is known, that is, in an editor. Without a terminal, reads as read_line() does.
  LineInput read(const std::string& prompt, std::string& line);

  // Puts a text where the cursor keys find it again.
  void remember(const std::string& text);

  static bool can_edit();  // whether this build has libedit

 private:
  class Editor;

  std::unique_ptr<HeldTyping> typing_;  // null without a terminal
  std::unique_ptr<Editor> editor_;      // null without libedit
};

}  // namespace common
