// Decodes that share a prefix: reading it once, beside reading it for each of them.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <ostream>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/app/progress.h"
#include "common/app/table.h"
#include "common/base/check.h"
#include "common/base/text.h"
#include "common/paged/shared_attention.h"
#include "tests/bench/bench_parts.h"

namespace stage7 {
namespace {

struct SharedCell {
  HeadShape heads;
  int num_sequences;
  int shared;     // tokens
  int own;        // tokens of each sequence, behind these
  int chunk = 0;  // new tokens of one more sequence, which shares nothing
  int past = 0;   // the tokens before them
};

std::vector<SharedCell> cells() {
  const HeadShape grouped{.num_heads = 32, .num_kv_heads = 8};
  const HeadShape small{.num_heads = 32, .num_kv_heads = 8, .head_dim = 64};
  const HeadShape ungrouped{.num_heads = 16, .num_kv_heads = 16};
  const HeadShape one_head{.num_heads = 8, .num_kv_heads = 1};  // a large model's part on one of several GPUs
  return {
      {grouped, 4, 256, 16},      {grouped, 4, 2048, 128},    {grouped, 3, 32768, 128},    {grouped, 4, 8192, 512},
      {grouped, 4, 16384, 128},   {grouped, 8, 256, 128},     {grouped, 8, 1000, 16},      {grouped, 8, 2048, 512},
      {grouped, 8, 8192, 128},    {grouped, 16, 1000, 16},    {grouped, 16, 2048, 128},    {grouped, 16, 8192, 128},
      {grouped, 32, 1000, 128},   {grouped, 64, 256, 16},     {grouped, 64, 256, 512},     {grouped, 64, 1000, 128},
      {grouped, 64, 2048, 128},   {grouped, 64, 8192, 128},   {grouped, 128, 256, 128},    {grouped, 128, 1000, 512},
      {grouped, 128, 2048, 128},  {grouped, 128, 8192, 16},   {small, 4, 1000, 128},       {small, 8, 2048, 128},
      {small, 16, 256, 16},       {small, 16, 8192, 512},     {small, 32, 1000, 128},      {small, 64, 1000, 128},
      {small, 128, 2048, 128},    {ungrouped, 4, 2048, 16},   {ungrouped, 8, 256, 512},    {ungrouped, 8, 2048, 128},
      {ungrouped, 16, 2048, 128}, {ungrouped, 64, 1000, 128}, {ungrouped, 128, 2048, 128}, {one_head, 8, 4000, 128}};
}

std::vector<SharedCell> float8_cells() {
  const HeadShape grouped{.num_heads = 32, .num_kv_heads = 8, .type = ScalarType::kFloat8};
  const HeadShape small{.num_heads = 32, .num_kv_heads = 8, .head_dim = 64, .type = ScalarType::kFloat8};
  const HeadShape ungrouped{.num_heads = 16, .num_kv_heads = 16, .type = ScalarType::kFloat8};
  return {
      {grouped, 4, 256, 16},     {grouped, 4, 2048, 128},    {grouped, 4, 8192, 512},    {grouped, 4, 16384, 128},
      {grouped, 8, 256, 128},    {grouped, 8, 2048, 512},    {grouped, 8, 8192, 128},    {grouped, 16, 1000, 16},
      {grouped, 16, 2048, 128},  {grouped, 16, 8192, 128},   {grouped, 32, 1000, 128},   {grouped, 64, 256, 16},
      {grouped, 64, 1000, 128},  {grouped, 64, 2048, 128},   {grouped, 64, 8192, 128},   {grouped, 128, 256, 128},
      {grouped, 128, 1000, 512}, {grouped, 128, 2048, 128},  {grouped, 128, 8192, 16},   {small, 8, 2048, 128},
      {small, 16, 8192, 512},    {small, 32, 1000, 128},     {small, 64, 1000, 128},     {small, 128, 2048, 128},
      {ungrouped, 8, 2048, 128}, {ungrouped, 16, 2048, 128}, {ungrouped, 64, 1000, 128}, {ungrouped, 128, 2048, 128}};
}

std::vector<SharedCell> mixed_cells() {
  const HeadShape grouped{.num_heads = 32, .num_kv_heads = 8};
  const HeadShape float8{.num_heads = 32, .num_kv_heads = 8, .type = ScalarType::kFloat8};
  std::vector<SharedCell> result;
  for (const HeadShape& heads : {grouped, float8}) {
    for (const auto& [chunk, past] : {std::pair(16, 2000), {128, 2000}, {512, 2000}, {2000, 0}}) {
      for (const auto& [num_sequences, shared, own] : {std::tuple(16, 2048, 128), {64, 1000, 128}, {64, 2048, 128}}) {
        result.push_back({heads, num_sequences, shared, own, chunk, past});
      }
    }
  }
  return result;
}

int blocks_of(int num_tokens, int block_size) { return (num_tokens + block_size - 1) / block_size; }

struct SharedTiming {
  double apart;     // microseconds, here and below
  double together;  // whether or not the step would be computed so
  double own;       // of the own tokens alone
  double plan;      // on the host: the search for prefixes, and the plan
  bool is_chosen;   // whether a step is computed together
  double bytes;     // of K and V, the prefix once
};

class SharedCase {
 public:
  explicit SharedCase(const SharedCell& cell)
      : cell_(cell),
        // A prefix ends with a block; what is left of it is in the sequences' own blocks.
        prefix_blocks_(cell.shared / cell.heads.block_size),
        lengths_(static_cast<std::size_t>(cell.num_sequences), cell.shared + cell.own),
        own_lengths_(lengths_.size(), cell.shared + cell.own - prefix_blocks_ * cell.heads.block_size) {
    const int block_size = cell.heads.block_size;
    const int blocks = blocks_of(lengths_.front(), block_size);
    const int own_blocks = blocks - prefix_blocks_;
    const int blocks_of_decodes = prefix_blocks_ + cell.num_sequences * own_blocks;
    num_blocks_ = blocks_of_decodes + blocks_of(cell.past + cell.chunk, block_size);
    const std::vector<int> order = shuffled(num_blocks_);
    for (int s = 0; s < cell.num_sequences; ++s) {
      starts_.push_back(static_cast<int>(tables_.size()));
      queries_.push_back(s);
      own_starts_.push_back(starts_.back() + prefix_blocks_);
      tables_.insert(tables_.end(), order.begin(), order.begin() + prefix_blocks_);
      const auto own = order.begin() + prefix_blocks_ + s * own_blocks;
      tables_.insert(tables_.end(), own, own + own_blocks);
    }
    queries_.push_back(cell.num_sequences);
    if (cell.chunk > 0) {
      for (std::vector<int>* starts : {&starts_, &own_starts_}) {
        starts->push_back(static_cast<int>(tables_.size()));
      }
      for (std::vector<int>* lengths : {&lengths_, &own_lengths_}) {
        lengths->push_back(cell.past + cell.chunk);
      }
      tables_.insert(tables_.end(), order.begin() + blocks_of_decodes, order.end());
      queries_.push_back(cell.num_sequences + cell.chunk);
    }
  }

