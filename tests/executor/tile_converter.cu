#include "tests/executor/tile_converter.h"

#include "common/paged/prefill_float8.cuh"

namespace tests {
namespace {

// What prefill_kernel.cuh's consumers wait for and release, with a copy to global memory in place of the products.
template <int kHeadDim>
struct Consumer {
  using Shape = common::PrefillShape<kHeadDim>;
  static constexpr int kThreads = common::kWarpgroupThreads * Shape::kConsumers;
  static constexpr int kVecs = kHeadDim / 8;

  const LoadedTokens& tokens;
  const int thread = static_cast<int>(threadIdx.x) - common::kWarpgroupThreads;

  __device__ void take(const unsigned char* tile, int first_token, __nv_bfloat16* to, const std::uint64_t& full,
                       const std::uint64_t& empty, int parity) const {
    common::wait_barrier(common::shared_address(&full), parity);
    const int count = min(Shape::kTokens, tokens.num_seen - first_token) * kVecs;
    for (int i = thread; i < count; i += kThreads) {
      const int row = i / kVecs;
      const int vec = i % kVecs;
      const unsigned char* panel = tile + vec / 8 * Shape::kPanelBytes + row * Shape::kRowBytes;
      reinterpret_cast<uint4*>(to + std::int64_t{first_token - tokens.first_token} * kHeadDim)[i] =
          reinterpret_cast<const uint4*>(panel)[vec % 8 ^ row % 8];
    }
    __syncwarp();
    if (thread % 32 == 0) {
      common::arrive(common::shared_address(&empty));
    }
  }
};

template <int kHeadDim>
__device__ void load_tiles(const LoadedTokens& tokens) {
  using Shape = common::PrefillShape<kHeadDim>;
  COURSE_DYNAMIC_SHARED(1024, memory);
  auto& shared = *reinterpret_cast<common::Float8PrefillShared<kHeadDim>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      for (std::uint64_t* full : {&shared.keys_full[i], &shared.values_full[i]}) {
        common::init_barrier(common::shared_address(full), 4);
      }
      for (std::uint64_t* empty : {&shared.keys_empty[i], &shared.values_empty[i]}) {
        common::init_barrier(common::shared_address(empty), 4 * Shape::kConsumers);
      }
    }
    for (auto& of_warp : shared.stored.full) {
      common::init_barrier(common::shared_address(&of_warp[0]), 1);
      common::init_barrier(common::shared_address(&of_warp[1]), 1);
    }
    common::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < common::kWarpgroupThreads) {
    const common::PrefillCall call{.pages = tokens.pages};
    common::TileConverter<kHeadDim, true> converter{call, shared};
    for (int i = 0; i < tokens.times; ++i) {
      converter.load(tokens.table, tokens.kv_head, tokens.first_token + tokens.num_hidden, tokens.num_seen);
    }
    return;
  }
  const Consumer<kHeadDim> consumer{tokens};
  common::RingPosition<Shape::kStages> stage;
  for (int i = 0; i < tokens.times; ++i) {
    for (int tile = (tokens.num_seen - 1) / Shape::kTokens; tile * Shape::kTokens >= tokens.first_token; --tile) {
      consumer.take(shared.keys[stage.place], tile * Shape::kTokens, tokens.keys, shared.keys_full[stage.place],
                    shared.keys_empty[stage.place], stage.parity);
      consumer.take(shared.values[stage.place], tile * Shape::kTokens, tokens.values, shared.values_full[stage.place],
                    shared.values_empty[stage.place], stage.parity);
      stage.advance();
    }
  }
}

}  // namespace

__global__ void load_tiles_64(LoadedTokens tokens) { load_tiles<64>(tokens); }
__global__ void load_tiles_128(LoadedTokens tokens) { load_tiles<128>(tokens); }

std::size_t load_tiles_bytes(int head_dim) {
  return head_dim == 64 ? sizeof(common::Float8PrefillShared<64>) : sizeof(common::Float8PrefillShared<128>);
}

}  // namespace tests
