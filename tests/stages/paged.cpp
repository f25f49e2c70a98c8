// What holds as soon as there are blocks: the manager's block tables, and an engine that lets sequences grow and takes
// their blocks back when they run out. Compiled once for each stage, from the second on.
#include "tests/support/catch.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/model/generation.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/compare.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

using common::CheckError;
using common::Completion;
using common::FinishReason;
using common::Request;
using common::Token;
using stage::KvCacheManager;
using tests::check_ledger;
using tests::contains;
using tests::make_request;
using tests::small_model;
using tests::Snapshot;
using tests::take_snapshot;

namespace {

// The result of a check below that finds nothing; a failing check then shows its text instead.
const std::string kNoProblem;

// Block table [7, 1, 3] in 8 blocks of 4, the example of the READMEs: eight one-block sequences hold blocks 0 to 7;
// the sequences of blocks 3, 1 and 7 end, in this order, and the last block freed is the first to be used again.
void set_up_example(KvCacheManager& manager) {
  INFO("blocks of 4 tokens, 8 in the pool; eight sequences take one each");
  for (int sequence = 100; sequence < 108; ++sequence) {
    REQUIRE(manager.allocate(sequence, 4));
  }
  for (const int block : {3, 1, 7}) {
    manager.free(100 + block);
  }
  REQUIRE(manager.allocate(0, 12));
  REQUIRE(manager.block_table(0) == std::vector<int>{7, 1, 3});
}

stage::EngineOptions make_options(int num_slots, int block_size, int chunk_size = 256) {
  stage::EngineOptions options = tests::tight_options();
  options.num_slots = num_slots;
  options.block_size = block_size;
  tests::max_pass_tokens(options) = chunk_size;
  return options;
}

struct Run {
  std::vector<Completion> completions;
  std::vector<std::vector<Token>> streamed;
  std::vector<common::Counter> counters;
  std::string ledger;  // a problem, or nothing
  int reserved = 0;    // slots, afterwards

  double counter(const char* name) const { return common::counter(counters, name); }
};

// A new engine with a cache full of NaN.
Run run(const std::vector<Request>& requests, const stage::EngineOptions& options) {
  stage::Engine engine(small_model(), options);
  tests::poison(engine);
  Run result;
  result.streamed.resize(requests.size());
  tests::EngineRun engine_run = tests::run_requests(engine, requests, [&](int request, Token token) {
    result.streamed.at(static_cast<std::size_t>(request)).push_back(token);
  });
  result.completions = std::move(engine_run.completions);
  result.counters = std::move(engine_run.counters);
  const int num_blocks = engine.manager().usage().total / options.block_size;
  result.ledger = check_ledger(engine.manager(), num_blocks, options.block_size);
  result.reserved = engine.manager().usage().reserved;
  return result;
}

// The request's text in a roomy engine of its own.
std::vector<Token> tokens_alone(const Request& request) {
  return run({request}, make_options(4096, 16)).completions[0].tokens;
}

// Empty if every request was served as if it were alone, each token was handed out once, and nothing is left behind.
std::string check_served(const Run& result, const std::vector<Request>& requests) {
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Completion& completion = result.completions[i];
    if (completion.finish_reason != FinishReason::kLength) {
      return common::format("request %zu did not run to its end: ", i) + completion.error;
    }
    if (const std::string difference = tests::first_difference(completion.tokens, tokens_alone(requests[i]));
        !difference.empty()) {
      return common::format("request %zu ", i) + difference +
             tests::text_hint(static_cast<int>(result.counter("preemptions")));
    }
    if (const std::string difference = tests::first_difference(result.streamed[i], completion.tokens);
        !difference.empty()) {
      return common::format("what the callback got of request %zu ", i) + difference +
             ": is each token handed out once?";
    }
  }
  return result.reserved == 0 ? result.ledger
                              : common::format("%d slots are still reserved at the end", result.reserved);
}

std::vector<Request> mixed_requests() {
  return {make_request(5, 12, 0), make_request(9, 7, 1), make_request(3, 20, 2), make_request(12, 1, 3),
          make_request(1, 15, 4)};
}

}  // namespace

