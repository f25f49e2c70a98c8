// Whole engines: every request gets the text of a single run, whatever the schedule, and a failure affects no other.
#include "tests/support/catch.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/serving/arrivals.h"
#include "common/serving/report.h"
#include "common/serving/tally.h"
#include "common/serving/view.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/stages/ties.h"
#include "tests/support/golden.h"
#include "tests/support/sanitizers.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(serve/engine_adapter.h)
// clang-format on

using common::FinishReason;
using common::Token;
using stage::GenerationRequest;
using stage::KvCacheManager;
using stage::Preemption;
using tests::compare_output;
using tests::make_request;
using tests::served_alone;
using tests::Serving;
using tests::ServingOptions;

namespace {

const std::string kNoProblem;

GenerationRequest sampled_request(int num_tokens, int max_new_tokens, int num_samples, int salt = 0) {
  GenerationRequest task{make_request(num_tokens, max_new_tokens, salt), num_samples};
  task.request.sampling.temperature = 1.0F;
  task.request.sampling.seed = static_cast<std::uint64_t>(salt);
  return task;
}

GenerationRequest beam_request(int num_tokens, int max_new_tokens, int width, int salt = 0) {
  return {make_request(num_tokens, max_new_tokens, salt), width, 1.0};
}

std::vector<GenerationRequest> mixed_requests() {
  return {{make_request(9, 12, 1)}, sampled_request(7, 8, 3, 2), {make_request(1, 1, 3)},
          beam_request(6, 7, 3, 4), {make_request(17, 9, 5)},    sampled_request(4, 10, 2, 6)};
}

int preemptions(const Serving& serving, bool swapped) {
  int count = 0;
  for (const stage::StepReport& report : serving.reports) {
    count += static_cast<int>((swapped ? report.swapped_out : report.recomputed).size());
  }
  return count;
}

// ", recomputed 2 times and swapped out 0 times": of one request.
std::string preemptions_of(const Serving& serving, int id) {
  std::ptrdiff_t recomputed = 0;
  std::ptrdiff_t swapped = 0;
  for (const stage::StepReport& report : serving.reports) {
    recomputed += std::count(report.recomputed.begin(), report.recomputed.end(), id);
    swapped += std::count(report.swapped_out.begin(), report.swapped_out.end(), id);
  }
  return common::format(", recomputed %td times and swapped out %td times", recomputed, swapped);
}

// Serves all of them at once, to the end. Returns the first problem.
std::string serve(Serving& serving, const std::vector<GenerationRequest>& tasks) {
  serving.submit_all(tasks);
  std::string problem = serving.run();
  for (std::size_t i = 0; problem.empty() && i < tasks.size(); ++i) {
    problem = compare_output(serving.engine.output(static_cast<int>(i)), served_alone(tasks[i]));
    if (!problem.empty()) {
      problem.insert(0, common::format("request %zu", i) + preemptions_of(serving, static_cast<int>(i)) + ": ");
    }
  }
  return problem;
}

// Whether the output passes for that of the request.
bool is_accepted(const GenerationRequest& task, const stage::RequestOutput& output, double margin) {
  std::vector<common::Completion> expected = served_alone(task);
  REQUIRE(compare_output(output, expected) != kNoProblem);
  tests::accept_ties(task, output, tests::small_model(), expected, static_cast<float>(margin));
  return compare_output(output, expected) == kNoProblem;
}

// A sink ends and forgets its own request at its first token, and one more of the step. Returns the first problem.
std::string end_and_forget_in_a_sink(bool run_ahead) {
  ServingOptions options;
  options.scheduler.run_ahead = run_ahead;
  Serving serving(options);
  int num_tokens = 0;
  serving.on_token = [&](int id, int, Token) {
    num_tokens += 1;
    for (const int ended : {id, 1 - id}) {
      serving.engine.stop(ended, FinishReason::kCancelled);
      CHECK(serving.engine.output(ended).finished());
      serving.engine.forget(ended);
    }
  };
  serving.submit(sampled_request(5, 8, 1, 1));
  serving.submit({make_request(6, 8, 2)});
  const GenerationRequest task{make_request(7, 3, 3)};
  const int last = serving.engine.submit(task);
  if (std::string problem = serving.run(); !problem.empty()) {
    return problem;
  }
  CHECK(num_tokens == 1);
  CHECK(serving.engine.num_requests() == 3);
  return compare_output(serving.engine.output(last), served_alone(task));
}

// The engine as common/serving sees it, and what is counted of a run.
struct Measured {
  explicit Measured(Serving& serving) : engine(serving.engine, serving.clock) {}

  // Serves all of them, each from its time on.
  const std::vector<common::RequestResult>& run(const std::vector<common::ArrivingRequest>& requests) {
    results =
        common::serve(engine, requests, {.on_step = [&](const common::StepReport& report) { tally.add(report); }});
    for (const common::RequestResult& result : results) {
      tally.add(result);
    }
    return results;
  }

  stage::EngineAdapter engine;
  common::Tally tally{common::Keep::kValues};
  std::vector<common::RequestResult> results;
};

}  // namespace

TEST_CASE("the texts are those of lone runs, for every budget, limit and block size (stage 8, invariant 7)") {
  // Sanitizers look at accesses, which a few of the combinations make as well as all ninety.
  const std::vector<int> budgets = tests::kSanitized ? std::vector{4, 256} : std::vector{3, 4, 7, 20, 256};
  const std::vector<int> limits = tests::kSanitized ? std::vector{3, 64} : std::vector{3, 5, 64};
  const std::vector<int> block_sizes = tests::kSanitized ? std::vector{3} : std::vector{1, 3, 16};
  for (const int budget : budgets) {
    for (const int max_sequences : limits) {
      for (const int block_size : block_sizes) {
        for (const bool prefix_cache : {true, false}) {
          ServingOptions options;
          options.num_blocks = 400 / block_size;
          options.block_size = block_size;
          options.prefix_cache = prefix_cache;
          options.scheduler.token_budget = budget;
          options.scheduler.max_sequences = max_sequences;
          options.scheduler.run_ahead = (budget + max_sequences) % 2 == 0;
          Serving serving(options);
          CAPTURE(budget, max_sequences, block_size, prefix_cache);
          CHECK(serve(serving, mixed_requests()) == kNoProblem);
        }
      }
    }
  }
}

TEST_CASE("budgets of 1 and 2 still serve requests of one sequence") {
  for (const int budget : {1, 2}) {
    ServingOptions options;
    options.scheduler.token_budget = budget;
    Serving serving(options);
    CHECK(serve(serving, {{make_request(9, 5, 1)}, {make_request(3, 4, 2)}, {make_request(1, 7, 3)}}) == kNoProblem);
  }
}

TEST_CASE("the loop: requests of one sequence in a tight pool, in every order, get the texts of lone runs") {
  std::vector<GenerationRequest> tasks;
  tasks.reserve(5);
  for (int i = 0; i < 5; ++i) {
    tasks.push_back({make_request(3 + 4 * i, 14 - 2 * i, i)});
  }
  for (int rotation = 0; rotation < 5; ++rotation) {
    std::rotate(tasks.begin(), tasks.begin() + 1, tasks.end());
    ServingOptions options;
    options.num_blocks = 9;
    options.scheduler.token_budget = 12;
    Serving serving(options);
    CAPTURE(rotation);
    CHECK(serve(serving, tasks) == kNoProblem);
    CHECK(preemptions(serving, false) > 0);
  }
}

TEST_CASE("the loop: each request gets the token after its own last row, in the step that computes it") {
  ServingOptions options;
  options.scheduler.token_budget = 16;
  Serving serving(options);
  std::vector<std::string> handed_out;
  serving.on_token = [&](int id, int, Token) {
    handed_out.push_back(common::format("%d after pass %zu", id, serving.reports.size()));
  };
  // A prompt of 20 is more than a step's 16 tokens: it gets no token before its last chunk.
  CHECK(serve(serving, {{make_request(2, 2, 1)}, {make_request(20, 1, 2)}}) == kNoProblem);
  CHECK(handed_out == std::vector<std::string>{"0 after pass 0", "0 after pass 1", "1 after pass 1"});
}

TEST_CASE("the loop: a pass that throws is repeated for each request, and only one that throws alone fails") {
  const std::vector<GenerationRequest> tasks = {
      {make_request(4, 4, 1)}, {make_request(9, 4, 2)}, {make_request(14, 4, 3)}};
  Serving serving({});
  serving.submit_all(tasks);
  std::vector<std::size_t> sizes;  // of the passes, in sequences
  serving.engine.on_pass([&](const stage::RaggedBatch& batch) {
    sizes.push_back(batch.num_sequences());
    const std::vector<int>& lengths = batch.context_lengths;
    // The first pass, and every pass that is to find request 1's second token.
    if (sizes.size() == 1 || std::find(lengths.begin(), lengths.end(), 10) != lengths.end()) {
      throw std::runtime_error("a fault");
    }
  });
  REQUIRE(serving.run() == kNoProblem);
  CHECK(sizes == std::vector<std::size_t>{3, 1, 1, 1, 3, 1, 1, 1, 2, 2});
  CHECK(serving.engine.output(1).finish_reason == FinishReason::kFailed);
  CHECK(serving.engine.output(1).error == "a fault");
  for (const int id : {0, 2}) {
    const auto& task = tasks[static_cast<std::size_t>(id)];
    CHECK(compare_output(serving.engine.output(id), served_alone(task)) == kNoProblem);
  }
}

