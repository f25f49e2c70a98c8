#include "by_hand.h"

#include <cmath>
#include <iostream>

#include "../attention.h"
#include "common/app/table.h"
#include "common/base/text.h"

namespace stage4 {
namespace {

const float kLn2 = std::log(2.0F);

template <typename Number, typename Text>
std::string join(const std::vector<Number>& numbers, Text text) {
  std::string result;
  for (const Number number : numbers) {
    result += result.empty() ? "" : " ";
    result += text(number);
  }
  return result;
}

// "1.125 + 1.875 = 3": the sum so far, rescaled to the new maximum, and what the block adds.
std::string sum_text(float before, float rescale, float after) {
  const float kept = before * rescale;
  return kept > 0.0F ? decimal(kept) + " + " + decimal(after - kept) + " = " + decimal(after) : decimal(after);
}

void print_by_hand() {
  common::Table table({"block", "scores", "row_max", "rescale", "weights", "row_sum", "output"});
  float row_sum = 0.0F;
  float output = 0.0F;
  for (const HandBlock& step : online_softmax_by_hand()) {
    table.add_row({std::to_string(step.block), join(step.scores, [](int score) { return std::to_string(score); }),
                   std::to_string(step.row_max), step.rescale > 0.0F ? fraction(step.rescale) : "-",
                   join(step.weights, fraction), sum_text(row_sum, step.rescale, step.row_sum),
                   sum_text(output, step.rescale, step.output)});
    row_sum = step.row_sum;
    output = step.output;
  }
  std::cout << table.to_string() << decimal(output) << " / " << decimal(row_sum) << " = "
            << common::format("%.3f", static_cast<double>(output / row_sum)) << "\n";
}

}  // namespace

std::vector<HandBlock> online_softmax_by_hand() {
  std::vector<HandBlock> steps = {{.block = 7, .positions = {0, 1, 2, 3}, .scores = {1, 0, 2, 1}},
                                  {.block = 1, .positions = {4, 5, 6, 7}, .scores = {3, 1, 0, 2}},
                                  {.block = 3, .positions = {8, 9}, .scores = {2, 4}}};
  OnlineSoftmax softmax(1, 1);  // one query, vectors of one dimension
  for (HandBlock& step : steps) {
    const auto count = static_cast<Eigen::Index>(step.scores.size());
    common::Matrix scores(1, count);
    common::Matrix values(count, 1);
    for (Eigen::Index i = 0; i < count; ++i) {
      scores(0, i) = static_cast<float>(step.scores[static_cast<std::size_t>(i)]) * kLn2;
      values(i, 0) = static_cast<float>(step.positions[static_cast<std::size_t>(i)]);
    }
    const float previous = softmax.row_max(0);
    softmax.add(0, scores, {values.data(), count, 1});
    step.weights.assign(scores.data(), scores.data() + count);
    step.row_max = static_cast<int>(std::lround(softmax.row_max(0) / kLn2));
    step.rescale = std::exp(previous - softmax.row_max(0));
    step.row_sum = softmax.row_sum(0);
    step.output = softmax.output(0, 0);
  }
  return steps;
}

std::string fraction(float power_of_two) {
  return power_of_two < 0.75F ? common::format("1/%ld", std::lround(1.0F / power_of_two))
                              : common::format("%ld", std::lround(power_of_two));
}

std::string decimal(float value) {
  std::string text = common::format("%.4f", static_cast<double>(value));
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') {
    text.pop_back();
  }
  return text;
}

common::Command& add_by_hand_command(common::Program& program) {
  return program.add_command("by-hand", "The online softmax on ten tokens, step by step", print_by_hand);
}

}  // namespace
