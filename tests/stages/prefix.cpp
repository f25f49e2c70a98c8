// What holds as soon as full blocks are found again by their tokens. Compiled once for each stage, from the sixth on.
#include "tests/support/catch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <list>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "common/app/workload.h"
#include "common/base/check.h"
#include "common/math/sampling.h"
#include "common/model/default_model.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/ledger.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

#include STAGE_HEADER(prefix_cache.h)

using common::CheckError;
using common::Completion;
using common::Request;
using common::Token;
using stage::KvCacheManager;
using tests::check_ledger;
using tests::make_request;
using tests::small_model;
using tests::Snapshot;
using tests::take_snapshot;

namespace {

const std::string kNoProblem;

using Tokens = std::vector<Token>;

// `first`, 1, 2, …: texts that begin differently have no block in common.
Tokens text(int length, Token first = 0) {
  Tokens tokens;
  for (int i = 0; i < length; ++i) {
    tokens.push_back(i == 0 ? first : i);
  }
  return tokens;
}

// Starts a sequence, "computes" what is not cached, and returns how many tokens were.
int compute(KvCacheManager& manager, int sequence, const Tokens& tokens, std::uint64_t salt = 0) {
  REQUIRE(manager.allocate(sequence, tokens, salt));
  const int cached = manager.length(sequence);
  manager.commit(sequence, std::span<const Token>(tokens).subspan(static_cast<std::size_t>(cached)));
  return cached;
}

stage::BlockHash everything_collides(stage::BlockHash, std::span<const Token>, std::uint64_t) { return 1; }

stage::EngineOptions make_options(int num_slots, int block_size, bool prefix_cache) {
  stage::EngineOptions options = tests::tight_options();
  options.num_slots = num_slots;
  options.block_size = block_size;
  options.prefix_cache = prefix_cache;
  return options;
}

std::vector<Tokens> texts_of(stage::Engine& engine, const std::vector<Request>& requests) {
  std::vector<Tokens> texts;
  for (const Completion& completion : tests::run_requests(engine, requests).completions) {
    CHECK(completion.error == kNoProblem);
    texts.push_back(completion.tokens);
  }
  return texts;
}

// Nothing was looked up, and nothing is kept: the cold side of a comparison is really cold.
void check_cold(stage::Engine& engine) {
  CHECK(common::counter(engine.counters(), "prefix_lookups") == 0);
  CHECK(common::counter(engine.counters(), "prefix_hits") == 0);
  CHECK(engine.manager().usage().cached == 0);
}

}  // namespace

TEST_CASE("stage 6, invariant 1: blocks are found up to the first that differs, and never the last token") {
  for (const bool collide : {false, true}) {
    KvCacheManager manager(32, 4, collide ? stage::HashFunction(everything_collides) : stage::hash_block);
    CHECK(compute(manager, 0, text(16)) == 0);
    CHECK(compute(manager, 1, text(16)) == 12);  // a prompt of exactly four blocks: one token is left to compute
    CHECK(compute(manager, 2, text(17)) == 16);
    CHECK(compute(manager, 3, text(15)) == 12);
    CHECK(compute(manager, 4, text(4)) == 0);
    CHECK(compute(manager, 5, text(5)) == 4);
    CHECK(compute(manager, 6, text(16, 9)) == 0);  // differs in the first token: no block after it counts
    Tokens middle = text(17);
    middle[5] = 60;
    CHECK(compute(manager, 7, middle) == 4);
    CHECK(check_ledger(manager, 32, 4) == kNoProblem);
  }
}

TEST_CASE("stage 6, invariant 2: a block counts only after those before it, even when all hashes are equal") {
  KvCacheManager manager(16, 2, everything_collides);
  compute(manager, 0, {1, 2, 3, 4, 9});
  // 3 4 is published, but after 1 2, not at the beginning and not after 5 6.
  CHECK(compute(manager, 1, {3, 4, 9}) == 0);
  CHECK(compute(manager, 2, {5, 6, 3, 4, 9}) == 0);
  CHECK(compute(manager, 3, {1, 2, 3, 4, 8}) == 4);
}

