// What holds as soon as sequences share blocks: forks, copies before writes, several samples and beams of one prompt.
// Compiled once a stage, from the fifth on.
#include "tests/support/catch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "common/app/compare.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/model/default_model.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/ledger.h"
#include "tests/support/reference_decoder.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

// clang-format off
#include STAGE_HEADER(demo/sampling_commands.h)
// clang-format on

using common::CheckError;
using common::Completion;
using common::FinishReason;
using common::Request;
using common::Token;
using stage::BlockCopy;
using stage::KvCacheManager;
using tests::BeamSearch;
using tests::check_ledger;
using tests::make_request;
using tests::ParallelSampling;
using tests::small_model;
using tests::Snapshot;
using tests::take_snapshot;

namespace {

const std::string kNoProblem;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- One number a token --------------------------------------------------------------------------------------------

using Numbers = std::vector<float>;

// A cache whose tokens are single numbers above zero: K is the number, V its negative.
class NumberPool {
 public:
  NumberPool(int num_blocks, int block_size)
      : num_blocks_(num_blocks),
        manager_(tests::make_manager(num_blocks, block_size)),
        cache_(tests::cache_shape({1, 1, 1, 1}, num_blocks, block_size)) {
    cache_.fill(kNaN);
  }

  KvCacheManager& manager() { return manager_; }
  std::string ledger() const { return check_ledger(manager_, num_blocks_, manager_.block_size()); }
  int num_free() const { return static_cast<int>(manager_.free_blocks().size()); }

  // A sequence of these numbers.
  void start(int sequence, const Numbers& numbers) {
    REQUIRE(manager_.allocate(sequence, static_cast<int>(numbers.size())));
    write(sequence, numbers);
  }

  bool append(int sequence, const Numbers& numbers) {
    if (!manager_.reserve(sequence, static_cast<int>(numbers.size()))) {
      return false;
    }
    execute(tests::take_copies(manager_));
    write(sequence, numbers);
    return true;
  }

  void execute(const std::vector<BlockCopy>& copies) { cache_.copy_blocks(copies); }

  // Into slots that are reserved, with all copies carried out.
  void write(int sequence, const Numbers& numbers) {
    const auto count = static_cast<int>(numbers.size());
    REQUIRE(tests::check_writable(manager_, sequence, count) == kNoProblem);
    const common::Matrix k = common::MatrixView(numbers.data(), count, 1);
    cache_.write(0, manager_.slots(sequence, manager_.length(sequence), count), k, -k);
    manager_.commit(sequence, count);
  }

  // What the sequence finds in its slots. A V that does not belong to its K is returned as -1.
  Numbers read(int sequence) const {
    Numbers result;
    for (const int slot : manager_.slots(sequence, 0, manager_.length(sequence))) {
      const float k = cache_.keys(0, 0, slot, 1)(0, 0);
      result.push_back(cache_.values(0, 0, slot, 1)(0, 0) == -k ? k : -1.0F);
    }
    return result;
  }

  // Every float of the cache, 0 for NaN.
  Numbers all() const {
    Numbers result;
    for (int slot = 0; slot < manager_.usage().total; ++slot) {
      for (const float value : {cache_.keys(0, 0, slot, 1)(0, 0), cache_.values(0, 0, slot, 1)(0, 0)}) {
        result.push_back(std::isnan(value) ? 0.0F : value);
      }
    }
    return result;
  }

 private:
  int num_blocks_;
  KvCacheManager manager_;
  stage::KvCache cache_;
};

// first, first + 1, …
Numbers count_from(int first, int count) {
  Numbers result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), static_cast<float>(first));
  return result;
}

