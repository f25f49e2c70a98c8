#include "common/app/text_stream.h"

#include <algorithm>
#include <ostream>
#include <span>

#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/base/utf8.h"
#include "common/model/unicode.h"

namespace common {
namespace {

constexpr std::string_view kUnreadable = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

WordWrap::WordWrap(std::ostream& output, int columns, int indent)
    : output_(output), columns_(std::max(columns - 1, 0)), indent_(indent), at_(indent) {
  COMMON_CHECK(columns == 0 || columns >= indent + 3, "there is no room for a character of two columns");
}

void WordWrap::write(std::string_view text) {
  for (std::size_t offset = 0; offset < text.size();) {
    const std::size_t length = valid_utf8_length(text.substr(offset));
    const std::string_view bytes = text.substr(offset, std::max<std::size_t>(length, 1));
    offset += bytes.size();
    if (bytes == "\n") {
      begin_line();
    } else if (columns_ == 0) {
      output_ << bytes;
    } else if (bytes == " " || bytes == "\t") {
      word_.clear();
      word_columns_ = 0;
      if (at_ < columns_) {  // the blank at a line's end is the line's end
        output_ << ' ';
        at_ += 1;
      }
    } else {
      const char32_t code_point = length > 0 ? decode_utf8(bytes, 0).code_point : 0;
      const bool is_readable = length > 0 && !is_deceptive(code_point);
      write_character(is_readable ? bytes : kUnreadable, is_readable ? display_columns(code_point) : 1);
    }
  }
  output_.flush();
}

void WordWrap::write_character(std::string_view bytes, int columns) {
  if (at_ + columns > columns_) {
    const std::string word = at_ - word_columns_ > indent_ ? word_ : "";  // a word longer than a line is broken
    const int word_columns = word.empty() ? 0 : word_columns_;
    if (word_columns > 0) {
      output_ << "\x1b[" << word_columns << "D\x1b[K";
    }
    begin_line();
    output_ << word;
    word_ = word;
    word_columns_ = word_columns;
    at_ += word_columns;
  }
  output_ << bytes;
  at_ += columns;
  if (columns > 1) {  // a line may end at any of these characters
    word_.clear();
    word_columns_ = 0;
  } else {
    word_ += bytes;
    word_columns_ += columns;
  }
}

void WordWrap::begin_line() {
  output_ << '\n' << std::string(static_cast<std::size_t>(indent_), ' ');
  at_ = indent_;
  word_.clear();
  word_columns_ = 0;
}

int wrap_columns(const std::ostream& stream) {
  constexpr int kMinColumns = 20;
  return understands_escapes(stream) ? std::max(terminal_size(stream).columns, kMinColumns) : 0;
}

void print_prompt(std::ostream& output, std::size_t number, const std::string& prompt) {
  const bool color = use_color(output);
  output << format("%2zu  ", number) << (color ? "\x1b[2m" : "") << quote(prompt, 240) << (color ? "\x1b[0m" : "")
         << '\n'
         << std::string(kTextIndent, ' ');
}

std::string why_nothing(const Completion& completion) {
  if (!completion.error.empty()) {
    return (completion.tokens.empty() ? "no reply: " : "\nno reply: ") + completion.error;
  }
  const bool is_empty = completion.tokens.empty() && completion.finish_reason == FinishReason::kStop;
  return is_empty ? "(nothing: the model ended the text at once)" : "";
}

TextStream::TextStream(const Session& session, std::ostream& output, bool is_quiet)
    : session_(session), output_(output), is_quiet_(is_quiet) {
  const auto decode = [this](std::span<const Token> tokens) { return session_.tokenizer.decode(tokens); };
  for (const Request& request : session.requests) {
    texts_.push_back({.reply = ReplyStream(request.stop_strings, decode)});
  }
}

void TextStream::add(int request, Token token) {
  Text& text = texts_.at(static_cast<std::size_t>(request));
  text.waiting += text.reply.add(token);
  text.num_tokens += 1;
  write_waiting(false);
  if (!output_) {
    throw InputError("can't write to standard output");
  }
}

void TextStream::finish(std::span<const Completion> completions) {
  for (std::size_t i = 0; i < completions.size() && !is_quiet_; ++i) {
    if (const std::string reason = why_nothing(completions[i]); !reason.empty()) {
      Text& text = texts_.at(i);
      text.waiting += text.reply.finish() + reason;
    }
  }
  write_waiting(true);
}

// That a stop token has ended a text is known only when all texts have ended.
bool TextStream::has_ended(std::size_t request) const {
  const Text& text = texts_[request];
  return text.reply.is_stopped() || text.num_tokens == session_.requests[request].max_new_tokens;
}

void TextStream::write_waiting(bool is_end) {
  while (current_ < texts_.size()) {
    Text& text = texts_[current_];
    if (!wrap_.has_value()) {
      if (!is_quiet_) {
        print_prompt(output_, current_, session_.prompts[current_]);
      }
      wrap_.emplace(output_, wrap_columns(output_), is_quiet_ ? 0 : kTextIndent);
    }
    const bool has_ended = is_end || this->has_ended(current_);
    if (has_ended) {
      text.waiting += text.reply.finish();
    }
    wrap_->write(text.waiting);
    text.waiting.clear();
    if (!has_ended) {
      return;
    }
    output_ << '\n' << std::flush;
    current_ += 1;
    wrap_.reset();
  }
}

}  // namespace common
