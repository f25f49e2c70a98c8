// Drafts: how they are looked up, which of them become text, and what a step with them leaves behind. The numbers of
// invariants are SPECULATION.md's.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/stages/fake_runner.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/messages.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/speculation/look_up.h)
#include STAGE_HEADER(serve/make_engine.h)
#include STAGE_HEADER(production/speculation/speculating_engine.h)
// clang-format on

namespace {

const std::string kNoProblem;

using Tokens = std::vector<common::Token>;

// Drafts what a test says, wherever a request decodes: the same number of tokens for each of its texts.
class ScriptedScheduler : public stage::SpeculatingScheduler {
 public:
  using Script = std::function<Tokens(const Tokens& text, std::size_t sample)>;  // text: what it has written
  ScriptedScheduler(stage::KvCacheManager& manager, const stage::SchedulerOptions& options, Script script)
      : SpeculatingScheduler(manager, options, true, 0, {}), script_(std::move(script)) {}

  stage::ScheduledStep schedule() override {
    stage::ScheduledStep step = SpeculatingScheduler::schedule();  // which drafts nothing by itself
    for (const stage::ScheduledGroup& scheduled : step.groups) {
      for (std::size_t i = 0; i < scheduled.tokens.sequences.size(); ++i) {
        const Tokens& text = scheduled.group->live()[i].tokens;
        const Tokens draft = scheduled.tokens.with_logits && !text.empty() ? script_(text, i) : Tokens();
        const auto count = static_cast<int>(draft.size());
        if (count > 0) {
          is_awaited_ = true;
          REQUIRE(manager_.reserve(scheduled.tokens.sequences[i], 1 + count));
          drafts_[scheduled.tokens.sequences[i]] = draft;
          step.num_tokens += count;
        }
      }
    }
    return step;
  }

 private:
  Script script_;
};

struct Scripted {
  Scripted(const stage::GenerationRequest& request, const ScriptedScheduler::Script& script, int block_size = 4)
      : Scripted(request, script, {.num_slots = 64, .block_size = block_size, .gpu = {.device = stage::Device::kCpu}}) {
  }
  Scripted(const stage::GenerationRequest& request, const ScriptedScheduler::Script& script,
           const stage::EngineOptions& options)
      : engine(tests::small_model(), options, stage::make_runner(tests::small_model(), options), clock,
               [&](stage::KvCacheManager& manager, const stage::SchedulerOptions& scheduler, bool) {
                 return std::make_unique<ScriptedScheduler>(manager, scheduler, script);
               }) {
    tests::poison(engine);
    engine.on_step([this](const stage::StepReport& report) { reports.push_back(report); });
    engine.submit(request);
  }

  void step() {
    REQUIRE(engine.step());
    REQUIRE(engine.output(0).error == kNoProblem);
  }

  stage::VirtualClock clock;
  stage::SpeculatingEngine engine;
  std::vector<stage::StepReport> reports;
};

Tokens plain_text(const common::Request& request) { return tests::served_alone({.request = request}).front().tokens; }

}  // namespace

TEST_CASE("a draft is what followed the latest place with the text's last tokens, three of them if it can") {
  using stage::look_up_draft;
  const auto draft = [](const Tokens& text, int max_tokens = 2) { return look_up_draft(text, max_tokens).tokens; };
  CHECK(draft({1, 2, 3, 4, 5, 1, 2, 3}) == Tokens{4, 5});
  CHECK(draft({1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3}) == Tokens{4, 9});  // three equal tokens count more than two later ones
  CHECK(draft({1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3}) == Tokens{5, 1});  // the latest of two places
  CHECK(draft({7, 3, 4, 8, 3}) == Tokens{4, 8});                    // one token, if no more are equal
  CHECK(draft({1, 2, 3, 4}).empty());
  CHECK(draft({}).empty());
  CHECK(draft({5}).empty());
  CHECK(draft({5, 5}, 4) == Tokens{5, 5, 5, 5});           // it goes on with itself
  CHECK(draft({1, 2, 1, 2}, 5) == Tokens{1, 2, 1, 2, 1});  // with the period 2
  CHECK(look_up_draft(Tokens{7, 3, 4, 8, 3}, 2, 2).tokens.empty());
  CHECK(look_up_draft(Tokens{1, 2, 3, 4, 5, 1, 2, 3}, 2).matched == 3);
}