Numbers joined(Numbers left, const Numbers& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

std::vector<std::pair<int, int>> pairs(const std::vector<BlockCopy>& copies) {
  std::vector<std::pair<int, int>> result;
  result.reserve(copies.size());
  for (const BlockCopy& copy : copies) {
    result.emplace_back(copy.source, copy.destination);
  }
  return result;
}
using Copies = std::vector<std::pair<int, int>>;

// ---- Engines -------------------------------------------------------------------------------------------------------

stage::EngineOptions make_options(int num_slots, int block_size) {
  stage::EngineOptions options;
  options.num_slots = num_slots;
  options.block_size = block_size;
  return options;
}

// With a cache full of NaN.
std::unique_ptr<stage::Engine> make_engine(int num_slots, int block_size, const common::Llama& model = small_model()) {
  auto engine = std::make_unique<stage::Engine>(model, make_options(num_slots, block_size));
  engine->cache().fill(kNaN);
  return engine;
}

std::string ledger(stage::Engine& engine) {
  return check_ledger(engine.manager(), engine.cache().shape().num_blocks, engine.cache().shape().block_size);
}

int blocks_in_use(stage::Engine& engine) {
  return engine.manager().usage().reserved / engine.cache().shape().block_size;
}

// What the request gets in a roomy engine of its own.
Completion alone(const Request& request) {
  const auto engine = make_engine(4096, 16);
  return tests::run_requests(*engine, std::span(&request, 1)).completions.front();
}

std::vector<Completion> samples_alone(Request request, int num_samples) {
  std::vector<Completion> result;
  for (int i = 0; i < num_samples; ++i, ++request.sample_index) {
    result.push_back(alone(request));
  }
  return result;
}

Request sampled_request(int num_tokens, int max_new_tokens, float temperature, std::uint64_t seed = 1) {
  Request request = make_request(num_tokens, max_new_tokens, static_cast<int>(seed));
  request.sampling.temperature = temperature;
  request.sampling.seed = seed;
  return request;
}

// Every k-th token ends the text: often enough for some samples and beams to end early.
std::vector<Token> every_kth_token(int k) {
  std::vector<Token> result;
  for (Token token = 0; token < tests::kSmallVocabulary; token += k) {
    result.push_back(token);
  }
  return result;
}

std::string compare_texts(const std::vector<Completion>& actual, const std::vector<Completion>& expected) {
  if (actual.size() != expected.size()) {
    return "another number of texts";
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (actual[i].tokens != expected[i].tokens || actual[i].finish_reason != expected[i].finish_reason) {
      return common::format("text %zu is ", i) + tests::to_string(actual[i].tokens) + ", expected " +
             tests::to_string(expected[i].tokens);
    }
  }
  return "";
}

template <typename Decoding>
void run_to_end(Decoding& decoding) {
  while (!decoding.finished()) {
    REQUIRE(decoding.step());
  }
}

// Everything that a step may change but the texts themselves.
struct State {
  Snapshot books;
  std::vector<int> sequences;
  std::vector<std::vector<Token>> tokens;
  bool operator==(const State&) const = default;
};

template <typename Decoding>
State state_of(stage::Engine& engine, const Decoding& decoding) {
  State state{take_snapshot(engine.manager()), {}, {}};
  for (const stage::Branch& branch : decoding.live()) {
    state.sequences.push_back(branch.sequence);
    state.tokens.push_back(branch.tokens);
  }
  return state;
}

// Sequences that hold all blocks but some, a block each.
class Occupants {
 public:
  Occupants(KvCacheManager& manager, int num_left) : manager_(manager) {
    while (static_cast<int>(manager_.free_blocks().size()) > num_left) {
      REQUIRE(manager_.allocate(kFirst + count_++, 1));
    }
  }
  bool leave_one() {
    if (count_ > 0) {
      manager_.free(kFirst + --count_);
      return true;
    }
    return false;
  }

 private:
  static constexpr int kFirst = 1000000;
  KvCacheManager& manager_;
  int count_ = 0;
};

// Runs the decoding to its end while others hold all blocks but num_left, and give one back whenever a step is refused.
// Returns how often that was; `problem` says what a refused step has changed (stage 5, invariant 7).
template <typename Decoding>
int run_beside_others(stage::Engine& engine, Decoding& decoding, int num_left, std::string& problem) {
  Occupants others(engine.manager(), num_left);
  int num_refused = 0;
  while (!decoding.finished() && problem.empty()) {
    const State before = state_of(engine, decoding);
    if (!decoding.step()) {
      num_refused += 1;
      if (!(state_of(engine, decoding) == before)) {
        problem = "a refused step changed something";
      } else if (!engine.manager().pending_copies().empty()) {
        problem = "a refused step planned a copy";
      } else if (!others.leave_one()) {
        problem = "refused with all blocks free";
      }
    }
    problem += ledger(engine);
  }
  while (others.leave_one()) {
  }
  if (problem.empty() && blocks_in_use(engine) != 0) {
    problem = "some blocks were not given back";
  }
  return num_refused;
}

// ---- What beam search should find ----------------------------------------------------------------------------------

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

bool stops(const Request& request, const std::vector<Token>& tokens) {
  return std::find(request.stop_tokens.begin(), request.stop_tokens.end(), tokens.back()) !=
             request.stop_tokens.end() ||
         static_cast<int>(tokens.size()) == request.max_new_tokens;
}

// log p(token | prompt, tokens) for every token, computed from nothing, in float64 from the logits on.
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

// A beam that never ends early.
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

// All texts there are.
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

// The best text is the best of all; the others are among those expected, with the same scores. A search that ends
// early has fewer.
std::string compare_hypotheses(const BeamSearch& search, const Expected& expected) {
  if (search.hypotheses().empty()) {
    return "nothing was found";
  }
  for (std::size_t i = 0; i < search.hypotheses().size(); ++i) {
    const stage::Hypothesis& hypothesis = search.hypotheses()[i];
    const auto same = std::find_if(expected.hypotheses.begin(), expected.hypotheses.end(), [&](const Found& found) {
      // A hypothesis does not show its stop token.
      const bool with_stop = hypothesis.finish_reason == FinishReason::kStop;
      return std::equal(hypothesis.tokens.begin(), hypothesis.tokens.end(), found.tokens.begin(),
                        found.tokens.end() - (with_stop ? 1 : 0)) &&
             std::abs(found.log_probability - hypothesis.log_probability) < 1e-4;
    });
    if (same == expected.hypotheses.end()) {
      return "not expected: " + tests::to_string(hypothesis.tokens);
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

// Blocks of different texts are different ones: live branches share a block exactly if they agree up to its end.
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

// ---- The manager and the cache -------------------------------------------------------------------------------------

TEST_CASE("fork: both own the blocks, none is taken and no float moves (stage 5, invariants 1 and 2)") {
  for (const int length : {0, 1, 3, 4, 6, 8, 11}) {
    CAPTURE(length);
    NumberPool pool(8, 4);
    pool.start(7, count_from(1, 1));  // so that the tables do not begin with block 0
    REQUIRE(pool.manager().allocate(0, 1));
    REQUIRE(pool.append(0, count_from(10, length)));
    const Snapshot before = take_snapshot(pool.manager());
    const Numbers floats = pool.all();
    pool.manager().fork(0, 1);
    pool.manager().fork(1, 2);

    CHECK(pool.all() == floats);
    CHECK(pool.manager().pending_copies().empty());
    CHECK(pool.manager().free_blocks() == before.free_blocks);
    for (const int child : {1, 2}) {
      CHECK(pool.manager().length(child) == length);
      CHECK(pool.read(child) == count_from(10, length));
      std::vector<int> with_tokens = pool.manager().block_table(0);
      with_tokens.resize(static_cast<std::size_t>((length + 3) / 4));
      CHECK(pool.manager().block_table(child) == with_tokens);
      for (const int block : with_tokens) {
        CHECK(pool.manager().reference_count(block) == 3);
      }
    }
    CHECK(pool.ledger() == kNoProblem);
  }
}

TEST_CASE("write: of N owners the first N - 1 copy, and the last writes in place (stage 5, invariants 3 and 4)") {
  for (int block_size = 2; block_size <= 5; ++block_size) {
    for (int length = 1; length <= 2 * block_size; ++length) {
      for (int num_owners = 1; num_owners <= 4; ++num_owners) {
        CAPTURE(block_size, length, num_owners);
        NumberPool pool(12, block_size);
        pool.start(0, count_from(1, length));
        for (int child = 1; child < num_owners; ++child) {
          pool.manager().fork(child - 1, child);
        }
        const std::vector<int> table = pool.manager().block_table(0);
        const bool is_partial = length % block_size != 0;
        // The parent neither first nor last.
        for (int i = 0; i < num_owners; ++i) {
          const int sequence = (i + 1) % num_owners;
          const bool is_last = i == num_owners - 1;
          REQUIRE(pool.manager().reserve(sequence, 1));
          const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
          const std::vector<int> written_to = pool.manager().block_table(sequence);
          if (is_partial && !is_last) {
            REQUIRE(copies.size() == 1);
            CHECK(copies[0].source == table.back());
            CHECK(copies[0].destination == written_to.back());
          } else {
            CHECK(copies.empty());
            CHECK(std::equal(table.begin(), table.end(), written_to.begin()));
          }
          pool.execute(copies);
          pool.write(sequence, count_from(100 * (sequence + 1), 1));
          CHECK(pool.ledger() == kNoProblem);
        }
        for (int sequence = 0; sequence < num_owners; ++sequence) {
          CHECK(pool.read(sequence) == joined(count_from(1, length), count_from(100 * (sequence + 1), 1)));
        }
      }
    }
  }
}

TEST_CASE("fork: what the parent has reserved ahead stays its own") {
  NumberPool pool(6, 4);
  REQUIRE(pool.manager().allocate(0, 11));
  pool.write(0, count_from(1, 5));
  pool.manager().fork(0, 1);
  CHECK(pool.manager().block_table(0) == std::vector<int>{0, 1, 2});
  CHECK(pool.manager().block_table(1) == std::vector<int>{0, 1});
  CHECK(pool.manager().reference_count(2) == 1);
  // Its partly filled block has another owner now; the block reserved ahead of it is used as it is.
  REQUIRE(pool.manager().reserve(0, 6));
  CHECK(pairs(tests::take_copies(pool.manager())) == Copies{{1, 3}});
  CHECK(pool.manager().block_table(0) == std::vector<int>{0, 3, 2});
  CHECK(pool.ledger() == kNoProblem);
}

TEST_CASE("free: exactly the private blocks come back, in every order of freeing (stage 5, invariant 6)") {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    NumberPool pool(16, 3);
    pool.start(0, count_from(1, 7));
    pool.manager().fork(0, 1);
    REQUIRE(pool.append(1, count_from(50, 4)));
    pool.manager().fork(1, 2);
    pool.manager().fork(0, 3);
    REQUIRE(pool.append(2, count_from(70, 1)));
    REQUIRE(pool.append(0, count_from(90, 3)));
    for (const int sequence : order) {
      CAPTURE(order, sequence);
      const Snapshot before = take_snapshot(pool.manager());
      std::set<int> expected(before.free_blocks.begin(), before.free_blocks.end());
      for (const int block : before.sequences.at(sequence).block_table) {
        if (before.reference_counts[static_cast<std::size_t>(block)] == 1) {
          expected.insert(block);
        }
      }
      pool.manager().free(sequence);
      const std::vector<int>& free_blocks = pool.manager().free_blocks();
      CHECK(std::set<int>(free_blocks.begin(), free_blocks.end()) == expected);
      CHECK(pool.ledger() == kNoProblem);
      for (const int left : pool.manager().sequences()) {
        CHECK(pool.manager().block_table(left) == before.sequences.at(left).block_table);
        CHECK(pool.read(left).size() == static_cast<std::size_t>(before.sequences.at(left).length));
      }
    }
    CHECK(pool.num_free() == 16);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("manager: misuse of forks is noticed and changes nothing (stage 5, invariant 7)") {
  NumberPool pool(5, 4);
  KvCacheManager& manager = pool.manager();
  pool.start(0, count_from(1, 6));
  manager.fork(0, 1);
  manager.fork(0, 2);
  manager.free(2);
  const Snapshot before = take_snapshot(manager);
  CHECK_THROWS_AS(manager.fork(0, 0), CheckError);
  CHECK_THROWS_AS(manager.fork(0, 1), CheckError);
  CHECK_THROWS_AS(manager.fork(2, 3), CheckError);
  CHECK_THROWS_AS(manager.fork(9, 3), CheckError);
  CHECK_FALSE(manager.contains(3));
  CHECK_THROWS_AS(manager.free(2), CheckError);
  CHECK_THROWS_AS(manager.reserve(2, 1), CheckError);
  CHECK_THROWS_AS(manager.can_reserve(std::vector<int>{0, 2}, 1), CheckError);
  CHECK_THROWS_AS(manager.commit(0, 3), CheckError);
  CHECK_THROWS_AS(manager.commit(0, 1), CheckError);  // into a block that sequence 1 reads too
  CHECK(take_snapshot(manager) == before);
  CHECK(manager.pending_copies().empty());
  CHECK(pool.ledger() == kNoProblem);
  manager.fork(0, 2);  // the id may come back
  CHECK(pool.read(2) == count_from(1, 6));
}

TEST_CASE("manager: a write that finds no block for its copy is refused without a trace (stage 5, invariant 7)") {
  NumberPool pool(3, 4);
  pool.start(0, count_from(1, 6));
  pool.manager().fork(0, 1);
  pool.start(2, count_from(30, 4));
  const Snapshot before = take_snapshot(pool.manager());
  const Numbers floats = pool.all();
  for (const int sequence : {0, 1}) {
    CHECK_FALSE(pool.manager().reserve(sequence, 1));
    CHECK_FALSE(pool.manager().can_reserve(std::vector<int>{sequence}, 1));
    CHECK(pool.manager().reserve(sequence, 0));
  }
  CHECK(take_snapshot(pool.manager()) == before);
  CHECK(pool.manager().pending_copies().empty());
  CHECK(pool.all() == floats);

  SECTION("a block is freed: the copy goes there") {
    pool.manager().free(2);
    REQUIRE(pool.append(1, count_from(50, 1)));
    CHECK(pool.read(1) == joined(count_from(1, 6), count_from(50, 1)));
    CHECK(pool.read(0) == count_from(1, 6));
  }
  SECTION("the other owner is freed: no copy is needed") {
    pool.manager().free(0);
    REQUIRE(pool.append(1, count_from(50, 1)));
    CHECK(pool.manager().block_table(1) == std::vector<int>{0, 1});
    CHECK(pool.read(1) == joined(count_from(1, 6), count_from(50, 1)));
  }
  CHECK(pool.ledger() == kNoProblem);
}

TEST_CASE("copies: several are planned before any is carried out (stage 5, invariant 5)") {
  NumberPool pool(8, 4);
  pool.start(0, count_from(1, 6));
  for (const int child : {1, 2, 3}) {
    pool.manager().fork(0, child);
  }
  for (const int sequence : {0, 1, 2, 3}) {
    REQUIRE(pool.manager().reserve(sequence, 1));
  }
  CHECK(pool.manager().reserve(0, 1));  // again: it has its own block by now
  const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
  CHECK(pairs(copies) == Copies{{1, 2}, {1, 3}, {1, 4}});
  CHECK(pool.manager().pending_copies().empty());
  pool.execute(copies);
  for (const int sequence : {3, 2, 1, 0}) {
    pool.write(sequence, count_from(100 * (sequence + 1), 1));
  }
  for (const int sequence : {0, 1, 2, 3}) {
    CHECK(pool.read(sequence) == joined(count_from(1, 6), count_from(100 * (sequence + 1), 1)));
  }
}

TEST_CASE("copies: they stay pending until they have been carried out, and more are planned behind them") {
  NumberPool pool(8, 4);
  pool.start(0, count_from(1, 6));
  pool.manager().fork(0, 1);
  REQUIRE(pool.manager().reserve(1, 1));
  const std::span<const BlockCopy> pending = pool.manager().pending_copies();
  CHECK(pairs({pending.begin(), pending.end()}) == Copies{{1, 2}});  // a copy that throws here is tried again
  pool.manager().fork(0, 2);
  REQUIRE(pool.manager().reserve(2, 1));
  CHECK(pairs(tests::take_copies(pool.manager())) == Copies{{1, 2}, {1, 3}});
  CHECK(pool.manager().pending_copies().empty());
}

TEST_CASE("copies: a sequence whose copy is still planned is forked, and its child writes (stage 5, invariant 5)") {
  NumberPool pool(8, 4);
  pool.start(0, count_from(1, 6));
  pool.manager().fork(0, 1);
  REQUIRE(pool.manager().reserve(1, 1));
  pool.manager().fork(1, 2);
  REQUIRE(pool.manager().reserve(2, 1));
  const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
  CHECK(pairs(copies) == Copies{{1, 2}, {2, 3}});  // a chain: the second copies what the first has put there
  pool.execute(copies);
  for (const int sequence : {0, 1, 2}) {
    pool.write(sequence, count_from(100 * (sequence + 1), 2));
  }
  for (const int sequence : {0, 1, 2}) {
    CHECK(pool.read(sequence) == joined(count_from(1, 6), count_from(100 * (sequence + 1), 2)));
  }
}

TEST_CASE("copies: a source is freed and becomes the destination of a later copy (stage 5, invariant 5)") {
  NumberPool pool(5, 4);
  pool.start(0, count_from(1, 6));   // blocks 0 and 1
  pool.start(5, count_from(61, 3));  // block 2
  pool.manager().fork(0, 1);
  pool.manager().fork(5, 6);
  REQUIRE(pool.manager().reserve(0, 1));  // block 1 to block 3
  pool.manager().free(1);                 // the last owner of block 1, which is to be copied yet
  REQUIRE(pool.manager().reserve(6, 1));  // block 2 to block 1
  const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
  CHECK(pairs(copies) == Copies{{1, 3}, {2, 1}});
  pool.execute(copies);
  pool.write(0, count_from(7, 1));
  pool.write(6, count_from(80, 1));
  CHECK(pool.read(0) == count_from(1, 7));
  CHECK(pool.read(5) == count_from(61, 3));
  CHECK(pool.read(6) == joined(count_from(61, 3), count_from(80, 1)));
  CHECK(pool.ledger() == kNoProblem);
}

TEST_CASE("copies: a destination is freed and used for another copy (stage 5, invariant 5)") {
  NumberPool pool(5, 4);
  pool.start(0, count_from(1, 6));
  pool.start(5, count_from(61, 3));
  pool.manager().fork(0, 1);
  pool.manager().fork(5, 6);
  REQUIRE(pool.manager().reserve(0, 1));  // block 1 to block 3
  pool.manager().free(0);
  REQUIRE(pool.manager().reserve(6, 1));  // block 2 to block 3
  const std::vector<BlockCopy> copies = tests::take_copies(pool.manager());
  CHECK(pairs(copies) == Copies{{1, 3}, {2, 3}});
  pool.execute(copies);
  pool.write(6, count_from(64, 1));
  CHECK(pool.read(6) == count_from(61, 4));
  CHECK(pool.read(1) == count_from(1, 6));
}

TEST_CASE("copies: all layers and heads of K and V go along, and nothing else is touched") {
  const tests::AttentionShape shape{4, 2, 3, 2};
  stage::KvCache cache(tests::cache_shape(shape, 4, 2));
  std::vector<int> slots(8);
  std::iota(slots.begin(), slots.end(), 0);
  common::Random random(1);
  const tests::TokenInputs rows = tests::random_inputs(shape, 8, random);
  for (int layer = 0; layer < 2; ++layer) {
    const auto& [q, k, v] = rows[static_cast<std::size_t>(layer)];
    cache.write(layer, slots, k, v);
  }
  cache.copy_blocks(std::vector<BlockCopy>{{2, 0}});
  for (int layer = 0; layer < 2; ++layer) {
    const auto& [q, k, v] = rows[static_cast<std::size_t>(layer)];
    for (int head = 0; head < 2; ++head) {
      for (const int slot : slots) {
        CAPTURE(layer, head, slot);
        const int row = slot < 2 ? slot + 4 : slot;  // block 0 is slots 0 and 1, block 2 is slots 4 and 5
        CHECK(cache.keys(layer, head, slot, 1) == k.block(row, Eigen::Index{head} * 3, 1, 3));
        CHECK(cache.values(layer, head, slot, 1) == v.block(row, Eigen::Index{head} * 3, 1, 3));
      }
    }
  }
}

TEST_CASE("can_reserve: N writers of a shared block need N - 1 blocks, and one each where they grow") {
  for (int num_owners = 1; num_owners <= 4; ++num_owners) {
    for (int num_writers = 1; num_writers <= num_owners; ++num_writers) {
      for (int num_free = 0; num_free <= 8; ++num_free) {
        KvCacheManager manager = tests::make_manager(2 + num_free, 4);
        REQUIRE(manager.allocate(0, 6));
        manager.commit(0, 6);
        std::vector<int> writers;
        for (int sequence = 0; sequence < num_owners; ++sequence) {
          if (sequence > 0) {
            manager.fork(0, sequence);
          }
          if (sequence < num_writers) {
            writers.push_back(sequence);
          }
        }
        CAPTURE(num_owners, num_writers, num_free);
        const int copies = std::min(num_writers, num_owners - 1);
        CHECK(manager.can_reserve(writers, 0));
        CHECK(manager.can_reserve(writers, 2) == (copies <= num_free));
        CHECK(manager.can_reserve(writers, 3) == (copies + num_writers <= num_free));
        CHECK_FALSE(manager.can_reserve(writers, std::numeric_limits<int>::max()));
      }
    }
  }
}

// ---- Figures that circulate, and what they are (ERRATA) ------------------------------------------------------------

TEST_CASE("figures: four forks of a sequence that goes on are five owners") {
  KvCacheManager manager = tests::make_manager(16, 16);
  REQUIRE(manager.allocate(0, 64));
  manager.commit(0, 64);
  for (const int child : {1, 2, 3, 4}) {
    manager.fork(0, child);
  }
  for (const int block : manager.block_table(0)) {
    CHECK(manager.reference_count(block) == 5);
  }
  manager.free(0);
  CHECK(manager.reference_count(manager.block_table(1).front()) == 4);
  CHECK(manager.usage().reserved == 64);
}

TEST_CASE("figures: after tokens 0 to 10 the next one goes to slot 11 of a shared partial block") {
  NumberPool pool(8, 4);
  pool.start(0, count_from(1, 11));
  for (const int child : {1, 2, 3}) {
    pool.manager().fork(0, child);
  }
  CHECK(pool.manager().slots(3, 10, 1) == std::vector<int>{10});
  Copies copies;
  for (const int sequence : {0, 1, 2, 3}) {
    REQUIRE(pool.manager().reserve(sequence, 1));
    for (const auto& copy : pairs(tests::take_copies(pool.manager()))) {
      copies.push_back(copy);
    }
  }
  CHECK(copies == Copies{{2, 3}, {2, 4}, {2, 5}});
  CHECK(pool.manager().slots(3, 11, 1) == std::vector<int>{11});
}

TEST_CASE("figures: 64 tokens and 4 beams of 50 more, or of 10 more") {
  for (const int more : {0, 10, 50}) {
    KvCacheManager manager = tests::make_manager(64, 16);
    REQUIRE(manager.allocate(0, 64));
    manager.commit(0, 64);
    for (const int child : {1, 2, 3}) {
      manager.fork(0, child);
    }
    for (int token = 0; token < more; ++token) {
      for (const int sequence : {0, 1, 2, 3}) {
        REQUIRE(manager.reserve(sequence, 1));
        manager.commit(sequence, 1);
      }
    }
    CHECK(manager.pending_copies().empty());  // 64 tokens fill their blocks
    const stage::SharingFigures figures = stage::sharing_figures(manager);
    CAPTURE(more);
    // 4 blocks of the prompt, and for each beam 1 block for 10 tokens or 4 for 50.
    CHECK(figures.blocks == (more == 0 ? 4 : more == 10 ? 8 : 20));
    CHECK(figures.separate_blocks == (more == 0 ? 16 : more == 10 ? 20 : 32));
    CHECK(figures.slots == 64 + 4 * more);
    CHECK(figures.separate_slots == 4 * (64 + more));
  }
}

TEST_CASE("figures: 100 users share 512 tokens and add 200 each") {
  KvCacheManager manager = tests::make_manager(1332, 16);
  REQUIRE(manager.allocate(0, 512));
  manager.commit(0, 512);
  for (int user = 1; user < 100; ++user) {
    manager.fork(0, user);
  }
  for (int user = 0; user < 100; ++user) {
    REQUIRE(manager.reserve(user, 200));
    manager.commit(user, 200);
  }
  const stage::SharingFigures figures = stage::sharing_figures(manager);
  CHECK(figures.blocks == 1332);
  CHECK(figures.separate_blocks == 4500);
  CHECK(manager.free_blocks().empty());
}

// ---- Attention and the engine --------------------------------------------------------------------------------------

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
        for (std::size_t variant = 0; variant < expected.size(); ++variant) {
          for (std::size_t layer = 0; layer < expected[variant].size(); ++layer) {
            const common::Matrix& left = outputs[sequence][step][variant][layer];
            const common::Matrix& right = expected[variant][layer];
            CAPTURE(block_size, sequence, step, layer, tests::kVariants[variant]);
            CHECK(common::compare_bits({left.data(), static_cast<std::size_t>(left.size())},
                                       {right.data(), static_cast<std::size_t>(right.size())}) == kNoProblem);
          }
        }
      }
    }
  }
}

TEST_CASE("engine: a forked sequence goes on as if it had computed everything itself, bit for bit") {
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
      CHECK(common::compare_bits({actual.data(), static_cast<std::size_t>(actual.size())},
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

// ---- Several samples -----------------------------------------------------------------------------------------------

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
        // The prompt is one pass, and all its tokens but one are computed once for everybody.
        const int passes_per_token = STAGE_NUMBER < 8 ? kSamples : 1;  // from stage 8 on all samples are one batch
        CHECK(common::counter(engine->counters(), "forward_passes") == 1 + passes_per_token * 6);
#if STAGE_NUMBER < 8
        CHECK(engine->timing().prefill_tokens == (length == 1 ? 0 : length));
#else
        CHECK(sampling.timing().prefill_tokens == (length == 1 ? 0 : length));
        CHECK(sampling.timing().decode_tokens == (length == 1 ? 1 : 0) + 6 * kSamples);
#endif
        CHECK(common::counter(engine->counters(), "blocks_copied") == (length % block_size == 0 ? 0 : kSamples - 1));
        CHECK(blocks_in_use(*engine) == 0);
        CHECK(ledger(*engine) == kNoProblem);
      }
    }
  }
}

