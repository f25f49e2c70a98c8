// The Llama forward pass on the GPU, with the interface of the CPU's (common/model/llama.h): flat tokens, and one
// attention callback for each layer. It does not depend on caches. This header can be included without nvcc.
//
// A layer is computed in one of two ways. With few tokens, up to 64 on Hopper or 128 with float8 weights, reading the
// weights takes most of the time: four kernels for each layer, besides attention's, each fuse a matrix product with
// everything around it (fused_linear.h). With more tokens, which share the weights that are read, cuBLASLt computes the
// products and small kernels the rest.
//
// Float8 weights are unpacked inside the fused products, which then read half the bytes. Before a product of the
// library, a matrix is unpacked into a buffer, which costs more than it saves: long chunks of prompts hardly notice,
// but short ones do.
//
// Gemma 3's layers normalise what attention and the feed-forward part add. That takes the whole row, whose columns
// several thread blocks compute, so one kernel more normalises it, adds it and prepares the next norm (add_sum in
// llama_kernels.h). GELU, its gate, has a launch of its own.
//
// With float8 activations too, the library multiplies float8 by float8, in every step of more than max_fused_tokens():
// nothing is unpacked, and tensor cores take half the time. What enters a product is rounded where it is written, by
// the norm and by silu; attention's output, which is in bfloat16, by a small kernel (float8_rows.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/cuda/precision.h"
#include "common/cuda/several/communicator.h"
#include "common/model/llama.h"

namespace common {

// One layer's attention. All pointers are device pointers, in the model's precision; the work is enqueued on `stream`.
// If its first launch may overlap with the previous one (programmatic dependent launch), it must execute
// griddepcontrol.wait before it reads what any launch of this forward pass has written. All work enqueued before
// the pass has finished by then: the pass's first launch lets no other start sooner (look_up_kernel).
struct CudaAttentionCall {
  int layer = 0;
  int num_tokens = 0;
  // Two numbers that are rotated together always lie next to each other here, in q and in k.
  const void* q = nullptr;         // [num_tokens, num_heads * head_dim], rotary embedding applied
  const void* k = nullptr;         // [num_tokens, num_kv_heads * head_dim], rotary embedding applied; rows of k and of
  const void* v = nullptr;         //   v begin kv_row_stride elements apart
  std::int64_t kv_row_stride = 0;  // a multiple of 16 bytes, as are the pointers
  void* output = nullptr;          // [num_tokens, num_heads * head_dim]
  cudaStream_t stream = nullptr;
};

// Tokens that the host does not know yet, because the step that computes them has not finished. Device pointers.
struct CudaPendingTokens {
  const int* rows = nullptr;    // [num_tokens]: token i is tokens[rows[i]]; -1 if it is known; nullptr: all are known
  const int* tokens = nullptr;  // the result of argmax() in the previous step
};

using CudaAttentionFn = std::function<void(const CudaAttentionCall&)>;

class CudaLlama {
 public:
  // Why the kernels do not support a model of this shape; empty if they do.
  static std::string unsupported(const LlamaConfig& config, const GpuTypes& types);

  // Uploads the weights. Throws OutOfDeviceMemory, and frees everything, if they and the activations of max_tokens
  // tokens do not fit. Throws InputError if the shape is not supported.
  //
  // peers: the other GPUs, if several compute the model together; this object then has one shard. Everything below is
  // then about the shard (config() has its heads, logits() has its part of the vocabulary), except argmax's result.
  // peers must outlive this object. Float8 activations go with float8 weights, and with no peers.
  CudaLlama(const Llama& model, const GpuTypes& types, int max_tokens, Communicator* peers = nullptr);

  // Random weights, drawn on the device, where 8 billion parameters take a second. They are not the numbers that
  // Llama(config, seed) draws.
  CudaLlama(const LlamaConfig& config, std::uint64_t seed, const GpuTypes& types, int max_tokens,
            Communicator* peers = nullptr);

  CudaLlama(CudaLlama&&) noexcept;
  CudaLlama& operator=(CudaLlama&&) noexcept;
  CudaLlama(const CudaLlama&) = delete;
  CudaLlama& operator=(const CudaLlama&) = delete;
  ~CudaLlama();

  const LlamaConfig& config() const;
  Precision precision() const;
  int max_tokens() const;

  // tokens, positions: device, [num_tokens], 1 to max_tokens. Calls attention once for each layer, in
  // order. Everything is enqueued on `stream` and may be captured in a CUDA graph; tokens and positions are read when
  // it runs. A token outside of the vocabulary results in NaN.
  void forward(const int* tokens, const int* positions, int num_tokens, const CudaAttentionFn& attention,
               cudaStream_t stream, const CudaPendingTokens& pending = {});

  // rows: device, [num_rows], indices of rows of the last forward. An index out of range results in NaN.
  // logits: device, [num_rows, vocab_size] float32. The final norm is part of this.
  void logits(const int* rows, int num_rows, float* logits, cudaStream_t stream);

  // next_tokens: device, [num_rows]: the most likely token of each row, the lowest id on a tie. -1 where common::argmax
  // throws: if a logit is NaN or all are -infinity.
  void argmax(const float* logits, int num_rows, int* next_tokens, cudaStream_t stream);

  // Has the matrix library choose its algorithms for each number of tokens up to num_tokens, and for each number of
  // rows of logits up to num_rows, and load those for tokens; otherwise the first step of a number does that, while a
  // request waits. Enqueues products whose results mean nothing.
  void prepare(int num_tokens, int num_rows, cudaStream_t stream);
  std::size_t num_prepared() const;  // shapes of products that have an algorithm

  // After a peer has failed: stop_sums ends sums that wait for it; reset_sums is called before the next step, on all
  // GPUs.
  void stop_sums() noexcept;
  void reset_sums();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace common
