// Layers that see the last tokens only, on a GPU (WINDOWS.md). In 16 bits a text is not the CPU's, but each of its
// tokens must be as likely to the CPU; in float32 the texts are equal. What no query may read is NaN.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/app/gpu_types.h"
#include "common/cuda/runtime/device.h"
#include "common/cuda/several/nccl_group.h"
#include "common/math/sampling.h"
#include "tests/gpu/gpu_built_runner.h"
#include "tests/gpu/gpu_step.h"
#include "tests/stages/windowed_model.h"
#include "tests/support/catch.h"
#include "tests/support/random.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/tensor_parallel_runner.h)
#include STAGE_HEADER(production/windows/local_pool_scheduler.h)
#include STAGE_HEADER(serve/engine_adapter.h)
#include STAGE_HEADER(serve/make_engine.h)
// clang-format on

using common::Llama;
using stage::GenerationRequest;
using tests::between;

namespace {

const std::string kNoProblem;
constexpr int kContext = 320;

// Which layers have a window: all of a model, those between others, or Gemma 3's, which rotate in another way.
struct Kind {
  const char* name;
  int global_period;  // as in LlamaConfig
  bool is_gemma = false;
};
constexpr Kind kOneKind{"one kind", 0};
constexpr std::array<Kind, 3> kKinds = {kOneKind, {"two kinds", 2}, {"Gemma 3", 2, true}};

// Random weights, in a shape that the production kernels take.
Llama model_with_windows(int window, const Kind& kind) {
  common::LlamaConfig config;
  config.vocab_size = 64;
  config.context_length = kContext;
  config.hidden_size = 128;
  config.num_layers = 4;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 32;
  config.feed_forward_size = 192;
  config.window = window;
  config.global_period = kind.global_period;
  if (kind.is_gemma) {
    config.qk_norm = true;
    config.post_norms = true;
    config.gelu = true;
    config.rotates_halves = true;
    config.embedding_scale = 11.313708F;  // the root of 128
    config.rope_freq_base = 1e6F;
    config.window_rope_freq_base = window > 0 ? 1e4F : 0.0F;
  }
  return {config, 1, common::Windows::kComputed};
}

const std::vector<common::GpuTypes> kTypes = {
    {.precision = common::Precision::kBFloat16},
    {.precision = common::Precision::kBFloat16, .kv_cache = common::KvCacheType::kFloat8},
    {}};  // float32, by the plain kernels

// How far a logit or a log-probability may be from the CPU's. Logits have a standard deviation of 1.0, and a window
// moves them by 1.2 and more. On the CPU, with queries, K, V and what attention returns rounded to 16 bits, 12,000 of
// them move by up to 0.036, and with K and V rounded to float8, by up to 0.34. (On an H200, where all else is rounded
// too, log-probabilities were off by up to 0.06 and 0.28.) In float32, only sums are in another order.
double tolerance_of(const common::GpuTypes& types) {
  if (types.is_exact()) {
    return 2e-3;
  }
  return types.kv_cache == common::KvCacheType::kFloat8 ? 0.7 : 0.25;
}

stage::EngineOptions cpu_options() {
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kCpu;
  return options;
}

// NaN is copied from a block of the pool that is never written to; free parts are filled with it. These copies wait for
// the last step, and what is copied after them too: so there are none if copies beside a step are tested.
class PoisoningGpuRunner : public tests::RunnerAround, public stage::HostBlocks {
 public:
  // num_parts: of the layers with a window, if others see all.
  PoisoningGpuRunner(std::unique_ptr<stage::Runner> inner, int num_parts)
      : RunnerAround(std::move(inner)), gpu_(dynamic_cast<stage::RecordingRunner&>(*inner_)), num_parts_(num_parts) {}

  void allocate(int count) override { gpu_.allocate(count); }
  int num_allocated() const override { return gpu_.num_allocated(); }
  std::string why_no_more() const override { return gpu_.why_no_more(); }
  void copy_beside(std::span<const stage::BlockCopy> copies) override { gpu_.copy_beside(copies); }

  std::shared_ptr<stage::LocalPool> separate_windows(const NumParts& /*num_parts*/, int num_blocks) override {
    local_pool_ = gpu_.separate_windows([&](int /*count*/) { return num_parts_; }, num_blocks);
    return local_pool_;
  }

  // After the engine was made, and before its first step: from now on, there is NaN.
  void watch(stage::KvCacheManager& manager) {
    REQUIRE(manager.allocate(kHolder, 1));
    nan_block_ = manager.block_table(kHolder).front();
    manager_ = &manager;
  }

  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    std::vector<stage::BlockCopy> poison;
    if (manager_ != nullptr) {
      for (const int block : unreadable_blocks(*manager_)) {
        poison.push_back({nan_block_, block});
      }
    }
    if (has_computed_ && manager_ != nullptr) {  // before that, all is NaN
      inner_->copy_blocks(poison);
      if (local_pool_ != nullptr) {
        gpu_.poison_parts(free_parts());
      }
    }
    has_computed_ = true;
    return inner_->enqueue(batch);
  }

 private:
  static constexpr stage::SequenceId kHolder = -7;  // engines number from 0

