// Causal attention of prompts on Hopper's tensor cores, with wgmma.
//
// flops: 4 * head_dim for each pair of a query head and a token it sees. bytes: a tile of K and V, 64 KB, comes from L2
// once for 128 rows, 128 flops a byte. ragged_kernel.cuh computes the same with mma, and reaches a third of what the
// tensor cores can do: its warps are busy fetching operands into registers, and a warp that waits for a product cannot
// compute a softmax meanwhile. Here no warp fetches operands, and copies, products and softmax overlap:
//
//     warpgroup 0     takes work, copies queries, K and V into rings in shared memory   (40 registers a thread)
//     warpgroup 1, 2  64 rows each; scores, softmax and output in registers              (232 registers a thread)
//
// - wgmma reads K and V from shared memory in the pages' layout: a page's panel (page_layout.h), 2 KB, is a part of one
//   of wgmma's matrices. So a page costs one plain copy for each panel, and no tile is rearranged. For O += P V, wgmma
//   reads V transposed from the same bytes.
// - A warpgroup starts a product and waits for it later. It starts the scores of the next tile before it adds V of this
//   tile, so the tensor cores multiply V while the warpgroup turns the new scores into weights.
// - The two warpgroups start their products in turn, so that one computes its softmax while the other's products run.
// - Weights are computed by the largest score of earlier tiles, before the largest of this one is known: see
//   guess_weights().
// - K and V are copied in the order in which products take them: K of a tile before V of the previous one.
// - The tasks are ragged_plan.h's, longest first. There is a thread block for each multiprocessor. A thread block gets
//   its next task when it has copied all of the last one, and the first tiles of the next task arrive while the last
//   one is still computed.
// - A task may be a part of a context. Then its rows are stored as floats, for ragged_merge.cu.
// - A task of up to 64 rows leaves one warpgroup without work: reading K and V then takes longer than the products.
// - Tiles are computed from the last to the first. Only in the last one do rows see different tokens; only its scores
//   are masked, and it is as short as possible, in steps of 32 tokens.
// - With a window, rows see different tokens in the first tiles too. These are masked, and computed each by itself.
//
// On an H200, one prompt of 8,192 tokens with 32 heads over 8 kv heads of 128 dimensions: 341 TFLOP/s with mma, 548
// here; 16 prompts of 512 tokens: 191 and 292.
#pragma once

#include <cfloat>

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/ring_position.cuh"
#include "common/paged/element.h"
#include "common/paged/fresh.cuh"
#include "common/paged/online_softmax.cuh"
#include "common/paged/ragged_plan.h"
#include "common/paged/windows.cuh"

namespace common {

template <int kHeadDim>
struct PrefillShape {
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kRows = kConsumers * common::kWarpgroupRows;
  static_assert(kRows == kWarpgroupsTaskRows);
  // With 256 dimensions a thread holds 128 numbers of the output, so it has registers for the scores of 64 tokens; and
  // the queries take 64 KB.
  static constexpr int kTokens = warpgroups_tile_tokens(kHeadDim);  // of a tile
  static constexpr int kStages = kHeadDim == 64 ? 4 : 2;
  static constexpr int kTilesAlone = kRows / kTokens;  // tiles, from the last one on, whose K and V are taken together
  static constexpr int kSlots = kHeadDim == 256 ? 1 : 2;  // places for queries
  static constexpr int kThreads = common::kWarpgroupThreads * (1 + kConsumers);
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr int kRowBytes = 128;                     // a row of a panel
  static constexpr int kPanelBytes = kTokens * kRowBytes;   // a panel of K or V
  static constexpr int kTileBytes = kPanels * kPanelBytes;  // a tile of K or V
  static constexpr int kQueryPanelBytes = common::kWarpgroupRows * kRowBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;  // one warpgroup's queries

