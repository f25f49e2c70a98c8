// The pages of layers with a window on a GPU, without one: streams of the executor work as late as they may. Attention
// is a function here that stores a number for each token and layer, and looks every number up that a query sees.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/text.h"
#include "common/cuda/executor/runtime_api.h"
#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/support/catch.h"
#include "tests/support/random.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(batch.h)
#include STAGE_HEADER(production/host_cache/host_cache.h)
#include STAGE_HEADER(production/local_pages.h)
// clang-format on

using tests::between;

namespace {

const std::string kNoProblem;
constexpr int kBlockSize = 4;
constexpr int kNumLayers = 5;
constexpr int kPeriod = 3;         // layer 2 sees all
constexpr int kRunnerBlocks = 30;  // in each layer
constexpr int kNumBlocks = 50;     // of layer 2
constexpr int kNumParts = 18;
constexpr int kNumSwapBlocks = 30;
constexpr int kNumTierBlocks = 40;
constexpr int kMaxTokens = 64;
constexpr std::size_t kMaxTableBlocks = 300;
static_assert(kNumBlocks + (kNumLayers - 1) * kNumParts <= kNumLayers * kRunnerBlocks);

common::LlamaConfig config_with(int window) {
  common::LlamaConfig config;
  config.num_layers = kNumLayers;
  config.context_length = 1000;
  config.window = window;
  config.global_period = kPeriod;
  return config;
}

common::PageShape shape_of(int num_blocks) { return {num_blocks, 1, kBlockSize, 8, common::ScalarType::kFloat32}; }

float number_of(common::Token token, int layer) { return static_cast<float>(token * kNumLayers + layer + 1); }

// What a step's sequences are, for what stands in for attention.
struct Sequences {
  std::vector<std::vector<common::Token>> texts;  // with the new tokens
  std::vector<int> num_queries;
};

class NumberKernels final : public common::PagedKernels {
 public:
  explicit NumberKernels(bool has_windows = true) : has_windows_(has_windows) {}

  // The next calls of attend(): layer after layer.
  void begin(Sequences sequences) const {
    sequences_ = std::make_shared<Sequences>(std::move(sequences));
    layer_ = 0;
  }
  // What was wrong in the steps that have been computed.
  const std::string& problem() const { return problem_; }
  const std::vector<int>& windows() const { return windows_; }  // of the last step's layers

  bool has_windows() const override { return has_windows_; }
  std::string unsupported(const common::PageShape& /*shape*/, int /*num_heads*/) const override { return ""; }
  void write_to_slots(const common::Pages& /*pages*/, const void* /*keys*/, const void* /*values*/,
                      std::int64_t /*row_stride*/, const int* /*slot_mapping*/, int /*num_tokens*/,
                      cudaStream_t /*stream*/) const override {}
  void read_from_slots(const common::Pages& /*pages*/, void* /*keys*/, void* /*values*/, std::int64_t /*row_stride*/,
                       const int* /*slot_mapping*/, int /*num_tokens*/, cudaStream_t /*stream*/) const override {}
  void copy_blocks(void* keys, void* values, int num_layers, const common::PageShape& shape,
                   const common::PageCopy* copies, int num_copies, cudaStream_t stream) const override {
    const std::vector<common::PageCopy> list(copies, copies + num_copies);
    CUDA_CHECK(common::executor::enqueue(stream, [=] {
      for (void* const memory : {keys, values}) {
        for (int layer = 0; layer < num_layers; ++layer) {
          auto* const pages = static_cast<std::byte*>(memory) + layer * shape.keys_bytes();
          const std::size_t bytes = shape.keys_bytes() / static_cast<std::size_t>(shape.num_blocks);
          for (const auto& [source, destination] : list) {
            std::copy_n(pages + static_cast<std::size_t>(source) * bytes, bytes,
                        pages + static_cast<std::size_t>(destination) * bytes);
          }
        }
      }
    }));
  }
  std::size_t workspace_bytes(const common::PageShape& /*shape*/, const common::StepArrays& largest) const override {
    return largest.batch.window > 0 ? 700 : 300;
  }
  void plan(const common::PageShape& shape, const common::StepArrays& step, std::span<std::byte> workspace,
            cudaStream_t /*stream*/) const override {
    CHECK(workspace.size() >= workspace_bytes(shape, step));
    plans_[workspace.data()] = {step.batch.window, shape.num_blocks};
  }
  void attend(const common::Pages& pages, const common::StepArrays& step, const common::LayerRows& /*rows*/,
              void* /*output*/, std::span<std::byte> workspace, cudaStream_t stream) const override {
    // Each layer has the plan that was made for its window and its pages.
    CHECK(plans_.at(workspace.data()) == std::pair(step.batch.window, pages.shape.num_blocks));
    windows_.resize(static_cast<std::size_t>(layer_));
    windows_.push_back(step.batch.window);
    CUDA_CHECK(common::executor::enqueue(stream, [this, pages, step, sequences = sequences_, layer = layer_] {
      compute(pages, step, *sequences, layer);
    }));
    layer_ += 1;
  }

