#include "common/app/svg.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

struct Colors {
  const char* name;
  const char* light;
  const char* light_soft;
  const char* dark;
  const char* dark_soft;
};

// By Hue. Strong tones have a contrast of 4.5 at least to paper and to their own soft tone, in both themes.
constexpr std::array<Colors, 8> kColors = {{{"ink", "#1f2328", "#ffffff", "#f0f6fc", "#0d1117"},
                                            {"grey", "#59636e", "#eff2f5", "#9da7b3", "#1c222a"},
                                            {"blue", "#0757b8", "#cfe4ff", "#79b8ff", "#123a6b"},
                                            {"orange", "#9a4600", "#ffdfb8", "#ffb26b", "#5a320a"},
                                            {"green", "#0b6b34", "#c8f0d3", "#67d68c", "#114526"},
                                            {"pink", "#932a86", "#f6d8f2", "#f29be8", "#54234f"},
                                            {"yellow", "#6e5900", "#fbeea0", "#e8cf5a", "#4a3f0a"},
                                            {"red", "#b3261e", "#ffdad6", "#ff8f87", "#5c1a17"}}};
constexpr const char* kLightPaper = "#ffffff";
constexpr const char* kDarkPaper = "#0d1117";

const Colors& colors(Hue hue) { return kColors[static_cast<std::size_t>(hue)]; }
std::string name_of(Hue hue) { return colors(hue).name; }

// One decimal at most: enough for a screen, and no compiler rounds it in its own way.
std::string number(double value) {
  const long tenths = std::lround(value * 10.0);
  return tenths % 10 == 0 ? format("%ld", tenths / 10) : format("%.1f", static_cast<double>(tenths) / 10.0);
}

std::string pair(Point point) { return number(point.x) + " " + number(point.y); }

std::string attribute(const char* name, const std::string& value) { return format(" %s=\"", name) + value + "\""; }

std::string escape(const std::string& text) {
  std::string result;
  for (const char character : text) {
    result += character == '&'   ? "&amp;"
              : character == '<' ? "&lt;"
              : character == '>' ? "&gt;"
              : character == '"' ? "&quot;"
                                 : std::string(1, character);
  }
  return result;
}

std::string middle_of(Point point) { return attribute("x", number(point.x)) + attribute("y", number(point.y)); }

// What a class of the body means, in one theme.
std::string rule(const std::string& name, bool dark) {
  if (name == "paper") {
    return std::string(".paper{fill:") + (dark ? kDarkPaper : kLightPaper) + "}\n";
  }
  for (const Colors& hue : kColors) {
    const std::string line = std::string(hue.name) + "-line";
    const std::string soft = std::string(hue.name) + "-soft";
    if (name == line) {
      return "." + line + "{stroke:" + (dark ? hue.dark : hue.light) + "}\n";
    }
    if (name == soft) {
      return "." + soft + "{fill:" + (dark ? hue.dark_soft : hue.light_soft) + "}\n";
    }
    if (name == hue.name) {
      return "." + name + "{fill:" + (dark ? hue.dark : hue.light) + "}\n";
    }
  }
  return "";
}

}  // namespace

Hue owner_hue(int owner) {
  constexpr std::array kOwners = {Hue::kBlue, Hue::kOrange, Hue::kGreen, Hue::kPink, Hue::kYellow};
  return kOwners[static_cast<std::size_t>(owner) % kOwners.size()];
}

Svg::Svg(int width, int height, std::string title, std::string description)
    : width_(width), height_(height), title_(std::move(title)), description_(std::move(description)) {
  classes_.insert("paper");
}

void Svg::box(const Box& box, const BoxStyle& style) {
  std::string names = fill_class(style.hue, style.fill);
  std::string attributes = attribute("x", number(box.x)) + attribute("y", number(box.y)) +
                           attribute("width", number(box.width)) + attribute("height", number(box.height));
  if (style.radius > 0.0) {
    attributes += attribute("rx", number(style.radius));
  }
  if (style.fill == Fill::kHatched) {
    attributes += attribute("fill", "url(#" + name_of(style.hue) + "-hatch)");
  } else if (style.fill == Fill::kNone) {
    attributes += attribute("fill", "none");
  }
  if (style.line_width > 0.0) {
    const std::string line = name_of(style.hue) + "-line";
    names = names.empty() ? line : names + " " + line;
    classes_.insert(line);
    attributes += attribute("stroke-width", number(style.line_width));
    attributes += style.dashed ? attribute("stroke-dasharray", "5 4") : "";
  }
  body_ += "<rect" + (names.empty() ? "" : attribute("class", names)) + attributes + "/>\n";
}

void Svg::text(Point point, const std::string& text, const TextStyle& style) {
  body_ += "<text" + middle_of(point) + text_attributes(style) + ">" + escape(text) + "</text>\n";
}

void Svg::label(const Box& box, const std::string& text, TextStyle style) {
  style.anchor = Anchor::kMiddle;
  constexpr double kHalfCapital = 0.36;  // of the letters' size: how far below the middle a line of text stands
  this->text({box.x + box.width / 2.0, box.y + box.height / 2.0 + kHalfCapital * style.size}, text, style);
}

void Svg::cells(const Box& box, const std::vector<Cell>& cells, const BoxStyle& outline, const TextStyle& style) {
  COMMON_CHECK(!cells.empty(), "a row has cells");
  const double width = box.width / static_cast<double>(cells.size());
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const Box cell{box.x + width * static_cast<double>(i), box.y, width, box.height};
    this->box(cell, {cells[i].hue, cells[i].fill, 0.0, 0.0});
    if (!cells[i].text.empty()) {
      label(cell, cells[i].text, style);
    }
    if (i > 0) {
      line({{cell.x, cell.y}, {cell.x, cell.bottom()}}, {outline.hue, 0.7});
    }
  }
  BoxStyle frame = outline;
  frame.fill = Fill::kNone;
  this->box(box, frame);
}