  stage::RecordingRunner& gpu_;
  int num_parts_;
  stage::KvCacheManager* manager_ = nullptr;
  int nan_block_ = -1;
  bool has_computed_ = false;
};

// What the CPU thinks of texts, in float32.
class Judge {
 public:
  explicit Judge(const Llama& model) : engine_(model, cpu_options()) {}

  // Empty if the CPU gives each token the log-probability that the completion says, if it says one, and no other token
  // of a greedy text a much larger one.
  std::string problem(const common::Request& request, const common::Completion& completion, double tolerance) {
    const common::Completion expected = forced(request, completion.tokens);
    if (expected.tokens != completion.tokens) {
      return "the CPU has another text: " + expected.error;
    }
    for (std::size_t i = 0; i < completion.tokens.size(); ++i) {
      const common::TokenLogprobs& own = expected.logprobs[i];
      const double deficit = own.best.front().logprob - own.drawn.logprob;
      const double difference =
          request.num_logprobs > 0 ? std::abs(completion.logprobs[i].drawn.logprob - own.drawn.logprob) : 0.0;
      max_deficit_ = std::max(max_deficit_, request.sampling.temperature == 0.0F ? deficit : 0.0);
      max_difference_ = std::max(max_difference_, difference);
      if (!(difference <= tolerance) || (request.sampling.temperature == 0.0F && !(deficit <= 2 * tolerance))) {
        return common::format("token %zu is off by %g, and less likely by %g than another", i, difference, deficit);
      }
    }
    return "";
  }
  // What the CPU gives the text.
  double log_probability(const common::Request& request, const std::vector<common::Token>& tokens) {
    double sum = 0.0;
    for (const common::TokenLogprobs& own : forced(request, tokens).logprobs) {
      sum += own.drawn.logprob;
    }
    return sum;
  }
  double max_deficit() const { return max_deficit_; }
  double max_difference() const { return max_difference_; }

 private:
  common::Completion forced(const common::Request& request, const std::vector<common::Token>& tokens) {
    common::Request again = request;
    again.max_new_tokens = static_cast<int>(tokens.size());
    again.forced = tokens;
    again.num_logprobs = 1;
    return tests::run_requests(engine_, std::span(&again, 1)).completions.front();
  }

  stage::Engine engine_;
  double max_deficit_ = 0.0;
  double max_difference_ = 0.0;
};

struct Totals {
  int requests = 0;
  int swapped_out = 0;
  int recomputed = 0;
  int stand_ins = 0;
  int accepted = 0;
  int cancelled = 0;
  double hits = 0.0;
  std::int64_t copies = 0;
  int pools = 0;             // of parts
  std::int64_t evicted = 0;  // parts
  std::int64_t stored = 0;   // blocks
  std::int64_t restored = 0;
};

struct Errors {
  double difference = 0.0;  // of log-probabilities
  double deficit = 0.0;     // of the tokens of greedy texts
};

std::vector<GenerationRequest> random_tasks(common::Random& random) {
  std::vector<GenerationRequest> tasks;
  for (int left = between(random, 6, 12); left > 0; --left) {
    GenerationRequest task{tests::make_request(between(random, 2, 150), between(random, 1, 60), between(random, 0, 3))};
    task.request.sampling.seed = random.below(1000);
    switch (random.below(6)) {
      case 0:
        task.num_samples = between(random, 2, 3);
        task.request.sampling.temperature = 1.2F;
        task.request.num_logprobs = 1;
        break;
      case 1:
        task.num_samples = between(random, 1, 3);
        task.length_penalty = 1.0;
        break;
      case 2:
        task.request.num_logprobs = 1;
        break;
      default:  // greedy: steps run ahead
        break;
    }
    tasks.push_back(std::move(task));
  }
  return tasks;
}

