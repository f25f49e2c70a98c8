// A second tier of the prefix cache in the host's memory: its books, its copies, and texts that are found there.
// Compiled for stage 8.
#include "tests/support/catch.h"

#include <chrono>
#include <cstdint>
#include <iostream>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <sstream>
#include <streambuf>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/json.h"
#include "common/base/parallel.h"
#include "common/serving/pool_view.h"
#include "common/serving/prometheus.h"
#include "common/serving/tally.h"
#include "tests/stages/host_blocks_runner.h"
#include "tests/stages/late_runner.h"
#include "tests/stages/number_pool.h"
#include "tests/stages/serving_fixtures.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/host_cache/host_cache.h)
#include STAGE_HEADER(production/host_cache/host_cache_scheduler.h)
#include STAGE_HEADER(serve/engine_adapter.h)
// clang-format on

using common::Token;
using stage::HostCache;
using tests::Copies;

namespace {

const std::string kNoProblem;
using Tokens = std::vector<Token>;
using Blocks = std::vector<int>;

Tokens tokens_from(int first, int count) {
  Tokens tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// A pool with a tier of blocks behind it, in which a token is a number.
class TieredPool {
 public:
  TieredPool(int num_blocks, int block_size, int num_host_blocks)
      : manager_(num_blocks, block_size),
        cache_(tests::cache_shape({1, 1, 1, 1}, num_blocks, block_size, num_host_blocks)),
        host_(num_blocks, num_host_blocks, block_size) {
    cache_.fill(std::numeric_limits<float>::quiet_NaN());
    manager_.on_evict([this](int block) { host_.store(manager_.prefix_cache(), block); });
  }

  // Serves the text as a request that ends. Returns how many of its tokens were not computed.
  int serve(const Tokens& text, std::uint64_t salt = 0, const stage::Admission& admission = {}) {
    constexpr int kSequence = 0;
    host_.touch(manager_.prefix_cache(), text, salt);
    REQUIRE(manager_.allocate(kSequence, text, salt, admission));
    const auto in_pool = static_cast<std::size_t>(manager_.length(kSequence));
    host_.restore(manager_, kSequence, std::span(text).subspan(in_pool), salt, admission);
    const int num_found = manager_.length(kSequence);
    copies = tests::pairs({host_.pending_copies().begin(), host_.pending_copies().end()});
    for (const stage::BlockCopy& copy : host_.pending_copies()) {
      cache_.copy_blocks({&copy, 1});
    }
    host_.clear_pending_copies(copies.size());
    const Tokens rest(text.begin() + num_found, text.end());
    REQUIRE(manager_.reserve(kSequence, static_cast<int>(rest.size())));
    const tests::Numbers numbers(rest.begin(), rest.end());
    const common::Matrix k = common::MatrixView(numbers.data(), static_cast<Eigen::Index>(numbers.size()), 1);
    cache_.write(0, manager_.slots(kSequence, num_found, static_cast<int>(rest.size())), k, -k);
    manager_.commit(kSequence, rest);
    for (std::size_t i = 0; i < text.size(); ++i) {
      const int slot = manager_.slots(kSequence, static_cast<int>(i), 1).front();
      CHECK(cache_.keys(0, 0, slot, 1)(0, 0) == static_cast<float>(text[i]));
      CHECK(cache_.values(0, 0, slot, 1)(0, 0) == -static_cast<float>(text[i]));
    }
    table = manager_.block_table(kSequence);
    manager_.free(kSequence);
    CHECK(tests::check_ledger(manager_, manager_.usage().total / manager_.block_size(), manager_.block_size()) ==
          kNoProblem);
    return num_found;
  }

  // Takes all blocks but these, the last of which are taken first.
  void leave(const Blocks& blocks) {
    const int num_blocks = manager_.usage().total / manager_.block_size();
    for (int i = 0; i < num_blocks; ++i) {
      REQUIRE(manager_.allocate(100 + i, 1));
    }
    for (const int block : blocks) {
      manager_.free(100 + block);  // the first allocation has block 0
    }
  }

  Blocks in_use() const { return {host_.in_use().begin(), host_.in_use().end()}; }
  HostCache& host() { return host_; }
  stage::KvCacheManager& manager() { return manager_; }

  Copies copies;  // of the last text
  Blocks table;   // its blocks

 private:
  stage::KvCacheManager manager_;
  stage::KvCache cache_;
  HostCache host_;
};

// Of the small model, in blocks of 4.
constexpr std::int64_t kBlockBytes = 1024;

// A request that ends after one token, so that only its prompt is in the cache.
stage::GenerationRequest ask(int num_tokens, int salt) { return {tests::make_request(num_tokens, 1, salt)}; }

// Keeps the result.
class Kept : public common::RequestSink {
 public:
  explicit Kept(common::RequestResult& result) : result_(result) {}
  void on_token(int, int, Token, const common::TokenLogprobs*) override {}
  void on_end(int, common::RequestResult result) override { result_ = std::move(result); }

 private:
  common::RequestResult& result_;
};

}  // namespace

// HOST_CACHE.md, by hand.
TEST_CASE("host cache: what the pool evicts is copied to the host, and back when a text goes on there") {
  TieredPool pool(8, 4, 4);
  pool.leave({3, 1, 7});
  const Tokens text = tokens_from(1, 10);
  CHECK(pool.serve(text) == 0);
  CHECK(pool.table == Blocks{7, 1, 3});
  // Block 3 is free: it was not full. Block 1 is evicted before block 7, being deeper.
  CHECK(pool.serve(tokens_from(21, 10)) == 0);
  CHECK(pool.table == Blocks{3, 1, 7});
  CHECK(pool.copies == Copies{{1, 8}, {7, 9}});
  CHECK(pool.in_use() == Blocks{8, 9});
  // The other text's blocks go the same way before this one's are copied back into them.
  CHECK(pool.serve(text) == 8);
  CHECK(pool.table == Blocks{7, 1, 3});
  CHECK(pool.copies == Copies{{1, 10}, {3, 11}, {9, 7}, {8, 1}});
  CHECK(pool.in_use() == Blocks{10, 11, 8, 9});
  CHECK(pool.host().statistics().stored == 4);
  CHECK(pool.host().statistics().restored == 2);
  CHECK(pool.host().statistics().hits == 1);
  // Both texts are on the host now, so that another eviction copies nothing.
  CHECK(pool.serve(tokens_from(41, 10)) == 0);
  CHECK(pool.copies.empty());
}

TEST_CASE("host cache: a text is followed from block to block, wherever its first blocks are") {
  stage::KvCacheManager manager(4, 2);
  HostCache host(4, 8, 2);
  manager.on_evict([&](int block) { host.store(manager.prefix_cache(), block); });
  const Tokens text = tokens_from(1, 8);
  REQUIRE(manager.allocate(0, text));
  manager.commit(0, text);
  const Blocks table = manager.block_table(0);
  const std::int64_t first = manager.prefix_cache().entry(table[0]).text;
  const std::int64_t second = manager.prefix_cache().entry(table[1]).text;
  manager.free(0);
  REQUIRE(manager.allocate(1, 6));  // evicts all but the first block, from the end
  CHECK(Blocks(host.in_use().begin(), host.in_use().end()) == Blocks{4, 5, 6});
  const std::span<const Token> rest = std::span(text).subspan(2);
  CHECK(host.find(first, rest, 0) == Blocks{6, 5, 4});
  CHECK(host.find(first, rest.first(5), 0) == Blocks{6, 5});  // part of a block is none
  CHECK(host.find(second, rest.subspan(2), 0) == Blocks{5, 4});
  CHECK(host.find(first, Tokens{3, 4, 9, 9, 7, 8}, 0) == Blocks{6});
  CHECK(host.find(0, rest, 0).empty());  // what comes before is another text
  CHECK(host.find(first, {}, 0).empty());
}

TEST_CASE("host cache: one token is left to compute, and a part of a block is not found") {
  for (const int length : {8, 9, 11, 12}) {
    TieredPool pool(3, 4, 6);
    const Tokens text = tokens_from(1, length);
    pool.serve(text);
    pool.serve(tokens_from(21, 12));
    CAPTURE(length);
    CHECK(pool.serve(text) == (length - 1) / 4 * 4);
  }
}

TEST_CASE("host cache: a block is found behind its own text only, and by its own tenants") {
  const Tokens text = {1, 2, 3, 4, 5};
  for (const auto& [other, salt] : {std::pair(Tokens{9, 8, 3, 4, 5}, 0), std::pair(text, 7)}) {
    TieredPool pool(3, 2, 8);
    pool.serve(text);
    pool.serve(tokens_from(21, 6));
    CHECK(pool.serve(other, static_cast<std::uint64_t>(salt)) == 0);
    CHECK(pool.serve(text) == 4);
  }
}

TEST_CASE("host cache: the pool has a text's beginning, and the host what follows") {
  TieredPool pool(4, 2, 8);
  const Tokens text = tokens_from(1, 7);
  pool.serve(text);
  pool.serve(tokens_from(21, 3));  // takes the free block, and the text's third one
  CHECK(pool.copies == Copies{{2, 4}});
  REQUIRE(pool.manager().prefix_cache().find(text, 0).size() == 2);
  CHECK(pool.serve(text) == 6);
}

TEST_CASE("host cache: a full tier gives up what has not been used for the longest time") {
  TieredPool pool(2, 2, 2);
  pool.serve({1, 2, 3});
  pool.serve({4, 5, 6});
  pool.serve({7, 8, 9});
  CHECK(pool.in_use().size() == 2);
  CHECK(pool.host().statistics().evictions == 0);
  CHECK(pool.serve({1, 2, 3}) == 2);  // used now, so that {4, 5} is the oldest one
  CHECK(pool.host().statistics().evictions == 1);
  CHECK(pool.host().find(0, Tokens{1, 2}, 0).size() == 1);
  CHECK(pool.host().find(0, Tokens{4, 5}, 0).empty());
}

TEST_CASE("host cache: a text is found again after it came back alone, without what follows") {
  TieredPool pool(4, 2, 12);
  const Tokens text = tokens_from(1, 7);
  pool.serve(text);
  pool.serve(tokens_from(21, 8));
  REQUIRE(pool.manager().prefix_cache().find(text, 0).empty());
  CHECK(pool.serve({1, 2, 30}) == 2);  // the first block has another number in the pool now
  CHECK(pool.serve(text) == 6);
  pool.serve(tokens_from(41, 8));
  REQUIRE(pool.manager().prefix_cache().find(text, 0).empty());
  CHECK(pool.serve(text) == 6);
}

TEST_CASE("host cache: what makes room for a block may take that block's place on the host: then it is not found") {
  TieredPool pool(4, 2, 3);
  const Tokens text = tokens_from(1, 7);
  pool.serve(text);
  pool.serve(tokens_from(21, 8));
  REQUIRE(pool.in_use().size() == 3);
  // Admitted with a block, whose eviction gives up the text's third block on the host. Room for the second one is made
  // by another eviction, which gives that one up.
  CHECK(pool.serve(text, 0, {1}) == 2);
}

TEST_CASE("host cache: copies that a failed step has left come before those of the next step") {
  stage::KvCacheManager manager(3, 2, stage::hash_block, 2);
  HostCache host(5, 4, 2);
  manager.on_evict([&](int block) { host.store(manager.prefix_cache(), block); });
  const Tokens text = {1, 2, 3};
  REQUIRE(manager.allocate(0, text));
  manager.commit(0, text);
  REQUIRE(manager.swap_out(Blocks{0}));
  REQUIRE(manager.allocate(1, tokens_from(21, 6)));  // evicts the block that was left behind
  manager.free(1);
  manager.clear_pending_copies();
  host.clear_pending_copies(host.pending_copies().size());
  REQUIRE(manager.swap_in(Blocks{0}));
  const Copies left = tests::pairs({manager.pending_copies().begin(), manager.pending_copies().end()});
  REQUIRE(left.size() == 2);
  const int published = manager.block_table(0).front();
  manager.free(0);
  host.take_over_copies(manager);
  CHECK(manager.pending_copies().empty());
  REQUIRE(manager.allocate(1, tokens_from(41, 6)));  // evicts the block before its content is there
  CHECK_FALSE(manager.prefix_cache().contains(published));
  CHECK(tests::pairs({host.pending_copies().begin(), host.pending_copies().end()}) == left);  // its text is there
}

TEST_CASE("host cache: no more comes back than leaves the spare blocks, and room for the step") {
  for (const auto& [spare, max_tokens, expected] :
       {std::tuple(0, 100, 3), std::tuple(0, 1, 3), std::tuple(1, 1, 3), std::tuple(2, 1, 2), std::tuple(4, 1, 0)}) {
    stage::KvCacheManager manager(5, 2);
    HostCache host(5, 4, 2);
    manager.on_evict([&](int block) { host.store(manager.prefix_cache(), block); });
    const Tokens text = tokens_from(1, 7);
    REQUIRE(manager.allocate(0, text));
    manager.commit(0, text);
    manager.free(0);
    REQUIRE(manager.allocate(0, tokens_from(21, 10)));
    manager.free(0);
    const stage::Admission admission{max_tokens, spare};
    REQUIRE(manager.allocate(0, text, 0, admission));
    host.restore(manager, 0, text, 0, admission);
    CAPTURE(spare, max_tokens);
    CHECK(manager.length(0) == 2 * expected);
    const int num_spare = static_cast<int>(manager.free_blocks().size() + manager.prefix_cache().evictable().size());
    CHECK(num_spare >= spare);
    CHECK(manager.max_reservable(0) >= 1);
  }
}

TEST_CASE("host cache: a prompt that is sent again is found in either tier, and has the cold text") {
  for (const bool run_ahead : {false, true}) {
    tests::ServingOptions options;
    options.num_blocks = 8;
    options.num_host_cache_blocks = 16;
    options.num_host_blocks = 3;
    options.scheduler.run_ahead = run_ahead;
    tests::Serving serving(options);
    CHECK(serving.engine.cache().num_host_blocks == 3);
    std::vector<stage::GenerationRequest> requests;
    for (const int salt : {1, 2, 3, 1, 2, 3, 3}) {
      requests.push_back({tests::make_request(22, 5, salt)});
      const int id = serving.submit(requests.back());
      CHECK(serving.run() == kNoProblem);
      CHECK(serving.engine.output(id).cached_tokens == (id < 3 ? 0 : 20));
      CHECK(tests::compare_output(serving.engine.output(id), tests::served_alone(requests.back())) == kNoProblem);
    }
    const auto& scheduler = dynamic_cast<const stage::HostCacheScheduler&>(serving.engine.scheduler());
    CHECK(scheduler.host_cache().statistics().hits == 3);
    CHECK(common::counter(serving.engine.counters(), "prefix_hits") == 1);  // the last one, in the pool
  }
}

TEST_CASE("host cache: logits after a hit on the host are those after a hit in the pool, to the bit") {
  std::vector<common::Completion> texts;
  for (const int num_blocks : {64, 8}) {  // in the small pool, the other prompt evicts the first
    tests::ServingOptions options;
    options.num_blocks = num_blocks;
    options.num_host_cache_blocks = 16;
    tests::Serving serving(options);
    for (const int salt : {1, 2, 1}) {
      stage::GenerationRequest request{tests::make_request(22, 5, salt)};
      request.request.num_logprobs = 3;
      serving.submit(request);
      CHECK(serving.run() == kNoProblem);
    }
    texts.push_back(serving.engine.output(2).completions.front());
  }
  REQUIRE(texts[0].logprobs.size() == texts[1].logprobs.size());
  for (std::size_t i = 0; i < texts[0].logprobs.size(); ++i) {
    CHECK(texts[0].logprobs[i].drawn.logprob == texts[1].logprobs[i].drawn.logprob);
  }
}

TEST_CASE("host cache: nothing is kept if computing it again is cheaper") {
  for (const int swap_cost : {3, 4}) {  // a block has four tokens
    tests::ServingOptions options;
    options.num_blocks = 8;
    options.num_host_cache_blocks = 16;
    options.scheduler.block_swap_cost = swap_cost;
    tests::Serving serving(options);
    serving.submit_all({ask(22, 1), ask(22, 2), ask(22, 1)});
    CHECK(serving.run() == kNoProblem);
    const auto& scheduler = dynamic_cast<const stage::HostCacheScheduler&>(serving.engine.scheduler());
    CHECK((scheduler.host_cache().statistics().stored > 0) == (swap_cost == 3));
  }
}

TEST_CASE("host cache: a server's figures tell the tiers apart") {
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  options.num_slots = 24;
  options.block_size = 4;
  options.num_host_slots = 5;
  for (const std::int64_t bytes : {std::int64_t{0}, 17 * kBlockBytes - 1}) {
    const auto served =
        stage::make_served_engine(tests::small_model(), options, {.virtual_clock = true}, {.host_cache_bytes = bytes});
    std::int64_t num_kept = 0;
    std::int64_t num_back = 0;
    for (const int salt : {1, 2, 1}) {
      common::RequestResult result;
      served->submit({tests::make_request(22, 1, salt)}, 0.0, std::make_unique<Kept>(result));
      while (served->step()) {
        for (const auto& [source, destination] : served->last_step().copies) {
          num_kept += destination >= 6 + 2 ? 1 : 0;  // behind the pool's blocks and those for swapping
          num_back += source >= 6 + 2 ? 1 : 0;
        }
      }
    }
    common::ServerState state;
    state.status = served->status();
    const common::HostCacheFigures& figures = state.status.host_cache;
    CHECK(served->description().num_host_blocks == 2);
    CHECK(state.status.num_host_blocks_used == 0);
    CHECK(state.status.prefix.hits == 0);  // in the pool
    CHECK(state.status.prefix.prompt_tokens_found == (bytes > 0 ? 20 : 0));
    CHECK(figures.num_blocks == (bytes > 0 ? 16 : 0));
    CHECK(figures.num_allocated == figures.num_blocks);  // on a CPU all are there from the start
    CHECK(figures.hits == (bytes > 0 ? 1 : 0));
    CHECK(figures.restored == (bytes > 0 ? 5 : 0));
    CHECK(figures.stored == figures.num_used);
    CHECK(num_kept == figures.stored);
    CHECK(num_back == figures.restored);
    CHECK(state.status.blocks_moved == 0);  // by swapping
    common::PoolView view(nullptr);
    common::PoolView::Watcher watcher(view);
    const common::Tally tally;
    view.update({.engine = served.get(), .tally = &tally, .report = &served->last_step(), .is_still = true});
    common::Json record = common::Json::parse(watcher.read(std::chrono::milliseconds(0)).back(), 8);
    CHECK(record["sizes"]["tier_blocks"] == figures.num_blocks);
    CHECK(record["counters"]["tier_allocated"] == figures.num_allocated);
    CHECK(record["counters"]["tier_used"] == figures.num_used);
    CHECK(record["counters"]["tier_restored"] == static_cast<int>(figures.restored));
    const std::string text = common::metrics_text(state, "small");
    CHECK((text.find("course:host_cache_restored_total{model_name=\"small\"} 5\n") != std::string::npos) ==
          (bytes > 0));
    CHECK((text.find("host_cache") != std::string::npos) == (bytes > 0));
  }
}

TEST_CASE("host cache: a size that can't be is refused, with the reason") {
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  options.num_slots = 24;
  options.block_size = 4;
  const auto error_of = [&](std::int64_t bytes) -> std::string {
    try {
      stage::make_served_engine(tests::small_model(), options, {}, {.host_cache_bytes = bytes});
    } catch (const common::InputError& error) {
      return error.what();
    }
    return "";
  };
  CHECK(error_of(kBlockBytes) == kNoProblem);
  CHECK(error_of(kBlockBytes - 1) == "--host-cache: 1023 B is less than one block, 1.00 KiB");
  CHECK(error_of(std::int64_t{1} << 53).find("--host-cache: 8.00 PiB is more than can be used, ") == 0);
  options.num_host_slots = std::numeric_limits<int>::max() - 16 * options.block_size;  // for an int, with one tier
  CHECK(error_of(16 * kBlockBytes) == "--host-cache: 16.0 KiB is more than can be used, 15.0 KiB");
  options.num_host_slots = 0;
  options.prefix_cache = false;
  CHECK(error_of(8 * kBlockBytes).find("--no-prefix-cache") != std::string::npos);
}

TEST_CASE("host cache: a prompt that is scored has its scores, and is computed") {
  std::vector<std::vector<common::TokenLogprobs>> scores;
  for (const std::int64_t bytes : {std::int64_t{0}, 16 * kBlockBytes}) {
    stage::EngineOptions options;
    options.gpu.device = stage::Device::kCpu;
    options.num_slots = 24;
    options.block_size = 4;
    const auto served =
        stage::make_served_engine(tests::small_model(), options, {.virtual_clock = true}, {.host_cache_bytes = bytes});
    common::RequestResult result;
    for (const int salt : {1, 2}) {
      served->submit({tests::make_request(22, 1, salt)}, 0.0, std::make_unique<Kept>(result));
      while (served->step()) {
      }
    }
    stage::GenerationRequest scored{tests::make_request(22, 21, 1)};  // has been evicted
    scored.request.forced.assign(scored.request.prompt.begin() + 1, scored.request.prompt.end());
    scored.request.prompt.resize(1);
    scored.request.num_logprobs = 1;
    served->submit(scored, 0.0, std::make_unique<Kept>(result));
    while (served->step()) {
    }
    CHECK(result.error == kNoProblem);
    CHECK(result.cached_tokens == 0);
    scores.push_back(result.completions.front().logprobs);
  }
  REQUIRE(scores[0].size() == 21);
  REQUIRE(scores[1].size() == 21);
  for (std::size_t i = 0; i < scores[0].size(); ++i) {
    CHECK(scores[0][i].drawn.logprob == scores[1][i].drawn.logprob);
    CHECK(scores[0][i].drawn.logprob < 0.0F);
  }
}

TEST_CASE("host cache: blocks that are not there yet keep nothing, and then they do, in their order") {
  stage::KvCacheManager manager(2, 2);
  HostCache host(5, 4, 2, 0);
  manager.on_evict([&](int block) { host.store(manager.prefix_cache(), block); });
  const auto serve = [&](const Tokens& text) {
    REQUIRE(manager.allocate(0, text));
    manager.commit(0, text);
    manager.free(0);
  };
  serve({1, 2, 3, 4});
  serve({5, 6, 7, 8});
  CHECK(host.num_there() == 0);
  CHECK(host.num_blocks() == 4);
  CHECK(host.statistics().stored == 0);
  CHECK(host.pending_copies().empty());
  host.grow(1);
  serve({1, 2, 9, 9});
  CHECK(Blocks(host.in_use().begin(), host.in_use().end()) == Blocks{5});
  CHECK(host.statistics().stored == 2);  // the second one took the place of the first
  CHECK(host.statistics().evictions == 1);
  host.grow(3);
  host.grow(2);
  CHECK(host.num_there() == 3);
  serve({5, 6, 7, 8});
  CHECK(Blocks(host.in_use().begin(), host.in_use().end()) == Blocks{5, 6, 7});
  host.grow(7);
  CHECK(host.num_there() == 4);
}

// Requests are cancelled while a step is computed that reads and writes their blocks: what is copied back into such a
// block must wait for that step, and all else does not.
TEST_CASE("host cache: copies beside the step that is computed leave its blocks alone") {
  for (const int num_sequences : {1, 2, 4}) {
    for (const int fault : {-1, 3, 5, 8, 12}) {  // the index of a copy that throws
      tests::ServingOptions options;
      options.num_blocks = 16;
      options.num_host_blocks = 6;
      options.num_host_cache_blocks = 24;
      options.scheduler.max_sequences = num_sequences;
      options.scheduler.run_ahead = true;
      tests::HostBlocksRunner* device = nullptr;
      options.wrap = tests::wrap_in(device, 0);
      tests::Serving serving(options);
      device->fail(tests::RunnerCall::kCopy, fault, fault % 2 == 0);
      const auto& scheduler = dynamic_cast<const stage::HostCacheScheduler&>(serving.engine.scheduler());
      CAPTURE(num_sequences, fault);
      std::vector<std::pair<int, stage::GenerationRequest>> requests;
      for (int round = 0; round < 3; ++round) {
        for (const int salt : {1, 2, 3, 4, 5}) {
          const stage::GenerationRequest request{tests::make_request(18 + salt, 4 + salt, salt)};
          requests.emplace_back(serving.submit(request), request);
        }
        for (int step = 1; !serving.engine.is_idle(); ++step) {
          if (step % 5 == 0 && !scheduler.running().empty()) {
            serving.engine.stop(scheduler.running().front()->id(), common::FinishReason::kCancelled);
          }
          serving.engine.step();
          CHECK(serving.problem() == kNoProblem);
        }
        CHECK(serving.leak() == kNoProblem);
        CHECK(scheduler.host_cache().num_there() <= device->num_allocated() - 6);
        device->grow(12);
      }
      for (const auto& [id, request] : requests) {
        const stage::RequestOutput& output = serving.engine.output(id);
        const bool has_failed = output.finish_reason == common::FinishReason::kFailed;
        CHECK((!has_failed || fault >= 0));
        const bool is_part = has_failed || output.finish_reason == common::FinishReason::kCancelled;
        CHECK(tests::compare_output(output, tests::served_alone(request), is_part) == kNoProblem);
      }
      CHECK(scheduler.host_cache().num_there() == 24);
      CHECK(scheduler.host_cache().statistics().restored > 10);
      CHECK(device->num_beside() > 20);
      CHECK(device->num_behind() > 0);
    }
  }
}

TEST_CASE("host cache: memory that never comes is said once, and the tier has what there is") {
  tests::ServingOptions options;
  options.num_blocks = 8;
  options.num_host_blocks = 3;
  options.num_host_cache_blocks = 16;
  options.scheduler.run_ahead = true;
  tests::HostBlocksRunner* device = nullptr;
  options.wrap = tests::wrap_in(device, 2);
  tests::Serving serving(options);
  CHECK(device->num_allocated() == 3 + 2);  // those for swapping were asked for
  device->grow(4);
  device->grow_no_more("host blocks stay at 9 of 19: a reason");
  std::ostringstream said;
  std::streambuf* const before = std::cerr.rdbuf(said.rdbuf());
  std::string problem;
  for (const int salt : {1, 2, 3, 1, 2, 3}) {
    serving.submit(ask(22, salt));
    problem += serving.run();
  }
  std::cerr.rdbuf(before);
  CHECK(problem == kNoProblem);
  CHECK(said.str() == "note: host blocks stay at 9 of 19: a reason\n");
  const auto& scheduler = dynamic_cast<const stage::HostCacheScheduler&>(serving.engine.scheduler());
  CHECK(scheduler.host_cache().num_there() == 6);
  CHECK(scheduler.host_cache().num_used() == 6);
}

TEST_CASE("host cache: a copy that fails is carried out with the next pass, in its order") {
  common::set_num_threads(1);  // they would wait for each other longer than they compute
  for (int index = 0; index < 6; ++index) {
    for (const bool is_done : {false, true}) {
      tests::ServingOptions options;
      options.num_blocks = 8;
      options.num_host_cache_blocks = 7;
      options.scheduler.run_ahead = index % 2 == 1;
      tests::LateRunner* late = nullptr;
      options.wrap = tests::wrap_in(late);
      tests::Serving serving(options);
      late->fail(tests::RunnerCall::kCopy, index, is_done);
      CAPTURE(index, is_done);
      for (const int salt : {1, 2, 1, 2, 3, 1}) {
        const stage::GenerationRequest request{tests::make_request(22, 5, salt)};
        const int id = serving.submit(request);
        CHECK(serving.run() == kNoProblem);
        const stage::RequestOutput& output = serving.engine.output(id);
        const bool has_failed = output.finish_reason == common::FinishReason::kFailed;
        CHECK(tests::compare_output(output, tests::served_alone(request), has_failed) == kNoProblem);
      }
      CHECK(late->has_failed());
    }
  }
}
