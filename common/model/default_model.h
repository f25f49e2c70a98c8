// The bundled model, carried inside the program: nothing to download, nothing to find at run time.
#pragma once

#include <cstddef>
#include <span>

namespace common {

// The bytes of common/model/tales/tales-5m-q8_0.gguf. They lie in the program's read-only data, aligned to 64 bytes,
// and are mapped from the executable's file page by page as they are touched.
std::span<const std::byte> default_model();

}  // namespace common
