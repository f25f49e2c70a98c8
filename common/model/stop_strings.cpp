#include "common/model/stop_strings.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <utility>

#include "common/base/check.h"
#include "common/base/utf8.h"

namespace common {
namespace {

// Where the string begins in the text if it ends after the first num_passed bytes; npos: it is not there.
std::size_t find_after(std::string_view text, std::size_t num_passed, const std::string& string) {
  const std::size_t min_end = num_passed + 1;
  return text.find(string, min_end > string.size() ? min_end - string.size() : 0);
}

}  // namespace

StopStrings::StopStrings(std::vector<std::string> strings, Decode decode, int min_tokens)
    : decode_(std::move(decode)), min_tokens_(min_tokens) {
  for (const std::string& string : strings) {
    if (string.empty()) {
      throw InputError("a stop string needs a text: the empty one would end every reply");
    }
    max_size_ = std::max(max_size_, string.size());
  }
  if (!strings.empty()) {
    strings_ = std::make_shared<const std::vector<std::string>>(std::move(strings));
  }
}

const std::vector<std::string>& StopStrings::strings() const {
  static const std::vector<std::string> none;
  return strings_ != nullptr ? *strings_ : none;
}

bool StopStrings::found_after(std::span<const Token> reply) const {
  if (empty() || std::ssize(reply) <= min_tokens_) {
    return false;
  }
  // A string that the last token completes begins less than max_size_ bytes before that token. If tokens have no bytes,
  // it takes more tokens.
  const std::size_t last_size = decode_(reply.last(1)).size();
  std::size_t count = std::min(reply.size(), max_size_ + 1);
  std::string tail = decode_(reply.last(count));
  while (tail.size() < last_size + max_size_ && count < reply.size()) {
    count = std::min(reply.size(), 2 * count);
    tail = decode_(reply.last(count));
  }
  return first_in(tail, tail.size() - last_size).has_value();
}

std::size_t StopStrings::num_passed(std::span<const Token> reply) const {
  const auto count = static_cast<std::size_t>(min_tokens_);
  return empty() || count == 0 ? 0 : decode_(reply.first(std::min(count, reply.size()))).size();
}

std::optional<std::string> StopStrings::first_in(std::string_view text, std::size_t num_passed) const {
  const std::string* first = nullptr;
  std::size_t begin = std::string_view::npos;
  for (const std::string& string : strings()) {
    if (const std::size_t at = find_after(text, num_passed, string); at < begin) {
      begin = at;
      first = &string;
    }
  }
  return first != nullptr ? std::optional(*first) : std::nullopt;
}

std::string StopStrings::cut(std::string_view text, std::size_t num_passed) const {
  std::size_t end = text.size();
  for (const std::string& string : strings()) {
    end = std::min(end, find_after(text, num_passed, string));
  }
  return std::string(text.substr(0, end));
}

std::size_t StopStrings::safe_length(std::string_view text) const {
  std::size_t safe = text.size();
  for (const std::string& string : strings()) {
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
  num_tokens_ += 1;
  num_passed_ = num_tokens_ <= stop_strings_.min_tokens() ? held_.size() : num_passed_;
  std::string before_stop = stop_strings_.cut(held_, num_passed_);
  if (before_stop.size() < held_.size()) {
    is_stopped_ = true;
    held_.clear();
    return before_stop;
  }
  const std::size_t safe = std::min(stop_strings_.safe_length(held_), whole_characters(held_));
  std::string shown = held_.substr(0, safe);
  held_.erase(0, safe);
  num_passed_ -= std::min(num_passed_, safe);
  return shown;
}

std::string ReplyStream::finish() { return std::exchange(held_, {}); }

}  // namespace common
