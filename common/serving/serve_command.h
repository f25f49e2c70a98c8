// The command `serve`: requests that arrive while others run, with live view, trace and measurements.
#pragma once

#include <string>

#include "common/app/cli.h"
#include "common/serving/http_command.h"
#include "common/serving/served_engine.h"
#include "common/serving/view.h"

namespace common {

struct ServeOptions {
  std::string arrivals;  // "poisson:RATE", a file, or empty: all at once
  std::string workload;  // "offline", or empty: prompts or arrivals
  int num_requests = 0;  // 0: one for each prompt
  int num_samples = 1;
  int num_beams = 0;
  std::string synthetic;  // random weights of this shape; empty: the session's model
  bool virtual_clock = false;
  ViewKind view = ViewKind::kAuto;
  int shown_step = -1;  // the step whose batch is printed; negative: none
  std::string trace_path;
  std::string json_path;
  HttpCommandOptions http;
};

// `options` must live as long as `program`.
Command& add_serve_command(Program& program, ServeOptions& options, MakeEngineFor make_engine);

}  // namespace common
