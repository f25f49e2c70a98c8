// Stage 8's runner: ragged steps, steps that are enqueued before the tokens of the one before are known, swapping.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/several/nccl_group.h"
#include "common/math/sampling.h"
#include "tests/gpu/gpu_built_runner.h"
#include "tests/gpu/gpu_matrices.h"
#include "tests/gpu/gpu_step.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/golden.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(kernels/host_pages.h)
#ifdef COURSE_PRODUCTION
#include STAGE_HEADER(production/sampling_inputs.h)
#include STAGE_HEADER(production/tensor_parallel_runner.h)
#endif
// clang-format on

using common::Matrix;
using common::Token;
using tests::bundled;
using tests::compare;
using tests::make_step;
using tests::shape_of;
using tests::some_tokens;

namespace {

const std::string kNoDifference;

const std::vector<common::GpuTypes> kCacheTypes = {
    {.precision = common::Precision::kFloat32},
    {.precision = common::Precision::kBFloat16},
#ifdef COURSE_PRODUCTION
    {.precision = common::Precision::kBFloat16, .kv_cache = common::KvCacheType::kFloat8},
#endif
    {.precision = common::Precision::kBFloat16, .weights = common::WeightType::kFloat8}};

}  // namespace

#ifdef COURSE_PRODUCTION

TEST_CASE("GPU: sequences that read a shared prefix together get what they get apart") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // Two prompts of 64 tokens, and of each three sequences, which stand among each other; then a sequence leaves and
  // another one, without a prefix, comes: a recorded step is replayed with another plan. In every third step a chunk
  // stands behind the others. It begins with one of the prompts, but reads it by itself.
  constexpr int kPrompt = 64;
  constexpr int kChunk = 5;
  const common::GpuTypes types = GENERATE(kCacheTypes[1], kCacheTypes[2]);
  tests::BuiltRunner runner(bundled().llama, shape_of(80), {.types = types}, 128, 8);
  REQUIRE(runner.set_reading_costs({.block = 1}));
  CHECK(runner.can_share());
  CHECK_FALSE(tests::BuiltRunner(bundled().llama, shape_of(80), {}, 128, 8).can_share());  // float32
  // Each step is computed apart and then together, in the same slots: so both read the same K and V of earlier steps.
  // The order of sums differs, of bfloat16 weights: as between sequences in a step and alone. In float8, the step's own
  // keys and values that are next to a border are then stored as their neighbours, up to an eighth away: 0.28 was seen.
  const float tolerance = types.kv_cache == common::KvCacheType::kFloat8 ? 0.5F : 0.25F;
  const auto run = [&](const stage::RaggedBatch& step) {
    runner.share(false);
    runner.enqueue(step);
    const Matrix apart = runner.logits();
    runner.share(true);
    runner.enqueue(step);
    CHECK(compare(runner.logits(), apart, tolerance) == kNoDifference);
  };
  const auto iota = [](int first, int count) {
    std::vector<int> numbers(static_cast<std::size_t>(count));
    std::iota(numbers.begin(), numbers.end(), first);
    return numbers;
  };
  for (const int prompt : {0, 1}) {  // in blocks 0 to 3, and 4 to 7
    run(make_step(some_tokens(kPrompt, 7 + prompt), {}, iota(0, kPrompt), iota(prompt * kPrompt, kPrompt), {0, kPrompt},
                  {kPrompt}, iota(prompt * 4, 4), {0, 4}, {kPrompt - 1}));
  }
  CHECK(runner.figures().steps == 0);
  constexpr int kSteps = 20;
  for (int i = 0; i < kSteps; ++i) {
    stage::RaggedBatch step;
    const int num_decodes = i < kSteps / 2 ? 6 : 7;
    const int num_sequences = num_decodes + (i % 3 == 2 ? 1 : 0);
    for (int s = 0; s < num_sequences; ++s) {
      const bool is_chunk = s == num_decodes;
      const bool is_new = s == 6 && !is_chunk;
      const int num_tokens = is_chunk ? kChunk : 1;
      const int first = is_chunk ? kPrompt + i / 3 * kChunk : is_new ? i - kSteps / 2 : kPrompt + i;
      const int length = first + num_tokens;
      const int own = is_chunk ? 7 : s;
      std::vector<int> table = is_new ? std::vector<int>{} : iota(s % 2 * 4, 4);
      for (int block = 0; static_cast<int>(table.size()) * 16 < length; ++block) {
        table.push_back(8 + own * 8 + block);
      }
      if (i >= kSteps / 2 && s == 2) {  // it reads the prompt of the others now
        std::iota(table.begin(), table.begin() + 4, 4);
      }
      const std::vector<Token> tokens = some_tokens(num_tokens, 100 + i * 8 + s);
      step.tokens.insert(step.tokens.end(), tokens.begin(), tokens.end());
      for (int position = first; position < length; ++position) {
        step.positions.push_back(position);
        step.slot_mapping.push_back(table[static_cast<std::size_t>(position / 16)] * 16 + position % 16);
      }
      step.context_lengths.push_back(length);
      step.block_tables.insert(step.block_tables.end(), table.begin(), table.end());
      step.table_starts.push_back(static_cast<int>(step.block_tables.size()));
      step.query_starts.push_back(s + num_tokens);
      step.logits_rows.push_back(step.query_starts.back() - 1);
    }
    CAPTURE(i);
    run(step);
  }
  CHECK(runner.figures().steps == kSteps);
  CHECK(runner.figures().blocks_saved == kSteps * 4 * 4);
}

