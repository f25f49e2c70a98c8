// A runner in front of another one that makes every text quote: whatever the model draws, a text goes on with a given
// one, over and over. All that the other runner computes is computed, so that the time is that of a model which quotes;
// the bundled one does not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../runner.h"

namespace stage8 {

class QuotingRunner : public Runner {
 public:
  explicit QuotingRunner(std::unique_ptr<Runner> inner) : inner_(std::move(inner)) {}

  // From now on, position i of every text has the quoted text's token number i modulo its length. Empty: what the model
  // draws. No step may be in flight.
  void quote(std::vector<common::Token> text) { quoted_ = std::move(text); }

  const CacheSize& cache() const override { return inner_->cache(); }
  void copy_blocks(std::span<const BlockCopy> copies) override { inner_->copy_blocks(copies); }
  StepId enqueue(const RaggedBatch& batch) override;
  StepResult wait(StepId step) override;
  bool is_asynchronous() const override { return inner_->is_asynchronous(); }
  void warm_up(int max_tokens, int max_sequences) override { inner_->warm_up(max_tokens, max_sequences); }

 private:
  common::Token token_at(int position) const { return quoted_[static_cast<std::size_t>(position) % quoted_.size()]; }

  std::unique_ptr<Runner> inner_;
  std::vector<common::Token> quoted_;
  std::map<std::uint64_t, std::vector<int>> next_positions_;  // by step, the last two: by row
};

}  // namespace
