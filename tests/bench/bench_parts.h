// The parts of kernel_bench.h's programs.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "common/cuda/runtime/timing.h"
#include "tests/bench/cold_batches.h"
#include "tests/bench/kernel_bench.h"

namespace stage7 {

// What decode attention is timed on.
struct TimedCase {
  HeadShape shape;
  BenchCell cell;
};

// A pool large enough for each of the cases.
Pool pool_for(const std::vector<TimedCase>& cases);

// Measures the read ceiling in the pool's memory, prints a line about the machine, and returns the ceiling in GB/s.
double print_machine(const common::Stream& stream, const Pool& pool, std::ostream& output);

// Microseconds of decode_attention, without the plan; or of contiguous_attention.
double time_decode(const common::Stream& stream, const ColdBatches& sets, bool contiguous = false);
double time_decode_plan(const common::Stream& stream, const ColdBatches& sets);

void print_decode_speed(const KernelBenchOptions& options, std::ostream& output);
void print_ragged_speed(std::ostream& output);
void print_chunk_speed(std::ostream& output);
void print_mixed_speed(std::ostream& output);
void print_shared_speed(std::ostream& output);
void print_window_speed(std::ostream& output);
void print_cache_speed(std::ostream& output);
void print_sampling_speed(std::ostream& output);
void print_product_speed(std::ostream& output);
void print_float8_speed(const KernelBenchOptions& options, std::ostream& output);

// For prompts over pages of this type: a row of print_ragged_speed's table or of print_float8_speed's.
struct Prompts {
  std::string name;
  std::vector<int> lengths;  // new tokens of each sequence
  HeadShape shape;
  int past = 0;            // tokens of each sequence that are cached already
  int num_sets = 1;        // of pages, used in turn: enough of them, and none is found in the L2 cache
  int num_decodes = 0;     // sequences of one new token each that stand before these
  int decode_context = 0;  // the tokens that each of them sees
  int window = 0;          // how many tokens a query sees at most; 0: all
};
struct PromptStep;  // stage7_cuda_kernel/ladder/prompt_ladder.h
struct PromptTiming {
  double microseconds;
  double plan;
};
// Microseconds of write_to_slots for 8 kv heads of 128 dimensions, into blocks in random order.
double time_writing(const common::Stream& stream, ScalarType type, int num_tokens);

// Times ragged_attention, a step of the prompts' ladder or, where sequences decode too, what a model's step launches.
PromptTiming time_prompts(const common::Stream& stream, const Prompts& prompts, const PromptStep* step = nullptr,
                          const common::RaggedOptions& options = {});
double flops_of(const Prompts& prompts);

}  // namespace
