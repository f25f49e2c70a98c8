// A scheduler that frees the blocks behind the window of all layers before it looks for room (hidden_blocks.h).
#pragma once

#include <memory>
#include <utility>

#include "../host_cache/host_cache_scheduler.h"
#include "hidden_blocks.h"

namespace stage8 {

class WindowScheduler : public HostCacheScheduler {
 public:
  // num_in_flight: max tokens of a sequence that are not computed when the next step is scheduled. What their queries
  // see is not freed, so that no step in flight reads a block that has gone to another text. The other arguments are
  // HostCacheScheduler's.
  template <typename... Arguments>
  WindowScheduler(int window, int num_in_flight, Arguments&&... arguments)
      : HostCacheScheduler(std::forward<Arguments>(arguments)...), window_(window), num_in_flight_(num_in_flight) {}

  ScheduledStep schedule() override {
    free_hidden();
    return HostCacheScheduler::schedule();
  }

 protected:
  // Of all running groups.
  void free_hidden() {
    take_over_copies();  // a block that stands in may take an evicted one's place
    for (const std::shared_ptr<SequenceGroup>& group : running()) {
      int stand_in = -1;  // of the group's sequences
      for (const Branch& branch : group->live()) {
        if (manager_.contains(branch.sequence)) {
          // The last one after the others, so that it is evicted after them: a prompt with this text begins where a
          // block ends, and may see one block more than the text's own next query.
          for (const int num_tokens : {num_in_flight_ + manager_.block_size(), num_in_flight_}) {
            stand_in = free_hidden_blocks(manager_, branch.sequence, window_, num_tokens, stand_in);
          }
        }
      }
    }
  }

  int window() const { return window_; }
  int num_in_flight() const { return num_in_flight_; }

 private:
  int window_;
  int num_in_flight_;
};

}  // namespace
