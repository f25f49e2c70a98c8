// The prefix cache's second tier on a GPU (HOST_CACHE.md): copies between the device and pinned memory, beside the
// steps or between them, while more memory is pinned. In float32, every text is that of a lone run on the CPU, without
// anything to find.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/cuda/runtime/device.h"
#include "common/cuda/runtime/pinned.h"
#include "common/math/sampling.h"
#include "tests/gpu/gpu_random_serving.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/golden.h"

// Not formatted: spaces around the slash would become part of the path.
// clang-format off
#include STAGE_HEADER(production/host_cache/host_cache_scheduler.h)
#include STAGE_HEADER(production/pinned_blocks.h)
#include STAGE_HEADER(serve/engine_adapter.h)
// clang-format on

using stage::GenerationRequest;
using tests::between;
using tests::bundled;

namespace {

const std::string kNoProblem;

struct Totals {
  std::int64_t stored = 0;
  std::int64_t restored = 0;
  std::int64_t given_up = 0;
  int swapped_out = 0;
  int recomputed = 0;
  int faults = 0;
  int failed = 0;  // requests
  int cancelled = 0;
  int grown = 0;       // tiers of which a part came while texts were served
  int incomplete = 0;  // tiers of which a part never came
};

// While it lives, host memory is pinned in pieces of this size.
class PieceSize {
 public:
  explicit PieceSize(std::size_t bytes) : before_(std::exchange(stage::pinned_piece_bytes, bytes)) {}
  ~PieceSize() { stage::pinned_piece_bytes = before_; }
  PieceSize(const PieceSize&) = delete;
  PieceSize& operator=(const PieceSize&) = delete;

