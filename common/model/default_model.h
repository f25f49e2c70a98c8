// The bundled model, embedded in the program: there is nothing to download and no file to find at run time.
#pragma once

#include <cstddef>
#include <span>

namespace common {

// The bytes of common/model/tales/tales-5m-q8_0.gguf, aligned to 64 bytes. They are part of the program's read-only
// data: the system reads a page from the executable when it is first touched.
std::span<const std::byte> default_model();

}  // namespace common
