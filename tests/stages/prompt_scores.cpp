// The log-probabilities of a prompt from the steps that compute it: they are those of a reply that is forced to be the
// prompt, a token a step, however the prompt is cut into chunks and whatever happens to it meanwhile.
#include "tests/support/catch.h"
#include "tests/support/counted_allocations.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/parallel.h"
#include "common/base/text.h"
#include "common/model/scored_rows.h"
#include "tests/stages/late_runner.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/sanitizers.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/scoring/prompt_scores.h)
#include STAGE_HEADER(production/scoring/row_scoring.h)
#include STAGE_HEADER(production/speculation/speculating_engine.h)
// clang-format on

using common::TokenLogprobs;
using tests::allocations_until_failure;
using tests::LateRunner;
using tests::make_request;
using tests::small_model;

namespace {

const std::string kNoDifference;
constexpr int kBlockSize = 4;

// The log-probabilities of these tokens as they are found without prompt_scores.h.
common::Request forced_request(int num_tokens, int salt, int num_logprobs) {
  common::Request request = make_request(num_tokens, 1, salt);
  request.forced.assign(request.prompt.begin() + 1, request.prompt.end());
  request.prompt.resize(1);
  request.max_new_tokens = num_tokens - 1;
  request.num_logprobs = num_logprobs;
  return request;
}

stage::EngineOptions options_of(int token_budget, int num_blocks, bool run_ahead) {
  stage::EngineOptions options;
  options.num_slots = num_blocks * kBlockSize;
  options.block_size = kBlockSize;
  options.scheduler = {.token_budget = token_budget, .headroom = 0, .run_ahead = run_ahead};
  options.gpu.device = stage::Device::kCpu;
  return options;
}

std::vector<TokenLogprobs> expected_scores(const common::Request& request) {
  stage::Engine engine(small_model(), options_of(16, 32, false));
  const int id = engine.submit({request});
  while (engine.step()) {
  }
  return engine.output(id).completions.front().logprobs;
}

// Empty if they are equal but for rounding: chunks of other sizes are other products.
std::string difference(const std::vector<TokenLogprobs>& actual, const std::vector<TokenLogprobs>& expected) {
  constexpr double kTolerance = 1e-4;
  if (actual.size() != expected.size()) {
    return common::format("%zu scores, expected %zu", actual.size(), expected.size());
  }
  const auto is_close = [](const common::TokenLogprob& left, const common::TokenLogprob& right) {
    return left.token == right.token && std::abs(static_cast<double>(left.logprob - right.logprob)) < kTolerance;
  };
  for (std::size_t i = 0; i < actual.size(); ++i) {
    bool is_equal = is_close(actual[i].drawn, expected[i].drawn) && actual[i].rank == expected[i].rank &&
                    actual[i].best.size() == expected[i].best.size();
    for (std::size_t j = 0; is_equal && j < actual[i].best.size(); ++j) {
      is_equal = is_close(actual[i].best[j], expected[i].best[j]);
    }
    if (!is_equal) {
      return common::format("score %zu is %.6f of token %d, expected %.6f of token %d", i,
                            static_cast<double>(actual[i].drawn.logprob), actual[i].drawn.token,
                            static_cast<double>(expected[i].drawn.logprob), expected[i].drawn.token);
    }
  }
  return "";
}

// A late runner around the engine's own, which counts the rows that it scores.
class LateScoringRunner : public LateRunner, public stage::RowScoring {
 public:
  explicit LateScoringRunner(const stage::EngineOptions& options)
      : LateScoringRunner(stage::make_runner(small_model(), options)) {}

  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    std::vector<common::ScoredRow> rows = take_rows();
    const stage::StepId step = LateRunner::enqueue(batch);
    num_scored += rows.size();
    rows_[step.value] = std::move(rows);
    return step;
  }

  std::size_t num_scored = 0;

 private:
  explicit LateScoringRunner(std::unique_ptr<stage::Runner> inner)
      : LateScoringRunner(dynamic_cast<stage::RowScoring&>(*inner), std::move(inner)) {}
  LateScoringRunner(stage::RowScoring& scoring, std::unique_ptr<stage::Runner>&& inner) : LateRunner(std::move(inner)) {
    on_compute([this, &scoring](std::uint64_t step) { scoring.score_next(std::move(rows_[step])); });
  }

  std::map<std::uint64_t, std::vector<common::ScoredRow>> rows_;  // by step
};

