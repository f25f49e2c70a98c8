#include "common/base/platform.h"

#if defined(__unix__) || defined(__APPLE__)
#define COURSE_POSIX 1
#include <fcntl.h>
#include <langinfo.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>
#endif
#ifdef __linux__
#include <malloc.h>
#endif

#include <algorithm>
#include <array>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/base/check.h"

namespace common {

bool understands_escapes(const std::ostream& stream) {
  const char* const terminal = std::getenv("TERM");
  const bool is_dumb = terminal != nullptr && std::string_view(terminal) == "dumb";
  return !is_dumb && is_terminal(stream);
}

bool use_color(const std::ostream& stream) {
  const char* const no_color = std::getenv("NO_COLOR");
  const bool unwanted = no_color != nullptr && *no_color != '\0';
  return !unwanted && understands_escapes(stream);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}

#ifdef COURSE_POSIX

namespace {

struct FileDescriptor {
  explicit FileDescriptor(int descriptor) : value(descriptor) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (value >= 0) {
      ::close(value);
    }
  }
  int value;
};

[[noreturn]] void fail_with_errno(const std::string& path, const char* action) {
  throw InputError(path + ": cannot " + action + ": " + std::generic_category().message(errno));
}

}  // namespace

bool is_terminal(const std::ostream& stream) {
  if (&stream == &std::cout) {
    return ::isatty(STDOUT_FILENO) == 1;
  }
  return (&stream == &std::cerr || &stream == &std::clog) && ::isatty(STDERR_FILENO) == 1;
}

bool is_input_terminal() { return ::isatty(STDIN_FILENO) == 1; }

TerminalSize terminal_size(const std::ostream& stream) {
  winsize size{};
  TerminalSize result;
  if (is_terminal(stream) && ::ioctl(&stream == &std::cout ? STDOUT_FILENO : STDERR_FILENO, TIOCGWINSZ, &size) == 0 &&
      size.ws_col > 0 && size.ws_row > 0) {
    result = {size.ws_col, size.ws_row};
  }
  return result;
}

namespace {

const char* volatile text_on_interrupt = nullptr;

// What HeldTyping has changed: the settings before, valid while is_held.
termios settings_before = {};
volatile std::sig_atomic_t is_held = 0;
volatile std::sig_atomic_t are_pastes_marked = 0;
constexpr std::string_view kMarkPastes = "\033[?2004h";
constexpr std::string_view kMarkNoPastes = "\033[?2004l";

void write_escape(std::string_view text) {
  [[maybe_unused]] const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
}

// Calls only functions that a signal handler may call.
void restore_terminal() {
  if (are_pastes_marked != 0) {
    write_escape(kMarkNoPastes);
  }
  if (is_held != 0) {
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &settings_before);
  }
}

extern "C" void write_and_end(int number) {
  if (const char* const text = text_on_interrupt; text != nullptr) {
    [[maybe_unused]] const ssize_t written = ::write(STDOUT_FILENO, text, std::strlen(text));
  }
  restore_terminal();
  ::signal(number, SIG_DFL);
  ::raise(number);
}

volatile std::sig_atomic_t are_interrupts_noted = 0;

}  // namespace

void write_on_interrupt(const char* text) {
  text_on_interrupt = text;
  if (are_interrupts_noted == 0) {
    ::signal(SIGINT, text != nullptr ? write_and_end : SIG_DFL);
  }
  for (const int number : {SIGTERM, SIGHUP, SIGQUIT}) {
    if (::signal(number, text != nullptr ? write_and_end : SIG_DFL) == SIG_IGN) {
      ::signal(number, SIG_IGN);
    }
  }
}

namespace {

volatile std::sig_atomic_t num_interrupts = 0;
volatile std::sig_atomic_t is_any_number_noted = 0;
std::array<int, 2> interrupt_pipe = {-1, -1};  // a byte for each interrupt, so that waiting for input ends
void (*handler_before)(int) = SIG_DFL;

extern "C" void note_interrupt(int number) {
  const int error = errno;
  constexpr int kEnough = 3;  // a count that does not grow further
  num_interrupts = num_interrupts < kEnough ? num_interrupts + 1 : kEnough;
  if (num_interrupts == kEnough && is_any_number_noted == 0) {
    write_and_end(number);
  }
  [[maybe_unused]] const ssize_t written = ::write(interrupt_pipe[1], "", 1);
  errno = error;
}

volatile std::sig_atomic_t has_terminal_changed = 0;

extern "C" void note_change(int) {
  const int error = errno;
  has_terminal_changed = 1;
  [[maybe_unused]] const ssize_t written = ::write(interrupt_pipe[1], "", 1);
  errno = error;
}

void drain_interrupt_pipe() {
  std::array<char, 16> bytes = {};
  while (::read(interrupt_pipe[0], bytes.data(), bytes.size()) > 0) {
  }
}

// Input that has been read but not yet returned as a line.
std::string& input_ahead() {
  static std::string text;
  return text;
}

// Removes the first line from the input ahead. is_end: the last line may lack its line end.
bool take_line(std::string& line, bool is_end) {
  std::string& ahead = input_ahead();
  const std::size_t end = ahead.find('\n');
  if (end == std::string::npos && (!is_end || ahead.empty())) {
    return false;
  }
  line = ahead.substr(0, end);
  ahead.erase(0, end == std::string::npos ? end : end + 1);
  return true;
}

}  // namespace

