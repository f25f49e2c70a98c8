// What `plan` computes: published figures of known models, figures worked out by hand, and what it prints. And the
// bytes that `bench` says are read.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "common/app/bench.h"
#include "common/app/cli.h"
#include "common/app/plan.h"
#include "common/base/check.h"
#include "common/model/presets.h"
#include "tests/support/catch.h"
#include "tests/support/messages.h"
#include "tests/support/paths.h"

namespace {

using common::plan_pool;
using common::PoolDemand;
using common::PoolPlan;
using common::PoolShape;
using tests::contains;
using tests::error_of;
using tests::source_path;

constexpr std::int64_t kKiB = 1024;
constexpr std::int64_t kMiB = 1024 * kKiB;
constexpr std::int64_t kGiB = 1024 * kMiB;

PoolShape shape_of(const std::string& name, std::int64_t block_size = 16) {
  const common::Preset& preset = common::find_preset(name);
  return {preset.config, preset.bytes_per_kv_element, block_size};
}

// 2 bytes per token, so that sizes are easy to read: 1 layer, 1 head, 1 value of 1 byte.
PoolShape tiny_shape(std::int64_t block_size) {
  return {{.num_layers = 1, .num_heads = 1, .num_kv_heads = 1, .head_dim = 1}, 1, block_size};
}

PoolDemand demand_of(const std::vector<std::int64_t>& lengths, std::int64_t max_length = 2048) {
  PoolDemand demand;
  demand.lengths = lengths;
  demand.max_length = max_length;
  return demand;
}

PoolDemand mean_of(std::int64_t mean_length, std::int64_t max_length = 2048) {
  PoolDemand demand;
  demand.mean_length = mean_length;
  demand.max_length = max_length;
  return demand;
}

// Collects what is written to a stream.
class Captured {
 public:
  explicit Captured(std::ostream& stream) : stream_(stream), original_(stream.rdbuf(text_.rdbuf())) {}
  ~Captured() { stream_.rdbuf(original_); }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::ostream& stream_;
  std::streambuf* original_;
};

struct Output {
  int code = 0;
  std::string out;
  std::string err;
};

Output run_plan(std::vector<std::string> arguments) {
  common::Program program("stage2", "for the test");
  int block_size = 16;
  program.add_bench({}, {});
  program.add_block_commands(block_size, {});  // `plan` is one of them
  arguments.insert(arguments.begin(), {"stage2", "plan"});
  std::vector<char*> pointers;
  pointers.reserve(arguments.size());
  for (std::string& argument : arguments) {
    pointers.push_back(argument.data());
  }
  const Captured out(std::cout);
  const Captured err(std::cerr);
  const int code = program.run(static_cast<int>(pointers.size()), pointers.data());
  return {code, out.text(), err.text()};
}

}  // namespace

TEST_CASE("plan: bytes per token, block and sequence of known models", "[plan]") {
  struct Row {
    const char* name;
    std::int64_t token;
    std::int64_t block;
    std::int64_t sequence;
  };
  const std::vector<Row> rows = {
      {"llama-2-7b", 512 * kKiB, 8 * kMiB, kGiB},        {"llama-2-13b", 800 * kKiB, 12800 * kKiB, 1600 * kMiB},
      {"llama-2-70b", 320 * kKiB, 5 * kMiB, 640 * kMiB}, {"llama-3-8b", 128 * kKiB, 2 * kMiB, 256 * kMiB},
      {"llama-3-70b", 320 * kKiB, 5 * kMiB, 640 * kMiB}, {"llama-3.2-1b", 32 * kKiB, 512 * kKiB, 64 * kMiB},
      {"smollm2-135m", 23040, 360 * kKiB, 45 * kMiB},    {"qwen3-0.6b", 112 * kKiB, 1792 * kKiB, 224 * kMiB},
      {"mistral-7b", 128 * kKiB, 2 * kMiB, 256 * kMiB},  {"gemma-3-270m", 18 * kKiB, 288 * kKiB, 36 * kMiB},
      {"tales-5m", 3 * kKiB, 48 * kKiB, 6 * kMiB}};
  CHECK(rows.size() == common::presets().size());
  for (const Row& row : rows) {
    const PoolPlan plan = plan_pool(shape_of(row.name), kGiB, PoolDemand());
    CAPTURE(row.name);
    CHECK(plan.bytes_per_token == row.token);
    CHECK(plan.bytes_per_block == row.block);
    CHECK(plan.bytes_per_max_length == row.sequence);
  }
}

