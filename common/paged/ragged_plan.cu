// Lists the tasks of ragged attention, once for each step, on the device: the lengths never travel to the host.
//
// A task takes time in proportion to the tokens it sees. Thread blocks start in the order of the list, so the longest
// tasks stand first and the short ones fill the gaps at the end, when no full wave is left. Among tasks that take about
// as long, tasks of one sequence stand together: they read the same K and V, which then come from memory once, not once
// for each task.
//
// A few new tokens after a long context are few tasks, each of them long: 16 tokens with a group of 4 are one task for
// each kv head, and most multiprocessors would have nothing to do. So contexts are cut into parts, each a task of its
// own, whose results a launch of its own joins (ragged_merge.cu). A part costs something too, so there are only as many
// parts as pay: the plan estimates how long the launch takes for 32 lengths of a part, and takes the best.
//
// With a window, a task begins with the tile in which its first row's window begins. What is in front of it is not
// read.
#include <algorithm>
#include <climits>

#include "common/cuda/runtime/launch.h"
#include "common/paged/checks.h"
#include "common/paged/ragged_plan.h"
#include "common/paged/supported_shapes.h"

namespace common {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// The estimate's unit is the time that a task takes for kPartTokens tokens.
constexpr int kTaskCost = 1;   // of a task, whatever its length: nothing is computed before its first tile is there
constexpr int kPartCost = 2;   // of a part, likewise; a part stores floats
constexpr int kMergeCost = 2;  // of a launch

// The tokens of a whole task, from where it may be cut on.
__device__ int length_of(const RaggedTask& task) {
  return task.end_token - task.first_token / kPartTokens * kPartTokens;
}

struct RaggedLengths {
  const int* query_starts;
  BatchArrays batch;
  int group;
  int rows;         // the rows of a task
  int tile_tokens;  // a task begins at a multiple

  __device__ int num_queries(int s) const {
    return batch.context_lengths[s] == 0 ? 0 : query_starts[s + 1] - query_starts[s];
  }
  __device__ int num_tasks(int s) const { return (num_queries(s) * group + rows - 1) / rows; }
  // A task with its whole context.
  __device__ RaggedTask task(int s, int task) const {
    const int num_rows = num_queries(s) * group;
    const int end_row = min((task + 1) * rows, num_rows);
    const int seen_by_first = batch.context_lengths[s] - num_queries(s) + 1;
    const int num_hidden = batch.num_hidden(seen_by_first + task * rows / group);
    return {.sequence = s,
            .first_row = task * rows,
            .end_row = end_row,
            .first_query = query_starts[s],
            .seen_by_first = seen_by_first,
            .first_token = num_hidden - num_hidden % tile_tokens,
            .end_token = seen_by_first + (end_row - 1) / group,
            .num_parts = 1,
            .num_hidden = num_hidden % tile_tokens};
  }
  // The most tokens that length_of() finds for a task of the sequence, or some more.
  __device__ int longest_of(int s) const {
    const int context = batch.context_lengths[s];
    return batch.window > 0 ? min(context, batch.window + (rows + group - 1) / group + kPartTokens - 1) : context;
  }
  // The length that decides a task's place in the list: without a window, the whole context for tasks that see nearly
  // all of it.
  __device__ int listed_length(const RaggedTask& task) const {
    if (batch.window > 0) {
      return length_of(task);
    }
    const int context = batch.context_lengths[task.sequence];
    return task.end_token >= context - context / 8 ? context : task.end_token;
  }
};

__device__ int units_of(int num_tokens) { return (num_tokens + kPartTokens - 1) / kPartTokens; }

__device__ int parts_of(int num_tokens, int part_units) { return (units_of(num_tokens) + part_units - 1) / part_units; }

__device__ RaggedTask part_of(RaggedTask task, int part) {
  const int first_unit = task.first_token / kPartTokens;
  const std::int64_t units = units_of(length_of(task));
  task.part = part;
  if (part > 0) {
    task.first_token = (first_unit + static_cast<int>(units * part / task.num_parts)) * kPartTokens;
    task.num_hidden = 0;
  }
  if (part + 1 < task.num_parts) {
    task.end_token = (first_unit + static_cast<int>(units * (part + 1) / task.num_parts)) * kPartTokens;
  }
  return task;
}

// Tasks by length, the longest in bucket 0. A bucket's lengths differ by 3 % at most, and lengths below 64 have one
// each: exact enough, and one pass of counting suffices.
struct Buckets {
  int longest;

