// Layers that see the last tokens only: their attention, and blocks that are freed while their sequence lives. Compiled
// for stage 8.
#include "tests/support/catch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/math/sampling.h"
#include "common/serving/prometheus.h"
#include "tests/stages/http_fixtures.h"
#include "tests/stages/number_pool.h"
#include "tests/stages/windowed_model.h"
#include "tests/support/compare.h"
#include "tests/support/reference_attention.h"
#include "tests/support/reference_decoder.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/scoring/prompt_scores.h)
#include STAGE_HEADER(production/windows/block_ownership.h)
#include STAGE_HEADER(production/windows/evicted_texts.h)
#include STAGE_HEADER(production/windows/finding_room.h)
#include STAGE_HEADER(production/windows/hidden_blocks.h)
#include STAGE_HEADER(production/windows/local_pool.h)
#include STAGE_HEADER(production/windows/local_pool_scheduler.h)
#include STAGE_HEADER(production/windows/window_prompt_scheduler.h)
#include STAGE_HEADER(production/windows/window_prompts.h)
#include STAGE_HEADER(production/windows/windowed_attention.h)
#include STAGE_HEADER(serve/engine_adapter.h)
#include STAGE_HEADER(serve/make_engine.h)
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

// Of a pool of 8 blocks, leaves these in this order: 7, 1, 3, 5, 2, 4; frees_all: and 6 and 0.
void order_blocks(tests::NumberPool& pool, bool frees_all = false) {
  for (const int block : {0, 1, 2, 3, 4, 5, 6, 7}) {
    pool.start(100 + block, {1.0F});
  }
  for (const int sequence : frees_all ? Blocks{100, 106} : Blocks{}) {
    pool.manager().free(sequence);
  }
  for (const int sequence : {104, 102, 105, 103, 101, 107}) {  // which own blocks 4, 2, 5, 3, 1 and 7
    pool.manager().free(sequence);
  }
}

// The tokens first … last.
std::vector<common::Token> text(int first, int last) {
  std::vector<common::Token> result(static_cast<std::size_t>(last - first + 1));
  std::iota(result.begin(), result.end(), first);
  return result;
}

std::vector<common::Token> joined_text(std::vector<common::Token> left, const std::vector<common::Token>& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

// A pool of numbers and parts beside it, as the scheduler drives them.
struct NumbersAndParts {
  NumbersAndParts(int num_parts, int window, int num_blocks, int num_host_blocks = 0)
      : numbers(num_blocks, kBlockSize, num_host_blocks),
        parts({num_parts, num_blocks, num_host_blocks, kBlockSize, window}) {}

  // A sequence with this text, of which it computes what is not cached.
  void start(int sequence, const std::vector<common::Token>& tokens, bool use_prefix_cache = true) {
    stage::KvCacheManager& manager = numbers.manager();
    parts.begin_step(manager);
    REQUIRE(manager.allocate(sequence, tokens, 0, {.use_prefix_cache = use_prefix_cache}));
    compute(sequence, std::span(tokens).subspan(static_cast<std::size_t>(manager.length(sequence))));
  }
  void append(int sequence, const std::vector<common::Token>& tokens) {
    parts.begin_step(numbers.manager());
    REQUIRE(numbers.manager().reserve(sequence, static_cast<int>(tokens.size())));
    compute(sequence, tokens);
  }
  void compute(int sequence, std::span<const common::Token> tokens) {
    parts.end_step(numbers.manager());
    numbers.execute_copies();
    numbers.manager().commit(sequence, tokens);
    CHECK(tests::check_parts(parts, numbers.manager()) == kNoProblem);
  }
  // How many of the cached blocks with the tokens 1 … num_tokens a sequence can begin with.
  std::size_t num_shared(int num_tokens) {
    const std::vector<common::Token> tokens = text(1, num_tokens);
    return parts.share_parts(numbers.manager(), numbers.manager().prefix_cache().find(tokens, 0));
  }

  Blocks parts_of(int sequence) {
    Blocks result;
    for (const int block : numbers.manager().block_table(sequence)) {
      result.push_back(parts.part_of(block));
    }
    return result;
  }

  static constexpr int kBlockSize = 4;
  tests::NumberPool numbers;
  stage::LocalPool parts;
};

// The same with a second tier of the prefix cache, whose blocks come behind the pool's.
struct TwoTiers : NumbersAndParts {
  TwoTiers(int num_parts, int window, int num_blocks, int num_host_blocks = 8)
      : NumbersAndParts(num_parts, window, num_blocks, num_host_blocks),
        host(std::make_shared<stage::HostCache>(num_blocks, num_host_blocks, kBlockSize)) {
    parts.attach(host);
    stage::KvCacheManager& manager = numbers.manager();
    manager.on_evict([this, &manager](int block) {
      host->store(manager.prefix_cache(), block, [&](int host_block) {
        return parts.will_have_part(manager, block) && !parts.will_have_part(manager, host_block);
      });
    });
  }

  // Of the host blocks with the tokens 1 … num_tokens: with how many of them a sequence can begin.
  std::size_t num_found(int num_tokens) {
    return parts.share_parts(numbers.manager(), host->find(0, text(1, num_tokens), 0));
  }
  // A sequence with this text, whose beginning is brought back.
  void begin(int sequence, const std::vector<common::Token>& tokens) {
    parts.begin_step(numbers.manager());
    REQUIRE(numbers.manager().allocate(sequence, tokens));
    host->restore(numbers.manager(), sequence, tokens, 0, {});
  }
  void start(int sequence, const std::vector<common::Token>& tokens, bool use_prefix_cache = true) {
    parts.begin_step(numbers.manager());
    REQUIRE(numbers.manager().allocate(sequence, tokens, 0, {.use_prefix_cache = use_prefix_cache}));
    compute(sequence, tokens);
  }
  void append(int sequence, const std::vector<common::Token>& tokens) {
    parts.begin_step(numbers.manager());
    REQUIRE(numbers.manager().reserve(sequence, static_cast<int>(tokens.size())));
    compute(sequence, tokens);
  }
  // All cached blocks go to the host.
  void evict_all() {
    parts.begin_step(numbers.manager());
    REQUIRE(numbers.manager().allocate(-1, parts.size().num_blocks * kBlockSize));
    numbers.manager().free(-1);
    parts.end_step(numbers.manager());
    take_copies();
  }
  void compute(int sequence, std::span<const common::Token> tokens) {
    NumbersAndParts::compute(sequence, tokens);
    take_copies();
  }
  void take_copies() {
    const auto take = [](std::span<const stage::BlockCopy> pending) {
      std::vector<std::pair<int, int>> result;
      for (const auto& [source, destination] : pending) {
        result.emplace_back(source, destination);
      }
      return result;
    };
    copies = take(host->pending_copies());
    part_copies = take(parts.pending_copies());
    host->clear_pending_copies(copies.size());
    parts.clear_pending_copies();
  }

  std::shared_ptr<stage::HostCache> host;
  std::vector<std::pair<int, int>> copies;  // of the last step
  std::vector<std::pair<int, int>> part_copies;
};

// Numbers in blocks of 4, of which queries see the last 6, and what is known of texts that were evicted.
struct NumbersAndTexts {
  // num_tier_blocks: of a second tier, numbered behind the pool's; 0: there is none.
  explicit NumbersAndTexts(int num_blocks, int num_tier_blocks = 0)
      : numbers(num_blocks, kBlockSize, num_tier_blocks),
        tier(num_tier_blocks > 0 ? std::make_shared<stage::HostCache>(num_blocks, num_tier_blocks, kBlockSize)
                                 : nullptr),
        evicted(num_blocks, tier) {
    numbers.manager().on_evict([this](int block) {
      evicted.add(numbers.manager().prefix_cache(), block);
      if (tier != nullptr) {
        tier->store(numbers.manager().prefix_cache(), block);
      }
    });
  }

  // Computes more of the sequence's text, and then frees what the next query does not see.
  void append(int sequence, const std::vector<common::Token>& tokens) {
    REQUIRE(numbers.manager().reserve(sequence, static_cast<int>(tokens.size())));
    numbers.manager().commit(sequence, tokens);
    stage::free_hidden_blocks(numbers.manager(), sequence, kWindow);
  }
  void start(int sequence, const std::vector<common::Token>& tokens) {
    REQUIRE(numbers.manager().allocate(sequence, 1));
    append(sequence, tokens);
  }
  stage::FoundBlocks look_up(const std::vector<common::Token>& tokens, std::uint64_t salt = 0) {
    return stage::find_window(numbers.manager(), evicted, tokens, salt, kWindow, tier.get());
  }
  Blocks find(const std::vector<common::Token>& tokens, std::uint64_t salt = 0) { return look_up(tokens, salt).blocks; }
  // What was found is in the pool from now on.
  bool bring_back(stage::FoundBlocks& found, const std::vector<common::Token>& tokens) {
    return stage::bring_back(numbers.manager(), evicted, *tier, found, tokens, 0, kWindow);
  }
  // The tier's planned copies, which are carried out.
  std::vector<std::pair<int, int>> take_copies() {
    std::vector<std::pair<int, int>> result;
    for (const stage::BlockCopy& copy : tier->pending_copies()) {
      result.emplace_back(copy.source, copy.destination);
      numbers.execute({copy});
    }
    tier->clear_pending_copies(result.size());
    return result;
  }
  // Evicts cached blocks, and leaves all that have no owner free.
  void evict(int num_blocks) {
    const auto num_free = static_cast<int>(numbers.manager().free_blocks().size());
    REQUIRE(numbers.manager().allocate(99, (num_free + num_blocks) * kBlockSize));
    numbers.manager().free(99);
  }

  static constexpr int kBlockSize = 4;
  static constexpr int kWindow = 6;
  tests::NumberPool numbers;
  std::shared_ptr<stage::HostCache> tier;
  stage::EvictedTexts evicted;
};

// When a request is admitted, another caller's sequence takes so many blocks that the parts of a step are too few.
class CrowdedScheduler : public stage::LocalPoolScheduler {
 public:
  using LocalPoolScheduler::LocalPoolScheduler;

  int num_taken = 0;  // blocks

 protected:
  bool find_room(stage::SequenceGroup& group, const stage::Admission& admission) override {
    const bool has_room = LocalPoolScheduler::find_room(group, admission);
    if (has_room && num_taken > 0) {
      REQUIRE(manager_.allocate(1000, num_taken * manager_.block_size()));
    }
    return has_room;
  }
};

// The texts of a model in which every second layer sees all.
void check_texts(tests::WindowedServing& windowed, const Llama& model,
                 const std::vector<stage::GenerationRequest>& requests) {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i);
    CHECK(tests::compare_output(windowed.serving.engine.output(static_cast<int>(i)),
                                tests::served_alone(requests[i], model)) == kNoProblem);
  }
}

