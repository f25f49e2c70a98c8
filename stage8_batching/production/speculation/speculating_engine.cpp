#include "speculating_engine.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../host_cache/host_blocks.h"
#include "../host_cache/host_cache_runner.h"
#include "../host_cache/host_cache_scheduler.h"
#include "../scoring/prompt_scores.h"
#include "../windows/local_pool_scheduler.h"
#include "../windows/window_prompt_scheduler.h"
#include "common/base/check.h"

namespace stage8 {
namespace {

// What tokens and drafts cost with the runner.
TokenCost token_cost(const common::Llama& model, const GpuOptions& gpu, const Runner& runner) {
  if (!runner.is_asynchronous()) {
    return kCpuTokenCost;
  }
  const double bytes = gpu.types.weights == common::WeightType::kFloat8      ? 1.0
                       : gpu.types.precision == common::Precision::kBFloat16 ? 2.0
                                                                             : 4.0;
  return gpu_token_cost(model.config().num_layers,
                        bytes * static_cast<double>(model.num_parameters()) / gpu.tensor_parallel);
}

// Null if all layers are in one pool.
std::shared_ptr<LocalPool> separate_windows(const common::LlamaConfig& config, const EngineOptions& options,
                                            Runner& runner) {
  auto* const windows = dynamic_cast<SeparateWindows*>(&runner);
  const auto num_parts = [&](int num_blocks) {
    return num_local_parts(config, options, {.num_blocks = num_blocks, .block_size = runner.cache().block_size});
  };
  const int num_blocks = blocks_needed(options.num_slots.value_or(0), options.block_size);
  return windows != nullptr && config.has_both_kinds() ? windows->separate_windows(num_parts, num_blocks) : nullptr;
}

}  // namespace

SpeculatingEngine::SpeculatingEngine(const common::Llama& model, const EngineOptions& options,
                                     std::unique_ptr<Runner> runner, Clock& clock, const MakeScheduler& make_scheduler,
                                     RowScoring* scoring, const SharedReading* sharing)
    : Engine(model, options, std::move(runner), clock, make_scheduler),
      speculating_(dynamic_cast<SpeculatingScheduler&>(*scheduler_)),
      scoring_(scoring),
      sharing_(sharing) {}

Step SpeculatingEngine::prepare(std::vector<ScheduledGroup> groups) {
  report_drafts(groups);
  Step step(manager_, std::move(groups));
  std::vector<common::ScoredRow> scored = scored_rows(step);
  const RaggedBatch& batch = with_drafts(step.batch(), scored);
  if (scoring_ != nullptr) {
    scoring_->score_next(std::move(scored));
  }
  step.enqueued(forward(batch), batch.logits_rows.size(), !speculating_.is_awaited() && may_run_ahead(step));
  report_reads(batch, batch.num_tokens() - step.batch().num_tokens());
  return step;
}

const RaggedBatch& SpeculatingEngine::with_drafts(const RaggedBatch& own, std::span<common::ScoredRow> scored_rows) {
  first_rows_.clear();
  if (!speculating_.has_drafts()) {
    return own;
  }
  batch_ = {};
  batch_.sampling_rows = own.sampling_rows;
  std::vector<int> places(own.tokens.size());   // by token of the step: where it stands in this batch
  for (const bool is_single : {true, false}) {  // sequences with one token come first, and drafts are further tokens
    for (std::size_t i = 0; i < own.num_sequences(); ++i) {
      const std::span<const common::Token> known = own.tokens_of(i);
      const std::span<const common::Token> drafts = speculating_.drafts_of(own.sequences[i]);
      std::vector<common::Token> tokens(known.begin(), known.end());
      tokens.insert(tokens.end(), drafts.begin(), drafts.end());
      if ((tokens.size() == 1) != is_single) {
        continue;
      }
      const auto first = places.begin() + own.query_starts[i];
      std::iota(first, first + own.num_queries(i), batch_.num_tokens());
      batch_.add(manager_, own.sequences[i], tokens, false);
    }
  }
  for (const int row : own.logits_rows) {
    batch_.logits_rows.push_back(places[static_cast<std::size_t>(row)]);
  }
  for (common::ScoredRow& scored : scored_rows) {
    scored.row = places[static_cast<std::size_t>(scored.row)];
  }
  for (const PendingToken& pending : own.pending_tokens) {
    batch_.pending_tokens.push_back({places[static_cast<std::size_t>(pending.index)], pending.row});
  }
  for (std::size_t i = 0; i < own.num_sequences(); ++i) {
    const int last = own.query_starts[i + 1] - 1;
    const auto row = std::find(own.logits_rows.begin(), own.logits_rows.end(), last) - own.logits_rows.begin();
    add_rows(own.sequences[i], static_cast<std::size_t>(row), places[static_cast<std::size_t>(last)]);
  }
  return batch_;
}

void SpeculatingEngine::add_rows(SequenceId sequence, std::size_t row, int index) {
  first_rows_[sequence] = static_cast<int>(batch_.logits_rows.size());
  for (std::size_t left = speculating_.drafts_of(sequence).size(); left > 0; --left) {
    if (!batch_.sampling_rows.empty()) {
      SamplingRow behind = batch_.sampling_rows[row];
      behind.used.push_back(batch_.tokens[static_cast<std::size_t>(index)]);  // its text has all tokens before
      row = batch_.sampling_rows.size();
      batch_.sampling_rows.push_back(std::move(behind));
    }
    batch_.logits_rows.push_back(++index);
  }
}

void SpeculatingEngine::extend(const Step& step, const ScheduledGroup& scheduled, int row) {
  SequenceGroup& group = *scheduled.group;
  check_scores(group);
  Engine::extend(step, scheduled, row);
  const auto num_drafts = static_cast<int>(speculating_.drafts_of(scheduled.tokens.sequences.front()).size());
  for (int draft = 0; draft < num_drafts && !group.finished(); ++draft) {
    const auto is_right = [&](const Branch& branch) {
      return branch.tokens.back() == speculating_.drafts_of(branch.sequence)[static_cast<std::size_t>(draft)];
    };
    if (!std::all_of(group.live().begin(), group.live().end(), is_right)) {
      return;
    }
    commit_last(manager_, group, options_.prefix_cache);
    StepReport& report = reporter_.report();
    report.num_accepted += report.num_drafts.empty() ? 0 : static_cast<int>(group.live().size());
    speculating_.count_accepted(group);
    for (common::SequenceDrafts& drafts : report.drafts) {
      const auto is_its = [&](const Branch& branch) { return branch.sequence == drafts.sequence; };
      drafts.num_accepted += std::any_of(group.live().begin(), group.live().end(), is_its) ? 1 : 0;
    }
    group.extend(result_behind(step, group, draft), clock_.now());
  }
}

GroupResult SpeculatingEngine::result_behind(const Step& step, const SequenceGroup& group, int draft) const {
  GroupResult result;
  for (const Branch& branch : group.live()) {
    GroupResult row = step.result(first_rows_.at(branch.sequence) + draft, 1);
    std::move(row.tokens.begin(), row.tokens.end(), std::back_inserter(result.tokens));
    std::move(row.logits.begin(), row.logits.end(), std::back_inserter(result.logits));
  }
  return result;
}

void SpeculatingEngine::report_drafts(const std::vector<ScheduledGroup>& groups) noexcept {
  const bool is_repeated = groups.size() != reporter_.report().num_served.size();  // a pass for a group alone
  if (is_repeated || !speculating_.has_drafts()) {
    return;
  }
  try {
    StepReport report = reporter_.report();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      for (const SequenceId sequence : groups[i].tokens.sequences) {
        const std::span<const common::Token> drafts = speculating_.drafts_of(sequence);
        const auto num_drafts = static_cast<int>(drafts.size());
        report.num_queries[report.num_drafts.size()] += num_drafts;
        report.num_drafts.push_back(num_drafts);
        report.num_served[i] += num_drafts;
        if (num_drafts > 0) {
          const int position = manager_.length(sequence) + 1;  // behind the text's last token
          report.drafts.push_back({groups[i].group->id(), sequence, position, {drafts.begin(), drafts.end()}});
        }
      }
    }
    reporter_.report() = std::move(report);
  } catch (const std::bad_alloc&) {  // the report has no drafts
  }
}

