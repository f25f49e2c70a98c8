// A scheduler for models whose layers all have the same window. It frees the blocks behind the windows, as
// WindowScheduler does, and looks at windows where others look at whole texts:
//   - A prompt begins with cached blocks if those that its first query sees are in the pool or in the second tier of
//   the
//     prefix cache (window_prompts.h). Only these are brought back.
//   - A request may be longer than the pool. Alone, it is computed in chunks for which there is room, and what is
//     behind its windows then is freed before the next one.
#pragma once

#include <memory>
#include <string>

#include "../host_cache/host_cache_scheduler.h"
#include "common/serving/pool_snapshot.h"
#include "evicted_texts.h"
#include "window_scheduler.h"

namespace stage8 {

class WindowPromptScheduler : public WindowScheduler {
 public:
  // window, num_in_flight: WindowScheduler's. The other arguments are HostCacheScheduler's.
  WindowPromptScheduler(int window, int num_in_flight, KvCacheManager& manager, const SchedulerOptions& options,
                        bool use_prefix_cache, int default_drafts, const TokenCost& cost,
                        const std::shared_ptr<HostCache>& host_cache = nullptr);

  ScheduledStep schedule() override;

  // Whether one text may be longer than the pool.
  bool exceeds_pool() const { return max_held(1) <= evicted_.num_blocks(); }
  // Of a request that is longer than the pool, only the windows must fit.
  std::string obstacle(const common::Request& request, int num_sequences) const override;

  const EvictedTexts& evicted_texts() const { return evicted_; }
  const common::WindowPromptFigures& statistics() const { return statistics_; }

 protected:
  // Not in a step that has preempted a group.
  void admit_waiting(ScheduledStep& step) override;
  // Remembers the text, too.
  void store(int block) noexcept override;
  bool find_room(SequenceGroup& group, const Admission& admission) override;

 private:
  // Whether the request is longer than the pool.
  bool is_beyond(const common::Request& request, int num_sequences) const;
  // How many blocks are enough for so many sequences that run alone, however long they are.
  int max_held(int num_sequences) const;
  // If one group runs and holds all blocks: gives up blocks behind its windows, as a block is needed that stands in for
  // them.
  void make_room_to_stand_in();

  EvictedTexts evicted_;
  common::WindowPromptFigures statistics_;
  bool has_preempted_ = false;  // in this step
};

}  // namespace
