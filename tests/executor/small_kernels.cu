#include "tests/executor/small_kernels.h"

#include <stdexcept>

#include "common/cuda/ptx.cuh"

namespace tests {

__global__ void shuffle_halves(int* in_half, int* across) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane >= 16) {
    in_half[lane] = __shfl_xor_sync(0xFFFF0000U, lane, 1);
  } else {
    in_half[lane] = __shfl_down_sync(0xFFFFU, lane, 3);
  }
  across[lane] = __shfl_sync(~0U, lane, 31 - lane);
}

__global__ void vote(int num_threads, unsigned* ballots, int* all, int* any) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread >= num_threads) {
    return;
  }
  ballots[thread] = __ballot_sync(~0U, true);
  all[thread] = __all_sync(~0U, true) && !__all_sync(~0U, thread != 0);
  any[thread] = __any_sync(~0U, thread == 1) && !__any_sync(~0U, false);
}

__global__ void count_after_barrier(int num_threads, int* sums) {
  __shared__ int sum;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread >= num_threads) {
    return;
  }
  if (thread == 0) {
    sum = 0;
  }
  __syncthreads();
  atomicAdd(&sum, 1);
  __syncthreads();
  sums[thread] = sum;
}

__global__ void meet_at_different_instructions(int* out) {
  if (threadIdx.x == 7) {
    out[0] = static_cast<int>(__ballot_sync(~0U, true));
  } else {
    out[1] = __shfl_sync(~0U, 1, 0);
  }
}

__global__ void note_turn(int* turn, int* turns) {
  if (threadIdx.x == 0) {
    turns[(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = atomicAdd(turn, 1);
  }
}

__global__ void wait_at_different_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    common::wait_named(1, 64);
  }
}

__global__ void wait_for_missing_arrival() {
  __shared__ std::uint64_t barrier;
  const std::uint32_t address = common::shared_address(&barrier);
  if (threadIdx.x == 0) {
    common::init_barrier(address, 2);
    common::arrive(address);
  }
  __syncthreads();
  if (threadIdx.x < 3) {
    common::wait_barrier(address, 0);
  }
}

__global__ void wait_at_uninitialised_barrier() {
  __shared__ std::uint64_t barrier;
  common::wait_barrier(common::shared_address(&barrier), 0);
}

__global__ void read_at(const float* from, int index, int thread, float* out) {
  if (static_cast<int>(threadIdx.x) == thread) {
    out[blockIdx.x] = from[index];
  }
}

__global__ void read_2_bytes_off(const float* from, float* out) {
  out[0] = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(from) + 2);
}

__global__ void read_shared_at(int index, float* out) {
  COURSE_DYNAMIC_SHARED(16, memory);
  out[0] = reinterpret_cast<const float*>(memory)[index];
}

__global__ void copy_to_shared_at(int index, const float* from) {
  COURSE_DYNAMIC_SHARED(16, memory);
  common::copy_vec_async(common::shared_address(memory) + static_cast<unsigned>(index) * 4, from);
}

__global__ void throw_exception() { throw std::runtime_error("a bug of the host's code"); }

__global__ void read_fresh_dynamic(float* out) {
  COURSE_DYNAMIC_SHARED(16, memory);
  auto* const words = reinterpret_cast<float*>(memory);
  const unsigned thread = threadIdx.x;
  out[32 * blockIdx.x + thread] = words[thread];
  words[thread] = 1.0F;
}

__global__ void read_fresh_static(float* out) {
  __shared__ float words[32];
  const unsigned thread = threadIdx.x;
  out[32 * blockIdx.x + thread] = words[thread];
  words[thread] = 1.0F;
}

__global__ void read_other_static(float* out) {
  __shared__ float words[32];
  const unsigned thread = threadIdx.x;
  out[32 * blockIdx.x + thread] = words[31 - thread];
  words[thread] = 1.0F;
}

