// A GpuRunner that launches a step with one token for each sequence as a whole: the first step of a size is recorded as
// a CUDA graph, and later ones replay the graph with other numbers in the inputs. A step has five launches for each
// layer and four more; one by one, they take the host longer than they take the GPU. The same holds for a step with a
// few tokens of one sequence and a row of logits for each of them (SPECULATION.md); with several sequences, there are
// too many sizes to record. And tokens are drawn on the device (device_sampler.h), and rows scored (row_scorer.h).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "../gpu_runner.h"
#include "common/cuda/runtime/device.h"
#include "row_scorer.h"
#include "scoring/row_scoring.h"

namespace stage8 {

class RecordingRunner : public GpuRunner, public RowScoring {
 public:
  // As GpuRunner, with memory for up to seven more sequences, and for the rows of logits of a step with drafts.
  RecordingRunner(const common::Llama& model, const KvCacheShape& shape, const GpuOptions& options, int chunk_size,
                  int max_sequences, const common::PagedKernels& kernels,
                  const std::optional<common::MemoryShare>& share = {}, common::Communicator* peers = nullptr);

  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override;

  // Also records the steps of all sizes with one token for each sequence.
  void warm_up(int max_tokens, int max_sequences) override;

  // For tests. Steps recorded so far: after warm_up, no step with one token for each of up to max_sequences sequences
  // is recorded any more.
  int num_recorded_steps() const { return static_cast<int>(steps_.size()); }

 protected:
  int padded_sequences(const RaggedBatch& step) const override;
  void launch(const StepCounts& counts) override;
  void forget_recorded() { steps_.clear(); }

 private:
  // By the buffers that they use, and the numbers of sequences and of tokens.
  std::map<std::tuple<int, int, int>, common::Graph> steps_;
  int vocab_size_;
  int max_tokens_;
  std::unique_ptr<RowScorer> scorer_;  // made for the first step with scored rows: most servers have none
};

}  // namespace
