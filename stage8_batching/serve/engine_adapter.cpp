#include "engine_adapter.h"

#include <algorithm>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "../make_runner.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "make_engine.h"

namespace stage8 {

void add_scheduler_options(common::Command& command, EngineOptions& options) {
  SchedulerOptions& scheduler = options.scheduler;
  command.option("--budget", scheduler.token_budget, {1, 1 << 16}, "max tokens in one step, of all requests together");
  command.option("--max-sequences", scheduler.max_sequences, {1, 1 << 16}, "max sequences that run at once");
  command.option("--headroom", scheduler.headroom, {0, 1024},
                 "blocks left free for each running sequence when another request is admitted");
  command.choice("--preemption", scheduler.preemption,
                 {{"recompute", Preemption::kRecompute}, {"swap", Preemption::kSwap}, {"auto", Preemption::kAuto}},
                 "how a preempted request is resumed: recompute, swap, or auto, whichever is cheaper");
  command.flag_pair("run-ahead", scheduler.run_ahead,
                    "schedule a step before the tokens of the one before are known (default: on a GPU)");
  command.option("--host-slots", options.num_host_slots, {0, 1 << 24}, "room for what is swapped out, in tokens");
}

std::int64_t operations_per_byte(bool on_gpu, common::Precision precision) {
  // A CPU copies within one memory.
  constexpr std::int64_t kCpu = 16;
  // An H200's data sheet: 989 Tflop/s in bfloat16 and 67 in float32; 64 GB/s each way over PCIe.
  constexpr std::int64_t kGpuBFloat16 = 15'000;
  constexpr std::int64_t kGpuFloat32 = 1'000;
  return !on_gpu ? kCpu : precision == common::Precision::kFloat32 ? kGpuFloat32 : kGpuBFloat16;
}

void set_preemption_costs(SchedulerOptions& scheduler, std::int64_t num_parameters, const CacheSize& cache,
                          std::int64_t operations_per_byte) {
  scheduler.token_compute_cost = 2 * num_parameters / operations_per_byte;  // two operations per parameter
  scheduler.block_swap_cost = 2 * cache.bytes_per_slot * cache.block_size;  // out and in
}

std::string format_batch(const RaggedBatch& batch) {
  std::string result;
  const auto add = [&](const char* name, const std::vector<int>& values, std::span<const int> starts) {
    result += common::format("%-15s", name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool begins = i > 0 && std::find(starts.begin(), starts.end(), static_cast<int>(i)) != starts.end();
      result += common::format("%s %4d", begins ? " |" : "", values[i]);
    }
    result += "\n";
  };
  add("tokens", batch.tokens, batch.query_starts);
  add("positions", batch.positions, batch.query_starts);
  add("slot_mapping", batch.slot_mapping, batch.query_starts);
  add("query_starts", batch.query_starts, {});
  add("context_lengths", batch.context_lengths, {});
  add("block_tables", batch.block_tables, batch.table_starts);
  add("table_starts", batch.table_starts, {});
  add("logits_rows", batch.logits_rows, {});
  return result;
}

namespace {

common::PoolSnapshot blocks_of(const KvCacheManager& manager) {
  common::PoolSnapshot pool;
  pool.block_size = manager.block_size();
  pool.num_blocks = manager.usage().total / manager.block_size();
  const auto& cached = manager.prefix_cache().evictable();
  pool.cached_blocks.assign(cached.begin(), cached.end());
  for (const int block : cached) {
    pool.cached_tokens.emplace_back(manager.prefix_cache().entry(block).tokens);
  }
  return pool;
}

common::PoolSnapshot::Sequence describe_sequence(const KvCacheManager& manager, SequenceId sequence) {
  return {manager.block_table(sequence), manager.length(sequence), sequence};
}

// Sets a flag during its own lifetime.
class ScopedFlag {
 public:
  explicit ScopedFlag(bool& flag) : flag_(flag) { flag_ = true; }
  ~ScopedFlag() { flag_ = false; }
  ScopedFlag(const ScopedFlag&) = delete;
  ScopedFlag& operator=(const ScopedFlag&) = delete;