TEST_CASE("plan: what windows reach of a sequence", "[plan]") {
  const auto seen = [](const char* name, std::int64_t length) {
    PoolDemand demand;
    demand.max_length = length;
    return plan_pool(shape_of(name), kGiB, demand).bytes_seen;
  };
  // In blocks of 16, 4,096 tokens lie in up to 257 blocks. All 32 layers see no more.
  CHECK(seen("mistral-7b", 2048) == 256 * kMiB);
  CHECK(seen("mistral-7b", 4096) == 256 * 2 * kMiB);
  CHECK(seen("mistral-7b", 32768) == 257 * 2 * kMiB);
  // 512 tokens: 33 blocks in 15 of 18 layers; a block has 16 KiB in a layer. Three layers see all.
  CHECK(seen("gemma-3-270m", 32768) == (15 * 33 + 3 * 2048) * 16 * kKiB);
  CHECK(seen("llama-3-8b", 8192) == 1024 * kMiB);
}

TEST_CASE("plan: the pool has the whole blocks that the memory holds", "[plan]") {
  const PoolPlan plan = plan_pool(shape_of("tales-5m"), kMiB, PoolDemand());
  CHECK(plan.num_blocks == 21);
  CHECK(plan.num_slots == 336);
  CHECK(plan_pool(shape_of("llama-2-7b"), 16 * kGiB, PoolDemand()).num_blocks == 2048);

  CHECK(plan_pool(shape_of("tales-5m"), 48 * kKiB, PoolDemand()).num_blocks == 1);
  const PoolPlan too_small = plan_pool(shape_of("tales-5m"), 48 * kKiB - 1, PoolDemand());
  CHECK(too_small.num_blocks == 0);
  CHECK(too_small.num_slots == 0);
  CHECK(too_small.paged_sequences == 0);
}

TEST_CASE("plan: pools of known sizes", "[plan]") {
  const PoolPlan llama_13b = plan_pool(shape_of("llama-2-13b"), 54000000000, mean_of(500));
  CHECK(llama_13b.num_slots == 65904);
  CHECK(llama_13b.paged_sequences == 129);
  CHECK(plan_pool(shape_of("llama-2-70b"), 50 * kGiB, PoolDemand()).num_blocks == 10240);
}

TEST_CASE("plan: a mix of given lengths is counted exactly", "[plan]") {
  const auto mix_slots = [](const std::vector<std::int64_t>& lengths, std::int64_t block_size) {
    return plan_pool(shape_of("tales-5m", block_size), kGiB, demand_of(lengths)).mix_slots;
  };
  const PoolPlan plan = plan_pool(shape_of("tales-5m"), kMiB, demand_of({11, 11, 4, 16}));
  CHECK(plan.mix_sequences == 4);
  CHECK(plan.mix_tokens == 42);
  CHECK(plan.mix_slots == 64);
  CHECK(mix_slots({300}, 16) == 304);
  CHECK(mix_slots({1}, 16) == 16);
  CHECK(mix_slots({15}, 16) == 16);
  CHECK(mix_slots({16}, 16) == 16);
  CHECK(mix_slots({17}, 16) == 32);
  for (const std::int64_t block_size : {1, 2, 16, 256}) {
    CAPTURE(block_size);
    CHECK(mix_slots({256}, block_size) == 256);
  }
}

TEST_CASE("plan: sequences are taken from the mix in turn until one does not fit", "[plan]") {
  // Blocks of 4 slots, 8 bytes; sequences of 1, 3 and 2 blocks: 6 blocks per round.
  const std::vector<std::int64_t> expected = {0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5, 6};
  for (std::size_t blocks = 0; blocks < expected.size(); ++blocks) {
    CAPTURE(blocks);
    CHECK(plan_pool(tiny_shape(4), static_cast<std::int64_t>(blocks) * 8, demand_of({3, 12, 5}, 12)).paged_sequences ==
          expected[blocks]);
  }
}