 private:
  void compute(const common::Pages& pages, const common::StepArrays& step, const Sequences& sequences,
               int layer) const {
    auto* const keys = static_cast<float*>(pages.keys);
    auto* const values = static_cast<float*>(pages.values);
    const std::int64_t num_slots = pages.shape.num_blocks * kBlockSize;
    int row = 0;
    for (std::size_t s = 0; s < sequences.texts.size(); ++s) {
      const auto length = static_cast<int>(sequences.texts[s].size());
      for (int position = length - sequences.num_queries[s]; position < length; ++position) {
        const std::int64_t slot = step.slot_mapping[row++];
        if (slot < 0 || slot >= num_slots) {
          report(common::format("layer %d: slot %td", layer, static_cast<std::ptrdiff_t>(slot)));
          return;
        }
        const float number = number_of(sequences.texts[s][static_cast<std::size_t>(position)], layer);
        std::fill_n(keys + slot * 8, 8, number);
        std::fill_n(values + slot * 8, 8, -number);
      }
    }
    for (; row < step.num_tokens; ++row) {
      if (step.slot_mapping[row] != -1) {
        report("an inactive sequence stores something");
      }
    }
    for (std::size_t s = 0; s < sequences.texts.size(); ++s) {
      const auto length = static_cast<int>(sequences.texts[s].size());
      const int window = step.batch.window > 0 ? step.batch.window : length;
      const int* const table = step.batch.block_tables + step.batch.table_starts[s];
      for (int position = std::max(0, length - sequences.num_queries[s] + 1 - window); position < length; ++position) {
        const std::int64_t block = table[position / kBlockSize];
        const float expected = number_of(sequences.texts[s][static_cast<std::size_t>(position)], layer);
        const std::int64_t element = (block * kBlockSize + position % kBlockSize) * 8;
        if (block < 0 || block >= pages.shape.num_blocks || keys[element + 7] != expected ||
            values[element] != -expected) {
          report(common::format("layer %d, sequence %zu of %d tokens, position %d: block %td has %g, expected %g",
                                layer, s, length, position, static_cast<std::ptrdiff_t>(block),
                                static_cast<double>(keys[element + 7]), static_cast<double>(expected)));
          return;
        }
      }
    }
  }
  void report(const std::string& problem) const { problem_ = problem_.empty() ? problem : problem_; }

  bool has_windows_;
  mutable std::shared_ptr<Sequences> sequences_;
  mutable int layer_ = 0;
  mutable std::string problem_;
  mutable std::vector<int> windows_;
  mutable std::map<const std::byte*, std::pair<int, std::int64_t>> plans_;  // by where they are
};

// A runner's memory, and the streams of one.
struct Memory {
  explicit Memory(const common::LlamaConfig& config, const NumberKernels& table) : kernels(table, config) {
    const std::size_t size = shape_of(kRunnerBlocks).keys_bytes() / sizeof(float) * kNumLayers;
    keys.assign(size, std::numeric_limits<float>::quiet_NaN());
    values = keys;
    workspace.resize(kernels.workspace_bytes(shape_of(kRunnerBlocks), {}));
  }

