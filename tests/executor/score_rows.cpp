// The kernel that scores rows of logits, on the executor of kernels: it finds what common::top_logprobs finds.
#include "common/cuda/model/score_rows.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/support/catch.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Rows {
  int vocab_size = 0;
  std::vector<float> logits = {};  // [num_rows, vocab_size]
  std::vector<int> tokens = {};
  std::vector<int> num_best = {};
};

std::vector<common::RowScore> scores_of(const Rows& rows) {
  const common::DeviceArray<float> logits(rows.logits);
  const common::DeviceArray<int> tokens(rows.tokens);
  const common::DeviceArray<int> num_best(rows.num_best);
  const common::DeviceArray<common::RowScore> scores(rows.tokens.size());
  const common::Stream stream;
  common::score_logits(logits.data(), rows.vocab_size, static_cast<int>(rows.tokens.size()), tokens.data(),
                       num_best.data(), scores.data(), stream.get());
  stream.synchronize();
  return scores.download();
}

}  // namespace

TEST_CASE(
    "rows of logits are scored as the host scores them: with ties, with tokens that are impossible, of any size") {
  constexpr double kTolerance = 1e-5;  // sums in float
  common::Random random(1);
  for (const int vocab_size : {1, 5, 33, 1024, 1500}) {
    Rows rows{.vocab_size = vocab_size};
    for (int row = 0; row < 6; ++row) {
      for (int i = 0; i < vocab_size; ++i) {
        const float logit = 3.0F * static_cast<float>(random.normal());
        const bool is_impossible = row == 2 && i % 3 == 1;
        rows.logits.push_back(is_impossible ? -kInfinity : row % 2 == 0 ? logit : std::round(logit));
      }
      rows.tokens.push_back(static_cast<int>(random.below(static_cast<std::uint64_t>(vocab_size))) / 3 * 3);
      rows.num_best.push_back(std::min(vocab_size, std::vector<int>{0, 1, 2, 7, 20, common::RowScore::kMaxBest}[row]));
    }
    const std::vector<common::RowScore> scores = scores_of(rows);
    for (std::size_t row = 0; row < scores.size(); ++row) {
      const auto size = static_cast<std::size_t>(vocab_size);
      const std::span logits = std::span(rows.logits).subspan(row * size, size);
      const common::TokenLogprobs expected = common::top_logprobs(logits, rows.tokens[row], rows.num_best[row]);
      CAPTURE(vocab_size, row);
      CHECK(scores[row].rank == expected.rank);
      CHECK(std::abs(static_cast<double>(scores[row].logprob - expected.drawn.logprob)) < kTolerance);
      for (std::size_t place = 0; place < expected.best.size(); ++place) {
        CHECK(scores[row].best_tokens[place] == expected.best[place].token);
        const float difference = scores[row].best_logprobs[place] - expected.best[place].logprob;
        CHECK((std::abs(static_cast<double>(difference)) < kTolerance || expected.best[place].logprob == -kInfinity));
      }
    }
  }
}

TEST_CASE("a row without a distribution has no score: a NaN, an infinite logit, or nothing that is possible") {
  constexpr int kVocabSize = 40;
  Rows rows{.vocab_size = kVocabSize};
  for (const float odd : {1.0F, std::nanf(""), kInfinity, -kInfinity}) {
    std::vector<float> logits(kVocabSize, odd == -kInfinity ? odd : 0.5F);
    logits[37] = odd;
    rows.logits.insert(rows.logits.end(), logits.begin(), logits.end());
    rows.tokens.push_back(3);
    rows.num_best.push_back(2);
  }
  const std::vector<common::RowScore> scores = scores_of(rows);
  CHECK(scores[0].rank == 2);
  for (const std::size_t row : {1, 2, 3}) {
    CHECK(scores[row].rank == 0);
  }
}