struct Scoring {
  // runner: in place of the engine's own.
  explicit Scoring(const stage::EngineOptions& options, std::unique_ptr<stage::Runner> runner = nullptr, int drafts = 0)
      : engine(stage::make_speculating_engine(small_model(), options,
                                              runner ? std::move(runner) : stage::make_runner(small_model(), options),
                                              drafts, clock, stage::TokenCost{.per_token = 0.01, .max_tokens = 64})) {
    engine->on_pass([this](const stage::RaggedBatch&) { ++num_passes; });
  }
  int submit(const common::Request& request) { return engine->submit({stage::with_scored_prompt(request)}); }
  void run() {
    while (engine->step()) {
    }
  }
  const std::vector<TokenLogprobs>& scores(int id) const { return engine->output(id).completions.front().logprobs; }

  stage::VirtualClock clock;
  std::unique_ptr<stage::SpeculatingEngine> engine;
  int num_passes = 0;
};

}  // namespace

TEST_CASE("scores come from a prompt's chunks, whatever their size, and are those of a reply that is forced") {
  for (const int token_budget : {1, 3, 16, 64}) {
    for (const int num_tokens : {2, 3, 4, 5, 16, 17, 33}) {
      const common::Request request = forced_request(num_tokens, 1, 3);
      const stage::EngineOptions options = options_of(token_budget, 16, false);
      auto owned = std::make_unique<LateScoringRunner>(options);
      const LateScoringRunner& runner = *owned;
      Scoring scoring(options, std::move(owned));
      const int id = scoring.submit(request);
      scoring.run();
      CAPTURE(token_budget, num_tokens);
      CHECK(difference(scoring.scores(id), expected_scores(request)) == kNoDifference);
      CHECK(scoring.num_passes == (num_tokens - 1 + token_budget - 1) / token_budget);
      CHECK(runner.num_scored == static_cast<std::size_t>(num_tokens) - 2);  // the last one is drawn
      CHECK(scoring.engine->manager().usage().reserved == 0);
    }
  }
}

TEST_CASE("scores of a prompt that the cache has: all of it is computed, and other requests share it as ever") {
  Scoring scoring(options_of(16, 32, false));
  const common::Request request = forced_request(21, 1, 2);
  common::Request plain = make_request(21, 3, 1);
  scoring.engine->submit({plain});
  scoring.run();
  const int scored = scoring.submit(request);
  scoring.run();
  CHECK(scoring.engine->output(scored).cached_tokens == 0);
  CHECK(difference(scoring.scores(scored), expected_scores(request)) == kNoDifference);
  scoring.engine->manager().reset_prefix_cache();
  scoring.submit(request);
  scoring.run();
  const int after = scoring.engine->submit({plain});
  scoring.run();
  CHECK(scoring.engine->output(after).cached_tokens == 20);
}

TEST_CASE("scores of several requests in a cache that is too small: preempted, with drafts, beside plain texts") {
  const std::vector<common::Request> scored = {forced_request(25, 1, 1), forced_request(30, 2, 4),
                                               forced_request(30, 1, 2), forced_request(9, 4, 20)};
  common::Request text = make_request(6, 30, 5);
  text.num_speculative_tokens = common::kMaxDrafts;
  const std::vector<common::Token> expected_text = [&] {
    stage::Engine alone(small_model(), options_of(16, 32, false));
    return tests::run_requests(alone, std::span(&text, 1)).completions.front().tokens;
  }();
  for (const stage::Preemption preemption : {stage::Preemption::kRecompute, stage::Preemption::kSwap}) {
    int num_preemptions = 0;  // of requests that are scored
    for (const int token_budget : {5, 12}) {
      for (const bool run_ahead : {false, true}) {
        stage::EngineOptions options = options_of(token_budget, 10, run_ahead);
        options.scheduler.preemption = preemption;
        options.num_host_slots = 16 * kBlockSize;
        auto runner = std::make_unique<LateScoringRunner>(options);
        runner->fail(tests::RunnerCall::kEnqueue, 4, false);  // its step is computed again, a request at a time
        Scoring scoring(options, std::move(runner));
        std::vector<int> ids;
        const int first_text = scoring.engine->submit({text});
        for (const common::Request& request : scored) {
          ids.push_back(scoring.submit(request));
        }
        const int last_text = scoring.engine->submit({text});
        scoring.run();
        for (std::size_t i = 0; i < ids.size(); ++i) {
          CAPTURE(token_budget, run_ahead, i, scoring.engine->output(ids[i]).error);
          num_preemptions += scoring.engine->output(ids[i]).preemptions;
          REQUIRE(scoring.engine->output(ids[i]).finish_reason == common::FinishReason::kLength);
          CHECK(difference(scoring.scores(ids[i]), expected_scores(scored[i])) == kNoDifference);
        }
        for (const int id : {first_text, last_text}) {
          CHECK(scoring.engine->output(id).completions.front().tokens == expected_text);
        }
        CHECK(scoring.engine->manager().usage().reserved == 0);
      }
    }
    CHECK(num_preemptions > 0);
  }
}

