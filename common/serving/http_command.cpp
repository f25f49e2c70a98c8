#include "common/serving/http_command.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/model/chat.h"
#include "common/serving/api.h"
#include "common/serving/pool_view.h"
#include "common/serving/request_log.h"

namespace common {
namespace {

volatile std::sig_atomic_t signal_received = 0;

extern "C" void note_signal(int number) {
  signal_received = number;
  for (const int ending : {SIGTERM, SIGINT}) {  // the second one ends the program
    std::signal(ending, SIG_DFL);
  }
}

// Whole lines, whichever thread writes them.
void print(const std::string& text) {
  static std::mutex output;
  const std::lock_guard lock(output);
  std::cout << text << std::flush;
}

void check_name(const std::string& name) {
  if (!std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c < '\x7F'; })) {
    throw InputError("the name is for ASCII characters");
  }
}

// Throws InputError unless a header can have the key.
void check_key(const std::string& key) {
  if (key.empty()) {
    throw InputError("the API key is empty");
  }
  if (!std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < '\x7F'; })) {
    throw InputError("an API key is one word of ASCII characters");
  }
}

std::string checked_key(const std::string& key, const std::string& source) {
  try {
    check_key(key);
  } catch (const InputError& error) {
    throw InputError(source + ": " + error.what());
  }
  return key;
}

// The file's only line.
std::string read_key(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string key;
  std::string rest;
  if (!std::getline(file, key)) {
    throw InputError(path + ": " +
                     (file.is_open() && file.eof()
                          ? "the file has no API key"
                          : "cannot read the API key: " + std::generic_category().message(errno)));
  }
  if (file >> rest) {
    throw InputError(path + ": the file has more than one line; an API key is one");
  }
  if (key.ends_with('\r')) {
    key.pop_back();
  }
  return key;
}

// Behind a proxy on this machine all clients come to a loopback address: a key is a sign of them. It is not read here:
// the file may be a pipe, which has it once.
bool has_pool_controls(const HttpCommandOptions& options, const HttpServer& server) {
  const bool has_key =
      options.api_key.has_value() || !options.api_key_file.empty() || std::getenv(kApiKeyVariable) != nullptr;
  return options.pool_controls.value_or(server.is_on_loopback() && !has_key);
}

// Throws InputError if a template was chosen that does not fit the model.
void check_chats(const ServedModel& model, const std::string& chat_format) {
  const std::string problem = chat_format.empty() ? "" : chat_problem(model, chat_format);
  if (!problem.empty()) {
    throw InputError("--chat-template " + chat_format + ": " + problem);
  }
}

// What chats are made of. A model that has none for its own template's sake is noted.
std::string describe_chats(const ServedModel& model, const std::string& chat_format) {
  if (const std::string problem = chat_problem(model, chat_format); !problem.empty()) {
    std::cerr << "note: chats are refused: " << problem << '\n';
    return "no chats";
  }
  const std::string format = common::chat_format(*model.session().file, {chat_format});
  return format == "none" ? "chats without a template" : "chats by the template " + format;
}

}  // namespace

std::string describe_drain(const ServerState& state, const std::optional<int>& seconds) {
  const int running = state.status.num_running;
  const int waiting = state.num_waiting();
  if (running + waiting == 0) {
    return "draining: no request runs\n";
  }
  std::string text = format("draining: %d request%s", running, running == 1 ? " runs" : "s run");
  if (waiting > 0) {
    text += format(", %d wait%s", waiting, waiting == 1 ? "s" : "");
  }
  text += seconds.has_value() ? format("; the server ends at the latest in %d s", *seconds) : "";
  return text + (running + waiting == 1 ? "; a second Ctrl-C ends it\n" : "; a second Ctrl-C ends them\n");
}

std::string find_api_key(const HttpCommandOptions& options) {
  if (options.api_key.has_value()) {
    return *options.api_key;
  }
  if (!options.api_key_file.empty()) {
    return checked_key(read_key(options.api_key_file), options.api_key_file);
  }
  const char* const value = std::getenv(kApiKeyVariable);
  return value == nullptr ? "" : checked_key(value, kApiKeyVariable);
}