TEST_CASE("ties: a text that goes on with the second best token is accepted if that is as near as the margin") {
  GenerationRequest task{make_request(6, 5, 3)};
  task.request.num_logprobs = 2;
  const std::vector<common::TokenLogprob> best = served_alone(task).front().logprobs.front().best;
  const auto gap = static_cast<double>(best[0].logprob - best[1].logprob);
  task.request.num_logprobs = 0;
  GenerationRequest forced = task;
  forced.request.forced = {best[1].token};
  stage::RequestOutput output;
  output.completions = served_alone(forced);
  CHECK(is_accepted(task, output, 1.01 * gap));
  CHECK_FALSE(is_accepted(task, output, 0.99 * gap));
  output.completions.front().tokens.back() = (output.completions.front().tokens.back() + 1) % tests::kSmallVocabulary;
  CHECK_FALSE(is_accepted(task, output, 1.01 * gap));
}

TEST_CASE("ties: a sample with another token is refused") {
  const GenerationRequest task = sampled_request(6, 5, 2, 3);
  stage::RequestOutput output;
  output.completions = served_alone(task);
  output.completions.back().tokens[2] = (output.completions.back().tokens[2] + 1) % tests::kSmallVocabulary;
  CHECK_FALSE(is_accepted(task, output, tests::kTieMargin));
  CHECK(is_accepted(task, output, 100.0));
}

TEST_CASE("ties: beams may change places within the margin, and others are refused") {
  const GenerationRequest task = beam_request(6, 7, 2, 4);
  Serving serving({});
  serving.submit(task);
  REQUIRE(serving.run() == kNoProblem);
  stage::RequestOutput output = serving.engine.output(0);
  const double gap = output.hypotheses[0].log_probability - output.hypotheses[1].log_probability;
  std::swap(output.completions[0], output.completions[1]);
  CHECK(is_accepted(task, output, 1.01 * gap));
  CHECK_FALSE(is_accepted(task, output, 0.99 * gap));
  output.completions = served_alone(beam_request(6, 7, 2, 5));
  CHECK_FALSE(is_accepted(task, output, tests::kTieMargin));
}

TEST_CASE("the loop: a request that is alone in a pass that throws is not tried twice") {
  Serving serving({});
  serving.submit({make_request(4, 4, 1)});
  int num_passes = 0;
  serving.engine.on_pass([&](const stage::RaggedBatch&) {
    num_passes += 1;
    throw std::runtime_error("a fault");
  });
  REQUIRE(serving.run() == kNoProblem);
  CHECK(num_passes == 1);
  CHECK(serving.engine.output(0).finish_reason == FinishReason::kFailed);
  CHECK(serving.engine.output(0).error == "a fault");
}

TEST_CASE("the loop: a request that is stopped after a pass has thrown gets no pass of its own") {
  Serving serving({});
  const std::vector<GenerationRequest> tasks = {
      {make_request(4, 3, 1)}, {make_request(9, 3, 2)}, {make_request(14, 3, 3)}};
  serving.submit_all(tasks);
  std::vector<std::size_t> sizes;  // of the passes, in sequences
  serving.engine.on_pass([&](const stage::RaggedBatch& batch) {
    sizes.push_back(batch.num_sequences());
    if (sizes.size() == 1) {
      throw std::runtime_error("a fault");
    }
  });
  serving.on_token = [&](int id, int, Token) {
    if (id == 0) {
      serving.engine.stop(2, FinishReason::kCancelled);
    }
  };
  REQUIRE(serving.run() == kNoProblem);
  CHECK(sizes == std::vector<std::size_t>{3, 1, 1, 2, 2});
  CHECK(serving.engine.output(2).finish_reason == FinishReason::kCancelled);
  CHECK(compare_output(serving.engine.output(1), served_alone(tasks[1])) == kNoProblem);
}

TEST_CASE("the loop: a request that is stopped before its pass is told nothing of it, and the others go on") {
  Serving serving({});
  const std::vector<GenerationRequest> tasks = {
      {make_request(4, 3, 1)}, {make_request(9, 3, 2)}, {make_request(14, 3, 3)}};
  serving.submit_all(tasks);
  serving.engine.on_pass([&](const stage::RaggedBatch&) { serving.engine.stop(1, FinishReason::kCancelled); });
  REQUIRE(serving.run() == kNoProblem);
  CHECK(serving.engine.output(1).finish_reason == FinishReason::kCancelled);
  CHECK(serving.engine.output(1).completions.empty());
  for (const int id : {0, 2}) {
    CAPTURE(id);
    const auto& task = tasks[static_cast<std::size_t>(id)];
    CHECK(compare_output(serving.engine.output(id), served_alone(task)) == kNoProblem);
  }
}

TEST_CASE("the loop: a sink that throws fails its own request, and the others go on") {
  Serving serving({});
  const std::vector<GenerationRequest> tasks = {
      {make_request(5, 6, 1)}, {make_request(6, 7, 2)}, {make_request(7, 8, 3)}};
  serving.submit_all(tasks);
  int count = 0;
  serving.on_token = [&](int id, int, Token) {
    count += id == 1 ? 1 : 0;
    if (id == 1 && count == 2) {
      throw std::runtime_error("the connection is closed");
    }
  };
  REQUIRE(serving.run() == kNoProblem);
  CHECK(serving.engine.output(1).finish_reason == FinishReason::kFailed);
  CHECK(serving.engine.output(1).error == "the connection is closed");
  for (const int id : {0, 2}) {
    CAPTURE(id);
    const auto& task = tasks[static_cast<std::size_t>(id)];
    CHECK(compare_output(serving.engine.output(id), served_alone(task)) == kNoProblem);
  }
}

TEST_CASE("the loop: a sink may end and forget its own request, and others of the step") {
  CHECK(end_and_forget_in_a_sink(false) == kNoProblem);
}

TEST_CASE("the loop: a request ends for its text's reason: a stop token, or all its tokens") {
  std::vector<GenerationRequest> tasks = {{make_request(5, 8, 1)}, {make_request(6, 4, 2)}};
  tasks[0].request.stop_tokens = {served_alone(tasks[0]).front().tokens[3]};
  Serving serving({});
  REQUIRE(serve(serving, tasks) == kNoProblem);
  CHECK(serving.engine.output(0).finish_reason == FinishReason::kStop);
  CHECK(serving.engine.output(1).finish_reason == FinishReason::kLength);
}

TEST_CASE("the loop: a step's schedule is reported before its pass, and its pass when the tokens are in the cache") {
  Serving serving({});
  std::vector<std::string> calls;
  serving.engine.on_pass([&](const stage::RaggedBatch&) { calls.emplace_back("on_pass"); });
  tests::cpu_runner(serving.engine).on_layer([&](int layer) {
    if (layer == 0) {
      calls.emplace_back("the pass");
    }
  });
  serving.on_token = [&](int id, int, Token) {
    calls.push_back(common::format("token of %d", id));
    CHECK(serving.engine.output(id).admission == 0.0);  // known when the first token is handed out
  };
  serving.submit({make_request(5, 1, 1)});
  serving.submit({make_request(7, 2, 2)});
  REQUIRE(serving.run() == kNoProblem);
  CHECK(calls == std::vector<std::string>{"on_pass", "the pass", "token of 0", "token of 1", "on_pass", "the pass",
                                          "token of 1"});
  REQUIRE(serving.reports.size() == 2);
  CHECK(serving.reports[0].num_running == 2);  // both ran, though request 0 has ended with this step
  CHECK(serving.reports[0].usage.used == 12);  // both prompts, before request 0's blocks are free
  CHECK(serving.reports[1].usage.used == 8);
  stage::VirtualClock clock;  // is told of passes with as many tokens
  clock.step_computed(12);
  clock.step_computed(1);
  CHECK(serving.clock.now() == clock.now());
}

TEST_CASE("the loop: a step that throws keeps none of the slots that were reserved for it") {
  struct InterruptedScheduler : stage::Scheduler {
    using Scheduler::Scheduler;
    stage::ScheduledStep schedule() override {
      Scheduler::schedule();
      throw std::bad_alloc();
    }
  };
  const stage::EngineOptions options = Serving::engine_options({});
  stage::VirtualClock clock;
  stage::Engine engine(tests::small_model(), options, stage::make_runner(tests::small_model(), options), clock,
                       [](stage::KvCacheManager& manager, const stage::SchedulerOptions& scheduler, bool prefix_cache) {
                         return std::make_unique<InterruptedScheduler>(manager, scheduler, prefix_cache);
                       });
  engine.submit({make_request(5, 3)});
  CHECK_THROWS_AS(engine.step(), std::bad_alloc);
  CHECK(engine.manager().usage().reserved == 0);
}

TEST_CASE("reports: requests run that have no token in a step for want of budget") {
  ServingOptions options;
  options.scheduler.token_budget = 2;
  Serving serving(options);
  serving.submit(sampled_request(1, 3, 2));
  serving.submit({make_request(1, 3)});
  REQUIRE(serving.run() == kNoProblem);
  REQUIRE(serving.reports.size() > 2);
  CHECK(serving.reports[1].num_tokens == 2);  // both of request 0
  CHECK(serving.reports[1].num_running == 2);
}