#endif

TEST_CASE("GPU: two steps with other shared prefixes are in flight at once") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // Three sequences of each of two prompts, of four blocks and of three. In turn, a step has those of one prompt alone,
  // those of the other one, or all: its plan is on its way while the step before reads another one. One step at a time,
  // the same tokens are drawn.
  constexpr int kSteps = 18;
  const std::vector<int> prompts = {64, 48};
  std::vector<std::vector<Token>> found[2];
  for (const bool ahead : {false, true}) {
    tests::BuiltRunner runner(bundled().llama, shape_of(80), {.types = kCacheTypes[1]}, 128, 8);
    REQUIRE(runner.set_reading_costs({.block = 1}));
    for (const int prompt : {0, 1}) {
      const int length = prompts[static_cast<std::size_t>(prompt)];
      std::vector<int> positions(static_cast<std::size_t>(length));
      std::iota(positions.begin(), positions.end(), 0);
      std::vector<int> slots = positions;
      std::for_each(slots.begin(), slots.end(), [&](int& slot) { slot += prompt * 64; });
      std::vector<int> table(static_cast<std::size_t>(length / 16));
      std::iota(table.begin(), table.end(), prompt * 4);
      const int num_blocks = static_cast<int>(table.size());
      runner.wait(runner.enqueue(make_step(some_tokens(length, 7 + prompt), {}, positions, slots, {0, length}, {length},
                                           table, {0, num_blocks}, {length - 1})));
    }
    std::vector<int> lengths = {64, 48, 64, 48, 64, 48};
    std::vector<std::vector<Token>>& answers = found[ahead ? 1 : 0];
    std::optional<stage::StepId> in_flight;
    for (int i = 0; i < kSteps; ++i) {
      stage::RaggedBatch step;
      for (int s = 0; s < 6; ++s) {
        if (i % 3 < 2 && s % 2 != i % 3) {
          continue;
        }
        int& length = lengths[static_cast<std::size_t>(s)];
        std::vector<int> table(static_cast<std::size_t>(prompts[static_cast<std::size_t>(s % 2)] / 16));
        std::iota(table.begin(), table.end(), s % 2 * 4);
        for (int block = 0; static_cast<int>(table.size()) * 16 <= length; ++block) {
          table.push_back(8 + s * 8 + block);
        }
        step.tokens.push_back(some_tokens(1, 100 + i * 8 + s).front());
        step.positions.push_back(length);
        step.slot_mapping.push_back(table.back() * 16 + length % 16);
        length += 1;
        step.context_lengths.push_back(length);
        step.block_tables.insert(step.block_tables.end(), table.begin(), table.end());
        step.table_starts.push_back(static_cast<int>(step.block_tables.size()));
        step.query_starts.push_back(step.num_tokens() + 1);
        step.logits_rows.push_back(step.num_tokens() - 1);
      }
      const stage::StepId own = runner.enqueue(step);
      if (in_flight.has_value()) {
        answers.push_back(runner.wait(*in_flight).tokens);
      }
      in_flight = own;
      if (!ahead) {
        answers.push_back(runner.wait(own).tokens);
        in_flight.reset();
      }
    }
    if (in_flight.has_value()) {
      answers.push_back(runner.wait(*in_flight).tokens);
    }
    CHECK(runner.figures().steps == kSteps);
    // 2 x 4 blocks of the first prompt's three sequences, 2 x 2 of the other one's, and both: a plan reads multiples of
    // 32 tokens together.
    CHECK(runner.figures().blocks_saved == kSteps / 3 * (8 + 4 + 12));
  }
  REQUIRE(found[0].size() == kSteps);
  CHECK(found[0] == found[1]);
}

