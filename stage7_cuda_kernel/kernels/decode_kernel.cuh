// Decode attention on tensor cores: what one thread block does with its share of the tiles.
//
// bytes: every K and V of the batch once. flops: 4 * num_heads * head_dim for each token; with a group of 4 that is 4
// for each byte (8 with the columns that are padding), and tensor cores could do 160 in the time that the byte takes.
// So the kernel is a memory copy with some arithmetic on the side, and is built like one: rings of tiles in flight
// (tile_ring.cuh), equal shares (decode_plan.h), and nothing that makes the copies wait.
//
// The products are formed the other way round than on paper, S^T = K Q^T and O^T = V^T P^T. An mma is 16 rows by 8
// columns: tokens (or dimensions) fill the 16 rows, and a group of up to 8 query heads needs only one step of 8
// columns, where Q on the left would fill 16 rows with at most 8 of use. A column of S^T, the scores of one query, then
// lies in the same threads as that query's column of O^T: the rescaling of the online softmax needs no exchange between
// threads.
#pragma once

#include "common/cuda/launch.h"
#include "common/cuda/scalars.cuh"
#include "decode_merge.cuh"
#include "decode_plan.h"
#include "online_softmax.cuh"
#include "tile_ring.cuh"

namespace stage7 {

// One warp's part of one head: queries in registers, running softmax, accumulated output.
template <int kHeadDim, int kQueryTiles>
struct WarpAttention {
  static constexpr int kSteps = kHeadDim / 16;  // of 16 dimensions
  using Tile = SharedTile<kHeadDim>;
  // V into registers before the softmax, if there are registers left: their loading hides behind it.
  static constexpr bool kValuesEarly = kQueryTiles * kSteps <= 8;

  std::uint32_t queries[kQueryTiles][kSteps][2];  // Q^T as the right operand of an mma
  float output[kQueryTiles][kSteps][4];           // O^T: 16 dimensions x 8 queries each
  // Of this thread's two queries. The sum is that of the weights which this thread has formed itself.
  RunningSoftmax softmax[kQueryTiles][2];

  // queries: the group's rows of head_dim.
  __device__ __forceinline__ void start(const Element* group_queries, int group) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < kQueryTiles; ++t) {
      const int query = t * 8 + lane / 4;
      const auto* row = reinterpret_cast<const std::uint32_t*>(group_queries + query * kHeadDim);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        queries[t][step][0] = query < group ? row[step * 8 + lane % 4] : 0;
        queries[t][step][1] = query < group ? row[step * 8 + lane % 4 + 4] : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          output[t][step][i] = 0.0F;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        softmax[t][i] = {};
      }
    }
  }

  // K and V of 16 tokens in shared memory, of which num_tokens exist.
  __device__ __forceinline__ void add_tile(std::uint32_t keys, std::uint32_t values, int num_tokens, float scale) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    std::uint32_t v[kSteps][4];
    float scores[kQueryTiles][4] = {};
    {
      // Matrices: tokens 0-7 and 8-15 of the lower 8 dimensions, then of the upper 8. Steps of 16 dimensions are steps
      // of two vectors.
      const int row = lane % 16;
      const std::uint32_t row_begin = keys + Tile::row_begin(row);
      const int place = Tile::place(row, lane / 16);
      // Even and odd steps are summed apart: two chains of half the length keep the tensor core busier than one.
      float odd[kQueryTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        std::uint32_t k[2][4];
        load_matrices(k[0], row_begin + Tile::at_step(place, step));
        load_matrices(k[1], row_begin + Tile::at_step(place, step + 1));
#pragma unroll
        for (int t = 0; t < kQueryTiles; ++t) {
          multiply_add(scores[t], k[0], queries[t][step][0], queries[t][step][1]);
          multiply_add(odd[t], k[1], queries[t][step + 1][0], queries[t][step + 1][1]);
        }
      }
#pragma unroll
      for (int t = 0; t < kQueryTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[t][i] += odd[t][i];
        }
      }
    }
    if constexpr (kValuesEarly) {
      load_values(v, values);
    }
    std::uint32_t weights[kQueryTiles][2];  // P^T as the right operand