 private:
  std::size_t before_;
};

// How many times a thread beside the engine can still pin memory; twice for each piece.
std::atomic<int> pins_left = 0;
const std::thread::id kEngineThread = std::this_thread::get_id();

// Some of the copies between device and host throw: of the next ones, one, or several in a row.
struct CopyFaults {
  int until_first = 0;  // 0: none is planned
  int in_a_row = 0;
  int thrown = 0;
} copy_faults;

void fail_copies(const char* call) {
  if (std::string_view(call) == "cudaHostAlloc" && std::this_thread::get_id() != kEngineThread) {
    std::this_thread::sleep_for(std::chrono::microseconds(300));  // so that the engine sees a tier grow
    if (pins_left.fetch_sub(1) <= 0) {
      throw common::OutOfPinnedMemory("a fault in pinning");
    }
  }
  if (!std::string_view(call).starts_with("cudaMemcpy2DAsync(to.first") || copy_faults.until_first == 0) {
    return;
  }
  if (copy_faults.until_first > 1) {
    copy_faults.until_first -= 1;
    return;
  }
  copy_faults.in_a_row -= 1;
  copy_faults.until_first = copy_faults.in_a_row > 0 ? 1 : 0;
  copy_faults.thrown += 1;
  throw common::CudaError("a fault in a copy");
}

// While it lives, copies fail where copy_faults says.
class FaultyCopies {
 public:
  FaultyCopies() { common::device_call_hook = fail_copies; }
  ~FaultyCopies() {
    common::device_call_hook = nullptr;
    copy_faults = {};
  }
  FaultyCopies(const FaultyCopies&) = delete;
  FaultyCopies& operator=(const FaultyCopies&) = delete;
};

// The fixed workload, and a beam search.
std::vector<GenerationRequest> tasks_with_beams() {
  std::vector<GenerationRequest> tasks = tests::workload_tasks();
  GenerationRequest beams{tests::greedy_request("The king had a garden", 12)};
  beams.num_samples = 2;
  beams.length_penalty = 1.0;
  tasks.push_back(std::move(beams));
  return tasks;
}

// Serves the tasks three times in a small engine with options drawn at random, and compares their texts with what is
// expected. Some are cancelled. fails: some copies throw, in the first two rounds.
void serve_at_random(std::uint64_t seed, const std::vector<GenerationRequest>& tasks,
                     const std::vector<std::vector<common::Completion>>& expected, bool fails, Totals& totals) {
  CAPTURE(seed, fails);
  common::Random random(seed);
  tests::DrawnEngine drawn = tests::draw_engine(random);
  stage::EngineOptions& options = drawn.options;
  options.prefix_cache = true;
  options.num_slots = between(random, 460, 560);
  options.scheduler.token_compute_cost = 10;  // so that blocks are kept
  // A few blocks of 3 KiB a token, or the usual size, with which all is there at once.
  const PieceSize pieces(seed % 2 == 0 ? stage::pinned_piece_bytes
                                       : static_cast<std::size_t>(between(random, 1, 4) * options.block_size) * 3072);
  const int num_host_blocks = stage::blocks_needed(options.num_host_slots, options.block_size);
  const int num_tier_blocks =
      random.below(3) == 0 ? between(random, 1, 3) : between(random, 4, 2 * *options.num_slots / options.block_size);
  stage::EngineOptions with_tier = options;
  with_tier.num_host_slots = (num_host_blocks + num_tier_blocks) * options.block_size;
  stage::VirtualClock clock;
  const bool is_incomplete = seed % 4 == 1;
  pins_left = is_incomplete ? 2 * between(random, 0, 2) : 1 << 30;
  const std::unique_ptr<stage::SpeculatingEngine> engine =
      stage::make_speculating_engine(bundled().llama, options, stage::make_runner(bundled().llama, with_tier),
                                     random.below(2) == 0 ? 0 : drawn.num_drafts, clock, drawn.cost, num_tier_blocks);
  std::set<int> cancelled;
  engine->on_step([&](const stage::StepReport& report) {
    totals.swapped_out += static_cast<int>(report.swapped_out.size());
    totals.recomputed += static_cast<int>(report.recomputed.size());
    if (!report.served.empty() && random.below(100) == 0 && !engine->output(report.served.front()).finished()) {
      cancelled.insert(report.served.front());
    }
    if (fails && copy_faults.until_first == 0 && random.below(8) == 0) {
      copy_faults.until_first = between(random, 1, 30);
      copy_faults.in_a_row = between(random, 1, 8);
    }
  });
  const auto& scheduler = dynamic_cast<const stage::HostCacheScheduler&>(engine->scheduler());
  const stage::HostCache& host = scheduler.host_cache();
  const int num_at_start = host.num_there();
  for (int round = 0; round < 3; ++round) {
    if (round == 2) {
      fails = false;
      copy_faults.until_first = 0;
    }
    tests::serve_arriving(*engine, random, tasks, [&] {
      for (const int id : cancelled) {
        if (!engine->output(id).finished()) {
          engine->stop(id, common::FinishReason::kCancelled);
        }
      }
    });
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const int id = round * static_cast<int>(tasks.size()) + static_cast<int>(i);
      const stage::RequestOutput& output = engine->output(id);
      const bool has_failed = output.finish_reason == common::FinishReason::kFailed;
      const bool is_part = has_failed || output.finish_reason == common::FinishReason::kCancelled;
      CAPTURE(round, i, output.error);
      CHECK((!has_failed || round < 2));
      totals.failed += has_failed ? 1 : 0;
      totals.cancelled += is_part && !has_failed ? 1 : 0;
      if (!is_part || !tasks[i].length_penalty.has_value()) {  // half a beam search promises nothing
        CHECK(tests::compare_output(output, expected[i], is_part) == kNoProblem);
      }
    }
    CHECK(engine->manager().usage().reserved == 0);
    CHECK(engine->manager().num_free_host_blocks() == num_host_blocks);
    CHECK(host.num_used() <= host.num_there());
    CHECK(host.num_blocks() == num_tier_blocks);
    CHECK(host.statistics().stored - host.statistics().evictions == host.num_used());
  }
  totals.grown += host.num_there() > num_at_start ? 1 : 0;
  totals.incomplete += host.num_there() < num_tier_blocks ? 1 : 0;
  CHECK((is_incomplete || host.num_there() == num_tier_blocks));
  totals.stored += host.statistics().stored;
  totals.restored += host.statistics().restored;
  totals.given_up += host.statistics().evictions;
}

}  // namespace

TEST_CASE("GPU: texts with a second tier are those of lone runs, in tiny pools and tiers, and when copies fail") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  const std::vector<GenerationRequest> tasks = tasks_with_beams();
  std::vector<std::vector<common::Completion>> expected;
  expected.reserve(tasks.size());
  for (const GenerationRequest& task : tasks) {
    expected.push_back(tests::served_alone(task, bundled().llama));
  }
  Totals totals;
  const FaultyCopies guard;
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    serve_at_random(seed, tasks, expected, seed % 3 == 0, totals);
  }
  totals.faults = copy_faults.thrown;
  CAPTURE(totals.stored, totals.restored, totals.given_up, totals.swapped_out, totals.recomputed, totals.faults,
          totals.failed, totals.cancelled, totals.grown, totals.incomplete);
  CHECK(totals.stored > 1000);
  CHECK(totals.restored > 100);
  CHECK(totals.given_up > 100);
  CHECK(totals.swapped_out > 10);
  CHECK(totals.recomputed > 10);
  CHECK(totals.faults > 20);
  CHECK(totals.cancelled > 10);
  CHECK(totals.grown > 3);
  CHECK(totals.incomplete > 0);
}

