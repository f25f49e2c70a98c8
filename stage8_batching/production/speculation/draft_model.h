// Drafts by a second, smaller model of the same tokenizer. It is an engine like the server's, with pages of its own,
// and keeps a sequence for each text:
//
//   the text's sequence    the  king had  a          computed once: what the text has gained since the last step
//                                         \          the row behind it draws the first draft
//   a fork of it                            cat .    computes the drafts, and draws the further ones; then it is freed
//
// A fork shares all blocks, and what it writes goes to a copy of the last one. So a wrong draft leaves nothing behind,
// and the text's sequence has only text.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../../engine.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "drafter.h"

namespace stage8 {

// How an engine for drafts is made beside one with these options. As many slots, if they are given. If not, a GPU's
// share is a tenth of what it has free, but no more than kMaxDraftedTexts texts of the context length can fill.
EngineOptions draft_engine_options(const EngineOptions& options);

// Texts in one batch of drafts: a GPU's step has no room for drafts of more.
inline constexpr int kMaxDraftedTexts = kMaxGpuTokens / 2;

// Throws InputError, naming the first token that differs, unless the draft model's tokens are the model's. One
// vocabulary may be a little longer than the other, as some families' are: filled up to a round number.
void check_vocabularies(const common::Gguf& model, const common::Gguf& draft_model);

class DraftModel : public Drafter {
 public:
  // vocab_size: the large model's. options: the draft engine's own.
  DraftModel(std::shared_ptr<const common::Llama> model, int vocab_size, const EngineOptions& options);
  // The same with the caller's runner.
  DraftModel(std::shared_ptr<const common::Llama> model, int vocab_size, const EngineOptions& options,
             std::unique_ptr<Runner> runner);

  int begin(DraftedText& text) override;
  // Draws as the request does: with its parameters, and with the noise of the position. Where the two models agree
  // about a token's chances, they so draw the same one. A text gets fewer drafts, or none, if its blocks are too few
  // even without all texts that have not been drafted in this step.
  void complete(std::span<DraftedText> texts) override;
  double cost_of_draft(Engine& engine) const override;
  void forget(int request) override;

  Engine& engine() { return *engine_; }
  bool has_failed() const { return has_failed_; }

 private:
  using TextId = std::pair<int, SequenceId>;  // the request, and the server's sequence
  struct Text {
    SequenceId sequence = 0;            // of the draft engine
    std::vector<common::Token> tokens;  // that it has in the cache
    std::int64_t last_step = 0;         // that drafted it
  };
  // A fork that drafts.
  struct Fork {
    DraftedText* text = nullptr;
    SequenceId sequence = 0;
    SamplingRow sampling;  // how the token behind the next one is drawn
    bool is_live = true;   // may still grow
  };

  // complete() for as many texts as fit into a batch.
  void draft(std::span<DraftedText> texts);
  // Finds room for what the text's sequence lacks. If it does not have the text's beginning, it begins again: the
  // prefix cache has most of it.
  bool find_room(const DraftedText& text);
  // Computes what the texts' sequences lack, in as many batches as it needs, and draws their first drafts.
  bool compute_texts(std::span<DraftedText* const> texts);
  // Computes the last draft of each fork, and draws another one. Returns false if none may grow.
  bool compute_forks(std::vector<Fork>& forks);
  // Computes and commits the batch. Returns the drawn tokens by row; nothing if the model has failed, which then drafts
  // no more.
  std::optional<std::vector<common::Token>> compute(RaggedBatch& batch);
  // Adds the drawn token to the text's drafts. Returns false if it is none that the large model knows.
  bool add_draft(DraftedText& text, common::Token drawn) const;
  // Reserves slots, if need be those of texts that have not been drafted in this step, the least recent first.
  bool reserve(SequenceId sequence, int num_tokens);
  bool drop_least_recent();
  void drop(std::map<TextId, Text>::iterator text);

  std::shared_ptr<const common::Llama> model_;
  int vocab_size_;  // of both models: tokens from here on are never drafted
  std::unique_ptr<Engine> engine_;
  std::map<TextId, Text> texts_;
  std::int64_t step_ = 0;
  bool has_failed_ = false;
};

}  // namespace
