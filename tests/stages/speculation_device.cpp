// Drafts beside a runner that is asynchronous, as a GPU's is: what it is given to compute, when the engine runs ahead,
// and that the texts stay the same. The numbers of invariants are SPECULATION.md's.
#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/math/sampling.h"
#include "tests/stages/fake_runner.h"
#include "tests/stages/serving_fixtures.h"
#include "tests/support/catch.h"
#include "tests/support/random.h"

using tests::between;

namespace {

const std::string kNoProblem;

// What the step lacks for a GPU's runner, beyond a CPU's demands. Empty: nothing.
std::string problem_of(const stage::RaggedBatch& batch, int max_rows, int num_rows_before) {
  bool has_longer = false;
  for (std::size_t i = 0; i < batch.num_sequences(); ++i) {
    if (batch.num_queries(i) == 1 && has_longer) {
      return "a sequence with one token comes after one with more";
    }
    has_longer = has_longer || batch.num_queries(i) > 1;
  }
  if (static_cast<int>(batch.logits_rows.size()) > max_rows) {
    return common::format("%zu rows of logits, and there is memory for %d", batch.logits_rows.size(), max_rows);
  }
  std::vector<int> rows = batch.logits_rows;
  std::sort(rows.begin(), rows.end());
  if (std::adjacent_find(rows.begin(), rows.end()) != rows.end()) {
    return "two rows of logits of one token";
  }
  if (!batch.sampling_rows.empty() && batch.sampling_rows.size() != batch.logits_rows.size()) {
    return "a row of logits, and nothing says how its token is drawn";
  }
  for (const stage::PendingToken& pending : batch.pending_tokens) {
    if (pending.row >= num_rows_before ||
        batch.tokens[static_cast<std::size_t>(pending.index)] != 0) {  // an unknown token is 0
      return "a token is taken for one that is not known yet";
    }
  }
  return "";
}

class DeviceRunner : public tests::FakeRunner {
 public:
  // The token at each position of a text, in place of what the model draws.
  using Script = std::function<common::Token(int position)>;

  explicit DeviceRunner(std::unique_ptr<stage::Runner> inner, int max_sequences, Script script = {})
      : FakeRunner(std::move(inner)),
        max_rows_(std::max(max_sequences, stage::kMaxGpuTokens)),
        script_(std::move(script)) {}

  stage::StepId enqueue(const stage::RaggedBatch& batch) override {
    if (problem.empty()) {
      problem = problem_of(batch, max_rows_, static_cast<int>(next_positions_.size()));
    }
    const bool has_single = batch.num_queries(0) == 1;
    const bool has_drafts = batch.logits_rows.size() > batch.num_sequences();
    num_steps += 1;
    num_mixed += has_single && has_drafts ? 1 : 0;
    num_pending += has_drafts && !batch.pending_tokens.empty() ? 1 : 0;
    num_ahead += is_seen_ ? 0 : 1;
    is_seen_ = false;
    previous_positions_ = std::exchange(next_positions_, {});
    for (const int row : batch.logits_rows) {
      next_positions_.push_back(batch.positions[static_cast<std::size_t>(row)] + 1);
    }
    last_ = FakeRunner::enqueue(batch);
    return last_;
  }

  stage::StepResult wait(stage::StepId step) override {
    const bool is_last = step.value == last_.value;
    is_seen_ = is_seen_ || is_last;
    stage::StepResult result = FakeRunner::wait(step);
    const std::vector<int>& positions = is_last ? next_positions_ : previous_positions_;
    for (std::size_t row = 0; script_ && row < result.tokens.size(); ++row) {
      result.tokens[row] = script_(positions[row]);
    }
    return result;
  }

  std::string problem;  // the first
  int num_steps = 0;
  int num_mixed = 0;    // with drafts, and a sequence with one token
  int num_pending = 0;  // with drafts, and a token that is not known yet
  int num_ahead = 0;    // enqueued before the tokens of the step before were seen

