// Sequences beside the engine's loop, one at a time, as the engines of the stages before compute them: for what is
// shown or tested of a cache without requests.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "../engine.h"

namespace stage8 {

class LoneSequences {
 public:
  // The engine must outlive it, and be idle whenever something is computed.
  explicit LoneSequences(Engine& engine) : engine_(engine) {}

  // Starts a sequence with room for these tokens; the first manager().length(sequence) of them are in the cache
  // already. Returns false and changes nothing if there is no room.
  bool start(SequenceId sequence, std::span<const common::Token> tokens, std::uint64_t salt);

  // Computes the next tokens of a live sequence, chunk by chunk, and stores their K and V. Returns the logits after the
  // last one, [1, vocab_size]. Returns nothing and changes nothing if there are too few slots.
  std::optional<common::Matrix> append(SequenceId sequence, std::span<const common::Token> tokens);

 private:
  Engine& engine_;
};

}  // namespace
