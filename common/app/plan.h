// What fits into a KV cache: the arithmetic behind `plan`, in whole numbers.
//
//   bytes per token = 2 (K and V) x layers x KV heads x head_dim x bytes per element
//
// LLaMA-2-7B in fp16: 2 x 32 x 32 x 128 x 2 = 512 KiB per token. The number of weights does not matter.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "common/model/llama.h"

namespace common {

class CommandLine;

// A cache for K and V of one model.
struct PoolShape {
  LlamaConfig model;
  std::int64_t bytes_per_element = 2;  // 1 to 8; fp16 and bf16 have 2
  std::int64_t block_size = 16;        // slots in a block: 1 to 2^20
};

// The lengths, in tokens of prompt and reply together, of the sequences that are in the cache at once.
struct PoolDemand {
  std::vector<std::int64_t> lengths;  // a mix that repeats; empty: only the mean is known
  std::int64_t mean_length = 800;     // used if lengths is empty: of lengths that vary by far more than a block
  std::int64_t max_length = 2048;     // none is longer, and a contiguous cache reserves this for each: 1 to 2^26
};

struct PoolPlan {
  std::int64_t bytes_per_token = 0;
  std::int64_t bytes_per_block = 0;
  std::int64_t bytes_per_max_length = 0;  // what a contiguous cache reserves for a sequence
  std::int64_t bytes_seen = 0;  // of these, in blocks: what its next token sees, the model's windows considered

  std::int64_t num_blocks = 0;  // 0 if the memory is smaller than a block
  std::int64_t num_slots = 0;   // tokens that the blocks hold

  std::int64_t paged_sequences = 0;     // at once, each in the blocks that it needs
  std::int64_t reserved_sequences = 0;  // at once in the same memory, each with max_length slots

  // One round of the mix. For a mean, it has two sequences, because their mean number of slots may end in a half.
  std::int64_t mix_sequences = 0;
  std::int64_t mix_tokens = 0;
  std::int64_t mix_slots = 0;  // in blocks, including the unused ends of the last blocks
};

// memory: bytes for K and V, at most 2^53; weights and activations are not included. Throws InputError on a length
// below 1 or above max_length.
PoolPlan plan_pool(const PoolShape& shape, std::int64_t memory, const PoolDemand& demand);

// "24e9", "600MiB", "1.5 GB": a number, then B, KiB … TiB (powers of 1024) or kB … TB (powers of 1000), rounded down to
// whole bytes: 1 to 2^53. Throws InputError on anything else.
std::int64_t parse_memory(std::string_view text);

// Adds the command `plan`.
void add_plan(CommandLine& command_line);

}  // namespace common
