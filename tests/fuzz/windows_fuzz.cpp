// Random requests in small pools, to a model whose layers see the last tokens only, with and without layers that see
// all. A text is compared with that of the same request served alone, by an engine that frees no block before its
// sequence ends. Some requests go on with the text of an earlier one, and some are longer than the pool. What no query
// may read is NaN (windowed_model.h). Every case is a function of its seed, which a failure prints:
//
//   build/tests/windows_fuzz_stage8 --cases 300 --seed 1
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/fuzz/requests.h"
#include "tests/stages/ties.h"
#include "tests/stages/windowed_model.h"
#include "tests/support/sanitizers.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/host_cache/host_cache_scheduler.h)
#include STAGE_HEADER(production/host_cache/text_link.h)
#include STAGE_HEADER(production/windows/window_prompt_scheduler.h)
// clang-format on

namespace {

using common::Random;
using tests::between;
using tests::FuzzCounts;
using tests::FuzzFailure;

constexpr std::size_t kMaxTasks = 14;  // of a case
constexpr int kDefaultCases = tests::kSanitized ? 30 : 600;

stage::GenerationRequest random_task(Random& random) {
  stage::GenerationRequest task =
      tests::random_task(random, {.min_prompt = 2, .max_prompt = 60, .max_reply = 40, .num_texts = 4});
  task.request.cache_salt = random.below(8) == 0 ? 1 : 0;
  return task;
}

tests::ServingOptions random_options(Random& random) {
  tests::ServingOptions options;
  options.block_size = between(random, 1, 6);
  options.num_blocks = 100 / options.block_size + between(random, 1, 20);
  options.num_host_blocks = random.below(2) == 0 ? 0 : between(random, 1, options.num_blocks);
  options.num_host_cache_blocks = random.below(2) == 0 ? between(random, 1, 2 * options.num_blocks) : 0;
  options.prefix_cache = random.below(4) > 0;
  options.scheduler.token_budget = random.below(2) == 0 ? between(random, 3, 12) : between(random, 13, 100);
  options.scheduler.headroom = between(random, 0, 1);
  options.scheduler.max_sequences = between(random, 3, 10);
  options.scheduler.preemption = static_cast<stage::Preemption>(random.below(3));
  options.scheduler.token_compute_cost = 10;
  if (random.below(3) == 0) {
    options.scheduler.run_ahead = true;
  }
  return options;
}

// The text of a request that has ended, a few tokens and a reply: the next turn of a conversation. Nothing if it is too
// long.
std::optional<stage::GenerationRequest> next_turn(Random& random, const stage::GenerationRequest& task,
                                                  const stage::RequestOutput& output) {
  constexpr int kMaxPrompt = 110;
  if (!output.finished() || output.completions.empty()) {
    return std::nullopt;
  }
  stage::GenerationRequest next = random_task(random);
  next.request.cache_salt = task.request.cache_salt;
  std::vector<common::Token>& prompt = next.request.prompt;
  prompt.resize(static_cast<std::size_t>(std::min(between(random, 1, 8), static_cast<int>(prompt.size()))));
  const std::vector<common::Token>& reply = output.completions.front().tokens;
  prompt.insert(prompt.begin(), reply.begin(), reply.end());
  prompt.insert(prompt.begin(), task.request.prompt.begin(), task.request.prompt.end());
  return prompt.size() <= kMaxPrompt ? std::optional(std::move(next)) : std::nullopt;
}

// Every text that is in both tiers has the same K and V in both, but for the order of additions: with one pool in all
// layers, and with two in those that see all and, if both blocks have their parts, in the others. Needs an idle engine.
void compare_tiers(tests::WindowedServing& windowed, const stage::HostCache& host, FuzzCounts& counts) {
  const stage::KvCacheManager& manager = windowed.serving.engine_manager();
  const stage::LocalPool* const parts = windowed.runner->local_pool();
  if (host.statistics().stored - host.statistics().evictions != host.num_used() ||
      host.num_used() > host.num_blocks()) {
    throw FuzzFailure("blocks that came, less those that were given up, are not those that are there");
  }
  if (!host.pending_copies().empty() || !manager.pending_copies().empty() ||
      (parts != nullptr && !parts->pending_copies().empty())) {
    return;
  }
  // Host blocks are copied to a free one to be read. The cache of the parts has room behind the last one.
  const int free_part = parts != nullptr ? parts->size().num_parts : 0;
  if (manager.free_blocks().empty()) {
    return;
  }
  const auto expect_equal = [](stage::KvCache& cache, int host_block, int first, int second) {
    const stage::BlockCopy copy = {host_block, first};
    cache.copy_blocks({&copy, 1});
    const stage::KvCacheShape& shape = cache.shape();
    const int size = shape.block_size;
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const auto keys = cache.keys(layer, head, first * size, size) - cache.keys(layer, head, second * size, size);
        const auto values =
            cache.values(layer, head, first * size, size) - cache.values(layer, head, second * size, size);
        if (!(keys.cwiseAbs().maxCoeff() < 1e-4F && values.cwiseAbs().maxCoeff() < 1e-4F)) {
          throw FuzzFailure("a text has other K or V on the host than in the pool");
        }
      }
    }
  };
  for (const int block : manager.prefix_cache().evictable()) {
    const stage::TextLink link = stage::link_of(manager.prefix_cache(), block);
    const std::vector<int> found = host.find(link.parent, link.tokens, link.salt);
    if (found.empty()) {
      continue;
    }
    expect_equal(windowed.runner->cpu().kv_cache(), found.front(), manager.free_blocks().back(), block);
    if (parts == nullptr) {
      counts.add("in both tiers, one pool");
      continue;
    }
    const bool have_both = parts->part_of(block) >= 0 && parts->part_of(found.front()) >= 0;
    if (have_both) {
      expect_equal(windowed.runner->cpu().local_cache(), parts->part_of(found.front()), free_part,
                   parts->part_of(block));
    }
    counts.add(have_both ? "parts in both tiers" : "in both tiers, a part at most in one");
  }
}