TEST_CASE("a draft is looked up: SPECULATION.md's three texts") {
  const auto draft = [](const std::string& text, int min_match = 1) {
    std::vector<std::string> words;  // a word's first place is its token
    Tokens tokens;
    std::istringstream stream(text);
    for (std::string word; stream >> word;) {
      const auto place = std::find(words.begin(), words.end(), word);
      tokens.push_back(static_cast<common::Token>(place - words.begin()));
      words.insert(words.end(), place == words.end() ? 1 : 0, word);
    }
    std::string result;
    for (const common::Token token : stage::look_up_draft(tokens, 3, min_match).tokens) {
      result += (result.empty() ? "" : " ") + words.at(static_cast<std::size_t>(token));
    }
    return result;
  };
  CHECK(draft("the king had a cat . and the queen had a") == "cat . and");
  CHECK(draft("ha ha") == "ha ha ha");
  CHECK(draft("once upon a time") == "");
  CHECK(draft("the king had a cat . and the queen had a", 3) == "");  // two equal tokens are too few
}

TEST_CASE("an accepted draft is committed: it counts, and a block is published as soon as text fills it") {
  stage::KvCacheManager manager(8, 4);
  stage::SequenceIds ids;
  const common::Request request = tests::make_request(5, 12);
  stage::ParallelSampling group(manager, ids, 0, request, 1);
  REQUIRE(group.allocate({}));
  const int sequence = group.live().front().sequence;
  const Tokens drafts = {1, 2, 3, 4};
  // The prompt, the reply's first token and the drafts are computed; the last two drafts turn out to be wrong.
  REQUIRE(manager.reserve(sequence, 5));
  manager.commit(sequence, request.prompt);
  group.extend({.tokens = {0}, .logits = {}}, 0.0);
  REQUIRE(manager.reserve(sequence, 5));
  manager.commit(sequence, Tokens{0});
  REQUIRE(manager.length(sequence) == 6);
  const int block = manager.block_table(sequence)[1];
  for (const int expected_length : {7, 8}) {
    CHECK_FALSE(manager.prefix_cache().contains(block));
    group.extend({.tokens = {drafts[static_cast<std::size_t>(expected_length - 7)]}, .logits = {}}, 0.0);
    stage::commit_last(manager, group, true);
    CHECK(manager.length(sequence) == expected_length);
  }
  CHECK(manager.prefix_cache().contains(block));
}

TEST_CASE("SPECULATION.md, invariant 1: a step takes up exactly the drafts that plain decoding draws") {
  for (const float temperature : {0.0F, 0.9F}) {
    for (const float penalty : {1.0F, 2.0F}) {
      for (int salt = 0; salt < 4; ++salt) {
        common::Request request = tests::make_request(5, 12, salt);
        request.sampling = {.temperature = temperature, .repetition_penalty = penalty, .seed = 7};
        const Tokens text = plain_text(request);
        REQUIRE(text.size() == 12);
        for (int num_right = 0; num_right <= 3; ++num_right) {
          INFO("temperature " << temperature << ", penalty " << penalty << ", salt " << salt << ", right "
                              << num_right);
          Scripted scripted({request}, [&](const Tokens& written, std::size_t) {
            Tokens draft;
            for (std::size_t i = written.size(); draft.size() < 3 && i + 1 < text.size(); ++i) {
              const bool is_right = static_cast<int>(draft.size()) < num_right;
              draft.push_back(is_right ? text[i] : (text[i] + 1) % tests::kSmallVocabulary);
            }
            return draft;
          });
          scripted.step();  // the prompt
          scripted.step();
          CHECK(scripted.reports.back().num_drafts == std::vector<int>{3});
          CHECK(scripted.reports.back().num_accepted == num_right);
          REQUIRE(scripted.reports.back().drafts.size() == 1);
          const common::SequenceDrafts& drafts = scripted.reports.back().drafts.front();
          CHECK(drafts.position == 6);  // behind the prompt's 5 tokens and the first of the reply
          CHECK(drafts.tokens.size() == 3);
          CHECK(drafts.num_accepted == num_right);
          CHECK(scripted.engine.output(0).completions.front().tokens.size() == static_cast<std::size_t>(2 + num_right));
          while (scripted.engine.step()) {
          }
          CHECK(tests::to_string(scripted.engine.output(0).completions.front().tokens) == tests::to_string(text));
        }
      }
    }
  }
}

