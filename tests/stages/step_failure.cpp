// One thing fails once in a run of Engine::step(): a call of the runner, or an allocation of memory, at every moment at
// which it can. Whatever the step was doing, it holds or it never was: the books are in order after every step, only
// requests of the step fail, the others get their texts, and the same prompts, sent again, get them too: no block is
// found that was never computed.
#include "tests/support/catch.h"
#include "tests/support/counted_allocations.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/base/parallel.h"
#include "common/base/text.h"
#include "tests/stages/late_runner.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/stages/sharing_fixtures.h"

#ifdef COURSE_PRODUCTION
// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/host_cache/host_cache_scheduler.h)
#include STAGE_HEADER(production/windows/local_pool_scheduler.h)
// clang-format on
#include "tests/stages/windowed_model.h"
#endif

using stage::GenerationRequest;
using stage::Preemption;
using tests::allocations_until_failure;
using tests::Counting;
using tests::LateRunner;
using tests::make_request;
using tests::RunnerCall;
using tests::small_model;

namespace {

constexpr int kBlockSize = 4;
constexpr int kNumBlocks = 9;
constexpr int kNumHostBlocks = 16;

// Chunks, hits, forks and beams, in a cache that is too small for all of them at once.
std::vector<GenerationRequest> make_requests() {
  std::vector<GenerationRequest> requests = {{make_request(14, 5)},
                                             {make_request(6, 6, 1), 2},
                                             {make_request(5, 4, 2), 2, 1.0},
                                             {make_request(17, 4)},  // begins as the first does
                                             {make_request(9, 5, 3)}};
  requests[1].request.sampling.temperature = 1.0F;
  return requests;
}

struct Setup {
  bool run_ahead = false;
  Preemption preemption = Preemption::kRecompute;
  int num_host_cache_blocks = 0;  // a second tier of the prefix cache (production/)
  int num_parts = 0;  // every second layer has a window, and all of these so many blocks of their own (production/)
  bool has_windows = false;  // all layers
};

const std::vector<Setup> kSetups = {
    {false, Preemption::kRecompute},        {false, Preemption::kSwap},
    {true, Preemption::kRecompute},         {true, Preemption::kSwap},
#ifdef COURSE_PRODUCTION
    {false, Preemption::kSwap, 6},          {true, Preemption::kRecompute, 6},
    {false, Preemption::kSwap, 0, 6},       {false, Preemption::kRecompute, 0, 6},
    {false, Preemption::kSwap, 9, 8},       {true, Preemption::kRecompute, 9, 8},
    {false, Preemption::kSwap, 0, 0, true}, {true, Preemption::kRecompute, 0, 0, true},
    {false, Preemption::kSwap, 6, 0, true}, {true, Preemption::kRecompute, 6, 0, true},
#endif
};

const common::Llama& model_of([[maybe_unused]] const Setup& setup) {
#ifdef COURSE_PRODUCTION
  static const common::Llama windowed = tests::windowed_model(5, 2);
  static const common::Llama all_windowed = tests::windowed_model(5);
  if (setup.num_parts > 0 || setup.has_windows) {
    return setup.has_windows ? all_windowed : windowed;
  }
#endif
  return small_model();
}

#ifdef COURSE_PRODUCTION
// Parts are looked up when a step is computed: it is when it is enqueued, as on a CPU.
class WindowsRunner : public LateRunner, public stage::SeparateWindows {
 public:
  WindowsRunner(std::unique_ptr<stage::Runner> inner, stage::ScoringCpuRunner& cpu, int num_parts)
      : LateRunner(std::move(inner)), cpu_(cpu), num_parts_(num_parts) {}

  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    const stage::StepId step = LateRunner::enqueue(batch);
    const Counting none(false);
    compute_all();
    return step;
  }

  std::shared_ptr<stage::LocalPool> separate_windows(const NumParts& /*num_parts*/, int num_blocks) override {
    std::shared_ptr<stage::LocalPool> pool =
        cpu_.separate_windows([&](int /*count*/) { return num_parts_; }, num_blocks);
    cpu_.local_cache().fill(std::numeric_limits<float>::quiet_NaN());
    return pool;
  }

 private:
  stage::ScoringCpuRunner& cpu_;
  int num_parts_;
};
#endif