  // As GpuRunner::launch().
  void launch(const common::StepArrays& step) {
    const common::PageShape shape = shape_of(kRunnerBlocks);
    kernels.plan(shape, step, workspace, stream.get());
    for (int layer = 0; layer < kNumLayers; ++layer) {
      const std::size_t begin = shape.keys_bytes() / sizeof(float) * static_cast<std::size_t>(layer);
      kernels.attend({keys.data() + begin, values.data() + begin, shape}, step, {}, nullptr, workspace, stream.get());
    }
  }

  stage::LayerKernels kernels;
  std::vector<float> keys;
  std::vector<float> values;
  std::vector<std::byte> workspace;
  common::Stream stream;
};

// The copy between device and host with this number fails; 0: none does.
int until_fault = 0;

void fail_a_copy(const char* call) {
  if (std::string_view(call).starts_with("cudaMemcpy2DAsync(to.first") && until_fault > 0 && --until_fault == 0) {
    throw common::CudaError("a fault in a copy");
  }
}

// An engine's books, and what a runner does with them.
class Engine {
 public:
  // num_tier_blocks: of a second tier of the prefix cache, without which no prompt is found either. fails: some copies
  // do. poisons: parts that no block has are filled with NaN, in front of each step.
  Engine(std::uint64_t seed, int window, int num_tier_blocks, bool fails, bool poisons)
      : random_(seed),
        fails_(fails),
        poisons_(poisons),
        memory_(config_with(window), table_),
        manager_(kNumBlocks, kBlockSize, stage::hash_block, kNumSwapBlocks),
        pool_(std::make_shared<stage::LocalPool>(
            stage::LocalPoolSize{kNumParts, kNumBlocks, kNumSwapBlocks + num_tier_blocks, kBlockSize, window})),
        local_(pool_, shape_of(kNumParts), kNumLayers - 1, kMaxTokens, kMaxTableBlocks),
        host_blocks_(shape_of(kNumBlocks), 1, kNumSwapBlocks + num_tier_blocks) {
    local_.allocate(kNumSwapBlocks + num_tier_blocks);
    host_blocks_.allocate(kNumSwapBlocks + num_tier_blocks);
    memory_.kernels.divide(kNumBlocks, kNumParts);
    if (num_tier_blocks > 0) {
      tier_ = std::make_shared<stage::HostCache>(kNumBlocks + kNumSwapBlocks, num_tier_blocks, kBlockSize);
      pool_->attach(tier_);
      REQUIRE(manager_.allocate(-1, 28 * kBlockSize));  // so that cached blocks are evicted while they have parts
      manager_.on_evict([this](int block) {             // as LocalPoolScheduler
        tier_->store(manager_.prefix_cache(), block, [&](int host_block) {
          return pool_->will_have_part(manager_, block) && !pool_->will_have_part(manager_, host_block);
        });
      });
    }
  }

  void step() {
    pool_->begin_step(manager_);
    if (tier_ != nullptr) {
      tier_->take_over_copies(manager_);
    }
    is_preempting_ = false;
    change();
    for (int left = tier_ != nullptr && !is_preempting_ ? between(random_, 0, 2) : 0; left > 0; --left) {
      start();
    }
    std::vector<std::pair<int, int>> work;  // sequences, and how many tokens they compute
    for (const auto& [sequence, text] : texts_) {
      if (const int count = between(random_, 0, 6);
          count > 0 && !manager_.is_swapped(sequence) && static_cast<int>(work.size()) < 5) {
        if (static_cast<int>(work.size()) == 0 || has_room(count)) {
          if (manager_.reserve(sequence, count)) {
            work.emplace_back(sequence, count);
          }
        }
      }
    }
    while (pool_->num_needed(manager_) > kNumParts) {  // as a scheduler would preempt
      const int last = texts_.rbegin()->first;
      std::erase_if(work, [&](const auto& item) { return item.first == last; });
      manager_.free(last);
      texts_.erase(last);
    }
    pool_->end_step(manager_);
    most_held = std::max(most_held, pool_->num_held());
    until_fault = fails_ && random_.below(8) == 0 ? between(random_, 1, 12) : 0;
    try {
      copy();
      until_fault = 0;
      if (!work.empty()) {
        launch(work);
      }
    } catch (const common::CudaError&) {  // the copies are left to the next step
      num_faults += 1;
      for (const auto& [sequence, count] : work) {
        manager_.free(sequence);
        texts_.erase(sequence);
      }
    }
    until_fault = 0;
    if (random_.below(4) == 0) {
      memory_.stream.synchronize();
    }
  }

