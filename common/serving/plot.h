// Line charts as SVG.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace common {

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x ascending; a value holds until the next one
};

struct Chart {
  std::string title;
  std::string x_label;
  std::string y_label;
  double y_max = 0.0;  // the axis ends here; 0: at the largest value
  std::vector<Curve> curves;
};

// The charts one below the other, with one legend. title and description are the text for screen readers.
std::string draw_charts(const std::vector<Chart>& charts, const std::string& title, const std::string& description);

}  // namespace common
