// A batch whose attention can be worked out by hand: 10 tokens behind a block table that jumps about.
//
// All keys are zero except token 9's, which is 1 in dimension 0. V of token t is t in kv head 0 and 4 t in kv head 1,
// in all dimensions: numbers that every type has. Query heads 0 and 2 are ln 3 * sqrt(head_dim) in dimension 0, heads 1
// and 3 are zero; heads 0 and 1 read kv head 0. So heads 0 and 2 give tokens 0 … 9 the weights 1, 1, … 1, 3, and heads
// 1 and 3 give all of them the weight 1:
//
//   token 9, heads 0 and 1:  (0 + 1 + … + 8 + 3 * 9) / 12 = 5.25   and   (0 + 1 + … + 9) / 10 = 4.5
//   token 8, which does not see token 9:  (0 + 1 + … + 8) / 9 = 4, for both
//
// and four times that in heads 2 and 3. Float32 has blocks of 4 and the table [7, 1, 3], bfloat16 blocks of 8 and
// [7, 1], float8 a block of 16 and [7].
#pragma once

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "tests/gpu/gpu_paged_batch.h"
#include "tests/support/compare.h"

namespace tests {

class HandWorked : public PagedBatch {
 public:
  static constexpr int kNumTokens = 10;
  static constexpr int kHeadDim = 32;
  inline static const std::vector<double> kLastToken = {5.25, 4.5, 21.0, 18.0};
  inline static const std::vector<double> kLastTwoTokens = {4.0, 4.0, 16.0, 16.0, 5.25, 4.5, 21.0, 18.0};

  explicit HandWorked(ScalarType type);
  // expected: one number for each query head of each row; every dimension has it. The output may have more rows.
  std::string check(const std::vector<float>& result, const std::vector<double>& expected) const;
};

inline HandWorked::HandWorked(ScalarType type) {
  const int block_size = type == ScalarType::kFloat32 ? 4 : type == ScalarType::kBFloat16 ? 8 : 16;
  std::vector<int> table = {7, 1, 3};
  table.resize(static_cast<std::size_t>((kNumTokens + block_size - 1) / block_size));
  std::vector<float> keys(std::size_t{kNumTokens} * 2 * kHeadDim, 0.0F);
  std::vector<float> values(keys.size());
  std::vector<int> slots;
  for (int token = 0; token < kNumTokens; ++token) {
    slots.push_back(table[static_cast<std::size_t>(token / block_size)] * block_size + token % block_size);
    for (int column = 0; column < 2 * kHeadDim; ++column) {
      const int index = token * 2 * kHeadDim + column;
      const auto i = static_cast<std::size_t>(index);
      values[i] = static_cast<float>(token * (column < kHeadDim ? 1 : 4));
      keys[i] = token == 9 && column % kHeadDim == 0 ? 1.0F : 0.0F;
    }
  }
  std::vector<float> two_rows(std::size_t{2} * 4 * kHeadDim, 0.0F);  // equal ones; decode attention takes the first
  for (std::size_t row_of_head = 0; row_of_head < 8; row_of_head += 2) {
    two_rows[row_of_head * kHeadDim] = std::log(3.0F) * std::sqrt(static_cast<float>(kHeadDim));
  }
  put({.shape = {.num_blocks = 8, .num_kv_heads = 2, .block_size = block_size, .head_dim = kHeadDim, .type = type},
       .num_heads = 4,
       .context_lengths = {kNumTokens},
       .block_tables = table,
       .table_starts = {0},
       .max_blocks = static_cast<int>(table.size()),
       .query_starts = {0, 2},
       .slots = slots,
       .keys = keys,
       .values = values,
       .queries = two_rows});
}

inline std::string HandWorked::check(const std::vector<float>& result, const std::vector<double>& expected) const {
  std::vector<double> all;
  for (const double x : expected) {
    all.insert(all.end(), kHeadDim, x);
  }
  // The query is rounded to the type. This moves the weight 3 by up to 1.1 roundings of itself, and the result by a
  // fifth of that times about 9 - 4: less than 2 roundings. The output is rounded once more.
  const double rounding = shape().type == ScalarType::kFloat32 ? 0x1p-24 : 0x1p-8;
  return tests::compare(std::span(result).first(all.size()), all, {.absolute = 0.0, .relative = 4.0 * rounding});
}

}  // namespace tests
