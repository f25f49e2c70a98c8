#include "make_server.h"

#include <utility>

#include "common/app/notes.h"
#include "common/base/check.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#ifdef COURSE_PRODUCTION
#include "../production/speculation/draft_model.h"
#include "../production/speculation/speculating_server.h"
#endif

namespace stage8 {
namespace {

constexpr int kDefaultDrafts = 4;  // with a model that drafts

DraftSource draft_source(const common::Llama& model, const std::shared_ptr<const common::Gguf>& file,
                         EngineOptions engine, const DraftOptions& options) {
  engine.num_speculative_tokens = options.max_drafts.value_or(options.model_path.empty() ? 0 : kDefaultDrafts);
  return {engine, make_drafter(model, file, engine, options)};
}

}  // namespace

void add_draft_options(common::Command& command, DraftOptions& options) {
  command.option("--speculate", options.max_drafts, {0, kMaxDrafts},
                 "max drafts a step: guesses of how a text goes on, looked up in the text itself (default: 0; 4 with "
                 "--draft-model)");
  command.file("--draft-model", options.model_path,
               "a smaller GGUF with the same vocabulary, which makes the drafts; its cache has as many slots (on a "
               "GPU without --slots: a tenth of the free memory, for up to 8 texts)");
}

SpeculatingEngine::SpeculatingEngine(const common::Llama& model, const std::shared_ptr<const common::Gguf>& file,
                                     const EngineOptions& engine, const DraftOptions& drafts)
    : DraftSource(draft_source(model, file, engine, drafts)), Engine(model, drafting_options) {}

#ifdef COURSE_PRODUCTION

int max_drafts() { return kMaxDrafts; }

std::shared_ptr<Drafter> make_drafter(const common::Llama& model, const std::shared_ptr<const common::Gguf>& file,
                                      const EngineOptions& engine, const DraftOptions& options) {
  if (options.model_path.empty()) {
    return nullptr;
  }
  if (options.max_drafts == 0) {
    throw common::InputError("--draft-model drafts nothing with --speculate 0");
  }
  if (model.is_synthetic() || file == nullptr) {
    throw common::InputError("--draft-model needs a model with a vocabulary, and random weights have none");
  }
  const common::Gguf draft = common::Gguf::open(options.model_path);
  check_vocabularies(*file, draft);
  if (!engine.num_slots.has_value()) {
    common::print_note("the draft model's cache comes first, then the model's");
  }
  return std::make_shared<DraftModel>(std::make_shared<const common::Llama>(draft), model.config().vocab_size,
                                      draft_engine_options(engine));
}

std::unique_ptr<Server> make_server(Engine& engine, const SchedulerOptions& options, Clock& clock,
                                    std::shared_ptr<Drafter> drafter) {
  return make_speculating_server(engine, options, clock, std::nullopt, std::move(drafter));
}

#else

class Drafter {};

int max_drafts() { return 0; }

std::shared_ptr<Drafter> make_drafter(const common::Llama& /*model*/,
                                      const std::shared_ptr<const common::Gguf>& /*file*/,
                                      const EngineOptions& /*engine*/, const DraftOptions& options) {
  if (!options.model_path.empty()) {
    throw common::InputError("--draft-model needs production/, which is left out of this build (COURSE_PRODUCTION)");
  }
  return nullptr;
}

std::unique_ptr<Server> make_server(Engine& engine, const SchedulerOptions& options, Clock& clock,
                                    std::shared_ptr<Drafter> /*drafter*/) {
  if (engine.options().num_speculative_tokens > 0) {
    throw common::InputError("--speculate needs production/, which is left out of this build (COURSE_PRODUCTION)");
  }
  return std::make_unique<Server>(engine, options, clock);
}

#endif

}  // namespace