TEST_CASE("a stop string ends the samples in which it comes, and no other, whatever runs ahead") {
  // Token i is spelled "<i>".
  const auto decode = [](std::span<const Token> tokens) {
    std::string text;
    for (const Token token : tokens) {
      text += "<" + std::to_string(token) + ">";
    }
    return text;
  };
  for (const bool run_ahead : {false, true}) {
    std::vector<GenerationRequest> tasks = {{make_request(9, 12, 1)}, sampled_request(7, 8, 3, 2)};
    for (GenerationRequest& task : tasks) {
      const std::vector<Token> text = served_alone(task).back().tokens;
      task.request.stop_strings = common::StopStrings({"absent", decode(std::span(text).subspan(3, 2))}, decode);
    }
    ServingOptions options;
    options.scheduler.run_ahead = run_ahead;
    Serving serving(options);
    CHECK(serve(serving, tasks) == kNoProblem);
    for (const int id : {0, 1}) {
      const common::Completion& stopped = serving.engine.output(id).completions.back();
      CHECK(stopped.tokens.size() == 5);  // with what the stop string is made of
      CHECK(stopped.finish_reason == FinishReason::kStop);
    }
    CHECK(serving.engine.output(1).completions.front().finish_reason == FinishReason::kLength);
  }
}

TEST_CASE("log-probabilities are handed out with their tokens, and change none") {
  for (GenerationRequest task : {GenerationRequest{make_request(9, 6, 1)}, sampled_request(7, 6, 2, 2)}) {
    const std::vector<common::Completion> expected = served_alone(task);
    task.request.num_logprobs = 2;
    Serving serving({});
    serving.on_token = [&](int id, int sample, Token token) {
      const common::Completion& part = serving.engine.output(id).completions[static_cast<std::size_t>(sample)];
      CHECK(part.logprobs.size() == part.tokens.size());
      CHECK(part.logprobs.back().drawn.token == token);
      CHECK(part.logprobs.back().best.size() == 2);
      CHECK(part.logprobs.back().best.front().logprob >= part.logprobs.back().drawn.logprob);
    };
    serving.submit(task);
    CHECK(serving.run() == kNoProblem);
    CHECK(compare_output(serving.engine.output(0), expected) == kNoProblem);
  }
}

TEST_CASE("a repetition penalty counts the prompt and the reply, in a batch as alone") {
  std::vector<GenerationRequest> tasks = mixed_requests();
  for (GenerationRequest& task : tasks) {
    task.request.sampling.repetition_penalty = 1.7F;
  }
  for (const bool run_ahead : {false, true}) {
    ServingOptions options;
    options.num_blocks = 24;  // some are preempted
    options.scheduler.run_ahead = run_ahead;
    Serving serving(options);
    CHECK(serve(serving, tasks) == kNoProblem);
    const std::vector<Token>& text = serving.engine.output(0).completions.front().tokens;
    CHECK(text != served_alone({make_request(9, 12, 1)}).front().tokens);
  }
}

TEST_CASE("the order of arrival changes no text") {
  std::vector<GenerationRequest> tasks = mixed_requests();
  for (int rotation = 0; rotation < 6; ++rotation) {
    std::rotate(tasks.begin(), tasks.begin() + 1, tasks.end());
    ServingOptions options;
    options.num_blocks = 24;
    options.scheduler.token_budget = 12;
    Serving serving(options);
    CHECK(serve(serving, tasks) == kNoProblem);
  }
}

TEST_CASE("preempted by recomputation or by swapping, requests get the same texts (stage 8, invariants 3, 6 and 7)") {
  for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap, Preemption::kAuto}) {
    for (const int num_host_blocks : {0, 3, 40}) {
      for (const bool prefix_cache : {true, false}) {
        ServingOptions options;
        options.num_blocks = 13;
        options.block_size = 3;
        options.num_host_blocks = num_host_blocks;
        options.prefix_cache = prefix_cache;
        options.scheduler.token_budget = 20;
        options.scheduler.preemption = preemption;
        options.scheduler.run_ahead = num_host_blocks % 2 == 1;
        Serving serving(options);
        std::vector<GenerationRequest> tasks;
        tasks.reserve(7);
        for (int i = 0; i < 5; ++i) {
          tasks.push_back({make_request(5 + i, 14, i)});
        }
        tasks.push_back(sampled_request(5, 7, 3, 9));
        tasks.push_back({make_request(4, 9, 10)});
        CAPTURE(static_cast<int>(preemption), num_host_blocks, prefix_cache);
        CHECK(serve(serving, tasks) == kNoProblem);
        CHECK(preemptions(serving, true) + preemptions(serving, false) > 0);
        CHECK((preemptions(serving, true) > 0) == (preemption != Preemption::kRecompute && num_host_blocks > 0));
      }
    }
  }
}

TEST_CASE("texts stay the same when steps are scheduled ahead of the last tokens (stage 8, invariants 7 and 8)") {
  std::vector<GenerationRequest> tasks(6);
  for (int i = 0; i < 6; ++i) {
    tasks[static_cast<std::size_t>(i)] = {make_request(5 + i, 6 + 2 * i, i)};
  }
  // Two end at a stop token, which is known only after the next step has been enqueued.
  for (const std::size_t i : {std::size_t{2}, std::size_t{4}}) {
    tasks[i].request.stop_tokens = {served_alone(tasks[i]).front().tokens[4]};
  }
  int num_preempted = 0;
  for (const int num_blocks : {9, 12, 64}) {
    for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
      for (const int budget : {2, 7, 64}) {
        ServingOptions options;
        options.num_blocks = num_blocks;
        options.num_host_blocks = 30;
        options.scheduler.preemption = preemption;
        options.scheduler.token_budget = budget;
        std::vector<int> tokens_computed;
        for (const bool run_ahead : {false, true}) {
          options.scheduler.run_ahead = run_ahead;
          Serving serving(options);
          CAPTURE(num_blocks, static_cast<int>(preemption), budget, run_ahead);
          CHECK(serve(serving, tasks) == kNoProblem);
          num_preempted += preemptions(serving, preemption == Preemption::kSwap);
          const common::Timing timing = serving.engine.timing();
          tokens_computed.push_back(static_cast<int>(timing.prefill_tokens + timing.decode_tokens));
        }
        if (num_blocks == 64) {
          CHECK(tokens_computed[1] == tokens_computed[0] + 2);  // the two stop tokens
        }
      }
    }
  }
  CHECK(num_preempted > 10);
}

TEST_CASE("sampled texts do not depend on neighbours, preemption or running ahead (stage 8, invariants 7 and 8)") {
  std::vector<GenerationRequest> tasks;
  for (int i = 0; i < 6; ++i) {
    tasks.push_back(sampled_request(5 + i, 7 + 2 * i, i == 3 ? 3 : 1, i));
    common::SamplingOptions& sampling = tasks.back().request.sampling;
    sampling.top_k = i == 1 ? 20 : 0;
    sampling.top_p = i == 2 ? 0.9F : 1.0F;
    sampling.min_p = i == 4 ? 0.05F : 0.0F;
    sampling.repetition_penalty = i >= 4 ? 1.5F : 1.0F;
    sampling.presence_penalty = i == 3 ? 0.8F : 0.0F;
    sampling.frequency_penalty = i == 5 ? 0.6F : 0.0F;
    sampling.logit_bias = i == 2 ? std::vector<common::TokenBias>{{3, 2.0F}, {9, -4.0F}} : sampling.logit_bias;
  }
  tasks[0].request.stop_tokens = {served_alone(tasks[0]).front().tokens[4]};
  tasks.push_back({make_request(4, 9, 8)});
  int num_preempted = 0;
  for (const int num_blocks : {14, 64}) {
    for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
      for (const int budget : {3, 64}) {
        for (const bool run_ahead : {false, true}) {
          ServingOptions options;
          options.num_blocks = num_blocks;
          options.num_host_blocks = 30;
          options.scheduler.preemption = preemption;
          options.scheduler.token_budget = budget;
          options.scheduler.run_ahead = run_ahead;
          Serving serving(options);
          CAPTURE(num_blocks, static_cast<int>(preemption), budget, run_ahead);
          CHECK(serve(serving, tasks) == kNoProblem);
          num_preempted += preemptions(serving, preemption == Preemption::kSwap);
        }
      }
    }
  }
  CHECK(num_preempted > 4);
}