  static __device__ int of(int num_tokens) {
    const int exponent = max(0, 26 - __clz(num_tokens));  // num_tokens >> exponent: below 64
    return kThreads - 1 - (exponent * 32 + (num_tokens >> exponent));
  }
  // What no task of the bucket exceeds, in units.
  __device__ int units(int bucket) const {
    const int index = kThreads - 1 - max(bucket, of(longest));
    const int exponent = max(0, index / 32 - 1);
    return units_of(min(((index - exponent * 32 + 1) << exponent) - 1, longest));
  }
};

// The sum of the numbers of all threads up to this one.
__device__ int sum_up(int number) {
  __shared__ int of_warps[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto sum_up_warp = [&](int x) {
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0U, x, distance);
      x += lane >= distance ? before : 0;
    }
    return x;
  };
  const int of_warp = sum_up_warp(number);
  if (lane == 31) {
    of_warps[warp] = of_warp;
  }
  __syncthreads();
  const int of_all = sum_up_warp(of_warps[lane]);
  const int before = __shfl_sync(~0U, of_all, max(0, warp - 1));
  __syncthreads();
  return of_warp + (warp > 0 ? before : 0);
}

__device__ int sum_of_warp(int x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(~0U, x, distance);
  }
  return x;
}
__device__ int max_of_warp(int x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    x = max(x, __shfl_xor_sync(~0U, x, distance));
  }
  return x;
}

// The step's whole tasks, by length.
struct Histogram {
  const int* lengths;  // [kThreads]: of the bucket's longest task, in units
  const int* tasks;    // [kThreads]: how many are in this bucket and in all before, of longer tasks
  const int* units;    // [kThreads]: their tokens
  int num_kv_heads;
  const RaggedShape& shape;

  // How long the launch takes if no part is longer than part_units: INT_MAX if there is no room for the parts. For a
  // whole warp. Thread blocks take the longest tasks first. So a task starts no later than all longer tasks take when
  // shared out evenly, and no later than its thread block's earlier tasks take if each is as long as the longest.
  __device__ int estimate(int part_units) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int num_parts = 0;
    int num_cut = 0;  // buckets
    for (int b = lane; b < kThreads; b += 32) {
      const int length = lengths[b];
      if (length > part_units) {
        const int count = tasks[b] - (b == 0 ? 0 : tasks[b - 1]);
        num_parts += count * ((length + part_units - 1) / part_units);
        num_cut += 1;
      }
    }
    num_parts = sum_of_warp(num_parts);
    num_cut = sum_of_warp(num_cut);
    if (std::int64_t{num_parts} * num_kv_heads > shape.max_places) {
      return INT_MAX;
    }
    const int tasks_cut = num_cut == 0 ? 0 : tasks[num_cut - 1];
    const int units_cut = num_cut == 0 ? 0 : units[num_cut - 1];
    const int longest = num_parts > 0 ? part_units + kPartCost : lengths[0] + kTaskCost;
    // When the last of a head's `count` longest tasks ends. Together they take `cost`, and the last takes `own`.
    const auto end_of = [&](int count, int cost, int own) {
      const int evenly = static_cast<int>((std::int64_t{cost} * num_kv_heads - own) / shape.num_workers);
      const int in_turn = static_cast<int>((std::int64_t{count} * num_kv_heads - 1) / shape.num_workers) * longest;
      return own + min(evenly, in_turn);
    };
    int end = num_parts > 0 ? end_of(num_parts, units_cut + num_parts * kPartCost, part_units + kPartCost) : 0;
    for (int b = num_cut + lane; b < kThreads; b += 32) {
      if (tasks[b] > (b == 0 ? 0 : tasks[b - 1])) {
        const int whole = tasks[b] - tasks_cut;
        end = max(end, end_of(num_parts + whole, units[b] + num_parts * kPartCost + whole * kTaskCost,
                              lengths[b] + kTaskCost));
      }
    }
    return max_of_warp(end) + (num_parts > 0 ? kMergeCost : 0);
  }

  // A length of parts that is worth an estimate; each warp has one. The first 16 cut the longest context into 1 to 16.
  // Others fill every thread block with a part once, twice …, if all contexts are equally long; the last ones give each
  // thread block the same number of tokens.
  __device__ int candidate(int warp) const {
    const int whole = lengths[0];
    if (warp < 28) {
      const int heads = tasks[kThreads - 1] * num_kv_heads;
      const int times = warp < 16 ? warp + 1 : max(1, (warp - 15) * shape.num_workers / heads);
      return max(1, (whole + times - 1) / times);
    }
    const int all_units = units[kThreads - 1] * num_kv_heads;
    return max(1, min(whole, all_units / shape.num_workers / (warp - 27)));
  }
};

