// The instructions that kernels use beyond plain CUDA C++: one function for each, for all kernels. Names
// follow the PTX manual (https://docs.nvidia.com/cuda/parallel-thread-execution/). Destinations come first, as there.
// Unless marked otherwise, an instruction exists from compute capability 8.0 on.
#pragma once

#include <cuda.h>

#include <cstdint>

#ifdef COURSE_EXECUTOR
// The same functions for a machine without a GPU.
#include "common/cuda/executor/ptx_on_host.h"
#else

// A launch's dynamic shared memory, by this name in the function.
#define COURSE_DYNAMIC_SHARED(alignment, name) \
  extern __shared__ __align__(alignment)       \
  unsigned char name[]

// Whether the target chip has asynchronous copies of whole stretches of memory, barriers that count their bytes, and
// clusters: compute capability 9.0 and newer. On older chips each thread copies 16 bytes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COURSE_BULK_COPY 1
#else
#define COURSE_BULK_COPY 0
#endif

// Whether the target chip has wgmma: only compute capability 9.0, and only in code compiled for 90a.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#error "kernels for compute capability 9.0 are compiled for 90a: wgmma exists on this one architecture only"
#endif
#define COURSE_WGMMA 1
#else
#define COURSE_WGMMA 0
#endif

// Whether the target chip is older than compute capability 8.0, and what it lacks is in a file of its own.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#include "common/cuda/ptx_before_80.cuh"
#define COURSE_BEFORE_80 1
#else
#define COURSE_BEFORE_80 0
#endif

namespace common {

// Shared memory's own 32-bit addresses, which the instructions below take.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- arithmetic --------------------------------------------------------------------------------------------------

// 2^x, to about 2 units in the last place: one instruction, where expf takes about ten. 2^-infinity is 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two of four bytes, kFirst and the next one, each extended by its sign to 16 bits.
template <int kFirst>
__device__ __forceinline__ std::uint32_t extend_bytes(std::uint32_t bytes) {
  constexpr int kSignOf = 8;  // added to a byte's number: its sign, eight times
  constexpr int kSecond = kFirst + 1;
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %1, %2;"
      : "=r"(result)
      : "r"(bytes), "n"(kFirst | (kSignOf + kFirst) << 4 | kSecond << 8 | (kSignOf + kSecond) << 12));
  return result;
}

// log2(x), to about 2^-22, or to as much of its own size: one instruction. Of 0, subnormal numbers included, -infinity.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if !COURSE_BEFORE_80

// a b + c, of two bfloat16 in each register.
__device__ __forceinline__ std::uint32_t multiply_add_pairs(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

#endif

// ---- matrices: ldmatrix, mma -------------------------------------------------------------------------------------
//
// A warp holds an 8x8 matrix of 16-bit elements as one register of each thread: thread t has elements 2 (t % 4) and
// 2 (t % 4) + 1 of row t / 4. All larger operands are made of such matrices.

// Four 8x8 matrices. Thread t gives the address of row t % 8 of matrix t / 8: 16 bytes.
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// The same; the load transposes each matrix.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// An 8x8 matrix in registers, transposed.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t m) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(m));
  return result;
}

#if !COURSE_BEFORE_80

// c += a b with a: 16x16 (matrices: upper left, lower left, upper right, lower right), b: 16x8 stored transposed
// (upper, lower), c: 16x8 in float32: thread t has c[0], c[1] at row t / 4, columns 2 (t % 4) and the next, c[2], c[3]
// eight rows below.
__device__ __forceinline__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with float16 in a and b.
__device__ __forceinline__ void multiply_add_halves(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with bfloat16 and an a whose lower eight rows are zeros: computes the upper half of c.
__device__ __forceinline__ void multiply_add_upper(float (&c)[2], std::uint32_t a0, std::uint32_t a1, std::uint32_t b0,
                                                   std::uint32_t b1) {
  [[maybe_unused]] float unused[2];
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, "
      "{%0, %1, %9, %9};"
      : "+f"(c[0]), "+f"(c[1]), "=f"(unused[0]), "=f"(unused[1])
      : "r"(a0), "r"(0U), "r"(a1), "r"(b0), "r"(b1), "f"(0.0F));
}

#endif

// ---- accesses to global memory -----------------------------------------------------------------------------------

#if !COURSE_BEFORE_80

// How long L2 keeps the line of an access.
using CachePolicy = std::uint64_t;

// As short as possible: for data that is read, or written, once.
__device__ __forceinline__ CachePolicy streaming_policy() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As long as possible: for data that all thread blocks read.
__device__ __forceinline__ CachePolicy keeping_policy() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The memory must not be written during the launch.
__device__ __forceinline__ uint4 load_once(const uint4* from, CachePolicy policy) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from), "l"(policy));
  return x;
}