 private:
  int max_rows_;
  Script script_;
  bool is_seen_ = true;
  stage::StepId last_;
  std::vector<int> next_positions_;  // by row of the last step
  std::vector<int> previous_positions_;
};

struct Device {
  explicit Device(const stage::EngineOptions& options, const common::Llama& model = tests::small_model(),
                  const DeviceRunner::Script& script = {}) {
    stage::EngineOptions own = options;
    own.gpu.device = stage::Device::kCpu;
    auto made = std::make_unique<DeviceRunner>(stage::make_runner(model, own), own.scheduler.max_sequences, script);
    runner = made.get();
    // As for a large model: for small ones, drafts on a GPU hardly ever pay.
    engine = stage::make_speculating_engine(model, own, std::move(made), 0, clock, stage::gpu_token_cost(16, 2.5e9));
    engine->on_step([this](const stage::StepReport& report) {
      num_drafts += std::accumulate(report.num_drafts.begin(), report.num_drafts.end(), 0);
      for (const int drafts : report.num_drafts) {
        most_drafts = std::max(most_drafts, drafts);
      }
      num_accepted += report.num_accepted;
      num_preempted += static_cast<int>(report.swapped_out.size() + report.recomputed.size());
    });
  }

  stage::VirtualClock clock;
  DeviceRunner* runner = nullptr;
  std::unique_ptr<stage::SpeculatingEngine> engine;
  int num_drafts = 0;
  int most_drafts = 0;  // of a sequence in a step
  int num_accepted = 0;
  int num_preempted = 0;
};

stage::GenerationRequest random_task(common::Random& random) {
  stage::GenerationRequest task{
      .request = tests::make_request(between(random, 2, 10), between(random, 2, 26), between(random, 0, 3))};
  common::Request& request = task.request;
  const std::size_t once = request.prompt.size();
  for (std::size_t i = 0; i < once; ++i) {
    request.prompt.push_back(request.prompt[i]);
  }
  request.num_speculative_tokens = between(random, 0, 3) == 0 ? 0 : between(random, 1, common::kMaxDrafts);
  request.sampling = {.temperature = random.below(2) == 0 ? 0.0F : 0.4F, .seed = random.below(100)};
  request.sampling.repetition_penalty = random.below(4) == 0 ? 1.2F : 1.0F;
  request.num_logprobs = random.below(8) == 0 ? 1 : 0;  // fetches logits
  task.num_samples = random.below(6) == 0 ? 2 : 1;
  return task;
}

// Serves one request whose text is the script. Returns the device.
std::unique_ptr<Device> serve_script(const DeviceRunner::Script& script, int max_new_tokens, int num_drafts) {
  constexpr int kPrompt = 20;
  static const common::Llama model = [] {
    common::LlamaConfig config = tests::small_model().config();
    config.vocab_size = 1000;
    config.context_length = 1000;
    return common::Llama(config, 1);
  }();
  auto device = std::make_unique<Device>(stage::EngineOptions{.num_slots = 1000}, model, script);
  stage::GenerationRequest task;
  for (int position = 0; position < kPrompt; ++position) {
    task.request.prompt.push_back(script(position));
  }
  task.request.max_new_tokens = max_new_tokens;
  task.request.num_speculative_tokens = num_drafts;
  const int id = device->engine->submit(task);
  while (device->engine->step()) {
  }
  const std::vector<common::Token>& text = device->engine->output(id).completions.front().tokens;
  REQUIRE(static_cast<int>(text.size()) == max_new_tokens);
  for (int i = 0; i < max_new_tokens; ++i) {
    REQUIRE(text[static_cast<std::size_t>(i)] == script(kPrompt + i));
  }
  CHECK(device->runner->problem == kNoProblem);
  return device;
}

}  // namespace