NoteInterrupts::NoteInterrupts(bool any_number) {
  clear();
  is_any_number_noted = any_number ? 1 : 0;
  if (::pipe(interrupt_pipe.data()) == 0) {
    for (const int end : interrupt_pipe) {
      ::fcntl(end, F_SETFL, O_NONBLOCK);
      ::fcntl(end, F_SETFD, FD_CLOEXEC);
    }
  }
  are_interrupts_noted = 1;
  handler_before = ::signal(SIGINT, note_interrupt);
  if (handler_before == SIG_IGN) {
    ::signal(SIGINT, SIG_IGN);
  }
}

NoteInterrupts::~NoteInterrupts() {
  are_interrupts_noted = 0;
  ::signal(SIGINT, handler_before);
  for (int& end : interrupt_pipe) {
    ::close(end);
    end = -1;
  }
}

bool NoteInterrupts::is_noted() { return num_interrupts > 0; }

void NoteInterrupts::clear() {
  drain_interrupt_pipe();
  num_interrupts = 0;
}

InputWait wait_for_input() {
  while (true) {
    std::array<pollfd, 2> ends = {pollfd{STDIN_FILENO, POLLIN, 0}, pollfd{interrupt_pipe[0], POLLIN, 0}};
    const bool is_broken_off = ::poll(ends.data(), ends.size(), -1) < 0 && errno == EINTR;
    if (NoteInterrupts::is_noted()) {
      return InputWait::kInterrupted;
    }
    if (has_terminal_changed != 0) {
      has_terminal_changed = 0;
      drain_interrupt_pipe();
      if (are_pastes_marked != 0) {
        write_escape(kMarkPastes);  // after Ctrl-Z, a shell has switched it off
      }
      return InputWait::kChanged;
    }
    if (!is_broken_off) {
      return InputWait::kReady;
    }
  }
}

HeldTyping::HeldTyping(bool is_edited) : is_edited_(is_edited) {
  if (!is_input_terminal() || ::tcgetattr(STDIN_FILENO, &settings_before) != 0) {
    return;
  }
  is_held = 1;
  for (const int number : {SIGTERM, SIGHUP, SIGQUIT}) {
    if (::signal(number, write_and_end) == SIG_IGN) {
      ::signal(number, SIG_IGN);
    }
  }
  ::signal(SIGWINCH, note_change);
  ::signal(SIGCONT, note_change);
  if (is_edited) {
    are_pastes_marked = 1;
    write_escape(kMarkPastes);
  }
  hold();
}

HeldTyping::~HeldTyping() {
  if (is_held == 0) {
    return;
  }
  restore_terminal();
  is_held = 0;
  are_pastes_marked = 0;
  for (const int number : {SIGTERM, SIGHUP, SIGQUIT, SIGWINCH, SIGCONT}) {
    ::signal(number, SIG_DFL);
  }
}

void HeldTyping::hold() {
  if (is_held != 0) {
    termios settings = settings_before;
    settings.c_lflag &= ~static_cast<tcflag_t>(ECHO);
    if (is_edited_) {  // without an editor, the system goes on gathering lines, and Ctrl-D stays the input's end
      settings.c_lflag &= ~static_cast<tcflag_t>(ICANON);
      settings.c_cc[VMIN] = 1;
      settings.c_cc[VTIME] = 0;
    }
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &settings);
  }
}

void HeldTyping::release() {
  if (is_held != 0) {
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &settings_before);
  }
}

bool use_utf8_locale() {
  for (const char* const name : {"", "C.UTF-8", "en_US.UTF-8", "UTF-8"}) {
    if (std::setlocale(LC_CTYPE, name) != nullptr && std::string_view(::nl_langinfo(CODESET)) == "UTF-8") {
      return true;
    }
  }
  return false;
}

LineInput read_line(std::string& line) {
  while (true) {
    if (take_line(line, false)) {
      return LineInput::kLine;
    }
    const InputWait wait = wait_for_input();
    if (wait == InputWait::kInterrupted) {
      return LineInput::kInterrupted;
    }
    if (wait == InputWait::kChanged) {
      continue;
    }
    std::array<char, 4096> bytes = {};
    const ssize_t count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      return take_line(line, true) ? LineInput::kLine : LineInput::kEnd;
    }
    input_ahead().append(bytes.data(), static_cast<std::size_t>(count));
  }
}

bool has_gpu_driver() {
  std::error_code ignored;
  // Of Linux, and of Linux under Windows.
  return std::filesystem::exists("/dev/nvidiactl", ignored) || std::filesystem::exists("/dev/dxg", ignored);
}

std::int64_t peak_resident_bytes() {
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) {
    return 0;
  }
#ifdef __APPLE__
  return usage.ru_maxrss;  // bytes there, kibibytes elsewhere
#else
  return std::int64_t{usage.ru_maxrss} * 1024;