  // The place of a vector in a warpgroup's queries.
  static COURSE_HOST_DEVICE int query_place(int row, int vec) {
    return vec / 8 * kQueryPanelBytes + row * kRowBytes + (vec % 8 ^ row % 8) * kVecBytes;
  }
};

// What a thread block works on: a task of the plan, one kv head.
struct PrefillWork {
  RaggedTask task;
  int kv_head;
  int num_seen;  // where the task's tokens end; 0: there is no more work
};

// It begins at a multiple of 1024 bytes, and so do its matrices: wgmma's swizzle depends on the address.
template <int kHeadDim>
struct PrefillShared {
  using Shape = PrefillShape<kHeadDim>;
  static_assert(Shape::kQueryBytes % 1024 == 0 && Shape::kTileBytes % 1024 == 0);
  unsigned char queries[Shape::kSlots][Shape::kConsumers][Shape::kQueryBytes];
  unsigned char keys[Shape::kStages][Shape::kTileBytes];
  unsigned char values[Shape::kStages][Shape::kTileBytes];
  PrefillWork work[Shape::kSlots];
  std::uint64_t queries_full[Shape::kSlots];
  std::uint64_t queries_empty[Shape::kSlots];
  std::uint64_t keys_full[Shape::kStages];
  std::uint64_t keys_empty[Shape::kStages];
  std::uint64_t values_full[Shape::kStages];
  std::uint64_t values_empty[Shape::kStages];
};

// The numbers of the named barriers: for the turns of two warpgroups, for one warpgroup's threads, for the producers.
inline constexpr int kTurn = 1;
inline constexpr int kOwn = 3;
inline constexpr int kProducers = 5;

struct PrefillCall {
  Pages pages;
  BatchArrays batch;
  const Element* queries;
  Element* output;
  RaggedQueue* queue;
  const RaggedTask* tasks;
  RaggedPartials partials;
  float scale;
  int num_queries_per_kv;
  bool begins_late;  // whether another launch holds multiprocessors, so that some thread blocks may begin far later
  bool is_merged;    // whether the next launch joins parts
  const int* order;  // for kernels that are compiled for it: see attend_tasks()
};

#if COURSE_BULK_COPY

// ---- arrivals ----------------------------------------------------------------------------------------------------

// How often a warp arrives at a barrier for what all of its lanes have done. After __syncwarp(), or a wait of the whole
// warp, lane 0's arrival is enough. But racecheck (CUDA 13.0) takes it for lane 0's alone, and reports what the other
// lanes have accessed: 30 hazards, and none if all lanes arrive. So it gets kernels that are compiled like that.
#ifdef COURSE_RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

__device__ __forceinline__ void arrive_as_warp(std::uint64_t& barrier, int lane) {
  if (kArrivalsOfWarp == 32 || lane == 0) {
    common::arrive(common::shared_address(&barrier));
  }
}

__device__ __forceinline__ void arrive_as_warp_expecting(std::uint64_t& barrier, int lane, int bytes) {
  if (lane == 0) {
    common::arrive_expecting(common::shared_address(&barrier), bytes);
  } else if (kArrivalsOfWarp == 32) {
    common::arrive(common::shared_address(&barrier));
  }
}

#endif  // COURSE_BULK_COPY

#if COURSE_WGMMA

// The rows of a piece of work, in queries or output: a row, then every kStep-th row after it. Divides once.
template <int kHeadDim, int kStep, typename T>
struct QueryRows {
  T* at;
  int head;  // the row's number in the group
  int group;
  int next_head;
  int distance;           // to the next row
  int distance_if_wraps;  // if its head's number is smaller

  __device__ __forceinline__ QueryRows(const PrefillCall& call, const PrefillWork& work, T* all, int row)
      : group(call.num_queries_per_kv) {
    const int num_heads = call.batch.num_heads;
    const int token = row / group;
    const int next_token = kStep / group;
    head = row - token * group;
    next_head = kStep - next_token * group;
    at = all + ((work.task.first_query + std::int64_t{token}) * num_heads + work.kv_head * group + head) * kHeadDim;
    distance = (next_token * num_heads + next_head) * kHeadDim;
    distance_if_wraps = distance + (num_heads - group) * kHeadDim;
  }
  __device__ __forceinline__ void advance() {
    head += next_head;
    const bool wraps = head >= group;
    head -= wraps ? group : 0;
    at += wraps ? distance_if_wraps : distance;
  }
};

// ---- producers ---------------------------------------------------------------------------------------------------

// How a thread of the first warpgroup loads K and V into the rings: with its warp, it copies them.
template <int kHeadDim, bool kHasWindows>
struct TileCopier {
  using Shape = PrefillShape<kHeadDim>;
  static constexpr bool kWindows = kHasWindows;
  static constexpr int kWarps = common::kWarpgroupThreads / 32;
  static constexpr int kPieces = Shape::kTokens / kTileRows / kWarps;  // the pieces of a panel that a warp copies
  static constexpr int kPieceBytes = kTileRows * Shape::kRowBytes;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kOrderedAtOnce = kHeadDim == 64 ? 2 : 4;
  static constexpr int kPrefixLowered = 0;

  const PrefillCall& call;
  PrefillShared<kHeadDim>& shared;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_piece = static_cast<int>(threadIdx.x) / 32 * kPieces;  // this warp's
  common::RingPosition<Shape::kStages> keys;                             // the places of the tiles that come next
  common::RingPosition<Shape::kStages> values;

  // Copies K or V of one tile. count: the number of its pieces; offset: where this thread's piece begins, in elements.
  __device__ __forceinline__ void copy_tile(unsigned char* tile, const void* pages, std::int64_t offset, int count,
                                            std::uint64_t& full, std::uint64_t& empty, int parity) const {
    const int piece = first_piece + lane % kPieces;
    const int panel = lane / kPieces;
    common::wait_barrier(common::shared_address(&empty), parity ^ 1);
    const int own = max(0, min(kPieces, count - first_piece));
    arrive_as_warp_expecting(full, lane, own * Shape::kPanels * kPieceBytes);
    __syncwarp();
    if (piece < count && panel < Shape::kPanels) {
      common::copy_bulk(common::shared_address(tile) + panel * Shape::kPanelBytes + piece * kPieceBytes,
                        static_cast<const Element*>(pages) + offset, kPieceBytes, common::shared_address(&full));
    }
  }
  __device__ __forceinline__ void copy_keys(std::int64_t offset, int count) {
    copy_tile(shared.keys[keys.place], call.pages.keys, offset, count, shared.keys_full[keys.place],
              shared.keys_empty[keys.place], keys.parity);
    keys.advance();
  }
  __device__ __forceinline__ void copy_values(std::int64_t offset, int count) {
    copy_tile(shared.values[values.place], call.pages.values, offset, count, shared.values_full[values.place],
              shared.values_empty[values.place], values.parity);
    values.advance();
  }

