#include "row_scorer.h"

#include <algorithm>

#include "common/base/check.h"

namespace stage8 {
namespace {

static_assert(common::kMaxScoredBest <= common::RowScore::kMaxBest);

// The rows of a piece, for all of which the output matrix is read once: 261 with a vocabulary of 128,256.
std::size_t rows_of_piece(int vocab_size, int max_rows) {
  constexpr std::size_t kPieceBytes = 128 << 20;
  const std::size_t row_bytes = static_cast<std::size_t>(vocab_size) * sizeof(float);
  return std::clamp<std::size_t>(kPieceBytes / row_bytes, 1, static_cast<std::size_t>(max_rows));
}

}  // namespace

RowScorer::RowScorer(common::CudaLlama& model, int vocab_size, int max_rows)
    : model_(model),
      vocab_size_(vocab_size),
      rows_of_piece_(rows_of_piece(vocab_size, max_rows)),
      buffers_{Buffers(static_cast<std::size_t>(max_rows)), Buffers(static_cast<std::size_t>(max_rows))},
      logits_(rows_of_piece_ * static_cast<std::size_t>(vocab_size)) {}

void RowScorer::upload(std::size_t which, std::span<const common::ScoredRow> rows, const common::Stream& stream) {
  Buffers& own = buffers_[which];
  COMMON_CHECK(rows.size() <= own.scores.size(), "a step has at most as many rows as tokens");
  own.scored.wait();
  own.rows.assign(rows.begin(), rows.end());
  if (rows.empty()) {
    return;
  }
  int* const inputs = own.host_inputs.data();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    inputs[i] = rows[i].row;
    inputs[rows.size() + i] = rows[i].token;
    inputs[2 * rows.size() + i] = std::min({rows[i].num_best, vocab_size_, common::kMaxScoredBest});
  }
  CUDA_CHECK(
      cudaMemcpyAsync(own.inputs.data(), inputs, 3 * rows.size() * sizeof(int), cudaMemcpyHostToDevice, stream.get()));
}

void RowScorer::score(std::size_t which, const common::Stream& stream) {
  Buffers& own = buffers_[which];
  const std::size_t num_rows = own.rows.size();
  if (num_rows == 0) {
    return;
  }
  for (std::size_t first = 0; first < num_rows; first += rows_of_piece_) {
    const auto count = static_cast<int>(std::min(rows_of_piece_, num_rows - first));
    const int* const rows = own.inputs.data() + first;
    model_.logits(rows, count, logits_.data(), stream.get());
    common::score_logits(logits_.data(), vocab_size_, count, rows + num_rows, rows + 2 * num_rows,
                         own.scores.data() + first, stream.get());
  }
  CUDA_CHECK(cudaMemcpyAsync(own.host_scores.data(), own.scores.data(), num_rows * sizeof(common::RowScore),
                             cudaMemcpyDeviceToHost, stream.get()));
  own.scored.record(stream);
}

void RowScorer::store(std::size_t which) {
  Buffers& own = buffers_[which];
  own.scored.wait();
  for (std::size_t i = 0; i < own.rows.size(); ++i) {
    const common::RowScore& score = own.host_scores.data()[i];
    const int num_best = own.host_inputs.data()[2 * own.rows.size() + i];
    common::TokenLogprobs& result = *own.rows[i].result;
    result = {{score.rank > 0 ? own.rows[i].token : -1, score.logprob}, score.rank, {}};
    for (int place = 0; place < num_best; ++place) {
      result.best.push_back({score.best_tokens[place], score.best_logprobs[place]});
    }
  }
  own.rows.clear();
}

}  // namespace
