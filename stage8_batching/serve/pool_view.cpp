#include "pool_view.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "common/base/machine.h"
#include "common/base/text.h"

namespace stage8 {
namespace {

using nlohmann::ordered_json;

constexpr int kMaxBlocks = 2048;
constexpr std::size_t kMaxEvents = 40;
constexpr std::size_t kMaxRequests = 64;  // shown of the batch, and of the queue
constexpr std::size_t kMaxTokensShown = 48;
constexpr double kSecondsBetweenStates = 0.04;
constexpr double kSpeedSeconds = 2.0;  // tokens a second are a mean over so long

// Texts may end in the middle of a character.
std::string dump(const ordered_json& document) {
  return document.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

ordered_json blocks_of(const KvCacheManager& manager, const OwnerOfSequence& owners) {
  const int block_size = manager.block_size();
  const int total = manager.usage().total / block_size;
  const auto shown = static_cast<std::size_t>(std::min(total, kMaxBlocks));
  std::vector<int> owner(shown, -1);
  std::vector<int> num_owners(shown, 0);
  std::vector<int> fill(shown, 0);
  for (const auto& [sequence, name] : owners) {
    const std::vector<int>& table = manager.block_table(sequence);
    const int length = manager.length(sequence);
    for (std::size_t i = 0; i < table.size(); ++i) {
      const auto block = static_cast<std::size_t>(table[i]);
      if (block < shown) {
        owner[block] = owner[block] < 0 ? name : std::min(owner[block], name);
        num_owners[block] = manager.reference_count(table[i]);
        const int used = std::clamp(length - static_cast<int>(i) * block_size, 0, block_size);
        fill[block] = std::max(fill[block], used);
      }
    }
  }
  for (const int block : manager.prefix_cache().evictable()) {
    if (static_cast<std::size_t>(block) < shown) {
      owner[static_cast<std::size_t>(block)] = -2;
      fill[static_cast<std::size_t>(block)] = block_size;
    }
  }
  return {{"block_size", block_size}, {"total", total}, {"owner", owner}, {"owners", num_owners}, {"fill", fill}};
}

std::string list(const std::vector<int>& ids) {
  std::string text;
  for (const int id : ids) {
    text += (text.empty() ? "" : ", ") + std::to_string(id);
  }
  return text;
}

}  // namespace

std::string blocks_json(const KvCacheManager& manager, const OwnerOfSequence& owners) {
  return blocks_of(manager, owners).dump();
}

void PoolView::update(const EngineNews& news) {
  if (news.report != nullptr) {
    note_events(news);
  }
  const double now = common::now_seconds();
  if (num_watchers_ == 0 || (!news.is_still && now - made_at_ < kSecondsBetweenStates)) {
    return;
  }
  made_at_ = now;
  auto json =
      std::make_shared<const std::string>(news.server == nullptr ? dump({{"failure", news.failure}}) : to_json(news));
  {
    const std::lock_guard lock(mutex_);
    state_.version += 1;
    state_.json = std::move(json);
  }
  changed_.notify_all();
}

PoolView::State PoolView::wait(std::int64_t version, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return state_.version != version; });
  return state_;
}

void PoolView::note_events(const EngineNews& news) {
  report_ = *news.report;
  const StepReport& report = report_;
  const auto note = [&](const std::string& text) {
    events_.push_back(common::format("step %lld: ", static_cast<long long>(report.index)) + text);
    num_events_ += 1;
    if (events_.size() > kMaxEvents) {
      events_.pop_front();
    }
  };
  const auto note_ids = [&](const char* what, const std::vector<int>& ids) {
    if (!ids.empty()) {
      note(what + list(ids));
    }
  };
  note_ids("swapped out, because a block was missing: ", report.swapped_out);
  note_ids("preempted, because a block was missing: ", report.recomputed);
  note_ids("admitted: ", report.admitted);
  const auto copied = static_cast<std::int64_t>(common::counter(news.server->engine().counters(), "blocks_copied"));
  const auto moved = copied - copied_;
  copied_ = copied;
  if (moved > 0) {
    note(common::format("%lld block%s copied", static_cast<long long>(moved), moved == 1 ? "" : "s"));
  }
  note_ids("ended: ", report.ended);
  preemptions_ += static_cast<std::int64_t>(report.swapped_out.size() + report.recomputed.size());
  const double now = common::now_seconds();
  progress_.emplace_back(now, news.num_generated);
  while (now - progress_.front().first > kSpeedSeconds) {
    progress_.pop_front();
  }
}

