#include "common/cuda/executor/executor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/context/fiber.hpp>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/text.h"
#include "common/cuda/executor/accesses.h"

#ifdef __SANITIZE_ADDRESS__
#define COURSE_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define COURSE_ADDRESS_SANITIZER 1
#endif
#endif
#ifdef COURSE_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/lsan_interface.h>
#endif

namespace common::executor {
namespace {

// ---- the device's memory -----------------------------------------------------------------------------------------

void set_accessible([[maybe_unused]] const void* begin, [[maybe_unused]] std::size_t bytes,
                    [[maybe_unused]] bool accessible) {
#ifdef COURSE_ADDRESS_SANITIZER
  if (accessible) {
    ASAN_UNPOISON_MEMORY_REGION(begin, bytes);
  } else {
    ASAN_POISON_MEMORY_REGION(begin, bytes);
  }
#endif
}

class DeviceArena {
 public:
  static constexpr std::size_t kBytes = std::size_t{2} << 30;
  static constexpr std::size_t kAlignment = 256;

  DeviceArena() {
    // Address space; pages become memory when they are first written.
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    COMMON_CHECK(memory != MAP_FAILED, "there is address space for the device's memory");
    begin_ = reinterpret_cast<std::uintptr_t>(memory);
    set_accessible(memory, kBytes, false);
  }

  void* allocate(std::size_t bytes) {
    std::uintptr_t place = begin_ + kAlignment;         // a gap before the first, too
    for (const auto& [address, size] : allocations_) {  // first fit
      if (place + bytes + kAlignment <= address) {
        break;
      }
      place = behind(address + size);
    }
    if (bytes > kBytes || place + bytes + kAlignment > begin_ + kBytes) {
      return nullptr;
    }
    allocations_[place] = bytes;
    used_ += bytes;
    void* pointer = reinterpret_cast<void*>(place);  // NOLINT(performance-no-int-to-ptr): addresses are what it keeps
    set_accessible(pointer, bytes, true);
    return pointer;
  }

  void free(void* pointer) {
    const auto found = allocations_.find(reinterpret_cast<std::uintptr_t>(pointer));
    COMMON_CHECK(found != allocations_.end(), "memory is freed once, and where it begins");
    const std::size_t pages = found->second / kPage * kPage;
    if (pages > 0 && reinterpret_cast<std::uintptr_t>(pointer) % kPage == 0) {
      (void)madvise(pointer, pages, MADV_DONTNEED);
    }
    used_ -= found->second;
    set_accessible(pointer, found->second, false);
    last_ = {0, 0};
    allocations_.erase(found);
  }

  bool has(std::uintptr_t address) const { return address - begin_ < kBytes; }
  std::uintptr_t offset(std::uintptr_t address) const { return address - begin_; }

  bool is_allocated(std::uintptr_t address, std::size_t bytes) {
    if (address < last_.first || address + bytes > last_.second) {
      auto next = allocations_.upper_bound(address);
      if (next == allocations_.begin()) {
        return false;
      }
      --next;
      last_ = {next->first, next->first + next->second};
    }
    return address + bytes <= last_.second;
  }

  std::size_t used() const { return used_; }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::uintptr_t behind(std::uintptr_t address) {  // with a gap
    return (address + 2 * kAlignment - 1) / kAlignment * kAlignment;
  }

  std::uintptr_t begin_ = 0;
  std::map<std::uintptr_t, std::size_t> allocations_;
  std::pair<std::uintptr_t, std::uintptr_t> last_;  // the allocation that was found last
  std::size_t used_ = 0;
};

DeviceArena& arena() {
  static auto* const all = new DeviceArena;  // outlives every object that frees memory
  return *all;
}

alignas(1024) unsigned char dynamic_memory[kMaxSharedBytes];

#ifdef __ELF__
extern "C" char __bss_start[];  // NOLINT: the linker's name for where data without a value begins
extern "C" char _end[];         // NOLINT: and ends

// A kernel's static arrays in shared memory are static variables of the program. What a block has not touched holds
// what an earlier block left, or zeros: it is overwritten before it is first accessed.
class StaticShared {
 public:
  bool has(std::uintptr_t address) const { return address - begin() < size(); }

