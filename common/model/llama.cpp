#include "common/model/llama.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "common/base/check.h"
#include "common/base/memory.h"
#include "common/base/parallel.h"
#include "common/base/text.h"
#include "common/math/sampling.h"
#include "common/model/weight_matrix.h"

namespace common {
namespace {

// One array that holds all matrices of a model with random weights.
class Arena {
 public:
  explicit Arena(std::int64_t size) : size_(size), floats_(allocate_floats(static_cast<std::size_t>(size))) {}

  MutableMatrixView allocate(std::int64_t rows, std::int64_t cols) {
    const std::int64_t first = used_;
    used_ += padded(rows * cols);
    COMMON_CHECK(used_ <= size_, "the matrices must be as many as were counted");
    return {floats_.get() + first, rows, cols};
  }

  // Every matrix begins on a cache line of 16 floats.
  static std::int64_t padded(std::int64_t size) { return (size + 15) / 16 * 16; }

 private:
  std::int64_t size_;
  std::int64_t used_ = 0;
  FloatArray floats_;
};

int checked_int(const Gguf& file, const std::string& key, std::int64_t value, std::int64_t max) {
  if (value < 1 || value > max) {
    throw InputError(file.name() + ": " + key + " is " + std::to_string(value) + ", expected 1 to " +
                     std::to_string(max));
  }
  return static_cast<int>(value);
}

int read_int(const Gguf& file, const std::string& key, std::int64_t max) {
  return checked_int(file, key, file.get_int(key), max);
}

int read_int(const Gguf& file, const std::string& key, std::int64_t max, int fallback) {
  return checked_int(file, key, file.get_int(key, fallback), max);
}

void require(const Gguf& file, bool condition, const std::string& message) {
  if (!condition) {
    throw InputError(file.name() + ": " + message);
  }
}

// --- Rotary embedding ----------------------------------------------------------------------------------------------

std::vector<double> plain_frequencies(const LlamaConfig& config, float base) {
  std::vector<double> frequencies;
  frequencies.reserve(static_cast<std::size_t>(config.head_dim / 2));
  for (int i = 0; i < config.head_dim / 2; ++i) {
    frequencies.push_back(std::pow(static_cast<double>(base), -2.0 * i / config.head_dim));
  }
  return frequencies;
}

double read_positive(const Gguf& file, const std::string& key, double fallback) {
  const double value = file.get_float(key, fallback);
  require(file, value > 0.0 && std::isfinite(static_cast<float>(value)), key + " is not a positive number");
  return value;
}

// How rotations are slowed down for contexts longer than in training.
struct RotaryScaling {
  double divisor = 1.0;        // of the frequencies
  bool is_yarn = false;        // divide only the frequencies that YaRN interpolates
  double first_slowed = 0.0;   // YaRN: pairs up to this one keep their frequency
  double first_divided = 0.0;  // YaRN: pairs from this one on are divided in full
  float rotation_scale = 1.0F;
};

// YaRN (Peng et al., arXiv 2309.00071) divides the frequencies of pairs that turn less than once over the context of
// training, keeps the frequencies of pairs that turn more than 32 times, and goes from one to the other linearly in
// between. It also makes scores larger, here by scaling q and k.
RotaryScaling read_yarn(const Gguf& file, const std::string& prefix, const LlamaConfig& config, double factor) {
  const double trained_length = read_positive(file, prefix + "original_context_length", config.context_length);
  const double fast = read_positive(file, prefix + "yarn_beta_fast", 32.0);
  const double slow = read_positive(file, prefix + "yarn_beta_slow", 1.0);
  const auto base = static_cast<double>(config.rope_freq_base);
  require(file, base > 1.0, "YaRN needs a base of the rotation above 1");
  // The pair that turns this many times over the context of training.
  const auto pair_of = [&](double turns) {
    constexpr double kTwoPi = 6.283185307179586;
    return config.head_dim * std::log(trained_length / (turns * kTwoPi)) / (2.0 * std::log(base));
  };
  RotaryScaling scaling;
  scaling.divisor = factor;
  scaling.is_yarn = true;
  scaling.first_slowed = std::max(0.0, std::floor(pair_of(fast)));
  scaling.first_divided = std::min(config.head_dim - 1.0, std::ceil(pair_of(slow)));
  scaling.rotation_scale =
      static_cast<float>(read_positive(file, prefix + "attn_factor", 1.0) * (1.0 + 0.1 * std::log(factor)));
  return scaling;
}

RotaryScaling read_rotary_scaling(const Gguf& file, std::string_view architecture, const LlamaConfig& config) {
  const std::string prefix = std::string(architecture) + ".rope.scaling.";
  const std::string type = file.has(prefix + "type") ? file.get_string(prefix + "type") : "linear";
  if (type == "none") {
    return {};
  }
  // Files from before there were other types have the factor under another key.
  const std::string old_key = std::string(architecture) + ".rope.scale_linear";
  const double factor = read_positive(file, file.has(old_key) ? old_key : prefix + "factor", 1.0);
  if (type == "linear") {
    RotaryScaling scaling;
    scaling.divisor = factor;
    require(file, file.get_float(prefix + "attn_factor", 1.0) == 1.0, prefix + "attn_factor needs YaRN");
    return scaling;
  }
  require(file, type == "yarn",
          "rotary scaling " + quote(type) + " is not supported (supported: \"none\", \"linear\", \"yarn\")");
  require(file, factor >= 1.0, prefix + "factor is below 1");
  return read_yarn(file, prefix, config, factor);
}

std::vector<double> window_frequencies(const LlamaConfig& config) {
  return config.window_rope_freq_base > 0.0F ? plain_frequencies(config, config.window_rope_freq_base)
                                             : std::vector<double>();
}

std::vector<double> read_frequencies(const Gguf& file, const LlamaConfig& config) {
  std::vector<double> frequencies = plain_frequencies(config, config.rope_freq_base);
  if (file.has_tensor("rope_freqs.weight")) {
    // Llama 3.1 and later slow down the slow rotations by these factors, for longer contexts.
    std::vector<float> factors(frequencies.size());
    file.read_tensor("rope_freqs.weight", std::array<std::int64_t, 1>{config.head_dim / 2}, factors);
    for (std::size_t i = 0; i < factors.size(); ++i) {
      require(file, std::isfinite(factors[i]) && factors[i] > 0.0F,
              "rope_freqs.weight holds a factor that is not positive");
      frequencies[i] /= static_cast<double>(factors[i]);
    }
  }
  const RotaryScaling scaling = read_rotary_scaling(file, file.get_string("general.architecture"), config);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double span = std::max(0.001, scaling.first_divided - scaling.first_slowed);
    const double slowed =
        scaling.is_yarn ? std::clamp((static_cast<double>(i) - scaling.first_slowed) / span, 0.0, 1.0) : 1.0;
    frequencies[i] *= slowed / scaling.divisor + (1.0 - slowed);
  }
  return frequencies;
}

// --- Architectures and their tensors -------------------------------------------------------------------------------

// What an architecture does in a layer beyond the common operations.
struct Architecture {
  std::string_view name;   // in general.architecture, and before each of its keys
  std::string_view title;  // in errors
  bool qkv_bias;
  bool qk_norm;
  bool rotates_halves;
  bool windows;  // the files say whether layers see the last tokens only
  bool is_gemma;
};

// Llama's files have the rows of Q and K permuted, so that the two numbers of a pair lie next to each other.
constexpr std::array<Architecture, 4> kArchitectures = {{
    {"llama", "Llama", false, false, false, true, false},
    {"qwen2", "Qwen2", true, false, true, false, false},
    {"qwen3", "Qwen3", false, true, true, false, false},
    {"gemma3", "Gemma 3", false, true, true, true, true},
}};

const Architecture& architecture_of(const Gguf& file) {
  const std::string& name = file.get_string("general.architecture");
  std::string supported;
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.name == name) {
      return architecture;
    }
    supported += (supported.empty() ? "\"" : ", \"") + std::string(architecture.name) + "\"";
  }
  throw InputError(file.name() + ": the architecture " + quote(name) + " is not supported (supported: " + supported +
                   ")");
}

