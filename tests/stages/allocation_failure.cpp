// Memory runs out at the k-th allocation of an operation of the manager, for every k: the operation throws, and the
// books are as they were, or it does without that memory and is done. The same while samples and beams fork: no
// sequence is lost. Compiled once for each stage.
#include "tests/support/catch.h"

#include <atomic>
#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/failing_allocations.h"
#include "tests/support/stage_api.h"
#if STAGE_NUMBER >= 2
#include "tests/support/ledger.h"
#endif
#if STAGE_NUMBER < 8
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage_engine.h"
#endif
#if STAGE_NUMBER >= 5
#include "tests/stages/sharing_fixtures.h"
#endif

namespace {

std::atomic<int> allocations_until_failure = -1;  // -1: none fails; the model's threads allocate too
std::atomic<bool> has_run_out = false;            // whether one has failed

// The result of a check below that finds nothing; a failing check then shows its text instead.
const std::string kNoProblem;

}  // namespace

bool tests::allocation_fails() {
  int left = allocations_until_failure;
  while (left > 0 && !allocations_until_failure.compare_exchange_weak(left, left - 1)) {
  }
  if (left != 0) {
    return false;
  }
  has_run_out = true;
  return true;
}

using stage::KvCacheManager;

namespace {

constexpr int kNumBlocks = 12;
constexpr int kBlockSize = 4;

// A manager's state, in words.
std::string state_of(const KvCacheManager& manager) {
#if STAGE_NUMBER == 1
  std::string result;
  for (const int sequence : manager.sequences()) {
    const auto [first, size] = manager.region(sequence);
    result += std::to_string(sequence) + " holds " + std::to_string(manager.length(sequence)) + " of " +
              std::to_string(size) + " slots from " + std::to_string(first) + "; ";
  }
  return result + "holes of " + std::to_string(manager.usage().total - manager.usage().reserved);
#else
  std::string result = tests::to_string(tests::take_snapshot(manager));
#if STAGE_NUMBER >= 5
  for (const auto& [source, destination] : manager.pending_copies()) {
    result += "; " + std::to_string(source) + " to " + std::to_string(destination);
  }
#endif
#if STAGE_NUMBER >= 8
  result += "; " + std::to_string(manager.num_free_host_blocks()) + " host blocks free";
#endif
  return result;
#endif
}

// Ends every sequence, swapped out or not: all slots are free then, or it says what is lost.
std::string check_all_comes_back(KvCacheManager& manager) {
#if STAGE_NUMBER == 1
  for (const int sequence : manager.sequences()) {
    manager.free(sequence);
  }
  return manager.allocate(99, kNumBlocks * kBlockSize) ? "" : "slots are lost: " + state_of(manager);
#else
  if (const std::string problem = tests::check_ledger(manager, kNumBlocks, kBlockSize); !problem.empty()) {
    return problem;
  }
  for (int sequence = 0; sequence < 10; ++sequence) {
#if STAGE_NUMBER >= 8
    if (manager.is_swapped(sequence)) {
      manager.free(sequence);
    }
#endif
    if (manager.contains(sequence)) {
      manager.free(sequence);
    }
  }
#if STAGE_NUMBER >= 6
  manager.reset_prefix_cache();
#endif
#if STAGE_NUMBER >= 8
  if (manager.num_free_host_blocks() != kNumBlocks) {
    return "host blocks are lost: " + state_of(manager);
  }
#endif
  return manager.free_blocks().size() == kNumBlocks ? "" : "blocks are lost: " + state_of(manager);
#endif
}

#if STAGE_NUMBER >= 6
std::vector<common::Token> count_from(int first, int count) {
  std::vector<common::Token> result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

void compute(KvCacheManager& manager, int sequence, const std::vector<common::Token>& tokens) {
  REQUIRE(manager.allocate(sequence, tokens));
  manager.commit(sequence,
                 std::span<const common::Token>(tokens).subspan(static_cast<std::size_t>(manager.length(sequence))));
}

// Publishes a text, even if a part of it has been published already. Afterwards it is found.
std::string check_publishing(KvCacheManager& manager) {
  const std::vector<common::Token> text = count_from(1, 3 * kBlockSize + 2);
  compute(manager, 8, text);
  REQUIRE(manager.allocate(9, text));
  const int found = manager.length(9);
  return found == 3 * kBlockSize ? ""
                                 : "a text that has been published: " + std::to_string(found) + " tokens are found";
}
#endif

void fail_everywhere(const char* call, const std::function<void(KvCacheManager&)>& prepare,
                     const std::function<void(KvCacheManager&)>& operation, int min_allocations) {
  std::string done;  // the state after the operation, if there is memory
  int k = -1;        // at first none fails
  for (; k <= 0 || has_run_out; ++k) {
#if STAGE_NUMBER == 1
    KvCacheManager manager(kNumBlocks * kBlockSize);
#elif STAGE_NUMBER < 8
    KvCacheManager manager(kNumBlocks, kBlockSize);
#else
    KvCacheManager manager(kNumBlocks, kBlockSize, stage::hash_block, kNumBlocks);
#endif
    prepare(manager);
    const std::string before = state_of(manager);
    bool has_failed = false;
    has_run_out = false;
    allocations_until_failure = k;
    try {
      operation(manager);
    } catch (const std::bad_alloc&) {
      has_failed = true;
    }
    allocations_until_failure = -1;
    if (k < 0) {
      done = state_of(manager);
    }
    INFO("in " << call << ", call " << k + 1 << " of operator new throws std::bad_alloc");
    {
      INFO("what throws must have changed nothing, and what returns must have done all");
      CHECK(state_of(manager) == (has_failed ? before : done));
    }
#if STAGE_NUMBER >= 6
    if (has_run_out && !has_failed) {
      CHECK(check_publishing(manager) == kNoProblem);
    }
#endif
    CHECK(check_all_comes_back(manager) == kNoProblem);
  }
  // With fewer allocations than that, nothing was tried.
  CHECK(k > min_allocations);
}

void start(KvCacheManager& manager, int sequence, int num_tokens) {
  REQUIRE(manager.allocate(sequence, num_tokens));
  manager.commit(sequence, num_tokens);
}

}  // namespace

TEST_CASE("memory runs out: in allocate, reserve, commit and free") {
  fail_everywhere(
      "allocate", [](KvCacheManager&) {}, [](KvCacheManager& manager) { manager.allocate(0, 17); }, 1);
  const auto two = [](KvCacheManager& manager) {
    start(manager, 0, 6);
    start(manager, 1, 9);
  };
  fail_everywhere(
      "allocate", two, [](KvCacheManager& manager) { manager.allocate(2, 13); }, 1);
  fail_everywhere(
      "reserve", two, [](KvCacheManager& manager) { manager.reserve(0, 14); }, STAGE_NUMBER == 1 ? 0 : 1);
  fail_everywhere(
      "commit", two, [](KvCacheManager& manager) { manager.commit(0, 0); }, 0);
  fail_everywhere(
      "free", two, [](KvCacheManager& manager) { manager.free(0); }, 0);
  const auto hole = [](KvCacheManager& manager) {
    for (int sequence = 0; sequence < 4; ++sequence) {
      start(manager, sequence, 4);
    }
    manager.free(1);
  };
  fail_everywhere(
      "free", hole, [](KvCacheManager& manager) { manager.free(3); }, 0);
}

#if STAGE_NUMBER >= 5
TEST_CASE("memory runs out: in a fork") {
  const auto live = [](KvCacheManager& manager) {
    start(manager, 0, 6);
    start(manager, 1, 5);
  };
  fail_everywhere(
      "fork", live, [](KvCacheManager& manager) { manager.fork(0, 2); }, 2);
}

TEST_CASE("memory runs out: in a reserve that copies on write, and in a fork while a copy is pending") {
  const auto shared = [](KvCacheManager& manager) {
    start(manager, 0, 6);
    manager.fork(0, 1);
    start(manager, 2, 5);
    manager.fork(2, 3);
    REQUIRE(manager.reserve(3, 1));  // a copy is pending already
  };
  fail_everywhere(
      "fork", shared, [](KvCacheManager& manager) { manager.fork(1, 4); }, 2);
  fail_everywhere(
      "reserve", shared, [](KvCacheManager& manager) { manager.reserve(1, 1); }, 1);
  fail_everywhere(
      "reserve", shared, [](KvCacheManager& manager) { manager.reserve(1, 12); }, 2);
  fail_everywhere(
      "free", shared, [](KvCacheManager& manager) { manager.free(1); }, 0);
}
#endif

#if STAGE_NUMBER >= 6
TEST_CASE("memory runs out: where blocks are found again, published, evicted and forgotten") {
  const auto cached = [](KvCacheManager& manager) {
    compute(manager, 0, count_from(1, 18));
    compute(manager, 1, count_from(1, 10));
    manager.free(0);
  };
  const auto find = [](KvCacheManager& manager) { manager.allocate(2, count_from(1, 20)); };
  fail_everywhere("allocate", cached, find, 3);
  const auto evict = [](KvCacheManager& manager) { manager.allocate(2, count_from(101, 33)); };
  fail_everywhere("allocate", cached, evict, 2);
  fail_everywhere(
      "free", cached, [](KvCacheManager& manager) { manager.free(1); }, 0);
  fail_everywhere(
      "reset_prefix_cache", cached, [](KvCacheManager& manager) { manager.reset_prefix_cache(); }, 1);
  const auto allocated = [](KvCacheManager& manager) { REQUIRE(manager.allocate(0, count_from(1, 14))); };
  const auto publish = [](KvCacheManager& manager) { manager.commit(0, count_from(1, 14)); };
  fail_everywhere("commit", allocated, publish, 5);
}
#endif

#if STAGE_NUMBER >= 8
TEST_CASE("memory runs out: in a swap, either way") {
  const std::vector<int> group = {0, 1};
  const auto live = [](KvCacheManager& manager) {
    compute(manager, 0, count_from(1, 10));
    manager.fork(0, 1);
    REQUIRE(manager.reserve(1, 3));
    compute(manager, 2, count_from(50, 4));
  };
  fail_everywhere(
      "swap_out", live, [&](KvCacheManager& manager) { manager.swap_out(group); }, 4);
  const auto swapped = [&](KvCacheManager& manager) {
    live(manager);
    REQUIRE(manager.swap_out(group));
  };
  fail_everywhere(
      "swap_in", swapped, [&](KvCacheManager& manager) { manager.swap_in(group); }, 4);
  fail_everywhere(
      "free", swapped, [](KvCacheManager& manager) { manager.free(1); }, 0);
}
#endif

TEST_CASE("memory runs out: in a run, and none of its sequences stays behind") {
  std::vector<common::Request> requests;
  for (int i = 0; i < 3; ++i) {
    requests.push_back(tests::make_request(4 + i, 3, i));
  }
  stage::EngineOptions options;
  options.num_slots = 48;
  stage::Engine engine(tests::small_model(), options);
  engine.run(requests, [](int, common::Token) {});  // whatever is made once is there now
  int k = 0;
  for (has_run_out = true; has_run_out; ++k) {
    has_run_out = false;
    allocations_until_failure = k;
    try {
      engine.run(requests, [](int, common::Token) {});
    } catch (const std::bad_alloc&) {
    }
    allocations_until_failure = -1;
    INFO("call " << k + 1 << " of operator new throws std::bad_alloc");
    REQUIRE(engine.manager().sequences().empty());
    REQUIRE(engine.manager().usage().reserved == 0);
#if STAGE_NUMBER >= 8
    REQUIRE(engine.is_idle());
    REQUIRE_THROWS_AS(engine.output(engine.num_requests() - 1), common::CheckError);  // the run's last one is forgotten
#endif
  }
  CHECK(k > 20);
}

#if STAGE_NUMBER >= 5
namespace {

constexpr int kPromptLength = 6;

// The objects that a group's sequences need.
struct Home {
#if STAGE_NUMBER < 8
  std::unique_ptr<stage::Engine> engine = tests::make_engine(kNumBlocks * kBlockSize, kBlockSize);
  KvCacheManager& manager = engine->manager();
#else
  KvCacheManager manager{kNumBlocks, kBlockSize, stage::hash_block, kNumBlocks};
  stage::SequenceIds ids;
#endif

