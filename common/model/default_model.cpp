#include "common/model/default_model.h"

// DEFAULT_MODEL_PATH is the absolute path of the GGUF file, set by common/CMakeLists.txt. The assembler's .incbin
// copies the file byte for byte; a C array of five million numbers would take the compiler minutes and gigabytes. The
// GNU and LLVM assemblers know these directives on every processor. The section's name depends on the object format.
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
    ".byte 0\n"  // so that the end marker is not the address of another object
    ".popsection\n");

extern "C" {  // asm(): some systems put an underscore before C names
extern const std::byte kDefaultModelBegin[] asm("kDefaultModelBegin");
extern const std::byte kDefaultModelEnd[] asm("kDefaultModelEnd");
}

namespace common {

std::span<const std::byte> default_model() {
  const auto size = static_cast<std::size_t>(kDefaultModelEnd - kDefaultModelBegin);
  return {kDefaultModelBegin, size};
}

}  // namespace common