// A key that this program does not know could change what the model computes, and the text would be wrong without
// notice. Names are without the architecture's in front.
void check_keys(const Gguf& file, const Architecture& architecture) {
  static const std::set<std::string, std::less<>> kept = {
      "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "attention.head_count",
      "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
      "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
      "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
      "rope.scaling.yarn_beta_slow",
      // These change no logit.
      "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"};
  // Keys of other models, and the values with which they change nothing.
  static const std::map<std::string, std::vector<double>, std::less<>> neutral_values = {
      {"expert_count", {0}},
      {"expert_used_count", {0}},
      {"logit_scale", {0, 1}},
      {"embedding_scale", {0, 1}},
      {"residual_scale", {0, 1}},
      {"attention.scale", {0}},
      {"attention.sliding_window", {0}},
      {"attn_logit_softcapping", {0}},
      {"final_logit_softcapping", {0}},
      {"attention.clamp_kqv", {0}},
      {"attention.max_alibi_bias", {0}},
      {"rope.scaling.yarn_ext_factor", {1}},
      {"rope.scaling.yarn_attn_factor", {1}}};
  const std::string prefix = std::string(architecture.name) + ".";
  for (const std::string& key : file.keys()) {
    const std::string name = key.starts_with(prefix) ? key.substr(prefix.size()) : "";
    const bool is_window = name == "attention.sliding_window" || name == "attention.sliding_window_pattern" ||
                           name == "rope.freq_base_swa";
    if (name.empty() || kept.contains(name) || (is_window && architecture.windows)) {
      continue;
    }
    if (name == "use_parallel_residual" || name == "attention.causal") {
      require(file, file.get_bool(key, false) == (name == "attention.causal"), key + " is not supported");
      continue;
    }
    const auto without_effect = neutral_values.find(name);
    require(file, without_effect != neutral_values.end(),
            "metadata key " + quote(key) + " is not known, and may change what the model computes");
    const double value = file.get_float(key);
    const std::vector<double>& values = without_effect->second;
    const bool covers_context =
        name == "attention.sliding_window" && value >= file.get_float(prefix + "context_length", 0.0);
    require(file, covers_context || std::find(values.begin(), values.end(), value) != values.end(),
            name == "expert_count" ? "mixtures of experts are not supported"
                                   : key + format(" is %g, which is not supported", value));
  }
}