  void finish() { memory_.stream.synchronize(); }
  std::string problem() const { return table_.problem(); }
  const NumberKernels& table() const { return table_; }

  int num_swapped = 0;
  int num_copies = 0;
  int most_held = 0;
  int num_faults = 0;
  std::int64_t num_evicted() const { return pool_->num_evicted(); }
  std::int64_t num_restored() const { return tier_ != nullptr ? tier_->statistics().restored : 0; }

 private:
  bool has_room(int num_tokens) { return pool_->num_needed(manager_) + num_tokens / kBlockSize + 2 <= kNumParts; }

  // A sequence begins, is forked, ends, or is swapped out or in.
  void change() {
    const auto some = [&] {
      return std::next(texts_.begin(), between(random_, 0, static_cast<int>(texts_.size()) - 1))->first;
    };
    if (tier_ != nullptr) {
      std::erase_if(texts_, [&](const auto& item) {  // what goes on behind its prompt soon ends
        const bool ends = item.second.size() > prompts_[item.first].size() && !manager_.is_swapped(item.first) &&
                          random_.below(3) == 0;
        if (ends) {
          manager_.free(item.first);
        }
        return ends;
      });
    }
    const int kind = between(random_, 0, 6);
    if (texts_.empty() || (kind == 0 && texts_.size() < 6)) {
      if (has_room(0) && manager_.allocate(next_, std::vector<common::Token>(1, 0), 0, {.use_prefix_cache = false})) {
        texts_[next_++] = {};
      }
    } else if (kind == 1 && texts_.size() < 6 && !manager_.is_swapped(some())) {
      const int parent = some();
      if (!manager_.is_swapped(parent)) {
        manager_.fork(parent, next_);
        texts_[next_++] = texts_[parent];
      }
    } else if (kind == 2 && texts_.size() > 2) {
      const int sequence = some();
      if (!manager_.is_swapped(sequence)) {
        manager_.free(sequence);
        texts_.erase(sequence);
      }
    } else if (kind >= 4) {
      const std::vector<int> one = {some()};
      if (manager_.is_swapped(one.front())) {
        num_swapped += has_room(20) && manager_.swap_in(one) ? 1 : 0;
      } else {
        is_preempting_ = manager_.swap_out(one);
      }
    }
  }

  // One of a few prompts, which begins with the blocks that either tier has; as LocalPoolScheduler.
  void start() {
    std::vector<common::Token> text;
    const int number = between(random_, 0, 5);
    for (int i = between(random_, 1, 40); i > 0; --i) {
      text.push_back((text.size() < 8 ? number % 2 : number) * 100 + static_cast<int>(text.size()));
    }
    if (texts_.size() >= 6 || !has_room(static_cast<int>(text.size()))) {
      return;
    }
    const stage::PrefixCache& cache = manager_.prefix_cache();
    const std::vector<int> hits = cache.find(std::span(text).first(text.size() - 1), 0);
    const std::size_t num_found = hits.size() * kBlockSize;
    const std::span<const common::Token> rest = std::span(text).subspan(num_found);
    const auto num_usable = [&](std::span<const int> found) {
      std::vector<int> blocks(hits.begin(), hits.end());
      blocks.insert(blocks.end(), found.begin(), found.end());
      const std::size_t num_shared = pool_->share_parts(manager_, blocks);
      return num_shared - std::min(num_shared, hits.size());
    };
    tier_->touch(cache, text, 0);
    const bool comes_back =
        num_usable(tier_->find(hits.empty() ? 0 : cache.entry(hits.back()).text, rest.first(rest.size() - 1), 0)) > 0;
    const bool uses_cache = comes_back || pool_->share_parts(manager_, hits) == hits.size();
    if (!manager_.allocate(next_, text, 0, {.max_tokens = 1, .use_prefix_cache = uses_cache})) {
      return;
    }
    if (comes_back) {
      tier_->restore(manager_, next_, rest, 0, {}, num_usable);
      if (manager_.length(next_) == static_cast<int>(num_found)) {  // and these blocks may lack parts
        manager_.free(next_);
        return;
      }
    }
    texts_[next_] = {text.begin(), text.begin() + manager_.length(next_)};
    prompts_[next_++] = std::move(text);
  }