std::string PoolView::to_json(const EngineNews& news) const {
  const Server& server = *news.server;
  const Scheduler& scheduler = server.scheduler();
  const KvCacheManager& manager = scheduler.manager();
  const Usage usage = manager.usage();
  std::map<int, int> served;  // tokens in the last step, by request
  for (std::size_t i = 0; i < report_.served.size(); ++i) {
    served[report_.served[i]] = report_.num_served[i];
  }
  const auto text_of = [&](std::vector<common::Token> tokens) {
    if (tokens.size() > kMaxTokensShown) {
      tokens.erase(tokens.begin(), tokens.end() - static_cast<std::ptrdiff_t>(kMaxTokensShown));
    }
    return tokenizer_ == nullptr ? std::to_string(tokens.size()) + " tokens" : tokenizer_->decode(tokens);
  };
  const auto describe = [&](const SequenceGroup& group) {
    ordered_json entry = {{"id", group.id()}, {"served", served.contains(group.id()) ? served[group.id()] : 0}};
    std::set<int> blocks;
    int length = 0;
    entry["tables"] = ordered_json::array();
    entry["swapped"] = false;
    for (const SequenceId sequence : group.sequences()) {
      if (manager.is_swapped(sequence)) {
        entry["swapped"] = true;
        continue;
      }
      const std::vector<int>& table = manager.block_table(sequence);
      blocks.insert(table.begin(), table.end());
      length = std::max(length, manager.length(sequence));
      entry["tables"].push_back(table);
    }
    entry["blocks"] = blocks.size();
    entry["length"] = length;
    entry["texts"] = ordered_json::array();
    const std::vector<common::Completion>& completions = server.output(group.id()).completions;
    for (const common::Completion& completion : completions) {
      entry["texts"].push_back(text_of(completion.tokens));
    }
    for (std::size_t i = 0; completions.empty() && i < group.live().size(); ++i) {  // beams
      entry["texts"].push_back(text_of(group.live()[i].tokens));
    }
    return entry;
  };
  OwnerOfSequence owners;
  ordered_json running = ordered_json::array();
  for (const auto& group : scheduler.running()) {
    for (const SequenceId sequence : group->sequences()) {
      if (!manager.is_swapped(sequence)) {
        owners[sequence] = group->id();
      }
    }
    if (running.size() < kMaxRequests) {
      running.push_back(describe(*group));
    }
  }
  ordered_json waiting = ordered_json::array();
  for (std::size_t i = 0; i < std::min(scheduler.waiting().size(), kMaxRequests); ++i) {
    waiting.push_back(describe(*scheduler.waiting()[i]));
  }
  const double seconds = progress_.empty() ? 0.0 : progress_.back().first - progress_.front().first;
  const EngineOptions& options = server.engine().options();
  const int num_host_blocks = blocks_needed(options.num_host_slots, options.block_size);
  const PrefixStatistics& prefix = manager.prefix_cache().statistics();
  ordered_json document;
  document["paused"] = news.is_paused;
  document["generated"] = news.num_generated;
  document["step"] = report_.index;
  document["step_tokens"] = report_.num_tokens;
  document["blocks"] = blocks_of(manager, owners);
  document["host"] = {{"total", num_host_blocks}, {"used", num_host_blocks - manager.num_free_host_blocks()}};
  document["running"] = running;
  document["num_running"] = scheduler.running().size();
  document["waiting"] = waiting;
  document["num_waiting"] = scheduler.waiting().size();
  document["counters"] = {
      {"slots", usage.total},
      {"used", usage.used},
      {"reserved", usage.reserved},
      {"cached", usage.cached},
      {"preemptions", preemptions_},
      {"copied", copied_},
      {"prefix_lookups", prefix.lookups},
      {"prefix_hits", prefix.hits},
      {"tokens_saved", prefix.tokens_saved},
      {"evictions", prefix.evictions},
      {"tokens_per_second",
       seconds > 0.1 ? static_cast<double>(progress_.back().second - progress_.front().second) / seconds : 0.0}};
  document["sizes"] = {{"slots", usage.total},
                       {"block_size", manager.block_size()},
                       {"budget", options.chunk_size},
                       {"max_sequences", options.max_sequences}};
  document["events"] = {{"last", num_events_}, {"texts", events_}};
  return dump(document);
}

}  // namespace