// Which layers see all tokens, as the files have it: as a period or, for each layer, whether it has a window.
int read_global_period(const Gguf& file, const std::string& key, const LlamaConfig& config, int fallback) {
  if (!file.has_ints(key)) {
    const std::int64_t period = file.get_int(key, fallback);
    require(file, period >= 0 && period <= std::numeric_limits<int>::max(), key + " is not a number of layers");
    return static_cast<int>(period);
  }
  const std::vector<std::int64_t>& has_window = file.get_ints(key);
  require(file, static_cast<int>(has_window.size()) == config.num_layers,
          key + " has " + std::to_string(has_window.size()) + " values for " + std::to_string(config.num_layers) +
              " layers");
  const auto first_global = std::find(has_window.begin(), has_window.end(), 0);
  LlamaConfig periodic;
  periodic.window = 1;
  periodic.global_period =
      first_global == has_window.end() ? 0 : static_cast<int>(first_global - has_window.begin()) + 1;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    require(file, has_window[static_cast<std::size_t>(layer)] == periodic.window_of(layer),
            key + " is not supported: it does not repeat itself after a layer that sees all tokens");
  }
  return periodic.global_period;
}

// default_period: where the file has none. 0: it need not have windows either.
void read_windows(const Gguf& file, const std::string& prefix, int default_period, LlamaConfig& config) {
  const std::string key = prefix + "attention.sliding_window";
  const std::int64_t window = default_period > 0 ? file.get_int(key) : file.get_int(key, 0);
  require(file, window >= 0, key + " is below 0");
  config.global_period = read_global_period(file, key + "_pattern", config, default_period);
  if (config.global_period > config.num_layers) {
    config.global_period = 0;  // none of them sees all tokens
  }
  const std::string base = prefix + "rope.freq_base_swa";
  if (file.has(base) || config.window_rope_freq_base > 0.0F) {
    config.window_rope_freq_base =
        static_cast<float>(read_positive(file, base, static_cast<double>(config.window_rope_freq_base)));
  }
  if (window == 0) {
    config.window_rope_freq_base = 0.0F;  // no layer has a window, nor a rotation for it
  }
  const bool has_effect = window < config.context_length && config.global_period != 1;
  config.window = has_effect ? static_cast<int>(window) : 0;
}