__global__ void __launch_bounds__(kThreads) plan(RaggedWorkspace workspace, RaggedLengths lengths, int num_kv_heads) {
  __shared__ int longest;
  __shared__ int num_merges;
  __shared__ int num_parts;         // of contexts that are cut
  __shared__ int places[kThreads];  // the number of tasks in each bucket, then where the bucket begins
  __shared__ int bucket_lengths[kThreads];
  __shared__ int units[kThreads];
  __shared__ int part_units;
  __shared__ int estimates[kWarps];
  __shared__ int candidates[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const RaggedShape& shape = workspace.shape;
  const int num_sequences = lengths.batch.num_sequences;
  if (thread == 0) {
    longest = 1;
    num_merges = 0;
    num_parts = 0;
    part_units = INT_MAX;
  }
  places[thread] = 0;
  __syncthreads();
  for (int s = thread; s < num_sequences; s += kThreads) {
    atomicMax(&longest, lengths.longest_of(s));
  }
  for (int i = thread; i < shape.max_tasks; i += kThreads) {
    workspace.tasks[i] = {.sequence = -1};
  }
  __syncthreads();
  // A warp visits a sequence, 32 tasks at a time, each lane one of them; is_task: whether there is one for this lane.
  const auto for_each_task = [&](const auto& visit) {
    for (int s = warp; s < num_sequences; s += kWarps) {
      for (int first = 0; first < lengths.num_tasks(s); first += 32) {
        const bool is_task = first + lane < lengths.num_tasks(s);
        visit(is_task, lengths.task(s, is_task ? first + lane : first));
      }
    }
  };
  const auto count_in_bucket = [&](int num_tokens) { atomicAdd(&places[Buckets::of(num_tokens)], 1); };

  // How long the parts are.
  if (shape.max_places > 0) {
    for_each_task([&](bool is_task, const RaggedTask& task) {
      if (is_task) {
        count_in_bucket(length_of(task));
      }
    });
    __syncthreads();
    bucket_lengths[thread] = Buckets{longest}.units(thread);
    units[thread] = sum_up(places[thread] * bucket_lengths[thread]);
    places[thread] = sum_up(places[thread]);
    __syncthreads();
    const Histogram histogram{bucket_lengths, places, units, num_kv_heads, shape};
    if (places[kThreads - 1] > 0) {
      const int own = shape.part_tokens > 0 ? units_of(shape.part_tokens) : histogram.candidate(warp);
      const int estimate = histogram.estimate(own);
      if (lane == 0) {
        candidates[warp] = own;
        estimates[warp] = estimate;
      }
    }
    __syncthreads();
    if (thread == 0 && places[kThreads - 1] > 0) {
      int best = INT_MAX;
      for (int w = 0; w < kWarps; ++w) {
        if (estimates[w] < best || (estimates[w] == best && best < INT_MAX && candidates[w] > part_units)) {
          best = estimates[w];
          part_units = candidates[w];
        }
      }
    }
    __syncthreads();
    places[thread] = 0;
    __syncthreads();
  }

  // How many tasks are in each bucket, and which contexts are cut.
  const auto num_parts_of = [&](const RaggedTask& task) {
    return part_units == INT_MAX ? 1 : parts_of(length_of(task), part_units);
  };
  for_each_task([&](bool is_task, RaggedTask task) {
    task.num_parts = num_parts_of(task);
    if (is_task && task.num_parts == 1) {
      count_in_bucket(lengths.listed_length(task));
    } else if (is_task) {
      task.first_place = atomicAdd(&num_parts, task.num_parts);
      workspace.merges[atomicAdd(&num_merges, 1)] = task;
    }
  });
  __syncthreads();
  const auto for_each_part = [&](const auto& visit) {
    for (int i = warp; i < num_merges; i += kWarps) {
      const RaggedTask task = workspace.merges[i];
      for (int part = lane; part < task.num_parts; part += 32) {
        const RaggedTask own = part_of(task, part);
        visit(own, own.end_token - own.first_token);
      }
    }
  };
  for_each_part([&](const RaggedTask& /*part*/, int num_tokens) { count_in_bucket(num_tokens); });
  __syncthreads();
  const int own = places[thread];
  const int sum = sum_up(own);
  if (thread == kThreads - 1) {
    *workspace.queue = {.num_tasks = sum, .next = 0, .num_merges = num_merges};
  }
  places[thread] = sum - own;
  __syncthreads();

  // The order of sequences inside a bucket is left to chance: no result depends on it.
  for_each_task([&](bool is_task, const RaggedTask& task) {
    const int bucket = Buckets::of(lengths.listed_length(task));
    const bool is_whole = is_task && num_parts_of(task) == 1;
    for (unsigned left = __ballot_sync(~0U, is_whole); left != 0;) {
      const int leader = 31 - __clz(static_cast<int>(left));
      const int next_bucket = __shfl_sync(~0U, bucket, leader);
      const unsigned same = __ballot_sync(~0U, is_whole && bucket == next_bucket);
      int first = 0;
      if (lane == leader) {
        first = atomicAdd(&places[bucket], __popc(same));
      }
      first = __shfl_sync(~0U, first, leader);
      if ((same >> lane & 1U) != 0) {
        workspace.tasks[first + __popc(same & ((1U << lane) - 1))] = task;
      }
      left &= ~same;
    }
  });
  for_each_part([&](const RaggedTask& part, int num_tokens) {
    workspace.tasks[atomicAdd(&places[Buckets::of(num_tokens)], 1)] = part;
  });
}

// Which kernel computes a step. Lengths are known on the device only, so what the host knows decides: the shape, and
// how many new tokens a sequence has on average.
//
// wgmma wherever there is a kernel for it. A few new tokens after a long context fill only some of its rows, but then K
// and V come from memory more slowly than they are multiplied, whatever the rows.
//
// mma: a warp with few rows where prompts are short. With fewer rows a warp, more thread blocks wait for their first
// tile at the same time, and fewer rows of a diagonal tile see nothing. Measured on an H200, 32 query heads over 8 kv
// heads of 128 dimensions: 64 prompts of 128 tokens run 12 % faster in the short shape, 16 prompts of 512 tokens 5 %
// slower.
RaggedKernel choose_kernel(const PageShape& shape, const BatchArrays& batch, int num_tokens) {
  if (has_warpgroups(shape)) {
    return RaggedKernel::kWarpgroups;
  }
  return num_tokens <= std::int64_t{256} * batch.num_sequences ? RaggedKernel::kShort : RaggedKernel::kWide;
}

}  // namespace