void check_origin(const std::string& origin) {
  const std::size_t scheme = origin.find("://");
  const bool is_web = origin.starts_with("http://") || origin.starts_with("https://");
  const std::string host = scheme == std::string::npos ? "" : origin.substr(scheme + 3);
  const bool is_host = !host.empty() && std::all_of(host.begin(), host.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
           std::string_view(".-:[]").find(c) != std::string_view::npos;
  });
  if (origin != "*" && !(is_web && is_host)) {
    throw InputError("an origin is https://example.org or http://localhost:3000, in lower case, or '*' for all, not " +
                     quote(origin));
  }
}

void add_http_options(Command& command, HttpCommandOptions& options) {
  command.option("--http", options.address,
                 "serve on this address, as 127.0.0.1:8080: an OpenAI-compatible API, and a page that shows the pool",
                 parse_address);
  command.option("--api-key", options.api_key,
                 "with --http: a key that clients have to send (default: that of the environment's COURSE_API_KEY)",
                 check_key);
  command.file("--api-key-file", options.api_key_file, "with --http: a file whose only line is that key");
  command.option("--served-model-name", options.served_model_name,
                 "with --http: what clients call the model (default: the file's name)", check_name);
  command.option("--chat-template", options.chat_format,
                 "with --http: chatml, qwen3, llama2, llama3, gemma or none, in place of the model's own template",
                 check_chat_format);
  command.option("--cors", options.cors_origins,
                 "with --http: let pages of this origin use the API, as https://example.org, or '*' for all; may be "
                 "repeated",
                 check_origin);
  command.flag("--quiet", options.quiet, "with --http: no line for each request");
  command.option(
      "--drain-notice", options.drain_notice, {0, 3600},
      "with --http: after SIGTERM or Ctrl-C, seconds in which /health says that the server drains, but requests "
      "are still taken: a load balancer needs that long to see it");
  command.option("--drain-seconds", options.drain_seconds, {0, 1 << 20},
                 "with --http: after SIGTERM or Ctrl-C, seconds for the requests that have come to end (default: as "
                 "long as they take)");
  command.flag("--streams-wait", options.streams_wait,
               "with --http: begin a stream with its first token; until then a load balancer may ask another server");
  command.option("--max-queue", options.max_queue, {1, 1 << 20}, "with --http: max requests that wait");
  command.option("--request-memory", options.request_memory, {16, 1 << 20},
                 "with --http: MiB that all requests and their replies may take, half of it one (default: an eighth of "
                 "what is free)");
  command.option("--max-connections", options.http.max_connections, {1, 1 << 14},
                 "with --http: max connections served at once");
  command.option("--client-timeout", options.timeout_seconds, {1, 3600},
                 "with --http: seconds for a client to send the next part of its request (for the whole: four times as "
                 "long), or to read what is sent");
  command.flag_pair(
      "pool-controls", options.pool_controls,
      "with --http: let clients, as the page's scenes, pause the pool, step it and make it anew (default: "
      "on an address of this machine alone, without an API key)");
  command.flag("--paused", options.paused, "with --http: begin without computing, until the page says so");
  for (const char* const name :
       {"--api-key", "--api-key-file", "--served-model-name", "--chat-template", "--cors", "--quiet", "--drain-notice",
        "--drain-seconds", "--streams-wait", "--max-queue", "--max-connections", "--client-timeout", "--pool-controls",
        "--no-pool-controls", "--paused", "--request-memory"}) {
    command.require(name, "--http");
  }
  command.exclude("--api-key", "--api-key-file");
  command.exclude("--paused", "--no-pool-controls");
}