LlamaConfig config_of(const Gguf& file) {
  const Architecture& architecture = architecture_of(file);
  check_keys(file, architecture);
  const auto key = [&](const char* rest) { return std::string(architecture.name) + "." + rest; };
  // Far above every published model, and small enough that no product of two overflows an int.
  constexpr std::int64_t kMaxFeatures = 1 << 20;
  constexpr std::int64_t kMaxLayers = 1 << 12;
  constexpr std::int64_t kMaxHeads = 1 << 10;
  constexpr std::int64_t kMaxHeadDim = 1 << 10;

  LlamaConfig config;
  config.qkv_bias = architecture.qkv_bias;
  config.qk_norm = architecture.qk_norm;
  config.rotates_halves = architecture.rotates_halves;
  config.context_length = read_int(file, key("context_length"), 1 << 26);
  config.hidden_size = read_int(file, key("embedding_length"), kMaxFeatures);
  config.num_layers = read_int(file, key("block_count"), kMaxLayers);
  config.feed_forward_size = read_int(file, key("feed_forward_length"), kMaxFeatures);
  config.num_heads = read_int(file, key("attention.head_count"), kMaxHeads);
  config.num_kv_heads = read_int(file, key("attention.head_count_kv"), kMaxHeads, config.num_heads);
  require(file, config.num_heads % config.num_kv_heads == 0,
          std::to_string(config.num_heads) + " query heads can't share " + std::to_string(config.num_kv_heads) +
              " kv heads evenly");

  const std::string key_length = key("attention.key_length");
  require(file, file.has(key_length) || config.hidden_size % config.num_heads == 0,
          "no " + key_length + ", and the hidden size is not a multiple of the number of heads");
  config.head_dim = read_int(file, key_length, kMaxHeadDim, config.hidden_size / config.num_heads);
  require(file, read_int(file, key("attention.value_length"), kMaxHeadDim, config.head_dim) == config.head_dim,
          "keys and values of different length are not supported");
  require(file, config.head_dim % 2 == 0, "the head size is odd, so it has no pairs to rotate");
  const std::string rotated = key("rope.dimension_count");
  require(file, read_int(file, rotated, kMaxHeadDim, config.head_dim) == config.head_dim,
          "rotating a part of the head only (" + rotated + ") is not supported");

  const std::string base = key("rope.freq_base");
  const std::string epsilon = key("attention.layer_norm_rms_epsilon");
  config.rope_freq_base = static_cast<float>(file.get_float(base, 10000.0));
  config.rms_epsilon = static_cast<float>(file.get_float(epsilon));
  require(file, std::isfinite(config.rope_freq_base) && config.rope_freq_base > 0.0F,
          base + " is not a positive number");
  require(file, std::isfinite(config.rms_epsilon) && config.rms_epsilon >= 0.0F,
          epsilon + " is not a number from 0 up");

  config.vocab_size =
      checked_int(file, "the number of tokens",
                  static_cast<std::int64_t>(file.get_strings("tokenizer.ggml.tokens").size()), std::int64_t{1} << 24);
  require(file, file.get_int(key("vocab_size"), config.vocab_size) == config.vocab_size,
          key("vocab_size") + " and the number of tokens in tokenizer.ggml.tokens differ");
  config.tied_output = !file.has_tensor("output.weight");
  config.rotation_scale = read_rotary_scaling(file, architecture.name, config).rotation_scale;
  if (architecture.is_gemma) {
    // What its files do not say (Gemma 3 Technical Report, arXiv 2503.19786, and the published config.json).
    constexpr int kLargestLayers = 62;
    require(file, config.num_layers != kLargestLayers,
            "Gemma 3 27B divides its scores by another number than the root of head_dim, which is not supported");
    config.post_norms = true;
    config.gelu = true;
    config.embedding_scale = std::sqrt(static_cast<float>(config.hidden_size));
    config.window_rope_freq_base = 10000.0F;
  }
  if (architecture.windows) {
    read_windows(file, key(""), architecture.is_gemma ? 6 : 0, config);
  }
  return config;
}

// The same model, with the context that is computed right.
LlamaConfig limited(LlamaConfig config, Windows windows) {
  if (windows == Windows::kUnknown && config.has_windows()) {
    config.context_length = config.window;
  }
  return config;
}

std::string layer_prefix(int layer) { return "blk." + std::to_string(layer) + "."; }

struct ExpectedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
};

std::vector<ExpectedTensor> expected_tensors(const LlamaConfig& config) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t q_rows = std::int64_t{config.num_heads} * config.head_dim;
  const std::int64_t kv_rows = std::int64_t{config.num_kv_heads} * config.head_dim;
  const std::int64_t feed_forward = config.feed_forward_size;
  std::vector<ExpectedTensor> tensors = {{"token_embd.weight", {config.vocab_size, hidden}},
                                         {"output_norm.weight", {hidden}}};
  if (!config.tied_output) {
    tensors.push_back({"output.weight", {config.vocab_size, hidden}});
  }
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = layer_prefix(layer);
    tensors.push_back({prefix + "attn_norm.weight", {hidden}});
    tensors.push_back({prefix + "attn_q.weight", {q_rows, hidden}});
    tensors.push_back({prefix + "attn_k.weight", {kv_rows, hidden}});
    tensors.push_back({prefix + "attn_v.weight", {kv_rows, hidden}});
    if (config.qkv_bias) {
      tensors.push_back({prefix + "attn_q.bias", {q_rows}});
      tensors.push_back({prefix + "attn_k.bias", {kv_rows}});
      tensors.push_back({prefix + "attn_v.bias", {kv_rows}});
    }
    if (config.qk_norm) {
      tensors.push_back({prefix + "attn_q_norm.weight", {config.head_dim}});
      tensors.push_back({prefix + "attn_k_norm.weight", {config.head_dim}});
    }
    tensors.push_back({prefix + "attn_output.weight", {hidden, q_rows}});
    tensors.push_back({prefix + "ffn_norm.weight", {hidden}});
    if (config.post_norms) {
      tensors.push_back({prefix + "post_attention_norm.weight", {hidden}});
      tensors.push_back({prefix + "post_ffw_norm.weight", {hidden}});
    }
    tensors.push_back({prefix + "ffn_gate.weight", {feed_forward, hidden}});
    tensors.push_back({prefix + "ffn_up.weight", {feed_forward, hidden}});
    tensors.push_back({prefix + "ffn_down.weight", {hidden, feed_forward}});
  }
  return tensors;
}

