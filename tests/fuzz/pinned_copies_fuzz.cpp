// Copies between a GPU's pages and the host, without a GPU: random sequences in a small pool with a second tier, whose
// runner keeps its host blocks on the executor. Its streams work as late as they may, and in any order that events
// allow, so that a copy which does not wait for what it must is wrong sooner or later. Some copies fail. A step
// computes nothing: it writes a number to the slot of each new token, one for each text up to this token, and reads
// those of the whole text. Every case is a function of its seed, which a failure prints:
//
//   build/tests/pinned_copies_fuzz_stage8 --cases 300 --seed 1
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/text.h"
#include "common/cuda/executor/runtime_api.h"
#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/support/random.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(batch.h)
#include STAGE_HEADER(production/host_cache/host_blocks.h)
#include STAGE_HEADER(production/host_cache/host_cache.h)
#include STAGE_HEADER(production/host_cache/host_cache_runner.h)
#include STAGE_HEADER(production/pinned_blocks.h)
// clang-format on

namespace {

using common::Random;
using stage::BlockCopy;
using tests::between;
using tests::FuzzCounts;
using tests::FuzzFailure;
using Tokens = std::vector<common::Token>;
using Texts = std::map<stage::SequenceId, Tokens>;

constexpr int kDefaultCases = tests::kSanitized ? 60 : 600;
constexpr int kNumSteps = 30;

constexpr int kNumBlocks = 8;
constexpr int kNumSwapBlocks = 4;
constexpr int kNumTierBlocks = 6;
constexpr int kNumHostBlocks = kNumSwapBlocks + kNumTierBlocks;
constexpr int kBlockSize = 2;
constexpr int kHeadDim = 4;
constexpr int kNumLayers = 2;
constexpr int kNumParts = 2 * kNumLayers;  // K and V of each layer
constexpr common::PageShape kShape{kNumBlocks, 1, kBlockSize, kHeadDim, common::ScalarType::kFloat32};
constexpr int kElements = kBlockSize * kHeadDim;  // of a block, in each part

// The copy between device and host with this number fails; 0: none does.
int until_fault = 0;

void fail_a_copy(const char* call) {
  if (std::string_view(call).starts_with("cudaMemcpy2DAsync(to.first") && until_fault > 0 && --until_fault == 0) {
    throw common::CudaError("a fault in a copy");
  }
}

// Streams that are created while it lives are shuffled.
struct ShuffledStreams {
  explicit ShuffledStreams(Random& random) {
    common::executor::shuffle_streams(static_cast<unsigned>(random.below(1U << 30U)) + 1);
  }
  ~ShuffledStreams() { common::executor::shuffle_streams(0); }
  ShuffledStreams(const ShuffledStreams&) = delete;
  ShuffledStreams& operator=(const ShuffledStreams&) = delete;
};

class Device : public stage::Runner, public stage::HostBlocks {
 public:
  // The texts of the sequences that a step computes. num_there: of the host blocks, at first.
  Device(const Texts& texts, int num_there) : texts_(texts), num_there_(num_there) { blocks_.allocate(kNumHostBlocks); }
  ~Device() override { steps_.synchronize(); }  // what is enqueued writes to this object
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const stage::CacheSize& cache() const override { return size_; }
  bool is_asynchronous() const override { return true; }
  void copy_blocks(std::span<const BlockCopy> copies) override {
    num_behind += static_cast<int>(copies.size());
    blocks_.copy_behind(pages(), copies, steps_, [&](std::span<const BlockCopy> inside) {
      for (const BlockCopy& copy : inside) {
        for (int part = 0; part < kNumParts; ++part) {
          enqueue_copy(place(part, copy.destination), place(part, copy.source), kElements);
        }
      }
      num_inside += static_cast<int>(inside.size());
    });
  }
  void copy_beside(std::span<const BlockCopy> copies) override {
    num_beside += static_cast<int>(copies.size());
    blocks_.copy_beside(pages(), copies, steps_);
  }
  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    blocks_.before_step(steps_);
    for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
      const Tokens& text = texts_.at(batch.sequences[i]);
      const int length = batch.context_lengths[i];
      for (int position = 0; position < length; ++position) {
        const float number = number_of(std::span(text).first(static_cast<std::size_t>(position) + 1));
        const int block = batch.block_table(i)[static_cast<std::size_t>(position / kBlockSize)];
        if (position >= length - batch.num_queries(i)) {
          write(block, position % kBlockSize, number);
        }
        read(block, position % kBlockSize, number);
      }
    }
    return {++last_};
  }
  stage::StepResult wait(stage::StepId /*step*/) override {
    steps_.synchronize();
    return {};
  }

  // All are allocated, so that a case is a function of its seed; the engine hears of some of them later.
  void allocate(int /*count*/) override {}
  int num_allocated() const override { return num_there_; }
  std::string why_no_more() const override { return {}; }
  void grow() { num_there_ = std::min(num_there_ + 1, kNumHostBlocks); }

  // Throws FuzzFailure if a step has read what is not its text's.
  void check() {
    steps_.synchronize();
    for (const Reading& reading : readings_) {
      for (int i = 0; i < kNumParts * kHeadDim; ++i) {
        const float expected = element(reading.number, i / kHeadDim);
        if (const float actual = reading.elements.at(static_cast<std::size_t>(i)); actual != expected) {
          throw FuzzFailure(common::format("step %llu read %g, expected %g",
                                           static_cast<unsigned long long>(reading.step), actual, expected));
        }
      }
    }
    readings_.clear();
  }

  int num_beside = 0;  // copies
  int num_behind = 0;  // copies, here with those inside the pages
  int num_inside = 0;

 private:
  struct Reading {
    std::uint64_t step = 0;
    float number = 0.0F;
    std::array<float, std::size_t{kNumParts}* kHeadDim> elements = {};
  };

  static float element(float number, int part) { return number * kNumParts + static_cast<float>(part); }
  common::Pages pages() const { return {keys_.data(), values_.data(), kShape}; }
  float number_of(std::span<const common::Token> text) {
    return numbers_.try_emplace(Tokens(text.begin(), text.end()), static_cast<float>(numbers_.size()) + 1.0F)
        .first->second;
  }
  float* place(int part, int block, int row = 0) const {
    return (part % 2 == 0 ? keys_ : values_).data() + std::ptrdiff_t{part / 2 * kNumBlocks + block} * kElements +
           std::ptrdiff_t{row} * kHeadDim;
  }
  void enqueue_copy(float* to, const float* from, int count) {
    CUDA_CHECK(
        cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof(float), cudaMemcpyDefault, steps_.get()));
  }
  void write(int block, int row, float number) {
    for (int part = 0; part < kNumParts; ++part) {
      std::array<float, kHeadDim>& source = sources_.emplace_back();
      source.fill(element(number, part));
      enqueue_copy(place(part, block, row), source.data(), kHeadDim);
    }
  }
  void read(int block, int row, float number) {
    Reading& reading = readings_.emplace_back(Reading{last_ + 1, number});
    for (int part = 0; part < kNumParts; ++part) {
      enqueue_copy(reading.elements.data() + std::ptrdiff_t{part} * kHeadDim, place(part, block, row), kHeadDim);
    }
  }

  const Texts& texts_;
  int num_there_;
  stage::CacheSize size_ = {.num_blocks = kNumBlocks, .block_size = kBlockSize, .num_host_blocks = kNumHostBlocks};
  std::uint64_t last_ = 0;
  common::Stream steps_;
  common::DeviceArray<float> keys_ = common::DeviceArray<float>(std::size_t{kNumLayers} * kNumBlocks * kElements);
  common::DeviceArray<float> values_ = common::DeviceArray<float>(std::size_t{kNumLayers} * kNumBlocks * kElements);
  stage::PinnedBlocks blocks_ = stage::PinnedBlocks(kShape, kNumLayers, kNumHostBlocks);
  std::map<Tokens, float> numbers_;
  std::deque<std::array<float, kHeadDim>> sources_;
  std::deque<Reading> readings_;
};

