// Random batches on the device with their float64 answers, and what all attention kernels accept and refuse.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "common/paged/shared_reading.h"
#include "tests/gpu/gpu_paged_batch.h"
#include "tests/gpu/gpu_values.h"
#include "tests/support/compare.h"
#include "tests/support/reference_attention.h"

namespace tests {

// What a comparison returns if all is well; a failing check then shows the difference instead.
inline const std::string kNoDifference;

// What the attention kernels of production/ are tested on: every type with every head_dim and block size.
struct KernelShape {
  ScalarType type;
  int head_dim;
  int block_size;
};

inline std::vector<KernelShape> kernel_shapes(const std::vector<int>& block_sizes = {8, 16, 32, 64}) {
  std::vector<KernelShape> shapes;
  for (const int block_size : some_of({16}, block_sizes)) {
    for (const int head_dim : {32, 64, 96, 128, 256}) {
      shapes.push_back({ScalarType::kBFloat16, head_dim, block_size});
      if (block_size >= 16) {
        shapes.push_back({ScalarType::kFloat8, head_dim, block_size});
      }
    }
  }
  return shapes;
}

// Pages and a batch that were right, with one thing wrong, which every kernel has to refuse before it launches
// anything. of_pages: it is about the pages' memory, which a plan does not get to see. is_plain: but the plain kernels
// serve it.
struct BadBatch {
  const char* what;
  bool of_pages;
  bool is_plain;
  void (*spoil)(common::Pages& pages, common::BatchArrays& batch);
};

// For bfloat16 pages of 2 kv heads.
inline std::vector<BadBatch> bad_batches() {
  using common::BatchArrays;
  using common::Pages;
  return {{"block size between two", false, true, [](Pages& pages, BatchArrays&) { pages.shape.block_size = 12; }},
          {"small block size", false, true, [](Pages& pages, BatchArrays&) { pages.shape.block_size = 4; }},
          {"large block size", false, true, [](Pages& pages, BatchArrays&) { pages.shape.block_size = 128; }},
          {"head_dim between two", false, true, [](Pages& pages, BatchArrays&) { pages.shape.head_dim = 80; }},
          {"small head_dim", false, true, [](Pages& pages, BatchArrays&) { pages.shape.head_dim = 16; }},
          {"no blocks", false, false, [](Pages& pages, BatchArrays&) { pages.shape.num_blocks = 0; }},
          {"uneven groups", false, false, [](Pages&, BatchArrays& batch) { batch.num_heads = 7; }},
          {"group of 17", false, true, [](Pages&, BatchArrays& batch) { batch.num_heads = 34; }},
          {"number of sequences", false, false, [](Pages&, BatchArrays& batch) { batch.num_sequences = -1; }},
          {"no lengths", false, false, [](Pages&, BatchArrays& batch) { batch.context_lengths = nullptr; }},
          {"no tables", false, false, [](Pages&, BatchArrays& batch) { batch.block_tables = nullptr; }},
          {"no table starts", false, false, [](Pages&, BatchArrays& batch) { batch.table_starts = nullptr; }},
          {"empty tables", false, false, [](Pages&, BatchArrays& batch) { batch.max_blocks_per_sequence = 0; }},
          {"negative window", false, false, [](Pages&, BatchArrays& batch) { batch.window = -1; }},
          {"window beyond all contexts", false, false,
           [](Pages&, BatchArrays& batch) { batch.window = std::numeric_limits<int>::max(); }},
          {"no keys", true, false, [](Pages& pages, BatchArrays&) { pages.keys = nullptr; }},
          {"keys off by two bytes", true, false, [](Pages& pages, BatchArrays&) { pages.keys = off_by_2(pages.keys); }},
          {"no values", true, false, [](Pages& pages, BatchArrays&) { pages.values = nullptr; }},
          {"values off by two bytes", true, false,
           [](Pages& pages, BatchArrays&) { pages.values = off_by_2(pages.values); }}};
}

struct BatchSpec {
  ScalarType type = ScalarType::kBFloat16;
  int num_kv_heads = 2;
  int group = 4;
  int head_dim = 128;
  int block_size = 16;
  int window = 0;
  std::vector<int> context_lengths;
  std::vector<int> query_lengths;  // empty: one query for each sequence (decode)
  int first_block = 0;             // lower blocks are never used: for pools beyond 2^31 elements
  bool in_order = false;           // blocks in physical order, one sequence after the other
  unsigned seed = 1;
  std::vector<float> value_sizes = {1.0F};  // what V is multiplied by, token by token, over and over
  std::vector<float> score_shifts = {};     // what is added to each score, in units of log2(e): token by token, alike
  std::vector<common::SharedPrefix> shared =
      {};  // of each, the first sequence's blocks are the others' first blocks too
};

// A batch with K and V written into shuffled pages. What lies in front of the window of a sequence's first query is not
// there: its slots hold NaN, and its whole blocks are not in the table.
class GpuBatch : public PagedBatch {
 public:
  explicit GpuBatch(BatchSpec spec);

