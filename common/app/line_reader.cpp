#include "common/app/line_reader.h"

#include <iostream>
#include <utility>

#ifdef COURSE_LIBEDIT
#include <histedit.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <cstddef>
#include <cstdio>
#include <cwchar>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "common/base/check.h"
#include "common/base/utf8.h"
#endif

namespace common {

#ifdef COURSE_LIBEDIT

namespace {

// libedit counts in characters: a wchar_t is one on the systems that have it.
std::wstring to_wide(std::string_view text) {
  std::wstring result;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Character character = decode_utf8(text, at);
    result += static_cast<wchar_t>(character.code_point);
    at += character.num_bytes;
  }
  return result;
}

std::string to_utf8(std::wstring_view text) {
  std::string result;
  std::mbstate_t state = {};
  for (const wchar_t wide : text) {
    std::array<char, MB_LEN_MAX> bytes = {};
    if (const std::size_t count = std::wcrtomb(bytes.data(), wide, &state); count != static_cast<std::size_t>(-1)) {
      result.append(bytes.data(), count);
    }
  }
  return result;
}

bool is_control(wchar_t character) {
  return (character < L' ' && character != L'\n' && character != L'\t') || character == L'\x7F';
}

constexpr int kMaxHistory = 1000;
constexpr std::wstring_view kPasteEnd = L"\033[201~";

}  // namespace

class LineReader::Editor {
 public:
  explicit Editor(std::string history_path)
      : history_path_(std::move(history_path)),
        history_(history_winit()),
        edit_(el_init("course", stdin, stdout, stderr)) {
    COMMON_CHECK(history_ != nullptr && edit_ != nullptr, "libedit has no memory");
    history_w(history_, &event_, H_SETSIZE, kMaxHistory);
    history_w(history_, &event_, H_SETUNIQUE, 1);
    if (!history_path_.empty()) {
      history_w(history_, &event_, H_LOAD, history_path_.c_str());  // there may be none yet
    }
    el_wset(edit_, EL_CLIENTDATA, this);
    el_wset(edit_, EL_EDITOR, L"emacs");
    el_wset(edit_, EL_PROMPT, prompt_of);
    el_wset(edit_, EL_HIST, history_w, history_);
    el_wset(edit_, EL_GETCFN, read_character);
    el_wset(edit_, EL_ADDFN, L"course-paste", L"insert a paste", insert_paste);
    bind(L"\033[200~", L"course-paste");
    bind(L"\033[3~", L"ed-delete-next-char");
    bind(L"\033[1~", L"ed-move-to-beg");
    bind(L"\033[4~", L"ed-move-to-end");
    bind(L"\033[1;5C", L"em-next-word");
    bind(L"\033[1;5D", L"ed-prev-word");
    bind(L"\x17", L"ed-delete-prev-word");  // Ctrl-W
    bind(L"\x12", L"em-inc-search-prev");   // Ctrl-R
    el_source(edit_, nullptr);              // the user's ~/.editrc
  }
  ~Editor() {
    el_end(edit_);
    if (!history_path_.empty()) {
      std::error_code ignored;
      std::filesystem::create_directories(std::filesystem::path(history_path_).parent_path(), ignored);
      if (history_w(history_, &event_, H_SAVE, history_path_.c_str()) < 0) {  // readable by the user alone
        std::cerr << "note: can't write the history to " << history_path_ << '\n';
      }
    }
    history_wend(history_);
  }
  Editor(const Editor&) = delete;
  Editor& operator=(const Editor&) = delete;

  LineInput read(const std::string& prompt, std::string& line) {
    prompt_ = to_wide(prompt);
    end_ = LineInput::kEnd;
    has_typed_ = false;
    int count = 0;
    const wchar_t* const typed = el_wgets(edit_, &count);
    if (typed == nullptr || count <= 0) {
      if (end_ == LineInput::kInterrupted) {
        const LineInfoW& info = *el_wline(edit_);
        std::wstring rest(info.cursor, info.lastchar);  // so that ^C stands behind the line
        std::erase_if(rest, is_control);
        std::cout << to_utf8(rest) << "^C" << std::endl;
        return has_typed_ ? LineInput::kCleared : end_;
      }
      return end_;
    }
    line = to_utf8({typed, static_cast<std::size_t>(count)});
    if (line.ends_with('\n')) {
      line.pop_back();
    }
    return LineInput::kLine;
  }

