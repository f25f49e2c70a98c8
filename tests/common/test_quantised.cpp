// Weights as files store them: what another program makes of each type's blocks, a second definition of each type
// written down here, and products that unpack blocks as they read them, bit for bit equal to products of the floats.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/parallel.h"
#include "common/math/sampling.h"
#include "common/model/dequantize.h"
#include "common/model/linear.h"
#include "common/model/weight_matrix.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/messages.h"
#include "tests/support/quantised_rows.h"
#include "tests/support/thread_count.h"

using common::Matrix;
using common::TensorType;
using common::WeightMatrix;
using tests::Bytes;
using tests::ThreadCount;

namespace {

// A type, where the float16 scales of its blocks are, and what the Python package gguf (https://pypi.org/project/gguf/)
// makes of pseudo_random_blocks(): the first weights, and a hash of the bytes of all. Printed by gguf_vectors.py.
struct Quantised {
  TensorType type;
  std::vector<std::size_t> scales;
  std::array<float, 3> first;
  std::uint64_t hash;
};

const std::vector<Quantised>& quantised_types() {
  static const std::vector<Quantised> types = {
      {TensorType::Q8_0,
       {0},
       {-3.4868717193603516e-05F, -2.8014183044433594e-05F, -7.152557373046875e-06F},
       0xaf85008c71142633U},
      {TensorType::Q4_0, {0}, {8.940696716308594e-07F, -1.7881393432617188e-06F, 0.0F}, 0xc25469321dc91acaU},
      {TensorType::Q4_1,
       {0, 2},
       {-0.012776851654052734F, -0.012775659561157227F, -0.012775063514709473F},
       0x2fe6ec884bbdfb0eU},
      {TensorType::Q5_0,
       {0},
       {4.172325134277344e-06F, 3.5762786865234375e-06F, -2.384185791015625e-06F},
       0x3e740d5aacfbb282U},
      {TensorType::Q5_1,
       {0, 2},
       {-0.012776851654052734F, -0.012776851654052734F, -0.01277625560760498F},
       0xc1a842e0eb054ae9U},
      {TensorType::Q2_K, {80, 82}, {-0.9112548828125F, -0.9112548828125F, -2.7337646484375F}, 0x069dd9f9a256824cU},
      {TensorType::Q3_K,
       {108},
       {-0.0028710365295410156F, 0.0028710365295410156F, -0.0028710365295410156F},
       0xb51aa81c98b0d569U},
      {TensorType::Q4_K, {0, 2}, {0.3067612648010254F, 0.3067612648010254F, 0.30678510665893555F}, 0xac925e35cc01f243U},
      {TensorType::Q5_K,
       {0, 2},
       {0.30695199966430664F, 0.30699968338012695F, 0.30694007873535156F},
       0xfe7dac5d41e82297U},
      {TensorType::Q6_K, {208}, {-329.73486328125F, -314.033203125F, 78.50830078125F}, 0xc15fca1754fe1836U},
      {TensorType::IQ4_NL,
       {0},
       {1.1324882507324219e-05F, -2.473592758178711e-05F, 2.980232238769531e-07F},
       0x638dc98d509a3770U}};
  return types;
}

constexpr std::size_t kNumBlocks = 50;

// What compare() returns if all is well.
const std::string kNoComplaint;

// Random bytes, but the scales of each block are finite.
Bytes pseudo_random_blocks(std::size_t num_blocks, std::size_t block_bytes, const std::vector<std::size_t>& scales) {
  Bytes data(num_blocks * block_bytes);
  std::uint32_t state = 12345;
  for (std::byte& byte : data) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24U);
  }
  for (std::size_t block = 0; block < num_blocks; ++block) {
    for (const std::size_t scale : scales) {
      data[block * block_bytes + scale + 1] &= std::byte{0xBB};  // clears a bit of the exponent
    }
  }
  return data;
}

std::uint64_t fnv1a(std::span<const float> values) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const std::byte byte : std::as_bytes(values)) {
    hash = (hash ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001B3U;
  }
  return hash;
}

