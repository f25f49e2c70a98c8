// What more tokens than one cost in a step that reads all weights anyway. The command `speculate` measures it.
#pragma once

namespace stage8 {

// Where it has not been measured, a token more is never worth it. Shares are of the time of a step with one token.
struct TokenCost {
  double per_token = 1.0;  // added by each
  int max_tokens = 1;      // in a step; each beyond that costs as much as in a step of its own
  double per_step = 0.0;   // added once, where a step has any
  double waiting = 0.0;    // added where the host has to see a step's tokens before it schedules the next one
};

inline constexpr TokenCost kCpuTokenCost = {.per_token = 0.4, .max_tokens = 8};

// On an H100, llama-3.2-1b's step took 1.03 times as long where the host waited for it, then 1.25 with two tokens of a
// sequence, for which other kernels compute products and attention, and 1.37 with 16; llama-3-8b's took 1.01, 1.10 and
// 1.09. These numbers are between the two models'.
inline constexpr TokenCost kGpuTokenCost = {.per_token = 0.01, .max_tokens = 16, .per_step = 0.12, .waiting = 0.02};

}  // namespace
