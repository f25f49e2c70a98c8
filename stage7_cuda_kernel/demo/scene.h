// The lesson's example by hand as a scene: the command `scene`, and a widget of the course's site.
#pragma once

#include <vector>

#include "common/app/scene.h"

namespace stage7 {

std::vector<common::SceneScript> scenes();

}  // namespace