TEST_CASE("GPU: sequences that share a step get what they get alone") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // Four sequences in blocks of 16, with 20, 5, 33 and 1 tokens so far; then a step in which they have 1, 7, 1 and 12
  // more, and steps in which all have one, for batches that are recorded and filled up.
  const common::LlamaConfig& config = bundled().llama.config();
  const stage::KvCacheShape shape{.num_layers = config.num_layers,
                                  .num_blocks = 40,
                                  .block_size = 16,
                                  .num_heads = config.num_heads,
                                  .num_kv_heads = config.num_kv_heads,
                                  .head_dim = config.head_dim};
  for (const common::GpuTypes& type : kCacheTypes) {
    tests::BuiltRunner together(bundled().llama, shape, {.types = type}, 128, 8);
    tests::BuiltRunner alone(bundled().llama, shape, {.types = type}, 128, 8);
    std::vector<int> lengths(4, 0);
    int salt = 0;
    for (const std::vector<int>& counts :
         {std::vector{20, 5, 33, 1}, {1, 7, 1, 12}, {1, 1, 1, 1}, {3, 1, 0, 1}, {1, 1, 1, 0}}) {
      std::vector<Token> tokens;
      std::vector<int> positions;
      std::vector<int> slots;
      std::vector<int> starts = {0};
      std::vector<int> contexts;
      std::vector<int> tables;
      std::vector<int> table_starts = {0};
      std::vector<int> rows;
      std::vector<Matrix> expected;
      // Sequences with one token come first, except in the first step: there, ragged attention computes that sequence
      // as well.
      std::vector<int> order = {0, 1, 2, 3};
      std::stable_partition(order.begin(), order.end(),
                            [&](int s) { return lengths.front() > 0 && counts[static_cast<std::size_t>(s)] == 1; });
      for (const int s : order) {
        const int count = counts[static_cast<std::size_t>(s)];
        int& length = lengths[static_cast<std::size_t>(s)];
        if (count == 0) {
          continue;
        }
        const std::vector<Token> own = some_tokens(count, ++salt);
        std::vector<int> own_positions(own.size());
        std::iota(own_positions.begin(), own_positions.end(), length);
        std::vector<int> table(static_cast<std::size_t>((length + count + 15) / 16));
        std::generate(table.begin(), table.end(), [n = 10 * s]() mutable { return n++; });
        std::vector<int> own_slots(own.size());
        std::transform(own_positions.begin(), own_positions.end(), own_slots.begin(), [&](int position) {
          return table[static_cast<std::size_t>(position / 16)] * 16 + position % 16;
        });
        length += count;
        alone.enqueue(make_step(own, {}, own_positions, own_slots, std::vector<int>{0, count}, std::vector<int>{length},
                                table, std::vector<int>{0, static_cast<int>(table.size())},
                                std::vector<int>{count - 1}));
        expected.push_back(alone.logits());
        tokens.insert(tokens.end(), own.begin(), own.end());
        positions.insert(positions.end(), own_positions.begin(), own_positions.end());
        slots.insert(slots.end(), own_slots.begin(), own_slots.end());
        tables.insert(tables.end(), table.begin(), table.end());
        starts.push_back(static_cast<int>(tokens.size()));
        contexts.push_back(length);
        table_starts.push_back(static_cast<int>(tables.size()));
        rows.push_back(starts.back() - 1);
      }
      const stage::StepId step =
          together.enqueue(make_step(tokens, {}, positions, slots, starts, contexts, tables, table_starts, rows));
      const Matrix logits = together.logits();
      const std::vector<Token> drawn = together.wait(step).tokens;
      REQUIRE(logits.rows() == static_cast<Eigen::Index>(expected.size()));
      // Other products, in another order: as between GPU and CPU. In float8, a K or V that falls on the other side of
      // the middle between two numbers is off by an eighth, and about one in twenty does: a bfloat16's last place is
      // 1/16 of the distance. (Logits moved by 0.4 at most.)
      const float tolerance = type.kv_cache == common::KvCacheType::kFloat8    ? 1.0F
                              : type.precision == common::Precision::kBFloat16 ? 0.25F
                                                                               : 2e-3F;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const Matrix row = logits.row(static_cast<Eigen::Index>(i));
        CAPTURE(salt, i);
        CHECK(compare(row, expected[i], tolerance) == kNoDifference);
        CHECK(drawn[i] == common::argmax({row.data(), static_cast<std::size_t>(row.cols())}));
      }
    }
  }
}

