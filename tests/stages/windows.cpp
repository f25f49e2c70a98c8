// Layers that see the last tokens only: their attention, and blocks that are freed while their sequence lives. Compiled
// for stage 8.
#include "tests/support/catch.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/math/sampling.h"
#include "tests/stages/number_pool.h"
#include "tests/stages/windowed_model.h"
#include "tests/support/compare.h"
#include "tests/support/reference_attention.h"
#include "tests/support/reference_decoder.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/windows/hidden_blocks.h)
#include STAGE_HEADER(production/windows/windowed_attention.h)
#include STAGE_HEADER(serve/engine_adapter.h)
// clang-format on

using common::Llama;
using common::Matrix;
using common::Random;
using Blocks = std::vector<int>;

namespace {

const std::string kNoProblem;

// Sums of up to a few dozen products of numbers around 1, and weights of softmax below 1.
constexpr tests::Tolerance kRounding{1e-5, 1e-5};

struct Shape {
  int num_heads;
  int num_kv_heads;
  int block_size;
};

Matrix random_matrix(Random& random, int rows, int cols) {
  Matrix matrix(rows, cols);
  std::generate_n(matrix.data(), matrix.size(), [&] { return static_cast<float>(random.normal()); });
  return matrix;
}

// Sequences of these lengths in blocks in a random order, whose last num_queries tokens are a batch. Slots without a
// token are NaN, and so are blocks that no query sees.
struct Pages {
  Pages(Random& random, const Shape& shape, const std::vector<int>& lengths, const std::vector<int>& num_queries,
        int window)
      : cache(tests::cache_shape({shape.num_heads, shape.num_kv_heads, kHeadDim, 1}, kNumBlocks, shape.block_size)) {
    cache.fill(std::numeric_limits<float>::quiet_NaN());
    Blocks free_blocks(kNumBlocks);
    std::iota(free_blocks.begin(), free_blocks.end(), 0);
    int num_tokens = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      k.push_back(random_matrix(random, lengths[i], shape.num_kv_heads * kHeadDim));
      v.push_back(random_matrix(random, lengths[i], shape.num_kv_heads * kHeadDim));
      const int num_blocks = stage::blocks_needed(lengths[i], shape.block_size);
      for (int block = 0; block < num_blocks; ++block) {
        std::swap(free_blocks.back(), free_blocks[random.below(free_blocks.size())]);
        batch.block_tables.push_back(free_blocks.back());
        free_blocks.pop_back();
      }
      const int first_seen = std::max(0, lengths[i] - num_queries[i] + 1 - window);
      for (int position = first_seen / shape.block_size * shape.block_size; position < lengths[i]; ++position) {
        const int block =
            batch.block_tables[static_cast<std::size_t>(batch.table_starts.back() + position / shape.block_size)];
        const std::vector<int> slot = {block * shape.block_size + position % shape.block_size};
        cache.write(0, slot, k.back().row(position), v.back().row(position));
      }
      batch.table_starts.push_back(batch.table_starts.back() + num_blocks);
      batch.context_lengths.push_back(lengths[i]);
      num_tokens += num_queries[i];
      batch.query_starts.push_back(num_tokens);
    }
    q = random_matrix(random, num_tokens, shape.num_heads * kHeadDim);
  }

  static constexpr int kHeadDim = 6;
  static constexpr int kNumBlocks = 80;
  stage::KvCache cache;
  stage::RaggedBatch batch;
  std::vector<Matrix> k;  // by sequence
  std::vector<Matrix> v;
  Matrix q;
};

std::span<const float> all_of(const Matrix& matrix) { return {matrix.data(), static_cast<std::size_t>(matrix.size())}; }

// Of a pool of 8 blocks, leaves these in this order: 7, 1, 3, 5, 2, 4.
void order_blocks(tests::NumberPool& pool) {
  for (const int block : {0, 1, 2, 3, 4, 5, 6, 7}) {
    pool.start(100 + block, {1.0F});
  }
  for (const int sequence : {104, 102, 105, 103, 101, 107}) {  // which own blocks 4, 2, 5, 3, 1 and 7
    pool.manager().free(sequence);
  }
}

}  // namespace

