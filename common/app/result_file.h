// A file for the result of a long run.
#pragma once

#include <string>
#include <system_error>

namespace common {

// "can't write to 'PATH': No space left on device"
std::string write_failure(const std::string& path, const std::error_code& reason);

// path: a file, "-" for standard output, or empty for no result. It is checked at once, so that a wrong path is noticed
// before the run and not after it. Until write(), a file keeps its old content, and a new one does not exist.
class ResultFile {
 public:
  // Throws InputError if the file cannot be opened for writing.
  explicit ResultFile(std::string path);

  bool is_wanted() const { return !path_.empty(); }
  bool is_stdout() const { return path_ == "-"; }

  // Replaces the file. Throws InputError if that fails.
  void write(const std::string& text) const;

 private:
  std::string path_;
};

}  // namespace common