TEST_CASE("plan: with a mean length, (B - 1) / 2 slots of the last block are unused on average", "[plan]") {
  const PoolPlan plan = plan_pool(shape_of("llama-2-7b"), 16 * kGiB, mean_of(800));
  CHECK(plan.mix_sequences == 2);
  CHECK(plan.mix_slots - plan.mix_tokens == 15);
  CHECK(plan.paged_sequences == 40);  // 32768 slots / 807.5
  CHECK(plan.reserved_sequences == 16);

  SECTION("as in a mix that fills last blocks equally often to every extent") {
    std::vector<std::int64_t> lengths;
    for (std::int64_t length = 785; length <= 816; ++length) {
      lengths.push_back(length);
    }
    const PoolPlan spread = plan_pool(shape_of("llama-2-7b"), 16 * kGiB, demand_of(lengths));
    CHECK(2 * (spread.mix_slots - spread.mix_tokens) == 15 * spread.mix_sequences);
  }
  SECTION("blocks of one slot waste nothing") {
    const PoolPlan slots = plan_pool(tiny_shape(1), 2000, mean_of(10));
    CHECK(slots.mix_slots == slots.mix_tokens);
    CHECK(slots.paged_sequences == 100);
  }
  SECTION("no sequence takes less than a block") {
    CHECK(plan_pool(tiny_shape(256), 5120, mean_of(1)).paged_sequences == 10);
  }
  SECTION("no sequence takes more than the longest one") {
    CHECK(plan_pool(shape_of("llama-2-7b"), 16 * kGiB, mean_of(2048)).paged_sequences == 16);
  }
}

TEST_CASE("plan: a contiguous cache reserves the maximum length for every sequence", "[plan]") {
  CHECK(plan_pool(tiny_shape(16), 4095, demand_of({100}, 1024)).reserved_sequences == 1);
  CHECK(plan_pool(tiny_shape(16), 4096, demand_of({100}, 1024)).reserved_sequences == 2);
  // So it never serves more sequences than a cache in blocks, if the maximum length is a multiple of the block size.
  for (const std::int64_t length : {1, 16, 17, 1000, 1024}) {
    const PoolPlan mix = plan_pool(shape_of("tales-5m"), 600 * kMiB, demand_of({length}, 1024));
    CAPTURE(length);
    CHECK(mix.paged_sequences >= mix.reserved_sequences);
  }
}

TEST_CASE("plan: lengths that are not from 1 to the maximum length are input errors", "[plan]") {
  const auto message = [](const PoolDemand& demand) {
    return error_of([&] { plan_pool(shape_of("tales-5m"), kGiB, demand); });
  };
  CHECK(contains(message(demand_of({100, 0})), "a length of 0"));
  CHECK(contains(message(demand_of({-5})), "-5"));
  CHECK(contains(message(demand_of({2049})), "2049"));
  CHECK(message(demand_of({2048})).empty());
  CHECK(contains(message(mean_of(0)), "a length of 0"));
  CHECK(contains(message(mean_of(3000)), "a length of 3000 is not from 1 to the maximum length, 2048 (--max-length)"));
}

TEST_CASE("plan: memory is a number with an optional unit", "[plan]") {
  struct Row {
    const char* text;
    std::int64_t bytes;
  };
  const std::vector<Row> rows = {{"1", 1},
                                 {"1234567", 1234567},
                                 {"24e9", 24000000000},
                                 {"896B", 896},
                                 {"600MiB", 600 * kMiB},
                                 {"16GiB", 16 * kGiB},
                                 {"1.5 GiB", 3 * kGiB / 2},
                                 {"24GB", 24000000000},
                                 {"2kB", 2000},
                                 {"2KB", 2000},
                                 {"2KiB", 2048},
                                 {"1TB", 1000000000000},
                                 {"8192TiB", 9007199254740992},
                                 {"1.1KiB", 1126},
                                 {"0.5KiB", 512}};
  for (const Row& row : rows) {
    CAPTURE(row.text);
    CHECK(common::parse_memory(row.text) == row.bytes);
  }
  for (const char* text : {"",
                           "0",
                           "0.5",
                           "-1",
                           "-16GiB",
                           "GiB",
                           "16G",
                           "16gib",
                           "16XiB",
                           "16  GiB",
                           "16GiBs",
                           "16GiB ",
                           " 16",
                           "1e",
                           "1e400",
                           "inf",
                           "nan",
                           "8193TiB",
                           "9223372036854775808",
                           "0x10",
                           "1,000",
                           "16Gi"}) {
    const std::string message = error_of([&] { common::parse_memory(text); });
    CAPTURE(text, message);
    CHECK(contains(message, "memory"));
    CHECK(contains(message, "GiB"));
  }
}

