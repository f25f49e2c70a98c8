#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "common/app/block_map.h"
#include "common/app/cli.h"
#include "common/app/gpu_types.h"
#include "common/app/rounds.h"
#include "common/app/shell.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"
#include "demo/by_hand.h"
#include "demo/ladder_reads.h"
#include "demo/pictures.h"
#include "demo/prefix_commands.h"
#include "demo/sampling_commands.h"
#include "demo/scene.h"
#include "engine.h"
#include "kv_cache.h"
#include "make_runner.h"

namespace stage7 {
namespace {

constexpr const char* kIdea = "The cache moves to the GPU, and kernels of this course read it there.";

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

// A small cache; its commands come from kScript or, with --shell, from standard input.
void demo(int num_slots, bool shell_only, int block_size) {
  KvCacheManager manager(blocks_needed(num_slots, block_size), block_size);
  common::Shell shell;
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
  std::istringstream script(kScript);
  shell.run(shell_only ? std::cin : script, std::cout, !shell_only);
}

void add_engine_options(common::Command& command, EngineOptions& options) {
  command.option("--slots", options.num_slots, {1, 1 << 24}, "size of the cache, in tokens");
  command.option("--chunk", options.chunk_size, {1, 1 << 16}, "max prompt tokens in one forward pass");
  command.option("--block-size", options.block_size, {1, 1 << 16}, "slots in a block");
  command.flag_off("--no-prefix-cache", options.prefix_cache, "compute again what other sequences have computed");
  command.choice("--device", options.gpu.device,
                 {{"auto", Device::kAuto}, {"cpu", Device::kCpu}, {"gpu", Device::kGpu}},
                 "cpu, gpu, or auto: the GPU if there is one");
  common::add_type_options(command, options.gpu.types);
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
  EngineOptions options;
  const auto start_engine = [&](const common::Session& session) {
    const auto engine = std::make_shared<Engine>(session.model, options);
    return [engine](std::span<const common::Request> requests, const common::OnToken& on_token) {
      std::vector<common::Completion> completions = engine->run(requests, on_token);
      return common::RunResult{std::move(completions), engine->counters(), engine->timing()};
    };
  };
  add_engine_options(program.add_generate(start_engine), options);
  add_engine_options(program.add_chat(start_engine), options);
  const auto rounds = [&](const common::Session& session, std::span<const common::Request> requests,
                          common::RoundTable& table) {
    Engine engine(session.model, options);
    return engine.run(requests, [&](int request, common::Token) { table.add(request, engine.manager()); });
  };
  add_engine_options(common::add_rounds(program, rounds), options);

  std::optional<Engine> engine;
  const auto bench_target = [&](const common::Session& session) {
    options.num_slots = session.bench_slots(options.num_slots);
    KvCacheManager& manager = engine.emplace(session.model, options).manager();
    const auto start = [&](int max_length) {
      if (manager.contains(0)) {
        manager.free(0);
      }
      return manager.allocate(0, max_length);
    };
    const auto append = [&](std::span<const common::Token> tokens) { return engine->append(0, tokens); };
    common::BenchTarget target{start, append, engine->cache().bytes_per_slot};
    target.decode = [&](common::Token token) {
      common::Completion completion;
      return engine->next(0, {&token, 1}, {}, completion);
    };
    target.read_limit = [&] { return read_limit(session.model, options, engine->cache()); };
    return target;
  };
  const auto block_attention = [&](const common::AttentionShape& shape) {
    return attention_target(shape, options.block_size);
  };
  add_engine_options(program.add_bench(bench_target, block_attention), options);

  program.add_block_commands(options.block_size, start_engine);
  DecodingOptions decoding;
  add_engine_options(add_sample_command(program, decoding), decoding.engine);
  add_engine_options(add_beam_command(program, decoding), decoding.engine);
  ReuseOptions reuse;
  common::Command& prefix_command = add_prefix_command(program, reuse);
  add_engine_options(prefix_command, reuse.engine);
  prefix_command.remove("--no-prefix-cache");  // the command runs with and without the cache

  int demo_slots = 32;
  int demo_block_size = 4;
  bool shell_only = false;
  common::Command& command = program.add_command("demo", "Fill a small cache by a script, and look at it",
                                                 [&] { demo(demo_slots, shell_only, demo_block_size); });
  command.option("--slots", demo_slots, {4, 1 << 16}, "size of the cache, in tokens");
  command.option("--block-size", demo_block_size, {1, 1024}, "slots in a block");
  command.flag("--shell", shell_only, "read commands from standard input instead; 'help' lists them");
  add_by_hand_command(program);
  int ladder_step = 0;
  add_ladder_commands(program, ladder_step);
  program.add_pictures(pictures());
  program.add_scenes(scenes());
  return program.run(argc, argv);
}

}  // namespace
namespace stage = stage7;

int main(int argc, char** argv) { return stage::run(argc, argv); }
