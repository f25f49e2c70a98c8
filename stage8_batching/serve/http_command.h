// `serve --http`: the server on a network address, until it is told to end.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "common/app/cli.h"
#include "demo_pool.h"
#include "engine_thread.h"
#include "http_server.h"
#include "setup.h"

namespace stage8 {

struct HttpCommandOptions {
  std::optional<std::string> address;  // empty: no HTTP
  std::string api_key;
  HttpOptions http;
  int timeout_seconds = 5;
  int max_queue = 512;
  bool paused = false;
  bool pool_controls = false;
  AddDemoCommands add_demo_commands;
};

// Adds the options of the command `serve` that go with --http.
void add_http_options(common::Command& command, HttpCommandOptions& options);

// Serves until SIGTERM or SIGINT, then ends the requests that have come, and returns. A second signal ends at once.
void run_http(const ServedModel& model, const EngineOptions& engine, const SchedulerOptions& scheduler,
              const HttpCommandOptions& options);

}  // namespace
