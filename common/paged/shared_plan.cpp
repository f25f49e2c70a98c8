#include "common/paged/shared_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "common/base/check.h"
#include "common/cuda/runtime/device.h"
#include "common/paged/page_layout.h"
#include "common/paged/ragged_tile.h"

namespace common {
namespace {

int divide_up(int number, int by) { return (number + by - 1) / by; }

int units_of(int num_tokens) { return divide_up(num_tokens, kPartTokens); }

// One prefix, as tasks are made of it.
struct Group {
  const SharedPrefix* prefix;
  int num_tokens;
  int num_tasks;  // without parts

  std::int64_t saved() const {
    return std::int64_t{num_tokens} * (static_cast<std::int64_t>(prefix->sequences.size()) - 1);
  }
};

// Into how many tokens, in units of kPartTokens, prefixes are cut: the fewest parts with which the launch ends first. A
// part's cost beside its tokens is that of ragged attention's plan.
int choose_part_units(std::span<const Group> groups, const SharedShape& shape) {
  constexpr int kPartCost = 2;
  constexpr int kMostParts = 16;
  int longest = 1;
  for (const Group& group : groups) {
    longest = std::max(longest, units_of(group.num_tokens));
  }
  int best = longest;
  std::int64_t best_cost = std::numeric_limits<std::int64_t>::max();
  for (int parts = 1; parts <= std::min(longest, kMostParts); ++parts) {
    const int units = divide_up(longest, parts);
    std::int64_t num_tasks = 0;
    for (const Group& group : groups) {
      num_tasks += std::int64_t{group.num_tasks} * divide_up(units_of(group.num_tokens), units);
    }
    const std::int64_t rounds = (num_tasks * shape.num_kv_heads + shape.num_workers - 1) / shape.num_workers;
    const std::int64_t cost = rounds * (units + kPartCost);
    if ((parts == 1 || num_tasks <= shape.max_tasks) && cost < best_cost) {
      best_cost = cost;
      best = units;
    }
  }
  return best;
}

}  // namespace

std::string shared_reading_obstacle(const PageShape& shape) {
  if (shape.type == ScalarType::kFloat32) {
    return "prefixes are read together from bfloat16 and float8 pages only";
  }
  if (shape.head_dim > kMaxSharingHeadDim) {
    return "prefixes are read together for heads of up to " + std::to_string(kMaxSharingHeadDim) + " dimensions only";
  }
  return {};
}

SharedShape shared_shape(const PageShape& shape, const BatchArrays& batch) {
  SharedShape own{};
  const int num_multiprocessors = device_limits().num_multiprocessors;
  const RaggedTile tile = ragged_tile(shape.head_dim, true);
  const bool has_own_rows = has_warpgroups(shape);
  own.kernel = has_own_rows ? RaggedKernel::kWarpgroups : RaggedKernel::kShort;
  own.task_rows = has_own_rows ? kWarpgroupsTaskRows : tile.rows();
  own.group = batch.num_heads / shape.num_kv_heads;
  own.num_kv_heads = shape.num_kv_heads;
  own.num_workers = num_multiprocessors * (has_own_rows ? 1 : tile.resident);
  // Enough for all sequences in one group, and for some rounds of parts.
  constexpr int kRounds = 2;
  own.max_tasks = divide_up(batch.num_sequences, own.task_rows / own.group) +
                  divide_up(kRounds * own.num_workers, shape.num_kv_heads);
  return own;
}

ReadingCosts shared_reading_costs(const PageShape& shape, int num_heads) {
  ReadingCosts costs =
      reading_costs(num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, bytes_of(shape.type));
  // In float8 a block has half of the bytes, but reading it once more takes nearly as long: there, decode attention is
  // as busy with unpacking. Measured (KERNELS.md): what is counted is that of bfloat16, and of a block, 7 / 8.
  PageShape as_bfloat16 = shape;
  as_bfloat16.type = ScalarType::kBFloat16;
  costs.block = as_bfloat16.bytes_per_block() * (shape.type == ScalarType::kFloat8 ? 7 : 8) / 8;
  // The unit is a byte that decode attention reads from L2: of all sequences that read a prefix, each by itself, only
  // the first has to fetch it from memory, which is half as fast. So what is read for a group counts twice.
  costs.group_block = as_bfloat16.bytes_per_block();
  // Measured (KERNELS.md): rows of queries and of results, and a launch more, with a wait for its results, as long as
  // reading so many tiles.
  constexpr std::int64_t kTilesOfGroup = 12'000;
  costs.query *= 3;
  costs.group = kTilesOfGroup * pair_layout(as_bfloat16.type, shape.head_dim).bytes;
  return costs;
}

ReadingCosts beside_chunk(ReadingCosts costs, int num_chunk_tokens) {
  // Measured: the launch more waits for the chunk's tasks, or these for it.
  constexpr int kLargeChunk = 1024;
  costs.group *= num_chunk_tokens >= kLargeChunk ? 2 : 1;
  return costs;
}

SharedPlan plan_shared_reading(const StepTables& step, std::span<const SharedPrefix> prefixes,
                               const SharedShape& shape) {
  const std::size_t num_sequences = step.context_lengths.size();
  const int sequences_of_task = shape.task_rows / shape.group;
  std::vector<Group> groups;
  for (const SharedPrefix& prefix : prefixes) {
    const int num_tokens = prefix.num_blocks * step.block_size / kPrefixStep * kPrefixStep;
    if (num_tokens > 0) {
      groups.push_back({&prefix, num_tokens, divide_up(static_cast<int>(prefix.sequences.size()), sequences_of_task)});
    }
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [](const Group& left, const Group& right) { return left.saved() > right.saved(); });
  int num_tasks = 0;
  std::erase_if(groups, [&](const Group& group) {
    const bool has_room = num_tasks + group.num_tasks <= shape.max_tasks;
    num_tasks += has_room ? group.num_tasks : 0;
    return !has_room;
  });

  SharedPlan plan;
  plan.rows.resize(num_sequences);
  plan.own_lengths.assign(step.context_lengths.begin(), step.context_lengths.end());
  plan.own_starts.assign(step.table_starts.begin(),
                         step.table_starts.begin() + static_cast<std::ptrdiff_t>(num_sequences));
  const int part_units = choose_part_units(groups, shape);
  int next_place = 0;
  for (const Group& group : groups) {
    const std::vector<int>& sequences = group.prefix->sequences;
    plan.prefixes.push_back({sequences, group.num_tokens / step.block_size});
    const std::int64_t units = units_of(group.num_tokens);
    const int num_parts = divide_up(static_cast<int>(units), part_units);
    const auto first_query = static_cast<int>(plan.order.size());
    const int num_rows = static_cast<int>(sequences.size()) * shape.group;
    for (int part = 0; part < num_parts; ++part) {
      const auto first_token = static_cast<int>(units * part / num_parts) * kPartTokens;
      const auto end_token = static_cast<int>(units * (part + 1) / num_parts) * kPartTokens;
      for (int task = 0; task < group.num_tasks; ++task) {
        const int first_row = task * sequences_of_task * shape.group;
        plan.tasks.push_back({.sequence = sequences.front(),
                              .first_row = first_row,
                              .end_row = std::min(first_row + sequences_of_task * shape.group, num_rows),
                              .first_query = first_query,
                              .seen_by_first = group.num_tokens,
                              .first_token = first_token,
                              .end_token = std::min(end_token, group.num_tokens),
                              .part = part,
                              .num_parts = num_parts,
                              .first_place = next_place + task * num_parts,
                              .is_prefix = 1,
                              .num_hidden = 0});
      }
    }
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const auto s = static_cast<std::size_t>(sequences[i]);
      const int task = static_cast<int>(i) / sequences_of_task;
      COMMON_CHECK(step.query_starts[s] == sequences[i] && step.query_starts[s + 1] == sequences[i] + 1,
                   "only decodes have a prefix, and row s is sequence s's");
      COMMON_CHECK(plan.rows[s].num_parts == 0, "a sequence has one prefix");
      COMMON_CHECK(group.num_tokens < step.context_lengths[s], "a sequence has tokens behind the prefix");
      plan.rows[s] = {.first_place = next_place + task * num_parts,
                      .num_parts = num_parts,
                      .row = static_cast<int>(i) % sequences_of_task * shape.group};
      plan.own_lengths[s] -= group.num_tokens;
      plan.own_starts[s] += group.num_tokens / step.block_size;
    }
    next_place += group.num_tasks * num_parts;
    plan.order.insert(plan.order.end(), sequences.begin(), sequences.end());
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [](const RaggedTask& left, const RaggedTask& right) {
    return left.end_token - left.first_token > right.end_token - right.first_token;
  });
  return plan;
}

