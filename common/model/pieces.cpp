#include "common/model/pieces.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/base/utf8.h"
#include "common/model/unicode.h"

namespace common {
namespace {

enum class CharacterClass : std::uint8_t { kSpace, kLetter, kNumber, kOther };

CharacterClass classify(char32_t code_point) {
  if (is_space(code_point)) {
    return CharacterClass::kSpace;
  }
  if (is_letter(code_point)) {
    return CharacterClass::kLetter;
  }
  return is_number(code_point) ? CharacterClass::kNumber : CharacterClass::kOther;
}

bool is_newline(char32_t code_point) { return code_point == U'\r' || code_point == U'\n'; }
bool is_digit(char32_t code_point) { return code_point >= U'0' && code_point <= U'9'; }

bool is_mark(char32_t code_point) {
  constexpr std::u32string_view kMore = U"$+<=>^~|";
  return is_punctuation(code_point) || kMore.find(code_point) != std::u32string_view::npos;
}

// All positions count characters, not bytes. A rule is applied to a section of the text as if it were the whole text:
// \s+(?!\S) sees the end of the text at the section's end.
class PieceScanner {
 public:
  explicit PieceScanner(std::string_view text) : text_(text) {
    for (std::size_t offset = 0; offset < text.size();) {
      const Utf8Character character = decode_utf8(text, offset);
      offsets_.push_back(offset);
      characters_.push_back(character.code_point);
      classes_.push_back(classify(character.code_point));
      offset += character.num_bytes;
    }
    offsets_.push_back(text.size());
  }

  std::vector<std::string_view> pieces(PieceRule rule) {
    const std::size_t size = classes_.size();
    switch (rule) {
      case PieceRule::kGpt2:
        cut_like_gpt2(0, size);
        break;
      case PieceRule::kSmolLm:
        for (const auto& [begin, end] :
             sections(0, size, [this](std::size_t at) { return is_number_at(at) ? 1 : 0; })) {
          cut_like_gpt2(begin, end);
        }
        break;
      case PieceRule::kLlama3:
        cut(0, size, [this](std::size_t begin, std::size_t end) { return llama3_piece_end(begin, end, 3); });
        break;
      case PieceRule::kQwen2:
        cut(0, size, [this](std::size_t begin, std::size_t end) { return llama3_piece_end(begin, end, 1); });
        break;
      case PieceRule::kDefault:
        cut_by_default(size);
        break;
    }
    std::vector<std::string_view> result;
    std::size_t begin = 0;
    for (const std::size_t end : ends_) {
      result.push_back(slice(begin, end));
      begin = end;
    }
    return result;
  }

 private:
  using Sections = std::vector<std::pair<std::size_t, std::size_t>>;

  std::string_view slice(std::size_t begin, std::size_t end) const {
    return text_.substr(offsets_[begin], offsets_[end] - offsets_[begin]);
  }
  bool is_number_at(std::size_t at) const { return classes_[at] == CharacterClass::kNumber; }

  // Cuts begin … end at every match; the text between two matches is a section too. length_at(position): the length of
  // the match that begins there, 0 if there is none.
  template <typename LengthAt>
  static Sections sections(std::size_t begin, std::size_t end, const LengthAt& length_at) {
    Sections result;
    std::size_t gap = begin;
    for (std::size_t at = begin; at < end;) {
      const auto length = static_cast<std::size_t>(length_at(at));
      if (length == 0) {
        ++at;
        continue;
      }
      if (gap < at) {
        result.emplace_back(gap, at);
      }
      result.emplace_back(at, at + length);
      at += length;
      gap = at;
    }
    if (gap < end) {
      result.emplace_back(gap, end);
    }
    return result;
  }

  template <typename PieceEnd>
  void cut(std::size_t begin, std::size_t end, const PieceEnd& piece_end) {
    while (begin < end) {
      begin = piece_end(begin, end);
      ends_.push_back(begin);
    }
  }

  void cut_like_gpt2(std::size_t begin, std::size_t end) {
    cut(begin, end, [this](std::size_t from, std::size_t limit) { return gpt2_piece_end(from, limit); });
  }

  // Each expression cuts the pieces that the expression before has left.
  void cut_by_default(std::size_t size) {
    const auto run_length = [](std::size_t at, std::size_t end, const auto& is_part) {
      std::size_t length = 0;
      while (at + length < end && is_part(at + length)) {
        ++length;
      }
      return length;
    };
    const auto marks = sections(0, size, [&](std::size_t at) {
      return run_length(at, size, [this](std::size_t i) { return is_mark(characters_[i]); });
    });
    for (const auto& [begin, end] : marks) {
      cut_like_gpt2(begin, end);
    }
    std::vector<std::size_t> ends;
    std::size_t begin = 0;
    for (const std::size_t end : ends_) {
      const auto numbers = sections(begin, end, [&, limit = end](std::size_t at) {
        return run_length(at, limit, [this](std::size_t i) { return is_number_at(i); });
      });
      for (const auto& number : numbers) {
        const auto threes = sections(number.first, number.second, [&](std::size_t at) {
          const std::size_t digits = run_length(at, std::min(number.second, at + 3),
                                                [this](std::size_t i) { return is_digit(characters_[i]); });
          return digits == 3 ? 3 : 0;
        });
        for (const auto& three : threes) {
          ends.push_back(three.second);
        }
      }
      begin = end;
    }
    ends_ = std::move(ends);
  }