  void copy() {
    const auto copy_some = [&](std::span<const stage::BlockCopy> copies) {
      host_blocks_.copy_behind(
          memory_.kernels.pages_of(false), copies, memory_.stream,
          [&](std::span<const stage::BlockCopy> inside) { memory_.kernels.copy(false, inside, memory_.stream.get()); });
      num_copies += static_cast<int>(copies.size());
      return copies.size();
    };
    while (tier_ != nullptr && !tier_->pending_copies().empty()) {
      tier_->clear_pending_copies(copy_some(stage::independent_copies(tier_->pending_copies())));
    }
    while (!manager_.pending_copies().empty()) {
      manager_.clear_pending_copies(copy_some(stage::independent_copies(manager_.pending_copies())));
    }
    local_.copy_planned(memory_.kernels, memory_.stream);
  }

  void poison(int part) {
    const common::Pages first = memory_.kernels.pages_of(true);
    const std::size_t bytes = first.shape.keys_bytes() / kNumParts;
    for (std::size_t layer = 0; layer + 1 < kNumLayers; ++layer) {
      const std::size_t begin = layer * first.shape.keys_bytes() + static_cast<std::size_t>(part) * bytes;
      for (void* const memory : {first.keys, first.values}) {
        CUDA_CHECK(cudaMemsetAsync(static_cast<std::byte*>(memory) + begin, 0xFF, bytes, memory_.stream.get()));
      }
    }
  }

  void launch(const std::vector<std::pair<int, int>>& work) {
    Sequences sequences;
    stage::RaggedBatch& batch = batches_.emplace_back();  // the device reads it later
    for (const auto& [sequence, count] : work) {
      std::vector<common::Token>& text = texts_[sequence];
      const std::vector<common::Token>& prompt = prompts_[sequence];
      for (int i = 0; i < count; ++i) {
        text.push_back(text.size() < prompt.size() ? prompt[text.size()] : between(random_, 600, 2000));
      }
      batch.add(manager_, sequence, std::span(text).last(static_cast<std::size_t>(count)), true);
      sequences.texts.push_back(text);
      sequences.num_queries.push_back(count);
    }
    const int num_tokens = batch.num_tokens() + between(random_, 0, 3);
    batch.slot_mapping.resize(static_cast<std::size_t>(num_tokens), -1);  // of inactive sequences
    num_steps_ += 1;
    const std::size_t which = num_steps_ % 2;
    stage::RaggedBatch own = batch;
    own.slot_mapping.resize(static_cast<std::size_t>(batch.num_tokens()));
    for (int part = 0; poisons_ && has_launched_ && part < kNumParts; ++part) {  // behind copies, which may read them
      if (pool_->is_free(part)) {
        poison(part);
      }
    }
    local_.upload(which, own, num_tokens, memory_.stream);
    table_.begin(std::move(sequences));
    memory_.kernels.use_parts(local_.block_tables(which), local_.slot_mapping(which));
    memory_.launch({.batch = {.num_sequences = static_cast<int>(work.size()),
                              .num_heads = 1,
                              .context_lengths = batch.context_lengths.data(),
                              .block_tables = batch.block_tables.data(),
                              .table_starts = batch.table_starts.data(),
                              .max_blocks_per_sequence = kNumBlocks},
                    .num_tokens = num_tokens,
                    .query_starts = batch.query_starts.data(),
                    .slot_mapping = batch.slot_mapping.data()});
    local_.end(which, memory_.stream);
    has_launched_ = true;
    for (const auto& [sequence, count] : work) {
      if (tier_ == nullptr) {
        manager_.commit(sequence, count);
      } else {  // and its full blocks are published
        manager_.commit(sequence, std::span(std::as_const(texts_[sequence])).last(static_cast<std::size_t>(count)));
      }
    }
  }