  SharedTiming time(const common::Stream& stream, const Pool& pool) const {
    const HeadShape& heads = cell_.heads;
    const PageShape shape{.num_blocks = num_blocks_,
                          .num_kv_heads = heads.num_kv_heads,
                          .block_size = heads.block_size,
                          .head_dim = heads.head_dim,
                          .type = heads.type};
    SharedTiming timing{};
    timing.bytes = static_cast<double>(num_blocks_ * shape.bytes_per_block());
    const int num_sets = std::clamp(static_cast<int>(600e6 / timing.bytes) + 1, 2, 400);
    COMMON_CHECK(static_cast<std::size_t>(num_sets) * shape.keys_bytes() <= pool.keys.bytes(), "the pool is too small");
    const std::size_t num_numbers =
        static_cast<std::size_t>(queries_.back()) * static_cast<std::size_t>(heads.num_heads * heads.head_dim);
    const common::DeviceArray<std::uint16_t> queries(random_bf16(num_numbers));
    const common::DeviceArray<std::uint16_t> output(num_numbers);
    const common::DeviceArray<int> lengths(lengths_);
    const common::DeviceArray<int> tables(tables_);
    const common::DeviceArray<int> starts(starts_);
    const common::DeviceArray<int> query_starts(queries_);
    const common::DeviceArray<int> own_lengths(own_lengths_);
    const common::DeviceArray<int> own_starts(own_starts_);
    const auto num_sequences = static_cast<int>(lengths_.size());
    const StepArrays step{.batch = {.num_sequences = num_sequences,
                                    .num_heads = heads.num_heads,
                                    .context_lengths = lengths.data(),
                                    .block_tables = tables.data(),
                                    .table_starts = starts.data(),
                                    .max_blocks_per_sequence = blocks_of(
                                        *std::max_element(lengths_.begin(), lengths_.end()), heads.block_size)},
                          .num_decodes = cell_.num_sequences,
                          .num_tokens = queries_.back(),
                          .query_starts = query_starts.data()};
    StepArrays own = step;
    own.batch.context_lengths = own_lengths.data();
    own.batch.table_starts = own_starts.data();

    const common::SharedShape shared = common::shared_shape(shape, step.batch);
    const common::StepTables host{.context_lengths = lengths_,
                                  .query_starts = queries_,
                                  .block_tables = tables_,
                                  .table_starts = starts_,
                                  .block_size = heads.block_size};
    std::vector<common::SharedPrefix> all(1);
    all.front().num_blocks = prefix_blocks_;
    all.front().sequences.assign(queries_.begin(), queries_.begin() + cell_.num_sequences);
    common::StepTables decodes = host;
    decodes.context_lengths = host.context_lengths.first(static_cast<std::size_t>(cell_.num_sequences));
    std::vector<common::RaggedTask> plan(
        common::shared_arrays(nullptr, num_sequences, shared).bytes / sizeof(common::RaggedTask) + 1);
    const common::SharedArrays arrays = common::shared_arrays(plan.data(), num_sequences, shared);
    const auto begin = std::chrono::steady_clock::now();
    constexpr int kPlans = 20;
    for (int i = 0; i < kPlans; ++i) {
      const common::ReadingCosts costs =
          common::beside_chunk(common::shared_reading_costs(shape, heads.num_heads), cell_.chunk);
      timing.is_chosen = !common::find_shared_prefixes(decodes, costs).empty();
      common::write_plan(common::plan_shared_reading(host, all, shared), arrays, num_sequences, shared);
    }
    timing.plan = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / kPlans;
    const common::DeviceArray<common::RaggedTask> device_plan(plan);

    common::SharingKernels kernels;
    const common::DeviceMemory workspace(kernels.workspace_bytes(shape, step));
    const std::span<std::byte> room(static_cast<std::byte*>(workspace.data()), workspace.bytes());
    const auto microseconds = [&](const StepArrays& arrays_of_step, const void* read_together) {
      kernels.read_together(read_together);
      kernels.plan(shape, arrays_of_step, room, stream.get());
      stream.synchronize();
      return common::microseconds_per_call(stream, num_sets, [&](int set) {
        const auto offset = static_cast<std::size_t>(set) * shape.keys_bytes();
        const Pages pages{static_cast<std::byte*>(pool.keys.data()) + offset,
                          static_cast<std::byte*>(pool.values.data()) + offset, shape};
        kernels.attend(pages, arrays_of_step, {.queries = queries.data()}, output.data(), room, stream.get());
      });
    };
    timing.apart = microseconds(step, nullptr);
    timing.together = microseconds(step, device_plan.data());
    timing.own = microseconds(own, nullptr);
    return timing;
  }