TEST_CASE("GPU: a server is ready before its tier is pinned, and ends before that too") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  constexpr std::int64_t kTierBytes = std::int64_t{3} << 30;
  stage::EngineOptions options;
  options.num_slots = 2048;
  options.gpu = {.device = stage::Device::kGpu};
  const auto seconds_since = [](std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  double to_end = 0.0;
  {
    const auto served =
        stage::make_served_engine(bundled().llama, options, {.virtual_clock = true}, {.host_cache_bytes = kTierBytes});
    const common::HostCacheFigures figures = served->status().host_cache;
    CAPTURE(figures.num_allocated, figures.num_blocks);
    CHECK(figures.num_blocks == kTierBytes / (std::int64_t{options.block_size} * 3072));
    CHECK(figures.num_allocated > 0);
    CHECK(figures.num_allocated < figures.num_blocks / 4);
    to_end -= seconds_since({});
  }
  to_end += seconds_since({});
  CHECK(to_end < 1.5);  // of a piece, and of what is freed
}

// A prompt is computed, loses its blocks to another one, and is sent again: a prompt that is found in the pool, or on
// the host, is computed in the same pass, whose logits differ if a single bit of a copy does.
TEST_CASE("GPU: logits behind a text that came back are those behind a text that stayed, to the bit, in every type") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const common::GpuTypes& types :
       {common::GpuTypes{}, common::GpuTypes{.precision = common::Precision::kBFloat16},
        common::GpuTypes{.precision = common::Precision::kBFloat16, .kv_cache = common::KvCacheType::kFloat8}}) {
    std::vector<std::vector<common::TokenLogprobs>> logprobs;
    for (const int num_slots : {4096, 128}) {
      stage::EngineOptions options;
      options.num_slots = num_slots;
      options.scheduler.token_compute_cost = 10;
      options.gpu = {.device = stage::Device::kGpu, .types = types};
      constexpr int kTierBlocks = 16;
      stage::EngineOptions with_tier = options;
      with_tier.num_host_slots = kTierBlocks * options.block_size;
      stage::VirtualClock clock;
      const std::unique_ptr<stage::SpeculatingEngine> engine =
          stage::make_speculating_engine(bundled().llama, options, stage::make_runner(bundled().llama, with_tier), 0,
                                         clock, std::nullopt, kTierBlocks);
      int id = -1;
      for (const char first : {'1', '2', '1'}) {
        std::string prompt(1, first);
        for (int i = 0; i < 20; ++i) {
          prompt += " little girl who had a cat";
        }
        common::Request request = tests::greedy_request(prompt, 8);
        request.prompt.resize(100);
        request.num_logprobs = 3;
        id = engine->submit({.request = request});
        while (engine->step()) {
        }
        REQUIRE(engine->output(id).error == kNoProblem);
      }
      const auto& scheduler = dynamic_cast<const stage::HostCacheScheduler&>(engine->scheduler());
      CAPTURE(static_cast<int>(types.precision), static_cast<int>(types.kv_cache), num_slots);
      CHECK(engine->output(id).cached_tokens == 96);
      CHECK((scheduler.host_cache().statistics().restored > 0) == (num_slots == 128));
      logprobs.push_back(engine->output(id).completions.front().logprobs);
    }
    REQUIRE(logprobs[0].size() == logprobs[1].size());
    for (std::size_t i = 0; i < logprobs[0].size(); ++i) {
      CAPTURE(i);
      CHECK(logprobs[0][i].drawn.token == logprobs[1][i].drawn.token);
      CHECK(logprobs[0][i].drawn.logprob == logprobs[1][i].drawn.logprob);
    }
  }
}

TEST_CASE("GPU: a size in bytes is as many blocks of the type that pages hold as fit") {
  if (!common::has_cuda_device()) {
    SKIP_TEST("there is no GPU");
  }
  for (const auto& [types, bytes_per_token] :
       {std::pair(common::GpuTypes{}, 3072),
        std::pair(common::GpuTypes{.precision = common::Precision::kBFloat16}, 1536),
        std::pair(common::GpuTypes{.precision = common::Precision::kBFloat16, .kv_cache = common::KvCacheType::kFloat8},
                  792)}) {
    stage::EngineOptions options;
    options.num_slots = 2048;
    options.gpu = {.device = stage::Device::kGpu, .types = types};
    const std::int64_t block = std::int64_t{options.block_size} * bytes_per_token;
    const auto served = stage::make_served_engine(bundled().llama, options, {.virtual_clock = true},
                                                  {.host_cache_bytes = 8 * block - 1});
    CAPTURE(bytes_per_token);
    CHECK(common::counter(served->counters(), "kv_bytes_per_token") == bytes_per_token);
    CHECK(served->status().host_cache.num_blocks == 7);
  }
}
