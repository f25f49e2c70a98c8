#include "common/model/chat_template.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "common/base/hash.h"
#include "common/model/unicode.h"

namespace common {
namespace {

bool is_ascii_word(char character) {
  return (character >= '0' && character <= '9') || (character >= 'a' && character <= 'z') ||
         (character >= 'A' && character <= 'Z') || character == '_';
}

bool is_blank(char character) { return character == ' ' || character == '\t' || character == '\n'; }

// A word, an operator, the begin or end of a tag, or a literal.
struct JinjaToken {
  bool is_literal = false;
  std::string text;
};

// Cuts a program into tokens.
class JinjaReader {
 public:
  explicit JinjaReader(std::string_view program) : program_(with_plain_newlines(program)), rest_(program_) {}

  // Nothing if the program has what no known program has.
  std::optional<std::vector<JinjaToken>> read() {
    while (!rest_.empty()) {
      read_text();
      if (!rest_.empty() && !(rest_[1] == '#' ? skip_comment() : read_tag())) {
        return std::nullopt;
      }
    }
    return std::move(tokens_);
  }

 private:
  // Jinja's: one newline at the end is no part of the program.
  static std::string with_plain_newlines(std::string_view program) {
    std::string result;
    for (std::size_t i = 0; i < program.size(); ++i) {
      const bool is_pair = program[i] == '\r' && i + 1 < program.size() && program[i + 1] == '\n';
      result += is_pair ? "" : std::string(1, program[i] == '\r' ? '\n' : program[i]);
    }
    if (result.ends_with('\n')) {
      result.pop_back();
    }
    return result;
  }

  // The text up to the next tag, without what trim_blocks, lstrip_blocks and "-" take off.
  void read_text() {
    std::size_t end = 0;
    const auto begins_tag = [this](std::size_t at) {
      return rest_[at] == '{' && at + 1 < rest_.size() &&
             (rest_[at + 1] == '{' || rest_[at + 1] == '%' || rest_[at + 1] == '#');
    };
    while (end < rest_.size() && !begins_tag(end)) {
      ++end;
    }
    std::string_view text = rest_.substr(0, end);
    rest_.remove_prefix(end);
    if (trims_next_) {
      text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
    }
    const char sign = rest_.size() > 2 ? rest_[2] : ' ';
    const std::size_t last = text.find_last_not_of(kBlanks);
    if (sign == '-') {
      text = text.substr(0, last == text.npos ? 0 : last + 1);
    } else if (!rest_.empty() && rest_[1] != '{' && sign != '+') {
      const std::size_t line = text.rfind('\n') + 1;  // 0 if there is no newline
      if ((line > 0 || is_line_start_) && (last == text.npos || last < line)) {
        text = text.substr(0, line);
      }
    }
    if (!text.empty()) {
      add("{{");
      tokens_.push_back({true, std::string(text)});
      add("}}");
    }
  }

  bool skip_comment() {
    const std::size_t begin = rest_.size() > 2 && (rest_[2] == '-' || rest_[2] == '+') ? 3 : 2;
    const std::size_t end = rest_.find("#}", begin);
    if (end == rest_.npos) {
      return false;
    }
    const char sign = end > begin ? rest_[end - 1] : ' ';
    rest_.remove_prefix(end + 2);
    end_tag(sign, true);
    return true;
  }

  // What follows a tag.
  void end_tag(char sign, bool is_block) {
    trims_next_ = sign == '-';
    const std::size_t blanks = trims_next_
                                   ? std::min(rest_.find_first_not_of(kBlanks), rest_.size())
                                   : static_cast<std::size_t>(is_block && sign != '+' && rest_.starts_with('\n'));
    is_line_start_ = blanks > 0 && rest_[blanks - 1] == '\n';
    rest_.remove_prefix(blanks);
  }

