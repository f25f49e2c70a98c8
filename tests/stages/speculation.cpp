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

#include "tests/stages/draft_models.h"
#include "tests/stages/fake_runner.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/messages.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/speculation/drafter.h)
#include STAGE_HEADER(demo/make_server.h)
#include STAGE_HEADER(production/speculation/speculating_server.h)
// clang-format on

namespace {

const std::string kNoProblem;

using Tokens = std::vector<common::Token>;

// Drafts what a test says, wherever a request decodes: for each of its texts, as many tokens for one as for another.
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
      : engine(tests::small_model(),
               {.num_slots = 64, .block_size = block_size, .gpu = {.device = stage::Device::kCpu}}),
        server(engine, clock,
               std::make_unique<ScriptedScheduler>(engine.manager(), stage::SchedulerOptions{}, script)) {
    tests::poison(engine);
    server.on_step([this](const stage::StepReport& report) { reports.push_back(report); });
    server.submit(request);
  }

  void step() {
    REQUIRE(server.step());
    REQUIRE(server.output(0).error == kNoProblem);
  }

  stage::VirtualClock clock;
  stage::Engine engine;
  stage::SpeculatingServer server;
  std::vector<stage::StepReport> reports;
};

// Served with as many drafts as the model makes.
struct Drafted {
  explicit Drafted(const std::shared_ptr<stage::DraftModel>& model) : drafter(model), serving(options_with(model)) {}

  static tests::ServingOptions options_with(const std::shared_ptr<stage::DraftModel>& model) {
    tests::ServingOptions options;
    options.num_blocks = 256;
    options.speculates = true;
    options.drafter = model;
    return options;
  }

  // Empty if the requests have got their texts, and all blocks of both caches are free or cached. Ends the server.
  std::string serve(std::vector<stage::GenerationRequest> requests) {
    std::string problem;
    for (stage::GenerationRequest& request : requests) {
      request.request.num_speculative_tokens = stage::kMaxDrafts;
    }
    serving.submit_all(requests);
    problem = serving.run();
    for (std::size_t id = 0; id < requests.size() && problem.empty(); ++id) {
      problem = tests::compare_output(serving.server.output(static_cast<int>(id)), tests::served_alone(requests[id]));
    }
    for (const stage::StepReport& report : serving.reports) {
      num_drafts = std::accumulate(report.num_drafts.begin(), report.num_drafts.end(), num_drafts);
      num_accepted += report.num_accepted;
    }
    serving.owned_server.reset();
    return problem.empty() ? tests::leak_of(*drafter) : problem;
  }

  std::shared_ptr<stage::DraftModel> drafter;
  tests::Serving serving;
  int num_drafts = 0;
  int num_accepted = 0;
};

stage::DraftedText text_to_draft(int request, const Tokens& tokens, int max_drafts) {
  stage::DraftedText text;
  text.request = request;
  text.sequence = request;
  text.tokens = tokens;
  text.max_drafts = max_drafts;
  return text;
}

// The drafts of these texts in one step.
std::vector<Tokens> drafts_of(stage::DraftModel& drafter, std::vector<stage::DraftedText> texts) {
  for (stage::DraftedText& text : texts) {
    REQUIRE(drafter.begin(text) == text.max_drafts);
  }
  drafter.complete(texts);
  std::vector<Tokens> drafts;
  for (const stage::DraftedText& text : texts) {
    drafts.push_back(text.drafts);
  }
  return drafts;
}

Tokens plain_text(const common::Request& request) { return tests::served_alone({.request = request}).front().tokens; }

}  // namespace

