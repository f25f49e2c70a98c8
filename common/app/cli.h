// The commands that all stage programs share: their options, how a run is set up, and how it is reported.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/app/bench.h"
#include "common/app/command.h"
#include "common/app/svg.h"
#include "common/model/generation.h"
#include "common/model/gguf.h"
#include "common/model/llama.h"
#include "common/model/tokenizer.h"

namespace common {

// For --help: what the README says at length.
inline constexpr const char* kLoadableModels = "a GGUF file of Llama, Qwen2 or Qwen3, or of a model built like them";

// A loaded model, and the requests that the command line describes.
struct Session {
  std::string model_name;
  Llama model;
  Tokenizer tokenizer;
  std::vector<std::string> prompts;
  std::vector<Request> requests;  // one for each prompt
  StopStrings stop_strings = {};  // of all requests
  std::shared_ptr<const Gguf> file = nullptr;
  int bench_tokens = 0;     // of `bench`: the length of the text that it measures
  bool slots_given = true;  // of `bench`: by --slots

  // The reply's text, up to a stop string.
  std::string text_of(const Completion& completion) const {
    return stop_strings.cut(tokenizer.decode(completion.tokens));
  }

  // The slots of a cache for `bench`: num_slots, or more where none are given and the text needs them. Says so on
  // stderr.
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

// The options from which a Session is loaded.
struct SessionOptions {
  std::string model_path;                 // empty: the bundled model
  int num_threads = 0;                    // 0: one for each processor
  std::vector<std::string> prompts;       // "-": standard input
  std::vector<std::string> prompt_files;  // after them
  bool chat = false;
  std::string system_prompt;  // of a chat
  int max_new_tokens = 64;
  SamplingOptions sampling;
  int sample_index = 0;
  std::vector<std::string> stop_strings;
  int num_logprobs = 0;
};

// What a command has of the options of `generate`, beside --model and --threads: those that it uses.
struct SessionInput {
  bool prompts = true;   // --prompt, --chat, --max-new-tokens; without: the fixed workload
  bool sampling = true;  // --temperature to --stop
  SamplingOptions default_sampling = {};
};

class Program {
 public:
  // name: "stage1"; idea: one sentence for --help.
  Program(std::string name, const std::string& idea);

  // `generate`: text for --prompt, or for the fixed workload. The stage may add options to the returned command.
  Command& add_generate(StartEngine start);

  // `chat`: a conversation with the model.
  Command& add_chat(StartEngine start);

  // `bench`: the speed of the model or, with --attention, of attention alone.
  Command& add_bench(std::function<BenchTarget(const Session&)> target,
                     std::function<AttentionTarget(const AttentionShape&)> attention);

  // For caches in blocks. `plan`: what fits into a cache (common/app/plan.h). `bench --sweep-block-size`: runs
  // the fixed workload with block_size set to 1, 2, 4 … 256.
  void add_block_commands(int& block_size, StartEngine start);

  // A command that does something else with model and prompts.
  Command& add_session_command(const std::string& name, const std::string& description,
                               std::function<void(const Session&)> run, const SessionInput& input = {});

  // `picture`: draws one of these as SVG, or lists them.
  void add_pictures(std::vector<Picture> pictures);

  // Any other command.
  Command& add_command(const std::string& name, const std::string& description, std::function<void()> run);

  // Parses and runs. Returns the exit code: 0; 1 on bad input, 2 on a bug, both after one line on stderr; CLI11's
  // codes, 100 or more, on usage errors; 130 if Ctrl-C has ended the command.
  int run(int argc, char** argv);

 private:
  struct BenchOptions {
    SessionOptions session;
    int prompt_tokens = 512;
    int new_tokens = 64;
    bool attention = false;
    int max_context = 8192;
    bool sweep_block_size = false;
    std::string synthetic;
  };

  void bench(const std::function<BenchTarget(const Session&)>& target,
             const std::function<AttentionTarget(const AttentionShape&)>& attention);

  std::string name_;
  CommandLine command_line_;
  Command* bench_command_ = nullptr;
  BenchOptions bench_options_;
  std::function<void()> sweep_block_size_;
};

}  // namespace common