TEST_CASE(
    "running ahead: a request is preempted while its token is in flight, which is handed out and computed later") {
  for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
    ServingOptions options;
    options.num_blocks = 5;
    options.num_host_blocks = 5;
    options.scheduler.preemption = preemption;
    options.scheduler.run_ahead = true;
    Serving serving(options);
    int handed_out = 0;  // request 1's tokens
    serving.on_token = [&](int id, int, Token) { handed_out += id; };
    bool resumed = false;
    serving.engine.on_pass([&](const stage::RaggedBatch& batch) {
      if (!resumed && serving.engine.output(0).finished()) {
        resumed = true;
        CHECK(batch.context_lengths == std::vector{10});
        CHECK(batch.pending_tokens.empty());
      }
    });
    const std::vector<GenerationRequest> tasks = {{make_request(8, 6, 1)}, {make_request(9, 3, 2)}};
    serving.submit_all(tasks);
    const stage::SequenceGroup* victim = serving.engine.scheduler().waiting().back().get();
    CAPTURE(static_cast<int>(preemption));
    REQUIRE(serving.engine.step());  // both prompts, in two blocks and in three
    CHECK(victim->pending_row() == 1);
    CHECK(handed_out == 0);
    REQUIRE(serving.engine.step());  // request 0 needs a block, while request 1's first token is in flight
    CHECK(preemptions(serving, preemption == Preemption::kSwap) == 1);
    CHECK(handed_out == 1);
    CHECK_FALSE(victim->pending_row().has_value());
    CHECK(serving.problem() == kNoProblem);
    CHECK(serving.run() == kNoProblem);
    CHECK(resumed);
    for (const int id : {0, 1}) {
      const auto& task = tasks[static_cast<std::size_t>(id)];
      CHECK(compare_output(serving.engine.output(id), served_alone(task)) == kNoProblem);
    }
  }
}

TEST_CASE("a step's tokens are handed out once the next step is enqueued, if the server runs ahead") {
  for (const auto& [temperature, run_ahead] :
       {std::pair{0.0F, false}, std::pair{0.0F, true}, std::pair{1.0F, false}, std::pair{1.0F, true}}) {
    ServingOptions options;
    options.scheduler.run_ahead = run_ahead;
    Serving serving(options);
    int passes = 0;
    std::vector<int> passes_at_token;
    serving.engine.on_pass([&](const stage::RaggedBatch&) { passes += 1; });
    serving.on_token = [&](int, int, Token) { passes_at_token.push_back(passes); };
    GenerationRequest task{make_request(5, 4, 1)};
    task.request.sampling.temperature = temperature;
    CHECK(serve(serving, {task}) == kNoProblem);
    CHECK(passes == 4);
    INFO("for each token, how many passes had been enqueued when it was handed out; run_ahead: " << run_ahead);
    CHECK(passes_at_token == (run_ahead ? std::vector{2, 3, 4, 4} : std::vector{1, 2, 3, 4}));
  }
}

TEST_CASE("running ahead: full blocks are published when their step is collected, under the tokens that were drawn") {
  ServingOptions options;
  options.scheduler.run_ahead = true;
  Serving serving(options);
  const common::Request request = make_request(5, 12, 1);
  std::vector<Token> text = request.prompt;
  const std::vector<Token> reply = served_alone({request}).front().tokens;
  text.insert(text.end(), reply.begin(), reply.end());
  const auto num_found = [&] { return serving.engine.manager().prefix_cache().find(text, 0).size(); };
  serving.submit({request});
  REQUIRE(serving.engine.step());
  {
    INFO("the step that computes the prompt is in flight: its full block has no keys and values yet");
    CHECK(num_found() == 0);
  }
  CHECK(serving.run() == kNoProblem);
  INFO("blocks of 4 that are found for the prompt and the reply, 17 tokens: not under the placeholders, which are 0");
  CHECK(num_found() == 4);
}

TEST_CASE("running ahead: a step that cannot be prepared loses no token of the one before") {
  ServingOptions options;
  options.scheduler.run_ahead = true;
  Serving serving(options);
  int passes = 0;
  int handed_out = 0;
  serving.engine.on_pass([&](const stage::RaggedBatch&) {
    if (++passes == 3) {
      throw std::runtime_error("the third pass throws");
    }
  });
  serving.on_token = [&](int, int, Token) { handed_out += 1; };
  serving.submit({make_request(5, 8, 1)});
  CHECK(serving.run() == kNoProblem);
  CHECK(serving.engine.output(0).finish_reason == common::FinishReason::kFailed);
  INFO("the third pass throws: the tokens of the first two are handed out nevertheless");
  CHECK(handed_out == 2);
}

TEST_CASE("a group that is recomputed shares what it shared before, and fits") {
  // Three samples of a prompt of 12 tokens: 3 blocks in common and 3 for each rest, 12 of the 13 there are.
  ServingOptions options;
  options.num_blocks = 13;
  options.prefix_cache = false;
  options.scheduler.token_budget = 16;
  Serving serving(options);
  const std::vector<GenerationRequest> tasks = {{make_request(8, 22, 1)}, sampled_request(12, 12, 3, 2)};
  CHECK(serve(serving, tasks) == kNoProblem);
  CHECK(preemptions(serving, false) > 0);
  int max_used = 0;
  for (const stage::StepReport& report : serving.reports) {
    max_used = std::max(max_used, report.usage.used);
  }
  CHECK(max_used <= 13 * 4);
}

TEST_CASE("ten texts of 1,024 tokens in a pool for five") {
  if (tests::kSanitized) {
    return;  // minutes, and nothing that shorter texts do not do
  }
  for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
    ServingOptions options;
    options.block_size = 16;
    options.num_blocks = 5 * 1024 / 16;
    options.num_host_blocks = options.num_blocks;
    options.scheduler.token_budget = 256;
    options.scheduler.preemption = preemption;
    common::LlamaConfig config = tests::small_model().config();
    config.context_length = 1024;
    const common::Llama model(config, 3);
    Serving serving(options, model);
    std::vector<GenerationRequest> tasks;
    for (int i = 0; i < 10; ++i) {
      tasks.push_back({make_request(400 + i, 1024 - 400 - i, i)});
      serving.submit(tasks.back());
    }
    CHECK(serving.run() == kNoProblem);
    CHECK(preemptions(serving, preemption == Preemption::kSwap) > 0);
    for (int i = 0; i < 10; i += 3) {
      CHECK(compare_output(serving.engine.output(i), served_alone(tasks[static_cast<std::size_t>(i)], model)) ==
            kNoProblem);
    }
  }
}

TEST_CASE("the golden prompts get the golden texts in batches, with preemption of either kind") {
  for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
    for (const int num_blocks : {512, 14}) {
      ServingOptions options;
      options.block_size = 16;
      options.num_blocks = num_blocks;
      options.num_host_blocks = 20;
      options.scheduler.preemption = preemption;
      options.scheduler.token_budget = 40;
      Serving serving(options, tests::bundled().llama);
      for (const tests::GoldenCase& golden : tests::golden_cases()) {
        serving.submit({tests::greedy_request(golden.prompt, static_cast<int>(golden.generated_tokens.size()))});
      }
      CHECK(serving.run() == kNoProblem);
      CHECK((num_blocks > 100 || tests::kSanitized || preemptions(serving, preemption == Preemption::kSwap) > 0));
      for (std::size_t i = 0; i < tests::golden_cases().size(); ++i) {
        CHECK(tests::compare_tokens(serving.engine.output(static_cast<int>(i)).completions.front().tokens,
                                    tests::golden_cases()[i].generated_tokens) == kNoProblem);
      }
    }
  }
}

TEST_CASE("a step is one forward pass, and its copies are one batch") {
  Serving serving({});
  serving.submit(sampled_request(6, 5, 4));
  serving.submit(sampled_request(5, 5, 3, 1));
  CHECK(serving.run() == kNoProblem);
  const auto counters = serving.engine.counters();
  CHECK(common::counter(counters, "forward_passes") == static_cast<double>(serving.reports.size()));
  CHECK(serving.reports.size() == 5);
  CHECK(common::counter(counters, "blocks_copied") == 3 + 2);
}

TEST_CASE("several samples with room reserved ahead: a request that is not rejected is served") {
  for (const int block_size : {1, 3, 4}) {
    int num_served = 0;
    for (int num_blocks = 1; num_served < 3; ++num_blocks) {
      REQUIRE(num_blocks < 60);
      ServingOptions options;
      options.block_size = block_size;
      options.num_blocks = num_blocks;
      options.static_batches = true;
      options.reserve_ahead = true;
      Serving serving(options);
      const GenerationRequest request = sampled_request(6, 7, 2);
      const int id = serving.submit(request);
      CAPTURE(block_size, num_blocks);
      CHECK(serving.run() == kNoProblem);
      if (serving.engine.output(id).finish_reason != FinishReason::kRejected) {
        CHECK(compare_output(serving.engine.output(id), served_alone(request)) == kNoProblem);
        num_served += 1;
      }
    }
  }
}

TEST_CASE("a step that throws is over: a request can be stopped at once, and further steps work") {
  Serving serving({});
  stage::KvCacheManager& manager = serving.engine.manager();
  constexpr int kOther = 1000000;
  REQUIRE(manager.allocate(kOther, 64 * 4));
  const int first = serving.submit({make_request(5, 3, 1)});
  const int second = serving.submit({make_request(5, 3, 2)});
  CHECK(tests::is_refused_as_a_bug([&] { serving.engine.step(); }));  // sequence kOther holds the whole cache
  serving.engine.stop(first, FinishReason::kCancelled);
  CHECK(serving.engine.output(first).finished());
  manager.free(kOther);
  CHECK(serving.run() == kNoProblem);
  CHECK(compare_output(serving.engine.output(second), served_alone({make_request(5, 3, 2)})) == kNoProblem);
}

