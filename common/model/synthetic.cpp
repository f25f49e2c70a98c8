#include "common/model/synthetic.h"

#include <algorithm>
#include <array>

#include "common/base/check.h"

namespace common {
namespace {

struct NamedConfig {
  const char* name;
  LlamaConfig config;
};

// From the config.json of HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B (whose stretching of slow rotations is
// left out: it changes no speed) and meta-llama/Meta-Llama-3-8B.
constexpr std::array<NamedConfig, 3> kConfigs = {{{"smollm2-135m",
                                                   {.vocab_size = 49152,
                                                    .context_length = 8192,
                                                    .hidden_size = 576,
                                                    .num_layers = 30,
                                                    .num_heads = 9,
                                                    .num_kv_heads = 3,
                                                    .head_dim = 64,
                                                    .feed_forward_size = 1536,
                                                    .rope_freq_base = 100000.0F,
                                                    .tied_output = true}},
                                                  {"llama-3.2-1b",
                                                   {.vocab_size = 128256,
                                                    .context_length = 131072,
                                                    .hidden_size = 2048,
                                                    .num_layers = 16,
                                                    .num_heads = 32,
                                                    .num_kv_heads = 8,
                                                    .head_dim = 64,
                                                    .feed_forward_size = 8192,
                                                    .rope_freq_base = 500000.0F,
                                                    .tied_output = true}},
                                                  {"llama-3-8b",
                                                   {.vocab_size = 128256,
                                                    .context_length = 8192,
                                                    .hidden_size = 4096,
                                                    .num_layers = 32,
                                                    .num_heads = 32,
                                                    .num_kv_heads = 8,
                                                    .head_dim = 128,
                                                    .feed_forward_size = 14336,
                                                    .rope_freq_base = 500000.0F}}}};

}  // namespace

LlamaConfig synthetic_config(const std::string& name) {
  const auto* const found =
      std::find_if(kConfigs.begin(), kConfigs.end(), [&](const NamedConfig& entry) { return name == entry.name; });
  if (found == kConfigs.end()) {
    std::string names;
    for (const NamedConfig& entry : kConfigs) {
      names += std::string(names.empty() ? "" : ", ") + entry.name;
    }
    throw InputError("there is no shape '" + name + "'; there are " + names);
  }
  return found->config;
}

}  // namespace common