// Called before memory is allocated, because the file may not hold what its metadata says. A tensor that this program
// does not know would be ignored, and the text would be wrong without notice.
void check_tensors(const Gguf& file, const LlamaConfig& config) {
  std::set<std::string, std::less<>> known = {"rope_freqs.weight"};
  for (const ExpectedTensor& tensor : expected_tensors(config)) {
    known.insert(tensor.name);
  }
  for (const auto& [name, info] : file.tensors()) {
    require(
        file, known.contains(name),
        "tensor " + quote(name) + " is not part of the " + std::string(architecture_of(file).title) + " architecture");
  }
  for (const ExpectedTensor& tensor : expected_tensors(config)) {
    file.check_tensor(tensor.name, tensor.shape);
  }
}

[[noreturn]] void refuse_damaged(const Gguf& file, const std::string& name) {
  throw InputError(file.name() + ": tensor " + quote(name) +
                   " holds a value that is not a finite number: the file is damaged");
}

bool all_finite(const RowVector& values) {
  return std::all_of(values.data(), values.data() + values.size(), [](float value) { return std::isfinite(value); });
}

// Reads norms or biases and joins them, in order, to one vector.
RowVector read_vectors(const Gguf& file, const std::vector<std::string>& names) {
  RowVector values;
  for (const std::string& name : names) {
    const TensorInfo& info = file.tensors().find(name)->second;
    RowVector vector(info.num_elements);
    file.read_tensor(name, info.shape, {vector.data(), static_cast<std::size_t>(vector.size())});
    if (!all_finite(vector)) {
      refuse_damaged(file, name);
    }
    RowVector joined(values.size() + vector.size());
    joined << values, vector;
    values = std::move(joined);
  }
  return values;
}

// A single weight that is not finite would make every logit NaN. This also reads the file from the disk before the
// first request waits.
void check_finite(const Gguf& file, const std::string& name, const WeightMatrix& matrix) {
  constexpr Eigen::Index kFloats = 1 << 14;
  const Eigen::Index rows_at_once = std::max<Eigen::Index>(1, kFloats / matrix.cols());
  const auto num_steps = static_cast<int>((matrix.rows() + rows_at_once - 1) / rows_at_once);
  parallel_for(num_steps, [&](int begin, int end) {
    RowVector floats(rows_at_once * matrix.cols());
    floats.setZero();
    for (int step = begin; step < end; ++step) {
      const Eigen::Index first = step * rows_at_once;
      matrix.read_rows(first, std::min(rows_at_once, matrix.rows() - first), floats.data());
      if (!all_finite(floats)) {
        refuse_damaged(file, name);
      }
    }
  });
}

// Reads matrices and stacks them.
WeightMatrix read_matrix(const Gguf& file, const std::vector<std::string>& names) {
  WeightMatrix matrix;
  for (const std::string& name : names) {
    const TensorInfo& info = file.tensors().find(name)->second;
    WeightMatrix part;
    part.append(info.type, info.data, info.shape[0], info.shape[1]);
    check_finite(file, name, part);
    matrix.append(info.type, info.data, info.shape[0], info.shape[1]);
  }
  return matrix;
}

LlamaLayer read_layer(const Gguf& file, const LlamaConfig& config, const std::string& prefix) {
  LlamaLayer layer;
  layer.attention_norm = read_vectors(file, {prefix + "attn_norm.weight"});
  layer.qkv = read_matrix(file, {prefix + "attn_q.weight", prefix + "attn_k.weight", prefix + "attn_v.weight"});
  if (config.qkv_bias) {
    layer.qkv_bias = read_vectors(file, {prefix + "attn_q.bias", prefix + "attn_k.bias", prefix + "attn_v.bias"});
  }
  if (config.qk_norm) {
    layer.q_norm = read_vectors(file, {prefix + "attn_q_norm.weight"});
    layer.k_norm = read_vectors(file, {prefix + "attn_k_norm.weight"});
  }
  layer.output = read_matrix(file, {prefix + "attn_output.weight"});
  if (config.post_norms) {
    layer.post_attention_norm = read_vectors(file, {prefix + "post_attention_norm.weight"});
    layer.post_feed_forward_norm = read_vectors(file, {prefix + "post_ffw_norm.weight"});
  }
  layer.feed_forward_norm = read_vectors(file, {prefix + "ffn_norm.weight"});
  layer.gate_up = read_matrix(file, {prefix + "ffn_gate.weight", prefix + "ffn_up.weight"});
  layer.down = read_matrix(file, {prefix + "ffn_down.weight"});
  return layer;
}

LlamaWeights read_weights(const Gguf& file, const LlamaConfig& config) {
  LlamaWeights weights;
  weights.embedding = read_matrix(file, {"token_embd.weight"});
  weights.output_norm = read_vectors(file, {"output_norm.weight"});
  weights.output = config.tied_output ? weights.embedding : read_matrix(file, {"output.weight"});
  weights.frequencies = read_frequencies(file, config);
  weights.window_frequencies = window_frequencies(config);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    weights.layers.push_back(read_layer(file, config, layer_prefix(layer)));
  }
  return weights;
}