TEST_CASE("manager: positions go through block table [7, 1, 3]") {
  CHECK(stage::blocks_needed(3, 4) == 1);
  CHECK(stage::blocks_needed(4, 4) == 1);
  CHECK(stage::blocks_needed(5, 4) == 2);
  KvCacheManager manager = tests::make_manager(8, 4);
  set_up_example(manager);
  CHECK(manager.slots(0, 0, 12) == std::vector<int>{28, 29, 30, 31, 4, 5, 6, 7, 12, 13, 14, 15});
  CHECK(manager.slots(0, 9, 1) == std::vector<int>{13});  // entry 9 / 4 = 2 is block 3, row 9 % 4 = 1 of it
  CHECK(manager.slots(0, 3, 2) == std::vector<int>{31, 4});
  CHECK(manager.slots(0, 7, 2) == std::vector<int>{7, 12});
  CHECK(manager.slots(0, 12, 0).empty());
}

TEST_CASE("manager: one token less than a block, a block, one token more") {
  for (const int block_size : {1, 4, 16}) {
    for (const int length : {block_size - 1, block_size, block_size + 1}) {
      if (length == 0) {
        continue;
      }
      CAPTURE(block_size, length);
      KvCacheManager manager = tests::make_manager(8, block_size);
      REQUIRE(manager.allocate(0, length));
      const std::size_t num_blocks = length > block_size ? 2 : 1;
      CHECK(manager.block_table(0).size() == num_blocks);
      CHECK(manager.length(0) == 0);
      manager.commit(0, length);
      CHECK(manager.length(0) == length);

      // The next token starts a block of its own exactly if the last one is full.
      REQUIRE(manager.reserve(0, 1));
      CHECK(manager.block_table(0).size() == static_cast<std::size_t>(length / block_size + 1));
      const int block = manager.block_table(0).back();
      CHECK(manager.slots(0, length, 1) == std::vector<int>{block * block_size + length % block_size});
      CHECK(check_ledger(manager, 8, block_size) == kNoProblem);
    }
  }
}

TEST_CASE("manager: a sequence of n tokens has ceil(n / block_size) blocks, however it got them") {
  constexpr int kBlockSize = 3;
  for (int length = 1; length <= 13; ++length) {
    const auto expected = static_cast<std::size_t>((length + kBlockSize - 1) / kBlockSize);
    for (const int step : {1, 2, 3, 5, length}) {
      CAPTURE(length, step);
      KvCacheManager manager = tests::make_manager(6, kBlockSize);
      REQUIRE(manager.allocate(0, 1));
      while (manager.length(0) < length) {
        const int count = std::min(step, length - manager.length(0));
        REQUIRE(manager.reserve(0, count));
        manager.commit(0, count);
      }
      CHECK(manager.block_table(0).size() == expected);
    }
    KvCacheManager manager = tests::make_manager(6, kBlockSize);
    REQUIRE(manager.allocate(0, length));
    CHECK(manager.block_table(0).size() == expected);
  }
}

TEST_CASE("manager: reserving again what is reserved takes nothing") {
  KvCacheManager manager = tests::make_manager(4, 4);
  REQUIRE(manager.allocate(0, 5));
  const Snapshot before = take_snapshot(manager);
  CHECK(manager.reserve(0, 0));
  CHECK(manager.reserve(0, 5));
  CHECK(manager.reserve(0, 8));  // two blocks have room for them
  CHECK(take_snapshot(manager) == before);
  CHECK(manager.reserve(0, 9));
  CHECK(manager.block_table(0).size() == 3);
}

TEST_CASE("manager: the block that was freed last is used first") {
  KvCacheManager manager = tests::make_manager(6, 2);
  REQUIRE(manager.allocate(0, 4));
  REQUIRE(manager.allocate(1, 2));
  REQUIRE(manager.allocate(2, 2));
  CHECK(manager.block_table(0) == std::vector<int>{0, 1});
  manager.free(1);  // block 2
  manager.free(0);  // blocks 0 and 1, so that 0 lies on top again
  REQUIRE(manager.allocate(3, 8));
  CHECK(manager.block_table(3) == std::vector<int>{0, 1, 2, 4});
  CHECK(check_ledger(manager, 6, 2) == kNoProblem);
}

