// Paged attention, plain: correct for every shape, and fast for none. A decode step's token, a chunk of a prompt, and
// any mix of the two look the same to it: rows of queries, where each row sees its own sequence up to itself.
//
// A thread block computes one query head of one token. Its warps take the tokens of the context in turn: warp 0 the
// positions 0, 8, 16 …, warp 1 the positions 1, 9, 17 …; in a warp, a lane has the dimensions lane, lane + 32, … of the
// query, of K, of V and of the result. The block table says where a position's K and V are. Each warp runs stage 3's
// online softmax over its own tokens (online_softmax.cuh); the results of the eight warps are joined at the end.
//
// Arithmetic is float32, whatever the pages hold: in float32 the result can be compared with the CPU's, digit by digit.
// The ladder shows why it is slow: each query head of a group reads the same K and V again, no context is shared out
// among thread blocks, and a load has to end before the next token's load begins.
#include <cuda_bf16.h>

#include <string>

#include "common/cuda/model/scalars.cuh"
#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"
#include "kernels.h"
#include "online_softmax.cuh"
#include "page_layout.h"

namespace stage7 {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxDimensions = 256;
constexpr int kValues = kMaxDimensions / 32;  // a lane's dimensions at most

// A row of the queries: the sequence it belongs to, and how many tokens of the context it sees.
struct QueryRow {
  int sequence;
  int visible;  // 0: the row belongs to no sequence, or to an inactive one
};

__device__ QueryRow find_row(int row, const StepArrays& step) {
  const int* starts = step.query_starts;
  if (row < starts[0] || row >= starts[step.batch.num_sequences]) {
    return {0, 0};
  }
  int sequence = 0;
  for (int end = step.batch.num_sequences; end - sequence > 1;) {  // starts[sequence] <= row < starts[end]
    const int middle = (sequence + end) / 2;
    (starts[middle] <= row ? sequence : end) = middle;
  }
  const int rows_after = starts[sequence + 1] - row - 1;
  return {sequence, step.batch.context_lengths[sequence] - rows_after};
}

// What one warp computes from every kWarps-th position.
template <typename Scalar>
__device__ SoftmaxRow<kValues> attend_positions(const Pages& pages, const int* table, int kv_head, int visible,
                                                const float (&query)[kValues], float scale) {
  const PageShape& shape = pages.shape;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto* keys = static_cast<const Scalar*>(pages.keys);
  const auto* values = static_cast<const Scalar*>(pages.values);
  SoftmaxRow<kValues> result;
  for (int position = static_cast<int>(threadIdx.x) / 32; position < visible; position += kWarps) {
    const int block = table[position / shape.block_size];
    const std::int64_t row = row_offset(shape, block, kv_head, position % shape.block_size);
    float value[kValues] = {};
    float score = 0.0F;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int dimension = lane + 32 * i;
      if (dimension < shape.head_dim) {
        score += query[i] * common::to_float(keys[row + dimension]);
        value[i] = common::to_float(values[row + dimension]);
      }
    }
    score = scale * common::warp_sum(score);
    result.rescale(fmaxf(result.largest, score));
    result.add(common::exp2_fast(score - result.largest), value);
  }
  return result;
}

