// What one warp of each step of the ladder loads of K and V, load by load, as the executor sees it: the scenes of the
// course's site (common/site/widgets). Nothing in them is written by hand: they are recorded while the kernels run.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/gpu/gpu_fixtures.h"
#include "tests/gpu/gpu_ladder_pages.h"

namespace tests {

struct WarpScene {
  std::string name;   // "warp-loads-2"
  std::string title;  // one line
  std::vector<nlohmann::ordered_json> states;
};

// One for each step of the ladder: of the first warp of the first thread block. The batch has one sequence and one kv
// head. The first state says what is drawn, {"said", "actions", "counters", "memory": {"tokens": [0, 1, …], "blocks":
// [[4, 0], …]: physical block and its first token, "row_bytes"}, "whole": counts of the kernel}. Each that follows is a
// load:
//
//   {"command": "load", "label": "load 2 of K", "said": "…", "of": "K", "is_bulk": false,
//    "parts": [[lane, token, first byte of its row, bytes], …], "between": loads of other things just before it,
//    [["the block table", 1], …], "counters": of all its loads of K and V until then, {"loads so far": 2, …},
//    "actions": []}
std::vector<WarpScene> warp_scenes(const GpuBatch& batch, const PagesInOrder& pages);

}  // namespace tests
