// An engine with a small model, and the texts of its requests when each is served alone.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/text.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(demo/static_scheduler.h)
#include STAGE_HEADER(make_runner.h)
#ifdef COURSE_PRODUCTION
#include STAGE_HEADER(production/speculation/speculating_engine.h)
#endif
// clang-format on

namespace tests {

struct ServingOptions {
  int num_blocks = 64;
  int block_size = 4;
  int num_host_blocks = 0;
  bool prefix_cache = true;
  stage::SchedulerOptions scheduler = {.headroom = 0};  // tight, so that much happens
  bool static_batches = false;
  bool reserve_ahead = false;  // of static batches
  bool speculates = false;     // drafts whenever a request may have some, as if they cost nothing
  int num_host_cache_blocks = 0;
  bool has_windows = false;  // of the model: the ledger's
  // Puts a runner of the test's own around the one that computes.
  std::function<std::unique_ptr<stage::Runner>(std::unique_ptr<stage::Runner>)> wrap = nullptr;
};

// For ServingOptions::wrap: a Wrapper of the runner and these arguments, which `made` points to from then on.
template <typename Wrapper, typename... Arguments>
auto wrap_in(Wrapper*& made, Arguments... arguments) {
  return [&made, arguments...](std::unique_ptr<stage::Runner> runner) -> std::unique_ptr<stage::Runner> {
    auto wrapper = std::make_unique<Wrapper>(std::move(runner), arguments...);
    made = wrapper.get();
    return wrapper;
  };
}

inline std::unique_ptr<stage::Engine> make_serving_engine(const common::Llama& model,
                                                          const stage::EngineOptions& engine,
                                                          stage::VirtualClock& clock, const ServingOptions& options) {
  stage::EngineOptions with_host_cache = engine;
  with_host_cache.num_host_slots += options.num_host_cache_blocks * engine.block_size;
  std::unique_ptr<stage::Runner> runner = stage::make_runner(model, with_host_cache);
  poison(*runner);
  if (options.wrap) {
    runner = options.wrap(std::move(runner));
  }
#ifdef COURSE_PRODUCTION
  if ((options.speculates || options.num_host_cache_blocks > 0) && !options.static_batches) {
    const stage::TokenCost cost =
        options.speculates ? stage::TokenCost{.per_token = 0.0, .max_tokens = 64} : stage::kCpuTokenCost;
    return stage::make_speculating_engine(model, engine, std::move(runner), 0, clock, cost,
                                          options.num_host_cache_blocks);
  }
#endif
  stage::MakeScheduler make_scheduler;
  if (options.static_batches) {
    make_scheduler = [&](stage::KvCacheManager& manager, const stage::SchedulerOptions& scheduler, bool prefix_cache) {
      return std::make_unique<stage::StaticScheduler>(manager, scheduler, prefix_cache, options.reserve_ahead);
    };
  }
  return std::make_unique<stage::Engine>(model, engine, std::move(runner), clock, make_scheduler);
}

// Slots of the cache that were not written are NaN.
struct Serving {
  explicit Serving(const ServingOptions& serving_options, const common::Llama& model = small_model())
      : options(serving_options),
        owned_engine(make_serving_engine(model, engine_options(serving_options), clock, serving_options)),
        engine(*owned_engine) {
    engine.on_step([this](const stage::StepReport& report) { reports.push_back(report); });
  }

  static stage::EngineOptions engine_options(const ServingOptions& options) {
    stage::EngineOptions result;
    result.num_slots = options.num_blocks * options.block_size;
    result.block_size = options.block_size;
    result.num_host_slots = options.num_host_blocks * options.block_size;
    result.prefix_cache = options.prefix_cache;
    result.scheduler = options.scheduler;
    result.gpu.device = stage::Device::kCpu;
    return result;
  }

  // Its tokens go to on_token.
  int submit(const stage::GenerationRequest& request) {
    return engine.submit(request, [this](int id, int sample, common::Token token) {
      if (on_token) {
        on_token(id, sample, token);
      }
    });
  }

  void submit_all(const std::vector<stage::GenerationRequest>& requests) {
    for (const stage::GenerationRequest& request : requests) {
      submit(request);
    }
  }

