// Implements common/serving's interface of an engine with the stage's engine, and has the options of the commands that
// serve.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "../engine.h"
#include "../scheduler.h"
#include "common/app/cli.h"
#include "common/app/shell.h"
#include "common/serving/demo_pool.h"
#include "common/serving/served_engine.h"
#include "make_engine.h"

namespace stage8 {

// Adds the options for budget, limit, preemption and host memory to a command that schedules.
void add_scheduler_options(common::Command& command, EngineOptions& options);

// How many operations a processor does in the time in which it copies a byte between the cache and the host's memory,
// as an order of magnitude.
std::int64_t operations_per_byte(bool on_gpu, common::Precision precision);
// Sets the costs that Preemption::kAuto compares, for a model with num_parameters parameters.
void set_preemption_costs(SchedulerOptions& scheduler, std::int64_t num_parameters, const CacheSize& cache,
                          std::int64_t operations_per_byte);

// A batch's arrays, one per line; a '|' stands between sequences.
std::string format_batch(const RaggedBatch& batch);

// The caller's engine and clock, which must outlive the adapter. scores_prompts: make_engine()'s engine, of a runner of
// which scores_prompts() says so.
class EngineAdapter : public common::ServedEngine {
 public:
  EngineAdapter(Engine& engine, common::Clock& clock, bool scores_prompts = false);
  EngineAdapter(const EngineAdapter&) = delete;
  EngineAdapter& operator=(const EngineAdapter&) = delete;

  // From now on, step reports have the copies of blocks. Takes the engine's on_pass, so that the engine must not
  // compute once the adapter is gone. on_pass: called with the arrays of each forward pass, as text; may be null.
  void watch_passes(std::function<void(const std::string& batch)> on_pass);

  common::EngineDescription description() const override;
  common::EngineStatus status() const override;
  common::PoolSnapshot pool() const override;
  common::Clock& clock() override { return clock_; }

  int submit(const common::GenerationRequest& request, double arrival,
             std::unique_ptr<common::RequestSink> sink) override;
  int reject(const std::string& reason, double arrival, std::unique_ptr<common::RequestSink> sink) override;
  void cancel(int id, common::FinishReason reason) override;

  bool step() override;
  bool is_idle() const override { return engine_.is_idle(); }
  const common::StepReport& last_step() const override { return last_step_; }

  std::vector<common::Counter> counters() const override { return engine_.counters(); }
  std::optional<common::ReadLimit> measure_read_limit() override;

 private:
  struct Client {
    std::unique_ptr<common::RequestSink> sink;
    int prompt_tokens = 0;
    bool has_texts = false;  // else its reply is a prompt's scores
  };
  int add_client(int id, Client client);
  void report_end(int id);
  void add_drawn();
  void count_step();
  common::PoolSnapshot::Owner describe(const SequenceGroup& group) const;

  Engine& engine_;
  common::Clock& clock_;
  bool scores_prompts_;
  std::unordered_map<int, Client> clients_;  // by id, for requests that have not ended
  common::StepReport last_step_;
  std::int64_t prompt_tokens_ = 0;         // of requests that have been admitted and looked up in the prefix cache
  std::int64_t prompt_tokens_found_ = 0;   // of these, in the cache at that time
  std::int64_t blocks_moved_ = 0;          // between the pool and the host's memory
  std::int64_t blocks_saved_ = 0;          // that several sequences of a step have read once
  std::vector<common::BlockMove> copies_;  // of the current step
  bool is_in_step_ = false;
};

// Makes an engine with a clock that starts when all is ready. An engine with a scheduler of another kind has nothing of
// production/. Throws InputError if there is a second tier of the prefix cache without a first.
std::unique_ptr<common::ServedEngine> make_served_engine(const common::Llama& model, EngineOptions options,
                                                         const common::EngineDemand& demand,
                                                         const ProductionOptions& production = {},
                                                         const MakeScheduler& make_scheduler = nullptr);

// The pool on which the page runs the commands of `demo --shell`; add_commands adds them.
common::MakeDemoPool demo_pools(std::function<void(common::Shell&, KvCacheManager&)> add_commands);

}  // namespace
