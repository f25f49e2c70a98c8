// The small kernels of the Llama forward pass. All pointers are device pointers; "activations" are in the model's
// precision. Their only caller, CudaLlama, checks the shapes. Launches overlap: see launch.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/cuda/model/fused_linear.h"
#include "common/cuda/precision.h"

namespace common {

// What a step looks up for each of its tokens.
struct Lookup {
  const int* tokens = nullptr;        // [num_tokens]
  const int* pending_rows = nullptr;  // [num_tokens]: if not -1, the token is pending_tokens[that]; may be nullptr
  const int* pending_tokens = nullptr;
  const int* positions = nullptr;       // [num_tokens]
  const void* embedding = nullptr;      // [vocab_size, hidden_size], in the model's precision
  const double* frequencies = nullptr;  // [head_dim / 2], radians a position
  float rotation_scale = 1.0F;
  // Of a second rotation, which is not scaled: [head_dim / 2]; nullptr: there is none.
  const double* window_frequencies = nullptr;
  float embedding_scale = 1.0F;
  int vocab_size = 0;
  // If the embedding is shared out, it has the tokens from this one on; zeros are found for all others that exist.
  int first_token = 0;
  int num_tokens = 0;  // of the whole vocabulary
  int head_dim = 0;
};

// residual: num_tokens rows, NaN for a token outside of the vocabulary.
// rotation: [num_tokens, head_dim / 2], cosine and sine, times rotation_scale; behind it the second one, if there is
// one. The angles are computed in float64, as on the CPU.
void look_up(Precision precision, const Lookup& lookup, int num_tokens, const Residual& residual, float2* rotation,
             cudaStream_t stream);

// What a sum is normalised with before it is added to the residual stream.
struct SumNorm {
  const float* weights = nullptr;  // [num_cols]; nullptr: it is added as it is
  float epsilon = 0.0F;
};

// A sum whose parts, [num_tokens, num_cols], may lie on several GPUs that read each other's memory.
inline constexpr int kMaxPeerRows = 512;  // tokens, if the parts lie on several GPUs
struct PartialSum {
  const void* parts[kMaxPeers] = {};
  int num_parts = 0;  // 0: nothing is added
  // This GPU's number, if the parts lie on several GPUs.
  int rank = 0;
  unsigned* num_sums = nullptr;       // [kMaxPeerRows]: each row's sums so far; nullptr: all parts are on this GPU
  unsigned* arrived[kMaxPeers] = {};  // each GPU's, [kMaxPeers, kMaxPeerRows]: for how many sums a GPU's part is there
  const int* stop = nullptr;          // on the host: if not 0, no part is waited for
  SumNorm norm{};
};

// A second output: the normalised residual stream. A launch of its own would take longer.
struct Normed {
  void* output = nullptr;  // [num_tokens, num_cols], in the model's precision; nullptr: nowhere
  float epsilon = 0.0F;    // the weights are Residual::norm
};

// Adds the sum to the residual stream, and writes the rest of Residual, as fused_add does with a product. type: the
// parts' type.
void add_sum(Precision precision, const PartialSum& sum, Precision type, int num_tokens, const Residual& residual,
             const Normed& normed, cudaStream_t stream);

// output: [num_tokens, num_cols] activations. Row i is the normalised row rows[i] (row i if rows is nullptr) of
// residual, [num_residual_rows, num_cols]; NaN if there is no such row.
struct Norm {
  const float* residual = nullptr;
  int num_residual_rows = 0;
  const int* rows = nullptr;
  const float* weights = nullptr;  // [num_cols]
  int num_cols = 0;
  float epsilon = 0.0F;
};
void rms_norm(Precision precision, const Norm& norm, int num_tokens, void* output, cudaStream_t stream);

inline constexpr int kMaxHeadDim = 256;

// What a product's sums are to be multiplied by, if its x and its weights are float8.
struct SumScales {
  const float* tokens = nullptr;                // [num_tokens]; nullptr: the sums are what they are
  const std::uint8_t* row_exponents = nullptr;  // [num_rows]: powers of 2, the exponents in a float's bits
};

// The norms of each head of Q and of K.
struct HeadNorms {
  const float* q = nullptr;  // [head_dim]; nullptr: heads are not normalised
  const float* k = nullptr;  // [head_dim]
  float epsilon = 0.0F;
};

// qkv: [num_tokens, q_rows + 2 * kv_rows]. All of it is scaled, and the bias is added. Q is normalised and rotated into
// q, [num_tokens, q_rows]; K in place.
void rotate_and_split(Precision precision, const Rotary& rotary, const HeadNorms& norms, const SumScales& scales,
                      int num_tokens, void* qkv, void* q, cudaStream_t stream);

// gate_up: [num_tokens, 2 * size], gate and up alternating. output: [num_tokens, size]: silu(gate) * up.
void gated_silu(Precision precision, const void* gate_up, int size, int num_tokens, void* output, cudaStream_t stream);
void gated_gelu(Precision precision, const void* gate_up, int size, int num_tokens, void* output, cudaStream_t stream);

// scratch: argmax_scratch_bytes(num_rows) bytes, which must be zero before the first call; every call leaves them zero.
std::size_t argmax_scratch_bytes(int num_rows);
void argmax_rows(const float* logits, int vocab_size, int num_rows, void* scratch, int* next_tokens,
                 cudaStream_t stream);

// argmax in two steps, for logits that are shared out among GPUs. This GPU has the logits of vocab_size tokens from
// first_token on; ranks: [num_rows], the ranks of its largest logits. The largest rank of all GPUs is then turned into
// its token, one of num_tokens; another number into -1.
void rank_rows(const float* logits, int vocab_size, int first_token, int num_rows, void* scratch,
               unsigned long long* ranks, cudaStream_t stream);
void tokens_of_ranks(const unsigned long long* ranks, int num_rows, int num_tokens, int* next_tokens,
                     cudaStream_t stream);

// Float8 weights (scalars.cuh), [num_rows, num_cols], as bfloat16: exactly, if scales are powers of two.
void unpack_float8(const void* weights, const float* row_scales, std::int64_t num_rows, int num_cols, void* output,
                   cudaStream_t stream);

// ---- Filling the weights. These launches do not overlap. ----------------------------------------------------------

// Row i of source, [num_rows, num_cols], becomes row i * row_step of destination.
void store_rows(Precision precision, const float* source, std::int64_t num_rows, int num_cols, int row_step,
                void* destination, cudaStream_t stream);

// The same as float8 (scalars.cuh), with a scale for each row, also row_step apart: the smallest power of two with
// which no number is beyond 448, and the exponent in the scale's bits.
void store_rows_float8(const float* source, std::int64_t num_rows, int num_cols, int row_step, void* destination,
                       float* row_scales, std::uint8_t* row_exponents, cudaStream_t stream);

// Uniform in (-half_width, half_width). Element i depends only on seed and first + i.
void fill_uniform(Precision precision, std::uint64_t seed, std::uint64_t first, float half_width, std::int64_t size,
                  void* destination, cudaStream_t stream);

void fill_floats(float* destination, std::int64_t size, float value, cudaStream_t stream);

}  // namespace common
