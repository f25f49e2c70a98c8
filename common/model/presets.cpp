#include "common/model/presets.h"

#include <algorithm>
#include <array>

#include "common/base/check.h"
#include "common/base/text.h"

namespace common {
namespace {

// From config.json of meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf, meta-llama/Meta-Llama-3-8B and -70B,
// meta-llama/Llama-3.2-1B (without its scaling of slow rotations, which changes no speed), HuggingFaceTB/SmolLM2-135M,
// Qwen/Qwen3-0.6B, mistralai/Mistral-7B-v0.1 and google/gemma-3-270m, all on https://huggingface.co. The last one is
// the bundled model, common/model/tales/MODEL.md.
constexpr std::array<Preset, 11> kPresets = {{
    {.name = "llama-2-7b",
     .config = {.vocab_size = 32000,
                .context_length = 4096,
                .hidden_size = 4096,
                .num_layers = 32,
                .num_heads = 32,
                .num_kv_heads = 32,
                .head_dim = 128,
                .feed_forward_size = 11008}},
    {.name = "llama-2-13b",
     .config = {.vocab_size = 32000,
                .context_length = 4096,
                .hidden_size = 5120,
                .num_layers = 40,
                .num_heads = 40,
                .num_kv_heads = 40,
                .head_dim = 128,
                .feed_forward_size = 13824}},
    {.name = "llama-2-70b",
     .config = {.vocab_size = 32000,
                .context_length = 4096,
                .hidden_size = 8192,
                .num_layers = 80,
                .num_heads = 64,
                .num_kv_heads = 8,
                .head_dim = 128,
                .feed_forward_size = 28672}},
    {.name = "llama-3-8b",
     .config = {.vocab_size = 128256,
                .context_length = 8192,
                .hidden_size = 4096,
                .num_layers = 32,
                .num_heads = 32,
                .num_kv_heads = 8,
                .head_dim = 128,
                .feed_forward_size = 14336,
                .rope_freq_base = 500000.0F}},
    {.name = "llama-3-70b",
     .config = {.vocab_size = 128256,
                .context_length = 8192,
                .hidden_size = 8192,
                .num_layers = 80,
                .num_heads = 64,
                .num_kv_heads = 8,
                .head_dim = 128,
                .feed_forward_size = 28672,
                .rope_freq_base = 500000.0F}},
    {.name = "llama-3.2-1b",
     .config = {.vocab_size = 128256,
                .context_length = 131072,
                .hidden_size = 2048,
                .num_layers = 16,
                .num_heads = 32,
                .num_kv_heads = 8,
                .head_dim = 64,
                .feed_forward_size = 8192,
                .rope_freq_base = 500000.0F,
                .tied_output = true}},
    {.name = "smollm2-135m",
     .config = {.vocab_size = 49152,
                .context_length = 8192,
                .hidden_size = 576,
                .num_layers = 30,
                .num_heads = 9,
                .num_kv_heads = 3,
                .head_dim = 64,
                .feed_forward_size = 1536,
                .rope_freq_base = 100000.0F,
                .tied_output = true}},
    {.name = "qwen3-0.6b",
     .config = {.vocab_size = 151936,
                .context_length = 40960,
                .hidden_size = 1024,
                .num_layers = 28,
                .num_heads = 16,
                .num_kv_heads = 8,
                .head_dim = 128,
                .feed_forward_size = 3072,
                .rope_freq_base = 1e6F,
                .rms_epsilon = 1e-6F,
                .tied_output = true,
                .qk_norm = true,
                .rotates_halves = true}},
    {.name = "mistral-7b",
     .config = {.vocab_size = 32000,
                .context_length = 32768,
                .hidden_size = 4096,
                .num_layers = 32,
                .num_heads = 32,
                .num_kv_heads = 8,
                .head_dim = 128,
                .feed_forward_size = 14336,
                .window = 4096}},
    {.name = "gemma-3-270m",
     .config = {.vocab_size = 262144,
                .context_length = 32768,
                .hidden_size = 640,
                .num_layers = 18,
                .num_heads = 4,
                .num_kv_heads = 1,
                .head_dim = 256,
                .feed_forward_size = 2048,
                .rope_freq_base = 1e6F,
                .rms_epsilon = 1e-6F,
                .tied_output = true,
                .qk_norm = true,
                .rotates_halves = true,
                .post_norms = true,
                .gelu = true,
                .embedding_scale = 25.298221F,  // the root of 640
                .window_rope_freq_base = 10000.0F,
                .window = 512,
                .global_period = 6}},
    {.name = "tales-5m",
     .config = {.vocab_size = 2048,
                .context_length = 1024,
                .hidden_size = 256,
                .num_layers = 6,
                .num_heads = 8,
                .num_kv_heads = 2,
                .head_dim = 32,
                .feed_forward_size = 768,
                .tied_output = true},
     .bytes_per_kv_element = 4},
}};

}  // namespace

std::span<const Preset> presets() { return kPresets; }

const Preset& find_preset(const std::string& name) {
  const auto* const found =
      std::find_if(kPresets.begin(), kPresets.end(), [&](const Preset& preset) { return name == preset.name; });
  if (found == kPresets.end()) {
    throw InputError("there is no preset " + quote(name) + "; there are " + preset_names());
  }
  return *found;
}

std::string preset_names() {
  std::string names;
  for (const Preset& preset : kPresets) {
    names += std::string(names.empty() ? "" : ", ") + preset.name;
  }
  return names;
}

}  // namespace common
