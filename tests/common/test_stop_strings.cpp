// Stop strings, in texts and in streams.
#include <span>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/model/stop_strings.h"
#include "tests/support/catch.h"

namespace {

using common::ReplyStream;
using common::StopStrings;
using common::Token;

// Token i is the i-th of these.
const std::vector<std::string> kSpellings = {"",   "a",       "b",    "ab",   "END",          "E",
                                             "ND", "x END y", "\xC3", "\xA9", "\xF0\x9F\x98", "\x80"};

std::string decode(std::span<const Token> tokens) {
  std::string text;
  for (const Token token : tokens) {
    text += kSpellings[static_cast<std::size_t>(token)];
  }
  return text;
}

// What is shown after each token, and at the end.
std::vector<std::string> stream(const std::vector<std::string>& strings, const std::vector<Token>& tokens,
                                int min_tokens = 0) {
  ReplyStream reply(StopStrings(strings, decode, min_tokens), decode);
  std::vector<std::string> shown;
  shown.reserve(tokens.size() + 1);
  for (const Token token : tokens) {
    shown.push_back(reply.add(token));
  }
  shown.push_back(reply.finish());
  return shown;
}

// After how many tokens the first stop string is complete; -1: never.
int stops_after(const std::vector<std::string>& strings, const std::vector<Token>& tokens, int min_tokens = 0) {
  const StopStrings stop(strings, decode, min_tokens);
  for (std::size_t count = 1; count <= tokens.size(); ++count) {
    if (stop.found_after(std::span(tokens).first(count))) {
      return static_cast<int>(count);
    }
  }
  return -1;
}

}  // namespace

TEST_CASE("stop strings: found in a token, across tokens, and past tokens without text") {
  CHECK(stops_after({"END"}, {1, 4, 1}) == 2);
  CHECK(stops_after({"END"}, {1, 5, 6, 1}) == 3);
  CHECK(stops_after({"END"}, {1, 7, 1}) == 2);
  CHECK(stops_after({"END"}, {5, 0, 0, 0, 0, 0, 0, 0, 0, 6}) == 10);
  CHECK(stops_after({"END"}, {5, 1, 6}) == -1);
  CHECK(stops_after({"zzz", "bab"}, {1, 3, 3, 3}) == 3);
  CHECK(stops_after({}, {4, 4}) == -1);
  CHECK(StopStrings().empty());
  CHECK_FALSE(StopStrings().found_after(std::vector<Token>{1}));
  CHECK_THROWS_AS(StopStrings({"a", ""}, decode), common::InputError);
}

TEST_CASE("stop strings: the text ends before the first of them") {
  const StopStrings stop({"END", "b"}, decode);
  CHECK(stop.cut("a END b") == "a ");
  CHECK(stop.cut("abEND") == "a");
  CHECK(stop.cut("END") == "");  // NOLINT(readability-container-size-empty)
  CHECK(stop.cut("EN D") == "EN D");
  CHECK(stop.safe_length("aEN") == 1);
  CHECK(stop.safe_length("aENa") == 4);
  CHECK(StopStrings({"aab"}, decode).safe_length("xaaa") == 2);
  CHECK(StopStrings().safe_length("END") == 3);
  // Of several that may have begun, the first decides, whichever was given first.
  CHECK(StopStrings({"abc", "bd"}, decode).safe_length("xab") == 1);
  CHECK(StopStrings({"bd", "abc"}, decode).safe_length("xab") == 1);
}

TEST_CASE("reply stream: what may be part of a stop string is held back, and shown once it cannot be") {
  using Texts = std::vector<std::string>;
  CHECK(stream({"END"}, {1, 5, 6, 1}) == Texts{"a", "", "", "", ""});
  CHECK(stream({"END"}, {1, 5, 1, 1}) == Texts{"a", "", "Ea", "a", ""});
  CHECK(stream({"END"}, {1, 5}) == Texts{"a", "", "E"});
  CHECK(stream({"END"}, {7, 1}) == Texts{"x ", "", ""});
  CHECK(stream({}, {5, 6}) == Texts{"E", "ND", ""});
}

TEST_CASE("reply stream: a character is shown once it is complete") {
  using Texts = std::vector<std::string>;
  CHECK(stream({}, {1, 8, 9}) == Texts{"a", "", "\xC3\xA9", ""});
  CHECK(stream({}, {10, 11}) == Texts{"", "\xF0\x9F\x98\x80", ""});
  CHECK(stream({}, {8}) == Texts{"", "\xC3"});
  CHECK(stream({}, {9, 1}) == Texts{"\xA9", "a", ""});  // the rest of no character
}

TEST_CASE("stop strings: the one that a text was cut at is the first in the text, and then the first that was given") {
  const StopStrings stop({"never", "the king", "the", "he"}, decode);
  CHECK(stop.first_in("once the king") == "the king");
  CHECK(stop.first_in("once the queen") == "the");
  CHECK(stop.first_in("once he") == "he");
  CHECK_FALSE(stop.first_in("once").has_value());
  CHECK_FALSE(StopStrings().first_in("once").has_value());
}

TEST_CASE("stop strings: none ends within the first min_tokens tokens") {
  using Texts = std::vector<std::string>;
  CHECK(stops_after({"END"}, {1, 4, 1, 4}, 1) == 2);
  CHECK(stops_after({"END"}, {1, 4, 1, 4}, 2) == 4);
  CHECK(stops_after({"END"}, {1, 4, 1, 4}, 4) == -1);
  CHECK(stops_after({"END"}, {1, 5, 6, 1}, 2) == 3);   // begins within them, and ends after them
  CHECK(stops_after({"END"}, {4, 0, 0, 1}, 2) == -1);  // a token without text ends none
  CHECK(stops_after({"aba"}, {3, 3, 3}, 2) == 3);      // a string that does not count may overlap the string that does
  CHECK(stream({"END"}, {1, 4, 1, 4}, 2) == Texts{"a", "", "ENDa", "", ""});
  CHECK(stream({"END"}, {1, 4, 1}, 3) == Texts{"a", "", "ENDa", ""});
  CHECK(stream({"END"}, {1, 5, 6, 1}, 2) == Texts{"a", "", "", "", ""});
  CHECK(stream({"aba"}, {3, 3, 3}, 2) == Texts{"", "ab", "", ""});
  // Streamed and whole, a text ends at the same place.
  for (const std::vector<Token>& tokens : std::vector<std::vector<Token>>{{3, 3, 3, 3}, {1, 4, 5, 6}, {4, 8, 9, 4}}) {
    for (int min_tokens = 0; min_tokens <= 4; ++min_tokens) {
      const std::vector<std::string> strings = {"aba", "END"};
      const StopStrings stop(strings, decode, min_tokens);
      const int count = stops_after(strings, tokens, min_tokens);
      const auto reply = std::span(tokens).first(count < 0 ? tokens.size() : static_cast<std::size_t>(count));
      std::string shown;
      for (const std::string& text : stream(strings, {reply.begin(), reply.end()}, min_tokens)) {
        shown += text;
      }
      CAPTURE(tokens, min_tokens);
      CHECK(stop.first_in(decode(reply), stop.num_passed(reply)).has_value() == (count >= 0));
      CHECK(stop.cut(decode(reply), stop.num_passed(reply)) == shown);
    }
  }
}
