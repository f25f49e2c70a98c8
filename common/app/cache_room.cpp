#include "common/app/cache_room.h"

#include <algorithm>
#include <limits>

#include "common/base/check.h"
#include "common/base/platform.h"
#include "common/base/text.h"

namespace common {

CacheRoom room_in_host(int min_slots, int default_slots, int block_size, std::int64_t bytes_per_slot) {
  const auto blocks_of = [&](int num_slots) { return (num_slots + block_size - 1) / block_size; };
  const int wanted = blocks_of(min_slots);
  const std::int64_t available = available_memory_bytes();
  const std::int64_t room = available > 0 ? available / 2 / (bytes_per_slot * block_size) : wanted;
  if (room < 1) {
    throw InputError("half of the free memory, " + format_bytes(available / 2) +
                     ", has no room for a block of the cache");
  }
  return {static_cast<int>(std::min<std::int64_t>(wanted, room)), room < wanted ? "half of the free memory"
                                                                  : wanted > blocks_of(default_slots)
                                                                      ? "what the longest request needs"
                                                                      : "the default on a CPU"};
}

CacheRoom room_on_gpus(const MemoryShare& share, std::int64_t free_bytes, int num_gpus, int block_size,
                       std::int64_t bytes_per_slot) {
  const auto room = static_cast<std::int64_t>(share.memory_fraction * static_cast<double>(free_bytes)) /
                    (bytes_per_slot * block_size);
  // Slot numbers are ints.
  const std::int64_t most = std::min<std::int64_t>((share.max_slots + block_size - 1) / block_size,
                                                   std::numeric_limits<int>::max() / block_size);
  if (room < 1) {
    throw InputError("beside the model the GPU has " + format_bytes(free_bytes) +
                     " free, of which --memory-fraction leaves no block of K and V");
  }
  const std::string fraction = format("%g of ", share.memory_fraction);
  return {static_cast<int>(std::min(room, most)),
          room > most    ? "all that the sequences of a step can fill"
          : num_gpus > 1 ? fraction + format("what is free beside the model on the fullest of %d GPUs", num_gpus)
                         : fraction + "the " + format_bytes(free_bytes) + " that the GPU has free beside the model"};
}

std::string cache_note(std::int64_t num_slots, std::int64_t bytes_per_slot, const std::string& reason) {
  return "a cache of " + format_count(num_slots) + " slots, " + format_bytes(bytes_per_slot * num_slots) + ": " +
         reason + " (--slots sets it)";
}

}  // namespace common
