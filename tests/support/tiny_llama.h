// A Llama of a few dozen numbers, written as a file, and an independent forward pass for it: float64, plain loops,
// reading the tensors of the same file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/math/sampling.h"
#include "common/model/gguf.h"
#include "tests/support/catch.h"
#include "tests/support/float8.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/quantised_rows.h"

namespace tests {

using Vector = std::vector<double>;

// ---- The independent forward pass ---------------------------------------------------------------------------------

struct SlowMatrix {
  std::size_t rows = 0;
  std::size_t cols = 0;
  Vector values;  // row-major

  Vector operator*(const Vector& x) const {
    REQUIRE(x.size() == cols);
    Vector y(rows, 0.0);
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t col = 0; col < cols; ++col) {
        y[row] += values[row * cols + col] * x[col];
      }
    }
    return y;
  }

  Vector row(std::size_t index) const {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(index * cols);
    return {begin, begin + static_cast<std::ptrdiff_t>(cols)};
  }
};

inline void add_to(Vector& x, const Vector& y) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] += y[i];
  }
}

// Takes sizes from the tensors rather than from the metadata wherever it can.
class SlowLlama {
 public:
  explicit SlowLlama(const common::Gguf& file)
      : file_(file),
        architecture_(file.get_string("general.architecture")),
        is_gemma_(architecture_ == "gemma3"),
        num_heads_(static_cast<std::size_t>(file.get_int(key("attention.head_count")))),
        epsilon_(file.get_float(key("attention.layer_norm_rms_epsilon"))),
        embedding_(read("token_embd.weight")),
        head_dim_(read("blk.0.attn_q.weight").rows / num_heads_) {
    const double base = file.get_float(key("rope.freq_base"), 10000.0);
    for (std::size_t i = 0; i < head_dim_ / 2; ++i) {
      frequencies_.push_back(std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim_)));
      if (file.has_tensor("rope_freqs.weight")) {
        frequencies_[i] /= read("rope_freqs.weight").values[i];
      }
    }
    const std::string scaling = file.has(key("rope.scaling.type")) ? file.get_string(key("rope.scaling.type")) : "";
    if (scaling == "linear") {
      for (double& frequency : frequencies_) {
        frequency /= file.get_float(key("rope.scaling.factor"));
      }
    } else if (scaling == "yarn") {
      slow_by_yarn(base);
    }
  }

  // The logits of all tokens, row-major, for a sequence that begins at `first_position`.
  Vector logits(std::span<const common::Token> tokens, int first_position = 0) const {
    std::vector<Vector> x;
    for (const common::Token token : tokens) {
      x.push_back(embedding_.row(static_cast<std::size_t>(token)));
      for (double& value : x.back()) {
        value *= is_gemma_ ? std::sqrt(static_cast<double>(x.back().size())) : 1.0;
      }
    }
    const auto num_layers = static_cast<int>(file_.get_int(key("block_count")));
    for (int layer = 0; layer < num_layers; ++layer) {
      const std::string prefix = "blk." + std::to_string(layer) + ".";
      add_attention(prefix, layer, first_position, x);
      add_feed_forward(prefix, x);
    }
    const SlowMatrix output = file_.has_tensor("output.weight") ? read("output.weight") : embedding_;
    Vector result;
    for (const Vector& token : x) {
      const Vector row = output * normalised(token, "output_norm.weight");
      result.insert(result.end(), row.begin(), row.end());
    }
    return result;
  }

 private:
  std::string key(const std::string& rest) const { return architecture_ + "." + rest; }

  std::size_t window() const { return static_cast<std::size_t>(file_.get_int(key("attention.sliding_window"))); }

  // The file names a window and how often a layer has none: the last one of so many.
  bool sees_all(int layer) const {
    if (!file_.has(key("attention.sliding_window"))) {
      return true;
    }
    const std::int64_t period = file_.get_int(key("attention.sliding_window_pattern"), is_gemma_ ? 6 : 0);
    return period > 0 && layer % period == period - 1;
  }

  // As in the paper (arXiv 2309.00071, section 3.2): by how many times a pair turns over the context of training. The
  // ends of the ramp are moved to whole pairs, as in its authors' program.
  void slow_by_yarn(double base) {
    const double factor = file_.get_float(key("rope.scaling.factor"));
    const auto trained = static_cast<double>(file_.get_int(key("rope.scaling.original_context_length")));
    const auto dim = static_cast<double>(head_dim_);
    const auto pair_that_turns = [&](double times) {
      return dim / 2.0 * std::log(trained / (2.0 * std::acos(-1.0) * times)) / std::log(base);
    };
    const double low = std::max(0.0, std::floor(pair_that_turns(32.0)));
    const double high = std::min(dim - 1.0, std::ceil(pair_that_turns(1.0)));
    for (std::size_t i = 0; i < frequencies_.size(); ++i) {
      const double ramp = std::min(1.0, std::max(0.0, (static_cast<double>(i) - low) / std::max(0.001, high - low)));
      frequencies_[i] = (1.0 - ramp) * frequencies_[i] + ramp * frequencies_[i] / factor;
    }
    rotation_scale_ = (1.0 + 0.1 * std::log(factor)) * file_.get_float(key("rope.scaling.attn_factor"), 1.0);
  }

  SlowMatrix read(const std::string& name) const {
    const common::TensorInfo& info = file_.tensors().at(name);
    std::vector<float> values(static_cast<std::size_t>(info.num_elements));
    file_.read_tensor(name, info.shape, values);
    const auto cols = static_cast<std::size_t>(info.shape.back());
    return {values.size() / cols, cols, Vector(values.begin(), values.end())};
  }

  Vector normalised(const Vector& x, const std::string& weight) const {
    const SlowMatrix weights = read(weight);
    double sum = 0.0;
    for (const double value : x) {
      sum += value * value;
    }
    const double root = std::sqrt(sum / static_cast<double>(x.size()) + epsilon_);
    Vector y;
    for (std::size_t i = 0; i < x.size(); ++i) {
      y.push_back(x[i] / root * weights.values[i]);
    }
    return y;
  }

  // Turns each pair of each head by position * frequency i. Llama's pairs are (2i, 2i + 1), the others' (i, i + half).
  // Gemma's layers with windows have frequencies of their own, which are neither slowed nor scaled.
  Vector rotated(const Vector& x, int layer, int position) const {
    const bool is_local = is_gemma_ && !sees_all(layer);
    const double local_base = is_local ? file_.get_float(key("rope.freq_base_swa"), 10000.0) : 0.0;
    Vector result = x;
    const std::size_t half = head_dim_ / 2;
    for (std::size_t head = 0; head < x.size(); head += head_dim_) {
      for (std::size_t i = 0; i < half; ++i) {
        const double frequency =
            is_local ? std::pow(local_base, -static_cast<double>(i) / static_cast<double>(half)) : frequencies_[i];
        const double angle = position * frequency;
        const std::size_t first = head + (architecture_ == "llama" ? 2 * i : i);
        const std::size_t second = architecture_ == "llama" ? first + 1 : first + half;
        const double scale = is_local ? 1.0 : rotation_scale_;
        result[first] = scale * (x[first] * std::cos(angle) - x[second] * std::sin(angle));
        result[second] = scale * (x[first] * std::sin(angle) + x[second] * std::cos(angle));
      }
    }
    return result;
  }

  // q, k or v of a token: `part` is its letter. Biases and norms are used if the file has them.
  Vector projected(const std::string& prefix, const std::string& part, const Vector& x) const {
    Vector result = read(prefix + "attn_" + part + ".weight") * x;
    if (const std::string bias = prefix + "attn_" + part + ".bias"; file_.has_tensor(bias)) {
      add_to(result, read(bias).values);
    }
    if (const std::string norm = prefix + "attn_" + part + "_norm.weight"; file_.has_tensor(norm)) {
      for (std::size_t head = 0; head < result.size(); head += head_dim_) {
        const auto begin = result.begin() + static_cast<std::ptrdiff_t>(head);
        const Vector one = normalised({begin, begin + static_cast<std::ptrdiff_t>(head_dim_)}, norm);
        std::copy(one.begin(), one.end(), begin);
      }
    }
    return result;
  }

  // Gemma normalises what a part of a layer adds.
  Vector added(const Vector& y, const std::string& norm) const { return is_gemma_ ? normalised(y, norm) : y; }

  void add_attention(const std::string& prefix, int layer, int first_position, std::vector<Vector>& x) const {
    const SlowMatrix wo = read(prefix + "attn_output.weight");
    std::vector<Vector> keys;
    std::vector<Vector> values;
    for (std::size_t t = 0; t < x.size(); ++t) {
      const int position = first_position + static_cast<int>(t);
      const Vector h = normalised(x[t], prefix + "attn_norm.weight");
      keys.push_back(rotated(projected(prefix, "k", h), layer, position));
      values.push_back(projected(prefix, "v", h));
      if (!sees_all(layer) && keys.size() > window()) {
        keys.erase(keys.begin());
        values.erase(values.begin());
      }
      const Vector q = rotated(projected(prefix, "q", h), layer, position);
      add_to(x[t], added(wo * attend(q, keys, values), prefix + "post_attention_norm.weight"));
    }
  }

  // One token's query attends to these keys, the last of which is its own.
  Vector attend(const Vector& q, const std::vector<Vector>& keys, const std::vector<Vector>& values) const {
    const std::size_t num_queries_per_kv = q.size() / keys[0].size();
    Vector result(q.size(), 0.0);
    for (std::size_t head = 0; head < num_heads_; ++head) {
      const std::size_t q_begin = head * head_dim_;
      const std::size_t kv_begin = head / num_queries_per_kv * head_dim_;
      Vector weights;
      double sum = 0.0;
      for (const Vector& key : keys) {
        double score = 0.0;
        for (std::size_t d = 0; d < head_dim_; ++d) {
          score += q[q_begin + d] * key[kv_begin + d];
        }
        // Scores stay far below 700, so exp() does not overflow even without subtracting the maximum.
        weights.push_back(std::exp(score / std::sqrt(static_cast<double>(head_dim_))));
        sum += weights.back();
      }
      for (std::size_t t = 0; t < values.size(); ++t) {
        for (std::size_t d = 0; d < head_dim_; ++d) {
          result[q_begin + d] += weights[t] / sum * values[t][kv_begin + d];
        }
      }
    }
    return result;
  }

  void add_feed_forward(const std::string& prefix, std::vector<Vector>& x) const {
    const SlowMatrix gate_weights = read(prefix + "ffn_gate.weight");
    const SlowMatrix up_weights = read(prefix + "ffn_up.weight");
    const SlowMatrix down_weights = read(prefix + "ffn_down.weight");
    for (Vector& token : x) {
      const Vector h = normalised(token, prefix + "ffn_norm.weight");
      Vector gate = gate_weights * h;
      const Vector up = up_weights * h;
      for (std::size_t i = 0; i < gate.size(); ++i) {
        const double activated = is_gemma_ ? 0.5 * gate[i] *
                                                 (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) *
                                                                  (gate[i] + 0.044715 * std::pow(gate[i], 3.0))))
                                           : gate[i] / (1.0 + std::exp(-gate[i]));
        gate[i] = activated * up[i];
      }
      add_to(token, added(down_weights * gate, prefix + "post_ffw_norm.weight"));
    }
  }

  const common::Gguf& file_;
  std::string architecture_;
  bool is_gemma_;
  std::size_t num_heads_;
  double epsilon_;
  SlowMatrix embedding_;
  std::size_t head_dim_;
  Vector frequencies_;  // [head_dim / 2], radians a position
  double rotation_scale_ = 1.0;
};