// Uniform with variance 1 / cols, so that activations neither grow nor shrink from layer to layer.
void randomize(Random& random, MutableMatrixView matrix) {
  const float half_width = std::sqrt(3.0F / static_cast<float>(matrix.cols()));
  std::generate_n(matrix.data(), matrix.size(),
                  [&] { return (2.0F * static_cast<float>(random.uniform()) - 1.0F) * half_width; });
}

// y = x / sqrt(mean(x^2) + epsilon) * weight, row by row (Zhang and Sennrich, arXiv 1910.07467).
Matrix rms_norm(const Matrix& x, const RowVector& weight, float epsilon) {
  Matrix y(x.rows(), x.cols());
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const float mean_square = x.row(row).squaredNorm() / static_cast<float>(x.cols());
    y.row(row) = (x.row(row).array() * weight.array()) * (1.0F / std::sqrt(mean_square + epsilon));
  }
  return y;
}

// The rotary embedding's angles for a set of positions (Su et al., arXiv 2104.09864).
struct Rotation {
  Matrix cosine;  // [num_tokens, head_dim / 2]
  Matrix sine;    // [num_tokens, head_dim / 2]
};

Rotation rotation_at(std::span<const int> positions, const std::vector<double>& frequencies, float scale) {
  const auto rows = static_cast<Eigen::Index>(positions.size());
  const auto cols = static_cast<Eigen::Index>(frequencies.size());
  Rotation rotation{Matrix(rows, cols), Matrix(rows, cols)};
  for (Eigen::Index row = 0; row < rows; ++row) {
    for (Eigen::Index col = 0; col < cols; ++col) {
      const double angle = positions[static_cast<std::size_t>(row)] * frequencies[static_cast<std::size_t>(col)];
      rotation.cosine(row, col) = static_cast<float>(std::cos(angle)) * scale;
      rotation.sine(row, col) = static_cast<float>(std::sin(angle)) * scale;
    }
  }
  return rotation;
}

// Rotates one head's pairs (2i, 2i + 1).
void rotate_neighbours(float* head, const float* cosine, const float* sine, Eigen::Index half) {
  for (Eigen::Index i = 0; i < half; ++i) {
    const float even = head[2 * i];
    const float odd = head[2 * i + 1];
    head[2 * i] = even * cosine[i] - odd * sine[i];
    head[2 * i + 1] = even * sine[i] + odd * cosine[i];
  }
}

// Rotates one head's pairs (i, i + half).
void rotate_halves(float* head, const float* cosine, const float* sine, Eigen::Index half) {
  for (Eigen::Index i = 0; i < half; ++i) {
    const float first = head[i];
    const float second = head[i + half];
    head[i] = first * cosine[i] - second * sine[i];
    head[i + half] = first * sine[i] + second * cosine[i];
  }
}

// Rotates each head of x: [num_tokens, num_heads * head_dim] in place.
void rotate(Matrix& x, const Rotation& rotation, bool halves) {
  const Eigen::Index half = rotation.cosine.cols();
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const float* const cosine = rotation.cosine.row(row).data();
    const float* const sine = rotation.sine.row(row).data();
    for (Eigen::Index first = 0; first < x.cols(); first += 2 * half) {
      (halves ? rotate_halves : rotate_neighbours)(x.row(row).data() + first, cosine, sine, half);
    }
  }
}

// Normalises each head of x by itself.
void normalise_heads(Matrix& x, const RowVector& weight, float epsilon) {
  const Eigen::Index head_dim = weight.size();
  const Eigen::Index num_heads = x.cols() / head_dim;
  const Matrix heads = MatrixView(x.data(), x.rows() * num_heads, head_dim);
  MutableMatrixView(x.data(), heads.rows(), head_dim) = rms_norm(heads, weight, epsilon);
}

// gate_up: [num_tokens, 2 * feed_forward_size]. Returns f(gate) * up. f(x) = x / (1 + exp(-s)): SiLU with s = x, and
// with s = 2 sqrt(2 / pi) (x + 0.044715 x^3) GELU, x / 2 (1 + tanh(s / 2)) (Hendrycks and Gimpel, arXiv 1606.08415).
Matrix gated(const Matrix& gate_up, bool gelu) {
  const Eigen::Index size = gate_up.cols() / 2;
  Matrix y(gate_up.rows(), size);
  parallel_for(static_cast<int>(gate_up.rows()), [&](int begin, int end) {
    const auto gate = gate_up.block(begin, 0, end - begin, size).array();
    const auto up = gate_up.block(begin, size, end - begin, size).array();
    if (gelu) {
      constexpr float kScale = 1.5957691216F;
      y.middleRows(begin, end - begin) = gate / (1.0F + (-kScale * (gate + 0.044715F * gate.cube())).exp()) * up;
    } else {
      y.middleRows(begin, end - begin) = gate / (1.0F + (-gate).exp()) * up;
    }
  });
  return y;
}

}  // namespace

int LlamaConfig::num_windowed_layers() const {
  const int num_global = global_period > 0 ? num_layers / global_period : 0;
  return window > 0 ? num_layers - num_global : 0;
}

