// A scene: a stage's own bookkeeping on a few blocks, driven by short text commands, and its state after each of them
// as JSON. The command `scene` prints the states; the widgets of the course's site draw them. In the page the same
// files run, compiled to WebAssembly, so nothing here knows files, streams or a terminal.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/app/words.h"

namespace common {

// A pool of blocks and their owners. As JSON, it shares names with the live page's records
// (common/serving/pool_view.h):
//
//   {"sizes": {"slots": 32, "block_size": 4, "blocks": 8, "host_blocks": 0}, "running": [ids], "waiting": [ids],
//    "requests": [{"id": 0, "name": "A", "prompt": 6, "max": 13, "computed": 1, "host_blocks": 0, "preempted": false,
//                  "sequences": [{"id": 0, "length": 5, "blocks": [7, 1], "texts": ["o", "n", …]}]}],
//    "free": [2, 0], "cached": [[6, ["o", …]]] or null, "references": [0, 2, …], "copies": [[3, 6]], "evicted": [5],
//    "counters": {"slots used": 5, …}}
struct PoolState {
  struct Sequence {
    int id = 0;
    int length = 0;  // tokens in the cache
    std::vector<int> blocks;
    std::string text = {};  // a character for each token; empty: they have no text
  };
  struct Owner {
    int id = 0;
    std::string name;
    std::vector<Sequence> sequences;
    int prompt_tokens = 0;
    int max_tokens = 0;       // that its sequence may have in the cache
    int num_computed = 0;     // tokens, by the last command
    int num_host_blocks = 0;  // more than none: it is swapped out
    bool was_preempted = false;
  };
  struct CachedBlock {
    int block = 0;
    std::string text;
  };

  int num_blocks = 0;
  int block_size = 0;
  int num_host_blocks = 0;  // numbered after the pool's blocks
  std::vector<Owner> running = {};
  std::vector<Owner> waiting = {};    // in the order of the queue
  std::vector<int> free_blocks = {};  // the next one to be taken first
  std::optional<std::vector<CachedBlock>> cached =
      std::nullopt;                              // the next one to be evicted first; nullopt: no prefix cache
  std::vector<int> reference_counts = {};        // by block; empty: no block can have two owners
  std::vector<std::pair<int, int>> copies = {};  // from block to block, made by the last command
  std::vector<int> evicted = {};                 // by the last command
  std::vector<std::pair<std::string, std::int64_t>> counters = {};
};
nlohmann::ordered_json to_json(const PoolState& state);

class Scene {
 public:
  Scene() = default;
  virtual ~Scene() = default;
  Scene(const Scene&) = delete;  // commands refer to their scene
  Scene& operator=(const Scene&) = delete;

  // Carries out one command, `name argument …`, and returns in a sentence or two what it did and why. Throws
  // InputError, and has changed nothing, if there is no such command or if its arguments are wrong.
  std::string run(std::string_view command);
  // "append 3 tokens to A": what a button for the command says. Throws InputError like run().
  std::string label(std::string_view command) const;

  virtual nlohmann::ordered_json state() const = 0;
  // Commands that make sense now, in groups: a name, "A", and what can be done with it.
  using Actions = std::vector<std::pair<std::string, std::vector<std::string>>>;
  virtual Actions actions() const = 0;

 protected:
  // usage: "append NAME COUNT". The number of arguments is checked before the functions get them, without the name.
  void add_command(const std::string& usage, std::function<std::string(const Words&)> label,
                   std::function<std::string(const Words&)> run);

 private:
  struct Command {
    std::string usage;
    std::size_t num_arguments = 0;
    std::function<std::string(const Words&)> label;
    std::function<std::string(const Words&)> run;
  };
  // The command, and its arguments in `words`.
  const Command& find(std::string_view command, Words& words) const;

  std::map<std::string, Command, std::less<>> commands_;
};

// A scene as a lesson shows it.
struct SceneScript {
  std::string name;                              // "block-table"
  std::string title;                             // one line
  std::string first;                             // a sentence on what is there before the first command
  std::function<std::unique_ptr<Scene>()> make;  // the empty scene
  std::string setup;                             // commands that come before the first state, with ";" between them
  std::string commands;                          // the commands of the lesson, in order
};

// Makes the scene and carries out its setup.
std::unique_ptr<Scene> make_scene(const SceneScript& script);
std::vector<std::string> split_commands(std::string_view commands);

// Carries out the command and returns the state after it, in one line of JSON: what state() has and {"command": "append
// A 1", "label": "…", "said": "…", "actions": [["A", [["append A 1", "append a token to A"], …]], …]}. A wrong command
// leaves all as it was, and adds {"error": "…"}. An empty command only looks.
std::string state_after(Scene& scene, std::string_view command);
// The same before the first command.
std::string first_state(const SceneScript& script, const Scene& scene);

}  // namespace common
