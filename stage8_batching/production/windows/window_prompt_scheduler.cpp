#include "window_prompt_scheduler.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "block_ownership.h"
#include "common/base/text.h"
#include "finding_room.h"
#include "hidden_blocks.h"
#include "local_pool.h"
#include "window_prompts.h"

namespace stage8 {

WindowPromptScheduler::WindowPromptScheduler(int window, int num_in_flight, KvCacheManager& manager,
                                             const SchedulerOptions& options, bool use_prefix_cache, int default_drafts,
                                             const TokenCost& cost, const std::shared_ptr<HostCache>& host_cache)
    : WindowScheduler(window, num_in_flight, manager, options, use_prefix_cache, default_drafts, cost, host_cache),
      evicted_(manager.usage().total / manager.block_size(), host_cache) {
  manager.on_evict([this](int block) { store(block); });
}

ScheduledStep WindowPromptScheduler::schedule() {
  make_room_to_stand_in();
  has_preempted_ = false;
  ScheduledStep step = WindowScheduler::schedule();
  if (step.groups.empty() && !step.preempted.empty()) {  // the group that is left holds all blocks now
    make_room_to_stand_in();
    has_preempted_ = true;
    ScheduledStep again = WindowScheduler::schedule();
    again.preempted = std::move(step.preempted);
    again.is_memory_short = true;
    return again;
  }
  return step;
}

void WindowPromptScheduler::admit_waiting(ScheduledStep& step) {
  if (!has_preempted_) {
    WindowScheduler::admit_waiting(step);
  }
}

bool WindowPromptScheduler::is_beyond(const common::Request& request, int num_sequences) const {
  return max_slots_of(request, num_sequences, manager_.block_size()) / manager_.block_size() > evicted_.num_blocks();
}

std::string WindowPromptScheduler::obstacle(const common::Request& request, int num_sequences) const {
  const bool fits_into_step = num_sequences <= std::min(options().token_budget, options().max_sequences);
  if (num_sequences < 1 || !fits_into_step || !is_beyond(request, num_sequences)) {
    return WindowScheduler::obstacle(request, num_sequences);
  }
  const int total = evicted_.num_blocks();
  const int needed = max_held(num_sequences);
  if (needed <= total) {
    return "";
  }
  const int block_size = manager_.block_size();
  const int slots = std::min(max_slots_of(request, num_sequences, block_size), needed * block_size);
  return common::format(
      "the request needs up to %d blocks at once, and the whole cache has %d (%d slots): --slots %d would do, or fewer "
      "new tokens or sequences",
      slots / block_size, total, total * block_size, slots);
}

// What is not hidden, a hidden block of each if none stands in, and a new block for each to go on.
int WindowPromptScheduler::max_held(int num_sequences) const {
  const int num_seen = max_blocks_of_window(window() + num_in_flight(), manager_.block_size());
  return num_sequences * (std::max(num_seen, 2) + 2);
}

void WindowPromptScheduler::store(int block) noexcept {
  evicted_.add(manager_.prefix_cache(), block);
  if (has_host_cache() && pays(options(), manager_.block_size())) {
    WindowScheduler::store(block);
  }
}

bool WindowPromptScheduler::find_room(SequenceGroup& group, const Admission& admission) {
  const bool is_long = is_beyond(group.request(), group.max_sequences()) && running().empty();
  if (group.output().state == RequestState::kSwapped) {
    Admission terms = admission;
    terms.spare_blocks += is_long ? static_cast<int>(group.live().size()) : 0;
    if (WindowScheduler::find_room(group, terms)) {
      return true;
    }
    if (!is_long) {
      return false;
    }
    group.free_blocks();  // it was swapped out with so much that it could not go on
    group.output().state = RequestState::kWaiting;
  }
  if (num_available(manager_) <= admission.spare_blocks) {
    return false;  // before the tokens are hashed
  }
  const std::vector<common::Token> text = common_text(group);
  const std::uint64_t salt = group.request().cache_salt;
  const std::span<const common::Token> known = tokens_to_find(group, text, admission);
  for (const HostCache* tier = host_cache_.get();; tier = nullptr) {
    FoundBlocks found = find_window(manager_, evicted_, known, salt, window(), tier);
    Admission terms = admission;
    if (is_long) {
      const int room = num_available(manager_) - num_taken(manager_, found.blocks, 0) - admission.spare_blocks;
      terms.max_tokens = std::min(terms.max_tokens, std::max(room, 1) * manager_.block_size());
    }
    if (found.blocks.empty()) {
      return find_room_in_pool(group, terms);
    }
    const auto num_found = static_cast<int>(found.blocks.size()) * manager_.block_size();
    const int num_tokens = std::min(terms.max_tokens, static_cast<int>(text.size()) - num_found);
    std::size_t num_restored = 0;
    if (!found.host_blocks.empty()) {
      // What the pool evicts, for this request or for others before it, must not take the place of what is found.
      host_cache_->touch(found.host_blocks);
      num_restored = found.host_blocks.size();
      if (num_taken(manager_, found.blocks, num_tokens) > num_available(manager_) - terms.spare_blocks) {
        return false;
      }
      if (!bring_back(manager_, evicted_, *host_cache_, found, known, salt, window())) {
        continue;  // with the pool alone
      }
    }
    if (!allocate_behind(manager_, group.live().front().sequence, found.blocks, salt, num_tokens, terms.spare_blocks)) {
      return false;
    }
    count_lookup(manager_, found.blocks.size() - num_restored);
    if (found.blocks.size() > found.num_first) {
      statistics_.prompts += 1;
      statistics_.tokens += static_cast<std::int64_t>(found.blocks.size() - found.num_first) * manager_.block_size();
    }
    return true;
  }
}

void WindowPromptScheduler::make_room_to_stand_in() {
  if (running().size() != 1 || num_available(manager_) > 0) {
    return;
  }
  for (const Branch& branch : running().front()->live()) {
    if (!manager_.contains(branch.sequence)) {
      continue;
    }
    const std::vector<int>& table = manager_.block_table(branch.sequence);
    const int num_hidden =
        num_hidden_blocks(manager_.length(branch.sequence) - num_in_flight(), window(), manager_.block_size());
    // The first one that is seen has the places, but for one: then free_hidden_blocks() finds a block without an owner,
    // and gives it all of them.
    for (int i = 1; i < num_hidden && table[0] != table[1]; ++i) {
      replace_block(manager_, branch.sequence, i, table[static_cast<std::size_t>(num_hidden)]);
    }
  }
}

}  // namespace
