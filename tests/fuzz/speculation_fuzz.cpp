// Random requests served with drafts, looked up or made by a model, in pools that are far too small, beside the same
// requests served without them in a roomy one. Every text, finish reason and log-probability must be the same, and
// after every step no block may be published, and no token committed, that is not text. Every case is a function of its
// seed, which a failure prints:
//
//   build/tests/speculation_fuzz_stage8 --cases 1000 --seed 1
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/parallel.h"
#include "common/math/sampling.h"
#include "tests/fuzz/driver.h"
#include "tests/fuzz/requests.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/sanitizers.h"

namespace {

using common::Random;
using tests::between;
using tests::FuzzCounts;
using tests::FuzzFailure;

constexpr int kDefaultCases = tests::kSanitized ? 100 : 1000;

// A token as a letter, so that a stop string may end within a run of accepted drafts.
std::string letters(std::span<const common::Token> tokens) {
  std::string text;
  for (const common::Token token : tokens) {
    text += static_cast<char>('A' + token % 26);
  }
  return text;
}

stage::GenerationRequest random_task(Random& random) {
  stage::GenerationRequest task;
  common::Request& request = task.request;
  // Few different prompts, so that some are found in the prefix cache, and some of them repeat themselves.
  request = tests::make_request(between(random, 1, 12), between(random, 1, 30), between(random, 0, 3));
  const std::size_t once = request.prompt.size();
  for (std::size_t i = 0; i < once && random.below(8) > 0; ++i) {
    request.prompt.push_back(request.prompt[i]);
  }
  request.sampling.seed = random.below(1000);
  request.sample_index = between(random, 0, 2);
  if (random.below(8) > 0) {
    request.num_speculative_tokens = between(random, 1, common::kMaxDrafts);
  }
  if (random.below(2) == 0) {
    request.sampling.temperature = 0.1F * static_cast<float>(between(random, 1, 12));
    request.sampling.top_k = random.below(2) == 0 ? between(random, 1, 4) : 0;
    request.sampling.top_p = random.below(3) == 0 ? 0.8F : 1.0F;
  }
  if (random.below(5) == 0) {
    request.sampling.repetition_penalty = 1.0F + 0.1F * static_cast<float>(between(random, 1, 5));
  }
  if (random.below(8) == 0) {
    request.sampling.frequency_penalty = 0.02F;
  }
  if (random.below(4) == 0) {
    request.num_logprobs = between(random, 1, 3);
  }
  if (random.below(3) == 0) {
    for (common::Token token = between(random, 0, 16); token < tests::kSmallVocabulary; token += 17) {
      request.stop_tokens.push_back(token);
    }
    request.min_tokens = random.below(4) == 0 ? between(random, 1, 10) : 0;
  }
  if (random.below(4) == 0) {
    const char letter = static_cast<char>('A' + random.below(26));
    request.stop_strings = common::StopStrings({std::string(1, letter)}, letters);
  }
  tests::draw_branches(random, task);
  if (task.length_penalty.has_value()) {  // a beam search takes no options of sampling
    request = tests::make_request(between(random, 1, 12), between(random, 1, 20), 1);
  }
  return task;
}

// Kernels expect sequences with one token first. Empty if they are.
std::string problem_of_order(const stage::RaggedBatch& batch) {
  bool has_longer = false;
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    if (batch.num_queries(i) == 1 && has_longer) {
      return "a sequence with one token comes after one with more";
    }
    has_longer = has_longer || batch.num_queries(i) > 1;
  }
  return "";
}

