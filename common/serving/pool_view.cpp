#include "common/serving/pool_view.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "common/base/json.h"
#include "common/base/machine.h"

namespace common {
namespace {

constexpr std::size_t kMaxRunning = 512;       // shown of the batch
constexpr std::size_t kMaxWaiting = 256;       // shown of the queue
constexpr std::size_t kMaxDrawnBlocks = 8192;  // as in page/drawing.js
constexpr std::size_t kMaxTextTokens = 4096;   // of one sequence; the rest of a longer one is drawn without text
constexpr std::size_t kMaxSteps = 512;         // in one record
constexpr std::size_t kMaxRecords = 2048;      // kept for clients that read slowly
constexpr std::size_t kMaxRecordBytes = 8 << 20;
constexpr std::size_t kMaxReadBytes = 1 << 18;  // at once: each client that reads has a copy
// A record that takes long to make is followed by a pause of this many times the time that it took.
constexpr double kLongRecordSeconds = 0.0005;
constexpr double kPauseAfterLongRecord = 19.0;

template <typename Values>
std::size_t equal_beginning(const Values& left, std::span<const typename Values::value_type> right) {
  const std::size_t count = std::min(left.size(), right.size());
  const auto end = left.begin() + static_cast<std::ptrdiff_t>(count);
  return static_cast<std::size_t>(std::mismatch(left.begin(), end, right.begin()).first - left.begin());
}

// A sequence that computes one token has it drawn next, even if that was a prompt of one token. Drafts stand behind
// such a token only.
int prompt_tokens_of(const StepReport& report) {
  int count = 0;
  for (std::size_t i = 0; i < report.num_queries.size(); ++i) {
    const bool has_drafts = i < report.num_drafts.size() && report.num_drafts[i] > 0;
    count += (report.num_queries[i] > 1 && !has_drafts) || report.is_chunk[i] ? report.num_queries[i] : 0;
  }
  return count;
}

Json steps_json(std::span<const StepReport> steps) {
  Json list = Json::array();
  for (const StepReport& step : steps) {
    const int prompt_tokens = prompt_tokens_of(step);
    const double milliseconds = 1000.0 * (step.scheduling_seconds + step.computing_seconds);
    list.push_back({step.index, prompt_tokens, step.num_tokens - prompt_tokens,
                    static_cast<double>(static_cast<std::int64_t>(100.0 * milliseconds)) / 100.0,
                    step.recomputed.size() + step.swapped_out.size(), step.copies.size(),
                    std::accumulate(step.num_drafts.begin(), step.num_drafts.end(), 0), step.num_accepted});
  }
  return list;
}

Json happened_json(std::span<const StepReport> steps) {
  std::map<std::string, std::vector<int>> ids;
  Json copies = Json::array();
  std::map<int, int> batch;
  for (const StepReport& step : steps) {
    for (const auto& [name, list] :
         {std::pair{"admitted", &step.admitted}, std::pair{"ended", &step.ended},
          std::pair{"recomputed", &step.recomputed}, std::pair{"swapped_out", &step.swapped_out}}) {
      if (!list->empty()) {
        ids[name].insert(ids[name].end(), list->begin(), list->end());
      }
    }
    for (const BlockMove& copy : step.copies) {
      copies.push_back({copy.source, copy.destination});
    }
    for (std::size_t i = 0; i < step.served.size(); ++i) {
      batch[step.served[i]] += step.num_served[i];
    }
  }
  Json happened = Json::object();
  for (const auto& [name, list] : ids) {
    happened[name] = list;
  }
  if (!copies.empty()) {
    happened["copies"] = std::move(copies);
  }
  happened["batch"] = Json::array();
  for (const auto& [id, count] : batch) {
    happened["batch"].push_back({id, count});
  }
  return happened;
}

std::vector<int> ids_of(const std::vector<PoolSnapshot::Owner>& requests) {
  std::vector<int> ids;
  ids.reserve(requests.size());
  for (const PoolSnapshot::Owner& request : requests) {
    ids.push_back(request.id);
  }
  return ids;
}

}  // namespace

void PoolView::update(const EngineNews& news) {
  if (num_watchers_ == 0) {
    forget();
    return;
  }
  if (news.report != nullptr && steps_.size() < kMaxSteps) {
    steps_.push_back(*news.report);
  }
  const double begin = now_seconds();
  if (!news.is_still && begin < next_record_at_) {
    return;
  }
  if (news.engine == nullptr) {
    forget();
    publish(Json{{"failure", news.failure}}.dump(), true);
    wants_whole_ = true;
    return;
  }
  // A new pool's blocks and requests are not the old pool's, though they have the same numbers.
  const bool is_new = news.pool != pool_;
  pool_ = news.pool;
  const bool is_whole = wants_whole_.exchange(false) || is_new;
  publish(record_of(news, is_whole), is_whole);
  // A record that took long because the machine was busy counts little: the typical time at most doubles.
  const double end = now_seconds();
  record_seconds_ = std::min(end - begin, std::max(2.0 * record_seconds_, kLongRecordSeconds / 8.0));
  next_record_at_ = record_seconds_ > kLongRecordSeconds ? end + kPauseAfterLongRecord * record_seconds_ : end;
}

void PoolView::forget() {
  steps_.clear();
  requests_.clear();
  running_.clear();
  waiting_.clear();
  cached_.clear();
  sizes_.clear();
}

void PoolView::publish(std::string json, bool is_whole) {
  {
    const std::lock_guard lock(mutex_);
    records_.push_back({std::move(json), is_whole});
    num_bytes_ += records_.back().json.size();  // only now: there may be no memory for the line above
    while (records_.size() > 1 && (records_.size() > kMaxRecords || num_bytes_ > kMaxRecordBytes)) {
      num_bytes_ -= records_.front().json.size();
      records_.pop_front();
      first_ += 1;
    }
  }
  changed_.notify_all();
}

std::string PoolView::record_of(const EngineNews& news, bool is_whole) {
  const EngineDescription engine = news.engine->description();
  const EngineStatus status = news.engine->status();
  PoolSnapshot pool = news.engine->pool();
  const std::size_t num_running = pool.running.size();
  const std::size_t num_waiting = pool.waiting.size();
  pool.running.resize(std::min(num_running, kMaxRunning));
  pool.waiting.resize(std::min(num_waiting, kMaxWaiting));
  Json record;
  if (is_whole) {
    const std::vector<StepReport> steps = std::move(steps_);
    forget();
    steps_ = steps;
    record["whole"] = true;
  }
  const Json sizes = {{"slots", engine.sizes.num_slots},
                      {"block_size", engine.sizes.block_size},
                      {"budget", engine.sizes.token_budget},
                      {"blocks", pool.num_blocks},
                      {"host_blocks", engine.num_host_blocks},
                      {"tier_blocks", status.host_cache.num_blocks},
                      {"window_blocks", status.window_pool.num_blocks},
                      {"max_sequences", engine.max_sequences},
                      {"context_length", engine.context_length},
                      {"max_drafts", engine.max_drafts},
                      {"window", engine.window},
                      {"reads_once", engine.reads_once},
                      {"pool", news.pool},
                      {"slots_at_start", news.num_slots_at_start},
                      {"is_changed", news.is_resized}};
  if (std::string text = sizes.dump(); text != sizes_) {
    sizes_ = std::move(text);
    record["sizes"] = sizes;
  }
  record["paused"] = news.is_paused;
  if (news.is_draining) {
    record["draining"] = true;
  }
  record["steps"] = steps_json(steps_);
  record["happened"] = happened_json(steps_);
  if (!steps_.empty() && !steps_.back().drafts.empty()) {
    record["happened"]["drafts"] = drafts_json(steps_.back());
  }
  if (!steps_.empty() && !steps_.back().shared_blocks.empty()) {
    record["happened"]["shared"] = {steps_.back().shared_blocks, steps_.back().num_reads_saved};
  }
  steps_.clear();
  for (const auto& [name, known, now] : {std::tuple{"running", &running_, ids_of(pool.running)},
                                         std::tuple{"waiting", &waiting_, ids_of(pool.waiting)}}) {
    if (is_whole || *known != now) {
      *known = now;
      record[name] = now;
    }
  }
  std::set<int> shown(running_.begin(), running_.end());
  shown.insert(waiting_.begin(), waiting_.end());
  std::erase_if(requests_, [&](const auto& known) { return !shown.contains(known.first); });
  record["requests"] = Json::array();
  for (const auto* const requests : {&pool.running, &pool.waiting}) {
    for (const PoolSnapshot::Owner& request : *requests) {
      if (Json changes = changes_of(request); !changes.empty()) {
        record["requests"].push_back(std::move(changes));
      }
    }
  }
  add_cached(pool, record);
  record["num_running"] = num_running;
  record["num_waiting"] = num_waiting;
  record["counters"] = {{"used", status.slots.used},
                        {"reserved", status.slots.reserved},
                        {"cached", status.slots.cached},
                        {"host_used", status.num_host_blocks_used},
                        {"tier_allocated", status.host_cache.num_allocated},
                        {"tier_used", status.host_cache.num_used},
                        {"tier_restored", status.host_cache.restored},
                        {"window_held", status.window_pool.num_held},
                        {"generated", news.num_generated},
                        {"preemptions", news.tally->num_preemptions()},
                        {"copied", status.blocks_copied},
                        {"moved", status.blocks_moved},
                        {"lookups", status.prefix.lookups},
                        {"hits", status.prefix.hits},
                        {"saved", status.prefix.tokens_saved},
                        {"evictions", status.prefix.evictions},
                        {"found", status.prefix.prompt_tokens_found},
                        {"drafts", news.tally->steps.drafts},
                        {"accepted", news.tally->steps.accepted}};
  return record.dump();
}

Json PoolView::drafts_json(const StepReport& step) const {
  Json list = Json::array();
  for (const SequenceDrafts& drafts : step.drafts) {
    list.push_back({drafts.request, drafts.sequence, drafts.position, drafts.num_accepted, texts_of(drafts.tokens)});
    if (drafts.drawn.has_value()) {
      list.back().push_back(texts_of({&*drafts.drawn, 1}).front());
    }
  }
  return list;
}

// Empty: nothing has changed.
Json PoolView::changes_of(const PoolSnapshot::Owner& request) {
  const auto [found, is_new] = requests_.try_emplace(request.id);
  KnownRequest& known = found->second;
  Json changes;
  if (is_new || known.is_swapped != request.is_swapped) {
    known.is_swapped = request.is_swapped;
    changes = {{"prompt", request.prompt_tokens}, {"max", request.max_tokens}, {"swapped", request.is_swapped}};
  }
  Json sequences = Json::array();
  std::set<int> ids;
  for (const PoolSnapshot::Sequence& sequence : request.sequences) {
    ids.insert(sequence.id);
    if (Json entry = changes_of(sequence, known.sequences[sequence.id]); !entry.empty()) {
      sequences.push_back(std::move(entry));
    }
  }
  std::vector<int> gone;
  for (const auto& [id, sequence] : known.sequences) {
    if (!ids.contains(id)) {
      gone.push_back(id);
    }
  }
  std::erase_if(known.sequences, [&](const auto& sequence) { return !ids.contains(sequence.first); });
  if (!sequences.empty()) {
    changes["sequences"] = std::move(sequences);
  }
  if (!gone.empty()) {
    changes["gone"] = gone;
  }
  if (!changes.empty()) {
    changes["id"] = request.id;
  }
  return changes;
}

Json PoolView::changes_of(const PoolSnapshot::Sequence& sequence, KnownSequence& known) const {
  const std::span<const Token> tokens =
      std::span(sequence.tokens).first(std::min(sequence.tokens.size(), kMaxTextTokens));
  const std::size_t same_blocks = equal_beginning(known.block_table, sequence.block_table);
  const std::size_t same_tokens = equal_beginning(known.tokens, tokens);
  if (known.length == sequence.length && same_blocks == known.block_table.size() &&
      same_blocks == sequence.block_table.size() && same_tokens == known.tokens.size() && known.length > 0) {
    return {};
  }
  known.block_table.assign(sequence.block_table.begin(), sequence.block_table.end());
  known.tokens.assign(tokens.begin(), tokens.end());
  known.length = sequence.length;
  Json changes = {{"id", sequence.id}, {"length", sequence.length}};
  changes["from"] = same_blocks;
  changes["blocks"] = sequence.block_table.subspan(same_blocks);
  changes["at"] = same_tokens;
  changes["texts"] = texts_of(tokens.subspan(same_tokens));
  return changes;
}

void PoolView::add_cached(const PoolSnapshot& pool, Json& record) {
  const std::size_t num_drawn = std::min(static_cast<std::size_t>(pool.num_blocks), kMaxDrawnBlocks);
  std::vector<bool> is_cached(num_drawn);
  cached_.resize(num_drawn);
  Json added = Json::array();
  for (std::size_t i = 0; i < pool.cached_blocks.size(); ++i) {
    const auto block = static_cast<std::size_t>(pool.cached_blocks[i]);
    if (block >= num_drawn) {
      continue;
    }
    is_cached[block] = true;
    const std::span<const Token> tokens = pool.cached_tokens[i];
    if (!std::equal(tokens.begin(), tokens.end(), cached_[block].begin(), cached_[block].end())) {
      cached_[block].assign(tokens.begin(), tokens.end());
      added.push_back({block, texts_of(tokens)});
    }
  }
  std::vector<std::size_t> removed;
  for (std::size_t block = 0; block < num_drawn; ++block) {
    if (!is_cached[block] && !cached_[block].empty()) {
      cached_[block].clear();
      removed.push_back(block);
    }
  }
  if (!added.empty()) {
    record["cached"] = std::move(added);
  }
  if (!removed.empty()) {
    record["uncached"] = removed;
  }
}

Json PoolView::texts_of(std::span<const Token> tokens) const {
  Json texts = Json::array();
  for (const Token& token : tokens) {
    texts.push_back(tokenizer_ == nullptr ? std::to_string(token) : tokenizer_->decode({&token, 1}, true));
  }
  return texts;
}

PoolView::Watcher::Watcher(PoolView& view) : view_(view) {
  const std::lock_guard lock(view_.mutex_);
  next_ = view_.first_ + static_cast<std::int64_t>(view_.records_.size());
  view_.num_watchers_ += 1;
  view_.wants_whole_ = true;
}

std::vector<std::string> PoolView::Watcher::read(std::chrono::milliseconds timeout) {
  std::vector<std::string> result;
  std::unique_lock lock(view_.mutex_);
  const auto end = [&] { return view_.first_ + static_cast<std::int64_t>(view_.records_.size()); };
  view_.changed_.wait_for(lock, timeout, [&] { return next_ < end(); });
  if (next_ < view_.first_) {
    needs_whole_ = true;
    next_ = end();
  }
  std::size_t num_bytes = 0;
  for (; next_ < end() && num_bytes < kMaxReadBytes; ++next_) {
    const Record& record = view_.records_[static_cast<std::size_t>(next_ - view_.first_)];
    needs_whole_ = needs_whole_ && !record.is_whole;
    if (!needs_whole_) {
      result.push_back(record.json);
      num_bytes += record.json.size();
    }
  }
  if (needs_whole_) {  // again, in case that making it has failed
    view_.wants_whole_ = true;
  }
  return result;
}

}  // namespace common
