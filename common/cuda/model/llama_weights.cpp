#include "common/cuda/model/llama_weights.h"

#include <algorithm>
#include <cmath>

#include "common/cuda/model/llama_kernels.h"

namespace common {
namespace {

// Divides one allocation into pieces. They are offsets until the allocation is made, when all are known.
class Cuts {
 public:
  template <typename T>
  void take(T*& piece, std::size_t bytes) {
    pieces_.push_back({reinterpret_cast<void**>(&piece), total_});
    total_ += (bytes + 255) / 256 * 256;
  }
  std::size_t total() const { return total_; }
  void place(void* first) const {
    for (const Piece& piece : pieces_) {
      *piece.pointer = static_cast<std::byte*>(first) + piece.offset;
    }
  }

 private:
  struct Piece {
    void** pointer;
    std::size_t offset;
  };
  std::vector<Piece> pieces_;
  std::size_t total_ = 0;
};

std::int64_t q_rows(const LlamaConfig& config) { return std::int64_t{config.num_heads} * config.head_dim; }
std::int64_t qkv_rows(const LlamaConfig& config) {
  return (config.num_heads + 2 * std::int64_t{config.num_kv_heads}) * config.head_dim;
}

// Uploads through staging buffers of 32 MiB: the host unpacks the file's blocks to floats, and the device does the
// rounding.
class Uploader {
 public:
  explicit Uploader(Precision precision) : precision_(precision), staging_(kStagingFloats) {}

  // Row first + i of `source`, for num_rows rows, becomes row to_row + i * row_step of destination: only the shard's
  // part of its columns.
  void rows(const WeightMatrix& source, std::int64_t first, std::int64_t num_rows,
            const CudaLlamaWeights::LayerMatrix& destination, std::int64_t to_row, int row_step,
            const Shard& shard = {}) {
    const std::int64_t cols = source.cols();
    COMMON_CHECK(cols <= kStagingFloats, "a row fits into the staging buffer");
    const std::int64_t rows_at_once = std::max<std::int64_t>(1, kStagingFloats / cols);
    for (std::int64_t row = 0; row < num_rows; row += rows_at_once) {
      const std::int64_t count = std::min<std::int64_t>(rows_at_once, num_rows - row);
      floats_.resize(static_cast<std::size_t>(count * cols));
      source.read_rows(first + row, count, floats_.data());
      const std::int64_t own_cols = cols / shard.count;
      const auto own_bytes = static_cast<std::size_t>(own_cols) * sizeof(float);
      // Both are in the default stream, so a copy waits for the previous kernel.
      CUDA_CHECK(cudaMemcpy2D(staging_.data(), own_bytes, floats_.data() + own_cols * shard.rank,
                              static_cast<std::size_t>(cols) * sizeof(float), own_bytes,
                              static_cast<std::size_t>(count), cudaMemcpyHostToDevice));
      store(count, own_cols, destination, to_row + row * row_step, row_step);
    }
  }
  void matrix(const WeightMatrix& source, const CudaLlamaWeights::LayerMatrix& destination) {
    rows(source, 0, source.rows(), destination, 0, 1);
  }
  // The shard's part of each row.
  void columns(const WeightMatrix& source, const Shard& shard, const CudaLlamaWeights::LayerMatrix& destination) {
    rows(source, 0, source.rows(), destination, 0, 1, shard);
  }

  // Float8 rows, uniform in (-half_width, half_width), drawn from number `first` on.
  void randomize(std::uint64_t seed, std::uint64_t first, float half_width, std::int64_t num_rows, std::int64_t cols,
                 const CudaLlamaWeights::LayerMatrix& destination) {
    const std::int64_t rows_at_once = std::max<std::int64_t>(1, kStagingFloats / cols);
    for (std::int64_t row = 0; row < num_rows; row += rows_at_once) {
      const std::int64_t count = std::min<std::int64_t>(rows_at_once, num_rows - row);
      fill_uniform(Precision::kFloat32, seed, first + static_cast<std::uint64_t>(row * cols), half_width, count * cols,
                   staging_.data(), nullptr);
      store(count, cols, destination, row, 1);
    }
  }

 private:
  // The first rows of the staging buffer.
  void store(std::int64_t num_rows, std::int64_t cols, const CudaLlamaWeights::LayerMatrix& destination,
             std::int64_t to_row, int row_step) {
    const bool is_float8 = destination.row_scales != nullptr;
    auto* const to = static_cast<std::byte*>(destination.data) + to_row * cols * (is_float8 ? 1 : bytes_of(precision_));
    if (is_float8) {
      store_rows_float8(staging_.data(), num_rows, static_cast<int>(cols), row_step, to,
                        destination.row_scales + to_row, destination.row_exponents + to_row, nullptr);
    } else {
      store_rows(precision_, staging_.data(), num_rows, static_cast<int>(cols), row_step, to, nullptr);
    }
  }

