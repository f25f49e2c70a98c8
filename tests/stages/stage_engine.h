// How each stage turns requests into text: by its engine up to stage 7, by the server over it from stage 8 on, so that
// the tests run the loop that serves. Stage 8's server gets the names of the earlier stages' engine.
#pragma once

#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/model/generation.h"
#include "tests/support/stage_api.h"

#include STAGE_HEADER(engine.h)
#if STAGE_NUMBER >= 7
#include STAGE_HEADER(cpu_runner.h)
#endif
#if STAGE_NUMBER >= 5
#include STAGE_HEADER(decoding.h)
#endif
#if STAGE_NUMBER >= 8
#include STAGE_HEADER(server.h)
#endif

namespace tests {

struct EngineRun {
  std::vector<common::Completion> completions;
  std::vector<common::Counter> counters;
  common::Timing timing;
};

#if STAGE_NUMBER >= 7
// Of an engine that computes on the CPU.
inline stage::CpuRunner& cpu_runner(stage::Engine& engine) { return dynamic_cast<stage::CpuRunner&>(engine.runner()); }
#endif

// Fills the cache with NaN, so that a read of an unwritten slot shows. A GPU's is full of it from the start.
inline void poison(stage::Engine& engine) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
#if STAGE_NUMBER < 7
  engine.cache().fill(kNaN);
#else
  if (auto* const runner = dynamic_cast<stage::CpuRunner*>(&engine.runner())) {
    runner->kv_cache().fill(kNaN);
  }
#endif
}

inline void ignore_token(int, common::Token) {}

// Runs all requests to their end. chunk_size: the engine's, and also the token budget of a step.
inline EngineRun run_requests(stage::Engine& engine, std::span<const common::Request> requests,
                              const common::OnToken& on_token = ignore_token) {
  EngineRun run;
#if STAGE_NUMBER < 8
  run.completions = engine.run(requests, on_token);
  run.counters = engine.counters();
  run.timing = engine.timing();
#else
  stage::VirtualClock clock;
  // No headroom, as in the stages before, which leave no blocks free for requests to grow into.
  stage::Server server(engine, {.token_budget = engine.options().chunk_size, .headroom = 0}, clock);
  COMMON_CHECK(!server.step(), "step() is true although there is nothing to do: run() would never end");
  run.completions = server.run(requests, on_token);
  run.counters = server.counters();
  run.timing = server.timing();
#endif
  return run;
}

#if STAGE_NUMBER >= 5 && STAGE_NUMBER < 8
using ParallelSampling = stage::ParallelSampling;
using BeamSearch = stage::BeamSearch;
#elif STAGE_NUMBER >= 8
// One sequence group in a server of its own, step by step.
class ServedGroup {
 public:
  ServedGroup(stage::Engine& engine, const stage::GenerationRequest& request)
      : server_(engine,
                {.token_budget = engine.options().chunk_size,
                 .max_sequences = engine.options().max_sequences,
                 .headroom = 0},
                clock_),
        id_(server_.submit(request)) {
    if (!output().error.empty()) {
      throw common::InputError(output().error);
    }
  }

  // False if the free blocks are too few for the step.
  bool step() {
    try {
      return server_.step();
    } catch (const common::CheckError&) {
      return false;
    }
  }
  bool finished() const { return output().finished(); }
  std::vector<stage::Branch> live() const {
    for (const auto& group : server_.scheduler().running()) {
      return group->live();
    }
    for (const auto& group : server_.scheduler().waiting()) {
      return group->live();
    }
    return {};
  }
  const std::vector<common::Completion>& completions() const { return output().completions; }
  const std::vector<stage::Hypothesis>& hypotheses() const { return output().hypotheses; }
  common::Timing timing() const { return server_.timing(); }

 private:
  const stage::RequestOutput& output() const { return server_.output(id_); }

  stage::VirtualClock clock_;
  stage::Server server_;
  int id_;
};

class ParallelSampling : public ServedGroup {
 public:
  // The last parameter is the first sequence id, in stages where the caller chooses ids.
  ParallelSampling(stage::Engine& engine, const common::Request& request, int num_samples, int /*first*/ = 0)
      : ServedGroup(engine, {request, num_samples}) {}
};

class BeamSearch : public ServedGroup {
 public:
  BeamSearch(stage::Engine& engine, const common::Request& request, const stage::BeamOptions& options)
      : ServedGroup(engine, {request, 1, options}) {}
};
#endif

}  // namespace tests