  // Empty if `result` is what the reference gives, with inactive rows not written; else what is wrong.
  std::string check(const std::vector<float>& result);

 private:
  std::size_t kv_columns() const {
    return static_cast<std::size_t>(spec_.num_kv_heads) * static_cast<std::size_t>(spec_.head_dim);
  }

  // How many of the sequence's tokens no query sees.
  int num_hidden(std::size_t sequence) const {
    const int seen_by_first = spec_.context_lengths[sequence] - std::max(1, spec_.query_lengths[sequence]) + 1;
    return spec_.window > 0 ? std::max(0, seen_by_first - spec_.window) : 0;
  }

  // The sequence whose first blocks are also this one's, and how many they are.
  struct SharedBlocks {
    std::size_t source = 0;
    int count = 0;
  };
  SharedBlocks shared_blocks(std::size_t sequence) const {
    for (const auto& [sequences, num_blocks] : spec_.shared) {
      if (std::find(sequences.begin() + 1, sequences.end(), static_cast<int>(sequence)) != sequences.end()) {
        return {static_cast<std::size_t>(sequences.front()), num_blocks};
      }
    }
    return {};
  }

  BatchSpec spec_;
  std::vector<int> starts_;
  std::vector<float> host_queries_;
  std::vector<std::vector<float>> host_keys_;  // by sequence: [length, num_kv_heads * head_dim]
  std::vector<std::vector<float>> host_values_;
  std::vector<std::vector<double>> expected_;  // by sequence, once it has been asked for
};

inline GpuBatch::GpuBatch(BatchSpec spec) : spec_(std::move(spec)) {
  if (spec_.query_lengths.empty()) {
    for (const int length : spec_.context_lengths) {
      spec_.query_lengths.push_back(length == 0 ? 0 : 1);
    }
  }
  // Scores are shifted by dimension 0 alone: it is the same number in every query, and in a key it is the shift.
  constexpr float kShiftQuery = 16.0F;
  const float shift_of_one = kShiftQuery * 1.4427F / std::sqrt(static_cast<float>(spec_.head_dim));
  common::Random random(spec_.seed);
  const auto num_sequences = static_cast<int>(spec_.context_lengths.size());
  const bool decode = std::all_of(spec_.query_lengths.begin(), spec_.query_lengths.end(), [](int n) { return n < 2; });
  int num_blocks = 0;
  int max_blocks = 1;
  starts_ = {0};
  expected_.resize(spec_.context_lengths.size());
  for (std::size_t s = 0; s < spec_.context_lengths.size(); ++s) {
    const int blocks = (spec_.context_lengths[s] + spec_.block_size - 1) / spec_.block_size;
    num_blocks += blocks;
    max_blocks = std::max(max_blocks, blocks);
    // A decode batch has a row for each sequence, active or not.
    starts_.push_back(starts_.back() + (decode ? 1 : spec_.query_lengths[s]));
  }
  // The last sequence's table comes first. The entry after the end of a table points outside the pool: no kernel may
  // follow it. Nor the entries of blocks that are hidden.
  constexpr int kOutside = 1 << 30;
  std::vector<int> tables(static_cast<std::size_t>(num_blocks + num_sequences), kOutside);
  std::vector<int> table_starts(spec_.context_lengths.size());
  int table_end = static_cast<int>(tables.size());
  const std::vector<int> order = shuffled(num_blocks + 3, random);
  std::size_t next = 0;
  std::vector<int> slots;
  std::vector<float> all_keys;
  std::vector<float> all_values;
  std::vector<std::ptrdiff_t> begins;  // of each sequence, in these two
  for (std::size_t s = 0; s < spec_.context_lengths.size(); ++s) {
    const int length = spec_.context_lengths[s];
    table_end -= (length + spec_.block_size - 1) / spec_.block_size + 1;
    table_starts[s] = table_end;
    int* table = &tables[static_cast<std::size_t>(table_end)];
    begins.push_back(static_cast<std::ptrdiff_t>(all_keys.size()));
    const auto [source, num_shared] = shared_blocks(s);
    for (int i = 0; i * spec_.block_size < length; ++i) {
      if (i < num_shared) {
        table[i] = tables[static_cast<std::size_t>(table_starts[source] + i)];
        continue;
      }
      table[i] = spec_.first_block + (spec_.in_order ? static_cast<int>(next) : order[next]);
      ++next;
    }
    const int hidden = num_hidden(s);
    std::fill_n(table, hidden / spec_.block_size, kOutside);
    for (int position = 0; position < length; ++position) {
      slots.push_back(
          position < hidden ? -1 : table[position / spec_.block_size] * spec_.block_size + position % spec_.block_size);
    }
    const std::size_t size = static_cast<std::size_t>(length) * kv_columns();
    std::vector<float> keys = random_values(size, random);
    std::vector<float> values = random_values(size, random);
    for (std::size_t i = 0; i < size; ++i) {
      values[i] *= spec_.value_sizes[i / kv_columns() % spec_.value_sizes.size()];
    }
    for (std::size_t i = 0; !spec_.score_shifts.empty() && i < size; i += static_cast<std::size_t>(spec_.head_dim)) {
      keys[i] = spec_.score_shifts[i / kv_columns() % spec_.score_shifts.size()] / shift_of_one;
    }
    // The first and the last token that are seen count as much as all others together, so that a result without them
    // stands out.
    const std::size_t first = static_cast<std::size_t>(hidden) * kv_columns();
    for (std::size_t i = 0; i < std::min(size, kv_columns()); ++i) {
      values[first + i] *= std::sqrt(static_cast<float>(length - hidden));
      values[size - 1 - i] *= std::sqrt(static_cast<float>(length - hidden));
    }
    const std::size_t shared_size = static_cast<std::size_t>(num_shared * spec_.block_size) * kv_columns();
    std::copy_n(all_keys.begin() + begins[source], shared_size, keys.begin());
    std::copy_n(all_values.begin() + begins[source], shared_size, values.begin());
    host_keys_.push_back(stored(keys, spec_.type, spec_.head_dim));
    host_values_.push_back(stored(values, spec_.type, spec_.head_dim));
    all_keys.insert(all_keys.end(), keys.begin(), keys.end());
    all_values.insert(all_values.end(), values.begin(), values.end());
  }
  const int num_heads = spec_.num_kv_heads * spec_.group;
  std::vector<float> query_values = random_values(
      static_cast<std::size_t>(starts_.back()) * static_cast<std::size_t>(num_heads * spec_.head_dim), random);
  for (std::size_t i = 0; !spec_.score_shifts.empty() && i < query_values.size();
       i += static_cast<std::size_t>(spec_.head_dim)) {
    query_values[i] = kShiftQuery;
  }
  host_queries_ = rounded(query_values, common::row_type(spec_.type));
  put({.shape = {.num_blocks = spec_.first_block + num_blocks + 3,
                 .num_kv_heads = spec_.num_kv_heads,
                 .block_size = spec_.block_size,
                 .head_dim = spec_.head_dim,
                 .type = spec_.type},
       .num_heads = num_heads,
       .context_lengths = spec_.context_lengths,
       .block_tables = tables,
       .table_starts = table_starts,
       .max_blocks = max_blocks,
       .window = spec_.window,
       .query_starts = starts_,
       .slots = slots,
       .keys = all_keys,
       .values = all_values,
       .queries = host_queries_});
}

// How far a result may be from the float64 reference: 8 standard deviations (of the millions of numbers that a test
// looks at, some lie 5 or 6 out). n tokens are visible; scores are of size 1, so weights are of size 1 / n; V is of
// size 1, except for two tokens of size sqrt(n), which count as much as all others together. u is the type's unit
// roundoff.
//
// bfloat16: a weight is rounded before it meets V, and n independent errors of relative size u / sqrt(3) add up to
// u / sqrt(n); the output is rounded once more, by u of itself at most. float32's own errors are far below.
//
// float8: the reference has K and V as they are stored, so the same holds. Before weights meet V, they are rounded to
// float16, which is finer, or to bfloat16.
//
// float32: a weight is off by about 4 u: its score is a sum of head_dim products in fewer than 16 roundings, exp2f adds
// 2 units in the last place. That makes 6 u / sqrt(n), as above. Then a warp adds n / 8 products to its sum, one by
// one. The sum holds the heavy token, 1 / sqrt(n), so each addition errs by up to u / sqrt(n), together sqrt(n / 8) * u
// / sqrt(n) / sqrt(3) = 0.2 u; there are two heavy tokens: 0.4 u however long the context is. All of that
// once more, because weights are not all 1 / n: scores of 1 and 2 are common, and a heavy token's counts e and e^2
// times. A result that is larger still is one heavy token with a score of 3 or more, and nearly the whole sum of its
// warp: there the n / 8 additions err by u / sqrt(3) of the result each, together by sqrt(n / 24) u of it. (Seen on an
// H200: 66 u of 0.32 after 7,900 tokens, where one standard deviation is 18 u.)
inline tests::Tolerance tolerance_of(ScalarType type, double num_visible) {
  const double n = std::sqrt(num_visible);
  if (type == ScalarType::kFloat32) {
    return {.absolute = 16.0 * (6.0 / n + 0.4) * 0x1p-24,
            .relative = 8.0 * (2.0 + std::sqrt(num_visible / 24.0)) * 0x1p-24};
  }
  const double u = 0x1p-8;
  return {.absolute = 8.0 * u / n, .relative = 2.0 * u};
}

inline std::string GpuBatch::check(const std::vector<float>& result) {
  const auto columns = static_cast<std::size_t>(batch().num_heads) * static_cast<std::size_t>(spec_.head_dim);
  for (std::size_t s = 0; s < spec_.context_lengths.size(); ++s) {
    const int length = spec_.context_lengths[s];
    const std::span<const float> rows(result.data() + static_cast<std::size_t>(starts_[s]) * columns,
                                      static_cast<std::size_t>(starts_[s + 1] - starts_[s]) * columns);
    if (length == 0) {
      const auto written = std::find_if_not(rows.begin(), rows.end(), is_unwritten);
      if (written != rows.end()) {
        return "sequence " + std::to_string(s) + " has no context, so its output must stay as it was; " +
               std::to_string(*written) + " was written";
      }
      continue;
    }
    const auto view = [&](const float* data, std::size_t num_rows, std::size_t num_columns) {
      return common::MatrixView(data, static_cast<Eigen::Index>(num_rows), static_cast<Eigen::Index>(num_columns));
    };
    const std::size_t num_queries = rows.size() / columns;
    if (num_queries == 0) {
      continue;
    }
    std::vector<double>& expected = expected_[s];
    if (expected.empty()) {
      expected = tests::reference_attention(
          view(host_queries_.data() + static_cast<std::size_t>(starts_[s]) * columns, num_queries, columns),
          view(host_keys_[s].data(), static_cast<std::size_t>(length), kv_columns()),
          view(host_values_[s].data(), static_cast<std::size_t>(length), kv_columns()), batch().num_heads,
          spec_.num_kv_heads, spec_.head_dim, spec_.window);
    }
    for (std::size_t q = 0; q < num_queries; ++q) {
      const std::string place = "sequence " + std::to_string(s) + " (" + std::to_string(length) + " tokens), query " +
                                std::to_string(q) + ": ";
      const std::span<const float> row = rows.subspan(q * columns, columns);
      if (const auto missing = std::count_if(row.begin(), row.end(), is_unwritten); missing > 0) {
        return place + std::to_string(missing) + " of " + std::to_string(columns) + " outputs were not written";
      }
      const int seen = length - static_cast<int>(num_queries - q) + 1;
      const auto visible = static_cast<double>(seen - batch().num_hidden(seen));
      tests::Tolerance tolerance = tolerance_of(spec_.type, visible);
      tolerance.absolute *= *std::max_element(spec_.value_sizes.begin(), spec_.value_sizes.end());
      tolerance.absolute *=
          std::sqrt((length - num_hidden(s)) / visible);  // heavy for all tokens that are seen, not for `visible`
      const std::string difference = tests::compare(row, std::span(expected).subspan(q * columns, columns), tolerance);
      if (!difference.empty()) {
        return place + difference;
      }
    }
  }
  return {};
}

}  // namespace tests