  // The rules that hold after every step (stage 8, invariants 1 to 5). Empty if they do.
  std::string problem() const {
    if (reports.empty()) {
      return "a step without a report";
    }
    const stage::StepReport& report = reports.back();
    int num_tokens = 0;
    for (const int count : report.num_served) {
      num_tokens += count;
    }
    if (num_tokens != report.num_tokens || num_tokens > options.scheduler.token_budget) {
      return common::format("%d tokens in a step of %d", num_tokens, options.scheduler.token_budget);
    }
    if (num_tokens == 0 && !options.scheduler.run_ahead.value_or(false)) {
      return "a step without a token";
    }
    if (!std::is_sorted(report.served.begin(), report.served.end())) {
      return "served out of order";
    }
    int num_sequences = 0;
    int latest_running = -1;
    for (const auto& group : engine.scheduler().running()) {
      num_sequences += group->max_sequences();
      latest_running = std::max(latest_running, group->id());
      if (group->output().state != stage::RequestState::kRunning) {
        return "a running request's state is another";
      }
    }
    if (num_sequences > options.scheduler.max_sequences) {
      return common::format("%d sequences run", num_sequences);
    }
    int before = latest_running;
    for (const auto& group : engine.scheduler().waiting()) {
      if (group->id() <= before) {
        return "a later arrival has overtaken an earlier one";
      }
      before = group->id();
      if (group->output().state !=
          (group->sequences().empty() ? stage::RequestState::kWaiting : stage::RequestState::kSwapped)) {
        return "a waiting request's state is another";
      }
      for (const int sequence : group->sequences()) {
        if (!engine_manager().is_swapped(sequence)) {
          return "a waiting request holds blocks";
        }
      }
    }
    return check_ledger(engine_manager(), options.num_blocks, options.block_size, options.has_windows);
  }

  // Empty if, after the last request, every block is free or cached, and every host block is free.
  std::string leak() const {
    const stage::KvCacheManager& manager = engine_manager();
    if (manager.usage().reserved != 0 || !manager.sequences().empty()) {
      return common::format("%d slots are still reserved at the end", manager.usage().reserved);
    }
    const int held = options.num_host_blocks - manager.num_free_host_blocks();
    return held == 0 ? "" : count_of(held, "host block") + " still in use at the end";
  }

  // Serves all requests. Returns the first problem, or an empty string.
  std::string run() {
    while (true) {
      const bool is_idle = engine.is_idle();
      if (engine.step() == is_idle) {
        return is_idle ? "step() is true although there is nothing to do: a loop over it never ends"
                       : "step() is false although a request has not ended";
      }
      if (is_idle) {
        return leak();
      }
      if (std::string found = problem(); !found.empty()) {
        return found;
      }
    }
  }

  const stage::KvCacheManager& engine_manager() const { return engine.scheduler().manager(); }

  ServingOptions options;
  stage::VirtualClock clock;
  std::vector<stage::StepReport> reports;
  stage::TokenSink on_token;  // may be set while requests are served
  std::unique_ptr<stage::Engine> owned_engine;
  stage::Engine& engine;
};

// What the request gets in a roomy engine of its own, with each sample served alone.
inline std::vector<common::Completion> served_alone(const stage::GenerationRequest& request,
                                                    const common::Llama& model = small_model()) {
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  stage::Engine engine(model, options);
  if (request.length_penalty.has_value()) {
    const int id = engine.submit(request);
    while (engine.step()) {
    }
    return engine.output(id).completions;
  }
  std::vector<common::Completion> result;
  common::Request sample = request.request;
  for (int i = 0; i < request.num_samples; ++i, ++sample.sample_index) {
    result.push_back(run_requests(engine, std::span(&sample, 1)).completions.front());
  }
  return result;
}

// Empty if the texts are the expected ones; is_part: if they are beginnings of the expected texts.
inline std::string compare_output(const stage::RequestOutput& output, const std::vector<common::Completion>& expected,
                                  bool is_part = false) {
  if (!is_part && output.completions.size() != expected.size()) {
    return common::format("%zu texts, expected %zu: ", output.completions.size(), expected.size()) + output.error;
  }
  for (std::size_t i = 0; i < output.completions.size(); ++i) {
    const std::vector<common::Token>& actual = output.completions[i].tokens;
    std::vector<common::Token> wanted = expected[i].tokens;
    wanted.resize(is_part ? std::min(wanted.size(), actual.size()) : wanted.size());
    if (const std::string difference = first_difference(actual, wanted); !difference.empty()) {
      return common::format("text %zu ", i) + difference + ": " + to_string(actual) + ", expected " + to_string(wanted);
    }
    if (!is_part && output.completions[i].finish_reason != expected[i].finish_reason) {
      return common::format("text %zu ends for another reason", i);
    }
  }
  return "";
}

}  // namespace tests