#endif
}

std::int64_t available_memory_bytes() {
  std::int64_t available = 0;
#ifdef __linux__
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::int64_t kibibytes = 0;
  std::string unit;
  while (available == 0 && file >> name >> kibibytes) {
    if (name == "MemAvailable:") {
      available = kibibytes * 1024;
    }
    std::getline(file, unit);
  }
  rlimit limit = {};
  std::int64_t pages = 0;  // of the program's addresses, which `ulimit -v` limits
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      std::ifstream("/proc/self/statm") >> pages) {
    const std::int64_t rest = static_cast<std::int64_t>(limit.rlim_cur) - pages * ::sysconf(_SC_PAGESIZE);
    available = std::min(available, std::max<std::int64_t>(rest, 0));
  }
#endif
  return available;
}

void keep_freed_memory() {
#ifdef __GLIBC__
  constexpr int kLargestThreshold = 32 << 20;  // more is refused
  (void)::mallopt(M_MMAP_THRESHOLD, kLargestThreshold);
  (void)::mallopt(M_TRIM_THRESHOLD, 8 * kLargestThreshold);
#endif
}

void use_one_heap() {
#ifdef __GLIBC__
  (void)::mallopt(M_ARENA_MAX, 1);
#endif
}

void release_freed_memory() {
#ifdef __GLIBC__
  (void)::malloc_trim(0);
#endif
}

void* map_pages(std::size_t bytes) {
  void* const pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

void unmap_pages(void* pages, std::size_t bytes) { ::munmap(pages, bytes); }

void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  (void)::madvise(data, bytes, MADV_HUGEPAGE);
#endif
}

MappedFile::MappedFile(const std::string& path) {
  // Without O_NONBLOCK, opening a named pipe blocks until there is a writer.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.value < 0) {
    fail_with_errno(path, "open");
  }
  struct stat status {};
  if (::fstat(file.value, &status) != 0) {
    fail_with_errno(path, "read");
  }
  if (!S_ISREG(status.st_mode)) {
    throw InputError(path + ": it is " + (S_ISDIR(status.st_mode) ? "a directory" : "not a regular file"));
  }
  if (status.st_size == 0) {
    return;  // an empty range cannot be mapped
  }
  size_ = static_cast<std::size_t>(status.st_size);
  void* const address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (address == MAP_FAILED) {
    fail_with_errno(path, "map");
  }
  address_ = address;
}

MappedFile::~MappedFile() {
  if (address_ != nullptr) {
    ::munmap(address_, size_);
  }
}

void drop_pages(std::span<const std::byte> data) {
  const auto page_size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(data.data());
  const std::uintptr_t first_page = (begin + page_size - 1) / page_size * page_size;
  const std::uintptr_t end_page = (begin + data.size()) / page_size * page_size;
  if (first_page < end_page) {
    // Only a hint: if the system ignores it, the pages stay in memory.
    (void)::madvise(const_cast<std::byte*>(data.data()) + (first_page - begin), end_page - first_page, MADV_DONTNEED);
  }
}

#else

bool is_terminal(const std::ostream&) { return false; }
bool is_input_terminal() { return false; }
TerminalSize terminal_size(const std::ostream&) { return {}; }
void write_on_interrupt(const char*) {}

NoteInterrupts::NoteInterrupts(bool) {}
NoteInterrupts::~NoteInterrupts() = default;
bool NoteInterrupts::is_noted() { return false; }
void NoteInterrupts::clear() {}

InputWait wait_for_input() { return InputWait::kReady; }
HeldTyping::HeldTyping(bool) {}
HeldTyping::~HeldTyping() = default;
void HeldTyping::hold() {}
void HeldTyping::release() {}
bool use_utf8_locale() { return false; }
bool has_gpu_driver() { return false; }

LineInput read_line(std::string& line) { return std::getline(std::cin, line) ? LineInput::kLine : LineInput::kEnd; }

std::int64_t peak_resident_bytes() { return 0; }

void keep_freed_memory() {}

void use_one_heap() {}

void release_freed_memory() {}

void* map_pages(std::size_t bytes) { return std::calloc(bytes, 1); }

void unmap_pages(void* pages, std::size_t) { std::free(pages); }

void advise_huge_pages(void*, std::size_t) {}

// Reads the file instead.
MappedFile::MappedFile(const std::string& path) {
  if (std::filesystem::exists(path) && !std::filesystem::is_regular_file(path)) {
    throw InputError(path + ": it is " + (std::filesystem::is_directory(path) ? "a directory" : "not a regular file"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw InputError(path + ": cannot open");
  }
  size_ = static_cast<std::size_t>(std::filesystem::file_size(path));
  if (size_ == 0) {
    return;
  }
  address_ = ::operator new(size_);
  if (!file.read(static_cast<char*>(address_), static_cast<std::streamsize>(size_))) {
    ::operator delete(std::exchange(address_, nullptr));
    throw InputError(path + ": cannot read");
  }
}

MappedFile::~MappedFile() { ::operator delete(address_); }

void drop_pages(std::span<const std::byte>) {}

#endif

}  // namespace common