  bool read_tag() {
    const bool is_block = rest_[1] == '%';
    const std::string_view closing = is_block ? "%}" : "}}";
    add(is_block ? "{%" : "{{");
    rest_.remove_prefix(rest_.size() > 2 && (rest_[2] == '-' || rest_[2] == '+') ? 3 : 2);
    bool follows_blank = false;
    int num_open = 0;  // braces
    while (!rest_.empty()) {
      const char first = rest_[0];
      const bool has_sign = (first == '-' || (first == '+' && is_block)) && rest_.substr(1).starts_with(closing);
      if (has_sign || rest_.starts_with(closing)) {
        add(closing);
        rest_.remove_prefix(has_sign ? 3 : 2);
        end_tag(first, is_block);
        return num_open == 0;
      }
      if (first == '\'' || first == '"') {
        if (!read_literal()) {
          return false;
        }
      } else if (is_ascii_word(first)) {
        const auto* const end = std::find_if_not(rest_.begin(), rest_.end(), is_ascii_word);
        const auto size = static_cast<std::size_t>(end - rest_.begin());
        add_word(rest_.substr(0, size), rest_.substr(size).starts_with('('));
        rest_.remove_prefix(size);
      } else if (kOperators.find(first) != kOperators.npos) {
        const bool joins = !tokens_.back().is_literal && kJoining.find(first) != kJoining.npos &&
                           kJoining.find(tokens_.back().text.back()) != kJoining.npos;
        num_open += first == '{' ? 1 : first == '}' ? -1 : 0;
        if ((joins && follows_blank) || num_open < 0) {
          return false;  // "= =" is not "==", and "} }" no end of a tag
        }
        if (joins) {
          tokens_.back().text += first;
        } else {
          add(rest_.substr(0, 1));
        }
        rest_.remove_prefix(1);
      } else if (!is_blank(first)) {
        return false;
      } else {
        rest_.remove_prefix(1);
      }
      follows_blank = is_blank(first);
    }
    return false;
  }

  bool read_literal() {
    const char quote = rest_[0];
    std::string value;
    for (std::size_t i = 1; i < rest_.size(); ++i) {
      if (rest_[i] == quote) {
        rest_.remove_prefix(i + 1);
        tokens_.push_back({true, std::move(value)});
        return true;
      }
      if (rest_[i] == '\\') {
        ++i;
        const std::size_t escape = i < rest_.size() ? kEscapes.find(rest_[i]) : kEscapes.npos;
        if (escape == kEscapes.npos) {
          return false;
        }
        value += kEscaped[escape];
      } else {
        value += rest_[i];
      }
    }
    return false;
  }

  // message.role is message['role'].
  void add_word(std::string_view word, bool is_call) {
    if (!is_call && !tokens_.back().is_literal && tokens_.back().text == ".") {
      tokens_.back().text = "[";
      tokens_.push_back({true, std::string(word)});
      add("]");
    } else {
      add(word);
    }
  }

  void add(std::string_view text) { tokens_.push_back({false, std::string(text)}); }

  static constexpr std::string_view kBlanks = " \t\n";
  static constexpr std::string_view kOperators = ".,:|()[]{}=!<>+-*/%~";
  static constexpr std::string_view kJoining = "=!<>*/";
  static constexpr std::string_view kEscapes = "nt\\'\"";
  static constexpr std::string_view kEscaped = "\n\t\\'\"";