#ifdef COURSE_PRODUCTION
TEST_CASE("GPU: with one GPU, a model that is shared out is the whole model") {
  if (const std::string reason = common::NcclGroup::unsupported(1); !reason.empty()) {
    SKIP_TEST(reason);
  }
  // Steps of many tokens, of a few, and recorded ones; drawn with all filters.
  for (const common::GpuTypes& type : kCacheTypes) {
    tests::BuiltRunner plain(bundled().llama, shape_of(20), {.types = type}, 256, 8);
    stage::TensorParallelRunner shared(bundled().llama, shape_of(20), {.types = type}, 256, 8,
                                       tests::built_kernels({.types = type}));
    tests::BuiltRunner exact(bundled().llama, shape_of(20), {}, 256, 8);
    double plain_error = 0.0;  // squared
    double shared_error = 0.0;
    std::vector<int> table(20);
    std::iota(table.begin(), table.end(), 0);
    int length = 0;
    for (const int count : {200, 20, 1, 1, 5, 1}) {
      const std::vector<Token> tokens = some_tokens(count, length);
      std::vector<int> positions(tokens.size());
      std::iota(positions.begin(), positions.end(), length);
      length += count;
      stage::RaggedBatch step =
          make_step(tokens, {}, positions, positions, {0, count}, {length}, table, {0, 20}, {count - 1});
      step.sampling_rows = {{{.temperature = 0.9F, .top_k = 40, .top_p = 0.9F, .seed = 3}, 0, {}}};
      const stage::StepId plain_step = plain.enqueue(step);
      const stage::StepId shared_step = shared.enqueue(step);
      CAPTURE(length);
      const Matrix expected = plain.logits();
      const Matrix logits = shared.logits();
      exact.enqueue(step);
      const Matrix exact_logits = exact.logits();
      plain_error += (expected - exact_logits).squaredNorm();
      shared_error += (logits - exact_logits).squaredNorm();
      if (type.precision == common::Precision::kFloat32) {
        CHECK(compare(logits, expected, 2e-3F) == kNoDifference);
        CHECK(shared.wait(shared_step).tokens == plain.wait(plain_step).tokens);
      }
    }
    // Sums are rounded once more, to 16 bits.
    CAPTURE(plain_error, shared_error);
    CHECK(std::sqrt(shared_error) <= 1.5 * std::sqrt(plain_error) + 2e-3);
    CHECK(shared.num_recorded_steps() == plain.num_recorded_steps());
  }
}
#endif  // COURSE_PRODUCTION

TEST_CASE("GPU: a step takes up the tokens of the one before, which the host has not seen") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // Two prompts, then single tokens, with the order of rows reversed in every other step; beside it, everything
  // token by token.
  const common::LlamaConfig& config = bundled().llama.config();
  const stage::KvCacheShape shape{.num_layers = config.num_layers,
                                  .num_blocks = 8,
                                  .block_size = 16,
                                  .num_heads = config.num_heads,
                                  .num_kv_heads = config.num_kv_heads,
                                  .head_dim = config.head_dim};
  const std::vector<Token> prompt = some_tokens(14, 1);
  std::vector<int> positions(14);
  std::iota(positions.begin(), positions.end(), 0);
  std::iota(positions.begin() + 9, positions.end(), 0);
  std::vector<int> slots = positions;
  std::for_each(slots.begin() + 9, slots.end(), [](int& slot) { slot += 64; });
  const std::vector<int> tables = {0, 1, 4, 5};
  const std::vector<int> other_tables = {4, 5, 0, 1};
  std::vector<std::vector<Token>> found[2];
  for (const bool ahead : {false, true}) {
    tests::BuiltRunner runner(bundled().llama, shape, {}, 16, 8);
    std::vector<std::vector<Token>>& answers = found[ahead ? 1 : 0];
    stage::StepId last =
        runner.enqueue(make_step(prompt, {}, positions, slots, std::vector<int>{0, 9, 14}, std::vector<int>{9, 5},
                                 tables, std::vector<int>{0, 2, 4}, std::vector<int>{8, 13}));
    for (int step = 0; step < 6; ++step) {
      if (!ahead) {
        answers.push_back(runner.wait(last).tokens);
      }
      const bool turned = step % 2 == 0;
      const std::vector<int> at = turned ? std::vector{5 + step, 9 + step} : std::vector{9 + step, 5 + step};
      const std::vector<int> new_slots = turned ? std::vector{64 + at[0], at[1]} : std::vector{at[0], 64 + at[1]};
      const std::vector<Token> tokens = ahead ? std::vector{0, 0} : std::vector{answers.back()[1], answers.back()[0]};
      const std::vector<stage::PendingToken> pending =
          ahead ? std::vector<stage::PendingToken>{{0, 1}, {1, 0}} : std::vector<stage::PendingToken>{};
      const stage::StepId before = last;
      last = runner.enqueue(make_step(tokens, pending, at, new_slots, std::vector<int>{0, 1, 2},
                                      std::vector<int>{at[0] + 1, at[1] + 1}, turned ? other_tables : tables,
                                      std::vector<int>{0, 2, 4}, std::vector<int>{0, 1}));
      if (ahead) {
        answers.push_back(runner.wait(before).tokens);
      }
    }
    answers.push_back(runner.wait(last).tokens);
  }
  CHECK(found[0] == found[1]);
  CHECK(found[0].front() != found[0].back());
}

