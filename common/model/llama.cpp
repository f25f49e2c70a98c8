#include "common/model/llama.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "common/base/check.h"
#include "common/base/memory.h"
#include "common/base/parallel.h"
#include "common/math/sampling.h"
#include "common/model/linear.h"

namespace common {
namespace {

using Layer = LlamaLayer<MutableMatrixView>;

// One array that holds all matrices.
class Arena {
 public:
  explicit Arena(std::int64_t size) : size_(size), floats_(allocate_floats(static_cast<std::size_t>(size))) {}

  MutableMatrixView take(std::int64_t rows, std::int64_t cols) {
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

LlamaConfig config_of(const Gguf& file) {
  require(file, file.get_string("general.architecture") == "llama",
          "the architecture is \"" + file.get_string("general.architecture") + "\", only \"llama\" is supported");
  // Far above every published model, and small enough that no product of two overflows an int.
  constexpr std::int64_t kMaxFeatures = 1 << 20;
  constexpr std::int64_t kMaxLayers = 1 << 12;
  constexpr std::int64_t kMaxHeads = 1 << 10;
  constexpr std::int64_t kMaxHeadDim = 1 << 10;

  LlamaConfig config;
  config.context_length = read_int(file, "llama.context_length", 1 << 26);
  config.hidden_size = read_int(file, "llama.embedding_length", kMaxFeatures);
  config.num_layers = read_int(file, "llama.block_count", kMaxLayers);
  config.feed_forward_size = read_int(file, "llama.feed_forward_length", kMaxFeatures);
  config.num_heads = read_int(file, "llama.attention.head_count", kMaxHeads);
  config.num_kv_heads = read_int(file, "llama.attention.head_count_kv", kMaxHeads, config.num_heads);
  require(file, config.num_heads % config.num_kv_heads == 0,
          std::to_string(config.num_heads) + " query heads can't share " + std::to_string(config.num_kv_heads) +
              " kv heads evenly");

  const std::string key_length = "llama.attention.key_length";
  require(file, file.has(key_length) || config.hidden_size % config.num_heads == 0,
          "no " + key_length + ", and the hidden size is not a multiple of the number of heads");
  config.head_dim = read_int(file, key_length, kMaxHeadDim, config.hidden_size / config.num_heads);
  require(file, read_int(file, "llama.attention.value_length", kMaxHeadDim, config.head_dim) == config.head_dim,
          "keys and values of different length are not supported");
  require(file, config.head_dim % 2 == 0, "the head size is odd, so it has no pairs to rotate");
  require(file, read_int(file, "llama.rope.dimension_count", kMaxHeadDim, config.head_dim) == config.head_dim,
          "rotating a part of the head only (llama.rope.dimension_count) is not supported");
  if (file.has("llama.rope.scaling.type")) {
    const std::string& scaling = file.get_string("llama.rope.scaling.type");
    require(file, scaling == "none", "rotary scaling \"" + scaling + "\" is not supported");
  }
  require(file, file.get_int("llama.expert_count", 0) == 0, "mixtures of experts are not supported");

  config.rope_freq_base = static_cast<float>(file.get_float("llama.rope.freq_base", 10000.0));
  config.rms_epsilon = static_cast<float>(file.get_float("llama.attention.layer_norm_rms_epsilon"));
  require(file, std::isfinite(config.rope_freq_base) && config.rope_freq_base > 0.0F,
          "llama.rope.freq_base is not a positive number");
  require(file, std::isfinite(config.rms_epsilon) && config.rms_epsilon >= 0.0F,
          "llama.attention.layer_norm_rms_epsilon is not a number from 0 up");

  config.vocab_size =
      checked_int(file, "the number of tokens",
                  static_cast<std::int64_t>(file.get_strings("tokenizer.ggml.tokens").size()), std::int64_t{1} << 24);
  require(file, file.get_int("llama.vocab_size", config.vocab_size) == config.vocab_size,
          "llama.vocab_size and the number of tokens in tokenizer.ggml.tokens differ");
  config.tied_output = !file.has_tensor("output.weight");
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
    tensors.push_back({prefix + "attn_output.weight", {hidden, q_rows}});
    tensors.push_back({prefix + "ffn_norm.weight", {hidden}});
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
    require(file, known.contains(name), "tensor '" + name + "' is not part of the Llama architecture");
  }
  for (const ExpectedTensor& tensor : expected_tensors(config)) {
    file.check_tensor(tensor.name, tensor.shape);
  }
}

// Reads a tensor into rows first_row … of a matrix as wide as the tensor.
void read_rows(const Gguf& file, const std::string& name, MutableMatrixView matrix, Eigen::Index first_row,
               Eigen::Index rows) {
  const std::span<float> values(matrix.row(first_row).data(), static_cast<std::size_t>(rows * matrix.cols()));
  file.read_tensor(name, file.tensors().find(name)->second.shape, values);
  // One such weight would make every logit NaN.
  require(file, std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); }),
          "tensor \"" + name + "\" holds a value that is not a finite number: the file is damaged");
}