  const std::string program_;
  std::string_view rest_;  // of program_
  bool is_line_start_ = true;
  bool trims_next_ = false;
  std::vector<JinjaToken> tokens_;
};

// 'a' + 'b' is 'ab', and so is {{ 'a' }}{{ 'b' }}.
std::vector<JinjaToken> with_joined_literals(std::vector<JinjaToken> tokens) {
  const auto is = [](const JinjaToken& token, std::string_view text) {
    return !token.is_literal && token.text == text;
  };
  std::vector<JinjaToken> result;
  for (JinjaToken& token : tokens) {
    const bool ends_print = is(token, "}}");
    if (ends_print || is(token, "+") || is(token, "%}")) {
      const auto at = [&](std::size_t back) -> const JinjaToken& { return result[result.size() - back]; };
      const auto joins = [&](std::size_t gap) {
        return result.size() >= gap + 3 && at(1).is_literal && at(gap + 2).is_literal;
      };
      if (joins(1) && is(at(2), "+") && (is(at(4), "{{") || is(at(4), "+") || is(at(4), "="))) {
        result[result.size() - 3].text += at(1).text;
        result.resize(result.size() - 2);
      }
      if (ends_print && joins(2) && is(at(2), "{{") && is(at(3), "}}") && is(at(5), "{{")) {
        result[result.size() - 4].text += at(1).text;
        result.resize(result.size() - 3);
      }
    }
    result.push_back(std::move(token));
  }
  return result;
}

constexpr std::string_view kSystemOpening = "<|im_start|>system\n";
constexpr std::string_view kMessageEnd = "<|im_end|>";

// The text between the marks of a system message.
std::string_view system_prompt_in(std::string_view literal) {
  const std::size_t end = literal.find(kMessageEnd);
  const bool is_message = literal.starts_with(kSystemOpening) && end != literal.npos;
  return is_message ? literal.substr(kSystemOpening.size(), end - kSystemOpening.size()) : std::string_view();
}

void append_literal(std::string& text, std::string_view literal) {
  text += '\'';
  for (const char character : literal) {
    text += character == '\'' || character == '\\' ? "\\" : "";
    text += character;
  }
  text += '\'';
}

constexpr std::string_view kThought = "<think>\n";
constexpr const char* kOwn = "";  // the program's own

struct Kind {
  ChatTemplate prints;
  std::vector<std::uint64_t> programs;  // their hashes
};

// Each of these programs was compared with Jinja by tests/common/test_chat_templates.py. One of each kind is in
// tests/golden/chat_templates.
const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      // ChatML: its first models, Yi, OpenHermes, Dolphin, Qwen 3 2507 and Coder.
      {{.format = ChatFormat::kChatMl},
       {0x1831d110bb35d7c6, 0x7487f0607a446ffc, 0x84af9d74d4c6b350, 0x8ba09d39aa2c6bf5, 0xaaf3b82126ab8f6f,
        0xbedfdaa029c8c666, 0xfcb9a458da72fc0b}},
      // With a system prompt of their own: SmolLM 2, Qwen 1.5 to 2.5, Marco-o1, Sailor 2.
      {{.format = ChatFormat::kChatMl, .system_prompt = kOwn},
       {0x2a8ace7725aa2d3f, 0x51284eb8614c79cc, 0x830004b63b802316, 0xa575fa233a2ee550, 0xcd3d19b5da5595b6,
        0xda862c0b00550b3b, 0xf74aee16cc91ea1c, 0xf81a3cc9190738d1}},
      // BOS first: InternLM 2 and 3, Nous Hermes 2.
      {{.format = ChatFormat::kChatMl, .begins_with_bos = true}, {0x3c77ef5963593888}},
      // Both: Hermes 3.
      {{.format = ChatFormat::kChatMl, .begins_with_bos = true, .system_prompt = kOwn},
       {0x7480babda29d1935, 0xd6760590da8ad791}},
      // QwQ.
      {{.format = ChatFormat::kChatMl, .thoughts = Thoughts::kDropped, .reply_opening = kThought},
       {0xa469378751804545, 0xf8557fad6d4f1905}},
      // QwQ, later.
      {{.format = ChatFormat::kChatMl, .thoughts = Thoughts::kDroppedBeforeLast, .reply_opening = kThought},
       {0x26e760b2e4770d06, 0xfa4208ef172166b7}},
      // Qwen 3.
      {{.format = ChatFormat::kChatMl, .thoughts = Thoughts::kOfLastAnswer, .switches_thinking = true},
       {0x048a5b97caae6104, 0x5e605d45c8db678a, 0x61d361b15125921b, 0x8b12e5052c703339, 0x9eb182109b2bfc47,
        0x9ec467b04ecd1b95, 0xcb8f45514c22b665}},
      // Qwen 3 Thinking 2507.
      {{.format = ChatFormat::kChatMl, .thoughts = Thoughts::kOfLastAnswer, .reply_opening = kThought},
       {0x39e13f2f7149a0a0, 0x7f9e48edca9c002d, 0x9f96a1becec52fc8}},
      // Qwen 3 Instruct 2507, at first.
      {{.format = ChatFormat::kChatMl, .thoughts = Thoughts::kOfLastAnswer},
       {0x36595b3a5507d788, 0x5ae5bb68cb14d5c8, 0xa224c9cca37a053f}},
      // Llama 3.
      {{.format = ChatFormat::kLlama3},
       {0x039cf8ac8fee4b7c, 0x1ea22a6786a6990d, 0x72988483c7369e25, 0x9c0d5426295f23e7, 0xf99c31519417e7ea}},
      // Llama 3.1 to 3.3.
      {{.format = ChatFormat::kLlama3, .has_dates = true},
       {0x6924b58768e08aa6, 0xbec48e4b6e9583de, 0xf5dd6240ffc742eb}},
      // Llama 2, CodeLlama.
      {{.format = ChatFormat::kLlama2}, {0x644114f2846a583e, 0x96e875553a77e0a5}},
      // Gemma 3.
      {{.format = ChatFormat::kGemma},
       {0x3292aaf54fe2c749, 0x6f6717ec605728a5, 0xb7d2333609d2e948, 0xbb12a31da0059517, 0xc8aeba354fcfaefd}},
      // Gemma 1 and 2.
      {{.format = ChatFormat::kGemma, .has_system_role = false},
       {0x204769f3ab544938, 0xa9d76154fb2bbb80, 0xc72f6d91d271b3d2, 0xe6c740743ca5bcc1}},
  };
  return all;
}

}  // namespace