// A block's bytes, and the numbers in it.
class Block {
 public:
  explicit Block(std::span<const std::byte> data) : data_(data) {}

  int byte(std::size_t index) const { return std::to_integer<int>(data_[index]); }
  int signed_byte(std::size_t index) const { return byte(index) < 128 ? byte(index) : byte(index) - 256; }
  // `count` bits of a byte, from bit `first` on.
  int bits(std::size_t index, std::size_t first, std::size_t count) const {
    return byte(index) / (1 << first) % (1 << count);
  }
  int nibble(std::size_t index, bool high) const { return bits(index, high ? 4 : 0, 4); }

  // IEEE 754 binary16 by its definition.
  double half(std::size_t index) const {
    const int exponent = bits(index + 1, 2, 5);
    const int fraction = bits(index + 1, 0, 2) * 256 + byte(index);
    const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return byte(index + 1) < 128 ? size : -size;
  }

 private:
  std::span<const std::byte> data_;
};

// Number `index` of the eight six-bit scales (or, with `minimum`, minimums) in the twelve bytes from `begin` on.
int six_bit(const Block& block, std::size_t begin, std::size_t index, bool minimum) {
  const std::size_t first = begin + (minimum ? 4 : 0);
  if (index < 4) {
    return block.bits(first + index, 0, 6);
  }
  return block.nibble(begin + 4 + index, minimum) + 16 * block.bits(first + index - 4, 6, 2);
}

// Weight i of a block of 32.
double weight_of_32(TensorType type, const Block& block, std::size_t i) {
  const std::size_t at = i % 16;
  const bool high = i >= 16;
  const auto fifth_bit = [&](std::size_t begin) { return 16 * block.bits(begin + i / 8, i % 8, 1); };
  switch (type) {
    case TensorType::Q8_0:
      return block.half(0) * block.signed_byte(2 + i);
    case TensorType::Q4_0:
      return block.half(0) * (block.nibble(2 + at, high) - 8);
    case TensorType::Q4_1:
      return block.half(0) * block.nibble(4 + at, high) + block.half(2);
    case TensorType::Q5_0:
      return block.half(0) * (block.nibble(6 + at, high) + fifth_bit(2) - 16);
    case TensorType::Q5_1:
      return block.half(0) * (block.nibble(8 + at, high) + fifth_bit(4)) + block.half(2);
    case TensorType::IQ4_NL: {
      constexpr std::array<int, 16> kValues = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
      return block.half(0) * kValues[static_cast<std::size_t>(block.nibble(2 + at, high))];
    }
    default:
      throw common::CheckError("no block of 32");
  }
}

// Weight i of a block of 256.
double weight_of_256(TensorType type, const Block& block, std::size_t i) {
  const std::size_t in_half = i % 128;
  const std::size_t group = i / 16;
  const auto two_bits = [&](std::size_t begin) {
    return block.bits(begin + i / 128 * 32 + i % 32, in_half / 32 * 2, 2);
  };
  const auto four_bits = [&](std::size_t begin) { return block.nibble(begin + i / 64 * 32 + i % 32, i % 64 >= 32); };
  switch (type) {
    case TensorType::Q2_K:
      return block.half(80) * block.nibble(group, false) * two_bits(16) - block.half(82) * block.nibble(group, true);
    case TensorType::Q3_K: {
      const int scale = block.nibble(96 + group % 8, group >= 8) + 16 * block.bits(104 + group % 4, group / 4 * 2, 2);
      const int q = two_bits(32) + 4 * block.bits(i % 32, i / 32, 1) - 4;
      return block.half(108) * (scale - 32) * q;
    }
    case TensorType::Q4_K:
      return block.half(0) * six_bit(block, 4, i / 32, false) * four_bits(16) -
             block.half(2) * six_bit(block, 4, i / 32, true);
    case TensorType::Q5_K:
      return block.half(0) * six_bit(block, 4, i / 32, false) *
                 (four_bits(48) + 16 * block.bits(16 + i % 32, i / 32, 1)) -
             block.half(2) * six_bit(block, 4, i / 32, true);
    case TensorType::Q6_K: {
      const int low = block.nibble(i / 128 * 64 + in_half % 64, in_half >= 64);
      return block.half(208) * block.signed_byte(192 + group) * (low + 16 * two_bits(128) - 32);
    }
    default:
      throw common::CheckError("no block of 256");
  }
}

