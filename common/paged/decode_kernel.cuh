// Decode attention on tensor cores: what one thread block does with its share of the tiles.
//
// bytes: every K and V of the batch once. flops: 4 * num_heads * head_dim for each token; with a group of 4 that is 4
// for each byte (8 with the columns that are padding), and tensor cores could do 160 in the time that the byte takes.
// So the kernel is memory-bound, and is built like a copy with some arithmetic on the side: rings of tiles in flight
// (tile_ring.cuh), equal shares (decode_plan.h), and nothing that makes the copies wait.
//
// The products are computed transposed: S^T = K Q^T and O^T = V^T P^T. An mma's result has 16 rows and 8
// columns: tokens (or dimensions) fill the 16 rows, and a group of up to 8 query heads needs only one step of 8
// columns; with Q on the left, at most 8 of 16 rows would be useful. A column of S^T, the scores of one query, then
// lies in the same threads as that query's column of O^T: the rescaling of the online softmax needs no exchange between
// threads.
//
// Float8 (float8.cuh) is converted to float16 in registers, exactly, and the scales are applied to the result of the
// first product and to the operand of the second:
//
//     score  = log2(e) / sqrt(head_dim) * (q . k) * K's scale        one multiplication for each token and query
//     output = sum of 2^score * V's scale * v                        2^score * 2^e is 2^(score + e): one addition
//
// So the online softmax keeps the largest score + e, and the weights that are multiplied with V are at most 1, as
// float16 needs. The sum of weights is computed separately, from the scores alone.
#pragma once

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/paged/decode_merge.cuh"
#include "common/paged/decode_plan.h"
#include "common/paged/decode_ring.h"
#include "common/paged/float8.cuh"
#include "common/paged/new_row.cuh"
#include "common/paged/online_softmax.cuh"
#include "common/paged/tile_ring.cuh"

namespace common {

// One warp's part of one head: queries in registers, running softmax, accumulated output.
template <ScalarType kType, int kHeadDim, int kQueryTiles>
struct WarpAttention {
  static constexpr bool kFloat8 = kType == ScalarType::kFloat8;
  static constexpr int kSteps = kHeadDim / 16;  // steps of 16 dimensions
  using Tile = SharedTile<kHeadDim, kType>;
  static constexpr int kLoads = Tile::kVecs / 2;  // an ldmatrix loads two vectors
  // Load V into registers before the softmax if there are registers left: the softmax then hides the loads.
  static constexpr bool kValuesEarly = kQueryTiles * kSteps <= 8;

  std::uint32_t queries[kQueryTiles][kSteps][2];  // Q^T as the right operand of an mma
  float output[kQueryTiles][kSteps][4];           // O^T: 16 dimensions x 8 queries each
  // The softmax of this thread's two queries. Its sum has only the weights that this thread has computed. Float8: it
  // has the largest score + e, where e is the exponent of V's scale, and the sum is in units of V's scale.
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
        // A step may add its 16 dimensions in any order, if K has the same order. In float8, a thread's four dimensions
        // are neighbours, because the four bytes that it gets of a row are.
        const int first = kFloat8 ? step * 8 + lane % 4 * 2 : step * 8 + lane % 4;
        const int second = kFloat8 ? first + 1 : first + 4;
        queries[t][step][0] = query < group ? operand(row[first]) : 0;
        queries[t][step][1] = query < group ? operand(row[second]) : 0;
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

