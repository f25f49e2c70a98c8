#include "common/base/utf8.h"

#include <algorithm>

#include <string>

#include "common/base/check.h"

namespace common {
namespace {

constexpr char32_t kFirstSurrogate = 0xD800;
constexpr char32_t kLastSurrogate = 0xDFFF;
constexpr char32_t kLastCodePoint = 0x10FFFF;

// What the first byte of a character says: its length, the first bits of the code point, and the smallest code point
// that needs this length. A smaller one would be "overlong", a second encoding of a character, which UTF-8 forbids.
struct LeadByte {
  std::size_t num_bytes;
  char32_t payload;
  char32_t smallest;
  const char* problem = nullptr;
};

LeadByte read_lead_byte(unsigned char byte) {
  if (byte < 0x80) {
    return {1, byte, 0};
  }
  if (byte < 0xC0) {
    return {0, 0, 0, "continuation byte without a first byte"};
  }
  if (byte < 0xE0) {
    return {2, byte & 0x1FU, 0x80};
  }
  if (byte < 0xF0) {
    return {3, byte & 0x0FU, 0x800};
  }
  if (byte < 0xF8) {
    return {4, byte & 0x07U, 0x10000};
  }
  return {0, 0, 0, "a byte that UTF-8 never uses"};
}

// Decodes the first character of `text`, which is not empty. Returns nullptr, or what is wrong with it.
const char* decode(std::string_view text, Utf8Character& character) {
  const LeadByte lead = read_lead_byte(static_cast<unsigned char>(text.front()));
  if (lead.problem != nullptr) {
    return lead.problem;
  }
  char32_t code_point = lead.payload;
  for (std::size_t i = 1; i < lead.num_bytes; ++i) {
    if (i == text.size()) {
      return "character cut off by the end of the text";
    }
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte & 0xC0U) != 0x80U) {
      return "character cut off by another one";
    }
    code_point = (code_point << 6U) | (byte & 0x3FU);
  }
  if (code_point < lead.smallest) {
    return "overlong form";
  }
  if (code_point >= kFirstSurrogate && code_point <= kLastSurrogate) {
    return "surrogate";
  }
  if (code_point > kLastCodePoint) {
    return "code point above U+10FFFF";
  }
  character = {code_point, lead.num_bytes};
  return nullptr;
}

}  // namespace

Utf8Character decode_utf8(std::string_view text, std::size_t offset) {
  COMMON_CHECK(offset < text.size(), "offset lies outside the text");
  Utf8Character character;
  if (const char* const problem = decode(text.substr(offset), character)) {
    throw InputError("invalid UTF-8 at byte " + std::to_string(offset) + ": " + problem);
  }
  return character;
}

std::size_t valid_utf8_length(std::string_view text) {
  Utf8Character character;
  return text.empty() || decode(text, character) != nullptr ? 0 : character.num_bytes;
}

std::size_t whole_characters(std::string_view text) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if (byte >= 0xC0) {  // the first byte of a character
      const std::size_t size = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : 2;
      return size > back ? text.size() - back : text.size();
    }
    if (byte < 0x80) {
      break;
    }
  }
  return text.size();
}

void check_utf8(std::string_view text) {
  for (std::size_t offset = 0; offset < text.size();) {
    offset += decode_utf8(text, offset).num_bytes;
  }
}

}  // namespace common
