// Scores rows of a step (common/model/scored_rows.h) behind its pass on a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "common/cuda/model/cuda_llama.h"
#include "common/cuda/model/score_rows.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "common/model/scored_rows.h"

namespace stage8 {

// One for both steps that can be in flight; `which`, 0 or 1, says whose buffers a step has.
class RowScorer {
 public:
  // max_rows: of a step. The model must outlive the scorer.
  RowScorer(common::CudaLlama& model, int vocab_size, int max_rows);

  // Takes a step's rows, which may be none, and copies them to the device. The last step that used these buffers must
  // be over.
  void upload(std::size_t which, std::span<const common::ScoredRow> rows, const common::Stream& stream);
  // Enqueues the scores of the pass that is enqueued last: piece by piece, because the logits of all rows may not fit.
  void score(std::size_t which, const common::Stream& stream);
  // Waits for the scores, and stores them where the rows say. Token -1: there is no score. No rows are left.
  void store(std::size_t which);

 private:
  struct Buffers {
    explicit Buffers(std::size_t max_rows)
        : host_inputs(3 * max_rows), inputs(3 * max_rows), scores(max_rows), host_scores(max_rows) {}

    std::vector<common::ScoredRow> rows;
    common::PinnedArray<int> host_inputs;  // of all rows: their indices, then the tokens, then how many best
    common::DeviceArray<int> inputs;
    common::DeviceArray<common::RowScore> scores;
    common::PinnedArray<common::RowScore> host_scores;
    common::Event scored;
  };

  common::CudaLlama& model_;
  int vocab_size_;
  std::size_t rows_of_piece_;
  std::array<Buffers, 2> buffers_;
  common::DeviceArray<float> logits_;  // [rows_of_piece, vocab_size]
};

}  // namespace