// Serves random tasks in a small pool, with options drawn at random. With a second tier, it serves them twice.
void serve_at_random(std::uint64_t seed, const common::GpuTypes& types, const Kind& kind, bool has_tier, Totals& totals,
                     Errors& errors) {
  common::Random random(seed);
  const Llama model = model_with_windows(between(random, 1, 70), kind);
  const double tolerance = tolerance_of(types);
  stage::EngineOptions options;
  options.gpu = {.device = stage::Device::kGpu, .types = types};
  options.block_size = types.kv_cache == common::KvCacheType::kFloat8 || random.below(2) == 0 ? 16 : 8;
  options.num_slots = between(random, 280, 420);
  options.num_host_slots = random.below(2) == 0 ? 0 : 600;
  options.prefix_cache = random.below(4) > 0;
  options.scheduler.token_budget = between(random, 12, 100);
  options.scheduler.max_sequences = between(random, 3, 8);
  options.scheduler.headroom = between(random, 0, 1);
  options.scheduler.preemption = static_cast<stage::Preemption>(random.below(3));
  if (random.below(3) == 0) {
    options.scheduler.run_ahead = random.below(2) == 0;
  }
  int num_tier_blocks = 0;
  if (has_tier) {
    num_tier_blocks = random.below(4) == 0 ? between(random, 1, 8) : between(random, 20, 120);
    options.prefix_cache = true;
    options.scheduler.token_compute_cost = 10;  // so that blocks are kept
  }
  CAPTURE(seed, kind.name, model.config().window, options.block_size, num_tier_blocks);
  stage::VirtualClock clock;
  stage::EngineOptions with_tier = options;
  with_tier.num_host_slots += num_tier_blocks * options.block_size;
  std::unique_ptr<stage::Runner> runner = stage::make_runner(model, with_tier);
  PoisoningGpuRunner* poisoning = nullptr;
  if (has_tier || random.below(4) > 0) {  // else the engine knows what else the runner can
    // From the windows of one text alone to half of the blocks.
    const int least = stage::max_blocks_of_window(model.config().window, options.block_size);
    const int num_parts = between(random, least, std::max(least, runner->cache().num_blocks / 2));
    auto wrapped = std::make_unique<PoisoningGpuRunner>(std::move(runner), num_parts);
    poisoning = wrapped.get();
    runner = std::move(wrapped);
  }
  const stage::TokenCost cost{.per_token = 0.0, .max_tokens = stage::kMaxGpuTokens};
  const int num_drafts = random.below(2) == 0 ? 0 : between(random, 1, 4);
  const std::unique_ptr<stage::SpeculatingEngine> engine =
      stage::make_speculating_engine(model, options, std::move(runner), num_drafts, clock, cost, num_tier_blocks);
  const bool is_poisoned = poisoning != nullptr && (!has_tier || random.below(2) == 0);
  if (is_poisoned) {
    poisoning->watch(engine->manager());
  }
  const auto* const scheduler = dynamic_cast<const stage::LocalPoolScheduler*>(&engine->scheduler());
  const stage::LocalPool* const pool = scheduler != nullptr ? &scheduler->local_pool() : nullptr;
  totals.pools += pool != nullptr ? 1 : 0;
  std::vector<int> cancelled;
  engine->on_step([&](const stage::StepReport& report) {
    totals.swapped_out += static_cast<int>(report.swapped_out.size());
    totals.recomputed += static_cast<int>(report.recomputed.size());
    totals.accepted += report.num_accepted;
    if (!report.served.empty() && random.below(200) == 0) {
      cancelled.push_back(report.served.front());
    }
  });
  std::vector<GenerationRequest> tasks = random_tasks(random);
  if (has_tier) {
    const std::vector<GenerationRequest> again = tasks;
    tasks.insert(tasks.end(), again.begin(), again.end());
  }
  std::size_t num_submitted = 0;
  while (num_submitted < tasks.size() || !engine->is_idle()) {
    if (num_submitted < tasks.size() && (engine->is_idle() || random.below(3) == 0)) {
      engine->submit(tasks[num_submitted++]);
    }
    engine->step();
    if (pool != nullptr) {
      CHECK(tests::check_parts(*pool, engine->manager()) == kNoProblem);
    }
    for (const int id : std::exchange(cancelled, {})) {
      if (!engine->output(id).finished()) {
        engine->stop(id, common::FinishReason::kCancelled);
      }
    }
  }
  Judge judge(model);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const stage::RequestOutput& output = engine->output(static_cast<int>(i));
    CAPTURE(i, output.error);
    const bool is_rejected = output.finish_reason == common::FinishReason::kRejected;
    if (tests::is_too_wide(pool, tasks[i], options.block_size)) {
      CHECK(is_rejected);
    }
    if (is_rejected) {
      continue;  // a group that is larger than the pool or the limit
    }
    CHECK(output.error == kNoProblem);
    totals.requests += 1;
    totals.cancelled += output.finish_reason == common::FinishReason::kCancelled ? 1 : 0;
    for (const common::Completion& completion : output.completions) {
      common::Request request = tasks[i].request;
      if (tasks[i].length_penalty.has_value()) {
        request.sampling.temperature = 1.0F;  // no greedy text
      }
      if (!completion.tokens.empty()) {
        CHECK(judge.problem(request, completion, tolerance) == kNoProblem);
      }
    }
    for (const stage::Hypothesis& beam : output.hypotheses) {
      // Errors of a text's tokens add up as if they were independent.
      const auto num_tokens = static_cast<double>(beam.tokens.size());
      CHECK(std::abs(beam.log_probability - judge.log_probability(tasks[i].request, beam.tokens)) <=
            tolerance * std::sqrt(num_tokens));
    }
  }
  errors.difference = std::max(errors.difference, judge.max_difference());
  errors.deficit = std::max(errors.deficit, judge.max_deficit());
  totals.stand_ins += poisoning != nullptr ? poisoning->num_stand_ins() : 0;
  totals.evicted += pool != nullptr ? pool->num_evicted() : 0;
  if (has_tier) {
    const auto& tiers = dynamic_cast<const stage::HostCacheScheduler&>(engine->scheduler());
    totals.stored += tiers.host_cache().statistics().stored;
    totals.restored += tiers.host_cache().statistics().restored;
  }
  totals.hits += common::counter(engine->counters(), "prefix_hits");
  totals.copies += engine->blocks_copied();
  CHECK(engine->manager().usage().reserved == (is_poisoned ? options.block_size : 0));
}

