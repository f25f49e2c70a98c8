// Engines with several sequences of one prompt, for tests of what forks share: the expected texts, and runs while other
// sequences hold the blocks. For stages 5 and later.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "common/base/text.h"
#include "common/model/generation.h"
#include "common/model/llama.h"
#include "tests/stages/engine_fixtures.h"
#include "tests/stages/stage_engine.h"
#include "tests/support/catch.h"
#include "tests/support/ledger.h"
#include "tests/support/reference_decoder.h"
#include "tests/support/stage_api.h"

namespace tests {

inline stage::EngineOptions make_options(int num_slots, int block_size) {
  stage::EngineOptions options = tight_options();
  options.num_slots = num_slots;
  options.block_size = block_size;
#if STAGE_NUMBER >= 8
  options.scheduler.max_sequences = 1024;
#endif
  return options;
}

// The cache is full of NaN.
inline std::unique_ptr<SequenceEngine> make_engine(int num_slots, int block_size,
                                                   const common::Llama& model = small_model()) {
  auto engine = std::make_unique<SequenceEngine>(model, make_options(num_slots, block_size));
  poison(*engine);
  return engine;
}

inline std::string ledger(stage::Engine& engine) {
  const int block_size = engine.manager().block_size();
  return check_ledger(engine.manager(), engine.manager().usage().total / block_size, block_size);
}

inline int blocks_in_use(stage::Engine& engine) {
  return engine.manager().usage().reserved / engine.manager().block_size();
}

// The request's text in a roomy engine of its own.
inline common::Completion alone(const common::Request& request) {
  const auto engine = make_engine(4096, 16);
  return run_requests(*engine, std::span(&request, 1)).completions.front();
}

inline std::vector<common::Completion> samples_alone(common::Request request, int num_samples) {
  std::vector<common::Completion> result;
  for (int i = 0; i < num_samples; ++i, ++request.sample_index) {
    result.push_back(alone(request));
  }
  return result;
}

inline common::Request sampled_request(int num_tokens, int max_new_tokens, float temperature, std::uint64_t seed = 1) {
  common::Request request = make_request(num_tokens, max_new_tokens, static_cast<int>(seed));
  request.sampling.temperature = temperature;
  request.sampling.seed = seed;
  return request;
}

// With every k-th token as a stop token, some samples and beams end early.
inline std::vector<common::Token> every_kth_token(int k) {
  std::vector<common::Token> result;
  for (common::Token token = 0; token < kSmallVocabulary; token += k) {
    result.push_back(token);
  }
  return result;
}

inline std::string compare_texts(const std::vector<common::Completion>& actual,
                                 const std::vector<common::Completion>& expected) {
  if (actual.size() != expected.size()) {
    return common::format("there are %zu texts, expected %zu", actual.size(), expected.size());
  }
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (const std::string difference = first_difference(actual[i].tokens, expected[i].tokens); !difference.empty()) {
      return common::format("text %zu ", i) + difference + ": " + to_string(actual[i].tokens) + ", expected " +
             to_string(expected[i].tokens);
    }
    if (actual[i].finish_reason != expected[i].finish_reason) {
      return common::format("text %zu ends for another reason", i);
    }
  }
  return "";
}

template <typename Decoding>
inline void run_to_end(Decoding& decoding) {
  while (!decoding.finished()) {
    REQUIRE(decoding.step());
  }
}

// Everything that a step may change but the texts themselves.
struct State {
  Snapshot books;
  std::vector<int> sequences;
  std::vector<std::vector<common::Token>> tokens;
  bool operator==(const State&) const = default;
};

inline std::string to_string(const State& state) {
  std::string result = to_string(state.books);
  for (std::size_t i = 0; i < state.sequences.size(); ++i) {
    result += common::format("; branch %zu is sequence %d with ", i, state.sequences[i]) + to_string(state.tokens[i]);
  }
  return result;
}

// The parts of a printed state, between semicolons, that the other one does not have: most stand in both.
inline std::string parts_missing_in(const std::string& state, const std::string& other) {
  const auto parts = [](const std::string& text) {
    std::vector<std::string> result;
    for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end + 2) {
      end = std::min(text.find("; ", begin), text.size());
      result.push_back(text.substr(begin, end - begin));
    }
    return result;
  };
  const std::vector<std::string> others = parts(other);
  std::string result;
  for (const std::string& part : parts(state)) {
    if (std::find(others.begin(), others.end(), part) == others.end()) {
      result += (result.empty() ? "" : "; ") + part;
    }
  }
  return result;
}

// What a failed comparison of two states prints.
inline std::ostream& operator<<(std::ostream& out, const State& state) { return out << to_string(state); }

template <typename Decoding>
inline State state_of(stage::Engine& engine, const Decoding& decoding) {
  State state{take_snapshot(engine.manager()), {}, {}};
  for (const stage::Branch& branch : decoding.live()) {
    state.sequences.push_back(branch.sequence);
    state.tokens.push_back(branch.tokens);
  }
  return state;
}

// Sequences of one block each that hold all but num_left blocks.
class Occupants {
 public:
  Occupants(stage::KvCacheManager& manager, int num_left) : manager_(manager) {
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
  stage::KvCacheManager& manager_;
  int count_ = 0;
};

// Runs the decoding to its end while other sequences hold all but num_left blocks, and frees one of them whenever a
// step is refused. Returns the number of refused steps; `problem` says what a refused step has changed (stage 5,
// invariant 7).
template <typename Decoding>
inline int run_beside_others(stage::Engine& engine, Decoding& decoding, int num_left, std::string& problem) {
  Occupants others(engine.manager(), num_left);
  int num_refused = 0;
  while (!decoding.finished() && problem.empty()) {
    const State before = state_of(engine, decoding);
    if (!decoding.step()) {
      num_refused += 1;
      if (!(state_of(engine, decoding) == before)) {
        const std::string then = to_string(state_of(engine, decoding));
        problem = "a refused step changed something: " + parts_missing_in(to_string(before), then) + " became " +
                  parts_missing_in(then, to_string(before));
      } else if (!engine.manager().pending_copies().empty()) {
        problem = "a refused step planned a copy";
#if STAGE_NUMBER < 8
      } else if (!decoding.sequences().empty() && engine.manager().can_reserve(decoding.sequences(), 1)) {
        problem = common::format("a step of %zu branches was refused although can_reserve finds enough blocks",
                                 decoding.sequences().size());
#endif
      } else if (!others.leave_one()) {
        problem = "a step was refused although all blocks are free";
      }
    }
    problem += ledger(engine);
  }
  while (others.leave_one()) {
  }
  if (problem.empty() && blocks_in_use(engine) != 0) {
    problem = count_of(blocks_in_use(engine), "block") + " still in use at the end";
  }
  return num_refused;
}

}  // namespace tests