std::int64_t LlamaConfig::num_reads(int length, int num_queries) const {
  const int num_seen = std::min(length, window + num_queries - 1);
  return std::int64_t{num_windowed_layers()} * num_seen + std::int64_t{num_layers - num_windowed_layers()} * length;
}

struct Llama::Impl {
  Windows windows;
  LlamaConfig config;
  LlamaWeights weights;
  std::int64_t num_parameters = 0;
  std::shared_ptr<const void> file_mapping;  // keeps the matrices in memory if the file was opened by path

  // For a model with random weights:
  std::optional<Arena> arena;
  std::vector<MutableMatrixView> random_matrices;
  std::optional<std::uint64_t> synthetic_seed;
  std::once_flag randomized;

  Impl(const Gguf& file, Windows llama_windows)
      : windows(llama_windows),
        config(checked_config(file)),
        weights(read_weights(file, config)),
        file_mapping(file.mapping()) {
    config = limited(config, windows);
    count();
  }

  // The matrices are left uninitialised.
  Impl(const LlamaConfig& llama_config, Windows llama_windows)
      : windows(llama_windows), config(limited(llama_config, windows)), arena(count()) {
    const Eigen::Index hidden = config.hidden_size;
    const Eigen::Index q_rows = Eigen::Index{config.num_heads} * config.head_dim;
    const Eigen::Index qkv_rows = q_rows + 2 * Eigen::Index{config.num_kv_heads} * config.head_dim;
    const Eigen::Index feed_forward = config.feed_forward_size;
    weights.embedding = allocate(config.vocab_size, hidden);
    weights.output_norm = RowVector::Ones(hidden);
    weights.output = config.tied_output ? weights.embedding : allocate(config.vocab_size, hidden);
    weights.frequencies = plain_frequencies(config, config.rope_freq_base);
    weights.window_frequencies = window_frequencies(config);
    for (int i = 0; i < config.num_layers; ++i) {
      LlamaLayer layer;
      layer.attention_norm = RowVector::Ones(hidden);
      layer.qkv = allocate(qkv_rows, hidden);
      layer.qkv_bias = RowVector::Zero(config.qkv_bias ? qkv_rows : 0);
      layer.q_norm = RowVector::Ones(config.qk_norm ? config.head_dim : 0);
      layer.k_norm = layer.q_norm;
      layer.output = allocate(hidden, q_rows);
      layer.post_attention_norm = RowVector::Ones(config.post_norms ? hidden : 0);
      layer.feed_forward_norm = RowVector::Ones(hidden);
      layer.post_feed_forward_norm = layer.post_attention_norm;
      layer.gate_up = allocate(2 * feed_forward, hidden);
      layer.down = allocate(hidden, feed_forward);
      weights.layers.push_back(std::move(layer));
    }
  }

  static LlamaConfig checked_config(const Gguf& file) {
    LlamaConfig result = config_of(file);
    check_tensors(file, result);
    return result;
  }

  WeightMatrix allocate(Eigen::Index rows, Eigen::Index cols) {
    const MutableMatrixView floats = arena->allocate(rows, cols);
    random_matrices.push_back(floats);
    WeightMatrix matrix;
    matrix.append(MatrixView(floats.data(), rows, cols));
    return matrix;
  }

  void randomize_matrices(std::uint64_t seed) {
    Random random(seed);
    for (MutableMatrixView& matrix : random_matrices) {
      randomize(random, matrix);
    }
  }

  // Called before the weights are read.
  void randomize_if_synthetic() {
    if (synthetic_seed.has_value()) {
      std::call_once(randomized, [&] { randomize_matrices(*synthetic_seed); });
    }
  }

  // Sets num_parameters, and returns the floats to allocate: a little more, because matrices are aligned.
  std::int64_t count() {
    std::int64_t floats = 0;
    for (const ExpectedTensor& tensor : expected_tensors(config)) {
      std::int64_t size = 1;
      for (const std::int64_t extent : tensor.shape) {
        size *= extent;
      }
      num_parameters += size;
      floats += Arena::padded(size);
    }
    return floats;
  }
};

Llama::Llama(const Gguf& file, Windows windows) : impl_(std::make_unique<Impl>(file, windows)) {}

LlamaConfig Llama::read_config(const Gguf& file) { return config_of(file); }

Llama::Llama(const LlamaConfig& config, std::uint64_t seed, Windows windows)
    : impl_(std::make_unique<Impl>(config, windows)) {
  impl_->randomize_matrices(seed);
}