 private:
  bool& flag_;
};

// Owns the parts of a served engine.
struct EngineParts {
  std::unique_ptr<common::Clock> clock;
  std::unique_ptr<Engine> engine;
};

class OwningAdapter : private EngineParts, public EngineAdapter {
 public:
  OwningAdapter(EngineParts parts, bool scores_prompts)
      : EngineParts(std::move(parts)), EngineAdapter(*EngineParts::engine, *EngineParts::clock, scores_prompts) {}
};

// On a CPU, cache and host memory are one allocation: if it fails, the error names the largest part.
std::unique_ptr<Runner> make_served_runner(const common::Llama& model, EngineOptions options, int num_host_cache_blocks,
                                           bool is_divided) {
  const int num_host_slots = options.num_host_slots;
  const int num_host_cache_slots = num_host_cache_blocks * options.block_size;
  options.num_host_slots =
      blocks_needed(num_host_slots, options.block_size) * options.block_size + num_host_cache_slots;
  try {
    return is_divided ? make_engine_runner(model, options) : make_runner(model, options);
  } catch (const std::bad_alloc&) {
    const int largest = std::max(num_host_slots, num_host_cache_slots);
    if (largest <= std::max(options.num_slots.value_or(0), options.min_slots)) {
      throw;
    }
    throw common::InputError(
        "not enough memory for " +
        (largest == num_host_slots ? "--host-slots " + std::to_string(largest) : std::string("--host-cache")) +
        "; less may fit");
  }
}

}  // namespace

EngineAdapter::EngineAdapter(Engine& engine, common::Clock& clock, bool scores_prompts)
    : engine_(engine), clock_(clock), scores_prompts_(scores_prompts) {
  engine.on_step([this](const common::StepReport& report) { last_step_ = report; });
}

void EngineAdapter::watch_passes(std::function<void(const std::string&)> on_pass) {
  engine_.on_pass([this, on_pass = std::move(on_pass)](const RaggedBatch& batch) {
    for (const auto& copies : {host_cache_copies(engine_), engine_.scheduler().manager().pending_copies()}) {
      for (const auto& [source, destination] : copies) {
        copies_.push_back({source, destination});
      }
    }
    if (on_pass) {
      on_pass(format_batch(batch));
    }
  });
}

common::EngineDescription EngineAdapter::description() const {
  const EngineOptions& options = engine_.options();
  const common::LlamaConfig& model = engine_.model().config();
  return {.sizes = {*options.num_slots, options.block_size, options.scheduler.token_budget},
          .max_sequences = options.scheduler.max_sequences,
          .num_host_blocks = blocks_needed(options.num_host_slots, options.block_size),
          .context_length = engine_.context_length(),
          .max_drafts = max_drafts(),
          .window = model.has_windows() && model.global_period == 0 ? model.window : 0,
          .reads_once = shares_all_reading(engine_),
          .exceeds_cache = exceeds_cache(engine_)};
}

common::EngineStatus EngineAdapter::status() const {
  const Scheduler& scheduler = engine_.scheduler();
  const KvCacheManager& manager = scheduler.manager();
  const Usage usage = manager.usage();
  const PrefixStatistics& prefix = manager.prefix_cache().statistics();
  common::EngineStatus status;
  status.num_running = static_cast<int>(scheduler.running().size());
  status.num_waiting = static_cast<int>(scheduler.waiting().size());
  status.slots = {usage.total, usage.reserved, usage.used, usage.cached};
  status.num_host_blocks_used =
      blocks_needed(engine_.options().num_host_slots, manager.block_size()) - manager.num_free_host_blocks();
  status.blocks_copied = engine_.blocks_copied();
  status.blocks_moved = blocks_moved_;
  status.prefix = {prefix.lookups,   prefix.hits,    prefix.tokens_saved,
                   prefix.evictions, prompt_tokens_, prompt_tokens_found_};
  status.host_cache = host_cache_figures(engine_);
  status.window_pool = window_pool_figures(engine_);
  status.window_prompts = window_prompt_figures(engine_);
  status.shared_reading = shared_reading_figures(engine_);
  return status;
}

common::PoolSnapshot EngineAdapter::pool() const {
  const Scheduler& scheduler = engine_.scheduler();
  common::PoolSnapshot pool = blocks_of(scheduler.manager());
  for (const auto& group : scheduler.running()) {
    pool.running.push_back(describe(*group));
  }
  for (const auto& group : scheduler.waiting()) {
    pool.waiting.push_back(describe(*group));
  }
  return pool;
}

common::PoolSnapshot::Owner EngineAdapter::describe(const SequenceGroup& group) const {
  const KvCacheManager& manager = engine_.scheduler().manager();
  common::PoolSnapshot::Owner owner;
  owner.id = group.id();
  owner.max_tokens = group.max_tokens();
  if (const auto client = clients_.find(group.id()); client != clients_.end()) {
    owner.prompt_tokens = client->second.prompt_tokens;
  }
  for (const SequenceId sequence : group.sequences()) {
    if (manager.is_swapped(sequence)) {
      owner.is_swapped = true;
    } else {
      owner.sequences.push_back(describe_sequence(manager, sequence));
      owner.sequences.back().tokens = group.tokens(sequence, 0, owner.sequences.back().length);
    }
  }
  for (const common::Completion& completion : group.output().completions) {
    owner.texts.emplace_back(completion.tokens);
  }
  if (owner.texts.empty()) {  // before the first token, or in a beam search
    for (const Branch& branch : group.live()) {
      owner.texts.emplace_back(branch.tokens);
    }
  }
  return owner;
}

int EngineAdapter::submit(const common::GenerationRequest& request, double arrival,
                          std::unique_ptr<common::RequestSink> sink) {
  const auto on_token = [this, client = sink.get()](int id, int sample, common::Token token) {
    const common::Completion& written = engine_.output(id).completions[static_cast<std::size_t>(sample)];
    client->on_token(id, sample, token, written.logprobs.empty() ? nullptr : &written.logprobs.back());
  };
  const bool has_texts = request.counted == common::Counted::kTexts;
  return add_client(engine_.submit(scores_prompts_ ? in_fewest_steps(request) : request, on_token, arrival),
                    {std::move(sink), static_cast<int>(request.request.prompt.size()), has_texts});
}

int EngineAdapter::reject(const std::string& reason, double arrival, std::unique_ptr<common::RequestSink> sink) {
  return add_client(engine_.reject(reason, arrival), {std::move(sink)});
}

int EngineAdapter::add_client(int id, Client client) {
  clients_[id] = std::move(client);
  report_end(id);  // if it was rejected
  return id;
}

void EngineAdapter::cancel(int id, common::FinishReason reason) {
  if (clients_.contains(id)) {
    engine_.stop(id, reason);
    if (!is_in_step_) {  // else step() does it: the sink that has called this must stay alive until then
      report_end(id);
    }
  }
}

bool EngineAdapter::step() {
  copies_.clear();
  {
    const ScopedFlag guard(is_in_step_);
    if (!engine_.step()) {
      return false;
    }
  }
  last_step_.copies = copies_;
  add_drawn();
  count_step();
  for (const int id : last_step_.ended) {
    report_end(id);
  }
  return true;
}

// Behind drafts, the last step drew what their texts end with now.
void EngineAdapter::add_drawn() {
  for (common::SequenceDrafts& drafts : last_step_.drafts) {
    for (const auto& group : engine_.scheduler().running()) {
      for (const Branch& branch : group->live()) {
        if (group->id() == drafts.request && branch.sequence == drafts.sequence) {
          drafts.drawn = branch.tokens.back();
        }
      }
    }
  }
}

// Adds the last step to the counts that the engine does not keep.
void EngineAdapter::count_step() {
  for (const int id : last_step_.admitted) {
    const auto client = clients_.find(id);
    const RequestOutput& output = engine_.output(id);
    const bool is_first_time = output.admission == last_step_.begin;  // not back from a preemption
    if (engine_.options().prefix_cache && is_first_time && client != clients_.end() && client->second.has_texts) {
      prompt_tokens_ += client->second.prompt_tokens;
      prompt_tokens_found_ += output.cached_tokens;
    }
  }
  const CacheSize& cache = engine_.cache();
  for (const auto& [source, destination] : copies_) {
    const int largest = std::max(source, destination);  // blocks behind those for swapping are the second tier's
    blocks_moved_ += largest >= cache.num_blocks && largest < cache.num_blocks + cache.num_host_blocks ? 1 : 0;
  }
  const std::int64_t saved = shared_reading_figures(engine_).blocks_saved;
  last_step_.num_reads_saved = saved - blocks_saved_;
  blocks_saved_ = saved;
  if (last_step_.num_reads_saved > 0) {
    const std::span<const int> blocks = shared_blocks(engine_);
    last_step_.shared_blocks.assign(blocks.begin(), blocks.end());
  }
}

// If the request has ended, reports that to its client, and forgets the request.
void EngineAdapter::report_end(int id) {
  const auto found = clients_.find(id);
  if (found == clients_.end() || !engine_.output(id).finished()) {
    return;
  }
  const common::RequestResult& output = engine_.output(id);
  common::RequestResult result = output;
  result.prompt_tokens = found->second.prompt_tokens;
  const std::unique_ptr<common::RequestSink> sink = std::move(found->second.sink);
  clients_.erase(found);
  engine_.forget(id);
  sink->on_end(id, std::move(result));
}

std::optional<common::ReadLimit> EngineAdapter::measure_read_limit() {
  return read_limit(engine_.model(), engine_.options(), engine_.cache());
}

std::unique_ptr<common::ServedEngine> make_served_engine(const common::Llama& model, EngineOptions options,
                                                         const common::EngineDemand& demand,
                                                         const ProductionOptions& production,
                                                         const MakeScheduler& make_scheduler) {
  if (production.host_cache_bytes > 0 && !options.prefix_cache) {
    throw common::InputError("--host-cache keeps what the prefix cache evicts: --no-prefix-cache leaves it nothing");
  }
  SchedulerOptions& scheduler = options.scheduler;
  if (demand.requests.empty()) {
    options.min_slots = std::max(options.min_slots, model.config().context_length);
  }
  const common::LlamaConfig& config = model.config();
  const int most = blocks_needed(config.context_length, options.block_size) * options.block_size;
  std::int64_t longest = 0;
  for (const common::GenerationRequest& request : demand.requests) {  // one that is longer than the context is rejected
    const common::Request& text = request.request;
    longest = std::max(longest, static_cast<std::int64_t>(text.prompt.size()) + text.max_new_tokens);
    const auto room = std::int64_t{request.num_samples} * most;
    // What texts share of a prompt is not shared by what their windows hold in the end.
    const auto wanted = config.has_both_kinds()
                            ? request.num_samples * std::int64_t{max_slots_of(text, 1, options.block_size)}
                            : max_slots_of(text, request.num_samples, options.block_size);
    options.min_slots = std::max(options.min_slots, static_cast<int>(std::min(wanted, room)));
  }
  if (config.has_both_kinds() && longest > 0) {  // layers with a window get room for texts of the context's length
    options.context_length = static_cast<int>(std::min<std::int64_t>(max_context(config, options), longest));
  }
  if (demand.sizes.has_value()) {
    options.num_slots = demand.sizes->num_slots;
    options.block_size = demand.sizes->block_size;
    scheduler.token_budget = demand.sizes->token_budget;
    if (demand.sizes->swaps.has_value()) {
      scheduler.preemption = *demand.sizes->swaps ? Preemption::kSwap : Preemption::kRecompute;
      options.num_host_slots =
          *demand.sizes->swaps ? 2 * *options.num_slots : 0;  // more than the pool can lose at once
    }
  }
  const int num_host_cache_blocks = host_cache_blocks(model.config(), options, production.host_cache_bytes);
  std::unique_ptr<Runner> runner = make_served_runner(model, options, num_host_cache_blocks, !make_scheduler);
  set_preemption_costs(scheduler, model.num_parameters(), runner->cache(),
                       operations_per_byte(runner->is_asynchronous(), options.gpu.types.precision));
  share_reading(*runner, production.shared_reading);
  const bool scores = !make_scheduler && scores_prompts(*runner);
  EngineParts parts;
  if (demand.virtual_clock) {
    parts.clock = std::make_unique<common::VirtualClock>();
  } else {
    parts.clock = std::make_unique<common::RealClock>();
  }
  if (make_scheduler) {
    parts.engine = std::make_unique<Engine>(model, options, std::move(runner), *parts.clock, make_scheduler);
  } else {
    parts.engine =
        make_engine(model, options, std::move(runner), production.num_drafts, *parts.clock, num_host_cache_blocks);
  }
  parts.engine->runner().warm_up(scheduler.token_budget, scheduler.max_sequences);  // its memory is divided by now
  auto adapter = std::make_unique<OwningAdapter>(std::move(parts), scores);
  adapter->watch_passes(demand.on_pass);
  return adapter;
}

common::MakeDemoPool demo_pools(std::function<void(common::Shell&, KvCacheManager&)> add_commands) {
  return [add_commands = std::move(add_commands)](common::Shell& shell, int num_blocks, int block_size) {
    const auto manager = std::make_shared<KvCacheManager>(num_blocks, block_size);
    add_commands(shell, *manager);
    return [manager] {
      common::PoolSnapshot pool = blocks_of(*manager);
      for (const SequenceId sequence : manager->sequences()) {
        pool.running.push_back({.id = sequence, .sequences = {describe_sequence(*manager, sequence)}});
      }
      return pool;
    };
  };
}

}  // namespace
