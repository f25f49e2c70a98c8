#include "common/cuda/model/pushed_sum.h"

#include "common/base/check.h"
#include "common/cuda/model/finishes.cuh"
#include "common/cuda/model/scalars.cuh"
#include "common/cuda/ptx.cuh"
#include "common/cuda/runtime/launch.h"

namespace common {
namespace {

// Few threads for a block, so that a single row is spread over many multiprocessors.
constexpr int kThreads = 128;

// Waits for a pair of columns of all GPUs' parts. Returns false if it has to stop.
__device__ __forceinline__ bool wait_for_pairs(const PushedSum& sum, std::int64_t place, unsigned number,
                                               PushedPair (&pairs)[kMaxPeers]) {
  for (unsigned tries = 1;; ++tries) {
    bool all_are_there = true;
    // All loads are in flight before the first one is looked at.
#pragma unroll
    for (int part = 0; part < kMaxPeers; ++part) {
      if (part < sum.num_parts) {
        pairs[part] = load_two_words_system(sum.parts[part] + place);
      }
    }
#pragma unroll
    for (int part = 0; part < kMaxPeers; ++part) {
      // Each half comes by itself.
      if (part < sum.num_parts && (pairs[part].y != number || pairs[part].w != number)) {
        all_are_there = false;
      }
    }
    if (all_are_there) {
      return true;
    }
    if (tries % 4096 == 0 && *static_cast<const volatile int*>(sum.stop) != 0) {
      return false;
    }
  }
}

// A thread has two columns.
//
// It does not wait for the previous launch, the product: that ends only when the other GPUs have confirmed its stores,
// and by then their parts are here. It reads nothing that an earlier launch has written, but first_numbers, which are
// older than the step. What it overwrites has been read: the product waited for all earlier launches before it stored
// its part.
template <typename Scalar, int kSquares>
__global__ void __launch_bounds__(kThreads) add_pushed_kernel(PushedSum sum, Residual residual) {
  allow_next_launch();
  const auto token = static_cast<int>(blockIdx.y);
  const int column = 2 * static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  bool exists = column < residual.num_cols;
  float2 norm{};
  float2 total{};
  if (exists) {
    norm = *reinterpret_cast<const float2*>(residual.norm + column);
    const unsigned number = __ldcg(sum.number.first_numbers + token) + sum.number.index;
    PushedPair pairs[kMaxPeers];
    exists = wait_for_pairs(sum, (std::int64_t{token} * residual.num_cols + column) / 2, number, pairs);
    // In the same order on every GPU, so that all have the same residual stream to the last bit.
#pragma unroll
    for (int part = 0; part < kMaxPeers; ++part) {
      if (part < sum.num_parts) {
        total = {total.x + __uint_as_float(pairs[part].x), total.y + __uint_as_float(pairs[part].z)};
      }
    }
  }
  const AddToResidual<Scalar, kSquares> store{residual};
  store(exists, token, column, {0.0F, 0.0F, norm.x, norm.y}, total);
  // The launches after this one wait for this one alone, and rely on all earlier ones to have finished as well.
  wait_for_previous_launch();
}

__global__ void count_sums_kernel(unsigned* first_numbers, int num_tokens, unsigned num_sums) {
  const auto token = static_cast<int>(threadIdx.x);
  if (token < num_tokens) {
    first_numbers[token] += num_sums;
  }
}

}  // namespace

void add_pushed(Precision precision, const PushedSum& sum, int num_tokens, const Residual& residual,
                cudaStream_t stream) {
  COMMON_CHECK(num_tokens > 0 && num_tokens <= kMaxPushedTokens, "sums are pushed for a few tokens");
  COMMON_CHECK(residual.num_cols % kSquaresColumns == 0, "columns are added in pairs");
  const int pairs = residual.num_cols / 2;
  const dim3 grid(static_cast<unsigned>((pairs + kThreads - 1) / kThreads), static_cast<unsigned>(num_tokens));
  with_scalar(precision, [&]<typename Scalar>(Scalar) {
    const auto kernel = residual.squares_columns == kSquaresColumns ? add_pushed_kernel<Scalar, kSquaresColumns>
                                                                    : add_pushed_kernel<Scalar, kTileSquaresColumns>;
    launch(kernel, grid, kThreads, 0, stream, Overlap::kPreviousWithoutL1, sum, residual);
  });
}

void count_sums(unsigned* first_numbers, int num_tokens, unsigned num_sums, cudaStream_t stream) {
  COMMON_CHECK(num_tokens > 0 && num_tokens <= kMaxPushedTokens, "sums are pushed for a few tokens");
  COMMON_CHECK(num_sums % 2 == 0, "even and odd sums take turns in every row");
  launch(count_sums_kernel, dim3(1), kMaxPushedTokens, 0, stream, Overlap::kNone, first_numbers, num_tokens, num_sums);
}

}  // namespace common