void read_matrix(const Gguf& file, const std::string& name, const MutableMatrixView& matrix) {
  read_rows(file, name, matrix, 0, matrix.rows());
}

void read_layer(const Gguf& file, const LlamaConfig& config, const std::string& prefix, const Layer& layer) {
  const Eigen::Index q_rows = Eigen::Index{config.num_heads} * config.head_dim;
  const Eigen::Index kv_rows = Eigen::Index{config.num_kv_heads} * config.head_dim;
  const Eigen::Index feed_forward = config.feed_forward_size;
  read_matrix(file, prefix + "attn_norm.weight", layer.attention_norm);
  read_rows(file, prefix + "attn_q.weight", layer.qkv, 0, q_rows);
  read_rows(file, prefix + "attn_k.weight", layer.qkv, q_rows, kv_rows);
  read_rows(file, prefix + "attn_v.weight", layer.qkv, q_rows + kv_rows, kv_rows);
  read_matrix(file, prefix + "attn_output.weight", layer.output);
  read_matrix(file, prefix + "ffn_norm.weight", layer.feed_forward_norm);
  read_rows(file, prefix + "ffn_gate.weight", layer.gate_up, 0, feed_forward);
  read_rows(file, prefix + "ffn_up.weight", layer.gate_up, feed_forward, feed_forward);
  read_matrix(file, prefix + "ffn_down.weight", layer.down);
}

// Uniform with variance 1 / cols, so that activations neither grow nor shrink from layer to layer.
void randomize(Random& random, MutableMatrixView matrix) {
  const float half_width = std::sqrt(3.0F / static_cast<float>(matrix.cols()));
  std::generate_n(matrix.data(), matrix.size(),
                  [&] { return (2.0F * static_cast<float>(random.uniform()) - 1.0F) * half_width; });
}

// y = x / sqrt(mean(x^2) + epsilon) * weight, row by row (Zhang and Sennrich, arXiv 1910.07467).
Matrix rms_norm(const Matrix& x, const MutableMatrixView& weight, float epsilon) {
  Matrix y(x.rows(), x.cols());
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const float mean_square = x.row(row).squaredNorm() / static_cast<float>(x.cols());
    y.row(row) = (x.row(row).array() * weight.row(0).array()) * (1.0F / std::sqrt(mean_square + epsilon));
  }
  return y;
}

// The rotary embedding's angles for a set of positions (Su et al., arXiv 2104.09864).
struct Rotation {
  Matrix cosine;  // [num_tokens, head_dim / 2]
  Matrix sine;    // [num_tokens, head_dim / 2]
};

Rotation rotation_at(std::span<const int> positions, const std::vector<double>& frequencies) {
  const auto rows = static_cast<Eigen::Index>(positions.size());
  const auto cols = static_cast<Eigen::Index>(frequencies.size());
  Rotation rotation{Matrix(rows, cols), Matrix(rows, cols)};
  for (Eigen::Index row = 0; row < rows; ++row) {
    for (Eigen::Index col = 0; col < cols; ++col) {
      const double angle = positions[static_cast<std::size_t>(row)] * frequencies[static_cast<std::size_t>(col)];
      rotation.cosine(row, col) = static_cast<float>(std::cos(angle));
      rotation.sine(row, col) = static_cast<float>(std::sin(angle));
    }
  }
  return rotation;
}