TEST_CASE("sampling: full blocks of the prompt are shared to the end; who stops early gives the rest back") {
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
      const int num_shared = length == 10 ? num_blocks : 10 / kBlockSize;  // nobody has written after the first step
      CAPTURE(seed, length, live);
      CHECK(blocks_in_use(*engine) == (live == 0 ? 0 : num_shared + live * (num_blocks - num_shared)));
      CHECK(ledger(*engine) == kNoProblem);
      num_early += live < 5 && live > 0 ? 1 : 0;
    }
    CHECK(compare_texts(sampling.completions(), samples_alone(request, 5)) == kNoProblem);
  }
  CHECK(num_early > 6);
}

TEST_CASE("sampling: whenever the blocks run out, nothing has changed, and it goes on later (stage 5, invariant 7)") {
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

TEST_CASE("sampling: one that is given up leaves nothing behind") {
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

TEST_CASE("sampling and beams: what can never be done is rejected, and misuse is noticed") {
  const auto engine = make_engine(24, 4);
  for (const Request& request : {make_request(0, 5), make_request(4, 0), make_request(30, 19), make_request(20, 5)}) {
    CHECK_THROWS_AS(ParallelSampling(*engine, request, 2), common::InputError);
    CHECK_THROWS_AS(BeamSearch(*engine, request, {}), common::InputError);
  }
  using Misuse = std::conditional_t < STAGE_NUMBER<8, CheckError, common::InputError>;  // a server says no to both
  CHECK_THROWS_AS(ParallelSampling(*engine, make_request(4, 4), 0), Misuse);
  CHECK_THROWS_AS(BeamSearch(*engine, make_request(4, 4), {0, 1.0}), Misuse);
  CHECK_THROWS_AS(BeamSearch(*engine, make_request(4, 4), {2, std::nan("")}), Misuse);
  CHECK(blocks_in_use(*engine) == 0);
  CHECK(ledger(*engine) == kNoProblem);
}

// ---- Beam search ---------------------------------------------------------------------------------------------------

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

TEST_CASE("beam: it finds what a search finds that computes every text anew, and ends early without a loss") {
  int num_compared = 0;
  int num_cases = 0;
  int num_early = 0;
  for (const int width : {1, 2, 3, 4, 5, 6}) {
    for (const double length_penalty : {0.0, 0.5, 1.0}) {
      for (const int stop : {0, 20, 9}) {
        if (tests::kSanitized && width % 2 == 0) {
          continue;
        }
        Request request = make_request(5, 7, width + stop);
        request.stop_tokens = stop == 0 ? std::vector<Token>() : every_kth_token(stop);
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
        CHECK(compare_hypotheses(search, expected) == kNoProblem);
        const bool is_early = search.hypotheses().size() < expected.hypotheses.size();
        CHECK((stop > 0 || !is_early));
        num_early += is_early ? 1 : 0;
        CHECK(blocks_in_use(*engine) == 0);
      }
    }
  }
  CAPTURE(num_cases, num_compared, num_early);
  CHECK(num_compared * 3 > num_cases * 2);
  CHECK(num_early > 0);
}

TEST_CASE("beam: one as wide as the tree is exhaustive search (stage 5, invariant 9)") {
  int num_compared = 0;
  for (int seed = 0; seed < (tests::kSanitized ? 2 : 6); ++seed) {
    for (const double length_penalty : {-2.0, -0.5, 0.0, 1.0}) {
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
        CHECK(compare_hypotheses(search, expected) == kNoProblem);
        CHECK((with_stop || search.hypotheses().size() == 81));
        CHECK(blocks_in_use(*engine) == 0);
      }
    }
  }
  CHECK(num_compared > (tests::kSanitized ? 8 : 30));
}

TEST_CASE("beam: ending early never loses the best text, whatever the penalty") {
  int num_compared = 0;
  int num_early = 0;
  for (int seed = 0; seed < 6; ++seed) {
    for (Token first = 0; first < 3; ++first) {
      for (const double length_penalty : {-2.0, -1.0, -0.5, 0.5, 2.0}) {
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
          CHECK(compare_hypotheses(search, expected) == kNoProblem);
          num_early += search.hypotheses().size() < expected.hypotheses.size() ? 1 : 0;
        }
      }
    }
  }
  CHECK(num_compared > 100);
  CHECK(num_early > 10);
}

