// The Llama forward pass on the GPU, with the seam of the CPU's (common/model/llama.h): flat tokens, and one attention
// callback a layer. It knows nothing of caches. Nothing here needs nvcc to be included.
//
// Two ways through a layer. A handful of tokens, up to 32 of a small model, is bound by reading the weights: four
// kernels of our own a layer beside attention's two, each a matrix product with everything around it fused in
// (fused_linear.h). More tokens share that reading: then the products are cuBLASLt's and small kernels stand between.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/cuda/precision.h"
#include "common/model/llama.h"

namespace common {

// One layer's attention. All pointers are device pointers, in the model's precision; the work is enqueued on `stream`.
// If its first launch may overlap with the one before (programmatic dependent launch), it must wait for that one
// (griddepcontrol.wait) before it reads anything that any launch of this step has written.
struct CudaAttentionCall {
  int layer = 0;
  int num_tokens = 0;
  const void* q = nullptr;         // [num_tokens, num_heads * head_dim], rotary embedding applied
  const void* k = nullptr;         // [num_tokens, num_kv_heads * head_dim], rotary embedding applied; rows of k and of
  const void* v = nullptr;         //   v begin kv_row_stride elements apart
  std::int64_t kv_row_stride = 0;  // a multiple of 16 bytes, as are the pointers
  void* output = nullptr;          // [num_tokens, num_heads * head_dim]
  cudaStream_t stream = nullptr;
};
// Tokens that the host does not know yet, because the step that draws them has not finished. Device pointers.
struct CudaPendingTokens {
  const int* rows = nullptr;    // [num_tokens]: token i is tokens[rows[i]]; -1: it is known. nullptr: all are known
  const int* tokens = nullptr;  // what argmax() of the step before has left
};

using CudaAttentionFn = std::function<void(const CudaAttentionCall&)>;

class CudaLlama {
 public:
  // Why the kernels do not take a model of this shape; empty if they do.
  static std::string unsupported(const LlamaConfig& config);

  // Uploads the weights. Throws OutOfDeviceMemory (and leaves nothing behind) if they, or the activations of
  // max_tokens tokens, do not fit.
  CudaLlama(const Llama& model, Precision precision, int max_tokens);

  // Random weights of a given shape, drawn on the device: a model of 8 billion parameters takes a second. Not the
  // numbers that Llama(config, seed) draws.
  CudaLlama(const LlamaConfig& config, std::uint64_t seed, Precision precision, int max_tokens);

  CudaLlama(CudaLlama&&) noexcept;
  CudaLlama& operator=(CudaLlama&&) noexcept;
  CudaLlama(const CudaLlama&) = delete;
  CudaLlama& operator=(const CudaLlama&) = delete;
  ~CudaLlama();

  const LlamaConfig& config() const;
  Precision precision() const;
  int max_tokens() const;

  // tokens, positions: device, [num_tokens], 1 to max_tokens of them. Calls attention once a layer, in order.
  // Everything is enqueued on `stream` and may be captured in a CUDA graph; tokens and positions are read when it runs.
  // A token outside of the vocabulary gives NaN.
  void forward(const int* tokens, const int* positions, int num_tokens, const CudaAttentionFn& attention,
               cudaStream_t stream, const CudaPendingTokens& pending = {});

  // rows: device, [num_rows], rows of the last forward; a row that it did not have gives NaN.
  // logits: device, [num_rows, vocab_size] float32. The final norm is part of this.
  void logits(const int* rows, int num_rows, float* logits, cudaStream_t stream);

  // next_tokens: device, [num_rows]: the most likely token of each row, the lowest of several. -1 where common::argmax
  // would throw: if any logit is NaN or all are -infinity.
  void argmax(const float* logits, int num_rows, int* next_tokens, cudaStream_t stream);

  // Bytes of weights that forward and logits of a single token read: all matrices once, one embedding row.
  std::int64_t weight_bytes_per_token() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
