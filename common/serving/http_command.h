// `serve --http`: the server on a network address, until a signal ends it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/app/cli.h"
#include "common/serving/demo_pool.h"
#include "common/serving/engine_thread.h"
#include "common/serving/http_server.h"
#include "common/serving/prometheus.h"
#include "common/serving/served_engine.h"
#include "common/serving/served_model.h"

namespace common {

struct HttpCommandOptions {
  std::optional<std::string> address;  // empty: no HTTP
  std::optional<std::string> api_key;
  std::string api_key_file;
  std::string served_model_name;          // empty: the model's own
  std::string chat_format;                // as ChatOptions; empty: the model file's own
  std::vector<std::string> cors_origins;  // as ApiOptions
  bool quiet = false;                     // no line for each request
  HttpOptions http;
  int timeout_seconds = 5;
  int drain_notice = 0;              // seconds between a signal and the first refusal
  std::optional<int> drain_seconds;  // empty: as long as it takes
  bool streams_wait = false;         // as ApiOptions
  int max_queue = 512;
  std::optional<int> request_memory;  // MiB; empty: as MemoryAccount::of_this_machine
  bool paused = false;
  std::optional<bool> pool_controls;  // empty: on an address of this machine alone, without a key
  MakeDemoPool make_demo_pool;
};

// The environment variable with the API key, for when no option names one: it is not seen in a list of processes.
inline constexpr const char* kApiKeyVariable = "COURSE_API_KEY";

// The key that clients have to send, from --api-key, the file or the environment; empty: none is needed. Throws
// InputError if a key was meant and there is none, or if no client can send it.
std::string find_api_key(const HttpCommandOptions& options);

// Throws InputError unless it is "*" or an origin as browsers send it: "https://example.org", "http://localhost:3000".
void check_origin(const std::string& origin);

// The line that says that new requests are refused from now on, and what is still served. seconds: until that is ended;
// empty: it is served to its end.
std::string describe_drain(const ServerState& state, const std::optional<int>& seconds);

// Adds the options of the command `serve` that go with --http.
void add_http_options(Command& command, HttpCommandOptions& options);

// Begins to listen, so that a load balancer is told that the server is starting while a model is loaded. Throws
// InputError if the address can't be listened on, or if --paused is given where no client may end it.
std::unique_ptr<HttpServer> listen_http(const HttpCommandOptions& options);

// Serves until SIGTERM or SIGINT, and for --drain-notice seconds after it; then completes the requests that have
// arrived, and returns. --drain-seconds after the signal, requests that still run are ended with an error. A second
// signal ends the program at once. Before it serves, there is nothing to complete, and the first signal does.
void run_http(const ServedModel& model, const MakeEngine& make_engine, const HttpCommandOptions& options,
              std::unique_ptr<HttpServer> server);

}  // namespace common