TEST_CASE("manager: free returns the whole table, and the whole pool can be used again") {
  KvCacheManager manager = tests::make_manager(5, 4);
  for (int round = 0; round < 10; ++round) {
    CAPTURE(round);
    REQUIRE(manager.allocate(0, 1 + round % 4));
    REQUIRE(manager.allocate(1, 5));
    manager.commit(1, 3);
    REQUIRE(manager.reserve(1, 7));
    manager.free(round % 2);
    manager.free(1 - round % 2);
    CHECK(manager.free_blocks().size() == 5);
    CHECK(check_ledger(manager, 5, 4) == kNoProblem);
  }
  REQUIRE(manager.allocate(2, 20));
  CHECK(manager.free_blocks().empty());
}

TEST_CASE("manager: allocate and reserve get all or nothing") {
  KvCacheManager manager = tests::make_manager(5, 4);
  REQUIRE(manager.allocate(0, 6));
  manager.commit(0, 6);
  REQUIRE(manager.allocate(1, 4));
  const Snapshot before = take_snapshot(manager);
  REQUIRE(before.free_blocks.size() == 2);

  INFO("two blocks of 4 are free, and sequence 0 has two slots left in its last one");
  CHECK_FALSE(manager.allocate(2, 9));
  CHECK_FALSE(manager.contains(2));
  CHECK_FALSE(manager.allocate(2, std::numeric_limits<int>::max()));
  CHECK_FALSE(manager.reserve(0, 11));
  CHECK_FALSE(manager.reserve(0, std::numeric_limits<int>::max()));
  CHECK_FALSE(manager.reserve(1, 13));
  CHECK(take_snapshot(manager) == before);
  CHECK(check_ledger(manager, 5, 4) == kNoProblem);

  CHECK(manager.reserve(0, 10));
  CHECK(manager.free_blocks().empty());
  CHECK_FALSE(manager.reserve(0, 11));
  CHECK_FALSE(manager.allocate(2, 1));
  CHECK(check_ledger(manager, 5, 4) == kNoProblem);
}

TEST_CASE("manager: misuse is noticed and changes nothing") {
  KvCacheManager manager = tests::make_manager(5, 4);
  REQUIRE(manager.allocate(7, 6));
  manager.commit(7, 5);
  REQUIRE(manager.allocate(8, 2));
  manager.free(8);
  const Snapshot before = take_snapshot(manager);

  CHECK_THROWS_AS(manager.free(8), CheckError);  // freed before
  CHECK_THROWS_AS(manager.free(9), CheckError);
  CHECK_THROWS_AS(manager.allocate(7, 1), CheckError);  // live already
  CHECK_THROWS_AS(manager.allocate(9, 0), CheckError);
  CHECK_THROWS_AS(manager.allocate(9, -3), CheckError);
  CHECK_THROWS_AS(manager.reserve(7, -1), CheckError);
  CHECK_THROWS_AS(manager.reserve(9, 1), CheckError);
  CHECK_THROWS_AS(manager.commit(7, 4), CheckError);  // three are left
  CHECK_THROWS_AS(manager.commit(7, -1), CheckError);
  CHECK_THROWS_AS(manager.commit(9, 1), CheckError);
  CHECK_THROWS_AS(manager.slots(7, -1, 2), CheckError);
  CHECK_THROWS_AS(manager.slots(7, 5, 4), CheckError);
  CHECK_THROWS_AS(manager.slots(7, 0, -1), CheckError);
  CHECK_THROWS_AS(manager.slots(9, 0, 1), CheckError);
  CHECK_THROWS_AS(manager.length(9), CheckError);
  CHECK_THROWS_AS(manager.capacity(9), CheckError);
  CHECK_THROWS_AS(manager.block_table(9), CheckError);
  CHECK_THROWS_AS(tests::make_manager(0, 4), CheckError);
  CHECK_THROWS_AS(tests::make_manager(4, 0), CheckError);
  // Slots would be numbered past the largest int. One block as large as that is none too large.
  CHECK_THROWS_AS(tests::make_manager(2, std::numeric_limits<int>::max()), CheckError);
  CHECK_THROWS_AS(tests::make_manager(1 << 16, 1 << 15), CheckError);
  CHECK(tests::make_manager(1, std::numeric_limits<int>::max()).usage().total == std::numeric_limits<int>::max());
  CHECK(take_snapshot(manager) == before);
  CHECK(check_ledger(manager, 5, 4) == kNoProblem);
}

