// A server with the bundled model, as `serve --http` makes one.
#pragma once

#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "common/app/cli.h"
#include "common/model/default_model.h"
#include "common/model/gguf.h"
#include "common/serving/api.h"
#include "common/serving/engine_thread.h"
#include "common/serving/http_request.h"
#include "common/serving/http_server.h"
#include "common/serving/memory_account.h"
#include "common/serving/pool_view.h"
#include "common/serving/served_model.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(serve/engine_adapter.h)
// clang-format on

namespace tests {

inline const common::Session& default_session() {
  static const common::Session session = [] {
    const auto file =
        std::make_shared<const common::Gguf>(common::Gguf::parse(common::default_model(), "the bundled model"));
    common::Session result{file->name(), common::Llama(*file), common::Tokenizer(*file), {}, {}};
    result.file = file;
    common::Request request;
    request.stop_tokens = {result.tokenizer.eos().value()};
    result.requests.push_back(request);
    return result;
  }();
  return session;
}

inline const common::ServedModel& default_model() {
  static const common::ServedModel model(default_session(), "");
  return model;
}

struct HttpFixtureOptions {
  int num_slots = 1024;
  int num_host_slots = 0;
  int context_length = 0;  // the model's
  int block_size = 4;
  int token_budget = 64;
  int max_queue = 64;
  bool paused = false;
  std::string api_key = {};
  bool pool_controls = true;
  std::vector<std::string> cors_origins = {};
  std::shared_ptr<common::MemoryAccount> memory = nullptr;
  const common::Llama* model = &default_session().model;  // with the bundled model's vocabulary
};

// All but the network.
struct ApiFixture {
  explicit ApiFixture(const HttpFixtureOptions& options = {})
      : view(&default_session().tokenizer),
        engine(engines(options, *options.model), {options.max_queue, options.paused},
               [this](const common::EngineNews& news) { view.update(news); }),
        api(default_model(), engine, view,
            {"tales-5m",
             options.api_key,
             stage::demo_pools(add_demo_commands),
             options.pool_controls,
             options.cors_origins,
             {},
             false,
             options.memory}) {}

  static common::MakeEngine engines(const HttpFixtureOptions& options,
                                    const common::Llama& model = default_session().model) {
    return [options, &model](const common::EngineDemand& demand) {
      stage::EngineOptions engine_options;
      engine_options.num_slots = options.num_slots;
      engine_options.num_host_slots = options.num_host_slots;
      engine_options.context_length = options.context_length;
      engine_options.block_size = options.block_size;
      engine_options.gpu.device = stage::Device::kCpu;
      engine_options.scheduler.token_budget = options.token_budget;
      return stage::make_served_engine(model, engine_options, demand);
    };
  }

  // The few of the program's commands that the tests use, and one that writes which buffer std::cout has.
  static void add_demo_commands(common::Shell& shell, stage::KvCacheManager& manager) {
    shell.add("new", "NAME LENGTH", "", [&](const auto& arguments, std::ostream& output) {
      output << "made " << arguments[0] << "\n";
      manager.allocate(common::sequence_named(manager, arguments[0], false), common::parse_count(arguments[1], 1));
    });
    shell.add("terminal", "", "",
              [](const auto&, std::ostream& output) { output << static_cast<const void*>(std::cout.rdbuf()); });
  }

  common::ApiReply post(const std::string& path, const nlohmann::json& body) {
    return api.handle({.method = "POST", .path = path, .body = body.dump(), .content_type = "application/json"},
                      [] { return false; });
  }
  common::ApiReply get(const std::string& path) {
    return api.handle({.method = "GET", .path = path}, [] { return false; });
  }
  // Waits for a condition that another thread brings about. False: it took too long.
  static bool wait_for(const std::function<bool()>& condition) {
    // A hang, not a slow machine.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(tests::kSanitized ? 120 : 20);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  bool is_pool_empty() const { return engine.state().cache_usage() == 0.0; }

  common::PoolView view;
  common::EngineThread engine;
  common::Api api;
};

// The value of a line of GET /metrics; -1 if there is none.
inline double metric(ApiFixture& fixture, const std::string& name) {
  const std::string text = fixture.get("/metrics").body;
  const std::size_t at = text.find("\n" + name + "{");
  return at == std::string::npos ? -1.0 : std::stod(text.substr(text.find("} ", at) + 2));
}

// Reads a stream to its end.
inline std::string read_all(common::ReplyBody& stream) {
  std::string text;
  while (stream.read(text)) {
  }
  return text;
}

// The JSON documents of server-sent events; "[DONE]" becomes a string.
inline std::vector<nlohmann::json> events_of(const std::string& text) {
  std::vector<nlohmann::json> events;
  const std::string prefix = "data: ";
  for (std::size_t at = text.find(prefix); at != std::string::npos; at = text.find(prefix, at)) {
    at += prefix.size();
    const std::string line = text.substr(at, text.find('\n', at) - at);
    events.push_back(line == "[DONE]" ? nlohmann::json("[DONE]") : nlohmann::json::parse(line));
  }
  return events;
}

// The text of one choice, joined from its pieces.
inline std::string streamed_text(const std::string& text, int choice = 0) {
  std::string result;
  for (const nlohmann::json& event : events_of(text)) {
    if (!event.is_object() || !event.contains("choices")) {
      continue;
    }
    for (const nlohmann::json& entry : event["choices"]) {
      if (entry["index"] == choice) {
        result += entry.contains("delta") ? entry["delta"].value("content", "") : entry.value("text", "");
      }
    }
  }
  return result;
}

// The text that the request gets from a server that serves nothing else.
inline std::string text_alone(const std::string& prompt, int max_tokens, const common::SamplingOptions& sampling,
                              int sample_index = 0) {
  const common::Session& session = default_session();
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  stage::Engine engine(session.model, options);
  common::Request request = session.requests.front();
  request.prompt = session.tokenizer.encode_prompt(prompt);
  request.max_new_tokens = max_tokens;
  request.sampling = sampling;
  request.sample_index = sample_index;
  return session.tokenizer.decode(engine.run({&request, 1}, [](int, common::Token) {}).front().tokens);
}

}  // namespace tests