  void touch(std::uintptr_t address, int bytes) {
    touched_.resize(size());
    for (std::size_t i = address - begin(); i < std::min(address - begin() + static_cast<std::size_t>(bytes), size());
         ++i) {
      if (!touched_[i]) {
        touched_[i] = true;
        by_this_block_.push_back(i);
        __bss_start[i] = static_cast<char>(0xFF);
      }
    }
  }

  void begin_block() {
    for (const std::size_t i : by_this_block_) {
      touched_[i] = false;
    }
    by_this_block_.clear();
  }

 private:
  static std::uintptr_t begin() { return reinterpret_cast<std::uintptr_t>(__bss_start); }
  static std::size_t size() { return reinterpret_cast<std::uintptr_t>(_end) - begin(); }

  std::vector<bool> touched_;
  std::vector<std::size_t> by_this_block_;
};
#else
// Other linkers do not say where such variables lie: there, accesses to static arrays are not counted.
class StaticShared {
 public:
  bool has(std::uintptr_t /*address*/) const { return false; }
  void touch(std::uintptr_t /*address*/, int /*bytes*/) {}
  void begin_block() {}
};
#endif

StaticShared static_shared;

// ---- threads -----------------------------------------------------------------------------------------------------

enum class State { kReady, kAtWarp, kAtBlock, kAtNamed, kAtBarrier, kEnded, kFailed };

struct Thread {
  int index = 0;
  State state = State::kEnded;
  const char* waits_at = "";
  std::uint32_t barrier = 0;
  int parity = 0;
  int group = 0;  // of asynchronous copies: the number of the next one to be committed
  LaneLog log;
  boost::context::fiber fiber;
  boost::context::fiber scheduler;  // while the thread runs
  void* stack_begin = nullptr;
  std::size_t stack_bytes = 0;
#ifdef COURSE_ADDRESS_SANITIZER
  void* fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  std::size_t scheduler_stack_bytes = 0;
#endif
};

thread_local Thread* current = nullptr;
bool combines = false;  // the last lane to arrive works for all: its accesses then are no thread's

// Stacks from mmap, so that what is not touched takes no memory.
class Stacks {
 public:
  using traits_type = boost::context::stack_traits;  // NOLINT(readability-identifier-naming): boost's name
#ifdef COURSE_ADDRESS_SANITIZER
  static constexpr std::size_t kBytes = 512 * 1024;
#else
  static constexpr std::size_t kBytes = 128 * 1024;
#endif
  static constexpr std::size_t kGuardBytes = 16 * 1024;  // whole pages, wherever pages are not larger

  boost::context::stack_context allocate() {
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    COMMON_CHECK(memory != MAP_FAILED, "there is address space for a thread's stack");
    // A stack grows downwards: one that overflows ends the program, and not another thread's variables.
    (void)mprotect(memory, kGuardBytes, PROT_NONE);
#ifdef COURSE_ADDRESS_SANITIZER
    // A thread at fault is not unwound: what its stack points to is no leak.
    __lsan_register_root_region(static_cast<char*>(memory) + kGuardBytes, kBytes - kGuardBytes);
#endif
    boost::context::stack_context context;
    context.size = kBytes;
    context.sp = static_cast<char*>(memory) + kBytes;
    begin = memory;
    return context;
  }
  void deallocate(boost::context::stack_context& context) noexcept {
    char* const memory = static_cast<char*>(context.sp) - context.size;
#ifdef COURSE_ADDRESS_SANITIZER
    __lsan_unregister_root_region(memory + kGuardBytes, kBytes - kGuardBytes);
#endif
    munmap(memory, context.size);
  }
  void* begin = nullptr;  // of the one allocated last
};

// A meeting of the lanes of a mask.
struct Meeting {
  unsigned mask = 0;
  unsigned arrived = 0;
  const char* name = "";
  void* of_lanes[kWarpThreads] = {};
  void (*combine)(OfLanes) = nullptr;
};

struct Warp {
  unsigned alive = 0;
  std::vector<Meeting> meetings;  // of different masks
};

struct NamedBarrier {
  int arrived = 0;
  std::vector<Thread*> waiting;
};

// A barrier in shared memory. A phase ends when all arrivals and all bytes have come.
struct CountingBarrier {
  int arrivals_of_phase = 0;
  int missing_arrivals = 0;
  std::int64_t missing_bytes = 0;
  int phase = 0;