TEST_CASE("GPU: a step that can't be computed leaves the one before as it was") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  tests::BuiltRunner runner(bundled().llama, shape_of(4), {}, 16, 8);
  const std::vector<Token> tokens = some_tokens(16, 1);
  std::vector<int> positions(16);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int> table = {0};
  const auto forward = [&](int first, int count) {
    const auto of = [&](const auto& values) {
      return std::span(values).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    };
    return runner.enqueue(make_step(of(tokens), {}, of(positions), of(positions), std::vector{0, count},
                                    std::vector{first + count}, table, std::vector{0, 1}, std::vector{count - 1}));
  };
  const stage::StepId step = forward(0, 9);
  const std::vector<Token> drawn = runner.wait(step).tokens;
  const std::vector<int> slots = {0};
  // One token more than a step may have, and a table that is longer than the cache.
  const std::vector<Token> many = some_tokens(17, 1);
  const std::vector<int> zeros(1000);
  CHECK_THROWS_AS(
      runner.enqueue(make_step(many, {}, std::span(zeros).first(17), std::span(zeros).first(17), std::vector{0, 17},
                               std::vector{17}, zeros, std::vector{0, 2}, std::vector{16})),
      common::CheckError);
  CHECK_THROWS_AS(runner.enqueue(make_step(std::span(tokens).first(1), {}, slots, slots, std::vector{0, 1},
                                           std::vector{1}, zeros, std::vector{0, 1000}, std::vector{0})),
                  common::CheckError);
  // 17 tokens of context, and a table for 16 of them.
  CHECK_THROWS_AS(runner.enqueue(make_step(std::span(tokens).first(1), {}, slots, slots, std::vector{0, 1},
                                           std::vector{17}, table, std::vector{0, 1}, std::vector{0})),
                  common::CheckError);
  CHECK(runner.wait(step).tokens == drawn);
  forward(9, 7);
  CHECK(runner.wait(step).tokens == drawn);
  tests::BuiltRunner other(bundled().llama, shape_of(4), {}, 16, 8);
  other.enqueue(make_step(tokens, {}, positions, positions, std::vector{0, 16}, std::vector{16}, table,
                          std::vector{0, 1}, std::vector{15}));
  CHECK(compare(runner.logits(), other.logits(), 2e-3F) == kNoDifference);
  forward(9, 7);
  CHECK_THROWS_AS(runner.wait(step), common::CheckError);  // two later steps have been enqueued
}

TEST_CASE("GPU: a step has at most the sequences that were announced, and the logits take memory for these alone") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kTokens = 8192;
  const auto free_bytes = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
  };
  const auto bytes_of_runner = [&](int max_sequences) {
    const std::size_t before = free_bytes();
    const tests::BuiltRunner runner(bundled().llama, shape_of(4), {}, kTokens, max_sequences);
    return static_cast<double>(before - free_bytes());
  };
  bytes_of_runner(1);  // allocates what CUDA itself keeps
  const double logits = 4.0 * kTokens * bundled().llama.config().vocab_size;
  CHECK(bytes_of_runner(kTokens) - bytes_of_runner(1) > 0.9 * logits);

  tests::BuiltRunner runner(bundled().llama, shape_of(4), {}, 16, 2);
  const std::vector<int> slots = {0, 16, 32};
  const std::vector<int> zeros(3);
  const auto step = [&](int count) {
    const auto n = static_cast<std::size_t>(count);
    std::vector<int> starts(n + 1);
    std::iota(starts.begin(), starts.end(), 0);
    return make_step(some_tokens(count, 1), {}, std::span(zeros).first(n), std::span(slots).first(n), starts,
                     std::vector<int>(n, 1), std::vector{0, 1, 2}, starts, {starts.begin(), starts.end() - 1});
  };
  const stage::StepId last = runner.enqueue(step(2));
  CHECK_THROWS_AS(runner.enqueue(step(3)), common::CheckError);
  CHECK(runner.wait(last).tokens.size() == 2);
}

