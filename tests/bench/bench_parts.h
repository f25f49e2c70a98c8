// The parts of kernel_bench.h's programs.
#pragma once

#include <iosfwd>
#include <vector>

#include "common/cuda/timing.h"
#include "tests/bench/cold_batches.h"
#include "tests/bench/kernel_bench.h"

namespace stage7 {

// What decode attention is timed on.
struct TimedCase {
  HeadShape shape;
  BenchCase bench_case;
};

// A pool for the largest of them.
Pool pool_for(const std::vector<TimedCase>& cases);

// One line about the machine, after measuring its read ceiling in the pool's memory, which is returned in GB/s.
double print_machine(const common::Stream& stream, const Pool& pool, std::ostream& output);

// Microseconds of decode_attention, the plan excluded; or of contiguous_attention.
double time_decode(const common::Stream& stream, const ColdBatches& sets, bool contiguous = false);
double time_decode_plan(const common::Stream& stream, const ColdBatches& sets);

void print_decode_speed(const KernelBenchOptions& options, std::ostream& output);
void print_ragged_speed(std::ostream& output);
void print_cache_speed(std::ostream& output);

}  // namespace
