// What a step needs in order to be enqueued before the tokens of the step before it are known.
#pragma once

namespace stage8 {

// tokens[index] of a step is what the step before it has drawn for its logits row `row`.
struct PendingToken {
  int index = 0;
  int row = 0;
};

}  // namespace