#ifdef COURSE_PRODUCTION
TEST_CASE("GPU: each of a sequence's tokens can have a row of logits, in a step that is recorded") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // After a context of 150 tokens, and in the second round of some more, so that recorded steps find longer contexts.
  // Steps that are repeated write the same slots again, with other tokens.
  const std::vector<int> counts = {2, 3, 9, 5, 16};
  for (const common::GpuTypes& type : kCacheTypes) {
    tests::BuiltRunner together(bundled().llama, shape_of(20), {.types = type}, 150, 2);
    tests::BuiltRunner alone(bundled().llama, shape_of(20), {.types = type}, 150, 2);
    std::vector<int> table(20);
    std::iota(table.begin(), table.end(), 0);
    std::vector<int> positions(320);
    std::iota(positions.begin(), positions.end(), 0);
    const auto step = [&](const std::vector<Token>& tokens, int first, std::vector<int> rows) {
      const auto count = static_cast<int>(tokens.size());
      const auto own = std::span(positions).subspan(static_cast<std::size_t>(first), tokens.size());
      return make_step(tokens, {}, own, own, {0, count}, {first + count}, table, {0, 20}, std::move(rows));
    };
    const std::vector<Token> prompt = some_tokens(150, 1);
    together.enqueue(step(prompt, 0, {149}));
    alone.enqueue(step(prompt, 0, {149}));
    // In 16 bits, products of several rows round differently from products of one row, and a row moves as a whole: its
    // logits, which are 6.7 in size, moved by 0.28 at most, and with float8 K and V by 1.16. The largest of 2,048
    // normal numbers is 3.3 times their size: 0.013 and 0.05 of the row. Bounds are three times as far. A wrong row is
    // 0.7 away on average, and 1 in 300 pairs is nearer than 0.05 (1 in 50: 0.15).
    const double bound = type.kv_cache == common::KvCacheType::kFloat8 ? 0.15 : 0.04;
    const bool is_exact = type.precision == common::Precision::kFloat32;
    int length = 150;
    for (int round = 0; round < 4; ++round) {
      for (const int count : counts) {
        const std::vector<Token> tokens = some_tokens(count, 100 * round + count);
        std::vector<int> rows(tokens.size());
        std::iota(rows.begin(), rows.end(), 0);
        const stage::StepId last = together.enqueue(step(tokens, length, rows));
        const Matrix logits = together.logits();
        const std::vector<Token> drawn = together.wait(last).tokens;
        REQUIRE(logits.rows() == count);
        for (int row = 0; row < count; ++row) {
          alone.enqueue(step({tokens[static_cast<std::size_t>(row)]}, length + row, {0}));
          const Matrix own = logits.row(row);
          CAPTURE(round, count, row);
          const Matrix expected = alone.logits();
          if (is_exact) {
            CHECK(compare(own, expected, 2e-3F) == kNoDifference);
          } else {
            CHECK((own - expected).norm() / expected.norm() <= bound);  // nor a NaN
          }
          CHECK(drawn[static_cast<std::size_t>(row)] ==
                common::argmax({own.data(), static_cast<std::size_t>(own.cols())}));
        }
        length += round % 2 == 0 ? 0 : count;
      }
    }
    CHECK(together.num_recorded_steps() == 2 * static_cast<int>(counts.size()));
  }
}

TEST_CASE("GPU: after warming up no step is recorded, however long the contexts grow") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  common::LlamaConfig config = bundled().llama.config();
  config.context_length = 2048;
  const common::Llama model = common::Llama::synthetic(config, 1);
  constexpr int kBlocks = 100;  // of each of two sequences
  tests::BuiltRunner warm(model, shape_of(2 * kBlocks), {.types = {.precision = common::Precision::kBFloat16}}, 256, 2);
  warm.warm_up(256, 2);
  const int recorded = warm.num_recorded_steps();
  CHECK(recorded == 4);  // of one sequence and of two, in two sets of buffers
  tests::BuiltRunner cold(model, shape_of(2 * kBlocks), {.types = {.precision = common::Precision::kBFloat16}}, 256, 2);
  for (int length = 0; length < 1200;) {
    const int count = length % 256 < 120 ? 120 : 1;  // chunks, and single tokens in between
    std::vector<int> positions(static_cast<std::size_t>(2 * count));
    std::vector<int> slots(positions.size());
    for (int i = 0; i < 2 * count; ++i) {
      positions[static_cast<std::size_t>(i)] = length + i % count;
      slots[static_cast<std::size_t>(i)] = i / count * kBlocks * 16 + length + i % count;
    }
    length += count;
    const int num_blocks = (length + 15) / 16;
    std::vector<int> tables(static_cast<std::size_t>(2 * num_blocks));
    std::iota(tables.begin(), tables.begin() + num_blocks, 0);
    std::iota(tables.begin() + num_blocks, tables.end(), kBlocks);
    const auto step = make_step(some_tokens(2 * count, length), {}, positions, slots, {0, count, 2 * count},
                                {length, length}, tables, {0, num_blocks, 2 * num_blocks}, {count - 1, 2 * count - 1});
    warm.enqueue(step);
    cold.enqueue(step);
    CAPTURE(length);
    REQUIRE(warm.num_recorded_steps() == recorded);
    const Matrix logits = warm.logits();
    REQUIRE(logits.allFinite());
    REQUIRE(logits == cold.logits());
  }
  CHECK(cold.num_recorded_steps() == 2);
}
#endif  // COURSE_PRODUCTION

TEST_CASE("GPU: warming up leaves K and V as they were, whatever the limits") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  tests::BuiltRunner runner(bundled().llama, shape_of(4), {}, 100, 8);
  for (const auto& [max_tokens, max_sequences] : {std::pair{1, 1}, {100, 1}, {64, 64}, {1 << 16, 1 << 16}}) {
    CAPTURE(max_tokens, max_sequences);
    runner.warm_up(max_tokens, max_sequences);
    std::vector<int> slots(64);
    std::iota(slots.begin(), slots.end(), 0);
    const Matrix keys = runner.keys(0, slots);
    CHECK(std::all_of(keys.data(), keys.data() + keys.size(), [](float x) { return std::isnan(x); }));
  }
}

