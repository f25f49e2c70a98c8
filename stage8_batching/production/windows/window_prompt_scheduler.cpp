#include "window_prompt_scheduler.h"

#include <algorithm>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/base/text.h"
#include "finding_room.h"
#include "hidden_blocks.h"
#include "local_pool.h"
#include "window_prompts.h"

namespace stage8 {
namespace {

// Names a member that a class derived from the group may use. A pointer to it serves for every group.
struct GroupMembers : SequenceGroup {
  static constexpr auto kRequest = &GroupMembers::request_;
};
static_assert(std::is_nothrow_move_assignable_v<common::Request>);

}  // namespace

WindowPromptScheduler::WindowPromptScheduler(int window, int num_in_flight, KvCacheManager& manager,
                                             const SchedulerOptions& options, bool use_prefix_cache, int default_drafts,
                                             const TokenCost& cost)
    : WindowScheduler(window, num_in_flight, manager, options, use_prefix_cache, default_drafts, cost),
      evicted_(manager.usage().total / manager.block_size()) {
  manager.on_evict([this](int block) { evicted_.add(manager_.prefix_cache(), block); });
}

ScheduledStep WindowPromptScheduler::schedule() {
  make_room_to_stand_in();
  return WindowScheduler::schedule();
}

bool WindowPromptScheduler::is_beyond(const common::Request& request, int num_sequences) const {
  return max_slots_of(request, num_sequences, manager_.block_size()) / manager_.block_size() > evicted_.num_blocks();
}

std::string WindowPromptScheduler::obstacle(const common::Request& request, int num_sequences) const {
  const int total = evicted_.num_blocks();
  const int needed = max_held(num_sequences);
  if (!is_beyond(request, num_sequences) || needed <= total) {
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

bool WindowPromptScheduler::find_room(SequenceGroup& group, const Admission& admission) {
  const bool is_long = is_beyond(group) && running().empty();
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
  FoundBlocks found;
  if (admission.use_prefix_cache && group.request().num_scored == 0) {
    found = find_window(manager_, evicted_, std::span(text).first(text.size() - 1), salt, window());
  }
  Admission terms = admission;
  if (is_long) {
    const int room = num_available(manager_) - num_taken(manager_, found.blocks, 0) - admission.spare_blocks;
    terms.max_tokens = std::min(terms.max_tokens, std::max(room, 1) * manager_.block_size());
  }
  if (found.blocks.empty()) {
    return WindowScheduler::find_room(group, terms);
  }
  const auto num_found = static_cast<int>(found.blocks.size()) * manager_.block_size();
  const int num_tokens = std::min(terms.max_tokens, static_cast<int>(text.size()) - num_found);
  if (!allocate_behind(manager_, group.live().front().sequence, found.blocks, salt, num_tokens, terms.spare_blocks)) {
    return false;
  }
  if (found.blocks.size() > found.num_first) {
    statistics_.prompts += 1;
    statistics_.tokens += num_found - static_cast<std::int64_t>(found.num_first) * manager_.block_size();
  }
  return true;
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

int submit_beyond(Engine& engine, const GenerationRequest& request, TokenSink sink, std::optional<double> arrival) {
  const auto* const scheduler = dynamic_cast<const WindowPromptScheduler*>(&engine.scheduler());
  common::Request whole = request.request;
  const std::int64_t length = static_cast<std::int64_t>(whole.prompt.size()) + whole.max_new_tokens;
  const auto is_known = [&](common::Token token) { return token >= 0 && token < engine.model().config().vocab_size; };
  if (scheduler == nullptr || whole.prompt.empty() || whole.max_new_tokens < 1 || length > engine.context_length() ||
      !std::all_of(whole.prompt.begin(), whole.prompt.end(), is_known) || request.num_samples < 1 ||
      !scheduler->is_beyond(whole, request.num_samples) || !scheduler->obstacle(whole, request.num_samples).empty()) {
    return engine.submit(request, std::move(sink), arrival);
  }
  // The engine would reject it for its length alone. So it takes a request for a token after the first one, and that
  // becomes the whole request before anything is scheduled.
  GenerationRequest first = request;
  first.request.prompt.resize(1);
  first.request.max_new_tokens = 1;
  const int id = engine.submit(first, std::move(sink), arrival);
  if (!engine.output(id).finished()) {
    (*scheduler->waiting().back()).*GroupMembers::kRequest = std::move(whole);
  }
  return id;
}

}  // namespace
