#include "common/model/scored_rows.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "common/model/llama.h"

namespace common {

void score_rows(const Llama& model, const Matrix& hidden, std::span<const ScoredRow> rows) {
  constexpr std::size_t kPieceBytes = 4 << 20;
  const auto vocab_size = static_cast<std::size_t>(model.config().vocab_size);
  const std::size_t rows_of_piece = std::max<std::size_t>(kPieceBytes / (vocab_size * sizeof(float)), 1);
  while (!rows.empty()) {
    const auto piece = rows.first(std::min(rows.size(), rows_of_piece));
    std::vector<int> indices;
    for (const ScoredRow& scored : piece) {
      indices.push_back(scored.row);
    }
    const Matrix logits = model.logits(hidden(indices, Eigen::all));
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const std::span row(logits.row(static_cast<Eigen::Index>(i)).data(), vocab_size);
      *piece[i].result = top_logprobs(row, piece[i].token, piece[i].num_best);
    }
    rows = rows.subspan(piece.size());
  }
}

}  // namespace common
