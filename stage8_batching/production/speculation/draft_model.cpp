#include "draft_model.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <limits>
#include <string>

#include "common/app/notes.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "step_cost.h"

namespace stage8 {

EngineOptions draft_engine_options(const EngineOptions& options) {
  EngineOptions result = options;
  result.memory_fraction = 0.1;
  result.max_sequences = std::min(options.max_sequences, kMaxDraftedTexts);
  result.prefix_cache = true;  // samples of a prompt share it, and a text that begins again finds itself
  result.num_host_slots = 0;
  result.num_speculative_tokens = 0;
  result.gpu.kv_cache = KvCacheType::kAuto;
  result.gpu.weights = WeightType::kAuto;
  result.gpu.activations = ActivationType::kAuto;
  result.gpu.tensor_parallel = 1;
  return result;
}

void check_vocabularies(const common::Gguf& model, const common::Gguf& draft_model) {
  constexpr std::ptrdiff_t kMaxFilling = 128;
  const char* const key = "tokenizer.ggml.tokens";
  const std::vector<std::string>& tokens = model.get_strings(key);
  const std::vector<std::string>& drafted = draft_model.get_strings(key);
  const std::string begin = draft_model.name() + ": a draft model needs the model's vocabulary: ";
  const auto [ours, other] = std::mismatch(tokens.begin(), tokens.end(), drafted.begin(), drafted.end());
  if (ours != tokens.end() && other != drafted.end()) {
    throw common::InputError(begin + common::format("token %td is ", ours - tokens.begin()) + common::quote(*other) +
                             ", and the model's is " + common::quote(*ours));
  }
  if (std::abs(std::ssize(tokens) - std::ssize(drafted)) > kMaxFilling) {
    throw common::InputError(begin +
                             common::format("it has %zu tokens, and the model has %zu", drafted.size(), tokens.size()));
  }
}

DraftModel::DraftModel(std::shared_ptr<const common::Llama> model, int vocab_size, const EngineOptions& options)
    : model_(std::move(model)),
      vocab_size_(std::min(vocab_size, model_->config().vocab_size)),
      engine_(std::make_unique<Engine>(*model_, options)) {}

DraftModel::DraftModel(std::shared_ptr<const common::Llama> model, int vocab_size, const EngineOptions& options,
                       std::unique_ptr<Runner> runner)
    : model_(std::move(model)),
      vocab_size_(std::min(vocab_size, model_->config().vocab_size)),
      engine_(std::make_unique<Engine>(*model_, options, std::move(runner))) {}

int DraftModel::begin(DraftedText& text) {
  const auto is_known = [&](common::Token token) { return token < vocab_size_; };
  if (has_failed_ || !std::all_of(text.tokens.begin(), text.tokens.end(), is_known)) {
    return 0;
  }
  // The last draft is drawn, and not computed.
  const int max_tokens = std::min(engine_->context_length(), engine_->cache().num_slots());
  return std::clamp(max_tokens - static_cast<int>(text.tokens.size()) + 1, 0, text.max_drafts);
}

void DraftModel::complete(std::span<DraftedText> texts) {
  step_ += 1;
  const auto max_texts =
      static_cast<std::size_t>(std::min(engine_->options().max_sequences, engine_->options().chunk_size));
  for (; !texts.empty() && !has_failed_; texts = texts.subspan(std::min(max_texts, texts.size()))) {
    draft(texts.first(std::min(max_texts, texts.size())));
  }
}

double DraftModel::cost_of_draft(Engine& engine) const { return draft_step_cost(*engine_, engine); }

void DraftModel::forget(int request) {
  const auto end = texts_.lower_bound({request + 1, std::numeric_limits<SequenceId>::min()});
  for (auto text = texts_.lower_bound({request, std::numeric_limits<SequenceId>::min()}); text != end;) {
    drop(text++);
  }
}

void DraftModel::draft(std::span<DraftedText> texts) {
  std::vector<DraftedText*> old_texts;
  for (DraftedText& text : texts) {
    if (!find_room(text)) {
      continue;
    }
    if (!texts_.at({text.request, text.sequence}).tokens.empty()) {
      old_texts.push_back(&text);
    } else if (DraftedText* const new_text = &text; !compute_texts({&new_text, 1})) {
      return;  // alone, so that the next sample of its prompt finds that in the prefix cache
    }
  }
  if (!compute_texts(old_texts)) {
    return;
  }
  std::vector<Fork> forks;
  const auto free_forks = [&] {
    for (const Fork& fork : forks) {
      engine_->manager().free(fork.sequence);
      engine_->sequence_ids().give_back(fork.sequence);
    }
  };
  try {
    forks.reserve(texts.size());  // so that a fork that has been made is also kept
    for (DraftedText& text : texts) {
      if (std::ssize(text.drafts) < text.max_drafts && !text.drafts.empty()) {
        Fork fork{&text, engine_->sequence_ids().take(), text.sampling};
        fork.sampling.used.push_back(text.tokens.back());
        engine_->manager().fork(texts_.at({text.request, text.sequence}).sequence, fork.sequence);
        forks.push_back(std::move(fork));
      }
    }
    while (compute_forks(forks)) {
    }
  } catch (...) {  // no memory
    free_forks();
    throw;
  }
  free_forks();
}

bool DraftModel::find_room(const DraftedText& text) {
  const TextId id{text.request, text.sequence};
  auto found = texts_.find(id);
  if (found != texts_.end()) {
    // A token is left to compute, for its row of logits.
    const std::vector<common::Token>& known = found->second.tokens;
    const bool goes_on =
        known.size() < text.tokens.size() && std::equal(known.begin(), known.end(), text.tokens.begin());
    if (goes_on) {
      found->second.last_step = step_;
      return reserve(found->second.sequence, static_cast<int>(text.tokens.size() - known.size()));
    }
    drop(found);
  }
  const SequenceId sequence = engine_->sequence_ids().take();
  std::map<TextId, Text> made{{id, {sequence, {}, step_}}};  // has its memory before the sequence has blocks
  while (!engine_->start(sequence, text.tokens, text.cache_salt)) {
    if (!drop_least_recent()) {
      engine_->sequence_ids().give_back(sequence);
      return false;
    }
  }
  texts_.merge(made);
  return true;
}

bool DraftModel::compute_texts(std::span<DraftedText* const> texts) {
  KvCacheManager& manager = engine_->manager();
  std::vector<DraftedText*> left(texts.begin(), texts.end());
  while (!left.empty()) {
    struct Part {
      DraftedText* text;
      SequenceId sequence;
      std::span<const common::Token> tokens;
      bool is_last;
    };
    std::vector<Part> parts;
    int room = engine_->options().chunk_size;
    for (DraftedText* const text : left) {
      const SequenceId sequence = texts_.at({text->request, text->sequence}).sequence;
      const std::span rest =
          std::span<const common::Token>(text->tokens).subspan(static_cast<std::size_t>(manager.length(sequence)));
      const int count = std::min(room, static_cast<int>(rest.size()));
      if (count > 0) {
        parts.push_back({text, sequence, rest.first(static_cast<std::size_t>(count)), count == std::ssize(rest)});
      }
      room -= count;
    }
    std::stable_partition(parts.begin(), parts.end(), [](const Part& part) { return part.tokens.size() == 1; });
    RaggedBatch batch;
    for (const Part& part : parts) {
      batch.add(manager, part.sequence, part.tokens, part.is_last);
      if (part.is_last) {
        batch.sampling_rows.push_back(part.text->sampling);
      }
    }
    const std::optional<std::vector<common::Token>> drawn = compute(batch);
    if (!drawn.has_value()) {
      return false;
    }
    std::size_t row = 0;
    for (const Part& part : parts) {
      if (part.is_last) {
        texts_.at({part.text->request, part.text->sequence}).tokens = part.text->tokens;
        add_draft(*part.text, (*drawn)[row++]);
        std::erase(left, part.text);
      }
    }
  }
  return true;
}

bool DraftModel::compute_forks(std::vector<Fork>& forks) {
  RaggedBatch batch;
  std::vector<Fork*> computed;  // by row
  for (Fork& fork : forks) {
    DraftedText& text = *fork.text;
    fork.is_live = fork.is_live && std::ssize(text.drafts) < text.max_drafts && reserve(fork.sequence, 1);
    if (fork.is_live) {
      batch.add(engine_->manager(), fork.sequence, std::span(text.drafts).last(1), true);
      batch.sampling_rows.push_back(fork.sampling);
      computed.push_back(&fork);
    }
  }
  if (computed.empty()) {
    return false;
  }
  const std::optional<std::vector<common::Token>> drawn = compute(batch);
  for (std::size_t row = 0; drawn.has_value() && row < computed.size(); ++row) {
    Fork& fork = *computed[row];
    fork.sampling.used.push_back(fork.text->drafts.back());
    fork.is_live = add_draft(*fork.text, (*drawn)[row]);
  }
  return drawn.has_value();
}

std::optional<std::vector<common::Token>> DraftModel::compute(RaggedBatch& batch) {
  const auto is_greedy = [](const SamplingRow& row) { return common::is_greedy(row.options); };
  if (std::all_of(batch.sampling_rows.begin(), batch.sampling_rows.end(), is_greedy)) {
    batch.sampling_rows.clear();
  }
  std::vector<common::Token> drawn;
  try {
    engine_->forward(batch);
    drawn = engine_->runner().wait(0).tokens;
  } catch (const std::exception& error) {
    // The texts do not need drafts.
    common::print_note(std::string("the draft model has failed, and drafts no more: ") + error.what());
    has_failed_ = true;
    return std::nullopt;
  }
  engine_->commit(batch);
  return drawn;
}

bool DraftModel::add_draft(DraftedText& text, common::Token drawn) const {
  const bool is_known = drawn >= 0 && drawn < vocab_size_;
  if (is_known) {
    text.drafts.push_back(drawn);
  }
  return is_known;
}

bool DraftModel::reserve(SequenceId sequence, int num_tokens) {
  while (!engine_->manager().reserve(sequence, num_tokens)) {
    if (!drop_least_recent()) {
      return false;
    }
  }
  return true;
}

bool DraftModel::drop_least_recent() {
  const auto least = std::min_element(texts_.begin(), texts_.end(), [](const auto& left, const auto& right) {
    return left.second.last_step < right.second.last_step;
  });
  if (least == texts_.end() || least->second.last_step == step_) {
    return false;
  }
  drop(least);
  return true;
}

void DraftModel::drop(std::map<TextId, Text>::iterator text) {
  engine_->manager().free(text->second.sequence);
  engine_->sequence_ids().give_back(text->second.sequence);
  texts_.erase(text);
}

}  // namespace