// What a step has committed and published is text (SPECULATION.md, invariants 2 and 3). Empty if it is.
std::string problem_of_drafts(const tests::Serving& serving) {
  const stage::KvCacheManager& manager = serving.engine_manager();
  for (const auto& group : serving.engine.scheduler().running()) {
    for (const stage::Branch& branch : group->live()) {
      if (!manager.contains(branch.sequence)) {
        continue;
      }
      const int length = manager.length(branch.sequence);
      if (length > group->max_tokens()) {
        return common::format("sequence %d has %d tokens, and its text can have %d", branch.sequence, length,
                              group->max_tokens());
      }
      // CheckError if the sequence is longer than the text.
      const std::vector<common::Token> text = group->tokens(branch.sequence, 0, length);
      const std::vector<int>& table = manager.block_table(branch.sequence);
      const int size = manager.block_size();
      for (std::size_t i = 0; i < table.size(); ++i) {
        if (!manager.prefix_cache().contains(table[i]) || group->pending_row().has_value()) {
          continue;  // a token that is not known yet is not in the text, and not published
        }
        const std::vector<common::Token>& published = manager.prefix_cache().entry(table[i]).tokens;
        const auto first = static_cast<std::ptrdiff_t>(i) * size;
        if (first + size > length || !std::equal(published.begin(), published.end(), text.begin() + first)) {
          return common::format("block %d of sequence %d is published with tokens that are not its text's", table[i],
                                branch.sequence);
        }
      }
    }
  }
  return "";
}

std::string difference(const stage::RequestOutput& output, const stage::RequestOutput& plain) {
  if (std::string text = tests::compare_output(output, plain.completions); !text.empty()) {
    return text;
  }
  for (std::size_t i = 0; i < plain.completions.size(); ++i) {
    const auto& actual = output.completions[i].logprobs;
    const auto& expected = plain.completions[i].logprobs;
    if (actual.size() != expected.size()) {
      return common::format("text %zu has %zu log-probabilities, expected %zu", i, actual.size(), expected.size());
    }
    for (std::size_t t = 0; t < expected.size(); ++t) {
      if (actual[t].drawn.token != expected[t].drawn.token || actual[t].rank != expected[t].rank ||
          !(std::abs(actual[t].drawn.logprob - expected[t].drawn.logprob) < 1e-4F)) {
        return common::format("text %zu, token %zu has another log-probability", i, t);
      }
    }
  }
  return "";
}

