#include "serving.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <numeric>
#include <optional>

#include "common/app/result_file.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/presets.h"
#include "metrics.h"
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
std::vector<ArrivingRequest> make_requests(const common::Session& session, const Engine& engine,
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
  const std::string poisson = "poisson:";
  if (options.arrivals.empty() || options.arrivals.starts_with(poisson)) {
    const double rate = options.arrivals.empty() ? 0.0 : rate_of(options.arrivals.substr(poisson.size()));
    const std::size_t num_prompts = session.requests.size();
    const int count = options.num_requests > 0 ? options.num_requests : static_cast<int>(num_prompts);
    for (const double time : poisson_times(count, rate, seed)) {
      add(time, session.requests[requests.size() % num_prompts], "");
    }
    return requests;
  }
  std::ifstream file(options.arrivals);
  if (!file) {
    throw common::InputError("can't read '" + options.arrivals + "'");
  }
  for (const Arrival& arrival : read_arrivals(file, options.arrivals)) {
    common::Request request = session.requests.front();
    // A prompt that is too long to be served may be too long to be built.
    const std::string rejection = engine.rejection(arrival.prompt_tokens, arrival.output_tokens);
    request.prompt = make_prompt(session, engine.model().config().vocab_size, static_cast<int>(requests.size()),
                                 rejection.empty() ? arrival.prompt_tokens : 1);
    request.max_new_tokens = arrival.output_tokens;
    request.stop_tokens.clear();
    add(arrival.time, std::move(request), rejection);
  }
  return requests;
}

// Ends a request when its text holds one of these.
class StopStrings {
 public:
  StopStrings(const common::Tokenizer& tokenizer, const std::vector<std::string>& strings)
      : tokenizer_(tokenizer), strings_(strings) {}

  bool found_after(int id, common::Token token) {
    std::string& text = texts_[id];
    text += tokenizer_.decode({&token, 1});
    return text.size() > cut(text).size();
  }
  // Up to the first of them.
  std::string cut(const std::string& text) const {
    std::size_t end = text.size();
    for (const std::string& string : strings_) {
      end = std::min(end, text.find(string));
    }
    return text.substr(0, end);
  }

 private:
  const common::Tokenizer& tokenizer_;
  const std::vector<std::string>& strings_;
  std::map<int, std::string> texts_;  // of first samples
};

void print_texts(const common::Session& session, const Server& server, const StopStrings& stop_strings) {
  for (int id = 0; id < server.num_requests(); ++id) {
    const RequestOutput& output = server.output(id);
    if (!output.error.empty()) {
      std::cout << common::format("%3d  ", id) << output.error << "\n";
    }
    for (const common::Completion& completion : output.completions) {
      std::cout << common::format("%3d  ", id)
                << common::quote(stop_strings.cut(session.tokenizer.decode(completion.tokens)), 400) << "\n";
    }
  }
}

void run_serve(const common::Session& session, const ServingOptions& options) {
  const common::ResultFile json(options.json_path);
  std::optional<common::Llama> synthetic;
  if (!options.synthetic.empty()) {
    synthetic = common::Llama::synthetic(common::find_preset(options.synthetic).config, 1);
  }
  const common::Llama& model = synthetic ? *synthetic : session.model;
  Engine engine(model, with_chunk_size_at_least(options.scheduler.token_budget, options.engine));
  const std::vector<ArrivingRequest> requests = make_requests(session, engine, options);
  SchedulerOptions scheduler = options.scheduler;
  set_preemption_costs(scheduler, model, engine.cache().shape());
  if (engine.gpu() != nullptr) {
    engine.gpu()->warm_up(scheduler.token_budget, scheduler.max_sequences);
  }
  RealClock real_clock;
  VirtualClock virtual_clock;
  Clock& clock = options.virtual_clock ? static_cast<Clock&>(virtual_clock) : real_clock;
  Server server(engine, scheduler, clock);
  const bool json_only = json.is_stdout();
  // Random weights draw tokens that the session's tokenizer does not know.
  const bool has_texts = !json_only && !synthetic;
  const std::unique_ptr<View> view =
      make_view(has_texts ? options.view : ViewKind::kQuiet, session.tokenizer, std::cout);
  std::unique_ptr<TraceWriter> trace;
  if (!options.trace_path.empty()) {
    trace = std::make_unique<TraceWriter>(options.trace_path);
  }
  Metrics metrics;
  server.on_step([&](const StepReport& report) {
    metrics.add(report);
    view->on_step(server, report);
    if (trace) {
      trace->add(report);
    }
  });
  if (options.shown_step >= 0 && !json_only) {
    server.on_pass([&](const RaggedBatch& batch) {
      if (metrics.totals.steps == options.shown_step) {
        std::cout << format_batch(batch);
      }
    });
  }
  StopStrings stop_strings(session.tokenizer, options.stop_strings);
  serve(server, clock, requests, [&](int id, int sample, common::Token token) {
    view->on_token(id, sample, token);
    if (sample == 0 && options.num_samples == 1 && !options.stop_strings.empty() &&
        stop_strings.found_after(id, token)) {
      server.stop(id, common::FinishReason::kStop);
    }
  });
  if (trace) {
    trace->finish(server);
  }
  if (json.is_wanted()) {
    json.write(metrics_json(server, metrics, options.virtual_clock ? "virtual" : "real"));
  }
  if (has_texts) {
    std::cout << "\n";
    print_texts(session, server, stop_strings);
    std::cout << "\n";
  }
  if (!json_only) {
    std::cout << metrics_table(server, metrics);
  }
}

}  // namespace

