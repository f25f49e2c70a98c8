// Several samples of one prompt, and what they have in common with beams: sequences of one request that share blocks.
// Compiled once for each stage, from the fifth on.
#include "tests/support/catch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "common/base/check.h"
#include "common/model/generation.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/sharing_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/stage_api.h"

using common::CheckError;
using common::Completion;
using common::Request;
using tests::BeamSearch;
using tests::blocks_in_use;
using tests::compare_texts;
using tests::every_kth_token;
using tests::ledger;
using tests::make_engine;
using tests::make_request;
using tests::ParallelSampling;
using tests::run_beside_others;
using tests::run_to_end;
using tests::sampled_request;
using tests::samples_alone;
using tests::State;
using tests::state_of;

namespace {

const std::string kNoProblem;

}  // namespace

TEST_CASE("sampling: sample i is the text of a lone run with sample index i (stage 5, invariant 8)") {
  constexpr int kSamples = 4;
  for (const int block_size : {1, 2, 5, 16}) {
    for (const int length : std::set<int>{1, std::max(1, block_size - 1), block_size, block_size + 1, 2 * block_size}) {
      for (const float temperature : {0.0F, 0.7F, 2.0F}) {
        const Request request = sampled_request(length, 7, temperature, 40);
        const auto engine = make_engine(256, block_size);
        ParallelSampling sampling(*engine, request, kSamples, 5);
        run_to_end(sampling);
        CAPTURE(block_size, length, temperature);
        CHECK(compare_texts(sampling.completions(), samples_alone(request, kSamples)) == kNoProblem);
        // The prompt is one pass, and all its tokens but one are computed once for all samples.
        const int passes_per_token = STAGE_NUMBER < 8 ? kSamples : 1;  // from stage 8 on all samples are one batch
        CHECK(common::counter(engine->counters(), "forward_passes") == 1 + passes_per_token * 6);
        CHECK(engine->timing().prefill_tokens == (length == 1 ? 0 : length));
#if STAGE_NUMBER >= 8
        CHECK(engine->timing().decode_tokens == (length == 1 ? 1 : 0) + 6 * kSamples);
#endif
        CHECK(common::counter(engine->counters(), "blocks_copied") == (length % block_size == 0 ? 0 : kSamples - 1));
        CHECK(blocks_in_use(*engine) == 0);
        CHECK(ledger(*engine) == kNoProblem);
      }
    }
  }
}

TEST_CASE("sampling: full blocks of the prompt are shared to the end, and a sample that stops early frees its own") {
  constexpr int kBlockSize = 4;
  int num_early = 0;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Request request = sampled_request(10, 16, 1.5F, seed);
    request.stop_tokens = every_kth_token(9);
    const auto engine = make_engine(512, kBlockSize);
    ParallelSampling sampling(*engine, request, 5);
    for (int length = 10; !sampling.finished(); ++length) {
      REQUIRE(sampling.step());
      const auto live = static_cast<int>(sampling.live().size());
      const int num_blocks = (length + kBlockSize - 1) / kBlockSize;
      const int num_shared = length == 10 ? num_blocks : 10 / kBlockSize;  // no sample has written after the first step
      CAPTURE(seed, length, live);
      CHECK(blocks_in_use(*engine) == (live == 0 ? 0 : num_shared + live * (num_blocks - num_shared)));
      CHECK(ledger(*engine) == kNoProblem);
      num_early += live < 5 && live > 0 ? 1 : 0;
    }
    CHECK(compare_texts(sampling.completions(), samples_alone(request, 5)) == kNoProblem);
  }
  CHECK(num_early > 6);
}

TEST_CASE("sampling: when the blocks run out, nothing has changed, and it continues later (stage 5, invariant 7)") {
  Request request = sampled_request(6, 8, 1.2F, 3);
  request.stop_tokens = every_kth_token(20);
  const std::vector<Completion> expected = samples_alone(request, 4);
  int num_refused = 1;
  for (int num_left = 0; num_refused > 0; ++num_left) {
    REQUIRE(num_left < 40);
    const auto engine = make_engine(40 * 3, 3);
    ParallelSampling sampling(*engine, request, 4);
    std::string problem;
    num_refused = run_beside_others(*engine, sampling, num_left, problem);
    CAPTURE(num_left);
    CHECK(problem == kNoProblem);
    CHECK(compare_texts(sampling.completions(), expected) == kNoProblem);
    CHECK((num_refused > 0 || num_left >= 6));  // the prompt alone has two blocks, and four samples need more
  }
}

