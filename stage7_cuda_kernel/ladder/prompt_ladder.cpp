#include "prompt_ladder.h"

#include <array>

namespace stage7 {

std::span<const PromptStep> prompt_ladder() {
  // Copied at the first call, when other files' constants exist.
  static const std::array steps = {kPromptMma, kPromptWgmma, kPromptOverlap, kPromptDiagonal};
  return steps;
}

}  // namespace
