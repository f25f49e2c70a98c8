// A 64-bit hash of bytes: XXH3 of the xxHash library. Fast and well distributed, but not cryptographic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace common {

// Equal bytes with an equal seed have an equal hash, on every machine of the same byte order.
std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed);

}  // namespace common