TEST_CASE("stage 6, invariant 3: no block is found before its forward pass is over, or if its tokens are unknown") {
  KvCacheManager manager(16, 4);
  REQUIRE(manager.allocate(0, text(9)));
  CHECK(compute(manager, 1, text(9)) == 0);  // both compute: the first has not published
  manager.commit(0, text(9));
  CHECK(compute(manager, 2, text(9)) == 8);
  manager.free(0);
  manager.free(1);
  manager.free(2);
  manager.reset_prefix_cache();
  REQUIRE(manager.allocate(3, 8));
  manager.commit(3, 4);                   // tokens unknown
  manager.commit(3, Tokens{4, 5, 6, 7});  // known, after some that are not
  CHECK(compute(manager, 4, text(9)) == 0);
  CHECK(manager.prefix_cache().evictable().empty());
}

TEST_CASE("what follows a text that two sequences have computed is found, whichever of them goes on") {
  KvCacheManager manager(16, 4);
  REQUIRE(manager.allocate(0, text(13)));
  CHECK(compute(manager, 1, text(5)) == 0);  // its block is the one that is found
  manager.commit(0, text(13));
  CHECK(compute(manager, 2, text(13)) == 12);
}

TEST_CASE("tokens of one salt are not found with another") {
  KvCacheManager manager(16, 4, everything_collides);
  compute(manager, 0, text(9), 1);
  CHECK(compute(manager, 1, text(9), 2) == 0);
  CHECK(compute(manager, 2, text(9), 1) == 8);
  CHECK(compute(manager, 3, text(9)) == 0);
}

TEST_CASE("generated tokens are found too, and so is a fork's part") {
  KvCacheManager manager(16, 4);
  compute(manager, 0, text(6));
  for (int i = 6; i < 12; ++i) {
    REQUIRE(manager.reserve(0, 1));
    manager.commit(0, Tokens{i});
  }
  manager.fork(0, 1);
  REQUIRE(manager.reserve(1, 4));
  manager.commit(1, Tokens{12, 13, 14, 15});
  manager.free(0);
  manager.free(1);
  CHECK(compute(manager, 2, text(18)) == 16);
}

TEST_CASE("a fork in the middle of a block publishes that block when it has filled it, under the same salt") {
  KvCacheManager manager(16, 4);
  compute(manager, 0, text(6), 1);
  manager.fork(0, 1);
  REQUIRE(manager.reserve(1, 2));
  manager.commit(1, Tokens{6, 7});
  manager.free(0);
  manager.free(1);
  CHECK(compute(manager, 2, text(9), 1) == 8);
  CHECK(compute(manager, 3, text(9)) == 0);
}

static_assert(!std::is_copy_constructible_v<KvCacheManager>, "a copy's entries would lie in the original's lists");

TEST_CASE("nothing computed before a reset is found after it, not even the block that was being filled") {
  KvCacheManager manager(8, 4);
  const std::vector<Token> text = {1, 2, 3, 4, 5};
  REQUIRE(manager.allocate(0, text));
  manager.commit(0, std::span(text).first(2));
  manager.reset_prefix_cache();
  manager.commit(0, std::span(text).subspan(2));
  manager.free(0);
  REQUIRE(manager.allocate(1, text));
  CHECK(manager.length(1) == 0);
}

TEST_CASE("a block in which some tokens are unknown is never found") {
  KvCacheManager manager(8, 4);
  REQUIRE(manager.allocate(0, 8));
  manager.commit(0, 2);
  manager.commit(0, std::vector<Token>{2, 3, 4, 5});
  manager.commit(0, std::vector<Token>{6, 7});
  manager.free(0);
  for (const std::vector<Token>& text : {std::vector<Token>{2, 3, 4, 5, 6}, {4, 5, 6, 7, 8}, {0, 0, 2, 3, 4}}) {
    CHECK(manager.prefix_cache().find(text, 0).empty());
  }
  CHECK(manager.usage().cached == 0);
}

