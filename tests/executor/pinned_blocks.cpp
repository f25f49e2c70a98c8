// How the host blocks of a runner on a GPU are pinned, without one. Their copies are in fuzz/pinned_copies_fuzz.cpp.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <string_view>
#include <thread>

#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "tests/support/catch.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(block_copy.h)
#include STAGE_HEADER(production/pinned_blocks.h)
// clang-format on

namespace {

constexpr int kNumBlocks = 6;
constexpr int kNumHostBlocks = 9;
constexpr int kNumLayers = 3;
constexpr int kPieceBlocks = 2;

// In a block, each layer's K and V have this many elements.
const common::PageShape kShape{kNumBlocks, 1, 2, 4, common::ScalarType::kFloat32};
constexpr int kElements = 8;
constexpr std::size_t kBlockBytes = std::size_t{2} * kNumLayers * kElements * sizeof(float);

// While it lives, pieces have room for kPieceBlocks blocks, and device calls go through the hook.
class Pieces {
 public:
  explicit Pieces(common::DeviceCallHook hook = nullptr) {
    stage::pinned_piece_bytes = kPieceBlocks * kBlockBytes + 1;
    common::device_call_hook = hook;
  }
  ~Pieces() {
    common::device_call_hook = nullptr;
    stage::pinned_piece_bytes = before_;
  }
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

 private:
  std::size_t before_ = stage::pinned_piece_bytes;
};

std::atomic<int> pieces_until_none = 0;

bool is_pinning(const char* call) { return std::string_view(call) == "cudaHostAlloc"; }

// A piece has K and V.
void fail_to_pin(const char* call) {
  if (is_pinning(call) && pieces_until_none.fetch_sub(1) <= 0) {
    throw common::OutOfPinnedMemory("no more memory");
  }
}

void pin_slowly(const char* call) {
  if (is_pinning(call)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

int wait_for_all(const stage::PinnedBlocks& blocks, int count) {
  for (int left = 2000; blocks.num_allocated() < count && blocks.why_no_more().empty() && left > 0; --left) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return blocks.num_allocated();
}

}  // namespace

TEST_CASE("pinned blocks: those asked for are there at once, and the others come") {
  const Pieces pieces(pin_slowly);
  stage::PinnedBlocks blocks(kShape, kNumLayers, kNumHostBlocks);
  CHECK(blocks.num_allocated() == 0);
  blocks.allocate(3);
  CHECK(blocks.num_allocated() >= 4);  // whole pieces
  CHECK(wait_for_all(blocks, kNumHostBlocks) == kNumHostBlocks);
  CHECK(blocks.why_no_more().empty());
}

TEST_CASE("pinned blocks: a piece that cannot be pinned is an error if it was asked for, and else the end") {
  const Pieces pieces(fail_to_pin);
  pieces_until_none = 3;
  {
    stage::PinnedBlocks blocks(kShape, kNumLayers, kNumHostBlocks);
    CHECK_THROWS_AS(blocks.allocate(3), common::InputError);
  }
  pieces_until_none = 6;
  stage::PinnedBlocks blocks(kShape, kNumLayers, kNumHostBlocks);
  blocks.allocate(1);
  CHECK(wait_for_all(blocks, kNumHostBlocks) == 3 * kPieceBlocks);
  CHECK(blocks.why_no_more() == "the host's memory for K and V stays at 1.12 KiB of 1.69 KiB: no more memory");
}

TEST_CASE("pinned blocks: the end does not wait until all are there") {
  const Pieces pieces(pin_slowly);
  const auto begin = std::chrono::steady_clock::now();
  {
    stage::PinnedBlocks blocks(kShape, kNumLayers, 20000);  // 10 ms for each piece
    blocks.allocate(0);
    CHECK(blocks.num_allocated() < 20000);
  }
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

TEST_CASE("pinned blocks: without allocate(), a block comes when it is first copied") {
  const Pieces pieces;
  stage::PinnedBlocks blocks(kShape, kNumLayers, kNumHostBlocks);
  const common::DeviceArray<float> keys(kNumLayers * kNumBlocks * kElements);
  const common::DeviceArray<float> values(kNumLayers * kNumBlocks * kElements);
  const common::Stream steps;
  const auto copy_to = [&](int block) {
    const stage::BlockCopy copy{1, block};
    blocks.copy_behind({keys.data(), values.data(), kShape}, {&copy, 1}, steps, [](const auto& /*inside*/) {});
  };
  copy_to(kNumBlocks + 4);
  CHECK(blocks.num_allocated() == 3 * kPieceBlocks);
  CHECK_THROWS(copy_to(kNumBlocks + kNumHostBlocks));
}
