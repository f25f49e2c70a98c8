// The measurements that all stages share, so that their figures can be compared.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "common/base/machine.h"
#include "common/base/tensor.h"
#include "common/model/llama.h"

namespace common {

// A sequence that tokens can be appended to or, from the stage with a server on, a request that is served.
struct BenchTarget {
  // Begins a new sequence in place of the last one; false if the cache is too small.
  std::function<bool(int max_length)> start;
  // Appends tokens and returns the logits after the last one, [1, vocab_size]; nothing if the cache is too small.
  std::function<std::optional<Matrix>(std::span<const Token>)> append;
  std::int64_t kv_bytes_per_token = 0;
  // Appends one token and returns the most likely next one, where that is cheaper than to return all logits.
  std::function<std::optional<Token>(Token)> decode = nullptr;
  // Measures what a GPU can read; null or empty: weights and cache are in the host's memory.
  std::function<std::optional<ReadLimit>()> read_limit = nullptr;
  // In place of start and append: serves a request, and calls back for each of its num_tokens tokens; false if the
  // cache is too small. No call finds anything of an earlier one in the cache.
  std::function<bool(std::span<const Token> prompt, int num_tokens, const std::function<void()>& on_token)> serve =
      nullptr;
};

// Prints the speed of prefill and decode, the bytes that decode reads, and the share of the machine's read bandwidth
// that it reaches. load_seconds: how long the model took to load. Throws InputError if the cache is too small.
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
  std::int64_t bytes = 0;                                  // stored K and V of one layer
  std::function<void(int layer)> copy = nullptr;           // the part of attend that copies K and V, if any
};

// Prints the time that one thread takes for one decode step's attention in one layer, at contexts up to max_context,
// and the read bandwidth of one thread. Layers take turns, and together they are far larger than the processor's
// caches: in a real decode step, the weights pass through the caches between two calls. Below the table: what a token
// takes at that bandwidth, and what it takes when K and V are in a cache already.
void print_attention_speed(const std::function<AttentionTarget(const AttentionShape&)>& make_target, int max_context);

// Means over a run of the fixed workload. Slots and requests are held at once.
struct BlockSizeRow {
  double slots_reserved = 0.0;
  double slots_used = 0.0;
  double requests_held = 0.0;
  double milliseconds_per_token = 0.0;
};

// Prints the slots that each block size from 1 to 256 wastes in last blocks, and the size of the block tables.
void print_block_size_sweep(const std::function<BlockSizeRow(int block_size)>& run);

}  // namespace common
