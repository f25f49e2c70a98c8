#include "serving.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <vector>

#include "../cache_size.h"
#include "common/app/result_file.h"
#include "common/app/token_source.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/stop_strings.h"
#include "metrics.h"
#include "setup.h"
#include "trace.h"

namespace stage8 {
namespace {

double rate_of(const std::string& text) {
  char* end = nullptr;
  const double rate = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(rate > 0.0)) {
    throw common::InputError("--arrivals poisson:RATE takes requests a second, not '" + text + "'");
  }
  check_rate(rate);
  return rate;
}

// Lengths from a file, or the session's prompts at random times.
std::vector<ArrivingRequest> make_requests(const common::Session& session, const common::LlamaConfig& config,
                                           const ServingOptions& options) {
  std::vector<ArrivingRequest> requests;
  const std::uint64_t seed = session.requests.front().sampling.seed;
  const auto add = [&](double time, common::Request request, const std::string& rejection) {
    request.sampling.seed = seed + requests.size();  // otherwise equal prompts would get equal texts
    GenerationRequest added{std::move(request), options.num_samples};
    if (options.num_beams > 0) {
      added.beam = BeamOptions{options.num_beams, 1.0};
    }
    requests.push_back({time, std::move(added), 0, rejection});
  };
  if (options.workload == "offline") {
    if (options.num_requests > 0) {
      throw common::InputError("--requests is for prompts: the offline workload has 256 requests");
    }
    constexpr int kLongest = 2 * kMaxOfflineTokens;
    if (config.context_length < kLongest) {
      throw common::InputError(common::format(
          "the workload's texts have up to %d tokens, and the model's context is %d", kLongest, config.context_length));
    }
    const common::TokenSource source(session, config.vocab_size);
    for (const Arrival& arrival : offline_arrivals(seed)) {
      common::Request request = session.requests.front();
      request.prompt = source.take(static_cast<int>(requests.size()), arrival.prompt_tokens);
      request.max_new_tokens = arrival.output_tokens;
      request.stop_tokens.clear();
      add(arrival.time, std::move(request), "");
    }
    return requests;
  }
  const std::string poisson = "poisson:";
  if (options.num_requests > 0 && !options.arrivals.empty() && !options.arrivals.starts_with(poisson)) {
    throw common::InputError("--requests is for prompts: " + options.arrivals + " says how many requests there are");
  }
  if (options.arrivals.empty() || options.arrivals.starts_with(poisson)) {
    const double rate = options.arrivals.empty() ? 0.0 : rate_of(options.arrivals.substr(poisson.size()));
    const std::size_t num_prompts = session.requests.size();
    const int count = options.num_requests > 0 ? options.num_requests : static_cast<int>(num_prompts);
    for (const double time : poisson_times(count, rate, seed)) {
      add(time, session.requests[requests.size() % num_prompts], "");
    }
    return requests;
  }
  if (std::filesystem::is_directory(options.arrivals)) {
    throw common::InputError(options.arrivals + ": it is a directory");
  }
  std::ifstream file(options.arrivals);
  if (!file) {
    throw common::InputError("can't read '" + options.arrivals + "'");
  }
  const common::TokenSource source(session, config.vocab_size);
  for (const Arrival& arrival : read_arrivals(file, options.arrivals)) {
    common::Request request = session.requests.front();
    std::string rejection;
    if (arrival.prompt_tokens > config.context_length) {  // it may be too long to be built
      rejection = common::format("a prompt of %d tokens is longer than the model's context of %d",
                                 arrival.prompt_tokens, config.context_length);
    }
    request.prompt = source.take(static_cast<int>(requests.size()), rejection.empty() ? arrival.prompt_tokens : 1);
    request.max_new_tokens = arrival.output_tokens;
    request.stop_tokens.clear();
    add(arrival.time, std::move(request), rejection);
  }
  return requests;
}

// Shows the requests' texts, each as far as it is certain.
class ShownTexts {
 public:
  ShownTexts(const common::Session& session, View& view) : session_(session), view_(view) {}

