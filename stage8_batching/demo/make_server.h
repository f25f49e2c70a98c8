// Chooses the server, and where its drafts come from. Only this file knows production/speculation/.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "../engine.h"
#include "../server.h"
#include "common/app/command.h"
#include "common/app/session.h"

namespace stage8 {

class Drafter;

// The options --speculate and --draft-model.
struct DraftOptions {
  std::optional<int> max_drafts;  // of a step, for requests that do not say
  std::string model_path;         // of a model that drafts; empty: drafts are looked up in the text
};

// `options` must live as long as the command.
void add_draft_options(common::Command& command, DraftOptions& options);

// Max drafts of a step that a request may ask for: 0 if this build computes none.
int max_drafts();

// Loads the model that drafts, and makes its engine, for servers of a model whose engine has these options. It comes
// before that one, whose cache may take what is left. file: the model's. Returns null if drafts are looked up. Throws
// InputError if the file is bad, if its vocabulary is another, or if this build computes no drafts.
std::shared_ptr<Drafter> make_drafter(const common::Llama& model, const std::shared_ptr<const common::Gguf>& file,
                                      const EngineOptions& engine, const DraftOptions& options);

// What drafts come from, and how many.
struct DraftSource {
  EngineOptions drafting_options;  // the engine's, with max_drafts
  std::shared_ptr<Drafter> source;
};

// An engine whose servers draft as the options say. Model and file: as for make_drafter().
class SpeculatingEngine : private DraftSource, public Engine {
 public:
  SpeculatingEngine(const common::Llama& model, const std::shared_ptr<const common::Gguf>& file,
                    const EngineOptions& engine, const DraftOptions& drafts);
  SpeculatingEngine(const common::Session& session, const EngineOptions& engine, const DraftOptions& drafts)
      : SpeculatingEngine(session.model, session.file, engine, drafts) {}

  const std::shared_ptr<Drafter>& drafter() const { return source; }
};

// The server of all commands that take --speculate: one that also computes drafts (SPECULATION.md), if this build can.
// Throws InputError if the engine's options ask for drafts that it can't compute. Engine and clock must outlive it.
// drafter: null if drafts are looked up.
std::unique_ptr<Server> make_server(Engine& engine, const SchedulerOptions& options, Clock& clock,
                                    std::shared_ptr<Drafter> drafter = nullptr);
inline std::unique_ptr<Server> make_server(SpeculatingEngine& engine, const SchedulerOptions& options, Clock& clock) {
  return make_server(engine, options, clock, engine.drafter());
}

}  // namespace
