// Prompts over pages in float8: what the producers of common/paged/ bring to the tensor cores. The products themselves
// need a GPU (tests/gpu/gpu_ragged_attention.cpp).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "common/cuda/executor/counts.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/launch.h"
#include "common/math/sampling.h"
#include "common/paged/page_layout.h"
#include "tests/executor/tile_converter.h"
#include "tests/support/catch.h"
#include "tests/support/float8.h"

namespace {

using common::DeviceArray;
using common::PageShape;

constexpr int kHeads = 2;
constexpr std::uint8_t kNan = 0x7F;

struct Case {
  int head_dim;
  int block_size;
  int first_token;
  int num_hidden;
  int num_seen;
  int times;
  bool any_scale;
};

// Pages of random bytes and scales, NaN only where a scale is none, and what they stand for.
struct Sequence {
  PageShape shape;
  std::vector<int> table;
  std::vector<std::uint8_t> bytes;
  std::vector<float> numbers[2];  // K's and V's: [kHeads, num_seen, head_dim]
};

Sequence make_sequence(const Case& of, common::Random& random) {
  const int num_blocks = (of.num_seen + of.block_size - 1) / of.block_size;
  Sequence all{.shape = {.num_blocks = num_blocks + 3,
                         .num_kv_heads = kHeads,
                         .block_size = of.block_size,
                         .head_dim = of.head_dim,
                         .type = common::ScalarType::kFloat8},
               .table = {},
               .bytes = {},
               .numbers = {}};
  const auto below = [&](int limit) { return static_cast<int>(random.uniform() * limit); };
  all.table.resize(static_cast<std::size_t>(num_blocks));
  std::iota(all.table.rbegin(), all.table.rend(), 2);
  all.bytes.assign(static_cast<std::size_t>(all.shape.elements()), 0xFF);
  const common::PairLayout pair = common::pair_layout(all.shape.type, of.head_dim);
  const int vecs = of.head_dim / common::kVecBytes;
  for (int is_value = 0; is_value < 2; ++is_value) {
    for (int head = 0; head < kHeads; ++head) {
      for (int token = 0; token < of.num_seen; ++token) {
        const int row = token % common::kTileRows;
        std::uint8_t* tile = &all.bytes[static_cast<std::size_t>(common::row_offset(
            all.shape, all.table[static_cast<std::size_t>(token / of.block_size)], head, token % of.block_size - row))];
        // From 2^-40 on; what is above 2^7 is converted in another way, and what is above 2^119 has never been a scale.
        const int largest = of.any_scale && token % 50 == 0 ? 246 : 134;
        const int scale = of.any_scale && token % 70 == 1 ? 255 : 87 + below(largest - 86);
        tile[(is_value != 0 ? pair.value_scales : pair.key_scales) + row] = static_cast<std::uint8_t>(scale);
        for (int i = 0; i < of.head_dim; ++i) {
          auto byte = static_cast<std::uint8_t>(below(256));
          if (scale != 255 && (byte & 0x7F) == kNan) {
            byte = 0x80;
          }
          const int place = common::vec_place(vecs, common::kTileRows, row, i / common::kVecBytes);
          tile[(is_value != 0 ? pair.values : 0) + place * common::kVecBytes + i % common::kVecBytes] = byte;
          all.numbers[is_value].push_back(scale == 255
                                              ? static_cast<float>(tests::float8_value(byte)) * HUGE_VALF
                                              : static_cast<float>(std::ldexp(tests::float8_value(byte), scale - 127)));
        }
      }
    }
  }
  return all;
}

// How many of the numbers, from the first-th on, are not what they should be. A NaN of any kind is equal to any other.
int differences(const std::vector<__nv_bfloat16>& found, const float* expected, std::size_t first) {
  int count = 0;
  for (std::size_t i = first; i < found.size(); ++i) {
    const float x = __bfloat162float(found[i]);
    const bool are_nan = std::isnan(x) && std::isnan(expected[i]);
    count += are_nan || (x == expected[i] && std::signbit(x) == std::signbit(expected[i])) ? 0 : 1;
  }
  return count;
}

}  // namespace

TEST_CASE("Prompts over float8: rings hold what pages stand for, exactly (stage 7, invariant 9)") {
  const auto of = GENERATE(Case{128, 16, 0, 0, 1, 1, false}, Case{128, 16, 0, 0, 293, 2, false},
                           Case{128, 64, 128, 70, 400, 3, true}, Case{128, 32, 256, 100, 384, 1, true},
                           Case{64, 16, 0, 0, 128, 2, true}, Case{64, 32, 128, 0, 16 * 128 + 90, 2, true},
                           Case{128, 16, 0, 127, 17 * 128 + 16, 1, false});
  const std::uint64_t seed = GENERATE(0, 1, 2);
  CAPTURE(of.head_dim, of.block_size, of.first_token, of.num_hidden, of.num_seen, of.times, of.any_scale, seed);
  common::Random random(3);
  Sequence all = make_sequence(of, random);
  // Blocks in front of the window are not there.
  const int first_seen = of.first_token + of.num_hidden;
  std::fill_n(all.table.begin(), of.num_hidden > 0 ? first_seen / of.block_size : 0, 1 << 30);
  const DeviceArray<std::uint8_t> pages(all.bytes);
  const DeviceArray<int> table(all.table);
  const auto size = static_cast<std::size_t>((of.num_seen - of.first_token) * of.head_dim);
  for (int head = 0; head < kHeads; ++head) {
    const DeviceArray<__nv_bfloat16> keys(size);
    const DeviceArray<__nv_bfloat16> values(size);
    const tests::LoadedTokens tokens{.pages = {pages.data(), nullptr, all.shape},
                                     .table = table.data(),
                                     .kv_head = head,
                                     .first_token = of.first_token,
                                     .num_hidden = of.num_hidden,
                                     .num_seen = of.num_seen,
                                     .times = of.times,
                                     .keys = keys.data(),
                                     .values = values.data()};
    common::executor::set_seed(seed);
    const auto run = [&] {
      common::launch(of.head_dim == 64 ? tests::load_tiles_64 : tests::load_tiles_128, dim3(1), tests::kLoadThreads,
                     tests::load_tiles_bytes(of.head_dim), nullptr, common::Overlap::kNone, tokens);
    };
    if (common::executor::can_count()) {
      CHECK(common::executor::count(run).bank_conflicts() == 0);
    } else {
      run();
    }
    common::executor::set_seed(0);
    const std::size_t from =
        static_cast<std::size_t>((head * of.num_seen + of.first_token)) * static_cast<std::size_t>(of.head_dim);
    const auto hidden = static_cast<std::size_t>(of.num_hidden) * static_cast<std::size_t>(of.head_dim);
    CHECK(differences(keys.download(), all.numbers[0].data() + from, hidden) == 0);
    CHECK(differences(values.download(), all.numbers[1].data() + from, hidden) == 0);
  }
}
