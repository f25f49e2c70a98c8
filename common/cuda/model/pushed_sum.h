// Sums of parts that GPUs store into each other's memory, for the few tokens of a decode step: two launches for a sum.
// The product stores its sums in the memory of every GPU as soon as it has them; add_pushed() waits for all GPUs' sums
// in its own memory, and adds them up. Nothing is asked for, so the sum takes one way between the GPUs.
//
// A flag that says "my part is there" would have to be stored after the part, and wait for it. So each number brings
// its own: a word of 8 bytes, which arrives whole, is a float and the number of its sum, and the waiting thread reads
// the word until that number is there (NCCL calls this protocol LL). That is twice the bytes, which are few, and no
// fence. Why a number that is there is always the right one:
//
// - The sums of a row (a token of the step) are numbered one after another, and the even and the odd numbers have a
//   place each. A GPU stores sum n + 2 only when it has sum n + 1 of all GPUs, and they have sent that only when they
//   had all of sum n: so no GPU still waits for sum n at that place. One place would not do: a GPU that has sum n
//   stores sum n + 1 while another one still waits for its part of sum n.
// - So before sum n arrives, its place holds sum n - 2, or, in a row's first step, zeros, which is no early sum's
//   number. Both stay different from n when numbers begin anew after 2^32. That takes a count for each row: by a count
//   of all sums, a row that was not used for a while could hold any number.
// - Host code records a step once and replays it, so the host knows only how many sums of the step come before one.
//   What comes before the step is counted on the GPU, when it begins (count_sums).
//
// No launch waits for a place on a multiprocessor that a waiting block has: products do not wait, and a launch of
// add_pushed() starts when all blocks of its GPU's product have started.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda/model/linear_arguments.h"
#include "common/cuda/precision.h"

namespace common {

inline constexpr int kMaxPushedTokens = 64;  // of a step; with more, bytes count, and parts are fetched

// What add_pushed() waits for.
struct PushedSum {
  const PushedPair* parts[kMaxPeers] = {};  // all GPUs' parts in this GPU's memory, [num_tokens, num_cols / 2]
  int num_parts = 0;
  SumNumber number{};
  const int* stop = nullptr;  // on the host: if not 0, no part is waited for any more
};

// The residual stream becomes the sum of the parts, one of which includes its old value; the rest of Residual is
// written as fused_add does. Columns whose parts did not come are left as they are.
void add_pushed(Precision precision, const PushedSum& sum, int num_tokens, const Residual& residual,
                cudaStream_t stream);

// At the beginning of a step with num_sums sums, an even number: advances first_numbers. The next launch must not
// overlap.
void count_sums(unsigned* first_numbers, int num_tokens, unsigned num_sums, cudaStream_t stream);

}  // namespace common
