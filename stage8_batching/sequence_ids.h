// Hands out ids for an engine's sequences. An id that was given back is used again, so that ids stay small.
#pragma once

#include <vector>

#include "kv_cache_manager.h"

namespace stage8 {

class SequenceIds {
 public:
  SequenceId take() {
    if (unused_.empty()) {
      return next_++;
    }
    const SequenceId sequence = unused_.back();
    unused_.pop_back();
    return sequence;
  }
  void give_back(SequenceId sequence) { unused_.push_back(sequence); }

 private:
  SequenceId next_ = 0;
  std::vector<SequenceId> unused_;
};

}  // namespace
