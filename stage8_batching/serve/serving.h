// The command `serve`: requests that arrive while others run, with live view, trace and measurements.
#pragma once

#include <string>
#include <vector>

#include "../engine.h"
#include "../scheduler.h"
#include "arrivals.h"
#include "common/app/cli.h"
#include "http_command.h"
#include "view.h"

namespace stage8 {

struct ServingOptions {
  EngineOptions engine{.num_slots = std::nullopt};
  SchedulerOptions scheduler;
  std::string arrivals;  // "poisson:RATE", a file, or empty: all at once
  std::string workload;  // "offline", or empty: prompts or arrivals
  int num_requests = 0;  // 0: one per prompt
  int num_samples = 1;
  int num_beams = 0;
  std::string synthetic;  // random weights of this shape; empty: the session's model
  bool virtual_clock = false;
  ViewKind view = ViewKind::kAuto;
  int shown_step = -1;  // whose batch is printed; negative: none
  std::string trace_path;
  std::string json_path;
  HttpCommandOptions http;
};

// `options` must live as long as `program`.
common::Command& add_serve_command(common::Program& program, ServingOptions& options);

}  // namespace
