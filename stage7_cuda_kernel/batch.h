// A step's work as flat arrays, with everything that a forward pass needs to know about it. Built once a step, read by
// every layer; one copy brings it to a GPU.
//
//   sequence A, 4 tokens of its prompt          tokens          a4 a5 a6 a7
//                                                positions        4  5  6  7
//                                                query_starts     0            4
//                                                context_lengths  8
#pragma once

#include <span>
#include <vector>

#include "common/model/llama.h"
#include "kv_cache_manager.h"

namespace stage7 {

// The arrays have room for many sequences; a step of this stage has one.
struct RaggedBatch {
  std::vector<common::Token> tokens;  // [num_tokens]
  std::vector<int> positions;         // [num_tokens], each in its own sequence
  std::vector<int> slot_mapping;      // [num_tokens]
  std::vector<int> logits_rows;       // the rows whose logits are needed, ascending
  bool draws_tokens = true;           // whether the result is the largest logit's token; false: the logits

  std::vector<int> query_starts = {0};  // [num_sequences + 1]: where each sequence's tokens begin
  std::vector<int> context_lengths;     // [num_sequences]; the new tokens are included
  std::vector<int> block_tables;        // one after the other: ceil(context_length / block_size) blocks each
  std::vector<int> table_starts = {0};  // [num_sequences + 1]: where each sequence's table begins

  // Adds a sequence's next tokens, whose slots must be reserved. with_logits: the logits after the last one are needed.
  void add(const KvCacheManager& manager, SequenceId sequence, std::span<const common::Token> next, bool with_logits);

  std::size_t num_sequences() const { return context_lengths.size(); }
  int num_tokens() const { return query_starts.back(); }
};

}  // namespace