void add_scheduler_options(common::Command& command, SchedulerOptions& scheduler, EngineOptions& engine) {
  command.option("--budget", scheduler.token_budget, {1, 1 << 16}, "max tokens in one step, of all requests together");
  command.option("--max-sequences", scheduler.max_sequences, {1, 1 << 16}, "max sequences that run at once");
  command.option("--headroom", scheduler.headroom, {0, 1024},
                 "blocks left free for each running sequence when another request is admitted");
  command.choice("--preemption", scheduler.preemption,
                 {{"recompute", Preemption::kRecompute}, {"swap", Preemption::kSwap}, {"auto", Preemption::kAuto}},
                 "how a preempted request is resumed: recompute, swap, or auto, whichever is cheaper");
  command.flag_pair("run-ahead", scheduler.run_ahead,
                    "schedule a step before the tokens of the one before are known (default: on a GPU)");
  command.option("--host-slots", engine.num_host_slots, {0, 1 << 24}, "room for what is swapped out, in tokens");
}

void set_preemption_costs(SchedulerOptions& scheduler, const common::Llama& model, const KvCacheShape& shape) {
  // Computing a token takes two operations per parameter. As an order of magnitude, a CPU or a GPU copies at most one
  // byte in the time of 16 operations.
  constexpr std::int64_t kOperationsPerByte = 16;
  scheduler.token_compute_cost = 2 * model.num_parameters() / kOperationsPerByte;
  scheduler.block_swap_cost = 2 * shape.bytes_per_slot() * shape.block_size;  // out and in
}

EngineOptions with_chunk_size_at_least(int num_tokens, EngineOptions options) {
  options.chunk_size = std::max(options.chunk_size, num_tokens);
  return options;
}

common::Command& add_serve_command(common::Program& program, ServingOptions& options) {
  common::Command& command =
      program.add_session_command("serve", "Serve requests that arrive while others run, and show it",
                                  [&](const common::Session& session) { run_serve(session, options); });
  command.option("--arrivals", options.arrivals,
                 "poisson:RATE, in requests a second, or a file with lines \"seconds prompt_tokens output_tokens\"; "
                 "default: all at once");
  command.option("--requests", options.num_requests, {1, 1 << 20},
                 "how many, the prompts in turn (default: one per prompt)");
  command.option("--samples", options.num_samples, {1, 1024}, "texts per request, drawn from one prompt");
  command.option("--beams", options.num_beams, {1, 1024},
                 "instead: search for the likeliest texts with this many beams");
  const auto add_stop_string = [&options](const std::string& text) {
    if (text.empty()) {
      throw common::InputError("--stop needs a text: the empty one would end every reply");
    }
    options.stop_strings.push_back(text);
  };
  command.option("--stop", add_stop_string, "a text that ends a reply, and is no part of it");
  command.option("--synthetic", options.synthetic, "random weights in a published shape, as for bench");
  command.flag("--virtual-clock", options.virtual_clock,
               "a step takes 1 ms, and 0.1 ms per token: the same run on every machine");
  command.choice(
      "--view", options.view,
      {{"auto", ViewKind::kAuto}, {"live", ViewKind::kLive}, {"plain", ViewKind::kPlain}, {"quiet", ViewKind::kQuiet}},
      "live (for a terminal), plain (one line per step), quiet, or auto");
  command.option("--show-batch", options.shown_step, {0, 1 << 30}, "print the arrays of this step's batch");
  command.option("--trace", options.trace_path, "write the run to a file that ui.perfetto.dev opens");
  command.option("--json", options.json_path, "write the measurements to a file ('-': stdout, and nothing else)");
  return command;
}

}  // namespace
