// Included before each file that is compiled to WebAssembly: Emscripten 3.1.6, Debian 12's, has the compiler of C++20's
// std::bit_cast, and a standard library without it.
#pragma once

#include <bit>

#ifndef __cpp_lib_bit_cast
namespace std {  // NOLINT(cert-dcl58-cpp): only where the library lacks it

template <typename To, typename From>
constexpr To bit_cast(const From& from) noexcept {
  return __builtin_bit_cast(To, from);
}

}  // namespace std
#endif
