// Texts that are shown while they are generated.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/app/session.h"
#include "common/model/generation.h"
#include "common/model/stop_strings.h"

namespace common {

// Breaks a text that comes in parts into lines. Every part is written at once; a word that turns out not to fit into
// its line is erased and written to the next.
class WordWrap {
 public:
  // columns: of a terminal that understands escape sequences, at least `indent` + 3; 0: lines are not broken, and the
  // bytes stay as they are. indent: blanks in front of each line but the first, which the caller begins.
  WordWrap(std::ostream& output, int columns, int indent);

  // On a terminal, bytes that are not UTF-8 and control characters are shown as U+FFFD.
  void write(std::string_view text);

 private:
  void write_character(std::string_view bytes, int columns);
  void begin_line();

  std::ostream& output_;
  int columns_;  // in use: never the last one, after which terminals differ
  int indent_;
  int at_;            // the column of the next character
  std::string word_;  // the last word, as far as it has been written
  int word_columns_ = 0;
};

// The columns for WordWrap of what the stream is connected to.
int wrap_columns(const std::ostream& stream);

// The texts of a session's requests, each below its prompt. The first is written as it comes; each later one as soon as
// all texts before it are known to have ended.
class TextStream {
 public:
  // is_quiet: the texts alone, each with a line end.
  TextStream(const Session& session, std::ostream& output, bool is_quiet = false);
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;

  // Throws InputError if the text cannot be written.
  void add(int request, Token token);
  // To be called once, when no more tokens come: writes what is left and, for each request without a reply, why.
  void finish(std::span<const Completion> completions);

 private:
  struct Text {
    ReplyStream reply;
    int num_tokens = 0;
    std::string waiting = {};  // to be written when it is the text's turn
  };
  void write_waiting(bool is_end);
  bool has_ended(std::size_t request) const;

  const Session& session_;
  std::ostream& output_;
  bool is_quiet_;
  std::vector<Text> texts_;
  std::size_t current_ = 0;
  std::optional<WordWrap> wrap_;  // the current text's, once it has begun
};

// Prints the line above a text, "12  "prompt"", dimmed on a terminal, and the blanks before the text.
void print_prompt(std::ostream& output, std::size_t number, const std::string& prompt);
inline constexpr int kTextIndent = 4;

// What a person is told in place of a text: "no reply: ..." or that the model has ended it at once. Empty: there is
// one.
std::string why_nothing(const Completion& completion);

}  // namespace common
