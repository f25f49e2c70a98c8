#include "compare.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iostream>
#include <memory>
#include <vector>

#include "../serve/engine_adapter.h"
#include "common/app/progress.h"
#include "common/app/result_file.h"
#include "common/app/table.h"
#include "common/app/token_source.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/presets.h"
#include "common/serving/arrivals.h"
#include "common/serving/plot.h"
#include "common/serving/served_model.h"
#include "common/serving/tally.h"
#include "static_scheduler.h"

namespace stage8 {
namespace {

// The model computes all policies in the same ragged batches: they differ in memory, and in when a request may join.
struct ServingPolicy {
  const char* name;
  bool static_batches;
  bool reserve_ahead;
  bool knows_lengths;  // whether the reply's length is known on arrival; on a real server it never is
};
constexpr std::array<ServingPolicy, 4> kPolicies = {{{"reserved: the longest", true, true, false},
                                                     {"reserved: as needed", true, true, true},
                                                     {"blocks, static", true, false, false},
                                                     {"blocks, continuous", false, false, false}}};

struct Run {
  common::Tally tally{common::Keep::kValues};
  common::Curve slots;    // share of the cache that holds a token, over time
  common::Curve running;  // requests, over time
};

std::vector<common::ArrivingRequest> make_requests(const common::Session& session, const common::Llama& model,
                                                   const std::vector<common::Arrival>& arrivals, int max_length,
                                                   const ServingPolicy& policy) {
  std::vector<common::ArrivingRequest> requests;
  const common::TokenSource source(session, model.config().vocab_size);
  for (const common::Arrival& arrival : arrivals) {
    common::GenerationRequest added;
    added.request.prompt = source.take(static_cast<int>(requests.size()), arrival.prompt_tokens);
    added.request.max_new_tokens = policy.knows_lengths ? arrival.output_tokens : max_length - arrival.prompt_tokens;
    requests.push_back({arrival.time, std::move(added), arrival.output_tokens});
  }
  return requests;
}

Run run_policy(const common::Llama& model, const CompareOptions& options, const ServingPolicy& policy,
               const std::vector<common::ArrivingRequest>& requests, std::int64_t num_tokens) {
  const auto make_scheduler = [&](KvCacheManager& manager, const SchedulerOptions& chosen,
                                  bool use_prefix_cache) -> std::unique_ptr<Scheduler> {
    if (policy.static_batches) {
      return std::make_unique<StaticScheduler>(manager, chosen, use_prefix_cache, policy.reserve_ahead);
    }
    return std::make_unique<Scheduler>(manager, chosen, use_prefix_cache);
  };
  const std::unique_ptr<common::ServedEngine> engine =
      make_served_engine(model, options.engine, {.virtual_clock = options.virtual_clock}, {}, make_scheduler);
  Run run;
  run.slots.name = run.running.name = policy.name;
  // In tokens: the requests of a static batch end late and all at once.
  common::Progress progress(std::string(policy.name) + ", tokens", num_tokens);
  const auto on_token = [&](int, int, common::Token) { progress.advance(); };
  const auto on_step = [&](const common::StepReport& report) {
    run.tally.add(report);
    run.slots.points.emplace_back(report.end, 100.0 * report.usage.used / report.usage.total);
    run.running.points.emplace_back(report.end, report.num_running);
  };
  for (const common::RequestResult& result :
       common::serve(*engine, requests, {.on_token = on_token, .on_step = on_step})) {
    run.tally.add(result);
  }
  COMMON_CHECK(run.tally.num_finished() == static_cast<std::int64_t>(requests.size()), "a request was not served");
  return run;
}

void run_compare(const common::Session& session, const CompareOptions& options) {
  const common::ResultFile plot(options.plot_path);
  const common::ServedModel served(session, options.synthetic);
  const common::Llama& model = served.get();
  const int longest = std::min(model.config().context_length, *options.engine.num_slots);
  if (longest < 2) {
    throw common::InputError("a prompt and a reply have at least a token each; give more --slots");
  }
  common::check_rate(options.rate);
  const int max_length = options.max_length > 0 ? options.max_length : longest;
  if (max_length > longest) {
    throw common::InputError(common::format("the longest request can have %d tokens here", longest));
  }
  const std::vector<common::Arrival> arrivals =
      common::chat_arrivals(options.num_requests, options.rate, max_length, options.seed);
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;
  for (const common::Arrival& arrival : arrivals) {
    prompt_tokens += arrival.prompt_tokens;
    output_tokens += arrival.output_tokens;
  }
  std::cout << common::format(
      "%d requests of %.0f prompt and %.0f reply tokens on average, at most %d together; "
      "a cache of %d slots\n\n",
      options.num_requests, static_cast<double>(prompt_tokens) / options.num_requests,
      static_cast<double>(output_tokens) / options.num_requests, max_length, *options.engine.num_slots);

  common::Table table({"served with", "at once", "max", "slots used", "memory short", "tokens/s", "x", "P50", "P99"});
  common::Chart slots{"slots that hold a token, % of the cache", "seconds", "", 100.0, {}};
  common::Chart running{"requests at once", "seconds", "requests", 0.0, {}};
  double first = 0.0;
  for (const ServingPolicy& policy : kPolicies) {
    const Run run =
        run_policy(model, options, policy, make_requests(session, model, arrivals, max_length, policy), output_tokens);
    const double speed = run.tally.output_tokens_per_second();
    first = first > 0.0 ? first : speed;
    const common::Spread per_token = run.tally.per_token_seconds.spread();
    table.add_row({policy.name, common::format("%.1f", run.tally.running.value()),
                   std::to_string(run.tally.steps.max_running),
                   common::format_percent(run.tally.slots_used.value(), 1.0),
                   common::format_percent(run.tally.slots_used_while_memory_short.value(), 1.0),
                   common::format("%.1f", speed), common::format("%.2f", speed / first),
                   common::format("%.1f", 1e3 * per_token.median), common::format("%.1f", 1e3 * per_token.p99)});
    slots.curves.push_back(run.slots);
    running.curves.push_back(run.running);
  }
  std::cout << table.to_string() << "\nmemory short: slots used while requests wait because blocks are missing\n"
            << "P50, P99: milliseconds from arrival to end, divided by the reply's tokens\n";
  if (plot.is_wanted()) {
    plot.write(common::draw_charts({slots, running}, "Slots in use and requests at once, over time",
                                   "One curve for each way of serving the same requests in the same memory."));
  }
}

}  // namespace

common::Command& add_compare_command(common::Program& program, CompareOptions& options) {
  common::Command& command = program.add_session_command(
      "compare", "Serve the same requests in the same memory in four ways: reserved, in blocks, continuously",
      [&](const common::Session& session) { run_compare(session, options); }, {.prompts = false, .sampling = false});
  command.option("--requests", options.num_requests, {1, 1 << 20},
                 "how many, with lengths in the shape of a chat trace");
  command.option("--max-length", options.max_length, {4, 1 << 24},
                 "prompt and reply of the longest (default: the context)");
  command.option("--seed", options.seed, "random seed of lengths and times");
  command.option("--rate", options.rate, {1e-6, 1e6}, "requests a second (default: all at once)");
  command.option("--synthetic", options.synthetic, "random weights in a published shape, as for bench",
                 common::find_preset);
  command.exclude("--synthetic", "--model");
  command.flag("--virtual-clock", options.virtual_clock,
               "a step takes 1 ms, and 0.1 ms per token: the same run on every machine");
  command.file("--plot", options.plot_path, "draw both curves into an SVG file");
  return command;
}

}  // namespace
