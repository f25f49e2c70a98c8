// What more tokens than one cost in a step that reads all weights anyway. The command `speculate` measures it.
#pragma once

namespace stage8 {

// Where it has not been measured, a token more is never worth it. Shares are of the time of a step with one token.
struct TokenCost {
  double per_token = 1.0;  // added by each
  int max_tokens = 1;      // in a step; each beyond that costs as much as in a step of its own
  double waiting = 0.0;    // added where the host has to see a step's tokens before it schedules the next one
};

inline constexpr TokenCost kCpuTokenCost = {.per_token = 0.4, .max_tokens = 8};
inline constexpr TokenCost kGpuTokenCost = {.per_token = 0.04, .max_tokens = 16, .waiting = 0.06};

}  // namespace