  void end_phase_if_complete() {
    if (missing_arrivals == 0 && missing_bytes == 0) {
      ++phase;
      missing_arrivals = arrivals_of_phase;
    }
  }
};

struct CopyInFlight {
  int thread = 0;
  int group = -1;  // -1: the copy engine's
  void* to = nullptr;
  const void* from = nullptr;  // nullptr: zeros
  int bytes = 0;
  bool arrives = false;  // at the barrier, when the copy has landed
  bool is_bulk = false;
  std::uint32_t barrier = 0;
};

struct Block {
  Index3 grid;
  Index3 size;
  Index3 index;
  int num_threads = 0;
  std::size_t shared_bytes = 0;
  const std::function<void()>* body = nullptr;
  int num_alive = 0;
  int num_at_block = 0;
  std::vector<Warp> warps;
  std::map<int, NamedBarrier> named;
  std::map<std::uint32_t, CountingBarrier> barriers;
  std::deque<CopyInFlight> copies;  // in the order in which they were started
  std::string error;
};

Block block;
std::vector<std::unique_ptr<Thread>> threads;
std::uint64_t seed = 0;
std::mutex one_grid_at_a_time;

std::mt19937_64& random_numbers() {  // a seed may be set before main() begins
  static std::mt19937_64 numbers;
  return numbers;
}

std::string place_of(const Thread& thread) {
  const Index3& b = block.index;
  return "block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) + "), thread " +
         std::to_string(thread.index);
}

// Back to the scheduler, until it resumes this thread.
void yield() {
  Thread& thread = *current;
#ifdef COURSE_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&thread.fake_stack, thread.scheduler_stack, thread.scheduler_stack_bytes);
#endif
  thread.scheduler = std::move(thread.scheduler).resume();
#ifdef COURSE_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(thread.fake_stack, &thread.scheduler_stack, &thread.scheduler_stack_bytes);
#endif
}

// Ends the kernel. The thread that is at fault is never resumed: the functions that call this may be in code that does
// not expect exceptions.
void fail(const std::string& what) {
  if (block.error.empty()) {
    block.error = place_of(*current) + ": " + what;
  }
  current->state = State::kFailed;
  yield();
}

void wait_as(State state, const char* where) {
  current->state = state;
  current->waits_at = where;
  yield();
}

Warp& warp_of(const Thread& thread) { return block.warps[static_cast<std::size_t>(thread.index / kWarpThreads)]; }

// The lanes that a warp began with: the last one of a block may have fewer than 32.
unsigned existing_lanes(int warp) {
  const int count = std::min(block.num_threads - warp * kWarpThreads, kWarpThreads);
  return ~0U >> (kWarpThreads - count);
}

void count_lanes(int warp) {
  if (is_counting()) {
    LaneLog* logs[kWarpThreads] = {};
    for (int i = 0; i < kWarpThreads && warp * kWarpThreads + i < block.num_threads; ++i) {
      const int thread = warp * kWarpThreads + i;
      logs[i] = &threads[static_cast<std::size_t>(thread)]->log;
    }
    const Index3& at = block.index;
    count_requests(logs, {static_cast<int>(at.x + block.grid.x * (at.y + block.grid.y * at.z)), warp});
  }
}

// Ends each meeting at which all live lanes of its mask have arrived.
void end_meetings(int warp_index) {
  Warp& warp = block.warps[static_cast<std::size_t>(warp_index)];
  for (std::size_t i = 0; i < warp.meetings.size();) {
    Meeting& meeting = warp.meetings[i];
    if (meeting.arrived != (meeting.mask & warp.alive)) {
      ++i;
      continue;
    }
    // Lanes outside of the mask may be anywhere: what they have accessed by now depends on which lane ran first.
    if ((existing_lanes(warp_index) & ~meeting.mask) == 0) {
      count_lanes(warp_index);
    }
    combines = true;
    meeting.combine(meeting.of_lanes);
    combines = false;
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      if ((meeting.arrived >> lane & 1U) != 0) {
        const int thread = warp_index * kWarpThreads + lane;
        threads[static_cast<std::size_t>(thread)]->state = State::kReady;
      }
    }
    warp.meetings.erase(warp.meetings.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void end_block_barrier() {
  if (block.num_at_block == 0 || block.num_at_block != block.num_alive) {
    return;
  }
  for (std::size_t warp = 0; warp < block.warps.size(); ++warp) {
    count_lanes(static_cast<int>(warp));
  }
  count_barrier();
  for (int i = 0; i < block.num_threads; ++i) {
    if (threads[static_cast<std::size_t>(i)]->state == State::kAtBlock) {
      threads[static_cast<std::size_t>(i)]->state = State::kReady;
    }
  }
  block.num_at_block = 0;
}

CountingBarrier& barrier_at(std::uint32_t address) {
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end()) {
    fail("uses a barrier in shared memory that was not initialised");
  }
  return found->second;
}

void land(const CopyInFlight& copy) {
  if (copy.bytes > 0) {
    if (copy.from == nullptr) {
      std::memset(copy.to, 0, static_cast<std::size_t>(copy.bytes));
    } else {
      std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
    }
  }
  if (copy.arrives || copy.is_bulk) {
    CountingBarrier& barrier = block.barriers.at(copy.barrier);
    barrier.missing_arrivals -= copy.arrives ? 1 : 0;
    barrier.missing_bytes -= copy.is_bulk ? copy.bytes : 0;
    barrier.end_phase_if_complete();
  }
}

bool can_go_on(Thread& thread) {
  if (thread.state == State::kAtBarrier && block.barriers.at(thread.barrier).phase % 2 != thread.parity) {
    thread.state = State::kReady;
  }
  return thread.state == State::kReady;
}

void resume(Thread& thread) {
  current = &thread;
  running_stack = {reinterpret_cast<std::uintptr_t>(thread.stack_begin), thread.stack_bytes};
#ifdef COURSE_ADDRESS_SANITIZER
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, thread.stack_begin, thread.stack_bytes);
#endif
  thread.fiber = std::move(thread.fiber).resume();
#ifdef COURSE_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  current = nullptr;
  running_stack = {};
}

// An exception ends the kernel. It must not leave the fibre, and fail() leaves it for good: not inside of a handler.
void run_body(Thread& own) {
  std::string thrown;
  try {
    (*block.body)();
    own.state = State::kEnded;
  } catch (const std::exception& error) {
    thrown = error.what();
  }
  if (own.state != State::kEnded) {
    fail(thrown);
  }
}

// A thread's fibre lives as long as the program, and runs one block's thread after another.
std::unique_ptr<Thread> make_thread(int index) {
  auto thread = std::make_unique<Thread>();
  thread->index = index;
  Stacks stacks;
  boost::context::stack_context stack = stacks.allocate();
  thread->stack_begin = stacks.begin;
  thread->stack_bytes = stack.size;
  thread->fiber = boost::context::fiber(std::allocator_arg, boost::context::preallocated(stack.sp, stack.size, stack),
                                        stacks, [own = thread.get()](boost::context::fiber&& scheduler) {
#ifdef COURSE_ADDRESS_SANITIZER
                                          __sanitizer_finish_switch_fiber(nullptr, &own->scheduler_stack,
                                                                          &own->scheduler_stack_bytes);
#endif
                                          own->scheduler = std::move(scheduler);
                                          while (true) {
                                            run_body(*own);
                                            yield();
                                          }
                                          return std::move(own->scheduler);
                                        });
  return thread;
}

void on_end(const Thread& thread) {
  const int warp = thread.index / kWarpThreads;
  block.warps[static_cast<std::size_t>(warp)].alive &= ~(1U << thread.index % kWarpThreads);
  --block.num_alive;
  if (block.warps[static_cast<std::size_t>(warp)].alive == 0) {
    count_lanes(warp);
  }
  end_meetings(warp);
  end_block_barrier();
}

// Which threads wait for what, when none can go on.
std::string describe_hang() {
  std::map<std::string, std::pair<int, int>> waiting;  // what for: how many, and the first
  for (int i = 0; i < block.num_threads; ++i) {
    const Thread& thread = *threads[static_cast<std::size_t>(i)];
    if (thread.state != State::kEnded) {
      auto [found, is_new] = waiting.try_emplace(thread.waits_at, 0, i);
      ++found->second.first;
    }
  }
  const Index3& b = block.index;
  std::string text = "block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) +
                     ") hangs: " + std::to_string(block.num_threads - block.num_alive) + " of its " +
                     std::to_string(block.num_threads) + " threads have ended";
  for (const auto& [where, who] : waiting) {
    text += ", " + std::to_string(who.first) + " wait at " + where + " (the first is thread " +
            std::to_string(who.second) + ")";
  }
  return text;
}

// Drops all threads after a fault: their stacks may hold anything, and are not unwound.
void abandon_threads() {
  static auto* const abandoned = new std::vector<std::unique_ptr<Thread>>;
  for (std::unique_ptr<Thread>& thread : threads) {
    abandoned->push_back(std::move(thread));
  }
  threads.clear();
}

bool chance() { return seed != 0 && random_numbers()() % 2 == 0; }

void run_block() {
  static_shared.begin_block();
  std::fill_n(dynamic_memory, block.shared_bytes, static_cast<unsigned char>(0xFF));  // NaN
  const auto num_warps = static_cast<std::size_t>((block.num_threads + kWarpThreads - 1) / kWarpThreads);
  block.warps.assign(num_warps, {});
  block.named.clear();
  block.barriers.clear();
  block.copies.clear();
  block.num_alive = block.num_threads;
  block.num_at_block = 0;
  for (int i = 0; i < block.num_threads; ++i) {
    if (static_cast<std::size_t>(i) == threads.size()) {
      threads.push_back(make_thread(i));
    }
    Thread& thread = *threads[static_cast<std::size_t>(i)];
    thread.state = State::kReady;
    thread.group = 0;
    thread.log.clear();
    warp_of(thread).alive |= 1U << i % kWarpThreads;
  }
  std::vector<int> warp_order(num_warps);
  for (std::size_t i = 0; i < num_warps; ++i) {
    warp_order[i] = static_cast<int>(i);
  }
  std::array<int, kWarpThreads> lane_order{};
  for (int i = 0; i < kWarpThreads; ++i) {
    lane_order[static_cast<std::size_t>(i)] = i;
  }
  while (block.num_alive > 0) {
    bool went_on = false;
    if (seed != 0) {
      std::shuffle(warp_order.begin(), warp_order.end(), random_numbers());
    }
    for (const int warp : warp_order) {
      for (bool again = true; again;) {  // as long as one of its lanes can go on
        again = false;
        if (seed != 0) {
          std::shuffle(lane_order.begin(), lane_order.end(), random_numbers());
        }
        for (const int lane : lane_order) {
          const int index = warp * kWarpThreads + lane;
          if (index >= block.num_threads || !can_go_on(*threads[static_cast<std::size_t>(index)])) {
            continue;
          }
          Thread& thread = *threads[static_cast<std::size_t>(index)];
          resume(thread);
          if (!block.error.empty()) {
            return;
          }
          if (thread.state == State::kEnded) {
            on_end(thread);
          }
          again = true;
          went_on = true;
        }
        if (chance()) {
          break;
        }
      }
    }
    if (!block.copies.empty() && (!went_on || chance())) {
      land(block.copies.front());
      block.copies.pop_front();
    } else if (!went_on) {
      block.error = describe_hang();
      return;
    }
  }
  while (!block.copies.empty()) {
    land(block.copies.front());
    block.copies.pop_front();
  }
}

}  // namespace

