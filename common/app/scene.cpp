#include "common/app/scene.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

using nlohmann::ordered_json;

ordered_json characters(std::string_view text) {
  ordered_json result = ordered_json::array();
  for (const char character : text) {
    result.push_back(std::string(1, character));
  }
  return result;
}

ordered_json to_json(const PoolState::Owner& owner) {
  ordered_json sequences = ordered_json::array();
  for (const PoolState::Sequence& sequence : owner.sequences) {
    sequences.push_back({{"id", sequence.id},
                         {"length", sequence.length},
                         {"blocks", sequence.blocks},
                         {"texts", characters(sequence.text)}});
  }
  return {{"id", owner.id},
          {"name", owner.name},
          {"prompt", owner.prompt_tokens},
          {"max", owner.max_tokens},
          {"computed", owner.num_computed},
          {"host_blocks", owner.num_host_blocks},
          {"preempted", owner.was_preempted},
          {"sequences", std::move(sequences)}};
}

ordered_json list_actions(const Scene& scene) {
  ordered_json groups = ordered_json::array();
  for (const auto& [name, commands] : scene.actions()) {
    ordered_json group = ordered_json::array();
    for (const std::string& command : commands) {
      group.push_back({command, scene.label(command)});
    }
    groups.push_back({name, std::move(group)});
  }
  return groups;
}

std::string dump(const ordered_json& document) {
  return document.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace

ordered_json to_json(const PoolState& state) {
  ordered_json result;
  result["sizes"] = {{"slots", state.num_blocks * state.block_size},
                     {"block_size", state.block_size},
                     {"blocks", state.num_blocks},
                     {"host_blocks", state.num_host_blocks}};
  ordered_json requests = ordered_json::array();
  const auto add = [&](const char* name, const std::vector<PoolState::Owner>& owners) {
    result[name] = ordered_json::array();
    for (const PoolState::Owner& owner : owners) {
      result[name].push_back(owner.id);
      requests.push_back(to_json(owner));
    }
  };
  add("running", state.running);
  add("waiting", state.waiting);
  result["requests"] = std::move(requests);
  result["free"] = state.free_blocks;
  result["cached"] = nullptr;
  if (state.cached.has_value()) {
    result["cached"] = ordered_json::array();
    for (const PoolState::CachedBlock& cached : *state.cached) {
      result["cached"].push_back({cached.block, characters(cached.text)});
    }
  }
  result["references"] = state.reference_counts;
  result["copies"] = state.copies;
  result["evicted"] = state.evicted;
  result["counters"] = ordered_json::object();
  for (const auto& [name, value] : state.counters) {
    result["counters"][name] = value;
  }
  return result;
}

std::string Scene::run(std::string_view command) {
  Words words;
  const Command& found = find(command, words);
  return found.run(words);
}

std::string Scene::label(std::string_view command) const {
  Words words;
  const Command& found = find(command, words);
  return found.label(words);
}

void Scene::add_command(const std::string& usage, std::function<std::string(const Words&)> label,
                        std::function<std::string(const Words&)> run) {
  const Words words = split_words(usage);
  commands_[words.front()] = {usage, words.size() - 1, std::move(label), std::move(run)};
}

const Scene::Command& Scene::find(std::string_view command, Words& words) const {
  words = split_words(command);
  if (words.empty()) {
    throw InputError("there is no command in " + quote(command));
  }
  const auto found = commands_.find(words.front());
  if (found == commands_.end()) {
    std::string known;
    for (const auto& [name, unused] : commands_) {
      known += (known.empty() ? "" : ", ") + name;
    }
    throw InputError("no command " + quote(words.front()) + "; there are: " + known);
  }
  words.erase(words.begin());
  if (words.size() != found->second.num_arguments) {
    throw InputError("usage: " + found->second.usage);
  }
  return found->second;
}

std::unique_ptr<Scene> make_scene(const SceneScript& script) {
  std::unique_ptr<Scene> scene = script.make();
  for (const std::string& command : split_commands(script.setup)) {
    scene->run(command);
  }
  return scene;
}

std::vector<std::string> split_commands(std::string_view commands) {
  std::vector<std::string> result;
  while (!commands.empty()) {
    const std::size_t end = std::min(commands.find(';'), commands.size());
    std::string_view command = commands.substr(0, end);
    command.remove_prefix(std::min(command.find_first_not_of(' '), command.size()));
    if (!command.empty()) {
      result.emplace_back(command);
    }
    commands.remove_prefix(std::min(end + 1, commands.size()));
  }
  return result;
}

std::string state_after(Scene& scene, std::string_view command) {
  ordered_json result;
  result["command"] = command;
  try {
    result["label"] = scene.label(command);
    result["said"] = scene.run(command);
  } catch (const InputError& error) {
    result.erase("label");
    result["error"] = error.what();
  }
  result.update(scene.state());
  result["actions"] = list_actions(scene);
  return dump(result);
}

std::string first_state(const SceneScript& script, const Scene& scene) {
  ordered_json result;
  result["said"] = script.first;
  result.update(scene.state());
  result["actions"] = list_actions(scene);
  return dump(result);
}

}  // namespace common
