// How each stage's engine turns requests into text, in the same words for all stages.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
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
// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(demo/lone_sequences.h)
// clang-format on
#endif

namespace tests {

// An engine that also computes sequences of the caller's, by start() and append(). From stage 8 on, the demonstrations
// have a class for that.
#if STAGE_NUMBER < 8
using SequenceEngine = stage::Engine;
#else
class SequenceEngine : public stage::Engine {
 public:
  using Engine::Engine;
  bool start(stage::SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt) {
    return sequences_.start(sequence, tokens, salt);
  }
  std::optional<common::Matrix> append(stage::SequenceId sequence, std::span<const common::Token> tokens) {
    return sequences_.append(sequence, tokens);
  }

 private:
  stage::LoneSequences sequences_{*this};
};
#endif

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
#if STAGE_NUMBER < 7
inline void poison(stage::Engine& engine) { engine.cache().fill(std::numeric_limits<float>::quiet_NaN()); }
#else
inline void poison(stage::Runner& runner) {
  if (auto* const cpu = dynamic_cast<stage::CpuRunner*>(&runner)) {
    cpu->kv_cache().fill(std::numeric_limits<float>::quiet_NaN());
  }
}
inline void poison(stage::Engine& engine) { poison(engine.runner()); }
#endif

inline void ignore_token(int, common::Token) {}

// Max tokens of a forward pass.
inline int& max_pass_tokens(stage::EngineOptions& options) {
#if STAGE_NUMBER < 8
  return options.chunk_size;
#else
  return options.scheduler.token_budget;
#endif
}

// The stage's options except for the headroom: the stages before 8 leave no blocks free for requests to grow into.
inline stage::EngineOptions tight_options() {
  stage::EngineOptions options;
#if STAGE_NUMBER >= 8
  options.scheduler.headroom = 0;
#endif
  return options;
}

// Runs all requests to their end.
inline EngineRun run_requests(stage::Engine& engine, std::span<const common::Request> requests,
                              const common::OnToken& on_token = ignore_token) {
#if STAGE_NUMBER >= 8
  COMMON_CHECK(!engine.is_idle() || !engine.step(),
               "step() is true although there is nothing to do: run() would never end");
#endif
  EngineRun run;
  run.completions = engine.run(requests, on_token);
  run.counters = engine.counters();
  run.timing = engine.timing();
  return run;
}

#if STAGE_NUMBER >= 5 && STAGE_NUMBER < 8
using ParallelSampling = stage::ParallelSampling;
using BeamSearch = stage::BeamSearch;
#elif STAGE_NUMBER >= 8
// One of the engine's sequence groups, step by step.
class ServedGroup {
 public:
  ServedGroup(stage::Engine& engine, const stage::GenerationRequest& request)
      : engine_(engine), id_(engine.submit(request)) {
    if (!output().error.empty()) {
      throw common::InputError(output().error);
    }
  }
  ~ServedGroup() { engine_.stop(id_, common::FinishReason::kCancelled); }
  ServedGroup(const ServedGroup&) = delete;
  ServedGroup& operator=(const ServedGroup&) = delete;

  // False if the free blocks are too few for the step.
  bool step() {
    try {
      return engine_.step();
    } catch (const common::CheckError&) {
      return false;
    }
  }
  bool finished() const { return output().finished(); }
  std::vector<stage::Branch> live() const {
    for (const auto& group : engine_.scheduler().running()) {
      if (group->id() == id_) {
        return group->live();
      }
    }
    for (const auto& group : engine_.scheduler().waiting()) {
      if (group->id() == id_) {
        return group->live();
      }
    }
    return {};
  }
  const std::vector<common::Completion>& completions() const { return output().completions; }
  const std::vector<stage::Hypothesis>& hypotheses() const { return output().hypotheses; }

 private:
  const stage::RequestOutput& output() const { return engine_.output(id_); }

  stage::Engine& engine_;
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
      : ServedGroup(engine, {request, options.width, options.length_penalty}) {}
};
#endif

}  // namespace tests