struct Run {
  explicit Run(const Setup& setup) : has_windows(setup.has_windows) {
    common::set_num_threads(1);  // they would wait for each other longer than they compute
    stage::EngineOptions options;
    options.num_slots = kNumBlocks * kBlockSize;
    options.block_size = kBlockSize;
    options.num_host_slots = (kNumHostBlocks + setup.num_host_cache_blocks) * kBlockSize;
    options.scheduler = {
        .token_budget = 12, .headroom = 0, .preemption = setup.preemption, .run_ahead = setup.run_ahead};
    options.gpu.device = stage::Device::kCpu;
    const common::Llama& model = model_of(setup);
    auto cpu = stage::make_runner(model, options);
    tests::poison(*cpu);
    std::unique_ptr<LateRunner> late;
#ifdef COURSE_PRODUCTION
    if (setup.num_parts > 0) {
      auto& scoring = dynamic_cast<stage::ScoringCpuRunner&>(*cpu);
      late = std::make_unique<WindowsRunner>(std::move(cpu), scoring, setup.num_parts);
    }
#endif
    late = late == nullptr ? std::make_unique<LateRunner>(std::move(cpu)) : std::move(late);
    runner = late.get();
    runner->around([] { return std::make_shared<Counting>(false); });
    if (setup.num_host_cache_blocks == 0 && setup.num_parts == 0 && !setup.has_windows) {
      engine = std::make_unique<stage::Engine>(model, options, std::move(late), clock);
    }
#ifdef COURSE_PRODUCTION
    if (engine == nullptr) {
      engine = stage::make_speculating_engine(model, options, std::move(late), 0, clock, stage::kCpuTokenCost,
                                              setup.num_host_cache_blocks);
    }
#endif
    engine->on_step([this](const stage::StepReport& report) {
      const Counting none(false);
      ended.insert(ended.end(), report.ended.begin(), report.ended.end());
      preemptions += report.swapped_out.size() + report.recomputed.size();
    });
  }

  int submit(const GenerationRequest& request) {
    return engine->submit(request, [this](int id, int sample, common::Token token) {
      const Counting none(false);
      told[{id, sample}].push_back(token);
    });
  }

  // Until nothing is left to do. Returns the first problem, or an empty string.
  std::string run() {
    for (int step = 0; !engine->is_idle(); ++step) {
      bool has_thrown = false;
      try {
        const Counting all(true);
        engine->step();
      } catch (const std::exception& error) {
        has_thrown = true;
        num_thrown += 1;
        if (num_thrown > 1) {
          return std::string("steps throw again and again: ") + error.what();
        }
      }
      if (std::string problem = problem_of_books(has_thrown); !problem.empty()) {
        return common::format("after step %d: ", step) + problem;
      }
      if (step > 300) {
        return "it never ends";
      }
    }
    const stage::KvCacheManager& manager = engine->manager();
    if (!manager.sequences().empty() || manager.usage().reserved != 0 ||
        manager.num_free_host_blocks() != kNumHostBlocks) {
      return "blocks are lost";
    }
    return "";
  }

  // has_thrown: parts may be missing until the next step is scheduled.
  std::string problem_of_books([[maybe_unused]] bool has_thrown) {
    const stage::KvCacheManager& manager = engine->manager();
    for (const int sequence : manager.sequences()) {
      if (static_cast<int>(manager.block_table(sequence).size()) !=
          stage::blocks_needed(manager.length(sequence), kBlockSize)) {
        return common::format("sequence %d has %zu blocks for %d tokens", sequence,
                              manager.block_table(sequence).size(), manager.length(sequence));
      }
    }
#ifdef COURSE_PRODUCTION
    const auto* windows = dynamic_cast<const stage::LocalPoolScheduler*>(&engine->scheduler());
    if (windows != nullptr && !has_thrown) {
      if (std::string problem = tests::check_parts(windows->local_pool(), manager); !problem.empty()) {
        return problem;
      }
    }
#endif
    return tests::check_ledger(manager, kNumBlocks, kBlockSize, has_windows);
  }

  bool has_windows = false;
  stage::VirtualClock clock;
  LateRunner* runner = nullptr;
  std::unique_ptr<stage::Engine> engine;
  std::map<std::pair<int, int>, std::vector<common::Token>> told;  // by request and sample
  std::vector<int> ended;
  std::size_t preemptions = 0;
  int num_thrown = 0;
};

struct Outcome {
  std::string problem = {};
  int num_failed = 0;
  int num_thrown = 0;
  bool has_faulted = false;
  std::size_t preemptions = 0;
  double hits = 0.0;
  std::int64_t restored = 0;  // blocks, from the prefix cache's second tier
};

using Prepare = std::function<void(Run&)>;
using HasFaulted = std::function<bool(Run&)>;

