// How the decodes of a step read once what several of them share (cascade attention): the plan of it, made on the host,
// which knows the step's tables and lengths.
//
// A sequence's context is cut in two. Its first tokens, which it shares with others, are a task of ragged attention:
// the queries of all these sequences are its rows, and all of them see all of its tokens, so nothing is masked. The
// rest is the sequence's own, and decode attention's: to it, the context begins behind the prefix. The task leaves
// partial results, and decode attention adds them to what it has computed itself, by the rule that joins all parts
// (online_softmax.cuh).
//
//     A   |======= shared =======|--- A's own ---|
//     B   |======= shared =======|- B's own -|              tasks:   rows of A, B, C x 0 … n    (in parts, if few)
//     C   |======= shared =======|----- C's own -----|      decodes: A, B, C from n on; D from 0 on
//     D   |------ D's own ------|
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/paged/attention_launches.h"
#include "common/paged/ragged_plan.h"
#include "common/paged/shared_reading.h"

namespace common {

// A prefix is a multiple of this number of tokens: no kernel's tile then holds other tokens, which would need a mask.
inline constexpr int kPrefixStep = 32;

struct SharedShape {
  RaggedKernel kernel;
  int task_rows;  // rows of a task, and of a place for results: room for some sequences' groups of query heads
  int group;      // query heads that share a kv head
  int num_kv_heads;
  int num_workers;  // tasks that the device computes at once
  int max_tasks;    // of one kv head; parts included
};

// Empty if steps over these pages can read together; else why they read apart.
std::string shared_reading_obstacle(const PageShape& shape);

// For steps of up to batch.num_sequences sequences.
SharedShape shared_shape(const PageShape& shape, const BatchArrays& batch);

// What reading together costs on a GPU, in bytes that could be read meanwhile.
ReadingCosts shared_reading_costs(const PageShape& shape, int num_heads);
// The same in a step that has so many new tokens of prompts besides.
ReadingCosts beside_chunk(ReadingCosts costs, int num_chunk_tokens);

struct SharedPlan {
  std::vector<SharedPrefix> prefixes;  // those that are read together, as far as they are
  std::vector<RaggedTask> tasks;       // of one kv head; the longest come first
  std::vector<PrefixRows> rows;        // [num_sequences]
  std::vector<int> order;              // the sequences of one prefix after the other's
  std::vector<int> own_lengths;        // [num_sequences]: the tokens behind the prefix
  std::vector<int> own_starts;         // [num_sequences]: where the tables of these begin
};

// step: decodes, one query each, and then chunks, which have no prefix. A sequence has one prefix at most, and a token
// behind it. What a prefix has beyond the last multiple of kPrefixStep counts as the sequences' own. Where there are
// more prefixes than tasks, those are left out that save least.
SharedPlan plan_shared_reading(const StepTables& step, std::span<const SharedPrefix> prefixes,
                               const SharedShape& shape);

// A plan as one piece of memory, the same on the host and on the device. Places depend on the counts alone.
struct SharedArrays {
  RaggedQueue* queue;
  RaggedTask* tasks;  // [max_tasks]
  PrefixRows* rows;   // [num_sequences]
  int* order;         // [num_sequences]
  int* own_lengths;   // [num_sequences]
  int* own_starts;    // [num_sequences]
  std::size_t bytes;
};
SharedArrays shared_arrays(void* memory, int num_sequences, const SharedShape& shape);

// Writes a plan into memory on the host. Sequences that the plan does not have are inactive.
void write_plan(const SharedPlan& plan, const SharedArrays& to, int num_sequences, const SharedShape& shape);

}  // namespace common