  void remember(const std::string& text) { history_w(history_, &event_, H_ENTER, to_wide(text).c_str()); }

 private:
  static Editor& of(EditLine* edit) {
    void* self = nullptr;
    el_wget(edit, EL_CLIENTDATA, &self);
    return *static_cast<Editor*>(self);
  }
  static wchar_t* prompt_of(EditLine* edit) { return of(edit).prompt_.data(); }

  // 1: a character; 0: the end; -1: Ctrl-C.
  static int read_character(EditLine* edit, wchar_t* character) {
    std::string bytes;
    while (true) {
      switch (wait_for_input()) {
        case InputWait::kInterrupted:
          of(edit).end_ = LineInput::kInterrupted;
          return -1;
        case InputWait::kChanged:
          el_wset(edit, EL_PREP_TERM, 0);  // or it takes the terminal for prepared, which a shell has changed meanwhile
          el_wset(edit, EL_PREP_TERM, 1);
          el_resize(edit);
          el_wset(edit, EL_REFRESH);
          continue;
        case InputWait::kReady:
          break;
      }
      char byte = 0;
      if (::read(STDIN_FILENO, &byte, 1) != 1) {
        return 0;
      }
      of(edit).has_typed_ = true;
      bytes += byte;
      if (valid_utf8_length(bytes) > 0) {
        *character = static_cast<wchar_t>(decode_utf8(bytes, 0).code_point);
        return 1;
      }
      constexpr std::size_t kMaxBytes = 4;
      if (bytes.size() == kMaxBytes || (static_cast<unsigned char>(bytes[0]) & 0xC0U) == 0x80U) {
        *character = L'\uFFFD';
        return 1;
      }
    }
  }

  // A paste up to the mark of its end, in one piece: its line ends do not end the message.
  static unsigned char insert_paste(EditLine* edit, wint_t) {
    std::wstring text;
    for (wchar_t character = 0; el_wgetc(edit, &character) == 1;) {
      text += character == L'\r' ? L'\n' : character;
      if (text.ends_with(kPasteEnd)) {
        text.resize(text.size() - kPasteEnd.size());
        break;
      }
    }
    std::erase_if(text, is_control);
    while (text.ends_with(L'\n')) {
      text.pop_back();
    }
    return el_winsertstr(edit, text.c_str()) == 0 || text.empty() ? CC_REFRESH : CC_ERROR;
  }

  void bind(const wchar_t* keys, const wchar_t* function) { el_wset(edit_, EL_BIND, keys, function, nullptr); }

  std::string history_path_;
  HistoryW* history_;
  HistEventW event_ = {};
  std::wstring prompt_;
  LineInput end_ = LineInput::kEnd;  // why there is no line
  bool has_typed_ = false;           // since the prompt was shown
  EditLine* edit_;
};

bool LineReader::can_edit() { return true; }

#else

class LineReader::Editor {
 public:
  explicit Editor(const std::string&) {}
  LineInput read(const std::string&, std::string& line) { return read_line(line); }
  void remember(const std::string&) {}
};

bool LineReader::can_edit() { return false; }

#endif

LineReader::LineReader(std::string history_path) {
  if (!is_input_terminal() || !is_terminal(std::cout)) {
    return;
  }
  const bool edits = can_edit() && understands_escapes(std::cout) && use_utf8_locale();
  typing_ = std::make_unique<HeldTyping>(edits);
  if (edits) {
    editor_ = std::make_unique<Editor>(std::move(history_path));
  }
  typing_->hold();  // libedit has set the terminal for programs without libedit
}

LineReader::~LineReader() = default;

LineInput LineReader::read(const std::string& prompt, std::string& line) {
  if (typing_ == nullptr) {
    return read_line(line);
  }
  if (editor_ != nullptr) {
    std::cout.flush();
    const LineInput input = editor_->read(prompt, line);
    typing_->hold();
    return input;
  }
  typing_->release();
  std::cout << prompt << std::flush;
  const LineInput input = read_line(line);
  typing_->hold();
  if (input == LineInput::kInterrupted) {  // the system has shown ^C, and cleared the line if there was one
    std::cout << std::endl;
    return LineInput::kCleared;
  }
  return input;
}

void LineReader::remember(const std::string& text) {
  if (editor_ != nullptr) {
    editor_->remember(text);
  }
}

}  // namespace common