  void add(int id, int sample, common::Token token) {
    const auto decode = [this](std::span<const common::Token> tokens) { return session_.tokenizer.decode(tokens); };
    const auto stream = streams_.try_emplace({id, sample}, session_.stop_strings, decode).first;
    view_.on_text(id, sample, stream->second.add(token));
  }
  // To be called when a request has ended.
  void finish(int id) {
    const auto end = streams_.lower_bound({id + 1, 0});
    for (auto stream = streams_.lower_bound({id, 0}); stream != end; stream = streams_.erase(stream)) {
      if (const std::string text = stream->second.finish(); !text.empty()) {
        view_.on_text(id, stream->first.second, text);
      }
    }
  }

 private:
  const common::Session& session_;
  View& view_;
  std::map<std::pair<int, int>, common::ReplyStream> streams_;  // by request and sample
};

void print_texts(const common::Session& session, const Server& server) {
  for (int id = 0; id < server.num_requests(); ++id) {
    const RequestOutput& output = server.output(id);
    if (!output.error.empty()) {
      const bool rejected = output.finish_reason == common::FinishReason::kRejected;
      std::cout << common::format("%3d  ", id) << (rejected ? "rejected: " : "failed: ") << output.error << "\n";
    }
    for (const common::Completion& completion : output.completions) {
      std::cout << common::format("%3d  ", id) << common::quote(session.text_of(completion), 400) << "\n";
    }
  }
}

// The measurements, and of each request its texts and times.
std::string results_json(const common::Session& session, const Server& server, const Metrics& metrics,
                         const ServingOptions& options) {
  nlohmann::ordered_json document;
  document["model"] = options.synthetic.empty() ? session.model_name : options.synthetic;
  document["clock"] = options.virtual_clock ? "virtual" : "real";
  document.update(metrics_json(server, metrics));
  document["outputs"] = nlohmann::ordered_json::array();
  for (int id = 0; id < server.num_requests(); ++id) {
    const RequestOutput& output = server.output(id);
    nlohmann::ordered_json entry;
    entry["request"] = id;
    entry["arrival_seconds"] = output.arrival;
    if (!output.token_times.empty()) {
      entry["first_token_seconds"] = output.token_times.front();
    }
    entry["end_seconds"] = output.end;
    if (!output.error.empty()) {
      entry["error"] = output.error;
    }
    for (const common::Completion& completion : output.completions) {
      nlohmann::ordered_json written = {{"tokens", completion.tokens}};
      if (options.synthetic.empty()) {  // random weights draw tokens that the session's tokenizer does not know
        written["text"] = session.text_of(completion);
      }
      entry["completions"].push_back(written);
    }
    document["outputs"].push_back(entry);
  }
  // A reply may end in the middle of a character.
  return document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// Throws InputError if no request was served.
void check_served(const Server& server) {
  for (int id = 0; id < server.num_requests(); ++id) {
    if (server.output(id).error.empty()) {
      return;
    }
  }
  throw common::InputError("no request was served: " + server.output(0).error);
}

void run_serve(const common::Session& session, const ServingOptions& options) {
  const common::ResultFile json(options.json_path);
  const ServedModel model(session, options.synthetic);
  if (options.http.address.has_value()) {
    EngineOptions engine = options.engine;
    engine.min_slots = std::max(engine.min_slots, model.get().config().context_length);
    run_http(model, engine, options.scheduler, options.http);
    return;
  }
  const std::vector<ArrivingRequest> requests = make_requests(session, model.get().config(), options);
  EngineOptions engine_options = options.engine;
  for (const ArrivingRequest& request : requests) {
    if (request.rejection.empty()) {
      const int num_sequences = request.request.beam ? request.request.beam->width : request.request.num_samples;
      engine_options.min_slots = std::max(
          engine_options.min_slots, max_slots_of(request.request.request, num_sequences, engine_options.block_size));
    }
  }
  const ServerSetup setup(model.get(), engine_options, options.scheduler, options.virtual_clock);
  Server& server = *setup.server;
  const bool json_only = json.is_stdout();
  // Random weights draw tokens that the session's tokenizer does not know.
  const bool has_texts = !json_only && !model.is_synthetic();
  const ViewKind view_kind = has_texts ? options.view : ViewKind::kQuiet;
  std::unique_ptr<View> view = make_view(view_kind, std::cout);
  ShownTexts shown(session, *view);
  std::unique_ptr<TraceWriter> trace;
  if (!options.trace_path.empty()) {
    trace = std::make_unique<TraceWriter>(options.trace_path);
  }
  Metrics metrics;
  std::int64_t next_step = 0;
  server.on_step([&](const StepReport& report) {
    next_step = report.index + 1;
    metrics.add(report);
    for (const int id : report.ended) {
      shown.finish(id);
    }
    view->on_step(server, report);
    if (trace) {
      trace->add(report);
    }
  });
  if (options.shown_step >= 0 && !json_only) {
    server.on_pass([&](const RaggedBatch& batch) {
      if (next_step == options.shown_step) {
        std::cout << format_batch(batch);
      }
    });
  }
  TokenSink show;
  if (view_kind != ViewKind::kQuiet) {
    show = [&](int id, int sample, common::Token token) { shown.add(id, sample, token); };
  }
  serve(server, *setup.clock, requests, show);
  view.reset();  // a live one leaves its screen
  if (trace) {
    trace->finish(server);
  }
  if (json.is_wanted()) {
    json.write(results_json(session, server, metrics, options));
  }
  if (has_texts) {
    std::cout << "\n";
    print_texts(session, server);
    std::cout << "\n";
  }
  if (!json_only) {
    std::cout << metrics_table(server, metrics);
  }
  check_served(server);
  if (options.shown_step >= next_step) {
    throw common::InputError(common::format("--show-batch %d: the last step was %lld", options.shown_step,
                                            static_cast<long long>(next_step - 1)));
  }
}

}  // namespace

common::Command& add_serve_command(common::Program& program, ServingOptions& options) {
  common::Command& command =
      program.add_session_command("serve", "Serve requests that arrive while others run, and show it",
                                  [&](const common::Session& session) { run_serve(session, options); });
  command.option("--arrivals", options.arrivals,
                 "poisson:RATE, in requests a second, or a file with lines \"seconds prompt_tokens output_tokens\"; "
                 "default: all at once");
  command.choice("--workload", options.workload, {{"prompts", ""}, {"offline", "offline"}},
                 "prompts, or offline: 256 requests at once, prompts and replies of 100 to 1,024 tokens");
  command.exclude("--workload", "--arrivals");
  command.option("--requests", options.num_requests, {1, 1 << 20},
                 "how many, the prompts in turn (default: one per prompt)");
  command.option("--samples", options.num_samples, {1, 1024}, "texts per request, drawn from one prompt");
  command.option("--beams", options.num_beams, {1, 1024},
                 "instead: search for the likeliest texts with this many beams");
  // A search draws nothing. --seed stays: random arrivals depend on it.
  for (const char* const name :
       {"--samples", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--sample-index"}) {
    command.exclude("--beams", name);
  }
  command.option("--synthetic", options.synthetic, "random weights in a published shape, as for bench");
  command.exclude("--synthetic", "--model");
  command.flag("--virtual-clock", options.virtual_clock,
               "a step takes 1 ms, and 0.1 ms per token: the same run on every machine");
  command.choice(
      "--view", options.view,
      {{"auto", ViewKind::kAuto}, {"live", ViewKind::kLive}, {"plain", ViewKind::kPlain}, {"quiet", ViewKind::kQuiet}},
      "live (for a terminal), plain (one line per step), quiet, or auto");
  command.option("--show-batch", options.shown_step, {0, 1 << 30}, "print the arrays of this step's batch");
  command.option("--trace", options.trace_path, "write the run to a file that ui.perfetto.dev opens");
  command.option("--json", options.json_path, "write the measurements to a file ('-': stdout, and nothing else)");
  add_http_options(command, options.http);
  // What is about requests: over HTTP each says it for itself. --seed stays: it is that of the first request without
  // one.
  for (const char* const name :
       {"--prompt",       "--prompt-file", "--chat",          "--system",   "--max-new-tokens",
        "--temperature",  "--top-k",       "--top-p",         "--min-p",    "--repetition-penalty",
        "--sample-index", "--stop",        "--arrivals",      "--workload", "--requests",
        "--samples",      "--beams",       "--virtual-clock", "--view",     "--show-batch",
        "--trace",        "--json"}) {
    command.exclude("--http", name);
  }
  return command;
}

}  // namespace