bool has_warpgroups(const PageShape& shape) {
  // can_overlap: the kernel was compiled for this chip, the only one that has wgmma.
  return common::device_limits().compute_capability == 90 && common::can_overlap() &&
         (shape.head_dim == 64 || shape.head_dim == 128 || shape.head_dim == 256) &&
         (shape.type != ScalarType::kFloat8 || shape.head_dim <= kMaxFloat8PrefillHeadDim) &&
         shape.block_size >= kTileRows;
}

RaggedWorkspace ragged_workspace(void* memory, const PageShape& shape, const BatchArrays& batch, int num_tokens,
                                 const RaggedOptions& options) {
  const int num_multiprocessors = common::device_limits().num_multiprocessors;
  const std::int64_t num_rows = std::int64_t{num_tokens} * (batch.num_heads / shape.num_kv_heads);
  RaggedWorkspace workspace{};
  RaggedShape& own = workspace.shape;
  own.kernel = options.kernel == RaggedKernel::kChosen ? choose_kernel(shape, batch, num_tokens) : options.kernel;
  const RaggedTile tile = ragged_tile(shape.head_dim, own.kernel == RaggedKernel::kShort);
  const bool has_own_rows = own.kernel == RaggedKernel::kWarpgroups;
  own.rows = has_own_rows ? kWarpgroupsTaskRows : tile.rows();
  own.num_workers = num_multiprocessors * (has_own_rows ? 1 : tile.resident);
  own.part_tokens = options.part_tokens;

  // The room for rows of parts: 256 KB for each multiprocessor, which is four tasks of 128 rows of 128 dimensions, or
  // what the step needs if every context is cut wherever it can be. Steps with fewer tokens may have another kernel and
  // other tasks, and get by with the same memory: its size does not depend on the kernel.
  constexpr int kFloatsOfMultiprocessor = 65536;
  constexpr int kMostRows = 128;
  constexpr int kFewestRows = 64;
  const std::int64_t max_units =
      (std::int64_t{batch.max_blocks_per_sequence} * shape.block_size + kPartTokens - 1) / kPartTokens;
  const std::int64_t all_rows = (num_rows + std::int64_t{kMostRows} * batch.num_sequences) * shape.num_kv_heads;
  const std::int64_t room = std::int64_t{kFloatsOfMultiprocessor} * num_multiprocessors / shape.head_dim;
  const std::int64_t part_rows = max_units < 2 ? 0 : std::min(room, all_rows < room ? all_rows * max_units : room);

  // Every sequence may leave one task partly filled. Parts are more tasks. Where there are many tasks in any case,
  // nothing is gained by more.
  constexpr int kManyTasks = 8;  // for each thread block
  const std::int64_t whole_tasks = num_rows / own.rows;
  const bool is_cut = whole_tasks * shape.num_kv_heads < std::int64_t{kManyTasks} * own.num_workers;
  own.max_places = is_cut ? static_cast<int>(part_rows / own.rows) : 0;
  own.max_tasks = static_cast<int>(whole_tasks + batch.num_sequences + own.max_places / shape.num_kv_heads);

  const auto take = [&](std::int64_t count, std::size_t size) {
    auto* begin = static_cast<std::byte*>(memory) + (memory == nullptr ? 0 : workspace.bytes);
    workspace.bytes += (static_cast<std::size_t>(count) * size + 255) / 256 * 256;
    return static_cast<void*>(begin);
  };
  const std::int64_t most_places = part_rows / kFewestRows;
  workspace.queue = static_cast<RaggedQueue*>(take(1, sizeof(RaggedQueue)));
  workspace.tasks = static_cast<RaggedTask*>(
      take(num_rows / kFewestRows + batch.num_sequences + most_places / shape.num_kv_heads, sizeof(RaggedTask)));
  workspace.merges = static_cast<RaggedTask*>(take(most_places / 2, sizeof(RaggedTask)));
  workspace.partials.max_and_sum = static_cast<float2*>(take(part_rows, sizeof(float2)));
  workspace.partials.outputs = static_cast<float*>(take(part_rows * shape.head_dim, sizeof(float)));
  return workspace;
}

