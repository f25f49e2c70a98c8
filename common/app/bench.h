// The measurements all stages share, so that their figures can be put side by side.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "common/base/tensor.h"
#include "common/model/llama.h"

namespace common {

// A sequence that tokens can be appended to.
struct BenchTarget {
  std::function<bool(int max_length)> start;  // a new sequence, in place of the last one; false: the cache is too small
  std::function<std::optional<Matrix>(std::span<const Token>)> append;  // logits after the last token; none: likewise
  std::int64_t kv_bytes_per_token = 0;
  // The same for one token, and the likeliest next one: where it is found without handing out all logits.
  std::function<std::optional<Token>(Token)> decode = nullptr;
  std::int64_t weight_bytes_per_token = 0;  // 0: the model's own
  double read_bandwidth = 0.0;              // bytes a second of the memory that holds it all; 0: the processor's
};

// Prints the speed of prefill and decode, the bytes decode reads, and what share of the machine's own read bandwidth
// that is. load_seconds: how long it took to make the model ready.
void print_speed(const Llama& model, const BenchTarget& target, int prompt_tokens, int new_tokens, double load_seconds);

// One sequence of context_length tokens in a cache of num_layers layers.
struct AttentionShape {
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int context_length = 0;
};

struct AttentionTarget {
  std::function<void(int layer, const Matrix& q)> attend;  // q: [1, num_heads * head_dim], the sequence's last token
  std::int64_t bytes = 0;                                  // of K and V, stored for one layer
  std::function<void(int layer)> copy = nullptr;           // what of that is copying K and V, if anything is copied
};

// Prints the time of one decode step's attention in one layer, by one thread, at contexts up to max_context, beside
// this thread's own read bandwidth. Layers take turns and are together far larger than the processor's caches, because
// in a real decode step the weights have passed through them in between.
void print_attention_speed(const std::function<AttentionTarget(const AttentionShape&)>& make_target, int max_context);

// Means over a run of the fixed workload: slots, slots, requests, milliseconds.
struct BlockSizeRow {
  double slots_reserved = 0.0;
  double slots_used = 0.0;
  double requests_held = 0.0;
  double milliseconds_per_token = 0.0;
};

// Prints what each block size from 1 to 256 wastes in last blocks, and how long the block tables get.
void print_block_size_sweep(const std::function<BlockSizeRow(int block_size)>& run);

}  // namespace common
