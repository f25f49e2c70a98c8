#include "page.h"

#include <cstddef>

// STAGE_SOURCE_DIR is the stage's folder. The assembler copies the file byte for byte, as in
// common/model/default_model.cpp.
#ifdef __APPLE__
#define READ_ONLY_SECTION "__TEXT,__const"
#else
#define READ_ONLY_SECTION ".rodata, \"a\""
#endif
asm(".pushsection " READ_ONLY_SECTION
    "\n"
    ".global kServerPageBegin\n"
    "kServerPageBegin:\n"
    ".incbin \"" STAGE_SOURCE_DIR
    "/serve/page.html\"\n"
    ".global kServerPageEnd\n"
    "kServerPageEnd:\n"
    ".byte 0\n"
    ".popsection\n");

extern "C" {
extern const char kServerPageBegin[] asm("kServerPageBegin");
extern const char kServerPageEnd[] asm("kServerPageEnd");
}

namespace stage8 {

std::string_view page() { return {kServerPageBegin, static_cast<std::size_t>(kServerPageEnd - kServerPageBegin)}; }

}  // namespace
