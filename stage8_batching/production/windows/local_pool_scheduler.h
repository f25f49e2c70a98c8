// A scheduler for models with layers of two kinds: besides blocks, it finds room for their parts in the smaller pool
// (local_pool.h). Too few parts are to it what too few blocks are: running requests are preempted, others wait.
//
// Where parts are short, the base class must find as few blocks as there are parts: the others are held by a sequence
// of no request while the step is scheduled. The cached ones among them are evicted, and few prompts miss them: their
// parts are the next to be given up. With a second tier of the prefix cache, they go there.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "../../runner.h"
#include "../host_cache/host_cache_scheduler.h"
#include "local_pool.h"

namespace stage8 {

// How many parts go with a runner's blocks, so that both run out at the same time if all texts are as long as a text
// may become: as many as its windows need for each of its blocks. But never fewer than a text needs that runs with as
// many tokens as a step may have, and the window of one that has ended. num_blocks if nothing is saved.
int num_local_parts(const common::LlamaConfig& config, const EngineOptions& options, const CacheSize& cache);

class LocalPoolScheduler : public HostCacheScheduler {
 public:
  // The other arguments are the base class's. The runner that computes the steps shares the pool.
  LocalPoolScheduler(std::shared_ptr<LocalPool> pool, KvCacheManager& manager, const SchedulerOptions& options,
                     bool use_prefix_cache, int default_drafts, const TokenCost& cost,
                     std::shared_ptr<HostCache> host_cache = nullptr);

  ScheduledStep schedule() override;

  const LocalPool& local_pool() const { return *pool_; }
  // The windows of all its sequences must be in the pool at once, too.
  std::string obstacle(const common::Request& request, int num_sequences) const override;

 protected:
  // Copies the block again if the host has its text without the part.
  void store(int block) noexcept override;
  void admit_waiting(ScheduledStep& step) override;
  bool find_room(SequenceGroup& group, const Admission& admission) override;

 private:
  // The most blocks that the running groups can take in the next step, with drafts.
  int max_growth() const;

  // As Scheduler::find_room() for a group whose blocks `hits` are in the pool, with blocks of the second tier behind
  // them. Returns false and takes nothing if none of these can be brought back. room: parts.
  bool find_room_with_tier(SequenceGroup& group, std::span<const common::Token> text, std::span<const int> hits,
                           const Admission& admission, int room);
  // How many parts a text needs that begins with num_shared blocks, with the new ones of the step.
  int num_parts_of(std::size_t num_tokens, std::size_t num_shared, const Admission& admission) const;

  std::shared_ptr<LocalPool> pool_;  // shared with the runner
  bool has_preempted_ = false;       // in this step
};

}  // namespace
