// `serve --http`: the server on a network address, until a signal ends it.
#pragma once

#include <optional>
#include <string>

#include "common/app/cli.h"
#include "common/serving/demo_pool.h"
#include "common/serving/engine_thread.h"
#include "common/serving/http_server.h"
#include "common/serving/served_engine.h"
#include "common/serving/served_model.h"

namespace common {

struct HttpCommandOptions {
  std::optional<std::string> address;  // empty: no HTTP
  std::string api_key;
  HttpOptions http;
  int timeout_seconds = 5;
  int max_queue = 512;
  bool paused = false;
  bool pool_controls = false;
  MakeDemoPool make_demo_pool;
};

// Adds the options of the command `serve` that go with --http.
void add_http_options(Command& command, HttpCommandOptions& options);

// Serves until SIGTERM or SIGINT, then completes the requests that have arrived, and returns. A second signal ends it
// at once.
void run_http(const ServedModel& model, const MakeEngine& make_engine, const HttpCommandOptions& options);

}  // namespace common
