// Writes the run in Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open: a lane for each
// request, one for the steps, and counters for queue, batch and blocks.
#pragma once

#include <fstream>
#include <span>
#include <string>

#include "common/serving/served_engine.h"

namespace common {

class TraceWriter {
 public:
  // Throws InputError if the file can't be written.
  explicit TraceWriter(const std::string& path);

  void add(const StepReport& report);
  // To be called once, after the last step, with the results by id: writes the lanes' names and how long each request
  // waited. Throws InputError if the file can't be written.
  void finish(std::span<const RequestResult> results);

 private:
  void write(const std::string& event);

  std::string path_;
  std::ofstream file_;
  bool is_first_ = true;
};

}  // namespace common