std::vector<int> numbers_from(int first, int count) {
  std::vector<int> result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

// make_runner: of these steps.
template <typename MakeRunner>
void check_logits(const MakeRunner& make_runner, const std::vector<common::GpuTypes>& all_types = kTypes) {
  // Two sequences, in blocks of 16: their prompts in chunks, then steps that are recorded. In the GPU's tables, the
  // blocks in front of the first query's window are one that is never written to.
  constexpr int kNumBlocks = 40;
  for (const common::GpuTypes& types : all_types) {
    for (const Kind& kind : kKinds) {
      for (const int window : {1, 16, 23, 64, 100}) {
        const Llama model = model_with_windows(window, kind);
        const Llama unlimited = model_with_windows(0, kind);
        const common::LlamaConfig& config = model.config();
        const stage::KvCacheShape shape{.num_layers = config.num_layers,
                                        .num_blocks = kNumBlocks,
                                        .block_size = 16,
                                        .num_heads = config.num_heads,
                                        .num_kv_heads = config.num_kv_heads,
                                        .head_dim = config.head_dim};
        const auto gpu = make_runner(model, shape, types);
        stage::ScoringCpuRunner cpu(model, shape);
        stage::ScoringCpuRunner blind(unlimited, shape);
        std::vector<int> lengths = {0, 0};
        double error = 0.0;  // of all steps
        double effect = 0.0;
        int salt = 0;
        for (const std::vector<int>& counts : {std::vector{90, 3},
                                               {37, 1},
                                               {1, 80},
                                               {1, 1},
                                               {1, 1},
                                               {1, 1},
                                               {40, 1},
                                               {1, 1},
                                               {1, 1},
                                               {1, 1},
                                               {5, 0},
                                               {1, 0},
                                               {1, 0}}) {
          stage::RaggedBatch own;
          stage::RaggedBatch step;
          // The sequence with one token first, except in the first step.
          for (const int s : counts[1] == 1 ? std::vector{1, 0} : std::vector{0, 1}) {
            const int count = counts[static_cast<std::size_t>(s)];
            if (count == 0) {
              continue;
            }
            int& length = lengths[static_cast<std::size_t>(s)];
            const std::vector<common::Token> tokens = tests::make_request(count, 1, ++salt).prompt;
            step.tokens.insert(step.tokens.end(), tokens.begin(), tokens.end());
            const std::vector<int> table = numbers_from(20 * s, stage::blocks_needed(length + count, 16));
            for (int position = length; position < length + count; ++position) {
              step.positions.push_back(position);
              step.slot_mapping.push_back(table[static_cast<std::size_t>(position / 16)] * 16 + position % 16);
            }
            const int num_hidden = kind.global_period > 0 ? 0 : std::max(0, length + 1 - window) / 16;
            for (std::size_t i = 0; i < table.size(); ++i) {
              step.block_tables.push_back(table[i]);
              own.block_tables.push_back(static_cast<int>(i) < num_hidden ? kNumBlocks - 1 : table[i]);
            }
            length += count;
            step.context_lengths.push_back(length);
            step.table_starts.push_back(static_cast<int>(step.block_tables.size()));
            step.query_starts.push_back(static_cast<int>(step.tokens.size()));
            step.logits_rows.push_back(step.query_starts.back() - 1);
          }
          std::swap(own.block_tables, step.block_tables);
          gpu->enqueue(step);
          const common::Matrix actual = gpu->logits();
          std::swap(own.block_tables, step.block_tables);
          step.sampling_rows.assign(step.logits_rows.size(), {.draws_token = false});
          const stage::StepResult expected = cpu.wait(cpu.enqueue(step));
          const stage::StepResult unlimited_result = blind.wait(blind.enqueue(step));
          for (std::size_t row = 0; row < expected.logits.size(); ++row) {
            const common::Matrix difference = actual.row(static_cast<Eigen::Index>(row)) - expected.logits[row];
            CHECK(difference.allFinite());
            error = std::max<double>(error, difference.cwiseAbs().maxCoeff());
            effect =
                std::max<double>(effect, (unlimited_result.logits[row] - expected.logits[row]).cwiseAbs().maxCoeff());
          }
        }
        CAPTURE(common::to_string(types), kind.name, window, error, effect);
        CHECK(error <= tolerance_of(types));
        CHECK(effect > 1.5 * tolerance_of(types));
        CHECK(gpu->num_recorded_steps() > 0);
      }
    }
  }
}

}  // namespace

TEST_CASE("GPU: in layers with windows, logits are the CPU's, and no block in front of a window is read") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  check_logits([](const Llama& model, const stage::KvCacheShape& shape, const common::GpuTypes& types) {
    return std::make_unique<tests::BuiltRunner>(model, shape, stage::GpuOptions{.types = types}, 128, 8);
  });
}

TEST_CASE("GPU: in 16 bits, the plain kernels compute layers with windows where production kernels can't") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  check_logits(
      [](const Llama& model, const stage::KvCacheShape& shape, const common::GpuTypes& types) {
        return std::make_unique<stage::RecordingRunner>(model, shape, stage::GpuOptions{.types = types}, 128, 8,
                                                        stage::kPlainKernels);
      },
      {kTypes.front()});
}

