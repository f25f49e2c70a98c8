// Runs kernels without a GPU: a thread of a kernel is a fibre, and the blocks of a grid run one after another.
//
//   grid    block 0, then block 1, then …, or in a random order (set_seed)
//   block   its threads take turns. A thread runs until it has to wait: for its warp (a shuffle, a vote, a matrix
//           instruction), for its block (__syncthreads), or for a copy. If no thread can go on, the oldest copy in
//           flight lands; if there is none, the kernel hangs, and an Error says which threads wait for what.
//
// A copy in flight lands as late as it may, so that a kernel that reads too early finds old data. Shared memory that a
// block has not written holds NaN. Memory of the "device" is a range of addresses of its own: an access in it but
// outside of its allocations is an Error, as is one that is not aligned, and one where there is no memory at all. (The
// host's own memory is not checked, and under a sanitizer the sanitizer checks in the executor's place.) Arithmetic is
// the host compiler's: results differ from a GPU's in rounding.
//
// What memory would have to do is counted (counts.h). Kernels are written in CUDA C++ as always; cuda_on_host.h gives
// the host's compiler the words that it lacks, and ptx_on_host.h the instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "common/cuda/executor/warp_size.h"

namespace common::executor {

// A fault of the kernel: what() says which block and thread, and what is wrong.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Index3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

inline constexpr int kMaxBlockThreads = 1024;
// As an H200 has them.
inline constexpr int kNumMultiprocessors = 132;
inline constexpr int kComputeCapability = 90;
inline constexpr std::size_t kMaxSharedBytes = 227 * 1024;

// 0: blocks run and threads take turns in the order of their numbers, and copies land as late as they may. Otherwise
// blocks run and threads are resumed in a random order, and copies land at random times.
void set_seed(std::uint64_t seed);

// Runs a grid of blocks of `size` threads, which all call `thread`. Returns when they have ended.
void run_grid(Index3 grid, Index3 size, std::size_t shared_bytes, const std::function<void()>& thread);

// ---- what a kernel's thread calls --------------------------------------------------------------------------------

Index3 thread_index();
Index3 block_index();
Index3 block_size();
Index3 grid_size();
int lane();

// The block's dynamic shared memory, at a multiple of 1,024 bytes.
unsigned char* dynamic_shared();

// Shared memory has 32-bit addresses of its own.
std::uint32_t shared_address(const void* pointer);
void* shared_pointer(std::uint32_t address);

// Waits until all threads of the block that have not ended are here.
void synchronize_block();
// Barriers by number, for `threads` threads of the block. Without `waits` a thread only arrives.
void synchronize_named(int number, int num_threads, bool waits);

// Waits until the lanes of the mask have called it with the same name. The last one to arrive calls combine with what
// all of them brought; then all go on. of_lanes[i]: what lane i brought, or nullptr if it is not in the mask.
using OfLanes = void* const (&)[kWarpThreads];
void meet_warp(unsigned mask, const char* name, void* own, void (*combine)(OfLanes of_lanes));

// Copies in flight, by thread: groups as cp.async has them.
void copy_async(void* shared, const void* global, int bytes, bool exists);
void commit_copies();
void wait_copies(int pending);

// Barriers in shared memory that count arrivals and bytes: 8 bytes each.
void init_barrier(std::uint32_t address, int arrivals);
void arrive(std::uint32_t address, int expected_bytes);
void arrive_when_copied(std::uint32_t address);
void wait_barrier(std::uint32_t address, int parity);
void copy_bulk(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier);

// ---- the device's memory -----------------------------------------------------------------------------------------

// nullptr if there is no room. The address is a multiple of 256; behind the allocation there is a gap.
void* allocate(std::size_t bytes);
void free(void* pointer);
// Bytes that allocate() can still give, and all bytes.
std::size_t free_bytes();
std::size_t total_bytes();

}  // namespace common::executor
