// Text that is shown as it is generated: whole words, whole characters.
#include "common/app/text_stream.h"

#include <cstddef>
#include <cstdlib>
#include <ostream>
#include <sstream>
#include <streambuf>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/app/cli.h"
#include "common/base/utf8.h"
#include "common/model/default_model.h"
#include "common/model/gguf.h"
#include "tests/support/catch.h"

namespace {

using common::WordWrap;

// What a terminal shows after these bytes: ASCII, line ends, ESC [ n D (left) and ESC [ K (erase to the line's end).
std::vector<std::string> shown_lines(const std::string& bytes) {
  std::vector<std::string> lines(1);
  std::size_t column = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == '\n') {
      lines.emplace_back();
      column = 0;
    } else if (bytes.compare(i, 2, "\x1b[") == 0) {
      char* end = nullptr;
      const unsigned long count = std::strtoul(bytes.c_str() + i + 2, &end, 10);
      i = static_cast<std::size_t>(end - bytes.c_str());
      if (bytes.at(i) == 'D') {
        REQUIRE(count <= column);
        column -= count;
      } else {
        REQUIRE(bytes[i] == 'K');
        lines.back().resize(column);
      }
    } else {
      lines.back().resize(column);
      lines.back() += bytes[i];
      column += 1;
    }
  }
  return lines;
}

// The text, written in parts of this many bytes.
std::vector<std::string> wrapped(const std::string& text, int columns, int indent, std::size_t part) {
  std::ostringstream output;
  output << std::string(static_cast<std::size_t>(indent), ' ');
  WordWrap wrap(output, columns, indent);
  for (std::size_t at = 0; at < text.size(); at += part) {
    wrap.write(text.substr(at, part));
  }
  return shown_lines(output.str());
}

// Collects what is written between two flushes.
class Flushes : public std::streambuf {
 public:
  std::vector<std::string> parts = {""};

 protected:
  int sync() override {
    parts.emplace_back();
    return 0;
  }
  int overflow(int character) override {
    parts.back() += static_cast<char>(character);
    return character;
  }
};

}  // namespace

TEST_CASE("a word that does not fit into its line moves to the next as a whole, in whatever parts it arrives") {
  for (const std::size_t part : {1, 2, 3, 7, 100}) {
    CAPTURE(part);
    // Nine columns are used, because terminals differ in what they do after the last one.
    CHECK(wrapped("the fisherman and his wife", 10, 0, part) ==
          std::vector<std::string>{"the ", "fisherman", "and his ", "wife"});
    CHECK(wrapped("a b", 10, 4, part) == std::vector<std::string>{"    a b"});
    CHECK(wrapped("one two\nthree", 12, 4, part) == std::vector<std::string>{"    one two", "    three"});
    CHECK(wrapped("one two three", 12, 4, part) == std::vector<std::string>{"    one two", "    three"});
    // A word longer than a line is broken.
    CHECK(wrapped("no abcdefghijklm", 10, 0, part) == std::vector<std::string>{"no ", "abcdefghi", "jklm"});
  }
}

TEST_CASE("characters of two columns are counted as two, and a line may end between them") {
  std::ostringstream output;
  WordWrap(output, 8, 0).write("a王王王王");
  CHECK(output.str() == "a王王王\n王");
}

TEST_CASE("a terminal gets no control characters and no broken UTF-8 from a text, a pipe gets every byte") {
  std::ostringstream terminal;
  WordWrap(terminal, 40, 0).write("a\x1b[2Jb\xFF");
  CHECK(terminal.str() == "a\xEF\xBF\xBD[2Jb\xEF\xBF\xBD");
  std::ostringstream directed;
  const std::string right_to_left = {'a', '\xE2', '\x80', '\xAE', 'b'};  // U+202E turns what follows
  WordWrap(directed, 40, 0).write(right_to_left);
  CHECK(directed.str() == "a\uFFFDb");
  std::ostringstream pipe;
  WordWrap(pipe, 0, 2).write("a\x1b[2Jb\xFF\nc");
  CHECK(pipe.str() == "a\x1b[2Jb\xFF\n  c");
}

TEST_CASE("no character is split, and texts stay in order when their tokens arrive out of order") {
  const auto file = common::Gguf::parse(common::default_model(), "the bundled model");
  common::Session session{"tales", common::Llama(file), common::Tokenizer(file), {"one", "two"}, {}};
  const std::vector<std::string> texts = {"é 王 \U0001F600", "second"};
  std::vector<std::vector<common::Token>> tokens;
  for (const std::string& text : texts) {
    tokens.push_back(session.tokenizer.encode(text));
    common::Request request;
    request.max_new_tokens = static_cast<int>(tokens.back().size());
    session.requests.push_back(request);
  }
  REQUIRE(tokens[0].size() > 9);  // the vocabulary has only the bytes of these characters
  Flushes flushes;
  std::ostream output(&flushes);
  common::TextStream stream(session, output);
  for (std::size_t i = 0; i < tokens[0].size(); ++i) {
    if (i < tokens[1].size()) {
      stream.add(1, tokens[1][i]);
    }
    stream.add(0, tokens[0][i]);
  }
  stream.finish({});
  std::string all;
  for (const std::string& part : flushes.parts) {
    CAPTURE(part);
    CHECK_NOTHROW(common::check_utf8(part));
    all += part;
  }
  CHECK(all == " 0  \"one\"\n    " + texts[0] + "\n 1  \"two\"\n    " + texts[1] + "\n");
  CHECK(flushes.parts.size() > 5);
}

TEST_CASE("a text that the model ends at once is said to be nothing, and a quiet stream has the texts alone") {
  const auto file = common::Gguf::parse(common::default_model(), "the bundled model");
  common::Session session{"tales", common::Llama(file), common::Tokenizer(file), {"one", "two", "three"}, {}};
  session.requests.resize(3);
  for (common::Request& request : session.requests) {
    request.max_new_tokens = 8;
  }
  const std::vector<common::Token> tokens = session.tokenizer.encode("king");
  std::vector<common::Completion> completions(3);
  completions[0].finish_reason = common::FinishReason::kStop;
  completions[1] = {tokens, common::FinishReason::kFailed, "why"};
  completions[2] = {{}, common::FinishReason::kRejected, "too long"};
  for (const bool is_quiet : {false, true}) {
    std::ostringstream output;
    common::TextStream stream(session, output, is_quiet);
    for (const common::Token token : tokens) {
      stream.add(1, token);
    }
    stream.finish(completions);
    CHECK(output.str() == (is_quiet ? "\nking\n\n"
                                    : " 0  \"one\"\n    (nothing: the model ended the text at once)\n 1  \"two\"\n"
                                      "    king\n    no reply: why\n 2  \"three\"\n    no reply: too long\n"));
  }
}
