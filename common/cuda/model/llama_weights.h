// A Llama model's weights in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cuda/precision.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/several/shard.h"
#include "common/model/llama.h"

namespace common {

// Matrices are in the model's precision, except that the layers' may be in float8; norms and biases are in float32.
// Everything is in one allocation. The rows of a head of Q and K lie so that the two that are rotated together are
// neighbours, in whichever order the file has them.
class CudaLlamaWeights {
 public:
  // Allocates the GPU's shard of a model, but does not set the weights; the shapes below are a whole model's. Throws
  // OutOfDeviceMemory.
  CudaLlamaWeights(const LlamaConfig& config, Precision precision, WeightType type, const Shard& shard = {});

  void upload(const LlamaWeights& weights);  // the whole model's
  void randomize(std::uint64_t seed);        // the distribution of Llama(config, seed), but other numbers

  struct LayerMatrix {
    void* data = nullptr;
    // For float8 only, [rows]: the scales, powers of 2, and the exponents in their bits.
    float* row_scales = nullptr;
    std::uint8_t* row_exponents = nullptr;
  };
  struct Layer {
    float* attention_norm = nullptr;     // [hidden_size]
    LayerMatrix qkv;                     // [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: Q, K and V rows
    float* qkv_bias = nullptr;           // [(num_heads + 2 * num_kv_heads) * head_dim]; nullptr if there is none
    float* q_norm = nullptr;             // [head_dim]; nullptr if heads are not normalised
    float* k_norm = nullptr;             // [head_dim]; nullptr if heads are not normalised
    LayerMatrix output;                  // [hidden_size, num_heads * head_dim]
    float* feed_forward_norm = nullptr;  // [hidden_size]
    LayerMatrix gate_up;  // [2 * feed_forward_size, hidden_size]: each gate row is followed by its up row,
                          //   because their products are multiplied with each other
    LayerMatrix down;     // [hidden_size, feed_forward_size]
    // The norms of what is added to the residual stream, [hidden_size]; nullptr if it is added as it is.
    float* post_attention_norm = nullptr;
    float* post_feed_forward_norm = nullptr;
  };
  void* embedding = nullptr;      // [vocab_size, hidden_size]
  float* output_norm = nullptr;   // [hidden_size]
  void* output = nullptr;         // [vocab_size, hidden_size]; the embedding itself when tied
  double* frequencies = nullptr;  // [head_dim / 2], radians a position
  // Those of layers with a window; nullptr: the same.
  double* window_frequencies = nullptr;
  std::vector<Layer> layers;

 private:
  LlamaConfig whole_;
  LlamaConfig config_;  // the shard's
  Precision precision_;
  WeightType type_;
  Shard shard_;
  DeviceMemory memory_;
};

}  // namespace common