TEST_CASE("stage 6, invariant 4: freed blocks stay until needed, least recently used first, deepest first") {
  KvCacheManager manager(6, 2);
  compute(manager, 0, {1, 2, 3, 4});  // blocks 0, 1
  compute(manager, 1, {5, 6, 7, 8});  // blocks 2, 3
  manager.free(0);
  manager.free(1);
  CHECK(take_snapshot(manager).cached_blocks == std::vector<int>{1, 0, 3, 2});
  CHECK(manager.usage().reserved == 0);
  CHECK(manager.usage().cached == 8);
  compute(manager, 2, {1, 2, 9});  // reacquires block 0, and takes the free block 4
  manager.free(2);
  CHECK(take_snapshot(manager).cached_blocks == std::vector<int>{1, 3, 2, 0});
  REQUIRE(manager.allocate(3, 8));  // two free blocks, then two evictions
  CHECK(take_snapshot(manager).cached_blocks == std::vector<int>{2, 0});
  CHECK(manager.prefix_cache().statistics().evictions == 2);
  manager.free(3);
  CHECK(compute(manager, 4, {5, 6, 7, 8, 9}) == 2);  // the deeper block is gone
  CHECK(check_ledger(manager, 6, 2) == kNoProblem);
}

TEST_CASE("stage 6, invariant 5: a block in use is never evicted, and an allocation that fails changes nothing") {
  KvCacheManager manager(4, 2);
  compute(manager, 0, {1, 2, 3, 4});
  compute(manager, 1, {1, 2, 5, 6});
  manager.free(0);
  const Snapshot before = take_snapshot(manager);
  REQUIRE(before.cached_blocks.size() == 1);
  const std::int64_t lookups = manager.prefix_cache().statistics().lookups;
  CHECK_FALSE(manager.allocate(2, 5));
  // Block 1 would be a hit: it can't be evicted to make room for the rest of the same sequence.
  CHECK_FALSE(manager.allocate(2, Tokens{1, 2, 3, 4, 5, 6, 7, 8}));
  CHECK(take_snapshot(manager) == before);
  CHECK(manager.prefix_cache().statistics().lookups == lookups);  // a refusal is tried again, and counts then
  CHECK(manager.allocate(2, Tokens{1, 2, 3, 4, 5, 6}));
  CHECK(manager.length(2) == 4);
  CHECK(check_ledger(manager, 4, 2) == kNoProblem);
  CHECK_FALSE(manager.reserve(1, 1));
}

TEST_CASE("stage 6, invariant 6: a block that holds other tokens now is not found by the old ones") {
  KvCacheManager manager(2, 2, everything_collides);
  compute(manager, 0, {1, 2, 3});
  manager.free(0);
  compute(manager, 1, {5, 6, 7, 8});
  manager.free(1);
  CHECK(compute(manager, 2, {1, 2, 3}) == 0);
  manager.free(2);
  CHECK(compute(manager, 3, {5, 6, 7}) == 0);  // evicted in turn
}

TEST_CASE("several blocks may hold the same tokens, and each is as good as the others") {
  KvCacheManager manager(8, 2);
  REQUIRE(manager.allocate(0, text(5)));
  REQUIRE(manager.allocate(1, text(5)));
  manager.commit(0, text(5));
  manager.commit(1, text(5));
  CHECK(compute(manager, 2, text(7)) == 4);
  manager.free(0);
  manager.free(1);
  manager.free(2);
  REQUIRE(manager.allocate(3, 8));  // three free blocks, then the second block of sequence 1 is evicted
  CHECK(manager.prefix_cache().statistics().evictions == 1);
  manager.free(3);
  CHECK(compute(manager, 4, text(6)) == 4);  // sequence 0's block holds the same
  CHECK(check_ledger(manager, 8, 2) == kNoProblem);
}