// Serves them one after the other, and returns how many tokens of each prompt were found.
std::vector<int> serve_in_turn(tests::WindowedServing& windowed,
                               const std::vector<stage::GenerationRequest>& requests) {
  std::vector<int> found;
  for (const stage::GenerationRequest& request : requests) {
    const int id = windowed.serving.submit(request);
    while (windowed.serving.engine.step()) {
      CHECK(windowed.problem() == kNoProblem);
    }
    found.push_back(windowed.serving.engine.output(id).cached_tokens);
  }
  return found;
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

TEST_CASE("windows: blocks are held until the holder ends, also around one that holds none", "[windows]") {
  stage::KvCacheManager manager(4, 4);
  {
    const stage::HeldBlocks held(manager, 3);
    CHECK(stage::num_available(manager) == 1);
    { const stage::HeldBlocks none(manager, 0); }
    CHECK(stage::num_available(manager) == 1);
  }
  CHECK(stage::num_available(manager) == 4);
  CHECK(tests::is_refused_as_a_bug([&] { const stage::HeldBlocks too_many(manager, 5); }));
}

TEST_CASE("windows: a block that is written to, or a stand-in without an owner, is refused", "[windows]") {
  tests::NumberPool pool(8, 4);
  pool.start(0, tests::count_from(1, 10));
  stage::KvCacheManager& manager = pool.manager();
  const int own = manager.block_table(0).front();
  const int ownerless = manager.free_blocks().front();
  for (const int index : {-1, 2, 3}) {
    CHECK(tests::is_refused_as_a_bug([&] { stage::replace_block(manager, 0, index, own); }));
  }
  CHECK(tests::is_refused_as_a_bug([&] { stage::replace_block(manager, 0, 0, ownerless); }));
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

// A prompt of 10 tokens, 4 at a time, and two tokens of the reply, with a window of 6. The last token is not read.
//
//   tokens in the cache    4   8  10  11  12
//   computed in the step   4   4   2   1   1
//   its queries see        4   8   7   6   6     the first of the chunk's two: 3 … 8, the second: 4 … 9
TEST_CASE("windows: what a layer with a window reads is counted, by hand", "[windows]") {
  for (const auto& [global_period, num_read] :
       {std::pair{0, 4 + 8 + 7 + 6 + 6}, std::pair{2, (4 + 8 + 7 + 6 + 6 + 4 + 8 + 10 + 11 + 12) / 2}}) {
    const Llama model = tests::windowed_model(6, global_period);  // two layers
    tests::ServingOptions options;
    options.scheduler.token_budget = 4;
    tests::WindowedServing windowed(options, model);
    stage::GenerationRequest request{tests::make_request(10, 3)};
    request.request.num_speculative_tokens = 0;
    windowed.serving.submit(request);
    CHECK(windowed.serving.run() == kNoProblem);
    CAPTURE(global_period);
    CHECK(common::counter(windowed.serving.engine.counters(), "kv_bytes_read") ==
          static_cast<double>(num_read * windowed.serving.engine.cache().bytes_per_slot));
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

// WINDOWS.md, a prompt's window by hand.
TEST_CASE("windows: a prompt begins with its window, by hand", "[windows]") {
  NumbersAndTexts pool(8);
  order_blocks(pool.numbers);
  stage::KvCacheManager& manager = pool.numbers.manager();
  pool.start(0, text(1, 10));
  pool.append(0, text(11, 13));
  pool.append(0, text(14, 17));
  CHECK(manager.block_table(0) == Blocks{2, 2, 2, 5, 4});
  manager.free(0);
  const std::list<int>& cached = manager.prefix_cache().evictable();
  CHECK(Blocks(cached.begin(), cached.end()) == Blocks{1, 7, 3, 5});
  pool.evict(2);
  CHECK(Blocks(cached.begin(), cached.end()) == Blocks{3, 5});
  CHECK(pool.evicted.size() == 2);

  CHECK(pool.find(text(1, 17)) == Blocks{-1, -1, 3, 5});
  CHECK(pool.find(text(1, 15)).empty());  // 7 … 12, of which 5 … 8 are gone
  CHECK(pool.find(text(2, 18)).empty());  // another text
  CHECK(pool.find(text(1, 17), 1).empty());
  REQUIRE(stage::allocate_behind(manager, 1, pool.find(text(1, 17)), 0, 2, 0));
  CHECK(manager.block_table(1) == Blocks{2, 2, 3, 5, 4});
  CHECK(manager.length(1) == 16);
  CHECK(pool.numbers.ledger(true) == kNoProblem);
  // What follows is published behind it.
  pool.append(1, {17, 50, 51, 52});
  CHECK(manager.prefix_cache().contains(4));
  CHECK(pool.numbers.ledger(true) == kNoProblem);
  manager.free(1);
  CHECK(pool.find(joined_text(text(1, 17), {50, 51, 52, 9})).size() == 5);
}

// WINDOWS.md, one window and a second tier by hand.
TEST_CASE("windows: one window and a second tier, by hand", "[windows]") {
  NumbersAndTexts pool(8, 8);
  order_blocks(pool.numbers);
  stage::KvCacheManager& manager = pool.numbers.manager();
  pool.start(0, text(1, 10));
  pool.append(0, text(11, 13));
  pool.append(0, text(14, 17));
  CHECK(manager.block_table(0) == Blocks{2, 2, 2, 5, 4});
  manager.free(0);
  pool.start(1, text(31, 51));
  CHECK(manager.block_table(1) == Blocks{2, 4, 1, 7, 3, 5});
  using Copies = std::vector<std::pair<int, int>>;
  CHECK(pool.take_copies() == Copies{{1, 8}, {7, 9}, {3, 10}, {5, 11}});
  manager.free(1);
  const std::list<int>& cached = manager.prefix_cache().evictable();
  CHECK(Blocks(cached.begin(), cached.end()) == Blocks{3, 7, 1, 4, 2});

  constexpr int kHost = stage::FoundBlocks::kOnHost;
  CHECK(pool.find(text(1, 15)) == Blocks{-1, kHost, kHost});
  CHECK(pool.look_up(text(1, 15)).host_blocks == Blocks{8, 10});
  CHECK(pool.find(text(1, 9)) == Blocks{kHost, kHost});
  CHECK(pool.find(text(2, 18)).empty());
  CHECK(pool.find(text(1, 17), 1).empty());
  stage::FoundBlocks found = pool.look_up(text(1, 17));
  CHECK(found.blocks == Blocks{-1, -1, kHost, kHost});
  CHECK(found.host_blocks == Blocks{10, 11});
  REQUIRE(pool.bring_back(found, text(1, 17)));
  CHECK(found.blocks == Blocks{-1, -1, 5, 3});
  REQUIRE(stage::allocate_behind(manager, 2, found.blocks, 0, 2, 0));
  CHECK(manager.block_table(2) == Blocks{7, 7, 5, 3, 1});
  CHECK(manager.length(2) == 16);
  CHECK(pool.take_copies() == Copies{{3, 12}, {10, 5}, {11, 3}, {7, 13}, {1, 14}});
  CHECK(pool.numbers.ledger(true) == kNoProblem);
  // To the lesson's lookup, no block of the pool has the text: those that it follows are not there.
  CHECK(manager.prefix_cache().find(text(1, 17), 0).empty());
  CHECK(pool.find(text(1, 17)) == Blocks{-1, -1, 5, 3});
  CHECK(pool.find(text(1, 17), 1).empty());
  CHECK(pool.find(text(9, 17)).empty());  // a text that begins in the middle of it

  // What follows is found behind it, wherever it is. The host still has what was brought back.
  const std::vector<common::Token> longer = joined_text(text(1, 17), {60, 61, 62});
  pool.append(2, {17, 60, 61, 62});
  CHECK(manager.prefix_cache().contains(1));
  manager.free(2);
  const std::vector<common::Token> prompt = joined_text(longer, {9});
  CHECK(pool.find(prompt) == Blocks{-1, -1, -1, 3, 1});
  pool.evict(static_cast<int>(cached.size()));
  CHECK(pool.take_copies() == Copies{{4, 15}, {2, 8}, {1, 9}});
  CHECK(pool.find(prompt) == Blocks{-1, -1, -1, kHost, kHost});
  CHECK(pool.look_up(prompt).host_blocks == Blocks{11, 9});
  // Block 5 had A's tokens 9 … 12, under a number that the host's block has now. It is remembered behind its own text.
  std::set<stage::PrefixCache::TextId> remembered;
  pool.evicted.find(pool.tier->parent(10), text(9, 12), 0, remembered);
  CHECK(remembered.contains(pool.tier->text(10)));
}

TEST_CASE("windows: what stands before the host's blocks is not forgotten", "[windows]") {
  NumbersAndTexts pool(10, 30);
  stage::KvCacheManager& manager = pool.numbers.manager();
  pool.start(0, text(1, 25));
  manager.free(0);
  const std::vector<common::Token> prompt = text(1, 25);
  for (int i = 1; i < 100; ++i) {
    pool.start(i, text(100 * i, 100 * i + 24));
    manager.free(i);
    pool.tier->touch(pool.look_up(prompt).host_blocks);
    pool.take_copies();
  }
  CHECK(pool.tier->find(0, text(1, 4), 0).empty());  // its first block is in neither tier
  CHECK(pool.find(prompt).size() == 6);
  CHECK(pool.look_up(prompt).host_blocks.size() == 2);
  CHECK(pool.look_up(prompt).num_first == 0);
}

TEST_CASE("windows: what the pool has of a window is not evicted for the rest", "[windows]") {
  NumbersAndTexts pool(8, 8);
  stage::KvCacheManager& manager = pool.numbers.manager();
  pool.start(0, text(1, 17));
  manager.free(0);
  pool.start(1, text(31, 34));
  manager.free(1);
  REQUIRE(manager.allocate(2, 6 * 4));  // evicts all of the first text but its last block
  const int last = manager.prefix_cache().evictable().front();
  stage::FoundBlocks found = pool.look_up(text(1, 17));
  CHECK(found.blocks == Blocks{-1, -1, stage::FoundBlocks::kOnHost, last});
  CHECK(pool.bring_back(found, text(1, 17)));
  CHECK(found.blocks[3] == last);
  CHECK(pool.find(text(1, 17)) == found.blocks);
  CHECK(pool.tier->find(0, text(31, 34), 0).size() == 1);
}

TEST_CASE("windows: blocks that are lost on the host while the pool makes room for them are not begun with",
          "[windows]") {
  NumbersAndTexts pool(8, 4);
  stage::KvCacheManager& manager = pool.numbers.manager();
  pool.start(0, text(1, 17));
  manager.free(0);
  pool.start(1, text(31, 62));
  manager.free(1);
  pool.take_copies();
  REQUIRE(manager.free_blocks().empty());
  stage::FoundBlocks found = pool.look_up(text(1, 17));
  CHECK(found.host_blocks == Blocks{8, 11});
  // The tier was not told that they are needed: what the pool evicts takes their places.
  pool.tier->touch(Blocks{9, 10});
  CHECK(!pool.bring_back(found, text(1, 17)));
  CHECK(pool.tier->statistics().restored == 0);
  CHECK(pool.numbers.ledger(true) == kNoProblem);
  CHECK(pool.look_up(text(1, 17)).host_blocks == Blocks{10, 9});  // fewer blocks of the text
}

TEST_CASE("windows: a prompt that can't begin changes nothing", "[windows]") {
  NumbersAndTexts pool(6);
  stage::KvCacheManager& manager = pool.numbers.manager();
  pool.start(0, text(1, 17));
  manager.free(0);
  const Blocks found = pool.find(text(1, 18));
  CHECK(found.size() == 4);
  CHECK(found[1] == -1);
  // Two that are seen, one that stands in, and one for each four tokens.
  CHECK(stage::num_taken(manager, found, 9) == 6);
  const tests::Snapshot before = tests::take_snapshot(manager);
  CHECK(!stage::allocate_behind(manager, 1, found, 0, 13, 0));
  CHECK(!stage::allocate_behind(manager, 1, found, 0, 9, 1));
  CHECK(tests::take_snapshot(manager) == before);
  CHECK(tests::is_refused_as_a_bug([&] { stage::allocate_behind(manager, 1, Blocks{found[2], -1}, 0, 1, 0); }));
  CHECK(tests::take_snapshot(manager) == before);
  CHECK(stage::allocate_behind(manager, 1, found, 0, 9, 0));
  CHECK(pool.numbers.ledger(true) == kNoProblem);
}

TEST_CASE("windows: a text that was evicted and computed again is still the text of the blocks behind", "[windows]") {
  NumbersAndTexts pool(12);
  stage::KvCacheManager& manager = pool.numbers.manager();
  pool.start(0, text(1, 13));
  pool.append(0, text(14, 25));
  manager.free(0);
  pool.evict(2);
  CHECK(pool.find(text(1, 25)).size() == 6);
  // Its first two blocks again, under new numbers.
  pool.start(1, text(1, 9));
  manager.free(1);
  CHECK(manager.prefix_cache().find(text(1, 25), 0).size() == 2);
  CHECK(pool.find(text(1, 25)).size() == 6);
  CHECK(pool.find(text(1, 9)).size() == 2);
}

TEST_CASE("windows: what no cached block goes on with is forgotten", "[windows]") {
  constexpr int kNumBlocks = 10;
  NumbersAndTexts pool(kNumBlocks);
  stage::KvCacheManager& manager = pool.numbers.manager();
  std::size_t most = 0;
  for (int i = 0; i < 200; ++i) {
    pool.start(i, text(100 * i, 100 * i + 24));
    manager.free(i);
    most = std::max(most, pool.evicted.size());
  }
  // Those that were added since it was looked after last, and what stands before the blocks of the pool.
  CHECK(most <= std::size_t{2} * kNumBlocks);
  CHECK(most >= kNumBlocks);

  // However long texts are: 16 for each block.
  pool.start(1000, text(1, 5));
  for (int end = 9; end < 2000; end += 4) {
    pool.append(1000, text(end - 3, end));
  }
  CHECK(pool.evicted.size() == std::size_t{stage::EvictedTexts::kMaxPerBlock} * kNumBlocks);
}

TEST_CASE("windows: a conversation's second turn finds its window, although its first blocks are gone", "[windows]") {
  const Llama model = tests::windowed_model(10);
  tests::ServingOptions options{.num_blocks = 22};
  options.scheduler.token_budget = 12;
  tests::WindowedServing windowed(options, model);
  stage::GenerationRequest first{tests::make_request(60, 20)};
  first.request.cache_salt = 7;
  serve_in_turn(windowed, {first, {tests::make_request(35, 4, 1)}});
  stage::GenerationRequest second = first;
  const std::vector<common::Token> reply = windowed.serving.engine.output(0).completions.front().tokens;
  second.request.prompt.insert(second.request.prompt.end(), reply.begin(), reply.end());
  second.request.prompt.insert(second.request.prompt.end(), {5, 6, 7});
  CHECK(windowed.serving.engine_manager().prefix_cache().find(second.request.prompt, 0).empty());
  CHECK(serve_in_turn(windowed, {second}) == std::vector<int>{76});  // all full blocks of 79
  CHECK(tests::compare_output(windowed.serving.engine.output(2), tests::served_alone(second, model)) == kNoProblem);
  const auto& scheduler =
      dynamic_cast<const stage::WindowPromptScheduler&>(std::as_const(windowed.serving.engine).scheduler());
  CHECK(scheduler.statistics().prompts == 1);
  CHECK(scheduler.statistics().tokens == 76);
  const stage::PrefixStatistics& lookups = windowed.serving.engine_manager().prefix_cache().statistics();
  CHECK(lookups.lookups == 3);
  CHECK(lookups.hits == 1);
  CHECK(lookups.tokens_saved == 76);
}

TEST_CASE("windows: a second turn finds its window on the host, and only that is brought back", "[windows]") {
  const Llama model = tests::windowed_model(10);
  tests::ServingOptions options{.num_blocks = 22, .num_host_cache_blocks = 60};
  options.scheduler.token_budget = 12;
  options.scheduler.token_compute_cost = 10;  // so that blocks are kept
  tests::WindowedServing windowed(options, model);
  stage::GenerationRequest first{tests::make_request(60, 20)};
  first.request.cache_salt = 7;
  const stage::GenerationRequest other{tests::make_request(85, 4, 1)};
  serve_in_turn(windowed, {first, other});
  stage::GenerationRequest second = first;
  const std::vector<common::Token> reply = windowed.serving.engine.output(0).completions.front().tokens;
  second.request.prompt.insert(second.request.prompt.end(), reply.begin(), reply.end());
  second.request.prompt.insert(second.request.prompt.end(), {5, 6, 7});
  stage::GenerationRequest shorter = first;
  shorter.request.prompt.resize(30);
  CHECK(serve_in_turn(windowed, {second, other, shorter}) == std::vector<int>{76, 84, 28});
  const std::vector<stage::GenerationRequest> requests = {first, other, second, other, shorter};
  check_texts(windowed, model, requests);
  const auto& scheduler =
      dynamic_cast<const stage::WindowPromptScheduler&>(std::as_const(windowed.serving.engine).scheduler());
  CHECK(scheduler.host_cache().statistics().hits == 2);
  CHECK(scheduler.host_cache().statistics().restored == 2 * 3);  // the windows' blocks, of 19 and 7
  CHECK(scheduler.statistics().prompts == 0);                    // the others were on the host, too
  CHECK(windowed.serving.engine_manager().prefix_cache().statistics().tokens_saved == 76 + 84 + 28 - 6 * 4);
}

TEST_CASE("windows: what was found on the host is kept there while the pool makes room for it", "[windows]") {
  const Llama model = tests::windowed_model(10);
  const stage::GenerationRequest first{tests::make_request(61, 4)};
  const stage::GenerationRequest other{tests::make_request(85, 4, 1)};
  // Just large enough: what the other text evicts has taken the places of all but the window.
  tests::ServingOptions options{.num_blocks = 12, .num_host_cache_blocks = 15};
  options.scheduler.token_budget = 12;
  options.scheduler.token_compute_cost = 10;
  tests::WindowedServing windowed(options, model);
  CHECK(serve_in_turn(windowed, {first, other, first}) == std::vector<int>{0, 0, 60});
  check_texts(windowed, model, {first, other, first});
}

TEST_CASE("windows: a text behind blocks from the host is the cold text, to the bit", "[windows]") {
  const Llama model = tests::windowed_model(10);
  tests::ServingOptions options{.num_blocks = 22, .num_host_cache_blocks = 60};
  options.scheduler.token_budget = 12;
  options.scheduler.token_compute_cost = 10;
  tests::WindowedServing windowed(options, model);
  stage::GenerationRequest request{tests::make_request(61, 30)};
  request.request.num_logprobs = 3;
  const stage::GenerationRequest other{tests::make_request(85, 4, 1)};
  CHECK(serve_in_turn(windowed, {request, other, request}) == std::vector<int>{0, 0, 60});
  const std::vector<common::TokenLogprobs>& cold = windowed.serving.engine.output(0).completions.front().logprobs;
  const std::vector<common::TokenLogprobs>& warm = windowed.serving.engine.output(2).completions.front().logprobs;
  REQUIRE(cold.size() == 30);
  REQUIRE(warm.size() == 30);
  for (std::size_t i = 0; i < cold.size(); ++i) {
    CHECK(warm[i].drawn.token == cold[i].drawn.token);
    CHECK(warm[i].drawn.logprob == cold[i].drawn.logprob);
  }
}

TEST_CASE("windows: a request is longer than the pool", "[windows]") {
  const Llama model = tests::windowed_model(10);
  // A window's blocks, one behind it, and one to go on. Budgets smaller and larger than the pool.
  constexpr int kBlocksOfOne = 4 + 2;
  for (const int num_samples : {1, 3}) {
    stage::GenerationRequest request{tests::make_request(100, 30), num_samples};
    request.request.sampling.temperature = 1.0F;
    const stage::GenerationRequest other{tests::make_request(5, 8, 1)};
    const std::vector<common::Completion> expected = tests::served_alone(request, model);
    const std::vector<common::Completion> expected_other = tests::served_alone(other, model);
    struct Setup {
      int token_budget;
      stage::Preemption preemption;
      int num_host_cache_blocks;
    };
    for (const Setup& setup :
         {Setup{5, stage::Preemption::kRecompute, 0}, Setup{5, stage::Preemption::kSwap, 0},
          Setup{200, stage::Preemption::kRecompute, 0}, Setup{200, stage::Preemption::kSwap, 0},
          Setup{5, stage::Preemption::kRecompute, 3}, Setup{5, stage::Preemption::kSwap, 40},
          Setup{200, stage::Preemption::kRecompute, 40}, Setup{200, stage::Preemption::kSwap, 3}}) {
      tests::ServingOptions options{.num_blocks = num_samples * kBlocksOfOne,
                                    .num_host_blocks = 100,
                                    .num_host_cache_blocks = setup.num_host_cache_blocks};
      options.scheduler.token_budget = setup.token_budget;
      options.scheduler.preemption = setup.preemption;
      options.scheduler.token_compute_cost = 10;
      tests::WindowedServing windowed(options, model);
      CAPTURE(num_samples, setup.token_budget, setup.num_host_cache_blocks);
      for (const stage::GenerationRequest& served : {other, request, other, request}) {
        windowed.serving.submit(served);
      }
      CHECK(windowed.serving.run() == kNoProblem);
      for (const int id : {0, 1, 2, 3}) {
        CAPTURE(id);
        CHECK(tests::compare_output(windowed.serving.engine.output(id), id % 2 == 0 ? expected_other : expected) ==
              kNoProblem);
      }
    }
  }
}

TEST_CASE("windows: one that is left alone in the middle of a step, with all blocks, goes on", "[windows]") {
  stage::KvCacheManager manager(18, 3);
  stage::SequenceIds ids;
  stage::WindowPromptScheduler scheduler(18, 0, manager, {.headroom = 0}, true, 0, stage::kCpuTokenCost);
  // 21 blocks as a whole, of which the windows lie in 7 for each sample.
  const auto first = std::make_shared<stage::ParallelSampling>(manager, ids, 0, tests::make_request(5, 27), 2);
  scheduler.add(first);
  REQUIRE(scheduler.schedule().groups.size() == 1);
  manager.commit(first->live()[0].sequence, 5);
  first->extend({{}, {Matrix::Zero(1, 64)}}, 0.0);
  const auto compute_token = [&] {
    const stage::ScheduledStep step = scheduler.schedule();
    REQUIRE(!step.groups.empty());
    for (const stage::Branch& branch : first->live()) {
      manager.commit(branch.sequence, 1);
    }
    first->extend({{1, 1}, {}}, 0.0);
    return step;
  };
  while (manager.length(first->live()[0].sequence) < 21) {
    compute_token();
  }
  scheduler.add(std::make_shared<stage::ParallelSampling>(manager, ids, 1, tests::make_request(3, 9, 1), 1));
  CHECK(compute_token().admitted.size() == 1);
  for (const stage::Branch& branch : first->live()) {
    REQUIRE(manager.reserve(branch.sequence, 5));  // as drafts would
  }
  REQUIRE(stage::num_available(manager) == 0);
  while (manager.length(first->live()[0].sequence) < 27) {
    CHECK(compute_token().preempted.empty());
  }
  // The two need a block each, and the other request, which is preempted for it, has one.
  const stage::ScheduledStep step = compute_token();
  CHECK(step.groups.size() == 1);
  CHECK(step.preempted.size() == 1);
  CHECK(step.admitted.empty());
}

TEST_CASE("windows: a request whose windows are more than the pool is rejected", "[windows]") {
  const Llama model = tests::windowed_model(10);
  tests::WindowedServing windowed({.num_blocks = 5}, model);
  const int id = windowed.serving.submit({tests::make_request(100, 30)});
  CHECK(windowed.serving.engine.output(id).finish_reason == common::FinishReason::kRejected);
  CHECK(windowed.serving.engine.output(id).error ==
        "the request needs up to 6 blocks at once, and the whole cache has 5 (20 slots): --slots 24 would do, or fewer "
        "new tokens or sequences");
  const int short_id = windowed.serving.submit({tests::make_request(10, 10)});
  CHECK_FALSE(windowed.serving.engine.output(short_id).finished());
  // What is wrong besides its length is still a reason.
  tests::WindowedServing roomy({.num_blocks = 20}, model);
  stage::GenerationRequest strange{tests::make_request(100, 30)};
  strange.request.prompt.back() = -1;
  CHECK(roomy.serving.engine.output(roomy.serving.submit(strange)).error == "token -1 is not in the vocabulary");
  strange = {tests::make_request(100, 0)};
  CHECK(roomy.serving.engine.output(roomy.serving.submit(strange)).error == "no new tokens are requested");
  strange = {tests::make_request(100, 30)};
  strange.request.num_logprobs = -1;
  CHECK(roomy.serving.engine.output(roomy.serving.submit(strange)).error == "logprobs must be at least 0");
  strange = {tests::make_request(100, 30), 65};
  CHECK(roomy.serving.engine.output(roomy.serving.submit(strange)).error ==
        "65 sequences at once, and a step has room for 1 to 64");
  strange.num_samples = 0;
  CHECK(roomy.serving.engine.output(roomy.serving.submit(strange)).error ==
        "0 sequences at once, and a step has room for 1 to 64");
}

TEST_CASE("windows: a prompt's log-probabilities are those of a reply that is forced to be it", "[windows]") {
  for (const int global_period : {0, 2}) {
    const Llama model = tests::windowed_model(7, global_period);
    stage::GenerationRequest forced{tests::make_request(60, 59)};
    std::vector<common::Token>& prompt = forced.request.prompt;
    forced.request.forced.assign(prompt.begin() + 1, prompt.end());
    prompt.resize(1);
    forced.request.num_logprobs = 2;
    const std::vector<common::TokenLogprobs> expected = tests::served_alone(forced, model).front().logprobs;
    for (const int token_budget : {5, 100}) {
      tests::ServingOptions options{.num_blocks = 20, .speculates = true, .has_windows = true};
      options.scheduler.token_budget = token_budget;
      tests::Serving serving(options, model);
      serving.submit({tests::make_request(60, 4)});  // whose blocks would be found
      CHECK(serving.run() == kNoProblem);
      serving.submit({stage::with_scored_prompt(forced.request)});
      CHECK(serving.run() == kNoProblem);
      const std::vector<common::TokenLogprobs>& actual = serving.engine.output(1).completions.front().logprobs;
      CAPTURE(global_period, token_budget);
      REQUIRE(actual.size() == 59);
      for (std::size_t i = 0; i < actual.size(); ++i) {
        CHECK(actual[i].drawn.token == forced.request.forced[i]);
        CHECK(std::abs(actual[i].drawn.logprob - expected[i].drawn.logprob) < 1e-4F);
        CHECK(actual[i].rank == expected[i].rank);
      }
    }
  }
}

// WINDOWS.md, two kinds of layers by hand.
TEST_CASE("windows: two pools, by hand", "[windows]") {
  NumbersAndParts pools(3, 6, 8);
  order_blocks(pools.numbers, true);
  stage::KvCacheManager& manager = pools.numbers.manager();
  pools.start(0, text(1, 10));
  CHECK(manager.block_table(0) == Blocks{7, 1, 3});
  CHECK(pools.parts_of(0) == Blocks{0, 1, 2});

  pools.append(0, text(11, 13));
  CHECK(manager.block_table(0) == Blocks{7, 1, 3, 5});
  CHECK(pools.parts_of(0) == Blocks{-1, 1, 2, 0});
  CHECK(pools.num_shared(12) == 3);

  pools.append(0, text(14, 17));
  CHECK(manager.block_table(0) == Blocks{7, 1, 3, 5, 2});
  CHECK(pools.parts_of(0) == Blocks{-1, -1, 2, 0, 1});
  CHECK(pools.num_shared(16) == 4);  // the token behind them sees 11 … 16
  CHECK(pools.num_shared(12) == 0);  // 7 … 12, of which block 1 has lost its part
  CHECK(pools.parts.num_held() == 3);
  CHECK(pools.parts.num_evicted() == 2);
}

TEST_CASE("windows: the part goes that has not been in a window for the longest time, not the one given first",
          "[windows]") {
  NumbersAndParts pools(6, 6, 12);
  stage::KvCacheManager& manager = pools.numbers.manager();
  pools.start(0, text(1, 5));
  pools.start(1, text(101, 109));
  manager.free(1);
  pools.append(0, text(6, 9));  // and the first of them sees all
  manager.free(0);
  pools.start(2, text(201, 209));  // beside two published blocks of each text, there is room for two more
  CHECK(pools.parts.num_evicted() == 1);
  CHECK(pools.num_shared(8) == 2);
  const Blocks others = manager.prefix_cache().find(text(101, 108), 0);
  REQUIRE(others.size() == 2);
  CHECK(pools.parts.part_of(others[0]) == -1);
  CHECK(pools.parts.part_of(others[1]) >= 0);
}

TEST_CASE("windows: a text that was computed again lends its parts to the blocks that are found", "[windows]") {
  NumbersAndParts pools(3, 6, 12);
  stage::KvCacheManager& manager = pools.numbers.manager();
  pools.start(0, text(1, 10));
  pools.append(0, text(11, 13));
  pools.append(0, text(14, 17));
  manager.free(0);
  CHECK(pools.num_shared(8) == 0);
  pools.start(1, text(1, 9), false);
  const Blocks again = manager.block_table(1);
  const Blocks found = manager.prefix_cache().find(text(1, 8), 0);
  CHECK(found.front() != again.front());
  CHECK(pools.num_shared(8) == 2);
  for (const std::size_t i : {std::size_t{0}, std::size_t{1}}) {
    CHECK(pools.parts.part_of(found[i]) == pools.parts.part_of(again[i]));
  }
  CHECK(tests::check_parts(pools.parts, manager) == kNoProblem);

  // A block that gets another text gets another part.
  manager.reset_prefix_cache();
  pools.start(2, std::vector<common::Token>(4, 1));
  for (const int part : pools.parts_of(2)) {
    for (const int other : pools.parts_of(1)) {
      CHECK(part != other);
    }
  }
}

TEST_CASE("windows: a copy on write copies the part, and swapping takes only the window's parts back", "[windows]") {
  NumbersAndParts pools(8, 6, 12, 12);
  stage::KvCacheManager& manager = pools.numbers.manager();
  pools.start(0, text(1, 14));
  manager.fork(0, 1);
  const int shared = pools.parts_of(0).back();
  pools.append(1, {15});
  CHECK(pools.parts_of(1).back() == shared);
  CHECK(pools.parts_of(0).back() != shared);  // the first of the two gets another part
  REQUIRE(pools.parts.pending_copies().size() == 1);
  CHECK(pools.parts.pending_copies().front().source == shared);
  CHECK(pools.parts.pending_copies().front().destination == pools.parts_of(0).back());
  pools.parts.clear_pending_copies();

  const std::vector<int> both = {0, 1};
  pools.parts.begin_step(manager);
  REQUIRE(manager.swap_out(both));
  pools.parts.end_step(manager);
  pools.numbers.execute_copies();
  CHECK(pools.parts.pending_copies().size() == 3);  // of 8 … 11, and of both ends
  CHECK(pools.parts.num_held() == 0);
  CHECK(pools.parts.num_cached() == 3);  // of published blocks: no prompt finds the others
  pools.parts.clear_pending_copies();

  pools.parts.begin_step(manager);
  REQUIRE(manager.swap_in(both));
  pools.parts.end_step(manager);
  pools.numbers.execute_copies();
  CHECK(tests::check_parts(pools.parts, manager) == kNoProblem);
  CHECK(pools.parts.pending_copies().size() == 3);  // of 8 … 11, and of both ends
  CHECK(pools.parts_of(0)[1] == -1);
  CHECK(pools.parts.num_held() == 3);
}

TEST_CASE("windows: what is admitted and swapped out in one step takes its window's parts along", "[windows]") {
  NumbersAndParts pools(8, 6, 12, 12);
  stage::KvCacheManager& manager = pools.numbers.manager();
  pools.start(0, text(1, 12));
  manager.free(0);
  pools.parts.begin_step(manager);
  REQUIRE(manager.allocate(1, text(1, 13)));
  CHECK(pools.parts.num_needed(manager) == 3);  // 7 … 12, in two blocks, and a new one
  const std::vector<int> one = {1};
  REQUIRE(manager.swap_out(one));
  pools.parts.end_step(manager);
  CHECK(pools.parts.pending_copies().size() == 2);
}

TEST_CASE("windows: a copy on write and a swap in one step take no part beyond the pool", "[windows]") {
  NumbersAndParts pools(4, 6, 12, 12);
  stage::KvCacheManager& manager = pools.numbers.manager();
  pools.start(0, text(1, 6));
  manager.fork(0, 1);
  pools.start(2, text(31, 36));
  CHECK(pools.parts.num_held() == 4);
  // The copy of the shared end is a fifth block, and then the other sequence is preempted.
  pools.parts.begin_step(manager);
  REQUIRE(manager.reserve(1, 1));
  CHECK(pools.parts.num_needed(manager) == 5);
  const std::vector<int> other = {2};
  REQUIRE(manager.swap_out(other));
  pools.parts.end_step(manager);
  pools.numbers.execute_copies();
  CHECK(pools.parts.num_held() == 3);
  CHECK(pools.parts_of(0).back() != pools.parts_of(1).back());
  CHECK(pools.parts.pending_copies().size() == 3);
  CHECK(tests::check_parts(pools.parts, manager) == kNoProblem);
}

TEST_CASE("windows: with two pools, a long text holds the window's parts only", "[windows]") {
  const Llama model = tests::windowed_model(10, 2);
  for (const int num_tokens : {40, 80, 120}) {
    tests::ServingOptions options{.num_blocks = 64, .prefix_cache = false};
    options.scheduler.token_budget = 8;
    const int num_parts = 4 + 8 / 4;  // the window's, and those of a step
    tests::WindowedServing windowed(options, model, num_parts);
    const std::vector<stage::GenerationRequest> requests = {{tests::make_request(num_tokens, 20)}};
    serve_in_turn(windowed, requests);
    check_texts(windowed, model, requests);
    CAPTURE(num_tokens);
    CHECK(windowed.runner->max_held() <= num_parts);
    CHECK(windowed.serving.engine_manager().usage().reserved == 0);
  }
}

TEST_CASE("windows: a prompt is found if the last window has its parts, and else in part or not", "[windows]") {
  const Llama model = tests::windowed_model(10, 2);
  tests::ServingOptions options{.num_blocks = 100};
  options.scheduler.token_budget = 12;
  stage::GenerationRequest first{tests::make_request(61, 4)};
  stage::GenerationRequest shorter{first};
  shorter.request.prompt.resize(30);
  const stage::GenerationRequest other{tests::make_request(40, 4, 1)};
  const std::vector<stage::GenerationRequest> requests = {first, first, shorter, other, first, first};
  // The parts of one text, of which a shorter one needs those that are long given up; after another text, all are.
  tests::WindowedServing few(options, model, 7);
  CHECK(serve_in_turn(few, requests) == std::vector<int>{0, 60, 0, 0, 0, 60});
  check_texts(few, model, requests);
  // Room for the parts of all three.
  tests::WindowedServing many(options, model, 60);
  CHECK(serve_in_turn(many, requests) == std::vector<int>{0, 60, 28, 0, 60, 60});
  check_texts(many, model, requests);
  CHECK(many.runner->local_pool()->num_evicted() == 0);
}

TEST_CASE("windows: too few parts preempt a request, or let it wait, as too few blocks do", "[windows]") {
  const Llama model = tests::windowed_model(10, 2);
  for (const stage::Preemption preemption : {stage::Preemption::kRecompute, stage::Preemption::kSwap}) {
    tests::ServingOptions options{.num_blocks = 100, .num_host_blocks = 100};
    options.scheduler.token_budget = 16;
    options.scheduler.preemption = preemption;
    tests::WindowedServing windowed(options, model, 9);
    std::vector<stage::GenerationRequest> requests;
    for (int i = 0; i < 4; ++i) {
      requests.push_back({tests::make_request(5 + i, 30, i)});  // 9 blocks each, of which windows see 4
      windowed.serving.submit(requests.back());
    }
    std::size_t num_preempted = 0;
    while (windowed.serving.engine.step()) {
      CHECK(windowed.problem() == kNoProblem);
      const stage::StepReport& report = windowed.serving.reports.back();
      num_preempted += report.recomputed.size() + report.swapped_out.size();
    }
    CHECK(num_preempted > 0);
    check_texts(windowed, model, requests);
    CHECK(windowed.runner->max_held() <= 9);
  }
}

TEST_CASE("windows: a step that is scheduled again books the drafts of the one before once", "[windows]") {
  constexpr int kNumBlocks = 60;
  stage::KvCacheManager manager(kNumBlocks, 4);
  stage::SequenceIds ids;
  const auto pool = std::make_shared<stage::LocalPool>(
      stage::LocalPoolSize{.num_parts = 30, .num_blocks = kNumBlocks, .block_size = 4, .window = 6});
  CrowdedScheduler scheduler(pool, manager, {}, true, 3, {.per_token = 0.4, .max_tokens = 64});
  common::Request request;
  for (int i = 0; i < 24; ++i) {
    request.prompt.push_back(i % 6);  // that goes on so
  }
  request.max_new_tokens = 20;
  const auto first = std::make_shared<stage::ParallelSampling>(manager, ids, 0, request, 1);
  scheduler.add(first);
  REQUIRE(scheduler.schedule().groups.size() == 1);
  manager.commit(0, 24);
  first->extend({{0}, {}}, 0.0);

  scheduler.add(std::make_shared<stage::ParallelSampling>(manager, ids, 1, tests::make_request(9, 4), 1));
  scheduler.num_taken = 26;  // with 3 of the first request and 3 of the second, 2 more than there are
  const stage::ScheduledStep step = scheduler.schedule();
  REQUIRE(step.groups.size() == 2);
  CHECK(step.groups[1].tokens.num_tokens == Blocks{4});  // of 9: the others have no room in the second attempt
  // If those of the first attempt were booked, of which none has become text, the request would pause.
  CHECK(scheduler.drafts_of(0).size() == 3);
}

TEST_CASE("windows: a request whose windows can't be in the pool is rejected with the reason", "[windows]") {
  const Llama model = tests::windowed_model(10, 2);
  tests::WindowedServing windowed({.num_blocks = 100}, model, 9);
  const std::vector<stage::GenerationRequest> requests = {{tests::make_request(9, 20)},
                                                          {tests::make_request(8, 20), 3}};
  windowed.serving.submit_all(requests);
  CHECK(windowed.serving.run() == kNoProblem);
  check_texts(windowed, model, {requests.front()});
  const stage::RequestOutput& output = windowed.serving.engine.output(1);
  CHECK(output.finish_reason == common::FinishReason::kRejected);
  CHECK(
      output.error ==
      "3 sequences need up to 12 blocks in layers that see 10 tokens, which have 9: fewer sequences would do, or more "
      "--slots");
}

TEST_CASE("windows: no size of the cache is said to do if windows would still lack room", "[windows]") {
  // Three windows of 4 blocks each, for which there are 9: more of the other blocks would not help.
  const Llama model = tests::windowed_model(10, 2);
  const int num_blocks = GENERATE(30, 100);  // a text has 40
  tests::WindowedServing windowed({.num_blocks = num_blocks}, model, 9);
  windowed.serving.submit({tests::make_request(8, 150), 3});
  windowed.serving.submit({tests::make_request(8, 8), 1000});  // more than a step may have
  CAPTURE(num_blocks);
  CHECK(windowed.serving.engine.output(0).error ==
        "3 sequences need up to 12 blocks in layers that see 10 tokens, which have 9: fewer sequences" +
            std::string(num_blocks == 30 ? " and new tokens" : "") + " would do, or more --slots");
  CHECK(windowed.serving.engine.output(1).error.find("1000 sequences at once") == 0);
}

TEST_CASE("windows: the pools of both kinds run out together", "[windows]") {
  common::LlamaConfig config = tests::windowed_model(512, 6).config();
  config.context_length = 32768;
  stage::EngineOptions options;
  options.scheduler.token_budget = 256;
  // A text of 32,768 tokens has 2,048 blocks, of which windows of 512 lie in 33.
  CHECK(stage::num_local_parts(config, options, {.num_blocks = 20480, .block_size = 16}) == 330);
  // One text alone, with the tokens of a step, and the window of one that has ended.
  CHECK(stage::num_local_parts(config, options, {.num_blocks = 2048, .block_size = 16}) == 2 * 33 + 16);
  options.context_length = 1024;
  CHECK(stage::num_local_parts(config, options, {.num_blocks = 2048, .block_size = 16}) == 2048 * 33 / 64);
  options.context_length = 300;  // no longer than the window
  CHECK(stage::num_local_parts(config, options, {.num_blocks = 2048, .block_size = 16}) == 2048);
}

// WINDOWS.md, two pools and a second tier by hand.
TEST_CASE("windows: two pools and a second tier, by hand", "[windows]") {
  TwoTiers pools(5, 6, 8);
  stage::KvCacheManager& manager = pools.numbers.manager();
  for (int block = 0; block < 8; ++block) {
    REQUIRE(manager.allocate(-1 - block, 4));  // by no sequence of an engine
  }
  for (const int block : {4, 2, 5, 3, 1, 7}) {
    manager.free(-1 - block);
  }
  pools.start(0, text(1, 10));
  pools.append(0, text(11, 13));
  pools.append(0, text(14, 17));
  CHECK(manager.block_table(0) == Blocks{7, 1, 3, 5, 2});
  CHECK(pools.parts_of(0) == Blocks{0, 1, 2, 3, 4});
  manager.free(0);

  pools.start(1, text(31, 38));
  CHECK(manager.block_table(1) == Blocks{2, 4});
  CHECK(pools.parts_of(1) == Blocks{4, 0});
  CHECK(pools.parts.part_of(7) == -1);  // whose part was the oldest
  pools.append(1, text(39, 46));
  CHECK(pools.copies == std::vector<std::pair<int, int>>{{5, 8}, {3, 9}});
  CHECK(pools.part_copies == std::vector<std::pair<int, int>>{{3, 8}, {2, 9}});
  pools.append(1, text(47, 51));
  CHECK(manager.block_table(1) == Blocks{2, 4, 5, 3, 1, 7});
  CHECK(pools.copies == std::vector<std::pair<int, int>>{{1, 10}, {7, 11}});
  CHECK(pools.part_copies == std::vector<std::pair<int, int>>{{1, 10}});
  CHECK(pools.parts.part_of(11) == -1);
  manager.free(1);

  CHECK(pools.host->find(0, text(1, 17), 0) == Blocks{11, 10, 9, 8});
  CHECK(pools.num_found(16) == 4);
  CHECK(pools.num_found(12) == 3);  // 7 … 12, in blocks 10 and 9
  CHECK(pools.num_found(8) == 0);   // 3 … 8, of which block 11 has no part

  pools.begin(2, text(1, 18));
  CHECK(manager.block_table(2) == Blocks{7, 1, 3, 5, 4});
  CHECK(manager.length(2) == 16);
  CHECK(pools.num_shared(16) == 4);  // an equal prompt in the same step
  CHECK(pools.num_shared(8) == 0);
  pools.compute(2, text(17, 18));
  CHECK(pools.copies ==
        std::vector<std::pair<int, int>>{{1, 12}, {3, 13}, {5, 14}, {4, 15}, {11, 7}, {10, 1}, {9, 3}, {8, 5}});
  CHECK(pools.parts_of(2)[0] == -1);
  CHECK(pools.parts_of(2)[1] == -1);  // no query sees it
  CHECK(pools.parts_of(2)[2] >= 0);
  CHECK(pools.parts_of(2)[3] >= 0);

  // The prompt with 12 tokens alike: they are in the pool by now, but block 1's part is on the host alone.
  CHECK(pools.num_shared(12) == 3);
  const Blocks parts = pools.parts_of(2);
  REQUIRE(pools.parts.pending_copies().size() == 1);
  CHECK(pools.parts.pending_copies().front().source == 10);
  CHECK(pools.parts.pending_copies().front().destination == parts[1]);
  CHECK(pools.num_shared(8) == 0);  // block 7 has no part anywhere
  CHECK(pools.parts.pending_copies().size() == 1);
}

TEST_CASE("windows: a text that was computed again takes its part to the host's block", "[windows]") {
  TwoTiers pools(3, 6, 4);
  stage::KvCacheManager& manager = pools.numbers.manager();
  const auto evict_all = [&] {
    pools.parts.begin_step(manager);
    REQUIRE(manager.allocate(-1, 16));  // by no sequence of an engine
    pools.compute(-1, {});
    manager.free(-1);
  };
  pools.start(0, text(1, 8));
  pools.append(0, text(9, 12));
  pools.append(0, text(13, 16));  // the first block's part is given up
  CHECK(pools.parts_of(0)[0] == -1);
  manager.free(0);
  evict_all();
  const Blocks found = pools.host->find(0, text(1, 4), 0);
  REQUIRE(found.size() == 1);
  CHECK(pools.parts.part_of(found.front()) == -1);

  pools.start(1, text(1, 5), false);
  manager.free(1);
  evict_all();
  CHECK(pools.host->find(0, text(1, 4), 0) == found);
  CHECK(pools.parts.part_of(found.front()) == found.front());
}

TEST_CASE("windows: what comes back in a step that evicts others takes no part beyond the pool", "[windows]") {
  TwoTiers pools(6, 6, 9, 16);
  stage::KvCacheManager& manager = pools.numbers.manager();
  const auto cache = [&](int first, int num_blocks) {
    pools.start(0, text(first, first + 4 * num_blocks - 1));
    manager.free(0);
  };
  cache(31, 5);
  cache(1, 2);
  pools.parts.begin_step(manager);
  REQUIRE(manager.allocate(-1, 36));  // by no sequence of an engine: all that is cached goes to the host
  pools.compute(-1, {});
  manager.free(-1);
  cache(61, 6);
  // One sequence finds room, and for another one the cached blocks go, whose parts are all that there are.
  pools.parts.begin_step(manager);
  REQUIRE(manager.allocate(1, text(1, 9)));
  pools.host->restore(manager, 1, text(1, 9), 0, {});
  REQUIRE(manager.allocate(2, text(31, 51)));
  pools.host->restore(manager, 2, text(31, 51), 0, {});
  CHECK(manager.length(1) == 8);
  CHECK(manager.length(2) == 20);
  CHECK(pools.parts.num_needed(manager) == 6);
  pools.compute(1, text(9, 9));
  CHECK(pools.parts.num_held() == 6);
  CHECK(tests::check_parts(pools.parts, manager) == kNoProblem);
}

TEST_CASE("windows: in the parts' copies too, a host block is read before it is another one's", "[windows]") {
  NumbersAndParts pools(4, 6, 6, 1);
  stage::KvCacheManager& manager = pools.numbers.manager();
  pools.start(0, {1});
  pools.start(1, {2});
  const std::vector<int> first = {0};
  const std::vector<int> second = {1};
  pools.parts.begin_step(manager);
  REQUIRE(manager.swap_out(first));
  pools.parts.end_step(manager);
  pools.numbers.execute_copies();
  pools.parts.clear_pending_copies();

  pools.parts.begin_step(manager);
  REQUIRE(manager.swap_in(first));
  REQUIRE(manager.swap_out(second));
  pools.parts.end_step(manager);
  REQUIRE(pools.parts.pending_copies().size() == 2);
  CHECK(pools.parts.pending_copies().front().source == 6);
  CHECK(pools.parts.pending_copies().back().destination == 6);
}

TEST_CASE("windows: with two pools, what comes back from the host is not overwritten in the same step", "[windows]") {
  TwoTiers pools(6, 6, 8, 2);
  stage::KvCacheManager& manager = pools.numbers.manager();
  pools.start(0, text(1, 8));
  manager.free(0);
  pools.evict_all();
  pools.start(0, text(101, 108));
  manager.free(0);

  pools.begin(1, text(1, 9));
  REQUIRE(manager.allocate(2, text(201, 217)));  // the second text is evicted, and lost
  CHECK(pools.host->find(0, text(1, 8), 0).size() == 2);
  CHECK(manager.prefix_cache().find(text(101, 108), 0).empty());
  CHECK(pools.host->pending_copies().size() == 2);
}

TEST_CASE("windows: with two pools and a second tier, a prompt is found with its window's parts", "[windows]") {
  const Llama model = tests::windowed_model(10, 2);
  tests::ServingOptions options{.num_blocks = 20, .num_host_cache_blocks = 60};
  options.scheduler.token_budget = 12;
  stage::GenerationRequest first{tests::make_request(61, 4)};
  stage::GenerationRequest shorter{first};
  shorter.request.prompt.resize(30);
  const stage::GenerationRequest other{tests::make_request(61, 4, 1)};
  const std::vector<stage::GenerationRequest> requests = {first, other, first, other, shorter, other, shorter};
  // Of a text's parts, those are there that its last tokens see. A shorter one is computed once more, and takes its
  // parts to the host.
  tests::WindowedServing windowed(options, model, 9);
  CHECK(serve_in_turn(windowed, requests) == std::vector<int>{0, 0, 60, 60, 0, 60, 28});
  check_texts(windowed, model, requests);
  CHECK(windowed.runner->local_pool() != nullptr);
}

TEST_CASE("windows: a server's figures tell what the second pool saves", "[windows]") {
  const Llama model = tests::windowed_model(10, 2);
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  options.num_slots = 400;
  options.block_size = 4;
  options.scheduler.token_budget = 8;
  const auto served = stage::make_served_engine(model, options, {.virtual_clock = true});
  common::ServerState state;
  state.status = served->status();
  const common::LlamaConfig& config = model.config();
  const int block_bytes =
      2 * config.num_layers / 2 * config.num_kv_heads * config.head_dim * 4 * 4;  // of half the layers
  CHECK(state.status.window_pool.num_blocks == 10);  // of 100: two windows of 4 and a step of 2
  CHECK(state.status.window_pool.bytes_saved == 90 * block_bytes);
  CHECK(common::metrics_text(state, "small").find("course:window_pool_blocks{model_name=\"small\"} 10\n") !=
        std::string::npos);
}

TEST_CASE("windows: with two pools, a number of slots is that of the layers that see all", "[windows]") {
  const Llama model = tests::windowed_model(10, 2);
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  options.num_slots = 160;
  options.block_size = 4;
  options.scheduler.token_budget = 8;
  std::unique_ptr<stage::Runner> runner = stage::make_engine_runner(model, options);
  CHECK(runner->cache().num_blocks == 25);  // 40 in half the layers; two windows of 4 and a step of 2 in the others
  const std::unique_ptr<stage::Engine> engine = stage::make_engine(model, options, std::move(runner), 0);
  CHECK(engine->cache().num_blocks == 40);
  CHECK(stage::window_pool_figures(*engine).num_blocks == 10);
  const std::vector<common::Request> requests = {tests::make_request(120, 40)};
  stage::EngineOptions separate;
  separate.gpu.device = stage::Device::kCpu;
  stage::Engine whole(model, separate);
  CHECK(tests::run_requests(*engine, requests).completions.front().tokens ==
        tests::run_requests(whole, requests).completions.front().tokens);

  // One kind of layers, or nothing to save.
  for (const auto& [window, global_period, num_slots] : {std::tuple{10, 0, 160}, std::tuple{10, 2, 40}}) {
    options.num_slots = num_slots;
    const Llama other = tests::windowed_model(window, global_period);
    CHECK(stage::make_engine_runner(other, options)->cache().num_blocks == num_slots / 4);
  }
}

TEST_CASE("windows: a server that knows its requests has room for their windows", "[windows]") {
  const Llama model = tests::windowed_model(10, 2);
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  options.num_slots.reset();
  options.min_slots = 4;
  options.block_size = 4;
  options.scheduler.token_budget = 8;
  // Six windows of 4 blocks each. The prompt is shared, but by no window in the end.
  const int num_tokens = GENERATE(4, 100);
  const common::EngineDemand demand{.requests = {{tests::make_request(num_tokens, 40), 6}}, .virtual_clock = true};
  const auto served = stage::make_served_engine(model, options, demand);
  CAPTURE(num_tokens);
  CHECK(served->status().window_pool.num_blocks >= 24);
}

TEST_CASE("windows: over HTTP, a request whose windows don't fit is refused, and the server goes on", "[windows]") {
  common::LlamaConfig config = tests::default_session().model.config();
  config.window = 24;
  for (const int global_period : {0, 2}) {
    config.global_period = global_period;
    const Llama model(config, 1, common::Windows::kComputed);
    // One pool: 16 blocks for 8 with one text. Two pools: 2 windows' 7 parts each and a step's 2, for at most 7 in
    // each.
    tests::ApiFixture fixture({.num_slots = global_period == 0 ? 64 : 800,
                               .context_length = global_period == 0 ? 400 : 800,
                               .token_budget = 8,
                               .model = &model});
    const auto ask = [&](int num_tokens, int num_samples) {
      return fixture.post("/v1/completions", {{"prompt", std::vector<int>(static_cast<std::size_t>(num_tokens), 5)},
                                              {"max_tokens", 20},
                                              {"n", num_samples},
                                              {"ignore_eos", true}});
    };
    CAPTURE(global_period);
    CHECK(ask(100, 1).status == 200);
    const common::ApiReply refused = ask(100, 4);
    CHECK(refused.status == 400);
    const std::string message = nlohmann::json::parse(refused.body)["error"]["message"];
    CHECK(message ==
          (global_period == 0
               ? "the request needs up to 36 blocks at once, and the whole cache has 16 (64 slots): --slots 144 would "
                 "do, or fewer new tokens or sequences"
               : "4 sequences need up to 28 blocks in layers that see 24 tokens, which have 16: fewer sequences would "
                 "do, or more --slots"));
    CHECK(ask(100, 1).status == 200);
    CHECK(fixture.is_pool_empty());
  }
}

TEST_CASE("windows: prompts that begin behind evicted blocks are counted in GET /metrics", "[windows]") {
  common::LlamaConfig config = tests::default_session().model.config();
  config.window = 24;
  for (const int global_period : {0, 2}) {
    config.global_period = global_period;
    const Llama model(config, 1, common::Windows::kComputed);
    tests::ApiFixture fixture(
        {.num_slots = global_period == 0 ? 64 : 800, .context_length = 400, .token_budget = 8, .model = &model});
    CAPTURE(global_period);
    for (const int expected : {0, 1}) {
      const nlohmann::json body = {{"prompt", std::vector<int>(100, 5)}, {"max_tokens", 20}, {"ignore_eos", true}};
      CHECK(fixture.post("/v1/completions", body).status == 200);
      // It begins with 24 of the 25 blocks, and its first query sees 73 … 96.
      const bool counts = global_period == 0;
      CHECK(tests::metric(fixture, "course:window_prompts_total") == (counts ? expected : -1));
      CHECK(tests::metric(fixture, "course:window_prompt_tokens_saved_total") == (counts ? 96 * expected : -1));
    }
  }
}
