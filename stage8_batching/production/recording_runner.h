// A GpuRunner that launches a step with one token for each sequence as a whole: the first step of a size is recorded as
// a CUDA graph, and later ones replay the graph with other numbers in the inputs. A step has five launches for each
// layer (six if sequences read together) and four more; one by one, they take the host longer than they take the GPU.
// The same holds for a step with a few tokens of one sequence and a row of logits for each of them (SPECULATION.md);
// with several sequences, there are too many sizes to record. And tokens are drawn on the device (device_sampler.h),
// and rows scored (row_scorer.h). Its host blocks are pinned piece by piece, and can be copied beside a step
// (pinned_blocks.h).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "../gpu_runner.h"
#include "common/cuda/runtime/device.h"
#include "common/paged/shared_attention.h"
#include "host_cache/host_blocks.h"
#include "layer_kernels.h"
#include "local_pages.h"
#include "pinned_blocks.h"
#include "row_scorer.h"
#include "scoring/row_scoring.h"
#include "shared_plans.h"
#include "shared_reading/shared_reading.h"
#include "windows/local_pool.h"

namespace stage8 {

class RecordingRunner : public GpuRunner,
                        public RowScoring,
                        public SharedReading,
                        public HostBlocks,
                        public SeparateWindows {
 public:
  // As GpuRunner, with memory for up to seven more sequences, and for the rows of logits of a step with drafts.
  RecordingRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
                  int max_sequences, const common::PagedKernels& kernels,
                  const std::optional<common::MemoryShare>& share = {}, common::Communicator* peers = nullptr);

  const CacheSize& cache() const override { return size_; }
  void copy_blocks(std::span<const BlockCopy> copies) override;
  void allocate(int count) override;
  int num_allocated() const override;
  std::string why_no_more() const override;
  void copy_beside(std::span<const BlockCopy> copies) override;
  bool can_share() const override { return plans_ != nullptr && local_ == nullptr; }
  std::shared_ptr<LocalPool> separate_windows(const NumParts& num_parts, int num_blocks) override;
  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override;

  // Also records the steps of all sizes with one token for each sequence.
  void warm_up(int max_tokens, int max_sequences) override;

  // For tests. Steps recorded so far: after warm_up, no step with one token for each of up to max_sequences sequences
  // is recorded any more, but the first of a size whose sequences read together.
  int num_recorded_steps() const { return static_cast<int>(steps_.size()); }
  // For tests: what reading together costs, in place of what it costs on this device. False: these kernels can't.
  bool set_reading_costs(const common::ReadingCosts& costs);
  // For tests: fills parts with NaN, between the steps. Only if windows are separate.
  void poison_parts(std::span<const int> parts);

 protected:
  int padded_sequences(const RaggedBatch& step) const override;
  void launch(const StepCounts& counts) override;
  void forget_recorded() { steps_.clear(); }

 private:
  // What is called in place of the kernels that the runner is given.
  struct Tables {
    Tables(const common::PagedKernels& kernels, const common::PageShape& shape, const common::LlamaConfig& config)
        : sharing(common::sharing_kernels(kernels, shape)), layers(sharing == nullptr ? kernels : *sharing, config) {}

    std::unique_ptr<common::SharingKernels> sharing;  // nullptr if these can't read together
    LayerKernels layers;
  };

  RecordingRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
                  int max_sequences, const std::optional<common::MemoryShare>& share, common::Communicator* peers,
                  std::unique_ptr<Tables> tables);
  void copy_inside(std::span<const BlockCopy> copies);  // without host blocks, in any order
  void launch_recorded(const StepCounts& counts);       // replays a step that is recorded
  // The groups of the step's decodes that read together, whose plan is then on its way.
  std::vector<common::SharedPrefix> plan_sharing(const RaggedBatch& batch);

  std::unique_ptr<Tables> tables_;
  std::unique_ptr<SharedPlans> plans_;  // if there are such kernels
  // By the buffers that they use, the numbers of sequences and of tokens, and whether sequences read together.
  std::map<std::tuple<int, int, int, bool>, common::Graph> steps_;
  CacheSize size_;          // with all host blocks, of which the base class knows none
  common::PageShape page_;  // of one block
  int max_blocks_;          // that the layers which see all may have if those with a window have fewer
  // Of all layers, or of those that see all if windows are separate.
  std::optional<PinnedBlocks> host_blocks_;
  std::unique_ptr<LocalPages> local_;  // nullptr: windows are not separate
  int vocab_size_;
  int max_tokens_;
  std::unique_ptr<RowScorer> scorer_;  // made for the first step with scored rows: most servers have none
};

}  // namespace