  std::size_t run_end(std::size_t begin, std::size_t limit) const {
    std::size_t end = begin + 1;
    while (end < limit && classes_[end] == classes_[begin]) {
      ++end;
    }
    return end;
  }

  // Length of the contraction that begins here, or 0. GPT-2's rule has them in lower case only; in any case, the long s
  // is an s too.
  std::size_t contraction_length(std::size_t begin, std::size_t limit, bool any_case) const {
    for (const std::u32string_view contraction : {U"'s", U"'t", U"'re", U"'ve", U"'m", U"'ll", U"'d"}) {
      const auto matches = [&](char32_t expected, char32_t actual) {
        const bool is_capital = actual >= U'A' && actual <= U'Z' && actual + 32 == expected;
        return actual == expected || (any_case && (is_capital || (actual == U'\u017F' && expected == U's')));
      };
      if (limit - begin >= contraction.size() &&
          std::equal(contraction.begin(), contraction.end(), characters_.begin() + static_cast<std::ptrdiff_t>(begin),
                     matches)) {
        return contraction.size();
      }
    }
    return 0;
  }

  // The ends of the match of the expression's first alternative that matches at `begin`.
  std::size_t gpt2_piece_end(std::size_t begin, std::size_t limit) const {
    const std::size_t contraction = contraction_length(begin, limit, false);
    if (contraction > 0) {
      return begin + contraction;
    }
    // One blank (only U+0020, not any space) joins the word, number or punctuation after it.
    const bool blank_joins =
        characters_[begin] == U' ' && begin + 1 < limit && classes_[begin + 1] != CharacterClass::kSpace;
    const std::size_t first = blank_joins ? begin + 1 : begin;
    const std::size_t end = run_end(first, limit);
    return classes_[first] == CharacterClass::kSpace ? spaces_end(begin, end, limit) : end;
  }

  // \s+(?!\S)|\s+: of several spaces before other text, the last one is left to that text; a single one is kept.
  static std::size_t spaces_end(std::size_t begin, std::size_t end, std::size_t limit) {
    const bool text_follows = end < limit;
    return text_follows && end - begin > 1 ? end - 1 : end;
  }

  std::size_t llama3_piece_end(std::size_t begin, std::size_t limit, std::size_t max_digits) const {
    const std::size_t contraction = contraction_length(begin, limit, true);
    if (contraction > 0) {
      return begin + contraction;
    }
    const CharacterClass first = classes_[begin];
    if (first == CharacterClass::kLetter) {
      return run_end(begin, limit);
    }
    // Any one character but a newline or a number joins the word after it.
    const bool next_is_letter = begin + 1 < limit && classes_[begin + 1] == CharacterClass::kLetter;
    if (next_is_letter && first != CharacterClass::kNumber && !is_newline(characters_[begin])) {
      return run_end(begin + 1, limit);
    }
    if (first == CharacterClass::kNumber) {
      return std::min(run_end(begin, limit), begin + max_digits);
    }
    const bool blank_joins =
        characters_[begin] == U' ' && begin + 1 < limit && classes_[begin + 1] == CharacterClass::kOther;
    if (blank_joins || first == CharacterClass::kOther) {
      std::size_t end = run_end(blank_joins ? begin + 1 : begin, limit);
      while (end < limit && is_newline(characters_[end])) {
        ++end;
      }
      return end;
    }
    // Spaces: up to the last newline among them, if there is one.
    const std::size_t end = run_end(begin, limit);
    for (std::size_t at = end; at > begin; --at) {
      if (is_newline(characters_[at - 1])) {
        return at;
      }
    }
    return spaces_end(begin, end, limit);
  }

  std::string_view text_;
  std::vector<std::size_t> offsets_;     // [num_characters + 1] byte offset of each character, then of the end
  std::vector<char32_t> characters_;     // [num_characters]
  std::vector<CharacterClass> classes_;  // [num_characters]
  std::vector<std::size_t> ends_;        // of the pieces, in characters
};

}  // namespace

std::optional<PieceRule> find_piece_rule(std::string_view name) {
  // Files name a rule by the model that had it first, or by a later model.
  static constexpr std::array<std::pair<std::string_view, PieceRule>, 8> kRules = {{
      {"gpt-2", PieceRule::kGpt2},
      {"smollm", PieceRule::kSmolLm},
      {"llama-bpe", PieceRule::kLlama3},
      {"llama3", PieceRule::kLlama3},
      {"llama-v3", PieceRule::kLlama3},
      {"qwen2", PieceRule::kQwen2},
      {"deepseek-r1-qwen", PieceRule::kQwen2},
      {"default", PieceRule::kDefault},
  }};
  const auto* const found =
      std::find_if(kRules.begin(), kRules.end(), [name](const auto& rule) { return rule.first == name; });
  return found == kRules.end() ? std::nullopt : std::optional(found->second);
}

std::vector<std::string_view> cut_into_pieces(std::string_view text, PieceRule rule) {
  return PieceScanner(text).pieces(rule);
}

}  // namespace common
