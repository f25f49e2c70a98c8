// Between the executor and the counts: which thread runs, and where memory lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cuda/executor/warp_size.h"

namespace common::executor {

enum class Space { kGlobal, kShared, kOther };

struct Access {
  const void* instruction;  // where in the program
  std::uintptr_t address;
  std::int32_t bytes;
  bool is_store;
  Space space;
  bool is_bulk = false;  // a copy that the lane orders from the copy engine
};

// The warp that made the accesses.
struct WarpPlace {
  int block;  // of its grid, counted along x, then y, then z
  int warp;   // of its block
};

// One for each lane: what it has accessed since its warp last met.
using LaneLog = std::vector<Access>;

struct Stack {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;

  bool has(std::uintptr_t address) const { return address - begin < bytes; }
};
// That of the kernel's thread that runs; none has no bytes. Most accesses are to it, and are of no concern: here to be
// asked without a call.
extern constinit thread_local Stack running_stack;

// The log of the thread that runs, nullptr if no kernel runs or nothing is counted.
LaneLog* current_log();
// An access of the thread that runs. Outside of all memory that the kernel has been given, it ends the kernel.
Space check_access(std::uintptr_t address, int bytes, bool is_store);
bool runs_kernel();

// Called when the lanes meet, or have ended: logs[i] is lane i's. Clears them.
void count_requests(LaneLog* const (&logs)[kWarpThreads], WarpPlace place);
void count_grid();
void count_barrier();
// An access of the thread that runs: checked, and counted if that is wanted. A copy of 16 bytes, for which `from` may
// be nullptr: zeros are stored.
void note_access(const void* instruction, const void* pointer, int bytes, bool is_store);
void note_async_copy(const void* instruction, const void* to, const void* from, int bytes);
bool is_counting();

}  // namespace common::executor
