// Pictures as SVG: text and nothing else, the same bytes on every machine, and readable on a light and on a dark page.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

namespace common {

// A colour, as a strong tone for lines and text and a soft one for areas. The reader's theme decides what it looks
// like.
enum class Hue { kInk, kGrey, kBlue, kOrange, kGreen, kPink, kYellow, kRed };

// The colour of sequence 0, 1, 2 …: five in turn.
Hue owner_hue(int owner);

enum class Fill { kNone, kPaper, kSoft, kStrong, kHatched };
enum class Anchor { kStart, kMiddle, kEnd };

struct Point {
  double x = 0.0;
  double y = 0.0;
};

struct Box {
  double x = 0.0;
  double y = 0.0;
  double width = 0.0;
  double height = 0.0;

  double right() const { return x + width; }
  double bottom() const { return y + height; }
  Point top_middle() const { return {x + width / 2.0, y}; }
  Point bottom_middle() const { return {x + width / 2.0, bottom()}; }
};

struct BoxStyle {
  Hue hue = Hue::kGrey;
  Fill fill = Fill::kSoft;
  double line_width = 1.5;  // 0: no outline
  double radius = 3.0;
  bool dashed = false;
};

struct TextStyle {
  double size = 16.0;
  Anchor anchor = Anchor::kStart;
  Hue hue = Hue::kInk;
  bool bold = false;
  bool code = false;  // letters of equal width
};

struct LineStyle {
  Hue hue = Hue::kInk;
  double width = 1.5;
  bool dashed = false;
  bool arrow = false;  // a head at the end
};

// One cell of a row.
struct Cell {
  Hue hue = Hue::kGrey;
  Fill fill = Fill::kSoft;
  std::string text;
};

class Svg {
 public:
  // Screen readers read title and description aloud.
  Svg(int width, int height, std::string title, std::string description);

  void box(const Box& box, const BoxStyle& style = {});
  // y is the line that the letters stand on.
  void text(Point point, const std::string& text, const TextStyle& style = {});
  // In the middle of the box.
  void label(const Box& box, const std::string& text, TextStyle style = {});
  // Equal cells side by side, with one outline around all of them.
  void cells(const Box& box, const std::vector<Cell>& cells, const BoxStyle& outline, const TextStyle& style);
  void line(const std::vector<Point>& points, const LineStyle& style = {});
  // Level from each point to the next one's x, then up or down to it.
  void steps(const std::vector<Point>& points, const LineStyle& style = {});
  // Leaves `from` and reaches `to` vertically.
  void curve(Point from, Point to, const LineStyle& style = {});
  // Explains in words what cells mean: an example of each, then its text, from `point` to the right, in as many lines
  // as needed.
  void legend(Point point, const std::vector<Cell>& entries);
  // Read from the bottom up, around `point`.
  void vertical_text(Point point, const std::string& text, const TextStyle& style = {});

  std::string to_string() const;

 private:
  // step: SVG's letter for the points after the first.
  void path(const std::vector<Point>& points, char step, const LineStyle& style);
  std::string fill_class(Hue hue, Fill fill);
  std::string line_attributes(const LineStyle& style);
  std::string text_attributes(const TextStyle& style);

  int width_;
  int height_;
  std::string title_;
  std::string description_;
  std::string body_;
  std::set<std::string> classes_;  // what the body uses
  std::set<Hue> arrows_;
  std::set<Hue> hatches_;
};

// One of a program's pictures. Its file is the name and ".svg".
struct Picture {
  std::string name;
  std::string caption;
  std::function<std::string()> draw;
};

}  // namespace common