TEST_CASE("a draft is what followed the latest place with the text's last tokens, three of them if it can") {
  using stage::look_up_draft;
  const auto draft = [](const Tokens& text, int max_tokens = 2) { return look_up_draft(text, max_tokens).tokens; };
  CHECK(draft({1, 2, 3, 4, 5, 1, 2, 3}) == Tokens{4, 5});
  CHECK(draft({1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3}) == Tokens{4, 9});  // three equal ones count more than two later ones
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
  stage::Engine engine(tests::small_model(),
                       {.num_slots = 32, .block_size = 4, .gpu = {.device = stage::Device::kCpu}});
  stage::KvCacheManager& manager = engine.manager();
  const common::Request request = tests::make_request(5, 12);
  stage::ParallelSampling group(manager, engine.sequence_ids(), 0, request, 1);
  REQUIRE(group.allocate({}));
  const int sequence = group.live().front().sequence;
  const Tokens drafts = {1, 2, 3, 4};
  // The prompt, the reply's first token and the drafts are computed; the last two drafts turn out to be wrong.
  const auto computed = [&](const Tokens& tokens) {
    REQUIRE(manager.reserve(sequence, static_cast<int>(tokens.size())));
    stage::RaggedBatch batch;
    batch.add(manager, sequence, tokens, false);
    engine.forward(batch);
    return batch;
  };
  engine.commit(computed(request.prompt));
  group.extend({.tokens = {0}, .logits = {}}, 0.0);
  computed({0, 1, 2, 3, 4});
  stage::RaggedBatch own;
  own.add(manager, sequence, Tokens{0}, false);
  engine.commit(own);
  REQUIRE(manager.length(sequence) == 6);
  const int block = manager.block_table(sequence)[1];
  for (const int expected_length : {7, 8}) {
    CHECK_FALSE(manager.prefix_cache().contains(block));
    group.extend({.tokens = {drafts[static_cast<std::size_t>(expected_length - 7)]}, .logits = {}}, 0.0);
    stage::commit_last(engine, group);
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
          CHECK(scripted.server.output(0).completions.front().tokens.size() == static_cast<std::size_t>(2 + num_right));
          while (scripted.server.step()) {
          }
          CHECK(tests::to_string(scripted.server.output(0).completions.front().tokens) == tests::to_string(text));
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
    while (scripted.server.output(0).completions.empty() || scripted.server.output(0).completions[0].tokens.empty()) {
      scripted.step();
    }
    scripted.step();
    CHECK(scripted.reports.back().num_drafts == std::vector<int>{2, 2});
    CHECK(scripted.reports.back().num_accepted == (wrong == 2 ? 4 : 2));
    while (scripted.server.step()) {
    }
    CHECK(tests::compare_output(scripted.server.output(0), texts) == kNoProblem);
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
  const int sequence = scripted.server.scheduler().running().front()->live().front().sequence;
  CHECK(manager.length(sequence) == 6);
  CHECK(manager.capacity(sequence) == 12);  // room that the next tokens take
  CHECK_FALSE(manager.prefix_cache().contains(manager.block_table(sequence)[1]));

  // A prompt of the rejected tokens must not find a block with them.
  common::Request poisoned = request;
  poisoned.prompt.insert(poisoned.prompt.end(), {text[0], wrong, wrong, wrong});
  poisoned.max_new_tokens = 6;
  const int second = scripted.server.submit({.request = poisoned});
  while (scripted.server.step()) {
  }
  CHECK(scripted.server.output(second).cached_tokens == 4);
  CHECK(tests::to_string(scripted.server.output(0).completions.front().tokens) == tests::to_string(text));
  CHECK(tests::to_string(scripted.server.output(second).completions.front().tokens) ==
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
    while (serving.server.step()) {
      const auto& running = serving.server.scheduler().running();
      CHECK((running.empty() || !running.front()->pending_row().has_value()));
    }
    CHECK(tests::compare_output(serving.server.output(id), tests::served_alone(request)) == kNoProblem);
  }
  SECTION("without") {
    serving.submit(request);
    serving.server.step();
    CHECK(serving.server.scheduler().running().front()->pending_row().has_value());
  }
}

TEST_CASE("SPECULATION.md, invariant 5: drafts take only what a step leaves of cheap tokens") {
  common::Request request = tests::make_request(4, 24);
  for (int i = 0; i < 12; ++i) {
    request.prompt.push_back(request.prompt[static_cast<std::size_t>(i)]);  // a period of 4
  }
  stage::VirtualClock clock;
  stage::Engine engine(tests::small_model(), {.num_slots = 512, .gpu = {.device = stage::Device::kCpu}});
  constexpr int kMaxTokens = 6;
  stage::SpeculatingServer server(
      engine, clock,
      std::make_unique<stage::SpeculatingScheduler>(engine.manager(), stage::SchedulerOptions{}, true, 4,
                                                    stage::TokenCost{.per_token = 0.0, .max_tokens = kMaxTokens}));
  int most_drafts = 0;
  int sequences_with_drafts = 0;
  server.on_step([&](const stage::StepReport& report) {
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
      server.submit({.request = sampled});
    }
    most_drafts = 0;
    while (server.step()) {
    }
  };
  serve(1);
  CHECK(most_drafts >= 3);
  serve(4);
  CHECK(most_drafts >= 1);
  serve(8);
  CHECK(sequences_with_drafts < 6);  // six texts fill the step without drafts
}

TEST_CASE("SPECULATION.md, invariant 1, of a draft model: where it is the model itself, every draft is accepted") {
  for (const float temperature : {0.0F, 0.9F}) {
    for (const float penalty : {0.0F, 0.5F}) {
      INFO("temperature " << temperature << ", penalty " << penalty);
      std::vector<stage::GenerationRequest> requests;
      for (int i = 0; i < 4; ++i) {
        requests.push_back({.request = tests::make_request(3 + 4 * i, 20, i), .num_samples = i >= 2 ? 3 : 1});
        requests.back().request.num_logprobs = i == 3 ? 2 : 0;  // draws on the host
        requests.back().request.sampling = {.temperature = temperature,
                                            .repetition_penalty = 1.0F + penalty,
                                            .seed = static_cast<std::uint64_t>(7 + i),
                                            .frequency_penalty = penalty};
        requests.back().request.sample_index = i;
      }
      Drafted drafted(tests::make_draft_model(tests::small_model()));
      CHECK(drafted.serve(requests) == kNoProblem);
      CHECK(drafted.num_drafts > 50);
      CHECK(drafted.num_accepted == drafted.num_drafts);
    }
  }
}

TEST_CASE(
    "a draft model drafts what it draws behind the text: with the request's noise, whatever was rejected before") {
  for (const float temperature : {0.0F, 0.9F}) {
    INFO("temperature " << temperature);
    std::vector<stage::GenerationRequest> requests;
    for (int i = 0; i < 3; ++i) {
      requests.push_back({.request = tests::make_request(3 + 4 * i, 24, i)});
      requests.back().request.sampling = {.temperature = temperature, .seed = static_cast<std::uint64_t>(7 + i)};
    }
    Drafted drafted(tests::make_draft_model(tests::similar_model(), {.num_slots = 128, .block_size = 4}));
    REQUIRE(drafted.serve(requests) == kNoProblem);
    int num_rejected = 0;
    int num_compared = 0;
    for (const stage::StepReport& report : drafted.serving.reports) {
      for (const common::SequenceDrafts& drafts : report.drafts) {
        common::Request alone = requests.at(static_cast<std::size_t>(drafts.request)).request;
        const Tokens text = plain_text(alone);
        const auto written = drafts.position - static_cast<int>(alone.prompt.size());
        alone.prompt.insert(alone.prompt.end(), text.begin(), text.begin() + written);
        alone.max_new_tokens = static_cast<int>(drafts.tokens.size());
        const std::vector<common::Completion> expected =
            tests::served_alone({.request = alone}, tests::similar_model());
        CHECK(tests::to_string(drafts.tokens) == tests::to_string(expected.front().tokens));
        num_rejected += static_cast<int>(drafts.tokens.size()) - drafts.num_accepted;
        num_compared += static_cast<int>(drafts.tokens.size());
      }
    }
    CAPTURE(num_rejected, num_compared);
    CHECK(num_rejected > 20);
    CHECK(num_compared - num_rejected > 10);
  }
}

TEST_CASE("a draft model computes what a text has gained, and leaves none of its drafts behind") {
  const std::shared_ptr<stage::DraftModel> drafter =
      tests::make_draft_model(tests::small_model(), {.num_slots = 64, .chunk_size = 4, .block_size = 4});
  stage::Engine& engine = drafter->engine();
  const auto passes = [&] { return static_cast<int>(common::counter(engine.counters(), "forward_passes")); };
  Tokens tokens = tests::make_request(10, 1).prompt;
  const Tokens first = drafts_of(*drafter, {text_to_draft(0, tokens, 4)}).front();
  CHECK(first.size() == 4);
  CHECK(passes() == 3 + 3);  // the prompt in chunks of 4, then a step for each further draft
  REQUIRE(engine.manager().sequences().size() == 1);
  const int sequence = engine.manager().sequences().front();
  CHECK(engine.manager().length(sequence) == 10);
  CHECK(engine.blocks_copied() == 1);           // the fork's last block
  CHECK(engine.manager().usage().cached == 4);  // that one, which is full now: no text writes to it any more

  // The first draft was right, the second was not.
  tokens.push_back(first[0]);
  tokens.push_back((first[1] + 1) % tests::kSmallVocabulary);
  drafts_of(*drafter, {text_to_draft(0, tokens, 1)});
  CHECK(passes() == 6 + 1);
  CHECK(engine.manager().sequences() == std::vector<int>{sequence});
  CHECK(engine.manager().length(sequence) == 12);

  // One that is shorter than what it has, the same once more, and a longer one with another beginning: it begins again.
  for (const Tokens& other : {tests::make_request(6, 1, 1).prompt, tests::make_request(6, 1, 1).prompt,
                              tests::make_request(11, 1, 2).prompt}) {
    const std::shared_ptr<stage::DraftModel> fresh = tests::make_draft_model(tests::small_model());
    CHECK(drafts_of(*drafter, {text_to_draft(0, other, 4)}) == drafts_of(*fresh, {text_to_draft(0, other, 4)}));
    CHECK(engine.manager().sequences().size() == 1);
  }
  drafter->forget(1);
  CHECK(engine.manager().sequences().size() == 1);
  drafter->forget(0);
  CHECK(tests::leak_of(*drafter) == kNoProblem);
}

TEST_CASE("a draft model drafts for all texts of a step at once") {
  const std::shared_ptr<stage::DraftModel> drafter = tests::make_draft_model(tests::small_model());
  const auto passes_with = [&](int num_tokens) {
    const double before = common::counter(drafter->engine().counters(), "forward_passes");
    std::vector<stage::DraftedText> texts;
    for (int i = 0; i < 3; ++i) {
      texts.push_back(text_to_draft(i, tests::make_request(num_tokens, 1, i).prompt, 2 + i));
    }
    drafts_of(*drafter, texts);
    return common::counter(drafter->engine().counters(), "forward_passes") - before;
  };
  CHECK(passes_with(9) == 3.0 + 3.0);   // each prompt, then the drafts 2 to 4
  CHECK(passes_with(11) == 1.0 + 3.0);  // what the texts have gained
}

TEST_CASE(
    "a draft model without room: the texts that were drafted least recently are dropped, and else there are no "
    "drafts") {
  const std::shared_ptr<stage::DraftModel> drafter =
      tests::make_draft_model(tests::small_model(), {.num_slots = 32, .block_size = 4});
  stage::KvCacheManager& manager = drafter->engine().manager();
  const auto text = [](int request, int num_tokens = 9) {  // of three blocks
    return text_to_draft(request, tests::make_request(num_tokens, 1, request).prompt, 1);
  };
  drafts_of(*drafter, {text(1)});
  drafts_of(*drafter, {text(2)});
  CHECK(manager.sequences().size() == 2);
  CHECK(drafts_of(*drafter, {text(3)}).front().size() == 1);  // the first text's blocks
  CHECK(manager.sequences().size() == 2);
  const auto passes = [&] { return common::counter(drafter->engine().counters(), "kv_bytes_read"); };
  const double before = passes();
  drafts_of(*drafter, {text(2, 10), text(3, 10)});  // both are still there: a token each
  CHECK(passes() - before == 20.0 * static_cast<double>(drafter->engine().cache().bytes_per_slot));
  const std::vector<Tokens> drafts = drafts_of(*drafter, {text(2, 11), text(3, 11), text(1)});
  CHECK(drafts[0].size() == 1);
  CHECK(drafts[1].size() == 1);
  CHECK(drafts[2].empty());
  CHECK(tests::check_ledger(manager, 8, 4) == kNoProblem);

  // The last draft is drawn and not computed. A text can have 32 tokens here, and 48 in the model's context.
  stage::DraftedText longest = text_to_draft(4, Tokens(30, 1), 8);
  CHECK(drafter->begin(longest) == 3);
  longest.tokens.resize(33, 1);
  CHECK(drafter->begin(longest) == 0);
  // A large model may know more tokens.
  stage::DraftedText unknown = text_to_draft(5, {1, tests::kSmallVocabulary}, 8);
  CHECK(drafter->begin(unknown) == 0);
}

TEST_CASE("a draft model that fails drafts no more, and the texts are the same") {
  for (const tests::RunnerCall call : {tests::RunnerCall::kEnqueue, tests::RunnerCall::kWait}) {
    for (const int num_before : {0, 1, 3}) {
      stage::EngineOptions options{.num_slots = 256, .gpu = {.device = stage::Device::kCpu}};
      const std::shared_ptr<const common::Llama> model(std::shared_ptr<void>(), &tests::small_model());
      auto made = std::make_unique<tests::FakeRunner>(stage::make_runner(*model, options));
      tests::FakeRunner& runner = *made;
      Drafted drafted(std::make_shared<stage::DraftModel>(model, tests::kSmallVocabulary, options, std::move(made)));
      int num_results = 0;
      runner.on_result([&](stage::StepResult&) {
        if (++num_results == num_before) {
          runner.fail(call);
        }
      });
      if (num_before == 0) {
        runner.fail(call);
      }
      std::vector<stage::GenerationRequest> requests;
      for (int i = 0; i < 3; ++i) {
        requests.push_back({.request = tests::make_request(3 + 4 * i, 20, i), .num_samples = i == 2 ? 2 : 1});
      }
      CHECK(drafted.serve(requests) == kNoProblem);
      CHECK(drafted.drafter->has_failed());
    }
  }
}

TEST_CASE("samples of one prompt share it in the draft model's pages, too") {
  Drafted drafted(tests::make_draft_model(tests::small_model(), {.num_slots = 256, .block_size = 4}));
  CHECK(drafted.serve({{.request = tests::make_request(12, 12), .num_samples = 3}}) == kNoProblem);
  CHECK(common::counter(drafted.drafter->engine().counters(), "prefix_hits") == 2.0);
}

TEST_CASE("the vocabulary of a draft model has to be the model's") {
  const auto problem_of = [](const std::vector<std::string>& model, const std::vector<std::string>& draft) {
    const auto bytes_of = [](const std::vector<std::string>& tokens) {
      return tests::GgufBuilder().add_array("tokenizer.ggml.tokens", tokens).build();
    };
    const tests::Bytes of_model = bytes_of(model);
    const tests::Bytes of_draft = bytes_of(draft);
    try {
      stage::check_vocabularies(common::Gguf::parse(of_model, "model"), common::Gguf::parse(of_draft, "draft"));
    } catch (const common::InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string begin = "draft: a draft model needs the model's vocabulary: ";
  CHECK(problem_of({"a", "b"}, {"a", "b"}) == kNoProblem);
  CHECK(problem_of({"a", "b", "c"}, {"a", "x", "y"}) == begin + "token 1 is \"x\", and the model's is \"b\"");
  std::vector<std::string> filled(130, "filling");
  filled[0] = "a";
  filled[1] = "b";
  CHECK(problem_of({"a", "b"}, filled) == kNoProblem);
  CHECK(problem_of(filled, {"a", "b"}) == kNoProblem);
  filled.emplace_back("filling");
  CHECK(problem_of({"a", "b"}, filled) == begin + "it has 131 tokens, and the model has 2");
}

TEST_CASE("a draft model's steps are booked: a share of the model's for each draft") {
  stage::DraftAccount account({.per_token = 0.25, .per_draft = 0.5});
  account.book(4, 4);  // costs 1 for the drafts and 0.5 x (4 + 1) for making them: leaves 0.5
  account.book(4, 3);  // costs 1 and 0.5 x 4.75, and saves 3
  CHECK(account.may_draft());
  // Of two texts: 2, and 0.5 x (4 x 1.25 + 6 x 0.25); 3.75 are saved.
  account.book(4, 3, 2);
  CHECK_FALSE(account.may_draft());

  // Where not even right drafts pay, pauses grow.
  stage::DraftAccount dear({.per_token = 0.25, .per_draft = 1.0});
  std::vector<int> pauses;
  for (int i = 0; i < 3; ++i) {
    dear.book(3, 3);
    pauses.push_back(1);
    for (; !dear.may_draft(); ++pauses.back()) {
    }
  }
  CHECK(pauses == std::vector<int>{16, 32, 64});

  const stage::EngineOptions options{.num_slots = 64, .gpu = {.device = stage::Device::kCpu}};
  stage::Engine engine(tests::small_model(), options);
  const std::shared_ptr<stage::DraftModel> itself = tests::make_draft_model(tests::small_model(), options);
  const std::shared_ptr<stage::DraftModel> smaller = tests::make_draft_model(tests::other_model(), options);
  CHECK(itself->cost_of_draft(engine) == 1.0);
  CHECK(smaller->cost_of_draft(engine) == static_cast<double>(tests::other_model().weight_bytes_per_token()) /
                                              static_cast<double>(tests::small_model().weight_bytes_per_token()));

  // So the model itself soon stops drafting, although all drafts are right.
  stage::VirtualClock clock;
  stage::EngineOptions with_drafts = options;
  with_drafts.num_speculative_tokens = 8;
  stage::Engine large(tests::small_model(), with_drafts);
  const auto server = stage::make_speculating_server(large, {}, clock, std::nullopt, itself);
  int num_steps_with_drafts = 0;
  server->on_step([&](const stage::StepReport& report) { num_steps_with_drafts += report.drafts.empty() ? 0 : 1; });
  server->submit({.request = tests::make_request(6, 30)});
  while (server->step()) {
  }
  CHECK(num_steps_with_drafts == 2);  // the second one after a pause of 16 steps
}

TEST_CASE("the draft model's cache: as many slots as the model's or, on a GPU, a tenth of the memory for eight texts") {
  stage::EngineOptions options{.num_slots = 1000, .max_sequences = 64, .prefix_cache = false, .num_host_slots = 50};
  options.gpu.tensor_parallel = 2;
  CHECK(stage::draft_engine_options(options).num_slots == 1000);
  CHECK(stage::draft_engine_options(options).prefix_cache);
  CHECK(stage::draft_engine_options(options).num_host_slots == 0);
  CHECK(stage::draft_engine_options(options).gpu.tensor_parallel == 1);
  options.num_slots = std::nullopt;
  options.min_slots = 16;
  const stage::MemoryShare share =
      stage::memory_share(tests::small_model().config(), stage::draft_engine_options(options));
  CHECK(share.memory_fraction == 0.1);
  CHECK(share.max_slots == std::int64_t{8} * tests::kSmallContext);
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
  account.book(7, 1);  // it lives on what the last ones have earned
  CHECK(account.may_draft());
  CHECK(account.num_drafts(8) == 3);
  for (int i = 0; i < 4; ++i) {
    account.book(3, 0);
  }
  CHECK_FALSE(account.may_draft());
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
  CHECK(stage::LookUp({.per_token = 0.3}).min_match() == 3);
  CHECK(stage::LookUp({.per_token = 0.1}).min_match() == 2);
  CHECK(stage::LookUp({.per_token = 0.1, .per_step = 0.2}).min_match() == 3);  // with 0.2, three cost 0.5
  CHECK(stage::LookUp(stage::kCpuTokenCost).min_match() == 3);
  CHECK(stage::LookUp(stage::gpu_token_cost(32, 15e9)).min_match() == 1);  // the shape of Llama 3 8B
  CHECK(stage::LookUp(stage::gpu_token_cost(16, 2.5e9)).min_match() == 2);
  CHECK(stage::LookUp(stage::gpu_token_cost(6, 10e6)).min_match() == 3);
  CHECK(stage::LookUp({.per_token = 0.0}).min_match() == 1);
  stage::DraftAccount cheap({.per_token = 0.0});
  CHECK(cheap.num_drafts(8) == 3);
  for (int i = 0; i < 100; ++i) {
    cheap.book(3, 0);  // where a draft costs nothing, none is too many
    CHECK(cheap.may_draft());
  }
}

TEST_CASE("how many drafts a request may ask for") {
  tests::ServingOptions options;
  options.speculates = true;
  tests::Serving serving(options);
  stage::GenerationRequest request{.request = tests::make_request(4, 4)};
  for (const int wanted : {-1, 9, 1000}) {
    request.request.num_speculative_tokens = wanted;
    const stage::RequestOutput& output = serving.server.output(serving.submit(request));
    CHECK(output.finish_reason == common::FinishReason::kRejected);
    CHECK(output.error == std::to_string(wanted) + " drafts in a step, and this server computes up to 8");
  }
  stage::EngineOptions engine_options{.gpu = {.device = stage::Device::kCpu}};
  engine_options.num_speculative_tokens = 9;
  stage::Engine engine(tests::small_model(), engine_options);
  stage::VirtualClock clock;
  CHECK_THROWS_AS(stage::make_server(engine, {}, clock), common::InputError);
}
