// What steps 4 to 6 share: a context cut into pieces that different thread blocks walk, and the merge of their results.
//
// The results of a head lie in the workspace just as those of half-warps lie in shared memory (PartialSoftmax in
// online_softmax.cuh: for each part and query the largest score, the sum of weights, and the weighted sum of V), and
// are joined by the same arithmetic. A step itself has the kernel that walks a piece, and describes it with a
// SplitStep.
#pragma once

#include <algorithm>

#include "ladder_parts.cuh"

namespace stage7 {

struct Splits {
  unsigned char* memory;
  int count;        // pieces of a context; 1: nothing to merge, outputs are written at once
  int num_heads;    // query heads, or kv heads if a group is computed together
  int num_queries;  // query heads that are computed together
  std::size_t bytes_per_head;

  std::size_t bytes(int num_sequences) const {
    return count == 1 ? 0 : bytes_per_head * static_cast<std::size_t>(num_sequences * num_heads);
  }
  __device__ __forceinline__ PartialSoftmax<kDimensions> results(int sequence, int head) const {
    return {memory + (std::int64_t{sequence} * num_heads + head) * bytes_per_head, count, num_queries};
  }
};

// Enough pieces for `resident` thread blocks on every multiprocessor, but none shorter than 128 tokens: each piece adds
// to the merge. All contexts have the same number of pieces, because the host does not know their lengths.
inline Splits choose_splits(const PageShape& shape, const Batch& batch, int num_heads, int resident, void* memory) {
  constexpr int kMinTokens = 128;
  check_ladder(shape, batch);
  const int slots = resident * common::device_limits().num_multiprocessors;
  const int most = (max_context(batch) + kMinTokens - 1) / kMinTokens;
  const int count = std::clamp(slots / std::max(1, batch.num_sequences * num_heads), 1, most);
  const int num_queries = batch.num_heads / num_heads;
  return {.memory = static_cast<unsigned char*>(memory),
          .count = count,
          .num_heads = num_heads,
          .num_queries = num_queries,
          .bytes_per_head = PartialSoftmax<kDimensions>::bytes(count, num_queries)};
}

// What a thread block of steps 4 to 6 walks: tokens begin … end - 1 of one context, for query head `head`, or for all
// query heads of kv head `head`. Pieces are cut between blocks; a short context has pieces without any token.
struct Piece {
  int sequence;
  int head;
  int split;
  int length;  // of the whole context; 0: there is nothing to do, and no result to store
  int begin;
  int end;

  __device__ __forceinline__ Piece(const LadderCall& call, const Splits& splits)
      : sequence(static_cast<int>(blockIdx.y)),
        head(static_cast<int>(blockIdx.x)),
        split(static_cast<int>(blockIdx.z)),
        length(call.batch.context_lengths[sequence]) {
    const std::int64_t num_blocks = (length + kBlockTokens - 1) / kBlockTokens;
    begin = static_cast<int>(num_blocks * split / splits.count) * kBlockTokens;
    end = min(static_cast<int>(num_blocks * (split + 1) / splits.count) * kBlockTokens, length);
  }
};

// Joins the num_parts results of a thread block, and writes the output or this piece's result. All threads call it.
__device__ __forceinline__ void finish_piece(const LadderCall& call, const Splits& splits, const Piece& piece,
                                             const PartialSoftmax<kDimensions>& exchange, int num_parts) {
  constexpr int kValues = kWarpValues<kDimensions>;
  const int dimension = static_cast<int>(threadIdx.x) % 32 * kValues;
  __syncthreads();
  for (int query = static_cast<int>(threadIdx.x) / 32; query < splits.num_queries;
       query += static_cast<int>(blockDim.x) / 32) {
    if (splits.count == 1) {
      write_output(call, exchange, num_parts, query,
                   head_row(call, piece.sequence, piece.head * splits.num_queries + query));
    } else {
      splits.results(piece.sequence, piece.head)
          .store(piece.split, query, merge_parts<kValues>(exchange, num_parts, query, dimension), dimension);
    }
  }
}

// The properties of a step's kernel.
struct SplitStep {
  bool groups_together;  // whether a thread block computes a kv head's whole group; else one query head
  int resident;          // thread blocks that a multiprocessor holds at once
  int threads;
  int num_parts;           // a thread block's results, which are joined in shared memory
  std::size_t ring_bytes;  // further shared memory
  void (*(*kernel_for)(int num_queries))(LadderCall, Splits);

  Splits splits(const PageShape& shape, const Batch& batch, void* workspace) const {
    return choose_splits(shape, batch, groups_together ? shape.num_kv_heads : batch.num_heads, resident, workspace);
  }
};

// The second launch (step4_split.cu). Does nothing if no context was cut.
void merge_splits(const LadderCall& call, const Splits& splits, cudaStream_t stream);

template <const SplitStep& step>
std::size_t split_workspace_bytes(const PageShape& shape, const Batch& batch) {
  return step.splits(shape, batch, nullptr).bytes(batch.num_sequences);
}

// A launch that walks all pieces, and one that joins their results.
template <const SplitStep& step>
void decode_split(const Pages& pages, const Batch& batch, const void* queries, void* output, void* workspace,
                  cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  const Splits splits = step.splits(pages.shape, batch, workspace);
  if (batch.num_sequences > 0) {
    common::launch(step.kernel_for(splits.num_queries), grid_of(splits.num_heads, batch.num_sequences, splits.count),
                   step.threads,
                   step.ring_bytes + PartialSoftmax<kDimensions>::bytes(step.num_parts, splits.num_queries), stream,
                   common::Overlap::kNone, call, splits);
    merge_splits(call, splits, stream);
  }
}

}  // namespace