__global__ void copy_without_waiting(const float* from, float* before, float* after) {
  __shared__ __align__(16) float words[32 * 4];
  const unsigned first = threadIdx.x * 4;
  for (unsigned i = first; i < first + 4; ++i) {
    words[i] = -1.0F;
  }
  common::copy_vec_async(common::shared_address(&words[first]), &from[first]);
  common::commit_copies();
  __syncthreads();
  for (unsigned i = first; i < first + 4; ++i) {
    before[i] = words[i];
  }
  common::wait_copies<0>();
  __syncthreads();
  for (unsigned i = first; i < first + 4; ++i) {
    after[i] = words[(i + 4) % 128];
  }
}

__global__ void copy_in_groups(const float* from, float* first, float* second) {
  __shared__ __align__(16) float words[2][32 * 4];
  const unsigned own = threadIdx.x * 4;
  for (unsigned i = own; i < own + 4; ++i) {
    words[0][i] = -1.0F;
    words[1][i] = -1.0F;
  }
  for (auto& group : words) {
    common::copy_vec_async(common::shared_address(&group[own]), &from[own]);
    common::commit_copies();
  }
  common::wait_copies<1>();
  for (unsigned i = own; i < own + 4; ++i) {
    first[i] = words[0][i];
    second[i] = words[1][i];
  }
  common::wait_copies<0>();
}

__global__ void copy_tiles(const float* from, float* to, int num_tiles) {
  __shared__ __align__(16) float tile[128];
  __shared__ std::uint64_t full;
  const std::uint32_t barrier = common::shared_address(&full);
  if (threadIdx.x == 0) {
    common::init_barrier(barrier, 1);
  }
  __syncthreads();
  for (int i = 0; i < num_tiles; ++i) {
    if (threadIdx.x == 0) {
      common::arrive_expecting(barrier, sizeof(tile));
      common::copy_bulk(common::shared_address(tile), from + 128 * i, sizeof(tile), barrier);
    }
    common::wait_barrier(barrier, i % 2);
    to[128 * i + static_cast<int>(threadIdx.x)] = tile[threadIdx.x];
    __syncthreads();  // all have read it
  }
}

__global__ void arrive_by_copies(const float* from, float* to) {
  __shared__ __align__(16) float words[32 * 4];
  __shared__ std::uint64_t full;
  const std::uint32_t barrier = common::shared_address(&full);
  if (threadIdx.x == 0) {
    common::init_barrier(barrier, 32);
  }
  __syncthreads();
  const unsigned first = threadIdx.x * 4;
  common::copy_vec_async(common::shared_address(&words[first]), &from[first], threadIdx.x != 5);
  common::arrive_when_copied(barrier);
  common::wait_barrier(barrier, 0);
  for (unsigned i = first; i < first + 4; ++i) {
    to[i] = words[(i + 64) % 128];
  }
}

namespace {

// Rows of 8 numbers, for loading four matrices of 8 x 8 from each 16 x 16 matrix: top left, bottom left, top right,
// bottom right.
__device__ std::uint32_t row_address(const std::uint16_t* matrix, int columns, bool is_transposed) {
  const auto lane = static_cast<int>(threadIdx.x);
  const int row = lane % 16;
  const int column = lane / 16 * 8;
  return common::shared_address(matrix + (is_transposed ? row * columns : row * columns + column));
}

}  // namespace

__global__ void multiply(Element element, const std::uint16_t* a, const std::uint16_t* b, float* c) {
  __shared__ __align__(16) std::uint16_t left[16 * 16];
  __shared__ __align__(16) std::uint16_t right[16 * 8];
  const auto lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) {
    left[i] = a[i];
  }
  for (int i = lane; i < 128; i += 32) {
    right[i] = b[i];
  }
  __syncwarp();
  std::uint32_t of_a[4];
  std::uint32_t of_b[4];  // twice the same two matrices
  common::load_matrices(of_a, row_address(left, 16, false));
  common::load_matrices_transposed(of_b, row_address(right, 8, true));
  float sums[4] = {1.0F, 1.0F, 1.0F, 1.0F};
  if (element == Element::kHalf) {
    common::multiply_add_halves(sums, of_a, of_b[0], of_b[1]);
  } else {
    common::multiply_add(sums, of_a, of_b[0], of_b[1]);
  }
  for (int i = 0; i < 4; ++i) {
    c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
  }
}