std::unique_ptr<HttpServer> listen_http(const HttpCommandOptions& options) {
  use_one_heap();  // before the first thread
  HttpOptions http = options.http;
  const HttpOptions address = parse_address(options.address.value());
  http.host = address.host;
  http.port = address.port;
  http.timeout = std::chrono::seconds(options.timeout_seconds);
  http.memory = options.request_memory.has_value()
                    ? MemoryAccount::of_size(static_cast<std::size_t>(*options.request_memory) << 20)
                    : MemoryAccount::of_this_machine();
  if (!options.quiet) {
    http.on_answered = [](const AnsweredRequest& request) {
      if (is_logged(request)) {
        print(log_line(request) + '\n');
      }
    };
  }
  auto server = std::make_unique<HttpServer>(http);
  if (options.paused && !has_pool_controls(options, *server)) {
    throw UsageError(
        "--paused needs --pool-controls, which is on by default only where this machine alone is served, without a "
        "key");
  }
  return server;
}

void run_http(const ServedModel& model, const MakeEngine& make_engine, const HttpCommandOptions& options,
              std::unique_ptr<HttpServer> server) {
  const std::string host = parse_address(options.address.value()).host;
  ApiOptions api_options{options.served_model_name.empty() ? model.name() : options.served_model_name,
                         find_api_key(options),
                         options.make_demo_pool,
                         has_pool_controls(options, *server),
                         options.cors_origins,
                         options.chat_format,
                         options.streams_wait,
                         server->memory()};
  check_chats(model, options.chat_format);
  const std::string chats = describe_chats(model, options.chat_format);
  PoolView view(model.is_synthetic() ? nullptr : &model.session().tokenizer);
  EngineThread thread(make_engine, {options.max_queue, options.paused},
                      [&](const EngineNews& news) { view.update(news); });
  const bool has_key = !api_options.api_key.empty();
  const char* const steering = api_options.pool_controls ? "drawn and steered" : "drawn";
  const char* const off = api_options.pool_controls ? "" : " (no scenes without --pool-controls)";
  const std::string name = api_options.model_name;
  Api api(model, thread, view, api_options);
  signal_received = 0;
  std::signal(SIGTERM, note_signal);
  std::signal(SIGINT, note_signal);
  {
    const std::unique_ptr<HttpServer> serving = std::move(server);  // ends before what it uses
    serving->serve(api);
    const PoolSizes sizes = thread.sizes();
    const int num_blocks = (sizes.num_slots + sizes.block_size - 1) / sizes.block_size;
    const std::string url = "http://" + (host.find(':') != std::string::npos ? "[" + host + "]" : host) + ":" +
                            std::to_string(serving->port());
    print(format("%s on %s/v1, %d slots in blocks of %d, %s; the pool is %s on %s/%s\n", name.c_str(), url.c_str(),
                 num_blocks * sizes.block_size, sizes.block_size, chats.c_str(), steering, url.c_str(), off));
    if (!has_key && !serving->is_on_loopback()) {
      std::cerr << "note: all who reach " << url << " can use this server; --api-key asks them for a key\n";
    }
    constexpr std::chrono::milliseconds kPoll{20};
    while (signal_received == 0) {
      std::this_thread::sleep_for(kPoll);
      api.restore_unwatched();
    }
    const auto signalled = std::chrono::steady_clock::now();
    const auto has_passed = [&](int seconds) {
      return std::chrono::steady_clock::now() - signalled >= std::chrono::seconds(seconds);
    };
    const int notice = std::min(options.drain_notice, options.drain_seconds.value_or(options.drain_notice));
    thread.announce_drain();
    if (notice > 0) {
      print(
          format("draining is announced: requests are taken for %d s more; a second Ctrl-C ends the server\n", notice));
    }
    while (!has_passed(notice)) {
      std::this_thread::sleep_for(kPoll);
    }
    thread.drain();
    serving->prepare_to_end();
    print(describe_drain(thread.state(), options.drain_seconds.has_value()
                                             ? std::optional(*options.drain_seconds - notice)
                                             : std::nullopt));
    bool is_late = false;
    while (!thread.drained()) {
      if (!is_late && options.drain_seconds.has_value() && has_passed(*options.drain_seconds)) {
        is_late = true;
        print("the time to drain is over: what has not ended is ended now\n");
        thread.end_requests("the server has ended");
      }
      std::this_thread::sleep_for(kPoll);
    }
  }
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGINT, SIG_DFL);
}

}  // namespace common