TEST_CASE("SPECULATION.md, invariant 1, of two samples: both take up a draft, or neither does") {
  stage::GenerationRequest request{.request = tests::make_request(5, 12), .num_samples = 2};
  request.request.sampling = {.temperature = 0.9F, .seed = 7};
  const std::vector<common::Completion> texts = tests::served_alone(request);
  REQUIRE(texts[0].tokens != texts[1].tokens);
  REQUIRE(std::min(texts[0].tokens.size(), texts[1].tokens.size()) == 12);
  for (const std::size_t wrong : {0, 1, 2}) {  // the sample whose second draft is wrong, or none
    INFO("wrong " << wrong);
    Scripted scripted(request, [&](const Tokens& written, std::size_t sample) {
      if (written.size() != 1) {
        return Tokens();
      }
      const Tokens& text = texts[sample].tokens;
      return Tokens{text[1], sample == wrong ? (text[2] + 1) % tests::kSmallVocabulary : text[2]};
    });
    while (scripted.engine.output(0).completions.empty() || scripted.engine.output(0).completions[0].tokens.empty()) {
      scripted.step();
    }
    scripted.step();
    CHECK(scripted.reports.back().num_drafts == std::vector<int>{2, 2});
    CHECK(scripted.reports.back().num_accepted == (wrong == 2 ? 4 : 2));
    while (scripted.engine.step()) {
    }
    CHECK(tests::compare_output(scripted.engine.output(0), texts) == kNoProblem);
  }
}

TEST_CASE("SPECULATION.md, invariants 2 and 3: what was not accepted counts for nothing and is not found by others") {
  const common::Request request = tests::make_request(5, 12);
  const Tokens text = plain_text(request);
  const common::Token wrong = (text[1] + 1) % tests::kSmallVocabulary;
  // Behind the prompt's 5 tokens and the first of the reply: a block of 4 would be full with two more tokens.
  Scripted scripted({request}, [&](const Tokens& written, std::size_t) {
    return written.size() == 1 ? Tokens{wrong, wrong, wrong} : Tokens{};
  });
  const stage::KvCacheManager& manager = scripted.engine.manager();
  scripted.step();
  scripted.step();
  REQUIRE(scripted.reports.back().num_drafts == std::vector<int>{3});
  CHECK(scripted.reports.back().num_accepted == 0);
  const int sequence = scripted.engine.scheduler().running().front()->live().front().sequence;
  CHECK(manager.length(sequence) == 6);
  CHECK(manager.capacity(sequence) == 12);  // room that the next tokens take
  CHECK_FALSE(manager.prefix_cache().contains(manager.block_table(sequence)[1]));

  // A prompt of the rejected tokens must not find a block with them.
  common::Request poisoned = request;
  poisoned.prompt.insert(poisoned.prompt.end(), {text[0], wrong, wrong, wrong});
  poisoned.max_new_tokens = 6;
  const int second = scripted.engine.submit({.request = poisoned});
  while (scripted.engine.step()) {
  }
  CHECK(scripted.engine.output(second).cached_tokens == 4);
  CHECK(tests::to_string(scripted.engine.output(0).completions.front().tokens) == tests::to_string(text));
  CHECK(tests::to_string(scripted.engine.output(second).completions.front().tokens) ==
        tests::to_string(plain_text(poisoned)));
}

TEST_CASE("SPECULATION.md, invariant 4: a request that looks its tokens up does not run ahead") {
  tests::ServingOptions options;
  options.speculates = true;
  options.scheduler.run_ahead = true;
  tests::Serving serving(options);
  stage::GenerationRequest request{.request = tests::make_request(6, 12)};
  SECTION("with drafts") {
    request.request.num_speculative_tokens = 4;
    const int id = serving.submit(request);
    while (serving.engine.step()) {
      const auto& running = serving.engine.scheduler().running();
      CHECK((running.empty() || !running.front()->pending_row().has_value()));
    }
    CHECK(tests::compare_output(serving.engine.output(id), tests::served_alone(request)) == kNoProblem);
  }
  SECTION("without") {
    serving.submit(request);
    serving.engine.step();
    CHECK(serving.engine.scheduler().running().front()->pending_row().has_value());
  }
}