#pragma unroll
    for (int t = 0; t < kQueryTiles; ++t) {
      update_softmax(t, scores[t], num_tokens, scale);
      // A result's upper and lower half are the left operand's layout; the transposed ones are the right operand's.
      weights[t][0] = transpose(common::pack(scores[t][0], scores[t][1]));
      weights[t][1] = transpose(common::pack(scores[t][2], scores[t][3]));
    }
    if constexpr (!kValuesEarly) {
      load_values(v, values);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int t = 0; t < kQueryTiles; ++t) {
        multiply_add(output[t][step], v[step], weights[t][0], weights[t][1]);
      }
    }
  }

  // Leaves the result as part `part` of the exchange, unless there was no tile.
  __device__ __forceinline__ void finish(const PartialSoftmax<kHeadDim>& exchange, int part) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < kQueryTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float total = sum_over_tokens(softmax[t][i].sum);
        const int query = t * 8 + lane % 4 * 2 + i;
        if (query < exchange.group) {
          if (lane < 4) {
            exchange.max_and_sum(part, query) = make_float2(softmax[t][i].largest, total);
          }
          float* row = exchange.row(part, query) + lane / 4;
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            row[step * 16] = output[t][step][i];
            row[step * 16 + 8] = output[t][step][i + 2];
          }
        }
      }
    }
  }

 private:
  // V^T: matrices of the lower and upper 8 dimensions of tokens 0-7, then of tokens 8-15, transposed on loading.
  static __device__ __forceinline__ void load_values(std::uint32_t (&v)[kSteps][4], std::uint32_t values) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = lane / 16 * 8 + lane % 8;
    const std::uint32_t row_begin = values + Tile::row_begin(row);
    const int place = Tile::place(row, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_matrices_transposed(v[step], row_begin + Tile::at_step(place, step));
    }
  }

  // Threads with the same lane % 4 hold the scores of the same two queries, for different tokens.
  static __device__ __forceinline__ float sum_over_tokens(float x) {
    x += __shfl_xor_sync(~0U, x, 4);
    x += __shfl_xor_sync(~0U, x, 8);
    return x + __shfl_xor_sync(~0U, x, 16);
  }
  static __device__ __forceinline__ float max_over_tokens(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0U, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0U, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0U, x, 16));
  }

  // Turns scores into weights 2^(scale * score - largest), and brings what came before to the new largest score.
  __device__ __forceinline__ void update_softmax(int t, float (&scores)[4], int num_tokens, float scale) {
    if (num_tokens < kTileTokens) {
      const int token = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[i] = token + i / 2 * 8 < num_tokens ? scores[i] : -INFINITY;
      }
    }
    float rescale[2];
    bool grew = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      RunningSoftmax& own = softmax[t][i];
      const float before = own.largest;
      rescale[i] = own.raise_to(fmaxf(before, scale * max_over_tokens(fmaxf(scores[i], scores[i + 2]))));
      grew |= before != own.largest;
      scores[i] = own.weight_of(scores[i], scale);
      scores[i + 2] = own.weight_of(scores[i + 2], scale);
      own.sum = own.sum + scores[i] + scores[i + 2];
    }
    if (__any_sync(~0U, grew)) {  // after a few tiles, rarely
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          output[t][step][i] *= rescale[i % 2];
        }
      }
    }
  }
};

