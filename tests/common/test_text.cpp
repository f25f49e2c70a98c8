// Numbers with units and quoted strings.
#include <cstdint>
#include <limits>
#include <string>

#include "common/base/text.h"
#include "tests/support/catch.h"

TEST_CASE("format: printf into a string of any length") {
  CHECK(common::format("plain") == "plain");
  CHECK(common::format("%d of %s, %.2f", 3, "four", 2.5) == "3 of four, 2.50");
  CHECK(common::format("%s", "").empty());
  const std::string long_text(5000, 'x');
  CHECK(common::format("%s", long_text.c_str()) == long_text);
}

TEST_CASE("format_bytes: three significant digits and a binary unit") {
  CHECK(common::format_bytes(0) == "0 B");
  CHECK(common::format_bytes(896) == "896 B");
  CHECK(common::format_bytes(1023) == "1023 B");
  CHECK(common::format_bytes(1024) == "1.00 KiB");
  CHECK(common::format_bytes(23040) == "22.5 KiB");
  CHECK(common::format_bytes(std::int64_t{512} * 1024) == "512 KiB");
  CHECK(common::format_bytes(1675037245) == "1.56 GiB");
  CHECK(common::format_bytes(-23040) == "-22.5 KiB");
  // No rounding to a fourth digit: 9.996, 99.96 and 999.6 KiB.
  CHECK(common::format_bytes(10236) == "10.0 KiB");
  CHECK(common::format_bytes(102359) == "100 KiB");
  CHECK(common::format_bytes(1023590) == "0.976 MiB");
  CHECK(common::format_bytes(std::int64_t{1023} * 1024) == "0.999 MiB");
  CHECK(common::format_bytes(1024 * 1024 - 1) == "1.00 MiB");
  CHECK(common::format_bytes(std::int64_t{1} << 40U) == "1.00 TiB");
  CHECK(common::format_bytes(std::int64_t{1} << 50U) == "1.00 PiB");
  CHECK(common::format_bytes(std::numeric_limits<std::int64_t>::max()) == "8.00 EiB");
  CHECK(common::format_bytes(std::numeric_limits<std::int64_t>::min()) == "-8.00 EiB");
}

TEST_CASE("format_count: commas between thousands") {
  CHECK(common::format_count(0) == "0");
  CHECK(common::format_count(999) == "999");
  CHECK(common::format_count(1000) == "1,000");
  CHECK(common::format_count(123456) == "123,456");
  CHECK(common::format_count(1234567) == "1,234,567");
  CHECK(common::format_count(-123) == "-123");
  CHECK(common::format_count(-1234) == "-1,234");
  CHECK(common::format_count(std::numeric_limits<std::int64_t>::min()) == "-9,223,372,036,854,775,808");
}

TEST_CASE("format_percent: one decimal, and a dash for a share of nothing") {
  CHECK(common::format_percent(15, 16) == "93.8 %");
  CHECK(common::format_percent(0, 7) == "0.0 %");
  CHECK(common::format_percent(7, 7) == "100.0 %");
  CHECK(common::format_percent(0, 0) == "-");
  CHECK(common::format_percent(5, 0) == "-");
}

TEST_CASE("quote: one line, escaped") {
  CHECK(common::quote("") == "\"\"");
  CHECK(common::quote("plain text") == "\"plain text\"");
  CHECK(common::quote("a\nb\tc\rd\"e\\f") == R"("a\nb\tc\rd\"e\\f")");
  CHECK(common::quote(std::string_view("\0\x1b[31m\x7f", 7)) == R"("\x00\x1b[31m\x7f")");
  CHECK(common::quote("größe 日本 🙂") == "\"größe 日本 🙂\"");
  CHECK(common::quote("\xC2\x9B"
                      "31m") == R"("\xc2\x9b31m")");   // U+009B opens a terminal command, as ESC [ does
  CHECK(common::quote("\xC2\xA0") == "\"\xC2\xA0\"");  // U+00A0 is the first above the control characters
}

TEST_CASE("quote: what changes the direction of a text is escaped, so that it cannot mislead") {
  // NOLINTBEGIN(misc-misleading-bidirectional): they are what is escaped
  CHECK(common::quote("a\u202Eb") == R"("a\xe2\x80\xaeb")");
  for (const char* const mark : {"\u061C", "\u200E", "\u200F", "\u2028", "\u2029", "\u202A", "\u202B", "\u202C",
                                 "\u202D", "\u202E", "\u2066", "\u2067", "\u2068", "\u2069"}) {
    CAPTURE(mark);
    CHECK(common::quote(mark).find("\\x") == 1);
  }
  for (const char* const harmless : {"\u061B", "\u061D", "\u200D", "\u2010", "\u2027", "\u202F", "\u2065", "\u206A"}) {
    CHECK(common::quote(harmless) == "\"" + std::string(harmless) + "\"");
  }
  // NOLINTEND(misc-misleading-bidirectional)
}

TEST_CASE("quote: bytes that are not UTF-8 are escaped, so that the message is UTF-8") {
  CHECK(common::quote("a\xFF"
                      "b") == R"("a\xffb")");
  CHECK(common::quote("\x80") == R"("\x80")");
  CHECK(common::quote("\xE6\x97") == R"("\xe6\x97")");  // cut short
  CHECK(common::quote("\xE6\x97x") == R"("\xe6\x97x")");
  CHECK(common::quote("\xC0\xAF") == R"("\xc0\xaf")");  // an overlong '/'
  CHECK(common::quote("\xE0\x80\xAF") == R"("\xe0\x80\xaf")");
  CHECK(common::quote("\xF0\x80\x80\xAF") == R"("\xf0\x80\x80\xaf")");
  CHECK(common::quote("\xED\xA0\x80") == R"("\xed\xa0\x80")");          // a surrogate
  CHECK(common::quote("\xF4\x90\x80\x80") == R"("\xf4\x90\x80\x80")");  // past U+10FFFF
  CHECK(common::quote("\xF4\x8F\xBF\xBF") == "\"\xF4\x8F\xBF\xBF\"");   // the last code point
}

TEST_CASE("quote: cut after max_length bytes, never inside a character") {
  CHECK(common::quote("abcdef", 6) == "\"abcdef\"");
  CHECK(common::quote("abcdefg", 6) == "\"abcdef\"...");
  CHECK(common::quote("abc", 0) == "\"\"...");
  CHECK(common::quote("", 0) == "\"\"");
  CHECK(common::quote("a日本", 7) == "\"a日本\"");
  CHECK(common::quote("a日本", 6) == "\"a日\"...");
  CHECK(common::quote("a日本", 4) == "\"a日\"...");
  CHECK(common::quote("a日本", 3) == "\"a\"...");
  CHECK(common::quote("\n\n\n", 2) == R"("\n\n"...)");  // counted before escaping
  CHECK(common::quote(std::string(80, 'x')) == "\"" + std::string(80, 'x') + "\"");
  CHECK(common::quote(std::string(81, 'x')) == "\"" + std::string(80, 'x') + "\"...");
}