  common::Random random_;
  bool fails_;
  bool poisons_;
  bool is_preempting_ = false;  // then the engine's scheduler admits and resumes no request in this step
  NumberKernels table_;
  Memory memory_;
  stage::KvCacheManager manager_;
  std::shared_ptr<stage::LocalPool> pool_;
  std::shared_ptr<stage::HostCache> tier_;  // null if there is none
  stage::LocalPages local_;
  stage::PinnedBlocks host_blocks_;
  std::map<int, std::vector<common::Token>> texts_;    // by sequence
  std::map<int, std::vector<common::Token>> prompts_;  // with which they go on, if they have one
  std::deque<stage::RaggedBatch> batches_;
  int next_ = 0;
  std::size_t num_steps_ = 0;
  bool has_launched_ = false;
};

}  // namespace

TEST_CASE("executor: kernels without windows are given them, by lists that a workspace has room for") {
  const NumberKernels plain(false);
  const stage::LayerKernels kernels(plain, config_with(600));
  const int numbers[2] = {0, 1};
  common::StepArrays step{.batch = {.num_sequences = 1,
                                    .num_heads = 1,
                                    .context_lengths = numbers,
                                    .block_tables = numbers,
                                    .table_starts = numbers,
                                    .max_blocks_per_sequence = 1000},
                          .num_tokens = 1,
                          .query_starts = numbers};
  const std::size_t whole = kernels.workspace_bytes(shape_of(kRunnerBlocks), step);
  step.batch.window = 600;
  const std::size_t lists = common::WindowedKernels(plain).workspace_bytes(shape_of(kRunnerBlocks), step);
  CHECK(lists >= 600 * sizeof(int));
  CHECK(whole >= 2 * lists);  // as for layers that see all
}

TEST_CASE("executor: layers of two kinds find what they have stored, in pages that are divided anew") {
  int num_swapped = 0;
  int num_copies = 0;
  int num_faults = 0;
  int most_held = 0;
  std::int64_t num_evicted = 0;
  std::int64_t num_restored = 0;
  common::device_call_hook = fail_a_copy;
  for (std::uint64_t seed = 0; seed < 160; ++seed) {
    common::executor::shuffle_streams(static_cast<unsigned>(seed) + 1);
    CAPTURE(seed);
    // Without a tier, with one, and with one whose blocks are all on their way back at times.
    const int num_tier_blocks = seed % 4 == 0 ? 0 : seed % 4 == 1 ? 3 : kNumTierBlocks;
    Engine engine(seed, 1 + static_cast<int>(seed % 23), num_tier_blocks, seed % 3 == 0, seed % 8 < 4);
    for (int i = 0; i < 120; ++i) {
      engine.step();
    }
    engine.finish();
    CHECK(engine.problem() == kNoProblem);
    const int window = 1 + static_cast<int>(seed % 23);
    CHECK(engine.table().windows() == std::vector<int>{window, window, 0, window, window});
    num_swapped += engine.num_swapped;
    num_copies += engine.num_copies;
    num_faults += engine.num_faults;
    num_restored += engine.num_restored();
    most_held = std::max(most_held, engine.most_held);
    num_evicted += engine.num_evicted();
  }
  common::executor::shuffle_streams(0);
  common::device_call_hook = nullptr;
  CAPTURE(num_swapped, num_copies, num_faults, most_held, num_evicted, num_restored);
  CHECK(num_swapped > 100);
  CHECK(num_copies > 500);
  CHECK(num_faults > 50);
  CHECK(num_restored > 500);
  CHECK(most_held > kNumParts / 2);
  CHECK(num_evicted > 100);
}
