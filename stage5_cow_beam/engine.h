// Turns requests into text: admits them while the cache has room, computes their prompts, then a token each in turn.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention.h"
#include "common/model/generation.h"
#include "common/model/llama.h"
#include "kv_cache.h"
#include "kv_cache_manager.h"

namespace stage5 {

struct EngineOptions {
  // The cache's size, in tokens.
  int num_slots = 4096;
  // Max tokens in one forward pass: bounds the memory of the activations, however long the prompt is.
  int chunk_size = 256;
  // Slots in a block. The cache is rounded up to whole blocks.
  int block_size = 16;
};

class Engine {
 public:
  // The model must outlive the engine.
  Engine(const common::Llama& model, const EngineOptions& options);

  // Serves the requests in static batches, in order: as many as fit are admitted and run to their end, then the next.
  // No room to grow is reserved: when the blocks run out, the latest arrival is preempted and computed again later.
  // A request that can never be served is rejected with the reason; the others are served all the same.
  std::vector<common::Completion> run(std::span<const common::Request> requests, const common::OnToken& on_token);

  // Computes the next tokens of a live sequence, chunk by chunk, and stores their K and V. Returns the logits after the
  // last one, [1, vocab_size]. Returns nothing and changes nothing if there are too few slots.
  std::optional<common::Matrix> append(SequenceId sequence, std::span<const common::Token> tokens);

  // Why the request can never be served; empty if it can.
  std::string rejection(const common::Request& request) const;

  KvCacheManager& manager() { return manager_; }
  KvCache& cache() { return cache_; }

  // Counts of events so far, the same on every machine.
  std::vector<common::Counter> counters() const;
  common::Timing timing() const { return timing_; }

 private:
  // A request that is being served or waits.
  struct Generation {
    SequenceId sequence = 0;  // the request's index
    const common::Request* request = nullptr;
    common::Completion* completion = nullptr;
    std::vector<common::Token> tokens;  // the prompt and the tokens drawn so far; the cache may lack the last ones
    bool finished = false;
  };

  // Computes what the cache lacks, the whole prompt at first, and draws the next token. Returns false and changes
  // nothing if there are too few slots.
  bool step(Generation& generation, const common::OnToken& on_token);
  // Counts a round, in which each request of the batch got one token, and frees the slots of finished requests.
  void end_round(std::vector<Generation>& batch);
  common::Matrix forward(SequenceId sequence, std::span<const common::Token> tokens);

  const common::Llama& model_;
  EngineOptions options_;
  KvCache cache_;
  KvCacheManager manager_;
  common::Timing timing_;
  std::int64_t forward_passes_ = 0;
  std::int64_t kv_bytes_read_ = 0;
  std::int64_t preemptions_ = 0;
  std::int64_t blocks_copied_ = 0;
  // Summed over the rounds; a round gives every request of the batch one token.
  std::int64_t rounds_ = 0;
  std::int64_t slots_reserved_ = 0;
  std::int64_t slots_used_ = 0;
  std::int64_t requests_held_ = 0;
  int max_running_ = 0;
};

}  // namespace