  // Loads the tiles of a piece of work, from the last to the tile with token first_seen, in the order in which
  // consumers take them (PrefillRows::attend): after the tiles that are computed alone, K of a tile before V of the
  // previous one. The place of that V is free later: behind it, K would come too late.
  __device__ __forceinline__ void load(const int* table, int kv_head, int first_seen, int num_seen) {
    const int first_token = kWindows ? first_seen / Shape::kTokens * Shape::kTokens : first_seen;
    const int block_size = call.pages.shape.block_size;
    const int panel = lane / kPieces;
    // Where this thread's piece begins, and the piece's block, which is looked up one tile ahead.
    int token = (num_seen - 1) / Shape::kTokens * Shape::kTokens + (first_piece + lane % kPieces) * kTileRows;
    int block = token < num_seen ? table[token_looked_up<kWindows>(token, first_seen) / block_size] : 0;
    int count = ((num_seen - 1) % Shape::kTokens + kTileRows) / kTileRows;
    int num_alone = Shape::kTilesAlone;
    std::int64_t previous = -1;  // where V begins that is still to be copied
    for (; token >= first_token; token -= Shape::kTokens) {
      const std::int64_t offset = row_offset(call.pages.shape, block, kv_head, token % block_size) +
                                  SharedTile<kHeadDim>::panel_offset(panel, kTileRows);
      if (token - Shape::kTokens >= first_token) {
        block = table[token_looked_up<kWindows>(token - Shape::kTokens, first_seen) / block_size];
      }
      copy_keys(offset, count);
      if (num_alone > 0) {
        copy_values(offset, count);
        --num_alone;
      } else {
        if (previous >= 0) {
          copy_values(previous, count);
        }
        previous = offset;
      }
      count = Shape::kTokens / kTileRows;
    }
    if (previous >= 0) {
      copy_values(previous, count);
    }
  }
};

// The warpgroup that fetches work, and loads what the other two need for it: queries, then K and V, always as far
// ahead as there is room. kOrdered: the queries' rows have an order (PrefillCall::order).
template <int kHeadDim, bool kOrdered>
struct PrefillProducer {
  using Shape = PrefillShape<kHeadDim>;
  static constexpr int kVecs = kHeadDim / 8;

  const PrefillCall& call;
  PrefillShared<kHeadDim>& shared;
  const int thread = static_cast<int>(threadIdx.x);

  // The longest task that is left goes to the first thread block that is free.
  __device__ __forceinline__ int take_ticket() const {
    const int first = call.begins_late ? 0 : static_cast<int>(gridDim.x);
    return thread == 0 ? first + atomicAdd(&call.queue->next, 1) : 0;
  }
  // Thread blocks that begin together need not ask for the first one. The last to ask gets the same ticket either way.
  __device__ __forceinline__ int first_ticket() const {
    return call.begins_late ? take_ticket() : static_cast<int>(blockIdx.x);
  }

  // Four kv heads are computed at a time, where they can be shared out so: all of them might have more K and V than the
  // L2 cache holds. Fewer heads have too few tasks: their shortest would not fill the gaps that the longest leave.
  static __device__ __forceinline__ int heads_together(int num_kv_heads) {
    return num_kv_heads % 4 == 0 ? 4 : num_kv_heads;
  }

  __device__ __forceinline__ PrefillWork work_of(int ticket) const {
    const int num_kv_heads = call.pages.shape.num_kv_heads;
    const int total = call.queue->num_tasks * num_kv_heads;
    if (ticket >= total) {
      if (ticket == total + static_cast<int>(gridDim.x) - 1) {
        call.queue->next = 0;  // for the next launch: every thread block has asked for the last time
      }
      return {};
    }
    PrefillWork work;
    const int together = heads_together(num_kv_heads);
    const int of_these = call.queue->num_tasks * together;
    const int number = ticket % of_these;
    work.task = call.tasks[number / together];
    work.kv_head = ticket / of_these * together + number % together;
    work.num_seen = work.task.end_token;
    return work;
  }

  // A thread copies the same vector of every kStep-th row. For rows that do not exist it repeats a row that does.
  __device__ __forceinline__ void copy_queries(const PrefillWork& work, int place) const {
    constexpr int kStep = common::kWarpgroupThreads / kVecs;
    const int vec = thread % kVecs;
    const int first = thread / kVecs;
    const int last = work.task.end_row - 1 - work.task.first_row;
    QueryRows<kHeadDim, kStep, const Element> rows(call, work, call.queries + vec * 8,
                                                   work.task.first_row + min(first, last));
#pragma unroll 1
    for (int w = 0; w < Shape::kConsumers; ++w) {
      const std::uint32_t to = fresh(common::shared_address(shared.queries[place][w]) + Shape::query_place(first, vec));
#pragma unroll
      for (int row = 0; row < common::kWarpgroupRows; row += kStep) {
        common::copy_vec_async((to ^ row % 8 * kVecBytes) + row * Shape::kRowBytes, rows.at);
        if (w * common::kWarpgroupRows + row + kStep <= last - first) {
          rows.advance();
        }
      }
    }
  }