// blockIdx.x counts the rows of the queries and, fastest, the query heads.
template <typename Scalar>
__global__ void __launch_bounds__(32 * kWarps)
    paged_attention(Pages pages, StepArrays step, const Scalar* queries, Scalar* output, float scale) {
  // Where the warps' results are joined.
  __shared__ float2 maxima_and_sums[kWarps];
  __shared__ float values[kWarps][kMaxDimensions];
  const int num_heads = step.batch.num_heads;
  const int head = static_cast<int>(blockIdx.x) % num_heads;
  const QueryRow row = find_row(static_cast<int>(blockIdx.x) / num_heads, step);
  if (row.visible <= 0) {
    return;
  }
  const int head_dim = pages.shape.head_dim;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const std::int64_t row_begin = std::int64_t{blockIdx.x} * head_dim;
  float query[kValues] = {};
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (lane + 32 * i < head_dim) {
      query[i] = common::to_float(queries[row_begin + lane + 32 * i]);
    }
  }
  const int* table = step.batch.block_table(row.sequence);
  const int kv_head = head / (num_heads / pages.shape.num_kv_heads);
  const SoftmaxRow<kValues> own = attend_positions<Scalar>(pages, table, kv_head, row.visible, query, scale);

  const int warp = thread / 32;
  if (lane == 0) {
    maxima_and_sums[warp] = make_float2(own.largest, own.sum);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[warp][lane + 32 * i] = own.values[i];
  }
  __syncthreads();
  if (thread < head_dim) {  // a thread for each dimension
    SoftmaxRow<1> joined;
    for (int part = 0; part < kWarps; ++part) {
      joined.largest = fmaxf(joined.largest, maxima_and_sums[part].x);
    }
    for (int part = 0; part < kWarps; ++part) {
      joined.add_part(maxima_and_sums[part], {values[part][thread]});
    }
    output[row_begin + thread] = common::from_float<Scalar>(joined.values[0] / joined.sum);
  }
}

template <typename Scalar>
void launch_attention(const Pages& pages, const StepArrays& step, const void* queries, void* output,
                      cudaStream_t stream) {
  const std::int64_t grid = std::int64_t{step.num_tokens} * step.batch.num_heads;
  COMMON_CHECK(grid < std::int64_t{1} << 31, "too many tokens for one launch");
  common::launch(paged_attention<Scalar>, dim3(static_cast<unsigned>(grid)), 32 * kWarps, 0, stream,
                 common::Overlap::kNone, pages, step, static_cast<const Scalar*>(queries), static_cast<Scalar*>(output),
                 score_scale(pages.shape.head_dim));
}

}  // namespace

const PlainKernels kPlainKernels{};

std::string PlainKernels::unsupported(const PageShape& shape, int num_heads) const {
  if (std::string reason = common::unsupported_by_all(shape, num_heads); !reason.empty()) {
    return reason;
  }
  if (shape.type == ScalarType::kFloat8) {
    return "K and V in float8 need the kernels of common/paged/, which are left out of this build (COURSE_PRODUCTION)";
  }
  if (shape.block_size < 1) {
    return "the plain kernels need blocks of at least one token, not " + std::to_string(shape.block_size);
  }
  // Rows of whole 16-byte vectors; a lane has room for 8 dimensions.
  if (shape.head_dim < 8 || shape.head_dim % 8 != 0 || shape.head_dim > kMaxDimensions) {
    return "the plain kernels need a head dimension that is a multiple of 8 up to 256, not " +
           std::to_string(shape.head_dim);
  }
  return {};
}

std::size_t PlainKernels::workspace_bytes(const PageShape& shape, const StepArrays& largest) const {
  common::check_step(*this, shape, largest);
  return 0;
}

void PlainKernels::plan(const PageShape& shape, const StepArrays& step, std::span<std::byte> /*workspace*/,
                        cudaStream_t /*stream*/) const {
  common::check_step(*this, shape, step);
}

void PlainKernels::attend(const Pages& pages, const StepArrays& step, const LayerRows& rows, void* output,
                          std::span<std::byte> /*workspace*/, cudaStream_t stream) const {
  common::check_pages(*this, pages);
  common::check_step(*this, pages.shape, step);
  if (step.batch.num_sequences == 0 || step.num_tokens == 0) {
    return;
  }
  COMMON_CHECK(rows.queries != nullptr && output != nullptr, "queries and output are given");
  COMMON_CHECK(common::is_aligned(rows.queries) && common::is_aligned(output),
               "queries and output begin at multiples of 16 bytes");
  if (rows.keys != nullptr) {
    write_to_slots(pages, rows.keys, rows.values, rows.row_stride, step.slot_mapping, step.num_tokens, stream);
  }
  if (pages.shape.type == ScalarType::kFloat32) {
    launch_attention<float>(pages, step, rows.queries, output, stream);
  } else {
    launch_attention<__nv_bfloat16>(pages, step, rows.queries, output, stream);
  }
}

}  // namespace
