// The arithmetic of `plan`: published figures of known models, by hand, and what it prints.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "common/app/cli.h"
#include "common/app/plan.h"
#include "common/base/check.h"
#include "tests/support/catch.h"

namespace {

using common::plan_pool;
using common::PoolDemand;
using common::PoolPlan;
using common::PoolShape;

constexpr std::int64_t kKiB = 1024;
constexpr std::int64_t kMiB = 1024 * kKiB;
constexpr std::int64_t kGiB = 1024 * kMiB;
constexpr std::int64_t kMostInt32 = 2147483647;

constexpr PoolShape kLlama7b = {32, 32, 32, 128, 2};
constexpr PoolShape kLlama13b = {40, 40, 40, 128, 2};
constexpr PoolShape kLlama70b = {80, 64, 8, 128, 2};
constexpr PoolShape kSmolLm2 = {30, 9, 3, 64, 2};
constexpr PoolShape kTales = {6, 8, 2, 32, 4};
// 1 layer, 1 head, 1 value of 1 byte: 2 bytes a token, so that sizes can be read off.
constexpr PoolShape kTiny = {1, 1, 1, 1, 1};

PoolShape with_block_size(PoolShape shape, std::int64_t block_size) {
  shape.block_size = block_size;
  return shape;
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

// The message of the InputError that `act` throws, "" if it throws none.
std::string input_error(const std::function<void()>& act) {
  try {
    act();
  } catch (const common::InputError& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Everything `print_plan` writes to a stream while it lives.
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
  common::add_plan(program);
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

TEST_CASE("bytes per token, block and sequence of known models", "[plan]") {
  struct Row {
    PoolShape shape;
    std::int64_t token;
    std::int64_t block;
    std::int64_t sequence;
  };
  const std::vector<Row> rows = {{kLlama7b, 512 * kKiB, 8 * kMiB, kGiB},
                                 {kLlama13b, 800 * kKiB, 12800 * kKiB, 1677721600},  // 1.5625 GiB
                                 {kLlama70b, 320 * kKiB, 5 * kMiB, 640 * kMiB},
                                 {kSmolLm2, 23040, 360 * kKiB, 45 * kMiB},  // 22.5 KiB
                                 {kTales, 3 * kKiB, 48 * kKiB, 6 * kMiB}};
  for (const Row& row : rows) {
    const PoolPlan plan = plan_pool(row.shape, kGiB, PoolDemand());
    CAPTURE(row.shape.num_layers);
    CHECK(plan.bytes_per_token == row.token);
    CHECK(plan.bytes_per_block == row.block);
    CHECK(plan.bytes_per_max_length == row.sequence);
  }
}

TEST_CASE("K and V repeated for every query head", "[plan]") {
  CHECK(plan_pool(kLlama7b, kGiB, PoolDemand()).bytes_per_repeated_token == 512 * kKiB);
  CHECK(plan_pool(kLlama70b, kGiB, PoolDemand()).bytes_per_repeated_token == 2560 * kKiB);
  CHECK(plan_pool(kTales, kGiB, PoolDemand()).bytes_per_repeated_token == 12 * kKiB);
}

TEST_CASE("the pool has the whole blocks that the memory holds", "[plan]") {
  const PoolPlan plan = plan_pool(kTales, kMiB, PoolDemand());
  CHECK(plan.num_blocks == 21);
  CHECK(plan.num_slots == 336);
  CHECK(plan.bytes_unused == 16 * kKiB);

  const PoolPlan exact = plan_pool(kLlama7b, 16 * kGiB, PoolDemand());
  CHECK(exact.num_blocks == 2048);
  CHECK(exact.bytes_unused == 0);

  CHECK(plan_pool(kTales, 48 * kKiB, PoolDemand()).num_blocks == 1);
  const PoolPlan too_small = plan_pool(kTales, 48 * kKiB - 1, PoolDemand());
  CHECK(too_small.num_blocks == 0);
  CHECK(too_small.num_slots == 0);
  CHECK(too_small.paged_sequences == 0);
  CHECK(too_small.bytes_unused == 48 * kKiB - 1);
}

TEST_CASE("a mix of given lengths is counted exactly", "[plan]") {
  SECTION("11, 11, 4 and 16 tokens take 4 blocks of 16, and use 42 of 64 slots") {
    const PoolPlan plan = plan_pool(kTales, kMiB, demand_of({11, 11, 4, 16}));
    CHECK(plan.mix_sequences == 4);
    CHECK(plan.mix_tokens == 42);
    CHECK(plan.mix_slots == 64);
    CHECK(plan.most_unused_slots == 12);
    CHECK(plan.most_unused_reserved_slots == 2044);
  }
  SECTION("300 tokens take 19 blocks, 304 slots") {
    CHECK(plan_pool(kTales, kGiB, demand_of({300})).mix_slots == 304);  // 19 blocks
  }
  SECTION("around a block's end") {
    CHECK(plan_pool(kTales, kGiB, demand_of({1})).mix_slots == 16);
    CHECK(plan_pool(kTales, kGiB, demand_of({15})).most_unused_slots == 1);
    CHECK(plan_pool(kTales, kGiB, demand_of({16})).most_unused_slots == 0);
    CHECK(plan_pool(kTales, kGiB, demand_of({17})).most_unused_slots == 15);
  }
  SECTION("a full last block wastes nothing, whatever the block size") {
    for (const std::int64_t block_size : {1, 2, 16, 256}) {
      const PoolPlan plan = plan_pool(with_block_size(kTales, block_size), kGiB, demand_of({256}));
      CAPTURE(block_size);
      CHECK(plan.mix_slots == 256);
    }
  }
}

TEST_CASE("sequences are taken from the mix in turn until one does not fit", "[plan]") {
  // Blocks of 4 slots, 8 bytes; sequences of 1, 3 and 2 blocks: 6 blocks a round.
  const PoolShape shape = with_block_size(kTiny, 4);
  const std::vector<std::int64_t> expected = {0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5, 6};
  for (std::size_t blocks = 0; blocks < expected.size(); ++blocks) {
    const std::int64_t memory = std::max<std::int64_t>(1, static_cast<std::int64_t>(blocks) * 8);
    CAPTURE(blocks);
    CHECK(plan_pool(shape, memory, demand_of({3, 12, 5}, 12)).paged_sequences == expected[blocks]);
  }
}

TEST_CASE("of a mean, the last block is (B - 1) / 2 empty on average", "[plan]") {
  const PoolPlan plan = plan_pool(kLlama7b, 16 * kGiB, mean_of(800));
  // Two sequences, since (B - 1) / 2 is 7.5 slots.
  CHECK(plan.mix_sequences == 2);
  CHECK(plan.mix_slots - plan.mix_tokens == 15);
  CHECK(plan.most_unused_slots == 15);
  CHECK(plan.most_unused_slots * plan.bytes_per_token == 7680 * kKiB);  // 7.5 MiB over 32 layers
  CHECK(plan.paged_sequences == 40);                                    // 32768 slots / 807.5
  CHECK(plan.reserved_sequences == 16);

  SECTION("the average over all lengths that end a block differently is just that") {
    std::vector<std::int64_t> lengths;
    for (std::int64_t length = 785; length <= 816; ++length) {
      lengths.push_back(length);
    }
    const PoolPlan spread = plan_pool(kLlama7b, 16 * kGiB, demand_of(lengths));
    CHECK(2 * (spread.mix_slots - spread.mix_tokens) == 15 * spread.mix_sequences);
  }
  SECTION("blocks of one slot waste nothing") {
    const PoolPlan slots = plan_pool(with_block_size(kTiny, 1), 2000, mean_of(10));
    CHECK(slots.mix_slots == slots.mix_tokens);
    CHECK(slots.most_unused_slots == 0);
    CHECK(slots.paged_sequences == 100);
  }
  SECTION("no sequence takes less than a block") {
    const PoolPlan tiny = plan_pool(with_block_size(kTiny, 256), 5120, mean_of(1));
    CHECK(tiny.num_blocks == 10);
    CHECK(tiny.paged_sequences == 10);
  }
  SECTION("no sequence takes more than the longest does") {
    CHECK(plan_pool(kLlama7b, 16 * kGiB, mean_of(2048)).paged_sequences == 16);
  }
}

TEST_CASE("pools of known sizes", "[plan]") {
  const PoolPlan llama_13b = plan_pool(kLlama13b, 54000000000, mean_of(500));
  CHECK(llama_13b.num_slots == 65904);
  CHECK(llama_13b.paged_sequences == 129);
  CHECK(plan_pool(kLlama70b, 50 * kGiB, PoolDemand()).num_blocks == 10240);
}

TEST_CASE("a contiguous cache reserves the maximum length for every sequence", "[plan]") {
  const PoolPlan plan = plan_pool(kTiny, 4095, demand_of({100}, 1024));
  CHECK(plan.reserved_sequences == 1);
  CHECK(plan_pool(kTiny, 4096, demand_of({100}, 1024)).reserved_sequences == 2);
  // Reserving in advance never serves more sequences than blocks do, if the maximum is a multiple of the block size.
  for (const std::int64_t length : {1, 16, 17, 1000, 1024}) {
    const PoolPlan mix = plan_pool(kTales, 600 * kMiB, demand_of({length}, 1024));
    CAPTURE(length);
    CHECK(mix.paged_sequences >= mix.reserved_sequences);
  }
}

TEST_CASE("numbers out of range are input errors that name the number", "[plan]") {
  struct Row {
    const char* name;
    std::int64_t PoolShape::*field;
  };
  const std::vector<Row> rows = {{"layers", &PoolShape::num_layers},       {"query heads", &PoolShape::num_heads},
                                 {"KV heads", &PoolShape::num_kv_heads},   {"head dimension", &PoolShape::head_dim},
                                 {"bytes", &PoolShape::bytes_per_element}, {"block size", &PoolShape::block_size}};
  for (const Row& row : rows) {
    for (const std::int64_t value : {std::int64_t{0}, std::int64_t{-1}, kMostInt32 + 1, INT64_MIN, INT64_MAX}) {
      PoolShape shape = kTiny;
      shape.*row.field = value;
      const std::string message = input_error([&] { plan_pool(shape, kGiB, PoolDemand()); });
      CAPTURE(row.name, value, message);
      CHECK(contains(message, row.name));
      CHECK(contains(message, std::to_string(value)));
    }
  }
}

TEST_CASE("demands that cannot be met are input errors", "[plan]") {
  const auto message = [](const PoolDemand& demand) { return input_error([&] { plan_pool(kTales, kGiB, demand); }); };
  CHECK(contains(message(demand_of({100, 0})), "length of a sequence"));
  CHECK(contains(message(demand_of({-5})), "-5"));
  CHECK(contains(message(demand_of({2049})), "2049"));
  CHECK(message(demand_of({2048})).empty());
  CHECK(contains(message(mean_of(0)), "mean length"));
  CHECK(contains(message(mean_of(3000)), "3000"));
  CHECK(contains(message(mean_of(1, 0)), "maximum length"));
  for (const std::int64_t memory : {std::int64_t{0}, std::int64_t{-1}, INT64_MIN}) {
    CHECK(contains(input_error([&] { plan_pool(kTales, memory, PoolDemand()); }), "memory"));
  }
  const PoolShape uneven = {1, 9, 2, 64, 2};
  CHECK(contains(input_error([&] { plan_pool(uneven, kGiB, PoolDemand()); }), "multiple"));
  const PoolShape more_kv_heads = {1, 2, 4, 64, 2};
  CHECK(contains(input_error([&] { plan_pool(more_kv_heads, kGiB, PoolDemand()); }), "multiple"));
}

TEST_CASE("sizes beyond 64 bits are input errors, never wrapped", "[plan]") {
  const auto message = [](const PoolShape& shape, const PoolDemand& demand) {
    return input_error([&] { plan_pool(shape, INT64_MAX, demand); });
  };
  PoolShape shape = {kMostInt32, 1, 1, kMostInt32, 1};
  CHECK(message(with_block_size(shape, 1), mean_of(1, 1)).empty());  // 2 (2^31 - 1)^2 fits
  CHECK(contains(message(with_block_size(shape, 2), mean_of(1, 1)), "2^63"));
  CHECK(contains(message(with_block_size(shape, 1), mean_of(1, 2)), "2^63"));
  shape.bytes_per_element = 2;
  CHECK(contains(message(with_block_size(shape, 1), mean_of(1, 1)), "2^63"));
  const PoolShape repeated = {kMostInt32, 4, 1, kMostInt32, 1, 1};
  CHECK(contains(message(repeated, mean_of(1, 1)), "2^63"));

  // The largest memory there is, in the smallest slots: 2^62 - 1 of them.
  const PoolPlan plan = plan_pool(with_block_size(kTiny, 1), INT64_MAX, mean_of(1, 1));
  CHECK(plan.num_slots == INT64_MAX / 2);
  CHECK(plan.paged_sequences == INT64_MAX / 2);
}

TEST_CASE("memory is a number with an optional unit", "[plan]") {
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
    const std::string message = input_error([&] { common::parse_memory(text); });
    CAPTURE(text, message);
    CHECK(contains(message, "memory"));
    CHECK(contains(message, "GiB"));
  }
}

TEST_CASE("plan prints the presets", "[plan]") {
  const Output output = run_plan({});
  CHECK(output.code == 0);
  CHECK(output.err.empty());
  CHECK(
      output.out ==
      R"(| preset       | layers | heads | KV heads | head_dim | bytes |  a token | a block of 16 | a sequence of 2,048 |
| ------------ | -----: | ----: | -------: | -------: | ----: | -------: | ------------: | ------------------: |
| llama-2-7b   |     32 |    32 |       32 |      128 |     2 |  512 KiB |         8 MiB |               1 GiB |
| llama-2-13b  |     40 |    40 |       40 |      128 |     2 |  800 KiB |      12.5 MiB |          1.5625 GiB |
| llama-2-70b  |     80 |    64 |        8 |      128 |     2 |  320 KiB |         5 MiB |             640 MiB |
| smollm2-135m |     30 |     9 |        3 |       64 |     2 | 22.5 KiB |       360 KiB |              45 MiB |
| tales-5m     |      6 |     8 |        2 |       32 |     4 |    3 KiB |        48 KiB |               6 MiB |
)");
}

TEST_CASE("plan prints one model in a given memory", "[plan]") {
  const Output output = run_plan({"--preset", "llama-2-7b", "--memory", "16GiB"});
  CHECK(output.code == 0);
  CHECK(output.err.empty());
  CHECK(output.out == R"(32 layers, 32 query heads, 32 KV heads, 128 values a head, 2 bytes a value

| KV cache                   |    size |
| -------------------------- | ------: |
| a token                    | 512 KiB |
| a block of 16              |   8 MiB |
| a sequence of 2,048        |   1 GiB |
| blocks in the memory       |   2,048 |
| tokens in these blocks     |  32,768 |
| memory that makes no block |     0 B |

| sequences of 800 on average | in blocks | reserved at 2,048 |
| --------------------------- | --------: | ----------------: |
| sequences at once           |        40 |                16 |
| slots a sequence            |     807.5 |            2048.0 |
| unused slots a sequence     |       7.5 |            1248.0 |
| unused slots, at most       |        15 |             2,047 |
| unused memory, at most      |   7.5 MiB |        1023.5 MiB |
| utilisation                 |    99.1 % |            39.1 % |
)");
}

TEST_CASE("plan prints a mix of lengths", "[plan]") {
  const Output output = run_plan({"--preset", "tales-5m", "--memory", "1MiB", "--lengths", "11,11,4,16"});
  CHECK(output.code == 0);
  CHECK(output.out == R"(6 layers, 8 query heads, 2 KV heads, 32 values a head, 4 bytes a value

| KV cache                                      |   size |
| --------------------------------------------- | -----: |
| a token                                       |  3 KiB |
| a token, K and V repeated for each query head | 12 KiB |
| a block of 16                                 | 48 KiB |
| a sequence of 2,048                           |  6 MiB |
| blocks in the memory                          |     21 |
| tokens in these blocks                        |    336 |
| memory that makes no block                    | 16 KiB |

| 4 sequences of 42 tokens in all | in blocks | reserved at 2,048 |
| ------------------------------- | --------: | ----------------: |
| sequences at once               |        21 |                 0 |
| blocks of one round of them     |         4 |                 - |
| slots a sequence                |      16.0 |            2048.0 |
| unused slots a sequence         |       5.5 |            2037.5 |
| unused slots, at most           |        12 |             2,044 |
| unused memory, at most          |    36 KiB |        5.9883 MiB |
| utilisation                     |    65.6 % |             0.5 % |
)");
}

TEST_CASE("options override a preset, and make a shape without one", "[plan]") {
  CHECK(contains(run_plan({"--preset", "llama-2-7b", "--bytes", "1"}).out, "256 KiB"));
  CHECK(contains(run_plan({"--preset", "llama-2-7b", "--kv-heads", "8"}).out, "128 KiB"));
  CHECK(contains(run_plan({"--preset", "llama-2-7b", "--layers", "16"}).out, "16 layers"));
  CHECK(contains(run_plan({"--preset", "llama-2-7b", "--block-size", "32"}).out, "a block of 32"));
  const std::string own = run_plan({"--layers", "2", "--heads", "4", "--head-dim", "8"}).out;
  CHECK(contains(own, "4 KV heads"));
  CHECK(contains(own, "256 B"));
  const std::string presets = run_plan({"--bytes", "4", "--memory", "16GiB"}).out;
  CHECK(contains(presets, "1 MiB"));
  CHECK(contains(presets, "sequences in blocks"));
}

TEST_CASE("bad input to plan is one line that names it", "[plan]") {
  struct Row {
    std::vector<std::string> arguments;
    const char* part;
  };
  const std::vector<Row> rows = {{{"--layers", "4"}, "--heads"},
                                 {{"--kv-heads", "4"}, "--layers"},
                                 {{"--preset", "llama-2-7b", "--kv-heads", "5"}, "multiple"},
                                 {{"--preset", "llama-2-7b", "--memory", "7MiB"}, "less than one block, 8 MiB"},
                                 {{"--max-length", "100"}, "800"},
                                 {{"--lengths", "100,5000"}, "5000"}};
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

TEST_CASE("values that plan's options cannot have are usage errors, as everywhere", "[plan]") {
  struct Row {
    std::vector<std::string> arguments;
    const char* part;
  };
  const std::vector<Row> rows = {{{"--preset", "gpt-9"}, "gpt-9"},
                                 {{"--preset", ""}, "--preset"},
                                 {{"--layers", "0"}, "--layers"},
                                 {{"--layers", "many"}, "--layers"},
                                 {{"--layers", ""}, "--layers"},
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
