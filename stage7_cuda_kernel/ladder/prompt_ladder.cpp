#include "prompt_ladder.h"

#include <vector>

namespace stage7 {

std::span<const PromptStep> prompt_ladder() {
  // Copied at the first call, when other files' constants exist.
  static const std::vector<PromptStep> steps = [] {
    std::vector<PromptStep> all = {kPromptPlain, kPromptMma, kPromptWgmma};
#ifdef COURSE_PRODUCTION
    all.push_back(kPromptProduction);
#endif
    return all;
  }();
  return steps;
}

}  // namespace