TEST_CASE("GPU: in float32, greedy texts of models with windows are the CPU's") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const Kind& kind : kKinds) {
    for (const int window : {1, 10, 33, 64}) {
      const Llama model = model_with_windows(window, kind);
      std::vector<GenerationRequest> tasks;
      for (int i = 0; i < 6; ++i) {
        tasks.push_back({tests::make_request(20 + 30 * i, 60, i)});
      }
      std::vector<std::vector<std::vector<common::Token>>> texts;
      for (const stage::Device device : {stage::Device::kCpu, stage::Device::kGpu}) {
        stage::EngineOptions options;
        options.gpu.device = device;
        options.num_slots = 50 * 16;  // not enough for six wholes
        options.scheduler.token_budget = 48;
        stage::VirtualClock clock;
        const std::unique_ptr<stage::SpeculatingEngine> engine =
            stage::make_speculating_engine(model, options, stage::make_runner(model, options), 0, clock);
        for (const GenerationRequest& task : tasks) {
          engine->submit(task);
        }
        while (engine->step()) {
        }
        texts.emplace_back();
        for (std::size_t i = 0; i < tasks.size(); ++i) {
          texts.back().push_back(engine->output(static_cast<int>(i)).completions.front().tokens);
          CHECK(texts.back().back().size() == 60);
        }
      }
      CAPTURE(kind.name, window);
      CHECK(texts[0] == texts[1]);
    }
  }
}

TEST_CASE("GPU: with a second tier, layers of two kinds have two pools, and in float32 greedy texts are the CPU's") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const Kind& kind : kKinds) {
    for (const int window : {10, 33, 64}) {
      if (kind.global_period == 0) {
        continue;
      }
      const Llama model = model_with_windows(window, kind);
      std::vector<std::vector<std::vector<common::Token>>> texts;
      for (const auto& [device, num_tier_blocks] :
           {std::pair(stage::Device::kCpu, 0), std::pair(stage::Device::kGpu, 0),
            std::pair(stage::Device::kGpu, 120)}) {
        CAPTURE(kind.name, window, num_tier_blocks);
        stage::EngineOptions options;
        options.gpu.device = device;
        options.num_slots = 50 * 16;  // not enough for the texts of a turn
        options.scheduler.token_budget = 48;
        options.scheduler.max_sequences = 4;
        options.scheduler.token_compute_cost = 10;  // so that blocks are kept
        stage::EngineOptions with_tier = options;
        with_tier.num_host_slots = num_tier_blocks * options.block_size;
        stage::VirtualClock clock;
        std::unique_ptr<stage::Runner> runner = stage::make_runner(model, with_tier);
        if (device ==
            stage::Device::kGpu) {  // more parts than the engine would choose, so that cached blocks keep some
          runner = std::make_unique<PoisoningGpuRunner>(std::move(runner), 24);
        }
        const std::unique_ptr<stage::SpeculatingEngine> engine =
            stage::make_speculating_engine(model, options, std::move(runner), 0, clock, std::nullopt, num_tier_blocks);
        std::vector<std::vector<common::Token>>& own = texts.emplace_back();
        // Then each text is a prompt, and goes on: the next turn of a conversation.
        for (int turn = 0; turn < 2; ++turn) {
          for (int i = 0; i < 8; ++i) {
            GenerationRequest task{tests::make_request(20 + 20 * i, 60, i)};
            std::vector<common::Token>& prompt = task.request.prompt;
            if (turn == 1) {
              const std::vector<common::Token>& reply = own[static_cast<std::size_t>(i)];
              prompt.insert(prompt.end(), reply.begin(), reply.end());
            }
            engine->submit(std::move(task));
          }
          while (engine->step()) {
          }
          for (int i = 0; i < 8; ++i) {
            own.push_back(engine->output(turn * 8 + i).completions.front().tokens);
            CHECK(own.back().size() == 60);
          }
        }
        const auto& scheduler = dynamic_cast<const stage::LocalPoolScheduler&>(engine->scheduler());
        CHECK(scheduler.has_host_cache() == (num_tier_blocks > 0));
        if (num_tier_blocks > 0) {
          CHECK(scheduler.host_cache().statistics().restored > 5);
        }
      }
      CHECK(texts[0] == texts[1]);
      CHECK(texts[0] == texts[2]);
    }
  }
}

// As in gpu_host_cache.cpp, with a window: the blocks that it reaches must have come back with their parts.
TEST_CASE("GPU: logits behind a text that came back to two pools are those behind one that stayed, to the bit") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const Llama model = model_with_windows(16, kKinds[1]);
  for (const common::GpuTypes& types : kTypes) {
    std::vector<std::vector<common::TokenLogprobs>> logprobs;
    for (const int num_slots : {4096, 160}) {
      stage::EngineOptions options;
      options.gpu = {.device = stage::Device::kGpu, .types = types};
      options.num_slots = num_slots;
      options.scheduler.token_budget = 32;
      options.scheduler.max_sequences = 1;
      options.scheduler.token_compute_cost = 10;
      constexpr int kTierBlocks = 16;
      stage::EngineOptions with_tier = options;
      with_tier.num_host_slots = kTierBlocks * options.block_size;
      stage::VirtualClock clock;
      const std::unique_ptr<stage::SpeculatingEngine> engine = stage::make_speculating_engine(
          model, options, stage::make_runner(model, with_tier), 0, clock, std::nullopt, kTierBlocks);
      int id = -1;
      for (const int salt : {1, 2, 1}) {
        GenerationRequest task{tests::make_request(100, 8, salt)};
        task.request.num_logprobs = 3;
        id = engine->submit(std::move(task));
        while (engine->step()) {
        }
        REQUIRE(engine->output(id).error == kNoProblem);
      }
      const auto& scheduler = dynamic_cast<const stage::LocalPoolScheduler&>(engine->scheduler());
      CAPTURE(common::to_string(types), num_slots);
      CHECK(engine->output(id).cached_tokens == 96);
      CHECK((scheduler.host_cache().statistics().restored > 0) == (num_slots == 160));
      logprobs.push_back(engine->output(id).completions.front().logprobs);
    }
    REQUIRE(logprobs[0].size() == logprobs[1].size());
    for (std::size_t i = 0; i < logprobs[0].size(); ++i) {
      CAPTURE(common::to_string(types), i);
      CHECK(logprobs[0][i].drawn.token == logprobs[1][i].drawn.token);
      CHECK(logprobs[0][i].drawn.logprob == logprobs[1][i].drawn.logprob);
    }
  }
}

