// The forward pass of Llama and of the architectures that differ from it in a few details of a layer (Qwen2, Qwen3,
// Gemma 3). It knows nothing of caches: in each layer it passes q, k and v to a callback and continues with the
// attention output that the callback returns. Tokens are flat: they may belong to one sequence or to many, and
// `positions` alone says where each token is in its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "common/base/tensor.h"
#include "common/model/gguf.h"
#include "common/model/weight_matrix.h"

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

  // What architectures differ in.
  bool qkv_bias = false;        // a bias is added to q, k and v
  bool qk_norm = false;         // each head of q and of k is normalised before it is rotated
  bool rotates_halves = false;  // number i of a head is rotated with i + head_dim / 2, not 2i with 2i + 1
  float rotation_scale = 1.0F;  // factor of rotated q and k (YaRN)

  bool post_norms = false;  // what attention and the feed-forward part add is normalised first
  bool gelu = false;        // the gate's function is GELU, approximated by tanh, and not SiLU
  float embedding_scale = 1.0F;
  // Of the rotation in layers with a window, which is not slowed; 0: as in all others.
  float window_rope_freq_base = 0.0F;

  // How many tokens a query sees, the last of which is its own; 0: all so far. The same in all layers but each
  // global_period-th, which sees all. 0: there is no such layer.
  int window = 0;
  int global_period = 0;

  int num_queries_per_kv() const { return num_heads / num_kv_heads; }
  bool sees_all(int layer) const { return global_period > 0 && (layer + 1) % global_period == 0; }
  int window_of(int layer) const { return sees_all(layer) ? 0 : window; }
  bool has_windows() const { return window > 0 && window < context_length; }  // of any effect
  int num_windowed_layers() const;
  bool has_both_kinds() const { return has_windows() && global_period > 0; }  // layers with a window, and others
  // How many tokens' K and V attention reads for the last num_queries of `length` tokens, summed over all layers: in
  // each, those that one of these queries sees.
  std::int64_t num_reads(int length, int num_queries) const;
};

// What a caller's attention does in layers with a window.
enum class Windows {
  kUnknown,   // it lets every query see all tokens: the context ends where that becomes wrong, with the window
  kComputed,  // it lets a query see window_of(layer) tokens: the context is as long as the model was made for
};

// q: [num_tokens, num_heads * head_dim], k and v: [num_tokens, num_kv_heads * head_dim], rotary embedding applied.
// Returns [num_tokens, num_heads * head_dim].
using AttentionFn = std::function<Matrix(int layer, const Matrix& q, const Matrix& k, const Matrix& v)>;

struct LlamaLayer {
  RowVector attention_norm;          // [hidden_size]
  WeightMatrix qkv;                  // [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: Q, K and V rows
  RowVector qkv_bias;                // [(num_heads + 2 * num_kv_heads) * head_dim]; empty unless config.qkv_bias
  RowVector q_norm;                  // [head_dim]; empty unless config.qk_norm
  RowVector k_norm;                  // [head_dim]; empty unless config.qk_norm
  WeightMatrix output;               // [hidden_size, num_heads * head_dim]
  RowVector post_attention_norm;     // [hidden_size]; empty unless config.post_norms
  RowVector feed_forward_norm;       // [hidden_size]
  RowVector post_feed_forward_norm;  // [hidden_size]; empty unless config.post_norms
  WeightMatrix gate_up;              // [2 * feed_forward_size, hidden_size]: gate rows, then up rows
  WeightMatrix down;                 // [hidden_size, feed_forward_size]
};

// The matrices are views, valid as long as the model.
struct LlamaWeights {
  WeightMatrix embedding;  // [vocab_size, hidden_size]
  RowVector output_norm;   // [hidden_size]
  WeightMatrix output;     // [vocab_size, hidden_size]; the embedding itself when tied
  std::vector<LlamaLayer> layers;
  std::vector<double> frequencies;         // [head_dim / 2], radians per position
  std::vector<double> window_frequencies;  // those of layers with a window; empty: the same
};

class Llama {
 public:
  // Reads and checks the architecture's keys and all weights, which stay in the file as they are: a file opened by path
  // is kept mapped, and bytes given to Gguf::parse must outlive the model. Throws InputError on missing keys, on keys
  // that contradict each other, and on tensors that are missing, have another shape or hold a value that is not finite.
  explicit Llama(const Gguf& file, Windows windows = Windows::kUnknown);

  // The shape alone, from the keys, without reading a weight, and with the whole context. Throws InputError on the same
  // keys.
  static LlamaConfig read_config(const Gguf& file);

  // Random weights, the same for the same seed.
  Llama(const LlamaConfig& config, std::uint64_t seed, Windows windows = Windows::kUnknown);

  // The same weights, but drawn when the CPU first needs them: a GPU that draws random weights of its own then costs
  // the host neither time nor memory.
  static Llama synthetic(const LlamaConfig& config, std::uint64_t seed, Windows windows = Windows::kUnknown);
  bool is_synthetic() const;

  Llama(Llama&&) noexcept;
  Llama& operator=(Llama&&) noexcept;
  Llama(const Llama&) = delete;
  Llama& operator=(const Llama&) = delete;
  ~Llama();

  const LlamaConfig& config() const;

  // tokens, positions: [num_tokens]. Calls attention once for each layer, in order. Returns the final hidden states,
  // normalised: [num_tokens, hidden_size]. Throws CheckError on a token outside of the vocabulary, and on a position
  // that a window would matter for, if windows are unknown.
  Matrix forward(std::span<const Token> tokens, std::span<const int> positions, const AttentionFn& attention) const;

  // hidden: [num_rows, hidden_size], some rows of forward's result. Returns [num_rows, vocab_size].
  Matrix logits(const Matrix& hidden) const;

  std::int64_t num_parameters() const;
  // Bytes of weights that forward and logits read for a single token: every matrix once, and one row of the embedding.
  std::int64_t weight_bytes_per_token() const;

  // For another implementation of the forward pass.
  const LlamaWeights& weights() const;

 private:
  struct Impl;
  explicit Llama(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace common
