#include "common/app/words.h"

#include <algorithm>
#include <charconv>
#include <cstddef>

#include "common/base/text.h"

namespace common {

Words split_words(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n\v\f";
  Words words;
  for (std::size_t begin = text.find_first_not_of(kSpaces); begin != std::string_view::npos;) {
    const std::size_t end = std::min(text.find_first_of(kSpaces, begin), text.size());
    words.emplace_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(kSpaces, end);
  }
  return words;
}

int sequence_id(std::string_view name) {
  if (name.size() != 1 || name[0] < 'A' || name[0] > 'Z') {
    throw InputError("a sequence is named by a letter from A to Z, not " + quote(name));
  }
  return name[0] - 'A';
}

char sequence_name(int id) {
  COMMON_CHECK(id >= 0 && id < 26, "sequences in a demonstration are named A to Z");
  return static_cast<char>('A' + id);
}

int parse_count(std::string_view text, int min) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < min) {
    throw InputError("expected a number from " + std::to_string(min) + " up, not " + quote(text));
  }
  return value;
}

std::string counted(int count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string listed(std::span<const int> numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    text += i == 0 ? "" : i + 1 == numbers.size() ? " and " : ", ";
    text += std::to_string(numbers[i]);
  }
  return text;
}

std::string listed(const std::string& noun, std::span<const int> numbers) {
  return noun + (numbers.size() == 1 ? " " : "s ") + listed(numbers);
}

}  // namespace common
