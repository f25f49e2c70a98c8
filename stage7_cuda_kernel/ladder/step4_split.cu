// Step 4: split the context. Several thread blocks share one head's tokens, and a second launch joins their results.
//
// Decoding has one query a sequence, so steps 1 to 3 have sequences x heads thread blocks: 32 for a single sequence,
// and there are 132 multiprocessors with room for 8 each. Cutting the context gives as many as the device can hold
// ("Flash-Decoding", https://pytorch.org/blog/flash-decoding/). The price is the partial results, 520 bytes for each
// piece and query head, written and read once more, and a launch that cannot begin before the last piece is done.
//
// bytes for 32 x 8,192: 4.3 GB loaded, as before. There are 1,024 heads already, so nothing is cut (num_splits). For 1
// x 8,192 a context is cut into 33 pieces of 248 tokens: 34 MB of K and V, each loaded four times, and 0.5 MB of
// partial results. flops: 4.3 G; merging adds 2 for each number of a partial result.
// measured: 1x8192 26.2 us (28%), 32x8192 572 us (41%), 32xragged 1,072 us (19%) on an NVIDIA H200, 2026-11-23, at
// 5fcb232
//
// Why it is faster: a single sequence has the whole device. Where it is not: a batch that fills the device anyway. And
// the second launch is not free: in a run of 2026-11-28 it took 3.0 us of 8.95 us for 1,024 tokens, and 5.7 us of 26.3
// us where it joins 33 pieces.
#include <algorithm>

#include "ladder_call.cuh"

namespace stage7 {
namespace {

constexpr int kThreads = 128;
static_assert(kThreads == kDimensions);  // a thread for each dimension of the output

using Vec = common::Vec16<Element>;  // 16 bytes: what a thread moves at once
constexpr int kVecElements = Vec::kElements;
constexpr int kVecsPerRow = kDimensions / kVecElements;  // 16: half a warp moves a row
constexpr int kHalfWarps = kThreads / kVecsPerRow;
constexpr int kUnroll = 4;  // rows that a half-warp has in flight

constexpr int kResident = 8;  // thread blocks on a multiprocessor

// What a thread block has found in its piece of a context, for one query.
struct Partial {
  float output[kDimensions];
  float largest;
  float sum;
};

// A context is cut between blocks, into `splits` pieces or, if there are fewer blocks, one for each: none is empty.
__device__ int num_pieces(int length, int splits) { return min(splits, (length + kBlockTokens - 1) / kBlockTokens); }

__device__ Vec load_vec(const Element* row, int vec) {
  return {*reinterpret_cast<const uint4*>(row + vec * kVecElements)};
}

__device__ float dot(const Vec& a, const Vec& b) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kVecElements; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

// The sum of a number of each thread of a half-warp; all 16 get it.
__device__ float over_half_warp(float x) {
#pragma unroll
  for (int distance = kVecsPerRow / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(~0U, x, distance);
  }
  return x;
}

// kResident thread blocks fit, with registers for K and V of four tokens in each thread. By default the compiler uses
// fewer registers, and not all of a thread's loads are in flight at once.
__global__ void __launch_bounds__(kThreads, kResident) attend(LadderCall call, int splits, Partial* partials) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int half_warp = thread / kVecsPerRow;
  const int vec = thread % kVecsPerRow;
  const auto head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const auto piece = static_cast<int>(blockIdx.z);
  const int length = call.context_lengths[sequence];
  const int pieces = num_pieces(length, splits);
  if (piece >= pieces) {
    return;
  }
  const int num_blocks = (length + kBlockTokens - 1) / kBlockTokens;
  const int first = num_blocks * piece / pieces * kBlockTokens;
  const int end = min(num_blocks * (piece + 1) / pieces * kBlockTokens, length);
  const int* table = call.block_tables + call.table_starts[sequence];
  const int kv_head = head / (call.num_heads / call.num_kv_heads);
  const std::int64_t row = std::int64_t{sequence} * call.num_heads + head;
  const Vec query = load_vec(call.queries + row * kDimensions, vec);

  // The half-warp's online softmax over every eighth token.
  float largest = -INFINITY;
  float sum = 0.0F;
  float output[kVecElements] = {};
  for (int begin = first; begin < end; begin += kHalfWarps * kUnroll) {
    Vec keys[kUnroll];
    Vec values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {  // past the end: the last token again, so that no thread diverges
      const int position = min(begin + i * kHalfWarps + half_warp, end - 1);
      const std::int64_t offset = row_offset(call, table, kv_head, position);
      keys[i] = load_vec(call.keys + offset, vec);
      values[i] = load_vec(call.values + offset, vec);
    }
    float scores[kUnroll];
    float new_largest = largest;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      scores[i] = over_half_warp(dot(query, keys[i])) * call.scale;
      new_largest = fmaxf(new_largest, scores[i]);
    }
    const float factor = common::exp2_fast(largest - new_largest);
    largest = new_largest;
    sum *= factor;
#pragma unroll
    for (int j = 0; j < kVecElements; ++j) {
      output[j] *= factor;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool exists = begin + i * kHalfWarps + half_warp < end;
      const float weight = exists ? common::exp2_fast(scores[i] - largest) : 0.0F;
      sum += weight;
#pragma unroll
      for (int j = 0; j < kVecElements; ++j) {
        output[j] += weight * values[i][j];
      }
    }
  }

