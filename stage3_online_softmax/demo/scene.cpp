#include "scene.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../attention.h"
#include "common/base/check.h"
#include "common/base/text.h"

namespace stage3 {
namespace {

using common::Words;

constexpr int kNumTokens = 10;
constexpr int kBlockSize = 4;
constexpr std::array<int, 3> kBlocks = {7, 1, 3};
constexpr double kMinScore = -2.0;
constexpr double kMaxScore = 6.0;

double parse_score(const std::string& text) {
  char* end = nullptr;
  const double score = std::strtod(text.c_str(), &end);
  if (end != text.c_str() + text.size() || !(score >= kMinScore && score <= kMaxScore)) {
    throw common::InputError("a score is a number from -2 to 6, not " + common::quote(text));
  }
  return score;
}

int parse_position(const std::string& text) {
  const int position = common::parse_count(text, 0);
  if (position >= kNumTokens) {
    throw common::InputError("positions are 0 to 9, not " + text);
  }
  return position;
}

// Rounds to four decimals. The last digits of a float depend on how a machine adds, and must not decide about a number
// halfway between two results, as many powers of two are: it goes up.
double rounded(double value) { return std::floor(value * 1e4 + 0.55) / 1e4; }

// "2.75": four decimals at most.
std::string decimal(double value) {
  std::string text = common::format("%.4f", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') {
    text.pop_back();
  }
  return text;
}

// One query reads ten tokens, block by block. Scores are in units of ln 2, so that a weight is a power of two, and the
// value of a token is its position.
class SoftmaxScene : public common::Scene {
 public:
  SoftmaxScene() {
    add_command(
        "block",
        [this](const Words&) {
          return next_ < kBlocks.size() ? "read block " + std::to_string(kBlocks[next_]) : "read the next block";
        },
        [this](const Words&) { return read_block(); });
    add_command(
        "set POSITION SCORE",
        [](const Words& words) {
          return "give position " + std::to_string(parse_position(words[0])) + " the score " +
                 decimal(parse_score(words[1]));
        },
        [this](const Words& words) { return set(parse_position(words[0]), parse_score(words[1])); });
    add_command(
        "restart", [](const Words&) { return "begin again, with these scores"; },
        [this](const Words&) {
          next_ = 0;
          recompute();
          return std::string("No block has been read: there is no maximum yet, and both sums are 0.");
        });
  }

  nlohmann::ordered_json state() const override {
    nlohmann::ordered_json blocks = nlohmann::ordered_json::array();
    for (std::size_t i = 0; i < kBlocks.size(); ++i) {
      blocks.push_back({{"block", kBlocks[i]}, {"first", first_of(i)}, {"count", count_of(i)}, {"read", i < next_}});
    }
    nlohmann::ordered_json state;
    state["score_range"] = {kMinScore, kMaxScore};
    state["scores"] = scores_;
    state["weights"] = nlohmann::ordered_json::array();
    for (const double weight : weights_) {
      state["weights"].push_back(rounded(weight));
    }
    state["blocks"] = std::move(blocks);
    state["row_max"] = next_ == 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(row_max());
    state["rescale"] = rounded(rescale_);
    state["row_sum"] = rounded(softmax_.row_sum(0));
    state["output"] = rounded(softmax_.output(0, 0));
    state["result"] = next_ == 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(rounded(result()));
    return state;
  }

  Actions actions() const override {
    Actions result = {{"query", {}}};
    if (next_ < kBlocks.size()) {
      result.front().second.emplace_back("block");
    }
    result.front().second.emplace_back("restart");
    result.front().second.emplace_back("set 5 6");
    result.front().second.emplace_back("set 9 0");
    return result;
  }

 private:
  static int first_of(std::size_t index) { return static_cast<int>(index) * kBlockSize; }
  static int count_of(std::size_t index) { return std::min(kBlockSize, kNumTokens - first_of(index)); }

