// The functions of ptx.cuh on the executor. What it cannot run is absent: wgmma, clusters, copies by tensor maps, and
// the accesses between GPUs that order others. All GPUs' memory is the host's.
#pragma once

#include <cstring>

#include "common/cuda/executor/cuda_on_host.h"
#include "common/cuda/executor/mma_layout.h"
#include "common/cuda/executor/small_floats.h"

#define COURSE_BULK_COPY 1
#define COURSE_WGMMA 0

namespace common {

inline std::uint32_t shared_address(const void* pointer) { return executor::shared_address(pointer); }

// ---- arithmetic --------------------------------------------------------------------------------------------------

inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }

template <int kFirst>
std::uint32_t extend_bytes(std::uint32_t bytes) {
  const auto one = [&](int byte) {
    return static_cast<std::uint16_t>(static_cast<std::int8_t>(bytes >> 8 * byte & 0xFFU));
  };
  return std::uint32_t{one(kFirst + 1)} << 16U | one(kFirst);
}

namespace executor {

inline float upper_bfloat16(std::uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000U); }
inline float lower_bfloat16(std::uint32_t pair) { return __uint_as_float(pair << 16U); }

}  // namespace executor

inline std::uint32_t multiply_add_pairs(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto one = [](float x, float y, float z) { return __float2bfloat16_rn(fmaf(x, y, z)).bits; };
  using executor::lower_bfloat16;
  using executor::upper_bfloat16;
  return std::uint32_t{one(upper_bfloat16(a), upper_bfloat16(b), upper_bfloat16(c))} << 16U |
         one(lower_bfloat16(a), lower_bfloat16(b), lower_bfloat16(c));
}

// ---- matrices: ldmatrix, mma -------------------------------------------------------------------------------------

namespace executor {

// Row r of matrix m, 16 bytes, lies where lane 8 m + r says. `transposed`: each lane gets elements of columns.
template <bool kTransposed>
void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  struct Own {
    const unsigned char* row;
    std::uint32_t (*result)[4];
  } own{static_cast<const unsigned char*>(shared_pointer(address)), &m};
  note_shared_rows(own.row);
  meet_warp(~0U, kTransposed ? "ldmatrix.trans" : "ldmatrix", &own, [](OfLanes of_lanes) {
    note_instruction(Instruction::kMatrixLoad);
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        std::uint32_t pair = 0;
        for (int i = 0; i < 2; ++i) {
          const int row = kTransposed ? 2 * (lane % 4) + i : lane / 4;
          const int column = kTransposed ? lane / 4 : 2 * (lane % 4) + i;
          std::uint16_t element = 0;
          std::memcpy(&element, static_cast<const Own*>(of_lanes[8 * matrix + row])->row + 2 * column, 2);
          pair |= std::uint32_t{element} << 16 * i;
        }
        (*static_cast<Own*>(of_lanes[lane])->result)[matrix] = pair;
      }
    }
  });
}

// c += a b, of 16x16 and 16x8. to_float: of a 16-bit element.
template <float (*to_float)(std::uint32_t)>
void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, const char* name) {
  struct Own {
    float (*c)[4];
    const std::uint32_t (*a)[4];
    std::uint32_t b[2];
  } own{&c, &a, {b0, b1}};
  meet_warp(~0U, name, &own, [](OfLanes of_lanes) {
    note_instruction(Instruction::kMatrixProduct);
    const auto half_of = [](std::uint32_t pair, int i) { return to_float(pair >> 16 * i & 0xFFFFU); };
    float left[16][16];  // a
    float right[16][8];  // b
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      const Own& of = *static_cast<const Own*>(of_lanes[lane]);
      for (int i = 0; i < 2; ++i) {
        for (int index = 0; index < 4; ++index) {
          const MatrixPlace place = left_place(lane, index, i);
          left[place.row][place.column] = half_of((*of.a)[index], i);
        }
        for (int index = 0; index < 2; ++index) {
          const MatrixPlace place = right_place(lane, index, i);
          right[place.row][place.column] = half_of(of.b[index], i);
        }
      }
    }
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const MatrixPlace place = result_place(lane, i);
        double sum = 0.0;
        for (int k = 0; k < 16; ++k) {
          sum += static_cast<double>(left[place.row][k]) * static_cast<double>(right[k][place.column]);
        }
        float& result = (*static_cast<Own*>(of_lanes[lane])->c)[i];
        result = static_cast<float>(static_cast<double>(result) + sum);
      }
    }
  });
}

inline float float_of_bfloat16(std::uint32_t bits) { return __uint_as_float(bits << 16U); }

}  // namespace executor

inline void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) { executor::load_matrices<false>(m, address); }
inline void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t address) {
  executor::load_matrices<true>(m, address);
}