TEST_CASE("GPU: two GPUs compute layers with windows as one does") {
  if (const std::string reason = common::NcclGroup::unsupported(2); !reason.empty()) {
    SKIP_TEST(reason);
  }
  check_logits([](const Llama& model, const stage::KvCacheShape& shape, const common::GpuTypes& types) {
    const stage::GpuOptions options{.types = types, .tensor_parallel = 2};
    return std::make_unique<stage::TensorParallelRunner>(model, shape, options, 128, 8, tests::built_kernels(options));
  });
}

TEST_CASE("GPU: sequences read a shared prefix together as long as no context is longer than the window") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  // Three sequences with a prefix of four blocks; their contexts grow beyond the window.
  constexpr int kWindow = 72;
  constexpr int kPrefix = 64;
  const Llama model = model_with_windows(kWindow, kKinds[1]);
  const common::LlamaConfig& config = model.config();
  const stage::KvCacheShape shape{.num_layers = config.num_layers,
                                  .num_blocks = 20,
                                  .block_size = 16,
                                  .num_heads = config.num_heads,
                                  .num_kv_heads = config.num_kv_heads,
                                  .head_dim = config.head_dim};
  tests::BuiltRunner together(model, shape, {.types = kTypes.front()}, 128, 8);
  tests::BuiltRunner apart(model, shape, {.types = kTypes.front()}, 128, 8);
  REQUIRE(together.set_reading_costs({.block = 1}));
  apart.share(false);
  const auto error_of = [&](const stage::RaggedBatch& step) {
    together.enqueue(step);
    apart.enqueue(step);
    return (together.logits() - apart.logits()).cwiseAbs().maxCoeff();
  };
  const std::vector<int> prefix = numbers_from(0, kPrefix);
  const std::vector<int> prefix_table = numbers_from(0, kPrefix / 16);
  CHECK(error_of(tests::make_step(tests::make_request(kPrefix, 1).prompt, {}, prefix, prefix, {0, kPrefix}, {kPrefix},
                                  prefix_table, {0, kPrefix / 16}, {kPrefix - 1})) <= tolerance_of(kTypes.front()));
  for (int position = kPrefix; position < kPrefix + 16; ++position) {
    stage::RaggedBatch step;
    for (int s = 0; s < 3; ++s) {
      step.tokens.push_back((position + 20 * s) % 61);
      step.positions.push_back(position);
      step.slot_mapping.push_back((8 + s) * 16 + position % 16);
      step.context_lengths.push_back(position + 1);
      step.block_tables.insert(step.block_tables.end(), prefix_table.begin(), prefix_table.end());
      step.block_tables.push_back(8 + s);
      step.table_starts.push_back(static_cast<int>(step.block_tables.size()));
      step.query_starts.push_back(s + 1);
      step.logits_rows.push_back(s);
    }
    CAPTURE(position);
    CHECK(error_of(step) <= tolerance_of(kTypes.front()));
    CHECK(together.figures().steps == std::min(position + 1, kWindow) - kPrefix);
  }
}

TEST_CASE("GPU: texts of models with windows are the CPU's within rounding, in small pools, whatever is around them") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const common::GpuTypes& types : kTypes) {
    for (const Kind& kind : kKinds) {
      Totals totals;
      Errors errors;
      for (std::uint64_t seed = 1; seed <= 24; ++seed) {
        serve_at_random(seed, types, kind, false, totals, errors);
      }
      CAPTURE(common::to_string(types), kind.name, errors.difference, errors.deficit);
      CAPTURE(totals.requests, totals.swapped_out, totals.recomputed, totals.stand_ins, totals.accepted,
              totals.cancelled, totals.hits, totals.copies, totals.pools, totals.evicted);
      CHECK(totals.requests > 100);
      CHECK(totals.swapped_out > 3);
      CHECK(totals.recomputed > 5);
      CHECK((totals.stand_ins > 100) == (kind.global_period == 0));
      CHECK((totals.pools > 10) == (kind.global_period > 0));
      CHECK((totals.evicted > 50) == (kind.global_period > 0));
      CHECK(totals.hits > 10);
      CHECK(totals.copies > 5);
      CHECK(totals.cancelled > 0);
    }
  }
}