std::size_t ragged_workspace_bytes(const PageShape& shape, const BatchArrays& batch, int num_tokens,
                                   const RaggedOptions& options) {
  check_batch(kProductionShapes, shape, batch);
  COMMON_CHECK(num_tokens >= 0, "a batch has no tokens or some");
  return ragged_workspace(nullptr, shape, batch, num_tokens, options).bytes;
}
std::size_t ragged_workspace_bytes(const PageShape& shape, const BatchArrays& batch, int num_tokens) {
  return ragged_workspace_bytes(shape, batch, num_tokens, {});
}

void plan_ragged(const PageShape& shape, const BatchArrays& batch, const int* query_starts, int num_tokens,
                 void* workspace, cudaStream_t stream, const RaggedOptions& options) {
  check_batch(kProductionShapes, shape, batch);
  COMMON_CHECK(num_tokens >= 0, "a batch has no tokens or some");
  if (batch.num_sequences == 0 || num_tokens == 0) {
    return;
  }
  COMMON_CHECK(query_starts != nullptr, "a ragged batch has query_starts");
  COMMON_CHECK(workspace != nullptr && is_aligned(workspace), "a workspace is given");
  const RaggedWorkspace own = ragged_workspace(workspace, shape, batch, num_tokens, options);
  const int tile_tokens = own.shape.kernel == RaggedKernel::kWarpgroups
                              ? warpgroups_tile_tokens(shape.head_dim)
                              : ragged_tile(shape.head_dim, own.shape.kernel == RaggedKernel::kShort).tokens;
  const RaggedLengths lengths{query_starts, batch, batch.num_heads / shape.num_kv_heads, own.shape.rows, tile_tokens};
  common::launch(plan, dim3(1), kThreads, 0, stream, common::Overlap::kNone, own, lengths, shape.num_kv_heads);
}
void plan_ragged(const PageShape& shape, const BatchArrays& batch, const int* query_starts, int num_tokens,
                 void* workspace, cudaStream_t stream) {
  plan_ragged(shape, batch, query_starts, num_tokens, workspace, stream, {});
}

}  // namespace common