inline std::uint32_t transpose(std::uint32_t m) {
  struct Own {
    std::uint32_t given;
    std::uint32_t taken;
  } own{m, 0};
  executor::meet_warp(~0U, "movmatrix", &own, [](executor::OfLanes of_lanes) {
    for (int lane = 0; lane < executor::kWarpThreads; ++lane) {
      Own& to = *static_cast<Own*>(of_lanes[lane]);
      to.taken = 0;
      for (int i = 0; i < 2; ++i) {
        const int row = 2 * (lane % 4) + i;  // of the matrix that is transposed, in column lane / 4
        const std::uint32_t pair = static_cast<const Own*>(of_lanes[4 * row + lane / 4 / 2])->given;
        to.taken |= (pair >> 16 * (lane / 4 % 2) & 0xFFFFU) << 16 * i;
      }
    }
  });
  return own.taken;
}

inline void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  executor::multiply_add<executor::float_of_bfloat16>(c, a, b0, b1, "mma");
}
inline void multiply_add_halves(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  executor::multiply_add<executor::float_of_half>(c, a, b0, b1, "mma of float16");
}
inline void multiply_add_upper(float (&c)[2], std::uint32_t a0, std::uint32_t a1, std::uint32_t b0, std::uint32_t b1) {
  float whole[4] = {c[0], c[1], 0.0F, 0.0F};
  const std::uint32_t a[4] = {a0, 0, a1, 0};
  multiply_add(whole, a, b0, b1);
  c[0] = whole[0];
  c[1] = whole[1];
}

// ---- accesses to global memory -----------------------------------------------------------------------------------

using CachePolicy = std::uint64_t;
inline CachePolicy streaming_policy() { return 0; }
inline CachePolicy keeping_policy() { return 0; }
inline uint4 load_once(const uint4* from, CachePolicy /*policy*/) { return *from; }
inline void store_once(uint4* to, uint4 x, CachePolicy /*policy*/) { *to = x; }
inline uint4 load_past_l1(const void* from) { return *static_cast<const uint4*>(from); }
inline uint4 load_streaming(const uint4* from) { return *from; }
inline void prefetch_to_l2(const void* /*from*/) {}
inline void store_release_system(unsigned* to, unsigned x) { *to = x; }
inline unsigned load_acquire_system(const unsigned* from) { return *from; }
inline void store_two_words_system(uint4* to, uint4 x) { *to = x; }
inline uint4 load_two_words_system(const uint4* from) { return *from; }

// ---- accesses to shared memory by its own addresses --------------------------------------------------------------

inline void store_vec(std::uint32_t address, uint4 x) { *static_cast<uint4*>(executor::shared_pointer(address)) = x; }
inline void store_zeros(std::uint32_t address) { store_vec(address, {0, 0, 0, 0}); }
inline void store_word(std::uint32_t address, std::uint32_t x) {
  *static_cast<std::uint32_t*>(executor::shared_pointer(address)) = x;
}
inline void store_byte(std::uint32_t address, std::uint32_t x) {
  *static_cast<std::uint8_t*>(executor::shared_pointer(address)) = static_cast<std::uint8_t>(x);
}
inline std::uint32_t load_byte(std::uint32_t address) {
  return *static_cast<const std::uint8_t*>(executor::shared_pointer(address));
}

// ---- asynchronous copies of 16 bytes for each thread -------------------------------------------------------------

inline void copy_vec_async(std::uint32_t shared, const void* global, bool exists) {
  executor::copy_async(executor::shared_pointer(shared), global, 16, exists);
}
inline void copy_vec_async(std::uint32_t shared, const void* global) { copy_vec_async(shared, global, true); }
inline void commit_copies() { executor::commit_copies(); }
template <int pending>
void wait_copies() {
  executor::wait_copies(pending);
}

// ---- barriers of some of a thread block's threads ----------------------------------------------------------------

inline void wait_named(int barrier, int threads) { executor::synchronize_named(barrier, threads, true); }
inline void arrive_named(int barrier, int threads) { executor::synchronize_named(barrier, threads, false); }

// ---- launches that overlap: here they never do -------------------------------------------------------------------

inline void wait_for_previous_launch() {}
inline void allow_next_launch() {}

// ---- barriers in shared memory that also count bytes, and the copy engine ----------------------------------------

inline void init_barrier(std::uint32_t barrier, int arrivals) { executor::init_barrier(barrier, arrivals); }
inline void fence_barrier_init() {}
inline void arrive(std::uint32_t barrier) { executor::arrive(barrier, 0); }
inline void arrive_expecting(std::uint32_t barrier, int bytes) { executor::arrive(barrier, bytes); }
inline void arrive_when_copied(std::uint32_t barrier) { executor::arrive_when_copied(barrier); }
inline void wait_barrier(std::uint32_t barrier, int parity) { executor::wait_barrier(barrier, parity); }
inline void copy_bulk(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
  executor::copy_bulk(shared, global, bytes, barrier);
}
inline void copy_bulk_once(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier,
                           CachePolicy /*policy*/) {
  copy_bulk(shared, global, bytes, barrier);
}
inline void fence_copy_engine() {}

// ---- wgmma: absent; the shapes of its operands -------------------------------------------------------------------

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;

}  // namespace common

// A launch's dynamic shared memory; see ptx.cuh.
#define COURSE_DYNAMIC_SHARED(alignment, name) unsigned char* const name = ::common::executor::dynamic_shared()
