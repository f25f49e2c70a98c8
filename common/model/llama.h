// The Llama forward pass. It knows nothing of caches: in each layer it passes q, k and v to a callback and continues
// with the attention output that the callback returns. Tokens are flat: they may belong to one sequence or to many, and
// `positions` alone says where each token is in its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "common/base/tensor.h"
#include "common/model/gguf.h"

namespace common {

struct LlamaConfig {
  int vocab_size = 0;
  int context_length = 0;
  int hidden_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int feed_forward_size = 0;
  float rope_freq_base = 10000.0F;
  float rms_epsilon = 1e-5F;
  bool tied_output = false;  // the output matrix is the embedding

  int num_queries_per_kv() const { return num_heads / num_kv_heads; }
};

// q: [num_tokens, num_heads * head_dim], k and v: [num_tokens, num_kv_heads * head_dim], rotary embedding applied.
// Returns [num_tokens, num_heads * head_dim].
using AttentionFn = std::function<Matrix(int layer, const Matrix& q, const Matrix& k, const Matrix& v)>;

// Views of one layer's weights.
template <typename View>
struct LlamaLayer {
  View attention_norm;     // [1, hidden_size]
  View qkv;                // [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: Q, K and V rows
  View output;             // [hidden_size, num_heads * head_dim]
  View feed_forward_norm;  // [1, hidden_size]
  View gate_up;            // [2 * feed_forward_size, hidden_size]: gate rows, then up rows
  View down;               // [hidden_size, feed_forward_size]
};

// Views of a model's weights, valid as long as the model.
struct LlamaWeights {
  using Layer = LlamaLayer<MatrixView>;
  MatrixView embedding;    // [vocab_size, hidden_size]
  MatrixView output_norm;  // [1, hidden_size]
  MatrixView output;       // [vocab_size, hidden_size]; the embedding itself when tied
  std::vector<Layer> layers;
  std::span<const double> frequencies;  // [head_dim / 2], radians per position
};

class Llama {
 public:
  // Reads and checks the llama.* keys and converts all weights to floats. Throws InputError on missing keys, on keys
  // that contradict each other, and on tensors that are missing, have another shape or hold a value that is not finite.
  explicit Llama(const Gguf& file);

  // The shape alone, from the llama.* keys, without reading a weight. Throws InputError on the same keys.
  static LlamaConfig read_config(const Gguf& file);

  // Random weights, the same for the same seed.
  Llama(const LlamaConfig& config, std::uint64_t seed);

  // The same weights, but drawn when the CPU first needs them: a GPU that draws random weights of its own then costs
  // the host neither time nor memory.
  static Llama synthetic(const LlamaConfig& config, std::uint64_t seed);
  bool is_synthetic() const;

  Llama(Llama&&) noexcept;
  Llama& operator=(Llama&&) noexcept;
  Llama(const Llama&) = delete;
  Llama& operator=(const Llama&) = delete;
  ~Llama();

  const LlamaConfig& config() const;

  // tokens, positions: [num_tokens]. Calls attention once for each layer, in order. Returns the final hidden states,
  // normalised: [num_tokens, hidden_size]. Throws CheckError on a token outside of the vocabulary.
  Matrix forward(std::span<const Token> tokens, std::span<const int> positions, const AttentionFn& attention) const;

  // hidden: [num_rows, hidden_size], some rows of forward's result. Returns [num_rows, vocab_size].
  Matrix logits(const Matrix& hidden) const;

  std::int64_t num_parameters() const;
  // Bytes of weights that forward and logits read for a single token: every matrix once, and one row of the embedding.
  std::int64_t weight_bytes_per_token() const;

  // For another implementation of the forward pass.
  LlamaWeights weights() const;

 private:
  struct Impl;
  explicit Llama(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace common