TEST_CASE("windows: attention against float64, in ragged batches", "[windows]") {
  Random random(1);
  for (const Shape& shape : {Shape{1, 1, 4}, Shape{4, 2, 1}, Shape{6, 2, 5}, Shape{3, 3, 16}}) {
    for (const int window : {1, 2, 3, 4, 5, 6, 8, 13, 40}) {
      const std::vector<int> lengths = {13, 1, 30, 16, 9};
      const std::vector<int> num_queries = {1, 1, 30, 7, 4};
      const Pages pages(random, shape, lengths, num_queries, window);
      const Matrix actual = stage::windowed_attention(pages.cache, 0, pages.q, pages.batch, window);
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        const Matrix q = pages.q.middleRows(pages.batch.query_starts[i], num_queries[i]);
        const Matrix rows = actual.middleRows(pages.batch.query_starts[i], num_queries[i]);
        CAPTURE(shape.num_heads, shape.block_size, window, i);
        CHECK(tests::compare(all_of(rows),
                             tests::reference_attention(q, pages.k[i], pages.v[i], shape.num_heads, shape.num_kv_heads,
                                                        Pages::kHeadDim, window),
                             kRounding) == kNoProblem);
      }
    }
  }
}

TEST_CASE("windows: one that reaches as far as the text changes no bit", "[windows]") {
  Random random(2);
  const Pages pages(random, {4, 2, 4}, {13, 30}, {1, 30}, 30);
  CHECK(tests::compare_bits(all_of(stage::windowed_attention(pages.cache, 0, pages.q, pages.batch, 30)),
                            all_of(stage::attention(pages.cache, 0, pages.q, pages.batch))) == kNoProblem);
}

TEST_CASE("windows: which blocks no query sees from now on", "[windows]") {
  // Blocks of 4 and a window of 6: the query at position 9 sees 4 to 9, that at position 13 sees 8 to 13.
  CHECK(stage::num_hidden_blocks(8, 6, 4) == 0);
  CHECK(stage::num_hidden_blocks(9, 6, 4) == 1);
  CHECK(stage::num_hidden_blocks(12, 6, 4) == 1);
  CHECK(stage::num_hidden_blocks(13, 6, 4) == 2);
  // The last full block stays, however short the window is.
  CHECK(stage::num_hidden_blocks(8, 1, 4) == 1);
  CHECK(stage::num_hidden_blocks(3, 1, 4) == 0);
  CHECK(stage::num_hidden_blocks(0, 6, 4) == 0);
  CHECK(stage::num_hidden_blocks(-20, 6, 4) == 0);
  for (int window = 1; window < 20; ++window) {
    for (int block_size = 1; block_size < 7; ++block_size) {
      for (int length = 1; length < 60; ++length) {
        const int num_hidden = stage::num_hidden_blocks(length, window, block_size);
        const int first_seen = std::max(0, length - window + 1);
        CAPTURE(window, block_size, length);
        CHECK(num_hidden * block_size <= first_seen);
        CHECK((num_hidden + 1) * block_size > std::min(first_seen, length / block_size * block_size - 1));
      }
    }
  }
}

