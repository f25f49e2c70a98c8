// Swapping as the manager does it: what is swapped out is still live, and still counts. Compiled for stage 8.
#include "tests/support/catch.h"

#include <limits>
#include <string>
#include <vector>

#include "common/base/tensor.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

using common::Token;
using stage::KvCacheManager;
using tests::check_ledger;
using tests::is_refused_as_a_bug;
using tests::take_snapshot;

namespace {

const std::string kNoProblem;
using Tokens = std::vector<Token>;
using Ids = std::vector<int>;

}  // namespace

TEST_CASE("swap: a swapped-out id is live, so that neither allocate nor fork takes it") {
  KvCacheManager manager(8, 4, stage::hash_block, 4);
  REQUIRE(manager.allocate(1, 4));
  manager.commit(1, 4);
  REQUIRE(manager.swap_out(Ids{1}));
  REQUIRE(manager.allocate(2, 4));
  CHECK(is_refused_as_a_bug([&] { manager.allocate(1, 8); }));
  CHECK(is_refused_as_a_bug([&] { manager.allocate(1, Tokens{1, 2, 3}); }));
  CHECK(is_refused_as_a_bug([&] { manager.fork(2, 1); }));
  manager.free(2);
  REQUIRE(manager.swap_in(Ids{1}));
  manager.free(1);
  CHECK(manager.free_blocks().size() == 8);
  CHECK(manager.num_free_host_blocks() == 4);
  CHECK(check_ledger(manager, 8, 4) == kNoProblem);
}

TEST_CASE("swap: resetting the prefix cache reaches what is swapped out") {
  const Tokens text = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  KvCacheManager manager(8, 4, stage::hash_block, 4);
  REQUIRE(manager.allocate(1, text));
  manager.commit(1, text);
  REQUIRE(manager.swap_out(Ids{1}));
  manager.reset_prefix_cache();
  REQUIRE(manager.swap_in(Ids{1}));
  REQUIRE(manager.reserve(1, 2));
  manager.commit(1, Tokens{11, 12});  // fills the third block, which was begun before the reset
  manager.free(1);
  REQUIRE(manager.allocate(2, text));
  CHECK(manager.length(2) == 0);
  CHECK(check_ledger(manager, 8, 4) == kNoProblem);
}

TEST_CASE("swap: misuse is noticed before anything has changed") {
  KvCacheManager manager(8, 4, stage::hash_block, 8);
  for (const int sequence : {1, 2, 3}) {
    REQUIRE(manager.allocate(sequence, 6));
    manager.commit(sequence, 6);
  }
  REQUIRE(manager.swap_out(Ids{3}));
  const tests::Snapshot before = take_snapshot(manager);
  const auto pending = manager.pending_copies().size();
  CHECK(is_refused_as_a_bug([&] { manager.swap_out(Ids{1, 1}); }));
  CHECK(is_refused_as_a_bug([&] { manager.swap_out(Ids{1, 3}); }));
  CHECK(is_refused_as_a_bug([&] { manager.swap_out(Ids{2, 9}); }));
  CHECK(is_refused_as_a_bug([&] { manager.swap_in(Ids{3, 1}); }));
  CHECK(is_refused_as_a_bug([&] { manager.swap_in(Ids{3, 3}); }));
  CHECK(is_refused_as_a_bug([&] { manager.allocate(4, Tokens{1, 2}, 0, {.max_tokens = -1}); }));
  CHECK(is_refused_as_a_bug([&] { manager.allocate(4, Tokens{1, 2}, 0, {.max_tokens = 0}); }));
  CHECK(is_refused_as_a_bug([&] { manager.allocate(4, Tokens{1, 2}, 0, {.spare_blocks = -1}); }));
  CHECK(take_snapshot(manager) == before);
  CHECK(manager.pending_copies().size() == pending);
  CHECK(manager.is_swapped(3));
  CHECK(manager.num_free_host_blocks() == 6);
}

TEST_CASE("swap: a block that is found in the step that swaps it back in holds its K and V") {
  const Tokens text = {1, 2, 3, 4, 5};
  stage::KvCacheShape shape = tests::cache_shape({1, 1, 1, 1}, 6, 2);
  shape.num_host_blocks = 4;
  KvCacheManager manager(6, 2, stage::hash_block, 4);
  stage::KvCache cache(shape);
  cache.fill(std::numeric_limits<float>::quiet_NaN());
  REQUIRE(manager.allocate(1, text));
  common::Matrix k(5, 1);
  k << 1, 2, 3, 4, 5;
  cache.write(0, manager.slots(1, 0, 5), k, -k);
  manager.commit(1, text);
  REQUIRE(manager.swap_out(Ids{1}));
  // All blocks are needed by another sequence, which overwrites them.
  REQUIRE(manager.allocate(7, 12));
  cache.copy_blocks(tests::take_copies(manager));
  const common::Matrix other = common::Matrix::Constant(12, 1, 77.0F);
  cache.write(0, manager.slots(7, 0, 12), other, other);
  manager.commit(7, 12);
  manager.free(7);

  REQUIRE(manager.swap_in(Ids{1}));
  REQUIRE(manager.allocate(2, text));  // in the same step, before the copy has been carried out
  REQUIRE(manager.length(2) == 4);
  cache.copy_blocks(tests::take_copies(manager));
  for (const int slot : manager.slots(2, 0, 4)) {
    const float value = cache.keys(0, 0, slot, 1)(0, 0);
    CAPTURE(slot, value);
    CHECK(cache.values(0, 0, slot, 1)(0, 0) == -value);
    CHECK(value < 5.0F);
  }
}