// A head of the share is done by all warps: joins their parts, and either writes the output or hands the result in; if
// this thread block is the last of the head to hand in, it merges all of them. contributors: the thread blocks that
// work on the head, this one among them.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void finish_head(const PartialSoftmax<kHeadDim>& exchange, const DecodeWorkspace& workspace,
                                            Element* output, int first_contributor, int last_contributor) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = exchange.group;
  const int own_place = partial_place(static_cast<int>(blockIdx.x), first_contributor);
  const bool whole = first_contributor == last_contributor;
  __syncthreads();
  const int dimension = static_cast<int>(threadIdx.x) % 32 * kWarpValues<kHeadDim>;
  for (int query = warp; query < group; query += kWarps) {
    const auto merged = merge_parts<kWarpValues<kHeadDim>>(exchange, kWarps, query, dimension);
    if (whole) {
      store_output(merged, output + query * kHeadDim + dimension);
    } else {
      store_partial<kHeadDim>(merged, workspace, own_place * group + query, dimension);
    }
  }
  __syncthreads();  // the exchange may be written again; and all of a partial result has been stored
  if (whole) {
    return;
  }
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();  // of all this block's stores, which the barrier has put before it
    is_last = atomicAdd(workspace.arrivals + first_contributor, 1) == last_contributor - first_contributor;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) {
    return;
  }
  if (threadIdx.x == 0) {
    workspace.arrivals[first_contributor] = 0;  // for the next layer
  }
  merge_head<kHeadDim, kWarps>(exchange, workspace, output, first_contributor, last_contributor);
}

template <int kHeadDim, int kQueryTiles, int kWarps, int kStages, int kResident, bool kContiguous>
__global__ void __launch_bounds__(32 * kWarps, kResident)
    decode_kernel(Pages pages, Batch batch, const Element* queries, Element* output, DecodeWorkspace workspace,
                  float scale) {
  using Ring = TileRing<kHeadDim, kStages, kWarps, kContiguous>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) unsigned char barriers[kWarps * Ring::kBarrierBytes];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const TileRange share = workspace.shares[blockIdx.x];
  if (share.num_tiles == 0) {
    common::wait_for_previous_launch();  // or this launch might finish before the one before it
    return;
  }
  Ring ring(pages, batch, share, shared + warp * Ring::kBytes, barriers + warp * Ring::kBarrierBytes);
  // In this order: a launch that starts early then knows that everything two launches back has finished.
  common::wait_for_previous_launch();
  common::allow_next_launch();
  ring.start();

  const int num_kv_heads = pages.shape.num_kv_heads;
  const int group = batch.num_heads / num_kv_heads;
  const PartialSoftmax<kHeadDim> exchange(shared + kWarps * Ring::kBytes, kWarps, group);
  WarpAttention<kHeadDim, kQueryTiles> attention;
  TileCursor head(batch.context_lengths, num_kv_heads, share);  // where the current head, or its rest, begins
  int begin = 0;                                                // the same, counted from the beginning of the share
  int next = warp;                                              // this warp's next tile, counted likewise
  while (true) {
    const int end = min(begin + num_tiles_of(head.length) - head.tile, share.num_tiles);
    const std::int64_t first_row = std::int64_t{head.sequence} * batch.num_heads + head.kv_head * group;
    attention.start(queries + first_row * kHeadDim, group);
    for (; next < end; next += kWarps) {
      const int num_tokens = min(kTileTokens, head.length - (head.tile + next - begin) * kTileTokens);
      ring.wait();
      if (num_tokens < kTileTokens) {
        ring.clear_values_from(num_tokens);
      }
      attention.add_tile(ring.keys(), ring.values(), num_tokens, scale);
      ring.release();
    }
    attention.finish(exchange, warp);
    const bool is_first = begin == 0;
    const bool is_rest = end == share.num_tiles;
    const int own = static_cast<int>(blockIdx.x);
    finish_head<kHeadDim, kWarps>(exchange, workspace, output + first_row * kHeadDim,
                                  is_first ? share.first_contributor : own,
                                  is_first  ? share.last_contributor
                                  : is_rest ? share.last_contributor_of_last_head
                                            : own);
    if (is_rest) {
      return;
    }
    head.advance(end - begin);
    begin = end;
  }
}

}  // namespace