  // The same for rows of queries that do not follow each other. kAtOnce: as many as there are registers for.
  template <int kAtOnce>
  __device__ __forceinline__ void copy_ordered_queries(const PrefillWork& work, int place) const {
    constexpr int kStep = common::kWarpgroupThreads / kVecs;
    const int vec = thread % kVecs;
    const int group = call.num_queries_per_kv;
#pragma unroll kAtOnce
    for (int row = thread / kVecs; row < Shape::kRows; row += kStep) {
      const int own = min(work.task.first_row + row, work.task.end_row - 1);
      const int token = own / group;
      const std::int64_t head = std::int64_t{call.order[work.task.first_query + token]} * call.batch.num_heads +
                                work.kv_head * group + own - token * group;
      common::copy_vec_async(common::shared_address(shared.queries[place][row / common::kWarpgroupRows]) +
                                 Shape::query_place(row % common::kWarpgroupRows, vec),
                             reinterpret_cast<const uint4*>(call.queries + head * kHeadDim) + vec);
    }
  }

  template <typename Tiles>
  __device__ __forceinline__ void run(Tiles& tiles) const {
    common::RingPosition<Shape::kSlots> slot;
    int ticket = first_ticket();
    while (true) {
      PrefillWork& work = shared.work[slot.place];
      const std::uint32_t full = common::shared_address(&shared.queries_full[slot.place]);
      common::wait_barrier(common::shared_address(&shared.queries_empty[slot.place]), slot.parity ^ 1);
      if (thread == 0) {
        work = work_of(ticket);
        common::arrive(full);
      }
      common::wait_named(kProducers, common::kWarpgroupThreads);
      if (work.num_seen == 0) {
        common::arrive(full);
        if (call.is_merged) {
          common::allow_next_launch();
        }
        common::wait_for_previous_launch();  // this launch may have begun beside it, and must not finish before
        return;
      }
      if constexpr (kOrdered) {
        common::wait_for_previous_launch();  // it may compute the queries; what is read before has been there for long
        copy_ordered_queries<Tiles::kOrderedAtOnce>(work, slot.place);
      } else {
        copy_queries(work, slot.place);
      }
      common::arrive_when_copied(full);
      ticket = take_ticket();
      tiles.load(call.batch.block_table(work.task.sequence), work.kv_head,
                 work.task.first_token + (Tiles::kWindows ? work.task.num_hidden : 0), work.num_seen);
      slot.advance();
    }
  }
};

// ---- consumers ---------------------------------------------------------------------------------------------------

// kRegisters: how many a thread has.
template <int kHeadDim, int kRegisters, bool kWindows>
struct PrefillRows {
  using Shape = PrefillShape<kHeadDim>;
  static constexpr int kTokens = Shape::kTokens;
  static constexpr int kSteps = kHeadDim / 16;
  using Weights = std::uint32_t[kTokens / 16][4];  // of a tile, packed
  // Whether there are registers for a second set of weights, beside output, scores, the first set and 40 for the rest.
  // Then weights are computed before the tile's largest score is known.
  static constexpr bool kGuesses = kHeadDim / 2 + kTokens / 2 + 2 * (kTokens / 4) + 40 <= kRegisters;
  // Weights may exceed 1: the sum that divides the output at the end grows with them. So a larger score becomes the new
  // `largest` only if it exceeds the old one by more than kSlack, and the output is rarely rescaled. A weight of up to
  // 2^8 is as exact in bfloat16 as one below 1. (Conditional rescaling: Zadouri et al., FlashAttention-4,
  // 2026. It is worth 2 % here.)
  static constexpr float kSlack = 8.0F;
  // Where weights are guessed, what a thread's weights of a row may add up to before `largest` is raised. They would
  // still be exact at 2^100.
  static constexpr float kMostWeight = 65536.0F;

  const PrefillCall& call;
  PrefillShared<kHeadDim>& shared;
  const int warpgroup;
  common::RingPosition<Shape::kStages> keys;    // the tile whose scores come next
  common::RingPosition<Shape::kStages> values;  // the tile whose V is added next
  int slot;                                     // the place of the queries

  float output[kHeadDim / 2];
  float scores[kTokens / 2];
  Weights weights;
  Weights others;             // if it guesses, the set of every other tile
  RunningSoftmax softmax[2];  // the thread's two rows; the sum has only the weights that the thread has computed
  bool rescales;              // whether the tile has raised `largest` of some row of the warp
  float rescale[2];           // if so
  int visible[2];             // tokens that the two rows see

  __device__ __forceinline__ PrefillRows(const PrefillCall& c, PrefillShared<kHeadDim>& s, int w)
      : call(c), shared(s), warpgroup(w) {}

  // The thread's number in its warpgroup, and in its warp. What follows from it would stay in registers for the whole
  // launch, and would be stored and loaded around every tile.
  static __device__ __forceinline__ int own_thread() {
    return static_cast<int>(fresh(threadIdx.x) % common::kWarpgroupThreads);
  }
  static __device__ __forceinline__ int own_lane() { return static_cast<int>(fresh(threadIdx.x) % 32); }