TEST_CASE("GPU: a block that goes out and comes back is byte-equal in every layer") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kNumBlocks = 6;
  for (const common::GpuTypes& type : kCacheTypes) {
    CAPTURE(static_cast<int>(type.precision), static_cast<int>(type.kv_cache));
    stage::KvCacheShape shape = shape_of(kNumBlocks);
    shape.num_host_blocks = 3;
    tests::BuiltRunner runner(bundled().llama, shape, {.types = type}, 32, 8);
    // 32 tokens in blocks 4 and 1.
    const std::vector<Token> tokens = some_tokens(32, 1);
    const std::vector<int> table = {4, 1};
    std::vector<int> positions(32);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<int> slots(32);
    std::iota(slots.begin(), slots.begin() + 16, 4 * 16);
    std::iota(slots.begin() + 16, slots.end(), 1 * 16);
    runner.enqueue(make_step(tokens, {}, positions, slots, std::vector{0, 32}, std::vector{32}, table,
                             std::vector{0, 2}, std::vector{31}));
    const auto block = [&](int index) {  // K and V of all layers, one below the other
      std::vector<int> own(16);
      std::iota(own.begin(), own.end(), index * 16);
      std::vector<Matrix> contents;
      for (int layer = 0; layer < shape.num_layers; ++layer) {
        contents.push_back(runner.keys(layer, own));
        contents.push_back(runner.values(layer, own));
      }
      return contents;
    };
    const auto equal_bytes = [](const std::vector<Matrix>& a, const std::vector<Matrix>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Matrix& x, const Matrix& y) {
        return std::memcmp(x.data(), y.data(), static_cast<std::size_t>(x.size()) * sizeof(float)) == 0;
      });
    };
    const std::vector<Matrix> first = block(4);
    const std::vector<Matrix> second = block(1);
    const std::vector<Matrix> never_written = block(5);
    REQUIRE_FALSE(equal_bytes(first, second));
    for (std::size_t i = 1; i < first.size(); ++i) {  // no layer can be taken for another one, nor K for V
      REQUIRE_FALSE(equal_bytes({first[0]}, {first[i]}));
    }
    // Both are swapped out, to the last places on the host and in the other order; their blocks on the device are
    // overwritten; and both are swapped in, to other blocks.
    runner.copy_blocks(std::vector<stage::BlockCopy>{{4, kNumBlocks + 2}, {1, kNumBlocks + 1}, {5, 4}, {5, 1}});
    CHECK(equal_bytes(block(4), never_written));
    CHECK(equal_bytes(block(1), never_written));
    runner.copy_blocks(std::vector<stage::BlockCopy>{{kNumBlocks + 2, 1}, {kNumBlocks + 1, 3}});
    CHECK(equal_bytes(block(1), first));
    CHECK(equal_bytes(block(3), second));
    for (const int other : {0, 2, 4, 5}) {
      CAPTURE(other);
      CHECK(equal_bytes(block(other), never_written));
    }
  }
}

// Layers of more than 2 GiB are further apart than a two-dimensional copy allows.
TEST_CASE("GPU: a block that is swapped out and in again has its bytes, in every layer") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const bool is_large = GENERATE(false, true);
  CAPTURE(is_large);
  constexpr int kLayers = 3;
  const common::PageShape shape{.num_blocks = is_large ? (1 << 16) + 1 : 5,
                                .num_kv_heads = 8,
                                .block_size = 16,
                                .head_dim = 128,
                                .type = common::ScalarType::kBFloat16};
  const auto block_bytes = static_cast<std::size_t>(shape.elements_per_block() * 2);
  const std::size_t layer_bytes = block_bytes * static_cast<std::size_t>(shape.num_blocks);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes < 3 * kLayers * layer_bytes) {
    SKIP_TEST("the GPU has no room for it");
  }
  const common::DeviceMemory keys(kLayers * layer_bytes);
  const common::DeviceMemory values(kLayers * layer_bytes);
  const auto block_at = [&](const common::DeviceMemory& pages, std::size_t layer, int block) {
    return static_cast<std::byte*>(pages.data()) + layer * layer_bytes + static_cast<std::size_t>(block) * block_bytes;
  };
  const int source = static_cast<int>(shape.num_blocks) - 1;
  const auto fill_of = [](std::size_t layer, bool is_key) { return static_cast<int>(2 * layer + (is_key ? 1 : 2)); };
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    CUDA_CHECK(cudaMemset(block_at(keys, layer, source), fill_of(layer, true), block_bytes));
    CUDA_CHECK(cudaMemset(block_at(values, layer, source), fill_of(layer, false), block_bytes));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  const common::Stream stream;
  stage::HostPages host(shape, kLayers, 2);
  const int host_block = static_cast<int>(shape.num_blocks) + 1;
  host.copy(keys.data(), values.data(), source, host_block, stream);
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    CUDA_CHECK(cudaMemsetAsync(block_at(keys, layer, source), 0, block_bytes, stream.get()));
    CUDA_CHECK(cudaMemsetAsync(block_at(values, layer, source), 0, block_bytes, stream.get()));
  }
  host.copy(keys.data(), values.data(), host_block, 2, stream);
  stream.synchronize();
  std::vector<std::byte> block(block_bytes);
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    for (const bool is_key : {true, false}) {
      CAPTURE(layer, is_key);
      CUDA_CHECK(cudaMemcpy(block.data(), block_at(is_key ? keys : values, layer, 2), block_bytes, cudaMemcpyDefault));
      const auto expected = static_cast<std::byte>(fill_of(layer, is_key));
      CHECK(std::all_of(block.begin(), block.end(), [&](std::byte x) { return x == expected; }));
    }
  }
}

