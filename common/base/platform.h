// Calls to the operating system that the C++ library does not wrap; no other file differs between systems. Where a
// system lacks a call there is a fallback, which costs memory or a little speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <iosfwd>
#include <span>
#include <string>

namespace common {

// Whether `stream` is std::cout, std::cerr or std::clog and is connected to a terminal.
bool is_terminal(const std::ostream& stream);

// Whether `stream` is a terminal that understands escape sequences, that is, TERM is not "dumb".
bool understands_escapes(const std::ostream& stream);

// The same, and NO_COLOR is unset or empty (https://no-color.org).
bool use_color(const std::ostream& stream);

// Whether standard input is a terminal, whatever TERM says.
bool is_input_terminal();

// The size in characters of the terminal that the stream is connected to; 80 x 24 if the terminal does not say.
struct TerminalSize {
  int columns = 80;
  int rows = 24;
};
TerminalSize terminal_size(const std::ostream& stream);

// Arranges that `text` is written to standard output, which is a terminal, if Ctrl-C or another signal (SIGTERM,
// SIGHUP, SIGQUIT) ends the program: it undoes what the program has done to the terminal. The pointer must stay valid.
// Null cancels this. Not while HeldTyping lives, which does the same for those signals.
void write_on_interrupt(const char* text);

// Thrown to end work because of Ctrl-C.
class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted"; }
};

// While it lives, Ctrl-C (SIGINT) is only noted. Unless it is told that any number is, the third one that has not been
// cleared ends the program all the same (and what write_on_interrupt() and HeldTyping have arranged is done).
// A signal that was ignored from the start, as in a shell's background jobs, stays ignored. At most one object exists
// at a time.
class NoteInterrupts {
 public:
  explicit NoteInterrupts(bool any_number = false);
  ~NoteInterrupts();
  NoteInterrupts(const NoteInterrupts&) = delete;
  NoteInterrupts& operator=(const NoteInterrupts&) = delete;

  static bool is_noted();
  static void clear();
};

// Waits until standard input can be read, or has ended.
enum class InputWait {
  kReady,
  kInterrupted,  // Ctrl-C has been noted
  kChanged,      // while typing is held: the terminal has another size, or the program continues after Ctrl-Z
};
InputWait wait_for_input();

// While typing is held, the terminal that standard input is connected to does not show what is typed, which waits until
// it is read; Ctrl-C and Ctrl-Z work. For a line editor (`is_edited`), it is read character by character, and a paste
// is marked as such (bracketed paste): it comes between ESC [200~ and ESC [201~. The destructor, and a signal that ends
// the program, restore the terminal. Without a terminal nothing happens. At most one object exists at a time.
class HeldTyping {
 public:
  explicit HeldTyping(bool is_edited);
  ~HeldTyping();
  HeldTyping(const HeldTyping&) = delete;
  HeldTyping& operator=(const HeldTyping&) = delete;

  void hold();     // the constructor does it too
  void release();  // the terminal shows, and lets edit, a line as it did before

 private:
  bool is_edited_;
};

// Makes the C library take characters for UTF-8, whatever the environment says of languages. Returns whether it does.
// Not to be called while other threads run that depend on the locale.
bool use_utf8_locale();

// Reads a line of standard input, and removes its line end, which the last line may lack. Nothing else may read
// standard input.
enum class LineInput {
  kLine,
  kEnd,          // there are no more lines
  kInterrupted,  // Ctrl-C has been noted; what was typed before it is lost
  kCleared,      // a line editor alone can tell: the same, and something had been typed
};
LineInput read_line(std::string& line);

// Whether the driver of an NVIDIA GPU is there, whatever a program may do with it.
bool has_gpu_driver();

// The peak resident memory of this process, in bytes; 0 where the system does not report it.
std::int64_t peak_resident_bytes();

// The memory that this program can still take, in bytes, within the limit of its addresses (ulimit -v) if it has one; 0
// where the system does not report it.
std::int64_t available_memory_bytes();

// From here on, the program keeps up to 256 MB of freed memory. A step frees matrices of some megabytes and the next
// one needs them again; fetching them from the system page by page took a tenth of a prompt's time.
void keep_freed_memory();

// Threads that start from now on allocate from one heap. With a heap for each thread, release_freed_memory() can't give
// back the heaps' ends, and after a burst of clients these were hundreds of megabytes. Small blocks, which most are,
// have a cache for each thread all the same.
void use_one_heap();

// Gives the system back what the program keeps of freed memory.
void release_freed_memory();

// Memory from the system itself, zeros that no heap keeps; null if there is none. unmap_pages() takes what map_pages()
// gave, all of it.
void* map_pages(std::size_t bytes);
void unmap_pages(void* pages, std::size_t bytes);

// Requests pages of 2 MiB, which cause fewer TLB misses. `data` must be aligned to 2 MiB. The system may ignore it.
void advise_huge_pages(void* data, std::size_t bytes);

// A file in memory, read-only. It is mapped where the system can do so: a page is read when it is first touched, and
// the system may drop it at any time, because it can be read again. If another program truncates the file while it is
// mapped, touching the missing part ends this program with SIGBUS.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);  // throws InputError; the message begins with the path
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  bool is_open() const { return address_ != nullptr; }  // false for an empty file too
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(address_), size_}; }

 private:
  void* address_ = nullptr;
  std::size_t size_ = 0;
};

// Drops from memory the pages that lie entirely inside `data`, a part of a MappedFile. Touching one reads it again.
void drop_pages(std::span<const std::byte> data);

}  // namespace common
