// One batch whose attention can be done by hand: 10 tokens behind a block table that jumps about.
//
// All keys are zero but that of token 9, which is ln 3 in dimension 0; V of token t is t in kv head 0 and 100 + t in kv
// head 1, in all dimensions. Query heads 0 and 2 are sqrt(head_dim) in dimension 0, heads 1 and 3 are zero; heads 0 and
// 1 read kv head 0. So heads 0 and 2 weigh tokens 0 … 9 with 1, 1, … 1, 3, and heads 1 and 3 all with 1:
//
//   token 9, heads 0 and 1:  (0 + 1 + … + 8 + 3 * 9) / 12 = 5.25   and   (0 + 1 + … + 9) / 10 = 4.5
//   token 8, which does not see token 9:  (0 + 1 + … + 8) / 9 = 4, for both
//
// and 100 more in heads 2 and 3. Float32 has blocks of 4 behind the table [7, 1, 3], bfloat16 blocks of 8 behind
// [7, 1].
#pragma once

#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "tests/gpu/gpu_values.h"
#include "tests/support/compare.h"

namespace tests {

class HandWorked {
 public:
  static constexpr int kNumTokens = 10;
  static constexpr int kHeadDim = 32;
  inline static const std::vector<double> kLastToken = {5.25, 4.5, 105.25, 104.5};
  inline static const std::vector<double> kLastTwoTokens = {4.0, 4.0, 104.0, 104.0, 5.25, 4.5, 105.25, 104.5};

  explicit HandWorked(ScalarType type);
  std::vector<float> decode();
  std::vector<float> ragged();
  // expected: one number for each query head of each row; every dimension has it.
  std::string check(const std::vector<float>& output, const std::vector<double>& expected) const;

 private:
  ScalarType type_;
  common::Stream stream_;
  common::DeviceArray<std::byte> keys_;
  common::DeviceArray<std::byte> values_;
  common::DeviceArray<std::byte> queries_;  // two equal rows
  common::DeviceArray<int> context_length_{std::vector<int>{kNumTokens}};
  common::DeviceArray<int> block_table_;
  common::DeviceArray<int> query_starts_{std::vector<int>{0, 2}};
  stage::Pages pages_;
  stage::Batch batch_;
};

inline HandWorked::HandWorked(ScalarType type) : type_(type) {
  const std::vector<int> table = type == ScalarType::kFloat32 ? std::vector<int>{7, 1, 3} : std::vector<int>{7, 1};
  const int block_size = type == ScalarType::kFloat32 ? 4 : 8;
  pages_.shape = {.num_blocks = 8, .num_kv_heads = 2, .block_size = block_size, .head_dim = kHeadDim, .type = type};
  keys_ = poisoned(pages_.shape.elements(), type);
  values_ = poisoned(pages_.shape.elements(), type);
  pages_.keys = keys_.data();
  pages_.values = values_.data();
  block_table_ = common::DeviceArray<int>(table);
  batch_ = {.num_sequences = 1,
            .num_heads = 4,
            .context_lengths = context_length_.data(),
            .block_tables = block_table_.data(),
            .max_blocks_per_sequence = static_cast<int>(table.size())};
  std::vector<float> keys(std::size_t{kNumTokens} * 2 * kHeadDim, 0.0F);
  std::vector<float> values(keys.size());
  std::vector<int> slots;
  for (int token = 0; token < kNumTokens; ++token) {
    slots.push_back(table[static_cast<std::size_t>(token / block_size)] * block_size + token % block_size);
    for (int column = 0; column < 2 * kHeadDim; ++column) {
      const int index = token * 2 * kHeadDim + column;
      const auto i = static_cast<std::size_t>(index);
      values[i] = static_cast<float>(token + (column < kHeadDim ? 0 : 100));
      keys[i] = token == 9 && column % kHeadDim == 0 ? std::log(3.0F) : 0.0F;
    }
  }
  std::vector<float> queries(std::size_t{2} * 4 * kHeadDim, 0.0F);
  for (std::size_t row_of_head = 0; row_of_head < 8; row_of_head += 2) {
    queries[row_of_head * kHeadDim] = std::sqrt(static_cast<float>(kHeadDim));
  }
  queries_ = common::DeviceArray<std::byte>(to_bytes(queries, type));
  const common::DeviceArray<std::byte> key_rows(to_bytes(keys, type));
  const common::DeviceArray<std::byte> value_rows(to_bytes(values, type));
  const common::DeviceArray<int> slot_mapping(slots);
  stage::write_to_slots(pages_, key_rows.data(), value_rows.data(), 2 * kHeadDim, slot_mapping.data(), kNumTokens,
                        stream_.get());
  stream_.synchronize();
}

inline std::vector<float> HandWorked::decode() {
  const auto output = poisoned(4 * kHeadDim, type_);
  const common::DeviceArray<std::byte> workspace(stage::decode_workspace_bytes(pages_.shape, batch_));
  stage::plan_decode(pages_.shape, batch_, workspace.data(), stream_.get());
  stage::decode_attention(pages_, batch_, queries_.data(), output.data(), workspace.data(), stream_.get());
  stream_.synchronize();
  return to_floats(output.download(), type_);
}

inline std::vector<float> HandWorked::ragged() {
  const auto output = poisoned(2 * 4 * kHeadDim, type_);
  const common::DeviceArray<std::byte> workspace(stage::ragged_workspace_bytes(pages_.shape, batch_, 2));
  stage::plan_ragged(pages_.shape, batch_, query_starts_.data(), 2, workspace.data(), stream_.get());
  stage::ragged_attention(pages_, batch_, query_starts_.data(), queries_.data(), output.data(), 2, workspace.data(),
                          stream_.get());
  stream_.synchronize();
  return to_floats(output.download(), type_);
}

inline std::string HandWorked::check(const std::vector<float>& output, const std::vector<double>& expected) const {
  std::vector<double> all;
  for (const double x : expected) {
    all.insert(all.end(), kHeadDim, x);
  }
  // ln 3 and sqrt(32) are rounded to the type, which moves the weight 3 by up to 2.2 roundings of itself and the result
  // by a fifth of that times 9 - 4 or so: under 3 roundings of it. The output is rounded once more.
  const double rounding = type_ == ScalarType::kFloat32 ? 0x1p-24 : 0x1p-8;
  return tests::compare(output, all, {.absolute = 0.0, .relative = 4.0 * rounding});
}

}  // namespace tests