 private:
  SharedCell cell_;
  int prefix_blocks_;
  int num_blocks_ = 0;
  std::vector<int> lengths_;
  std::vector<int> own_lengths_;
  std::vector<int> tables_;
  std::vector<int> starts_;
  std::vector<int> own_starts_;
  std::vector<int> queries_;  // where each sequence's rows of queries begin
};

void print_cells(const common::Stream& stream, const Pool& pool, double ceiling, const std::vector<SharedCell>& all,
                 const std::string& what, std::ostream& output) {
  common::Table table({"heads", "sequences", "shared", "own", "chunk", "apart us", "together us", "ratio", "own alone",
                       "bytes' floor", "read", "plan us"});
  common::Progress progress("measuring shared prefixes", static_cast<std::int64_t>(all.size()));
  for (const SharedCell& cell : all) {
    const SharedTiming timing = SharedCase(cell).time(stream, pool);
    const std::string chunk = cell.chunk == 0 ? "" : common::format("%d after %d", cell.chunk, cell.past);
    table.add_row({name_of(cell.heads), std::to_string(cell.num_sequences), std::to_string(cell.shared),
                   std::to_string(cell.own), chunk, common::format_microseconds(timing.apart),
                   common::format_microseconds(timing.together), common::format("%.2f", timing.apart / timing.together),
                   common::format_microseconds(timing.own), common::format_microseconds(timing.bytes / ceiling / 1e3),
                   timing.is_chosen ? "together" : "apart", common::format("%.1f", timing.plan)});
    progress.advance();
  }
  progress.clear();
  output << what << "\n" << table.to_string() << "\n" << std::flush;
}

}  // namespace

void print_shared_speed(std::ostream& output) {
  const common::Stream stream;
  const Pool pool(std::int64_t{2} << 30);
  const double ceiling = print_machine(stream, pool, output);
  output << "Attention of steps whose decodes share a prefix, random blocks. Floor: every page is read once, at the "
            "read ceiling.\n\n";
  print_cells(stream, pool, ceiling, cells(), "Decodes alone, bfloat16.", output);
  print_cells(stream, pool, ceiling, float8_cells(), "Decodes alone, float8.", output);
  print_cells(stream, pool, ceiling, mixed_cells(), "Decodes beside a chunk, bfloat16 and then float8.", output);
}

}  // namespace
