// What the commands that serve have in common: the options, the model, and the server with all that it needs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "../clock.h"
#include "../engine.h"
#include "../scheduler.h"
#include "../server.h"
#include "common/app/cli.h"

namespace stage8 {

// Budget, limit, preemption, host memory: for each command that schedules.
void add_scheduler_options(common::Command& command, SchedulerOptions& scheduler, EngineOptions& engine);

// How many operations a processor does in the time in which it copies a byte between the cache and the host's memory,
// as an order of magnitude.
std::int64_t operations_per_byte(bool on_gpu, Precision precision);
// Sets the costs that Preemption::kAuto compares, for a model with so many parameters.
void set_preemption_costs(SchedulerOptions& scheduler, std::int64_t num_parameters, const CacheSize& cache,
                          std::int64_t operations_per_byte);

// The session's model or, if `synthetic` names a published shape, one of that shape with random weights.
class ServedModel {
 public:
  // The session must outlive the object.
  ServedModel(const common::Session& session, const std::string& synthetic);
  const common::Session& session() const { return session_; }
  const common::Llama& get() const { return synthetic_ ? *synthetic_ : session_.model; }
  bool is_synthetic() const { return synthetic_.has_value(); }
  // "SmolLM2-135M" of "models/SmolLM2-135M.gguf", or the shape's.
  std::string name() const;
  // The text of tokens. Random weights draw tokens that the session's tokenizer does not know; theirs are numbers.
  std::string decode(std::span<const common::Token> tokens, bool show_special = false) const;

 private:
  const common::Session& session_;
  std::string shape_;
  std::optional<common::Llama> synthetic_;
};

// Makes a scheduler of another kind than the server's own.
using MakeScheduler = std::function<std::unique_ptr<Scheduler>(KvCacheManager& manager, const SchedulerOptions& options,
                                                               bool use_prefix_cache)>;

// A server with an engine whose forward passes are as large as its steps. The clock starts when all is ready.
struct ServerSetup {
  ServerSetup(const common::Llama& model, EngineOptions engine_options, SchedulerOptions scheduler, bool virtual_clock,
              const MakeScheduler& make_scheduler = nullptr);

  std::unique_ptr<Engine> engine;
  std::unique_ptr<Clock> clock;
  std::unique_ptr<Server> server;
};

}  // namespace