TEST_CASE("GPU: with a second tier, texts of layers of two kinds are the CPU's within rounding, in small pools") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const common::GpuTypes& types : kTypes) {
    Totals totals;
    Errors errors;
    for (std::uint64_t seed = 1; seed <= 24; ++seed) {
      serve_at_random(seed, types, kKinds[1 + seed % 2], true, totals, errors);
    }
    CAPTURE(common::to_string(types), errors.difference, errors.deficit);
    CAPTURE(totals.requests, totals.swapped_out, totals.recomputed, totals.accepted, totals.cancelled, totals.hits,
            totals.copies, totals.pools, totals.evicted, totals.stored, totals.restored);
    CHECK(totals.requests > 200);
    CHECK(totals.swapped_out > 3);
    CHECK(totals.recomputed > 5);
    CHECK(totals.pools > 20);
    CHECK(totals.evicted > 50);
    CHECK(totals.stored > 500);
    CHECK(totals.restored > 50);
    CHECK(totals.cancelled > 0);
  }
}

TEST_CASE("GPU: more texts run at once than have room as wholes, a step ahead, in recorded steps") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const Llama model = model_with_windows(32, kOneKind);
  stage::EngineOptions options;
  options.gpu = {.device = stage::Device::kGpu, .types = kTypes.front()};
  options.num_slots = 60 * 16;
  options.scheduler.token_budget = 32;
  stage::VirtualClock clock;
  const std::unique_ptr<stage::SpeculatingEngine> engine =
      stage::make_speculating_engine(model, options, stage::make_runner(model, options), 0, clock);
  std::vector<GenerationRequest> tasks;
  for (int i = 0; i < 6; ++i) {
    tasks.push_back({tests::make_request(200, 100, i)});  // 19 blocks each
    engine->submit(tasks.back());
  }
  std::size_t most = 0;
  std::size_t preempted = 0;
  engine->on_step([&](const stage::StepReport& report) { preempted += report.recomputed.size(); });
  while (engine->step()) {
    most = std::max(most, engine->scheduler().running().size());
  }
  CHECK(most == 6);
  CHECK(preempted == 0);
  Judge judge(model);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    CAPTURE(i);
    CHECK(judge.problem(tasks[i].request, engine->output(static_cast<int>(i)).completions.front(),
                        tolerance_of(kTypes.front())) == kNoProblem);
  }
}

TEST_CASE("GPU: with --slots, layers with a window take the memory of their parts") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const Llama model = model_with_windows(32, {"three of four", 4});
  const auto free_memory = [] {
    CUDA_CHECK(cudaDeviceSynchronize());
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return static_cast<double>(free_bytes);
  };
  for (const common::GpuTypes& types : kTypes) {
    stage::EngineOptions options;
    options.gpu = {.device = stage::Device::kGpu, .types = types};
    options.scheduler.token_budget = 32;
    CAPTURE(common::to_string(types));

    options.num_slots = 40'000;  // 2,500 blocks, and 375 parts: windows lie in 3 of a text's 20 blocks
    const auto bytes_of = [&](const auto& make) {
      const double before = free_memory();
      const std::unique_ptr<stage::Runner> runner = make(model, options);
      return std::pair(before - free_memory(), runner->cache());
    };
    bytes_of(stage::make_runner);  // from now on, kernels and libraries are loaded
    const auto [divided, size] = bytes_of(
        [](const Llama& llama, const stage::EngineOptions& own) { return stage::make_engine_runner(llama, own); });
    const auto [whole, whole_size] = bytes_of(stage::make_runner);
    CHECK(size.num_blocks == 907);  // (2500 + 3 * 375) / 4
    CHECK(whole_size.num_blocks == 2500);
    CAPTURE(divided, whole);
    CHECK(std::abs(whole - divided - (2500.0 - 907.0) * 16.0 * static_cast<double>(size.bytes_per_slot)) < 8e6);

    // A text in more blocks than the runner was made with.
    options.num_slots = kContext;
    std::unique_ptr<stage::Runner> runner = stage::make_engine_runner(model, options);
    CHECK(runner->cache().num_blocks == 11);  // (20 + 3 * 8) / 4
    const std::unique_ptr<stage::Engine> engine = stage::make_engine(model, options, std::move(runner), 0);
    CHECK(engine->cache().num_blocks == 20);
    common::Request request = tests::make_request(200, 120);
    request.num_logprobs = 1;
    const common::Completion completion = tests::run_requests(*engine, std::span(&request, 1)).completions.front();
    CHECK(completion.tokens.size() == 120);
    Judge judge(model);
    CHECK(judge.problem(request, completion, tolerance_of(types)) == kNoProblem);
  }
}

TEST_CASE("GPU: a server's engine divides its memory before its steps are recorded") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  struct Collecting : common::RequestSink {
    explicit Collecting(std::vector<common::Token>& own) : tokens(own) {}
    void on_token(int /*id*/, int /*sample*/, common::Token token, const common::TokenLogprobs* /*logprobs*/) override {
      tokens.push_back(token);
    }
    void on_end(int /*id*/, common::RequestResult /*result*/) override {}
    std::vector<common::Token>& tokens;
  };
  const Llama model = model_with_windows(32, {"three of four", 4});
  stage::EngineOptions options;
  options.gpu.device = stage::Device::kGpu;  // in float32: texts are the CPU's
  options.num_slots = 400;
  options.scheduler.token_budget = 32;
  const auto served = stage::make_served_engine(model, options, {.virtual_clock = true});
  CHECK(served->description().sizes.num_slots == 400);
  CHECK(served->status().window_pool.num_blocks == 8);
  const GenerationRequest task{tests::make_request(100, 60)};
  std::vector<common::Token> tokens;
  served->submit(task, 0.0, std::make_unique<Collecting>(tokens));
  while (served->step()) {
  }
  stage::Engine cpu(model, cpu_options());
  CHECK(tokens == tests::run_requests(cpu, std::span(&task.request, 1)).completions.front().tokens);
}