void set_seed(std::uint64_t new_seed) {
  seed = new_seed;
  random_numbers().seed(new_seed);
}

void run_grid(Index3 grid, Index3 size, std::size_t shared_bytes, const std::function<void()>& thread) {
  COMMON_CHECK(current == nullptr, "a kernel starts no kernels");
  COMMON_CHECK(size.x * size.y * size.z >= 1 && size.x * size.y * size.z <= kMaxBlockThreads,
               "a block has 1 to 1,024 threads");
  COMMON_CHECK(shared_bytes <= kMaxSharedBytes, "a block has at most 227 KB of shared memory");
  const std::lock_guard lock(one_grid_at_a_time);
  count_grid();
  block.grid = grid;
  block.size = size;
  block.num_threads = static_cast<int>(size.x * size.y * size.z);
  block.shared_bytes = shared_bytes;
  block.body = &thread;
  combines = false;
  set_accessible(dynamic_memory, sizeof(dynamic_memory), false);
  set_accessible(dynamic_memory, shared_bytes, true);
  // Counted along x, then y, then z.
  std::vector<unsigned> order(std::size_t{grid.x} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0U);
  if (seed != 0) {
    std::shuffle(order.begin(), order.end(), random_numbers());
  }
  for (const unsigned number : order) {
    block.index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    run_block();
    if (!block.error.empty()) {
      abandon_threads();
      throw Error(std::exchange(block.error, {}));
    }
  }
}