TEST_CASE("manager: an id can be used again, for a sequence that starts empty") {
  KvCacheManager manager = tests::make_manager(3, 4);
  REQUIRE(manager.allocate(3, 9));
  manager.commit(3, 9);
  manager.free(3);
  CHECK_FALSE(manager.contains(3));
  REQUIRE(manager.allocate(3, 1));
  CHECK(manager.length(3) == 0);
  CHECK(manager.capacity(3) == 4);
  CHECK(manager.sequences() == std::vector<int>{3});
}

TEST_CASE("attention: a block table that is too short, or a wrong shape, is noticed") {
  const tests::AttentionShape shape{4, 2, 8, 1};
  stage::KvCache cache(tests::cache_shape(shape, 3, 4));
  cache.fill(1.0F);
  const std::vector<int> table = {2, 0};
  CHECK_NOTHROW(stage::attention(cache, 0, common::Matrix::Zero(2, 32), table, 8));
  CHECK_THROWS_AS(stage::attention(cache, 0, common::Matrix::Zero(2, 32), table, 9), CheckError);
  CHECK_THROWS_AS(stage::attention(cache, 0, common::Matrix::Zero(9, 32), table, 8), CheckError);
  CHECK_THROWS_AS(stage::attention(cache, 0, common::Matrix::Zero(2, 16), table, 8), CheckError);
  CHECK_THROWS_AS(stage::attention(cache, 0, common::Matrix::Zero(2, 32), std::vector<int>{2, 3}, 8), CheckError);
}

TEST_CASE("engine: a tight pool preempts, and changes no text") {
  const std::vector<Request> requests = mixed_requests();
  for (const int block_size : {1, 3, 16, 64}) {
    // The largest request needs 23 slots, all together need 85; every pool in between has to do.
    for (const int num_slots : {23, 32, 48, 64, 4096}) {
      for (const int chunk_size : {1, 4, 256}) {
        CAPTURE(block_size, num_slots, chunk_size);
        CHECK(check_served(run(requests, make_options(num_slots, block_size, chunk_size)), requests) == kNoProblem);
      }
    }
  }
}

TEST_CASE("engine: preemptions are counted, and occur only where the pool is tight") {
  const std::vector<Request> requests = mixed_requests();
  const Run tight = run(requests, make_options(24, 3, 4));
  const Run ample = run(requests, make_options(4096, 3, 4));
  CHECK(tight.counter("preemptions") > 0);
  CHECK(ample.counter("preemptions") == 0);
  // From stage 8 on a step has 4 tokens, and one request has ended when the last is admitted.
  CHECK(ample.counter("max_requests_at_once") == (STAGE_NUMBER < 8 ? 5 : 4));
  // A preempted request is computed again, in chunks.
  CHECK(tight.counter("forward_passes") > ample.counter("forward_passes"));
}

TEST_CASE("engine: a preempted request continues its random draws where they stopped") {
  std::vector<Request> requests = mixed_requests();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].sampling.temperature = 1.5F;
    requests[i].sampling.seed = i;
  }
  const Run tight = run(requests, make_options(24, 3));
  CHECK(tight.counter("preemptions") > 0);
  CHECK(check_served(tight, requests) == kNoProblem);
}

