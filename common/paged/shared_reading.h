// Finds out which sequences of a step begin with the same blocks, and whether reading these once, for all of their
// queries together, is worth it. Plain C++, without CUDA: a CPU and a GPU decide in the same way.
//
// Attention over the blocks that a group shares and attention over the rest of each sequence give two partial results
// for each query. They are joined as online softmax joins two blocks. Each block is then read once instead of once for
// each sequence, at the price of writing partial results and reading them again.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace common {

// Sequences of a step whose first num_blocks blocks are the same, and at least one token of each comes after them.
struct SharedPrefix {
  std::vector<int> sequences;  // two or more, by their index in the step, ascending
  int num_blocks = 0;
};

// The block tables of a step, as a step has them.
struct StepTables {
  std::span<const int> context_lengths;  // [num_sequences]; the new tokens are included; 0: the sequence is left out
  std::span<const int> query_starts;     // [num_sequences + 1]: query_starts[i + 1] - query_starts[i] tokens are new
  std::span<const int> block_tables;     // one after the other: at least ceil(context_length / block_size) blocks each
  std::span<const int> table_starts;     // [num_sequences] or more: where each sequence's table begins
  int block_size = 0;
};

// What is weighed, in bytes of one layer, or in any other unit.
struct ReadingCosts {
  std::int64_t block = 0;        // to read a block's K and V, of all kv heads
  std::int64_t query = 0;        // for each new token of a sequence that is in a group
  std::int64_t group = 0;        // for each group
  std::int64_t group_block = 0;  // for each block of a group, beside reading it
};

// In bytes. A query's partial result is (head_dim + 2) floats for each query head: the output, the largest score and
// the sum of the weights. It is written and read, once for the shared blocks and once for the rest, and all of that
// counts twice: reading together has to win clearly.
ReadingCosts reading_costs(int num_heads, int num_kv_heads, int head_dim, int block_size, int bytes_per_element);

// The groups that save most: the blocks that are not read several times, less what the groups and their members cost. A
// sequence is in one group at most, and no group costs more than it saves. Only blocks that were full before this step
// are shared: all new tokens see them whole. Ordered by their first sequences. Compares each table as far as it is
// shared, once.
std::vector<SharedPrefix> find_shared_prefixes(const StepTables& tables, const ReadingCosts& costs);

// How many blocks are not read again.
std::int64_t num_blocks_saved(std::span<const SharedPrefix> groups);

}  // namespace common