TEST_CASE("plan: prints the presets", "[plan]") {
  const Output output = run_plan({});
  CHECK(output.code == 0);
  CHECK(output.err.empty());
  CHECK(
      output.out ==
      R"(| preset       | layers | heads | KV heads | head_dim | bytes |  a token | a block of 16 | a sequence of 2,048 |
| ------------ | -----: | ----: | -------: | -------: | ----: | -------: | ------------: | ------------------: |
| llama-2-7b   |     32 |    32 |       32 |      128 |     2 |  512 KiB |      8.00 MiB |            1.00 GiB |
| llama-2-13b  |     40 |    40 |       40 |      128 |     2 |  800 KiB |      12.5 MiB |            1.56 GiB |
| llama-2-70b  |     80 |    64 |        8 |      128 |     2 |  320 KiB |      5.00 MiB |             640 MiB |
| llama-3-8b   |     32 |    32 |        8 |      128 |     2 |  128 KiB |      2.00 MiB |             256 MiB |
| llama-3-70b  |     80 |    64 |        8 |      128 |     2 |  320 KiB |      5.00 MiB |             640 MiB |
| llama-3.2-1b |     16 |    32 |        8 |       64 |     2 | 32.0 KiB |       512 KiB |            64.0 MiB |
| smollm2-135m |     30 |     9 |        3 |       64 |     2 | 22.5 KiB |       360 KiB |            45.0 MiB |
| qwen3-0.6b   |     28 |    16 |        8 |      128 |     2 |  112 KiB |      1.75 MiB |             224 MiB |
| mistral-7b   |     32 |    32 |        8 |      128 |     2 |  128 KiB |      2.00 MiB |             256 MiB |
| gemma-3-270m |     18 |     4 |        1 |      256 |     2 | 18.0 KiB |       288 KiB |            36.0 MiB |
| tales-5m     |      6 |     8 |        2 |       32 |     4 | 3.00 KiB |      48.0 KiB |            6.00 MiB |
)");
  CHECK(contains(run_plan({"--preset", "mistral-7b", "--max-length", "8192"}).out,
                 "| of these, in blocks that a window reaches |  514 MiB |"));
  CHECK_FALSE(contains(run_plan({"--preset", "mistral-7b", "--max-length", "4096"}).out, "window"));
  CHECK(contains(run_plan({"--memory", "16GiB"}).out, "sequences in blocks"));
}

TEST_CASE("plan: prints one model in a given memory", "[plan]") {
  const Output output = run_plan({"--preset", "llama-2-7b", "--memory", "16GiB"});
  CHECK(output.code == 0);
  CHECK(output.err.empty());
  CHECK(output.out == R"(32 layers, 32 query heads, 32 KV heads, 128 values per head, 2 bytes per value

| KV cache               |     size |
| ---------------------- | -------: |
| a token                |  512 KiB |
| a block of 16          | 8.00 MiB |
| a sequence of 2,048    | 1.00 GiB |
| blocks in the memory   |    2,048 |
| tokens in these blocks |   32,768 |

| sequences of 800 on average | in blocks | reserved at 2,048 |
| --------------------------- | --------: | ----------------: |
| sequences at once           |        40 |                16 |
| slots per sequence          |     807.5 |            2048.0 |
| unused slots per sequence   |       7.5 |            1248.0 |
| utilisation                 |    99.1 % |            39.1 % |
)");
}

TEST_CASE("plan: prints a mix of lengths", "[plan]") {
  const Output output = run_plan({"--preset", "tales-5m", "--memory", "1MiB", "--lengths", "11,11,4,16"});
  CHECK(output.code == 0);
  CHECK(output.out == R"(6 layers, 8 query heads, 2 KV heads, 32 values per head, 4 bytes per value

| KV cache                              |     size |
| ------------------------------------- | -------: |
| a token                               | 3.00 KiB |
| a token, repeated for each query head | 12.0 KiB |
| a block of 16                         | 48.0 KiB |
| a sequence of 2,048                   | 6.00 MiB |
| blocks in the memory                  |       21 |
| tokens in these blocks                |      336 |

| 4 sequences of 42 tokens in all | in blocks | reserved at 2,048 |
| ------------------------------- | --------: | ----------------: |
| sequences at once               |        21 |                 0 |
| slots per sequence              |      16.0 |            2048.0 |
| unused slots per sequence       |       5.5 |            2037.5 |
| utilisation                     |    65.6 % |             0.5 % |
)");
}

