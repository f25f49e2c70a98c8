#include "plot.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "common/base/text.h"

namespace stage8 {
namespace {

constexpr double kWidth = 760.0;
constexpr double kHeight = 230.0;  // of a chart, with its labels
constexpr double kLeft = 64.0;
constexpr double kRight = 16.0;
constexpr double kTop = 34.0;
constexpr double kBottom = 44.0;
constexpr double kLegendHeight = 30.0;
// Told apart in grey and by those who see few colours (Okabe and Ito's palette).
constexpr std::array<const char*, 5> kColors = {"#d55e00", "#e69f00", "#009e73", "#0072b2", "#cc79a7"};

const char* color_of(std::size_t curve) { return kColors[curve % kColors.size()]; }

std::string escape(const std::string& text) {
  std::string result;
  for (const char character : text) {
    result += character == '&' ? "&amp;" : character == '<' ? "&lt;" : std::string(1, character);
  }
  return result;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return common::format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor) + escape(text) + "</text>\n";
}

// 1, 2 or 5 times a power of ten: about five of them up to `most`.
double tick_distance(double most) {
  const double rough = most / 5.0;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double factor = rough / power;
  return power * (factor < 1.5 ? 1.0 : factor < 3.5 ? 2.0 : factor < 7.5 ? 5.0 : 10.0);
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
    x_max_ = x_max_ > 0.0 ? x_max_ : 1.0;
    y_max_ = y_max_ > 0.0 ? y_max_ : 1.0;
  }

  std::string to_string() const {
    std::string result = text_at(kLeft, top_ + 20.0, "start", chart_.title) + axes();
    for (std::size_t i = 0; i < chart_.curves.size(); ++i) {
      result += common::format("<path fill=\"none\" stroke-width=\"1.5\" stroke=\"%s\" d=\"", color_of(i)) +
                path(chart_.curves[i]) + "\"/>\n";
    }
    return result;
  }

 private:
  double x_of(double value) const { return kLeft + value / x_max_ * (kWidth - kLeft - kRight); }
  double y_of(double value) const { return top_ + kHeight - kBottom - value / y_max_ * (kHeight - kTop - kBottom); }

  std::string axes() const {
    std::string result;
    const double dy = tick_distance(y_max_);
    for (double value = 0.0; value < y_max_ * 1.0001; value += dy) {
      result += common::format("<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", kLeft,
                               kWidth - kRight, y_of(value), y_of(value)) +
                text_at(kLeft - 6.0, y_of(value) + 4.0, "end", common::format("%g", value));
    }
    const double dx = tick_distance(x_max_);
    for (double value = 0.0; value < x_max_ * 1.0001; value += dx) {
      result += text_at(x_of(value), y_of(0.0) + 16.0, "middle", common::format("%g", value));
    }
    result += text_at(x_of(x_max_ / 2.0), y_of(0.0) + 34.0, "middle", chart_.x_label);
    return result +
           common::format("<text transform=\"translate(14 %.1f) rotate(-90)\" text-anchor=\"middle\">",
                          y_of(y_max_ / 2.0)) +
           escape(chart_.y_label) + "</text>\n";
  }

  // As steps. Of points that fall on the same pixel one is enough.
  std::string path(const Curve& curve) const {
    std::string result;
    double last_x = -1.0;
    for (const auto& [x, y] : curve.points) {
      if (x_of(x) - last_x < 0.7 && x < x_max_) {
        continue;
      }
      result += result.empty() ? common::format("M%.1f %.1f", x_of(x), y_of(y))
                               : common::format("H%.1fV%.1f", x_of(x), y_of(y));
      last_x = x_of(x);
    }
    return result;
  }

  const Chart& chart_;
  double top_;
  double x_max_ = 0.0;
  double y_max_;
};

}  // namespace

std::string draw_charts(const std::vector<Chart>& charts) {
  const double height = kLegendHeight + kHeight * static_cast<double>(charts.size());
  std::string svg = common::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kWidth, height);
  double x = kLeft;
  for (std::size_t i = 0; !charts.empty() && i < charts.front().curves.size(); ++i) {
    const std::string& name = charts.front().curves[i].name;
    svg += common::format("<rect x=\"%.1f\" y=\"12\" width=\"14\" height=\"4\" fill=\"%s\"/>\n", x, color_of(i)) +
           text_at(x + 18.0, 18.0, "start", name);
    x += 30.0 + 6.2 * static_cast<double>(name.size());
  }
  for (std::size_t i = 0; i < charts.size(); ++i) {
    svg += ChartDrawing(charts[i], kLegendHeight + kHeight * static_cast<double>(i)).to_string();
  }
  return svg + "</svg>\n";
}

}  // namespace