// Rotates each head of x: [num_tokens, num_heads * head_dim] in place. GGUF stores the rows of Llama's Q and K
// permuted, so that the two numbers of a pair lie next to each other: (2i, 2i + 1), not (i, i + head_dim / 2).
void rotate(Matrix& x, const Rotation& rotation) {
  const Eigen::Index half = rotation.cosine.cols();
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const float* cosine = rotation.cosine.row(row).data();
    const float* sine = rotation.sine.row(row).data();
    for (Eigen::Index head = 0; head < x.cols() / (2 * half); ++head) {
      float* pair = x.row(row).data() + head * 2 * half;
      for (Eigen::Index i = 0; i < half; ++i) {
        const float even = pair[2 * i];
        const float odd = pair[2 * i + 1];
        pair[2 * i] = even * cosine[i] - odd * sine[i];
        pair[2 * i + 1] = even * sine[i] + odd * cosine[i];
      }
    }
  }
}

// gate_up: [num_tokens, 2 * feed_forward_size]. Returns silu(gate) * up, with silu(x) = x / (1 + exp(-x)).
Matrix gated_silu(const Matrix& gate_up) {
  const Eigen::Index size = gate_up.cols() / 2;
  Matrix y(gate_up.rows(), size);
  parallel_for(static_cast<int>(gate_up.rows()), [&](int begin, int end) {
    const auto gate = gate_up.block(begin, 0, end - begin, size).array();
    const auto up = gate_up.block(begin, size, end - begin, size).array();
    y.middleRows(begin, end - begin) = gate / (1.0F + (-gate).exp()) * up;
  });
  return y;
}

}  // namespace

struct Llama::Impl {
  LlamaConfig config;
  std::int64_t num_parameters = 0;
  Arena arena;
  MutableMatrixView embedding;    // [vocab_size, hidden_size]
  MutableMatrixView output_norm;  // [1, hidden_size]
  MutableMatrixView output;       // [vocab_size, hidden_size]; the embedding itself when tied
  std::vector<Layer> layers;
  std::vector<double> frequencies;  // [head_dim / 2], radians per position
  std::optional<std::uint64_t> synthetic_seed;
  std::once_flag drawn;

  explicit Impl(const LlamaConfig& llama_config)
      : config(llama_config),
        arena(count()),
        embedding(arena.take(config.vocab_size, config.hidden_size)),
        output_norm(arena.take(1, config.hidden_size)),
        output(config.tied_output ? embedding : arena.take(config.vocab_size, config.hidden_size)) {
    const Eigen::Index hidden = config.hidden_size;
    const Eigen::Index q_rows = Eigen::Index{config.num_heads} * config.head_dim;
    const Eigen::Index kv_rows = Eigen::Index{config.num_kv_heads} * config.head_dim;
    const Eigen::Index feed_forward = config.feed_forward_size;
    for (int layer = 0; layer < config.num_layers; ++layer) {
      layers.push_back({arena.take(1, hidden), arena.take(q_rows + 2 * kv_rows, hidden), arena.take(hidden, q_rows),
                        arena.take(1, hidden), arena.take(2 * feed_forward, hidden), arena.take(hidden, feed_forward)});
    }
    for (int i = 0; i < config.head_dim / 2; ++i) {
      frequencies.push_back(std::pow(static_cast<double>(config.rope_freq_base), -2.0 * i / config.head_dim));
    }
  }

  void draw(std::uint64_t seed) {
    Random random(seed);
    randomize(random, embedding);
    output_norm.setOnes();
    if (!config.tied_output) {
      randomize(random, output);
    }
    for (Layer& layer : layers) {
      layer.attention_norm.setOnes();
      randomize(random, layer.qkv);
      randomize(random, layer.output);
      layer.feed_forward_norm.setOnes();
      randomize(random, layer.gate_up);
      randomize(random, layer.down);
    }
  }