TEST_CASE("GPU: a prompt's window comes back from the host, and requests are longer than the pool") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr int kBlockSize = 16;
  constexpr int kNumTierBlocks = 30;
  const Llama model = model_with_windows(32, kOneKind);
  for (const common::GpuTypes& types : kTypes) {
    stage::EngineOptions options;
    options.gpu = {.device = stage::Device::kGpu, .types = types};
    options.block_size = kBlockSize;
    options.num_slots = 10 * kBlockSize;
    options.scheduler.token_budget = 32;
    options.scheduler.token_compute_cost = 1000;  // so that blocks are kept
    stage::EngineOptions with_tier = options;
    with_tier.num_host_slots += kNumTierBlocks * kBlockSize;
    stage::VirtualClock clock;
    const std::unique_ptr<stage::SpeculatingEngine> engine = stage::make_speculating_engine(
        model, options, stage::make_runner(model, with_tier), 0, clock, std::nullopt, kNumTierBlocks);
    const GenerationRequest first{tests::make_request(200, 20)};  // 14 blocks
    const GenerationRequest other{tests::make_request(200, 20, 1)};
    Judge judge(model);
    std::vector<int> found;
    for (const GenerationRequest& task : {first, other, first}) {
      const int id = engine->submit(task);
      while (engine->step()) {
      }
      const stage::RequestOutput& output = engine->output(id);
      CAPTURE(common::to_string(types), id, output.error);
      REQUIRE(output.completions.size() == 1);
      CHECK(judge.problem(task.request, output.completions.front(), tolerance_of(types)) == kNoProblem);
      found.push_back(output.cached_tokens);
    }
    CHECK(found == std::vector<int>{0, 0, 192});
    const auto& scheduler = dynamic_cast<const stage::WindowPromptScheduler&>(engine->scheduler());
    CHECK(scheduler.host_cache().statistics().restored == 2);  // position 192 sees 161 … 192
  }
}

TEST_CASE("GPU: without --slots, layers that see all have the memory that layers with a window do without") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const Llama model = model_with_windows(32, {"three of four", 4});
  for (const common::GpuTypes& types : kTypes) {
    stage::EngineOptions options;
    options.gpu = {.device = stage::Device::kGpu, .types = types};
    options.num_slots.reset();
    options.scheduler.max_sequences = 120;
    options.scheduler.token_budget = 128;
    options.scheduler.token_compute_cost = 10;               // so that the tier keeps blocks
    const int num_tier_blocks = types.is_exact() ? 200 : 0;  // takes nothing of the device's memory
    // So that there are some hundred blocks, of 16 KiB in 16 bits, and about as many in float32.
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    options.memory_fraction = (types.is_exact() ? 12e6 : 6e6) / static_cast<double>(free_bytes);
    stage::EngineOptions with_tier = options;
    with_tier.num_host_slots = num_tier_blocks * options.block_size;
    std::unique_ptr<stage::Runner> runner = stage::make_runner(model, with_tier);
    const int before = runner->cache().num_blocks;
    stage::VirtualClock clock;
    const std::unique_ptr<stage::SpeculatingEngine> engine =
        stage::make_speculating_engine(model, options, std::move(runner), 0, clock, std::nullopt, num_tier_blocks);
    const auto& scheduler = dynamic_cast<const stage::LocalPoolScheduler&>(engine->scheduler());
    const stage::LocalPoolSize& size = scheduler.local_pool().size();
    CAPTURE(common::to_string(types), before, size.num_blocks, size.num_parts);
    CHECK(engine->cache().num_blocks == size.num_blocks);
    CHECK(size.num_blocks > before * 3 / 2);
    CHECK(size.num_blocks + 3 * size.num_parts <= 4 * before);           // one layer of four sees all
    CHECK(size.num_blocks + 1 + 3 * (size.num_parts + 1) > 4 * before);  // and as many as fit
    std::vector<GenerationRequest> tasks;
    for (int i = 0; i < 100; ++i) {
      tasks.push_back({tests::make_request(40 + i % 20, 250, i)});
      tasks.back().request.num_logprobs = 1;
      engine->submit(tasks.back());
    }
    int most_used = 0;
    while (engine->step()) {
      most_used = std::max(most_used, engine->manager().usage().reserved / options.block_size);
    }
    CHECK(most_used > before);
    Judge judge(model);
    for (std::size_t i = 0; i < tasks.size(); i += 7) {
      CAPTURE(i);
      CHECK(judge.problem(tasks[i].request, engine->output(static_cast<int>(i)).completions.front(),
                          tolerance_of(types)) == kNoProblem);
    }
  }
}
