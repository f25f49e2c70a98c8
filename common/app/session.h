// What a command runs with: a model, requests, and what serves them.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/model/chat.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"

namespace common {

// For --help: what the README says at length.
inline constexpr const char* kLoadableModels =
    "a GGUF file of Llama, Qwen2, Qwen3 or Gemma 3, or of a model built like them";

// A loaded model, and the requests that the command line describes.
struct Session {
  std::string model_name;
  Llama model;
  Tokenizer tokenizer;
  std::vector<std::string> prompts;
  std::vector<Request> requests;  // one for each prompt
  StopStrings stop_strings = {};  // the same for all requests
  std::shared_ptr<const Gguf> file = nullptr;
  ChatOptions chat = {};    // of its chats
  int bench_tokens = 0;     // for `bench`: the length of the text that it measures
  bool slots_given = true;  // for `bench`: whether --slots was given
  Windows windows = Windows::kUnknown;

  // The reply's text, up to a stop string.
  std::string text_of(const Completion& completion) const {
    return stop_strings.cut(tokenizer.decode(completion.tokens));
  }

  // The slots of a cache for `bench`: num_slots, or more (with a note on stderr) if --slots was not given and the text
  // needs more.
  int bench_slots(int num_slots) const;
};

// What a run reports.
struct RunResult {
  std::vector<Completion> completions;  // one for each request
  std::vector<Counter> counters;        // deterministic: the same on every machine
  Timing timing;
};

// Serves requests, one text each. Behind it is an engine, whose cache outlives the call.
using RunRequests = std::function<RunResult(std::span<const Request> requests, const OnToken& on_token)>;
// Makes an engine for the session's model, with room for its requests. The session must outlive it.
using StartEngine = std::function<RunRequests(const Session& session)>;

}  // namespace common
