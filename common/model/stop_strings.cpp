#include "common/model/stop_strings.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "common/base/check.h"

namespace common {
namespace {

// The length of the text without its last character if bytes of that are still to come. Bytes that are not UTF-8 count
// as characters.
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

}  // namespace

StopStrings::StopStrings(std::vector<std::string> strings, Decode decode)
    : strings_(std::move(strings)), decode_(std::move(decode)) {
  for (const std::string& string : strings_) {
    if (string.empty()) {
      throw InputError("a stop string needs a text: the empty one would end every reply");
    }
    max_size_ = std::max(max_size_, string.size());
  }
}

bool StopStrings::found_after(std::span<const Token> reply) const {
  if (empty() || reply.empty()) {
    return false;
  }
  // The text before the last token has no stop string, so one that is complete now begins less than max_size_ bytes
  // before that token. Tokens may have no bytes, and then more of them are needed.
  const std::size_t last_size = decode_(reply.last(1)).size();
  std::size_t count = std::min(reply.size(), max_size_ + 1);
  std::string tail = decode_(reply.last(count));
  while (tail.size() < last_size + max_size_ && count < reply.size()) {
    count = std::min(reply.size(), 2 * count);
    tail = decode_(reply.last(count));
  }
  return cut(tail).size() < tail.size();
}

std::optional<std::string> StopStrings::first_in(std::string_view text) const {
  const std::string* first = nullptr;
  std::size_t begin = std::string_view::npos;
  for (const std::string& string : strings_) {
    if (const std::size_t at = text.find(string); at < begin) {
      begin = at;
      first = &string;
    }
  }
  return first != nullptr ? std::optional(*first) : std::nullopt;
}

std::string StopStrings::cut(std::string_view text) const {
  std::size_t end = text.size();
  for (const std::string& string : strings_) {
    end = std::min(end, text.find(string));
  }
  return std::string(text.substr(0, end));
}

std::size_t StopStrings::safe_length(std::string_view text) const {
  std::size_t safe = text.size();
  for (const std::string& string : strings_) {
    // The longest end of the text that the string begins with.
    for (std::size_t size = std::min(string.size(), text.size()); size > 0; --size) {
      if (text.ends_with(std::string_view(string).substr(0, size))) {
        safe = std::min(safe, text.size() - size);
        break;
      }
    }
  }
  return safe;
}

std::string ReplyStream::add(Token token) {
  if (is_stopped_) {
    return "";
  }
  held_ += decode_({&token, 1});
  std::string before_stop = stop_strings_.cut(held_);
  if (before_stop.size() < held_.size()) {
    is_stopped_ = true;
    held_.clear();
    return before_stop;
  }
  const std::size_t safe = std::min(stop_strings_.safe_length(held_), whole_characters(held_));
  std::string shown = held_.substr(0, safe);
  held_.erase(0, safe);
  return shown;
}

std::string ReplyStream::finish() { return std::exchange(held_, {}); }

}  // namespace common
