// An engine whose steps also compute drafts: guesses of how a text goes on, behind the text's last token
// (speculating_scheduler.h). Where a guess is right, the step has computed several tokens of the text at once. Only
// what the text turns out to be is taken up, so that drafts change no text. SPECULATION.md has the lesson.
//
// Drafts are in the batch that the runner computes, and nowhere else: the step that is committed does not have them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "../../engine.h"
#include "../scoring/row_scoring.h"
#include "../shared_reading/shared_reading.h"
#include "speculating_scheduler.h"

namespace stage8 {

class SpeculatingEngine : public Engine {
 public:
  // Model and clock must outlive the engine. make_scheduler makes a SpeculatingScheduler. scoring, sharing: the runner,
  // or the one inside of it, if it scores rows, and if it reads shared blocks once.
  SpeculatingEngine(const common::Llama& model, const EngineOptions& options, std::unique_ptr<Runner> runner,
                    Clock& clock, const MakeScheduler& make_scheduler, RowScoring* scoring = nullptr,
                    const SharedReading* sharing = nullptr);

 protected:
  // Enqueues the step's batch, with the rows that are scored (../scoring/prompt_scores.h) and with drafts in it. The
  // next step does not run ahead of it if a request waits for its token, to look it up.
  Step prepare(std::vector<ScheduledGroup> groups) override;
  // Gives the group its own token, and then takes up its drafts, one by one, as long as each is the next token of all
  // its texts: its K and V are in their slots, so it is committed, and the rows behind it give the texts their next
  // tokens.
  void extend(const Step& step, const ScheduledGroup& scheduled, int row) override;

 private:
  // What the runner computes for the step: its batch, with each sequence's drafts behind its own token. Their rows of
  // logits come after all others, so that the step's own rows keep their numbers, although sequences with drafts come
  // after those with one token. scored_rows: of this batch, and then of the result.
  const RaggedBatch& with_drafts(const RaggedBatch& own, std::span<common::ScoredRow> scored_rows);
  // Adds the rows of logits behind the sequence's drafts to batch_, and how the tokens after them are drawn. row: the
  // row of logits behind its own token, which is batch_.tokens[index].
  void add_rows(SequenceId sequence, std::size_t row, int index);
  // Adds the drafts of these groups to the report, unless memory runs out: then it has none.
  void report_drafts(const std::vector<ScheduledGroup>& groups) noexcept;
  // Corrects what the reporter counts as read: all tokens of the step's sequences, without drafts, by each sequence and
  // in each layer. Of layers of two kinds, a token that some do not read counts in part.
  void report_reads(const RaggedBatch& batch, int num_drafts) noexcept;
  // The rows behind one draft of each live branch.
  GroupResult result_behind(const Step& step, const SequenceGroup& group, int draft) const;

  SpeculatingScheduler& speculating_;  // the engine's scheduler
  RowScoring* scoring_;                // part of the engine's runner; null if it scores no rows
  const SharedReading* sharing_;       // the same; null if each sequence reads alone
  std::int64_t blocks_saved_ = 0;      // of its figures: reported so far
  std::int64_t reads_saved_ = 0;       // by windows, of a token in a layer: not reported yet, less than a token
  // Of the last step. One with drafts does not run ahead, so that they are collected before the next one has some.
  RaggedBatch batch_;
  std::map<SequenceId, int> first_rows_;  // where the rows behind a sequence's drafts begin
};

// Each text of the group ends with a token that was computed as its draft, so that K and V are in its slot already:
// counts it as part of the cache, and publishes the block that it fills, if blocks are published at all.
void commit_last(KvCacheManager& manager, const SequenceGroup& group, bool use_prefix_cache);

// num_drafts: max drafts of a step for requests that do not say. cost: what drafts cost; absent: as on this runner.
// num_host_cache_blocks: how many of the runner's host blocks are not for swapping, but a second tier of the prefix
// cache (../host_cache/host_cache.h).
std::unique_ptr<SpeculatingEngine> make_speculating_engine(const common::Llama& model, const EngineOptions& options,
                                                           std::unique_ptr<Runner> runner, int num_drafts, Clock& clock,
                                                           const std::optional<TokenCost>& cost = std::nullopt,
                                                           int num_host_cache_blocks = 0);

}  // namespace