TEST_CASE("in a batch, sequences with one token come first, and every request gets its own row") {
  // The second request has a prompt of one token, in the same step as the first one's prompt; the third is sampled
  // twice.
  std::vector<GenerationRequest> requests = {
      {make_request(7, 6, 0)}, {make_request(1, 6, 1)}, sampled_request(9, 5, 2, 2)};
  for (const bool run_ahead : {false, true}) {
    ServingOptions options;
    options.scheduler.run_ahead = run_ahead;
    options.scheduler.token_budget = 12;
    Serving serving(options);
    int num_mixed = 0;
    serving.engine.on_pass([&](const stage::RaggedBatch& batch) {
      bool has_longer = false;
      for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
        const bool is_single = batch.num_queries(i) == 1;
        CHECK_FALSE((is_single && has_longer));
        num_mixed += is_single && batch.num_queries(batch.num_sequences() - 1) > 1 ? 1 : 0;
        has_longer = has_longer || !is_single;
      }
    });
    for (const GenerationRequest& request : requests) {
      serving.engine.submit(request);
    }
    CHECK(serving.run() == kNoProblem);
    CHECK(num_mixed > 0);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CHECK(compare_output(serving.engine.output(static_cast<int>(i)), served_alone(requests[i])) == kNoProblem);
    }
  }
}

TEST_CASE("sequence ids are reused, however many branches a search has had") {
  Serving serving({});
  int largest = 0;
  serving.engine.on_pass([&](const stage::RaggedBatch& batch) {
    largest = std::max(largest, *std::max_element(batch.sequences.begin(), batch.sequences.end()));
  });
  for (int i = 0; i < 20; ++i) {
    serving.submit(beam_request(4, 8, 4, i % 5));
    CHECK(serving.run() == kNoProblem);
  }
  CHECK(largest < 8);  // 4 branches, and at most as many children while their parents live
}

TEST_CASE("a preempted request finds its own blocks again") {
  // Two texts of 4 blocks in a pool of 6: the second is preempted, and what it has computed is cached until the first
  // needs it.
  ServingOptions options;
  options.num_blocks = 6;
  Serving serving(options);
  CHECK(serve(serving, {{make_request(6, 10, 1)}, {make_request(6, 10, 2)}}) == kNoProblem);
  CHECK(preemptions(serving, false) > 0);
  CHECK(common::counter(serving.engine.counters(), "prefix_tokens_saved") > 0);
}

TEST_CASE("a step has room for at least one token and one sequence") {
  for (const auto& [token_budget, max_sequences] : {std::pair{0, 4}, {8, 0}, {-1, 4}}) {
    stage::EngineOptions options;
    options.scheduler = {.token_budget = token_budget, .max_sequences = max_sequences};
    options.gpu.device = stage::Device::kCpu;
    CHECK_THROWS_AS(stage::Engine(tests::small_model(), options), common::CheckError);
  }
}

TEST_CASE("room for swapped-out tokens is rounded up to whole blocks") {
  for (const auto& [num_host_slots, num_host_blocks] : {std::pair{0, 0}, {1, 1}, {16, 1}, {17, 2}}) {
    stage::EngineOptions options;
    options.block_size = 16;
    options.num_host_slots = num_host_slots;
    options.gpu.device = stage::Device::kCpu;
    stage::Engine engine(tests::small_model(), options);
    CHECK(engine.manager().num_free_host_blocks() == num_host_blocks);
  }
}

// ---- Requests at the edge ------------------------------------------------------------------------------------------

TEST_CASE("what can never be served is rejected with the reason, and the others are served (stage 8, invariant 4)") {
  ServingOptions options;
  options.num_blocks = 8;
  options.scheduler.token_budget = 6;
  options.scheduler.max_sequences = 5;
  Serving serving(options);
  stage::Engine& engine = serving.engine;
  const auto error = [&](const GenerationRequest& task) {
    const int id = engine.submit(task);
    CHECK(engine.output(id).finish_reason == FinishReason::kRejected);
    CHECK(engine.output(id).finished());
    return engine.output(id).error;
  };
  CHECK(tests::contains(error({make_request(0, 3)}), "empty"));
  CHECK(tests::contains(error({make_request(3, 0)}), "no new tokens"));
  CHECK(tests::contains(error({make_request(40, 9)}), "context"));
  CHECK(tests::contains(error({make_request(30, 4)}), "slots"));  // 33 tokens in the cache
  CHECK(tests::contains(error(sampled_request(4, 4, 6)), "6 sequences"));
  CHECK(tests::contains(error(sampled_request(4, 4, 0)), "0 sequences"));
  CHECK(tests::contains(error(sampled_request(6, 16, 2)), "blocks"));  // 1 in common and 5 for each rest
  GenerationRequest unknown{make_request(4, 4)};
  unknown.request.prompt[2] = tests::kSmallVocabulary;
  CHECK(tests::contains(error(unknown), "vocabulary"));
  GenerationRequest hot{make_request(4, 4)};
  hot.request.sampling.temperature = std::numeric_limits<float>::quiet_NaN();
  CHECK(tests::contains(error(hot), "temperature"));
  GenerationRequest outside{make_request(4, 4)};
  outside.request.sampling.min_p = 1.5F;
  CHECK(tests::contains(error(outside), "min_p"));

  const GenerationRequest one{make_request(4, 1)};
  const GenerationRequest most = sampled_request(6, 10, 2);  // 1 and twice 3: 7 of 8 blocks
  const GenerationRequest whole{make_request(20, 12)};       // 31 tokens in the cache: all 8 blocks
  const int first = engine.submit(one);
  engine.submit(most);
  engine.submit(whole);
  CHECK(serving.run() == kNoProblem);
  CHECK(compare_output(engine.output(first), served_alone(one)) == kNoProblem);
  CHECK(compare_output(engine.output(first + 1), served_alone(most)) == kNoProblem);
  CHECK(compare_output(engine.output(first + 2), served_alone(whole)) == kNoProblem);
}

TEST_CASE("a request that fills the whole cache is served, as its last token is never stored (stage 8, invariant 4)") {
  for (const int max_new_tokens : {13, 14}) {  // 20 + 13 - 1 tokens are 8 blocks
    ServingOptions options;
    options.num_blocks = 8;
    Serving serving(options);
    const GenerationRequest request{make_request(20, max_new_tokens)};
    const int id = serving.submit(request);
    CHECK(serving.run() == kNoProblem);
    CAPTURE(max_new_tokens, serving.engine.output(id).error);
    CHECK((serving.engine.output(id).finish_reason == FinishReason::kRejected) == (max_new_tokens == 14));
  }
}

TEST_CASE("a request can be cancelled in every state, and leaves nothing behind (stage 8, invariant 8)") {
  ServingOptions options;
  options.num_blocks = 12;
  options.num_host_blocks = 12;
  options.scheduler.token_budget = 10;
  options.scheduler.preemption = Preemption::kSwap;
  options.scheduler.run_ahead = GENERATE(false, true);
  const std::vector<GenerationRequest> tasks = {
      {make_request(16, 14, 1)}, sampled_request(8, 9, 3, 2), {make_request(20, 9, 3)}, beam_request(5, 9, 2, 4)};
  bool swapped_was_cancelled = false;
  for (int victim = 0; victim < 4; ++victim) {
    for (int steps = 0; steps < 30; ++steps) {
      Serving serving(options);
      serving.submit_all(tasks);
      for (int i = 0; i < steps; ++i) {
        serving.engine.step();
      }
      if (serving.engine.output(victim).finished()) {
        break;
      }
      for (const int sequence : serving.engine_manager().sequences()) {
        CHECK_FALSE(serving.engine_manager().is_swapped(sequence));
      }
      const int free_before = serving.engine_manager().num_free_host_blocks();
      serving.engine.stop(victim, FinishReason::kCancelled);
      swapped_was_cancelled = swapped_was_cancelled || serving.engine_manager().num_free_host_blocks() > free_before;
      CAPTURE(victim, steps);
      CHECK(serving.engine.output(victim).finish_reason == FinishReason::kCancelled);
      CHECK(serving.run() == kNoProblem);
      for (int i = 0; i < 4; ++i) {
        if (i != victim) {
          CHECK(compare_output(serving.engine.output(i), served_alone(tasks[static_cast<std::size_t>(i)])) ==
                kNoProblem);
        }
      }
    }
  }
  CHECK(swapped_was_cancelled);
}

TEST_CASE("a callback may stop its own request, stop others and submit new ones") {
  ServingOptions options;
  options.scheduler.run_ahead = GENERATE(false, true);
  Serving serving(options);
  const std::vector<GenerationRequest> tasks = {
      {make_request(5, 9, 1)}, {make_request(6, 9, 2)}, {make_request(7, 9, 3)}};
  serving.submit_all(tasks);
  int added = -1;
  serving.on_token = [&](int id, int, Token) {
    const std::size_t count = serving.engine.output(id).completions.front().tokens.size();
    if (id == 0 && count == 3) {
      serving.engine.stop(0, FinishReason::kStop);
      serving.engine.stop(2, FinishReason::kCancelled);
      added = serving.submit({make_request(4, 4, 4)});
    }
  };
  CHECK(serving.run() == kNoProblem);
  CHECK(serving.engine.output(0).completions.front().tokens.size() == 3);
  CHECK(serving.engine.output(0).finish_reason == FinishReason::kStop);
  CHECK(serving.engine.output(2).completions.front().tokens.size() == 2);
  CHECK(compare_output(serving.engine.output(1), served_alone(tasks[1])) == kNoProblem);
  CHECK(compare_output(serving.engine.output(added), served_alone({make_request(4, 4, 4)})) == kNoProblem);
}

