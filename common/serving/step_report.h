// What happened in one step of an engine, and in all steps so far.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/model/generation.h"
#include "common/serving/pool_snapshot.h"

namespace common {

// A block copied to another. Behind the pool's numbers are the host's blocks: for swapping, then of a second tier.
struct BlockMove {
  int source = 0;
  int destination = 0;
};

// The drafts of a sequence in a step: guesses of how its text goes on. The drafts that have become text come first.
struct SequenceDrafts {
  int request = 0;
  int sequence = 0;  // as in PoolSnapshot
  int position = 0;  // of the first
  std::vector<Token> tokens = {};
  int num_accepted = 0;  // of them
  // The token that the model drew behind the accepted drafts, in place of the first rejected one, if any. The cache
  // lacks it as yet. Nothing if the sequence has ended.
  std::optional<Token> drawn = std::nullopt;
};

// One step as it happened. Requests by id.
struct StepReport {
  std::int64_t index = 0;  // counted from 0
  double begin = 0.0;
  double end = 0.0;
  double scheduling_seconds = 0.0;  // on the machine's own clock
  double computing_seconds = 0.0;   // on the machine's own clock
  double waiting_seconds = 0.0;     // of computing_seconds: waiting for the GPU
  int num_tokens = 0;
  std::vector<int> num_queries;  // how many of them each sequence of the batch has
  std::vector<int> num_drafts;   // by sequence: how many of its tokens are drafts, guesses of how the text goes on
  int num_accepted = 0;          // drafts that have become text, of all sequences
  std::vector<bool> is_chunk;    // by sequence: whether other steps compute the rest of what the cache lacks
  std::int64_t num_read = 0;     // tokens whose K and V the attention has read
  std::int64_t bytes_saved = 0;  // of K and V: what more it would have read if no sequences had read together
  std::vector<int> served;       // the requests in the batch, in order of arrival
  std::vector<int> num_served;   // how many tokens each of them got
  std::vector<int> admitted;
  std::vector<int> swapped_out;  // preempted, and moved to the host's memory
  std::vector<int> recomputed;   // preempted, and their blocks freed: they are computed again later
  std::vector<int> ended;        // in this step, or since the previous step
  int num_running = 0;
  int num_waiting = 0;
  bool is_memory_short = false;        // requests wait because blocks are missing
  std::vector<BlockMove> copies;       // these copies, in order
  std::vector<SequenceDrafts> drafts;  // of the sequences that have some
  std::vector<int> shared_blocks;      // blocks that were read once for several sequences
  std::int64_t num_reads_saved = 0;    // of blocks: how often these would have been read besides
  SlotUsage usage;                     // right after the forward pass, when the cache is fullest

  // What num_tokens would be if all sequences were padded to the longest.
  int padded_tokens() const;
};

// Sums over the steps that computed something. A server that runs ahead also has steps that only collect the tokens of
// the previous step.
struct StepTotals {
  std::int64_t steps = 0;
  std::int64_t tokens = 0;
  std::int64_t padded_tokens = 0;
  std::int64_t drafted = 0;   // how often a sequence has computed drafts
  std::int64_t drafts = 0;    // these drafts
  std::int64_t accepted = 0;  // drafts that have become text
  std::int64_t num_read = 0;
  std::int64_t bytes_saved = 0;
  std::int64_t slots_reserved = 0;
  std::int64_t slots_used = 0;
  std::int64_t running = 0;
  std::int64_t swapped_out = 0;
  std::int64_t recomputed = 0;
  int max_running = 0;
  Timing timing;  // prompts and replies share steps: a step's time is divided among its tokens

  void add(const StepReport& report);
};

// The totals as counters of a run.
std::vector<Counter> counters_of(const StepTotals& totals);

}  // namespace common