  double row_max() const { return rounded(static_cast<double>(softmax_.row_max(0)) / std::log(2.0)); }
  double result() const {
    return static_cast<double>(softmax_.output(0, 0)) / static_cast<double>(softmax_.row_sum(0));
  }

  // Hands a block to the OnlineSoftmax that attention uses.
  void add(std::size_t index) {
    const int count = count_of(index);
    common::Matrix scores(1, count);
    common::Matrix values(count, 1);
    for (int i = 0; i < count; ++i) {
      scores(0, i) = static_cast<float>(
          scores_[static_cast<std::size_t>(first_of(index)) + static_cast<std::size_t>(i)] * std::log(2.0));
      values(i, 0) = static_cast<float>(first_of(index) + i);
    }
    const float previous = softmax_.row_max(0);
    softmax_.add(0, scores, {values.data(), count, 1});
    rescale_ = index == 0 ? 1.0 : std::exp(static_cast<double>(previous) - static_cast<double>(softmax_.row_max(0)));
    for (double& weight : weights_) {  // the weights of earlier blocks, as they count from now on
      weight *= rescale_;
    }
    for (int i = 0; i < count; ++i) {
      weights_.push_back(static_cast<double>(scores(0, i)));
    }
  }

  void recompute() {
    softmax_ = OnlineSoftmax(1, 1);
    weights_.clear();
    rescale_ = 1.0;
    for (std::size_t i = 0; i < next_; ++i) {
      add(i);
    }
  }

  std::string sums() const {
    return "The weights sum to " + decimal(rounded(softmax_.row_sum(0))) + ", and weights times values to " +
           decimal(rounded(softmax_.output(0, 0))) + ".";
  }

  std::string read_block() {
    if (next_ == kBlocks.size()) {
      return "All blocks have been read: " + decimal(rounded(softmax_.output(0, 0))) + " / " +
             decimal(rounded(softmax_.row_sum(0))) + " = " + decimal(rounded(result())) + " is the answer.";
    }
    const double before = next_ == 0 ? 0.0 : row_max();
    add(next_++);
    const std::string block = std::to_string(kBlocks[next_ - 1]);
    if (next_ == 1) {
      return "Block " + block + " brings the first maximum, " + decimal(row_max()) + ". " + sums();
    }
    if (row_max() > before) {
      return "Block " + block + " brings a larger score, " + decimal(row_max()) +
             ": what was summed with the maximum " + decimal(before) + " is multiplied by " +
             decimal(rounded(rescale_)) + ". " + sums();
    }
    return "Block " + block + " has no larger score than " + decimal(before) + ": nothing is rescaled. " + sums();
  }

  std::string set(int position, double score) {
    scores_[static_cast<std::size_t>(position)] = score;
    recompute();
    const bool is_read = static_cast<std::size_t>(position) / kBlockSize < next_;
    return "Position " + std::to_string(position) + " has the score " + decimal(score) +
           (is_read ? ". " + sums() : ". Its block has not been read yet.");
  }

  std::vector<double> scores_ = {1, 0, 2, 1, 3, 1, 0, 2, 2, 4};
  std::vector<double> weights_;  // of the tokens that were read
  std::size_t next_ = 0;         // block, by its place in the table
  double rescale_ = 1.0;         // by the last block
  OnlineSoftmax softmax_{1, 1};  // one query, vectors of one dimension
};

}  // namespace

std::vector<common::SceneScript> scenes() {
  return {{.name = "online-softmax",
           .title = "Softmax, block by block",
           .first =
               "Ten scores in blocks 7, 1 and 3, in units of ln 2: a weight is 2 to the power of score minus maximum. "
               "The value of a token is its position. No block has been read yet.",
           .make = [] { return std::make_unique<SoftmaxScene>(); },
           .setup = "",
           .commands = "block; block; block; block; set 5 6; restart; block; block; block"}};
}

}  // namespace
