// What the programs ask of the operating system beyond the C++ library: the one file that differs between systems.
// Where a system lacks a call there is a fallback, which costs memory or a little speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>

namespace common {

// Whether std::cout, std::cerr or std::clog is a terminal; false for every other stream.
bool is_terminal(const std::ostream& stream);

// True if `stream` is a terminal, not a dumb one, and NO_COLOR is unset or empty (https://no-color.org).
bool use_color(const std::ostream& stream);

// The most memory this process has had resident, in bytes; 0 where the system does not say.
std::int64_t peak_resident_bytes();

// Asks for pages of 2 MiB, which cost fewer address translations. `data` is aligned to one. Refusal is harmless.
void advise_huge_pages(void* data, std::size_t bytes);

// A file in memory, for reading. Mapped where the system can: pages come in when they are touched, and the system may
// drop them again at any time because they are on disk. A file that another program cuts short while it is mapped ends
// this one with SIGBUS.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);  // throws InputError that begins with the path
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  bool is_open() const { return address_ != nullptr; }  // false for an empty file too
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(address_), size_}; }

 private:
  void* address_ = nullptr;
  std::size_t size_ = 0;
};

// Gives back the whole pages inside `data`, which must lie in a MappedFile; they are read again when they are touched.
void drop_pages(std::span<const std::byte> data);

}  // namespace common
