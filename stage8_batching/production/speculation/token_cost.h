// What more tokens than one cost in a step that reads all weights anyway. The command `speculate` measures it.
#pragma once

namespace stage8 {

// How many drafts a text has in a step at first. With its last token four tokens, and later eight: products on a CPU
// take up to four rows at once.
inline constexpr int kFirstDrafts = 3;

// Where it has not been measured, a token more is never worth it. Shares are of the time of a step with one token.
struct TokenCost {
  double per_token = 1.0;  // added by each
  int max_tokens = 1;      // in a step; each beyond that costs as much as in a step of its own
  double per_step = 0.0;   // added once, where a step has any
  double waiting = 0.0;    // added where the host has to see a step's tokens before it schedules the next one
};

inline constexpr TokenCost kCpuTokenCost = {.per_token = 0.4, .max_tokens = 8};

// On a GPU, a step takes as long as its weights are on their way from memory, and some time for each layer. With two
// tokens of a sequence, other kernels compute products and attention, each layer takes longer by about as much in all
// models, and further tokens up to 16 are nearly free. So the smaller a model is, the larger is the share that drafts
// cost. Measured on an H100: llama-3.2-1b's step took 1.03 times as long where the host waited for it, then 1.25 with
// two tokens and 1.37 with 16; llama-3-8b's 1.01, 1.10 and 1.09; the bundled model's 1.24, 2.03 and 2.14. From the
// number of layers and the bytes of the weights, this says 1.03, 1.25 and 1.39; 1.00, 1.09 and 1.23; 1.33, 2.38 and
// 2.52.
inline constexpr int kMaxGpuTokens = 16;
inline constexpr double kGpuWaiting = 25e-6;  // seconds
inline double gpu_step_seconds(int num_layers, double weight_bytes) {
  constexpr double kBytesPerSecond = 3.1e12;
  constexpr double kLayer = 12e-6;  // seconds
  return weight_bytes / kBytesPerSecond + num_layers * kLayer;
}
inline TokenCost gpu_token_cost(int num_layers, double weight_bytes) {
  constexpr double kLayerWithDrafts = 13e-6;  // seconds in addition
  const double step = gpu_step_seconds(num_layers, weight_bytes);
  return {.per_token = 0.01,
          .max_tokens = kMaxGpuTokens,
          .per_step = num_layers * kLayerWithDrafts / step,
          .waiting = kGpuWaiting / step};
}

}  // namespace
