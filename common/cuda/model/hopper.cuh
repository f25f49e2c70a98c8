// Hopper's instructions for products of matrices, which C++ cannot express: a small function for each. Names follow the
// PTX manual (https://docs.nvidia.com/cuda/parallel-thread-execution/).
//
// A matrix in shared memory lies in panels of 64 columns of 16-bit numbers, 128 bytes: row r of a panel begins 128 r
// bytes after it, and its pieces of 16 bytes are swizzled by r % 8, so that 8 rows' pieces of equal number lie in
// different banks. Panels begin at multiples of 1,024 bytes. copy_panel() brings them so, and wgmma reads them so. Of
// 8-bit numbers a panel has 128 columns.
#pragma once

#include <cuda.h>

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "kernels for compute capability 9.0 are compiled for 90a: wgmma exists on this one architecture only"
#endif

// wgmma exists on this one architecture only.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define COMMON_HOPPER 1
#else
#define COMMON_HOPPER 0
#endif

namespace common {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

#if COMMON_HOPPER

// Shared memory's own 32-bit addresses, which the instructions below take.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- barriers that also count bytes: a phase ends when all arrivals and all bytes have come -----------------------

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

// Barriers of some of a block's threads, by number (0 is __syncthreads'): of `threads` that wait or arrive.
__device__ __forceinline__ void wait_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_named(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- copies of panels ---------------------------------------------------------------------------------------------

// What is read once should not stay in L2 longer than it must, and what all blocks read should.
__device__ __forceinline__ std::uint64_t streaming_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t keeping_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As many rows as the map says, from `row` on, of the panel whose first column is `column`. What lies outside of the
// matrix becomes zeros, and the barrier counts it as well.
__device__ __forceinline__ void copy_panel(std::uint32_t shared, const CUtensorMap& map, int column, int row,
                                           std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], "
      "[%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers, whose rows lie where lanes 8 i to 8 i + 7 say of matrix i: lane 4 g + t gets
// word t of row g of each.
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Loads the description of a matrix before its first copy needs it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- clusters: thread blocks that run side by side and reach into each other's shared memory ----------------------

// All threads of the cluster meet, and see what was written to shared memory before.
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

// ---- registers ----------------------------------------------------------------------------------------------------

// All threads of a block start with equally many. A warpgroup that only copies gives most of its own back, and those
// that compute take them.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma: four warps, a warpgroup, multiply 64 rows -------------------------------------------------------------

// What wgmma is told about a panel: where it begins, and that 8 rows further on is 1,024 bytes further on.
__device__ __forceinline__ std::uint64_t panel_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kRowsAndSwizzle = (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{1} << 62);
  return kRowsAndSwizzle | (std::uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}
// 16 columns further on in the panel, and 64 rows.
constexpr std::uint64_t kDescriptorStep = 32 >> 4;
constexpr std::uint64_t kDescriptorBlock = 64 * kPanelRowBytes >> 4;

// Before the first of some products, so that registers are as they were written.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products: they are waited for together.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups are under way.
template <int pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// The compiler does not know that a product writes its registers later: their values are, as far as it knows, made
// here.
template <int kCount>
__device__ __forceinline__ void settle(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}

#define COMMON_INOUT_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define COMMON_INOUT_8(c, i) COMMON_INOUT_4(c, i), COMMON_INOUT_4(c, i + 4)
#define COMMON_INOUT_16(c, i) COMMON_INOUT_8(c, i), COMMON_INOUT_8(c, i + 8)
#define COMMON_INOUT_32(c, i) COMMON_INOUT_16(c, i), COMMON_INOUT_16(c, i + 16)
#define COMMON_OUT_0_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define COMMON_OUT_0_15 COMMON_OUT_0_7 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define COMMON_OUT_0_31 \
  COMMON_OUT_0_15 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define COMMON_OUT_32_63                                                                                      \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define COMMON_WGMMA(tokens, registers, a, b, sum, ...)                                                    \
  asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, %" sum                                                \
               ", 0;\n"                                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" tokens "k16.f32.bf16.bf16 {" registers "}, %" a ", %" b \
               ", sum, 1, 1, 0, 0;\n}"                                                                     \
               : __VA_ARGS__                                                                               \
               : "l"(weights), "l"(x), "r"(static_cast<int>(adds)))
#define COMMON_WGMMA_OF_REGISTERS(tokens, registers, a0, a1, a2, a3, b, sum, ...)                                      \
  asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, %" sum                                                            \
               ", 0;\n"                                                                                                \
               "wgmma.mma_async.sync.aligned.m64n" tokens "k16.f32.bf16.bf16 {" registers "}, {%" a0 ", %" a1 ", %" a2 \
               ", %" a3 "}, %" b ", sum, 1, 1, 0;\n}"                                                                  \
               : __VA_ARGS__                                                                                           \
               : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(x),                           \
                 "r"(static_cast<int>(adds)))

// c (+)= weights x^T: 16 columns of 64 rows of the weights and of kTokens rows of x, both described. Without `adds`, c
// is overwritten. Warp w of the four has rows 16 w to 16 w + 15; of these, and of tokens 8 j to 8 j + 7, lane 4 g + t
// has in c[4 j] and c[4 j + 1] row g and tokens 2 t and 2 t + 1, and in the next two the same of row g + 8.
template <int kTokens>
__device__ __forceinline__ void multiply_panels(float (&c)[kTokens / 2], std::uint64_t weights, std::uint64_t x,
                                                bool adds) {
  if constexpr (kTokens == 16) {
    COMMON_WGMMA("16", COMMON_OUT_0_7, "8", "9", "10", COMMON_INOUT_8(c, 0));
  } else if constexpr (kTokens == 32) {
    COMMON_WGMMA("32", COMMON_OUT_0_15, "16", "17", "18", COMMON_INOUT_16(c, 0));
  } else {
    static_assert(kTokens == 64);
    COMMON_WGMMA("64", COMMON_OUT_0_31, "32", "33", "34", COMMON_INOUT_32(c, 0));
  }
}

// The same with weights in registers: of its warp's 16 rows, lane 4 g + t has of row g columns 2 t and 2 t + 1 in the
// first, of row g + 8 in the second, and columns 2 t + 8 and 2 t + 9 in the other two. They are read until the product
// has been waited for.
template <int kTokens>
__device__ __forceinline__ void multiply_registers(float (&c)[kTokens / 2], const std::uint32_t (&weights)[4],
                                                   std::uint64_t x, bool adds) {
  if constexpr (kTokens == 16) {
    COMMON_WGMMA_OF_REGISTERS("16", COMMON_OUT_0_7, "8", "9", "10", "11", "12", "13", COMMON_INOUT_8(c, 0));
  } else if constexpr (kTokens == 32) {
    COMMON_WGMMA_OF_REGISTERS("32", COMMON_OUT_0_15, "16", "17", "18", "19", "20", "21", COMMON_INOUT_16(c, 0));
  } else if constexpr (kTokens == 64) {
    COMMON_WGMMA_OF_REGISTERS("64", COMMON_OUT_0_31, "32", "33", "34", "35", "36", "37", COMMON_INOUT_32(c, 0));
  } else {
    static_assert(kTokens == 128);
    COMMON_WGMMA_OF_REGISTERS("128", COMMON_OUT_0_31 ", " COMMON_OUT_32_63, "64", "65", "66", "67", "68", "69",
                              COMMON_INOUT_32(c, 0), COMMON_INOUT_32(c, 32));
  }
}

#undef COMMON_WGMMA_OF_REGISTERS
#undef COMMON_WGMMA

#endif  // COMMON_HOPPER

}  // namespace common