TEST_CASE("reset forgets everything, and leaves live sequences alone") {
  KvCacheManager manager(8, 2);
  compute(manager, 0, text(5));
  compute(manager, 1, text(5, 9));
  manager.free(1);
  manager.reset_prefix_cache();
  CHECK(manager.usage().cached == 0);
  CHECK(compute(manager, 2, text(5)) == 0);
  REQUIRE(manager.reserve(0, 1));
  manager.commit(0, Tokens{5});  // fills a block whose parents are forgotten
  manager.free(0);
  CHECK(manager.usage().cached == 0);
  CHECK(check_ledger(manager, 8, 2) == kNoProblem);
}

TEST_CASE("misuse of the prefix cache is noticed") {
  KvCacheManager manager(8, 2);
  compute(manager, 0, text(5));
  const Snapshot before = take_snapshot(manager);
  CHECK_THROWS_AS(manager.allocate(0, text(5)), CheckError);
  CHECK_THROWS_AS(manager.allocate(1, Tokens{}), CheckError);
  CHECK_THROWS_AS(manager.commit(0, text(9)), CheckError);
  CHECK(take_snapshot(manager) == before);
  stage::PrefixCache cache(2, stage::hash_block);
  cache.publish(3, -1, Tokens{1, 2}, 0);
  CHECK_THROWS_AS(cache.publish(3, -1, Tokens{1, 2}, 0), CheckError);
  CHECK_THROWS_AS(cache.publish(4, -1, Tokens{1}, 0), CheckError);
  CHECK_THROWS_AS(cache.reacquire(3), CheckError);
  cache.make_evictable(3);
  CHECK_THROWS_AS(cache.make_evictable(3), CheckError);
  CHECK(cache.evictable() == std::list<int>{3});
  CHECK(cache.evict() == 3);
  CHECK_THROWS_AS(cache.make_evictable(3), CheckError);  // no longer published
  CHECK_THROWS_AS(cache.reacquire(3), CheckError);
  CHECK_THROWS_AS(cache.evict(), CheckError);
}

TEST_CASE("100 users of a prompt of 512 tokens, 200 tokens each: 1,332 blocks against 4,500") {
  KvCacheManager manager(1332, 16);
  for (int user = 0; user < 100; ++user) {
    Tokens prompt = text(712);
    for (int i = 512; i < 712; ++i) {
      prompt[static_cast<std::size_t>(i)] = 1000 * (user + 1) + i;
    }
    CHECK(compute(manager, user, prompt) == (user == 0 ? 0 : 512));
  }
  CHECK(manager.free_blocks().empty());
}

TEST_CASE("warm text equals cold text, even for prompts of whole blocks, in pools of any size") {
  for (const int block_size : {1, 2, 4, 5}) {
    std::vector<Request> requests;
    for (int i = 0; i < 8; ++i) {
      Request request = make_request(block_size * 3 + (i % 3 == 2 ? 1 : 0), 9, i / 3);
      request.sampling.temperature = i % 2 == 0 ? 0.0F : 1.0F;
      request.sampling.seed = static_cast<std::uint64_t>(i);
      requests.push_back(request);
    }
    stage::Engine cold(small_model(), make_options(4096, block_size, false));
    const std::vector<Tokens> expected = texts_of(cold, requests);
    check_cold(cold);
    for (const int num_slots : {26, 40, 80, 4096}) {
      CAPTURE(block_size, num_slots);
      stage::Engine engine(small_model(), make_options(num_slots, block_size, true));
      tests::poison(engine);
      CHECK(texts_of(engine, requests) == expected);
      CHECK(texts_of(engine, requests) == expected);  // asked twice
      CHECK(common::counter(engine.counters(), "prefix_hits") > 0);
      CHECK(engine.manager().usage().reserved == 0);
      CHECK(check_ledger(engine.manager(), engine.manager().usage().total / block_size, block_size) == kNoProblem);
    }
  }
}

