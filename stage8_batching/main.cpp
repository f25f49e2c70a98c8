#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/app/block_map.h"
#include "common/app/cli.h"
#include "common/app/gpu_types.h"
#include "common/app/shell.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "common/serving/serve_command.h"
#include "demo/by_hand.h"
#include "demo/compare.h"
#include "demo/pictures.h"
#include "demo/prefix_commands.h"
#include "demo/production_commands.h"
#include "demo/sampling_commands.h"
#include "demo/scene.h"
#include "demo/steps_by_hand.h"
#include "engine.h"
#include "kv_cache.h"
#include "make_runner.h"
#include "serve/engine_adapter.h"
#include "serve/make_engine.h"

namespace stage8 {
namespace {

constexpr const char* kIdea = "Requests join and leave the batch at every step: continuous batching.";

// B shares three blocks of A's prompt; C finds the same three after both have ended; D needs the room.
constexpr const char* kScript = R"(prompt A once_upon_a_time
prompt B once_upon_a_hill
show
free A
free B
show
prompt C once_upon_a_time
show
free C
new D 20
show
)";

void show(const KvCacheManager& manager, std::ostream& output) {
  const Usage usage = manager.usage();
  std::vector<common::MapCell> cells(usage.total);
  common::Table table({"sequence", "length", "block table", "unused"});
  for (const SequenceId sequence : manager.sequences()) {
    const int length = manager.length(sequence);
    const std::vector<int> slots = manager.slots(sequence, 0, manager.capacity(sequence));
    for (std::size_t position = 0; position < slots.size(); ++position) {
      const int count = manager.reference_count(slots[position] / manager.block_size());
      const char fill = static_cast<int>(position) < length ? common::count_digit(count) : '-';
      cells[slots[position]] = {.color = count - 1, .fill = fill};
    }
    table.add_row({std::string(1, common::sequence_name(sequence)), std::to_string(length),
                   common::format_list(manager.block_table(sequence)),
                   std::to_string(manager.capacity(sequence) - length)});
  }
  for (const int block : manager.prefix_cache().evictable()) {
    std::fill_n(cells.begin() + block * manager.block_size(), manager.block_size(), common::MapCell{.fill = 'c'});
  }
  output << common::draw_map(cells, manager.block_size(), common::use_color(output)) << table.to_string()
         << common::format("used %d of %d reserved slots, cached %d, free %d\n", usage.used, usage.reserved,
                           usage.cached, usage.total - usage.reserved - usage.cached)
         << sharing_summary(manager) << "\n";
}

void add_demo_commands(common::Shell& shell, KvCacheManager& manager) {
  shell.add("new", "NAME LENGTH", "start a sequence with room for LENGTH tokens",
            [&](const auto& arguments, std::ostream& output) {
              const SequenceId sequence = common::sequence_named(manager, arguments[0], false);
              const int length = common::parse_count(arguments[1], 1);
              if (!manager.allocate(sequence, length)) {
                output << "refused: no room for " << length << "\n";
              }
            });
  shell.add("append", "NAME COUNT", "put COUNT more tokens into the cache",
            [&](const auto& arguments, std::ostream& output) {
              const SequenceId sequence = common::sequence_named(manager, arguments[0], true);
              const int count = common::parse_count(arguments[1], 1);
              if (manager.reserve(sequence, count)) {
                print_copies(output, manager.pending_copies());
                manager.clear_pending_copies();
                manager.commit(sequence, count);
              } else {
                output << "refused: no room for " << count << " more\n";
              }
            });
  add_sharing_commands(shell, manager);
  add_prefix_commands(shell, manager);
  shell.add("free", "NAME", "end a sequence", [&](const auto& arguments, std::ostream&) {
    manager.free(common::sequence_named(manager, arguments[0], true));
  });
  shell.add("show", "", "the cache, slot by slot", [&](const auto&, std::ostream& output) { show(manager, output); });
}

// A small cache; its commands come from kScript or, with --shell, from standard input.
void demo(int num_slots, bool shell_only, int block_size) {
  KvCacheManager manager(blocks_needed(num_slots, block_size), block_size);
  common::Shell shell;
  add_demo_commands(shell, manager);
  std::istringstream script(kScript);
  shell.run(shell_only ? std::cin : script, std::cout, !shell_only);
}

void add_engine_options(common::Command& command, EngineOptions& options, bool has_budget = false) {
  const std::string default_size = options.num_slots ? "" : " (default: what is needed or, to serve, what fits)";
  command.option("--slots", options.num_slots, {1, 1 << 24}, "size of the cache, in tokens" + default_size);
  if (!options.num_slots.has_value()) {
    command.option("--memory-fraction", options.memory_fraction, {0.01, 1.0},
                   "what fits: this share of what the GPU has free beside the model");
  }
  command.option("--context-length", options.context_length, {1, 1 << 24},
                 "max tokens of a prompt and its reply together (default: the model's)");
  if (!has_budget) {
    command.option("--chunk", options.scheduler.token_budget, {1, 1 << 16}, "max prompt tokens in one forward pass");
  }
  command.option("--block-size", options.block_size, {1, 1 << 16}, "slots in a block");
  command.flag_off("--no-prefix-cache", options.prefix_cache, "compute again what other sequences have computed");
  command.choice("--device", options.gpu.device,
                 {{"auto", Device::kAuto}, {"cpu", Device::kCpu}, {"gpu", Device::kGpu}},
                 "cpu, gpu, or auto: the GPU if there is one");
  common::add_type_options(command, options.gpu.types);
  command.option("--tensor-parallel", options.gpu.tensor_parallel, {1, 64},
                 "GPUs that compute the model together, each with a part of every matrix");
  command.choice("--all-reduce", options.gpu.all_reduce, {{"nccl", AllReduce::kNccl}, {"peer", AllReduce::kPeer}},
                 "with several GPUs: what adds up their parts of few tokens, NCCL or kernels that use peers' memory");
}

// One sequence with random K and V, for `bench --attention`.
common::AttentionTarget attention_target(const common::AttentionShape& shape, int block_size) {
  const int length = shape.context_length;
  const int num_blocks = blocks_needed(length, block_size);
  const auto manager = std::make_shared<KvCacheManager>(num_blocks, block_size);
  const auto cache = std::make_shared<KvCache>(
      KvCacheShape{shape.num_layers, num_blocks, block_size, shape.num_heads, shape.num_kv_heads, shape.head_dim});
  COMMON_CHECK(manager->allocate(0, length), "the cache was made for this sequence");
  const common::Matrix kv = common::Matrix::Random(length, shape.num_kv_heads * shape.head_dim);
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    cache->write(layer, manager->slots(0, 0, length), kv, kv);
  }
  return {[=](int layer, const common::Matrix& q) { attention(*cache, layer, q, manager->block_table(0), length); },
          cache->shape().bytes_per_slot() / shape.num_layers * length};
}

}  // namespace