__global__ void multiply_upper(const std::uint16_t* a, const std::uint16_t* b, float* c) {
  const auto lane = static_cast<int>(threadIdx.x);
  const auto pair = [](std::uint16_t low, std::uint16_t high) { return std::uint32_t{high} << 16U | low; };
  const int k = lane % 4 * 2;
  const int row = lane / 4;
  float sums[2] = {0.0F, 0.0F};
  common::multiply_add_upper(sums, pair(a[row * 16 + k], a[row * 16 + k + 1]),
                             pair(a[row * 16 + k + 8], a[row * 16 + k + 9]), pair(b[k * 8 + row], b[k * 8 + 8 + row]),
                             pair(b[k * 8 + 64 + row], b[k * 8 + 72 + row]));
  c[row * 8 + k] = sums[0];
  c[row * 8 + k + 1] = sums[1];
}

__global__ void transpose_matrix(const std::uint16_t* matrix, std::uint16_t* result) {
  const unsigned place = threadIdx.x * 2;
  const std::uint32_t pair = common::transpose(std::uint32_t{matrix[place + 1]} << 16U | std::uint32_t{matrix[place]});
  result[place] = static_cast<std::uint16_t>(pair);
  result[place + 1] = static_cast<std::uint16_t>(pair >> 16U);
}

__global__ void load_strided(const float* from, float* to, int stride) {
  to[threadIdx.x] = from[static_cast<int>(threadIdx.x) * stride];
}

__global__ void load_vectors(const float4* from, float4* to) { to[threadIdx.x] = from[threadIdx.x]; }

__global__ void load_the_same(const float* from, float* to) { to[threadIdx.x] = from[3]; }

__global__ void load_twice(const float* from, float* to) {
  const float once = from[threadIdx.x];
  __syncwarp();
  to[threadIdx.x] = once + from[31 - threadIdx.x];
}

__global__ void load_by_lane(const float* from, float* to) {
  float sum = 0.0F;
  for (unsigned i = 0; i <= threadIdx.x; ++i) {
    sum += from[8 * i];
  }
  to[threadIdx.x] = sum;
}

__global__ void load_after_halves_met(const float* from, float* to) {
  float x = from[threadIdx.x];
  if (threadIdx.x < 16) {
    x = __shfl_xor_sync(0xFFFFU, x, 1);
  }
  to[threadIdx.x] = x;
}

__global__ void share_strided(float* to, int stride) {
  COURSE_DYNAMIC_SHARED(16, memory);
  auto* const words = reinterpret_cast<float*>(memory);
  const auto place = static_cast<int>(threadIdx.x) * stride;
  words[place] = static_cast<float>(place);
  __syncwarp();
  to[threadIdx.x] = words[place];
}

__global__ void share_vectors(float4* to) {
  COURSE_DYNAMIC_SHARED(16, memory);
  auto* const vectors = reinterpret_cast<float4*>(memory);
  vectors[threadIdx.x] = make_float4(1.0F, 2.0F, 3.0F, 4.0F);
  __syncwarp();
  to[threadIdx.x] = vectors[31 - threadIdx.x];
}

__global__ void transpose_tile(const float* from, float* to, int row_words) {
  COURSE_DYNAMIC_SHARED(16, memory);
  auto* const words = reinterpret_cast<float*>(memory);
  const auto lane = static_cast<int>(threadIdx.x);
  for (int row = 0; row < 32; ++row) {
    words[row * row_words + lane] = from[row * 32 + lane];
  }
  __syncwarp();
  for (int row = 0; row < 32; ++row) {
    to[row * 32 + lane] = words[lane * row_words + row];
  }
}

__global__ void load_triples(const Triple* from, Triple* to) { to[threadIdx.x] = from[threadIdx.x]; }

}  // namespace tests