  // Adds the parts of the result over the sequence's shared prefix: every `distance`-th, from part `first` on.
  __device__ __forceinline__ void add_prefix(const PrefixResults& prefixes, int sequence, int kv_head, int num_kv_heads,
                                             int group, int first, int distance) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const PrefixRows rows = prefixes.rows[sequence];
    for (int part = first; part < rows.num_parts; part += distance) {
      const std::int64_t begin = prefixes.first_row(rows, part, kv_head, num_kv_heads);
#pragma unroll
      for (int t = 0; t < kQueryTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int query = t * 8 + lane % 4 * 2 + i;
          if (query < group) {
            const float2 max_and_sum = __ldcg(prefixes.max_and_sum + begin + query);
            const float* values = prefixes.outputs + (begin + query) * kHeadDim + lane / 4 * (kFloat8 ? 2 : 1);
            RunningSoftmax& own = softmax[t][i];
            const float rescale = own.raise_to(fmaxf(own.largest, max_and_sum.x));
            const float weight = common::exp2_fast(max_and_sum.x - own.largest);
            own.sum += lane < 4 ? weight * max_and_sum.y : 0.0F;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              float& lower = output[t][step][i];
              float& upper = output[t][step][i + 2];
              lower = rescale * lower + weight * __ldcg(values + step * 16);
              upper = rescale * upper + weight * __ldcg(values + step * 16 + (kFloat8 ? 1 : 8));
            }
          }
        }
      }
    }
  }

  // Adds a tile: K and V of 16 tokens in shared memory; those from first_token to num_tokens exist and are seen.
  __device__ __forceinline__ void add_tile(std::uint32_t keys, std::uint32_t values, int first_token, int num_tokens,
                                           float scale) {
    std::uint32_t v[kLoads][4];
    float scores[kQueryTiles][4] = {};
    add_scores(scores, keys);
    const TileScales scales = load_scales(keys, scale);
    if constexpr (kValuesEarly) {
      load_values(v, values);
    }
    std::uint32_t weights[kQueryTiles][2];  // P^T as the right operand
#pragma unroll
    for (int t = 0; t < kQueryTiles; ++t) {
      update_softmax(t, scores[t], first_token, num_tokens, scales);
      // The two halves of a result have a left operand's layout and, once transposed, a right operand's.
      weights[t][0] = common::transpose(pack_weights(scores[t][0], scores[t][1]));
      weights[t][1] = common::transpose(pack_weights(scores[t][2], scores[t][3]));
    }
    if constexpr (!kValuesEarly) {
      load_values(v, values);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t own[4];
      values_of_step(own, v, step);
#pragma unroll
      for (int t = 0; t < kQueryTiles; ++t) {
        multiply(output[t][step], own, weights[t][0], weights[t][1]);
      }
    }
  }

  // Writes the finished result of a head that this warp has computed alone: the group's rows.
  __device__ __forceinline__ void store(Element* rows, int group) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int t = 0; t < kQueryTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float inverse = 1.0F / sum_over_tokens(softmax[t][i].sum);
        const int query = t * 8 + lane % 4 * 2 + i;
        if (query < group) {
          Element* const row = rows + query * kHeadDim + lane / 4 * (kFloat8 ? 2 : 1);
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            row[step * 16] = common::from_float<Element>(output[t][step][i] * inverse);
            row[step * 16 + (kFloat8 ? 1 : 8)] = common::from_float<Element>(output[t][step][i + 2] * inverse);
          }
        }
      }
    }
  }

  // Stores the results of queries 8 t to 8 t + 7, as far as the group has them, as part `part` of the exchange, where
  // they are the queries from `first` on. Stores nothing if there was no tile.
  __device__ __forceinline__ void finish(const PartialSoftmax<kHeadDim>& exchange, int part, int t, int first,
                                         int group) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = sum_over_tokens(softmax[t][i].sum);
      const int query = lane % 4 * 2 + i;
      if (t * 8 + query < group) {
        if (lane < 4) {
          exchange.max_and_sum(part, first + query) = make_float2(softmax[t][i].largest, total);
        }
        float* row = exchange.row(part, first + query) + lane / 4 * (kFloat8 ? 2 : 1);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          row[step * 16] = output[t][step][i];
          row[step * 16 + (kFloat8 ? 1 : 8)] = output[t][step][i + 2];
        }
      }
    }
  }

 private:
  // The factors for this thread's scores of tokens lane / 4 and lane / 4 + 8, and what is added to the scores.
  struct TileScales {
    float of_keys[2];
    float of_values[2];
  };

  static __device__ __forceinline__ TileScales load_scales(std::uint32_t tile, float scale) {
    TileScales scales{{scale, scale}, {0.0F, 0.0F}};
    if constexpr (kFloat8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t own = tile + half * 8 + threadIdx.x % 32 / 4;
        scales.of_keys[half] = scale * scale_of(common::load_byte(own + Tile::kPair.key_scales));
        scales.of_values[half] =
            static_cast<float>(static_cast<int>(common::load_byte(own + Tile::kPair.value_scales)) - 127);
      }
    }
    return scales;
  }

  // The tensor cores' operands: float16 if K and V are float8, else bfloat16.
  static __device__ __forceinline__ std::uint32_t operand(std::uint32_t pair) {
    return kFloat8 ? to_halves(pair) : pair;
  }
  static __device__ __forceinline__ std::uint32_t pack_weights(float low, float high) {
    return kFloat8 ? pack_halves(low, high) : common::pack(low, high);
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                  std::uint32_t b1) {
    if constexpr (kFloat8) {
      common::multiply_add_halves(c, a, b0, b1);
    } else {
      common::multiply_add(c, a, b0, b1);
    }
  }

  // S^T += K Q^T. Even and odd steps have sums of their own: two chains of half the length keep the tensor core busier
  // than one.
  __device__ __forceinline__ void add_scores(float (&scores)[kQueryTiles][4], std::uint32_t keys) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Matrices: the lower vector of tokens 0-7 and 8-15, then the upper vector. In bfloat16 the two vectors are one
    // step; in float8 each vector is a step.
    const int row = lane % 16;
    const std::uint32_t row_begin = keys + Tile::row_begin(row);
    const int place = Tile::place(row, lane / 16);
    float odd[kQueryTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      std::uint32_t k[2][4];
      if constexpr (kFloat8) {
        std::uint32_t bytes[4];
        common::load_matrices(bytes, row_begin + Tile::at_step(place, step / 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          k[i][0] = lower_halves(bytes[2 * i]);
          k[i][1] = lower_halves(bytes[2 * i + 1]);
          k[i][2] = upper_halves(bytes[2 * i]);
          k[i][3] = upper_halves(bytes[2 * i + 1]);
        }
      } else {
        common::load_matrices(k[0], row_begin + Tile::at_step(place, step));
        common::load_matrices(k[1], row_begin + Tile::at_step(place, step + 1));
      }
#pragma unroll
      for (int t = 0; t < kQueryTiles; ++t) {
        multiply(scores[t], k[0], queries[t][step][0], queries[t][step][1]);
        multiply(odd[t], k[1], queries[t][step + 1][0], queries[t][step + 1][1]);
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

  // Loads V^T: matrices of the lower and the upper vector of tokens 0-7, then of tokens 8-15, transposed by the load.
  static __device__ __forceinline__ void load_values(std::uint32_t (&v)[kLoads][4], std::uint32_t values) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = lane / 16 * 8 + lane % 8;
    const std::uint32_t row_begin = values + Tile::row_begin(row);
    const int place = Tile::place(row, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      common::load_matrices_transposed(v[i], row_begin + Tile::at_step(place, i));
    }
  }

  // 16 dimensions of V^T. The transposing load treats two bytes of float8 as one element: a thread gets dimensions 2 g
  // and 2 g + 1, g = lane / 4, of one token, and then of the next. The mma's row g becomes dimension 2 g and its row g
  // + 8 dimension 2 g + 1, as finish() knows.
  static __device__ __forceinline__ void values_of_step(std::uint32_t (&own)[4], const std::uint32_t (&v)[kLoads][4],
                                                        int step) {
    if constexpr (kFloat8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t by_dimension = __byte_perm(v[step / 2][half * 2 + step % 2], 0, 0x3120);
        own[half * 2] = lower_halves(by_dimension);
        own[half * 2 + 1] = upper_halves(by_dimension);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[i] = v[step][i];
      }
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

  // Turns scores into weights 2^(scale * score - largest), and rescales the earlier results to the new largest score.
  __device__ __forceinline__ void update_softmax(int t, float (&scores)[4], int first_token, int num_tokens,
                                                 const TileScales& scales) {
    if constexpr (kFloat8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[i] *= scales.of_keys[i / 2];
      }
    }
    if (num_tokens - first_token < kTileTokens) {
      const int token = static_cast<int>(threadIdx.x) % 32 / 4 - first_token;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_seen = static_cast<unsigned>(token + i / 2 * 8) < static_cast<unsigned>(num_tokens - first_token);
        scores[i] = is_seen ? scores[i] : -INFINITY;
      }
    }
    float rescale[2];
    bool grew = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      RunningSoftmax& own = softmax[t][i];
      const float before = own.largest;
      if constexpr (kFloat8) {
        const float first = scores[i] + scales.of_values[0];
        const float second = scores[i + 2] + scales.of_values[1];
        rescale[i] = own.raise_to(fmaxf(before, max_over_tokens(fmaxf(first, second))));
        own.sum += common::exp2_fast(scores[i] - own.largest) + common::exp2_fast(scores[i + 2] - own.largest);
        scores[i] = common::exp2_fast(first - own.largest);
        scores[i + 2] = common::exp2_fast(second - own.largest);
      } else {
        const float scale = scales.of_keys[0];
        rescale[i] = own.raise_to(fmaxf(before, scale * max_over_tokens(fmaxf(scores[i], scores[i + 2]))));
        scores[i] = own.weight_of(scores[i], scale);
        scores[i + 2] = own.weight_of(scores[i + 2], scale);
        own.sum = own.sum + scores[i] + scores[i + 2];
      }
      grew |= before != own.largest;
    }
    if (__any_sync(~0U, grew)) {  // rare after a few tiles
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

// Ends a head of the share: joins the parts of all warps, and either writes the output or stores a partial result in
// the workspace; if this thread block is the head's last contributor, it merges all of its partial results.
// contributors: the thread blocks that work on the head, this one included. The exchange has room for 8 queries.
template <int kWarps, ScalarType kType, int kHeadDim, int kQueryTiles>
__device__ __forceinline__ void finish_head(const WarpAttention<kType, kHeadDim, kQueryTiles>& attention,
                                            const PartialSoftmax<kHeadDim>& exchange, const DecodeWorkspace& workspace,
                                            Element* output, int group, int first_contributor, int last_contributor) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int own_place = partial_place(static_cast<int>(blockIdx.x), first_contributor);
  const bool whole = first_contributor == last_contributor;
  const int dimension = static_cast<int>(threadIdx.x) % 32 * kWarpValues<kHeadDim>;
#pragma unroll
  for (int t = 0; t < kQueryTiles; ++t) {
    attention.finish(exchange, warp, t, 0, group);
    __syncthreads();
    for (int query = t * 8 + warp; query < min(group, t * 8 + 8); query += kWarps) {
      const auto merged = merge_parts<kWarpValues<kHeadDim>>(exchange, kWarps, query - t * 8, dimension);
      if (whole) {
        store_output(merged, output + query * kHeadDim + dimension);
      } else {
        store_partial<kHeadDim>(merged, workspace, own_place * group + query, dimension);
      }
    }
    __syncthreads();  // the exchange may be overwritten; and the partial result is stored as a whole
  }
  if (whole) {
    return;
  }
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();  // it covers all of this block's stores: the barrier has ordered them before it
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
  merge_head<kHeadDim, kWarps>(exchange.outputs, workspace, output, group, first_contributor, last_contributor);
}

// An earlier launch of the same step made the plan. This kernel does not wait for that launch, which has finished all
// the same (DecodeOptions::overlap_previous). The plan is in L2; the load bypasses this multiprocessor's L1.
__device__ __forceinline__ TileRange load_share(const TileRange* share) {
  static_assert(sizeof(TileRange) == 3 * sizeof(int4));
  int4 words[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    words[i] = __ldcg(reinterpret_cast<const int4*>(share) + i);
  }
  TileRange result;
  memcpy(&result, words, sizeof(result));
  return result;
}

// kGeneral: there may be windows, prefixes, and warps with whole heads (DecodeShape::heads_for_warps). Without them a
// launch is faster if the compiler knows it.
template <ScalarType kType, int kHeadDim, int kQueryTiles, int kWarps, int kStages, int kResident, bool kContiguous,
          bool kGeneral>
__global__ void __launch_bounds__(32 * kWarps, kResident)
    decode_kernel(Pages pages, BatchArrays batch, const Element* queries, NewRows new_rows, PrefixResults prefixes,
                  Element* output, DecodeWorkspace workspace, float scale) {
  using Ring = TileRing<kType, kHeadDim, kStages, kWarps, kContiguous>;
  COURSE_DYNAMIC_SHARED(128, shared);
  __shared__ __align__(8) unsigned char barriers[kWarps * Ring::kBarrierBytes];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  TileRange share = load_share(workspace.shares + blockIdx.x);
  if constexpr (!kGeneral) {
    batch.window = 0;
    prefixes.rows = nullptr;
    share.heads_of_warps = 0;
  }
  if (share.num_tiles == 0) {
    common::wait_for_previous_launch();  // else this launch might finish before the previous one
    return;
  }
  Ring ring(pages, batch, share, shared + warp * Ring::kBytes, barriers + warp * Ring::kBarrierBytes);
  ring.start();  // before the queries are computed: the tiles were written by earlier steps
  common::wait_for_previous_launch();
  common::allow_next_launch();

  const int num_kv_heads = pages.shape.num_kv_heads;
  const int group = batch.num_heads / num_kv_heads;
  const PartialSoftmax<kHeadDim> exchange(shared + kWarps * Ring::kBytes, kWarps, exchanged_at_once(group));
  WarpAttention<kType, kHeadDim, kQueryTiles> attention;
  TileCursor head(batch, num_kv_heads, share);  // where the current head, or its rest, begins
  int begin = 0;                                // the same place, counted in tiles from the beginning of the share
  int next = warp;                              // this warp's next tile, counted from the beginning of the share
  // With whole heads, tiles are counted from the beginning of this warp's heads.
  const bool has_whole_heads = share.heads_of_warps > 0;
  const int step = has_whole_heads ? 1 : kWarps;
  const int num_tiles = has_whole_heads ? tiles_of_warp(batch, num_kv_heads, share, warp, kWarps) : share.num_tiles;
  if (has_whole_heads) {
    if (num_tiles == 0) {
      return;
    }
    head.skip_heads(warp, kWarps);
    next = 0;
  }
  while (true) {
    const int head_end = begin + num_tiles_of(head.length) - head.tile;
    const int end = min(head_end, num_tiles);
    const std::int64_t first_row = std::int64_t{head.sequence} * batch.num_heads + head.kv_head * group;
    // Whether this warp has the head's last tile, where the new token is. Its row is loaded together with the queries.
    NewRow<kType, kHeadDim> new_row;
    const bool has_new_row =
        new_rows.keys != nullptr && end == head_end && (has_whole_heads || (end - 1) % kWarps == warp);
    if (has_new_row) {
      new_row.load(new_rows, head.sequence, head.kv_head);
    }
    attention.start(queries + first_row * kHeadDim, group);
    if (prefixes.rows != nullptr && head.tile == 0) {  // each of the head's warps has a part
      attention.add_prefix(prefixes, head.sequence, head.kv_head, num_kv_heads, group, next - begin, step);
    }
    for (; next < end; next += step) {
      const int num_left = head.length - (head.tile + next - begin) * kTileTokens;
      const int num_tokens = min(kTileTokens, num_left);
      const int first_token = batch.num_hidden(num_left);  // in front of it, the window hides the tile's tokens
      ring.wait();
      if (num_tokens - first_token < kTileTokens) {
        ring.clear_other_values(first_token, num_tokens);
      }
      if (has_new_row && next == end - 1) {
        new_row.store(pages, head.kv_head, ring.keys(), num_tokens - 1);
      }
      attention.add_tile(ring.keys(), ring.values(), first_token, num_tokens, scale);
      ring.release();
    }
    if (has_whole_heads) {
      attention.store(output + first_row * kHeadDim, group);
      if (end == num_tiles) {
        return;
      }
      head.skip_heads(kWarps, kWarps);
      begin = end;
      continue;
    }
    const bool is_first = begin == 0;
    const bool is_rest = end == share.num_tiles;
    const int own = static_cast<int>(blockIdx.x);
    finish_head<kWarps>(attention, exchange, workspace, output + first_row * kHeadDim, group,
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

}  // namespace common