// WINDOWS.md, by hand.
TEST_CASE("windows: by hand", "[windows]") {
  tests::NumberPool pool(8, 4);
  order_blocks(pool);
  stage::KvCacheManager& manager = pool.manager();
  pool.start(0, tests::count_from(1, 10));
  CHECK(manager.block_table(0) == Blocks{7, 1, 3});
  stage::free_hidden_blocks(manager, 0, 6);
  CHECK(manager.block_table(0) == Blocks{7, 1, 3});  // one block: no gain

  REQUIRE(pool.append(0, tests::count_from(11, 3)));
  CHECK(manager.block_table(0) == Blocks{7, 1, 3, 5});
  stage::free_hidden_blocks(manager, 0, 6);
  CHECK(manager.block_table(0) == Blocks{2, 2, 3, 5});
  CHECK(manager.free_blocks() == Blocks{4, 1, 7});
  CHECK(manager.reference_count(2) == 2);
  CHECK(manager.length(0) == 13);
  CHECK(manager.slots(0, 12, 1) == Blocks{5 * 4});  // positions stay
  CHECK(manager.sequences() == Blocks{0, 100, 106});
  CHECK(pool.ledger(true) == kNoProblem);

  REQUIRE(pool.append(0, tests::count_from(14, 4)));
  stage::free_hidden_blocks(manager, 0, 6);
  CHECK(manager.block_table(0) == Blocks{2, 2, 2, 5, 7});
  CHECK(manager.free_blocks() == Blocks{4, 1, 3});
  CHECK(pool.ledger(true) == kNoProblem);
  manager.free(0);
  CHECK(pool.ledger(true) == kNoProblem);
  CHECK(manager.reference_count(2) == 0);
}

TEST_CASE("windows: without a block for the places, nothing changes", "[windows]") {
  tests::NumberPool pool(4, 4);
  pool.start(0, tests::count_from(1, 13));
  const tests::Snapshot before = tests::take_snapshot(pool.manager());
  stage::free_hidden_blocks(pool.manager(), 0, 6);
  CHECK(tests::take_snapshot(pool.manager()) == before);
}

TEST_CASE("windows: a block that is written to, or a stand-in without an owner, is refused", "[windows]") {
  tests::NumberPool pool(8, 4);
  pool.start(0, tests::count_from(1, 10));
  stage::KvCacheManager& manager = pool.manager();
  const int own = manager.block_table(0).front();
  const int ownerless = manager.free_blocks().front();
  for (const int index : {-1, 2, 3}) {
    CHECK(tests::is_refused_as_a_bug([&] { manager.replace_block(0, index, own); }));
  }
  CHECK(tests::is_refused_as_a_bug([&] { manager.replace_block(0, 0, ownerless); }));
  CHECK(pool.ledger(true) == kNoProblem);
}

TEST_CASE("windows: forks share what is left, and what is swapped out comes back", "[windows]") {
  tests::NumberPool pool(10, 4, 10);
  stage::KvCacheManager& manager = pool.manager();
  pool.start_text(0, std::vector<common::Token>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13});
  stage::free_hidden_blocks(manager, 0, 6);
  CHECK(manager.usage().cached == 8);
  manager.fork(0, 1);
  REQUIRE(pool.append(1, {14.0F}));
  CHECK(pool.ledger(true) == kNoProblem);

  const std::vector<int> both = {0, 1};
  REQUIRE(manager.swap_out(both));
  pool.execute_copies();
  CHECK(pool.ledger(true) == kNoProblem);
  REQUIRE(manager.swap_in(both));
  pool.execute_copies();
  CHECK(pool.ledger(true) == kNoProblem);
  for (const int sequence : both) {
    const tests::Numbers numbers = pool.read(sequence);
    CHECK(tests::Numbers(numbers.begin() + 8, numbers.begin() + 13) == tests::count_from(9, 5));
    CHECK(manager.block_table(sequence)[0] == manager.block_table(sequence)[1]);
  }
  // What stands in is no text that a prompt may find.
  REQUIRE(manager.allocate(2, std::vector<common::Token>{9, 10, 11, 12, 13}));
  CHECK(manager.length(2) == 0);
  for (const int sequence : {0, 1, 2}) {
    manager.free(sequence);
  }
  CHECK(pool.ledger(true) == kNoProblem);
}