std::optional<ChatProgram> read_chat_program(std::string_view jinja) {
  const std::optional<std::vector<JinjaToken>> read = JinjaReader(jinja).read();
  if (!read) {
    return std::nullopt;
  }
  const std::vector<JinjaToken> tokens = with_joined_literals(*read);
  ChatProgram program;
  for (const JinjaToken& token : tokens) {
    const std::string_view found = token.is_literal ? system_prompt_in(token.text) : std::string_view();
    if (!found.empty()) {
      program.system_prompt = found;
      break;
    }
  }
  constexpr std::string_view kMark = "$";  // no operator of Jinja
  for (const JinjaToken& token : tokens) {
    if (!token.is_literal) {
      const bool needs_blank =
          !program.text.empty() && is_ascii_word(program.text.back()) && is_ascii_word(token.text[0]);
      program.text += (needs_blank ? " " : "") + token.text;
    } else if (program.system_prompt && system_prompt_in(token.text) == *program.system_prompt) {
      append_literal(program.text, kSystemOpening);
      program.text += kMark;
      append_literal(program.text,
                     std::string_view(token.text).substr(kSystemOpening.size() + program.system_prompt->size()));
    } else if (program.system_prompt && token.text == *program.system_prompt) {
      program.text += kMark;
    } else {
      append_literal(program.text, token.text);
    }
  }
  return program;
}

std::optional<ChatTemplate> find_chat_template(std::string_view jinja) {
  const std::optional<ChatProgram> program = read_chat_program(jinja);
  const std::uint64_t hash = program ? hash_bytes(std::as_bytes(std::span(program->text)), 0) : 0;
  for (const Kind& kind : kinds()) {
    const bool is_known = std::find(kind.programs.begin(), kind.programs.end(), hash) != kind.programs.end();
    if (program && is_known) {
      ChatTemplate found = kind.prints;
      found.system_prompt = found.system_prompt ? program->system_prompt : std::nullopt;
      return found;
    }
  }
  return std::nullopt;
}

}  // namespace common
