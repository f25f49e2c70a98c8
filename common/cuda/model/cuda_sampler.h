// Sampling on the GPU: draws a token from each row of logits without sorting them or fetching them to the host. From
// the same logits it draws what common::sample draws on the CPU, to the last bit (common/math/gumbel.h says how).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/cuda/model/sampling_parameters.h"
#include "common/cuda/runtime/device.h"

namespace common {

// All pointers are device pointers.
struct SamplingBatch {
  const SamplingParameters* rows = nullptr;  // [num_rows]
  int num_rows = 0;
  bool have_cuts = false;                // whether a row has top_k or top_p
  bool change_logits = false;            // whether a row has a penalty or a bias
  const SamplingBias* biases = nullptr;  // of all rows
  // For penalties: the used tokens of all rows, repetitions allowed; and for each row of logits its row of the step's
  // tokens. The token of that row i counts as used too: tokens[i], or pending_tokens[pending_rows[i]] if
  // pending_rows[i] is not -1.
  const int* used = nullptr;
  const int* token_rows = nullptr;
  const int* tokens = nullptr;
  const int* pending_rows = nullptr;
  const int* pending_tokens = nullptr;
};

class CudaSampler {
 public:
  CudaSampler(int vocab_size, int max_rows);

  // next_tokens: [num_rows], the token with the largest logit of each row (-1: there is none); the drawn token replaces
  // it, or -1 if a logit is +inf. Penalties and biases change the logits, [num_rows, vocab_size]. Enqueues all work on
  // the stream.
  void sample(float* logits, const SamplingBatch& batch, int* next_tokens, cudaStream_t stream);

 private:
  int vocab_size_;
  int max_rows_;
  DeviceMemory best_;        // [max_rows], zero between calls
  DeviceMemory cuts_;        // [max_rows]: for top_k and top_p
  DeviceMemory candidates_;  // [max_rows, kMaxCandidates]: the tokens that the cuts may keep
  DeviceMemory counts_;      // [max_rows, 2^15] of 32 bits, where thread blocks have no room for them; else empty
  DeviceMemory uses_;        // [max_rows, vocab_size] of 32 bits, zero between calls
};

}  // namespace common
