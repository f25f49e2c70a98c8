#include "prompt_ladder.h"

#include <array>

namespace stage7 {

std::span<const PromptStep> prompt_ladder() {
  // Copied at the first call: other files' constants exist by then.
  static const std::array steps = {kPromptMma, kPromptWgmma, kPromptOverlap, kPromptDiagonal};
  return steps;
}

}  // namespace
