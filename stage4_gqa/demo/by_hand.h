// The online softmax on numbers that fit on paper: the command `by-hand`, and what its picture shows.
#pragma once

#include <string>
#include <vector>

#include "common/app/cli.h"

namespace stage4 {

// One block of four tokens or fewer. A score is in units of ln 2, so that weights are powers of two, and the value of a
// token is its position.
struct HandBlock {
  int block = 0;
  std::vector<int> positions;
  std::vector<int> scores;
  std::vector<float> weights = {};  // exp(score - row_max)
  int row_max = 0;                  // the largest score so far, in units of ln 2
  float rescale = 0.0F;  // the factor for the sums so far; 0 for the first block, before which there are none
  float row_sum = 0.0F;
  float output = 0.0F;
};

// Ten tokens in blocks 7, 1 and 3.
std::vector<HandBlock> online_softmax_by_hand();

std::string fraction(float power_of_two);  // "1/4" or "2"
std::string decimal(float value);          // "16.6875": four decimals at most

common::Command& add_by_hand_command(common::Program& program);

}  // namespace
