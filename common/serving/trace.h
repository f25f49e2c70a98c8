// Writes the run in Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open: a lane for each
// request, one for the steps, and counters for queue, batch and blocks.
#pragma once

#include <fstream>
#include <set>
#include <span>
#include <string>

#include "common/serving/served_engine.h"

namespace common {

class TraceWriter {
 public:
  // Throws InputError if the file can't be written.
  explicit TraceWriter(const std::string& path);

  // Writes the step's events, and before them the names of lanes that are new. Afterwards the file is complete,
  // whatever happens to the program then: the list's end is written too, and overwritten by the next step. (Into a
  // pipe, the end comes with finish().)
  void add(const StepReport& report);
  // To be called once, after the last step, with the results by id: writes how long each request waited. Throws
  // InputError if the file can't be written.
  void finish(std::span<const RequestResult> results);

 private:
  void name_lane(int lane, const std::string& name);
  void write(const std::string& event);
  void flush(bool is_last);

  std::string path_;
  std::ofstream file_;
  bool can_seek_;
  std::set<int> named_;  // lanes
  bool is_first_ = true;
  std::string waiting_;  // events, to be written at once
};

}  // namespace common
