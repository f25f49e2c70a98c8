// Beam search, compared with a search that recomputes every text from its tokens. Compiled once for each stage, from
// the fifth on.
#include "tests/support/catch.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "common/base/tensor.h"
#include "common/base/text.h"
#include "common/model/default_model.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/sharing_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/reference_decoder.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

using common::Completion;
using common::FinishReason;
using common::Request;
using common::Token;
using tests::alone;
using tests::BeamSearch;
using tests::blocks_in_use;
using tests::every_kth_token;
using tests::ledger;
using tests::make_engine;
using tests::make_request;
using tests::run_beside_others;
using tests::run_to_end;
using tests::small_model;

namespace {

const std::string kNoProblem;

struct Found {
  std::vector<Token> tokens;  // with the stop token
  double log_probability = 0.0;
  double score = 0.0;
};

struct Expected {
  std::vector<Found> hypotheses;  // the best first
  // How close a decision was: between the last candidate kept and the first one dropped, or between the two best
  // hypotheses. Where it is tiny, rounding decides, and there is nothing to compare.
  double margin = std::numeric_limits<double>::infinity();
  bool is_clear() const { return margin > 1e-4; }
};

bool ends_with_stop_token(const Request& request, const std::vector<Token>& tokens) {
  return std::find(request.stop_tokens.begin(), request.stop_tokens.end(), tokens.back()) != request.stop_tokens.end();
}

bool stops(const Request& request, const std::vector<Token>& tokens) {
  return ends_with_stop_token(request, tokens) || request.stop_strings.found_after(tokens) ||
         static_cast<int>(tokens.size()) == request.max_new_tokens;
}

// Token i is spelled "<i>".
std::string spell(std::span<const Token> tokens) {
  std::string text;
  for (const Token token : tokens) {
    text += "<" + std::to_string(token) + ">";
  }
  return text;
}

// log p(token | prompt, tokens) for every token, computed from the whole text, in float64 from the logits on.
std::vector<double> next_log_probabilities(const common::Llama& model, const Request& request,
                                           const std::vector<Token>& tokens) {
  std::vector<Token> text = request.prompt;
  text.insert(text.end(), tokens.begin(), tokens.end());
  tests::ReferenceCache cache(model.config());
  const common::Matrix logits = tests::next_logits(model, cache, text);
  const std::span<const float> last = tests::row_of(logits, logits.rows() - 1);
  double sum = 0.0;
  for (const float logit : last) {
    sum += std::exp(static_cast<double>(logit));
  }
  std::vector<double> result;
  for (const float logit : last) {
    result.push_back(static_cast<double>(logit) - std::log(sum));
  }
  return result;
}

void rank(Expected& expected, double length_penalty) {
  for (Found& found : expected.hypotheses) {
    found.score = found.log_probability / std::pow(static_cast<double>(found.tokens.size()), length_penalty);
  }
  std::stable_sort(expected.hypotheses.begin(), expected.hypotheses.end(),
                   [](const Found& left, const Found& right) { return left.score > right.score; });
  if (expected.hypotheses.size() > 1) {
    expected.margin = std::min(expected.margin, expected.hypotheses[0].score - expected.hypotheses[1].score);
  }
}

std::vector<Found> extensions(const common::Llama& model, const Request& request, const std::vector<Found>& live) {
  std::vector<Found> result;
  for (const Found& branch : live) {
    const std::vector<double> next = next_log_probabilities(model, request, branch.tokens);
    for (std::size_t token = 0; token < next.size(); ++token) {
      result.push_back(branch);
      result.back().tokens.push_back(static_cast<Token>(token));
      result.back().log_probability += next[token];
    }
  }
  return result;
}

Expected search_by_recomputing(const common::Llama& model, const Request& request, std::size_t width,
                               double length_penalty) {
  Expected expected;
  std::vector<Found> live = {{}};
  while (!live.empty()) {
    std::vector<Found> candidates = extensions(model, request, live);
    std::stable_sort(candidates.begin(), candidates.end(), [](const Found& left, const Found& right) {
      return left.log_probability > right.log_probability;
    });
    const std::size_t places = width - expected.hypotheses.size();
    if (candidates.size() > places) {
      expected.margin =
          std::min(expected.margin, candidates[places - 1].log_probability - candidates[places].log_probability);
      candidates.resize(places);
    }
    live.clear();
    for (const Found& candidate : candidates) {
      (stops(request, candidate.tokens) ? expected.hypotheses : live).push_back(candidate);
    }
  }
  rank(expected, length_penalty);
  return expected;
}

// All possible texts.
Expected enumerate(const common::Llama& model, const Request& request, double length_penalty) {
  Expected expected;
  std::vector<Found> live = {{}};
  while (!live.empty()) {
    std::vector<Found> next;
    for (const Found& text : extensions(model, request, live)) {
      (stops(request, text.tokens) ? expected.hypotheses : next).push_back(text);
    }
    live = next;
  }
  rank(expected, length_penalty);
  return expected;
}

// The best text is the best of all; the others are the expected texts, with the same scores.
std::string compare_hypotheses(const BeamSearch& search, const Request& request, const Expected& expected) {
  if (search.hypotheses().size() != expected.hypotheses.size()) {
    return common::format("%zu texts, expected %zu", search.hypotheses().size(), expected.hypotheses.size());
  }
  for (std::size_t i = 0; i < search.hypotheses().size(); ++i) {
    const stage::Hypothesis& hypothesis = search.hypotheses()[i];
    // A hypothesis does not show its stop token, so that several may show the same.
    const auto has_tokens = [&](const Found& found) {
      const bool with_stop = ends_with_stop_token(request, found.tokens);
      const bool is_stopped = with_stop || request.stop_strings.found_after(found.tokens);
      return (hypothesis.finish_reason == FinishReason::kStop) == is_stopped &&
             std::equal(hypothesis.tokens.begin(), hypothesis.tokens.end(), found.tokens.begin(),
                        found.tokens.end() - (with_stop ? 1 : 0));
    };
    const auto same = std::find_if(expected.hypotheses.begin(), expected.hypotheses.end(), [&](const Found& found) {
      return has_tokens(found) && std::abs(found.log_probability - hypothesis.log_probability) < 1e-4;
    });
    if (same == expected.hypotheses.end()) {
      const auto near = std::find_if(expected.hypotheses.begin(), expected.hypotheses.end(), has_tokens);
      const std::string found = tests::to_string(hypothesis.tokens) +
                                common::format(" with a log probability of %g", hypothesis.log_probability);
      return near == expected.hypotheses.end() ? "not expected: " + found
                                               : found + common::format(", expected %g", near->log_probability);
    }
    if (!(std::abs(same->score - hypothesis.score) < 1e-4)) {
      return common::format("a score of %g, expected %g", hypothesis.score, same->score);
    }
    if (i == 0 && same != expected.hypotheses.begin()) {
      return "the best is " + tests::to_string(hypothesis.tokens) + ", expected " +
             tests::to_string(expected.hypotheses.front().tokens);
    }
    if (i > 0 && hypothesis.score > search.hypotheses()[i - 1].score) {
      return "not sorted";
    }
  }
  return "";
}

// A row of logits that gives these tokens their log probabilities, and divides what is left among the others.
common::Matrix logits_of(const std::map<Token, double>& log_probabilities) {
  double rest = 1.0;
  for (const auto& [token, log_probability] : log_probabilities) {
    rest -= std::exp(log_probability);
  }
  const auto num_others = static_cast<double>(tests::kSmallVocabulary) - static_cast<double>(log_probabilities.size());
  common::Matrix logits =
      common::Matrix::Constant(1, tests::kSmallVocabulary, static_cast<float>(std::log(rest / num_others)));
  for (const auto& [token, log_probability] : log_probabilities) {
    logits(0, token) = static_cast<float>(log_probability);
  }
  return logits;
}

// A search whose logits are made up: the prompt counts as computed, and no model runs.
class ByHand {
 public:
  ByHand(const Request& request, const stage::BeamOptions& options)
      : engine_(make_engine(256, 4)),
#if STAGE_NUMBER < 8
        search_(*engine_, request, options) {
#else
        search_(engine_->manager(), ids_, 0, request, options) {
#endif
    const auto length = static_cast<int>(request.prompt.size());
    REQUIRE(engine_->manager().allocate(search_.live().front().sequence, length));
    engine_->manager().commit(search_.live().front().sequence, length);
  }

  const stage::BeamSearch& search() const { return search_; }
  void extend(std::vector<common::Matrix> logits) {
#if STAGE_NUMBER < 8
    search_.extend(std::move(logits));
#else
    search_.extend({{}, std::move(logits)}, 0.0);
#endif
  }
  std::vector<std::vector<Token>> texts() const {
    std::vector<std::vector<Token>> result;
    for (const stage::Branch& branch : search_.live()) {
      result.push_back(branch.tokens);
    }
    return result;
  }

 private:
  std::unique_ptr<stage::Engine> engine_;
#if STAGE_NUMBER >= 8
  stage::SequenceIds ids_;
#endif
  stage::BeamSearch search_;
};

// Different texts have different blocks: live branches share a block exactly if they agree up to its end.
int distinct_blocks(const Request& request, const std::vector<stage::Branch>& live, std::size_t block_size) {
  std::set<std::vector<Token>> prefixes;
  for (const stage::Branch& branch : live) {
    std::vector<Token> text = request.prompt;
    text.insert(text.end(), branch.tokens.begin(), branch.tokens.end() - 1);  // the cache lacks the last token
    for (std::size_t first = 0; first < text.size(); first += block_size) {
      const auto end = static_cast<std::ptrdiff_t>(std::min(first + block_size, text.size()));
      prefixes.insert({text.begin(), text.begin() + end});
    }
  }
  return static_cast<int>(prefixes.size());
}

const common::Llama& tiny_model(int seed) {
  static std::vector<common::Llama> models = [] {
    common::LlamaConfig config;
    config.vocab_size = 3;
    config.context_length = 16;
    config.hidden_size = 16;
    config.num_layers = 1;
    config.num_heads = 2;
    config.num_kv_heads = 1;
    config.head_dim = 8;
    config.feed_forward_size = 24;
    std::vector<common::Llama> result;
    for (std::uint64_t i = 0; i < 6; ++i) {
      result.emplace_back(config, i);
    }
    return result;
  }();
  return models.at(static_cast<std::size_t>(seed));
}

}  // namespace

TEST_CASE("beam: a width of one is greedy (stage 5, invariant 9)") {
  for (const int block_size : {1, 3, 16}) {
    for (const int length : {1, 3, 9}) {
      for (const int stop : {0, 7, 3}) {
        Request request = make_request(length, 12, length);
        request.stop_tokens = stop == 0 ? std::vector<Token>() : every_kth_token(stop);
        const auto engine = make_engine(64, block_size);
        BeamSearch search(*engine, request, {1, 1.0});
        run_to_end(search);
        const Completion greedy = alone(request);
        CAPTURE(block_size, length, stop);
        REQUIRE(search.hypotheses().size() == 1);
        CHECK(search.hypotheses()[0].tokens == greedy.tokens);
        CHECK(search.hypotheses()[0].finish_reason == greedy.finish_reason);
        CHECK(common::counter(engine->counters(), "blocks_copied") == 0);
        CHECK(blocks_in_use(*engine) == 0);
      }
    }
  }
}

TEST_CASE("beam: the search finds what one that recomputes every text finds, as many texts as it is wide") {
  constexpr int kStopText = -1;
  int num_compared = 0;
  int num_cases = 0;
  for (const int width : {1, 2, 3, 4, 5, 6}) {
    for (const double length_penalty : {0.0, 0.5, 1.0}) {
      for (const int stop : {0, 20, 9, kStopText}) {
        if (tests::kSanitized && width % 2 == 0) {
          continue;
        }
        Request request = make_request(5, 7, width + stop);
        request.stop_tokens = stop <= 0 ? std::vector<Token>() : every_kth_token(stop);
        if (stop == kStopText) {
          request.stop_strings = common::StopStrings({"7", "0><"}, spell);
        }
        const Expected expected =
            search_by_recomputing(small_model(), request, static_cast<std::size_t>(width), length_penalty);
        num_cases += 1;
        if (!expected.is_clear()) {
          continue;
        }
        num_compared += 1;
        const auto engine = make_engine(512, 3);
        BeamSearch search(*engine, request, {width, length_penalty});
        run_to_end(search);
        CAPTURE(width, length_penalty, stop, expected.margin);
        CHECK(compare_hypotheses(search, request, expected) == kNoProblem);
        CHECK(search.hypotheses().size() == static_cast<std::size_t>(width));
        CHECK(blocks_in_use(*engine) == 0);
      }
    }
  }
  CAPTURE(num_compared, num_cases);
  CHECK(num_compared * 3 > num_cases * 2);
}

TEST_CASE("beam: a search as wide as the tree is exhaustive (stage 5, invariant 9)") {
  int num_compared = 0;
  for (int seed = 0; seed < (tests::kSanitized ? 2 : 6); ++seed) {
    for (const double length_penalty : {0.0, 0.5, 1.0, 2.0}) {
      for (const bool with_stop : {false, true}) {
        Request request;
        request.prompt = {1, 0, static_cast<Token>(seed % 3)};
        request.max_new_tokens = 4;
        if (with_stop) {
          request.stop_tokens = {2};
        }
        const Expected expected = enumerate(tiny_model(seed), request, length_penalty);
        // 3^4 texts; with a stop token 1 + 2 + 4 that end early, and 8 * 3.
        REQUIRE(expected.hypotheses.size() == (with_stop ? 31U : 81U));
        if (!expected.is_clear()) {
          continue;
        }
        num_compared += 1;
        const auto engine = make_engine(1024, 2, tiny_model(seed));
        BeamSearch search(*engine, request, {81, length_penalty});
        run_to_end(search);
        CAPTURE(seed, length_penalty, with_stop);
        CHECK(compare_hypotheses(search, request, expected) == kNoProblem);
        CHECK(blocks_in_use(*engine) == 0);
      }
    }
  }
  CHECK(num_compared > (tests::kSanitized ? 8 : 30));
}

TEST_CASE("beam: a text that has ended early never costs the others their places, whatever the penalty") {
  int num_compared = 0;
  for (int seed = 0; seed < 6; ++seed) {
    for (Token first = 0; first < 3; ++first) {
      for (const double length_penalty : {0.0, 0.5, 1.0, 2.0, 4.0}) {
        for (const int width : {2, 3}) {
          Request request;
          request.prompt = {1, first};
          request.max_new_tokens = 8;
          request.stop_tokens = {static_cast<Token>(seed % 3)};
          const common::Llama& model = tiny_model(seed);
          const Expected expected =
              search_by_recomputing(model, request, static_cast<std::size_t>(width), length_penalty);
          if (!expected.is_clear()) {
            continue;
          }
          num_compared += 1;
          const auto engine = make_engine(128, 4, model);
          BeamSearch search(*engine, request, {width, length_penalty});
          run_to_end(search);
          CAPTURE(seed, first, length_penalty, width);
          CHECK(compare_hypotheses(search, request, expected) == kNoProblem);
        }
      }
    }
  }
  CHECK(num_compared > 100);
}

TEST_CASE("beam: the search continues for a text that wins later, thanks to its length") {
  const common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  const common::Llama model(file);
  const common::Tokenizer tokenizer(file);
  const auto argmax = [](const std::vector<double>& log_probabilities) {
    return static_cast<Token>(std::max_element(log_probabilities.begin(), log_probabilities.end()) -
                              log_probabilities.begin());
  };
  const auto search_both = [&](const Request& request, double length_penalty) {
    const Expected expected = search_by_recomputing(model, request, 2, length_penalty);
    const auto engine = make_engine(256, 16, model);
    BeamSearch search(*engine, request, {2, length_penalty});
    run_to_end(search);
    CAPTURE(length_penalty, request.stop_tokens);
    CHECK(compare_hypotheses(search, request, expected) == kNoProblem);
    return search.hypotheses().front();
  };
  Request request;
  request.max_new_tokens = 8;

  constexpr double kLengthPenalty = 8.0;
  request.prompt = tokenizer.encode_prompt("Once upon a");
  std::vector<double> next = next_log_probabilities(model, request, {});
  request.stop_tokens = {argmax(next)};
  std::partial_sort(next.begin(), next.begin() + 2, next.end(), std::greater<>());
  // The text that ends at once is ahead of the other branch, also of that branch with one more token for free.
  REQUIRE(next[0] > next[1] / std::pow(2.0, kLengthPenalty));
  CHECK(search_both(request, kLengthPenalty).tokens.size() == 8);
}

TEST_CASE("beam: branches share a block where their texts agree, and losing ones keep none (stage 5, invariant 6)") {
  for (const int block_size : {1, 2, 3, 5}) {
    for (const int width : {2, 4, 7}) {
      for (const int stop : {0, 12}) {
        Request request = make_request(6, 12, width);
        request.stop_tokens = stop == 0 ? std::vector<Token>() : every_kth_token(stop);
        const auto engine = make_engine(512, block_size);
        BeamSearch search(*engine, request, {width, 1.0});
        while (!search.finished()) {
          REQUIRE(search.step());
          CAPTURE(block_size, width, stop, search.live().size());
          CHECK(blocks_in_use(*engine) ==
                distinct_blocks(request, search.live(), static_cast<std::size_t>(block_size)));
          CHECK(engine->manager().sequences().size() == search.live().size());
          CHECK(ledger(*engine) == kNoProblem);
        }
        CHECK(blocks_in_use(*engine) == 0);
      }
    }
  }
}

TEST_CASE("beam: ties go to the better branch, then to the lower token") {
  Request request = make_request(3, 4, 0);
  ByHand beam(request, {3, 1.0});
  const common::Matrix all_equal = logits_of({});
  beam.extend({all_equal});
  CHECK(beam.texts() == std::vector<std::vector<Token>>{{0}, {1}, {2}});
  beam.extend({all_equal, all_equal, all_equal});
  CHECK(beam.texts() == std::vector<std::vector<Token>>{{0, 0}, {0, 1}, {0, 2}});
}

TEST_CASE("beam: a search ends when all its texts have ended, however far they are behind") {
  Request request = make_request(3, 3, 0);
  request.stop_tokens = {5};
  ByHand beam(request, {2, 1.0});
  beam.extend({logits_of({{5, -0.1}, {7, -3.1}})});
  CHECK(beam.search().hypotheses().size() == 1);
  CHECK(beam.texts() == std::vector<std::vector<Token>>{{7}});
  beam.extend({logits_of({{8, -0.1}})});
  CHECK(beam.texts() == std::vector<std::vector<Token>>{{7, 8}});
  beam.extend({logits_of({{9, -0.1}})});
  CHECK(beam.search().finished());
  REQUIRE(beam.search().hypotheses().size() == 2);
  CHECK(beam.search().hypotheses()[0].tokens.empty());
  CHECK(beam.search().hypotheses()[0].finish_reason == FinishReason::kStop);
  CHECK(beam.search().hypotheses()[1].tokens == std::vector<Token>{7, 8, 9});
  CHECK(beam.search().hypotheses()[1].finish_reason == FinishReason::kLength);
}

TEST_CASE("beam: a text ends with the token that completes a stop string, and counts all its tokens") {
  Request request = make_request(3, 3, 0);
  request.stop_strings = common::StopStrings({"7><9"}, spell);
  ByHand beam(request, {2, 1.0});
  beam.extend({logits_of({{5, -1.0}, {7, -1.2}})});
  beam.extend({logits_of({{8, -0.1}}), logits_of({{9, -0.3}})});
  CHECK(beam.texts() == std::vector<std::vector<Token>>{{5, 8}});
  REQUIRE(beam.search().hypotheses().size() == 1);
  const stage::Hypothesis& stopped = beam.search().hypotheses().front();
  CHECK(stopped.tokens == std::vector<Token>{7, 9});
  CHECK(stopped.finish_reason == FinishReason::kStop);
  CHECK(std::abs(stopped.score + 1.5 / 2.0) < 1e-5);
}

TEST_CASE("beam: when the blocks run out, nothing has changed, and the search continues later (stage 5, invariant 7)") {
  Request request = make_request(5, 7, 2);
  request.stop_tokens = every_kth_token(15);
  const auto roomy = make_engine(512, 3);
  BeamSearch expected(*roomy, request, {4, 1.0});
  run_to_end(expected);
  int num_refused = 1;
  for (int num_left = 0; num_refused > 0; ++num_left) {
    REQUIRE(num_left < 40);
    const auto engine = make_engine(40 * 3, 3);
    BeamSearch search(*engine, request, {4, 1.0});
    std::string problem;
    num_refused = run_beside_others(*engine, search, num_left, problem);
    CAPTURE(num_left);
    CHECK(problem == kNoProblem);
    REQUIRE(search.hypotheses().size() == expected.hypotheses().size());
    for (std::size_t i = 0; i < search.hypotheses().size(); ++i) {
      CHECK(search.hypotheses()[i].tokens == expected.hypotheses()[i].tokens);
      CHECK(search.hypotheses()[i].log_probability == expected.hypotheses()[i].log_probability);
    }
    CHECK((num_refused > 0 || num_left >= 5));
  }
}