  // The warpgroups take turns: one starts products while the other computes its softmax.
  __device__ __forceinline__ void wait_turn() const {
    common::wait_named(kTurn + warpgroup, Shape::kConsumers * common::kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    common::arrive_named(kTurn + 1 - warpgroup, Shape::kConsumers * common::kWarpgroupThreads);
  }

  __device__ __forceinline__ void start(const PrefillWork& work, int place) {
    const int lane = own_lane();
    const int warp = own_thread() / 32;
    slot = place;
#pragma unroll
    for (float& x : output) {
      x = 0.0F;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax[half] = {.largest = -FLT_MAX};  // finite: a row may see nothing of a tile
      const int row = work.task.first_row + warpgroup * common::kWarpgroupRows + warp * 16 + half * 8 + lane / 4;
      visible[half] = work.task.seen_by_first + min(row, work.task.end_row - 1) / call.num_queries_per_kv;
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void start_scores() {
    const common::SharedMatrix own(common::shared_address(shared.queries[slot][warpgroup]), Shape::kQueryPanelBytes);
    const common::SharedMatrix tile(common::shared_address(shared.keys[keys.place]), Shape::kPanelBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      common::multiply_rows<kColumns>(scores, own.descriptor(step / 4 * Shape::kQueryPanelBytes + step % 4 * 32),
                                      tile.descriptor(step / 4 * Shape::kPanelBytes + step % 4 * 32), step > 0);
    }
    common::commit_products();
  }

  template <int kColumns>
  __device__ __forceinline__ void start_values(const Weights& of) {
    const common::SharedMatrix tile(common::shared_address(shared.values[values.place]), Shape::kPanelBytes);
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      common::multiply_registers_by_columns<kHeadDim>(output, of[step], tile.descriptor(step * 16 * Shape::kRowBytes));
    }
    common::commit_products();
  }

  __device__ __forceinline__ void release(std::uint64_t& empty) const { arrive_as_warp(empty, own_lane()); }
  __device__ __forceinline__ void release_keys() {
    release(shared.keys_empty[keys.place]);
    keys.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(shared.values_empty[values.place]);
    values.advance();
  }
  __device__ __forceinline__ void wait_keys() const {
    common::wait_barrier(common::shared_address(&shared.keys_full[keys.place]), keys.parity);
  }
  __device__ __forceinline__ void wait_values() const {
    common::wait_barrier(common::shared_address(&shared.values_full[values.place]), values.parity);
  }

  template <int kColumns>
  __device__ __forceinline__ void mask(int first_token) {
    const int lane = own_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int seen = visible[half] - first_token - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n * 4 + half * 2 + i];
          score = n * 8 + i < seen ? score : -INFINITY;
        }
      }
      if (kWindows && call.batch.window > 0) {
        const int hidden = seen - call.batch.window;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[n * 4 + half * 2 + i];
            score = n * 8 + i >= hidden ? score : -INFINITY;
          }
        }
      }
    }
  }

  // The largest scores of the thread's two rows in a tile, scaled. Both at once: a search for one row would delay the
  // other row's exponentials, which take longest.
  template <int kColumns>
  __device__ __forceinline__ void find_largest(float (&largest)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = scores[half * 2];
      float odd = scores[half * 2 + 1];
#pragma unroll
      for (int n = 1; n < kColumns / 8; ++n) {
        even = fmaxf(even, scores[n * 4 + half * 2]);
        odd = fmaxf(odd, scores[n * 4 + half * 2 + 1]);
      }
      largest[half] = fmaxf(even, odd);
    }
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
      for (float& x : largest) {
        x = fmaxf(x, __shfl_xor_sync(~0U, x, distance));
      }
    }
    largest[0] *= call.scale;
    largest[1] *= call.scale;
  }

  // Raises `largest` of the rows that need it. A branch that is rarely taken; and the assembler moves no exponential
  // before it.
  __device__ __forceinline__ void raise(const float (&largest)[2], const bool (&is_raised)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rescale[half] = softmax[half].raise_to(is_raised[half] ? largest[half] : softmax[half].largest);
    }
  }

  // Scores become weights. Even and odd columns have sums of their own: hardly any other warp shares this warp's
  // scheduler and could fill the cycles between two dependent additions.
  template <int kColumns>
  __device__ __forceinline__ void update_softmax() {
    float largest[2];
    find_largest<kColumns>(largest);
    const bool is_raised[2] = {largest[0] > softmax[0].largest + kSlack, largest[1] > softmax[1].largest + kSlack};
    rescales = __any_sync(~0U, is_raised[0] || is_raised[1]) != 0;
    if (rescales) {
      raise(largest, is_raised);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = 0.0F;
      float odd = 0.0F;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int first = n * 4 + half * 2;
        scores[first] = softmax[half].weight_of(scores[first], call.scale);
        scores[first + 1] = softmax[half].weight_of(scores[first + 1], call.scale);
        even += scores[first];
        odd += scores[first + 1];
      }
      softmax[half].sum += even + odd;
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = (2 * step + i / 2) * 4 + i % 2 * 2;
        weights[step][i] = common::pack(scores[first], scores[first + 1]);
      }
    }
  }

  // The weights of a whole tile by `largest` as it is, and their sums. The scores stay.
  __device__ __forceinline__ void compute_weights(Weights& to, float (&sums)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = 0.0F;
      float odd = 0.0F;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        const float first = softmax[half].weight_of(scores[n * 4 + half * 2], call.scale);
        const float second = softmax[half].weight_of(scores[n * 4 + half * 2 + 1], call.scale);
        even += first;
        odd += second;
        to[n / 2][n % 2 * 2 + half] = common::pack(first, second);
      }
      sums[half] = even + odd;
    }
  }

  // Computes a tile's weights as if it had no far larger score than the tiles before. Nearly always that is so. The
  // weights' sum tells: a far larger score makes it exceed kMostWeight or become infinite. Then the largest score is
  // looked for, and the weights are computed again. So the tensor cores do not wait for a search of 64 scores in each
  // thread, and its exchange between threads. Whether a row's `largest` is raised depends on its own scores alone.
  __device__ __forceinline__ void guess_weights(Weights& to) {
    float sums[2];
    compute_weights(to, sums);
    const bool is_far[2] = {!(sums[0] <= kMostWeight), !(sums[1] <= kMostWeight)};
    rescales = __any_sync(~0U, is_far[0] || is_far[1]) != 0;
    if (rescales) {
      float largest[2];
      find_largest<kTokens>(largest);
      bool is_raised[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int any = is_far[half] ? 1 : 0;  // in the four threads of the row
        any |= __shfl_xor_sync(~0U, any, 1);
        any |= __shfl_xor_sync(~0U, any, 2);
        is_raised[half] = any != 0 && largest[half] > softmax[half].largest;
      }
      raise(largest, is_raised);
      compute_weights(to, sums);
    }
    softmax[0].sum += sums[0];
    softmax[1].sum += sums[1];
  }

  __device__ __forceinline__ void rescale_output() {
    if (rescales) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) {
        output[i] *= rescale[i / 2 % 2];
      }
    }
  }

  // Computes scores and weights of a tile that some rows do not see to its end, while no product with V is in flight.
  // kIsFirst: there is no output yet that could be rescaled.
  template <int kColumns, bool kIsFirst = false>
  __device__ __forceinline__ void add_scores(int first_token) {
    wait_keys();
    wait_turn();
    common::fence_products();
    start_scores<kColumns>();
    pass_turn();
    common::wait_products<0>();
    common::fence_registers(scores);
    release_keys();
    mask<kColumns>(first_token);
    update_softmax<kColumns>();
    if constexpr (!kIsFirst) {
      rescale_output();
    }
    pack_weights<kColumns>();
  }

  // Adds V of the previous tile, whose weights are `from`, and computes scores and weights of this one. Products read
  // `from` meanwhile: only if it guesses, `to` is another set and is written before they are done.
  __device__ __forceinline__ void next_tile(const Weights& from, Weights& to, bool is_last) {
    wait_turn();
    common::fence_products();
    start_scores<kTokens>();
    wait_values();
    common::fence_products();
    start_values<kTokens>(from);
    pass_turn();
    common::wait_products<1>();
    common::fence_registers(scores);
    release_keys();
    if constexpr (kGuesses) {
      guess_weights(to);
    } else {
      update_softmax<kTokens>();
    }
    // The assembler tends to move the wait for V up to the wait for the scores, which would leave the tensor cores
    // without work during the softmax; but it moves nothing across wait_keys().
    if (!is_last) {
      wait_keys();
    }
    common::wait_products<0>();
    common::fence_registers(scores);
    common::fence_registers(output);
    release_values();
    rescale_output();
    if constexpr (!kGuesses) {
      pack_weights<kTokens>();
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void add_values(const Weights& of) {
    wait_values();
    common::fence_products();
    start_values<kColumns>(of);
    common::wait_products<0>();
    common::fence_registers(output);
    release_values();
  }

  // Clears rows of V that the task does not see: they may hold a NaN, and 0 times a NaN is a NaN.
  __device__ __forceinline__ void clear_values(int begin, int end) const {
    wait_values();
    constexpr int kVecs = Shape::kRowBytes / kVecBytes;
    const std::uint32_t tile = common::shared_address(shared.values[values.place]);
    for (int i = own_thread(); i < (end - begin) * kVecs * Shape::kPanels; i += common::kWarpgroupThreads) {
      const int row = i / kVecs;
      common::store_zeros(tile + row % Shape::kPanels * Shape::kPanelBytes +
                          (begin + row / Shape::kPanels) * Shape::kRowBytes + i % kVecs * kVecBytes);
    }
    common::fence_copy_engine();
    common::wait_named(kOwn + warpgroup, common::kWarpgroupThreads);
  }

  // Some row sees the tile's first `count` tokens, but for the first num_hidden. Computes `count` columns, rounded up.
  template <int kColumns = 32>
  __device__ __forceinline__ void add_last_tile(int tile, int num_hidden, int count) {
    if constexpr (kColumns < kTokens) {
      if (count > kColumns) {
        return add_last_tile<kColumns + 32>(tile, num_hidden, count);
      }
    }
    add_scores<kColumns, true>(tile * kTokens);
    if (kWindows && num_hidden > 0) {
      clear_values(0, num_hidden);
    }
    if (count < kColumns) {
      clear_values(count, kColumns);
    }
    add_values<kColumns>(weights);
  }

  // The first tile that all rows of the task see to its beginning.
  __device__ __forceinline__ int first_whole_tile(const PrefillWork& work) const {
    const int seen_by_last = work.task.seen_by_first + (work.task.end_row - 1) / call.num_queries_per_kv;
    return max(work.task.first_token, call.batch.num_hidden(seen_by_last) + kTokens - 1) / kTokens;
  }

  // Computes all tiles, from the last to the first. Only the last one and kRows / kTokens before it may hold tokens
  // that some rows do not see.
  __device__ __forceinline__ void attend(int first, int num_seen) {
    static_assert(kTokens == Shape::kRows || 2 * kTokens == Shape::kRows);
    const int last = (num_seen - 1) / kTokens;
    add_last_tile(last, 0, num_seen - last * kTokens);
    if (last > first) {
      int tile = last - 1;
      if (kTokens < Shape::kRows && tile > first) {
        add_scores<kTokens>(tile * kTokens);
        add_values<kTokens>(weights);
        --tile;
      }
      add_scores<kTokens>(tile * kTokens);
      if (tile > first) {
        wait_keys();
      }
      --tile;
      if constexpr (kGuesses) {
        for (; tile > first; tile -= 2) {
          next_tile(weights, others, false);
          next_tile(others, weights, tile - 1 == first);
        }
        if (tile == first) {
          next_tile(weights, others, true);
          return add_values<kTokens>(others);
        }
      } else {
        for (; tile >= first; --tile) {
          next_tile(weights, weights, tile == first);
        }
      }
      add_values<kTokens>(weights);
    }
  }

  // The same with a window. The tiles in which rows' windows begin are masked too, and computed each by itself. What is
  // between them and the last ones are whole tiles.
  __device__ __forceinline__ void attend_in_windows(const PrefillWork& work) {
    static_assert(kTokens == Shape::kRows || 2 * kTokens == Shape::kRows);
    const int last = (work.num_seen - 1) / kTokens;
    const int whole = call.batch.window > 0 ? first_whole_tile(work) : work.task.first_token / kTokens;
    add_last_tile(last, last * kTokens == work.task.first_token ? work.task.num_hidden : 0,
                  work.num_seen - last * kTokens);
#pragma unroll 1
    for (int tile = last - 1; tile * kTokens >= work.task.first_token; --tile) {
      add_scores<kTokens>(tile * kTokens);
      if (tile > whole && (work.num_seen - 1) / kTokens - tile >= Shape::kRows / kTokens) {
        wait_keys();
        --tile;
        if constexpr (kGuesses) {
          for (; tile > whole; tile -= 2) {
            next_tile(weights, others, false);
            next_tile(others, weights, tile - 1 == whole);
          }
          if (tile == whole) {
            next_tile(weights, others, true);
            add_values<kTokens>(others);
            continue;
          }
        } else {
          for (; tile >= whole; --tile) {
            next_tile(weights, weights, tile == whole);
          }
        }
        ++tile;
      }
      const int num_hidden = work.task.first_token + work.task.num_hidden - tile * kTokens;
      if (num_hidden > 0) {
        clear_values(0, num_hidden);
      }
      add_values<kTokens>(weights);
    }
  }

  // What a warpgroup without rows does for num_tiles tiles: it releases them, and passes its turns on.
  __device__ __forceinline__ void skip(int num_tiles) {
    for (int tile = 0; tile < num_tiles; ++tile) {
      wait_keys();
      wait_turn();
      pass_turn();
      release_keys();
      wait_values();
      release_values();
    }
  }

  // Stores the rows of a part of the context. kLowered: the stored maximum is that much lower than the rows' own, and
  // sum and output are 2^kLowered times as large.
  template <int kLowered>
  __device__ __forceinline__ void store_part(const PrefillWork& work) const {
    constexpr auto kFactor = static_cast<float>(std::uint64_t{1} << kLowered);
    const int lane = own_lane();
    const int warp = own_thread() / 32;
    const std::int64_t place =
        RaggedPartials::place_of(work.task, work.task.part, work.kv_head, call.pages.shape.num_kv_heads) * Shape::kRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax[half].sum;
      total += __shfl_xor_sync(~0U, total, 1);
      total += __shfl_xor_sync(~0U, total, 2);
      const int row = warpgroup * common::kWarpgroupRows + warp * 16 + half * 8 + lane / 4;
      if (work.task.first_row + row < work.task.end_row) {
        if (lane % 4 == 0) {
          call.partials.max_and_sum[place + row] = make_float2(softmax[half].largest - kLowered, total * kFactor);
        }
        float* to = call.partials.outputs + (place + row) * kHeadDim + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          *reinterpret_cast<float2*>(to + n * 8) =
              make_float2(output[n * 4 + half * 2] * kFactor, output[n * 4 + half * 2 + 1] * kFactor);
        }
      }
    }
  }

  __device__ __forceinline__ void store(const PrefillWork& work, int place) {
    const int lane = own_lane();
    const int warp = own_thread() / 32;
    unsigned char* rows = shared.queries[place][warpgroup] + warp * 16 * Shape::kRowBytes;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax[half].sum;
      total += __shfl_xor_sync(~0U, total, 1);
      total += __shfl_xor_sync(~0U, total, 2);
      inverse[half] = 1.0F / total;
    }
    common::wait_named(kOwn + warpgroup, common::kWarpgroupThreads);  // all threads have read the queries
    // Four matrices of 8x8 at a time: two vectors of 16 rows. A lane says where one of their 32 rows begins.
    const std::uint32_t own_row = common::shared_address(rows) + lane % 16 * Shape::kRowBytes;
    const int own_vec = lane / 16 ^ lane % 8;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      std::uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = (n + i / 2) * 4 + i % 2 * 2;
        packed[i] = common::pack(output[first] * inverse[i % 2], output[first + 1] * inverse[i % 2]);
      }
      common::store_matrices(own_row + n / 8 * Shape::kQueryPanelBytes + (own_vec ^ n % 8) * kVecBytes, packed);
    }
    __syncwarp();
    constexpr int kVecs = kHeadDim / 8;
    constexpr int kStep = 32 / kVecs;
    const int first_row = work.task.first_row + warpgroup * common::kWarpgroupRows + warp * 16;
    const int vec = lane % kVecs;
    const int own = lane / kVecs;
    QueryRows<kHeadDim, kStep, Element> to(call, work, call.output + vec * 8, first_row + own);
    const int num_rows = work.task.end_row - first_row;
