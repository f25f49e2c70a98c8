// Random steps whose sequences share blocks: attention that reads these once, against attention that reads every
// sequence's blocks apart. Not a bit may differ.
//
//   shared_attention_fuzz_stage8 [--steps N] [--seed S]      or with FUZZ_STEPS and FUZZ_SEED in the environment
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "common/base/tensor.h"
#include "common/math/sampling.h"
#include "common/paged/shared_reading.h"
#include "tests/fuzz/driver.h"
#include "tests/support/compare.h"
#include "tests/support/sanitizers.h"
#include "tests/support/stage_api.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(batch.h)
#include STAGE_HEADER(production/cpu/shared_attention.h)
// clang-format on

namespace {

using common::Random;
using common::SharedPrefix;
using tests::FuzzCounts;
using tests::FuzzFailure;

constexpr long long kDefaultSteps = tests::kSanitized ? 200 : 2'000;

class Case {
 public:
  explicit Case(std::uint64_t seed) : random_(seed), shape_(random_shape()), cache_(shape_) {
    cache_.fill(std::numeric_limits<float>::quiet_NaN());
    const int num_sequences = 2 + below(8);
    for (int i = 0; i < num_sequences; ++i) {
      add_sequence();
    }
    q_ = random_matrix(batch_.num_tokens(), shape_.num_heads * shape_.head_dim);
  }

  const stage::RaggedBatch& batch() const { return batch_; }

  std::vector<SharedPrefix> groups() {
    const common::ReadingCosts costs{.block = 1, .query = below(2), .group = below(2)};
    return common::find_shared_prefixes({.context_lengths = batch_.context_lengths,
                                         .query_starts = batch_.query_starts,
                                         .block_tables = batch_.block_tables,
                                         .table_starts = batch_.table_starts,
                                         .block_size = shape_.block_size},
                                        costs);
  }

  std::string difference(const std::vector<SharedPrefix>& groups) const {
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      const common::Matrix apart = attention(cache_, layer, q_, batch_);
      const common::Matrix together = attention(cache_, layer, q_, batch_, groups);
      const auto floats = [](const common::Matrix& matrix) {
        return std::span(matrix.data(), static_cast<std::size_t>(matrix.size()));
      };
      if (std::string found = tests::compare_bits(floats(together), floats(apart)); !found.empty()) {
        return found;
      }
    }
    return "";
  }

 private:
  int below(int bound) { return static_cast<int>(random_.below(static_cast<std::uint64_t>(bound))); }

  stage::KvCacheShape random_shape() {
    stage::KvCacheShape shape;
    shape.num_layers = 2;
    shape.num_blocks = 80;  // more than all sequences need
    shape.block_size = 1 + below(8);
    shape.num_kv_heads = 1 + below(3);
    shape.num_heads = shape.num_kv_heads * (1 + below(5));
    shape.head_dim = below(2) == 0 ? 1 + below(40) : 16 * (1 + below(3));  // whole vectors
    return shape;
  }

  common::Matrix random_matrix(int rows, int cols) {
    common::Matrix result(rows, cols);
    for (Eigen::Index i = 0; i < result.size(); ++i) {
      result.data()[i] = static_cast<float>(below(2001) - 1000) / 300.0F;
    }
    return result;
  }

  // Begins with blocks of an earlier sequence, or with none, and goes on with blocks of its own.
  void add_sequence() {
    std::vector<int> table;
    if (batch_.num_sequences() > 0 && below(5) != 0) {
      const auto other = static_cast<std::size_t>(below(static_cast<int>(batch_.num_sequences())));
      const int num_old = batch_.context_lengths[other] - batch_.num_queries(other);
      const std::span<const int> shared =
          batch_.block_table(other).first(static_cast<std::size_t>(below(num_old / shape_.block_size + 1)));
      table.assign(shared.begin(), shared.end());
    }
    const int num_shared = static_cast<int>(table.size()) * shape_.block_size;
    const int num_own = 1 + below(6 * shape_.block_size);
    const int context_length = num_shared + num_own;
    std::vector<int> slots;
    for (int position = num_shared; position < context_length; ++position) {
      if (position % shape_.block_size == 0) {
        table.push_back(next_block_++);
      }
      slots.push_back(table.back() * shape_.block_size + position % shape_.block_size);
    }
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      const int cols = shape_.num_kv_heads * shape_.head_dim;
      cache_.write(layer, slots, random_matrix(num_own, cols), random_matrix(num_own, cols));
    }
    const int num_queries = below(3) != 0 ? 1 : 1 + below(num_own);
    batch_.query_starts.push_back(batch_.query_starts.back() + num_queries);
    batch_.context_lengths.push_back(context_length);
    batch_.block_tables.insert(batch_.block_tables.end(), table.begin(), table.end());
    batch_.table_starts.push_back(static_cast<int>(batch_.block_tables.size()));
  }

  Random random_;
  stage::KvCacheShape shape_;
  stage::KvCache cache_;
  stage::RaggedBatch batch_;
  common::Matrix q_;
  int next_block_ = 0;
};

void run(std::uint64_t seed, FuzzCounts& counts) {
  Case step(seed);
  const std::vector<SharedPrefix> groups = step.groups();
  if (const std::string difference = step.difference(groups); !difference.empty()) {
    throw FuzzFailure("a row differs: " + difference);
  }
  std::size_t num_members = 0;
  for (const SharedPrefix& group : groups) {
    num_members += group.sequences.size();
    counts.add("groups");
    counts.add("groups of four or more", group.sequences.size() > 3 ? 1 : 0);
    const bool has_chunk = std::any_of(group.sequences.begin(), group.sequences.end(), [&](int sequence) {
      return step.batch().num_queries(static_cast<std::size_t>(sequence)) > 1;
    });
    counts.add("groups with a chunk", has_chunk ? 1 : 0);
  }
  counts.add("sequences in no group", static_cast<long long>(step.batch().num_sequences() - num_members));
}

}  // namespace

int main(int argc, char** argv) {
  return tests::run_fuzz(
      {argv + 1, argv + argc}, {.unit = "steps", .default_units = kDefaultSteps, .rarest = 50},
      FuzzCounts({"groups", "groups of four or more", "groups with a chunk", "sequences in no group"}), run);
}
