// How a model is shared out among several GPUs. Of the matrices that read the residual stream each GPU has some of the
// rows, and of those that add to it the columns that go with them: its heads, its part of the feed-forward layer, its
// part of the vocabulary. Norms are small, and every GPU has them.
#pragma once

#include <string>

#include "common/model/llama.h"

namespace common {

struct Shard {
  int rank = 0;
  int count = 1;  // of GPUs
};

// Why so many GPUs can't share the model evenly; empty if they can.
std::string why_not_shared(const LlamaConfig& config, int count);

// What each of them computes: a model with fewer heads, a narrower feed-forward layer and fewer tokens.
LlamaConfig shard_config(const LlamaConfig& config, int count);

// The rows that a GPU has, of those matrices that are cut by rows. The others are whole. Views, as the weights are.
LlamaWeights shard_rows(const LlamaWeights& weights, const LlamaConfig& config, const Shard& shard);

}  // namespace common
