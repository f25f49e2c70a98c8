#include "common/cuda/executor/counts.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/cuda/executor/accesses.h"
#include "common/cuda/executor/warp.h"

namespace common::executor {
namespace {

constexpr std::uintptr_t kSectorBytes = 32;
constexpr int kBanks = 32;
constexpr int kWordBytes = 4;

bool counting = false;
Counts counts;
int num_grids = 0;
const std::function<void(const WarpLoad&)>* see_load = nullptr;
std::vector<std::uintptr_t> sectors_read;  // with repetitions, made unique now and then

void note_sectors(std::uintptr_t begin, std::uintptr_t end) {
  for (std::uintptr_t sector = begin / kSectorBytes; sector * kSectorBytes < end; ++sector) {
    sectors_read.push_back(sector);
  }
}

void make_unique(std::vector<std::uintptr_t>& numbers) {
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
}

// The different units of `size` bytes that the accesses touch.
int different(const Access* const* accesses, std::size_t count, std::uintptr_t size) {
  std::vector<std::uintptr_t> all;
  for (std::size_t i = 0; i < count; ++i) {
    const Access& access = *accesses[i];
    for (std::uintptr_t unit = access.address / size;
         unit * size < access.address + static_cast<std::uintptr_t>(access.bytes); ++unit) {
      all.push_back(unit);
    }
  }
  make_unique(all);
  return static_cast<int>(all.size());
}

// Passes through shared memory for lanes that are served together.
int passes_of(const Access* const* accesses, std::size_t count) {
  std::vector<std::uintptr_t> words;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uintptr_t first = accesses[i]->address / kWordBytes;
    const std::uintptr_t last =
        (accesses[i]->address + static_cast<std::uintptr_t>(accesses[i]->bytes) - 1) / kWordBytes;
    for (std::uintptr_t word = first; word <= last; ++word) {
      words.push_back(word);
    }
  }
  make_unique(words);
  std::array<int, kBanks> of_bank{};
  for (const std::uintptr_t word : words) {
    ++of_bank[word % kBanks];
  }
  return *std::max_element(of_bank.begin(), of_bank.end());
}

// An access of a warp's lanes that they make together.
using Together = std::vector<std::pair<int, const Access*>>;

void show_load(const Together& lanes, WarpPlace place) {
  const Access& first = *lanes.front().second;
  if (see_load == nullptr || first.space != Space::kGlobal || first.is_store) {
    return;
  }
  WarpLoad load{.grid = num_grids - 1, .block = place.block, .warp = place.warp, .is_bulk = first.is_bulk, .lanes = {}};
  for (const auto& [lane, access] : lanes) {
    load.lanes.push_back({lane, access->address, access->bytes});
  }
  (*see_load)(load);
}

void count_bulk_copy(const Access& access) {
  ++counts.bulk_copies;
  counts.bulk_bytes += access.bytes;
  note_sectors(access.address, access.address + static_cast<std::uintptr_t>(access.bytes));
}

void count_request(const Together& lanes) {
  const Access& first = *lanes.front().second;
  Requests& of = first.space == Space::kGlobal ? (first.is_store ? counts.global_stores : counts.global_loads)
                                               : (first.is_store ? counts.shared_stores : counts.shared_loads);
  ++of.requests;
  std::vector<const Access*> accesses;
  for (const auto& [lane, access] : lanes) {
    of.bytes += access->bytes;
    accesses.push_back(access);
    if (first.space == Space::kGlobal && !first.is_store) {
      note_sectors(access->address, access->address + static_cast<std::uintptr_t>(access->bytes));
    }
  }
  if (first.space == Space::kGlobal) {
    of.units += different(accesses.data(), accesses.size(), kSectorBytes);
    const auto smallest = static_cast<std::uintptr_t>(first.bytes);
    const auto bytes = static_cast<std::uintptr_t>(different(accesses.data(), accesses.size(), smallest)) * smallest;
    of.ideal += static_cast<std::int64_t>((bytes + kSectorBytes - 1) / kSectorBytes);
    return;
  }
  const int lanes_together = kWarpThreads * kWordBytes / std::max(first.bytes, kWordBytes);
  for (int begin = 0; begin < kWarpThreads; begin += lanes_together) {
    std::vector<const Access*> together;
    for (const auto& [lane, access] : lanes) {
      if (lane >= begin && lane < begin + lanes_together) {
        together.push_back(access);
      }
    }
    if (!together.empty()) {
      of.units += passes_of(together.data(), together.size());
      ++of.ideal;
    }
  }
}

}  // namespace

bool can_count() {
#ifdef COURSE_COUNTED
  return true;
#else
  return false;
#endif
}

bool is_counting() { return counting; }

void note_access(const void* instruction, const void* pointer, int bytes, bool is_store) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (running_stack.has(address) || !runs_kernel()) {
    return;
  }
  const Space space = check_access(address, bytes, is_store);
  LaneLog* log = current_log();
  if (log != nullptr && space != Space::kOther) {
    log->push_back({instruction, address, bytes, is_store, space});
  }
}

Counts count(const std::function<void()>& work, const std::function<void(const WarpLoad&)>& see) {
  COMMON_CHECK(can_count(), "these kernels were compiled so that their accesses can be counted");
  counts = {};
  sectors_read.clear();
  num_grids = 0;
  see_load = see ? &see : nullptr;
  counting = true;
  try {
    work();
  } catch (...) {
    counting = false;
    see_load = nullptr;
    throw;
  }
  counting = false;
  see_load = nullptr;
  make_unique(sectors_read);
  counts.distinct_bytes = static_cast<std::int64_t>(sectors_read.size() * kSectorBytes);
  return counts;
}

