// Stage 5 without a fork is stage 4, bit for bit: the same floats, texts and blocks.
#include "tests/support/catch.h"

#include <array>
#include <string>
#include <vector>

#include "common/model/generation.h"
#include "stage4/attention.h"
#include "stage4/engine.h"
#include "stage5/attention.h"
#include "stage5/engine.h"
#include "tests/stages/collapse.h"

using common::Request;
using tests::Arrival;
using tests::AttentionShape;
using tests::make_request;

namespace {

const std::string kNoDifference;

TESTS_STAGE(Separate, stage4);
TESTS_STAGE(Shared, stage5);

constexpr std::array<AttentionShape, 5> kShapes = {
    {{1, 1, 5, 1}, {4, 2, 32, 1}, {3, 1, 33, 1}, {16, 2, 64, 1}, {6, 2, 1, 2}}};
constexpr std::array<int, 5> kBlockSizes = {1, 3, 4, 16, 64};

template <typename Stage>
struct Run {
  std::vector<common::Completion> completions;
  std::vector<common::Counter> counters;

  Run(const std::vector<Request>& requests, int num_slots, int block_size) {
    typename Stage::EngineOptions options;
    options.num_slots = num_slots;
    options.block_size = block_size;
    typename Stage::Engine engine(tests::small_model(), options);
    completions = engine.run(requests, [](int, common::Token) {});
    counters = engine.counters();
  }
};

// The same random operations, and after each of them what the manager says about everything.
template <typename Stage>
std::vector<std::vector<int>> books(std::uint64_t seed) {
  common::Random random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random.below(static_cast<std::uint64_t>(bound))); };
  typename Stage::KvCacheManager manager(1 + below(12), 1 + below(5));
  std::vector<std::vector<int>> result;
  for (int i = 0; i < 200; ++i) {
    const int sequence = below(4);
    const int num_tokens = 1 + below(6);
    const int choice = below(5);
    bool success = true;
    if (!manager.contains(sequence)) {
      success = manager.allocate(sequence, num_tokens);
    } else if (choice == 0) {
      manager.free(sequence);
    } else if (choice == 1) {
      success = manager.reserve(sequence, num_tokens);
    } else {
      success = manager.reserve(sequence, num_tokens);
      manager.commit(sequence, success ? num_tokens : 0);
    }
    result.push_back({success ? 1 : 0, manager.usage().reserved, manager.usage().used});
    result.push_back(manager.free_blocks());
    for (const int live : manager.sequences()) {
      result.push_back(manager.block_table(live));
      result.push_back(manager.slots(live, 0, manager.length(live)));
    }
  }
  return result;
}

}  // namespace

TEST_CASE("attention is stage 4, bit for bit") {
  for (const AttentionShape& shape : kShapes) {
    for (const int block_size : kBlockSizes) {
      for (const int chunk_size : {37, 1, 7}) {
        CHECK(tests::compare_stages<Separate, Shared>(shape, block_size, Arrival{37, chunk_size, 2}, true) ==
              kNoDifference);
      }
    }
  }
}

TEST_CASE("logits through the engine are those of stage 4, bit for bit") {
  for (const int block_size : kBlockSizes) {
    stage4::EngineOptions separate;
    separate.block_size = block_size;
    stage5::EngineOptions shared;
    shared.block_size = block_size;
    CAPTURE(block_size);
    CHECK(tests::compare_logits(tests::engine_logits<Shared>(shared, 21, 6),
                                tests::engine_logits<Separate>(separate, 21, 6), {}) == kNoDifference);
  }
}

TEST_CASE("a run gives the same texts with the same blocks, preemptions and passes as in stage 4") {
  std::vector<Request> requests = {make_request(5, 12, 0), make_request(9, 7, 1), make_request(3, 20, 2),
                                   make_request(12, 1, 3), make_request(1, 15, 4)};
  for (const float temperature : {0.0F, 1.5F}) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      requests[i].sampling.temperature = temperature;
      requests[i].sampling.seed = i;
    }
    for (const int num_slots : {24, 40, 4096}) {
      for (const int block_size : {1, 3, 16}) {
        const Run<Separate> separate(requests, num_slots, block_size);
        const Run<Shared> shared(requests, num_slots, block_size);
        CAPTURE(temperature, num_slots, block_size);
        for (std::size_t i = 0; i < requests.size(); ++i) {
          CHECK(shared.completions[i].tokens == separate.completions[i].tokens);
          CHECK(shared.completions[i].finish_reason == separate.completions[i].finish_reason);
        }
        for (const common::Counter& counter : separate.counters) {
          CAPTURE(counter.name);
          CHECK(common::counter(shared.counters, counter.name) == counter.value);
        }
        CHECK(common::counter(shared.counters, "blocks_copied") == 0);
      }
    }
  }
}

TEST_CASE("without a fork the managers' books are the same after every operation") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CAPTURE(seed);
    CHECK((books<Shared>(seed) == books<Separate>(seed)));
  }
}
