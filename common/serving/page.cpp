#include "common/serving/page.h"

#include <cstddef>

// The build says where the page is (PAGE_PATH). The assembler copies the file byte for byte, as in
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
    ".incbin \"" PAGE_PATH
    "\"\n"
    ".global kServerPageEnd\n"
    "kServerPageEnd:\n"
    ".byte 0\n"
    ".popsection\n");

extern "C" {
extern const char kServerPageBegin[] asm("kServerPageBegin");
extern const char kServerPageEnd[] asm("kServerPageEnd");
}

namespace common {

std::string_view page() { return {kServerPageBegin, static_cast<std::size_t>(kServerPageEnd - kServerPageBegin)}; }

}  // namespace common