int run(int argc, char** argv) {
  common::Program program(STAGE_NAME, kIdea);
  EngineOptions options{.num_slots = std::nullopt};
  int num_drafts = 0;
  const auto start_engine = [&](const common::Session& session) {
    int needed = options.min_slots;
    const int context = session.model.config().context_length;
    for (const common::Request& request : session.requests) {  // one that is longer than the context is rejected
      needed = std::max(needed, std::min(max_slots_of(request, 1, options.block_size), context));
    }
    EngineOptions sized = options;
    sized.num_slots = options.num_slots.value_or(needed);
    const std::shared_ptr<Engine> engine =
        make_engine(session.model, sized, make_engine_runner(session.model, sized), num_drafts);
    return [engine](std::span<const common::Request> requests, const common::OnToken& on_token) {
      std::vector<common::Completion> completions = engine->run(requests, on_token);
      return common::RunResult{std::move(completions), engine->counters(), engine->timing()};
    };
  };
  for (common::Command* command : {&program.add_generate(start_engine), &program.add_chat(start_engine)}) {
    add_engine_options(*command, options);
    add_draft_option(*command, num_drafts);
  }

  std::unique_ptr<Engine> engine;
  std::uint64_t num_benches = 0;
  const auto bench_target = [&](const common::Session& session) {
    EngineOptions sized = options;
    sized.min_slots = std::max(sized.min_slots, session.bench_tokens);
    engine = make_engine(session.model, sized, make_engine_runner(session.model, sized), num_drafts);
    common::BenchTarget target;
    target.serve = [&](std::span<const common::Token> prompt, int num_tokens, const std::function<void()>& on_token) {
      common::Request request;
      request.prompt.assign(prompt.begin(), prompt.end());
      request.max_new_tokens = num_tokens;
      request.cache_salt = ++num_benches;
      const auto completions = engine->run({&request, 1}, [&](int, common::Token) { on_token(); });
      const common::Completion& completion = completions.front();
      if (completion.finish_reason == common::FinishReason::kFailed) {
        throw std::runtime_error(completion.error);
      }
      const bool is_rejected = completion.finish_reason == common::FinishReason::kRejected;
      if (is_rejected && static_cast<int>(prompt.size()) + num_tokens > engine->context_length()) {
        throw common::InputError(completion.error);
      }
      return !is_rejected;
    };
    target.kv_bytes_per_token = engine->cache().bytes_per_slot;
    target.read_limit = [&] { return read_limit(session.model, options, engine->cache()); };
    return target;
  };
  const auto block_attention = [&](const common::AttentionShape& shape) {
    return attention_target(shape, options.block_size);
  };
  common::Command& bench_command = program.add_bench(bench_target, block_attention);
  add_engine_options(bench_command, options);
  add_draft_option(bench_command, num_drafts);
  bench_command.remove("--context-length");  // it follows from --prompt-tokens and --new-tokens

  program.add_block_commands(options.block_size, start_engine);
  DecodingOptions decoding;
  add_engine_options(add_sample_command(program, decoding), decoding.engine);
  add_engine_options(add_beam_command(program, decoding), decoding.engine);
  ReuseOptions reuse;
  common::Command& prefix_command = add_prefix_command(program, reuse);
  add_engine_options(prefix_command, reuse.engine);
  prefix_command.remove("--no-prefix-cache");  // the command runs with and without the cache
  prefix_command.remove("--context-length");
  common::ServeOptions serving;
  EngineOptions served_engine{.num_slots = std::nullopt};
  ProductionOptions served_production;
  serving.http.make_demo_pool = demo_pools(add_demo_commands);
  common::Command& serve_command =
      add_serve_command(program, serving, [&](const common::Llama& model, const common::EngineDemand& demand) {
        return make_served_engine(model, served_engine, demand, served_production);
      });
  add_engine_options(serve_command, served_engine, true);
  add_production_options(serve_command, served_production);
  add_scheduler_options(serve_command, served_engine);
  CompareOptions comparison;
  common::Command& compare_command = add_compare_command(program, comparison);
  add_engine_options(compare_command, comparison.engine, true);
  compare_command.remove("--context-length");  // it follows from --max-length
  add_scheduler_options(compare_command, comparison.engine);

  ProductionDemos demos;
  for (const auto& [production_command, engine_options] : add_production(program, demos)) {
    add_engine_options(*production_command, *engine_options);
  }

  int demo_slots = 32;
  int demo_block_size = 4;
  bool shell_only = false;
  common::Command& command = program.add_command("demo", "Fill a small cache by a script, and look at it",
                                                 [&] { demo(demo_slots, shell_only, demo_block_size); });
  command.option("--slots", demo_slots, {4, 1 << 16}, "size of the cache, in tokens");
  command.option("--block-size", demo_block_size, {1, 1024}, "slots in a block");
  command.flag("--shell", shell_only, "read commands from standard input instead; 'help' lists them");
  add_by_hand_command(program);
  StepsOptions steps;
  add_steps_command(program, steps);
  program.add_pictures(pictures());
  program.add_scenes(scenes());
  return program.run(argc, argv);
}

}  // namespace
namespace stage = stage8;

int main(int argc, char** argv) { return stage::run(argc, argv); }
