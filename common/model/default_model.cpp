#include "common/model/default_model.h"

// DEFAULT_MODEL_PATH is the absolute path of the GGUF file, set by common/CMakeLists.txt. The assembler's .incbin
// copies the file as it is; a C array of five million numbers would take the compiler minutes and gigabytes. The
// directives are those of the GNU and LLVM assemblers, on every processor; the section's name is the object format's.
#ifdef __APPLE__
#define READ_ONLY_SECTION "__TEXT,__const"
#else
#define READ_ONLY_SECTION ".rodata, \"a\""
#endif
asm(".pushsection " READ_ONLY_SECTION
    "\n"
    ".balign 64\n"
    ".global kDefaultModelBegin\n"
    "kDefaultModelBegin:\n"
    ".incbin \"" DEFAULT_MODEL_PATH
    "\"\n"
    ".global kDefaultModelEnd\n"
    "kDefaultModelEnd:\n"
    ".byte 0\n"  // the end marker needs a byte of its own, or it may be another object's first
    ".popsection\n");

extern "C" {  // these exact names: some systems put an underscore before C's names
extern const std::byte kDefaultModelBegin[] asm("kDefaultModelBegin");
extern const std::byte kDefaultModelEnd[] asm("kDefaultModelEnd");
}

namespace common {

std::span<const std::byte> default_model() {
  const auto size = static_cast<std::size_t>(kDefaultModelEnd - kDefaultModelBegin);
  return {kDefaultModelBegin, size};
}

}  // namespace common
