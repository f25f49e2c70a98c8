#include "common/serving/trace.h"

#include <cerrno>
#include <cstddef>
#include <ios>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/app/result_file.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

using Json = nlohmann::ordered_json;

// Lane 0 is for the steps.
int lane_of(int id) { return id + 1; }

// The format counts in microseconds.
double microseconds(double seconds) { return 1e6 * seconds; }

Json event(const char* phase, const std::string& name, int lane, double time) {
  return {{"ph", phase}, {"name", name}, {"pid", 0}, {"tid", lane}, {"ts", microseconds(time)}};
}

Json span(const std::string& name, int lane, double begin, double end) {
  Json result = event("X", name, lane, begin);
  result["dur"] = microseconds(end - begin);
  return result;
}

Json lane_name(int lane, const std::string& name) {
  Json result = event("M", "thread_name", lane, 0.0);
  result["args"] = {{"name", name}};
  return result;
}

}  // namespace

TraceWriter::TraceWriter(const std::string& path) : path_(path), file_(path), can_seek_(file_.tellp() >= 0) {
  if (!file_) {
    throw InputError(write_failure(path, {errno, std::generic_category()}));
  }
  waiting_ = "[\n";
  name_lane(0, "steps");
  flush(false);
}

void TraceWriter::add(const StepReport& report) {
  for (const std::vector<int>* const ids : {&report.admitted, &report.served}) {
    for (const int id : *ids) {
      name_lane(lane_of(id), format("request %d", id));
    }
  }
  Json step = span(format("step %lld", static_cast<long long>(report.index)), 0, report.begin, report.end);
  step["args"] = {{"tokens", report.num_tokens}, {"padded_tokens", report.padded_tokens()}};
  write(step.dump());
  for (std::size_t i = 0; i < report.served.size(); ++i) {
    write(span(format("%d tokens", report.num_served[i]), lane_of(report.served[i]), report.begin, report.end).dump());
  }
  const auto mark = [&](const std::vector<int>& ids, const char* name) {
    for (const int id : ids) {
      Json instant = event("i", name, lane_of(id), report.begin);
      instant["s"] = "t";
      write(instant.dump());
    }
  };
  mark(report.admitted, "admitted");
  mark(report.swapped_out, "swapped out");
  mark(report.recomputed, "preempted, to be recomputed");
  const auto count = [&](const char* name, const Json& values) {
    Json counter = event("C", name, 0, report.end);
    counter["args"] = values;
    write(counter.dump());
  };
  count("requests", {{"running", report.num_running}, {"waiting", report.num_waiting}});
  count("slots", {{"used", report.usage.used},
                  {"unused in blocks", report.usage.reserved - report.usage.used},
                  {"cached", report.usage.cached}});
  flush(false);
}

void TraceWriter::finish(std::span<const RequestResult> results) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto id = static_cast<int>(i);
    const RequestResult& result = results[i];
    name_lane(lane_of(id), format("request %d", id));  // a rejected request has taken part in no step
    if (result.admission > result.arrival) {
      write(span("waits", lane_of(id), result.arrival, result.admission).dump());
    }
  }
  flush(true);
  file_.close();
  if (!file_) {
    throw InputError("can't write to '" + path_ + "'");
  }
}

void TraceWriter::name_lane(int lane, const std::string& name) {
  if (named_.insert(lane).second) {
    write(lane_name(lane, name).dump());
  }
}

void TraceWriter::write(const std::string& event) {
  waiting_ += (is_first_ ? "" : ",\n") + event;
  is_first_ = false;
}

// One write for events and end: between two writes the file is whole.
void TraceWriter::flush(bool is_last) {
  constexpr std::string_view kEnd = "\n]\n";
  if (can_seek_ || is_last) {
    waiting_ += kEnd;
  }
  file_ << waiting_ << std::flush;
  waiting_.clear();
  if (can_seek_ && !is_last) {
    file_.seekp(-static_cast<std::streamoff>(kEnd.size()), std::ios::cur);
  }
}

}  // namespace common