TEST_CASE("drafts on a device: sequences with one token come first, and the texts are those of lone runs") {
  int num_mixed = 0;
  int num_ahead = 0;
  int num_accepted = 0;
  int num_preempted = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    common::Random random(seed);
    std::vector<stage::GenerationRequest> tasks;
    for (int left = between(random, 2, 8); left > 0; --left) {
      tasks.push_back(random_task(random));
    }
    stage::EngineOptions options;
    options.block_size = between(random, 1, 6);
    options.num_slots = between(random, 52, 120);
    options.num_host_slots = random.below(2) == 0 ? 0 : 100;
    options.scheduler.token_budget = between(random, 8, 40);
    options.scheduler.max_sequences = between(random, 2, 8);
    options.prefix_cache = random.below(4) > 0;
    options.scheduler.headroom = 0;
    options.scheduler.preemption = static_cast<stage::Preemption>(random.below(3));
    Device device(options);
    std::size_t num_submitted = 0;
    while (num_submitted < tasks.size() || !device.engine->is_idle()) {
      if (num_submitted < tasks.size() && (device.engine->is_idle() || random.below(3) == 0)) {
        device.engine->submit(tasks[num_submitted++]);
      }
      device.engine->step();
    }
    CHECK(device.runner->problem == kNoProblem);
    for (std::size_t id = 0; id < tasks.size(); ++id) {
      CAPTURE(id);
      const stage::RequestOutput& output = device.engine->output(static_cast<int>(id));
      if (output.finish_reason != common::FinishReason::kRejected) {  // several samples in a small pool
        CHECK(tests::compare_output(output, tests::served_alone(tasks[id])) == kNoProblem);
      }
    }
    num_mixed += device.runner->num_mixed;
    num_ahead += device.runner->num_ahead;
    num_accepted += device.num_accepted;
    num_preempted += device.num_preempted;
  }
  CAPTURE(num_mixed, num_ahead, num_accepted, num_preempted);
  CHECK(num_mixed > 100);
  CHECK(num_ahead > 100);
  CHECK(num_accepted > 200);
  CHECK(num_preempted > 20);
}

// A request that drafts keeps all steps from running ahead, but not while it is swapped out. When it is resumed, the
// others' tokens are not known, and its own are. (It stands behind them in the batch, so that they keep their places.)
TEST_CASE("drafts on a device: a request that is swapped in drafts beside tokens that are not known yet") {
  int num_pending = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    common::Random random(seed);
    std::vector<stage::GenerationRequest> tasks;
    for (const int most_drafts : {0, 0, common::kMaxDrafts}) {
      tasks.push_back(random_task(random));
      tasks.back().request.num_speculative_tokens = most_drafts;
      tasks.back().request.max_new_tokens = most_drafts == 0 ? between(random, 14, 26) : 26;
      tasks.back().request.num_logprobs = 0;
      tasks.back().num_samples = 1;
    }
    const stage::EngineOptions options{.num_slots = 64,
                                       .scheduler = {.headroom = 0, .preemption = stage::Preemption::kSwap},
                                       .block_size = 2,
                                       .prefix_cache = false,
                                       .num_host_slots = 64};
    Device device(options);
    for (const stage::GenerationRequest& task : tasks) {
      device.engine->submit(task);
    }
    while (device.engine->step()) {
    }
    CHECK(device.runner->problem == kNoProblem);
    for (std::size_t id = 0; id < tasks.size(); ++id) {
      CAPTURE(id);
      CHECK(tests::compare_output(device.engine->output(static_cast<int>(id)), tests::served_alone(tasks[id])) ==
            kNoProblem);
    }
    num_pending += device.runner->num_pending;
  }
  CHECK(num_pending > 5);
}

TEST_CASE("drafts on a device: a request whose text does not repeat itself runs ahead, and one that quotes drafts") {
  const auto counting = [](int position) { return position; };
  const std::unique_ptr<Device> plain = serve_script(counting, 400, 0);
  CHECK(plain->runner->num_ahead == 399);  // all but the first
  const std::unique_ptr<Device> without = serve_script(counting, 400, 8);
  CHECK(without->num_drafts == 0);
  CHECK(without->runner->num_ahead >= 385);

  // From position 300 on, it says again what it has said.
  const auto quoting = [](int position) { return position < 300 ? position : position - 300; };
  const std::unique_ptr<Device> quoted = serve_script(quoting, 500, 8);
  CHECK(quoted->num_accepted > 170);
  CHECK(quoted->num_accepted == quoted->num_drafts);
  CHECK(quoted->runner->num_steps < 330);

  // However many it asks for.
  CHECK(serve_script(quoting, 500, 1000)->most_drafts == common::kMaxDrafts);
  CHECK(serve_script(quoting, 500, 2)->most_drafts == 2);
  const std::unique_ptr<Device> below_none = serve_script(quoting, 500, -5);
  CHECK(below_none->num_drafts == 0);
  CHECK(below_none->runner->num_ahead == 499);
}