Index3 thread_index() {
  const auto i = static_cast<unsigned>(current->index);
  return {i % block.size.x, i / block.size.x % block.size.y, i / block.size.x / block.size.y};
}
Index3 block_index() { return block.index; }
Index3 block_size() { return block.size; }
Index3 grid_size() { return block.grid; }
int lane() { return current->index % kWarpThreads; }

unsigned char* dynamic_shared() { return dynamic_memory; }

// Static arrays and dynamic memory are all in the program's data, which is smaller than 2 GB.
std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(pointer) - dynamic_memory);
}
void* shared_pointer(std::uint32_t address) { return dynamic_memory + static_cast<std::int32_t>(address); }

void synchronize_block() {
  ++block.num_at_block;
  current->state = State::kAtBlock;
  current->waits_at = "__syncthreads";
  end_block_barrier();
  yield();
}

void synchronize_named(int number, int num_threads, bool waits) {
  NamedBarrier& barrier = block.named[number];
  ++barrier.arrived;
  if (waits) {
    barrier.waiting.push_back(current);
    current->state = State::kAtNamed;
    current->waits_at = "a named barrier";
  }
  if (barrier.arrived == num_threads) {
    barrier.arrived = 0;
    for (Thread* thread : std::exchange(barrier.waiting, {})) {
      thread->state = State::kReady;
    }
  }
  yield();
}

