#include "common/serving/plot.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "common/app/svg.h"
#include "common/base/text.h"

namespace common {
namespace {

constexpr int kWidth = 720;
constexpr int kHeight = 250;  // of a chart, with its labels
constexpr double kLeft = 64.0;
constexpr double kRight = 16.0;
constexpr double kTop = 40.0;
constexpr double kBottom = 52.0;
constexpr int kLegendHeight = 60;
constexpr TextStyle kLabel{.size = 14.0, .hue = Hue::kGrey};

Hue hue_of(std::size_t curve) {
  constexpr std::array kHues = {Hue::kPink, Hue::kOrange, Hue::kGreen, Hue::kBlue, Hue::kRed};
  return kHues[curve % kHues.size()];
}

TextStyle label(Anchor anchor) {
  TextStyle style = kLabel;
  style.anchor = anchor;
  return style;
}

// 1, 2 or 5 times a power of ten, so that there are about five ticks up to `maximum`.
double tick_distance(double maximum) {
  const double rough = maximum / 5.0;
  double power = 1.0;
  while (power * 10.0 <= rough) {
    power *= 10.0;
  }
  while (power > rough) {
    power /= 10.0;
  }
  const double factor = rough / power;
  return power * (factor < 1.5 ? 1.0 : factor < 3.5 ? 2.0 : factor < 7.5 ? 5.0 : 10.0);
}

// The end of an axis that has to reach `maximum`: a tick, which has a label.
double up_to_tick(double maximum) {
  const double distance = tick_distance(maximum);
  return distance * std::ceil(maximum / distance - 1e-9);
}

class ChartDrawing {
 public:
  ChartDrawing(const Chart& chart, double top) : chart_(chart), top_(top), y_max_(chart.y_max) {
    for (const Curve& curve : chart.curves) {
      for (const auto& [x, y] : curve.points) {
        x_max_ = std::max(x_max_, x);
        y_max_ = chart.y_max > 0.0 ? chart.y_max : std::max(y_max_, y);
      }
    }
    last_x_ = x_max_;
    x_max_ = up_to_tick(x_max_ > 0.0 ? x_max_ : 1.0);
    y_max_ = up_to_tick(y_max_ > 0.0 ? y_max_ : 1.0);
  }

  void draw(Svg& svg) const {
    svg.text({kLeft, top_ + 24.0}, chart_.title, {.size = 16.0, .bold = true});
    draw_axes(svg);
    for (std::size_t i = 0; i < chart_.curves.size(); ++i) {
      svg.steps(corners(chart_.curves[i]), {.hue = hue_of(i), .width = 1.8});
    }
  }

 private:
  double x_of(double value) const { return kLeft + value / x_max_ * (kWidth - kLeft - kRight); }
  double y_of(double value) const { return top_ + kHeight - kBottom - value / y_max_ * (kHeight - kTop - kBottom); }

  void draw_axes(Svg& svg) const {
    const double dy = tick_distance(y_max_);
    for (double value = 0.0; value < y_max_ * 1.0001; value += dy) {
      svg.line({{kLeft, y_of(value)}, {kWidth - kRight, y_of(value)}}, {.hue = Hue::kGrey, .width = 0.4});
      svg.text({kLeft - 6.0, y_of(value) + 5.0}, format("%g", value), label(Anchor::kEnd));
    }
    const double dx = tick_distance(x_max_);
    for (double value = 0.0; value < x_max_ * 1.0001; value += dx) {
      svg.text({x_of(value), y_of(0.0) + 18.0}, format("%g", value), label(Anchor::kMiddle));
    }
    svg.text({x_of(x_max_ / 2.0), y_of(0.0) + 38.0}, chart_.x_label, label(Anchor::kMiddle));
    if (!chart_.y_label.empty()) {
      svg.vertical_text({16.0, y_of(y_max_ / 2.0)}, chart_.y_label, label(Anchor::kMiddle));
    }
  }

  // Of several points on the same pixel, one is enough.
  std::vector<Point> corners(const Curve& curve) const {
    std::vector<Point> result;
    for (const auto& [x, y] : curve.points) {
      if (result.empty() || x_of(x) - result.back().x >= 0.7 || x >= last_x_) {
        result.push_back({x_of(x), y_of(y)});
      }
    }
    return result;
  }

  const Chart& chart_;
  double top_;
  double last_x_ = 0.0;  // of the points
  double x_max_ = 0.0;   // of the axis
  double y_max_;
};

}  // namespace

std::string draw_charts(const std::vector<Chart>& charts, const std::string& title, const std::string& description) {
  Svg svg(kWidth, kLegendHeight + kHeight * static_cast<int>(charts.size()), title, description);
  std::vector<Cell> names;
  for (std::size_t i = 0; !charts.empty() && i < charts.front().curves.size(); ++i) {
    names.push_back({hue_of(i), Fill::kStrong, charts.front().curves[i].name});
  }
  svg.legend({kLeft, 26.0}, names);
  for (std::size_t i = 0; i < charts.size(); ++i) {
    ChartDrawing(charts[i], kLegendHeight + kHeight * static_cast<double>(i)).draw(svg);
  }
  return svg.to_string();
}

}  // namespace common
