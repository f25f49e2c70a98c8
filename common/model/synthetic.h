// Published shapes without their weights: to measure speed at real sizes with nothing to download.
#pragma once

#include <string>

#include "common/model/llama.h"

namespace common {

// "smollm2-135m", "llama-3.2-1b" or "llama-3-8b". Throws InputError naming these.
LlamaConfig synthetic_config(const std::string& name);

}  // namespace common