void meet_warp(unsigned mask, const char* name, void* own, void (*combine)(OfLanes)) {
  Thread& thread = *current;
  const int lane = thread.index % kWarpThreads;
  Warp& warp = warp_of(thread);
  if ((mask >> lane & 1U) == 0) {
    fail(std::string("calls ") + name + " with a mask that it is not in itself");
  }
  Meeting* meeting = nullptr;
  for (Meeting& other : warp.meetings) {
    if (other.mask == mask) {
      meeting = &other;
    }
  }
  if (meeting == nullptr) {
    meeting = &warp.meetings.emplace_back();
    meeting->mask = mask;
    meeting->name = name;
    meeting->combine = combine;
  } else if (meeting->name != name && std::strcmp(meeting->name, name) != 0) {
    fail(std::string("is at ") + name + " while other lanes of its warp are at " + meeting->name);
  }
  meeting->of_lanes[lane] = own;
  meeting->arrived |= 1U << lane;
  thread.state = State::kAtWarp;
  thread.waits_at = name;
  end_meetings(thread.index / kWarpThreads);
  yield();
}

void copy_async(void* shared, const void* global, int bytes, bool exists) {
  note_async_copy(__builtin_return_address(0), shared, exists ? global : nullptr, bytes);
  block.copies.push_back({.thread = current->index,
                          .group = current->group,
                          .to = shared,
                          .from = exists ? global : nullptr,
                          .bytes = bytes});
}

void commit_copies() { ++current->group; }

void wait_copies(int pending) {
  const int last = current->group - pending;
  std::erase_if(block.copies, [&](const CopyInFlight& copy) {
    const bool lands = copy.thread == current->index && copy.group >= 0 && copy.group < last;
    if (lands) {
      land(copy);
    }
    return lands;
  });
}

void init_barrier(std::uint32_t address, int arrivals) {
  block.barriers[address] = {.arrivals_of_phase = arrivals, .missing_arrivals = arrivals};
}

void arrive(std::uint32_t address, int expected_bytes) {
  CountingBarrier& barrier = barrier_at(address);
  barrier.missing_bytes += expected_bytes;
  --barrier.missing_arrivals;
  barrier.end_phase_if_complete();
}

