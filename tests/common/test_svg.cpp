#include "common/app/svg.h"

#include <string>

#include "tests/support/catch.h"

namespace {

using common::Fill;
using common::Hue;
using common::Svg;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("a picture has a size, a title and a description, escaped") {
  const std::string svg = Svg(720, 100, "K & V", "a < b, \"c\"").to_string();
  CHECK(contains(svg, "width=\"720\" height=\"100\" viewBox=\"0 0 720 100\""));
  CHECK(contains(svg, "<title id=\"title\">K &amp; V</title>"));
  CHECK(contains(svg, "<desc id=\"description\">a &lt; b, &quot;c&quot;</desc>"));
}

TEST_CASE("numbers have one decimal at most, and no sign at zero") {
  Svg svg(10, 10, "t", "d");
  svg.line({{-0.01, 1.0 / 3.0}, {2.0, -1.25}});
  CHECK(contains(svg.to_string(), "d=\"M0 0.3L2 -1.3\""));
}

TEST_CASE("each theme has rules for the colours in use, and for no others") {
  Svg svg(10, 10, "t", "d");
  svg.box({0.0, 0.0, 5.0, 5.0}, {Hue::kBlue, Fill::kSoft});
  const std::string text = svg.to_string();
  const std::size_t dark = text.find("prefers-color-scheme:dark");
  REQUIRE(dark != std::string::npos);
  for (const std::string name : {".paper{", ".blue-soft{", ".blue-line{"}) {
    CHECK(text.find(name) < dark);
    CHECK(text.find(name, dark) != std::string::npos);
  }
  CHECK(!contains(text, ".red"));
  CHECK(!contains(text, "<defs>"));
}

TEST_CASE("arrow heads and hatching are defined where they are used") {
  Svg svg(10, 10, "t", "d");
  svg.curve({0.0, 0.0}, {5.0, 5.0}, {.hue = Hue::kRed, .arrow = true});
  svg.box({0.0, 0.0, 5.0, 5.0}, {Hue::kGreen, Fill::kHatched});
  const std::string text = svg.to_string();
  CHECK(contains(text, "<marker id=\"red-arrow\""));
  CHECK(contains(text, "url(#red-arrow)"));
  CHECK(contains(text, "<pattern id=\"green-hatch\""));
  CHECK(contains(text, "url(#green-hatch)"));
  CHECK(contains(text, ".red{fill:"));
}

TEST_CASE("cells share a row and have one outline") {
  Svg svg(100, 20, "t", "d");
  svg.cells({0.0, 0.0, 40.0, 10.0}, {{Hue::kBlue, Fill::kSoft, "x<y"}, {Hue::kGrey, Fill::kHatched, ""}},
            {.hue = Hue::kBlue}, {.size = 14.0});
  const std::string text = svg.to_string();
  CHECK(contains(text, "x=\"20\" y=\"0\" width=\"20\" height=\"10\""));
  CHECK(contains(text, "x=\"0\" y=\"0\" width=\"40\" height=\"10\""));
  CHECK(contains(text, ">x&lt;y</text>"));
}

}  // namespace
