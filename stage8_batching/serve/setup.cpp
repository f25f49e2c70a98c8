#include "setup.h"

#include <algorithm>
#include <filesystem>
#include <new>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/presets.h"

namespace stage8 {

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

std::int64_t operations_per_byte(bool on_gpu, Precision precision) {
  // A CPU copies within one memory.
  constexpr std::int64_t kCpu = 16;
  // An H200's data sheet: 989 Tflop/s in bfloat16 and 67 in float32; 64 GB/s each way over PCIe.
  constexpr std::int64_t kGpuBFloat16 = 15'000;
  constexpr std::int64_t kGpuFloat32 = 1'000;
  return !on_gpu ? kCpu : precision == Precision::kFloat32 ? kGpuFloat32 : kGpuBFloat16;
}

void set_preemption_costs(SchedulerOptions& scheduler, std::int64_t num_parameters, const CacheSize& cache,
                          std::int64_t operations_per_byte) {
  scheduler.token_compute_cost = 2 * num_parameters / operations_per_byte;  // two operations per parameter
  scheduler.block_swap_cost = 2 * cache.bytes_per_slot * cache.block_size;  // out and in
}

ServedModel::ServedModel(const common::Session& session, const std::string& synthetic)
    : session_(session), shape_(synthetic) {
  if (!synthetic.empty()) {
    synthetic_ = common::Llama::synthetic(common::find_preset(synthetic).config, 1);
  }
}

std::string ServedModel::name() const {
  if (is_synthetic()) {
    return shape_;
  }
  return session_.model_name == "the bundled model" ? "tales-5m"
                                                    : std::filesystem::path(session_.model_name).stem().string();
}

std::string ServedModel::decode(std::span<const common::Token> tokens, bool show_special) const {
  if (!is_synthetic()) {
    return session_.tokenizer.decode(tokens, show_special);
  }
  std::string text;
  for (const common::Token token : tokens) {
    text += ' ';
    text += std::to_string(token);
  }
  return text;
}

namespace {

// On a CPU, cache and host memory are one allocation: if it fails, the larger one is what to make smaller.
std::unique_ptr<Engine> make_engine(const common::Llama& model, const EngineOptions& options) {
  try {
    return std::make_unique<Engine>(model, options);
  } catch (const std::bad_alloc&) {
    if (options.num_host_slots <= std::max(options.num_slots.value_or(0), options.min_slots)) {
      throw;
    }
    throw common::InputError(
        common::format("not enough memory for --host-slots %d; a smaller number may fit", options.num_host_slots));
  }
}

}  // namespace

ServerSetup::ServerSetup(const common::Llama& model, EngineOptions engine_options, SchedulerOptions scheduler,
                         bool virtual_clock, const MakeScheduler& make_scheduler) {
  engine_options.chunk_size = scheduler.token_budget;
  engine_options.max_sequences = scheduler.max_sequences;
  engine = make_engine(model, engine_options);
  set_preemption_costs(scheduler, model.num_parameters(), engine->cache(),
                       operations_per_byte(engine->runner().is_asynchronous(), engine_options.gpu.precision));
  engine->runner().warm_up(scheduler.token_budget, scheduler.max_sequences);
  if (virtual_clock) {
    clock = std::make_unique<VirtualClock>();
  } else {
    clock = std::make_unique<RealClock>();
  }
  if (make_scheduler) {
    server = std::make_unique<Server>(*engine, *clock,
                                      make_scheduler(engine->manager(), scheduler, engine->options().prefix_cache));
  } else {
    server = std::make_unique<Server>(*engine, scheduler, *clock);
  }
}

}  // namespace