TEST_CASE("windows: the engine's texts are those of float64, in models of both kinds", "[windows]") {
  for (const int global_period : {0, 2}) {
    const Llama model = tests::windowed_model(11, global_period);
    tests::WindowedServing windowed({.num_blocks = 60}, model);
    for (int i = 0; i < 3; ++i) {
      windowed.serving.submit({tests::make_request(5 + 9 * i, 40, i)});
    }
    CHECK(windowed.serving.run() == kNoProblem);
    for (int i = 0; i < 3; ++i) {
      const common::Request request = tests::make_request(5 + 9 * i, 40, i);
      std::vector<common::Token> expected;
      for (const tests::GreedyStep& step : tests::decode_greedily(model, request.prompt, 40)) {
        expected.push_back(step.token);
      }
      CAPTURE(global_period, i);
      CHECK(windowed.serving.engine.output(i).error == kNoProblem);
      CHECK(tests::first_difference(windowed.serving.engine.output(i).completions.front().tokens, expected) ==
            kNoProblem);
    }
    CHECK((windowed.runner->num_stand_ins() > 0) == (global_period == 0));  // else a layer needs all blocks
  }
}

TEST_CASE("windows: a text holds the window's blocks, however long it is", "[windows]") {
  const Llama model = tests::windowed_model(10);
  for (const int num_tokens : {40, 80, 120}) {
    tests::ServingOptions options{.num_blocks = 64};
    options.scheduler.token_budget = 8;
    tests::WindowedServing windowed(options, model);
    windowed.serving.submit({tests::make_request(num_tokens, 20)});
    int most = 0;
    while (windowed.serving.engine.step()) {
      CHECK(windowed.serving.problem() == kNoProblem);
      most = std::max(most, windowed.serving.engine_manager().usage().reserved / 4);
    }
    CHECK(windowed.serving.leak() == kNoProblem);
    // The window of the step's first query, its 8 tokens, the ends of two blocks, and the block that stands in.
    CAPTURE(num_tokens);
    CHECK(most <= (10 + 8) / 4 + 2 + 1);
    CHECK(windowed.serving.engine.output(0).completions.front().tokens ==
          tests::served_alone({tests::make_request(num_tokens, 20)}, model).front().tokens);
  }
}

TEST_CASE("windows: a server says how far a query sees, if that is the same in all layers", "[windows]") {
  for (const auto& [window, global_period] : {std::pair{0, 0}, std::pair{10, 0}, std::pair{10, 2}}) {
    const Llama model = tests::windowed_model(window, global_period);
    stage::EngineOptions options;
    options.gpu.device = stage::Device::kCpu;
    options.num_slots = tests::kWindowedContext;
    const auto served = stage::make_served_engine(model, options, {.virtual_clock = true});
    CAPTURE(window, global_period);
    CHECK(served->description().window == (global_period == 0 ? window : 0));
  }
}

TEST_CASE("windows: several samples run in the blocks that they were promised", "[windows]") {
  // Three samples share one block that stands in. With one each, three would be taken for the two of the prompt.
  const Llama model = tests::windowed_model(4);
  tests::WindowedServing windowed({.num_blocks = 8}, model);
  windowed.serving.submit({tests::make_request(8, 6), 3});
  CHECK(windowed.serving.run() == kNoProblem);
}

TEST_CASE("windows: more texts run at once than have room as wholes", "[windows]") {
  const Llama model = tests::windowed_model(8);
  tests::ServingOptions options{.num_blocks = 40};
  options.scheduler.token_budget = 16;
  tests::WindowedServing windowed(options, model);
  for (int i = 0; i < 6; ++i) {
    windowed.serving.submit({tests::make_request(60, 20, i)});  // 20 blocks each
  }
  std::size_t most = 0;
  int preempted = 0;
  while (windowed.serving.engine.step()) {
    CHECK(windowed.serving.problem() == kNoProblem);
    most = std::max(most, windowed.serving.engine.scheduler().running().size());
    preempted += static_cast<int>(windowed.serving.reports.back().recomputed.size());
  }
  CHECK(most == 6);
  CHECK(preempted == 0);
}
