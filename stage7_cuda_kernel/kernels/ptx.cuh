// Instructions that C++ cannot express, a small function for each. Names follow the PTX manual
// (https://docs.nvidia.com/cuda/parallel-thread-execution/).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// Hopper's asynchronous copies: one instruction of one thread copies a whole stretch of memory. On older chips an
// instruction copies 16 bytes for each thread.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COURSE_BULK_COPY 1
#else
#define COURSE_BULK_COPY 0
#endif

namespace stage7 {

// Queries and outputs where tensor cores compute, and K and V unless they are stored as float8.
using Element = __nv_bfloat16;

// Shared memory's own 32-bit addresses, which the instructions below take.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- matrices: ldmatrix, mma -------------------------------------------------------------------------------------
//
// A warp holds an 8x8 matrix of 16-bit elements as one register a thread: thread t has elements 2 (t % 4) and
// 2 (t % 4) + 1 of row t / 4. All larger operands are made of such matrices.

// Four 8x8 matrices. Thread t gives the address of row t % 8 of matrix t / 8: 16 bytes.
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed on the way.
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

// ---- accesses to memory that is touched once ---------------------------------------------------------------------

// What is read, and what is written, goes through L2 without staying there longer than it must.
struct StreamingPolicy {
  std::uint64_t bits;
  __device__ __forceinline__ StreamingPolicy() {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(bits));
  }
};

// The memory must not be written during the launch.
__device__ __forceinline__ uint4 load_once(const uint4* from, StreamingPolicy policy) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from), "l"(policy.bits));
  return x;
}

__device__ __forceinline__ void store_once(uint4* to, uint4 x, StreamingPolicy policy) {
  asm volatile("st.global.L1::no_allocate.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x.x),
               "r"(x.y), "r"(x.z), "r"(x.w), "l"(policy.bits)
               : "memory");
}

// 16 bytes into shared memory.
__device__ __forceinline__ void store_vec(std::uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// A byte into it, and out of it.
__device__ __forceinline__ void store_byte(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ std::uint32_t load_byte(std::uint32_t address) {
  std::uint32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// 16 bytes of zeros into shared memory.
__device__ __forceinline__ void store_zeros(std::uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// ---- asynchronous copies -----------------------------------------------------------------------------------------

// 16 bytes, Ampere and newer; not through L1.
__device__ __forceinline__ void copy_vec_async(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's groups are under way.
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#if COURSE_BULK_COPY

// A barrier in shared memory that also counts bytes: a phase ends when all arrivals and all bytes have come.
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

// `bytes` (a multiple of 16) in one vector; the barrier counts them as they land.
__device__ __forceinline__ void copy_bulk(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Arrives as soon as all that this thread has copied with copy_vec_async has come. One of the expected arrivals.
__device__ __forceinline__ void arrive_when_copied(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before the copy engine's that follow.
__device__ __forceinline__ void fence_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif  // COURSE_BULK_COPY

}  // namespace
