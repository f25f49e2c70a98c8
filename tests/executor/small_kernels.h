// Kernels of a few lines, each for one thing that the executor does.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tests {

// ---- lanes together ----------------------------------------------------------------------------------------------

// [32] each, for one warp whose halves shuffle by themselves, and then together.
__global__ void shuffle_halves(int* in_half, int* across);
// ballots: of each thread's warp. Threads from num_threads on end before.
__global__ void vote(int num_threads, unsigned* ballots, int* all, int* any);
// The sum over all threads below num_threads; the others end before the block meets.
__global__ void count_after_barrier(int num_threads, int* sums);
__global__ void meet_at_different_instructions(int* out);

// ---- blocks ------------------------------------------------------------------------------------------------------

// turns: how many blocks have run before each one, [gridDim.z, gridDim.y, gridDim.x]. turn begins as 0.
__global__ void note_turn(int* turn, int* turns);

// ---- hangs and faults --------------------------------------------------------------------------------------------

__global__ void wait_at_different_barriers();
__global__ void wait_for_missing_arrival();
__global__ void wait_at_uninitialised_barrier();
__global__ void read_at(const float* from, int index, int thread, float* out);
__global__ void read_2_bytes_off(const float* from, float* out);
__global__ void read_shared_at(int index, float* out);
__global__ void copy_to_shared_at(int index, const float* from);
__global__ void throw_exception();

// ---- shared memory and copies ------------------------------------------------------------------------------------

__global__ void read_fresh_dynamic(float* out);
// Two kernels with a static array each.
__global__ void read_fresh_static(float* out);
__global__ void read_other_static(float* out);
// Four words for each of 32 threads: the words before the copies are waited for, and after.
__global__ void copy_without_waiting(const float* from, float* before, float* after);
// Two groups of copies. first: what the first group brought when one group may be pending, [32, 4]; second: what the
// second group's place holds then.
__global__ void copy_in_groups(const float* from, float* first, float* second);
// num_tiles tiles of 128 floats through one buffer, by bulk copies and the phases of one barrier.
__global__ void copy_tiles(const float* from, float* to, int num_tiles);
__global__ void arrive_by_copies(const float* from, float* to);

// ---- matrices ----------------------------------------------------------------------------------------------------

enum class Element { kBFloat16, kHalf };
// a [16, 16], b [16, 8], c [16, 8], in the fragments of ptx.cuh, which ldmatrix finds in shared memory.
__global__ void multiply(Element element, const std::uint16_t* a, const std::uint16_t* b, float* c);
// The upper 8 rows alone.
__global__ void multiply_upper(const std::uint16_t* a, const std::uint16_t* b, float* c);
// matrix, result: [8, 8] of 16 bits.
__global__ void transpose_matrix(const std::uint16_t* matrix, std::uint16_t* result);

// ---- accesses ----------------------------------------------------------------------------------------------------

__global__ void load_strided(const float* from, float* to, int stride);
__global__ void load_vectors(const float4* from, float4* to);
__global__ void load_the_same(const float* from, float* to);
__global__ void load_twice(const float* from, float* to);
__global__ void load_by_lane(const float* from, float* to);
__global__ void load_after_halves_met(const float* from, float* to);
__global__ void share_strided(float* to, int stride);
__global__ void share_vectors(float4* to);
// 32 x 32 floats, with rows of row_words words in shared memory.
__global__ void transpose_tile(const float* from, float* to, int row_words);
struct Triple {
  float x;
  float y;
  float z;
};
__global__ void load_triples(const Triple* from, Triple* to);

}  // namespace tests
