// The block tables of a step, as flat arrays.
#pragma once

#include <vector>

#include "common/paged/shared_reading.h"

namespace tests {

struct Sequence {
  std::vector<int> table;
  int context_length = 0;
  int num_queries = 1;
};

class Step {
 public:
  Step(const std::vector<Sequence>& sequences, int block_size) : block_size_(block_size) {
    for (const Sequence& sequence : sequences) {
      context_lengths_.push_back(sequence.context_length);
      query_starts_.push_back(query_starts_.back() + sequence.num_queries);
      block_tables_.insert(block_tables_.end(), sequence.table.begin(), sequence.table.end());
      table_starts_.push_back(static_cast<int>(block_tables_.size()));
    }
  }

  // Views of this step.
  common::StepTables tables() const {
    return {.context_lengths = context_lengths_,
            .query_starts = query_starts_,
            .block_tables = block_tables_,
            .table_starts = table_starts_,
            .block_size = block_size_};
  }

 private:
  int block_size_;
  std::vector<int> context_lengths_;
  std::vector<int> query_starts_ = {0};
  std::vector<int> block_tables_;
  std::vector<int> table_starts_ = {0};
};

}  // namespace tests