TEST_CASE("warm text equals cold text for every prompt of the workload") {
  const common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  const common::Llama model(file);
  const common::Tokenizer tokenizer(file);
  std::vector<Request> requests;
  for (const common::WorkloadItem& item : common::workload()) {
    Request request;
    request.prompt = tokenizer.encode_prompt(item.prompt);
    request.max_new_tokens = std::min(item.max_new_tokens, 16);
    requests.push_back(request);
  }
  stage::Engine cold(model, make_options(4096, 16, false));
  const std::vector<Tokens> expected = texts_of(cold, requests);
  check_cold(cold);
  stage::Engine engine(model, make_options(4096, 16, true));
  CHECK(texts_of(engine, requests) == expected);
  const double first = common::counter(engine.counters(), "prefix_tokens_saved");
  // Three prompts begin with the same 128 tokens, in eight blocks. From stage 8 on two of the three share a step.
  CHECK(first == (STAGE_NUMBER < 8 ? 256 : 128));
  CHECK(texts_of(engine, requests) == expected);
  CHECK(common::counter(engine.counters(), "prefix_tokens_saved") > 2 * first);
}

TEST_CASE("a token that is found is not computed, and only requests of one salt find each other's") {
  stage::EngineOptions options = make_options(512, 4, true);
  tests::max_pass_tokens(options) = 1;  // forward_passes counts the tokens that are computed
  stage::Engine engine(small_model(), options);
  std::vector<Tokens> texts;
  const auto check_found = [&](std::uint64_t salt, int num_found) {
    CAPTURE(salt);
    Request request = make_request(13, 6);  // the last of the new tokens is not computed
    request.cache_salt = salt;
    const std::vector<common::Counter> before = engine.counters();
    texts.push_back(texts_of(engine, {request}).front());
    const std::vector<common::Counter> after = engine.counters();
    const auto increase = [&](const char* name) {
      return common::counter(after, name) - common::counter(before, name);
    };
    CHECK(increase("prefix_lookups") == 1);
    CHECK(increase("prefix_hits") == (num_found > 0 ? 1 : 0));
    CHECK(increase("prefix_tokens_saved") == num_found);
    CHECK(increase("forward_passes") == 13 + 6 - 1 - num_found);
  };
  check_found(1, 0);
  check_found(2, 0);
  check_found(0, 0);
  check_found(1, 12);
  check_found(2, 12);
  check_found(0, 12);
  CHECK(texts == std::vector<Tokens>(6, texts.front()));
}

TEST_CASE("a preempted request finds its own blocks again") {
  // The first tokens differ: a request that finds anything finds what it has computed itself.
  std::vector<Request> requests = {make_request(8, 16, 0), make_request(8, 16, 1)};
  requests[0].cache_salt = requests[1].cache_salt = 1;  // and resumes with its salt
  const auto run = [&](int num_slots, bool prefix_cache) {
    stage::Engine engine(small_model(), make_options(num_slots, 4, prefix_cache));
    return tests::run_requests(engine, requests);
  };
  const auto num_computed = [](const tests::EngineRun& done) {
    return static_cast<double>(done.timing.prefill_tokens + done.timing.decode_tokens);
  };
  const tests::EngineRun cold = run(32, false);
  const tests::EngineRun warm = run(32, true);
  const tests::EngineRun ample = run(4096, true);
  const double num_preemptions = common::counter(warm.counters, "preemptions");
  const double num_found = common::counter(warm.counters, "prefix_tokens_saved");
  REQUIRE(num_preemptions > 0);
  REQUIRE(common::counter(cold.counters, "preemptions") == num_preemptions);
  CHECK(common::counter(ample.counters, "prefix_hits") == 0);
  CHECK(num_found > 0);
  CHECK(num_computed(warm) == num_computed(cold) - num_found);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CHECK(warm.completions[i].tokens == ample.completions[i].tokens);
  }
}