// What an engine does with manager, tier and runner, without its requests.
class Case {
 public:
  Case(std::uint64_t seed, FuzzCounts& counts) : random_(seed), counts_(counts) {
    manager_.on_evict([this](int block) { tier_->store(manager_.prefix_cache(), block); });
  }

  void run() {
    for (int step = 0; step < kNumSteps; ++step) {
      tier_->take_over_copies(manager_);
      if (random_.below(4) == 0) {
        device_->grow();
      }
      schedule();
      until_fault = random_.below(8) == 0 ? between(random_, 1, 6) : 0;
      compute();
      until_fault = 0;
      if (random_.below(6) == 0) {
        device_->check();
      }
    }
    device_->check();
    counts_.add("stored", tier_->statistics().stored);
    counts_.add("restored", tier_->statistics().restored);
    counts_.add("beside a step", device_->num_beside);
    counts_.add("behind it", device_->num_behind - device_->num_inside);
    counts_.add("inside", device_->num_inside);
  }

 private:
  void schedule() {
    bool is_preempting = false;  // then the engine's scheduler admits and resumes no request
    for (const stage::SequenceId id : manager_.sequences()) {
      if (random_.below(4) == 0) {
        manager_.free(id);
        texts_.erase(id);
      } else if (random_.below(6) == 0 && manager_.swap_out({&id, 1})) {
        counts_.add("swapped out");
        is_preempting = true;
      }
    }
    for (const auto& [id, text] : texts_) {
      if (!is_preempting && manager_.is_swapped(id) && random_.below(2) == 0) {
        manager_.swap_in({&id, 1});
      }
    }
    for (const stage::SequenceId id : manager_.sequences()) {
      if (random_.below(6) == 0) {
        manager_.fork(id, next_);
        texts_[next_++] = texts_.at(id);
      }
    }
    for (const stage::SequenceId id : manager_.sequences()) {
      const int count = between(random_, 0, 2);
      if (count > 0 && manager_.reserve(id, count)) {
        Tokens& text = texts_.at(id);
        scheduled_.push_back(id);
        text.resize(text.size() + static_cast<std::size_t>(count), between(random_, 1000, 1002));
      }
    }
    if (!is_preempting && random_.below(2) == 0) {
      start();
    }
  }

