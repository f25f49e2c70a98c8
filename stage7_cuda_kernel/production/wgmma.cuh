// Hopper's matrix instruction, wgmma: four warps, a warpgroup, multiply 64 rows at once, and the tensor cores fetch the
// operands out of shared memory themselves. An mma needs both in registers: every 16x16 of it costs loads, addresses
// and registers, and its issue slots keep the warp from everything else. wgmma is asynchronous as well: a warpgroup
// starts it, goes on computing something else, and waits for it later.
//
// Names follow the PTX manual, section "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#error "kernels for compute capability 9.0 are compiled for 90a: wgmma exists on this one architecture only"
#endif
#define COURSE_WGMMA 1
#else
#define COURSE_WGMMA 0
#endif

namespace stage7 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;

// ---- operands in shared memory -----------------------------------------------------------------------------------
//
// A matrix lies there in panels of 64 columns, 128 bytes; row r of a panel begins 128 r bytes after it, and its vectors
// of 16 bytes are swizzled by r % 8. Panels begin at multiples of 1,024 bytes. The hardware is told where the matrix
// begins and how far apart its pieces of 8 rows are (1,024 bytes), and panels, in a descriptor of 64 bits.
struct SharedMatrix {
  std::uint32_t low;  // the address and the distance of panels, in units of 16 bytes

  __device__ __forceinline__ SharedMatrix(std::uint32_t address, int panel_stride)
      : low(__shfl_sync(~0U, (address & 0x3FFFF) >> 4 | static_cast<std::uint32_t>(panel_stride >> 4) << 16, 0)) {}

  // Of the part that begins `bytes` further on.
  __device__ __forceinline__ std::uint64_t descriptor(int bytes) const {
    constexpr std::uint32_t kHigh = 1024 >> 4 | 1U << 30;  // the distance of 8 rows; 128-byte swizzle
    std::uint64_t result;
    asm("mov.b64 %0, {%1, %2};" : "=l"(result) : "r"(low + static_cast<std::uint32_t>(bytes >> 4)), "r"(kHigh));
    return result;
  }
};

#if COURSE_WGMMA

// ---- order -------------------------------------------------------------------------------------------------------

// Before the first of some products, so that registers and shared memory are as they were written.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products: they are waited for together.
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` groups are under way.
template <int pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The compiler does not know that a product writes its registers later. This keeps it from reading them earlier: their
// values are, as far as it knows, made here.
template <int kCount>
__device__ __forceinline__ void settle(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}

// ---- products ----------------------------------------------------------------------------------------------------
//
// A result of 64 rows and n columns takes n / 2 registers a thread: warp w has rows 16 w to 16 w + 15, and in them a
// thread has, of each 8 columns, what it has of an mma's result (ptx.cuh).

#define COURSE_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define COURSE_REGISTERS_32 \
  COURSE_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define COURSE_REGISTERS_48 \
  COURSE_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define COURSE_REGISTERS_64 \
  COURSE_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define COURSE_IN_OUT_8(c, i)                                                                                 \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define COURSE_IN_OUT_16(c, i) COURSE_IN_OUT_8(c, i), COURSE_IN_OUT_8(c, i + 8)
#define COURSE_IN_OUT_32(c, i) COURSE_IN_OUT_16(c, i), COURSE_IN_OUT_16(c, i + 16)

// c (+)= a b^T: 16 columns of a, 64 rows, and as many of b, kColumns rows, both in shared memory. The first product of
// a sum overwrites c.
#define COURSE_ROWS_BY_ROWS(columns, registers, a, b, sum, ...)                                             \
  asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, %" sum                                                 \
               ", 0;\n"                                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" registers "}, %" a ", %" b \
               ", sum, 1, 1, 0, 0;\n}"                                                                      \
               : __VA_ARGS__                                                                                \
               : "l"(rows), "l"(other_rows), "r"(static_cast<int>(adds)))

template <int kColumns, int kCount>
__device__ __forceinline__ void multiply_rows(float (&c)[kCount], std::uint64_t rows, std::uint64_t other_rows,
                                              bool adds) {
  static_assert(kCount >= kColumns / 2);
  if constexpr (kColumns == 32) {
    COURSE_ROWS_BY_ROWS("32", COURSE_REGISTERS_16, "16", "17", "18", COURSE_IN_OUT_16(c, 0));
  } else if constexpr (kColumns == 64) {
    COURSE_ROWS_BY_ROWS("64", COURSE_REGISTERS_32, "32", "33", "34", COURSE_IN_OUT_32(c, 0));
  } else if constexpr (kColumns == 96) {
    COURSE_ROWS_BY_ROWS("96", COURSE_REGISTERS_48, "48", "49", "50", COURSE_IN_OUT_32(c, 0), COURSE_IN_OUT_16(c, 32));
  } else {
    static_assert(kColumns == 128);
    COURSE_ROWS_BY_ROWS("128", COURSE_REGISTERS_64, "64", "65", "66", COURSE_IN_OUT_32(c, 0), COURSE_IN_OUT_32(c, 32));
  }
}

// c += a b: a, 64 rows and 16 columns, in registers, four 8x8 matrices a warp as for an mma; b, 16 rows and kColumns
// columns, in shared memory. That b's rows run along the sum is what the last operand, the transpose bit, says.
#define COURSE_REGISTERS_BY_COLUMNS(columns, registers, operands, ...)                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" registers "}, " operands \
               ", 1, 1, 1, 1;"                                                                            \
               : __VA_ARGS__                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <int kColumns>
__device__ __forceinline__ void multiply_columns(float (&c)[kColumns / 2], const std::uint32_t (&a)[4],
                                                 std::uint64_t b) {
  if constexpr (kColumns == 64) {
    COURSE_REGISTERS_BY_COLUMNS("64", COURSE_REGISTERS_32, "{%32, %33, %34, %35}, %36", COURSE_IN_OUT_32(c, 0));
  } else {
    static_assert(kColumns == 128);
    COURSE_REGISTERS_BY_COLUMNS("128", COURSE_REGISTERS_64, "{%64, %65, %66, %67}, %68", COURSE_IN_OUT_32(c, 0),
                                COURSE_IN_OUT_32(c, 32));
  }
}

// ---- registers and barriers of warpgroups ------------------------------------------------------------------------

// All threads of a thread block start with equally many registers. A warpgroup that only copies gives most of its own
// back, and those that compute take them.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barriers of some of a thread block's threads, by number (0 is __syncthreads'). `threads` in all arrive; some of them
// wait.
__device__ __forceinline__ void wait_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#endif  // COURSE_WGMMA

}  // namespace
