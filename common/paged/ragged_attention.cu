// Ragged causal attention: the kernel's outline, its checks and its launch. ragged_kernel.cuh has its parts.
#include <cmath>

#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/paged/attention_launches.h"
#include "common/paged/checks.h"
#include "common/paged/head_dims.h"
#include "common/paged/prefill_attention.h"
#include "common/paged/ragged_kernel.cuh"
#include "common/paged/ragged_loader.cuh"
#include "common/paged/ragged_merge.h"
#include "common/paged/supported_shapes.h"
#include "common/paged/windows.cuh"

namespace common {
namespace {

// blockIdx.x counts tasks, and within a task the kv heads, which take equally long.
template <ScalarType kType, int kHeadDim, bool kShort, bool kWindows, int kLowered>
__global__ void __launch_bounds__(32 * RaggedTileOf<kHeadDim, kShort>::kTile.warps,
                                  RaggedTileOf<kHeadDim, kShort>::kTile.resident)
    ragged_kernel(Pages pages, BatchArrays batch, const Element* queries, const int* order, Element* output,
                  const RaggedTask* tasks, RaggedPartials partials, float scale) {
  using Shared = RaggedShared<kHeadDim, kShort>;
  using Rows = RaggedRows<kHeadDim, kShort>;
  constexpr RaggedTile kTile = RaggedTileOf<kHeadDim, kShort>::kTile;
  constexpr int kRowsOfWarp = kTile.rows_per_warp;
  constexpr int kTokens = kTile.tokens;
  constexpr int kStages = kTile.stages;
  COURSE_DYNAMIC_SHARED(128, shared);
  __shared__ __align__(8) std::uint64_t barriers[2 * kStages];
  const int num_kv_heads = pages.shape.num_kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % num_kv_heads;
  const RaggedTask task = tasks[static_cast<int>(blockIdx.x) / num_kv_heads];
  if (task.sequence < 0) {
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = batch.num_heads / num_kv_heads;
  const int first_query = task.first_query;
  const int end_row = task.end_row;
  const int seen_by_first = task.seen_by_first - task.first_token;  // of the task's part; below 1: nothing
  const std::uint32_t query_tile = common::shared_address(shared);
  const RaggedLoader<kType, kHeadDim, kShort, kWindows> loader{
      .pages = pages,
      .table = batch.block_table(task.sequence),
      .kv_head = kv_head,
      .first_token = task.first_token,
      .num_hidden = task.num_hidden,
      .num_tokens = task.end_token - task.first_token,
      .keys = query_tile + Shared::kQueryBytes,
      .values = query_tile + Shared::kQueryBytes + kStages * Shared::kTileBytes,
      .barriers = common::shared_address(barriers)};
  const int num_tiles = (loader.num_tokens + kTokens - 1) / kTokens;
#if COURSE_BULK_COPY
  if (threadIdx.x < 2 * kStages) {
    common::init_barrier(loader.barriers + static_cast<int>(threadIdx.x) * 8, 1);
    common::fence_barrier_init();
  }
  __syncthreads();
#endif

  // A warp loads its own rows. Rows that do not exist repeat the last row, and are not stored.
  const int first_row = task.first_row + warp * kRowsOfWarp;
  const auto row_begin = [&](int row) {
    const int token = first_query + row / group;
    return (std::int64_t{order == nullptr ? token : order[token]} * batch.num_heads + kv_head * group + row % group) *
           kHeadDim;
  };
  const std::uint32_t own_rows = query_tile + warp * kRowsOfWarp * Shared::kRowBytes;
  constexpr int kVecs = Rows::kVecs;
  for (int i = lane; i < kRowsOfWarp * kVecs; i += 32) {
    const int row = i / kVecs;
    common::copy_vec_async(
        own_rows + vec_place(kVecs, kTileRows, row, i % kVecs) * kVecBytes,
        reinterpret_cast<const uint4*>(queries + row_begin(min(first_row + row, end_row - 1))) + i % kVecs);
  }
  common::commit_copies();
  for (int tile = 0; tile < kStages; ++tile) {
    if (tile < num_tiles) {
      loader.start_copy(tile);
    }
    loader.commit();
  }
#if COURSE_BULK_COPY
  common::wait_copies<0>();
#else
  common::wait_copies<kStages>();
#endif
  __syncwarp();

  Rows rows;
  rows.start();
  // How many tokens the first row of this warp sees, and the last row: 0 if there is no row.
  const int seen_by_warp_first = seen_by_first + first_row / group;
  const int seen_by_last =
      first_row < end_row ? seen_by_first + (min(first_row + kRowsOfWarp, end_row) - 1) / group : 0;
  // How many of the part's first tokens their windows hide.
  const int hidden_from_first = batch.num_hidden(seen_by_warp_first);
  const int hidden_from_last = batch.num_hidden(seen_by_last);
  const auto add_tile = [&](int tile, auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    const int stage = tile % kStages;
    const int num_seen = seen_by_last - tile * kTokens;
    float scores[Rows::kBlocks][Rows::kColumns][4];
    rows.template score<kMasked>(scores, own_rows, loader.keys + stage * Shared::kTileBytes, num_seen);
    if constexpr (kMasked) {
      Rows::template mask<kWindows>(scores, tile * kTokens, seen_by_first, first_row, group, batch.window);
    }
    rows.update_softmax(scores, scale);
    loader.wait_values(tile);
    rows.template add_values<kMasked>(scores, loader.values + stage * Shared::kTileBytes, num_seen);
  };
  for (int tile = 0; tile < num_tiles; ++tile) {
    loader.wait_keys(tile);
    if (kWindows ? loader.has_other_rows(tile) : loader.tokens_of(tile) < kTokens) {
      loader.wait_values(tile);
      loader.clear_values(tile);
    }
    const bool is_whole =
        (tile + 1) * kTokens <= seen_by_warp_first && (!kWindows || tile * kTokens >= hidden_from_last);
    if (is_whole && first_row < end_row) {
      add_tile(tile, std::false_type{});
    } else if (tile * kTokens < seen_by_last && (!kWindows || (tile + 1) * kTokens > hidden_from_first)) {
      add_tile(tile, std::true_type{});
    }
    loader.release();
    if (tile + kStages < num_tiles) {
      loader.start_copy(tile + kStages);
    }
    loader.commit();
  }

  if (task.is_partial()) {
    const std::int64_t place =
        RaggedPartials::place_of(task, task.part, kv_head, num_kv_heads) * kTile.rows() + warp * kRowsOfWarp;
    rows.template store_part<kLowered>(partials.outputs + place * kHeadDim, partials.max_and_sum + place,
                                       end_row - first_row);
    return;
  }
  rows.store(own_rows);
  __syncwarp();
  for (int i = lane; i < kRowsOfWarp * kVecs; i += 32) {
    const int row = i / kVecs;
    if (first_row + row < end_row) {
      const auto* vec = reinterpret_cast<const uint4*>(shared + warp * kRowsOfWarp * Shared::kRowBytes) +
                        vec_place(kVecs, kTileRows, row, i % kVecs);
      reinterpret_cast<uint4*>(output + row_begin(first_row + row))[i % kVecs] = *vec;
    }
  }
}

struct RaggedCall {
  const Pages& pages;
  const BatchArrays& batch;
  const void* queries;
  const int* order;
  void* output;
  const RaggedWorkspace& workspace;
  cudaStream_t stream;
};

template <ScalarType kType, int kHeadDim, bool kShort, bool kWindows, int kLowered = 0>
void launch_ragged(const RaggedCall& call) {
  constexpr RaggedTile kTile = RaggedTileOf<kHeadDim, kShort>::kTile;
  const float scale = score_scale(kHeadDim);
  const std::int64_t grid = std::int64_t{call.workspace.shape.max_tasks} * call.pages.shape.num_kv_heads;
  COMMON_CHECK(grid < std::int64_t{1} << 31, "too many tokens for one launch");
  common::launch(ragged_kernel<kType, kHeadDim, kShort, kWindows, kLowered>, dim3(static_cast<unsigned>(grid)),
                 32 * kTile.warps, RaggedShared<kHeadDim, kShort>::kBytes, call.stream, common::Overlap::kNone,
                 call.pages, call.batch, static_cast<const Element*>(call.queries), call.order,
                 static_cast<Element*>(call.output), call.workspace.tasks, call.workspace.partials, scale);
}

template <ScalarType kType, int kHeadDim, bool kWindows>
void choose_tile(const RaggedCall& call) {
  if constexpr (kHeadDim <= 128) {
    if (call.workspace.shape.kernel == RaggedKernel::kShort) {
      if constexpr (kType == ScalarType::kFloat8 && (!kWindows || kOnlyWithWindows)) {
        if (call.order != nullptr) {
          return launch_ragged<kType, kHeadDim, true, kWindows, kFloat8PrefixLowered>(call);
        }
      }
      return launch_ragged<kType, kHeadDim, true, kWindows>(call);
    }
  } else if constexpr (common::kServesSmallMemory) {
    if (ragged_shared_bytes(kHeadDim, false) > common::shared_bytes_per_block()) {
      return launch_ragged<kType, kHeadDim, true, kWindows>(call);
    }
  }
  launch_ragged<kType, kHeadDim, false, kWindows>(call);
}

template <ScalarType kType, bool kWindows>
void choose_head_dim(const RaggedCall& call) {
  with_head_dim(call.pages.shape.head_dim, [&](auto head_dim) { choose_tile<kType, head_dim, kWindows>(call); });
}

}  // namespace

void attend_tasks(const Pages& pages, const BatchArrays& batch, const void* queries, const int* order, void* output,
                  const RaggedWorkspace& workspace, bool beside_previous, cudaStream_t stream) {
  COMMON_CHECK(order == nullptr || batch.window == 0, "only rows without a window have an order");
  if (workspace.shape.kernel == RaggedKernel::kWarpgroups) {
    COMMON_CHECK(has_warpgroups(pages.shape), "wgmma serves this device and these pages");
    prefill_attention(pages, batch, queries, order, output, workspace, beside_previous, stream);
    return;
  }
  const RaggedCall call{pages, batch, queries, order, output, workspace, stream};
  with_windows(batch.window, [&](auto windows) {
    if (pages.shape.type == ScalarType::kFloat8) {
      choose_head_dim<ScalarType::kFloat8, windows>(call);
    } else {
      choose_head_dim<ScalarType::kBFloat16, windows>(call);
    }
  });
}

void ragged_attention(const Pages& pages, const BatchArrays& batch, const int* query_starts, const void* queries,
                      void* output, int num_tokens, const void* workspace, cudaStream_t stream,
                      const RaggedOptions& options) {
  check_pages(kProductionShapes, pages);
  check_batch(kProductionShapes, pages.shape, batch);
  COMMON_CHECK(num_tokens >= 0, "a batch has no tokens or some");
  if (batch.num_sequences == 0 || num_tokens == 0) {
    return;
  }
  COMMON_CHECK(query_starts != nullptr && queries != nullptr && output != nullptr,
               "query_starts, queries and output are given");
  COMMON_CHECK(is_aligned(queries) && is_aligned(output), "queries and output begin at multiples of 16 bytes");
  COMMON_CHECK(workspace != nullptr && is_aligned(workspace), "a workspace is given");
  const RaggedWorkspace own = ragged_workspace(const_cast<void*>(workspace), pages.shape, batch, num_tokens, options);
  attend_tasks(pages, batch, queries, nullptr, output, own, options.beside_previous, stream);
  if (own.shape.max_places > 0) {
    merge_parts_of_contexts(own, pages.shape, batch.num_heads, output, stream);
  }
}

}  // namespace common