void SpeculatingEngine::report_reads(const RaggedBatch& batch, int num_drafts) noexcept {
  StepReport& report = reporter_.report();
  report.num_read += num_drafts;
  const common::LlamaConfig& config = model_.config();
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    const int length = batch.context_lengths[i];
    reads_saved_ += std::int64_t{length} * config.num_layers - config.num_reads(length, batch.num_queries(i));
  }
  report.num_read -= reads_saved_ / config.num_layers;
  reads_saved_ %= config.num_layers;
  if (sharing_ != nullptr) {
    const std::int64_t blocks_saved = sharing_->figures().blocks_saved;
    const std::int64_t num_saved = (blocks_saved - std::exchange(blocks_saved_, blocks_saved)) * cache().block_size;
    report.num_read -= num_saved;
    report.bytes_saved += num_saved * cache().bytes_per_slot;
  }
}

void commit_last(KvCacheManager& manager, const SequenceGroup& group, bool use_prefix_cache) {
  for (const Branch& branch : group.live()) {
    manager.commit(branch.sequence, 1);
    if (use_prefix_cache) {
      manager.publish(branch.sequence, {&branch.tokens.back(), 1});
    }
  }
}

std::unique_ptr<SpeculatingEngine> make_speculating_engine(const common::Llama& model, const EngineOptions& options,
                                                           std::unique_ptr<Runner> runner, int num_drafts, Clock& clock,
                                                           const std::optional<TokenCost>& cost,
                                                           int num_host_cache_blocks) {
  const TokenCost chosen = cost.value_or(token_cost(model, options.gpu, *runner));
  auto* const scoring = dynamic_cast<RowScoring*>(runner.get());
  const auto* const sharing = dynamic_cast<const SharedReading*>(runner.get());
  const common::LlamaConfig& config = model.config();
  auto* const host_blocks = dynamic_cast<HostBlocks*>(runner.get());
  // First: it may change the number of blocks.
  const std::shared_ptr<LocalPool> local_pool = separate_windows(config, options, *runner);
  const CacheSize& size = runner->cache();
  const int num_swap_blocks = size.num_host_blocks - num_host_cache_blocks;
  if (host_blocks != nullptr) {
    host_blocks->allocate(num_swap_blocks);
  }
  std::shared_ptr<HostCache> host_cache;
  if (num_host_cache_blocks > 0) {
    const int num_there =
        host_blocks == nullptr ? num_host_cache_blocks : host_blocks->num_allocated() - num_swap_blocks;
    host_cache = std::make_shared<HostCache>(size.num_blocks + num_swap_blocks, num_host_cache_blocks, size.block_size,
                                             num_there);
    runner = std::make_unique<HostCacheRunner>(std::move(runner), host_cache);
  }
  // If one layer sees all tokens, all blocks are needed.
  const int window = config.has_windows() && config.global_period == 0 ? config.window : 0;
  const bool runs_ahead = options.scheduler.run_ahead.value_or(runner->is_asynchronous());
  const auto make_scheduler = [&](KvCacheManager& manager, const SchedulerOptions& scheduler,
                                  bool use_prefix_cache) -> std::unique_ptr<Scheduler> {
    const int num_in_flight = runs_ahead ? scheduler.token_budget : 0;
    if (local_pool != nullptr) {
      return std::make_unique<LocalPoolScheduler>(local_pool, manager, scheduler, use_prefix_cache, num_drafts, chosen,
                                                  host_cache);
    }
    if (window > 0) {
      return std::make_unique<WindowPromptScheduler>(window, num_in_flight, manager, scheduler, use_prefix_cache,
                                                     num_drafts, chosen, host_cache);
    }
    if (host_cache != nullptr) {
      return std::make_unique<HostCacheScheduler>(manager, scheduler, use_prefix_cache, num_drafts, chosen, host_cache);
    }
    return std::make_unique<SpeculatingScheduler>(manager, scheduler, use_prefix_cache, num_drafts, chosen);
  };
  return std::make_unique<SpeculatingEngine>(model, options, std::move(runner), clock, make_scheduler, scoring,
                                             sharing);
}

}  // namespace
