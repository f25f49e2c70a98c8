// The commands that all stage programs share: their options, how a run is set up, and how it is reported.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common/app/bench.h"
#include "common/app/command.h"
#include "common/app/scene.h"
#include "common/app/session.h"
#include "common/app/svg.h"
#include "common/model/generation.h"

namespace common {

// The options from which a Session is loaded.
struct SessionOptions {
  std::string model_path;                 // empty: the bundled model
  int num_threads = 0;                    // 0: one for each processor
  std::vector<std::string> prompts;       // "-": standard input
  std::vector<std::string> prompt_files;  // after them
  bool chat = false;
  std::string system_prompt;  // for a chat
  std::string chat_format;    // as ChatOptions
  int max_new_tokens = 64;
  SamplingOptions sampling;
  int sample_index = 0;
  std::vector<std::string> stop_strings;
  int num_logprobs = 0;
  const Windows* windows = nullptr;  // the program's
};

// Which of `generate`'s options a command has, beside --model and --threads.
struct SessionInput {
  bool prompts = true;   // --prompt, --chat, --max-new-tokens; without: the fixed workload
  bool sampling = true;  // --temperature to --stop
  SamplingOptions default_sampling = {};
  std::function<void()> before_loading = {};  // called once the options are known
};

class Program {
 public:
  // name: "stage1"; idea: one sentence for --help.
  Program(std::string name, const std::string& idea);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // What the attention of all commands does with a model that has windows, if it knows them.
  void set_windows(Windows windows) { windows_ = windows; }

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

  // `scene`: goes through one of these, or through commands of its own. At least one.
  void add_scenes(std::vector<SceneScript> scripts);

  // Any other command.
  Command& add_command(const std::string& name, const std::string& description, std::function<void()> run);

  // Parses and runs. Returns the exit code: 0; 1 on bad input and 70 (EX_SOFTWARE of sysexits.h) on a bug, both after
  // one line on stderr; 2 on usage errors; 130 if Ctrl-C has ended the command.
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
  Windows windows_ = Windows::kUnknown;
  CommandLine command_line_;
  Command* bench_command_ = nullptr;
  BenchOptions bench_options_;
  std::function<void()> sweep_block_size_;
};

}  // namespace common