void note_instruction(Instruction instruction) {
  if (counting) {
    std::int64_t* const of[] = {&counts.shuffles, &counts.votes, &counts.matrix_loads, &counts.matrix_products};
    ++*of[static_cast<int>(instruction)];
  }
}

void note_shared_rows(const void* row) { note_access(__builtin_return_address(0), row, 16, false); }

void note_async_copy(const void* instruction, const void* to, const void* from, int bytes) {
  if (from != nullptr) {
    note_access(instruction, from, bytes, false);
  } else if (LaneLog* log = current_log(); log != nullptr) {
    log->push_back({instruction, 0, 0, false, Space::kGlobal});  // the lane is there, and loads nothing
  }
  note_access(instruction, to, bytes, true);
  counts.async_copies += counting ? 1 : 0;
}

void count_barrier() { counts.barriers += counting ? 1 : 0; }

void count_grid() { num_grids += counting ? 1 : 0; }

void count_requests(LaneLog* const (&logs)[kWarpThreads], WarpPlace place) {
  // The same instruction for the same time: one request.
  struct Key {
    const void* instruction;
    int time;
    int lane;
    const Access* access;
  };
  std::vector<Key> keys;
  std::unordered_map<const void*, int> times;
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    if (logs[lane] == nullptr) {
      continue;
    }
    times.clear();
    for (const Access& access : *logs[lane]) {
      keys.push_back({access.instruction, times[access.instruction]++, lane, &access});
    }
  }
  std::sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
    return std::tie(a.instruction, a.time, a.lane) < std::tie(b.instruction, b.time, b.lane);
  });
  std::vector<Together> requests(1);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].access->bytes > 0) {
      requests.back().emplace_back(keys[i].lane, keys[i].access);
    }
    if (i + 1 == keys.size() || keys[i + 1].instruction != keys[i].instruction || keys[i + 1].time != keys[i].time ||
        keys[i].access->is_bulk) {
      if (requests.back().empty()) {
        continue;
      }
      if (keys[i].access->is_bulk) {
        count_bulk_copy(*keys[i].access);
      } else {
        count_request(requests.back());
      }
      requests.emplace_back();
    }
  }
  requests.pop_back();
  if (see_load != nullptr) {  // a log is in order
    std::sort(requests.begin(), requests.end(), [&](const Together& a, const Together& b) {
      const auto& [a_lane, a_access] = a.front();
      const auto& [b_lane, b_access] = b.front();
      return std::tuple(a_access - logs[a_lane]->data(), a_lane) < std::tuple(b_access - logs[b_lane]->data(), b_lane);
    });
    for (const Together& request : requests) {
      show_load(request, place);
    }
  }
  for (LaneLog* log : logs) {
    if (log != nullptr) {
      log->clear();
    }
  }
  if (sectors_read.size() > std::size_t{1} << 22U) {
    make_unique(sectors_read);
  }
}

}  // namespace common::executor

#ifdef COURSE_COUNTED

namespace common::executor {
namespace {

// A structure that the compiler copies as a whole. A GPU takes one instruction for each aligned part.
void note_range(const void* instruction, const void* pointer, std::size_t bytes, bool is_store) {
  auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (running_stack.has(address)) {
    return;
  }
  while (bytes > 0) {
    std::size_t part = 16;
    while (part > bytes || address % part != 0) {
      part /= 2;
    }
    note_access(instruction, reinterpret_cast<const void*>(address), static_cast<int>(part), is_store);
    address += part;
    bytes -= part;
  }
}

}  // namespace
}  // namespace common::executor

// What the compiler calls at each access in the kernels' files, see counts.h.
// NOLINTBEGIN: the names are the compiler's
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define COURSE_ACCESS(name, bytes, is_store) \
  void name(void* address) { common::executor::note_access(__builtin_return_address(0), address, bytes, is_store); }
#define COURSE_ACCESSES(bytes)                                                         \
  COURSE_ACCESS(__tsan_read##bytes, bytes, false)                                      \
  COURSE_ACCESS(__tsan_write##bytes, bytes, true)                                      \
  COURSE_ACCESS(__tsan_unaligned_read##bytes, bytes, false)                            \
  COURSE_ACCESS(__tsan_unaligned_write##bytes, bytes, true)                            \
  COURSE_ACCESS(__tsan_volatile_read##bytes, bytes, false)                             \
  COURSE_ACCESS(__tsan_volatile_write##bytes, bytes, true)                             \
  void __tsan_read_write##bytes(void* address) {                                       \
    common::executor::note_access(__builtin_return_address(0), address, bytes, false); \
    common::executor::note_access(__builtin_return_address(0), address, bytes, true);  \
  }
COURSE_ACCESSES(1)
COURSE_ACCESSES(2)
COURSE_ACCESSES(4)
COURSE_ACCESSES(8)
COURSE_ACCESSES(16)
void __tsan_read_range(void* address, unsigned long bytes) {
  common::executor::note_range(__builtin_return_address(0), address, bytes, false);
}
void __tsan_write_range(void* address, unsigned long bytes) {
  common::executor::note_range(__builtin_return_address(0), address, bytes, true);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
// No kernel's: the count of a shared pointer, in a file of the host that is compiled with kernels.
int __tsan_atomic32_fetch_add(volatile int* count, int value, int) {
  return __atomic_fetch_add(count, value, __ATOMIC_SEQ_CST);
}
}
// NOLINTEND

#endif
