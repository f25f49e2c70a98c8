// What a terminal gets and a pipe does not: colour and a progress line.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "common/app/cli.h"
#include "common/app/notes.h"
#include "common/app/progress.h"
#include "common/base/machine.h"
#include "common/base/platform.h"
#include "common/model/default_model.h"
#include "common/model/gguf.h"
#include "tests/support/catch.h"

namespace {

void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Replaces stdout or stderr with a pseudo-terminal or a pipe, and collects what is written.
class Redirect {
 public:
  Redirect(int descriptor, bool terminal) : descriptor_(descriptor), saved_(dup(descriptor)) {
    int write_end = -1;
    if (terminal) {
      read_end_ = posix_openpt(O_RDWR | O_NOCTTY);
      if (read_end_ >= 0 && grantpt(read_end_) == 0 && unlockpt(read_end_) == 0) {
        write_end = open(ptsname(read_end_), O_RDWR | O_NOCTTY);
      }
    } else {
      std::array<int, 2> ends = {-1, -1};
      if (pipe(ends.data()) == 0) {
        read_end_ = ends[0];
        write_end = ends[1];
      }
    }
    ready_ = write_end >= 0 && fcntl(read_end_, F_SETFL, O_NONBLOCK) == 0 && dup2(write_end, descriptor_) >= 0;
    if (write_end >= 0) {
      close(write_end);
    }
  }
  ~Redirect() {
    dup2(saved_, descriptor_);
    close(saved_);
    if (read_end_ >= 0) {
      close(read_end_);
    }
  }
  Redirect(const Redirect&) = delete;
  Redirect& operator=(const Redirect&) = delete;

  bool ready() const { return ready_; }

  // What was written since the last call.
  std::string written() const {
    std::string text;
    std::array<char, 4096> buffer = {};
    for (auto n = read(read_end_, buffer.data(), buffer.size()); n > 0; n = read(read_end_, buffer.data(), 4096)) {
      text.append(buffer.data(), static_cast<std::size_t>(n));
    }
    return text;
  }

 private:
  int descriptor_;
  int saved_;
  int read_end_ = -1;
  bool ready_ = false;
};

// Sets or unsets an environment variable, and restores it at the end.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* const before = std::getenv(name);
    was_set_ = before != nullptr;
    before_ = was_set_ ? before : "";
    set(value);
  }
  ~Variable() { set(was_set_ ? before_.c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) {
    if (value == nullptr) {
      unsetenv(name_);
    } else {
      setenv(name_, value, 1);
    }
  }
  const char* name_;
  bool was_set_ = false;
  std::string before_;
};

// use_color(stdout) and use_color(stderr) while the given descriptor is redirected.
std::pair<bool, bool> colors_with(int descriptor, bool terminal, const char* no_color, const char* kind = "xterm") {
  const Variable no_color_set("NO_COLOR", no_color);
  const Variable kind_set("TERM", kind);
  const Redirect redirect(descriptor, terminal);
  return {common::use_color(std::cout), common::use_color(std::cerr)};
}