SharedArrays shared_arrays(void* memory, int num_sequences, const SharedShape& shape) {
  SharedArrays arrays{};
  const auto take = [&](int count, std::size_t size) {
    auto* begin = static_cast<std::byte*>(memory) + (memory == nullptr ? 0 : arrays.bytes);
    arrays.bytes += (static_cast<std::size_t>(count) * size + 255) / 256 * 256;
    return static_cast<void*>(begin);
  };
  arrays.queue = static_cast<RaggedQueue*>(take(1, sizeof(RaggedQueue)));
  arrays.tasks = static_cast<RaggedTask*>(take(shape.max_tasks, sizeof(RaggedTask)));
  arrays.rows = static_cast<PrefixRows*>(take(num_sequences, sizeof(PrefixRows)));
  arrays.order = static_cast<int*>(take(num_sequences, sizeof(int)));
  arrays.own_lengths = static_cast<int*>(take(num_sequences, sizeof(int)));
  arrays.own_starts = static_cast<int*>(take(num_sequences, sizeof(int)));
  return arrays;
}

void write_plan(const SharedPlan& plan, const SharedArrays& to, int num_sequences, const SharedShape& shape) {
  COMMON_CHECK(
      static_cast<int>(plan.tasks.size()) <= shape.max_tasks && static_cast<int>(plan.rows.size()) <= num_sequences,
      "the plan has the step's counts at most");
  std::memset(static_cast<void*>(to.queue), 0, to.bytes);
  to.queue->num_tasks = static_cast<int>(plan.tasks.size());
  std::copy(plan.tasks.begin(), plan.tasks.end(), to.tasks);
  RaggedTask none{};
  none.sequence = -1;
  std::fill(to.tasks + plan.tasks.size(), to.tasks + shape.max_tasks, none);
  std::copy(plan.rows.begin(), plan.rows.end(), to.rows);
  std::copy(plan.order.begin(), plan.order.end(), to.order);
  std::copy(plan.own_lengths.begin(), plan.own_lengths.end(), to.own_lengths);
  std::copy(plan.own_starts.begin(), plan.own_starts.end(), to.own_starts);
}

}  // namespace common