double slow_weight(TensorType type, const Block& block, std::size_t i) {
  return common::block_format(type).elements == 32 ? weight_of_32(type, block, i) : weight_of_256(type, block, i);
}

std::vector<float> dequantized(TensorType type, const Bytes& data, std::size_t num_elements) {
  std::vector<float> out(num_elements, std::numeric_limits<float>::quiet_NaN());
  common::dequantize(type, data, out);
  return out;
}

Bytes random_rows(common::Random& random, TensorType type, Eigen::Index rows, Eigen::Index cols) {
  return tests::random_weights(random, type, static_cast<std::size_t>(rows * cols), 1.0F);
}

Matrix random_matrix(common::Random& random, Eigen::Index rows, Eigen::Index cols) {
  Matrix matrix(rows, cols);
  std::generate_n(matrix.data(), matrix.size(), [&] { return static_cast<float>(random.normal()); });
  return matrix;
}

Matrix floats_of(const WeightMatrix& weights) {
  Matrix floats(weights.rows(), weights.cols());
  weights.read_rows(0, weights.rows(), floats.data());
  return floats;
}

bool same_bits(const Matrix& a, const Matrix& b) {
  const auto bytes = [](const Matrix& matrix) {
    return std::as_bytes(std::span(matrix.data(), static_cast<std::size_t>(matrix.size())));
  };
  const auto left = bytes(a);
  const auto right = bytes(b);
  return a.rows() == b.rows() && a.cols() == b.cols() &&
         std::equal(left.begin(), left.end(), right.begin(), right.end());
}

}  // namespace

TEST_CASE("quantised blocks give the weights that another program reads", "[quantised]") {
  for (const Quantised& quantised : quantised_types()) {
    const common::BlockFormat format = common::block_format(quantised.type);
    INFO(common::type_name(quantised.type));
    const Bytes data = pseudo_random_blocks(kNumBlocks, static_cast<std::size_t>(format.bytes), quantised.scales);
    const std::vector<float> weights =
        dequantized(quantised.type, data, kNumBlocks * static_cast<std::size_t>(format.elements));
    CHECK(std::equal(quantised.first.begin(), quantised.first.end(), weights.begin()));
    CHECK(fnv1a(weights) == quantised.hash);
  }
}

TEST_CASE("quantised blocks agree with the definition, weight by weight", "[quantised]") {
  for (const Quantised& quantised : quantised_types()) {
    const common::BlockFormat format = common::block_format(quantised.type);
    const auto elements = static_cast<std::size_t>(format.elements);
    const auto block_bytes = static_cast<std::size_t>(format.bytes);
    INFO(common::type_name(quantised.type));
    const Bytes data = pseudo_random_blocks(kNumBlocks, block_bytes, quantised.scales);
    std::vector<float> expected;
    for (std::size_t i = 0; i < kNumBlocks * elements; ++i) {
      const Block block(std::span<const std::byte>(data).subspan(i / elements * block_bytes, block_bytes));
      // Doubles hold all products and sums here exactly, so this is the correctly rounded result. The reader rounds
      // only once too, in its last operation, so the bits must agree.
      expected.push_back(static_cast<float>(slow_weight(quantised.type, block, i % elements)));
    }
    // -0 and 0 are the same weight.
    std::vector<float> actual = dequantized(quantised.type, data, expected.size());
    for (std::vector<float>* weights : {&actual, &expected}) {
      std::replace(weights->begin(), weights->end(), -0.0F, 0.0F);
    }
    CHECK(tests::compare_bits(actual, expected) == kNoComplaint);
  }
}