#pragma unroll
    for (int row = 0; row < 16; row += kStep) {
      if (own + row < num_rows) {
        *reinterpret_cast<uint4*>(to.at) = *reinterpret_cast<const uint4*>(rows + Shape::query_place(own + row, vec));
      }
      to.advance();
    }
  }

  // One piece of work after the other, until none is left.
  template <int kLowered>
  __device__ __forceinline__ void run() {
    common::RingPosition<Shape::kSlots> next;
    if (warpgroup == 1) {
      pass_turn();
    }
    while (true) {
      common::wait_barrier(common::shared_address(&shared.queries_full[next.place]), next.parity);
      const PrefillWork& work = shared.work[next.place];
      if (work.num_seen == 0) {
        return;
      }
      if (work.task.first_row + warpgroup * common::kWarpgroupRows >= work.task.end_row) {
        skip((work.num_seen - work.task.first_token + kTokens - 1) / kTokens);
      } else {
        common::fence_copy_engine();  // the queries were stored by ordinary copies
        start(work, next.place);
        if constexpr (kWindows) {
          attend_in_windows(work);
        } else {
          attend(work.task.first_token / kTokens, work.num_seen);
        }
        if (work.task.is_partial()) {
          store_part<kLowered>(work);
        } else {
          store(work, next.place);
        }
      }
      __syncwarp();
      release(shared.queries_empty[next.place]);
      next.advance();
    }
  }
};

