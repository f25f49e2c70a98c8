// How large a KV cache has to be: the arithmetic behind `plan`, in whole numbers.
//
//   bytes per token = 2 (K and V) x layers x KV heads x head_dim x bytes per element
//
// LLaMA-2-7B in fp16: 2 x 32 x 32 x 128 x 2 = 512 KiB a token. Nothing here depends on how many weights a model has.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

namespace common {

class Program;

// One model's cache, and how it is cut into blocks. Every number is from 1 to 2^31 - 1.
struct PoolShape {
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;     // query heads: a multiple of num_kv_heads
  std::int64_t num_kv_heads = 0;  // heads that K and V are stored for
  std::int64_t head_dim = 0;
  std::int64_t bytes_per_element = 2;  // fp16 and bf16
  std::int64_t block_size = 16;        // slots in a block
};

// How many tokens (prompt and reply together) the sequences have that are in the cache at once.
struct PoolDemand {
  std::vector<std::int64_t> lengths;  // a mix that repeats; empty: only the mean is known
  std::int64_t mean_length = 800;     // used if lengths is empty: of lengths spread far wider than a block
  std::int64_t max_length = 2048;     // what a contiguous cache reserves for each sequence; none is longer
};

struct PoolPlan {
  std::int64_t bytes_per_token = 0;
  std::int64_t bytes_per_repeated_token = 0;  // if K and V were stored once per query head
  std::int64_t bytes_per_block = 0;
  std::int64_t bytes_per_max_length = 0;  // what a contiguous cache reserves for a sequence

  std::int64_t num_blocks = 0;    // 0 if the memory is smaller than a block
  std::int64_t num_slots = 0;     // tokens that the blocks hold
  std::int64_t bytes_unused = 0;  // memory too small for one more block

  std::int64_t paged_sequences = 0;     // at once, each in the blocks it needs
  std::int64_t reserved_sequences = 0;  // at once, in the same memory, each with max_length slots

  // One round of the mix. Of a mean there are two sequences, because their average number of slots may end in a half.
  std::int64_t mix_sequences = 0;
  std::int64_t mix_tokens = 0;
  std::int64_t mix_slots = 0;                   // in blocks, the unused ends of the last blocks included
  std::int64_t most_unused_slots = 0;           // of one sequence, in its last block
  std::int64_t most_unused_reserved_slots = 0;  // of one sequence, with max_length slots reserved
};

// memory: bytes for K and V; weights and activations are not part of it. Throws InputError on a number out of range, a
// length above max_length, heads that the KV heads do not divide, and sizes beyond 2^63 - 1 bytes.
PoolPlan plan_pool(const PoolShape& shape, std::int64_t memory, const PoolDemand& demand);

// "24e9", "600MiB", "1.5 GB": a number, then B, KiB … TiB (powers of 1024) or kB … TB (powers of 1000). Rounded down to
// whole bytes, and at least 1. Throws InputError on anything else.
std::int64_t parse_memory(std::string_view text);

// What the command line said; what it left out is 0, and comes from the preset.
struct PlanOptions {
  std::string preset;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t bytes_per_element = 0;
  std::int64_t block_size = PoolShape().block_size;
  std::int64_t memory = 0;  // bytes; 0: sizes only
  PoolDemand demand;
};

// One model's plan; without a preset and without a shape, one row for each preset. Throws InputError.
void print_plan(const PlanOptions& options, std::ostream& output);

// Adds the subcommand `plan`.
void add_plan(Program& program);

}  // namespace common
