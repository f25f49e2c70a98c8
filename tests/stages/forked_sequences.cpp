// Forked sequences in attention and in the engine: they get what they would get alone, bit for bit. Compiled once
// for each stage, from the fifth on.
#include "tests/support/catch.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/math/sampling.h"
#include "common/model/generation.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/sharing_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/attention_inputs.h"
#include "tests/support/compare.h"
#include "tests/support/ledger.h"
#include "tests/support/stage_api.h"

using common::Request;
using common::Token;
using tests::alone;
using tests::blocks_in_use;
using tests::check_ledger;
using tests::compare_texts;
using tests::ledger;
using tests::make_engine;
using tests::make_request;
using tests::ParallelSampling;
using tests::run_to_end;
using tests::sampled_request;
using tests::samples_alone;

namespace {

const std::string kNoProblem;

}  // namespace

TEST_CASE("attention: a forked sequence gets what it gets alone, bit for bit") {
  const tests::AttentionShape shape{4, 2, 5, 2};
  for (const int block_size : {1, 2, 3, 4, 16}) {
    common::Random random(static_cast<std::uint64_t>(block_size));
    // The trunk, then three branches of different lengths, which take turns; one is forked again on the way.
    const tests::TokenInputs trunk = tests::random_inputs(shape, 7, random);
    std::vector<std::vector<tests::TokenInputs>> steps(4);
    tests::PagedSequences pool(shape, 200 / block_size, block_size);
    REQUIRE(pool.start(0, 100));
    REQUIRE(pool.append(0, trunk).has_value());
    pool.fork(0, 1);
    pool.fork(0, 2);
    std::vector<std::vector<tests::Outputs>> outputs(4);
    for (int round = 0; round < 6; ++round) {
      if (round == 3) {
        pool.fork(2, 3);
        steps[3] = steps[2];
        outputs[3] = outputs[2];
      }
      for (const int sequence : {2, 0, 3, 1}) {
        if (!pool.manager().contains(sequence)) {
          continue;
        }
        const auto index = static_cast<std::size_t>(sequence);
        steps[index].push_back(tests::random_inputs(shape, 1 + sequence % 2, random));
        const std::optional<tests::Outputs> output = pool.append(sequence, steps[index].back());
        REQUIRE(output.has_value());
        outputs[index].push_back(*output);
        CHECK(check_ledger(pool.manager(), 200 / block_size, block_size) == kNoProblem);
      }
    }
    for (std::size_t sequence = 0; sequence < 4; ++sequence) {
      tests::PagedSequences lone(shape, 200 / block_size, block_size);
      REQUIRE(lone.start(0, 100));
      REQUIRE(lone.append(0, trunk).has_value());
      for (std::size_t step = 0; step < steps[sequence].size(); ++step) {
        const tests::Outputs expected = lone.append(0, steps[sequence][step]).value();
        for (std::size_t layer = 0; layer < expected.size(); ++layer) {
          const common::Matrix& left = outputs[sequence][step][layer];
          const common::Matrix& right = expected[layer];
          CAPTURE(block_size, sequence, step, layer);
          CHECK(tests::compare_bits({left.data(), static_cast<std::size_t>(left.size())},
                                    {right.data(), static_cast<std::size_t>(right.size())}) == kNoProblem);
        }
      }
    }
  }
}

TEST_CASE("engine: a forked sequence continues as if it had computed everything itself, bit for bit") {
  const std::vector<Token> text = make_request(20, 1).prompt;
  const std::span<const Token> all(text);
  for (const int block_size : {1, 3, 4, 8, 16}) {
    const auto shared = make_engine(96, block_size);
    const auto lone = make_engine(96, block_size);
    REQUIRE(shared->manager().allocate(0, 1));
    REQUIRE(lone->manager().allocate(0, 1));
    REQUIRE(shared->append(0, all.first(10)).has_value());
    REQUIRE(lone->append(0, all.first(10)).has_value());
    shared->manager().fork(0, 1);
    shared->manager().fork(0, 2);
    for (std::size_t i = 10; i < text.size(); ++i) {
      const Token other = (text[i] + 1) % tests::kSmallVocabulary;
      REQUIRE(shared->append(1, {&other, 1}).has_value());
      const common::Matrix actual = shared->append(0, all.subspan(i, 1)).value();
      REQUIRE(shared->append(2, {&other, 1}).has_value());
      const common::Matrix expected = lone->append(0, all.subspan(i, 1)).value();
      CAPTURE(block_size, i);
      CHECK(tests::compare_bits({actual.data(), static_cast<std::size_t>(actual.size())},
                                {expected.data(), static_cast<std::size_t>(expected.size())}) == kNoProblem);
    }
    // Three owners of a partly filled block: two copies.
    CHECK(common::counter(shared->counters(), "blocks_copied") == (10 % block_size == 0 ? 0 : 2));
    CHECK(common::counter(lone->counters(), "blocks_copied") == 0);
    CHECK(ledger(*shared) == kNoProblem);
  }
}

TEST_CASE("engine: requests are preempted beside samples that share blocks, and no text changes") {
  const std::vector<Request> requests = {make_request(5, 12, 0), make_request(9, 7, 1), make_request(3, 20, 2)};
  const Request prompt = sampled_request(7, 12, 1.0F);
  const auto engine = make_engine(51, 3);
  {
    ParallelSampling sampling(*engine, prompt, 3, 1000);
    for (int i = 0; i < 4; ++i) {
      REQUIRE(sampling.step());
    }
    const tests::EngineRun run = tests::run_requests(*engine, requests);
    CHECK(common::counter(run.counters, "preemptions") > 0);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CHECK(run.completions[i].tokens == alone(requests[i]).tokens);
    }
    run_to_end(sampling);
    CHECK(compare_texts(sampling.completions(), samples_alone(prompt, 3)) == kNoProblem);
  }
  CHECK(blocks_in_use(*engine) == 0);
  CHECK(ledger(*engine) == kNoProblem);
}