void arrive_when_copied(std::uint32_t address) {
  (void)barrier_at(address);
  block.copies.push_back({.thread = current->index, .group = current->group, .arrives = true, .barrier = address});
}

void wait_barrier(std::uint32_t address, int parity) {
  (void)barrier_at(address);
  current->barrier = address;
  current->parity = parity;
  wait_as(State::kAtBarrier, "a barrier in shared memory");
}

void copy_bulk(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
  (void)barrier_at(barrier);
  const auto from = reinterpret_cast<std::uintptr_t>(global);
  if (bytes % 16 != 0 || from % 16 != 0 || shared % 16 != 0) {
    fail("starts a bulk copy that is not aligned to 16 bytes");
  }
  (void)check_access(from, bytes, false);
  (void)check_access(reinterpret_cast<std::uintptr_t>(shared_pointer(shared)), bytes, true);
  if (is_counting()) {
    current->log.push_back({__builtin_return_address(0), from, bytes, false, Space::kGlobal, true});
  }
  block.copies.push_back({.thread = current->index,
                          .to = shared_pointer(shared),
                          .from = global,
                          .bytes = bytes,
                          .is_bulk = true,
                          .barrier = barrier});
}

void* allocate(std::size_t bytes) {
  const std::lock_guard lock(one_grid_at_a_time);
  return arena().allocate(bytes);
}
void free(void* pointer) {
  const std::lock_guard lock(one_grid_at_a_time);
  if (pointer != nullptr) {
    arena().free(pointer);
  }
}
std::size_t total_bytes() { return DeviceArena::kBytes; }
std::size_t free_bytes() { return DeviceArena::kBytes - arena().used(); }

// ---- for the counts ----------------------------------------------------------------------------------------------

constinit thread_local Stack running_stack;

bool runs_kernel() { return current != nullptr && !combines; }
LaneLog* current_log() { return current == nullptr || !is_counting() ? nullptr : &current->log; }

namespace {

void fail_access(int bytes, bool is_store, const std::string& where) {
  fail((is_store ? "writes " : "reads ") + std::to_string(bytes) + " bytes " + where);
}

// Whether there is any memory at an address of the host's. A page that had some once counts as having it.
bool is_mapped(std::uintptr_t address) {
  static const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  static std::unordered_set<std::uintptr_t> mapped;
  static std::uintptr_t last = 0;
  const std::uintptr_t page = address / page_bytes;
  if (page == last || mapped.contains(page)) {
    last = page;
    return true;
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the address is all there is
  if (msync(reinterpret_cast<void*>(page * page_bytes), page_bytes, MS_ASYNC) != 0) {
    return false;
  }
  mapped.insert(page);
  return true;
}

}  // namespace

Space check_access(std::uintptr_t address, int bytes, bool is_store) {
  if (running_stack.has(address)) {
    return Space::kOther;
  }
  Space space = Space::kOther;
  if (arena().has(address)) {
    space = Space::kGlobal;
    if (!arena().is_allocated(address, static_cast<std::size_t>(bytes))) {
      fail_access(bytes, is_store, "of global memory outside of all arrays");
    }
  } else if (const std::uintptr_t offset = address - reinterpret_cast<std::uintptr_t>(dynamic_memory);
             offset < sizeof(dynamic_memory)) {
    space = Space::kShared;
    if (offset + static_cast<std::uintptr_t>(bytes) > block.shared_bytes) {
      fail_access(bytes, is_store, "of shared memory that the launch does not ask for");
    }
  } else if (static_shared.has(address)) {
    space = Space::kShared;
#ifdef COURSE_COUNTED  // elsewhere, the compiler does not report all accesses
    static_shared.touch(address, bytes);
#endif
  } else if (!is_mapped(address)) {  // it would end the program
    fail_access(
        bytes, is_store,
        common::format("at address 0x%llx, where there is no memory", static_cast<unsigned long long>(address)));
  }
  if (space != Space::kOther && address % static_cast<std::uintptr_t>(std::clamp(bytes, 1, 16)) != 0) {
    fail_access(bytes, is_store, "at an address that is no multiple of that");
  }
  return space;
}

}  // namespace common::executor