  // Called before the weights are read.
  void draw_if_synthetic() {
    if (synthetic_seed.has_value()) {
      std::call_once(drawn, [&] { draw(*synthetic_seed); });
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

Llama::Llama(const Gguf& file) {
  const LlamaConfig config = config_of(file);
  check_tensors(file, config);
  impl_ = std::make_unique<Impl>(config);
  read_matrix(file, "token_embd.weight", impl_->embedding);
  read_matrix(file, "output_norm.weight", impl_->output_norm);
  if (!config.tied_output) {
    read_matrix(file, "output.weight", impl_->output);
  }
  if (file.has_tensor("rope_freqs.weight")) {
    // Llama 3.1 and later slow down the slow rotations by these factors, for longer contexts.
    std::vector<float> factors(impl_->frequencies.size());
    file.read_tensor("rope_freqs.weight", std::array<std::int64_t, 1>{config.head_dim / 2}, factors);
    for (std::size_t i = 0; i < factors.size(); ++i) {
      require(file, std::isfinite(factors[i]) && factors[i] > 0.0F,
              "rope_freqs.weight holds a factor that is not positive");
      impl_->frequencies[i] /= static_cast<double>(factors[i]);
    }
  }
  parallel_for(config.num_layers, [&](int begin, int end) {
    for (int layer = begin; layer < end; ++layer) {
      read_layer(file, config, layer_prefix(layer), impl_->layers[static_cast<std::size_t>(layer)]);
    }
  });
}

LlamaConfig Llama::read_config(const Gguf& file) { return config_of(file); }

Llama::Llama(const LlamaConfig& config, std::uint64_t seed) : impl_(std::make_unique<Impl>(config)) {
  impl_->draw(seed);
}

Llama::Llama(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Llama Llama::synthetic(const LlamaConfig& config, std::uint64_t seed) {
  auto impl = std::make_unique<Impl>(config);
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
  impl_->draw_if_synthetic();
  const LlamaConfig& config = impl_->config;
  const auto num_tokens = static_cast<Eigen::Index>(tokens.size());
  const Eigen::Index q_cols = Eigen::Index{config.num_heads} * config.head_dim;
  const Eigen::Index kv_cols = Eigen::Index{config.num_kv_heads} * config.head_dim;

  Matrix x(num_tokens, config.hidden_size);
  for (Eigen::Index row = 0; row < num_tokens; ++row) {
    const Token token = tokens[static_cast<std::size_t>(row)];
    COMMON_CHECK(token >= 0 && token < config.vocab_size,
                 "token " + std::to_string(token) + " is not in the vocabulary");
    x.row(row) = impl_->embedding.row(token);
  }
  const Rotation rotation = rotation_at(positions, impl_->frequencies);

  for (int layer = 0; layer < config.num_layers; ++layer) {
    const Layer& weights = impl_->layers[static_cast<std::size_t>(layer)];

    const Matrix qkv = linear(rms_norm(x, weights.attention_norm, config.rms_epsilon), weights.qkv);
    Matrix q = qkv.leftCols(q_cols);
    Matrix k = qkv.middleCols(q_cols, kv_cols);
    const Matrix v = qkv.rightCols(kv_cols);
    rotate(q, rotation);
    rotate(k, rotation);
    const Matrix attended = attention(layer, q, k, v);
    COMMON_CHECK(attended.rows() == num_tokens && attended.cols() == q_cols,
                 "attention returned a matrix of another shape");
    x += linear(attended, weights.output);

    const Matrix gate_up = linear(rms_norm(x, weights.feed_forward_norm, config.rms_epsilon), weights.gate_up);
    x += linear(gated_silu(gate_up), weights.down);
  }
  return rms_norm(x, impl_->output_norm, config.rms_epsilon);
}

Matrix Llama::logits(const Matrix& hidden) const {
  impl_->draw_if_synthetic();
  return linear(hidden, impl_->output);
}

std::int64_t Llama::num_parameters() const { return impl_->num_parameters; }

std::int64_t Llama::weight_bytes_per_token() const {
  // The whole output matrix is read, and one row of the embedding. If they are tied, they are one matrix.
  const std::int64_t looked_up = impl_->config.tied_output ? 0 : impl_->embedding.size();
  return (num_parameters() - looked_up + impl_->config.hidden_size) * static_cast<std::int64_t>(sizeof(float));
}

LlamaWeights Llama::weights() const {
  impl_->draw_if_synthetic();
  const auto view = [](const MutableMatrixView& matrix) {
    return MatrixView(matrix.data(), matrix.rows(), matrix.cols());
  };
  LlamaWeights weights{.embedding = view(impl_->embedding),
                       .output_norm = view(impl_->output_norm),
                       .output = view(impl_->output),
                       .layers = {},
                       .frequencies = impl_->frequencies};
  for (const Layer& layer : impl_->layers) {
    weights.layers.push_back({view(layer.attention_norm), view(layer.qkv), view(layer.output),
                              view(layer.feed_forward_norm), view(layer.gate_up), view(layer.down)});
  }
  return weights;
}

}  // namespace common
