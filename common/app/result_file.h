// Where the result of a long run is written at its end.
#pragma once

#include <string>

namespace common {

// path: a file, "-" for standard output, or empty if nobody asks for the result. Checked at once, so that a wrong path
// does not cost the run; what was in the file stays until there is something to write in its place.
class ResultFile {
 public:
  // Throws InputError if the file can't be written to.
  explicit ResultFile(std::string path);

  bool is_wanted() const { return !path_.empty(); }
  bool is_stdout() const { return path_ == "-"; }

  // Throws InputError if it can't be written.
  void write(const std::string& text) const;

 private:
  std::string path_;
};

}  // namespace common
