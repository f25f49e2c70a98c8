#include "pictures.h"

#include <string>
#include <vector>

#include "by_hand.h"
#include "common/base/text.h"

namespace stage3 {
namespace {

using common::Anchor;
using common::Box;
using common::Cell;
using common::Fill;
using common::Hue;
using common::Svg;

constexpr int kWidth = 720;
constexpr double kLeft = 20.0;
constexpr double kFirst = 104.0;  // of the blocks' columns
constexpr double kCell = 40.0;
constexpr double kColumn = 4.0 * kCell;
constexpr double kPitch = kColumn + 48.0;

// A row of four cells, filled as far as the block has tokens.
template <typename Text>
void draw_row(Svg& svg, double x, double y, std::size_t count, Hue hue, Text text, std::size_t marked = 4) {
  std::vector<Cell> cells;
  for (std::size_t i = 0; i < 4; ++i) {
    cells.push_back(
        {i == marked ? Hue::kOrange : hue, i < count ? Fill::kSoft : Fill::kPaper, i < count ? text(i) : ""});
  }
  svg.cells({x, y, kColumn, 34.0}, cells, {.hue = hue, .line_width = 2.0}, {.size = 17.0});
}

std::string draw_online_softmax() {
  const std::vector<HandBlock> steps = online_softmax_by_hand();
  Svg svg(
      kWidth, 434, "Online softmax over blocks 7, 1 and 3",
      "Three blocks are read one after the other. After each, the query keeps three numbers: the largest score so far, "
      "the sum of the weights, and the sum of weights times values. A block with a larger score halves what came "
      "before. In the end 16.6875 divided by 2.75 is 6.068.");
  const common::TextStyle name{.size = 15.0, .hue = Hue::kGrey};
  const double state_top = 200.0;
  svg.text({kLeft, 77.0}, "values", name);
  svg.text({kLeft, 115.0}, "scores", name);
  svg.text({kLeft, 153.0}, "weights", name);
  svg.text({kLeft, state_top + 32.0}, "row_max", name);
  svg.text({kLeft, state_top + 82.0}, "row_sum", name);
  svg.text({kLeft, state_top + 138.0}, "output", name);
  float row_sum = 0.0F;
  float output = 0.0F;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const HandBlock& step = steps[i];
    const double x = kFirst + kPitch * static_cast<double>(i);
    const std::size_t count = step.scores.size();
    std::size_t largest = 4;
    for (std::size_t token = 0; token < count; ++token) {
      largest = step.scores[token] == step.row_max ? token : largest;
    }
    svg.text({x, 42.0}, common::format("Block %d", step.block), {.size = 18.0, .hue = Hue::kBlue, .bold = true});
    draw_row(svg, x, 55.0, count, Hue::kBlue, [&](std::size_t token) { return std::to_string(step.positions[token]); });
    draw_row(
        svg, x, 93.0, count, Hue::kGrey, [&](std::size_t token) { return std::to_string(step.scores[token]); },
        largest);
    draw_row(svg, x, 131.0, count, Hue::kGreen, [&](std::size_t token) { return fraction(step.weights[token]); });

    const Box state{x, state_top, kColumn, 156.0};
    svg.line({{x + kColumn / 2.0, 168.0}, {x + kColumn / 2.0, state_top - 2.0}}, {.width = 2.0, .arrow = true});
    svg.box(state, {Hue::kInk, Fill::kPaper, 2.0, 6.0});
    const auto sum = [&](float before, float after) {
      const float kept = before * step.rescale;
      return kept > 0.0F ? decimal(kept) + " + " + decimal(after - kept) : std::string();
    };
    const auto number = [&](double y, const std::string& text) {
      svg.text({x + kColumn - 10.0, y}, text, {.size = 20.0, .anchor = Anchor::kEnd, .bold = true});
    };
    const auto origin = [&](double y, const std::string& text) {
      svg.text({x + kColumn - 10.0, y}, text, {.size = 15.0, .anchor = Anchor::kEnd, .hue = Hue::kGrey});
    };
    number(state_top + 33.0, std::to_string(step.row_max));
    number(state_top + 83.0, decimal(step.row_sum));
    number(state_top + 139.0, decimal(step.output));
    origin(state_top + 62.0, sum(row_sum, step.row_sum));
    origin(state_top + 118.0, sum(output, step.output));
    if (i > 0) {
      svg.line({{x - 46.0, state_top + 76.0}, {x - 3.0, state_top + 76.0}}, {Hue::kOrange, 2.0, false, true});
      svg.text({x - 25.0, state_top + 66.0}, "x " + fraction(step.rescale),
               {.size = 15.0, .anchor = Anchor::kMiddle, .hue = Hue::kOrange, .bold = true});
    }
    row_sum = step.row_sum;
    output = step.output;
  }
  svg.text({kFirst + 2.0 * kPitch + kColumn - 10.0, 390.0},
           "output / row_sum = " + decimal(output) + " / " + decimal(row_sum) +
               common::format(" = %.3f", static_cast<double>(output / row_sum)),
           {.size = 19.0, .anchor = Anchor::kEnd, .bold = true});
  svg.text({kLeft, 418.0}, "Scores are in units of ln 2, so that weights are powers of two. A larger score rescales.",
           name);
  return svg.to_string();
}

}  // namespace

std::vector<common::Picture> pictures() {
  return {{"online_softmax", "what a query keeps from block to block", draw_online_softmax}};
}

}  // namespace