TEST_CASE("sampling and beams start from cached blocks, and get the texts that they get without them") {
  const Request sampled = [] {
    Request request = make_request(12, 8);
    request.sampling.temperature = 1.0F;
    return request;
  }();
  const Request greedy = make_request(12, 8);
  for (const int block_size : {1, 4, 5}) {
    stage::Engine cold(small_model(), make_options(512, block_size, false));
    stage::Engine warm(small_model(), make_options(512, block_size, true));
    tests::poison(warm);
    texts_of(warm, {greedy});
    const auto run = [](auto& decoding) {
      while (!decoding.finished()) {
        REQUIRE(decoding.step());
      }
    };
    tests::ParallelSampling cold_samples(cold, sampled, 3);
    tests::ParallelSampling warm_samples(warm, sampled, 3);
    run(cold_samples);
    run(warm_samples);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(warm_samples.completions()[i].tokens == cold_samples.completions()[i].tokens);
    }
    tests::BeamSearch cold_beams(cold, greedy, {3, 1.0});
    tests::BeamSearch warm_beams(warm, greedy, {3, 1.0});
    run(cold_beams);
    run(warm_beams);
    REQUIRE(warm_beams.hypotheses().size() == cold_beams.hypotheses().size());
    for (std::size_t i = 0; i < warm_beams.hypotheses().size(); ++i) {
      CHECK(warm_beams.hypotheses()[i].tokens == cold_beams.hypotheses()[i].tokens);
    }
    check_cold(cold);
    CHECK(common::counter(warm.counters(), "prefix_hits") >= 2);
    Request salted = sampled;
    salted.cache_salt = 1;
    const double num_hits = common::counter(warm.counters(), "prefix_hits");
    tests::ParallelSampling salted_samples(warm, salted, 3);
    run(salted_samples);
    CHECK(common::counter(warm.counters(), "prefix_hits") == num_hits);
    CHECK(check_ledger(warm.manager(), warm.manager().usage().total / block_size, block_size) == kNoProblem);
  }
}

namespace {

// A pool whose slots hold, in place of K and V, a name of all the tokens up to theirs: a sequence that shares a slot
// wrongly finds another name there.
class NamedSlots {
 public:
  NamedSlots(std::uint64_t seed, int num_blocks, int block_size)
      : random_(seed),
        num_blocks_(num_blocks),
        manager_(num_blocks, block_size, hash_of_bits(below(3))),
        names_(static_cast<std::size_t>(num_blocks * block_size)) {}

  void step() {
    const int sequence = below(5);
    const Snapshot before = take_snapshot(manager_);
    bool changed = true;
    if (!texts_.contains(sequence)) {
      changed = start(sequence);
    } else if (const int choice = below(12); choice < 3) {
      manager_.free(sequence);
      texts_.erase(sequence);
    } else if (choice < 5 && !texts_.contains(sequence + 5)) {
      manager_.fork(sequence, sequence + 5);
      texts_[sequence + 5] = texts_.at(sequence);
    } else if (choice < 7 && texts_.contains(sequence + 5)) {
      manager_.free(sequence + 5);
      texts_.erase(sequence + 5);
    } else if (choice == 7 && below(20) == 0) {
      manager_.reset_prefix_cache();
    } else {
      changed = append(texts_.contains(sequence + 5) && below(2) == 0 ? sequence + 5 : sequence, random_tokens(6));
    }
    if (!changed) {
      REQUIRE(take_snapshot(manager_) == before);
      // A sequence ends, or the pool would stay full.
      const auto victim = std::next(texts_.begin(), below(static_cast<int>(texts_.size()) + 1));
      if (victim != texts_.end()) {
        manager_.free(victim->first);
        texts_.erase(victim);
      }
    }
    const std::string problem = check_ledger(manager_, num_blocks_, manager_.block_size());
    if (!problem.empty()) {
      FAIL(problem);
    }
    check_names();
  }

  const stage::PrefixStatistics& statistics() const { return manager_.prefix_cache().statistics(); }

 private:
  struct Text {
    Tokens tokens;
    std::uint64_t salt = 0;
  };