#if STAGE_NUMBER < 8  // from then on a scheduler decides, which has tests of its own
TEST_CASE("engine: a preempted request is resumed before those that have not begun") {
  // 12 slots for 4 + 6 tokens, the same, and 5 + 1. Requests 0 and 1 run first, and 1 is preempted in the fourth round.
  const std::vector<Request> requests = {make_request(4, 6, 0), make_request(4, 6, 1), make_request(5, 1, 2)};
  stage::Engine engine(small_model(), make_options(12, 1));
  std::vector<int> order;
  engine.run(requests, [&](int request, Token) { order.push_back(request); });
  CHECK(common::counter(engine.counters(), "preemptions") == 1);
  {
    INFO("the requests in the order of their tokens: the later of 0 and 1 is preempted, and comes before 2 has begun");
    CHECK(order == std::vector<int>{0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 2, 1, 1});
  }
  INFO("nine rounds with 2 2 2 1 1 1 2 1 1 requests: in the fourth, request 0 gets its token after the preemption");
  CHECK(common::counter(engine.counters(), "requests_held") == 13.0 / 9);
}
#endif

TEST_CASE("engine: two requests in a pool that is one block too small, by hand") {
  // Two prompts of 2 in blocks of 2, 3 new tokens each: 2 + 3 - 1 = 4 slots each, and 3 blocks for both.
  //   round 1   prompts in one block each, both draw their first token
  //   round 2   request 0 takes the third block; request 1 finds none, and frees its own: a preemption
  //   round 3   request 0 draws its third token and ends
  //   then      request 1 computes its 3 tokens again (one pass) and draws the second, then the third
  const std::vector<Request> requests = {make_request(2, 3, 0), make_request(2, 3, 1)};
  const Run result = run(requests, make_options(6, 2));
  CHECK(check_served(result, requests) == kNoProblem);
  CHECK(result.counter("max_requests_at_once") == 2);
#if STAGE_NUMBER < 8
  CHECK(result.counter("preemptions") == 1);
  CHECK(result.counter("forward_passes") == 2 + 1 + 1 + 1 + 1);
#else
  // From stage 8 on both prompts are one pass, and request 1 waits with its block: no earlier one needs it.
  CHECK(result.counter("preemptions") == 0);
  CHECK(result.counter("forward_passes") == 1 + 1 + 1 + 1 + 1);
#endif
  const double bytes_per_token = result.counter("kv_bytes_per_token");
  // Lengths after each pass: 2 and 2, 3, 4, then 3, 4.
  CHECK(result.counter("kv_bytes_read") == (2 + 2 + 3 + 4 + 3 + 4) * bytes_per_token);
}

// A text's last token is never stored. From stage 8 on, a request needs no slot for it.
constexpr int kNeverStored = STAGE_NUMBER < 8 ? 0 : 1;

TEST_CASE("engine: one request may fill the pool, and one that is too large does not hold up the others") {
  for (const int block_size : {1, 3, 4}) {
    CAPTURE(block_size);
    const std::vector<Request> lone = {make_request(7, 5)};
    CHECK(check_served(run(lone, make_options(12, block_size)), lone) == kNoProblem);

    const std::vector<Request> requests = {make_request(4, 5, 0), make_request(8, 5 + kNeverStored, 1),
                                           make_request(3, 6, 2)};
    const Run result = run(requests, make_options(12, block_size));
    CHECK(result.completions[1].finish_reason == FinishReason::kRejected);
    CHECK(result.completions[1].tokens.empty());
    CHECK(contains(result.completions[1].error, STAGE_NUMBER < 8 ? "13 slots" : " blocks"));
    CHECK(contains(result.completions[1].error, "12"));
    CHECK(result.completions[0].tokens == tokens_alone(requests[0]));
    CHECK(result.completions[2].tokens == tokens_alone(requests[2]));
    CHECK(result.reserved == 0);
  }
  // The pool is rounded up to whole blocks: 12 slots in blocks of 5 are 15.
  const std::vector<Request> rounded = {make_request(8, 7)};
  CHECK(check_served(run(rounded, make_options(12, 5)), rounded) == kNoProblem);
}

TEST_CASE("engine: what can never be served is rejected with the reason") {
  const std::vector<Request> requests = {make_request(0, 5), make_request(4, 0), make_request(30, 19),
                                         make_request(30, 3 + kNeverStored), make_request(3, 6)};
  const Run result = run(requests, make_options(32, 4));
  const std::vector<std::string> reasons = {"empty", "no new tokens", "context",
                                            STAGE_NUMBER < 8 ? "33 slots" : "9 blocks", ""};
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CAPTURE(i, result.completions[i].error);
    CHECK((result.completions[i].finish_reason == FinishReason::kRejected) == !reasons[i].empty());
    CHECK(contains(result.completions[i].error, reasons[i]));
  }
  CHECK(result.completions[4].tokens == tokens_alone(requests[4]));
}

