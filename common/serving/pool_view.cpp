#include "common/serving/pool_view.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "common/base/machine.h"
#include "common/base/text.h"

namespace common {
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

std::string list(const std::vector<int>& ids) {
  std::string text;
  for (const int id : ids) {
    text += (text.empty() ? "" : ", ") + std::to_string(id);
  }
  return text;
}

}  // namespace

ordered_json blocks_json(const PoolSnapshot& pool) {
  constexpr int kFree = -1;
  constexpr int kCached = -2;
  std::vector<int> owners;
  std::vector<int> num_tables;
  std::vector<int> num_tokens;
  for (const BlockState& block : block_states(pool, kMaxBlocks)) {
    owners.push_back(block.is_cached ? kCached : block.num_tables == 0 ? kFree : block.owner);
    num_tables.push_back(block.num_tables);
    num_tokens.push_back(block.num_tokens);
  }
  return {{"block_size", pool.block_size},
          {"total", pool.num_blocks},
          {"owner", owners},
          {"owners", num_tables},
          {"fill", num_tokens}};
}

void PoolView::update(const EngineNews& news) {
  if (news.report != nullptr) {
    note_events(news);
  }
  const double now = now_seconds();
  if (num_watchers_ == 0 || (!news.is_still && now - made_at_ < kSecondsBetweenStates)) {
    return;
  }
  made_at_ = now;
  auto json =
      std::make_shared<const std::string>(news.engine == nullptr ? dump({{"failure", news.failure}}) : to_json(news));
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
    events_.push_back(format("step %lld: ", static_cast<long long>(report.index)) + text);
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
  if (report.blocks_copied > 0) {
    note(format("%lld block%s copied", static_cast<long long>(report.blocks_copied),
                report.blocks_copied == 1 ? "" : "s"));
  }
  note_ids("ended: ", report.ended);
  const double now = now_seconds();
  progress_.emplace_back(now, news.num_generated);
  while (now - progress_.front().first > kSpeedSeconds) {
    progress_.pop_front();
  }
}

std::string PoolView::to_json(const EngineNews& news) const {
  const EngineDescription engine = news.engine->description();
  const EngineStatus status = news.engine->status();
  const PoolSnapshot pool = news.engine->pool();
  std::map<int, int> served;  // tokens in the last step, by request
  for (std::size_t i = 0; i < report_.served.size(); ++i) {
    served[report_.served[i]] = report_.num_served[i];
  }
  const auto text_of = [&](std::span<const Token> tokens) {
    tokens = tokens.last(std::min(tokens.size(), kMaxTokensShown));
    return tokenizer_ == nullptr ? std::to_string(tokens.size()) + " tokens" : tokenizer_->decode(tokens);
  };
  const auto describe = [&](const PoolSnapshot::Owner& request) {
    ordered_json entry = {{"id", request.id}, {"served", served.contains(request.id) ? served[request.id] : 0}};
    std::set<int> blocks;
    int length = 0;
    entry["tables"] = ordered_json::array();
    entry["swapped"] = request.is_swapped;
    for (const PoolSnapshot::Sequence& sequence : request.sequences) {
      blocks.insert(sequence.block_table.begin(), sequence.block_table.end());
      length = std::max(length, sequence.length);
      entry["tables"].push_back(sequence.block_table);
    }
    entry["blocks"] = blocks.size();
    entry["length"] = length;
    entry["texts"] = ordered_json::array();
    for (const std::span<const Token> text : request.texts) {
      entry["texts"].push_back(text_of(text));
    }
    return entry;
  };
  const auto describe_first = [&](const std::vector<PoolSnapshot::Owner>& requests) {
    ordered_json entries = ordered_json::array();
    for (std::size_t i = 0; i < std::min(requests.size(), kMaxRequests); ++i) {
      entries.push_back(describe(requests[i]));
    }
    return entries;
  };
  const double seconds = progress_.empty() ? 0.0 : progress_.back().first - progress_.front().first;
  ordered_json document;
  document["paused"] = news.is_paused;
  document["generated"] = news.num_generated;
  document["step"] = report_.index;
  document["step_tokens"] = report_.num_tokens;
  document["blocks"] = blocks_json(pool);
  document["host"] = {{"total", engine.num_host_blocks}, {"used", status.num_host_blocks_used}};
  document["running"] = describe_first(pool.running);
  document["num_running"] = pool.running.size();
  document["waiting"] = describe_first(pool.waiting);
  document["num_waiting"] = pool.waiting.size();
  document["counters"] = {
      {"slots", status.slots.total},
      {"used", status.slots.used},
      {"reserved", status.slots.reserved},
      {"cached", status.slots.cached},
      {"preemptions", news.tally->num_preemptions()},
      {"copied", status.blocks_copied},
      {"prefix_lookups", status.prefix.lookups},
      {"prefix_hits", status.prefix.hits},
      {"tokens_saved", status.prefix.tokens_saved},
      {"evictions", status.prefix.evictions},
      {"tokens_per_second",
       seconds > 0.1 ? static_cast<double>(progress_.back().second - progress_.front().second) / seconds : 0.0}};
  document["sizes"] = {{"slots", status.slots.total},
                       {"block_size", engine.sizes.block_size},
                       {"budget", engine.sizes.token_budget},
                       {"max_sequences", engine.max_sequences}};
  document["events"] = {{"last", num_events_}, {"texts", events_}};
  return dump(document);
}

}  // namespace common
