#include "common/serving/serve_command.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/app/command.h"
#include "common/app/result_file.h"
#include "common/app/token_source.h"
#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/model/presets.h"
#include "common/model/stop_strings.h"
#include "common/serving/arrivals.h"
#include "common/serving/report.h"
#include "common/serving/served_model.h"
#include "common/serving/tally.h"
#include "common/serving/trace.h"

namespace common {
namespace {

double rate_of(const std::string& text) {
  char* end = nullptr;
  const double rate = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(rate > 0.0)) {
    throw InputError("poisson:RATE takes requests a second, not '" + text + "'");
  }
  check_rate(rate);
  return rate;
}

const std::string kPoisson = "poisson:";

void check_arrivals(const std::string& text) {
  if (text.starts_with(kPoisson)) {
    rate_of(text.substr(kPoisson.size()));
  }
}

// Lengths from a file, or the session's prompts at random times.
std::vector<ArrivingRequest> make_requests(const Session& session, const LlamaConfig& config,
                                           const ServeOptions& options) {
  std::vector<ArrivingRequest> requests;
  const std::uint64_t seed = session.requests.front().sampling.seed;
  const auto add = [&](double time, Request request, const std::string& rejection) {
    request.sampling.seed = seed + requests.size();  // otherwise equal prompts would get equal texts
    GenerationRequest added{std::move(request), options.num_samples};
    if (options.num_beams > 0) {
      added.num_samples = options.num_beams;
      added.length_penalty = 1.0;
    }
    requests.push_back({time, std::move(added), 0, rejection});
  };
  if (options.workload == "offline") {
    if (options.num_requests > 0) {
      throw UsageError("--requests is for prompts: the offline workload has 256 requests");
    }
    constexpr int kLongest = 2 * kMaxOfflineTokens;
    if (config.context_length < kLongest) {
      throw InputError(format("the workload's texts have up to %d tokens, and the model's context is %d", kLongest,
                              config.context_length));
    }
    const TokenSource source(session, config.vocab_size);
    for (const Arrival& arrival : offline_arrivals(seed)) {
      Request request = session.requests.front();
      request.prompt = source.take(static_cast<int>(requests.size()), arrival.prompt_tokens);
      request.max_new_tokens = arrival.output_tokens;
      request.stop_tokens.clear();
      add(arrival.time, std::move(request), "");
    }
    return requests;
  }
  if (options.num_requests > 0 && !options.arrivals.empty() && !options.arrivals.starts_with(kPoisson)) {
    throw UsageError("--requests is for prompts: " + options.arrivals + " says how many requests there are");
  }
  if (options.arrivals.empty() || options.arrivals.starts_with(kPoisson)) {
    const double rate = options.arrivals.empty() ? 0.0 : rate_of(options.arrivals.substr(kPoisson.size()));
    const std::size_t num_prompts = session.requests.size();
    const int count = options.num_requests > 0 ? options.num_requests : static_cast<int>(num_prompts);
    for (const double time : poisson_times(count, rate, seed)) {
      add(time, session.requests[requests.size() % num_prompts], "");
    }
    return requests;
  }
  if (std::filesystem::is_directory(options.arrivals)) {
    throw InputError(options.arrivals + ": it is a directory");
  }
  std::ifstream file(options.arrivals);
  if (!file) {
    throw InputError("can't read '" + options.arrivals + "', the file of --arrivals (random times: poisson:RATE)");
  }
  const TokenSource source(session, config.vocab_size);
  for (const Arrival& arrival : read_arrivals(file, options.arrivals)) {
    Request request = session.requests.front();
    std::string rejection;
    if (arrival.prompt_tokens > config.context_length) {  // it may be too long to be built
      rejection = format("a prompt of %d tokens is longer than the model's context of %d", arrival.prompt_tokens,
                         config.context_length);
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
  ShownTexts(const Session& session, View& view) : session_(session), view_(view) {}

  void add(int id, int sample, Token token) {
    const auto decode = [this](std::span<const Token> tokens) { return session_.tokenizer.decode(tokens); };
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
  const Session& session_;
  View& view_;
  std::map<std::pair<int, int>, ReplyStream> streams_;  // by request and sample
};

void print_texts(const Session& session, const std::vector<RequestResult>& results) {
  for (std::size_t id = 0; id < results.size(); ++id) {
    const RequestResult& result = results[id];
    if (!result.error.empty()) {
      const bool rejected = result.finish_reason == FinishReason::kRejected;
      std::cout << format("%3zu  ", id) << (rejected ? "rejected: " : "failed: ") << result.error << "\n";
    }
    for (const Completion& completion : result.completions) {
      std::cout << format("%3zu  ", id) << quote(session.text_of(completion), 400) << "\n";
    }
  }
}

// Why a request's sample ended: by itself, or with its request.
FinishReason reason_of(const Completion& completion, const RequestResult& result, int max_new_tokens) {
  const bool is_whole = completion.finish_reason == FinishReason::kStop ||
                        std::ssize(completion.tokens) == std::ptrdiff_t{max_new_tokens};
  return is_whole ? completion.finish_reason : result.finish_reason.value();
}

// Every request's texts and times, and why they ended.
nlohmann::ordered_json results_json(const Session& session, const std::vector<ArrivingRequest>& requests,
                                    const std::vector<RequestResult>& results, bool has_texts) {
  nlohmann::ordered_json entries = nlohmann::ordered_json::array();
  for (std::size_t id = 0; id < results.size(); ++id) {
    const RequestResult& result = results[id];
    const int max_new_tokens = requests[id].request.request.max_new_tokens;
    nlohmann::ordered_json entry;
    entry["request"] = id;
    entry["arrival_seconds"] = result.arrival;
    if (!result.token_times.empty()) {
      entry["first_token_seconds"] = result.token_times.front();
    }
    entry["end_seconds"] = result.end;
    entry["finish_reason"] = to_string(result.finish_reason.value());
    if (!result.error.empty()) {
      entry["error"] = result.error;
    }
    for (const Completion& completion : result.completions) {
      nlohmann::ordered_json written = {{"tokens", completion.tokens},
                                        {"finish_reason", to_string(reason_of(completion, result, max_new_tokens))}};
      if (has_texts) {
        written["text"] = session.text_of(completion);
      }
      entry["completions"].push_back(written);
    }
    entries.push_back(entry);
  }
  return entries;
}

// Throws InputError if no request was served.
void check_served(const std::vector<RequestResult>& results) {
  if (std::all_of(results.begin(), results.end(), [](const RequestResult& result) { return !result.error.empty(); })) {
    throw InputError("no request was served: " + results.front().error);
  }
}

void run_serve(const Session& session, const ServeOptions& options, const MakeEngineFor& make_engine_for,
               std::unique_ptr<HttpServer> server) {
  const ResultFile json(options.json_path);
  const ServedModel model(session, options.synthetic);
  const auto make_engine = [&](const EngineDemand& demand) { return make_engine_for(model.get(), demand); };
  if (options.http.address.has_value()) {
    run_http(model, make_engine, options.http, std::move(server));
    return;
  }
  const std::vector<ArrivingRequest> requests = make_requests(session, model.get().config(), options);
  const bool json_only = json.is_stdout();
  // Random weights draw tokens that the session's tokenizer does not know.
  const bool has_texts = !json_only && !model.is_synthetic();
  std::int64_t next_step = 0;
  EngineDemand demand{.virtual_clock = options.virtual_clock};
  for (const ArrivingRequest& request : requests) {
    if (request.rejection.empty()) {
      demand.requests.push_back(request.request);
    }
  }
  if (options.shown_step >= 0 && !json_only) {
    demand.on_pass = [&](const std::string& batch) {
      if (next_step == options.shown_step) {
        std::cout << batch;
      }
    };
  }
  const std::unique_ptr<ServedEngine> engine = make_engine(demand);
  const NoteInterrupts interrupts;  // Ctrl-C ends the run, and everything asked for is written
  const ViewKind view_kind = has_texts ? options.view : ViewKind::kQuiet;
  std::unique_ptr<View> view = make_view(view_kind, std::cout);
  std::unique_ptr<TraceWriter> trace;
  if (!options.trace_path.empty()) {
    trace = std::make_unique<TraceWriter>(options.trace_path);
  }
  ShownTexts shown(session, *view);
  Tally tally(Keep::kValues);
  ServeCallbacks callbacks;
  if (view_kind != ViewKind::kQuiet) {
    callbacks.on_token = [&](int id, int sample, Token token) { shown.add(id, sample, token); };
  }
  callbacks.on_step = [&](const StepReport& report) {
    next_step = report.index + 1;
    tally.add(report);
    for (const int id : report.ended) {
      shown.finish(id);
    }
    view->on_step(*engine, report);
    if (trace) {
      trace->add(report);
    }
  };
  callbacks.is_ended = NoteInterrupts::is_noted;
  const std::vector<RequestResult> results = serve(*engine, requests, callbacks);
  const bool is_interrupted = NoteInterrupts::is_noted();
  view.reset();  // a live view leaves its screen
  for (const RequestResult& result : results) {
    tally.add(result);
  }
  if (trace) {
    trace->finish(results);
  }
  const std::optional<ReadLimit> limit = is_interrupted ? std::nullopt : engine->measure_read_limit();
  if (json.is_wanted()) {
    nlohmann::ordered_json document;
    document["model"] = options.synthetic.empty() ? session.model_name : options.synthetic;
    document["clock"] = options.virtual_clock ? "virtual" : "real";
    document["interrupted"] = is_interrupted;
    document.update(report_json(*engine, tally, limit));
    document["outputs"] = results_json(session, requests, results, !model.is_synthetic());
    // A reply may end in the middle of a character.
    json.write(document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
  }
  if (has_texts) {
    std::cout << "\n";
    print_texts(session, results);
    std::cout << "\n";
  }
  if (!json_only) {
    std::cout << report_table(*engine, tally, limit);
  }
  if (is_interrupted) {
    if (!json_only) {
      std::cout << format("\ninterrupted: %lld of %zu requests had not ended, and %zu of these had not arrived\n",
                          static_cast<long long>(tally.num_ended(FinishReason::kCancelled)) + std::ssize(requests) -
                              std::ssize(results),
                          requests.size(), requests.size() - results.size());
    }
    throw Interrupted();
  }
  check_served(results);
  if (options.shown_step >= next_step) {
    throw InputError(
        format("--show-batch %d: the last step was %lld", options.shown_step, static_cast<long long>(next_step - 1)));
  }
}

}  // namespace

Command& add_serve_command(Program& program, ServeOptions& options, MakeEngineFor make_engine) {
  const auto server = std::make_shared<std::unique_ptr<HttpServer>>();
  SessionInput input;
  input.before_loading = [&options, server] {
    if (options.http.address.has_value()) {
      *server = listen_http(options.http);
    }
  };
  Command& command = program.add_session_command(
      "serve", "Serve requests that arrive while others run, and show it",
      [&options, server, make_engine = std::move(make_engine)](const Session& session) {
        run_serve(session, options, make_engine, std::move(*server));
      },
      input);
  command.option("--arrivals", options.arrivals,
                 "poisson:RATE, in requests a second, or a file with lines \"seconds prompt_tokens output_tokens\"; "
                 "default: all at once",
                 check_arrivals);
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
  command.option("--synthetic", options.synthetic, "random weights in a published shape, as for bench", find_preset);
  command.exclude("--synthetic", "--model");
  command.flag("--virtual-clock", options.virtual_clock,
               "a step takes 1 ms, and 0.1 ms per token: the same run on every machine");
  command.choice(
      "--view", options.view,
      {{"auto", ViewKind::kAuto}, {"live", ViewKind::kLive}, {"plain", ViewKind::kPlain}, {"quiet", ViewKind::kQuiet}},
      "live (for a terminal), plain (one line per step), quiet, or auto");
  command.option("--show-batch", options.shown_step, {0, 1 << 30}, "print the arrays of this step's batch");
  command.file("--trace", options.trace_path, "write the run to a file that ui.perfetto.dev opens");
  command.file("--json", options.json_path, "write the measurements to a file ('-': stdout, and nothing else)");
  add_http_options(command, options.http);
  // Options of requests: over HTTP each request has its own. --seed stays: the first request without a seed gets it.
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

}  // namespace common