TEST_CASE("engine: a single new token") {
  for (const int block_size : {1, 4}) {
    const std::vector<Request> requests = {make_request(4, 1, 0), make_request(1, 1, 1), make_request(8, 1, 2)};
    CHECK(check_served(run(requests, make_options(12, block_size)), requests) == kNoProblem);
  }
}

TEST_CASE("engine: a stop token ends a request, and its blocks serve the others") {
  std::vector<Request> requests = mixed_requests();
  const std::vector<Token> all = tokens_alone(requests[2]);
  requests[2].stop_tokens = {all[7]};
  const auto end = std::find(all.begin(), all.end(), all[7]);
  const Run result = run(requests, make_options(24, 3));
  CHECK(result.completions[2].finish_reason == FinishReason::kStop);
  CHECK(result.completions[2].tokens == std::vector<Token>(all.begin(), end));
  for (const std::size_t i : {0U, 1U, 3U, 4U}) {
    CHECK(result.completions[i].tokens == tokens_alone(requests[i]));
  }
  CHECK(result.reserved == 0);
  CHECK(result.ledger == kNoProblem);
}

#if STAGE_NUMBER < 8  // from then on the request fails alone: see serving.cpp
TEST_CASE("engine: when a callback throws, no block is lost, and the engine can be used again") {
  const std::vector<Request> requests = {make_request(5, 6, 0), make_request(9, 5, 1), make_request(3, 7, 2)};
  for (int at = 1; at < 18; ++at) {
    stage::Engine engine(small_model(), make_options(24, 4));
    int count = 0;
    const auto throw_at = [&](int, Token) {
      count += 1;
      if (count == at) {
        throw std::runtime_error("the connection is closed");
      }
    };
    CHECK_THROWS_AS(engine.run(requests, throw_at), std::runtime_error);
    CHECK(engine.manager().sequences().empty());
    CHECK(engine.manager().usage().reserved == 0);
    CHECK(engine.run(requests, throw_at).back().tokens == tokens_alone(requests.back()));
  }
}
#endif

TEST_CASE("engine: append takes blocks as it needs them, and refuses without a trace") {
  // With chunks of two tokens there is room for the first ones, when there is none for all.
  const int chunk_size = GENERATE(256, 2);
  CAPTURE(chunk_size);
  tests::SequenceEngine engine(small_model(), make_options(12, 4, chunk_size));
  tests::poison(engine);
  const std::vector<Token> tokens = make_request(12, 1).prompt;
  REQUIRE(engine.manager().allocate(0, 1));
  REQUIRE(engine.manager().allocate(1, 1));
  const std::span<const Token> all(tokens);
  CHECK(engine.append(0, all.first(5)).has_value());
  CHECK(engine.manager().length(0) == 5);
  CHECK(engine.manager().block_table(0).size() == 2);
  {
    INFO("a pass that throws, here for a token that is not in the vocabulary, has committed nothing");
    const Token unknown = small_model().config().vocab_size;
    CHECK_THROWS(engine.append(0, {&unknown, 1}));
    CHECK(engine.manager().length(0) == 5);
  }
  const Snapshot before = take_snapshot(engine.manager());
  CHECK_FALSE(engine.append(0, all.first(4)).has_value());  // three slots are left in its second block
  CHECK_FALSE(engine.append(1, all.first(5)).has_value());
  CHECK(take_snapshot(engine.manager()) == before);
  CHECK(engine.append(1, all.first(4)).has_value());
  CHECK(engine.append(0, all.first(3)).has_value());
  CHECK_THROWS_AS(engine.append(0, {}), CheckError);
  CHECK_THROWS_AS(engine.append(2, all), CheckError);
  CHECK_THROWS_AS(stage::Engine(small_model(), make_options(12, 4, 0)), CheckError);
}
