// The host blocks of a runner on a GPU, without one: streams of the executor work as late as they may, and in any order
// that events allow, while other pieces of memory are pinned. Steps are copies here, into some blocks and out of
// others.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/base/check.h"
#include "common/cuda/executor/runtime_api.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "common/math/sampling.h"
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

// Pages and host blocks whose elements are numbers: one number for all of a block. What is enqueued is noted as what it
// would be if everything was done at once.
class Device {
 public:
  explicit Device(unsigned seed) : random_(seed), is_shuffled_(seed), blocks_(kShape, kNumLayers, kNumHostBlocks) {
    blocks_.allocate(0);
    blocks_.before_step(steps_);
    for (int block = 0; block < kNumBlocks; ++block) {
      used_.insert(block);
      write(block);
    }
  }

  // Some blocks are written, and some are read.
  void step() {
    blocks_.before_step(steps_);
    used_.clear();
    for (int left = between(1, 3); left > 0; --left) {
      const int block = between(0, kNumBlocks - 1);
      used_.insert(block);
      read(block);
      if (between(0, 1) == 0) {
        write(block);
      }
    }
  }

  void copy_some() {
    std::vector<stage::BlockCopy> copies;
    for (int left = between(1, 4); left > 0; --left) {
      const int block = between(0, kNumBlocks - 1);
      const int host_block = kNumBlocks + between(0, blocks_.num_allocated() - 1);
      const bool is_out = !numbers_.contains(host_block) || between(0, 1) == 0;
      copies.push_back(is_out ? stage::BlockCopy{block, host_block} : stage::BlockCopy{host_block, block});
      numbers_[copies.back().destination] = numbers_.at(copies.back().source);
    }
    for (std::span<const stage::BlockCopy> rest = copies; !rest.empty();) {
      const std::span<const stage::BlockCopy> independent = stage::independent_copies(rest);
      std::vector<stage::BlockCopy> beside;
      std::vector<stage::BlockCopy> behind;
      for (const stage::BlockCopy& copy : independent) {
        (used_.contains(std::min(copy.source, copy.destination)) ? behind : beside).push_back(copy);
      }
      if (!beside.empty()) {
        blocks_.copy_beside(pages(), beside, steps_);
      }
      for (const stage::BlockCopy& copy : behind) {
        blocks_.copy(pages(), copy, steps_);
      }
      if (!behind.empty()) {
        blocks_.before_step(steps_);
      }
      num_beside += static_cast<int>(beside.size());
      num_behind += static_cast<int>(behind.size());
      rest = rest.subspan(independent.size());
    }
  }

  void wait() { steps_.synchronize(); }

  // The first thing that was read, or is in a block, and is wrong.
  std::string problem() {
    for (const auto& [block, number] : numbers_) {
      if (block >= kNumBlocks) {
        blocks_.copy(pages(), {block, 0}, steps_);
      }
      read(block < kNumBlocks ? block : 0, number);
    }
    wait();
    for (const Reading& reading : readings_) {
      for (const float element : reading.elements) {
        if (element != reading.expected) {
          return std::to_string(element) + ", expected " + std::to_string(reading.expected);
        }
      }
    }
    return "";
  }

  int num_beside = 0;
  int num_behind = 0;

 private:
  struct Shuffled {
    explicit Shuffled(unsigned seed) { common::executor::shuffle_streams(seed); }
    ~Shuffled() { common::executor::shuffle_streams(0); }
    Shuffled(const Shuffled&) = delete;
    Shuffled& operator=(const Shuffled&) = delete;
  };
  struct Reading {
    float expected = 0.0F;
    std::array<float, 2 * kNumLayers* kElements> elements = {};
  };

  int between(int least, int most) {
    return least + static_cast<int>(random_.below(static_cast<std::uint64_t>(most - least + 1)));
  }
  common::Pages pages() const { return {keys_.data(), values_.data(), kShape}; }

  template <typename Copy>
  void each_part(int block, const Copy& copy) {
    for (int layer = 0; layer < kNumLayers; ++layer) {
      const auto offset = static_cast<std::ptrdiff_t>((layer * kNumBlocks + block) * kElements);
      copy(keys_.data() + offset, std::ptrdiff_t{2 * layer} * kElements);
      copy(values_.data() + offset, std::ptrdiff_t{2 * layer + 1} * kElements);
    }
  }
  void write(int block) {
    number_ += 1.0F;
    numbers_[block] = number_;
    const std::vector<float>& source = sources_.emplace_back(kElements, number_);
    each_part(block, [&](float* part, std::ptrdiff_t /*place*/) {
      (void)cudaMemcpyAsync(part, source.data(), kElements * sizeof(float), cudaMemcpyHostToDevice, steps_.get());
    });
  }
  void read(int block) { read(block, numbers_.at(block)); }
  void read(int block, float expected) {
    Reading& reading = readings_.emplace_back(Reading{expected});
    each_part(block, [&](const float* part, std::ptrdiff_t place) {
      (void)cudaMemcpyAsync(reading.elements.data() + place, part, kElements * sizeof(float), cudaMemcpyDeviceToHost,
                            steps_.get());
    });
  }

  common::Random random_;
  Shuffled is_shuffled_;
  common::Stream steps_;
  common::DeviceArray<float> keys_ = common::DeviceArray<float>(kNumLayers * kNumBlocks * kElements);
  common::DeviceArray<float> values_ = common::DeviceArray<float>(kNumLayers * kNumBlocks * kElements);
  stage::PinnedBlocks blocks_;
  std::map<int, float> numbers_;  // of each block that has contents
  float number_ = 0.0F;
  std::set<int> used_;  // by the last step
  std::deque<std::vector<float>> sources_;
  std::deque<Reading> readings_;
};

}  // namespace

TEST_CASE("pinned blocks: what is copied beside a step is what an ordered device would copy, in any order of streams") {
  const Pieces pieces;
  int num_beside = 0;
  int num_behind = 0;
  for (unsigned seed = 1; seed <= 300; ++seed) {
    Device device(seed);
    for (int i = 0; i < 40; ++i) {
      if (i % 3 == 2) {
        device.copy_some();
      }
      device.copy_some();
      device.step();
      if (i % 5 == 4) {
        device.wait();
      }
    }
    CAPTURE(seed);
    CHECK(device.problem() == "");
    num_beside += device.num_beside;
    num_behind += device.num_behind;
  }
  CHECK(num_beside > 5000);
  CHECK(num_behind > 5000);
}

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
  blocks.copy({keys.data(), values.data(), kShape}, {1, kNumBlocks + 4}, steps);
  CHECK(blocks.num_allocated() == 3 * kPieceBlocks);
  CHECK_THROWS(blocks.copy({keys.data(), values.data(), kShape}, {1, kNumBlocks + kNumHostBlocks}, steps));
}