void Svg::path(const std::vector<Point>& points, char step, const LineStyle& style) {
  std::string data;
  for (std::size_t i = 0; i < points.size(); ++i) {
    data += i == 0 ? 'M' : i == 1 ? step : ' ';
    data += pair(points[i]);
  }
  body_ += "<path" + line_attributes(style) + attribute("d", data) + "/>\n";
}

void Svg::line(const std::vector<Point>& points, const LineStyle& style) { path(points, 'L', style); }

void Svg::steps(const std::vector<Point>& points, const LineStyle& style) {
  std::string data;
  for (const Point& point : points) {
    if (data.empty()) {
      data = pair(point).insert(0, 1, 'M');
    } else {
      data.append(1, 'H').append(number(point.x)).append(1, 'V').append(number(point.y));
    }
  }
  body_ += "<path" + line_attributes(style) + attribute("d", data) + "/>\n";
}

void Svg::curve(Point from, Point to, const LineStyle& style) {
  const double middle = (from.y + to.y) / 2.0;
  path({from, {from.x, middle}, {to.x, middle}, to}, 'C', style);
}

void Svg::legend(Point point, const std::vector<Cell>& entries) {
  constexpr double kSide = 14.0;
  constexpr double kSize = 14.0;
  constexpr double kLetter = 0.58 * kSize;  // wide enough for most fonts
  constexpr double kLine = 24.0;
  const double left = point.x;
  for (const Cell& entry : entries) {
    const double width = kSide + 6.0 + kLetter * static_cast<double>(entry.text.size());
    if (point.x > left && point.x + width > width_) {
      point = {left, point.y + kLine};
    }
    box({point.x, point.y - kSide + 2.0, kSide, kSide}, {entry.hue, entry.fill, 1.0, 2.0});
    text({point.x + kSide + 6.0, point.y}, entry.text, {.size = kSize, .hue = Hue::kGrey});
    point.x += width + 14.0;
  }
}

void Svg::vertical_text(Point point, const std::string& text, const TextStyle& style) {
  body_ += "<text" + attribute("transform", "translate(" + pair(point) + ") rotate(-90)") + text_attributes(style) +
           ">" + escape(text) + "</text>\n";
}

std::string Svg::fill_class(Hue hue, Fill fill) {
  std::string name;
  switch (fill) {
    case Fill::kNone:
      return "";
    case Fill::kHatched:
      hatches_.insert(hue);
      classes_.insert(name_of(hue) + "-line");
      return "";
    case Fill::kPaper:
      name = "paper";
      break;
    case Fill::kSoft:
      name = name_of(hue) + "-soft";
      break;
    case Fill::kStrong:
      name = name_of(hue);
      break;
  }
  classes_.insert(name);
  return name;
}

std::string Svg::line_attributes(const LineStyle& style) {
  classes_.insert(name_of(style.hue) + "-line");
  std::string result = attribute("class", name_of(style.hue) + "-line") + attribute("fill", "none") +
                       attribute("stroke-width", number(style.width));
  result += style.dashed ? attribute("stroke-dasharray", "5 4") : "";
  if (style.arrow) {
    arrows_.insert(style.hue);
    classes_.insert(name_of(style.hue));
    result += attribute("marker-end", "url(#" + name_of(style.hue) + "-arrow)");
  }
  return result;
}

std::string Svg::text_attributes(const TextStyle& style) {
  classes_.insert(name_of(style.hue));
  constexpr std::array<const char*, 3> kAnchors = {"start", "middle", "end"};
  std::string result =
      attribute("class", name_of(style.hue) + (style.code ? " code" : "")) + attribute("font-size", number(style.size));
  if (style.anchor != Anchor::kStart) {
    result += attribute("text-anchor", kAnchors[static_cast<std::size_t>(style.anchor)]);
  }
  return result + (style.bold ? attribute("font-weight", "bold") : "");
}

std::string Svg::to_string() const {
  std::string light;
  std::string dark;
  for (const std::string& name : classes_) {
    light += rule(name, false);
    dark += rule(name, true);
  }
  std::string definitions;
  for (const Hue hue : arrows_) {
    definitions += "<marker id=\"" + name_of(hue) +
                   "-arrow\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"10\" markerHeight=\"10\" "
                   "markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path class=\"" +
                   name_of(hue) + "\" d=\"M0 1L10 5L0 9z\"/></marker>\n";
  }
  for (const Hue hue : hatches_) {
    definitions += "<pattern id=\"" + name_of(hue) +
                   "-hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
                   "patternTransform=\"rotate(45)\"><rect class=\"paper\" width=\"6\" height=\"6\"/><path class=\"" +
                   name_of(hue) + "-line\" d=\"M3 0V6\" stroke-width=\"1.2\"/></pattern>\n";
  }
  // The description's id lets readers of screens announce it with the title.
  return format("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\"", width_,
                height_, width_, height_) +
         " role=\"img\" aria-labelledby=\"title description\" "
         "font-family=\"system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif\">\n<title id=\"title\">" +
         escape(title_) + "</title>\n<desc id=\"description\">" + escape(description_) + "</desc>\n<style>\n" + light +
         ".code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}\n"
         "@media (prefers-color-scheme:dark){\n" +
         dark + "}\n</style>\n" + (definitions.empty() ? "" : "<defs>\n" + definitions + "</defs>\n") +
         "<rect class=\"paper\" width=\"100%\" height=\"100%\" rx=\"8\"/>\n" + body_ + "</svg>\n";
}

}  // namespace common
