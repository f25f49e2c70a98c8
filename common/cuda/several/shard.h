// How a model is shared out among several GPUs. Each GPU has some rows of the matrices that read the residual stream,
// and the matching columns of the matrices that add to it: its heads, its part of the feed-forward layer, its part of
// the vocabulary. Norms are small, and every GPU has all of them.
#pragma once

#include <string>

#include "common/model/llama.h"

namespace common {

struct Shard {
  int rank = 0;
  int count = 1;  // the number of GPUs
};

// Why `count` GPUs can't share the model evenly; empty if they can.
std::string why_not_shared(const LlamaConfig& config, int count);

// The model that each GPU computes: it has fewer heads, a narrower feed-forward layer and fewer tokens.
LlamaConfig shard_config(const LlamaConfig& config, int count);

// A GPU's rows of the matrices that are cut by rows; all other matrices are whole. The result has views, as the
// weights.
LlamaWeights shard_rows(const LlamaWeights& weights, const LlamaConfig& config, const Shard& shard);

}  // namespace common