// ---- Small models -------------------------------------------------------------------------------------------------

// What a small file says of itself. The sizes are deliberately no multiples of a vector register's width.
struct TinyModel {
  std::string architecture = "llama";
  common::TensorType type = common::TensorType::F32;  // the matrices'; other_type is the second layer's
  std::optional<common::TensorType> other_type;
  int vocab_size = 11;
  int hidden_size = 12;
  int num_layers = 2;
  int num_heads = 6;
  int num_kv_heads = 2;
  int head_dim = 2;
  int feed_forward_size = 20;
  bool write_num_kv_heads = true;
  bool write_head_dim = false;
  bool tied = true;
  float epsilon = 1e-5F;
  bool float8 = false;  // the matrices of layers hold numbers that float8 with a scale for each row stores exactly
  double spread = 1.5;  // standard deviation of a product whose input has 1
  std::optional<float> freq_base;
  std::vector<float> rope_factors;
  std::string scaling;  // linear or yarn, by 4
  std::optional<int> trained_length;
  std::optional<int> window;
  std::optional<int> global_period;

  // Random weights and norms, large enough for tokens to influence one another.
  GgufBuilder builder() const {
    GgufBuilder result;
    add_metadata(result);
    common::Random random(7);
    const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, double mean) {
      std::int64_t count = 1;
      for (const std::int64_t size : shape) {
        count *= size;
      }
      const bool is_matrix = shape.size() == 2;
      const double deviation = is_matrix ? spread / std::sqrt(static_cast<double>(shape.back())) : 0.3;
      const common::TensorType tensor_type = name.starts_with("blk.1.") ? other_type.value_or(type) : type;
      if (is_matrix && tensor_type != common::TensorType::F32) {
        result.add_tensor(
            name, shape, tensor_type,
            random_weights(random, tensor_type, static_cast<std::size_t>(count), static_cast<float>(deviation)));
        return;
      }
      std::vector<float> values;
      for (std::int64_t i = 0; i < count; ++i) {
        values.push_back(static_cast<float>(mean + deviation * random.normal()));
      }
      if (float8 && is_matrix && name.starts_with("blk.")) {
        values = through_float8(values, static_cast<std::size_t>(shape.back()));
      }
      result.add_tensor(name, shape, values);
    };
    const int q_rows = num_heads * head_dim;
    const int kv_rows = num_kv_heads * head_dim;
    add("token_embd.weight", {vocab_size, hidden_size}, 0.0);
    for (int layer = 0; layer < num_layers; ++layer) {
      const std::string prefix = "blk." + std::to_string(layer) + ".";
      add(prefix + "attn_norm.weight", {hidden_size}, 1.0);
      add(prefix + "attn_q.weight", {q_rows, hidden_size}, 0.0);
      add(prefix + "attn_k.weight", {kv_rows, hidden_size}, 0.0);
      add(prefix + "attn_v.weight", {kv_rows, hidden_size}, 0.0);
      if (architecture == "qwen2") {
        add(prefix + "attn_q.bias", {q_rows}, 0.0);
        add(prefix + "attn_k.bias", {kv_rows}, 0.0);
        add(prefix + "attn_v.bias", {kv_rows}, 0.0);
      }
      if (architecture == "qwen3" || architecture == "gemma3") {
        add(prefix + "attn_q_norm.weight", {head_dim}, 1.0);
        add(prefix + "attn_k_norm.weight", {head_dim}, 1.0);
      }
      add(prefix + "attn_output.weight", {hidden_size, q_rows}, 0.0);
      add(prefix + "ffn_norm.weight", {hidden_size}, 1.0);
      if (architecture == "gemma3") {
        add(prefix + "post_attention_norm.weight", {hidden_size}, 1.0);
        add(prefix + "post_ffw_norm.weight", {hidden_size}, 1.0);
      }
      add(prefix + "ffn_gate.weight", {feed_forward_size, hidden_size}, 0.0);
      add(prefix + "ffn_up.weight", {feed_forward_size, hidden_size}, 0.0);
      add(prefix + "ffn_down.weight", {hidden_size, feed_forward_size}, 0.0);
    }
    add("output_norm.weight", {hidden_size}, 1.0);
    if (!tied) {
      add("output.weight", {vocab_size, hidden_size}, 0.0);
    }
    if (!rope_factors.empty()) {
      result.add_tensor("rope_freqs.weight", {static_cast<std::int64_t>(rope_factors.size())}, rope_factors);
    }
    return result;
  }

 private:
  void add_metadata(GgufBuilder& result) const {
    const auto add = [&](const std::string& key, const auto& value) { result.add(architecture + "." + key, value); };
    result.add("general.architecture", architecture);
    add("context_length", std::uint32_t{64});
    add("embedding_length", hidden_size);
    add("block_count", num_layers);
    add("feed_forward_length", feed_forward_size);
    add("attention.head_count", num_heads);
    add("attention.layer_norm_rms_epsilon", epsilon);
    if (write_num_kv_heads) {
      add("attention.head_count_kv", num_kv_heads);
    }
    if (write_head_dim) {
      add("attention.key_length", head_dim);
      add("attention.value_length", head_dim);
      add("rope.dimension_count", head_dim);
    }
    if (freq_base.has_value()) {
      add("rope.freq_base", *freq_base);
    }
    if (!scaling.empty()) {
      add("rope.scaling.type", scaling);
      add("rope.scaling.factor", 4.0F);
    }
    if (trained_length.has_value()) {
      add("rope.scaling.original_context_length", *trained_length);
    }
    if (window.has_value()) {
      add("attention.sliding_window", *window);
    }
    if (global_period.has_value()) {
      add("attention.sliding_window_pattern", *global_period);
    }
    // What the tokens spell does not matter here, only how many there are.
    result.add_array("tokenizer.ggml.tokens", std::vector<std::string>(static_cast<std::size_t>(vocab_size), "t"));
  }
};

// Of Gemma's layers, every second one rotates as those do that see all tokens, and the others as those with a window,
// which is so long that it hides nothing.
inline void add_layer_kinds(TinyModel& model) {
  if (model.architecture == "gemma3") {
    model.window = 1024;
    model.global_period = 2;
  }
}

// Sizes that no kernel's tiles divide evenly, and float8 weights.
inline TinyModel uneven_float8_model(const std::string& architecture, int feed_forward_size) {
  TinyModel model;
  model.architecture = architecture;
  model.vocab_size = 101;
  model.hidden_size = 208;
  model.num_heads = 7;
  model.num_kv_heads = 1;
  model.head_dim = 16;
  model.feed_forward_size = feed_forward_size;
  model.write_head_dim = true;
  model.spread = 0.8;
  model.float8 = true;
  add_layer_kinds(model);
  return model;
}

}  // namespace tests
