// The bundled model, and the texts that every stage has to generate with it.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "common/model/default_model.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/support/sanitizers.h"

namespace tests {

// Under sanitizers the full set would take a minute and a half for each stage. Sanitizers look for accesses out of
// bounds, which do not depend on the words of a prompt: a few prompts and one chunk size take every path. The other
// builds check all texts.
inline constexpr std::size_t kMaxPrompts = kSanitized ? 2 : std::numeric_limits<std::size_t>::max();

struct BundledModel {
  common::Gguf file = common::Gguf::parse(common::default_model(), "the bundled model");
  common::Llama llama{file};
  common::Tokenizer tokenizer{file};
};

// Loaded once for all test cases.
const BundledModel& bundled();

struct GoldenCase {
  std::string prompt;
  std::vector<common::Token> prompt_tokens;
  std::vector<common::Token> generated_tokens;
  double smallest_margin = 0.0;  // between the best and the second-best logit of any step
};

// The first kMaxPrompts of tests/golden/golden_greedy.json.
const std::vector<GoldenCase>& golden_cases();

common::Request greedy_request(const std::string& prompt, int max_new_tokens);

// Empty if equal; otherwise the first step at which they differ, and the text up to there.
std::string compare_tokens(const std::vector<common::Token>& actual, const std::vector<common::Token>& expected);

}  // namespace tests