TEST_CASE("SPECULATION.md, invariant 5: drafts take only what a step leaves of cheap tokens") {
  common::Request request = tests::make_request(4, 24);
  for (int i = 0; i < 12; ++i) {
    request.prompt.push_back(request.prompt[static_cast<std::size_t>(i)]);  // a period of 4
  }
  stage::VirtualClock clock;
  const stage::EngineOptions options{.num_slots = 512, .gpu = {.device = stage::Device::kCpu}};
  constexpr int kMaxTokens = 6;
  const std::unique_ptr<stage::SpeculatingEngine> owned =
      stage::make_speculating_engine(tests::small_model(), options, stage::make_runner(tests::small_model(), options),
                                     4, clock, stage::TokenCost{.per_token = 0.0, .max_tokens = kMaxTokens});
  stage::SpeculatingEngine& engine = *owned;
  int most_drafts = 0;
  int sequences_with_drafts = 0;
  engine.on_step([&](const stage::StepReport& report) {
    const int num_drafts = std::accumulate(report.num_drafts.begin(), report.num_drafts.end(), 0);
    const bool has_prompt = report.num_tokens - num_drafts > static_cast<int>(report.served.size());
    CHECK((num_drafts == 0 || (!has_prompt && report.num_tokens <= kMaxTokens)));
    most_drafts = std::max(most_drafts, num_drafts);
    sequences_with_drafts =
        std::max(sequences_with_drafts, num_drafts > 0 ? static_cast<int>(report.served.size()) : 0);
  });
  const auto serve = [&](int num_requests) {
    for (int i = 0; i < num_requests; ++i) {
      common::Request sampled = request;
      sampled.sampling = {.temperature = 0.3F, .seed = static_cast<std::uint64_t>(i)};
      engine.submit({.request = sampled});
    }
    most_drafts = 0;
    while (engine.step()) {
    }
  };
  serve(1);
  CHECK(most_drafts >= 3);
  serve(4);
  CHECK(most_drafts >= 1);
  serve(8);
  CHECK(sequences_with_drafts < 6);  // six texts fill the step without drafts
}

TEST_CASE("a request whose drafts do not pay stops drafting for longer and longer, and begins again") {
  stage::DraftAccount account({.per_token = 0.3});
  CHECK(account.may_draft());
  CHECK(account.num_drafts(8) == 3);
  CHECK(account.num_drafts(1) == 1);
  std::vector<int> pauses;
  for (int i = 0; i < 6; ++i) {
    account.book(3, 0);
    pauses.push_back(1);
    for (; !account.may_draft(); ++pauses.back()) {
    }
  }
  CHECK(pauses == std::vector<int>{16, 32, 64, 128, 256, 256});
  account.book(3, 3);
  CHECK(account.may_draft());
  CHECK(account.num_drafts(8) == 3);
  account.book(3, 3);
  CHECK(account.num_drafts(8) == 7);
  account.book(7, 1);  // paid from what the last drafts have saved
  CHECK(account.may_draft());
  CHECK(account.num_drafts(8) == 3);
  for (int i = 0; i < 4; ++i) {
    account.book(3, 0);
  }
  CHECK_FALSE(account.may_draft());
}

TEST_CASE("where not even right drafts pay, pauses grow") {
  stage::DraftAccount account({.per_token = 0.25, .per_step = 3.0});
  std::vector<int> pauses;
  for (int i = 0; i < 3; ++i) {
    account.book(3, 3);
    pauses.push_back(1);
    for (; !account.may_draft(); ++pauses.back()) {
    }
  }
  CHECK(pauses == std::vector<int>{16, 32, 64});
}

TEST_CASE("a step is booked with what it costs beside its drafts: other kernels, and that the host waits") {
  stage::DraftAccount account({.per_token = 0.0, .per_step = 0.5, .waiting = 0.25});
  account.book(3, 1);  // leaves 0.25
  account.book(0, 0);  // nothing
  CHECK(account.may_draft());
  account.book(0, 0);
  CHECK_FALSE(account.may_draft());
}

TEST_CASE("a draft that is right in all of a request's texts saves one step") {
  stage::DraftAccount account({.per_token = 0.1, .per_step = 1.0});
  account.book(1, 1, 4);  // costs 1.4, and saves a step with four tokens: 1.3
  CHECK_FALSE(account.may_draft());
}

TEST_CASE("the dearer a draft is, the surer it has to be") {
  CHECK(stage::min_match({.per_token = 0.3}) == 3);
  CHECK(stage::min_match({.per_token = 0.1}) == 2);
  CHECK(stage::min_match({.per_token = 0.1, .per_step = 0.2}) == 3);  // with 0.2, three cost 0.5
  CHECK(stage::min_match(stage::kCpuTokenCost) == 3);
  CHECK(stage::min_match(stage::gpu_token_cost(32, 15e9)) == 1);  // the shape of Llama 3 8B
  CHECK(stage::min_match(stage::gpu_token_cost(16, 2.5e9)) == 2);
  CHECK(stage::min_match(stage::gpu_token_cost(6, 10e6)) == 3);
  CHECK(stage::min_match({.per_token = 0.0}) == 1);
  stage::DraftAccount cheap({.per_token = 0.0});
  CHECK(cheap.num_drafts(8) == 3);
  for (int i = 0; i < 100; ++i) {
    cheap.book(3, 0);  // where a draft costs nothing, none is too many
    CHECK(cheap.may_draft());
  }
}