  // With its prompt in the cache.
  template <typename Group, typename Options>
  std::unique_ptr<Group> start(const common::Request& request, const Options& options) {
#if STAGE_NUMBER < 8
    auto group = std::make_unique<Group>(*engine, request, options);
#else
    auto group = std::make_unique<Group>(manager, ids, 0, request, options);
#endif
    ::start(manager, group->live().front().sequence, kPromptLength);
    return group;
  }
};

// Logits that favour other tokens in each step and for each branch: [1, kSmallVocabulary] for each live branch.
std::vector<common::Matrix> made_up_logits(const stage::SequenceGroup& group, int step) {
  std::vector<common::Matrix> result;
  for (std::size_t branch = 0; branch < group.live().size(); ++branch) {
    common::Matrix& logits = result.emplace_back(1, tests::kSmallVocabulary);
    for (Eigen::Index token = 0; token < logits.cols(); ++token) {
      logits(0, token) = 3.0F * std::sin(static_cast<float>(token * (step + 2)) + static_cast<float>(branch));
    }
  }
  return result;
}

template <typename Group>
void extend(Group& group, std::vector<common::Matrix> logits) {
#if STAGE_NUMBER < 8
  group.extend(std::move(logits));
#else
  group.extend({{}, std::move(logits)}, 0.0);
#endif
}

// Runs the group for num_steps steps without a failure. In the next one, call k of operator new fails, for every k:
// then the group is destroyed, for which there is no memory either, and everything it held is free.
template <typename Group, typename Options>
void fail_in_step(const Options& options, int num_steps) {
  common::Request request = tests::sampled_request(kPromptLength, 4, 1.0F);
  request.stop_tokens = tests::every_kth_token(7);
  bool has_failed = true;
  int k = 0;
  for (; has_failed; ++k) {
    Home home;
    std::unique_ptr<Group> group = home.start<Group>(request, options);
    for (int step = 0; step < num_steps; ++step) {
      extend(*group, made_up_logits(*group, step));
      for (const int sequence : group->sequences()) {
        REQUIRE(home.manager.reserve(sequence, 1));
        home.manager.commit(sequence, 1);
      }
      home.manager.clear_pending_copies();
    }
    REQUIRE_FALSE(group->finished());
    std::vector<common::Matrix> logits = made_up_logits(*group, num_steps);
    has_failed = false;
    allocations_until_failure = k;
    try {
      extend(*group, std::move(logits));
    } catch (const std::bad_alloc&) {
      has_failed = true;
    }
    allocations_until_failure = 0;
    group.reset();
    allocations_until_failure = -1;
    INFO("after " << num_steps << " steps, call " << k + 1 << " of operator new throws std::bad_alloc");
    CHECK(home.manager.sequences().empty());
    CHECK(tests::check_ledger(home.manager, kNumBlocks, kBlockSize) == kNoProblem);
    CHECK(check_all_comes_back(home.manager) == kNoProblem);
#if STAGE_NUMBER >= 8
    std::set<int> ids;
    for (int i = 0; i < 10; ++i) {
      CHECK(ids.insert(home.ids.take()).second);  // none was given back twice
    }
#endif
  }
  CHECK(k > 3);
}

}  // namespace

TEST_CASE("memory runs out: while samples and beams take their next tokens, no sequence is lost") {
  for (int num_steps = 0; num_steps < 3; ++num_steps) {
    fail_in_step<stage::ParallelSampling>(3, num_steps);
    fail_in_step<stage::BeamSearch>(stage::BeamOptions{3, 1.0}, num_steps);
  }
}
#endif