void run_case(std::uint64_t seed, FuzzCounts& counts) {
  common::set_num_threads(1);  // they would wait for each other longer than they compute
  Random random(seed);
  std::vector<stage::GenerationRequest> tasks;
  for (int left = between(random, 4, 12); left > 0; --left) {
    tasks.push_back(random_task(random));
  }
  tests::ServingOptions roomy;
  roomy.num_blocks = 512;
  roomy.scheduler.run_ahead = false;
  tests::Serving plain(roomy);
  for (const stage::GenerationRequest& task : tasks) {
    stage::GenerationRequest without = task;
    without.request.num_speculative_tokens = std::nullopt;
    plain.submit(without);
  }
  while (plain.engine.step()) {
  }

  tests::ServingOptions options;
  options.speculates = true;
  options.block_size = between(random, 1, 6);
  const int longest = 48 * between(random, 1, 3);
  options.num_blocks = longest / options.block_size + between(random, 1, 6);
  options.num_host_blocks = random.below(4) == 0 ? 0 : between(random, 1, options.num_blocks);
  options.prefix_cache = random.below(4) > 0;
  options.scheduler.token_budget = random.below(4) == 0 ? between(random, 3, 6) : between(random, 7, 40);
  options.scheduler.headroom = between(random, 0, 1);
  options.scheduler.max_sequences = between(random, 3, 12);
  options.scheduler.preemption = static_cast<stage::Preemption>(random.below(3));
  options.scheduler.run_ahead = random.below(2) == 0;
  tests::Serving serving(options);
  std::vector<int> streamed(tasks.size());
  std::vector<int> written_before(tasks.size());
  std::vector<bool> has_accepted(tasks.size());
  serving.on_token = [&](int id, int, common::Token) { streamed[static_cast<std::size_t>(id)] += 1; };
  std::string order;
  std::int64_t num_read = 0;  // tokens, by each sequence
  serving.engine.on_pass([&](const stage::RaggedBatch& batch) {
    order = order.empty() ? problem_of_order(batch) : order;
    num_read = std::accumulate(batch.context_lengths.begin(), batch.context_lengths.end(), num_read);
  });
  std::int64_t bytes_saved = 0;
  std::size_t num_submitted = 0;
  while (num_submitted < tasks.size() || !serving.engine.is_idle()) {
    if (num_submitted < tasks.size() && (serving.engine.is_idle() || random.below(3) == 0)) {
      serving.submit(tasks[num_submitted++]);
    }
    if (!serving.engine.step()) {
      continue;
    }
    for (std::size_t id = 0; id < num_submitted; ++id) {
      // Without drafts, a step gives each sample one token at most.
      const int count = streamed[id] - std::exchange(written_before[id], streamed[id]);
      has_accepted[id] = has_accepted[id] || count > tasks[id].num_samples;
    }
    const stage::StepReport& report = serving.reports.back();
    counts.add("swapped out", static_cast<long long>(report.swapped_out.size()));
    counts.add("recomputed", static_cast<long long>(report.recomputed.size()));
    for (const int num_drafts : report.num_drafts) {
      counts.add("drafts", num_drafts);
    }
    counts.add("accepted", report.num_accepted);
    bytes_saved += report.bytes_saved;
    std::string problem = serving.problem();
    problem = problem.empty() ? problem_of_drafts(serving) : problem;
    problem = problem.empty() ? order : problem;
    if (!problem.empty()) {
      throw FuzzFailure(problem);
    }
    if (serving.reports.size() > 20000) {
      throw FuzzFailure("the engine is still busy after 20,000 steps");
    }
  }
  for (std::size_t id = 0; id < tasks.size(); ++id) {
    const stage::RequestOutput& output = serving.engine.output(static_cast<int>(id));
    if (output.finish_reason == common::FinishReason::kRejected) {
      continue;  // a group too large for the budget, the limit or the pool
    }
    if (output.finish_reason == common::FinishReason::kFailed) {
      throw FuzzFailure(common::format("request %zu failed: ", id) + output.error);
    }
    if (const std::string found = difference(output, plain.engine.output(static_cast<int>(id))); !found.empty()) {
      throw FuzzFailure(common::format("request %zu: ", id) + found);
    }
    tests::check_streamed(static_cast<int>(id), tasks[id], output, streamed[id]);
    const bool is_sampled = tasks[id].request.sampling.temperature > 0.0F;
    const bool accepts = has_accepted[id];
    counts.add("texts", static_cast<long long>(output.completions.size()));
    counts.add("sampled texts with accepted drafts", is_sampled && accepts ? 1 : 0);
    counts.add("several samples with accepted drafts", tasks[id].num_samples > 1 && accepts ? 1 : 0);
    counts.add("log-probabilities with accepted drafts", tasks[id].request.num_logprobs > 0 && accepts ? 1 : 0);
    counts.add("stopped with accepted drafts", output.finish_reason == common::FinishReason::kStop && accepts ? 1 : 0);
  }
  counts.add("bytes read once", bytes_saved);
  if (static_cast<std::int64_t>(common::counter(serving.engine.counters(), "kv_bytes_read")) + bytes_saved !=
      num_read * serving.engine.cache().bytes_per_slot) {
    throw FuzzFailure("the bytes that are reported as read, and as read once, are not those of the passes");
  }
  counts.add("prefix hits", static_cast<long long>(common::counter(serving.engine.counters(), "prefix_hits")));
  if (const std::string problem = serving.leak(); !problem.empty()) {
    throw FuzzFailure(problem);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return tests::run_fuzz(
      {argv + 1, argv + argc}, {.unit = "cases", .default_units = kDefaultCases, .rarest = 40, .min_seeds = 99},
      FuzzCounts({"texts", "drafts", "accepted", "sampled texts with accepted drafts",
                  "several samples with accepted drafts", "log-probabilities with accepted drafts",
                  "stopped with accepted drafts", "swapped out", "recomputed", "bytes read once", "prefix hits"}),
      run_case);
}
