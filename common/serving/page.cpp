#include "common/serving/page.h"

#include <array>
#include <string_view>

// The build says where the files are (PAGE_FOLDER). The assembler copies them byte for byte, as in
// common/model/default_model.cpp.
#ifdef __APPLE__
#define READ_ONLY_SECTION "__TEXT,__const"
#else
#define READ_ONLY_SECTION ".rodata, \"a\""
#endif
#define EMBED(symbol, file)                                                                                    \
  asm(".pushsection " READ_ONLY_SECTION "\n.global " #symbol "\n" #symbol ":\n.incbin \"" PAGE_FOLDER "/" file \
      "\"\n.byte 0\n"                                                                                          \
      ".popsection\n");                                                                                        \
  extern "C" const char symbol[] asm(#symbol)  // NOLINT(bugprone-macro-parentheses): a name that is declared has none

EMBED(kPageHtml, "page.html");
EMBED(kPagePalette, "palette.css");
EMBED(kPageCss, "page.css");
EMBED(kPageSnapshot, "snapshot.js");
EMBED(kPageDrawing, "drawing.js");
EMBED(kPageViews, "views.js");
EMBED(kPageStrip, "strip.js");
EMBED(kPageScenes, "scenes.js");
EMBED(kPageMain, "page.js");

namespace common {
namespace {

struct Part {
  std::string_view reference;  // in page.html, so that the files can also be opened by themselves
  std::string_view begin;
  const char* text;
  std::string_view end;
};

std::string assemble() {
  const auto script = [](std::string_view reference, const char* text) {
    return Part{reference, "<script>\n", text, "</script>"};
  };
  const std::array parts = {
      Part{R"(<link rel="stylesheet" href="palette.css">)", "<style>\n", kPagePalette, "</style>"},
      Part{R"(<link rel="stylesheet" href="page.css">)", "<style>\n", kPageCss, "</style>"},
      script(R"(<script src="snapshot.js"></script>)", kPageSnapshot),
      script(R"(<script src="drawing.js"></script>)", kPageDrawing),
      script(R"(<script src="views.js"></script>)", kPageViews),
      script(R"(<script src="strip.js"></script>)", kPageStrip),
      script(R"(<script src="scenes.js"></script>)", kPageScenes),
      script(R"(<script src="page.js"></script>)", kPageMain),
  };
  std::string document = kPageHtml;
  for (const Part& part : parts) {
    std::string inlined(part.begin);
    inlined.append(part.text).append(part.end);
    document.replace(document.find(part.reference), part.reference.size(), inlined);
  }
  return document;
}

}  // namespace

std::string page() {
  static const std::string document = assemble();
  return document;
}

}  // namespace common
