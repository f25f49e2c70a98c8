// What `bench --ladder` and `bench --kernels` print: the kernels on their own, without a model.
//
// Method: bfloat16; blocks in random physical order; a CUDA graph of many calls, each on pages of its own (600 MB or
// more in all, so that none finds its pages in the L2 cache), replayed; the median, divided by the number of calls.
// Every launch of a call counts. What is done once in a step for all layers does not: the plan, whose time is given
// apart. The calls of decode_attention may overlap at their ends (programmatic dependent launch), as they do in a
// model's step; the other steps of the ladder do not. Percentages are of this machine's own read ceiling, measured in
// the same run. Nothing here needs CUDA's headers.
#pragma once

#include <iosfwd>
#include <string>

namespace stage7 {

struct KernelBenchOptions {
  std::string
      cell;  // "8x1024": only this batch x context of decode attention, in the tables or not; empty: the tables'
};

// Prints the steps of the ladder side by side. This function and the next need a GPU; without one, and if `cell` is
// malformed, they throw common::InputError.
void print_ladder(std::ostream& output, const KernelBenchOptions& options = {});

// which: decode, ragged, cache, chunks, mixed (decodes beside a chunk), shared (prefixes of decodes, read
// once or for each), windows (beside whole contexts, and contexts as short), float8 (its attention beside bfloat16's),
// sampling (of tokens), products (of a layer), or all: the first three.
void print_kernel_speed(const std::string& which, std::ostream& output, const KernelBenchOptions& options = {});

}  // namespace
