// What a runner is that reads the blocks that several sequences of a step begin with once, for all of their queries
// (SHARED_READING.md). On a CPU: ../cpu/shared_reading_cpu_runner.h.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "../../batch.h"
#include "common/paged/shared_reading.h"
#include "common/serving/pool_snapshot.h"

namespace stage8 {

class SharedReading {
 public:
  virtual ~SharedReading() = default;

  virtual bool can_share() const { return true; }
  // From the next step on; false: each sequence reads all of its blocks.
  void share(bool enabled) { is_enabled_ = enabled; }
  bool is_enabled() const { return is_enabled_ && can_share(); }
  const common::SharedReadingFigures& figures() const { return figures_; }
  // Of the last step: the blocks that were read once for several sequences, each group's in order.
  std::span<const int> blocks() const { return blocks_; }

 protected:
  // The groups of the step's first num_sequences sequences that read together.
  std::vector<common::SharedPrefix> groups_of(const RaggedBatch& batch, std::size_t num_sequences, int block_size,
                                              const common::ReadingCosts& costs) const;
  // What the step is going to read together. Before it is computed: afterwards nothing may throw.
  void read_together(const RaggedBatch& batch, std::vector<common::SharedPrefix> groups);
  std::span<const common::SharedPrefix> groups() const { return groups_; }
  // Counts the step, which has read so.
  void count() noexcept;

 private:
  bool is_enabled_ = true;
  std::vector<common::SharedPrefix> groups_;  // of the last step
  std::vector<int> blocks_;                   // theirs
  common::SharedReadingFigures figures_;
};

}  // namespace