bool have_terminals() { return Redirect(STDERR_FILENO, true).ready(); }

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) {
    ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("use_color: no color into a pipe or another stream") {
  CHECK_FALSE(colors_with(STDOUT_FILENO, false, nullptr).first);
  CHECK_FALSE(colors_with(STDERR_FILENO, false, nullptr).second);
  std::ostringstream text;
  CHECK_FALSE(common::use_color(text));
}

TEST_CASE("use_color: a terminal has color unless NO_COLOR says otherwise") {
  if (!have_terminals()) {
    SKIP_TEST("no pseudo-terminals here");
  }
  for (const char* value : {static_cast<const char*>(nullptr), ""}) {
    CHECK(colors_with(STDOUT_FILENO, true, value).first);
    CHECK(colors_with(STDERR_FILENO, true, value).second);
  }
  for (const char* value : {"1", "0", "false"}) {
    CHECK_FALSE(colors_with(STDOUT_FILENO, true, value).first);
    CHECK_FALSE(colors_with(STDERR_FILENO, true, value).second);
  }
  CHECK_FALSE(colors_with(STDOUT_FILENO, true, nullptr, "dumb").first);
}

TEST_CASE(
    "notes: that there is no GPU is remembered until the reason changes; with a driver it is a surprise each time") {
  const auto folder = std::filesystem::temp_directory_path() / ("course_notes_" + std::to_string(getpid()));
  const Variable state("XDG_STATE_HOME", folder.c_str());
  const std::string path = common::state_path("cpu_note");
  CHECK(path == (folder / "paged_attention_course" / "cpu_note").string());
  CHECK_FALSE(common::is_cpu_worth_a_note("no GPU", false, false, path));  // it would not be read
  CHECK(common::is_cpu_worth_a_note("no GPU", false, true, path));
  CHECK_FALSE(common::is_cpu_worth_a_note("no GPU", false, true, path));
  CHECK(common::is_cpu_worth_a_note("no CUDA", false, true, path));
  CHECK_FALSE(common::is_cpu_worth_a_note("no CUDA", false, true, path));
  for (const bool is_terminal : {false, true}) {
    CHECK(common::is_cpu_worth_a_note("an old driver", true, is_terminal, path));
    CHECK(common::is_cpu_worth_a_note("an old driver", true, is_terminal, path));
  }
  CHECK(common::is_cpu_worth_a_note("no GPU", false, true, ""));  // nowhere to remember it
  CHECK(common::is_cpu_worth_a_note("no GPU", false, true, "/dev/null/note"));
  std::filesystem::remove_all(folder);
}

TEST_CASE("notes: state is under XDG_STATE_HOME, if that is absolute, or else under the user's folder") {
  const Variable home("HOME", "/home/someone");
  for (const char* const relative : {static_cast<const char*>(nullptr), "", "state"}) {
    const Variable state("XDG_STATE_HOME", relative);
    CHECK(common::state_path("x") == "/home/someone/.local/state/paged_attention_course/x");
  }
  const Variable state("XDG_STATE_HOME", nullptr);
  const Variable no_home("HOME", nullptr);
  CHECK(common::state_path("x").empty());
}

TEST_CASE("progress: silent unless stderr is a terminal that understands escape sequences") {
  std::string into_pipe;
  std::string on_dumb_terminal;
  {
    const Variable kind_set("TERM", "xterm");
    const Redirect redirect(STDERR_FILENO, false);
    common::Progress progress("Reading", 10);
    sleep_ms(1050);
    progress.advance(5);
    into_pipe = redirect.written();
  }
  {
    const Variable kind_set("TERM", "dumb");
    const Redirect redirect(STDERR_FILENO, true);
    common::Progress progress("Reading", 10);
    sleep_ms(1050);
    progress.advance(5);
    on_dumb_terminal = redirect.written();
  }
  CHECK(into_pipe.empty());
  CHECK(on_dumb_terminal.empty());
}

TEST_CASE("progress: into a pipe, long work writes a line from time to time, with the remaining time") {
  using std::chrono::milliseconds;
  std::string early;
  std::string first;
  std::string next;
  {
    const Redirect redirect(STDERR_FILENO, false);
    common::Progress progress("Reading", 1000, {milliseconds(200), milliseconds(400)});
    progress.advance(100);
    early = redirect.written();
    sleep_ms(220);
    progress.advance(150);
    first = redirect.written();
    progress.advance(250);
    progress.clear();
    sleep_ms(420);
    progress.advance(0);
    next = redirect.written();
  }
  CHECK(early.empty());
  CHECK(first.starts_with("Reading: 250 of 1,000 (25.0 %), "));
  CHECK(first.ends_with(" s left\n"));
  CHECK(next.starts_with("Reading: 500 of 1,000 (50.0 %), "));
  CHECK(count_of(next, "\n") == 1);
}

TEST_CASE("bench: without --slots the cache is as large as the text needs, with a note; with --slots it is as given") {
  const common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  common::Session session{file.name(), common::Llama(file), common::Tokenizer(file), {}, {}};
  session.bench_tokens = 5000;
  int chosen = 0;
  int given = 0;
  std::string said;
  {
    const Redirect redirect(STDERR_FILENO, false);
    session.slots_given = true;
    given = session.bench_slots(64);
    session.slots_given = false;
    chosen = session.bench_slots(4096);
    said = redirect.written();
  }
  CHECK(given == 64);
  CHECK(chosen == 5000);
  CHECK(said == "note: a cache of 5,000 slots: what the text needs (--slots sets it)\n");
  session.bench_tokens = 576;
  CHECK(session.bench_slots(4096) == 4096);
}

TEST_CASE("progress: on a terminal, after a second, at most ten times a second, and erased at the end") {
  if (!have_terminals()) {
    SKIP_TEST("no pseudo-terminals here");
  }
  const double start = common::now_seconds();
  std::string early;
  std::string late;
  std::string cleared;
  std::string cleared_again;
  std::string unknown;
  std::string destroyed;
  double drawing_seconds = 0.0;
  {
    const Variable kind_set("TERM", "xterm");
    const Redirect redirect(STDERR_FILENO, true);
    common::Progress known("Reading", 3000);
    auto total_unknown = std::make_unique<common::Progress>("Counting", 0);
    while (common::now_seconds() - start < 0.9) {
      known.advance(0);
      sleep_ms(1);
    }
    early = redirect.written();
    sleep_ms(150);
    const double first_draw = common::now_seconds();
    known.advance(1500);
    while (common::now_seconds() - first_draw < 0.35) {
      known.advance(0);
      sleep_ms(1);
    }
    drawing_seconds = common::now_seconds() - first_draw;
    late = redirect.written();
    known.clear();
    cleared = redirect.written();
    known.clear();
    cleared_again = redirect.written();
    total_unknown->advance(1234);
    unknown = redirect.written();
    total_unknown.reset();
    destroyed = redirect.written();
  }
  const std::string wipe = "\r\033[K";
  const std::string line = wipe + "Reading: 1,500 of 3,000 (50.0 %)";
  CHECK(early.empty());
  CHECK(late.substr(0, line.size()) == line);
  CHECK(count_of(late, line) >= 2);
  CHECK(count_of(late, line) <= 1 + static_cast<int>(drawing_seconds / 0.1));
  CHECK(cleared == wipe);
  CHECK(cleared_again.empty());
  CHECK(unknown == wipe + "Counting: 1,234");
  CHECK(destroyed == wipe);
}
