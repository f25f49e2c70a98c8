// The lesson's three requests in six blocks as scenes: the command `scene`, and widgets of the course's site.
#pragma once

#include <vector>

#include "common/app/scene.h"

namespace stage8 {

std::vector<common::SceneScript> scenes();

}  // namespace
