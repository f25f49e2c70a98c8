// The run as a picture: Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open. A lane a request,
// one for the steps, and counters for queue, batch and blocks.
#pragma once

#include <fstream>
#include <string>

#include "../server.h"

namespace stage8 {

class TraceWriter {
 public:
  // Throws InputError if the file can't be written.
  explicit TraceWriter(const std::string& path);

  void add(const StepReport& report);
  // Once, after the last step: the lanes' names, and how each request went. Throws InputError if the disk is full.
  void finish(const Server& server);

 private:
  void write(const std::string& event);

  std::string path_;
  std::ofstream file_;
  bool is_first_ = true;
};

}  // namespace
