#include "common/model/default_model.h"

// DEFAULT_MODEL_PATH is the absolute path of the GGUF file, set by common/CMakeLists.txt. The assembler's .incbin
// copies the file as it is; a C array of five million numbers would take the compiler minutes and gigabytes. The
// directives are those of GNU and LLVM assemblers for ELF, on x86-64 and AArch64 alike.
asm(".pushsection .rodata, \"a\"\n"
    ".balign 64\n"
    ".global kDefaultModelBegin\n"
    "kDefaultModelBegin:\n"
    ".incbin \"" DEFAULT_MODEL_PATH
    "\"\n"
    ".global kDefaultModelEnd\n"
    "kDefaultModelEnd:\n"
    ".byte 0\n"  // the end marker needs a byte of its own, or it may be another object's first
    ".popsection\n");

extern "C" {
extern const std::byte kDefaultModelBegin[];
extern const std::byte kDefaultModelEnd[];
}

namespace common {

std::span<const std::byte> default_model() {
  const auto size = static_cast<std::size_t>(kDefaultModelEnd - kDefaultModelBegin);
  return {kDefaultModelBegin, size};
}

}  // namespace common
