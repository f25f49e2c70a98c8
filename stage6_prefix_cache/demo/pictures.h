// The lesson's pictures, drawn from what the stage's code does.
#pragma once

#include <vector>

#include "common/app/svg.h"

namespace stage6 {

std::vector<common::Picture> pictures();

}  // namespace