TEST_CASE("memory that runs out once in the steps of scored prompts: a request fails, or has all its scores") {
  if (tests::kSanitized) {
    return;  // allocations are the sanitizer's
  }
  common::set_num_threads(1);
  const std::vector<common::Request> requests = {forced_request(14, 1, 1), forced_request(15, 2, 3)};
  const std::vector<std::vector<TokenLogprobs>> expected = {expected_scores(requests[0]), expected_scores(requests[1])};
  common::Request text = make_request(5, 9, 5);
  text.num_speculative_tokens = 2;
  for (const bool run_ahead : {false, true}) {
    int num_failed = 0;
    int num_preemptions = 0;
    bool has_run_out = true;
    for (int k = 0; has_run_out; ++k) {
      CAPTURE(run_ahead, k);
      Scoring scoring(options_of(6, 6, run_ahead));
      scoring.engine->submit({text});
      const int first = scoring.submit(requests[0]);
      scoring.submit(requests[1]);
      allocations_until_failure = k;
      while (!scoring.engine->is_idle()) {
        const tests::Counting all(true);
        try {
          scoring.engine->step();
        } catch (const std::bad_alloc&) {
        }
      }
      has_run_out = allocations_until_failure < 0;
      allocations_until_failure = -1;
      for (std::size_t i = 0; i < 2; ++i) {
        const stage::RequestOutput& output = scoring.engine->output(first + static_cast<int>(i));
        num_preemptions += output.preemptions;
        if (output.finish_reason == common::FinishReason::kFailed) {
          num_failed += 1;
          CHECK(output.error == "out of memory");
        } else {
          REQUIRE(output.finish_reason == common::FinishReason::kLength);
          CHECK(difference(output.completions.front().logprobs, expected[i]) == kNoDifference);
        }
      }
      CHECK(scoring.engine->manager().usage().reserved == 0);
      const int again = scoring.submit(requests[0]);
      scoring.run();
      CHECK(difference(scoring.scores(again), expected[0]) == kNoDifference);
    }
    CHECK(num_failed > 0);
    CHECK(num_preemptions > 0);
  }
}

TEST_CASE("a request that is stopped and forgotten while a step with its scores is in flight") {
  stage::EngineOptions options = options_of(8, 16, true);
  Scoring scoring(options, std::make_unique<LateScoringRunner>(options));
  const common::Request request = forced_request(30, 1, 2);
  const int stopped = scoring.submit(request);
  const int other = scoring.submit(request);
  REQUIRE(scoring.engine->step());
  REQUIRE(scoring.engine->step());
  scoring.engine->stop(stopped, common::FinishReason::kCancelled);
  scoring.engine->forget(stopped);
  scoring.run();
  CHECK(difference(scoring.scores(other), expected_scores(request)) == kNoDifference);
}

TEST_CASE("only a reply that is forced to its end becomes a prompt") {
  const common::Request request = forced_request(9, 1, 2);
  CHECK(stage::with_scored_prompt(request).num_scored == 7);
  CHECK(stage::with_scored_prompt(forced_request(2, 1, 2)).num_scored == 0);
  common::Request longer = request;
  longer.max_new_tokens += 1;
  common::Request without = request;
  without.num_logprobs = 0;
  for (const common::Request& other : {longer, without, make_request(9, 3)}) {
    const common::Request same = stage::with_scored_prompt(other);
    CHECK(same.num_scored == 0);
    CHECK((same.prompt == other.prompt && same.forced == other.forced));
  }
}

TEST_CASE("rows of a large vocabulary are scored in pieces: each gets its own logits' score") {
  common::LlamaConfig config = small_model().config();
  config.vocab_size = 300'000;  // three rows in a piece
  config.num_layers = 1;
  const common::Llama model(config, 2);
  const common::Matrix hidden = common::Matrix::Random(9, config.hidden_size);
  std::vector<common::ScoredRow> rows;
  for (const int row : {8, 0, 3, 3, 1, 7, 5}) {
    rows.push_back({row, 1000 * row + static_cast<int>(rows.size()), 2, std::make_shared<TokenLogprobs>()});
  }
  common::score_rows(model, hidden, rows);
  for (const common::ScoredRow& scored : rows) {
    const common::Matrix logits = model.logits(hidden.row(scored.row));
    const TokenLogprobs expected =
        common::top_logprobs({logits.data(), static_cast<std::size_t>(logits.size())}, scored.token, 2);
    CHECK(difference({*scored.result}, {expected}) == kNoDifference);
  }
}