  // The half-warps' results, joined: a thread for each dimension.
  __shared__ float maxima[kHalfWarps];
  __shared__ float sums[kHalfWarps];
  __shared__ float outputs[kHalfWarps][kDimensions];
  if (vec == 0) {
    maxima[half_warp] = largest;
    sums[half_warp] = sum;
  }
#pragma unroll
  for (int j = 0; j < kVecElements; ++j) {
    outputs[half_warp][vec * kVecElements + j] = output[j];
  }
  __syncthreads();
  float joined_largest = -INFINITY;
  for (int i = 0; i < kHalfWarps; ++i) {
    joined_largest = fmaxf(joined_largest, maxima[i]);
  }
  float joined_sum = 0.0F;
  float joined = 0.0F;
  for (int i = 0; i < kHalfWarps; ++i) {
    const float weight = common::exp2_fast(maxima[i] - joined_largest);
    joined_sum += weight * sums[i];
    joined += weight * outputs[i][thread];
  }
  if (splits == 1) {
    call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
    return;
  }
  Partial& partial = partials[row * splits + piece];
  partial.output[thread] = joined;
  if (thread == 0) {
    partial.largest = joined_largest;
    partial.sum = joined_sum;
  }
}

// The second launch: joins the pieces as `attend` joins what its threads have.
__global__ void __launch_bounds__(kThreads) merge(LadderCall call, int splits, const Partial* partials) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto head = static_cast<int>(blockIdx.x);
  const auto sequence = static_cast<int>(blockIdx.y);
  const int pieces = num_pieces(call.context_lengths[sequence], splits);
  if (pieces == 0) {
    return;
  }
  const std::int64_t row = std::int64_t{sequence} * call.num_heads + head;
  partials += row * splits;
  float joined_largest = -INFINITY;
  for (int i = 0; i < pieces; ++i) {
    joined_largest = fmaxf(joined_largest, partials[i].largest);
  }
  float joined_sum = 0.0F;
  float joined = 0.0F;
  for (int i = 0; i < pieces; ++i) {
    const float weight = common::exp2_fast(partials[i].largest - joined_largest);
    joined_sum += weight * partials[i].sum;
    joined += weight * partials[i].output[thread];
  }
  call.output[row * kDimensions + thread] = common::from_float<Element>(joined / joined_sum);
}

// kResident places on every multiprocessor, divided by sequences and heads, rounded down; at most one piece for each 8
// blocks of the longest context, rounded up: each piece adds to the merge. The lengths are known on the device.
int num_splits(const BatchArrays& batch, int num_heads) {
  constexpr int kMinBlocks = 8;
  const int slots = kResident * common::device_limits().num_multiprocessors;
  const int most = (batch.max_blocks_per_sequence + kMinBlocks - 1) / kMinBlocks;
  return std::clamp(slots / std::max(1, batch.num_sequences * num_heads), 1, most);
}

std::size_t workspace_bytes(const PageShape& shape, const BatchArrays& batch) {
  check_ladder(shape, batch);
  return sizeof(Partial) * static_cast<std::size_t>(batch.num_sequences) * static_cast<std::size_t>(batch.num_heads) *
         static_cast<std::size_t>(num_splits(batch, batch.num_heads));
}

void decode(const Pages& pages, const BatchArrays& batch, const void* queries, void* output, void* workspace,
            cudaStream_t stream) {
  const LadderCall call = ladder_call(pages, batch, queries, output);
  if (call.num_sequences == 0) {
    return;
  }
  auto* partials = static_cast<Partial*>(workspace);
  const int splits = num_splits(batch, call.num_heads);
  common::launch(attend, grid_of(call.num_heads, call.num_sequences, splits), kThreads, 0, stream,
                 common::Overlap::kNone, call, splits, partials);
  if (splits > 1) {
    common::launch(merge, grid_of(call.num_heads, call.num_sequences), kThreads, 0, stream, common::Overlap::kNone,
                   call, splits, partials);
  }
}

}  // namespace

const LadderStep kSplit = {"4 split contexts", workspace_bytes, nullptr, decode};

}  // namespace