TEST_CASE("beam: it goes on for a text that wins later, by its length or in spite of it") {
  const common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  const common::Llama model(file);
  const common::Tokenizer tokenizer(file);
  const auto likeliest = [](const std::vector<double>& log_probabilities) {
    return static_cast<Token>(std::max_element(log_probabilities.begin(), log_probabilities.end()) -
                              log_probabilities.begin());
  };
  const auto search_both = [&](const Request& request, double length_penalty) {
    const Expected expected = search_by_recomputing(model, request, 2, length_penalty);
    const auto engine = make_engine(256, 16, model);
    BeamSearch search(*engine, request, {2, length_penalty});
    run_to_end(search);
    CHECK(compare_hypotheses(search, expected) == kNoProblem);
    return search.hypotheses().front();
  };
  Request request;
  request.max_new_tokens = 8;

  SECTION("a penalty that favours long texts") {
    constexpr double kLengthPenalty = 8.0;
    request.prompt = tokenizer.encode_prompt("Once upon a");
    std::vector<double> next = next_log_probabilities(model, request, {});
    request.stop_tokens = {likeliest(next)};
    std::partial_sort(next.begin(), next.begin() + 2, next.end(), std::greater<>());
    // The text that ends at once is ahead of the other branch, also of that branch with one more token for free.
    REQUIRE(next[0] > next[1] / std::pow(2.0, kLengthPenalty));
    CHECK(search_both(request, kLengthPenalty).tokens.size() == 8);
  }
  SECTION("a penalty that favours short texts") {
    constexpr double kLengthPenalty = -1.0;
    request.prompt = tokenizer.encode_prompt("Once");
    std::vector<double> next = next_log_probabilities(model, request, {});
    const Token best = likeliest(next);
    const double best_log_probability = next[static_cast<std::size_t>(best)];
    next[static_cast<std::size_t>(best)] = -std::numeric_limits<double>::infinity();
    const Token second = likeliest(next);
    request.stop_tokens = {second, likeliest(next_log_probabilities(model, request, {best}))};
    // The second-best token ends a text at once. The best one's would be ahead after one more, and behind after seven.
    REQUIRE(best_log_probability * std::pow(2.0, -kLengthPenalty) > next[static_cast<std::size_t>(second)]);
    REQUIRE(best_log_probability * std::pow(8.0, -kLengthPenalty) < next[static_cast<std::size_t>(second)]);
    CHECK(search_both(request, kLengthPenalty).tokens == std::vector<Token>{best});
  }
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

TEST_CASE("beam: whenever the blocks run out, nothing has changed, and it goes on later (stage 5, invariant 7)") {
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

// ---- Every allocation fails once -----------------------------------------------------------------------------------

TEST_CASE("a fixed scenario in pools of 1, 2, 3 … blocks: whichever block is missing, nothing has changed") {
  constexpr int kBlockSize = 3;
  std::set<std::size_t> stopped_at;
  bool done = false;
  for (int num_blocks = 1; !done; ++num_blocks) {
    REQUIRE(num_blocks < 40);
    NumberPool pool(num_blocks, kBlockSize);
    KvCacheManager& manager = pool.manager();
    const auto append = [&](int sequence, int first, int count) {
      return [&pool, sequence, first, count] { return pool.append(sequence, count_from(first, count)); };
    };
    const auto fork = [&](int parent, int child) {
      return [&manager, parent, child] {
        manager.fork(parent, child);
        return true;
      };
    };
    const std::vector<std::function<bool()>> steps = {[&] { return manager.allocate(0, 2); },
                                                      append(0, 1, 4),
                                                      append(0, 5, 3),
                                                      fork(0, 1),
                                                      fork(0, 2),
                                                      append(1, 100, 1),  // a copy
                                                      append(0, 200, 4),  // a copy and a new block
                                                      append(2, 300, 3),  // in place, and a new block
                                                      fork(1, 3),
                                                      [&] {
                                                        manager.free(2);
                                                        return true;
                                                      },
                                                      append(3, 400, 1),
                                                      append(1, 500, 5),
                                                      [&] { return manager.allocate(4, 7); }};
    done = true;
    for (std::size_t i = 0; i < steps.size() && done; ++i) {
      const Snapshot before = take_snapshot(manager);
      const Numbers floats = pool.all();
      CAPTURE(num_blocks, i);
      if (!steps[i]()) {
        CHECK(take_snapshot(manager) == before);
        CHECK(manager.pending_copies().empty());
        CHECK(pool.all() == floats);
        stopped_at.insert(i);
        done = false;
      }
      CHECK(pool.ledger() == kNoProblem);
    }
    if (done) {
      CHECK(pool.read(0) == joined(count_from(1, 7), count_from(200, 4)));
      CHECK(pool.read(1) == joined(joined(count_from(1, 7), count_from(100, 1)), count_from(500, 5)));
      CHECK(pool.read(3) == joined(joined(count_from(1, 7), count_from(100, 1)), count_from(400, 1)));
    }
    for (const int sequence : manager.sequences()) {
      manager.free(sequence);
    }
    CHECK(pool.num_free() == num_blocks);
  }
  CHECK(stopped_at.size() >= 6);
}

TEST_CASE("samples and beams in engines of 1, 2, 3 … blocks: rejected, or stopped without a trace, or right") {
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
  // What may run out of blocks is rejected: three sequences of 5 blocks need 11, the prompt's 2 full ones in common.
  CHECK(num_rejected == 10);
  CHECK(num_stopped == 0);
#endif
}