TEST_CASE("a request that ends between two steps is in the next report, and in no other") {
  Serving serving({});
  stage::Engine& engine = serving.engine;
  const int served = engine.submit({make_request(5, 6, 1)});
  const int rejected = engine.submit({make_request(0, 3)});
  const int stopped = engine.submit({make_request(5, 9, 2)});
  engine.step();
  CHECK(serving.reports.back().ended == std::vector{rejected});
  engine.stop(stopped, FinishReason::kCancelled);
  engine.step();
  CHECK(serving.reports.back().ended == std::vector{stopped});
  engine.step();
  CHECK(serving.reports.back().ended.empty());
  while (engine.step()) {
  }
  CHECK(serving.reports.back().ended == std::vector{served});
}

TEST_CASE("a callback after a step may end requests: the report that it has got stays as it is") {
  Serving serving({});
  stage::Engine& engine = serving.engine;
  const int first = engine.submit({make_request(5, 2, 1)});
  std::vector<int> others;
  for (int salt = 2; salt < 12; ++salt) {
    others.push_back(engine.submit({make_request(5, 9, salt)}));
  }
  std::vector<std::vector<int>> ended;
  engine.on_step([&](const stage::StepReport& report) {
    const std::vector<int> before = report.ended;
    for (const int id : others) {
      if (!report.ended.empty()) {
        engine.stop(id, FinishReason::kCancelled);
      }
    }
    CHECK(report.ended == before);
    ended.push_back(report.ended);
  });
  engine.step();
  engine.step();
  engine.submit({make_request(4, 1, 1)});
  engine.step();
  REQUIRE(ended.size() == 3);
  CHECK(ended[0].empty());
  CHECK(ended[1] == std::vector{first});
  REQUIRE(ended[2].size() == others.size() + 1);
  CHECK(std::equal(others.begin(), others.end(), ended[2].begin()));
}

// ---- Failures ------------------------------------------------------------------------------------------------------

TEST_CASE("a callback that throws fails its request and no other (stage 8, invariant 8)") {
  ServingOptions options;
  options.scheduler.run_ahead = GENERATE(false, true);
  for (int at = 1; at < 6; ++at) {
    Serving serving(options);
    const std::vector<GenerationRequest> tasks = {
        {make_request(5, 6, 1)}, sampled_request(6, 7, 2, 2), {make_request(7, 8, 3)}};
    serving.submit_all(tasks);
    int count = 0;
    serving.on_token = [&](int id, int, Token) {
      count += id == 1 ? 1 : 0;
      if (id == 1 && count == at) {
        throw std::runtime_error("the connection is closed");
      }
    };
    CHECK(serving.run() == kNoProblem);
    CHECK(serving.engine.output(1).finish_reason == FinishReason::kFailed);
    CHECK(serving.engine.output(1).error == "the connection is closed");
    CHECK(compare_output(serving.engine.output(0), served_alone(tasks[0])) == kNoProblem);
    CHECK(compare_output(serving.engine.output(2), served_alone(tasks[2])) == kNoProblem);
  }
}

TEST_CASE("a run that is interrupted cancels its requests, and its callback is not called again") {
  for (const bool by_arrivals : {false, true}) {
    Serving serving({});
    int num_others = 0;
    serving.on_token = [&](int, int, Token) { num_others += 1; };
    serving.submit({make_request(5, 3, 2)});
    constexpr int kOther = 1000000;
    REQUIRE(serving.engine.manager().allocate(kOther, 64 * 4));  // the whole cache
    const std::vector<common::Request> requests = {make_request(5, 3, 1)};
    int num_tokens = 0;
    const auto on_token = [&](int, int, Token) { num_tokens += 1; };
    CHECK(tests::is_refused_as_a_bug([&] {
      if (by_arrivals) {
        Measured measured(serving);
        common::serve(measured.engine, {{0.0, {requests[0]}}}, {.on_token = on_token});
      } else {
        serving.engine.run(requests, [&](int, Token) { num_tokens += 1; });
      }
    }));
    CHECK_THROWS_AS(serving.engine.output(1), common::CheckError);  // forgotten
    serving.engine.on_step([&](const stage::StepReport& report) { serving.reports.push_back(report); });
    serving.engine.manager().free(kOther);
    REQUIRE(serving.run() == kNoProblem);
    CAPTURE(by_arrivals);
    CHECK(num_tokens == 0);
    CHECK(num_others == 3);
    serving.engine.run(requests, [&](int, Token) { num_tokens += 1; });
    CHECK(num_tokens == 3);
  }
}

TEST_CASE("a pass that throws in any layer is repeated for each request, and no text changes (stage 8, invariant 8)") {
  for (const int layer : {0, 1}) {
    for (int at = 0; at < 12; ++at) {
      ServingOptions options;
      options.num_blocks = 16;
      options.scheduler.token_budget = 16;
      options.scheduler.run_ahead = at % 2 == 0;
      Serving serving(options);
      int pass = 0;
      tests::cpu_runner(serving.engine).on_layer([&](int current) {
        pass += current == 0 ? 1 : 0;
        if (pass - 1 == at && current == layer) {
          pass += 1;  // once
          throw std::runtime_error("a transient fault");
        }
      });
      CAPTURE(layer, at);
      CHECK(serve(serving, mixed_requests()) == kNoProblem);
    }
  }
}

TEST_CASE("a request is stopped and forgotten while its step is in flight, before a pass that throws") {
  const std::vector<GenerationRequest> tasks = {{make_request(5, 8, 1)}, {make_request(6, 8, 2)}};
  for (const std::size_t victim : {std::size_t{0}, std::size_t{1}}) {
    for (int steps = 0; steps < 8; ++steps) {
      ServingOptions options;
      options.scheduler.run_ahead = true;
      Serving serving(options);
      serving.submit_all(tasks);
      for (int i = 0; i < steps; ++i) {
        serving.engine.step();
      }
      serving.engine.stop(static_cast<int>(victim), FinishReason::kCancelled);
      serving.engine.forget(static_cast<int>(victim));
      CAPTURE(victim, steps);
      CHECK(tests::is_refused_as_a_bug([&] { serving.engine.output(static_cast<int>(victim)); }));
      bool has_thrown = false;
      tests::cpu_runner(serving.engine).on_layer([&](int) {
        if (!std::exchange(has_thrown, true)) {
          throw std::runtime_error("a fault");
        }
      });
      CHECK(serving.run() == kNoProblem);
      CHECK(has_thrown);
      // Alone in its step, the other request fails with the pass.
      const stage::RequestOutput& other = serving.engine.output(1 - static_cast<int>(victim));
      CHECK(other.finish_reason == FinishReason::kFailed);
      CHECK(compare_output(other, served_alone(tasks[1 - victim]), true) == kNoProblem);
    }
  }
}

TEST_CASE("running ahead: a sink may end and forget its own request, and others of the step") {
  CHECK(end_and_forget_in_a_sink(true) == kNoProblem);
}

TEST_CASE("a pass that throws loses no copy, of a write to a shared block or of a swap (stage 8, invariant 8)") {
  // Every pass throws once, in its first or its last layer, so that every planned copy is in a pass that is repeated.
  for (const int layer : {0, 1}) {
    for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
      ServingOptions options;
      options.num_blocks = 14;
      options.block_size = 3;
      options.num_host_blocks = 40;
      options.scheduler.token_budget = 20;
      options.scheduler.preemption = preemption;
      options.scheduler.run_ahead = layer == 0;
      Serving serving(options);
      std::size_t thrown_at = 1000;  // in which step
      tests::cpu_runner(serving.engine).on_layer([&](int current) {
        if (current == layer && thrown_at != serving.reports.size()) {
          thrown_at = serving.reports.size();
          throw std::runtime_error("a transient fault");
        }
      });
      CAPTURE(layer, static_cast<int>(preemption));
      // A step of a single request would fail for good: two run at any time but the end.
      std::vector<GenerationRequest> requests = {{make_request(5, 14, 0)},
                                                 {make_request(6, 14, 1)},
                                                 sampled_request(5, 7, 3, 2),
                                                 sampled_request(4, 9, 2, 3),
                                                 {make_request(7, 14, 4)}};
      serving.submit_all(requests);
      CHECK(serving.run() == kNoProblem);
      int num_finished = 0;
      for (std::size_t i = 0; i < requests.size(); ++i) {
        const stage::RequestOutput& output = serving.engine.output(static_cast<int>(i));
        const bool has_failed = output.finish_reason == FinishReason::kFailed;
        CHECK(compare_output(output, served_alone(requests[i]), has_failed) == kNoProblem);
        num_finished += has_failed ? 0 : 1;
      }
      CHECK(num_finished >= 3);
      CHECK(common::counter(serving.engine.counters(), "blocks_copied") > 0);
    }
  }
}