Outcome serve(const Setup& setup, const Prepare& prepare, const HasFaulted& has_faulted) {
  static const std::vector<GenerationRequest> requests = make_requests();
  static std::map<const common::Llama*, std::vector<std::vector<common::Completion>>> all_expected;
  std::vector<std::vector<common::Completion>>& expected = all_expected[&model_of(setup)];
  for (std::size_t i = expected.size(); i < requests.size(); ++i) {
    expected.push_back(tests::served_alone(requests[i], model_of(setup)));
  }
  Run run(setup);
  for (const GenerationRequest& request : requests) {
    run.submit(request);
  }
  prepare(run);
  Outcome outcome;
  outcome.problem = run.run();
  outcome.has_faulted = has_faulted(run);
  outcome.num_thrown = run.num_thrown;
  outcome.preemptions = run.preemptions;
  allocations_until_failure = -1;
  run.runner->fail_no_more();
  for (int round = 0; round < 2 && outcome.problem.empty(); ++round) {
    if (round == 1) {  // the same again, now that nothing fails
      for (const GenerationRequest& request : requests) {
        run.submit(request);
      }
      outcome.problem = run.run();
    }
    for (std::size_t i = 0; i < requests.size() && outcome.problem.empty(); ++i) {
      const int id = static_cast<int>(i) + round * static_cast<int>(requests.size());
      const stage::RequestOutput& output = run.engine->output(id);
      const bool has_failed = output.finish_reason == common::FinishReason::kFailed;
      outcome.num_failed += has_failed ? 1 : 0;
      std::string problem = tests::compare_output(output, expected[i], has_failed);
      if (has_failed && output.error != tests::RunnerFault().what() && output.error != "out of memory") {
        problem = "has failed: " + output.error;
      }
      if (has_failed && round == 1) {
        problem = "has failed, although nothing else did";
      }
      for (std::size_t sample = 0; sample < output.completions.size() && !requests[i].length_penalty.has_value();
           ++sample) {
        std::vector<common::Token> told = run.told[{id, static_cast<int>(sample)}];
        const std::vector<common::Token>& tokens = output.completions[sample].tokens;
        if (has_failed && told.size() + 1 == tokens.size()) {
          told.push_back(tokens.back());  // it may have failed before its sink was called
        }
        if (told != tokens && problem.empty()) {
          problem = "its sink has got another text";
        }
      }
      if (std::count(run.ended.begin(), run.ended.end(), id) != 1 && problem.empty()) {
        problem = "its end is in no report, or in several";
      }
      if (!problem.empty()) {
        outcome.problem =
            common::format(round == 0 ? "request %d " : "sent again, request %d ", static_cast<int>(i)) + problem;
      }
    }
  }
  outcome.hits = common::counter(run.engine->counters(), "prefix_hits");
#ifdef COURSE_PRODUCTION
  if (const auto* scheduler = dynamic_cast<const stage::HostCacheScheduler*>(&run.engine->scheduler());
      scheduler != nullptr && scheduler->has_host_cache()) {
    outcome.restored = scheduler->host_cache().statistics().restored;
  }
#endif
  return outcome;
}

const std::string kNoProblem;

}  // namespace

TEST_CASE("a step holds or never was: every call of the runner fails once") {
  for (const Setup& setup : kSetups) {
    for (const RunnerCall call : {RunnerCall::kCopy, RunnerCall::kEnqueue, RunnerCall::kWait}) {
      for (const bool is_done : {false, true}) {
        Outcome outcome{.has_faulted = true};
        std::size_t preemptions = 0;
        int index = 0;
        for (; outcome.has_faulted; ++index) {
          CAPTURE(setup.run_ahead, static_cast<int>(setup.preemption), setup.num_host_cache_blocks, setup.num_parts);
          CAPTURE(static_cast<int>(call), is_done, index);
          outcome = serve(
              setup, [&](Run& run) { run.runner->fail(call, index, is_done); },
              [](Run& run) { return run.runner->has_failed(); });
          CHECK(outcome.problem == kNoProblem);
          CHECK(outcome.num_thrown == 0);
          CHECK((outcome.num_failed <= 1 || call == RunnerCall::kWait));  // one that was alone in its step
          CHECK((outcome.hits > 0.0 || setup.num_parts > 0 || setup.has_windows));
          CHECK((outcome.restored > 0) == (setup.num_host_cache_blocks > 0));
          preemptions += outcome.preemptions;
        }
        CHECK(preemptions > 0);
        CHECK(index > (call == RunnerCall::kCopy ? 3 : 12));
      }
    }
  }
}

TEST_CASE("a step holds or never was: every allocation fails once") {
  for (const Setup& setup : kSetups) {
    Outcome outcome{.has_faulted = true};
    int k = 0;
    for (; outcome.has_faulted; ++k) {
      CAPTURE(setup.run_ahead, static_cast<int>(setup.preemption), setup.num_host_cache_blocks, setup.num_parts, k);
      outcome = serve(
          setup, [&](Run&) { allocations_until_failure = k; }, [](Run&) { return allocations_until_failure == -1; });
      CHECK(outcome.problem == kNoProblem);
    }
    CHECK(k > 1000);
  }
}