template <int kHeadDim>
__device__ __forceinline__ void init_barriers(PrefillShared<kHeadDim>& shared) {
  using Shape = PrefillShape<kHeadDim>;
  constexpr int kCopying = common::kWarpgroupThreads / 32 * kArrivalsOfWarp;
  constexpr int kConsuming = kCopying * Shape::kConsumers;
  for (int i = 0; i < Shape::kSlots; ++i) {
    common::init_barrier(common::shared_address(&shared.queries_full[i]), common::kWarpgroupThreads + 1);
    common::init_barrier(common::shared_address(&shared.queries_empty[i]), kConsuming);
  }
  for (int i = 0; i < Shape::kStages; ++i) {
    common::init_barrier(common::shared_address(&shared.keys_full[i]), kCopying);
    common::init_barrier(common::shared_address(&shared.keys_empty[i]), kConsuming);
  }
  for (int i = 0; i < Shape::kStages; ++i) {
    common::init_barrier(common::shared_address(&shared.values_full[i]), kCopying);
    common::init_barrier(common::shared_address(&shared.values_empty[i]), kConsuming);
  }
}

// The work of a thread block whose barriers are initialised. Tiles: how producers load tiles, such as TileCopier.
template <int kHeadDim, typename Tiles, bool kOrdered = false, typename Shared>
__device__ __forceinline__ void prefill_block(const PrefillCall& call, Shared& shared) {
  __syncthreads();
  if (threadIdx.x < common::kWarpgroupThreads) {
    common::shrink_registers<Tiles::kProducerRegisters>();
    // Made here: before the branch, it would take registers from the consumers, and their products would not overlap.
    Tiles tiles{call, shared};
    PrefillProducer<kHeadDim, kOrdered>{call, shared}.run(tiles);
  } else {
    common::grow_registers<Tiles::kConsumerRegisters>();
    const int warpgroup = static_cast<int>(threadIdx.x) / common::kWarpgroupThreads - 1;
    PrefillRows<kHeadDim, Tiles::kConsumerRegisters, Tiles::kWindows>(call, shared, warpgroup)
        .template run<kOrdered ? Tiles::kPrefixLowered : 0>();
  }
}

#endif  // COURSE_WGMMA

template <int kHeadDim, bool kWindows, bool kOrdered = false>
__global__ void __launch_bounds__(PrefillShape<kHeadDim>::kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillCall call) {
#if COURSE_WGMMA
  COURSE_DYNAMIC_SHARED(1024, memory);
  auto& shared = *reinterpret_cast<PrefillShared<kHeadDim>*>(memory);
  if (threadIdx.x == 0) {
    init_barriers(shared);
    common::fence_barrier_init();
  }
  prefill_block<kHeadDim, TileCopier<kHeadDim, kWindows>, kOrdered>(call, shared);
#endif
}

}  // namespace common