  static constexpr std::int64_t kStagingFloats = std::int64_t{1} << 23;
  Precision precision_;
  std::vector<float> floats_;
  DeviceArray<float> staging_;
};

void upload_array(const void* source, std::size_t bytes, void* destination) {
  CUDA_CHECK(cudaMemcpy(destination, source, bytes, cudaMemcpyHostToDevice));
}

// For a model that rotates the first half of a head with the second half: puts numbers that are rotated together next
// to each other. values: num_heads heads, whose numbers move, and then heads that stay as they are.
RowVector halves_side_by_side(const RowVector& values, int num_heads, int head_dim) {
  RowVector result = values;
  for (int head = 0; head < num_heads; ++head) {
    for (int i = 0; i < head_dim; ++i) {
      result[head * head_dim + i] = values[head * head_dim + i / 2 + i % 2 * (head_dim / 2)];
    }
  }
  return result;
}

// Q, K and V of a layer, and what belongs to them.
void upload_qkv(const LlamaConfig& config, const LlamaLayer& source, const CudaLlamaWeights::Layer& layer,
                Uploader& uploader) {
  const int num_rotated = config.num_heads + config.num_kv_heads;  // heads
  const auto upload_vector = [&](const RowVector& values, int num_heads, float* destination) {
    const RowVector ordered = config.rotates_halves ? halves_side_by_side(values, num_heads, config.head_dim) : values;
    upload_array(ordered.data(), static_cast<std::size_t>(ordered.size()) * sizeof(float), destination);
  };
  if (config.rotates_halves) {
    const int half = config.head_dim / 2;
    for (std::int64_t row = 0; row < std::int64_t{num_rotated} * config.head_dim; row += config.head_dim) {
      uploader.rows(source.qkv, row, half, layer.qkv, row, 2);
      uploader.rows(source.qkv, row + half, half, layer.qkv, row + 1, 2);
    }
    const std::int64_t first_v = std::int64_t{num_rotated} * config.head_dim;
    uploader.rows(source.qkv, first_v, source.qkv.rows() - first_v, layer.qkv, first_v, 1);
  } else {
    uploader.matrix(source.qkv, layer.qkv);
  }
  if (config.qkv_bias) {
    upload_vector(source.qkv_bias, num_rotated, layer.qkv_bias);
  }
  if (config.qk_norm) {
    upload_vector(source.q_norm, 1, layer.q_norm);
    upload_vector(source.k_norm, 1, layer.k_norm);
  }
}

}  // namespace

CudaLlamaWeights::CudaLlamaWeights(const LlamaConfig& whole, Precision precision, WeightType type, const Shard& shard)
    : layers(static_cast<std::size_t>(whole.num_layers)),
      whole_(whole),
      config_(shard_config(whole, shard.count)),
      precision_(precision),
      type_(type),
      shard_(shard) {
  const LlamaConfig& config = config_;
  const std::int64_t hidden = config.hidden_size;
  Cuts cuts;
  const auto take_matrix = [&](void*& piece, std::int64_t rows, std::int64_t cols) {
    cuts.take(piece, static_cast<std::size_t>(rows * cols * bytes_of(precision)));
  };
  const auto take_floats = [&](float*& piece, std::int64_t size) {
    cuts.take(piece, static_cast<std::size_t>(size) * sizeof(float));
  };
  const auto take_norm = [&](float*& piece) { take_floats(piece, hidden); };
  const auto take_layer_matrix = [&](LayerMatrix& piece, std::int64_t rows, std::int64_t cols) {
    if (type == WeightType::kFloat8) {
      cuts.take(piece.data, static_cast<std::size_t>(rows * cols));
      take_floats(piece.row_scales, rows);
      cuts.take(piece.row_exponents, static_cast<std::size_t>(rows));
    } else {
      take_matrix(piece.data, rows, cols);
    }
  };
  take_matrix(embedding, config.vocab_size, hidden);
  take_norm(output_norm);
  if (!config.tied_output) {
    take_matrix(output, config.vocab_size, hidden);
  }
  cuts.take(frequencies, static_cast<std::size_t>(config.head_dim / 2) * sizeof(double));
  if (config.window_rope_freq_base > 0.0F) {
    cuts.take(window_frequencies, static_cast<std::size_t>(config.head_dim / 2) * sizeof(double));
  }
  for (Layer& layer : layers) {
    take_norm(layer.attention_norm);
    take_layer_matrix(layer.qkv, qkv_rows(config), hidden);
    if (config.qkv_bias) {
      take_floats(layer.qkv_bias, qkv_rows(config));
    }
    if (config.qk_norm) {
      take_floats(layer.q_norm, config.head_dim);
      take_floats(layer.k_norm, config.head_dim);
    }
    take_layer_matrix(layer.output, hidden, q_rows(config));
    take_norm(layer.feed_forward_norm);
    if (config.post_norms) {
      take_norm(layer.post_attention_norm);
      take_norm(layer.post_feed_forward_norm);
    }
    take_layer_matrix(layer.gate_up, 2 * std::int64_t{config.feed_forward_size}, hidden);
    take_layer_matrix(layer.down, hidden, config.feed_forward_size);
  }
  memory_ = DeviceMemory(cuts.total());
  cuts.place(memory_.data());
  if (config.tied_output) {
    output = embedding;
  }
}

void CudaLlamaWeights::upload(const LlamaWeights& whole) {
  const LlamaWeights& weights = shard_.count > 1 ? shard_rows(whole, whole_, shard_) : whole;
  const std::size_t norm_bytes = static_cast<std::size_t>(config_.hidden_size) * sizeof(float);
  Uploader uploader(precision_);
  uploader.matrix(weights.embedding, {embedding});
  upload_array(weights.output_norm.data(), norm_bytes, output_norm);
  if (!config_.tied_output) {
    uploader.matrix(weights.output, {output});
  }
  upload_array(weights.frequencies.data(), weights.frequencies.size() * sizeof(double), frequencies);
  if (window_frequencies != nullptr) {
    upload_array(weights.window_frequencies.data(), weights.window_frequencies.size() * sizeof(double),
                 window_frequencies);
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LlamaLayer& source = weights.layers[i];
    const Layer& layer = layers[i];
    const std::int64_t half = source.gate_up.rows() / 2;
    upload_array(source.attention_norm.data(), norm_bytes, layer.attention_norm);
    upload_qkv(config_, source, layer, uploader);
    uploader.columns(source.output, shard_, layer.output);
    upload_array(source.feed_forward_norm.data(), norm_bytes, layer.feed_forward_norm);
    if (config_.post_norms) {
      upload_array(source.post_attention_norm.data(), norm_bytes, layer.post_attention_norm);
      upload_array(source.post_feed_forward_norm.data(), norm_bytes, layer.post_feed_forward_norm);
    }
    uploader.rows(source.gate_up, 0, half, layer.gate_up, 0, 2);
    uploader.rows(source.gate_up, half, half, layer.gate_up, 1, 2);
    uploader.columns(source.down, shard_, layer.down);
  }
  CUDA_CHECK(cudaDeviceSynchronize());
}

void CudaLlamaWeights::randomize(std::uint64_t seed) {
  const std::int64_t hidden = config_.hidden_size;
  std::uint64_t drawn = static_cast<std::uint64_t>(shard_.rank) << 40;
  Uploader float8_rows(precision_);
  // whole_cols: the columns of the whole matrix; cols is the shard's part.
  const auto randomize_matrix = [&](const LayerMatrix& matrix, std::int64_t rows, std::int64_t cols,
                                    std::int64_t whole_cols = 0) {
    const float half_width = std::sqrt(3.0F / static_cast<float>(std::max(cols, whole_cols)));
    if (matrix.row_scales != nullptr) {
      float8_rows.randomize(seed, drawn, half_width, rows, cols, matrix);
    } else {
      fill_uniform(precision_, seed, drawn, half_width, rows * cols, matrix.data, nullptr);
    }
    drawn += static_cast<std::uint64_t>(rows * cols);
  };
  randomize_matrix({embedding}, config_.vocab_size, hidden);
  fill_floats(output_norm, hidden, 1.0F, nullptr);
  if (!config_.tied_output) {
    randomize_matrix({output}, config_.vocab_size, hidden);
  }
  const auto upload_frequencies = [&](float base, double* destination) {
    std::vector<double> radians;
    radians.reserve(static_cast<std::size_t>(config_.head_dim / 2));
    for (int i = 0; i < config_.head_dim / 2; ++i) {
      radians.push_back(std::pow(static_cast<double>(base), -2.0 * i / config_.head_dim));
    }
    upload_array(radians.data(), radians.size() * sizeof(double), destination);
  };
  upload_frequencies(config_.rope_freq_base, frequencies);
  if (window_frequencies != nullptr) {
    upload_frequencies(config_.window_rope_freq_base, window_frequencies);
  }
  for (const Layer& layer : layers) {
    fill_floats(layer.attention_norm, hidden, 1.0F, nullptr);
    randomize_matrix(layer.qkv, qkv_rows(config_), hidden);
    if (config_.qkv_bias) {
      fill_floats(layer.qkv_bias, qkv_rows(config_), 0.0F, nullptr);
    }
    if (config_.qk_norm) {
      fill_floats(layer.q_norm, config_.head_dim, 1.0F, nullptr);
      fill_floats(layer.k_norm, config_.head_dim, 1.0F, nullptr);
    }
    randomize_matrix(layer.output, hidden, q_rows(config_), q_rows(whole_));
    fill_floats(layer.feed_forward_norm, hidden, 1.0F, nullptr);
    if (config_.post_norms) {
      fill_floats(layer.post_attention_norm, hidden, 1.0F, nullptr);
      fill_floats(layer.post_feed_forward_norm, hidden, 1.0F, nullptr);
    }
    randomize_matrix(layer.gate_up, 2 * std::int64_t{config_.feed_forward_size}, hidden);
    randomize_matrix(layer.down, hidden, config_.feed_forward_size, whole_.feed_forward_size);
  }
  CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace common