TEST_CASE("a request whose own pass throws again fails, and the others are served to the end (stage 8, invariant 8)") {
  std::vector<GenerationRequest> tasks = mixed_requests();
  std::fill(tasks[4].request.prompt.end() - 4, tasks[4].request.prompt.end(), 1);
  ServingOptions options;
  options.scheduler.token_budget = 32;
  options.scheduler.run_ahead = GENERATE(false, true);
  options.num_blocks = 20;
  Serving serving(options);
  serving.submit_all(tasks);
  // A pass whose batch holds the end of that prompt fails.
  bool alone = false;
  serving.engine.on_pass([&](const stage::RaggedBatch& batch) {
    const std::vector<Token>& prompt = tasks[4].request.prompt;
    const bool has_it =
        std::search(batch.tokens.begin(), batch.tokens.end(), prompt.end() - 4, prompt.end()) != batch.tokens.end();
    alone = alone || (has_it && batch.num_sequences() == 1);
    if (has_it) {
      throw std::runtime_error("a poisonous prompt");
    }
  });
  CHECK(serving.run() == kNoProblem);
  CHECK(alone);
  for (int i = 0; i < 6; ++i) {
    CAPTURE(i);
    if (i == 4) {
      CHECK(serving.engine.output(i).finish_reason == FinishReason::kFailed);
      CHECK(serving.engine.output(i).error == "a poisonous prompt");
    } else {
      CHECK(compare_output(serving.engine.output(i), served_alone(tasks[static_cast<std::size_t>(i)])) == kNoProblem);
    }
  }
}

TEST_CASE("blocks are taken from outside at the k-th step and freed later: the server continues, and no text changes") {
  for (int k = 0; k < 20; ++k) {
    ServingOptions options;
    options.num_blocks = 20;
    options.num_host_blocks = 4;
    options.scheduler.preemption = k % 2 == 0 ? Preemption::kRecompute : Preemption::kSwap;
    options.scheduler.run_ahead = k % 3 == 0;
    Serving serving(options);
    std::vector<GenerationRequest> tasks;
    for (int i = 0; i < 4; ++i) {
      tasks.push_back({make_request(6 + i, 16, i)});
      serving.submit(tasks.back());
    }
    constexpr int kOther = 1000000;
    bool taken = false;
    for (int step = 0; serving.engine.step(); ++step) {
      stage::KvCacheManager& manager = serving.engine.manager();
      if (step == k && !manager.free_blocks().empty()) {
        taken = manager.allocate(kOther, 4 * std::min(9, static_cast<int>(manager.free_blocks().size())));
      } else if (taken && step == k + 7) {
        manager.free(kOther);
        taken = false;
      }
    }
    if (taken) {
      serving.engine.manager().free(kOther);
    }
    CHECK(serving.leak() == kNoProblem);
    for (int i = 0; i < 4; ++i) {
      CHECK(compare_output(serving.engine.output(i), served_alone(tasks[static_cast<std::size_t>(i)])) == kNoProblem);
    }
  }
}

TEST_CASE("requests that are stopped between any two steps leave nothing behind, and the engine may end at once") {
  for (int steps = 0; steps < 25; ++steps) {
    stage::EngineOptions options;
    options.num_slots = 48;
    options.block_size = 4;
    options.num_host_slots = 48;
    options.scheduler.preemption = Preemption::kSwap;
    options.scheduler.run_ahead = steps % 2 == 1;
    options.gpu.device = stage::Device::kCpu;
    stage::Engine engine(tests::small_model(), options);
    for (const GenerationRequest& task : mixed_requests()) {
      engine.submit(task);
    }
    for (int i = 0; i < steps; ++i) {
      engine.step();
    }
    for (int id = 0; id < engine.num_requests(); ++id) {
      engine.stop(id, FinishReason::kCancelled);
    }
    CHECK(engine.manager().usage().reserved == 0);
    CHECK(engine.manager().num_free_host_blocks() == 12);
  }
}

// ---- What is measured ----------------------------------------------------------------------------------------------

TEST_CASE("times: a virtual clock counts steps and tokens") {
  Serving serving({});
  Measured measured(serving);
  const common::RequestResult output = measured.run({{0.0, {make_request(5, 3)}}}).front();
  const std::vector<double> expected = {1e-3 + 5e-4, 2e-3 + 6e-4, 3e-3 + 7e-4};
  REQUIRE(output.token_times.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(std::abs(output.token_times[i] - expected[i]) < 1e-12);
  }
  const common::Tally& tally = measured.tally;
  CHECK(std::abs(tally.first_token_seconds.spread().mean - 1.5e-3) < 1e-12);
  CHECK(std::abs(tally.between_tokens_seconds.spread().p99 - 1.1e-3) < 1e-12);
  CHECK(std::abs(tally.output_tokens_per_second() - 3 / 3.7e-3) < 1e-6);
  CHECK(tally.steps.tokens == 7);
  CHECK(tally.steps.padded_tokens == 7);
}

TEST_CASE("times: the last chunk of a prompt belongs to the prompt, even if it is a single token") {
  for (const int budget : {1, 4, 64}) {
    ServingOptions options;
    options.scheduler.token_budget = budget;
    Serving serving(options);
    CAPTURE(budget);
    CHECK(serve(serving, {{make_request(5, 4, 1)}, {make_request(9, 3, 2)}}) == kNoProblem);
    CHECK(serving.engine.timing().prefill_tokens == 5 + 9);
    CHECK(serving.engine.timing().decode_tokens == 3 + 2);  // the last token of a text is never computed
  }
}

TEST_CASE("metrics: steps in which all sequences decode are counted, however many a request has") {
  for (const int num_samples : {1, 3}) {
    Serving serving(ServingOptions{});
    Measured measured(serving);
    measured.run({{0.0, {sampled_request(5, 6, num_samples).request, num_samples}}});
    CAPTURE(num_samples);
    CHECK(measured.tally.decode_steps == 4);  // of five: before the first one the prompt was computed
    CHECK(measured.tally.decode_tokens == 4 * num_samples);
  }
}

TEST_CASE("metrics: a step that computes a prompt's last token, or one token of it, does not only decode") {
  ServingOptions options;
  options.scheduler.token_budget = 1;
  Serving serving(options);
  Measured measured(serving);
  measured.run({{0.0, {make_request(7, 4)}}});
  CHECK(measured.tally.decode_steps == 2);
}

TEST_CASE("forget: the output of a request that has ended goes as soon as those before it are forgotten") {
  Serving serving(ServingOptions{});
  CHECK(serve(serving, {{make_request(5, 3, 1)}, {make_request(4, 3, 2)}, {make_request(3, 3, 3)}}) == kNoProblem);
  serving.engine.forget(1);
  CHECK(serving.engine.output(0).completions.front().tokens.size() == 3);
  serving.engine.forget(0);
  CHECK_THROWS_AS(serving.engine.output(0), common::CheckError);
  CHECK_THROWS_AS(serving.engine.output(1), common::CheckError);
  CHECK(serving.engine.output(2).completions.front().tokens.size() == 3);
  CHECK(serving.engine.num_requests() == 3);
  CHECK(serving.engine.submit({make_request(2, 1)}) == 3);
}

TEST_CASE(
    "running ahead: what a step in flight has computed is not taken for that of a request that got its sequence's id") {
  Serving serving({.scheduler = {.headroom = 0, .run_ahead = true}});
  const GenerationRequest first = {make_request(8, 4)};
  const GenerationRequest second = {make_request(8, 4, 1)};
  serving.submit(first);
  REQUIRE(serving.engine.step());  // its prompt is computed, two blocks
  serving.engine.stop(0, FinishReason::kCancelled);
  serving.submit(second);
  REQUIRE(serving.run().empty());
  CHECK(compare_output(serving.engine.output(1), served_alone(second)).empty());
  serving.submit(first);
  REQUIRE(serving.run().empty());
  CHECK(serving.engine.output(2).cached_tokens == 0);
  CHECK(compare_output(serving.engine.output(2), served_alone(first)).empty());
}

TEST_CASE("counters and the numbers of steps: a server that runs ahead has one step more, which computes nothing") {
  std::vector<common::Counter> counters[2];
  for (const bool run_ahead : {false, true}) {
    ServingOptions options;
    options.block_size = 16;
    options.scheduler.run_ahead = run_ahead;
    Serving serving(options);
    CHECK(serve(serving, {{make_request(6, 4)}}) == kNoProblem);
    counters[run_ahead ? 1 : 0] = serving.engine.counters();
    CHECK(serving.reports.size() == (run_ahead ? 5 : 4));
    serving.submit({make_request(5, 2)});
    CHECK(serving.run() == kNoProblem);
    REQUIRE(serving.reports.size() == (run_ahead ? 8 : 6));
    for (std::size_t i = 0; i < serving.reports.size(); ++i) {
      CHECK(serving.reports[i].index == static_cast<std::int64_t>(i));
    }
  }
  for (const common::Counter& counter : counters[0]) {
    CAPTURE(counter.name);
    CHECK(common::counter(counters[1], counter.name) == counter.value);
  }
  CHECK(common::counter(counters[1], "slots_reserved") == 16.0);
  CHECK(common::counter(counters[1], "slots_used") == 7.5);  // 6, 7, 8 and 9 tokens
  CHECK(common::counter(counters[1], "requests_held") == 1.0);
}