__device__ __forceinline__ void store_once(uint4* to, uint4 x, CachePolicy policy) {
  asm volatile("st.global.L1::no_allocate.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x.x),
               "r"(x.y), "r"(x.z), "r"(x.w), "l"(policy)
               : "memory");
}

#endif

// L1 does not keep the line.
__device__ __forceinline__ uint4 load_past_l1(const void* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// Volatile, so that the compiler keeps the order of several loads.
__device__ __forceinline__ uint4 load_streaming(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}

__device__ __forceinline__ void prefetch_to_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Between GPUs: writes before the store are visible to a thread whose load has seen the stored value.
__device__ __forceinline__ void store_release_system(unsigned* to, unsigned x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ unsigned load_acquire_system(const unsigned* from) {
  unsigned x = 0;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// Between GPUs: two words of 8 bytes. Each is stored, and loaded, whole, but either may come first, and neither says
// anything about other accesses.
__device__ __forceinline__ void store_two_words_system(uint4* to, uint4 x) {
  asm volatile(
      "{\n"
      ".reg .b64 first, second;\n"
      "mov.b64 first, {%1, %2};\n"
      "mov.b64 second, {%3, %4};\n"
      "st.relaxed.sys.global.v2.b64 [%0], {first, second};\n"
      "}\n" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}
__device__ __forceinline__ uint4 load_two_words_system(const uint4* from) {
  uint4 x;
  asm volatile(
      "{\n"
      ".reg .b64 first, second;\n"
      "ld.relaxed.sys.global.v2.b64 {first, second}, [%4];\n"
      "mov.b64 {%0, %1}, first;\n"
      "mov.b64 {%2, %3}, second;\n"
      "}\n"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(from)
      : "memory");
  return x;
}

// ---- accesses to shared memory by its own addresses --------------------------------------------------------------

// 16 bytes.
__device__ __forceinline__ void store_vec(std::uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_zeros(std::uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// 4 bytes.
__device__ __forceinline__ void store_word(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_byte(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ std::uint32_t load_byte(std::uint32_t address) {
  std::uint32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// ---- asynchronous copies of 16 bytes for each thread -------------------------------------------------------------

#if !COURSE_BEFORE_80

// Bypasses L1.
__device__ __forceinline__ void copy_vec_async(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same, and L2 gets the line of 128 bytes. If the vector does not exist, it is not read: zeros are stored.
__device__ __forceinline__ void copy_vec_async(std::uint32_t shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0)
               : "memory");
}

// Ends a group of this thread's copies, for wait_copies().
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's groups are in flight.
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#endif

// ---- barriers of some of a thread block's threads ----------------------------------------------------------------

// By number (0 is __syncthreads'). `threads` in all arrive; some of them wait.
__device__ __forceinline__ void wait_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- launches that overlap (launch.h) ----------------------------------------------------------------------------

// Waits until the previous launch has finished and its writes are visible. Before 9.0 it always has.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch start as soon as there is room, even while the previous launch still runs, unless this launch
// has called wait_for_previous_launch() before. So until the next launch has waited itself, it must not read what this
// one may still write, nor write what this one may still read.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if COURSE_BULK_COPY

// ---- barriers in shared memory that also count bytes -------------------------------------------------------------
//
// A phase ends when all arrivals and all bytes have come.

__device__ __forceinline__ void init_barrier(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives as soon as all of this thread's copy_vec_async have finished. Counts as one of the expected arrivals.
__device__ __forceinline__ void arrive_when_copied(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase of this parity (0 for the first, 1 for the second, 0 for the third, …).
__device__ __forceinline__ void wait_barrier(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- the copy engine ---------------------------------------------------------------------------------------------

// `bytes`, a multiple of 16, from one stretch of memory to another; the barrier counts them as they land.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same, for bytes that are not read again soon: with streaming_policy(), they are the first to leave the L2 cache.
__device__ __forceinline__ void copy_bulk_once(std::uint32_t shared, const void* global, int bytes,
                                               std::uint32_t barrier, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Copies a piece of a matrix, as large as the map says, from this column and row on. Elements outside of the matrix
// become zeros, and the barrier counts them as well.
__device__ __forceinline__ void copy_panel(std::uint32_t shared, const CUtensorMap& map, int column, int row,
                                           std::uint32_t barrier, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], "
      "[%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Loads the description of a matrix before its first copy needs it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before later accesses of the copy engine.
__device__ __forceinline__ void fence_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters: thread blocks that run concurrently and access each other's shared memory -------------------------

// A barrier for all threads of the cluster; they then see all earlier writes to shared memory.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ int rank_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Two floats at the same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float2 load_of_block(const float2* place, int rank) {
  std::uint32_t address;
  float2 value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

#endif  // COURSE_BULK_COPY

// ---- wgmma: four warps, a warpgroup, multiply 64 rows at once ----------------------------------------------------
//
// The tensor cores fetch operands from shared memory themselves. An mma reads both operands from registers: every 16x16
// costs loads, addresses and registers, and issue slots that the warp's other work needs. wgmma is also asynchronous: a
// warpgroup starts it, continues with other work, and waits for it later.
//
// A matrix lies in shared memory in panels of 64 columns of 16 bits, 128 bytes; row r of a panel begins 128 r bytes
// after it, and its vectors of 16 bytes are swizzled by r % 8, so that vectors with equal numbers of 8 rows lie in
// different banks. Panels begin at multiples of 1,024 bytes. A panel of 8-bit numbers has 128 columns.

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;

// A descriptor of 64 bits tells the hardware where a matrix begins, the distance of its pieces of 8 rows (1,024 bytes),
// and the distance of panels.
struct SharedMatrix {
  std::uint32_t low;  // the address and the distance of panels, in units of 16 bytes

  __device__ __forceinline__ SharedMatrix(std::uint32_t address, int panel_stride)
      : low(__shfl_sync(~0U, (address & 0x3FFFF) >> 4 | static_cast<std::uint32_t>(panel_stride >> 4) << 16, 0)) {}

  // The descriptor of the part that begins `bytes` further.
  __device__ __forceinline__ std::uint64_t descriptor(int bytes) const {
    constexpr std::uint32_t kHigh = 1024 >> 4 | 1U << 30;  // the distance of 8 rows; 128-byte swizzle
    std::uint64_t result;
    asm("mov.b64 %0, {%1, %2};" : "=l"(result) : "r"(low + static_cast<std::uint32_t>(bytes >> 4)), "r"(kHigh));
    return result;
  }
};

// The same for a single panel, whose address must be equal in all threads of a warp.
__device__ __forceinline__ std::uint64_t panel_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kRowsAndSwizzle = (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{1} << 62);
  return kRowsAndSwizzle | (std::uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}
// Advances a descriptor by 16 columns within the panel, and by 64 rows.
inline constexpr std::uint64_t kDescriptorStep = 32 >> 4;
inline constexpr std::uint64_t kDescriptorBlock = 64 * kPanelRowBytes >> 4;

#if COURSE_WGMMA

// Stores four 8x8 matrices of 16 bits. Each thread holds the two elements of each matrix that it would hold of an mma's
// result, and lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t address, const std::uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// To be called before the first of several products: orders earlier writes to registers before them.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products, for wait_products().
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` groups are in flight.
template <int pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The compiler does not know that a product writes its registers later. This keeps the compiler from reading them too
// early: it must assume that their values are written here.
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}

// A result c of 64 rows and n columns takes n / 2 registers of each thread: warp w has rows 16 w to 16 w + 15, and in
// each 8 columns of these rows a thread has the same elements as of an mma's result.

#define COMMON_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define COMMON_REGISTERS_16 COMMON_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define COMMON_REGISTERS_32 \
  COMMON_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define COMMON_REGISTERS_48 \
  COMMON_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define COMMON_REGISTERS_64 \
  COMMON_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define COMMON_REGISTERS_128                                                                                  \
  COMMON_REGISTERS_64                                                                                         \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84" \
  ", %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104" \
  ", %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121"    \
  ", %122, %123, %124, %125, %126, %127"
#define COMMON_IN_OUT_8(c, i)                                                                                 \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define COMMON_IN_OUT_16(c, i) COMMON_IN_OUT_8(c, i), COMMON_IN_OUT_8(c, i + 8)
#define COMMON_IN_OUT_32(c, i) COMMON_IN_OUT_16(c, i), COMMON_IN_OUT_16(c, i + 16)

#define COMMON_ROWS_BY_ROWS(columns, registers, operand_a, operand_b, sum, ...)                             \
  asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, %" sum                                                 \
               ", 0;\n"                                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" registers "}, %" operand_a \
               ", %" operand_b ", sum, 1, 1, 0, 0;\n}"                                                      \
               : __VA_ARGS__                                                                                \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)))

// c (+)= a b^T: 16 columns of a, 64 rows, and of b, kColumns rows, both in shared memory (descriptors). Without `adds`,
// c is overwritten.
template <int kColumns, int kCount>
__device__ __forceinline__ void multiply_rows(float (&c)[kCount], std::uint64_t a, std::uint64_t b, bool adds) {
  static_assert(kCount >= kColumns / 2);
  if constexpr (kColumns == 16) {
    COMMON_ROWS_BY_ROWS("16", COMMON_REGISTERS_8, "8", "9", "10", COMMON_IN_OUT_8(c, 0));
  } else if constexpr (kColumns == 32) {
    COMMON_ROWS_BY_ROWS("32", COMMON_REGISTERS_16, "16", "17", "18", COMMON_IN_OUT_16(c, 0));
  } else if constexpr (kColumns == 64) {
    COMMON_ROWS_BY_ROWS("64", COMMON_REGISTERS_32, "32", "33", "34", COMMON_IN_OUT_32(c, 0));
  } else if constexpr (kColumns == 96) {
    COMMON_ROWS_BY_ROWS("96", COMMON_REGISTERS_48, "48", "49", "50", COMMON_IN_OUT_32(c, 0), COMMON_IN_OUT_16(c, 32));
  } else {
    static_assert(kColumns == 128);
    COMMON_ROWS_BY_ROWS("128", COMMON_REGISTERS_64, "64", "65", "66", COMMON_IN_OUT_32(c, 0), COMMON_IN_OUT_32(c, 32));
  }
}

#define COMMON_REGISTERS_BY_ROWS(columns, registers, a0, a1, a2, a3, operand_b, sum, ...)                      \
  asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, %" sum                                                    \
               ", 0;\n"                                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" registers "}, {%" a0 ", %" a1 \
               ", %" a2 ", %" a3 "}, %" operand_b ", sum, 1, 1, 0;\n}"                                         \
               : __VA_ARGS__                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))

// The same with a in registers, four 8x8 matrices of each warp as for an mma. The registers must stay unchanged until
// the product has been waited for.
template <int kColumns>
__device__ __forceinline__ void multiply_registers_by_rows(float (&c)[kColumns / 2], const std::uint32_t (&a)[4],
                                                           std::uint64_t b, bool adds) {
  if constexpr (kColumns == 16) {
    COMMON_REGISTERS_BY_ROWS("16", COMMON_REGISTERS_8, "8", "9", "10", "11", "12", "13", COMMON_IN_OUT_8(c, 0));
  } else if constexpr (kColumns == 32) {
    COMMON_REGISTERS_BY_ROWS("32", COMMON_REGISTERS_16, "16", "17", "18", "19", "20", "21", COMMON_IN_OUT_16(c, 0));
  } else if constexpr (kColumns == 64) {
    COMMON_REGISTERS_BY_ROWS("64", COMMON_REGISTERS_32, "32", "33", "34", "35", "36", "37", COMMON_IN_OUT_32(c, 0));
  } else {
    static_assert(kColumns == 128);
    COMMON_REGISTERS_BY_ROWS("128", COMMON_REGISTERS_64, "64", "65", "66", "67", "68", "69", COMMON_IN_OUT_32(c, 0),
                             COMMON_IN_OUT_32(c, 32));
  }
}

#define COMMON_REGISTERS_BY_COLUMNS(columns, registers, operands, ...)                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" registers "}, " operands \
               ", 1, 1, 1, 1;"                                                                            \
               : __VA_ARGS__                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c += a b, with a in registers and b, 16 rows and kColumns columns, in shared memory. The last operand, the transpose
// bit, says that the sum runs over b's rows.
template <int kColumns>
__device__ __forceinline__ void multiply_registers_by_columns(float (&c)[kColumns / 2], const std::uint32_t (&a)[4],
                                                              std::uint64_t b) {
  if constexpr (kColumns == 64) {
    COMMON_REGISTERS_BY_COLUMNS("64", COMMON_REGISTERS_32, "{%32, %33, %34, %35}, %36", COMMON_IN_OUT_32(c, 0));
  } else if constexpr (kColumns == 128) {
    COMMON_REGISTERS_BY_COLUMNS("128", COMMON_REGISTERS_64, "{%64, %65, %66, %67}, %68", COMMON_IN_OUT_32(c, 0),
                                COMMON_IN_OUT_32(c, 32));
  } else {
    static_assert(kColumns == 256);
    COMMON_REGISTERS_BY_COLUMNS("256", COMMON_REGISTERS_128, "{%128, %129, %130, %131}, %132", COMMON_IN_OUT_32(c, 0),
                                COMMON_IN_OUT_32(c, 32), COMMON_IN_OUT_32(c, 64), COMMON_IN_OUT_32(c, 96));
  }
}

#undef COMMON_REGISTERS_BY_COLUMNS
#undef COMMON_REGISTERS_BY_ROWS
#undef COMMON_ROWS_BY_ROWS
#undef COMMON_IN_OUT_32
#undef COMMON_IN_OUT_16
#undef COMMON_IN_OUT_8
#undef COMMON_REGISTERS_128
#undef COMMON_REGISTERS_64
#undef COMMON_REGISTERS_48
#undef COMMON_REGISTERS_32
#undef COMMON_REGISTERS_16
#undef COMMON_REGISTERS_8

// All threads of a thread block start with the same number of registers. A warpgroup that only copies releases most of
// its registers, and warpgroups that compute get them.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif  // COURSE_WGMMA

}  // namespace common

#endif  // COURSE_EXECUTOR
