// What the fuzzers of an engine share: requests drawn at random, and how many of their tokens must have been streamed.
#pragma once

#include <cstddef>

#include "common/base/text.h"
#include "tests/fuzz/driver.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/random.h"

namespace tests {

struct TaskRange {
  int min_prompt = 1;  // tokens
  int max_prompt = 1;
  int max_reply = 1;
  int num_texts = 1;  // of which prompts are the beginnings: with few of them, many prompts begin alike
};

// One text most of the time, else several samples or beams.
inline void draw_branches(common::Random& random, stage::GenerationRequest& task) {
  switch (random.below(6)) {
    case 0:
      task.num_samples = between(random, 2, 3);
      break;
    case 1:
      task.num_samples = between(random, 1, 3);
      task.length_penalty = 1.0;
      break;
    default:
      break;
  }
}

// One text or several samples or beams, with drafts or without.
inline stage::GenerationRequest random_task(common::Random& random, const TaskRange& range) {
  stage::GenerationRequest task;
  task.request = make_request(between(random, range.min_prompt, range.max_prompt), between(random, 1, range.max_reply),
                              between(random, 0, range.num_texts - 1));
  task.request.sampling.seed = random.below(1000);
  if (random.below(4) == 0) {
    task.request.num_speculative_tokens = between(random, 1, 4);
  }
  draw_branches(random, task);
  if (task.num_samples > 1 && !task.length_penalty.has_value()) {
    task.request.sampling.temperature = 1.2F;
  }
  return task;
}

// Throws FuzzFailure unless as many tokens were streamed as were written. The tokens of a beam search are not streamed.
inline void check_streamed(int id, const stage::GenerationRequest& task, const stage::RequestOutput& output,
                           int num_streamed) {
  std::size_t written = 0;
  for (const common::Completion& completion : output.completions) {
    written += completion.tokens.size();
  }
  if (!task.length_penalty.has_value() && static_cast<std::size_t>(num_streamed) != written) {
    throw FuzzFailure(common::format("request %d has %zu tokens, and %d were streamed", id, written, num_streamed));
  }
}

}  // namespace tests