// How many tokens' K and V the pass reads, summed over all layers: looks at every query and every position.
std::int64_t reads_of(const stage::RaggedBatch& batch, const common::LlamaConfig& config) {
  std::int64_t sum = 0;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const int window = config.window_of(layer);
    for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
      std::vector<bool> is_seen(static_cast<std::size_t>(batch.context_lengths[i]));
      for (int query = 0; query < batch.num_queries(i); ++query) {
        const int own = batch.context_lengths[i] - batch.num_queries(i) + query;
        for (int position = 0; position <= own; ++position) {
          is_seen[static_cast<std::size_t>(position)] =
              is_seen[static_cast<std::size_t>(position)] || window == 0 || position > own - window;
        }
      }
      sum += std::count(is_seen.begin(), is_seen.end(), true);
    }
  }
  return sum;
}

// Published blocks behind a text of which the pool had no block.
long long num_alone(const stage::KvCacheManager& manager) {
  const stage::PrefixCache& pool = manager.prefix_cache();
  long long result = 0;
  for (int block = 0; block < manager.usage().total / manager.block_size(); ++block) {
    result += pool.contains(block) && stage::link_of(pool, block).parent != pool.entry(block).parent_text ? 1 : 0;
  }
  return result;
}

void run_case(std::uint64_t seed, FuzzCounts& counts) {
  Random random(seed);
  const bool has_global = random.below(2) == 0;
  const common::Llama model = tests::windowed_model(between(random, 1, 24), has_global ? 2 : 0);
  tests::ServingOptions options = random_options(random);
  std::vector<stage::GenerationRequest> tasks;
  int most = 0;
  for (int left = between(random, 3, 8); left > 0; --left) {
    tasks.push_back(random_task(random));
    most = std::max(most, stage::max_slots_of(tasks.back().request, tasks.back().num_samples, options.block_size));
  }
  if (random.below(3) == 0) {  // no block more than is set aside for the largest task
    options.num_blocks = most / options.block_size;
  }
  // Room for the windows of any of them, but not for the longest as a whole.
  if (!has_global && random.below(2) == 0) {
    const int in_flight = options.scheduler.run_ahead.value_or(false) ? options.scheduler.token_budget : 0;
    const int window = stage::max_blocks_of_window(model.config().window + in_flight, options.block_size);
    options.num_blocks = between(random, 1, 4) * (std::max(window, 2) + 2);
  }
  // From the windows of one text alone to as many as there are blocks.
  const int least = stage::max_blocks_of_window(model.config().window, options.block_size);
  const int num_parts = between(random, std::min(least, options.num_blocks), options.num_blocks);
  if (options.num_host_cache_blocks > 0 && random.below(4) == 0) {
    options.num_host_cache_blocks = between(random, 1, 4);  // what is found goes before it is brought back
  }
  const bool has_faults = random.below(4) == 0;
  tests::WindowedServing windowed(options, model, num_parts);
  tests::Serving& serving = windowed.serving;
  std::int64_t num_reads = 0;
  serving.engine.on_pass([&](const stage::RaggedBatch& batch) { num_reads += reads_of(batch, model.config()); });
  std::int64_t num_lookups = 0;
  std::set<int> swapped;
  std::size_t num_submitted = 0;
  while (num_submitted < tasks.size() || !serving.engine.is_idle()) {
    if (num_submitted < tasks.size() && (serving.engine.is_idle() || random.below(3) == 0)) {
      windowed.serving.submit(tasks[num_submitted++]);
      if (tasks.size() < kMaxTasks && random.below(3) == 0) {  // the same again, later
        tasks.push_back(tasks[random.below(num_submitted)]);
      }
      for (int tries = 0; tries < 4 && tasks.size() < kMaxTasks; ++tries) {
        const std::size_t earlier = random.below(num_submitted);
        if (const auto next = next_turn(random, tasks[earlier], serving.engine.output(static_cast<int>(earlier)))) {
          tasks.insert(tasks.begin() + static_cast<std::ptrdiff_t>(num_submitted), *next);
          break;
        }
      }
    }
    if (has_faults && random.below(12) == 0) {  // several in a row: then a step fails, and its copies are left
      windowed.runner->fail_copies(between(random, 1, 4), random.below(2) == 0);
    }
    if (!serving.engine.step()) {
      continue;
    }
    for (const int id : serving.reports.back().admitted) {  // looked up each time, unless it was swapped out
      num_lookups += options.prefix_cache && swapped.erase(id) == 0 ? 1 : 0;
    }
    swapped.insert(serving.reports.back().swapped_out.begin(), serving.reports.back().swapped_out.end());
    counts.add("swapped out", static_cast<long long>(serving.reports.back().swapped_out.size()));
    counts.add("recomputed", static_cast<long long>(serving.reports.back().recomputed.size()));
    if (const std::string problem = windowed.problem(); !problem.empty()) {
      throw FuzzFailure(problem);
    }
    counts.add("blocks behind texts without one", num_alone(serving.engine_manager()));
    if (serving.reports.size() > 20000) {
      throw FuzzFailure("the engine is still busy after 20,000 steps");
    }
  }
  if (const std::string problem = serving.leak(); !problem.empty()) {
    throw FuzzFailure(problem);
  }
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const stage::RequestOutput& output = serving.engine.output(static_cast<int>(i));
    const bool is_rejected = output.finish_reason == common::FinishReason::kRejected;
    if (tests::is_too_wide(windowed.runner->local_pool(), tasks[i], options.block_size)) {
      counts.add("too wide");
      if (!is_rejected) {
        throw FuzzFailure("request " + std::to_string(i) + " has windows that can't be in the pool, and was served");
      }
    }
    if (is_rejected) {
      continue;  // a group too large for the budget, the limit or the pool
    }
    const bool has_failed = output.finish_reason == common::FinishReason::kFailed;
    if (has_failed && (!has_faults || output.error != tests::RunnerFault().what())) {
      throw FuzzFailure("request " + std::to_string(i) + " failed: " + output.error);
    }
    counts.add("failed", has_failed ? 1 : 0);
    if (has_failed && tasks[i].length_penalty.has_value()) {
      continue;  // a beam search that does not end promises nothing
    }
    counts.add("requests");
    const int num_needed =
        stage::max_slots_of(tasks[i].request, tasks[i].num_samples, options.block_size) / options.block_size;
    counts.add(options.num_host_cache_blocks > 0 ? "longer than the pool, with a tier" : "longer than the pool",
               num_needed > options.num_blocks ? 1 : 0);
    counts.add("several samples", tasks[i].num_samples > 1 && !tasks[i].length_penalty.has_value() ? 1 : 0);
    counts.add("beam searches", tasks[i].length_penalty.has_value() ? 1 : 0);
    std::vector<common::Completion> expected = tests::served_alone(tasks[i], model);
    if (const std::string difference = tests::compare_output(output, expected, has_failed); !difference.empty()) {
      tests::accept_ties(tasks[i], output, model, expected);
      if (const std::string problem = tests::compare_output(output, expected, has_failed); !problem.empty()) {
        throw FuzzFailure("request " + std::to_string(i) + ": " + problem + output.error);
      }
      std::cout << common::format("seed %llu: request %zu is a tie: ", static_cast<unsigned long long>(seed), i)
                << difference << std::endl;
    }
  }
  if (const auto* tiers = dynamic_cast<const stage::HostCacheScheduler*>(&serving.engine.scheduler());
      tiers != nullptr && tiers->has_host_cache()) {
    counts.add("back from the host", tiers->host_cache().statistics().restored);
    if (windowed.runner->local_pool() != nullptr) {
      counts.add("back from the host to two pools", tiers->host_cache().statistics().restored);
    }
    if (!has_faults) {  // else the last copies may be in front of a step that never was
      compare_tiers(windowed, tiers->host_cache(), counts);
    }
  }
  if (const auto* prompts = dynamic_cast<const stage::WindowPromptScheduler*>(&serving.engine.scheduler())) {
    counts.add(
        options.num_host_cache_blocks > 0 ? "found behind evicted blocks, with a tier" : "found behind evicted blocks",
        prompts->statistics().prompts);
  }
  if (const stage::LocalPool* pool = windowed.runner->local_pool()) {
    counts.add("parts given up", pool->num_evicted());
    counts.add("parts brought back alone", pool->num_brought_back());
    counts.add("found by local pools", serving.engine_manager().prefix_cache().statistics().tokens_saved);
  }
  if (const std::int64_t counted = serving.engine_manager().prefix_cache().statistics().lookups;
      counted != num_lookups) {
    throw FuzzFailure(common::format("%lld lookups are counted, and there were %lld", static_cast<long long>(counted),
                                     static_cast<long long>(num_lookups)));
  }
  // Without less than a token, if the layers are of two kinds. A pass that fails reads nothing.
  const std::int64_t bytes_per_slot = serving.engine.cache().bytes_per_slot;
  const auto bytes_read = static_cast<std::int64_t>(common::counter(serving.engine.counters(), "kv_bytes_read"));
  const std::int64_t extra = bytes_read - num_reads * (bytes_per_slot / model.config().num_layers);
  if (!has_faults && (extra < 0 || extra >= (has_global ? bytes_per_slot : 1))) {
    throw FuzzFailure(common::format("%lld bytes are reported as read, %lld too many",
                                     static_cast<long long>(bytes_read), static_cast<long long>(extra)));
  }
  counts.add("steps with freed blocks", windowed.runner->num_stand_ins());
  counts.add("cached tokens", serving.engine_manager().prefix_cache().statistics().tokens_saved);
}

}  // namespace

int main(int argc, char** argv) {
  return tests::run_fuzz({argv + 1, argv + argc},
                         {.unit = "cases", .default_units = kDefaultCases, .rarest = 20, .min_seeds = 59},
                         FuzzCounts({"requests",
                                     "several samples",
                                     "beam searches",
                                     "swapped out",
                                     "recomputed",
                                     "back from the host",
                                     "steps with freed blocks",
                                     "cached tokens",
                                     "too wide",
                                     "parts given up",
                                     "found by local pools",
                                     "found behind evicted blocks",
                                     "found behind evicted blocks, with a tier",
                                     "longer than the pool",
                                     "longer than the pool, with a tier",
                                     "failed",
                                     "back from the host to two pools",
                                     "parts brought back alone",
                                     "parts in both tiers",
                                     "in both tiers, a part at most in one",
                                     "in both tiers, one pool",
                                     "blocks behind texts without one"}),
                         run_case);
}