Llama::Llama(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Llama Llama::synthetic(const LlamaConfig& config, std::uint64_t seed, Windows windows) {
  auto impl = std::make_unique<Impl>(config, windows);
  impl->synthetic_seed = seed;
  return Llama(std::move(impl));
}

bool Llama::is_synthetic() const { return impl_->synthetic_seed.has_value(); }

Llama::Llama(Llama&&) noexcept = default;
Llama& Llama::operator=(Llama&&) noexcept = default;
Llama::~Llama() = default;

const LlamaConfig& Llama::config() const { return impl_->config; }

Matrix Llama::forward(std::span<const Token> tokens, std::span<const int> positions,
                      const AttentionFn& attention) const {
  COMMON_CHECK(!tokens.empty() && tokens.size() == positions.size(), "each token needs a position");
  impl_->randomize_if_synthetic();
  const LlamaConfig& config = impl_->config;
  COMMON_CHECK(impl_->windows == Windows::kComputed || config.window == 0 ||
                   *std::max_element(positions.begin(), positions.end()) < config.window,
               "layers see the last " + std::to_string(config.window) + " tokens only, and the attention all of them");
  const auto num_tokens = static_cast<Eigen::Index>(tokens.size());
  const Eigen::Index q_cols = Eigen::Index{config.num_heads} * config.head_dim;
  const Eigen::Index kv_cols = Eigen::Index{config.num_kv_heads} * config.head_dim;

  const LlamaWeights& weights = impl_->weights;
  Matrix x(num_tokens, config.hidden_size);
  for (Eigen::Index row = 0; row < num_tokens; ++row) {
    const Token token = tokens[static_cast<std::size_t>(row)];
    COMMON_CHECK(token >= 0 && token < config.vocab_size,
                 "token " + std::to_string(token) + " is not in the vocabulary");
    weights.embedding.read_rows(token, 1, x.row(row).data());
  }
  if (config.embedding_scale != 1.0F) {
    x *= config.embedding_scale;
  }
  const Rotation rotation = rotation_at(positions, weights.frequencies, config.rotation_scale);
  const Rotation window_rotation = rotation_at(positions, weights.window_frequencies, 1.0F);

  for (int index = 0; index < config.num_layers; ++index) {
    const LlamaLayer& layer = weights.layers[static_cast<std::size_t>(index)];

    Matrix qkv = linear(rms_norm(x, layer.attention_norm, config.rms_epsilon), layer.qkv);
    if (config.qkv_bias) {
      qkv.rowwise() += layer.qkv_bias;
    }
    Matrix q = qkv.leftCols(q_cols);
    Matrix k = qkv.middleCols(q_cols, kv_cols);
    const Matrix v = qkv.rightCols(kv_cols);
    if (config.qk_norm) {
      normalise_heads(q, layer.q_norm, config.rms_epsilon);
      normalise_heads(k, layer.k_norm, config.rms_epsilon);
    }
    const bool is_apart = !config.sees_all(index) && !weights.window_frequencies.empty();
    rotate(q, is_apart ? window_rotation : rotation, config.rotates_halves);
    rotate(k, is_apart ? window_rotation : rotation, config.rotates_halves);
    const Matrix attended = attention(index, q, k, v);
    COMMON_CHECK(attended.rows() == num_tokens && attended.cols() == q_cols,
                 "attention returned a matrix of another shape");
    const Matrix projected = linear(attended, layer.output);
    x += config.post_norms ? rms_norm(projected, layer.post_attention_norm, config.rms_epsilon) : projected;

    const Matrix gate_up = linear(rms_norm(x, layer.feed_forward_norm, config.rms_epsilon), layer.gate_up);
    const Matrix down = linear(gated(gate_up, config.gelu), layer.down);
    x += config.post_norms ? rms_norm(down, layer.post_feed_forward_norm, config.rms_epsilon) : down;
  }
  return rms_norm(x, weights.output_norm, config.rms_epsilon);
}

Matrix Llama::logits(const Matrix& hidden) const {
  impl_->randomize_if_synthetic();
  return linear(hidden, impl_->weights.output);
}

std::int64_t Llama::num_parameters() const { return impl_->num_parameters; }

std::int64_t Llama::weight_bytes_per_token() const {
  const LlamaWeights& weights = impl_->weights;
  const auto vector_bytes = [](const RowVector& vector) {
    return static_cast<std::int64_t>(vector.size()) * static_cast<std::int64_t>(sizeof(float));
  };
  // The whole output matrix is read, and one row of the embedding. If they are tied, they are one matrix.
  std::int64_t bytes = weights.output.num_bytes() + vector_bytes(weights.output_norm) +
                       weights.embedding.num_bytes() / weights.embedding.rows();
  for (const LlamaLayer& layer : weights.layers) {
    for (const WeightMatrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      bytes += matrix->num_bytes();
    }
    for (const RowVector* vector :
         {&layer.attention_norm, &layer.qkv_bias, &layer.q_norm, &layer.k_norm, &layer.post_attention_norm,
          &layer.feed_forward_norm, &layer.post_feed_forward_norm}) {
      bytes += vector_bytes(*vector);
    }
  }
  return bytes;
}

const LlamaWeights& Llama::weights() const {
  impl_->randomize_if_synthetic();
  return impl_->weights;
}

}  // namespace common