  // One of a few texts, some of which begin alike.
  void start() {
    const int number = between(random_, 0, 3);
    Tokens text;
    for (int i = between(random_, 0, 8); i >= 0; --i) {
      text.push_back((text.size() < 4 ? number % 2 : number) * 100 + static_cast<int>(text.size()));
    }
    tier_->touch(manager_.prefix_cache(), text, 0);
    if (!manager_.allocate(next_, text)) {
      return;
    }
    const auto found = static_cast<std::size_t>(manager_.length(next_));
    tier_->restore(manager_, next_, std::span(text).subspan(found), 0, {});
    if (!manager_.reserve(next_, static_cast<int>(text.size()) - manager_.length(next_))) {
      throw FuzzFailure("a text that was admitted has no room");
    }
    scheduled_.push_back(next_);
    texts_[next_++] = std::move(text);
  }

  // A step whose copies fail has not begun: it leaves the copies to the next one, as the engine's does.
  void compute() {
    const auto new_tokens = [&](stage::SequenceId id) {
      return std::span(std::as_const(texts_).at(id)).subspan(static_cast<std::size_t>(manager_.length(id)));
    };
    try {
      stage::RaggedBatch batch;
      for (const stage::SequenceId id : scheduled_) {
        batch.add(manager_, id, new_tokens(id), false);
      }
      while (!scheduled_.empty() && !manager_.pending_copies().empty()) {
        const std::span<const BlockCopy> copies = stage::independent_copies(manager_.pending_copies());
        runner_.copy_blocks(copies);
        manager_.clear_pending_copies(copies.size());
      }
      if (!scheduled_.empty()) {
        runner_.enqueue(batch);
      }
      for (const stage::SequenceId id : scheduled_) {
        manager_.commit(id, new_tokens(id));
      }
    } catch (const common::CudaError&) {
      counts_.add("faults");
      for (const stage::SequenceId id : scheduled_) {
        manager_.free(id);
        texts_.erase(id);
      }
    }
    scheduled_.clear();
  }

  Random random_;
  FuzzCounts& counts_;
  ShuffledStreams shuffled_ = ShuffledStreams(random_);
  stage::KvCacheManager manager_ = stage::KvCacheManager(kNumBlocks, kBlockSize, stage::hash_block, kNumSwapBlocks);
  Texts texts_;
  int num_there_ = between(random_, 0, kNumTierBlocks);
  std::shared_ptr<stage::HostCache> tier_ =
      std::make_shared<stage::HostCache>(kNumBlocks + kNumSwapBlocks, kNumTierBlocks, kBlockSize, num_there_);
  Device* device_ = new Device(texts_, kNumSwapBlocks + num_there_);
  stage::HostCacheRunner runner_ = stage::HostCacheRunner(std::unique_ptr<stage::Runner>(device_), tier_);
  stage::SequenceId next_ = 0;
  std::vector<stage::SequenceId> scheduled_;
};

void run_case(std::uint64_t seed, FuzzCounts& counts) { Case(seed, counts).run(); }

}  // namespace

int main(int argc, char** argv) {
  stage::pinned_piece_bytes = 2 * kNumParts * kElements * sizeof(float) + 1;  // two blocks
  common::device_call_hook = fail_a_copy;
  return tests::run_fuzz(
      {argv + 1, argv + argc}, {.unit = "cases", .default_units = kDefaultCases, .rarest = 10},
      FuzzCounts({"stored", "restored", "swapped out", "beside a step", "behind it", "inside", "faults"}), run_case);
}