TEST_CASE("GPU: too little room for swapped-out blocks is blamed on --host-slots, not on --slots") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  stage::KvCacheShape shape = shape_of(4);
  shape.num_host_blocks = 1 << 30;  // some hundred TB, far more than any host has
  std::string message;
  try {
    tests::BuiltRunner runner(bundled().llama, shape, {}, 16, 8);
#ifdef COURSE_PRODUCTION
    runner.allocate(shape.num_host_blocks);  // as an engine does
#endif
  } catch (const common::InputError& error) {
    message = error.what();
  }
  CAPTURE(message);
  CHECK(message.find("--host-slots") != std::string::npos);
  CHECK(message.find("--slots") == std::string::npos);
}

#ifdef COURSE_PRODUCTION
TEST_CASE("GPU: used tokens that find no room on the device find it at the next attempt") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const common::Stream stream;
  stage::SamplingInputs inputs(1);
  stage::RaggedBatch step;
  step.positions = {0};
  step.logits_rows = {0};
  step.sampling_rows = {{.options = {.repetition_penalty = 1.5F}, .used = {1, 2, 3, 4}}};
  common::device_call_hook = [](const char* call) {
    if (std::string_view(call) == "cudaMalloc") {
      throw common::OutOfDeviceMemory("as if the GPU's memory were full");
    }
  };
  CHECK_THROWS_AS(inputs.upload(step, stream), common::OutOfDeviceMemory);
  common::device_call_hook = nullptr;
  inputs.upload(step, stream);
  stream.synchronize();
  REQUIRE(inputs.batch().used != nullptr);
  std::vector<int> used(4);
  CUDA_CHECK(cudaMemcpy(used.data(), inputs.batch().used, sizeof(int) * used.size(), cudaMemcpyDefault));
  CHECK(used == step.sampling_rows[0].used);
}

TEST_CASE("GPU: the lesson's runner, which draws on the host, draws what the device draws") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // A prompt, then tokens that are pending when they are enqueued, with a penalty for all tokens before.
  const std::vector<Token> prompt = some_tokens(9, 1);
  std::vector<int> positions(20);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int> table = {0, 1};
  const auto draw = [&](stage::GpuRunner& runner) {
    std::vector<Token> drawn;
    stage::StepId last;
    for (int step = 0; step < 8; ++step) {
      const int first = step == 0 ? 0 : 8 + step;
      const int count = step == 0 ? 9 : 1;
      const auto own = std::span(positions).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
      const std::vector<Token> tokens = step == 0 ? prompt : std::vector<Token>{0};
      const std::vector<stage::PendingToken> pending =
          step == 0 ? std::vector<stage::PendingToken>{} : std::vector<stage::PendingToken>{{0, 0}};
      stage::RaggedBatch batch = make_step(tokens, pending, own, own, std::vector{0, count}, std::vector{first + count},
                                           std::span(table).first(static_cast<std::size_t>((first + count + 15) / 16)),
                                           std::vector{0, (first + count + 15) / 16}, std::vector{count - 1});
      batch.sampling_rows = {{.options = {.temperature = 0.9F, .top_p = 0.9F, .repetition_penalty = 1.2F, .seed = 5},
                              .sample_index = 0,
                              .used = prompt}};
      const stage::StepId before = last;
      last = runner.enqueue(batch);
      if (step > 0) {
        drawn.push_back(runner.wait(before).tokens[0]);
      }
    }
    drawn.push_back(runner.wait(last).tokens[0]);
    return drawn;
  };
  tests::LessonRunner on_host(bundled().llama, shape_of(4), {}, 16, 8);
  stage::RecordingRunner on_device(bundled().llama, shape_of(4), {}, 16, 8, stage::kPlainKernels);
  CHECK(draw(on_host) == draw(on_device));
}
#endif  // COURSE_PRODUCTION