TEST_CASE("a product with a file's blocks equals the product with their floats, bit for bit", "[quantised]") {
  const ThreadCount threads(GENERATE(1, 2, 3));
  common::Random random(5);
  for (const TensorType type : tests::all_types()) {
    for (const Eigen::Index rows : {1, 7, 130}) {
      const Eigen::Index cols = rows == 7 ? 256 : 512;
      const Bytes data = random_rows(random, type, rows, cols);
      WeightMatrix weights;
      weights.append(type, data, rows, cols);
      const Matrix floats = floats_of(weights);
      for (const Eigen::Index num_tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64, 65, 100}) {
        const Matrix x = random_matrix(random, num_tokens, cols);
        CAPTURE(common::type_name(type), rows, num_tokens, common::num_threads());
        CHECK(same_bits(common::linear(x, weights), common::linear(x, floats)));
      }
    }
  }
}

TEST_CASE("a product with several tensors equals the product with all their rows", "[quantised]") {
  const ThreadCount threads(GENERATE(1, 2, 5));
  common::Random random(6);
  constexpr Eigen::Index kCols = 768;
  const std::array<std::pair<TensorType, Eigen::Index>, 5> tensors = {{{TensorType::Q4_K, 50},
                                                                       {TensorType::F32, 1},
                                                                       {TensorType::Q6_K, 333},
                                                                       {TensorType::BF16, 17},
                                                                       {TensorType::Q8_0, 96}}};
  std::vector<Bytes> data;
  data.reserve(tensors.size());
  for (const auto& [type, rows] : tensors) {
    data.push_back(random_rows(random, type, rows, kCols));
  }
  WeightMatrix weights;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    weights.append(tensors[i].first, data[i], tensors[i].second, kCols);
  }
  CHECK(weights.rows() == 497);
  const Matrix floats = floats_of(weights);
  for (const Eigen::Index num_tokens : {1, 3, 9, 64, 70, 300}) {
    const Matrix x = random_matrix(random, num_tokens, kCols);
    CAPTURE(num_tokens, common::num_threads());
    CHECK(same_bits(common::linear(x, weights), common::linear(x, floats)));
  }
  // Any rows, across tensors.
  for (const auto& [first, count] : {std::pair<Eigen::Index, Eigen::Index>{0, 0}, {49, 3}, {40, 400}, {496, 1}}) {
    Matrix some(count, kCols);
    weights.read_rows(first, count, some.data());
    CHECK(same_bits(some, floats.middleRows(first, count)));
  }
  Matrix none(1, kCols);
  CHECK_THROWS_AS(weights.read_rows(497, 1, none.data()), common::CheckError);
}

TEST_CASE("rows that are not a whole number of packets, and bytes that are not aligned", "[quantised]") {
  common::Random random(7);
  for (const TensorType type : {TensorType::F32, TensorType::F16, TensorType::BF16}) {
    for (const Eigen::Index cols : {1, 12, 33, 48, 100}) {
      Bytes data = random_rows(random, type, 9, cols);
      data.insert(data.begin(), std::byte{0});
      WeightMatrix weights;
      weights.append(type, std::span(data).subspan(1), 9, cols);
      const Matrix floats = floats_of(weights);
      for (const Eigen::Index num_tokens : {1, 6, 20, 66}) {
        const Matrix x = random_matrix(random, num_tokens, cols);
        CAPTURE(common::type_name(type), cols, num_tokens);
        CHECK(same_bits(common::linear(x, weights), common::linear(x, floats)));
      }
    }
  }
}

TEST_CASE("a weight matrix takes whole rows, all of one length", "[quantised]") {
  WeightMatrix weights;
  const Bytes data(68);
  weights.append(TensorType::Q8_0, data, 1, 64);
  CHECK(weights.num_bytes() == 68);
  CHECK_THROWS_AS(weights.append(TensorType::Q8_0, data, 2, 32), common::CheckError);
  CHECK_THROWS_AS(weights.append(TensorType::Q8_0, data, 2, 64), common::CheckError);
  CHECK_THROWS_AS(weights.append(TensorType::Q8_0, std::span(data).subspan(1), 1, 64), common::CheckError);
  const Matrix x = Matrix::Ones(2, 7);
  CHECK(tests::contains(tests::error_of<common::CheckError>([&] { common::linear(x, weights); }),
                        "a linear layer got 7 features, expected 64"));
}