TEST_CASE("sampling: a stop string ends its sample for that reason, even if the last token completes it") {
  const auto decode = [](std::span<const common::Token> tokens) {  // token i is spelled "<i>"
    std::string text;
    for (const common::Token token : tokens) {
      text += "<" + std::to_string(token) + ">";
    }
    return text;
  };
  constexpr int kSamples = 3;
  Request request = sampled_request(6, 8, 1.2F, 3);
  const std::vector<common::Token> first = samples_alone(request, 1).front().tokens;
  request.stop_strings = common::StopStrings({decode(std::span(first).last(2))}, decode);
  const auto engine = make_engine(256, 4);
  ParallelSampling sampling(*engine, request, kSamples);
  run_to_end(sampling);
  CHECK(sampling.completions().front().tokens == first);
  CHECK(sampling.completions().front().finish_reason == common::FinishReason::kStop);
  CHECK(sampling.completions().back().finish_reason == common::FinishReason::kLength);
}

TEST_CASE("sampling: when it is abandoned, nothing is left behind") {
  const auto engine = make_engine(120, 3);
  for (const int num_steps : {0, 1, 2, 5}) {
    {
      ParallelSampling sampling(*engine, sampled_request(7, 8, 1.0F), 3);
      for (int i = 0; i < num_steps; ++i) {
        REQUIRE(sampling.step());
      }
      CHECK((blocks_in_use(*engine) > 0) == (num_steps > 0));
    }
    CHECK(engine->manager().sequences().empty());
    CHECK(blocks_in_use(*engine) == 0);
  }
}

// ---- Samples and beams ---------------------------------------------------------------------------------------------

TEST_CASE("sampling and beams: what can never be served is rejected, and misuse is noticed") {
  const auto engine = make_engine(24, 4);
  for (const Request& request : {make_request(0, 5), make_request(4, 0), make_request(30, 19), make_request(20, 5)}) {
    CHECK_THROWS_AS(ParallelSampling(*engine, request, 2), common::InputError);
    CHECK_THROWS_AS(BeamSearch(*engine, request, {}), common::InputError);
  }
  using Misuse =
      std::conditional_t < STAGE_NUMBER<8, CheckError, common::InputError>;  // stage 8 says no to both in the same way
  CHECK_THROWS_AS(ParallelSampling(*engine, make_request(4, 4), 0), Misuse);
  CHECK_THROWS_AS(BeamSearch(*engine, make_request(4, 4), {0, 1.0}), Misuse);
  CHECK_THROWS_AS(BeamSearch(*engine, make_request(4, 4), {2, std::nan("")}), Misuse);
  CHECK_THROWS_AS(BeamSearch(*engine, make_request(4, 4), {2, -1.0}), Misuse);
  CHECK(blocks_in_use(*engine) == 0);
  CHECK(ledger(*engine) == kNoProblem);
}

TEST_CASE("samples and beams in engines of 1, 2, 3 … blocks: rejected, refused without a trace, or right") {
  constexpr int kBlockSize = 2;
  const Request request = sampled_request(5, 6, 1.0F, 9);
  const std::vector<Completion> expected = samples_alone(request, 3);
  int num_rejected = 0;
  int num_stopped = 0;
  bool done = false;
  const auto run = [&](stage::Engine& engine, auto& decoding) {
    while (!decoding.finished()) {
      const State before = state_of(engine, decoding);
      if (!decoding.step()) {
        CHECK(state_of(engine, decoding) == before);
        CHECK(engine.manager().pending_copies().empty());
        num_stopped += 1;
        return false;
      }
      CHECK(ledger(engine) == kNoProblem);
    }
    return true;
  };
  for (int num_blocks = 1; !done; ++num_blocks) {
    REQUIRE(num_blocks < 40);
    const auto engine = make_engine(num_blocks * kBlockSize, kBlockSize);
    CAPTURE(num_blocks);
    try {
      {
        ParallelSampling sampling(*engine, request, 3);
        done = run(*engine, sampling);
        CHECK((!done || compare_texts(sampling.completions(), expected) == kNoProblem));
      }
      CHECK(blocks_in_use(*engine) == 0);
      {
        BeamSearch search(*engine, request, {3, 1.0});
        done = run(*engine, search) && done;
      }
    } catch (const common::InputError&) {
      num_rejected += 1;
    }
    CHECK(blocks_in_use(*engine) == 0);
    CHECK(ledger(*engine) == kNoProblem);
  }
#if STAGE_NUMBER < 8
  CHECK(num_rejected == 5);  // the request itself needs 11 slots
  CHECK(num_stopped > 2);
#else
  // A request that may run out of blocks is rejected: three sequences of 5 blocks need 11, the prompt's 2 full ones in
  // common.
  CHECK(num_rejected == 10);
  CHECK(num_stopped == 0);
#endif
}