TEST_CASE("memory is short while requests wait for blocks, and not while they wait for a place or for the budget") {
  const auto num_short = [](int num_blocks, int max_sequences, int budget, bool static_batches) {
    ServingOptions options;
    options.num_blocks = num_blocks;
    options.scheduler.max_sequences = max_sequences;
    options.scheduler.token_budget = budget;
    options.static_batches = static_batches;
    Serving serving(options);
    for (int i = 0; i < 4; ++i) {
      serving.submit({make_request(8, 8, i)});
    }
    CHECK(serving.run() == kNoProblem);
    return std::count_if(serving.reports.begin(), serving.reports.end(),
                         [](const stage::StepReport& report) { return report.is_memory_short; });
  };
  CHECK(num_short(64, 64, 256, false) == 0);
  CHECK(num_short(64, 2, 256, false) == 0);
  CHECK(num_short(64, 64, 4, false) == 0);
  CHECK(num_short(64, 2, 256, true) == 0);
  CHECK(num_short(8, 64, 256, false) > 6);
  CHECK(num_short(8, 64, 256, true) > 6);  // the batch was closed because blocks were missing
}

TEST_CASE("auto: a CPU swaps, and a GPU recomputes where moving takes longer") {
  // In 16 bits: 32 layers of 32 kv heads of 128 dimensions.
  const stage::CacheSize llama2_7b{.num_blocks = 1, .block_size = 16, .bytes_per_slot = 512 * 1024};
  const auto swap_is_cheaper = [&](std::int64_t num_parameters, const stage::CacheSize& cache, bool on_gpu) {
    stage::SchedulerOptions options;
    stage::set_preemption_costs(options, num_parameters, cache,
                                stage::operations_per_byte(on_gpu, common::Precision::kBFloat16));
    return options.block_swap_cost < cache.block_size * options.token_compute_cost;
  };
  CHECK(swap_is_cheaper(6'738'415'616, llama2_7b, false));
  CHECK_FALSE(swap_is_cheaper(6'738'415'616, llama2_7b, true));
  // 80 layers of 8 kv heads.
  const stage::CacheSize llama2_70b{.num_blocks = 1, .block_size = 16, .bytes_per_slot = 320 * 1024};
  CHECK(swap_is_cheaper(68'976'648'192, llama2_70b, true));
}

TEST_CASE("padding: sequences of 32, 16, 8 and 2 tokens in one step are 58 tokens, padded 128") {
  Serving serving({});
  for (const int num_tokens : {32, 16, 8, 2}) {
    serving.submit({make_request(num_tokens, 1, num_tokens)});
  }
  CHECK(serving.run() == kNoProblem);
  REQUIRE(serving.reports.size() == 1);
  CHECK(serving.reports[0].num_tokens == 58);
  CHECK(serving.reports[0].padded_tokens() == 128);
  CHECK(common::counter(serving.engine.counters(), "padded_tokens") == 128);
}

TEST_CASE("view: the plain view shows every token, even of a server that runs ahead") {
  for (const bool run_ahead : {false, true}) {
    ServingOptions options;
    options.scheduler.run_ahead = run_ahead;
    Serving serving(options, tests::bundled().llama);
    std::ostringstream output;
    const auto view = common::make_view(common::ViewKind::kPlain, output);
    Measured measured(serving);
    common::serve(
        measured.engine,
        {{0.0, {tests::greedy_request("Once upon a time", 3)}}, {0.0, {tests::greedy_request("The king", 3)}}},
        {[&](int id, int sample, Token token) {
           view->on_text(id, sample, tests::bundled().tokenizer.decode({&token, 1}));
         },
         [&](const common::StepReport& report) { view->on_step(measured.engine, report); }});
    CAPTURE(run_ahead, output.str());
    for (int id = 0; id < 2; ++id) {
      const std::string label = "  " + std::to_string(id) + ":\"";
      int count = 0;
      for (std::size_t at = output.str().find(label); at != std::string::npos; at = output.str().find(label, at + 1)) {
        count += 1;
      }
      CHECK(count == 3);
    }
  }
}

TEST_CASE("serve: every request arrives at its time, and its text ends where the trace says") {
  Serving serving({});
  Measured measured(serving);
  const std::vector<common::RequestResult>& results = measured.run(
      {{0.0, {make_request(5, 9, 1)}, 4}, {0.0021, {make_request(6, 9, 2)}, 0}, {5.0, {make_request(7, 3, 3)}, 0}});
  CHECK(serving.leak() == kNoProblem);
  CHECK(results[0].token_times.size() == 4);
  CHECK(results[1].token_times.size() == 9);
  CHECK(results[1].admission >= 0.0021);
  CHECK(results[1].admission < 0.0050);
  CHECK(results[2].admission == 5.0);
}

TEST_CASE("serve: of several texts, the first ends them all where the trace says") {
  Serving serving({});
  Measured measured(serving);
  const std::vector<common::RequestResult>& results =
      measured.run({{0.0, {.request = sampled_request(5, 9, 1).request, .num_samples = 3}, 4}});
  REQUIRE(results[0].completions.size() == 3);
  CHECK(results[0].completions[0].tokens.size() == 4);
}

TEST_CASE("serve: a run that is ended early has the results of what has arrived") {
  Serving serving({});
  Measured measured(serving);
  int num_steps = 0;
  const std::vector<common::RequestResult> results = common::serve(
      measured.engine, {{0.0, {make_request(5, 9, 1)}}, {1e6, {make_request(6, 9, 2)}}},
      {.on_step = [&](const common::StepReport&) { num_steps += 1; }, .is_ended = [&] { return num_steps == 3; }});
  REQUIRE(results.size() == 1);
  CHECK(results[0].finish_reason == FinishReason::kCancelled);
  CHECK(results[0].completions[0].tokens.size() == 3);
  CHECK(serving.leak() == kNoProblem);
}

TEST_CASE("view: the live view fits the terminal, names each request's letter and shows every sample") {
  for (const auto& [columns, rows] : {std::pair(80, 24), std::pair(40, 12), std::pair(200, 60), std::pair(20, 5)}) {
    ServingOptions options;
    options.num_blocks = 300;
    options.block_size = 8;
    Serving serving(options, tests::bundled().llama);
    std::ostringstream output;
    auto view = common::make_view(common::ViewKind::kLive, output, [&, columns = columns, rows = rows] {
      return common::TerminalSize{columns, rows};
    });
    const std::string before = "\033[?1049h\033[?25l";  // the alternate screen, without a cursor
    CHECK(output.str() == before);
    Measured measured(serving);
    std::string last;  // frame with requests in it
    std::vector<common::ArrivingRequest> requests;
    for (int i = 0; i < 20; ++i) {
      requests.push_back({0.0, {tests::greedy_request(i % 2 == 0 ? "Once upon a time" : "The king", 80)}});
      requests.back().request.num_samples = i == 0 ? 3 : 1;
    }
    common::serve(measured.engine, requests,
                  {[&](int id, int sample, Token token) {
                     view->on_text(id, sample, tests::bundled().tokenizer.decode({&token, 1}));
                   },
                   [&](const common::StepReport& report) {
                     output.str("");
                     view->on_step(measured.engine, report);
                     last = measured.engine.status().num_running == 20 && !output.str().empty() ? output.str() : last;
                   }});
    CAPTURE(columns, rows, last);
    REQUIRE(last.starts_with("\033[H"));
    REQUIRE(last.ends_with("\033[K\033[J"));
    std::vector<std::string> lines;
    std::istringstream text(last.substr(3, last.size() - 6));
    for (std::string line; std::getline(text, line);) {
      lines.push_back(line);
      const std::size_t erased = line.find("\033[K");
      REQUIRE(erased != std::string::npos);  // what was there before is erased
      CHECK(erased <= static_cast<std::size_t>(columns));
    }
    CHECK(lines.size() <= static_cast<std::size_t>(std::max(rows, 6)));
    if (columns == 80) {
      CHECK(last.find("\nA    0  \"") != std::string::npos);
      CHECK(last.find("\nA  0.1  \"") != std::string::npos);
      CHECK(last.find("\nB    1  \"") != std::string::npos);
      CHECK(last.find("blocks: a request's letter") != std::string::npos);
      CHECK(last.find("\n   0  ") != std::string::npos);
    }
    output.str("");
    view.reset();
    CHECK(output.str() == "\033[?25h\033[?1049l");
  }
}

TEST_CASE("metrics: a beam search has no time to its first token, and a time per token") {
  Serving serving(ServingOptions{});
  Measured measured(serving);
  measured.run({{0.0, {make_request(5, 6), 3, 1.0}}});
  const std::string table = common::report_table(measured.engine, measured.tally, std::nullopt);
  CAPTURE(table);
  CHECK(table.find("| to the first token             |    - |    - |    - |") != std::string::npos);
  CHECK(table.find("| from arrival to end, per token |    -") == std::string::npos);
  CHECK(measured.tally.per_token_seconds.spread().mean > 0.0);
  CHECK(common::report_json(measured.engine, measured.tally, std::nullopt)["seconds_to_first_token"].is_null());
}

TEST_CASE("cache size: a step's sequences can fill as much as their contexts allow") {
  const common::LlamaConfig& config = tests::small_model().config();
  stage::EngineOptions options;
  options.scheduler.max_sequences = 200;
  CHECK(stage::memory_share(config, options).max_slots == 200 * tests::kSmallContext);
  options.context_length = 30;
  CHECK(stage::memory_share(config, options).max_slots == 200 * 30);
  options.context_length = 1000;  // more than the model has
  CHECK(stage::memory_share(config, options).max_slots == 200 * tests::kSmallContext);
  options.scheduler.max_sequences = 1;
  CHECK(stage::memory_share(config, options).max_slots == options.min_slots);
}
