// Sums of parts that GPUs have stored into each other's memory, on the executor: the test stores the words of all GPUs.
#include "common/cuda/model/pushed_sum.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cuda/runtime/device.h"
#include "common/math/sampling.h"
#include "tests/support/catch.h"

namespace {

using common::DeviceArray;
using common::PushedPair;
using common::Random;

constexpr float kBefore = -77.0F;  // in what has to be written

// A sum of `parts` parts with the numbers of its rows, all words there.
struct Case {
  int num_parts;
  int num_tokens;
  int num_cols;
  unsigned index;
  std::vector<unsigned> first_numbers;
  std::vector<std::vector<PushedPair>> words;  // of each part, [num_tokens, num_cols / 2]
  std::vector<float> norm;

  Case(Random& random, int parts, int tokens, int cols, unsigned number_before)
      : num_parts(parts), num_tokens(tokens), num_cols(cols), index(static_cast<unsigned>(random.below(100))) {
    const auto pairs = static_cast<std::size_t>(cols) / 2;
    for (int row = 0; row < tokens; ++row) {
      first_numbers.push_back(number_before + 2 * static_cast<unsigned>(random.below(3)));
    }
    for (int part = 0; part < parts; ++part) {
      auto& of_part = words.emplace_back(static_cast<std::size_t>(tokens) * pairs);
      for (std::size_t i = 0; i < of_part.size(); ++i) {
        const unsigned number = first_numbers[i / pairs] + index;
        const auto bits = [&] { return std::bit_cast<std::uint32_t>(static_cast<float>(random.normal())); };
        of_part[i] = {bits(), number, bits(), number};
      }
    }
    for (int col = 0; col < cols; ++col) {
      norm.push_back(static_cast<float>(random.normal()));
    }
  }
  std::size_t pairs() const { return static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(num_cols) / 2; }

  // The sum of a pair's column: 0 or 1.
  float expected(std::size_t pair, std::size_t column) const {
    float sum = 0.0F;
    for (const auto& of_part : words) {
      sum += std::bit_cast<float>(column == 0 ? of_part[pair].x : of_part[pair].z);
    }
    return sum;
  }
};

struct Result {
  std::vector<float> values;
  std::vector<float> weighted;
  std::vector<float> squares;
};

Result run(const Case& given, int stop) {
  std::vector<DeviceArray<PushedPair>> parts(given.words.begin(), given.words.end());
  const auto elements = 2 * given.pairs();
  DeviceArray<unsigned> first_numbers(given.first_numbers);
  DeviceArray<float> norm(given.norm);
  DeviceArray<float> values(std::vector<float>(elements, kBefore));
  DeviceArray<float> weighted(std::vector<float>(elements, kBefore));
  DeviceArray<float> squares(std::vector<float>(elements / common::kSquaresColumns, kBefore));
  common::PushedSum sum{.num_parts = given.num_parts, .number = {first_numbers.data(), given.index}, .stop = &stop};
  for (std::size_t part = 0; part < parts.size(); ++part) {
    sum.parts[part] = parts[part].data();
  }
  const common::Stream stream;
  common::add_pushed(common::Precision::kFloat32, sum, given.num_tokens,
                     {.values = values.data(),
                      .norm = norm.data(),
                      .weighted = weighted.data(),
                      .squares = squares.data(),
                      .num_cols = given.num_cols},
                     stream.get());
  stream.synchronize();
  return {values.download(), weighted.download(), squares.download()};
}

}  // namespace

TEST_CASE("pushed sums: the parts of all GPUs, in their order, with what the next norm needs") {
  Random random(4);
  for (const int num_parts : {1, 2, 3, common::kMaxPeers}) {
    for (const int num_tokens : {1, 3, common::kMaxPushedTokens}) {
      for (const int num_cols : {8, 264}) {
        // In the last round, numbers begin anew within the rows.
        const Case given(random, num_parts, num_tokens, num_cols, num_parts == 3 ? ~0U - 3U : 2U);
        const Result result = run(given, 0);
        CAPTURE(num_parts, num_tokens, num_cols);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < result.values.size(); ++i) {
          const float expected = given.expected(i / 2, i % 2);
          wrong += result.values[i] == expected ? 0 : 1;
          wrong += result.weighted[i] == expected * given.norm[i % given.norm.size()] ? 0 : 1;
        }
        CHECK(wrong == 0);
        for (std::size_t group = 0; group < result.squares.size(); ++group) {
          double exact = 0.0;
          for (std::size_t i = 0; i < common::kSquaresColumns; ++i) {
            exact += std::pow(result.values[group * common::kSquaresColumns + i], 2.0);
          }
          wrong += std::abs(result.squares[group] - exact) <= 1e-6 * exact ? 0 : 1;
        }
        CHECK(wrong == 0);
      }
    }
  }
}

// The halves of a pair come by themselves. A late half still has the number of two sums before, or a row's first zero.
TEST_CASE("pushed sums: a column is added only when both of its pair's numbers are there, from every GPU") {
  Random random(5);
  for (int round = 0; round < 12; ++round) {
    Case given(random, 1 + round % 3, 2, 40, 1000U);
    std::vector<bool> is_late(given.pairs());
    for (std::size_t pair = 0; pair < given.pairs(); ++pair) {
      if (random.uniform() < 0.3) {
        PushedPair& word = given.words[random.below(given.words.size())][pair];
        const auto halves = 1 + random.below(3);
        const unsigned old = random.uniform() < 0.5 ? 0U : word.y - 2U;
        word.y = (halves & 1) != 0 ? old : word.y;
        word.w = (halves & 2) != 0 ? old : word.w;
        is_late[pair] = true;
      }
    }
    const Result result = run(given, 1);  // it is told to wait no longer
    CAPTURE(round);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < result.values.size(); ++i) {
      wrong += result.values[i] == (is_late[i / 2] ? kBefore : given.expected(i / 2, i % 2)) ? 0 : 1;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("pushed sums: each row of a step counts its own sums") {
  DeviceArray<unsigned> numbers(std::vector<unsigned>{0U, 10U, ~0U, 8U});
  const common::Stream stream;
  common::count_sums(numbers.data(), 3, 6, stream.get());
  stream.synchronize();
  CHECK(numbers.download() == std::vector<unsigned>{6U, 16U, 5U, 8U});
}
