#include "common/serving/http_command.h"

#include <chrono>
#include <csignal>
#include <iostream>
#include <thread>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/serving/api.h"
#include "common/serving/pool_view.h"

namespace common {
namespace {

volatile std::sig_atomic_t signal_received = 0;

extern "C" void note_signal(int number) {
  signal_received = number;
  std::signal(number, SIG_DFL);  // the second one ends the program
}

}  // namespace

void add_http_options(Command& command, HttpCommandOptions& options) {
  command.option("--http", options.address,
                 "serve on this address, as 127.0.0.1:8080: an OpenAI-compatible API, and a page that shows the pool");
  command.option("--api-key", options.api_key, "with --http: a key that clients have to send");
  command.option("--max-queue", options.max_queue, {1, 1 << 20}, "with --http: max requests that wait");
  command.option("--max-connections", options.http.max_connections, {1, 1 << 14},
                 "with --http: max connections served at once");
  command.option("--client-timeout", options.timeout_seconds, {1, 3600},
                 "with --http: seconds for a client to send the next part of its request (for the whole: four times as "
                 "long), or to read what is sent");
  command.flag("--pool-controls", options.pool_controls,
               "with --http: let clients, as the page, pause the pool, step it and make it anew");
  command.flag("--paused", options.paused, "with --pool-controls: begin without computing, until the page says so");
  for (const char* const name :
       {"--api-key", "--max-queue", "--max-connections", "--client-timeout", "--pool-controls"}) {
    command.require(name, "--http");
  }
  command.require("--paused", "--pool-controls");
}

void run_http(const ServedModel& model, const MakeEngine& make_engine, const HttpCommandOptions& options) {
  HttpOptions http = options.http;
  const HttpOptions address = parse_address(options.address.value());
  http.host = address.host;
  http.port = address.port;
  http.timeout = std::chrono::seconds(options.timeout_seconds);
  PoolView view(model.is_synthetic() ? nullptr : &model.session().tokenizer);
  EngineThread thread(make_engine, {options.max_queue, options.paused},
                      [&](const EngineNews& news) { view.update(news); });
  Api api(model, thread, view, {model.name(), options.api_key, options.make_demo_pool, options.pool_controls});
  signal_received = 0;
  std::signal(SIGTERM, note_signal);
  std::signal(SIGINT, note_signal);
  {
    HttpServer server(api, http);
    const PoolSizes sizes = thread.sizes();
    const bool is_v6 = http.host.find(':') != std::string::npos;
    const std::string url =
        "http://" + (is_v6 ? "[" + http.host + "]" : http.host) + ":" + std::to_string(server.port());
    std::cout << format("%s on %s/v1, %d slots in blocks of %d; the pool is drawn on %s/\n", model.name().c_str(),
                        url.c_str(), sizes.num_slots, sizes.block_size, url.c_str())
              << std::flush;
    if (options.api_key.empty() && !server.is_on_loopback()) {
      std::cerr << "note: all who reach " << url << " can use this server; --api-key asks them for a key\n";
    }
    constexpr std::chrono::milliseconds kPoll{20};
    while (signal_received == 0) {
      std::this_thread::sleep_for(kPoll);
    }
    thread.drain();
    server.prepare_to_end();
    std::cout << "ending: new requests are refused, and those that have come are served to their end\n" << std::flush;
    while (!thread.drained()) {
      std::this_thread::sleep_for(kPoll);
    }
  }
  std::signal(SIGTERM, SIG_DFL);
  std::signal(SIGINT, SIG_DFL);
}

}  // namespace common
