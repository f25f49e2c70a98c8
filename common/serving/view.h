// Shows a run as it goes on: on a terminal the queue, the running batch and the blocks, redrawn all the time; otherwise
// one line per step.
#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <string>

#include "common/base/platform.h"
#include "common/serving/served_engine.h"

namespace common {

enum class ViewKind { kAuto, kLive, kPlain, kQuiet };

class View {
 public:
  virtual ~View() = default;
  // Called with the text that the last tokens have added to a request's sample.
  virtual void on_text(int id, int sample, const std::string& text) = 0;
  virtual void on_step(const ServedEngine& engine, const StepReport& report) = 0;
};

// kAuto: live if `output` is a terminal that understands escape sequences, else plain. size: returns the terminal's
// size, which may change; null: the size of `output`.
std::unique_ptr<View> make_view(ViewKind kind, std::ostream& output, std::function<TerminalSize()> size = nullptr);

}  // namespace common
