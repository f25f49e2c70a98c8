// The scenes of one stage for a page: three functions that JavaScript can call. Compiled to WebAssembly with the
// stage's own files, and -DSTAGE=stage2 and the stage's folder among the include paths.
#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "common/app/scene.h"
#include "demo/scene.h"

namespace {

struct Player {
  common::SceneScript script;
  std::unique_ptr<common::Scene> scene;
  std::string state;  // the last one, which JavaScript reads
};

}  // namespace

extern "C" {

// The scene of that name in its first state, or null if the stage has no such scene.
__attribute__((export_name("scene_new"))) Player* scene_new(const char* name) {
  for (const common::SceneScript& script : STAGE::scenes()) {
    if (script.name == name) {
      return std::make_unique<Player>(Player{script, common::make_scene(script), ""}).release();
    }
  }
  return nullptr;
}

// The state after the command, or the present one if it is empty. Valid until the next call.
__attribute__((export_name("scene_apply"))) const char* scene_apply(Player* player, const char* command) {
  try {
    player->state = *command == '\0' ? common::first_state(player->script, *player->scene)
                                     : common::state_after(*player->scene, command);
  } catch (const std::exception& error) {  // a bug; the page shows it
    player->state = std::string("!") + error.what();
  }
  return player->state.c_str();
}

__attribute__((export_name("scene_free"))) void scene_free(Player* player) {
  delete player;  // NOLINT(cppcoreguidelines-owning-memory): JavaScript owns it
}
}