TEST_CASE("plan: takes the shape from a file, and other bytes and block sizes", "[plan]") {
  const std::string model = source_path("common/model/tales/tales-5m-q8_0.gguf");
  CHECK(contains(run_plan({"--model", model}).out, "6 layers, 8 query heads, 2 KV heads, 32 values per head, 2 bytes"));
  CHECK(run_plan({"--model", model, "--bytes", "4"}).out == run_plan({"--preset", "tales-5m"}).out);
  CHECK(contains(run_plan({"--preset", "llama-2-7b", "--bytes", "1"}).out, "256 KiB"));
  CHECK(contains(run_plan({"--preset", "llama-2-7b", "--block-size", "32"}).out, "a block of 32"));
}

TEST_CASE("plan: bad input is one line that names it", "[plan]") {
  struct Row {
    std::vector<std::string> arguments;
    const char* part;
  };
  const std::vector<Row> rows = {{{"--model", "/missing.gguf"}, "/missing.gguf"},
                                 {{"--preset", "llama-2-7b", "--memory", "7MiB"}, "less than one block, 8.00 MiB"}};
  for (const Row& row : rows) {
    const Output output = run_plan(row.arguments);
    CAPTURE(row.part, output.err);
    CHECK(output.code == 1);
    CHECK(output.out.empty());
    CHECK(contains(output.err, row.part));
    CHECK(output.err.rfind("stage2: ", 0) == 0);
    CHECK(output.err.find('\n') == output.err.size() - 1);
  }
}

TEST_CASE("plan: values that an option cannot have are usage errors", "[plan]") {
  struct Row {
    std::vector<std::string> arguments;
    const char* part;
  };
  const std::vector<Row> rows = {{{"--preset", "gpt-9"}, "gpt-9"},
                                 {{"--preset", ""}, "--preset"},
                                 {{"--max-length", "100"}, "800"},
                                 {{"--lengths", "100,5000"}, "5000"},
                                 {{"--model", "a.gguf", "--preset", "tales-5m"}, "--preset"},
                                 {{"--bytes", "0"}, "--bytes"},
                                 {{"--bytes", "many"}, "--bytes"},
                                 {{"--max-length", "67108865"}, "--max-length"},
                                 {{"--memory", "lots"}, "lots"},
                                 {{"--memory", ""}, "--memory"},
                                 {{"--memory", "0"}, "--memory"},
                                 {{"--block-size", ""}, "--block-size"},
                                 {{"--block-size", "-16"}, "-16"},
                                 {{"--lengths", ""}, "--lengths"},
                                 {{"--lengths", "5,,6"}, "5,,6"},
                                 {{"--lengths", "5,"}, "5,"},
                                 {{"--lengths", ",5"}, ",5"},
                                 {{"--lengths", "5,x"}, "5,x"},
                                 {{"--lengths", "5.5"}, "5.5"},
                                 {{"--lengths", "99999999999999999999"}, "99999999999999999999"},
                                 {{"--lengths", "1", "--mean-length", "2"}, "--lengths"}};
  for (const Row& row : rows) {
    const Output output = run_plan(row.arguments);
    CAPTURE(row.part, output.err);
    CHECK(output.code > 1);
    CHECK(output.out.empty());
    CHECK(contains(output.err, row.part));
  }
}

TEST_CASE("bench: the bytes of K and V that a token reads, with windows and without", "[plan]") {
  const auto read = [](const std::string& name, int prompt_tokens) {
    const common::Preset& preset = common::find_preset(name);
    const common::Llama model = common::Llama::synthetic(preset.config, 1, common::Windows::kComputed);
    common::BenchTarget target;
    target.kv_bytes_per_token = plan_pool(shape_of(name), kGiB, PoolDemand()).bytes_per_token;
    target.read_limit = [] { return common::ReadLimit{1, 1, 1.0}; };
    target.serve = [](std::span<const common::Token>, int num_tokens, const std::function<void()>& on_token) {
      for (int i = 0; i < num_tokens; ++i) {
        on_token();
      }
      return true;
    };
    const Captured out(std::cout);
    common::print_speed(model, target, prompt_tokens, 99, 0.0);
    const std::string text = out.text();
    const std::size_t row = text.find("keys and values read a token");
    return text.substr(row, text.find('\n', row) - row);
  };
  // With 10,050 tokens on average: three layers see them all, fifteen 512. 18 layers x 1 KiB.
  CHECK(contains(read("gemma-3-270m", 10000), " 36.9 MiB |"));  // (3 x 10,050 + 15 x 512) KiB
  CHECK(contains(read("gemma-3-270m", 300), " 6.15 MiB |"));    // 350 tokens x 18 KiB
  CHECK(contains(read("smollm2-135m", 1950), " 43.9 MiB |"));   // 2,000 tokens x 22.5 KiB
}
