// The shapes of published models, without their weights: for `plan`, and for random weights of real sizes.
#pragma once

#include <span>
#include <string>

#include "common/model/llama.h"

namespace common {

struct Preset {
  const char* name;
  LlamaConfig config;
  int bytes_per_kv_element = 2;  // K and V as they are usually stored: fp16 or bf16
};

std::span<const Preset> presets();

// The preset of that name. Throws InputError with all names if there is none.
const Preset& find_preset(const std::string& name);

// "llama-2-7b, llama-2-13b, …"
std::string preset_names();

}  // namespace common