  // No bits: everything collides; two: nearly everything; all 64 otherwise.
  static stage::HashFunction hash_of_bits(int kind) {
    return [kind](stage::BlockHash parent, std::span<const Token> tokens, std::uint64_t salt) {
      const stage::BlockHash hash = stage::hash_block(parent, tokens, salt);
      return kind == 0 ? 0 : kind == 1 ? hash % 4 : hash;
    };
  }

  int below(int bound) { return static_cast<int>(random_.below(static_cast<std::uint64_t>(bound))); }

  Tokens random_tokens(int most) {
    Tokens tokens(static_cast<std::size_t>(1 + below(most)));
    for (Token& token : tokens) {
      token = below(2);  // few different ones: many texts begin alike
    }
    return tokens;
  }

  bool start(int sequence) {
    const Text text{random_tokens(12), static_cast<std::uint64_t>(below(2))};
    if (!manager_.allocate(sequence, text.tokens, text.salt)) {
      return false;
    }
    const auto cached = static_cast<std::size_t>(manager_.length(sequence));
    if (cached >= text.tokens.size()) {
      FAIL("no token is left to compute");
    }
    texts_[sequence] = {Tokens(text.tokens.begin(), text.tokens.begin() + static_cast<std::ptrdiff_t>(cached)),
                        text.salt};
    return append(sequence, Tokens(text.tokens.begin() + static_cast<std::ptrdiff_t>(cached), text.tokens.end()));
  }

  bool append(int sequence, const Tokens& tokens) {
    const auto count = static_cast<int>(tokens.size());
    if (!manager_.reserve(sequence, count)) {
      return false;
    }
    const auto size = static_cast<std::size_t>(manager_.block_size());
    for (const auto& [source, destination] : tests::take_copies(manager_)) {
      std::copy_n(names_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(source) * size), size,
                  names_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(destination) * size));
    }
    Text& text = texts_.at(sequence);
    for (const int slot : manager_.slots(sequence, manager_.length(sequence), count)) {
      text.tokens.push_back(tokens[text.tokens.size() - static_cast<std::size_t>(manager_.length(sequence))]);
      names_[static_cast<std::size_t>(slot)] = name(text, text.tokens.size());
    }
    manager_.commit(sequence, tokens);
    return true;
  }

  // A hash of the first `length` tokens: a different one for every text of up to 60 tokens.
  static std::uint64_t name(const Text& text, std::size_t length) {
    std::uint64_t name = 1 + text.salt;
    for (std::size_t i = 0; i < length; ++i) {
      name = common::Random(name * 2 + static_cast<std::uint64_t>(text.tokens[i])).next();
    }
    return name;
  }

  void check_names() {
    if (below(4) != 0) {
      return;
    }
    for (const auto& [sequence, text] : texts_) {
      const std::vector<int> slots = manager_.slots(sequence, 0, static_cast<int>(text.tokens.size()));
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (names_[static_cast<std::size_t>(slots[i])] != name(text, i + 1)) {
          FAIL("sequence " << sequence << " finds another text's K and V at position " << i);
        }
      }
    }
  }

  common::Random random_;
  int num_blocks_;
  KvCacheManager manager_;
  std::vector<std::uint64_t> names_;  // by slot
  std::map<int, Text> texts_;         // by sequence
};

}  // namespace

TEST_CASE("fuzz: whatever was shared, forked, evicted and found again, every sequence finds its own text") {
  constexpr int kOperationsPerPool = 2000;
  constexpr int kPools = tests::kSanitized ? 30 : 500;  // 10^6 operations
  std::int64_t hits = 0;
  std::int64_t evictions = 0;
  for (int seed = 1; seed <= kPools; ++seed) {
    CAPTURE(seed);
    NamedSlots pool(static_cast<std::uint64_t>(seed), 1 + seed % 12, 1 + seed / 12 % 5);
    for (int operation = 0; operation < kOperationsPerPool; ++operation) {
      pool.step();
    }
    hits += pool.statistics().hits;
    evictions += pool.statistics().evictions;
  }
  CHECK(hits > kPools * 10);
  CHECK(evictions > kPools * 10);
}
